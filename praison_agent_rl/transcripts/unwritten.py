"""What this process has yet to write: jobs that a thread of its own does while agents wait for their models.

A lane is the order of one store. What must be written before an agent goes on is done at once, with all that is before
it in its lane, by the agent's own thread; the rest is done by the worker, or by whoever reads a store first.
"""

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Job = Callable[[], None]

_HEAD_START = 0.003
"""Seconds that an agent has to get its request out, for which it needs the interpreter's lock that a job would hold."""
_BREATH = 0.0002
"""Seconds between two jobs of the worker's, for whoever waits for that lock."""
_LOOK = 0.2
"""Seconds between two looks of the worker's, at most."""
_REST = 30.0
"""Seconds without a job after which it looks no more until it is told. To wake it takes an agent as long as a write."""


class Lane:
    """Jobs that are done one after the other, in order; a job raises nothing."""

    def __init__(self) -> None:
        self.restart()
        number = next(_NUMBERS)
        _LANES[number] = weakref.ref(self, lambda _: _LANES.pop(number, None))

    def restart(self) -> None:
        """Begin anew, in a forked child: the jobs are its parent's, and a lock may have been held there."""
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()

    def later(self, job: Job) -> None:
        """Have ``job`` done before long, while the calling thread goes on."""
        self._jobs.append(job)
        if _WORKER.rests:
            _WORKER.tell()

    def now(self, job: Callable[..., None], *given: Any, most: int = sys.maxsize) -> None:
        """Do all that waits here (or ``most`` of it), and then ``job(*given)``.

        A stream may be collected as garbage, and recorded, at any moment, also while this same thread does a job.
        Waiting for that or another lane's lock there could be for ever, so such a job waits for its turn.
        """
        thread = threading.get_ident()
        if thread in _WAITING:
            _WAITING[thread].append(functools.partial(self.now, job, *given))
            return
        waiting = _WAITING[thread] = []
        try:
            with self._lock:
                if self._jobs:
                    self._catch_up(most)
                job(*given)
        finally:
            del _WAITING[thread]
        while waiting:
            waiting.pop(0)()

    @property
    def waits(self) -> bool:
        """Whether there are jobs that nobody has begun with."""
        return bool(self._jobs)

    def settle(self, most: int = sys.maxsize) -> None:
        """Do all that waits here, or ``most`` of it."""
        self.now(_nothing, most=most)

    def _catch_up(self, most: int) -> None:
        for _ in range(min(most, len(self._jobs))):  # what others add meanwhile comes after what this is done for
            self._jobs.popleft()()


def _nothing() -> None:
    pass


def settle() -> None:
    """Write all that waits, so that it can be read; within a job, what is before that job is written already."""
    if threading.get_ident() not in _WAITING:
        for lane in _lanes():
            lane.settle()


class _Worker:
    """The thread that does what is left for later; there is none before something is, nor after a fork."""

    def __init__(self) -> None:
        self.rests = True
        """Whether it looks only when it is told."""
        self._bell: SimpleQueue[None] = SimpleQueue()  # also from within a finaliser
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        self._worked = -_REST
        """When it last had something to do."""

    def tell(self) -> None:
        """Have it look."""
        self.rests = False
        self._bell.put(None)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="praison-agent-rl-recorder", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter shuts down; what waits is written at exit
            self._thread.start()
        if "multiprocessing.util" in sys.modules:  # whose children end without atexit
            from multiprocessing.util import Finalize

            Finalize(None, settle, exitpriority=10)

    def _work(self) -> None:
        while True:
            self._wait()
            self._look()

    def _look(self) -> None:
        for lane in _lanes():
            while lane.waits:
                lane.settle(1)
                self._worked = time.monotonic()
                time.sleep(_BREATH)

    def _wait(self) -> None:
        """Until it is likely that there is something to do: the more seldom that was so lately, the longer."""
        idle = time.monotonic() - self._worked
        if idle >= _REST:
            self.rests = True
            if not any(lane.waits for lane in _lanes()):  # left by somebody who did not know yet that it rests
                self._bell.get()
            self.rests, self._worked, idle = False, time.monotonic(), 0.0
        time.sleep(max(_HEAD_START, min(idle / 2, _LOOK)))


_WAITING: dict[int, list[Job]] = {}
"""By the threads that do a job, what came up within it."""
_NUMBERS = itertools.count()
_LANES: "dict[int, weakref.ref[Lane]]" = {}
_WORKER = _Worker()


def _lanes() -> list[Lane]:
    return [lane for known in tuple(_LANES.values()) if (lane := known()) is not None]


def _restart() -> None:
    global _WORKER
    _WORKER = _Worker()
    for thread in _WAITING.keys() - {threading.get_ident()}:  # which are not here
        del _WAITING[thread]
    for lane in _lanes():
        lane.restart()


if sys.platform != "win32":
    # what waits is written before, for whoever forks may end next without another line, as daemons do
    os.register_at_fork(before=settle, after_in_child=_restart)
