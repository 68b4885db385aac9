"""Measures one reward alone on answers: what it returns, how long it takes, and what its scores depend on.

It calls the reward a few times and judges nothing; `reward_trials.verdicts` does.
"""

import inspect
import math
import re
import statistics
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from praison_agent_rl.records import Record
from praison_agent_rl.reward_trials.calls import Probe, Reading, Sample
from praison_agent_rl.rewards import Reward, Score
from praison_agent_rl.scoring.names import declared, short
from praison_agent_rl.scoring.readings import Fault, Outcome

LONGEST_TEXT = 1000
"""Letters of a fault that are shown; an error may hold a whole dataset."""
AT_ONCE = 8
"""Calls of an async reward in flight at once in training, by default."""


@dataclass(frozen=True)
class TrialRules:
    """What a trial may take, and what is too much."""

    timeout: float = 60.0
    """Seconds for one call; three times that for all calls of one reward."""
    batch: int = 8
    """Answers that are scored in a training step."""
    slow_after: float = 10.0
    """Seconds for the answers of one step from which a reward is too slow."""
    judges_twice: bool = False
    """Whether what each call of costs money is called again to see what its scores depend on."""
    few: int = 8
    """Answers that a reward is called with again, to see what its scores depend on; half of them one by one."""
    spare_after: float = math.inf
    """Seconds for one answer from which a reward is only called again with two."""


class FaultSeen(Record):
    """One kind of fault, however often it was met."""

    kind: str
    """``raised``, ``timed out``, ``not a list``, ``wrong length``, ``wrong steps``, ``not a number``,
    ``no verdict`` (of a judge), or ``cannot be used``."""
    text: str
    count: int = 1
    """Answers concerned; 0 where the fault is that of a call with several."""
    first: str | None = None
    """The first answer that caused it, shortened."""


class RewardTrial(Record):
    """What was found out about one reward."""

    name: str
    verdict: str = "fine"
    """``fine``, ``no signal``, ``too sparse``, ``too slow`` or ``broken``."""
    advice: str = ""
    """What to do, in one sentence; empty if it is fine."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not tried, and why."""
    judge: bool = False
    """Whether it judges only and is not trained on."""
    prompts: str | None = None
    """The form in which it reads prompts: ``text`` or ``messages``."""
    completions: str | None = None
    """The form in which it reads answers."""
    needs: tuple[str, ...] = ()
    """Columns of the data that it cannot be called without."""
    lacking: tuple[str, ...] = ()
    """Those of them that the data has not."""
    faults: tuple[FaultSeen, ...] = ()
    answers: int = 0
    scored: int = 0
    """Answers with a sound score."""
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    deviation: float | None = None
    """Standard deviation of all scores."""
    within: float | None = None
    """Standard deviation of the scores of the answers to one prompt, the mean of all prompts with several different
    answers; None where there is none. Nothing else is learned from."""
    groups: int = 0
    """Prompts with several different answers that have scores."""
    flat: int = 0
    """Those of them whose answers all have the same score."""
    differing: int = 0
    """Answers whose score is not the commonest one."""
    none: int = 0
    nan: int = 0
    infinite: int = 0
    not_numbers: int = 0
    unanswered: int = 0
    """Answers of which a judge gave no verdict, and says so."""
    seconds: float | None = None
    """One call with all answers."""
    seconds_each: float | None = None
    """The same by answer."""
    seconds_step: float | None = None
    """For the answers of one training step."""
    changed: tuple[str, ...] = ()
    """Arguments that it changes; what it is given are copies."""
    deterministic: bool | None = None
    """Whether two calls with the same gave the same; None: not tried."""
    by_order: bool | None = None
    """Whether a score depends on the place of the answer in the call; None: not tried, or it cannot be told."""
    by_sample: bool | None = None
    """Whether a score does not depend on the other answers of the call; None: not tried, or it cannot be told."""
    better: int = 0
    """Known pairs of which it prefers the better answer."""
    worse: int = 0
    """Known pairs of which it prefers the worse answer."""
    tied: int = 0
    """Known pairs that it scores alike."""
    rated: int = 0
    """Answers that have a score and a person's rating."""
    agreement: float | None = None
    """How far it puts these in the same order: Kendall's tau-b, from -1 to 1."""


@dataclass
class Measured:
    """A reward on its way through a trial."""

    reward: Reward
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of `RewardTrial`."""
    scores: list[Score] = field(default_factory=list)
    """One for each answer; None wherever there is no sound score."""


def measure(reward: Reward, samples: Sequence[Sample], rules: TrialRules) -> Measured:
    """Call ``reward`` with ``samples`` in several ways and say what came back."""
    found = _Faults()
    facts: dict[str, Any] = {"prompts": reward.shape.prompts, "completions": reward.shape.completions}
    with Probe(reward) as probe:
        calls = _Calls(probe, rules)
        whole = calls.read(samples)
        if whole.fault is None:
            outcomes = [*whole.outcomes]
            found.of_outcomes(outcomes, samples)
            facts |= {"seconds": whole.seconds, "seconds_each": whole.seconds / len(samples)}
            facts |= {"changed": whole.changed, **_dependence(calls, samples, whole, found)}
        else:
            outcomes = _of_failed(calls, samples, whole, found)
    kinds = Counter(outcome.kind if isinstance(outcome, Fault) else type(outcome) for outcome in outcomes)
    facts |= {"none": kinds[type(None)], "nan": kinds["NaN"], "infinite": kinds["infinite"]}
    facts |= {"not_numbers": kinds["not a number"], "unanswered": kinds["no verdict"]}
    facts["seconds_step"] = calls.seconds_of_step(facts.get("seconds_each"))
    facts |= {"answers": len(samples), "faults": tuple(found.listed()), "notes": tuple(calls.notes)}
    scores = [None if isinstance(outcome, Fault) else outcome for outcome in outcomes]
    return Measured(reward, facts | spread(scores, samples), scores)


def _of_failed(calls: "_Calls", samples: Sequence[Sample], whole: Reading, found: "_Faults") -> list[Outcome]:
    """What each sample gets where the call with all of them failed."""
    assert whole.fault is not None
    outcomes: list[Outcome] = [whole.fault] * len(samples)
    if whole.fault.kind in ("not a list", "wrong length", "no verdict"):
        found.of_call(whole, samples)
        for few in (samples[:1], samples[:2]) if whole.fault.kind != "no verdict" else ():
            found.of_call(calls.read(few), few)
        return outcomes
    for place, reading in calls.one_by_one(samples).items():
        if reading.fault is not None and reading.fault.kind == whole.fault.kind == "timed out":
            text = f"{whole.fault.text} for {len(samples)} answers, and one alone {reading.fault.text}"
            reading = reading._replace(fault=reading.fault._replace(text=text))
        found.of_call(reading, samples[place : place + 1])
        if reading.fault is None:
            found.of_outcomes(reading.outcomes, samples[place : place + 1])
            outcomes[place] = reading.outcomes[0]
    if not found.listed():
        text = f"{whole.fault.text}, in a call with all {len(samples)} answers; each alone is scored"
        found.add(whole.fault.kind, text, first=None, count=0)
    return outcomes


def spread(scores: Sequence[Score], samples: Sequence[Sample]) -> dict[str, Any]:
    """Range, mean and deviations, overall and among the answers to one prompt, as fields of `RewardTrial`."""
    known = [score for score in scores if score is not None]
    if not known:
        return {"scored": 0}
    by_group: dict[int, list[float]] = {}
    texts: dict[int, set[str]] = {}
    for score, sample in zip(scores, samples, strict=True):
        if score is not None:
            by_group.setdefault(sample.group, []).append(score)
            texts.setdefault(sample.group, set()).add(str(sample.completion))
    # the same answer twice has the same score, whatever the reward is worth
    groups = [values for group, values in by_group.items() if len(texts[group]) > 1]
    deviations = [statistics.pstdev(values) for values in groups]
    # as training keeps them: TRL's scores are float32, in which 1e9 and 1e9 + 1 are one
    commonest = Counter(round(_float32(score), 9) for score in known).most_common(1)[0][1]
    return {
        "scored": len(known),
        "low": min(known),
        "high": max(known),
        "mean": statistics.fmean(known),
        "deviation": statistics.pstdev(known),
        "within": statistics.fmean(deviations) if deviations else None,
        "groups": len(groups),
        "flat": sum(_alike(values) for values in groups),
        "differing": len(known) - commonest,
    }


def _alike(values: Sequence[float]) -> bool:
    return math.isclose(_float32(min(values)), _float32(max(values)), rel_tol=1e-9, abs_tol=1e-12)


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


class _Calls:
    """The calls of one reward's trial, which together may take three times what one may."""

    def __init__(self, probe: Probe, rules: TrialRules) -> None:
        self.reward, self.rules = probe.reward, rules
        self.notes: list[str] = []
        self._probe = probe
        self._left = 3 * rules.timeout
        self.cut_short = False
        """Whether the last call was ended for want of time left, which is no fault of the reward."""
        self._alone: float | None = None
        """Seconds of the call with one answer."""

    def read(self, samples: Sequence[Sample], *, share: float = 1.0) -> Reading:
        limit = share * self.rules.timeout
        reading = self._probe.read(samples, timeout=max(0.01, min(limit, self._left)))
        self.cut_short = self._left < limit and reading.fault is not None and reading.fault.kind == "timed out"
        self._left -= reading.seconds
        if len(samples) == 1:
            self._alone = reading.seconds
        return reading

    def one_by_one(self, samples: Sequence[Sample]) -> dict[int, Reading]:
        """Each sample alone, until one hangs or the time is over."""
        found: dict[int, Reading] = {}
        for place, sample in enumerate(samples):
            if self._left <= 0:
                break
            reading = self.read([sample], share=0.25)
            if self.cut_short:
                break
            found[place] = reading
            fault = reading.fault
            if fault is not None and fault.kind != "raised":
                break  # the first says it all, and waiting for the others would take too long
        return found

    def seconds_of_step(self, each: float | None) -> float | None:
        """What the answers of one training step will take; async calls are then made at once."""
        if _is_async(self.reward.fn) and self._alone is not None and self.reward.by_sample:
            return self._alone * math.ceil(self.rules.batch / AT_ONCE)
        each = self._alone if each is None else each
        return None if each is None else each * self.rules.batch


def _dependence(calls: _Calls, samples: Sequence[Sample], whole: Reading, found: "_Faults") -> dict[str, Any]:
    """What the scores depend on beside the answer itself, found by a few calls with a few of the samples."""
    alone = {0: calls.read(samples[:1])}
    found.of_call(alone[0], samples[:1])
    if len(samples) > 2:
        found.of_call(calls.read(samples[:2]), samples[:2])
    if declared(calls.reward.fn, "cacheable") and not calls.rules.judges_twice:
        calls.notes.append("called once only, since its calls may cost money: see --judges-twice")
        return {}
    spare = whole.seconds > calls.rules.spare_after * len(samples)
    few = list(samples[: 2 if spare else calls.rules.few])
    first = whole if len(few) == len(samples) else calls.read(few)
    again = calls.read(few)
    if first.fault or again.fault:
        found.of_call(first if first.fault else again, few)
        return {}
    facts: dict[str, Any] = {"deterministic": first.same(again)}
    facts["changed"] = tuple(sorted({*whole.changed, *first.changed, *again.changed}))
    if spare:
        calls.notes.append("it takes long, so it was not tried what its scores depend on")
    elif facts["deterministic"]:
        alone |= {place: calls.read([few[place]]) for place in range(1, len(few) // 2)}
        turned = calls.read(few[::-1])
        facts["by_order"] = turned.fault is None and not first.same(turned._replace(outcomes=turned.outcomes[::-1]))
        together = all(whole.only(place).same(first.only(place)) for place in range(len(few)))
        facts["by_sample"] = together and all(
            reading.fault is not None or reading.same(first.only(place)) for place, reading in alone.items()
        )
    return facts


_WITH_SEVERAL = ", in a call with "


class _Faults:
    """Faults by kind and cause, each with the first answer that caused it."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], FaultSeen] = {}

    def add(self, kind: str, text: str, *, first: Sample | None, count: int = 1) -> None:
        key = (kind, _general(kind, text.partition(_WITH_SEVERAL)[0]))
        known = self._found.get(key)
        if known is None:
            shown = short(first.completion) if first is not None else None
            text = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... ({len(text)} letters)"
            self._found[key] = FaultSeen(kind=kind, text=text, count=count, first=shown)
        else:
            self._found[key] = known.model_copy(update={"count": known.count + count})

    def of_call(self, reading: Reading, samples: Sequence[Sample]) -> None:
        """A call that failed, if it did; one with several answers concerns none in particular."""
        if reading.fault is None:
            return
        text, several = reading.fault.text, len(samples) > 1
        if several and reading.fault.kind == "raised":
            text += f"{_WITH_SEVERAL}{len(samples)} answers"
        self.add(reading.fault.kind, text, first=None if several else samples[0], count=0 if several else 1)

    def of_outcomes(self, outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> None:
        """What is no number; NaN and infinity are counted only."""
        for outcome, sample in zip(outcomes, samples, strict=True):
            if isinstance(outcome, Fault) and outcome.kind in ("not a number", "wrong steps", "no verdict"):
                self.add(outcome.kind, outcome.text, first=sample)

    def listed(self) -> list[FaultSeen]:
        return list(self._found.values())


def _general(kind: str, text: str) -> str:
    """A cause without what differs from answer to answer."""
    if kind == "not a number":
        return ""
    if kind in ("not a list", "wrong length"):  # the values that came are different each time
        text = text.partition(",")[0]
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+(\.\d+)?", "*", text)


def _is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def prefer(scores: Sequence[Score], pairs: Iterable[tuple[int, int]]) -> dict[str, int]:
    """How many known pairs, better answer first, the scores put in order; those without both scores do not count."""
    counts = Counter({"better": 0, "worse": 0, "tied": 0})
    for good, bad in pairs:
        a, b = scores[good], scores[bad]
        if a is not None and b is not None:
            counts["tied" if _alike([a, b]) else "better" if a > b else "worse"] += 1
    return dict(counts)
