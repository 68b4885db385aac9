"""Measures a reward in the form that it reads: the one that training finds, unless that hides what is wrong with it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from praison_agent_rl.deadlines import TimedOut, within
from praison_agent_rl.errors import RewardError
from praison_agent_rl.reward_trials.calls import Probe, Sample, columns_of_call
from praison_agent_rl.reward_trials.trials import FaultSeen, Measured, TrialRules, measure
from praison_agent_rl.rewards import Reward, Shape, Texts, find_shape
from praison_agent_rl.scoring.names import declared

_SHAPES = [Shape("text", "text"), Shape("messages", "messages"), Shape("messages", "text"), Shape("text", "messages")]
_FEW = 6
"""Answers with which each form is tried one by one."""
_PASSED = ("completion_ids", "trainer_state", "log_extra", "log_metric")


def measure_in_form(reward: Reward, samples: Sequence[Sample], rules: TrialRules) -> Measured:
    """Measure a reward whose form is not known yet.

    Raises:
        RewardError: it fails with every answer in every form, with different causes.
    """
    if reads := declared(reward.fn, "reads"):
        return measure(replace(reward, shape=Shape(*reads)), samples, rules)
    prompts, columns = _form_sample(samples)

    def seek() -> Shape:
        return find_shape(reward.fn, prompts, columns, name=reward.name, renamed=reward.renamed)

    start = time.monotonic()
    try:
        found = replace(reward, shape=within(rules.timeout, seek))
    except (TimedOut, RewardError) as error:
        if time.monotonic() - start >= rules.timeout:  # measuring tells a reward that hangs from one that is slow
            return measure(reward, samples, rules)
        best, tried = _best(reward, samples, rules)
        if not tried.returned and "\n" in str(error):  # each form fails in its own way: the author knows which is meant
            raise
        measured = measure(best, samples, rules)
        if not measured.facts["faults"]:  # only with the made-up answers of the search, but training makes it too
            measured.facts["faults"] = (FaultSeen(kind="cannot be used", text=str(error), count=0),)
        return measured
    return look_again(found, measure(found, samples, rules), samples, rules)


def look_again(reward: Reward, measured: Measured, samples: Sequence[Sample], rules: TrialRules) -> Measured:
    """The same, or what another form tells if this one gives every answer the same score.

    A reward that reads text and fails on one answer may seem to read messages, all of which are one to ``len``.
    """
    if measured.facts["faults"] or measured.facts.get("differing") or measured.facts["scored"] < 2:
        return measured
    if declared(reward.fn, "reads") or declared(reward.fn, "cacheable"):
        return measured
    best, tried = _best(reward, samples, rules)
    if best.shape == reward.shape or tried.distinct < 2:
        return measured
    other = measure(best, samples, rules)
    return other if other.facts["faults"] else measured


class _Tried(NamedTuple):
    """What calls with one answer each brought in one form."""

    distinct: int = 0
    """Different sound scores."""
    sound: int = 0
    returned: int = 0
    """Calls that brought something, if nothing to be believed."""


def _best(reward: Reward, samples: Sequence[Sample], rules: TrialRules) -> tuple[Reward, _Tried]:
    """The form that tells the most answers apart, or that gets the furthest."""
    tried = {shape: _try(replace(reward, shape=shape), samples[:_FEW], rules) for shape in _SHAPES}
    best = max(_SHAPES, key=lambda shape: tried[shape])
    return replace(reward, shape=best), tried[best]


def _try(reward: Reward, samples: Sequence[Sample], rules: TrialRules) -> _Tried:
    scores: set[float] = set()
    sound = returned = 0
    with Probe(reward) as probe:
        for sample in samples:
            reading = probe.read([sample], timeout=rules.timeout / 4)
            kind = reading.fault.kind if reading.fault else None
            if kind == "timed out":
                break
            known = [score for score in reading.scores if score is not None]
            returned += kind != "raised"
            sound += len(known)
            scores.update(known)
    return _Tried(len(scores), sound, returned)


def _form_sample(samples: Sequence[Sample]) -> tuple[Texts, dict[str, Any]]:
    """Three prompts from the first to the last with their columns, as training takes them."""
    firsts = list({sample.group: sample for sample in reversed(samples)}.values())[::-1]
    last = len(firsts) - 1
    picked = [firsts[place] for place in sorted({0, last // 2, last})]
    columns = {name: values for name, values in columns_of_call(picked).items() if name not in _PASSED}
    return [sample.prompt for sample in picked], columns
