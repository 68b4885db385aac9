"""Advantages of each call of a run where rewards score the steps of a run: by what came after, against the group."""

import statistics
from collections.abc import Mapping, Sequence

Steps = Sequence[Sequence[float | None] | None]
_LEAST = 1e-4  # as in trl/trainer/grpo_trainer.py, what is added to a deviation that is divided by


def step_advantages(
    totals: Sequence[float | None],
    steps: Mapping[str, Steps],
    weights: Mapping[str, float],
    *,
    group: int,
    scaled: bool = True,
) -> list[list[float]] | None:
    """For each run the advantage of each of its calls; None if no reward scored a run by steps.

    The return of a call is the run's total less what earlier steps have earned already. Its advantage is that less the
    mean return of the calls with the same number in the other runs of the ``group`` (so the first call has the run's
    usual advantage), divided by the deviation of the group's totals if ``scaled``. Runs without a total have none.

    >>> step_advantages([1.0, 0.0], {"r": [[1.0, 0.0], [0.0, 0.0]]}, {"r": 1.0}, group=2, scaled=False)
    [[0.5, 0.0], [-0.5, 0.0]]
    """
    counts = [max((len(each[run]) for each in steps.values() if each[run]), default=0) for run in range(len(totals))]  # type: ignore[arg-type]
    if not any(counts):
        return None
    returns = [_returns(run, totals[run], counts[run], steps, weights) for run in range(len(totals))]
    found: list[list[float]] = []
    for start in range(0, len(totals), group):
        places = range(start, start + group)
        scored = [total for place in places if (total := totals[place]) is not None]
        scale = statistics.stdev(scored) + _LEAST if scaled and len(scored) > 1 else 1.0
        for place in places:
            own = enumerate(returns[place])
            found.append([(value - _mean([returns[p] for p in places], call)) / scale for call, value in own])
    return found


def _returns(
    run: int, total: float | None, count: int, steps: Mapping[str, Steps], weights: Mapping[str, float]
) -> list[float]:
    """What was still to be earned at each call of a run; at least one, for runs that are scored as a whole."""
    if total is None:
        return []
    left, found = total, []
    for call in range(max(count, 1)):
        found.append(left)
        left -= sum(weights[name] * (_at(each[run], call)) for name, each in steps.items())
    return found


def _at(scores: Sequence[float | None] | None, call: int) -> float:
    return (scores[call] if scores and call < len(scores) else None) or 0.0


def _mean(returns: Sequence[Sequence[float]], call: int) -> float:
    return statistics.fmean(each[call] for each in returns if len(each) > call)
