"""Async rewards, all at once on one event loop in the background, with a limit to what is in flight."""

import asyncio
import concurrent.futures
import itertools
import math
import queue
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from praison_agent_rl.deadlines import LoopThread, TimedOut, in_a_thread
from praison_agent_rl.scoring.jobs import CallRules, Job, Place
from praison_agent_rl.scoring.readings import Fault, Said, Unsound, Value, told

_ALONE = 4.0  # timeouts that all parts together may take which are asked one after the other
_SMALL = 4  # a part of a batch that is asked so is given this fraction of the timeout
_BLOCKED = "does not await but keeps the event loop to itself; let it await, or make it a plain function"


class Part(NamedTuple):
    """Some samples that an async reward is asked about in one call."""

    job: Job
    places: list[Place]


class Came(NamedTuple):
    """What came of a part."""

    part: int
    outcomes: list[Value]
    said: Said
    failed: Unsound | None


@dataclass
class _Round:
    """Parts on their way in one event loop; what is told after it was given up reaches nobody."""

    parts: Mapping[int, Part]
    rules: CallRules
    came: "queue.SimpleQueue[Came]" = field(default_factory=queue.SimpleQueue)
    stop: Callable[[], Any] = lambda: None
    in_flight: set[int] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    """Rewards of which a call came to an end."""
    hung: Counter[str] = field(default_factory=Counter)
    """By reward: calls that timed out."""

    async def run(self) -> None:
        gate = asyncio.Semaphore(self.rules.at_once)
        await asyncio.gather(*(self._ask(number, gate) for number in self.parts))

    async def _ask(self, number: int, gate: asyncio.Semaphore) -> None:
        failed: Unsound | None = None
        for attempt in range(self.rules.retries + 1):
            if attempt:
                await asyncio.sleep(self.rules.pause * 2 ** (attempt - 1))
            async with gate:
                came = await self._call(number)
            failed = came.failed
            if failed is None:
                break
        self.came.put(came)

    async def _call(self, number: int) -> Came:
        job, places = self.parts[number]
        name, said = job.reward.name, Said()
        if name not in self.ended and self.hung[name] >= self.rules.at_once:
            return Came(number, [], said, Unsound(Fault("timed out", "was not asked: all calls before it timed out")))
        job.calls += 1
        self.in_flight.add(number)
        task = asyncio.create_task(read_part(job, places, said), name=str(number))
        task.add_done_callback(_heard)
        limit = job.limit(places)
        try:
            await asyncio.wait({task}, timeout=limit)
            error = _error_of(task)
        finally:
            said.over = True
            self.in_flight.discard(number)
            task.cancel()  # and not waited for: it may not heed it
        if isinstance(error, TimedOut):
            self.hung[name] += 1
        else:
            self.ended.add(name)
        return Came(number, [], said, told(error, limit)) if error else Came(number, task.result(), said, None)


async def read_part(job: Job, places: list[Place], said: Said) -> list[Value]:
    """Ask ``job`` about the samples at ``places``."""
    try:
        return job.read(places, await job.begin(places, said))
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
        raise told(error, 0) from error


def _error_of(task: "asyncio.Task[Any]") -> BaseException | None:
    if not task.done():
        return TimedOut()
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _heard(task: "asyncio.Task[Any]") -> None:
    """Look at a task's error, so that asyncio does not say that nobody did."""
    if not task.cancelled():
        task.exception()


class Waiting:
    """Has the event loop, as long as the rewards are used: what they share, such as a connection, belongs to it."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._loop: LoopThread | None = None
        self._begun: tuple[_Round, float] | None = None
        self._start = 0.0

    def finish(self, awaitable: Awaitable[Any], seconds: float) -> Any:
        """Wait for what a plain function gave to be awaited; raises TimedOut."""

        async def outcome() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
                raise told(error, seconds) from error

        loop = self._running()
        done = asyncio.run_coroutine_threadsafe(outcome(), loop.loop)
        try:
            return done.result(max(seconds, 0))
        except (concurrent.futures.TimeoutError, TimeoutError):
            if done.done():  # it is its own
                raise
            done.cancel()
            if not loop.reacts(1.0):
                self._give_up()
            raise TimedOut from None

    def begin(self, jobs: Sequence[Job]) -> None:
        """Let the jobs of async rewards begin."""
        if not jobs:
            return
        number = itertools.count()
        parts = {next(number): Part(job, places) for job in jobs for places in job.parts}
        self._start = time.monotonic()
        self._send(parts, self._time_for(parts))

    def _time_for(self, parts: Mapping[int, Part]) -> float:
        """When all ``parts`` must have come."""
        longest = max((part.job.limit(part.places) for part in parts.values()), default=0.0)
        rounds = math.ceil(len(parts) / self._rules.at_once) + self._rules.retries + 1
        return time.monotonic() + longest * rounds

    def collect(self) -> None:
        """Wait for all that was begun."""
        while self._begun is not None:
            round_, ends = self._begun
            left = self._listen(round_, ends)
            self._begun = None
            if time.monotonic() >= ends:
                _fail(left, Fault("out of time", "left no time for all to be asked"))
                round_.stop()
            elif left:
                blamed = self._blamed(round_, left)
                names = {part.job.reward.name for part in blamed.values()}
                others = {number: part for number, part in left.items() if part.job.reward.name not in names}
                rest = {number: part for number, part in left.items() if number not in blamed and number not in others}
                self._give_up()
                self._send(others, self._time_for(others))
                _fail(blamed, Fault("timed out", _BLOCKED))
                self._ask_alone(rest)

    def _ask_alone(self, parts: Mapping[int, Part]) -> None:
        """Ask one after the other, each in a loop of its own: a reward that keeps a loop to itself stops no other."""
        ends = time.monotonic() + _ALONE * self._rules.timeout
        for number, (job, places) in parts.items():
            said, limit = Said(), min(job.limit(places) / _SMALL, ends - time.monotonic())
            if limit <= 0:
                _fail({number: parts[number]}, Fault("out of time", f"left no time for all to be asked: it {_BLOCKED}"))
                continue
            job.calls += 1
            try:
                outcomes = in_a_thread(limit, partial(asyncio.run, read_part(job, places, said)))
                job.accept(places, outcomes, said)
            except Exception as error:  # noqa: BLE001 - the reward boundary: user code may raise anything
                job.fail(places, told(error, limit).fault)
            finally:
                said.over = True
            job.seconds = time.monotonic() - self._start

    def close(self) -> None:
        """End the loop."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _running(self) -> LoopThread:
        if self._loop is None:
            self._loop = LoopThread()
        return self._loop

    def _send(self, parts: Mapping[int, Part], ends: float) -> None:
        if parts:
            round_ = _Round(parts, self._rules)
            self._begun = round_, ends
            round_.stop = self._running().start(round_.run())

    def _give_up(self) -> None:
        if self._loop is not None:
            self._loop.abandon()
            self._loop = None

    def _listen(self, round_: _Round, ends: float) -> dict[int, Part]:
        """Take over what comes; what is left when the time is over or the loop is stuck."""
        left = dict(round_.parts)
        while left:
            wait = min(ends - time.monotonic(), self._rules.timeout)
            try:
                came = round_.came.get(timeout=max(wait, 0))  # what has come by then still counts
            except queue.Empty:
                if wait > 0 and self._running().reacts(self._rules.timeout):
                    continue
                break
            job, places = left.pop(came.part)
            job.seconds = time.monotonic() - self._start
            if came.failed is None:
                job.accept(places, came.outcomes, came.said)
            else:
                job.fail(places, came.failed.fault)
        return left

    def _blamed(self, round_: _Round, left: Mapping[int, Part]) -> dict[int, Part]:
        """The part that holds the loop, or all in flight where that cannot be told."""
        named = self._running().busy_with() or ""
        guilty = {int(named)} if named.isdecimal() and int(named) in left else set(round_.in_flight)
        return {number: part for number, part in left.items() if number in guilty} or dict(left)


def _fail(parts: Mapping[int, Part], fault: Fault) -> None:
    for job, places in parts.values():
        job.fail(places, fault)
