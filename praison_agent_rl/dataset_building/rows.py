"""What becomes of each recorded run: a row of a prompt dataset, or one more that was left out and why."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from praison_agent_rl.data_checks import check_rows
from praison_agent_rl.data_files import Row
from praison_agent_rl.dataset_building.brief_runs import BriefRun
from praison_agent_rl.dataset_building.choosing import OWN_COLUMNS, BuildOptions, Choice, fault_of
from praison_agent_rl.dataset_building.choosing import feedback_columns as feedback_columns
from praison_agent_rl.dataset_building.conversations import Conversations, Place, place_of
from praison_agent_rl.dataset_building.near_duplicates import NearDuplicates, Signature
from praison_agent_rl.dataset_building.row_texts import MessageText, RowText, RowWriter
from praison_agent_rl.errors import DataError

_NEAR = -1  # no number of a remembered side

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
        self._choice = Choice(options)

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
        reason = self._choice.refuses(run, opens)
        if reason:
            return reason
        earlier = self._rows.get(place.key)
        if earlier is not None:
            self._lend(earlier, run)
            return "duplicate"
        return self._made(_Candidate(run, prompt, place, group))

    def _made(self, candidate: _Candidate) -> KeptRow | str:
        """The row, if it can be trained on, no near-duplicate came before it, and its side is free."""
        run, prompt, place, group = candidate
        columns = self._choice.columns_of(run)
        try:
            self._check(run, prompt, columns=columns)
            text = self._writer.row(prompt, tools=run.tools, others=columns)
        except (DataError, TypeError, ValueError, RecursionError) as error:
            if fault := fault_of({"prompt": run.messages, "tools": run.tools}):
                return self._malformed(run, fault)
            return self._malformed(run, fault_of({"prompt": "-", **columns}) or str(error), "column")
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

    def _note_kinds(self, columns: Row) -> None:
        for name, value in columns.items():
            if value is not None and name not in OWN_COLUMNS[:-1]:
                self.kinds.setdefault(name, set()).add(type(value).__name__)

    def _lend(self, number: int, run: BriefRun) -> None:
        """A correction is worth more than the run that it was given to: the row with the same prompt has it too."""
        names = [name for name in self.options.columns if name in ("answer", "rating")]
        if run.feedback and (columns := feedback_columns(run, names)) and not fault_of({"prompt": "-", **columns}):
            self._note_kinds(columns)
            self.lent[number] = columns | self.lent.get(number, {})
