"""Rewards for the right answer in words: exact, contained or nearly the same.

The answer is read where the text marks it (`reading.final_answer`), never in the reasoning of ``<think>``. The column
``answer`` holds a text, a number or a list of accepted answers; where it holds nothing the sample has no score (None).
"""

from collections.abc import Sequence
from typing import Any

from .making import Scores, a_flag, a_number, library_reward, missing_extra, one_of
from .reading import each_against, final_answer, occurs, plain

_LONGEST = 20_000
"""Letters of a text that `fuzzy` compares; its time grows with both lengths."""


@library_reward("answer")
def exact(completions: Sequence[Any], answer: Any, *, case: bool = False, tag: str = "answer") -> Scores:
    r"""1.0 if the answer is one of the accepted ones, else 0.0.

    Outer marks and kinds of quotes do not count, letter case only with ``case: true``. The answer is what stands in the
    last ``<tag>``, else in ``\boxed{}``, else after ``####``, else the whole text after the reasoning.

    >>> exact(["Paris.", "It is Paris", "<think>Rome?</think><answer>paris</answer>"], ["Paris", "Paris", ["Paris"]])
    [1.0, 0.0, 1.0]
    """
    a_flag(case, "case")

    def score(text: str, right: list[str]) -> float:
        given = plain(final_answer(text, tag).text, case=case)
        return float(any(given == plain(final_answer(one).text, case=case) for one in right))

    return each_against(completions, answer, score)


@library_reward("answer")
def contains(
    completions: Sequence[Any], answer: Any, *, case: bool = False, every: bool = False, tag: str = "answer"
) -> Scores:
    """1.0 if an accepted answer stands in the text as whole words, else 0.0.

    With ``every: true`` the share of the accepted answers that stand there, from 0.0 to 1.0. "It is not Paris" and a
    list of guesses are paid too: use it with a reward on length.

    >>> contains(["It's PARIS!", "Comparison", "2.5"], ["Paris", "Paris", 5])
    [1.0, 0.0, 0.0]
    """
    a_flag(case, "case")
    a_flag(every, "every")

    def score(text: str, right: list[str]) -> float:
        given = plain(final_answer(text, tag).text, case=case)
        found = [occurs(plain(final_answer(one).text, case=case), given) for one in right]
        return sum(found) / len(found) if every else float(any(found))

    return each_against(completions, answer, score)


@library_reward("answer")
def fuzzy(
    completions: Sequence[Any], answer: Any, *, method: str = "ratio", least: float = 0.0, tag: str = "answer"
) -> Scores:
    """How like the closest accepted answer the text is, from 0.0 to 1.0, by rapidfuzz; below ``least`` 0.0.

    ``method``: ``ratio`` (letters), ``partial_ratio`` (best matching part), ``token_sort_ratio`` (words in any order)
    or ``token_set_ratio`` (words in any order, each once). The second and the last also pay a list of guesses.

    >>> fuzzy(["Pariss", "Berlin Mitte", "", "Rome"], ["Paris", "Berlin", "Paris", None], least=0.7)
    [0.9090909090909091, 0.0, 0.0, None]
    """
    try:
        from rapidfuzz import fuzz
    except ImportError as error:
        raise missing_extra("fuzzy", error.name) from error
    one_of(method, "method", ("ratio", "partial_ratio", "token_sort_ratio", "token_set_ratio"))
    a_number(least, "least", least=0, most=1)
    likeness = getattr(fuzz, method)
    # what finds a part would pay a single letter, or the word "the", in full: a shorter answer is compared as a whole
    whole = {"partial_ratio": fuzz.ratio, "token_set_ratio": fuzz.token_sort_ratio}.get(method, likeness)

    def score(text: str, right: list[str]) -> float:
        given = plain(final_answer(text, tag).text)[:_LONGEST]
        wanted = [plain(final_answer(one).text)[:_LONGEST] for one in right]
        best = max((likeness if len(given) >= len(one) else whole)(given, one) / 100 for one in wanted)
        return float(best) if given and best >= least else 0.0

    return each_against(completions, answer, score)
