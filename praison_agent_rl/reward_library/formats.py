"""Rewards for the form of an answer: a pattern, tags, reasoning before the answer."""

import bisect
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from praison_agent_rl.errors import RewardError

from .making import Scores, a_flag, a_number, a_text, library_reward, missing_extra, one_of, texts_of
from .patterns import MODES, compiled, found_in
from .reading import after_thinking, each, last_text


@library_reward()
def regex(
    completions: Sequence[Any],
    *,
    pattern: str = "",
    mode: str = "search",
    ignore_case: bool = False,
    right: float = 1.0,
    wrong: float = 0.0,
    seconds: float = 1.0,
) -> Scores:
    r"""``right`` (1.0) where the text has ``pattern``, else ``wrong`` (0.0); None if a search takes over ``seconds``.

    ``mode``: ``search`` (anywhere), ``match`` (from the start) or ``fullmatch``. A dot is a line break too.

    >>> regex(["Total: 12 EUR", "no idea"], pattern=r"Total: \d+")
    [1.0, 0.0]
    """
    a_text(pattern, "pattern", r"'Total: \d+'")
    one_of(mode, "mode", MODES)
    a_flag(ignore_case, "ignore_case")
    for name, value in {"right": right, "wrong": wrong}.items():
        a_number(value, name)
    a_number(seconds, "seconds", least=0.001)
    wanted = compiled(pattern, "pattern", ignore_case=ignore_case)
    paid = {True: right, False: wrong, None: None}
    return each(completions, lambda text: paid[found_in(wanted, text, mode=mode, seconds=seconds)])


@library_reward()
def tags(completions: Sequence[Any], *, names: Sequence[str] = ("reasoning", "answer")) -> Scores:
    """The share of the opening and closing tags that stand once and in order, from 0.0 to 1.0.

    Two names have four tags, each worth 0.25. A repeated tag is worth nothing, nor is the closing tag of an empty pair;
    of tags in a wrong order those count that are in order. What stands in ``<think>`` does not count, unless ``think``
    is one of the names.

    >>> tags(["<reasoning>2+2</reasoning><answer>4</answer>", "<answer>4</answer>", "<answer>" * 9, "four"])
    [1.0, 0.5, 0.0, 0.0]
    """
    wanted = _tag_names(names)
    whole = "think" in [name.casefold() for name in wanted]
    return each(
        completions,
        lambda text: _in_order(text if whole else after_thinking(text), wanted) / (2 * len(wanted)),
    )


@library_reward()
def think_answer(
    completions: Sequence[Any],
    *,
    thinking: str = "think",
    answering: str = "answer",
    right: float = 1.0,
    wrong: float = 0.0,
) -> Scores:
    """``right`` (1.0) for reasoning in one tag and then the answer in another, with nothing around, else ``wrong``.

    Each stands once and has something in it. With ``answering: ""`` the answer is all that follows the reasoning.

    >>> think_answer(["<think>2+2</think><answer>4</answer>", "<think></think><answer>4</answer>"], wrong=-1.0)
    [1.0, -1.0]
    """
    names = _tag_names([name for name in (thinking, answering) if name] if thinking else [])
    for name, value in {"right": right, "wrong": wrong}.items():
        a_number(value, name)
    return each(completions, lambda text: right if _thinks_then_answers(text.strip(), names) else wrong)


@library_reward()
def think_format(completions: Sequence[Any]) -> Scores:
    """1.0 if the text begins with one ``<think>`` that ends, else 0.0: ``trl.rewards.think_format_reward``.

    It does not look whether anything stands in the reasoning or after it; `think_answer` does.

    >>> think_format(["<think>2+2</think>4", "<think>2+2", "4"])
    [1.0, 0.0, 0.0]
    """
    try:
        from trl.rewards import think_format_reward
    except ImportError as error:
        raise missing_extra("think_format", error.name, extra="train") from error
    return list(think_format_reward([[{"content": last_text(completion)}] for completion in completions]))


def _tag_names(names: Any) -> list[str]:
    given = texts_of(names, "names of tags", "[reasoning, answer]")
    if odd := [name for name in given if not re.fullmatch(r"[\w.:-]+", name)]:
        raise RewardError(f"a tag's name has letters, digits, '-', '_', '.' and ':' only, not {odd[0]!r}")
    if len({name.casefold() for name in given}) < len(given):
        raise RewardError(f"names of tags must differ: {given}")
    return given


def _pieces(text: str, name: str) -> tuple[list[re.Match[str]], list[re.Match[str]]]:
    opening = re.finditer(rf"<{re.escape(name)}(?:\s[^<>]*)?>", text, re.IGNORECASE)
    return list(opening), list(re.finditer(rf"</{re.escape(name)}\s*>", text, re.IGNORECASE))


def _in_order(text: str, names: Sequence[str]) -> int:
    """How many tags stand once and follow each other as listed: the longest such run."""
    places = []
    for name in names:
        opening, closing = _pieces(text, name)
        empty = len(opening) == len(closing) == 1 and not text[opening[0].end() : closing[0].start()].strip()
        backwards = len(opening) == len(closing) == 1 and closing[0].start() < opening[0].start()
        places += [found[0].start() for found in (opening, closing) if len(found) == 1][
            : 1 if empty and not backwards else 2
        ]
    ends: list[int] = []  # patience sorting: ends[k] is the smallest last place of a run of k + 1
    for place in places:
        at = bisect.bisect_left(ends, place)
        ends[at : at + 1] = [place]
    return len(ends)


def _thinks_then_answers(text: str, names: Sequence[str]) -> bool:
    cuts = []
    for name in names:
        opening, closing = _pieces(text, name)
        if len(opening) != 1 or len(closing) != 1:
            return False
        cuts += [opening[0].span(), closing[0].span()]
    borders = [0, *(place for cut in cuts for place in cut), len(text)]
    if any(left > right for left, right in pairwise(borders)):
        return False
    # before, reasoning, between, answer, after; without a tag for the answer it is what comes after
    parts = [bool(text[start:end].strip()) for start, end in zip(borders[::2], borders[1::2], strict=True)]
    return parts == ([False, True, False, True, False] if len(names) == 2 else [False, True, True])
