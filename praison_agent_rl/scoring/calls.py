"""Calls rewards in a run: whatever a reward does costs only the samples that it concerns, and all of it is counted."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from praison_agent_rl.errors import RewardError
from praison_agent_rl.records import Record, Run
from praison_agent_rl.rewards import Reward, Score, Texts
from praison_agent_rl.scoring.cache import RewardCache
from praison_agent_rl.scoring.jobs import Batch, Job, do_job
from praison_agent_rl.scoring.jobs import CallRules as CallRules
from praison_agent_rl.scoring.keys import Unkeyed, identity, sample_keys
from praison_agent_rl.scoring.names import RUNTIME, declared, short
from praison_agent_rl.scoring.readings import Fault, FaultKind
from praison_agent_rl.scoring.waiting import Waiting

if TYPE_CHECKING:
    from praison_agent_rl.config import TrainConfig

logger = logging.getLogger(__name__)

_LAST = 5  # calls whose samples decide whether too many failed
_FEWEST = 2  # calls that must be seen: one bad moment ends no run


@dataclass(frozen=True)
class _Told:
    """What one process tells of one reward and one batch."""

    samples: int
    none: int
    hits: int
    calls: int
    seconds: float
    faults: dict[FaultKind, tuple[int, str]]
    """By kind: how many, and the first in words."""


@dataclass
class RewardCounts:
    """What one reward has done since the counting began."""

    samples: int = 0
    none: int = 0
    """Samples to which it gave None, as it may."""
    failed: int = 0
    """Samples without a sound score, for whatever reason."""
    nan: int = 0
    """Of these, those that it gave NaN."""
    infinite: int = 0
    """Of these, those that it gave infinity."""
    hits: int = 0
    """Samples whose score was known from the cache."""
    calls: int = 0
    seconds: float = 0.0
    by_kind: Counter[FaultKind] = field(default_factory=Counter)
    """Failed samples by what was wrong."""
    first_error: str | None = None
    """The first fault in words, with the completion that it concerned, shortened."""


class Caller:
    """Calls ``rewards`` for as long as a stage lasts; not for two threads at once. ``close`` it at the end."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        rules: CallRules = CallRules(),  # noqa: B008 - frozen
        *,
        cache: RewardCache | None = None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.rewards = list(rewards)
        self.rules = rules
        self._cache = cache
        self._warn = warn
        self._waiting = Waiting(rules)
        self._counts = {reward.name: RewardCounts() for reward in rewards}
        self._step = {reward.name: RewardCounts() for reward in rewards}
        self._last: dict[str, deque[tuple[int, int, str]]] = {r.name: deque(maxlen=_LAST) for r in rewards}
        self._said: set[tuple[str, FaultKind]] = set()
        self._shares: dict[str, tuple[int, int, int, int]] = {}
        self._steps: dict[str, list[list[Score] | None]] = {}
        self.everywhere: Callable[[_Told], list[_Told]] = lambda own: [own]
        """What each process tells, where several call the same rewards at the same time and count together."""

    @property
    def counts(self) -> Mapping[str, RewardCounts]:
        """By reward, of all calls so far."""
        return self._counts

    def take_step(self) -> dict[str, RewardCounts]:
        """By reward, of the calls since this was asked last."""
        step, self._step = self._step, {reward.name: RewardCounts() for reward in self.rewards}
        return step

    def shares(self) -> dict[str, tuple[int, int, int, int]]:
        """By reward, of the last call: samples, and those with None, with no sound score, and from the cache."""
        return dict(self._shares)

    def steps(self) -> dict[str, list[list[Score] | None]]:
        """By reward, of the last call: the scores of each completion's steps; None where it was scored as a whole."""
        return dict(self._steps)

    def score(
        self,
        prompts: Texts,
        completions: Texts,
        columns: Mapping[str, Any],
        *,
        runs: Sequence[Run | None] | None = None,
    ) -> dict[str, list[Score]]:
        """By reward, one score for each completion; None where it gave none, or no sound one.

        ``runs`` holds what was recorded of each completion, for the rewards that ask for it.

        Raises:
            RewardError: there are more or fewer runs than completions.
        """
        if runs is not None and len(runs) != len(completions):
            raise RewardError(f"{len(runs)} runs were given for {len(completions)} completions; give one for each")
        batch = Batch(prompts, completions, columns, runs)
        asked = [_Asked(reward, batch, self._cache, self.rules) for reward in self.rewards]
        jobs = [ask.job for ask in asked if ask.job.places]
        self._waiting.begin([job for job in jobs if job.is_async])
        for job in jobs:
            if not job.is_async:
                do_job(job, self._waiting.finish)
        self._waiting.collect()
        for ask in asked:
            ask.keep()
            ask.job.close()
            self._count(ask)
        self._steps = {ask.reward.name: ask.steps() for ask in asked}
        return {ask.reward.name: ask.scores() for ask in asked}

    def too_many_failed(self, *, at_the_end: bool = False) -> str | None:
        """Why a run cannot go on like this, in plain words; ``at_the_end`` one call is enough to say so."""
        reasons = []
        for name, last in self._last.items():
            samples, failed = sum(call[0] for call in last), sum(call[1] for call in last)
            if samples and failed / samples > self.rules.most_failed and (at_the_end or len(last) >= _FEWEST):
                first = next(text for _, _, text in last if text)
                share, allowed = f"{failed / samples:.0%}", f"{self.rules.most_failed:.0%}"
                reasons.append(
                    f"reward {name!r} gave no sound score for {failed} of the last {samples} completions "
                    f"({share}; reward_failures allows {allowed}). The first: it {first}"
                )
        return "\n".join(reasons) or None

    def summary(self) -> list[str]:
        """One line for each reward that failed on a sample, with what and how often."""
        lines = []
        for name, counts in self._counts.items():
            if counts.failed:
                kinds = ", ".join(f"{kind} {number}" for kind, number in counts.by_kind.items())
                lines.append(
                    f"reward {name!r} gave no sound score for {counts.failed} of {counts.samples} completions "
                    f"({kinds}); they counted as None. The first: it {counts.first_error}"
                )
        return lines

    def close(self) -> None:
        """Let go of the event loop and of the cache."""
        self._waiting.close()
        if self._cache is not None:
            self._cache.close()

    def _count(self, ask: "_Asked") -> None:
        name = ask.reward.name
        all_told = self.everywhere(ask.told())
        failed: Counter[FaultKind] = Counter()
        for told in all_told:
            failed.update({kind: number for kind, (number, _) in told.faults.items()})
        words = [text for told in all_told for _, text in told.faults.values()][:1]
        samples, none, hits = (
            sum(numbers) for numbers in zip(*((told.samples, told.none, told.hits) for told in all_told), strict=True)
        )
        for counts in (self._counts[name], self._step[name]):
            counts.samples += samples
            counts.none += none
            counts.failed += failed.total()
            counts.hits += hits
            counts.calls += sum(told.calls for told in all_told)
            counts.seconds += sum(told.seconds for told in all_told)
            counts.by_kind.update(failed)
            counts.nan, counts.infinite = counts.by_kind["NaN"], counts.by_kind["infinite"]
            counts.first_error = counts.first_error or (words[0] if words else None)
        self._shares[name] = samples, none, failed.total(), hits
        self._last[name].append((samples, failed.total(), "".join(words)))
        for kind, number in failed.items():
            first = next(told.faults[kind][1] for told in all_told if kind in told.faults)
            self._warn_of(name, kind, f"{first}; {number} of {samples}")

    def _warn_of(self, name: str, kind: FaultKind, what: str) -> None:
        if (name, kind) not in self._said:
            self._said.add((name, kind))
            self._warn(
                f"reward {name!r} {what} completions of this batch count as None (no score). It is said once and "
                "counted from here on"
            )


class _Asked:
    """One reward and one batch: what is known already, what is still to be asked, and what came of it."""

    def __init__(self, reward: Reward, batch: Batch, cache: RewardCache | None, rules: CallRules) -> None:
        self.reward = reward
        self.batch = batch
        self._cache = cache
        everyone = list(range(len(batch.completions)))
        self._keys = _keys(reward, batch) if cache is not None and everyone else None
        self.hits = self._known(everyone)
        self.job = Job(reward, batch, [place for place in everyone if place not in self.hits], rules)

    def _known(self, places: Sequence[int]) -> dict[int, Score]:
        if self._cache is None or self._keys is None:
            return {}
        kept = self._cache.read(self._keys)
        found = {place: kept[self._keys[place]] for place in places if self._keys[place] in kept}
        if not declared(self.reward.fn, "whole_group"):
            return found
        whole = [group for group in self.batch.groups(places) if all(place in found for place in group)]
        return {place: found[place] for group in whole for place in group}

    def faults(self) -> dict[int, Fault]:
        return {place: outcome for place, outcome in sorted(self.job.outcomes.items()) if isinstance(outcome, Fault)}

    def scores(self) -> list[Score]:
        found = {**self.hits, **self.job.outcomes}
        each = [found.get(place) for place in range(len(self.batch.completions))]
        return [None if isinstance(outcome, Fault) else outcome for outcome in each]

    def told(self) -> _Told:
        """What is counted of it."""
        faults, completions = self.faults(), self.batch.completions
        kinds: dict[FaultKind, tuple[int, str]] = {}
        for place, fault in faults.items():
            number, first = kinds.get(fault.kind, (0, _in_words(fault, completions[place])))
            kinds[fault.kind] = number + 1, first
        none = sum(score is None for score in self.scores()) - len(faults)
        return _Told(len(completions), none, len(self.hits), self.job.calls, self.job.seconds, kinds)

    def steps(self) -> list[list[Score] | None]:
        return [self.job.steps.get(place) for place in range(len(self.batch.completions))]

    def keep(self) -> None:
        """Write down what was asked and answered soundly; not the sums of steps, which would hide the steps."""
        if self._cache is not None and self._keys is not None:
            sound = {place: outcome for place, outcome in self.job.outcomes.items() if not isinstance(outcome, Fault)}
            whole = {place: score for place, score in sound.items() if place not in self.job.steps}
            self._cache.write({self._keys[place]: score for place, score in whole.items()})


def _keys(reward: Reward, batch: Batch) -> list[bytes] | None:
    """A key for each sample, or None for a reward whose scores are not kept."""
    columns = {name: value for name, value in batch.columns.items() if name not in RUNTIME}
    places = range(len(batch.completions))
    groups = batch.groups(places) if declared(reward.fn, "whole_group") else [[place] for place in places]
    try:
        source = identity(reward)
        given = reward.arguments(batch.prompts, batch.completions, columns, batch.runs)
        return sample_keys(source, given, groups)
    except Unkeyed:
        return None
    except Exception:  # noqa: BLE001 - copying a column may fail; the call itself will say so
        return None


def _in_words(fault: Fault, completion: object) -> str:
    return f"{fault.text} (completion: {short(completion)})"


def caller_for(
    config: "TrainConfig", rewards: Sequence[Reward], *, warn: Callable[[str], None] = logger.warning
) -> Caller:
    """Calls ``rewards`` as ``config`` says."""
    rules = CallRules(
        timeout=config.reward_timeout,
        retries=config.reward_retries,
        most_failed=config.reward_failures,
        at_once=config.reward_concurrency,
    )
    return Caller(rewards, rules, cache=RewardCache(warn=warn) if config.reward_cache else None, warn=warn)


def told_of(counts: Mapping[str, RewardCounts], rewards: Sequence[Reward] = ()) -> dict[str, dict[str, Any]]:
    """The counts as a step's event tells them, by reward; ``none`` and ``failed`` are shares.

    What a judge has used since it was made is told with them.
    """
    used = {reward.name: usage for reward in rewards if (usage := declared(reward.fn, "usage")) is not None}
    return {
        name: {
            "samples": found.samples,
            "none": found.none / max(found.samples, 1),
            "failed": found.failed / max(found.samples, 1),
            "nan": found.nan,
            "infinite": found.infinite,
            "hits": found.hits,
            "seconds": round(found.seconds, 3),
            **({"error": found.first_error} if found.first_error else {}),
            **({"usage": used[name].model_dump()} if isinstance(used.get(name), Record) else {}),
        }
        for name, found in counts.items()
    }
