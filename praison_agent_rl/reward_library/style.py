"""Rewards for how an answer is written: without repeating itself, in a language, without some phrases, with sources."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from praison_agent_rl import text_measures
from praison_agent_rl.errors import RewardError

from .making import (
    Scores,
    a_count,
    a_flag,
    a_number,
    library_reward,
    missing_extra,
    one_of,
    per_sample,
    texts_of,
)
from .patterns import compiled, found_in
from .reading import after_thinking, each, last_text, occurs, plain

_FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_URL = re.compile(r"(?:https?://|www\.)[^\s<>\"'`{}|\\^\[\]]+")
_CITATIONS = {
    "brackets": re.compile(r"(?<![\w)\]])\[(\d{1,3}(?:\s*[,;–-]\s*\d{1,3})*)\](?!\()|【(\d{1,3})[^】]{0,40}】"),
    "author_year": re.compile(
        r"\((?:see |e\.g\.,? |cf\. )?([A-ZÀ-ÞΑ-ΩА-Я][^()\d]{1,80}?,?\s(?:1[5-9]|20)\d\d[a-z]?(?:;[^()]{2,200})?)\)"
    ),
}
_LETTERS = 20
"""Letters of a text below which its language cannot be told."""
_LONGEST = 20_000
"""Letters of a text by which its language is told."""


@library_reward()
def repetition(completions: Sequence[Any], *, n: int = 4) -> Scores:
    """1.0 less the share of runs of ``n`` words that stood in the text before: 1.0 never repeats itself.

    Words and marks count; texts shorter than ``n`` words have 1.0.

    >>> repetition(["a b c d e f", "a b c d a b c d", "go " * 104, ""])
    [1.0, 0.8, 0.00990099009900991, 1.0]
    """
    a_count(n, "n", least=1)
    return each(completions, lambda text: 1.0 - text_measures.repetition(text, n))


@library_reward()
def language(completions: Sequence[Any], *, language: str | Sequence[str] = "en", among: Sequence[str] = ()) -> Scores:
    """1.0 if the text is in ``language`` (or one of several), else 0.0; None if it is too short to tell.

    Codes of ISO 639-1, told by py3langid offline. ``among`` says which languages may occur at all, which makes short
    texts surer. Code and reasoning do not count; texts of fewer than 20 letters have no score, shorter ones in Chinese
    or another script without spaces apart (5).

    >>> language(["The capital of France is Paris.", "Die Hauptstadt von Frankreich ist Paris.", "Paris"])
    [1.0, 0.0, None]
    """
    wanted = texts_of(language, "language", "en")
    possible = [*wanted, *texts_of(among, "among", "[en, de, fr]")] if among else []
    known, tell = _teller(tuple(sorted(set(possible))))
    if unknown := [code for code in [*wanted, *possible] if code not in known]:
        raise RewardError(f"language {unknown[0]!r} is not known; write one of: {', '.join(sorted(known))}")

    def score(text: str) -> float | None:
        text = _FENCED.sub(" ", after_thinking(text))[:_LONGEST]
        letters = sum(4 if re.match(f"[{text_measures.UNSPACED}]", c) else 1 for c in text if c.isalpha())
        return float(tell(text) in wanted) if letters >= _LETTERS else None

    return each(completions, score)


@library_reward()
def script(completions: Sequence[Any], *, script: str | Sequence[str] = "LATIN") -> Scores:
    """The share of letters in ``script`` (or one of several), from 0.0 to 1.0; None for a text without letters.

    ``LATIN``, ``CYRILLIC``, ``CJK``, ``ARABIC`` and so on: the first word of a letter's Unicode name.

    >>> script(["Paß 12", "мир x", "42"], script="LATIN")
    [1.0, 0.25, None]
    """
    wanted = {name.upper() for name in texts_of(script, "script", "LATIN")}

    def score(text: str) -> float | None:
        found = text_measures.scripts(text)
        letters = found.total()
        return sum(found[name] for name in wanted) / letters if letters else None

    return each(completions, score)


@library_reward()
def forbidden(
    completions: Sequence[Any],
    *,
    phrases: str | Sequence[str] = (),
    patterns: bool = False,
    case: bool = False,
    each_costs: float = 1.0,
) -> Scores:
    """1.0 if none of ``phrases`` stands in the text, ``each_costs`` less for each that does, down to 0.0.

    A phrase is found as whole words; with ``patterns: true`` it is a regular expression (None if that takes over a
    second).

    >>> forbidden(["Sure!", "As an AI, I cannot."], phrases=["as an AI", "I cannot"], each_costs=0.5)
    [1.0, 0.0]
    """
    given = texts_of(phrases, "phrases", "[as an AI, I cannot]")
    a_flag(patterns, "patterns")
    a_flag(case, "case")
    a_number(each_costs, "each_costs", least=0)
    wanted = [compiled(one, "phrases", ignore_case=not case) if patterns else plain(one, case=case) for one in given]

    def score(text: str) -> float | None:
        compared = text if patterns else plain(text, case=case)
        hits = [found_in(one, compared) if patterns else occurs(one, compared) for one in wanted]
        return None if None in hits else max(0.0, 1.0 - each_costs * sum(map(bool, hits)))

    return each(completions, score)


@library_reward("sources")
def citations(completions: Sequence[Any], sources: Any = None, *, least: int = 1, style: str = "any") -> Scores:
    """1.0 from ``least`` different citations on, a share of it below; it does not read what is cited.

    ``style``: ``brackets`` ([1], [2, 3]), ``links``, ``author_year`` ((Smith, 2020)) or ``any``. Where the column
    ``sources`` has a row's list of sources, numbers beyond it and links that are not in it do not count.

    >>> citations(["So [1][1].", "See https://a.org", "It is so.", "As said [7]."], [None, None, None, ["a", "b"]])
    [1.0, 1.0, 0.0, 0.0]
    """
    a_count(least, "least", least=1)
    one_of(style, "style", ("any", "links", *_CITATIONS))
    rows = per_sample(sources, "sources", len(completions)) if sources is not None else [None] * len(completions)
    texts = [after_thinking(last_text(completion)) for completion in completions]
    cited = [_cited(text, style, row) for text, row in zip(texts, rows, strict=True)]
    return [min(1.0, len(one) / least) for one in cited]


def _cited(text: str, style: str, sources: Any) -> set[str]:
    text = _FENCED.sub(" ", text)
    found: set[str] = set()
    if style in ("any", "brackets"):
        groups = ["".join(match.groups(default="")) for match in _CITATIONS["brackets"].finditer(text)]
        numbers = {number for group in groups for number in re.findall(r"\d+", group)}
        found |= {n for n in numbers if not isinstance(sources, list | tuple) or 1 <= int(n) <= len(sources)}
    if style in ("any", "links"):
        links = {match.group().rstrip(".,;:!?)*_") for match in _URL.finditer(text)}
        found |= {link for link in links if not isinstance(sources, list | tuple) or _same_link(link, sources)}
    if style in ("any", "author_year"):
        found |= {" ".join(match[1].casefold().split()) for match in _CITATIONS["author_year"].finditer(text)}
    return found


def _same_link(link: str, sources: Sequence[Any]) -> bool:
    return link.rstrip("/") in [str(source).rstrip("/") for source in sources]


@lru_cache(maxsize=16)
def _teller(among: tuple[str, ...]) -> tuple[frozenset[str], Any]:
    """The languages that can be told, and what tells the language of a text."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        advice = "; the reward script needs nothing and tells scripts, not languages"
        raise missing_extra("language", error.name, advice=advice) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    known = frozenset(identifier.labels)
    if among and known.issuperset(among):
        identifier.set_languages(list(among))
    return known, lambda text: identifier.classify(text)[0]
