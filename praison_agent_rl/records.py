"""The nouns that the stages of a run hand to each other: frozen, typed, without any reading or writing."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FEWEST_PROMPTS = 8
"""Held-out prompts below which nothing is called better: on pure noise the bootstrap interval of 2 prompts lies above
zero one time in four, that of 8 about one time in twenty (nominal: one in forty)."""


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


class Interval(Record):
    """A mean difference with its 95 % interval."""

    base: float
    new: float
    difference: float
    low: float
    high: float


class Comparison(Record):
    """Base and candidate on the same held-out prompts."""

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

    @property
    def better(self) -> bool:
        """Whether the interval of the total lies above zero, on enough prompts to mean it. NaN is never better."""
        return self.prompts >= FEWEST_PROMPTS and self.total.low > 0


class MergeProof(Record):
    """What was compared before a merge was believed."""

    tokens: int
    """Positions at which logits were compared."""
    merge_error: float
    """Largest difference between logits of base + adapter and of the merged weights in memory."""
    saved_error: float
    """Largest difference between the merged weights in memory and as read back from disk."""
    tolerance: float
    """Largest difference that was allowed, of both."""
    change: float
    """Largest difference between merged and base logits: what training did."""


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
    prompt: Any = None
    output: Any = None
    error: str | None = None
    finished: bool = True
    """False where the process ended first."""
    calls: list[Call] = []
    feedback: list[Feedback] = []
