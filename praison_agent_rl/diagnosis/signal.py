"""Symptoms of rewards that teach nothing: none, equal, rare, or at their best already."""

import math
from collections.abc import Mapping
from typing import Any

from praison_agent_rl.diagnosis.seen import WINDOW, Seen, Symptom, number_of

SILENT = 0.9
"""Share of groups with equal rewards that is named; of usual runs a third to two thirds of the groups are."""
FEW_GROUPS, MANY_GROUPS = 16, 32
"""Groups that must all be silent, or ``SILENT`` of them: where six in ten are, each comes once in a thousand looks."""
SILENT_TO_STOP, STEPS_TO_STOP = 64, 20
"""Groups, and steps, in a row without any signal after which a run ends: where nine groups in ten are silent, a row of
64 comes once in a thousand."""
RARE, ENOUGH_ANSWERS = 0.05, 128
"""Share of answers above the lowest score that is rare: with 1 in 20 two groups of 8 in three have none. Of 128 answers
it is told apart from 1 in 8."""
AT_THE_TOP, ANSWERS_AT_THE_TOP = 0.95, 128
"""Share of answers with the highest score seen at which nothing is left to learn."""
STEPS_UNSCORED = 3
"""Steps in a row without any score; one may be the reward's bad moment."""

_HALF = 0.5
_FINER = "give reward_funcs a reward that tells the answers of one prompt apart (partial credit, a finer scale)"


def no_scores(seen: Seen) -> Symptom | None:
    """No answer gets a score from any reward, or one of several rewards gives none."""
    last = seen.steps[-STEPS_UNSCORED:]
    if any(number_of(part, "failed") for step in last for part in calls_of(step).values()):
        return None  # told as failures, with their errors
    advice = "find out with `praison-agent-rl rewards check` why reward_funcs return None for this data"
    if len(last) == STEPS_UNSCORED and all(number_of(step, "reward") is None for step in last):
        return seen.warning("no scores", f"no answer of the last {len(last)} steps got a score from any reward", advice)
    if len(seen.steps) < WINDOW:
        return None
    names = seen.steps[-1].get("rewards") or {}
    for name in names:
        if len(names) > 1 and not seen.line(f"rewards.{name}"):
            text = f"the reward {name} gave no score to any answer of {len(seen.steps)} steps"
            return seen.warning("no scores", text, f"{advice}, or take {name} out")
    return None


def sparse(seen: Seen) -> Symptom | None:
    """Few answers get more than the lowest score."""
    recent = seen.recent("answers", ENOUGH_ANSWERS)
    if recent is None or seen.range is None:
        return None
    lowest = seen.range[0]
    answers = sum(number_of(step, "answers") or 0 for step in recent)
    low = sum(_share_at(step, "low", lowest) * (number_of(step, "answers") or 0) for step in recent)
    good = round(answers - low)
    if not 0 < good <= RARE * answers:
        return None
    return seen.warning(
        "sparse reward",
        f"{good} of the last {answers:.0f} answers ({good / answers:.1%}) got more than the lowest score "
        f"({lowest:.3g}); most groups have nothing to compare",
        f"give partial credit, take easier prompts, or raise {seen.rules.key('num_generations')}",
    )


def saturation(seen: Seen) -> Symptom | None:
    """Nearly all answers have the best score that was ever seen."""
    if not _at_the_top(seen):
        return None
    assert seen.range is not None
    return seen.warning(
        "saturation",
        f"nearly all answers get the highest score that was seen ({seen.range[1]:.3g}); little is left to learn",
        "take harder prompts or a finer reward, or end sooner with max_steps or num_train_epochs",
    )


def no_signal(seen: Seen) -> Symptom | None:
    """In nearly all groups the answers have equal scores, so that they teach nothing; a long row of them ends it."""
    row, steps = _silent_row(seen)
    if row >= SILENT_TO_STOP and steps >= STEPS_TO_STOP:
        name = "saturation" if _at_the_top(seen) else "no signal"
        return seen.stop(
            name, f"no group of the last {steps} steps ({row} groups) had a signal{_equal(seen)}", _what(seen)
        )
    if _at_the_top(seen) or sparse(seen) or no_scores(seen) or _failing(seen):
        return None  # which say why
    few = seen.recent("groups", FEW_GROUPS, each=1) or []
    many = seen.recent("groups", MANY_GROUPS, each=1) or []
    for recent, share in ((few, 1.0), (many, SILENT)):
        groups = sum(groups_of(step) for step in recent)
        silent = round(sum(silent_of(step) * groups_of(step) for step in recent))
        if groups and silent >= share * groups:
            text = f"in {silent} of the last {groups} groups all answers got the same score{_equal(seen)}"
            return seen.warning("no signal", text, _what(seen))
    return None


def silent_of(step: Mapping[str, Any]) -> float:
    """Share of a step's groups without a signal."""
    own = number_of(step, "silent")
    share = number_of(step, "frac_reward_zero_std") if own is None else own
    return (1.0 if number_of(step, "reward") is None else 0.0) if share is None else share


def groups_of(step: Mapping[str, Any]) -> int:
    """How many groups of answers a step had."""
    return int(number_of(step, "groups") or 1)


def calls_of(step: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """What became of the calls of each reward in a step."""
    calls = step.get("calls")
    return calls if isinstance(calls, Mapping) else {}


def _silent_row(seen: Seen) -> tuple[int, int]:
    """Groups, and steps, without a signal up to now."""
    groups = steps = 0
    for step in reversed(seen.steps):
        if silent_of(step) < 1:
            break
        groups, steps = groups + groups_of(step), steps + 1
    return groups, steps


def _at_the_top(seen: Seen) -> bool:
    recent = seen.recent("answers", ANSWERS_AT_THE_TOP)
    if recent is None or seen.range is None or seen.range[0] == seen.range[1]:
        return False
    answers = sum(number_of(step, "answers") or 0 for step in recent)
    top = sum(_share_at(step, "high", seen.range[1]) * (number_of(step, "answers") or 0) for step in recent)
    return top >= AT_THE_TOP * answers


def _share_at(step: Mapping[str, Any], end: str, value: float) -> float:
    """Share of a step's answers whose total is ``value``, which is the lowest or highest of the run."""
    found = number_of(step, end)
    return (number_of(step, f"at_{end}") or 0.0) if found is not None and math.isclose(found, value) else 0.0


def _failing(seen: Seen) -> bool:
    """Whether it is failures of the rewards that leave answers without scores."""
    last = seen.steps[-WINDOW:]
    return any((number_of(part, "failed") or 0) >= _HALF for step in last for part in calls_of(step).values())


def _equal(seen: Seen) -> str:
    last = number_of(seen.steps[-1], "reward")
    return f" (lately {last:.3g})" if last is not None else ""


def _what(seen: Seen) -> str:
    more = f"raise {seen.rules.key('num_generations')} or {seen.rules.key('temperature')}"
    return f"{_FINER}, {more}, or take prompts that are neither all right nor all wrong"
