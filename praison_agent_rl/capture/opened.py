"""Which recordings are open and which of them take a turn or a call: a matter of look-ups, however many there are."""

import itertools
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from praison_agent_rl.capture.outlets import Outlet, Writer
from praison_agent_rl.transcripts.masking import Mask

GROUP_STYLES = ("team", "flow", "planning")
"""Turns that ask through other turns, those of their agents or of a planner, which are recorded as they are."""


class _Turn(Protocol):
    style: str
    takers: "tuple[Recording, ...]"


class _Stream(Protocol):
    def cut_off(self, recording: "Recording") -> None:
        """Record as much as has come, as far as nobody else will."""


class Recording:
    """A recording under way; use it as a context manager, or `stop` it. It holds no agent alive."""

    def __init__(
        self, outlet: Outlet, agents: Sequence[Any] = (), *, mask: Mask, tags: Sequence[str] = (), sample: float = 1.0
    ) -> None:
        self.tags = list(tags)
        self.sample = sample
        self.mask = mask
        self.streams: set[_Stream] = set()
        """Calls of its turns whose streams are being read."""
        self.number = -1
        """Its place among all that were started."""
        self._outlet = outlet
        self._agents = [weakref.ref(agent, self._miss) for agent in agents if not isinstance(agent, str)]
        self._patterns = [agent for agent in agents if isinstance(agent, str)]
        self.keys = frozenset(id(agent) for agent in agents if not isinstance(agent, str))
        """By which it is found; ids are given anew once an agent is gone, so that they are only a hint."""
        self._runs = 0
        self._calls = 0

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "open" if is_open(self) else "stopped"
        return f"<Recording to {str(self.store)!r}, {state}, {self.counts}>"

    @property
    def outlet(self) -> Outlet:
        """Where it writes."""
        return self._outlet

    @property
    def store(self) -> Path:
        """Folder that it writes to."""
        return self._outlet.store

    @property
    def counts(self) -> dict[str, int]:
        """Runs and calls handed to the writer, and lines of this store that were lost (``dropped``)."""
        return {"runs": self._runs, "calls": self._calls, "dropped": self._outlet.dropped}

    @property
    def takes_by_agent(self) -> bool:
        """Whether it can take a turn outside of others only if that is of one of its agents."""
        return bool(self._agents) and not self._patterns

    def start(self) -> "Recording":
        """Take the turns and calls that begin from now on."""
        with _OPEN.lock:
            _OPEN.add(self)
        return self

    def stop(self) -> None:
        """Record nothing more; it is safe to call this twice. Of streams that are still read, what came is kept."""
        with _OPEN.lock:
            if not is_open(self):
                return
            last = _OPEN.remove(self)
        while self.streams:
            self.streams.pop().cut_off(self)
        if last:
            self._outlet.send(lambda writer: writer.close())

    def takes_turn(self, owner: Any, parent: _Turn | None, root: str) -> bool:
        """Whether it records this turn of ``owner``; a turn in another one is sampled as the outermost is."""
        if zlib.crc32(root.encode()) >= self.sample * 2**32:
            return False
        if not self._agents and not self._patterns:
            return True
        if parent is not None and parent.style in GROUP_STYLES and self in parent.takers:
            return True
        name = str(getattr(owner, "name", None))
        return any(agent() is owner for agent in self._agents) or any(fnmatchcase(name, p) for p in self._patterns)

    def takes_stray_calls(self, call: str) -> bool:
        """Whether it records a call that belongs to no turn."""
        return not self._agents and not self._patterns and zlib.crc32(call.encode()) < self.sample * 2**32

    def count(self, *, runs: int = 0, calls: int = 0) -> None:
        """Count what the writer has got. Called while sending only: see `Outlet.send` about locks."""
        with _OPEN.lock:
            self._runs += runs
            self._calls += calls

    def _miss(self, _: object) -> None:
        """One of its agents is gone. Called anywhere, so that nothing but noting it is safe."""
        if self.takes_by_agent and all(agent() is None for agent in self._agents):
            _OPEN.forsaken.append(self)


class _OpenRecordings:
    """The recordings of this process that have not been stopped."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.forsaken: deque[Recording] = deque()
        """Recordings whose agents are all gone, which nobody else knows of."""
        self.all: dict[Recording, None] = {}
        self.outlets: dict[Path, Outlet] = {}
        self._numbers = itertools.count()
        self._general: tuple[Recording, ...] = ()
        self._by_agent: dict[int, tuple[Recording, ...]] = {}

    def add(self, recording: Recording) -> None:
        recording.number = next(self._numbers)
        recording.outlet.join(recording.number, recording.mask)
        if recording.takes_by_agent:
            for key in recording.keys:
                self._by_agent[key] = (*self._by_agent.get(key, ()), recording)
        else:
            self._general = (*self._general, recording)
        self.all[recording] = None

    def remove(self, recording: Recording) -> bool:
        """Whether it was the last that wrote to its store."""
        del self.all[recording]
        self._general = tuple(other for other in self._general if other is not recording)
        for key in recording.keys:
            left = tuple(other for other in self._by_agent.pop(key, ()) if other is not recording)
            if left:
                self._by_agent[key] = left
        last = recording.outlet.leave(recording.number)
        if last:
            self.outlets.pop(recording.store, None)
        return last

    def candidates(self, owner: Any, parent: _Turn | None) -> Iterable[Recording]:
        found = (*self._general, *self._by_agent.get(id(owner), ()))
        if parent is not None and parent.style in GROUP_STYLES:
            found = (*found, *(taker for taker in parent.takers if taker in self.all))
        return found if len(found) < 2 else sorted(set(found), key=lambda recording: recording.number)

    def stray_candidates(self) -> tuple[Recording, ...]:
        return self._general


_OPEN = _OpenRecordings()


def open_recordings() -> tuple[Recording, ...]:
    """Recordings that have not been stopped."""
    return tuple(_OPEN.all)


def is_recording() -> bool:
    """Whether any recording is open."""
    return bool(_OPEN.all)


def is_open(recording: Recording) -> bool:
    """Whether it has not been stopped."""
    return recording in _OPEN.all


def takers_of_turn(owner: Any, parent: _Turn | None, root: str) -> tuple[Recording, ...]:
    """The recordings that take a turn of ``owner``, in the order in which they were started."""
    return tuple(r for r in _OPEN.candidates(owner, parent) if r.takes_turn(owner, parent, root))


def takers_of_stray_call(call: str) -> tuple[Recording, ...]:
    """The recordings that take a call outside of any turn."""
    return tuple(r for r in _OPEN.stray_candidates() if r.takes_stray_calls(call))


def outlet_at(store: Path, open_writer: Callable[[Path], Writer]) -> Outlet:
    """Where to write: recordings to one store share one outlet, so that nothing is kept twice."""
    with _OPEN.lock:
        outlet = _OPEN.outlets.get(store)
        if outlet is None:
            outlet = _OPEN.outlets[store] = Outlet(open_writer(store), store)
        return outlet


def stop_forsaken() -> None:
    """Stop the recordings whose agents are all gone."""
    while _OPEN.forsaken:
        _OPEN.forsaken.popleft().stop()
