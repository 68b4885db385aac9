"""The nouns that the stages of a run hand to each other: frozen, typed, without any reading or writing."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FEWEST_PROMPTS = 8
"""Held-out prompts below which nothing is called better: the fewer they are, the likelier that none shows a rare loss.

Of 8 prompts on which nothing changes on average the interval lies above zero in one case of forty or fewer; where three
in ten lose much and the others gain a little it does in one of six, and of 15 in one of twenty
(``benchmarks/results.md``).
"""


class Record(BaseModel):
    """A fact that was written down once and is not changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


class PlannedReward(Record):
    """A reward of a run, by the name under which another process finds it."""

    spec: str | None
    """``module:function``, or None for a function that only the process that planned the run has."""
    name: str
    weight: float
    prompts: Literal["text", "messages"]
    """Form in which it reads prompts."""
    completions: Literal["text", "messages"]
    """Form in which it reads completions."""
    parameters: dict[str, Any] = {}
    """What the function is called with besides, or its class is made with."""
    columns: dict[str, str] = {}
    """Which column of the dataset fills which parameter, where the two are called differently."""
    deterministic: bool = True
    """Whether two calls with the same gave the same, when it was tried."""
    by_sample: bool = True
    """Whether the score of an answer does not depend on the others of the call."""


class Plan(Record):
    """Everything that a run needs beside its rows; written before anything heavy starts."""

    format: int = 1
    base: str
    """Weights to train: a hub name, a folder, or a GGUF file."""
    config: dict[str, Any]
    """The resolved ``TrainConfig``."""
    rewards: list[PlannedReward]
    tools: list[dict[str, Any]] = []
    """Tool schemas that the agent sends; they are shown to the model and not run."""
    samples: int = 2
    """Answers per held-out prompt: the first greedy, the others sampled."""
    device: str
    notes: list[str]
    libraries: dict[str, str]
    created: str
    """ISO time, UTC."""
    agent: str | None = None
    """Name of the agent that is improved; None for a model trained from a file."""
    parent: str | None = None
    """Version of the agent whose weights are trained on, if any."""
    promote: bool = True
    """Whether the agent's new version becomes its current one if it passes."""
    judges: list[PlannedReward] = []
    """Rewards that judge the answers and are not trained on."""
    rules: "GateRules" = Field(default_factory=lambda: GateRules())
    earlier: dict[str, list[PlannedReward]] = {}
    """Rewards of the agent's earlier versions, which score those versions' held-out prompts."""
    incumbent: str | None = None
    """Model that the agent runs on, where it is not known to be ``base`` and its answers can be compared."""
    incumbent_weights: str | None = None
    """Weights of that model, where it is a version of ours; else its recorded answers are taken."""
    since: str | None = None
    """When the agent's current version was decided on (``Pointer.changed``), as it stood when ``base`` was chosen."""
    candidate: str | None = None
    """Weights that are compared with ``base`` where nothing is trained."""


class GateRules(Record):
    """What a candidate must show before it takes the place of the model that answers now."""

    min_gain: float = 0.0
    """The lower end of the interval of the total must lie above this."""
    guards: dict[str, float] = {}
    """Rewards, by name, whose mean may not fall by more than this."""
    limits: dict[str, float] = {}
    """Limits of drift that differ from the defaults, by the names of ``guards.LIMITS``."""


class Answer(Record):
    """One answer of a model to one held-out prompt, with what each reward said of it."""

    prompt: int
    """Place among the held-out rows."""
    sample: int
    """0 is the greedy answer, the others are sampled."""
    text: str
    tokens: int
    rewards: dict[str, float | None]
    total: float | None
    """Weighted sum; None where no reward gave a score."""
    judged: dict[str, float | None] = {}
    """What the rewards say that were not trained on."""
    likelihood: float | None = None
    """Mean log-probability of the answer's tokens under the base model, nats a token."""
    error: str | None = None
    """Why there is no answer; such an answer has no scores."""


class Interval(Record):
    """A mean difference with its 95 % interval."""

    base: float
    new: float
    difference: float
    low: float
    high: float


class Comparison(Record):
    """Base and candidate on the same held-out prompts; rows with the same prompt are one prompt."""

    total: Interval
    rewards: dict[str, Interval]
    """Each reward alone, unweighted."""
    prompts: int
    samples: int
    wins: int
    """Prompts on which the candidate's mean total is higher."""
    ties: int
    losses: int
    unscored: int
    """Prompts left out because one side had no scored answer."""
    judged: dict[str, Interval] = {}
    """Rewards that were not trained on, each alone."""
    errors_base: int = 0
    """Answers that failed; they are neither zeros nor ties."""
    errors_new: int = 0
    missing_base: dict[str, int] = {}
    """By reward: answers that did not fail and to which it gave no score, where it may not apply or NaN came out."""
    missing_new: dict[str, int] = {}
    unscored_base: int = 0
    """Answers that did not fail and have no total, since no reward gave them a score."""
    unscored_new: int = 0
    needed: int | None = None
    """Prompts, in all, that would show a difference of the size seen; None where there is none to show."""

    @property
    def better(self) -> bool:
        """Whether the interval of the total lies above zero, on enough prompts to mean it. NaN is never better."""
        return self.prompts >= FEWEST_PROMPTS and self.total.low > 0


class Guard(Record):
    """Something that may not get worse while the reward gets better, and what was seen of it."""

    name: str
    """``length``, ``reward correctness``, ``earlier v2``, ``control``, ..."""
    base: float
    new: float
    limit: str
    """What was allowed, in words and numbers."""
    broken: bool
    text: str
    """What was seen, in one plain sentence."""


class Finding(Record):
    """A sign that the reward was won without the job being done better."""

    name: str
    text: str
    """One plain sentence with the numbers."""


VerdictStatus = Literal["promoted", "not better", "worse", "undecided", "guard broken"]


class Verdict(Record):
    """Whether a candidate may take the place of the model that answers now, and why."""

    status: VerdictStatus
    text: str
    """The status with its reason: ``undecided (40 more prompts needed)``, ``guard broken: ...``."""
    guards: list[Guard] = []
    findings: list[Finding] = []
    incumbent: Interval | None = None
    """Candidate against the recorded answers of what runs now, where that is another model."""
    forced: bool = False
    """Promoted against the verdict, by hand."""

    @property
    def passed(self) -> bool:
        """Whether the gate let it through by itself."""
        return self.status == "promoted"


class MergeProof(Record):
    """What was compared before a merge was believed."""

    tokens: int
    """Positions at which logits were compared; 0 for a model that is too large for the machine's memory."""
    merge_error: float
    """Largest difference between logits of base + adapter and of PEFT's own merge in memory; by tensors alone, the
    largest difference of a weight from PEFT's own merge that rounding does not explain, as a share of the largest
    weight near it (2**18 numbers of its tensor)."""
    saved_error: float
    """Largest difference between logits of base + adapter and of what was read back from disk; by tensors alone, as
    ``merge_error``."""
    tolerance: float
    """Largest ``saved_error`` that was allowed."""
    change: float
    """Largest difference between merged and base logits, what training did; by tensors alone, of a weight."""
    by: Literal["logits", "tensors", "both"] = "logits"
    """What was compared: the model's output, each tensor on disk with PEFT's own merge of it, or both."""
    tensors: int = 0
    """Changed tensors that were compared with PEFT's own merge of them."""
    unchanged: int = 0
    """Tensors that are the base's, byte for byte."""
    note: str | None = None
    """Why the merge was made in memory and not shard by shard, or why no logits were compared."""


class Version(Record):
    """A trained model of an agent that can be served."""

    name: str
    """``v1``, ``v2``, ..."""
    agent: str
    folder: str
    """Holds ``model/`` (merged weights), ``adapter/`` and the run's records."""
    base: str
    parent: str | None
    """Version whose weights were trained on, if any."""
    created: str
    comparison: Comparison
    merge: MergeProof
    base_hash: str | None = None
    """Of the weights that it was trained on; its adapter is loaded onto no others."""
    template_hash: str | None = None
    """Of the chat template."""
    libraries: dict[str, str] = {}
    verdict: Verdict | None = None
    run: str | None = None
    """Folder of the run that it comes from."""

    @property
    def passed(self) -> bool:
        """Whether the gate let it through by itself; before there were verdicts, whether it was better."""
        return self.verdict.passed if self.verdict else self.comparison.better


class RewardCard(Record):
    """A trained reward model: where it comes from, how often it is right, and how its scores lie."""

    format: int = 1
    name: str
    version: str | None = None
    """``v1``, ``v2``, ...; None before it is published."""
    base: str
    base_hash: str | None = None
    created: str
    train: int
    """Pairs that were trained on."""
    held_out: int
    """Distinct prompts that were held out; accuracy and margin are over them."""
    accuracy: float
    """Share of held-out pairs whose chosen answer scores higher; an equal score is half right."""
    accuracy_low: float
    """Of its 95 % interval (Wilson), prompts taken as one draw each."""
    accuracy_high: float
    margin: float
    """Mean of chosen less rejected score on the held-out pairs."""
    score_mean: float
    """Of answers that were trained on: what ``scale: zscore`` takes off."""
    score_std: float
    """And what it divides by."""
    score_quantiles: dict[str, float]
    """5 %, 25 %, 50 %, 75 % and 95 % of those scores."""
    form: Literal["text", "messages"]
    """What it was trained on."""
    tools: list[dict[str, Any]] = []
    """Tool schemas that were rendered with the prompts."""
    max_length: int
    """Tokens of prompt and answer; longer ones are cut at their beginning when scored."""
    passed: bool
    """Whether the interval of the accuracy lies above a half, on enough prompts to mean it."""
    libraries: dict[str, str] = {}
    run: str | None = None


class Pointer(Record):
    """Which version of an agent is to answer; None is the model that the agent was built with."""

    version: str | None
    previous: list[str | None] = []
    """What answered before, the latest last: the way back."""
    changed: str
    """ISO time, UTC."""
    by: Literal["improve", "promote", "rollback"]
    forced: bool = False
    """Promoted against the gate's verdict."""


class Call(Record):
    """One model request as it was sent, and the whole reply."""

    id: str
    run: str | None = None
    """Run that it belongs to; None for a call outside of any."""
    agent: str | None = None
    time: float
    """Unix seconds at which it was sent."""
    seconds: float = 0.0
    """Until the whole reply was there."""
    model: str | None = None
    version: str | None = None
    """Name of the model among ours, if one of ours answered."""
    api: Literal["chat", "responses"] = "chat"
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    """Tool choice, response format, sampling, and whatever else was sent."""
    reply: dict[str, Any] | None = None
    """Assistant message: content, tool_calls, reasoning_content."""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    logprobs: Any = None
    error: str | None = None
    partial: bool = False
    """A stream that was not read to its end."""


class Feedback(Record):
    """What somebody said of a run afterwards."""

    run: str
    time: float
    score: float | None = None
    label: str | None = None
    correction: str | None = None
    """The answer that should have been given."""


class Run(Record):
    """One turn of an agent: what it was asked, the calls that it made, and what came out."""

    id: str
    agent: str | None = None
    parent: str | None = None
    """Run in which this one was started, by a handoff or a team."""
    session: str | None = None
    tags: list[str] = []
    style: str = "chat"
    """How the agent was called."""
    time: float
    """Unix seconds."""
    seconds: float = 0.0
    version: str | None = None
    """That answered it, if one of ours did; None where several did in turn."""
    prompt: Any = None
    output: Any = None
    error: str | None = None
    finished: bool = True
    """False where the process ended first."""
    calls: list[Call] = []
    feedback: list[Feedback] = []
