"""Rewards on how long an answer is: in words, characters or tokens."""

from collections.abc import Sequence
from typing import Any

from praison_agent_rl.errors import RewardError

from .making import Scores, a_count, a_number, library_reward, missing_extra, one_of, per_sample
from .reading import last_text

_UNITS = ("words", "characters", "tokens")


@library_reward("completion_ids")
def length_band(
    completions: Sequence[Any],
    completion_ids: Any = None,
    *,
    min: int = 0,
    max: int | None = None,
    unit: str = "words",
    fall: float | None = None,
) -> Scores:
    """1.0 from ``min`` to ``max`` words, falling in a straight line to 0.0 outside.

    It is 0.0 at ``fall`` words outside the band; without ``fall`` at no words and at twice ``max``. ``unit`` is
    ``words``, ``characters`` or ``tokens`` (all that was generated in a tool rollout).

    >>> length_band(["one two", "one", "one two three four five", ""], min=2, max=4)
    [1.0, 0.5, 0.75, 0.0]
    """
    a_count(min, "min")
    if max is not None:
        a_count(max, "max")
        if max < min:
            raise RewardError(f"max must be at least min ({min}), not {max}")
    if fall is not None:
        a_number(fall, "fall", least=0)
    below, above = (min, max) if fall is None else (fall, fall)

    def score(n: int) -> float:
        if n < min:
            return _falling(min - n, below)
        return _falling(n - max, above) if max is not None and n > max else 1.0

    return [score(n) for n in _lengths(completions, completion_ids, unit)]


@library_reward("completion_ids")
def length_penalty(
    completions: Sequence[Any], completion_ids: Any = None, *, limit: float = 20, unit: str = "words"
) -> Scores:
    """1.0 for no words, falling in a straight line to 0.0 at ``limit`` words: max(0, 1 - words / limit).

    The form of praisonai-train's documentation. It pays silence best: use it with a reward for the answer.

    >>> length_penalty(["one two three four five", "", "word " * 30])
    [0.75, 1.0, 0.0]
    """
    a_number(limit, "limit", least=0)
    if not limit:
        raise RewardError("limit must be more than 0, not 0")
    return [max(0.0, 1.0 - n / limit) for n in _lengths(completions, completion_ids, unit)]


@library_reward("completion_ids")
def soft_overlong(completions: Sequence[Any], completion_ids: Any, *, limit: int = 0, margin: int = 0) -> Scores:
    """0.0 up to ``limit`` - ``margin`` tokens, falling to -1.0 at ``limit`` and beyond: DAPO's soft punishment.

    Equation 13 of arXiv:2503.14476, by ``trl.rewards.get_soft_overlong_punishment``.

    >>> soft_overlong(["", "", ""], [[1] * 80, [1] * 90, [1] * 101], limit=100, margin=20)
    [0.0, -0.5, -1.0]
    """
    a_count(limit, "limit", least=1)
    a_count(margin, "margin")
    if margin > limit:
        raise RewardError(f"margin must be at most limit ({limit}), not {margin}")
    try:
        from trl.rewards import get_soft_overlong_punishment
    except ImportError as error:
        raise missing_extra("soft_overlong", error.name, extra="train") from error
    _lengths(completions, completion_ids, "tokens")  # says what is wrong with them
    return list(get_soft_overlong_punishment(limit, margin)(completion_ids=completion_ids))


def _falling(outside: float, until: float | None) -> float:
    return max(0.0, 1.0 - outside / until) if until else 0.0


def _lengths(completions: Sequence[Any], completion_ids: Any, unit: str) -> list[int]:
    one_of(unit, "unit", _UNITS)
    if unit == "tokens":
        ids = per_sample(completion_ids, "completion_ids", len(completions))
        if any(one is None for one in ids):
            raise RewardError("tokens can be counted where completion_ids are given (training); use unit: words")
        return [len(one) for one in ids]
    texts = map(last_text, completions)
    return [len(text.split()) if unit == "words" else len(text) for text in texts]
