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
        self.outlet = outlet
        """Where it writes."""
        self._agents = [weakref.ref(agent, self._miss) for agent in agents if not isinstance(agent, str)]
        self._patterns = [agent for agent in agents if isinstance(agent, str)]
        self.takes_all = not agents and sample >= 1
        """Whether it takes each turn of every agent."""
        self.keys = frozenset(id(agent) for agent in agents if not isinstance(agent, str))
        """By which it is found; ids are given anew once an agent is gone, so that they are only a hint."""
        self.runs = 0
        self.calls = 0
        """What its outlet's writer has got; counted by one thread at a time, as that writes."""

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "open" if is_open(self) else "stopped"
        return f"<Recording to {str(self.store)!r}, {state}, {self.counts}>"

    @property
    def store(self) -> Path:
        """Folder that it writes to."""
        return self.outlet.store

    @property
    def counts(self) -> dict[str, int]:
        """Runs and calls handed to the writer, and lines of this store that were lost (``dropped``)."""
        self.outlet.settle()
        return {"runs": self.runs, "calls": self.calls, "dropped": self.outlet.dropped}

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
            self.outlet.now(lambda writer: writer.close())
        else:
            self.outlet.settle()

    def takes_turn(self, owner: Any, parent: _Turn | None, root: str) -> bool:
        """Whether it records this turn of ``owner``; a turn in another one is sampled as the outermost is."""
        if self.sample < 1 and zlib.crc32(root.encode()) >= self.sample * 2**32:
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
        self.general: tuple[Recording, ...] = ()
        """Those that may take a turn of any agent."""
        self.by_agent: dict[int, tuple[Recording, ...]] = {}
        """The others, by the ids of their agents."""

    def add(self, recording: Recording) -> None:
        recording.number = next(self._numbers)
        recording.outlet.join(recording.number, recording.mask)
        if recording.takes_by_agent:
            for key in recording.keys:
                self.by_agent[key] = (*self.by_agent.get(key, ()), recording)
        else:
            self.general = (*self.general, recording)
        self.all[recording] = None

    def remove(self, recording: Recording) -> bool:
        """Whether it was the last that wrote to its store."""
        del self.all[recording]
        self.general = tuple(other for other in self.general if other is not recording)
        for key in recording.keys:
            left = tuple(other for other in self.by_agent.pop(key, ()) if other is not recording)
            if left:
                self.by_agent[key] = left
        last = recording.outlet.leave(recording.number)
        if last:
            self.outlets.pop(recording.store, None)
        return last

    def candidates(self, owner: Any, parent: _Turn | None) -> Iterable[Recording]:
        own = self.by_agent.get(id(owner))
        found = self.general if own is None else (*self.general, *own)
        if parent is not None and parent.style in GROUP_STYLES:
            found = (*found, *(taker for taker in parent.takers if taker in self.all))
        return found if len(found) < 2 else sorted(set(found), key=lambda recording: recording.number)


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
    general = _OPEN.general
    if parent is None and len(general) == 1 and general[0].takes_all and id(owner) not in _OPEN.by_agent:  # as mostly
        return general
    return tuple([r for r in _OPEN.candidates(owner, parent) if r.takes_turn(owner, parent, root)])


def takers_of_stray_call(call: str) -> tuple[Recording, ...]:
    """The recordings that take a call outside of any turn."""
    return tuple(r for r in _OPEN.general if r.takes_stray_calls(call))


def by_outlet(takers: Sequence[Recording]) -> dict[Outlet, Sequence[Recording]]:
    """Those of ``takers`` that are still open, by where they write: one store gets one copy."""
    still = _OPEN.all
    if len(takers) == 1:
        return {takers[0].outlet: takers} if takers[0] in still else {}
    outlets: dict[Outlet, list[Recording]] = {}
    for taker in takers:
        if taker in still:
            outlets.setdefault(taker.outlet, []).append(taker)
    return {**outlets}


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
