"""One reward's work on one batch: a call that fails is made again, then smaller, until only what is at fault has none.

It knows nothing of caches, counts or training.
"""

import inspect
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from praison_agent_rl.deadlines import end_copies, within
from praison_agent_rl.records import Run
from praison_agent_rl.rewards import Reward, Score, Text
from praison_agent_rl.scoring.names import declared
from praison_agent_rl.scoring.readings import (
    Fault,
    Outcome,
    Said,
    Stepped,
    Unsound,
    Value,
    outcome_of,
    read_values,
    told,
)

Place = int
"""Of a sample in the batch."""
Finish = Callable[[Awaitable[Any], float], Any]
"""Waits for an awaitable, for at most so many seconds; raises TimedOut."""

_WHOLE = ("trainer_state", "log_extra", "log_metric")  # not a list with one entry for each sample
_USUAL = 64  # completions in a call for which the timeout is meant; more may take longer in proportion
_SMALLEST = 4  # a part of a batch is given its share of the timeout, but at least this fraction of it
_SPLIT = 4.0  # timeouts that all the smaller calls of one batch may take together


@dataclass(frozen=True)
class CallRules:
    """How rewards are called, from the configuration's keys ``reward_*``."""

    timeout: float = 60.0
    """Seconds for one call of one reward with a batch of up to 64 completions; larger ones may take longer."""
    retries: int = 1
    """How often a call that failed is made again before it is made smaller."""
    most_failed: float = 0.2
    """Share of samples without a sound score above which a run stops."""
    at_once: int = 8
    """Calls of async rewards in flight."""
    pause: float = 0.2
    """Seconds before a call is made again; doubled each time."""


@dataclass(frozen=True)
class Batch:
    """What is to be scored."""

    prompts: Sequence[Text]
    completions: Sequence[Text]
    columns: Mapping[str, Any]
    runs: Sequence[Run | None] | None = None
    """What was recorded of each completion; None where nothing was."""

    def take(self, places: Sequence[Place]) -> "Batch":
        """The samples at ``places``."""
        columns = {
            name: value if name in _WHOLE or value is None else [value[i] for i in places]
            for name, value in self.columns.items()
        }
        runs = None if self.runs is None else [self.runs[i] for i in places]
        return Batch([self.prompts[i] for i in places], [self.completions[i] for i in places], columns, runs)

    def groups(self, places: Sequence[Place]) -> list[list[Place]]:
        """``places`` by prompt."""
        found: dict[str, list[Place]] = {}
        for place in places:
            found.setdefault(repr(self.prompts[place]), []).append(place)
        return list(found.values())


class Job:
    """What one reward is asked in one batch, and what came of it so far; ``outcomes`` ends with all ``places``."""

    def __init__(self, reward: Reward, batch: Batch, places: Sequence[Place], rules: CallRules) -> None:
        self.reward = reward
        self.batch = batch
        self.places = list(places)
        self.rules = rules
        self.outcomes: dict[Place, Outcome] = {}
        self.steps: dict[Place, list[Score]] = {}
        self.calls = 0
        self.seconds = 0.0
        self.extra: dict[str, dict[Place, Any]] = {}
        self.metrics: list[tuple[str, Any]] = []

    def limit(self, places: Sequence[Place]) -> float:
        """Seconds for one call with the samples at ``places``."""
        return self.rules.timeout * max(1.0, len(places) / _USUAL)

    @property
    def is_async(self) -> bool:
        """Whether calling the reward only begins its work."""
        fn = self.reward.fn
        return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004

    @property
    def parts(self) -> list[list[Place]]:
        """The smallest parts that it can be asked in."""
        if declared(self.reward.fn, "whole_group"):
            return self.batch.groups(self.places)
        return [[place] for place in self.places] if self.reward.by_sample else [self.places]

    def begin(self, places: Sequence[Place], said: Said) -> Any:
        """Call the reward with the samples at ``places``; what it returns, unread."""
        part = self.batch.take(places)
        given = self.reward.arguments(part.prompts, part.completions, said.stands_in(part.columns), part.runs)
        return self.reward.fn(**given)

    def read(self, places: Sequence[Place], values: object) -> list[Value]:
        """What the reward returned for the samples at ``places``; raises Unsound."""
        part = self.batch.take(places)
        return read_values(values, len(places), self.reward.step_counts(part.completions, part.runs))

    def accept(self, places: Sequence[Place], values: Sequence[Value], said: Said) -> None:
        """Take over what a call brought."""
        read = list(zip(places, values, strict=True))
        self.outcomes |= {place: outcome_of(value) for place, value in read}
        self.steps |= {place: value.steps for place, value in read if isinstance(value, Stepped)}
        for column, values in said.extra.items():
            if len(values) == len(places):  # else nobody knows whose they are
                self.extra.setdefault(column, {}).update(zip(places, values, strict=True))
        self.metrics += said.metrics

    def fail(self, places: Sequence[Place], fault: Fault) -> None:
        """Let the samples at ``places`` have no score."""
        self.outcomes |= dict.fromkeys(places, fault)

    def close(self) -> None:
        """Pass on what the reward logged."""
        log_extra, log_metric = (self.batch.columns.get(name) for name in ("log_extra", "log_metric"))
        if log_extra is not None:
            for column, values in self.extra.items():
                log_extra(column, [values.get(place) for place in range(len(self.batch.prompts))])
        if log_metric is not None:
            for name, value in self.metrics:
                if isinstance(value, int | float) and math.isfinite(value):  # TRL adds them up
                    log_metric(name, float(value))


def do_job(job: Job, finish: Finish) -> None:
    """Do the job of a reward that works when it is called."""
    start = time.monotonic()
    failed = _try_whole(job, finish)
    if failed is not None:
        _do_smaller(job, failed, finish)
    job.seconds = time.monotonic() - start


def _try_whole(job: Job, finish: Finish) -> Unsound | None:
    failed, limit = None, job.limit(job.places)
    for attempt in range(job.rules.retries + 1):
        if attempt:
            time.sleep(min(job.rules.pause * 2 ** (attempt - 1), limit))
        failed = _try(job, job.places, finish, limit)
        if failed is None:
            break
    return failed


def _do_smaller(job: Job, failed: Unsound, finish: Finish) -> None:
    """Ask in smaller parts: halves of halves, or single samples at once where the number of values was wrong."""
    smallest = job.parts
    if len(smallest) == 1 or (failed.got == 1 and len(smallest) > 2):
        # one value for many completions: asked one by one it would be believed, though it says nothing of any
        job.fail(job.places, failed.fault)
        return
    limit = job.limit(job.places)
    ends = time.monotonic() + limit * _SPLIT
    waiting = [[part] for part in smallest] if failed.got is not None else list(_halves(smallest))
    while waiting:
        parts = waiting.pop(0)
        places = [place for part in parts for place in part]
        left = ends - time.monotonic()
        if left <= 0:
            job.fail(places, Fault("out of time", f"left no time to be asked in parts ({failed.fault.text})"))
            continue
        share = max(len(places) / len(job.places), 1 / _SMALLEST)
        failed_part = _try(job, places, finish, min(limit * share, left))
        if failed_part is not None and len(parts) == 1:
            job.fail(places, failed_part.fault)
        elif failed_part is not None:
            waiting[:0] = _halves(parts)


def _halves(parts: list[list[Place]]) -> tuple[list[list[Place]], list[list[Place]]]:
    middle = len(parts) // 2
    return parts[:middle], parts[middle:]


def _try(job: Job, places: Sequence[Place], finish: Finish, seconds: float) -> Unsound | None:
    """One call; None if it brought scores."""
    said, ends, own = Said(), time.monotonic() + seconds, os.getpid()
    job.calls += 1

    def call() -> Any:
        values = job.begin(places, said)
        return values if inspect.isawaitable(values) else job.read(places, values)

    try:
        outcomes = within(seconds, call)
        if inspect.isawaitable(outcomes):
            outcomes = job.read(places, finish(outcomes, ends - time.monotonic()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the reward boundary: user code may raise anything
        return told(error, seconds)
    finally:
        end_copies(own)
        said.over = True
    job.accept(places, outcomes, said)
    return None
