"""What becomes of each recorded run: a row of a prompt dataset, or one more that was left out and why."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from praison_agent_rl.data_checks import RESERVED_COLUMNS, check_rows
from praison_agent_rl.data_files import Row
from praison_agent_rl.dataset_building.brief_runs import BriefRun
from praison_agent_rl.dataset_building.conversations import Conversations, Place, place_of
from praison_agent_rl.dataset_building.near_duplicates import NearDuplicates, Signature
from praison_agent_rl.dataset_building.row_texts import MessageText, RowText, RowWriter
from praison_agent_rl.errors import DataError, RewardError
from praison_agent_rl.records import Record, Run
from praison_agent_rl.rewards import resolve

FEEDBACK_COLUMNS = ("answer", "rating", "tags")
_NEAR = -1  # no number of a remembered side
OWN_COLUMNS = ("prompt", "run", "agent", "split", "tools")

REASONS = {
    "no call": "called no model (teams, flows, and runs that failed before)",
    "failed": "ended with an error",
    "later turn": "do not open their conversation",
    "rated": "have no rating, or one that is too low",
    "filtered": "refused by the filter",
    "empty": "ask nothing: no message, or a last user message that is blank",
    "malformed": "have a prompt that cannot be trained on",
    "column": "have a column that cannot be trained on",
    "too long": "have a prompt with too many characters",
    "duplicate": "have the prompt of an earlier run, case and white space aside",
    "near-duplicate": "say nearly the same as the prompt of an earlier run",
    "between sides": "would have to leave the side of the split that an earlier build gave them",
}
"""Why runs are left out, in the order in which it is looked at."""


class BuildOptions(Record):
    """What a dataset is made of."""

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


class KeptRow(NamedTuple):
    """A row, and what later builds must remember to give it the same side again."""

    text: RowText
    note: bytes
    """JSON; empty where it is remembered already."""


class _Candidate(NamedTuple):
    """A run that may become a row."""

    run: BriefRun
    prompt: list[MessageText]
    place: Place
    group: int


def remembered_label(number: int) -> int:
    """The label for near-duplicates of a side given by an earlier build, and back again; rows have 0, 1, 2, ..."""
    return -1 - number


def selected(runs: Iterable[BriefRun], options: BuildOptions) -> Iterator[BriefRun]:
    """The runs that the options speak of."""
    for run in runs:
        if options.agent is not None and not fnmatchcase(run.agent or "", options.agent):
            continue
        if options.since is not None and run.time < options.since:
            continue
        if options.until is not None and run.time >= options.until:
            continue
        if set(options.tags) <= set(run.tags):
            yield run


class Sieve:
    """Lets through the runs that become rows, and counts the others by reason; it keeps digests, no text.

    Raises:
        DataError: a function that the options name cannot be found.
    """

    def __init__(self, options: BuildOptions, conversations: Conversations, *, near: NearDuplicates | None) -> None:
        self.runs = self.calls = 0
        self.left_out: Counter[str] = Counter()
        self.example: str | None = None
        """The first malformed prompt or column: which run, and what is wrong with it."""
        self.kinds: dict[str, set[str]] = {}
        """Python's names for the types that were met in each column, those aside that all rows have."""
        self.lent: dict[int, Row] = {}
        """Answers and ratings that later runs with the same prompt have, by the number of the row."""
        self.options = options
        self.seeks_near_duplicates = near is not None
        self._conversations = conversations
        self._near = near
        self._writer = RowWriter()
        self._sound_tools: list[Row] = []
        self._rows: dict[int, int] = {}
        self._filter = _function("filter", options.filter) if options.filter else None
        self._makers = {spec: _function("columns", spec) for spec in options.columns if ":" in spec}

    def rows(self, runs: Iterable[BriefRun]) -> Iterator[KeptRow]:
        """The rows, in the order of the runs."""
        for run in runs:
            self.runs += 1
            self.calls += run.calls
            kept = self._sifted(run)
            if isinstance(kept, str):
                self.left_out[kept] += 1
            else:
                yield kept

    def _sifted(self, run: BriefRun) -> KeptRow | str:
        """The row of a run, or the reason why it makes none."""
        if not run.calls:
            return "no call"
        try:
            prompt = self._writer.texts(run.messages)
        except (TypeError, ValueError, RecursionError) as error:
            return self._malformed(run, f"the prompt has no form in JSON: {error}")
        place = place_of(run, prompt)
        # Runs that are left out are admitted too: they hold a conversation together
        group, opens = self._conversations.admit(run, place)
        reason = self._unwanted(run, opens)
        if reason:
            return reason
        earlier = self._rows.get(place.key)
        if earlier is not None:
            self._lend(earlier, run)
            return "duplicate"
        return self._made(_Candidate(run, prompt, place, group))

    def _unwanted(self, run: BriefRun, opens: bool) -> str | None:
        options = self.options
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

    def _made(self, candidate: _Candidate) -> KeptRow | str:
        """The row, if it can be trained on, no near-duplicate came before it, and its side is free."""
        run, prompt, place, group = candidate
        columns = self._columns(run)
        try:
            self._check(run, prompt, columns=columns)
            text = self._writer.row(prompt, tools=run.tools, others=columns)
        except (DataError, TypeError, ValueError, RecursionError) as error:
            if fault := _fault({"prompt": run.messages, "tools": run.tools}):
                return self._malformed(run, fault)
            return self._malformed(run, _fault({"prompt": "-", **columns}) or str(error), "column")
        side, signature = self._side(candidate)
        if side == _NEAR:
            return "near-duplicate"
        if side is not None and not self._conversations.follow(group, side):
            return "between sides"
        self._note_kinds({"tools": run.tools or None, **columns})
        number = self._rows[place.key] = len(self._rows)
        self._conversations.keep(place.key, group)
        if self._near and signature:
            self._near.add(signature, number)
        return KeptRow(text, self._note(candidate, signature))

    def _side(self, candidate: _Candidate) -> tuple[int | None, Signature | None]:
        """The number of the remembered side that a prompt must take, or ``_NEAR``; and its signature."""
        side = self._conversations.given(candidate.place.key)
        if self._near is None:
            return side, None
        signature = self._near.sign(candidate.run.messages)
        alike = self._near.find(signature)
        if any(label >= 0 for label in alike):
            return _NEAR, signature
        return remembered_label(alike[0]) if side is None and alike else side, signature

    def _note(self, candidate: _Candidate, signature: Signature | None) -> bytes:
        """What later builds must remember, where they do not yet."""
        run, _, place, _ = candidate
        if self._conversations.given(place.key) is not None:
            return b""
        near = f', "near": "{signature.text()}"' if signature else ""
        return f'{{"key": {place.key}, "links": {self._conversations.links_of(run, place)}{near}}}'.encode()

    def _check(self, run: BriefRun, prompt: list[MessageText], *, columns: Row) -> None:
        """Raise DataError if the row cannot be trained on."""
        # not asked where it would surely find nothing: it takes longer than all else together
        plain = prompt[-1].role == "user" and all([message.sound for message in prompt]) and len(columns) == 2
        if not plain or run.tools != self._sound_tools:
            check_rows([{"prompt": run.messages, "tools": run.tools, **columns}], "grpo", f"run {run.id}")
            self._sound_tools = run.tools

    def _malformed(self, run: BriefRun, fault: str, reason: str = "malformed") -> str:
        self.example = self.example or f"run {run.id}: {fault}"
        return reason

    def _columns(self, run: BriefRun) -> Row:
        columns = feedback_columns(run, self.options.columns)
        for spec, maker in self._makers.items():
            columns |= _made_columns(maker, run.whole(), spec=spec)
        return {**columns, "run": run.id, "agent": run.agent}

    def _note_kinds(self, columns: Row) -> None:
        for name, value in columns.items():
            if value is not None and name not in OWN_COLUMNS[:-1]:
                self.kinds.setdefault(name, set()).add(type(value).__name__)

    def _lend(self, number: int, run: BriefRun) -> None:
        """A correction is worth more than the run that it was given to: the row with the same prompt has it too."""
        names = [name for name in self.options.columns if name in ("answer", "rating")]
        if run.feedback and (columns := feedback_columns(run, names)) and not _fault({"prompt": "-", **columns}):
            self._note_kinds(columns)
            self.lent[number] = columns | self.lent.get(number, {})


def feedback_columns(run: BriefRun, names: Iterable[str]) -> Row:
    """What was said of a run, under those of the names ``answer``, ``rating`` and ``tags`` that it has."""
    if not run.feedback and not run.tags:
        return {}
    columns: Row = {}
    for feedback in sorted(run.feedback, key=lambda feedback: feedback.time):
        if feedback.correction is not None:
            columns["answer"] = feedback.correction
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


def _made_columns(function: Any, run: Run, *, spec: str) -> Row:
    made = _called(function, run, spec=spec)
    if not isinstance(made, Mapping):
        raise DataError(f"{spec!r} returned {made!r} for run {run.id!r}; it must return a dict of columns, or {{}}")
    odd = [name for name in made if not isinstance(name, str)]
    if odd:
        raise DataError(f"{spec!r} returned the column {odd[0]!r} for run {run.id!r}: a column's name must be a text")
    taken = [name for name in made if name in RESERVED_COLUMNS or name in OWN_COLUMNS]
    if taken:
        why = RESERVED_COLUMNS.get(taken[0], "every row has a column of this name")
        raise DataError(f"{spec!r} returned the column {taken[0]!r} for run {run.id!r}: {why}. Give it another name")
    return dict(made)


def _fault(row: Row) -> str | None:
    """Why a row cannot be written down and trained on, with the name of its column."""
    try:
        check_rows([row], "grpo")
    except DataError as error:
        said = next((line for line in str(error).splitlines() if line.startswith("  row 1: ")), str(error))
        return said.removeprefix("  row 1: ")
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return f"{name!r} is {value!r:.80}, for which JSON has no form: {error}"
    return None
