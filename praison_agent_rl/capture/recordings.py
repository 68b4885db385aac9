"""Which recording takes which turn and which call of an agent; faults in here are counted and never raised.

A turn is one answer of an agent to one prompt (a `Run` on disk); the turn of a team or a flow is the parent of its
agents' turns. What is handed to a writer is plain data that nobody changes any more.
"""

import contextlib
import contextvars
import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from praison_agent_rl.capture.opened import GROUP_STYLES as GROUP_STYLES
from praison_agent_rl.capture.opened import Recording as Recording
from praison_agent_rl.capture.opened import is_open, takers_of_stray_call, takers_of_turn
from praison_agent_rl.capture.opened import is_recording as is_recording
from praison_agent_rl.capture.opened import open_recordings as open_recordings
from praison_agent_rl.capture.outlets import Outlet, Writer
from praison_agent_rl.capture.replies import Fold, Reply, reply_in, reply_of, request_of, snapshot
from praison_agent_rl.swap import Route, server_of
from praison_agent_rl.transcripts.run_ids import RunId

_Result = TypeVar("_Result")

CURRENT: contextvars.ContextVar["Turn | None"] = contextvars.ContextVar("praison_agent_rl_turn", default=None)
"""The innermost turn that the running code belongs to."""


def _count(recordings: Sequence[Recording], **kinds: int) -> None:
    for recording in recordings:
        recording.count(**kinds)


def _begin(run: dict[str, Any], writer: Writer) -> None:
    writer.begin(run)


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

    def __init__(self, owner: Any, prompt: Any, style: str, route: Route | None = None) -> None:
        self.id = os.urandom(8).hex()
        self.owner = weakref.ref(owner)
        self.agent = type(owner).__name__ if style == "plan" else getattr(owner, "name", None)
        self.style = style
        self.parent = CURRENT.get()
        self.root: str = self.parent.root if self.parent else self.id
        self.takers = takers_of_turn(owner, self.parent, self.root)
        self.streams: set[PendingCall] = set()
        """Calls whose streams are being read."""
        self.failure: str | None = None
        """Error of the last call, if it failed."""
        server = server_of(owner) if route is None else route.server
        self.version: str | None = getattr(server, "model", None)
        self._session = vars(owner).get("_session_id")
        self._prompt = _copied(prompt) if self.takers else None
        self._began = time.time()
        self._clock = time.perf_counter()
        self._unannounced = [True]
        if self.takers:
            vars(owner)["_rl_last_run"] = RunId(self.id, self.takers[0].store)

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
            vars(owner)["_rl_last_run"] = RunId(self.id, self.takers[0].store)

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
        outlet, owner = takers[0].outlet, turn.owner() if turn is not None else None
        self._request = request_of(params, outlet.latest(owner))
        if self._request is not None:
            outlet.remember(owner, self._request)
        self._fold: Fold | None = None
        self._done = False
        self._owed: dict[Outlet, list[Recording]] = {}
        """Where a stream is still to be written to; whoever takes one out writes there."""

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
        self._owed = by_outlet(self.takers)
        if self.turn is not None:
            self.turn.streams.add(self)
        for taker in self.takers:
            taker.streams.add(self)

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

    @_harmless
    def cut_off(self, recording: Recording) -> None:
        """Record what has come of a stream, as ``recording`` stops, where no other one waits for the rest."""
        others = by_outlet(self.takers)
        for outlet in tuple(self._owed):
            if outlet is recording.outlet and outlet not in others:
                self._write(outlet, self._so_far(), {"error": None, "partial": True})

    def _so_far(self) -> Reply:
        return self._fold.reply() if self._fold is not None else Reply()

    def _record(self, reply: Reply, *, error: str | None = None, partial: bool = False) -> None:
        if self._done:
            return
        self._done = True
        if self.turn is not None:
            self.turn.streams.discard(self)
            self.turn.failure = error
        if self._fold is None:
            self._owed = by_outlet(self.takers)
        for outlet in tuple(self._owed):
            self._write(outlet, reply, {"error": error, "partial": partial})
        if self._fold is not None:
            for taker in self.takers:
                taker.streams.discard(self)

    def _write(self, outlet: Outlet, reply: Reply, ending: dict[str, Any]) -> None:
        recordings = self._owed.pop(outlet, None)
        if recordings is not None:
            line = self._as_line(reply, ending)
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
def open_turn(owner: Any, prompt: Any, style: str, route: Route | None = None) -> Turn | None:
    """A turn that begins now and is answered from ``route``, or None while nothing is recorded."""
    return Turn(owner, prompt, style, route) if is_recording() else None


@_harmless
def open_call(params: dict[str, Any]) -> PendingCall | None:
    """A request that is sent now, as it is sent, or None if no recording takes it."""
    if not is_recording() or not ("messages" in params or "input" in params):
        return None
    turn, id = CURRENT.get(), os.urandom(8).hex()
    takers = tuple(filter(is_open, turn.takers)) if turn is not None else takers_of_stray_call(id)
    if not takers:
        return None
    if turn is not None:
        turn.announce()
    return PendingCall(turn, params, takers, id)


def by_outlet(takers: Sequence[Recording]) -> dict[Outlet, list[Recording]]:
    """Those of ``takers`` that are still open, by where they write: one store gets one copy."""
    outlets: dict[Outlet, list[Recording]] = {}
    for taker in takers:
        if is_open(taker):
            outlets.setdefault(taker.outlet, []).append(taker)
    return outlets


def describe(error: BaseException) -> str:
    """An error as the records keep it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - another's code: an error that cannot even be put into words
        return type(error).__name__
