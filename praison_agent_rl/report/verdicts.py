"""What a run came to, in words: the sentence at the top of the page and its colour."""

import math
from typing import Literal

from praison_agent_rl.records import FEWEST_PROMPTS, Comparison, RewardCard, Verdict, VerdictStatus
from praison_agent_rl.report.page import count, figure

Tone = Literal["good", "bad", "open"]

_COIN = 0.5

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


def verdict(comparison: Comparison | None, decided: Verdict | None = None, *, by_pairs: bool = False) -> str:
    """The outcome of a run in one sentence; ``decided`` is what the gate said, where it was asked.

    ``by_pairs``: the total is the share of held-out pairs whose chosen answer is the likelier one.
    """
    if comparison is None:
        return "The model was trained; nothing was held out, so nothing was proved."
    numbers = _numbers(
        comparison, "share of pairs whose chosen answer is the likelier one" if by_pairs else "mean reward"
    )
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


def card_verdict(card: RewardCard | None) -> str:
    """The same of a reward model."""
    if card is None:
        return "The reward model was trained; no pair was held out, so nothing is known of its worth."
    numbers = (
        f"of {count(card.held_out, 'held-out prompt')} (95 % interval {card.accuracy_low:.0%} to "
        f"{card.accuracy_high:.0%}; a coin is right on 50 %)"
    )
    if not math.isfinite(card.accuracy):
        return "The scores of the reward model are not numbers."
    right = f"right on {card.accuracy:.0%} of the pairs {numbers}"
    if card.accuracy_high < _COIN:
        return f"The reward model is worse than a coin: {right}."
    return (
        f"The reward model is {right}."
        if card.passed
        else f"The reward model is not shown to be better than a coin: {right}."
    )


def card_tone(card: RewardCard | None) -> Tone:
    """The colour of it."""
    if card is None:
        return "open"
    return "good" if card.passed else "bad" if card.accuracy_high < _COIN else "open"


def card_badge(card: RewardCard | None) -> str:
    """It in a word or two."""
    if card is None:
        return "not measured"
    return {"good": "better than a coin", "bad": "worse than a coin", "open": "not shown to be better than a coin"}[
        card_tone(card)
    ]


def _numbers(comparison: Comparison, what: str) -> str:
    total = comparison.total
    if comparison.prompts == 0:
        return "no held-out prompt has a score of both models"
    if not math.isfinite(total.difference):
        return f"the {what} on {count(comparison.prompts, 'held-out prompt')} is not a number"
    return (
        f"{what} {figure(total.base)} → {figure(total.new)} on {count(comparison.prompts, 'held-out prompt')} "
        f"(difference {figure(total.difference, sign=True)}, 95 % interval {figure(total.low, sign=True)} to "
        f"{figure(total.high, sign=True)})"
    )
