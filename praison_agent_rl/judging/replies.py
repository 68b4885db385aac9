"""Read the scores out of a judge's reply: leniently in form, never in value. What is not clearly a score is a fault."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_LONGEST = 200_000
"""Characters of a reply that are read."""
_LONGEST_PYTHON = 20_000
"""Characters of what is no JSON; Python's own reader has ended processes on deeply nested text."""
_MOST_VALUES = 100
_NUMBER = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*(?:/\s*(\d+(?:\.\d+)?)\s*)?")
_OPENING = re.compile(r"[{\[]")
_OUR_KEYS = {"reason", "reasoning", "explanation", "scores", "score"}
"""Of the JSON that is asked for; a criterion may be called so too, and is then looked for inside ``scores`` alone."""
_IDS = ("id", "name", "criterion", "answer")
_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=lambda pairs: _without_conflict(pairs))


class Fault(NamedTuple):
    """Why there is no score."""

    kind: str
    text: str


class Reading(NamedTuple):
    """What one reply says of what was asked for; each wanted name is in ``scores`` or in ``faults``."""

    scores: dict[str, float]
    reasons: dict[str, str]
    faults: dict[str, Fault]
    reason: str = ""


def plain_name(name: object) -> str:
    """A name as models repeat it: without case and punctuation.

    >>> plain_name("Is_Polite!")
    'is polite'
    """
    return re.sub(r"[\W_]+", " ", str(name)).strip().casefold()


def read_scores(reply: str, wanted: Sequence[str], scale: tuple[float, float]) -> Reading:
    """The score of each ``wanted`` name on ``scale``, whatever stands around the JSON in ``reply``."""
    found = [said for value in _values(_answer_of(reply)) if (said := _said(value, wanted)) is not None]
    if not found:
        return _nothing(wanted, "no JSON with scores in the reply", reply)
    readings = [_reading(entries, reason, wanted, scale) for entries, reason in found]
    if any((other.scores, other.faults) != (readings[0].scores, readings[0].faults) for other in readings[1:]):
        return _nothing(wanted, f"{len(readings)} answers in one reply that differ", reply)
    return readings[0]


def _nothing(wanted: Sequence[str], why: str, reply: str) -> Reading:
    shown = reply if len(reply) <= 160 else f"{reply[:120]}...{reply[-37:]}"
    return Reading({}, {}, dict.fromkeys(wanted, Fault("unparsed", f"{why}: {shown!r}")))


def _answer_of(reply: str) -> str:
    """The reply without the thinking before it; nothing where the thinking did not end."""
    text = reply[:_LONGEST].lstrip()
    if text[:1] in ("{", "[", "`"):  # not thinking, though a reason in it may quote an answer's tags
        return text
    thinking, end, answer = text.partition("</think>")
    return answer if end else "" if thinking.startswith("<think>") else thinking


def _values(text: str) -> Iterator[Any]:
    """The outermost JSON objects and lists in a text; what lies within a broken one is not taken for an answer."""
    opened = _OPENING.search(text)
    for _ in range(_MOST_VALUES):
        if opened is None:
            return
        value, end = _value_at(text, opened.start())
        yield value
        opened = None if end is None else _OPENING.search(text, end)


def _value_at(text: str, start: int) -> tuple[Any, int | None]:
    """The object or list that begins at ``start``, None if it is none, and where it ends, None if nowhere."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        end = _closed_at(text, start)
    try:
        return (None if end is None else _python_value(text[start:end])), end
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None, end


def _closed_at(text: str, start: int) -> int | None:
    """The place after the bracket that closes the one at ``start``; brackets in quotes do not count."""
    depth, quote, escaped = 0, "", False
    for at in range(start, len(text)):
        sign = text[at]
        if quote:
            quote, escaped = ("" if sign == quote and not escaped else quote), sign == "\\" and not escaped
        elif sign in "\"'":
            quote, escaped = sign, False
        elif sign in "{[":
            depth += 1
        elif sign in "}]":
            depth -= 1
            if not depth:
                return at + 1
    return None


def _python_value(text: str) -> Any:
    """JSON as Python would write it: single quotes, a comma too many, None."""
    if len(text) > _LONGEST_PYTHON:
        raise ValueError("too long")
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and len({ast.dump(key) for key in node.keys if key}) < len(node.keys):
            raise ValueError("a key stands twice")
    return ast.literal_eval(tree)


def _without_conflict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made and made[key] != value:
            raise ValueError(f"{key!r} stands twice, with different values")
        made[key] = value
    return made


def _said(value: Any, wanted: Sequence[str]) -> tuple[list[tuple[str, Any]], str] | None:
    """Pairs of name and what is said of it, and the reason for all; None for a value that is no answer to us."""
    if isinstance(value, list):
        return (listed, "") if (listed := _listed(value)) else None
    if not isinstance(value, dict):
        return None
    keys = {plain_name(key): part for key, part in value.items()}
    reason = _text(keys.get("reason", keys.get("reasoning", keys.get("explanation"))))
    inner = keys.get("scores")
    names = {plain_name(name) for name in wanted}
    beside = [(key, part) for key, part in keys.items() if key in names - _OUR_KEYS]  # it may contradict what is inside
    if isinstance(inner, list):
        return [*_listed(inner), *beside], reason
    if isinstance(inner, dict):
        return [*((plain_name(key), part) for key, part in inner.items()), *beside], reason
    if names & keys.keys():
        return [(plain_name(key), part) for key, part in value.items()], reason
    return ([(plain_name(wanted[0]), value)], reason) if len(wanted) == 1 and "score" in keys else None


def _listed(entries: list[Any]) -> list[tuple[str, Any]]:
    named = []
    for entry in entries:
        keys = {plain_name(key): part for key, part in entry.items()} if isinstance(entry, dict) else {}
        named += [(plain_name(keys[key]), entry) for key in _IDS if key in keys][:1]
    return named


def _reading(said: list[tuple[str, Any]], reason: str, wanted: Sequence[str], scale: tuple[float, float]) -> Reading:
    reading = Reading({}, {}, {}, reason)
    for name in wanted:
        plain = plain_name(name)
        parts = [part for key, part in said if key == plain] or [part for key, part in said if key == f"answer {plain}"]
        values = {repr(_score_in(part)): _score_in(part) for part in parts}
        if why := next(filter(None, map(_reason_in, parts)), ""):
            reading.reasons[name] = why
        if not values:
            reading.faults[name] = Fault("incomplete", f"no score for {name!r} in the reply")
        elif len(values) > 1:
            reading.faults[name] = Fault("unparsed", f"{len(values)} different scores for {name!r} in one reply")
        else:
            score = _number(next(iter(values.values())), name, scale)
            if isinstance(score, Fault):
                reading.faults[name] = score
            else:
                reading.scores[name] = score
    return reading


def _score_in(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return next((value for key, value in part.items() if plain_name(key) == "score"), None)


def _reason_in(part: Any) -> str:
    if not isinstance(part, Mapping):
        return ""
    return next((_text(value) for key, value in part.items() if plain_name(key) in ("reason", "reasoning")), "")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(raw: Any, name: str, scale: tuple[float, float]) -> float | Fault:
    """``raw`` as a number of the scale; "8/10" is one where the scale ends at 10."""
    low, high = scale
    if raw is None:
        return Fault("incomplete", f"no score for {name!r} in the reply")
    if isinstance(raw, str) and (match := _NUMBER.fullmatch(raw)) and float(match[2] or high) == high:
        raw = float(match[1])
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return Fault("unparsed", f"the score of {name!r} is {str(raw)[:60]!r}, no number from {low:g} to {high:g}")
    if not low <= raw <= high:  # nor does any comparison hold for NaN
        return Fault("out of range", f"the score of {name!r} is {str(raw)[:30]}, not from {low:g} to {high:g}")
    return float(raw)
