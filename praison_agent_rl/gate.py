"""Decide whether a candidate may take the place of the model that answers now; reads records and writes nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from praison_agent_rl.cheating import find_cheating
from praison_agent_rl.guards import (
    control_guard,
    drift_guards,
    earlier_guards,
    failure_guards,
    judged_guards,
    reward_guards,
    score_guards,
    span,
)
from praison_agent_rl.intervals import differences, prompts_needed
from praison_agent_rl.pairing import Change, by_prompt, change_of, paired, total_of
from praison_agent_rl.records import (
    FEWEST_PROMPTS,
    Answer,
    Comparison,
    GateRules,
    Guard,
    Verdict,
    VerdictStatus,
)

_INCUMBENT = "the model that answers now"
Sides = tuple[Sequence[Answer], Sequence[Answer]]
"""Answers of base and candidate to the same prompts."""


@dataclass(frozen=True)
class Evidence:
    """Everything that a verdict goes by."""

    comparison: Comparison
    """Of ``base`` and ``new``."""
    base: Sequence[Answer]
    """Answers to the held-out prompts, scored."""
    new: Sequence[Answer]
    control: Sides | None = None
    """Answers to the general control prompts, with a total each."""
    earlier: Mapping[str, Sides] = field(default_factory=dict)
    """By version: answers to the prompts that it was judged by, with a total each."""
    incumbent: Sequence[Answer] | None = None
    """Recorded answers to the held-out prompts of what runs now, scored, where that is another model than the base."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that were shown."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the rewards in the total; 1 where it is not said."""


def judge(evidence: Evidence, rules: GateRules) -> Verdict:
    """The verdict on a candidate: better than the base, and than what runs now, with no guard broken."""
    guards = _guards(evidence, rules)
    findings = find_cheating(evidence.comparison, evidence.base, evidence.new)
    incumbent = change_of(evidence.incumbent, evidence.new, total_of) if evidence.incumbent is not None else None
    status, reason = _by_numbers(evidence, rules.min_gain, incumbent)
    broken = [f"{guard.text} ({guard.limit})" for guard in guards if guard.broken]
    if status == "promoted" and broken:
        status, reason = "guard broken", "; ".join(broken)
    text = f"{status} ({reason})" if status == "undecided" else f"{status}: {reason}"
    if findings:
        text += f"; signs of cheating: {', '.join(dict.fromkeys(finding.name for finding in findings))}"
    return Verdict(
        status=status, text=text, guards=guards, findings=findings, incumbent=incumbent.interval if incumbent else None
    )


def _guards(evidence: Evidence, rules: GateRules) -> list[Guard]:
    comparison = evidence.comparison
    unguarded = {name: seen for name, seen in comparison.judged.items() if name not in rules.guards}
    return [
        *reward_guards(comparison, rules.guards),
        *judged_guards(comparison.model_copy(update={"judged": unguarded})),
        *drift_guards(evidence.base, evidence.new, limits=rules.limits, tools=evidence.tools),
        *_gain_guards(evidence, evidence.base, rules.min_gain, None),
        *(_gain_guards(evidence, evidence.incumbent, rules.min_gain, _INCUMBENT) if evidence.incumbent else []),
        *([control_guard(*evidence.control)] if evidence.control else []),
        *earlier_guards(evidence.earlier),
    ]


def _gain_guards(evidence: Evidence, other: Sequence[Answer], min_gain: float, against: str | None) -> list[Guard]:
    """Whether the gain over ``other`` rests on answers that failed, or on scores that are missing."""
    return [
        *failure_guards(other, evidence.new, min_gain, against=against),
        *score_guards(other, evidence.new, min_gain=min_gain, weights=evidence.weights, against=against),
    ]


def _by_numbers(evidence: Evidence, min_gain: float, incumbent: Change | None) -> tuple[VerdictStatus, str]:
    """What the intervals say, guards aside."""
    against_base = Change(evidence.comparison.total, evidence.comparison.prompts)
    needed = _needed(evidence.base, evidence.new, min_gain)
    status, reason = _against(against_base, "the base", min_gain, needed)
    failed = (evidence.comparison.errors_base, evidence.comparison.errors_new)
    if not against_base.prompts and any(failed):
        reason += f": {failed[0]} answers of the base and {failed[1]} of the new model failed"
    if status != "promoted" or incumbent is None:
        return status, reason
    needed = _needed(evidence.incumbent or (), evidence.new, min_gain)
    status, second = _against(incumbent, _INCUMBENT, min_gain, needed)
    if status == "undecided":
        second += f" to compare with {_INCUMBENT}"
    return ("not better" if status == "worse" else status), (f"{reason}; {second}" if status == "promoted" else second)


def _against(change: Change, other: str, min_gain: float, needed: int | None) -> tuple[VerdictStatus, str]:
    seen, prompts = change
    more = max((needed or 0) - prompts, FEWEST_PROMPTS - prompts, 1)
    numbers = f"{seen.base:.3g} ({other}) to {seen.new:.3g} on {prompts} held-out prompts ({span(seen)})"
    if 0 < prompts < FEWEST_PROMPTS:
        return "undecided", f"{more} more prompts needed"
    if not all(map(math.isfinite, (seen.difference, seen.low, seen.high))):
        return "not better", f"no number was given by which to compare with {other}"
    if seen.low > min_gain:
        return "promoted", numbers
    if seen.high < 0:
        return "worse", numbers
    if seen.difference > max(min_gain, 0) and needed:
        return "undecided", f"{more} more prompts needed"
    return "not better", numbers + (f", where more than {min_gain:+.3g} is asked for" if min_gain else "")


def _needed(base: Sequence[Answer], new: Sequence[Answer], min_gain: float) -> int | None:
    """Prompts that would show that what was seen is more than ``min_gain``."""
    return prompts_needed(differences(*paired(by_prompt(base, total_of), by_prompt(new, total_of))) - min_gain)
