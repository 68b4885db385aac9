"""Try rewards before anything is trained: each alone, on recorded, given or made-up answers, and judge each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from praison_agent_rl.agreement import agreement
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_keys import plain_errors
from praison_agent_rl.config_values import DatasetSpec
from praison_agent_rl.data import Row, load_rows
from praison_agent_rl.errors import ConfigError, RewardError
from praison_agent_rl.records import Record
from praison_agent_rl.reward_trials.answers import Answers, Limits, answers_of_rows, rows_with
from praison_agent_rl.reward_trials.calls import Sample, staying_here
from praison_agent_rl.reward_trials.forms import measure_in_form
from praison_agent_rl.reward_trials.runs import answers_of_runs
from praison_agent_rl.reward_trials.trials import Measured, RewardTrial, TrialRules, prefer
from praison_agent_rl.reward_trials.verdicts import judged, remarks_on_all, unusable
from praison_agent_rl.rewards import Reward, Score
from praison_agent_rl.scoring.names import (
    Function,
    declared,
    importing_from,
    needed_columns,
    short,
    taken_view,
    unique_names,
    unlike_trl,
)
from praison_agent_rl.scoring.specs import RewardSpec, listed_specs, read_spec, resolve
from praison_agent_rl.transcripts import DEFAULT_STORE

_ON_MADE_UP = "These answers are made up: see what it says of real ones."


class TrialOptions(Record):
    """How rewards are tried."""

    config: Any = None
    """A configuration: its rewards, judges and dataset where none are given, and the size of a step."""
    store: Path = DEFAULT_STORE
    """Folder of the transcripts."""
    prompts: int = Field(default=16, ge=1)
    """Prompts at most."""
    answers_each: int = Field(default=4, ge=1)
    """Answers to each prompt at most; a judge's calls cost money."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds for one call; by default the configuration's ``reward_timeout``, which is 60."""
    slow_after: float = Field(default=10.0, gt=0)
    """Seconds for the answers of one training step from which a reward is too slow."""
    judges_twice: bool = False
    """Call judges again too, to see whether they say the same twice."""


class Trials(Record):
    """What a trial found out."""

    rewards: list[RewardTrial]
    source: str
    """Where the answers are from, in words."""
    made_up: bool
    """Whether the answers were made up."""
    prompts: int
    answers: int
    pairs: int
    """Pairs of answers to one prompt of which one is known to be better."""
    correlations: list[list[float | None]]
    """How far each two rewards put the answers in the same order: Kendall's tau-b; None where one says nothing."""
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether none is broken."""
        return all(trial.verdict != "broken" for trial in self.rewards)

    def as_json(self) -> str:
        """All of it as JSON."""
        return self.model_dump_json(indent=2)

    def __str__(self) -> str:
        lines = [f"tried on {self.answers} {self.source} ({self.prompts} prompts)"]
        for trial in self.rewards:
            lines += [f"{trial.name}: {trial.verdict}", *(f"  {line}" for line in lines_on(trial))]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class _Entry(NamedTuple):
    given: Any
    judge: bool


def try_rewards(
    rewards: Any = None, data: Any = None, *, answers: Any = None, agent: Any = None, **options: Any
) -> Trials:
    """Try each of ``rewards`` (as ``reward_funcs`` takes them) alone and say whether it can be trained with.

    The answers are, by what is given: ``answers`` (rows with ``prompt`` and ``completion`` or ``completions``, or an
    entry for each row of ``data``); those in ``data`` (columns ``completion``, ``completions``, or ``chosen`` and
    ``rejected``), else made-up ones to its prompts; what was recorded of ``agent`` (one, its name, or a pattern), or of
    all agents. ``options`` are those of `TrialOptions`.

    Raises:
        RewardError: no reward is named.
        ConfigError: an option cannot be.
        DataError: there are no answers or prompts, or they cannot be read.
    """
    try:
        chosen = TrialOptions(**options)
    except ValidationError as error:
        raise ConfigError("\n".join(plain_errors(error).values())) from error
    given = chosen.config
    config = None if given is None else TrainConfig.load(given, need_model=False, need_data=False)
    entries = [_Entry(spec, False) for spec in listed_specs(rewards)]
    if config is not None and not entries:
        entries = [_Entry(spec, False) for spec in listed_specs(config.reward_funcs)]
        entries += [_Entry(spec, True) for spec in listed_specs(config.judge_funcs)]
    if not entries:
        raise RewardError("no reward is named; give 'module:function', or a configuration with reward_funcs")
    found = _answers(data, answers, agent, config, chosen)
    step = {} if config is None else {"batch": config.prompts_per_batch * config.num_generations}
    timeout = chosen.timeout or (60.0 if config is None else config.reward_timeout)
    rules = TrialRules(timeout=timeout, slow_after=chosen.slow_after, judges_twice=chosen.judges_twice, **step)
    with importing_from(None), staying_here():  # a reward may import a helper beside it when it is called
        return _tried(entries, found, rules)


def lines_on(trial: RewardTrial) -> list[str]:
    """What there is to say of a reward beside its numbers."""
    said = []
    for fault in trial.faults:
        if fault.text in trial.advice:
            continue
        where = f" (first: {fault.first})" if fault.first else ""
        many = f", {fault.count} of {trial.answers} answers" if fault.count > 1 else ""
        said.append(f"{fault.text}{many}{where}")
    said += [trial.advice] if trial.advice else []
    return said + [f"warning: {warning}" for warning in trial.warnings] + [f"note: {note}" for note in trial.notes]


def _answers(data: Any, answers: Any, agent: Any, config: TrainConfig | None, options: TrialOptions) -> Answers:
    limits = Limits(options.prompts, options.answers_each)
    if agent is not None and (data is not None or answers is not None):
        raise ConfigError("agent= means its recorded answers; give either it or data= and answers=")
    if data is None and agent is None and config is not None:
        data = config.dataset
    if answers is not None:
        rows = rows_with(answers, None if data is None else _rows(data))
        return answers_of_rows(rows, "the given rows", limits)
    if data is not None:
        source = str(data) if isinstance(data, str | Path) else "the dataset"
        return answers_of_rows(_rows(data), source, limits)
    name = agent if isinstance(agent, str) or agent is None else str(getattr(agent, "name", None) or "")
    return answers_of_runs(options.store, name or None, limits)


def _rows(data: Any) -> list[Row]:
    if isinstance(data, list) and all(isinstance(entry, DatasetSpec) for entry in data):
        data = [entry.model_dump(exclude_none=True) for entry in data]
    return load_rows(data)


def _tried(entries: Sequence[_Entry], answers: Answers, rules: TrialRules) -> Trials:
    trials: list[RewardTrial] = []
    scores: list[Sequence[Score]] = []
    names = _names([entry.given for entry in entries])
    for entry, name in zip(entries, names, strict=True):
        trial, found = _trial(entry, name, answers, rules)
        trials.append(trial)
        scores.append(found)
    # made-up answers say little of how rewards go together
    correlations = [[agreement(a, b).tau if a and b else None for b in scores] for a in scores]
    remarks = [] if answers.made_up else remarks_on_all(trials, correlations)
    return Trials(
        rewards=trials,
        source=answers.source,
        made_up=answers.made_up,
        prompts=len({sample.group for sample in answers.samples}),
        answers=len(answers.samples),
        pairs=len(answers.pairs),
        correlations=correlations,
        notes=[*answers.notes, *_gaps(trials, answers.samples), *remarks],
    )


def _names(given: Sequence[Any]) -> list[str]:
    """A name for each entry, also for one that cannot be found."""
    names: list[str] = []
    fns: list[Function] = []
    asked: list[str | None] = []
    places = []
    for place, entry in enumerate(given):
        names.append(_label(entry))
        try:
            read, fn = read_spec(entry), resolve(entry)
        except RewardError:
            continue
        fns.append(fn)
        asked.append(read.name)
        places.append(place)
    for place, name in zip(places, unique_names(fns, asked), strict=True):
        names[place] = name
    return names


def _label(entry: Any) -> str:
    """What an entry that cannot be read is called: by its reward, as its parameters may hold a key."""
    said = entry.get("name") or entry.get("reward") if isinstance(entry, Mapping) else entry
    if isinstance(said, str) and said.strip() and not said.lstrip().startswith("{"):
        return said.strip()
    return "a reward without a name" if isinstance(entry, Mapping | str) else short(entry)


def _trial(entry: _Entry, name: str, answers: Answers, rules: TrialRules) -> tuple[RewardTrial, Sequence[Score]]:
    facts: dict[str, Any] = {"judge": entry.judge}
    try:
        spec, fn = read_spec(entry.given), resolve(entry.given)
        facts["needs"] = _needed(spec, fn)
        _check_columns(name, facts, answers.samples)
        _check_views(spec, fn, answers.samples)
        reward = Reward(fn, name, renamed=spec.columns, by_sample=not declared(fn, "whole_group"))
        measured = measure_in_form(reward, answers.samples, rules)
    except RewardError as error:
        return unusable(name, str(error), **facts), []
    if warning := unlike_trl(fn):
        measured.facts["notes"] += (warning,)
    trial = judged(measured, rules, **facts, **_against_people(measured, answers))
    if answers.made_up and trial.verdict in ("no signal", "too sparse"):
        trial = trial.model_copy(update={"advice": f"{trial.advice} {_ON_MADE_UP}"})
    return trial, measured.scores


def _needed(spec: RewardSpec, fn: Function) -> list[str]:
    fed = [spec.columns.get(parameter, parameter) for parameter in needed_columns(fn)]
    return list(dict.fromkeys([*fed, *spec.columns.values()]))


def _check_columns(name: str, facts: dict[str, Any], samples: Sequence[Sample]) -> None:
    """Raise RewardError if the data lacks a column that the reward needs; ``facts`` learns which."""
    there = list(dict.fromkeys(column for sample in samples for column in sample.columns))
    facts["lacking"] = [column for column in facts["needs"] if column not in there]
    for singular, plural in (("prompt", "prompts"), ("completion", "completions")):
        if singular in facts["lacking"]:
            raise RewardError(f"takes {singular!r}; TRL passes it as {plural!r} (a list)")
    if facts["lacking"]:
        what = f"the column{'s' * (len(facts['lacking']) > 1)} {', '.join(map(repr, facts['lacking']))}"
        raise RewardError(f"needs {what}; the data has: {', '.join(['prompt', *there])}")


def _check_views(spec: RewardSpec, fn: Function, samples: Sequence[Sample]) -> None:
    """Raise RewardError if a column has the name of what the reward asks of the run."""
    if taken := taken_view(fn, spec.columns, {column for sample in samples for column in sample.columns}):
        raise RewardError(taken)


def _against_people(measured: Measured, answers: Answers) -> dict[str, Any]:
    """How the scores stand to known pairs and to ratings, as fields of `RewardTrial`."""
    found = agreement(measured.scores, [sample.rating for sample in answers.samples])
    return {**prefer(measured.scores, answers.pairs), "rated": found.n, "agreement": found.tau}


def _gaps(trials: Sequence[RewardTrial], samples: Sequence[Sample]) -> list[str]:
    """Columns that rewards need and some prompts lack: a reward is given None there."""
    rows: Mapping[int, Mapping[str, Any]] = {sample.group: sample.columns for sample in samples}
    names = dict.fromkeys(name for trial in trials for name in trial.needs)
    lacking = {name: sum(columns.get(name) is None for columns in rows.values()) for name in names}
    return [
        f"the column {name!r} is empty for {count} of {len(rows)} prompts; a reward is given None there"
        for name, count in lacking.items()
        if 0 < count < len(rows)
    ]
