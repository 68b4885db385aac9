"""What the measurements of a reward mean: a verdict, what to do about it, and what to be warned of; it calls nothing.

The rules, of which the first that holds is the verdict:

- broken: it cannot be found or lacks a column, or a call raised, hung, or returned no list, the wrong number of values
  or something that is no number; or more than a fifth of its scores are NaN, infinite or a verdict that a judge failed
  to give, at which training stops.
- no signal: no answer has a score, or all have the same, or all answers to one prompt have the same for each prompt:
  GRPO learns from the differences among the answers to one prompt and from nothing else.
- too slow: scoring the answers of one training step takes longer than ``TrialRules.slow_after``.
- too sparse: of 20 answers or more less than one in twenty has another score than the commonest one, or more than half
  have none.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from praison_agent_rl.reward_trials.trials import FaultSeen, Measured, RewardTrial, TrialRules

MOST_UNSOUND = 0.2
"""Share of NaN and infinite scores above which a reward is broken: where training stops by default."""
FEWEST_DIFFERING = 0.05
ENOUGH_ANSWERS = 20
MOST_WITHOUT = 0.5
RARE = 0.05
"""Chance of as many wrong pairs by guessing, below which a reward is said to prefer the worse answers."""
ALIKE, OPPOSED = 0.95, -0.5
"""Kendall's tau-b of two rewards from which it is worth a remark."""
REMARKS = 6
ENOUGH_GROUPS = 3
"""Prompts with several answers from which equal scores within each are no chance."""


def judged(measured: Measured, rules: TrialRules, **facts: Any) -> RewardTrial:
    """The trial of a reward that could be called, with verdict and warnings."""
    trial = RewardTrial(name=measured.reward.name, **measured.facts, **facts)
    verdict, advice = _verdict(trial, rules)
    whole_group = not measured.reward.by_sample
    return trial.model_copy(
        update={
            "verdict": verdict,
            "advice": advice,
            "warnings": tuple(_warnings(trial, verdict, whole_group=whole_group)),
        }
    )


def unusable(name: str, problem: str, **facts: Any) -> RewardTrial:
    """The trial of a reward that could not be called at all; ``problem`` says why."""
    fault = FaultSeen(kind="cannot be used", text=problem, count=0)
    return RewardTrial(name=name, verdict="broken", advice=_MEND["cannot be used"], faults=(fault,), **facts)


_MEND = {
    "cannot be used": "Mend what is said, and try again.",
    "raised": "Let it return None for an answer that it cannot score.",
    "timed out": "Give what it waits for a time limit, and let it return None then.",
    "not a list": "Let it return a list with one number or None per completion, whatever their number.",
    "wrong length": "Let it return a list with one number or None per completion, whatever their number.",
    "wrong steps": "Let it return a number or None for each call of the run's model, or one number for the run.",
    "no verdict": "See that the judge can be reached and answers as it is told to.",
    "not a number": "Let it return numbers: float(...) of what it has, or None.",
}


_NOT_CALLED_SO = re.compile(r"TypeError: .*(unexpected keyword argument|required (positional|keyword-only) argument)")
"""A decorator without functools.wraps that hides what the function takes, or a parameter that has no name."""
_TOLD = re.compile(r"failed: (RewardError|MissingExtra|ModuleNotFoundError|ImportError|NameError|SyntaxError)")
"""Errors that no answer causes."""


def _verdict(trial: RewardTrial, rules: TrialRules) -> tuple[str, str]:
    slow = _slow(trial, rules)
    unsound = trial.nan + trial.infinite + trial.unanswered > MOST_UNSOUND * trial.answers
    # one that ends with each answer alone is slow; a judge that missed a few is no broken one
    late = [fault for fault in trial.faults if slow and fault.kind == "timed out" and fault.first is None]
    missed = [] if unsound else [fault for fault in trial.faults if fault.kind == "no verdict"]
    faults = [fault for fault in trial.faults if fault not in (*late, *missed)]
    if faults:
        return "broken", " ".join(dict.fromkeys(_advice(fault, trial.answers) for fault in faults))
    if unsound:
        return "broken", "Find the division or logarithm that goes wrong, and return None there."
    return _silent(trial) or slow or _sparse(trial) or ("fine", "")


def _advice(fault: FaultSeen, answers: int) -> str:
    if fault.kind == "raised" and _NOT_CALLED_SO.search(fault.text):
        return "It is called by name with what its signature takes: see that each of these goes on to what it calls."
    if fault.kind == "raised" and (fault.count >= answers or _TOLD.search(fault.text)):
        return _MEND["cannot be used"]
    return _MEND[fault.kind]


def _silent(trial: RewardTrial) -> tuple[str, str] | None:
    if not trial.scored and not trial.faults:
        return "no signal", "It scores no answer: see which answers it returns None for, and why."
    if trial.low is not None and trial.scored > 1 and not trial.differing:
        gives = (
            f"gives {trial.low:.4g} to every answer"
            if trial.high == trial.low
            else "gives scores that training cannot tell apart"
        )
        text = f"It {gives}: nothing is learned from it"
        return "no signal", f"{text}; mend it, or leave it out unless it is a guard."
    if trial.groups >= ENOUGH_GROUPS and trial.flat == trial.groups:
        text = "It gives all answers to one prompt the same score, and only their differences are learned from"
        return "no signal", f"{text}; let it tell the answers apart, or leave it out."
    return None


def _slow(trial: RewardTrial, rules: TrialRules) -> tuple[str, str] | None:
    late = [fault for fault in trial.faults if fault.kind == "timed out" and fault.first is None]
    if not late and (trial.seconds_step is None or trial.seconds_step <= rules.slow_after):
        return None
    if late:
        return "too slow", f"It {late[0].text}: make it faster, or async if it waits for others."
    took = f"takes {trial.seconds_step:.3g} s for the {rules.batch} answers of one step"
    return "too slow", f"It {took} (more than {rules.slow_after:g} s): make it faster, or async if it waits for others."


def _sparse(trial: RewardTrial) -> tuple[str, str] | None:
    if trial.none > MOST_WITHOUT * trial.answers:
        return "too sparse", f"It gives {trial.none} of {trial.answers} answers no score: let it score more of them."
    if trial.scored >= ENOUGH_ANSWERS and trial.differing < FEWEST_DIFFERING * trial.scored:
        text = f"Only {trial.differing} of {trial.scored} answers get another score than the commonest one"
        return "too sparse", f"{text}: give partial credit, or easier prompts first."
    return None


def _warnings(trial: RewardTrial, verdict: str, *, whole_group: bool) -> list[str]:
    said = []
    if trial.nan:
        said.append(f"NaN for {trial.nan} of {trial.answers} answers; each counts as None (no score)")
    if trial.infinite:
        said.append(f"infinity for {trial.infinite} of {trial.answers} answers; each counts as None (no score)")
    if trial.unanswered:
        said.append(f"no verdict of the judge for {trial.unanswered} of {trial.answers} answers")
    if 0 < trial.none <= MOST_WITHOUT * trial.answers:
        said.append(f"no score (None) for {trial.none} of {trial.answers} answers")
    if trial.changed:
        said.append(f"it changes what it is given ({', '.join(trial.changed)}); in training these are copies")
    if trial.deterministic is False:
        said.append("two calls with the same answers gave different scores: its scores are not cached")
    if trial.by_order:
        said.append("a score depends on the place of its answer in the call: return them in the order of the answers")
    elif trial.by_sample is False and not whole_group:
        said.append("a score depends on the other answers of the call; if that is meant, set whole_group = True on it")
    if _by_chance(trial.worse, trial.better) < RARE:
        pairs = trial.better + trial.worse + trial.tied
        said.append(f"it prefers the worse answer in {trial.worse} of {pairs} known pairs")
    if trial.agreement is not None and _tau_by_chance(trial.agreement, trial.rated) < RARE:
        said.append(f"it goes against the ratings of people (tau {trial.agreement:+.2f} on {trial.rated} answers)")
    if trial.flat and verdict == "fine":
        said.append(f"for {trial.flat} of {trial.groups} prompts all answers have the same score: no signal there")
    return said


def _by_chance(worse: int, better: int) -> float:
    """Chance of at least so many worse ones among all by guessing: the upper tail of the binomial with one half."""
    pairs = worse + better
    return float(sum(math.comb(pairs, count) for count in range(worse, pairs + 1)) / 2**pairs)


def _tau_by_chance(tau: float, n: int) -> float:
    """Chance of so low a tau of ``n`` answers by guessing: normal with variance 2 (2n + 5) / 9n(n - 1).

    Kendall, A new measure of rank correlation, Biometrika 30 (1938).
    """
    deviation = math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))
    return math.erfc(-tau / deviation / math.sqrt(2)) / 2 if tau < 0 else 1.0


def remarks_on_all(trials: Sequence[RewardTrial], correlations: Sequence[Sequence[float | None]]) -> list[str]:
    """What the rewards say of each other, the strongest first."""
    found: list[tuple[float, str]] = []
    for row, (trial, values) in enumerate(zip(trials, correlations, strict=True)):
        for other, value in zip(trials[:row], values, strict=False):
            if value is not None and (value >= ALIKE or value <= OPPOSED):
                how = "say nearly the same, so it counts twice" if value > 0 else "pull against each other"
                found.append((abs(value), f"{other.name} and {trial.name} {how} (tau {value:+.2f})"))
    found.sort(key=lambda remark: -remark[0])
    more = [f"{len(found) - REMARKS} more pairs of rewards are as alike or as opposed"] if len(found) > REMARKS else []
    return [text for _, text in found[:REMARKS]] + more
