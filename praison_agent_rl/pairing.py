"""Put two models' answers to the same prompts side by side, and measure by how much a number differs between them."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from praison_agent_rl.intervals import CONFIDENCE, numpy, paired_interval
from praison_agent_rl.records import FEWEST_PROMPTS, Answer, Interval

if TYPE_CHECKING:
    import numpy as np

Value = Callable[[Answer], float | None]
"""A number that an answer has; None where it has none, as one that failed has no score."""


def by_prompt(answers: Sequence[Answer], value: Value) -> dict[int, float]:
    """Each prompt's mean over the answers that have the number."""
    found: dict[int, list[float]] = {}
    for answer in answers:
        number = value(answer)
        if number is not None:
            found.setdefault(answer.prompt, []).append(number)
    return {prompt: _mean(numbers) for prompt, numbers in found.items()}


def _mean(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return mean if math.isfinite(mean) else sum(number / len(numbers) for number in numbers)  # a sum beyond 1.8e308


def paired(base: dict[int, float], new: dict[int, float]) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Both sides of the prompts that both have, in one order."""
    both = sorted(base.keys() & new.keys())
    np = numpy()
    return np.array([base[p] for p in both], dtype=float), np.array([new[p] for p in both], dtype=float)


class Change(NamedTuple):
    """How a number differs between both sides."""

    interval: Interval
    prompts: int
    """Prompts that have it on both sides."""

    @property
    def rose(self) -> bool:
        """Whether it is higher, on enough prompts to mean it."""
        return self.prompts >= FEWEST_PROMPTS and self.interval.low > 0

    @property
    def fell(self) -> bool:
        """Whether it is lower, on enough prompts to mean it."""
        return self.prompts >= FEWEST_PROMPTS and self.interval.high < 0


def change_of(
    base: Sequence[Answer], new: Sequence[Answer], value: Value, *, seed: int = 0, confidence: float = CONFIDENCE
) -> Change:
    """Mean of ``value`` over prompts on both sides, and the interval of its difference."""
    sides = paired(by_prompt(base, value), by_prompt(new, value))
    return Change(paired_interval(*sides, seed=seed, confidence=confidence), len(sides[0]))


def total_of(answer: Answer) -> float | None:
    """The weighted sum of an answer's rewards."""
    return None if answer.error is not None else answer.total


def reward_of(name: str) -> Value:
    """What the reward called ``name`` says of an answer."""
    return lambda answer: None if answer.error is not None else answer.rewards.get(name)


def judged_of(name: str) -> Value:
    """What the reward called ``name`` says of an answer, one that was not trained on."""
    return lambda answer: None if answer.error is not None else answer.judged.get(name)


def missing_of(value: Value) -> Value:
    """1 for an answer that did not fail and has no number, or one that is not finite, and 0 for one that has it."""

    def missing(answer: Answer) -> float | None:
        if answer.error is not None:
            return None
        number = value(answer)
        return float(number is None or not math.isfinite(number))

    return missing


def names_of(answers: Sequence[Answer], kind: Literal["rewards", "judged"]) -> list[str]:
    """Names of the rewards; an answer that failed may lack them, so they are collected from all."""
    return list(dict.fromkeys(name for answer in answers for name in getattr(answer, kind)))


def values_of(answers: Sequence[Answer]) -> dict[str, Value]:
    """By name, what each reward says of an answer; one that was trained on comes before a judge of the same name."""
    trained = {name: reward_of(name) for name in names_of(answers, "rewards")}
    return {**{name: judged_of(name) for name in names_of(answers, "judged")}, **trained}
