"""What the threads of an endpoint share: rollouts that are to be made, those under way, and their calls that wait."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from praison_agent_rl.agent_rollouts.chat_forms import Asked, Drawn, Refusal
from praison_agent_rl.agent_rollouts.jobs import Rollout, RolloutJob, RolloutOutcome, TokenCall
from praison_agent_rl.errors import AgentError

GRACE = 10.0
"""Seconds beyond its own time after which a rollout is taken for lost."""
QUIET = (0.005, 0.1)
"""Time without a new call after which those that wait are drawn: at least so many seconds, or this share of a draw."""
LONGEST_GATHERING = (0.05, 0.3)
"""Time after which they are drawn though more keep coming.

To draw for a few takes about as long as for many, so waiting pays in proportion. Of 8 agents with tools that were
answered at the same time (praisonaiagents 1.7.17 on 2 cores, draws of 1 s), the first asked again so much earlier than
the others that after 5 ms of quiet each turn was drawn in two batches, of 1 and 7; after 50 ms all were in one.
"""


@dataclass(eq=False)
class WaitingCall:
    """A call of a rollout to the policy, until it is answered."""

    job: str
    agent: str
    asked: Asked
    is_connected: Callable[[], bool]
    """Whether whoever asked still waits for the answer."""
    time: float
    """Unix seconds."""
    number: int
    """Among the calls of its rollout."""
    prompt_ids: list[int] = field(default_factory=list)
    record: TokenCall | None = None
    """What the rollout keeps of it."""
    drawn: Drawn | None = None
    refusal: Refusal | None = None
    settled: threading.Event = field(default_factory=threading.Event)
    """Whether one of the two is there."""

    def give(self, drawn: Drawn) -> None:
        """Answer it."""
        self.drawn = drawn
        self.settled.set()

    def refuse(self, refusal: Refusal) -> None:
        """Say that there is no answer, unless there is one."""
        if not self.settled.is_set():
            self.refusal = refusal
            self.settled.set()


@dataclass(eq=False)
class _Place:
    """A rollout at the desk."""

    job: RolloutJob
    taken: float | None = None
    """When, by the monotonic clock; None while nobody has taken it."""
    outcome: RolloutOutcome | None = None
    calls: list[WaitingCall] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        return self.taken is None and self.outcome is None

    @property
    def is_under_way(self) -> bool:
        return self.taken is not None and self.outcome is None

    @property
    def lost_at(self) -> float:
        return (self.taken or 0.0) + self.job.seconds + GRACE


class Desk:
    """Where hosts take jobs and agents leave calls, for the one thread that draws.

    ``first_host_seconds`` are those that free jobs may lie there, with no rollout under way, before somebody asks.
    """

    def __init__(self, *, first_host_seconds: float) -> None:
        self._first_host_seconds = first_host_seconds
        self._changed = threading.Condition()
        self._places: dict[str, _Place] = {}
        self._waiting: list[WaitingCall] = []
        self._last_asked = 0.0
        """When somebody last asked for a job, or the jobs were laid out; by the monotonic clock."""
        self.is_open = False
        """Whether there may be jobs, now or later."""

    # -- hosts

    def take(self, *, limit: int | None, wait: float, is_connected: Callable[[], bool]) -> list[RolloutJob]:
        """Jobs that nobody has taken; if there are none, up to ``wait`` seconds are given to them.

        Raises:
            Refusal: there will be none.
        """
        until = time.monotonic() + wait
        with self._changed:
            while True:
                self._last_asked = time.monotonic()
                if not self.is_open:
                    raise Refusal(410, "there are no more rollouts: the endpoint is closed")
                free = [place for place in self._places.values() if place.is_free][:limit]
                if free or self._last_asked >= until:
                    break
                self._changed.wait(until - self._last_asked)
            if not is_connected():
                return []
            for place in free:
                place.taken = self._last_asked
            self._changed.notify_all()
            return [place.job for place in free]

    def take_back(self, jobs: Sequence[RolloutJob]) -> None:
        """Offer jobs again that did not reach whoever had asked for them."""
        with self._changed:
            for place in map(self._places.get, (job.id for job in jobs)):
                if place is not None and place.is_under_way:
                    place.taken = None
            self._changed.notify_all()

    def end(self, outcome: RolloutOutcome) -> None:
        """End a rollout.

        Raises:
            Refusal: nobody has taken such a rollout, or it has ended.
        """
        with self._changed:
            place = self._places.get(outcome.id)
            if place is None or place.is_free:
                raise Refusal(404, f"there is no rollout {outcome.id!r} under way")
            if place.outcome is not None:
                raise Refusal(409, f"the rollout {outcome.id!r} has ended before")
            self._end(place, outcome)

    # -- agents

    def begin(self, job: str, agent: str, asked: Asked, is_connected: Callable[[], bool]) -> WaitingCall:
        """Note a call as the next of its rollout.

        Raises:
            Refusal: the rollout is over or unknown.
        """
        with self._changed:
            place = self._place_under_way(job)
            call = WaitingCall(job, agent, asked, is_connected, time.time(), len(place.calls))
            place.calls.append(call)
            return call

    def wait_for(self, call: WaitingCall) -> Drawn:
        """What is drawn for a call whose prompt is known.

        Raises:
            Refusal: the rollout has ended first, or nothing can be drawn.
        """
        with self._changed:
            self._place_under_way(call.job)
            self._waiting.append(call)
            self._changed.notify_all()
        call.settled.wait()
        if call.refusal is not None:
            raise call.refusal
        assert call.drawn is not None
        return call.drawn

    def keep(self, call: WaitingCall, record: TokenCall) -> None:
        """Have the rollout keep ``record`` of a call, in place of what it kept before.

        Raises:
            Refusal: the rollout has ended.
        """
        with self._changed:
            self._place_under_way(call.job)
            call.record = record

    def check_under_way(self, job: str) -> None:
        """Make sure that a rollout can go on.

        Raises:
            Refusal: it is over or unknown.
        """
        with self._changed:
            self._place_under_way(job)

    # -- the thread that draws

    def lay_out(self, jobs: Sequence[RolloutJob]) -> None:
        """Offer jobs in place of the former ones, which have ended.

        Raises:
            AgentError: two have the same id, or the endpoint is not open or has others under way.
        """
        places = {job.id: _Place(job) for job in jobs}
        if len(places) < len(jobs):
            twice = sorted({job.id for job in jobs if sum(other.id == job.id for other in jobs) > 1})
            raise AgentError(f"several rollouts have the same id: {twice}; each needs its own")
        with self._changed:
            if not self.is_open:
                raise AgentError("nobody can ask a RolloutEndpoint that is not open; run within `with endpoint:`")
            if self.ended < len(self._places):
                raise AgentError("a RolloutEndpoint makes one batch of rollouts at a time, and one is under way")
            self._places, self._waiting = places, []
            self._last_asked = time.monotonic()
            self._changed.notify_all()

    @property
    def ended(self) -> int:
        """Rollouts that have ended."""
        return sum(place.outcome is not None for place in self._places.values())

    def next_calls(self, draw_seconds: float = 0.0) -> list[WaitingCall]:
        """All calls that wait, to be drawn together; none if something else has happened.

        ``draw_seconds`` are those that the last draw took.

        Raises:
            AgentError: nobody has asked for jobs.
        """
        with self._changed:
            due = self._next_due()
            if not self._waiting and self.ended < len(self._places):
                self._changed.wait(min(max(due - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
            self._gather(draw_seconds)
            calls, self._waiting = self._waiting, []
        gone = [call for call in calls if not call.is_connected()]
        for call in gone:
            call.refuse(Refusal(400, "whoever asked has gone"))
        return [call for call in calls if call not in gone]

    def rollouts(self) -> list[Rollout]:
        """What has ended, in the order in which the jobs were laid out."""
        with self._changed:
            return [
                Rollout(
                    job=place.job,
                    outcome=place.outcome,
                    calls=[call.record for call in place.calls if call.record is not None],
                )
                for place in self._places.values()
                if place.outcome is not None
            ]

    def clear(self, why: str) -> None:
        """End all that is free or under way; whoever waits is told ``why``."""
        with self._changed:
            for place in self._places.values():
                for call in place.calls:
                    call.refuse(Refusal(500, why))
                if place.outcome is None:
                    self._end(place, RolloutOutcome(id=place.job.id, error=why))

    def close(self) -> None:
        """Let hosts know that nothing more will come."""
        self.clear("the endpoint was closed")
        with self._changed:
            self.is_open = False
            self._changed.notify_all()

    # -- all of these with the lock held

    def _place_under_way(self, job: str) -> _Place:
        place = self._places.get(job)
        if place is None or not place.is_under_way:
            raise Refusal(410, f"the rollout {job!r} is over or was never begun")
        return place

    def _end(self, place: _Place, outcome: RolloutOutcome) -> None:
        place.outcome = outcome
        self._waiting = [call for call in self._waiting if call.job != place.job.id]
        for call in place.calls:
            call.refuse(Refusal(410, f"the rollout {place.job.id!r} is over"))
        self._changed.notify_all()

    def _next_due(self) -> float:
        """When the next rollout is lost, or it is too late for a host; what is due is done."""
        now, due = time.monotonic(), []
        for place in self._places.values():
            if place.is_under_way and place.lost_at <= now:
                error = f"took longer than {place.job.seconds:g} s"
                self._end(place, RolloutOutcome(id=place.job.id, error=error, seconds=now - (place.taken or now)))
            elif place.is_under_way:
                due.append(place.lost_at)
        if due or not (free := sum(place.is_free for place in self._places.values())):
            return min(due, default=now)
        if self._last_asked + self._first_host_seconds <= now:
            raise AgentError(
                f"{free} rollouts wait to be made, and nobody has asked for one in {self._first_host_seconds:g} s; "
                "is the process that has the agent still there, and does its RolloutHost follow this endpoint's "
                "address with its key?"
            )
        return self._last_asked + self._first_host_seconds

    def _gather(self, draw_seconds: float) -> None:
        """Give the agents that were answered together time to ask together."""
        quiet, longest = (max(least, share * draw_seconds) for least, share in (QUIET, LONGEST_GATHERING))
        began = last = time.monotonic()
        while self._waiting and len(self._waiting) < self._under_way():
            left = min(last + quiet, began + longest) - time.monotonic()
            if left <= 0:
                return
            before = len(self._waiting)
            self._changed.wait(left)
            if len(self._waiting) != before:
                last = time.monotonic()

    def _under_way(self) -> int:
        return sum(place.is_under_way for place in self._places.values())
