"""``evaluate``: two models, versions or agents answer the same prompts in the same way, and the difference is judged.

Nothing is trained and nothing is swapped; what was asked, answered and found stays in a run's folder.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from praison_agent_rl import planning
from praison_agent_rl.agent_answers import answer_as_agent
from praison_agent_rl.answering import RawAnswer
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import HELD_OUT_SIDE, TRAIN_SIDE, Row, as_messages, sample, write_rows
from praison_agent_rl.drafting import as_the_agent_asks
from praison_agent_rl.errors import ConfigError, DataError, ModelError, RewardError
from praison_agent_rl.evaluation import score_answers
from praison_agent_rl.improvement import carry_out
from praison_agent_rl.measuring import calling_for, judge_run
from praison_agent_rl.models import find_weights, load_tokenizer, plain_weights, require_training_stack, weights_beneath
from praison_agent_rl.past import earlier_prompts
from praison_agent_rl.planning import Draft, Problems
from praison_agent_rl.preflight import check_chat_template, check_tokenizer
from praison_agent_rl.progress import RunProgress
from praison_agent_rl.records import FEWEST_PROMPTS, Comparison, Plan, Verdict, Version
from praison_agent_rl.registry import find_version, model_of
from praison_agent_rl.report import write_report
from praison_agent_rl.rewards import as_entry, require, resolve_all
from praison_agent_rl.runs import HOME, RunFolder, read_record
from praison_agent_rl.swap import server_of
from praison_agent_rl.upkeep import check_base

OnEvent = Callable[[dict[str, Any]], None]

_OF_THE_ENGINE = (
    *("max_seq_length", "max_completion_length", "temperature", "seed", "dtype", "chat_template", "trust_remote_code"),
    *("min_gain", "guards", "guard_limits"),
)
"""Settings that a version is evaluated with as it was trained and judged, unless others are given."""


@dataclass(frozen=True)
class Evaluation:
    """What ``evaluate`` found; prints as one line."""

    comparison: Comparison
    verdict: Verdict
    """That of the gate that ``improve`` goes through."""
    subject: str
    against: str
    run: Path
    """Folder with the prompts, the answers and the scores."""
    report: Path
    """HTML page of the same."""

    @property
    def better(self) -> bool:
        """Whether the subject would pass the gate."""
        return self.verdict.passed

    def __str__(self) -> str:
        total, status = self.comparison.total, "better" if self.verdict.passed else self.verdict.text
        return (
            f"{self.subject} against {self.against}: {total.base:.2f} -> {total.new:.2f} on {self.comparison.prompts} "
            f"prompts (95 % CI {total.low:+.2f}..{total.high:+.2f}), {status}"
        )


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    label: str
    weights: str
    agent: Any = None
    version: Version | None = None


def evaluate(
    subject: Any,
    *,
    against: Any = None,
    data: Any = None,
    reward_funcs: Any = None,
    base_model: str | None = None,
    samples: int | None = None,
    run_tools: bool = False,
    config: Any = None,
    quiet: bool = False,
    **settings: Any,
) -> Evaluation:
    """Compare ``subject`` with ``against``: weights (hub name, folder, GGUF), a version (``"helper/v3"``) or an agent.

    Without ``against`` a version, or an agent that runs on one, is compared with what it was trained on. Both answer
    the same prompts by one engine with the same seeds, ``samples`` each (2: the first greedy, the other sampled). An
    agent's prompts are asked as it asks them. ``data`` and ``reward_funcs`` may be left out for a version: then it is
    asked and scored again as it was judged. With ``run_tools=True`` the agent itself answers, once and without
    sampling, and its tools really run; otherwise they are shown to the model and not run. ``base_model`` names the
    weights beneath an agent where the agent does not. ``config`` and further keywords are as for ``improve``.

    Raises:
        PraisonRLError: something given is wrong (before any model is loaded), or the evaluation failed.
    """
    given = {"reward_funcs": reward_funcs, "eval_samples": 1 if run_tools else samples, **settings}
    with RunProgress() as progress:
        on_event: OnEvent = (lambda event: None) if quiet else progress
        new = side_of(subject, base_model)
        base = side_of(against, base_model) if against is not None else _base_of(new)
        draft = draft_evaluation(base, new, Request(data, config, given, run_tools), on_event)
        for note in draft.notes:
            on_event({"event": "note", "text": note})
        root = Path(draft.config.output_dir or planning.new_run_root("evaluate")).resolve()
        run = planning.write_run(draft, root)
        if run_tools:
            _through_agent(_agent_of(base, new), draft, run, on_event)
        else:
            carry_out(draft, run, on_event, stages=("measure_base", "measure_new"))
    write_report(run)
    comparison = read_record(run.comparison_file, Comparison)
    verdict = read_record(run.verdict_file, Verdict)
    return Evaluation(comparison, verdict, new.label, base.label, run.root, run.report)


def side_of(thing: Any, base_model: str | None = None) -> Side:
    """What ``thing`` names: an agent, a version, or weights.

    Raises:
        ModelError, VersionError: its weights are not there, or cannot be known.
    """
    from praisonaiagents import Agent

    if isinstance(thing, Agent):
        server = server_of(thing)
        version = _version_at(Path(server.folder)) if server is not None and base_model is None else None
        return Side(str(thing.name), weights_beneath(thing, base_model), thing, version)
    if isinstance(thing, Version):
        return Side(f"{thing.agent}/{thing.name}", str(model_of(thing)), None, thing)
    if not isinstance(thing, str | Path):
        raise ModelError(
            f"{thing!r} is nothing that can be evaluated; give an agent, a version such as 'helper/v3', a folder of "
            "weights, a GGUF file or a hub name"
        )
    text = str(thing)
    if (named := re.fullmatch(r"(.+)[/@](v\d+)", text)) and not Path(text).exists():
        version = find_version(HOME, f"{named[1]}/{named[2]}")
        return Side(text, str(model_of(version)), None, version)
    return Side(text, find_weights(text))


@dataclass(frozen=True)
class Request:
    """What ``evaluate`` was told besides the two sides."""

    data: Any
    config: Any
    settings: dict[str, Any]
    run_tools: bool


def draft_evaluation(base: Side, new: Side, request: Request, on_event: OnEvent) -> Draft:
    """Check all that ``evaluate`` was given, and ask an agent how it asks; no model is loaded."""
    problems = Problems()
    config, rows = _read(new, request, problems)
    agent = _agent_of(base, new)
    tools: list[dict[str, Any]] = []
    if request.run_tools:
        problems.attempt(lambda: _check_askable(agent, rows))
    elif agent is not None:
        rows, tools = as_the_agent_asks(agent, rows, on_event)
    problems.attempt(lambda: check_chat_template(config))
    for side in (base, new):
        problems.attempt(partial(check_tokenizer, config, side.weights))
    prompts, columns = sample(rows)
    scorers = planning.prepare_rewards(config, [as_messages(p) for p in prompts], columns, problems=problems)
    problems.raise_all()
    assert scorers is not None
    notes = list(config.notes)
    if len(rows) < FEWEST_PROMPTS:
        notes.append(f"{len(rows)} prompts are asked, and with fewer than {FEWEST_PROMPTS} nothing can be shown")
    if tools:
        names = ", ".join(str(tool.get("function", {}).get("name")) for tool in tools)
        notes.append(f"the agent's tools ({names}) are shown to the model but not run; run_tools=True runs them")
    rewards, judges = scorers
    return Draft(config, base.weights, [], rows, rewards, tools, notes, judges, candidate=new.weights)


def _read(new: Side, request: Request, problems: Problems) -> tuple[TrainConfig, list[Row]]:
    """The configuration and the rows to ask; raises all that is wrong with them."""
    given = request.settings
    if new.version is not None:
        given = _as_it_was_judged(new.version, given, with_settings=request.config is None)
    config = problems.attempt(lambda: TrainConfig.load(request.config, need_model=False, need_data=False, **given))
    fns = problems.attempt(lambda: resolve_all(config.reward_funcs if config else given.get("reward_funcs")))
    if fns is not None:
        problems.attempt(lambda: require("grpo", fns))
    problems.attempt(require_training_stack)
    data = request.data if request.data is not None or config is None else config.dataset
    rows = problems.attempt(lambda: _rows_of(data, new))
    problems.raise_all()
    assert config is not None and rows is not None
    return config, rows


def _agent_of(base: Side, new: Side) -> Any:
    """Who asks: the subject if it is an agent, else the other."""
    return new.agent if new.agent is not None else base.agent


def _base_of(side: Side) -> Side:
    """What a version was trained on."""
    if side.version is None:
        raise ConfigError(
            f"evaluate was not told what to compare {side.label!r} with; give against=: weights, a version or an agent"
        )
    if side.version.base_hash is not None:
        check_base(side.version, side.version.base)
    return Side(f"the base of {side.version.name}", find_weights(side.version.base))


def _version_at(model: Path) -> Version | None:
    record = model.parent / "version.json"
    return read_record(record, Version).model_copy(update={"folder": str(model.parent)}) if record.exists() else None


def _as_it_was_judged(version: Version, given: dict[str, Any], *, with_settings: bool) -> dict[str, Any]:
    """What was given, and where nothing was, what the version was made with."""
    plan = _plan_of(version)
    given = {name: value for name, value in given.items() if value is not None}
    if plan is None:
        return given
    if "reward_funcs" not in given:
        unnamed = [reward.name for reward in [*plan.rewards, *plan.judges] if reward.spec is None]
        if unnamed:
            raise RewardError(
                f"the rewards {', '.join(unnamed)} of {version.name} lived only in the process that made it; give "
                "reward_funcs="
            )
        scorers = {
            "reward_funcs": [as_entry(reward) for reward in plan.rewards],
            "reward_weights": [reward.weight for reward in plan.rewards],
            "judge_funcs": [as_entry(judge) for judge in plan.judges] or None,
        }
        given = {**{name: value for name, value in scorers.items() if value}, **given}
    elif with_settings:
        plan = plan.model_copy(update={"config": {**plan.config, "guards": {}}})  # they name the version's rewards
    kept = {name: plan.config[name] for name in _OF_THE_ENGINE if name in plan.config} if with_settings else {}
    return {**kept, **given}


def _plan_of(version: Version) -> Plan | None:
    run = RunFolder(version.folder)
    return run.plan if run.plan_file.exists() else None


def _rows_of(data: Any, side: Side) -> list[Row]:
    """Checked rows of ``data``: those that it holds out, or all; or the held-out rows of the version."""
    if data is None:
        past = earlier_prompts(side.version.name, Path(side.version.folder)) if side.version is not None else None
        if past is None:
            raise DataError("evaluate got no data=; give a file, a dataset or a list of prompts")
        return past.rows
    rows = planning.check_data(data, "grpo")
    sides = [row.get("split") for row in rows]
    if all(isinstance(said, str) and said in TRAIN_SIDE | HELD_OUT_SIDE for said in sides):
        held_out = [row for row, said in zip(rows, sides, strict=True) if said in HELD_OUT_SIDE]
        rows = [{name: value for name, value in row.items() if name != "split"} for row in held_out or rows]
    return rows


def _check_askable(agent: Any, rows: Sequence[Row]) -> None:
    if agent is None:
        raise ConfigError("run_tools=True lets an agent answer, but neither subject nor against is one; give an agent")
    messages = [number for number, row in enumerate(rows, 1) if not isinstance(row["prompt"], str)]
    if messages:
        raise DataError(
            f"run_tools=True asks through the agent, which takes text, but {len(messages)} of {len(rows)} prompts are "
            f"lists of messages, the first being number {messages[0]}; give texts"
        )


def _through_agent(agent: Any, draft: Draft, run: RunFolder, on_event: OnEvent) -> None:
    """Both sides answered by the agent itself, scored and judged."""
    run.listener = on_event
    prompts = [row["prompt"] for row in draft.held_out]
    for side, weights in (("base", draft.base), ("new", str(draft.candidate))):
        run.report_event("stage", stage=f"measure_{side}")
        report = _reporter(run, side)
        raw = answer_as_agent(agent, prompts, weights, device=run.plan.device, progress=report)
        tokenizer = load_tokenizer(plain_weights(weights), draft.config)
        raw = [_counted(answer, tokenizer) for answer in raw]
        calling = calling_for(run)
        scored = score_answers(raw, draft.held_out, draft.rewards, judges=draft.judges, calling=calling)
        write_rows(run.answers(side), [answer.model_dump() for answer in scored])
    judge_run(run)


def _reporter(run: RunFolder, side: str) -> Callable[[int, int], None]:
    return lambda done, of: run.report_event("answered", side=side, done=done, of=of)


def _counted(answer: RawAnswer, tokenizer: Any) -> RawAnswer:
    ids = tuple(tokenizer(answer.text, add_special_tokens=False)["input_ids"])
    return answer._replace(tokens=len(ids), ids=ids)
