"""Pairs of a better and a worse answer to one prompt, from what was said of recorded runs.

Runs are read once, and what may become a pair is put aside in a file: only when all are read is it known which ratings
belong together and which pairs contradict each other. Memory holds digests, places and scores.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from praison_agent_rl.data_checks import check_rows, without_white_space
from praison_agent_rl.data_files import Row
from praison_agent_rl.dataset_building.brief_runs import BriefRun
from praison_agent_rl.dataset_building.choosing import (
    OWN_COLUMNS,
    PAIR_COLUMNS,
    BuildOptions,
    Choice,
    fault_of,
    feedback_columns,
)
from praison_agent_rl.dataset_building.comparing import (
    Claim,
    Rated,
    add,
    best_and_worst,
    digest_of_answer,
    settled,
)
from praison_agent_rl.dataset_building.conversations import Conversations, Place, place_of
from praison_agent_rl.dataset_building.judged import Judged, judged_of, was_retried
from praison_agent_rl.dataset_building.near_duplicates import NearDuplicates, Signature
from praison_agent_rl.dataset_building.row_texts import RowWriter, message_text
from praison_agent_rl.dataset_building.rows import KeptRow, remembered_label
from praison_agent_rl.dataset_building.spool import Spool
from praison_agent_rl.errors import DataError


class Asked(NamedTuple):
    """A recorded prompt that answers are sampled to."""

    prompt: list[Row]
    tools: list[Row]
    columns: Row
    """What the options' columns say of its run."""


Scored = tuple[str, float | None]
Sampler = Callable[[Iterator[Asked]], Iterator[list[Scored]]]
"""Answers with their scores to each prompt in turn; it may end before the prompts do."""


class PairSieve:
    """Makes pairs of runs, and counts what makes none by reason.

    ``remembered`` is how many sides the dataset's own earlier builds gave; others may be known besides.

    Raises:
        DataError: a function that the options name cannot be found.
    """

    def __init__(
        self,
        options: BuildOptions,
        conversations: Conversations,
        *,
        near: NearDuplicates | None,
        spool: Spool,
        remembered: int = 0,
    ) -> None:
        self.runs = self.calls = 0
        self.left_out: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.prompts = 0
        """Different ones that have pairs."""
        self.example: str | None = None
        self.kinds: dict[str, set[str]] = {}
        self.lent: dict[int, Row] = {}
        """Nothing; prompt datasets lend answers."""
        self.options = options
        self.seeks_near_duplicates = near is not None
        self._conversations = conversations
        self._near = near
        self._spool = spool
        self._remembered = remembered
        self._writer = RowWriter()
        self._choice = Choice(options)
        self._told: list[Claim] = []
        self._rated: dict[int, list[Rated]] = {}
        self._sampling = False
        self._asked: dict[int, int] = {}
        self._groups: dict[int, int] = {}
        self._sides: dict[int, int | str | None] = {}
        """Of a prompt: the number of the side that it was given before, or why it makes no pair."""

    def rows(self, runs: Iterable[BriefRun], sampler: Sampler | None = None) -> Iterator[KeptRow]:
        """The rows, corrections and retries first, then ratings, then what ``sampler`` answers."""
        self._sampling = sampler is not None
        for run in runs:
            self.runs += 1
            self.calls += run.calls
            if reason := self._taken(run):
                self.left_out[reason] += 1
        claims = [*self._told, *self._from_ratings()]
        claims += self._from_samples(sampler) if sampler else []
        for claim in settled(claims):
            kept = claim if isinstance(claim, str) else self._made(claim)
            if isinstance(kept, str):
                self.left_out[kept] += 1
            else:
                yield kept

    # --- what runs say ----------------------------------------------------------------------------------------------

    def _taken(self, run: BriefRun) -> str | None:
        """Put aside what a run says of answers; why nothing, if it says something and cannot be used."""
        said, sampling = self._said(run), self._sampling
        if not run.calls:
            return "no answer" if said else None
        try:
            prompt = self._writer.texts(run.messages)
        except (TypeError, ValueError, RecursionError) as error:
            fault = f"the prompt has no form in JSON: {error}"
            return self._malformed(run.id, fault) if said or sampling else None
        place = place_of(run, prompt)
        # Runs that say nothing are admitted too: they hold a conversation together
        group, opens = self._conversations.admit(run, place)
        if not said and not sampling:
            return None
        if reason := self._choice.refuses(run, opens):
            return reason
        judged = judged_of(run.all_calls, run.output)
        if isinstance(judged, str) and not sampling:
            return judged
        try:
            return self._put_aside(run, place, group, judged)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return self._malformed(run.id, f"what it says has no form in JSON: {error}")

    def _said(self, run: BriefRun) -> Row:
        """What is said of a run's answer: a correction, a rating, that the agent took an answer back."""
        said: Row = {}
        sources = self.options.sources
        if run.feedback:
            columns = feedback_columns(run, ("answer", "rating"))
            corrected = any(feedback.correction is not None for feedback in run.feedback)
            answer, rating = columns.get("answer", "" if corrected else None), columns.get("rating")  # "" is counted
            # as the file has it, and NaN is no rating
            if "correction" in sources and isinstance(answer, str):
                said["correction"] = answer
            if "rating" in sources and isinstance(rating, int | float) and rating == rating:
                said["rating"] = rating
        if "retry" in sources and was_retried(run.all_calls):
            said["retry"] = True
        return said

    def _put_aside(self, run: BriefRun, place: Place, group: int, judged: Judged | str) -> str | None:
        messages, tools = (run.messages, run.tools) if isinstance(judged, str) else judged[:2]
        at_first = messages is run.messages or messages == run.messages
        key = place.key if at_first else _key_of(messages)
        base = self._spool.put(
            {
                "prompt": messages,
                "tools": tools,
                "first": len(run.messages) if messages[: len(run.messages)] == run.messages else len(messages),
                "key": place.key,
                "group": group,
                "links": self._conversations.links_of(run, place),
                "columns": self._choice.columns_of(run),
            }
        )
        if self._sampling:
            self._asked.setdefault(key, base)
        said = self._said(run)
        if isinstance(judged, str):
            return judged if said else None
        if said:
            self._note(said, key, judged, base)
        return None

    def _note(self, said: Row, key: int, judged: Judged, base: int) -> None:
        """Remember who is said to be better than whom; what cannot be a pair is counted at once."""
        answer = self._put_answer(judged.answer, base)
        if "correction" in said:
            self._claim("correction", key, self._put_answer(said["correction"], base), answer)
        if "retry" in said and judged.refused is not None:
            self._claim("retry", key, answer, self._put_answer(judged.refused, base))
        if "rating" in said:
            if answer is None:
                self.left_out["empty side"] += 1
            else:
                add(self._rated.setdefault(key, []), answer._replace(total=float(said["rating"])))

    def _put_answer(self, text: str, base: int) -> Rated | None:
        """An answer put aside; None if it is blank."""
        if not without_white_space(text):
            return None
        return Rated(digest_of_answer(text), 0.0, 1, base, self._spool.put(text))

    def _claim(self, source: str, key: int, chosen: Rated | None, rejected: Rated | None) -> None:
        if chosen is None or rejected is None:
            self.left_out["empty side"] += 1
        elif chosen.text == rejected.text:
            self.left_out["equal"] += 1
        else:
            self._told.append(Claim(key, chosen, rejected, source, scored=False))

    # --- what answers to one prompt say of each other ---------------------------------------------------------------

    def _from_ratings(self) -> Iterator[Claim]:
        for key, answers in self._rated.items():
            if sum(answer.times for answer in answers) > 1:
                yield from self._compared("rating", key, answers)

    def _from_samples(self, sampler: Sampler) -> Iterator[Claim]:
        asked = list(self._asked.items())
        prompts = (self._asked_at(base) for _, base in asked)
        for (key, base), answers in zip(asked, sampler(prompts), strict=False):
            found: list[Rated] = []
            scored = [(text, score) for text, score in answers if score is not None and score == score]
            for text, score in scored:
                if answer := self._put_answer(text, base):
                    add(found, answer._replace(total=float(score)))
            if len(scored) < 2:
                self.left_out["no score"] += 1
            elif not found or (len(found) == 1 and found[0].times < len(scored)):
                self.left_out["empty side"] += 1
            else:
                yield from self._compared("sampled", key, found)

    def _asked_at(self, base: int) -> Asked:
        given = self._spool.get(base)
        return Asked(given["prompt"], given["tools"], given["columns"])

    def _compared(self, source: str, key: int, answers: Sequence[Rated]) -> Iterator[Claim]:
        found = best_and_worst(answers, self.options.min_margin)
        if isinstance(found, str):
            self.left_out[found] += 1
        else:
            yield Claim(key, *found, source, scored=True)

    # --- pairs ------------------------------------------------------------------------------------------------------

    def _made(self, claim: Claim) -> KeptRow | str:
        """The row, if it can be trained on, its prompt is no near-duplicate, and its side is free."""
        given = self._spool.get(claim.chosen.base)
        others = self._columns(claim, given["columns"])
        row = {"prompt": given["prompt"], **({"tools": given["tools"]} if given["tools"] else {}), **others}
        try:
            check_rows([row], "cpo", f"run {others['run']}")
            prompt = self._writer.texts(given["prompt"])
            text = self._writer.row(prompt, tools=given["tools"], others=others)
        except (DataError, TypeError, ValueError, RecursionError) as error:
            columns = {name: value for name, value in others.items() if name not in PAIR_COLUMNS}
            if fault := fault_of({"prompt": "-", **columns}):
                return self._malformed(others["run"], fault, "column")
            return self._malformed(others["run"], fault_of(row, "cpo") or str(error))
        note = self._placed(claim, given)
        if isinstance(note, str):
            return note
        self._note_kinds(row)
        self.sources[claim.source] += 1
        return KeptRow(text, note)

    def _columns(self, claim: Claim, columns: Row) -> Row:
        sides = {"chosen": claim.chosen, "rejected": claim.rejected}
        row: Row = {
            name: [{"role": "assistant", "content": self._spool.get(side.place)}] for name, side in sides.items()
        }
        row["source"] = claim.source
        if claim.scored:
            row |= {f"{name}_score": side.score for name, side in sides.items()}
            row["margin"] = claim.margin
        return row | {name: value for name, value in columns.items() if name != "rating"}

    def _placed(self, claim: Claim, given: Row) -> bytes | str:
        """Give a pair its place in the split, and say what later builds must remember of it; or why it has none."""
        key = given["key"]
        first, signature = key not in self._sides, None
        if first:
            self._sides[key], signature = self._side(key, given)
        side = self._sides[key]
        if isinstance(side, str):
            return side
        other = self._spool.get(claim.rejected.base)
        known = [self._groups[digest] for digest in (claim.prompt, key) if digest in self._groups]
        group = self._conversations.join([given["group"], other["group"], *known])
        if group is None or (side is not None and not self._conversations.follow(group, side)):
            return "between sides"
        self.prompts += key not in self._groups
        self._groups[claim.prompt] = self._groups[key] = group
        self._conversations.keep(key, group)
        number = self._conversations.given(key)
        if not first or (number is not None and number < self._remembered):
            return b""
        near = f', "near": "{signature.text()}"' if signature else ""
        links = list(dict.fromkeys([*given["links"], *other["links"]]))
        return f'{{"key": {key}, "links": {links}{near}}}'.encode()

    def _side(self, key: int, given: Row) -> tuple[int | str | None, Signature | None]:
        """The number of the remembered side that a prompt must take, or why it makes no pair; and its signature."""
        side = self._conversations.given(key)
        if self._near is None:
            return side, None
        signature = self._near.sign(given["prompt"][: given["first"]])
        alike = self._near.find(signature)
        if any(label >= 0 for label in alike):
            return "near-duplicate", signature
        self._near.add(signature, len(self._sides))
        return remembered_label(alike[0]) if side is None and alike else side, signature

    def _note_kinds(self, row: Row) -> None:
        for name, value in row.items():
            if value is not None and name not in (*OWN_COLUMNS[:-1], "chosen", "rejected", "source"):
                self.kinds.setdefault(name, set()).add(type(value).__name__)

    def _malformed(self, run: str, fault: str, reason: str = "malformed") -> str:
        self.example = self.example or f"run {run}: {fault}"
        return reason


def _key_of(messages: Sequence[Row]) -> int:
    """Equal for requests in which the same was said and the same tools gave the same, whatever ids the calls had."""
    names: dict[Any, str] = {}

    def plain(identity: Any) -> str:
        return names.setdefault(identity, f"call {len(names)}")

    digests = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "id": plain(call.get("id"))} for call in calls]}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": plain(message["tool_call_id"])}
        digests.append(message_text(message).digest)
    return hash(tuple(digests))
