"""Which recording takes which turn and which call of an agent; faults in here are counted and never raised.

A turn is one answer of an agent to one prompt (a `Run` on disk); the turn of a team or a flow is the parent of its
agents' turns. What is handed to a writer is plain data that nobody changes any more.
"""

import contextlib
import contextvars
import functools
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from praison_agent_rl.capture.outlets import Outlet, Writer
from praison_agent_rl.capture.replies import Fold, Reply, reply_in, reply_of, request_of, snapshot
from praison_agent_rl.swap import server_of

_Result = TypeVar("_Result")

CURRENT: contextvars.ContextVar["Turn | None"] = contextvars.ContextVar("praison_agent_rl_turn", default=None)
"""The innermost turn that the running code belongs to."""

_LOCK = threading.RLock()
_OPEN: list["Recording"] = []
"""Recordings of this process that have not been stopped."""

GROUP_STYLES = ("team", "flow")
"""Turns that ask no model themselves but through the turns of their agents."""


class Recording:
    """A recording under way; use it as a context manager, or `stop` it. It holds no agent alive."""

    def __init__(
        self, outlet: Outlet, agents: Sequence[Any] = (), *, tags: Sequence[str] = (), sample: float = 1.0
    ) -> None:
        self.tags = list(tags)
        self.sample = sample
        self._outlet = outlet
        self._agents = [weakref.ref(agent) for agent in agents if not isinstance(agent, str)]
        self._patterns = [agent for agent in agents if isinstance(agent, str)]
        self._runs = 0
        self._calls = 0

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "open" if self in _OPEN else "stopped"
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
    def forsaken(self) -> bool:
        """Whether all agents that it was made for are gone."""
        return bool(self._agents) and not self._patterns and all(agent() is None for agent in self._agents)

    def start(self) -> "Recording":
        """Take the turns and calls that begin from now on."""
        with _LOCK:
            _OPEN.append(self)
        return self

    def stop(self) -> None:
        """Record nothing more; it is safe to call this twice."""
        with _LOCK:
            if self not in _OPEN:
                return
            _OPEN.remove(self)
            last = not any(other.outlet is self._outlet for other in _OPEN)
        if last:
            self._outlet.send(lambda writer: writer.close())

    def takes_turn(self, owner: Any, parent: "Turn | None", root: str) -> bool:
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
        with _LOCK:
            self._runs += runs
            self._calls += calls


def _count(recordings: Sequence[Recording], **kinds: int) -> None:
    for recording in recordings:
        recording.count(**kinds)


def _begin(run: dict[str, Any], writer: Writer) -> None:
    writer.begin(run)


def open_recordings() -> tuple[Recording, ...]:
    """Recordings that have not been stopped."""
    return tuple(_OPEN)


def is_recording() -> bool:
    """Whether any recording is open."""
    return bool(_OPEN)


def _harmless(action: Callable[..., _Result]) -> Callable[..., _Result | None]:
    """The recorder's boundary: what goes wrong in ``action`` is counted, and the agent goes on."""

    @functools.wraps(action)
    def guarded(*args: Any, **kwargs: Any) -> _Result | None:
        try:
            return action(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the recorder's boundary
            subject = args[0] if args else None
            takers = subject.takers if isinstance(subject, (Turn, PendingCall)) else open_recordings()
            for outlet in by_outlet(takers):
                outlet.lose(error)
            return None

    return guarded


_copied = _harmless(snapshot)


class Turn:
    """One answer of an agent, a team or a flow to one prompt."""

    def __init__(self, owner: Any, prompt: Any, style: str) -> None:
        self.id = os.urandom(8).hex()
        self.owner = weakref.ref(owner)
        self.agent = getattr(owner, "name", None)
        self.style = style
        self.parent = CURRENT.get()
        self.root: str = self.parent.root if self.parent else self.id
        self.takers = tuple(r for r in open_recordings() if r.takes_turn(owner, self.parent, self.root))
        self.streams: set[PendingCall] = set()
        """Calls whose streams are being read."""
        self.failure: str | None = None
        """Error of the last call, if it failed."""
        self.version: str | None = getattr(server_of(owner), "model", None)
        self._session = vars(owner).get("_session_id")
        self._prompt = _copied(prompt) if self.takers else None
        self._began = time.time()
        self._clock = time.perf_counter()
        self._unannounced = [True]
        if self.takers:
            vars(owner)["_rl_last_run"] = self.id

    def announce(self) -> None:
        """Write that the turn began, once."""
        with contextlib.suppress(IndexError):
            self._unannounced.pop()  # by one thread only, and without a lock: see `Outlet.send`
            for outlet, takers in by_outlet(self.takers).items():
                run = self._as_begun(list(dict.fromkeys(tag for taker in takers for tag in taker.tags)))
                outlet.send(functools.partial(_begin, run), functools.partial(_count, takers, runs=1))

    @_harmless
    def close(self, output: Any, error: str | None = None) -> None:
        """Write how the turn ended; the framework answers None where its last call failed."""
        for call in tuple(self.streams):
            call.dropped()
        if not self.takers:
            return
        self.announce()
        error = error or (self.failure if output is None else None)
        seconds = time.perf_counter() - self._clock
        kept = _copied(output)
        for outlet in by_outlet(self.takers):
            outlet.send(lambda writer: writer.end(self.id, output=kept, error=error, seconds=seconds))
        owner = self.owner()
        if owner is not None:
            vars(owner)["_rl_last_run"] = self.id

    def _as_begun(self, tags: list[str]) -> dict[str, Any]:
        return {
            "run": self.id,
            "agent": self.agent,
            "parent": self.parent.id if self.parent else None,
            "session": self._session,
            "tags": tags,
            "style": self.style,
            "prompt": self._prompt,
            "time": self._began,
            "version": self.version,
        }


class PendingCall:
    """A request that was sent and whose reply is not all there yet; it is recorded once, however it ends."""

    def __init__(self, turn: Turn | None, params: dict[str, Any], takers: tuple[Recording, ...], id: str) -> None:
        self.turn = turn
        self.id = id
        self.takers = takers
        self._began = time.time()
        self._clock = time.perf_counter()
        self._request = request_of(params)
        self._fold: Fold | None = None
        self._done = False

    @_harmless
    def answered(self, answer: Any) -> None:
        """Record the whole reply."""
        self._record(reply_of(answer))

    @_harmless
    def failed(self, error: BaseException) -> None:
        """Record what came instead of a reply or of its end; a reply that only its reader refused is there."""
        reply = self._so_far() if self._fold is not None else reply_in(error)
        self._record(reply, error=describe(error), partial=self._fold is not None)

    @_harmless
    def streams(self) -> None:
        """Expect chunks."""
        self._fold = Fold()
        if self.turn is not None:
            self.turn.streams.add(self)

    @_harmless
    def add(self, chunk: Any) -> None:
        """Take a chunk on its way to the agent."""
        if self._fold is not None:
            self._fold.add(chunk)

    @_harmless
    def ended(self) -> None:
        """Record a stream that was read to its end."""
        self._record(self._so_far())

    @_harmless
    def dropped(self) -> None:
        """Record a stream that nobody reads any further; it is whole if the model had said that it was done."""
        reply = self._so_far()
        self._record(reply, partial=reply.finish is None)

    def _so_far(self) -> Reply:
        return self._fold.reply() if self._fold is not None else Reply()

    def _record(self, reply: Reply, *, error: str | None = None, partial: bool = False) -> None:
        if self._done:
            return
        self._done = True
        turn, takers = self.turn, by_outlet(self.takers)
        if turn is not None:
            turn.streams.discard(self)
            turn.failure = error
        if takers:
            line = self._as_line(reply, {"error": error, "partial": partial})
            for outlet, recordings in takers.items():
                outlet.send(lambda writer: writer.call(line), functools.partial(_count, recordings, calls=1))

    def _as_line(self, reply: Reply, ending: dict[str, Any]) -> dict[str, Any]:
        request = self._request
        assert request is not None  # `open_call` lets no other through
        version = self.turn.version if self.turn else None
        return {
            "id": self.id,
            "run": self.turn.id if self.turn else None,
            "agent": self.turn.agent if self.turn else None,
            "time": self._began,
            "seconds": time.perf_counter() - self._clock,
            "model": request.model,
            "version": version if version and str(request.model).rpartition("/")[2] == version else None,
            "api": request.api,
            "messages": request.messages,
            "tools": request.tools,
            "settings": request.settings,
            "reply": reply.message,
            "finish": reply.finish,
            "usage": reply.usage,
            "logprobs": reply.logprobs,
            **ending,
        }


@_harmless
def open_turn(owner: Any, prompt: Any, style: str) -> Turn | None:
    """A turn that begins now, or None while nothing is recorded."""
    return Turn(owner, prompt, style) if _OPEN else None


@_harmless
def open_call(params: dict[str, Any]) -> PendingCall | None:
    """A request that is sent now, as it is sent, or None if no recording takes it."""
    if not _OPEN or not ("messages" in params or "input" in params):
        return None
    turn, id = CURRENT.get(), os.urandom(8).hex()
    takers = turn.takers if turn is not None else tuple(r for r in open_recordings() if r.takes_stray_calls(id))
    if not by_outlet(takers):
        return None
    if turn is not None:
        turn.announce()
    return PendingCall(turn, params, takers, id)


def by_outlet(takers: Sequence[Recording]) -> dict[Outlet, list[Recording]]:
    """Those of ``takers`` that are still open, by where they write: one store gets one copy."""
    outlets: dict[Outlet, list[Recording]] = {}
    for taker in takers:
        if taker in _OPEN:
            outlets.setdefault(taker.outlet, []).append(taker)
    return outlets


def describe(error: BaseException) -> str:
    """An error as the records keep it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - another's code: an error that cannot even be put into words
        return type(error).__name__
