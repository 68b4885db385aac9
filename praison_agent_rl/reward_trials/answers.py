"""The answers that rewards are tried on: given, in a dataset, or made up where there are only prompts."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from praison_agent_rl.data import Row, as_messages, prompt_key
from praison_agent_rl.data_checks import check_rows
from praison_agent_rl.errors import DataError
from praison_agent_rl.records import Run
from praison_agent_rl.reward_trials.calls import Sample
from praison_agent_rl.rewards import Text, made_up_answers

_ANSWERED = ("completion", "completions")
_HINTS = 3


@dataclass(frozen=True)
class Answers:
    """Answers to try rewards on, and which of them are known to be better than others."""

    samples: list[Sample]
    pairs: list[tuple[int, int]]
    """Places of a better and a worse answer to the same prompt."""
    source: str
    """In words."""
    made_up: bool = False
    notes: list[str] = field(default_factory=list)


class Limits(NamedTuple):
    """How many answers rewards are tried on."""

    prompts: int = 16
    each: int = 4
    """To one prompt."""


@dataclass
class Group:
    """What is known of one prompt."""

    prompt: Text
    columns: Row
    answers: list[tuple[Text, float | None]] = field(default_factory=list)
    """With their ratings."""
    pairs: list[tuple[Text, Text]] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)
    """Recorded ones by their answer, as ``str`` gives it."""

    @property
    def telling(self) -> bool:
        """Whether more is learned from it than from one answer."""
        return bool(self.pairs) or len(self.answers) > 1 or any(rating is not None for _, rating in self.answers)


def answers_of_rows(rows: Sequence[Row], source: str, limits: Limits) -> Answers:
    """Those that the rows hold as ``completion``, ``completions``, or ``chosen`` and ``rejected``; else made up.

    Raises:
        DataError: there are no rows, or some have no prompt that could be asked.
    """
    check_rows([{k: v for k, v in row.items() if k not in _ANSWERED} for row in rows], "grpo", source)
    groups: dict[str, Group] = {}
    for number, row in enumerate(rows, 1):
        group = group_of(groups, row)
        found, pairs = _answers_in(row, f"row {number} of {source}")
        group.answers += found
        group.pairs += pairs
    if not any(group.answers for group in groups.values()):
        return _invented(list(groups.values()), source, limits)
    answered = [group for group in groups.values() if group.answers]
    notes = []
    if len(answered) < len(groups):
        bare = len(groups) - len(answered)
        notes.append(f"{bare} of {len(groups)} prompts of {source} have no answer and are left out")
    return choose(answered, f"answers of {source}", limits, notes)


def invented_answers(prompts: Sequence[Text], columns: Mapping[str, Sequence[Any]], limits: Limits) -> Answers:
    """Made-up answers to a few prompts."""
    rows = [{name: values[place] for name, values in columns.items()} for place in range(len(prompts))]
    groups = [Group(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
    return _invented(groups, "the dataset", limits)


def rows_with(answers: Sequence[Any], rows: Sequence[Row] | None) -> list[Row]:
    """Given ``answers`` as rows: they are rows themselves, or one entry (an answer or several) to each of ``rows``.

    Raises:
        DataError: they are neither.
    """
    if isinstance(answers, str | Mapping) or not isinstance(answers, Iterable):
        raise DataError(f"answers={answers!r:.80} must be a list: of rows with prompt and completion, or of answers")
    given = list(answers)
    if given and all(isinstance(item, Mapping) and "prompt" in item for item in given):
        if lacking := [n for n, item in enumerate(given, 1) if not {*_ANSWERED, "chosen"} & item.keys()]:
            raise DataError(f"row {lacking[0]} of answers has no 'completion' (one answer) or 'completions' (a list)")
        return [dict(item) for item in given]
    if rows is None:
        raise DataError("answers need their prompts: give rows {'prompt': ..., 'completion': ...}, or data= too")
    if len(given) != len(rows):
        raise DataError(f"{len(given)} answers were given for {len(rows)} prompts; give one entry for each prompt")
    many = [item if isinstance(item, list | tuple) and not _is_messages(item) else [item] for item in given]
    return [{**row, "completions": list(entry)} for row, entry in zip(rows, many, strict=True)]


def group_of(groups: dict[str, Group], row: Row) -> Group:
    """The group of a row's prompt; an agent's instructions may have changed between two times that it was asked."""
    prompt = as_messages(row["prompt"])
    key = prompt_key({"prompt": [m for m in prompt if m.get("role") not in ("system", "developer")] or prompt})
    columns = {name: value for name, value in row.items() if name != "prompt" and name not in _ANSWERED}
    group = groups.setdefault(key, Group(prompt, columns))
    group.columns = {**columns, **{name: value for name, value in group.columns.items() if value is not None}}
    return group


def _answers_in(row: Row, where: str) -> tuple[list[tuple[Text, float | None]], list[tuple[Text, Text]]]:
    rating = row.get("rating")
    known = float(rating) if isinstance(rating, numbers.Real) and not isinstance(rating, bool) else None
    given = row.get("completions")
    texts = list(given) if isinstance(given, list | tuple) and not _is_messages(given) else []
    texts += [row["completion"]] if row.get("completion") is not None else []
    found = [(text, known if len(texts) == 1 else None) for text in texts]
    pairs = []
    if row.get("chosen") is not None and row.get("rejected") is not None:
        found += [(row["chosen"], None), (row["rejected"], None)]
        pairs = [(row["chosen"], row["rejected"])]
    for text, _ in found:
        if not isinstance(text, str) and not _is_messages(text):
            raise DataError(f"{where} has the answer {text!r:.80}, which is neither text nor a list of messages")
    return found, pairs


def _is_messages(value: Any) -> bool:
    parts = value if isinstance(value, list) else []
    return bool(parts) and all(isinstance(part, Mapping) and "role" in part for part in parts)


def choose(groups: Sequence[Group], source: str, limits: Limits, notes: list[str]) -> Answers:
    """At most so many prompts, those from which most is learned first, and so many answers to each."""
    telling = [group for group in groups if group.telling]
    kept = _evenly(telling, limits.prompts)
    kept += _evenly([group for group in groups if not group.telling], limits.prompts - len(kept))
    samples: list[Sample] = []
    pairs: list[tuple[int, int]] = []
    empty = _no_columns(kept)
    for number, group in enumerate(kept):
        places: dict[str, int] = {}
        for text, rating in _first_answers(group, limits.each):
            if str(text) not in places or rating is not None:
                places[str(text)] = len(samples)
            run = group.runs.get(str(text))
            samples.append(Sample(group.prompt, text, {**empty, **group.columns}, number, rating, run))
        known = [(places.get(str(good)), places.get(str(bad))) for good, bad in group.pairs]
        pairs += [(good, bad) for good, bad in known if good is not None and bad is not None and good != bad]
        pairs += _pairs_by_rating(samples, list(places.values()))
    if len(kept) == len(samples):
        notes.append("each prompt has one answer, so what tells the answers to one prompt apart cannot be known")
    return Answers(samples, list(dict.fromkeys(pairs)), source, notes=notes)


def _first_answers(group: Group, most: int) -> list[tuple[Text, float | None]]:
    """Those of known pairs first, then those with a rating."""
    paired = {str(text) for pair in group.pairs for text in pair}
    ranked = sorted(group.answers, key=lambda answer: (str(answer[0]) not in paired, answer[1] is None))
    return ranked[:most]


def _pairs_by_rating(samples: Sequence[Sample], places: Sequence[int]) -> list[tuple[int, int]]:
    rated = [(place, rating) for place in places if (rating := samples[place].rating) is not None]
    return [(a, b) for a, good in rated for b, bad in rated if good > bad]


def _invented(groups: Sequence[Group], source: str, limits: Limits) -> Answers:
    """Answers that differ in length and markup; where a column tells the right one, that of another row is worse."""
    kept = _evenly(groups, limits.prompts)
    right = [_text_of(group.columns.get("answer")) for group in kept]
    samples: list[Sample] = []
    pairs: list[tuple[int, int]] = []
    empty = _no_columns(kept)
    for number, group in enumerate(kept):
        others = (_text_of(value) for name, value in group.columns.items() if name not in ("answer", "run", "agent"))
        # from half the rows further: always the first row's would favour what likes its length
        others_right = [*right[number + len(right) // 2 :], *right[: number + len(right) // 2]]
        known, wrong = right[number], next((text for text in others_right if text and text != right[number]), None)
        hints = list(dict.fromkeys(text for text in (known, *others) if text))[:_HINTS]
        texts = list(dict.fromkeys([*made_up_answers(hints), *([wrong] if known and wrong else [])]))
        start = len(samples)
        samples += [Sample(group.prompt, text, {**empty, **group.columns}, number) for text in texts]
        if known and wrong and known in texts:
            pairs.append((start + texts.index(known), start + texts.index(wrong)))
    note = (
        f"{source} has no answers, so these were made up: short and long ones, with and without markup, and what the "
        "columns hold; real ones (recorded, or a column 'completion') tell more"
    )
    return Answers(samples, pairs, f"made-up answers to prompts of {source}", made_up=True, notes=[note])


def _text_of(value: Any) -> str | None:
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value) else None


def _no_columns(groups: Sequence[Group]) -> Row:
    """Each column that any prompt has: a reward is given None where a prompt lacks it."""
    return {name: None for group in groups for name in group.columns}


def _evenly(items: Sequence[Group], most: int) -> list[Group]:
    """At most so many of the items, from the first to the last."""
    if most <= 0:
        return []
    if len(items) <= most:
        return list(items)
    last, steps = len(items) - 1, max(most - 1, 1)
    return [items[step * last // steps] for step in range(most)]
