"""Which recording takes which turn and which call of an agent; faults in here are counted and never raised.

A turn is one answer of an agent to one prompt (a `Run` on disk); the turn of a team or a flow is the parent of its
agents' turns. What is handed to a writer is plain data that nobody changes any more.
"""

import contextlib
import contextvars
import functools
import itertools
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from praison_agent_rl.capture.opened import GROUP_STYLES as GROUP_STYLES
from praison_agent_rl.capture.opened import Recording as Recording
from praison_agent_rl.capture.opened import by_outlet, takers_of_stray_call, takers_of_turn
from praison_agent_rl.capture.opened import is_recording as is_recording
from praison_agent_rl.capture.opened import open_recordings as open_recordings
from praison_agent_rl.capture.outlets import Outlet, Writer
from praison_agent_rl.capture.replies import Fold, Reply, answer_in, reply_in, reply_of, request_of, snapshot, take
from praison_agent_rl.capture.versions import model_named, version_named
from praison_agent_rl.swap import Route, server_of
from praison_agent_rl.transcripts.run_ids import RunId

_Result = TypeVar("_Result")

UNRECORDED = "_rl_unrecorded"
"""Attribute of an agent whose turns are nobody's conversation; no recording takes them, nor what is asked in them."""

CURRENT: contextvars.ContextVar["Turn | None"] = contextvars.ContextVar("praison_agent_rl_turn", default=None)
"""The innermost turn that the running code belongs to."""


def _harmless(action: Callable[..., _Result]) -> Callable[..., _Result | None]:
    """The recorder's boundary: what goes wrong in ``action`` is counted, and the agent goes on."""

    @functools.wraps(action)
    def guarded(*args: Any, **kwargs: Any) -> _Result | None:
        try:
            return action(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the recorder's boundary
            _lose(error, args[0] if args else None)
            return None

    return guarded


def _lose(error: Exception, subject: Any = None) -> None:
    takers = subject.takers if isinstance(subject, (Turn, PendingCall)) else open_recordings()
    for outlet in by_outlet(takers):
        outlet.lose(error)


_snapshot = _harmless(snapshot)


def _copied(value: Any) -> Any:
    return value if type(value) is str else _snapshot(value)


class Turn:
    """One answer of an agent, a team or a flow to one prompt."""

    def __init__(self, owner: Any, prompt: Any, style: str, route: Route | None = None) -> None:
        self._began = time.time()
        self._clock = time.perf_counter()
        self.id = new_id()
        self.owner = weakref.ref(owner)
        self.agent = type(owner).__name__ if style == "plan" else getattr(owner, "name", None)
        self.style = style
        self.parent = parent = CURRENT.get()
        self.root: str = parent.root if parent is not None else self.id
        self.unrecorded: bool = UNRECORDED in vars(owner) or (parent is not None and parent.unrecorded)
        self.takers = () if self.unrecorded else takers_of_turn(owner, parent, self.root)
        self.streams: set[PendingCall] = set()
        """Calls whose streams are being read."""
        self.failure: str | None = None
        """Error of the last call, if it failed."""
        self._unannounced = [True]
        if self.takers:
            server = server_of(owner) if route is None else route.server
            self.version: str | None = None if server is None else getattr(server, "model", None)
            state = vars(owner)
            self._session = state.get("_session_id")
            self._prompt = _copied(prompt)
            self._run_id = state["_rl_last_run"] = RunId(self.id, self.takers[0].store)

    def announce(self) -> None:
        """Write that the turn began, once."""
        if not self._unannounced:
            return
        try:
            self._unannounced.pop()  # by one thread only, and without a lock: see `Lane.now`
        except IndexError:
            return
        for outlet, takers in by_outlet(self.takers).items():
            outlet.later(self._begin, takers)

    @_harmless
    def close(self, output: Any, error: str | None = None) -> None:
        """Write how the turn ended; the framework answers None where its last call failed."""
        if self.streams:
            for call in tuple(self.streams):
                call.dropped()
        if not self.takers:
            return
        seconds = time.perf_counter() - self._clock
        self.announce()
        ended = _copied(output), error or (self.failure if output is None else None), seconds
        for outlet in by_outlet(self.takers):
            outlet.later(self._end, *ended)
        owner = self.owner()
        if owner is not None:
            vars(owner)["_rl_last_run"] = self._run_id

    def _begin(self, writer: Writer, takers: Sequence[Recording]) -> None:
        run = {
            "run": self.id,
            "agent": self.agent,
            "parent": self.parent.id if self.parent else None,
            "session": self._session,
            "tags": list(dict.fromkeys(tag for taker in takers for tag in taker.tags)),
            "style": self.style,
            "prompt": self._prompt,
            "time": self._began,
            "version": self.version,
        }
        writer.begin(run)
        for taker in takers:
            taker.runs += 1

    def _end(self, writer: Writer, output: Any, error: str | None, seconds: float) -> None:
        writer.end(self.id, output=output, error=error, seconds=seconds)


class PendingCall:
    """A request that was sent and whose reply is not all there yet; it is recorded once, however it ends."""

    def __init__(
        self, turn: Turn | None, params: dict[str, Any], outlets: dict[Outlet, Sequence[Recording]], id: str
    ) -> None:
        self._began = time.time()
        self._clock = time.perf_counter()
        self.turn = turn
        self.id = id
        self.takers = next(iter(outlets.values())) if len(outlets) == 1 else tuple(itertools.chain(*outlets.values()))
        self._taken = take(params, self.takers[0].outlet.latest(turn.owner()) if turn is not None else ())
        self._line: dict[str, Any] | None = None
        """What is known of it before the reply, once somebody has made it."""
        self._fold: Fold | None = None
        self._named: str | None = None
        """The model that the server named."""
        self._done = False
        self._owed: dict[Outlet, Sequence[Recording]] = {}
        """Where a stream is still to be written to; whoever takes one out writes there."""

    def answered(self, answer: Any) -> None:
        """Record the whole reply."""
        try:
            self._named = model_named(answer)
            self._record(reply_of(answer))
        except Exception as error:  # noqa: BLE001 - the recorder's boundary, without a further call
            _lose(error, self)

    @_harmless
    def failed(self, error: BaseException) -> None:
        """Record what came instead of a reply or of its end; a reply that only its reader refused is there."""
        if self._fold is None:
            self._named = model_named(answer_in(error))
        reply = self._so_far() if self._fold is not None else reply_in(error)
        self._record(reply, describe(error), partial=self._fold is not None)

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
            self._named = self._named or model_named(chunk)
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
                takers = self._owed.pop(outlet, None)
                if takers is not None:
                    outlet.now(self._keep, takers, self._so_far(), (time.perf_counter() - self._clock, None, True))

    def _so_far(self) -> Reply:
        return self._fold.reply() if self._fold is not None else Reply()

    def _record(self, reply: Reply, error: str | None = None, *, partial: bool = False) -> None:
        if self._done:
            return
        self._done = True
        ending = time.perf_counter() - self._clock, error, partial
        if self.turn is not None:
            self.turn.failure = error
        if self._fold is None:
            for outlet, takers in by_outlet(self.takers).items():
                outlet.lane.now(outlet.attempt, self._keep, takers, reply, ending)
            return
        if self.turn is not None:
            self.turn.streams.discard(self)
        for outlet in tuple(self._owed):
            owed = self._owed.pop(outlet, None)
            if owed is not None:
                outlet.now(self._keep, owed, reply, ending)
        for taker in self.takers:
            taker.streams.discard(self)

    def _keep(
        self, writer: Writer, takers: Sequence[Recording], reply: Reply, ending: tuple[float, str | None, bool]
    ) -> None:
        message, finish, usage, logprobs = reply
        seconds, error, partial = ending
        known = self._line or self._known()
        call = {
            **known,
            "version": known["version"] or version_named(self._named, known["model"]),
            "seconds": seconds,
            "reply": message,
            "finish": finish,
            "usage": usage,
            "logprobs": logprobs,
            "error": error,
            "partial": partial,
        }
        writer.call(call)
        for taker in takers:
            taker.calls += 1

    def expect(self, writer: Writer) -> None:
        """Have all that is known before the reply got ready while that is awaited."""
        with contextlib.suppress(Exception):  # that is told of when the call itself is written
            writer.expect(self._known())

    def _known(self) -> dict[str, Any]:
        """What is known of the call before its reply."""
        if self._line is not None:
            return self._line
        assert self._taken is not None  # `open_call` lets no other through
        turn, request = self.turn, request_of(self._taken)
        self.takers[0].outlet.remember(turn.owner() if turn is not None else None, request)
        version = turn.version if turn else None
        self._line = {
            "id": self.id,
            "run": turn.id if turn else None,
            "agent": turn.agent if turn else None,
            "time": self._began,
            "model": request.model,
            "version": version if version and str(request.model).rpartition("/")[2] == version else None,
            "api": request.api,
            "messages": request.messages,
            "tools": request.tools,
            "settings": request.settings,
        }
        return self._line


def new_id() -> str:
    """An id that no other run or call has."""
    try:
        return _IDS.pop()
    except IndexError:
        _IDS.extend(f"{_RANDOM.getrandbits(64):016x}" for _ in range(_IDS_AT_ONCE))
        return _IDS.pop()


_IDS: list[str] = []
_IDS_AT_ONCE = 256
_RANDOM = random.Random()  # not the one that a user's program seeds; the system's takes as long as a whole line


def _other_ids() -> None:
    _IDS.clear()
    _RANDOM.seed()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_other_ids)


@_harmless
def open_turn(owner: Any, prompt: Any, style: str, route: Route | None = None) -> Turn | None:
    """A turn that begins now and is answered from ``route``, or None while nothing is recorded."""
    return Turn(owner, prompt, style, route) if is_recording() else None


@_harmless
def open_call(params: dict[str, Any]) -> PendingCall | None:
    """A request that is sent now, as it is sent, or None if no recording takes it."""
    if not is_recording() or not ("messages" in params or "input" in params):
        return None
    turn, id = CURRENT.get(), new_id()
    outlets = by_outlet(turn.takers if turn is not None else takers_of_stray_call(id))
    if not outlets:
        return None
    if turn is not None:
        turn.announce()
    call = PendingCall(turn, params, outlets, id)
    for outlet in outlets:
        outlet.later(call.expect)
    return call


def describe(error: BaseException) -> str:
    """An error as the records keep it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - another's code: an error that cannot even be put into words
        return type(error).__name__
