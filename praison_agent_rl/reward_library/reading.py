"""Reads completions: the text that counts, the answer in it, and what a row of the dataset accepts; it scores nothing.

A completion is a text, a list of messages or a whole tool rollout. The last assistant message counts, not the first.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from praison_agent_rl.errors import RewardError
from praison_agent_rl.run_views import by_assistant as by_assistant
from praison_agent_rl.run_views import messages_of as messages_of
from praison_agent_rl.run_views import text_in as text_in
from praison_agent_rl.text_measures import UNSPACED

from .making import Score, Scores, per_sample

_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|mathbf)\{([^{}]*)\}")
_OPENING = "\"'“”‘’«»*`([{_"
_CLOSING = _OPENING + ".,;:!?)]}"
_RAISED = str.maketrans({raised: f"^{digit}" for digit, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})
_UNSEEN = str.maketrans("", "", "\u00ad\u200b\u200c\u200d\u2060\ufeff")
_QUOTES = str.maketrans("“”„‘’‚«»", '"""\'\'\'""')


class Piece(NamedTuple):
    """The part of a text that gives the answer."""

    text: str
    marked: bool
    """Whether a tag, a box or ``####`` marks it; else it is the whole text."""


def last_text(completion: Any) -> str:
    """The text of the last assistant message; empty where there is none."""
    written = [message for message in messages_of(completion) if by_assistant(message)]
    return text_in(written[-1].get("content")) if written else ""


def each(completions: Sequence[Any], score: Callable[[str], Score]) -> Scores:
    """The score of each completion's text."""
    return [score(last_text(completion)) for completion in completions]


def each_against(completions: Sequence[Any], answer: Any, score: Callable[[str, list[str]], Score]) -> Scores:
    """The score of each completion's text against what its row accepts; None where the row accepts nothing."""
    rows = [accepted(value) for value in per_sample(answer, "answer", len(completions))]
    pairs = zip(completions, rows, strict=True)
    return [score(last_text(completion), right) if right else None for completion, right in pairs]


def accepted(value: Any) -> list[str]:
    """The accepted answers in a row's ground truth: a text, a number or a list of them; nothing usable gives none."""
    values = value if isinstance(value, list | tuple) else [value]
    return [text for text in map(_as_text, values) if text.strip()]


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) < 10**300 else ""
    if isinstance(value, float):
        return "" if not math.isfinite(value) else str(int(value)) if value.is_integer() else repr(value)
    return value if isinstance(value, str) else ""


def after_thinking(text: str) -> str:
    """A text without its reasoning: what follows the last ``</think>``; nothing if the reasoning does not end."""
    _, closed, after = text.rpartition("</think>")
    return after if closed else text.partition("<think>")[0]


def final_answer(text: str, tag: str = "answer") -> Piece:
    r"""What stands in the last ``<answer>``, else in the last ``\boxed{}``, else after ``####``, else the whole text.

    >>> final_answer("<think>2+2?</think>It is <answer>4</answer>")
    Piece(text='4', marked=True)
    """
    text = after_thinking(text)
    opened = list(_opening(tag).finditer(text))
    if opened:
        text = re.split(rf"</{re.escape(tag)}\s*>", text[opened[-1].end() :], maxsplit=1, flags=re.IGNORECASE)[0]
    if (boxed := _boxed(text)) is not None:
        return Piece(boxed.strip(), True)
    last_line = text.rstrip().rpartition("\n")[2]
    _, marked, after = last_line.rpartition("####")
    if marked and after.strip():
        return Piece(after.strip(), True)
    return Piece(text.strip(), bool(opened))


@lru_cache(maxsize=64)
def _opening(tag: str) -> re.Pattern[str]:
    if not re.fullmatch(r"[\w.:-]+", tag):
        raise RewardError(f"tag must be the name of a tag, for example answer; not {tag!r}")
    return re.compile(rf"<{re.escape(tag)}(?:\s[^<>]*)?>", re.IGNORECASE)


def _boxed(text: str) -> str | None:
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    inside = text.index("{", start) + 1
    depth = 1
    for place in re.finditer(r"[{}]", text[inside:]):
        depth += 1 if place.group() == "{" else -1
        if depth == 0:
            return text[inside : inside + place.start()]
    return text[inside:]  # cut off


def plain(text: str, *, case: bool = False) -> str:
    """A text as answers are compared: letter case, outer marks, kinds of quotes and blanks do not count.

    >>> plain("  **Paris**. ") == plain("paris")
    True
    """
    text = _LATEX_TEXT.sub(r"\1", text).translate(_RAISED).translate(_UNSEEN)  # NFKC would make 10² the number 102
    text = unicodedata.normalize("NFKC", text).translate(_QUOTES)
    text = " ".join(text.split())
    stripped = text.rstrip(_CLOSING + " ").lstrip(_OPENING + " ")
    text = stripped or text
    return text if case else text.casefold().replace("i\u0307", "i")  # the Turkish İ


def occurs(phrase: str, text: str) -> bool:
    """Whether ``phrase`` stands in ``text`` as whole words; both as `plain` gives them.

    The number 5 does not stand in 2.5, 1,500 or -5, nor C in C++ and C#. Scripts without spaces between words have no
    whole words.
    """
    if not phrase or phrase not in text:
        return False
    return any(_bounded(text, found.start(), found.end()) for found in re.finditer(re.escape(phrase), text))


def _bounded(text: str, start: int, end: int) -> bool:
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    if after == "++" or (after[:1] == "#" and text[end - 1].isalpha()):
        return False
    return not (_joined(before[-1:], text[start]) or _joined(text[end - 1], after[:1]) or _in_number(text, start, end))


def _joined(left: str, right: str) -> bool:
    """Whether a letter or digit goes on over the border."""
    return all(re.fullmatch(rf"(?![{UNSPACED}])\w", letter) for letter in (left, right))


def _in_number(text: str, start: int, end: int) -> bool:
    """Whether digits at the edges belong to a longer number: 2.5, 1,500, -5."""
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    if text[start].isdigit() and (re.search(r"\d[.,]$", before) or re.search(r"(?<![\w)])[-−]$", before)):
        return True
    return text[end - 1].isdigit() and re.match(r"[.,]\d", after) is not None
