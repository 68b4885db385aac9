"""Wrap the methods of agents, teams and flows that take a turn, so that each request is known to be of one."""

import contextvars
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from praison_agent_rl.capture.recordings import CURRENT, GROUP_STYLES, Turn, describe, is_recording, open_turn
from praison_agent_rl.capture.routes import Pin, current_pin, is_routed, pin_turn, pinned

_LOG = logging.getLogger(__name__)
_Method = Callable[..., Any]

SAME_TURN = "same turn"
"""Style of a method that goes on with the turn that it is called in."""

_PROMPT_NAMES = ("prompt", "content", "input", "request")
_END = object()


class _Entry(NamedTuple):
    """How a turn is about to begin: by which method of which agent, from within which turn."""

    owner: Any
    style: str
    outer: Turn | None


_ENTRY: "contextvars.ContextVar[_Entry | None]" = contextvars.ContextVar("praison_agent_rl_entry", default=None)


class _Within:
    """Sets a context variable for a block; a block that ends in another context (a collected coroutine) is let be."""

    def __init__(self, variable: "contextvars.ContextVar[Any]", value: Any) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        try:
            self._variable.reset(self._token)
        except ValueError:
            _LOG.debug("a turn ended in another context than it began in")


class _Taking:
    """A block in which ``owner`` takes a turn, recorded if it is one to record, and on one model."""

    def __init__(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], style: str) -> None:
        pin = pin_turn(owner)
        self._pinned = pinned(pin) if pin is not None else None
        self._turn = _turn_of(owner, args, kwargs, style, pin)
        self._within = _Within(CURRENT, self._turn) if self._turn is not None else None
        self._answer: Any = None

    def __enter__(self) -> "_Taking":
        if self._pinned is not None:
            self._pinned.__enter__()
        if self._within is not None:
            self._within.__enter__()
        return self

    def keep(self, answer: Any) -> Any:
        """Note the answer, and pass it on."""
        self._answer = answer
        if self._turn is not None and self._turn.style == "flow" and isinstance(answer, dict):
            self._answer = answer.get("output")  # the rest is its steps, which have turns of their own
        return answer

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if self._turn is not None and self._within is not None:
            self._turn.close(self._answer, None if error is None else describe(error))
            self._within.__exit__()
        if self._pinned is not None:
            self._pinned.__exit__(None, None, None)


def tap_turn(original: _Method, style: str) -> _Method:
    """A method that takes a turn and returns the answer."""

    @functools.wraps(original)
    def tapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_recording() and not is_routed(self):
            return original(self, *args, **kwargs)
        with _Taking(self, args, kwargs, style) as taking:
            return taking.keep(original(self, *args, **kwargs))

    @functools.wraps(original)
    async def tapped_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_recording() and not is_routed(self):
            return await original(self, *args, **kwargs)
        with _Taking(self, args, kwargs, style) as taking:
            return taking.keep(await original(self, *args, **kwargs))

    return tapped_async if inspect.iscoroutinefunction(original) else tapped


def tap_streamed_turn(original: _Method, style: str) -> _Method:
    """A generator that takes a turn; the turn is the current one only while the generator itself runs."""

    @functools.wraps(original)
    def tapped(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        pin = pin_turn(self) if is_routed(self) else None
        turn = _turn_of(self, args, kwargs, style, pin) if is_recording() else None
        chunks = original(self, *args, **kwargs)
        if pin is not None and pin is not current_pin():
            chunks = _kept_there(chunks, pin)
        if turn is None:
            yield from chunks
        else:
            yield from _recorded(chunks, turn)

    return tapped


def _kept_there(chunks: Iterator[Any], pin: Pin) -> Iterator[Any]:
    try:
        while True:
            with pinned(pin, whole=False):
                chunk = next(chunks, _END)
            if chunk is _END:
                return
            yield chunk
    except GeneratorExit:
        with pinned(pin, whole=False):
            chunks.close()  # type: ignore[attr-defined]
        raise
    finally:
        pin.close()


def _recorded(chunks: Iterator[Any], turn: Turn) -> Iterator[Any]:
    read: list[str] = []
    try:
        while True:
            with _Within(CURRENT, turn):
                chunk = next(chunks, _END)
            if chunk is _END:
                break
            read.append(str(chunk))
            yield chunk
    except GeneratorExit:
        with _Within(CURRENT, turn):
            chunks.close()  # type: ignore[attr-defined]
        turn.close("".join(read), "the stream was closed before its end")
        raise
    except BaseException as error:
        turn.close("".join(read) or None, describe(error))
        raise
    turn.close("".join(read) or None)


def tap_entry(original: _Method, style: str) -> _Method:
    """A method that leads to a turn of the same agent, and by whose name that turn's style is known."""

    @functools.wraps(original)
    def tapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Within(_ENTRY, _Entry(self, style, CURRENT.get())):
            return original(self, *args, **kwargs)

    @functools.wraps(original)
    async def tapped_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Within(_ENTRY, _Entry(self, style, CURRENT.get())):
            return await original(self, *args, **kwargs)

    return tapped_async if inspect.iscoroutinefunction(original) else tapped


def _turn_of(
    owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], style: str, pin: Pin | None = None
) -> Turn | None:
    """The turn that begins with a call of a method of ``owner``, or None if it goes on with the current one."""
    current, entry = CURRENT.get(), _ENTRY.get()
    if style not in GROUP_STYLES and entry is not None and entry.owner is owner and entry.outer is current:
        style = entry.style
    # a team starts itself once more within its own turn, to share a sandbox
    again = style in GROUP_STYLES and current is not None and current.owner() is owner
    if style == SAME_TURN or again:
        return None
    prompt = args[0] if args else next((kwargs[name] for name in _PROMPT_NAMES if name in kwargs), None)
    return open_turn(owner, prompt, style, pin.route if pin is not None else None)


def tap_middleware(original: _Method, _: str) -> _Method:
    """The method that finds a user's model middleware, which async turns run in a thread that knows no turn."""

    @functools.wraps(original)
    def tapped(self: Any) -> Any:
        manager, turn, pin = original(self), CURRENT.get(), current_pin()
        return manager if manager is None or (turn is None and pin is None) else _Middleware(manager, turn, pin)

    return tapped


class _Middleware:
    """A middleware manager that takes its turn along."""

    def __init__(self, manager: Any, turn: Turn | None, pin: Pin | None) -> None:
        self._manager = manager
        self._turn = turn
        self._pin = pin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def execute_model_call(self, *args: Any, **kwargs: Any) -> Any:
        """As the manager does it, within the turn."""
        with _Within(CURRENT, self._turn), pinned(self._pin, whole=False):
            return self._manager.execute_model_call(*args, **kwargs)
