"""What a run came to, in words: the sentence at the top of the page and its colour."""

import math
from typing import Literal

from praison_agent_rl.records import FEWEST_PROMPTS, Comparison, Verdict, VerdictStatus
from praison_agent_rl.report.page import count, figure

Tone = Literal["good", "bad", "open"]

_LEADS: dict[VerdictStatus, str] = {
    "promoted": "The new model is better and passes the gate",
    "not better": "The new model is not shown to be better",
    "worse": "The new model is worse",
    "undecided": "It is not decided whether the new model is better",
    "guard broken": "The new model does not pass the gate, since a guard is broken",
}
_TONES: dict[VerdictStatus, Tone] = {
    "promoted": "good", "not better": "open", "worse": "bad", "undecided": "open", "guard broken": "bad",
}  # fmt: skip


def verdict(comparison: Comparison | None, decided: Verdict | None = None) -> str:
    """The outcome of a run in one sentence; ``decided`` is what the gate said, where it was asked."""
    if comparison is None:
        return "The model was trained; nothing was held out, so nothing was proved."
    numbers = _numbers(comparison)
    if decided is not None and decided.forced and not decided.passed:
        return f"The new model was promoted by force against the verdict {decided.status!r}: {numbers}."
    if decided is not None:
        return f"{_LEADS[decided.status]}: {numbers}."
    if comparison.better:
        return f"The new model is better: {numbers}."
    if comparison.total.high < 0:
        return f"The new model is worse: {numbers}."
    return f"The new model is not shown to be better: {numbers}."


def tone(comparison: Comparison | None, decided: Verdict | None) -> Tone:
    """The colour of the outcome."""
    if decided is not None:
        return "bad" if decided.forced and not decided.passed else _TONES[decided.status]
    if comparison is None or not (comparison.better or comparison.total.high < 0):
        return "open"
    return "good" if comparison.better else "bad"


def badge(comparison: Comparison | None, decided: Verdict | None) -> str:
    """The outcome in a word or two."""
    if decided is not None:
        forced = decided.forced and not decided.passed
        return f"forced · {decided.status}" if forced else decided.status
    if comparison is None:
        return "not measured"
    return {"good": "better", "bad": "worse", "open": "not shown to be better"}[tone(comparison, None)]


def what_is_needed(comparison: Comparison, decided: Verdict | None) -> str | None:
    """How many prompts would settle it, where the data was too small to; None where it was not."""
    if comparison.better or comparison.total.high < 0 or (decided is not None and decided.passed):
        return None
    if comparison.prompts < FEWEST_PROMPTS:
        return f"With fewer than {FEWEST_PROMPTS} prompts nothing is called better; compared: {comparison.prompts}."
    if comparison.needed is None or comparison.needed <= comparison.prompts or not comparison.total.difference > 0:
        return None
    return (
        f"To show a difference of the size seen here ({figure(comparison.total.difference, sign=True)}), about "
        f"{count(comparison.needed, 'held-out prompt')} are needed; compared: {comparison.prompts:,}."
    )


def _numbers(comparison: Comparison) -> str:
    total = comparison.total
    if comparison.prompts == 0:
        return "no held-out prompt has a score of both models"
    if not math.isfinite(total.difference):
        return f"the mean reward on {count(comparison.prompts, 'held-out prompt')} is not a number"
    return (
        f"mean reward {figure(total.base)} → {figure(total.new)} on {count(comparison.prompts, 'held-out prompt')} "
        f"(difference {figure(total.difference, sign=True)}, 95 % interval {figure(total.low, sign=True)} to "
        f"{figure(total.high, sign=True)})"
    )
