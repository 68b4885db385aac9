"""Which runs a dataset is made of, and what its options' functions say of them; it makes no rows."""

import json
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from praison_agent_rl.data_checks import RESERVED_COLUMNS, check_rows
from praison_agent_rl.data_files import Row
from praison_agent_rl.dataset_building.brief_runs import BriefRun
from praison_agent_rl.errors import DataError, RewardError
from praison_agent_rl.records import Record, Run
from praison_agent_rl.rewards import resolve
from praison_agent_rl.transcripts.corrections import last_correction

FEEDBACK_COLUMNS = ("answer", "rating", "tags")
OWN_COLUMNS = ("prompt", "run", "agent", "split", "tools")
PAIR_COLUMNS = ("chosen", "rejected", "source", "chosen_score", "rejected_score", "margin")
"""Columns that pairs have besides."""


class BuildOptions(Record):
    """What a dataset is made of."""

    kind: Literal["prompts", "pairs"] = "prompts"
    """Prompts, for GRPO; or pairs of a better and a worse answer, for reward models and CPO."""
    sources: tuple[Literal["correction", "rating", "retry"], ...] = ("correction", "rating", "retry")
    """Pairs: what of the recorded runs they are made of."""
    min_margin: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Pairs: least difference of two scores; equal scores never make a pair."""
    agent: str | None = None
    """Name of the agent, or a pattern as ``support-*``; all agents by default."""
    turns: Literal["all", "first"] = "all"
    """Every turn of a conversation, or only the one that opens it."""
    columns: tuple[str, ...] = ("answer", "rating")
    """``answer`` (the correction of the last feedback), ``rating`` (its score), ``tags``, or a ``module:function``
    that takes a ``Run`` and returns a dict of columns."""
    filter: str | None = None
    """A ``module:function`` that takes a ``Run`` and says whether it is used."""
    since: float | None = None
    """Unix seconds: only runs that began then or later."""
    until: float | None = None
    """Unix seconds: only runs that began before."""
    tags: tuple[str, ...] = ()
    """Only runs that have all of these tags."""
    min_rating: float | None = None
    """Only runs whose last score is at least this."""
    max_prompt_chars: int | None = Field(default=None, ge=1)
    """Longest prompt, tool schemas included. Training itself leaves out what has too many tokens."""
    near_duplicates: float | None = Field(default=0.9, gt=0, le=1)
    """Jaccard similarity from which a prompt is left out, by an estimate that leaves out some a little less similar
    too; None: only equal prompts are."""
    held_out: float = Field(default=0.2, ge=0, lt=1)
    """Share of the rows that are held out."""
    seed: int = 0
    """Draws what is held out."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """JSON lines, written as a stream; or Parquet, for which all rows must fit into memory."""

    @field_validator("columns")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        odd = [name for name in names if name not in FEEDBACK_COLUMNS and ":" not in name]
        if odd:
            raise ValueError(
                f"column {odd[0]!r} is unknown; give {', '.join(FEEDBACK_COLUMNS)}, or a 'module:function' that takes "
                "a Run and returns a dict of columns"
            )
        return names

    def speaks_of(self, run: BriefRun) -> bool:
        """Whether a run is one of those that are looked at."""
        if self.agent is not None and not fnmatchcase(run.agent or "", self.agent):
            return False
        if self.since is not None and run.time < self.since:
            return False
        if self.until is not None and run.time >= self.until:
            return False
        return set(self.tags) <= set(run.tags)

    @field_validator("min_rating")
    @classmethod
    def _fit_for_the_kind(cls, rating: float | None, info: ValidationInfo) -> float | None:
        if rating is not None and info.data.get("kind") == "pairs":
            raise ValueError(
                f"min_rating={rating:g} would leave out the worse of two answers; leave it out for pairs, or give "
                "min_margin, the least difference of their scores"
            )
        return rating


def selected(runs: Iterable[BriefRun], options: BuildOptions) -> Iterator[BriefRun]:
    """The runs that the options speak of."""
    return filter(options.speaks_of, runs)


class Choice:
    """What bounds and functions of the options say of a run.

    Raises:
        DataError: a function that the options name cannot be found.
    """

    def __init__(self, options: BuildOptions) -> None:
        self._options = options
        self._filter = _function("filter", options.filter) if options.filter else None
        self._makers = {spec: _function("columns", spec) for spec in options.columns if ":" in spec}
        self._taken = (*OWN_COLUMNS, *(PAIR_COLUMNS if options.kind == "pairs" else ()))

    def refuses(self, run: BriefRun, opens: bool) -> str | None:
        """Why a run is not used; ``opens`` says whether it opens its conversation."""
        options = self._options
        if options.turns == "first" and not opens:
            return "later turn"
        if run.error is not None:
            return "failed"
        if options.min_rating is not None:
            rating = feedback_columns(run, ("rating",)).get("rating")
            if rating is None or not rating >= options.min_rating:
                return "rated"
        if self._filter is not None and not _called(self._filter, run.whole(), spec=options.filter):
            return "filtered"
        if asks_nothing(run.messages):
            return "empty"
        limit = options.max_prompt_chars
        return "too long" if limit is not None and prompt_chars(run.messages, run.tools) > limit else None

    def columns_of(self, run: BriefRun) -> Row:
        """The columns that the options name, and which run it was of which agent."""
        columns = feedback_columns(run, self._options.columns)
        for spec, maker in self._makers.items():
            columns |= self._made(maker, run.whole(), spec=spec)
        return {**columns, "run": run.id, "agent": run.agent}

    def _made(self, function: Any, run: Run, *, spec: str) -> Row:
        made = _called(function, run, spec=spec)
        if not isinstance(made, Mapping):
            raise DataError(f"{spec!r} returned {made!r} for run {run.id!r}; it must return a dict of columns, or {{}}")
        odd = [name for name in made if not isinstance(name, str)]
        if odd:
            raise DataError(
                f"{spec!r} returned the column {odd[0]!r} for run {run.id!r}: a column's name must be a text"
            )
        taken = [name for name in made if name in RESERVED_COLUMNS or name in self._taken]
        if taken:
            why = RESERVED_COLUMNS.get(taken[0], "every row has a column of this name")
            raise DataError(
                f"{spec!r} returned the column {taken[0]!r} for run {run.id!r}: {why}. Give it another name"
            )
        return dict(made)


def feedback_columns(run: BriefRun, names: Iterable[str]) -> Row:
    """What was said of a run, under those of the names ``answer``, ``rating`` and ``tags`` that it has."""
    if not run.feedback and not run.tags:
        return {}
    columns: Row = {}
    said = sorted(run.feedback, key=lambda feedback: feedback.time)
    if (answer := last_correction(said)) is not None:
        columns["answer"] = answer
    for feedback in said:
        if feedback.score is not None:
            columns["rating"] = feedback.score
    if run.tags:
        columns["tags"] = run.tags
    return {name: columns[name] for name in names if name in columns}


def asks_nothing(messages: list[Row]) -> bool:
    """Whether nobody says anything in these messages, system prompts aside."""
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            return content == [] or (isinstance(content, str) and not content.strip())
    return all(message.get("role") in ("system", "developer") for message in messages)


def prompt_chars(messages: list[Row], tools: list[Row]) -> int:
    """Characters of a prompt: texts and tool calls of its messages, and the schemas of its tools."""
    count = len(json.dumps(tools, ensure_ascii=False, default=repr)) if tools else 0
    for message in messages:
        for part in (message.get("content"), message.get("tool_calls")):
            if part:
                count += len(part) if isinstance(part, str) else len(json.dumps(part, ensure_ascii=False, default=repr))
    return count


def _function(option: str, spec: str) -> Any:
    try:
        return resolve(spec)
    except RewardError as error:
        raise DataError(f"option {option}: {error}".replace("reward function", "function")) from error


def _called(function: Any, run: Run, *, spec: str | None) -> Any:
    try:
        return function(run)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise DataError(f"{spec!r} failed on run {run.id!r}: {type(error).__name__}: {error}") from error


def fault_of(row: Row, method: str = "grpo") -> str | None:
    """Why a row cannot be written down and trained on, with the name of its column."""
    try:
        check_rows([row], method)
    except DataError as error:
        said = next((line for line in str(error).splitlines() if line.startswith("  row 1: ")), str(error))
        return said.removeprefix("  row 1: ")
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return f"{name!r} is {value!r:.80}, for which JSON has no form: {error}"
    return None
