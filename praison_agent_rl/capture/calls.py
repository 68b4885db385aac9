"""Wrap the places where the framework hands a request to a provider's client, so that request and reply are seen."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from praison_agent_rl.capture.recordings import PendingCall, is_recording, open_call
from praison_agent_rl.capture.routes import current_pin, route_for, sent_there

_Method = Callable[..., Any]
_Params = dict[str, Any]
_Reroute = Callable[[tuple[str, ...], _Params], "tuple[_Method, _Params] | None"]
"""Of a request by its place in OpenAI's client and its parameters: the method and parameters to use instead."""
_RESOURCES = {"chat", "beta", "completions", "responses"}
_REQUESTS = {"create", "parse"}


def tap_attempts(original: _Method, _: str) -> _Method:
    """The method of the litellm class that tries a request until it succeeds: each attempt is a request."""

    @functools.wraps(original)
    def tapped(self: Any, send: _Method, *args: Any, **kwargs: Any) -> Any:
        return original(self, _tapped_attempt(self, send), *args, **kwargs)

    @functools.wraps(original)
    async def tapped_async(self: Any, send: _Method, *args: Any, **kwargs: Any) -> Any:
        return await original(self, _tapped_attempt(self, send), *args, **kwargs)

    return tapped_async if inspect.iscoroutinefunction(original) else tapped


def tap_client(original: property, _: str) -> property:
    """The property by which the framework gets at OpenAI's client for each request."""

    def client(self: Any) -> Any:
        found = original.fget(self)  # type: ignore[misc]
        if current_pin() is None:
            return _Client(found) if is_recording() else found
        return _Client(found, functools.partial(_by_route, original.fget, self))  # type: ignore[arg-type]

    return property(client, original.fset, original.fdel, original.__doc__)


def tap_responses_stream(original: _Method, _: str) -> _Method:
    """The method of the litellm class that sends a streamed Responses request and reads all of it."""

    @functools.wraps(original)
    def tapped(self: Any, params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        params = sent_there(self, params) or params
        call = open_call({**params, "stream": True})
        if call is None:
            return original(self, params, *args, **kwargs)
        try:
            found = original(self, params, *args, **kwargs)
        except BaseException as error:
            call.failed(error)
            raise
        call.answered(found)
        return found

    @functools.wraps(original)
    async def tapped_async(self: Any, params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        params = sent_there(self, params) or params
        call = open_call({**params, "stream": True})
        if call is None:
            return await original(self, params, *args, **kwargs)
        try:
            found = await original(self, params, *args, **kwargs)
        except BaseException as error:
            call.failed(error)
            raise
        call.answered(found)
        return found

    return tapped_async if inspect.iscoroutinefunction(original) else tapped


def _tapped_attempt(llm: Any, send: _Method) -> _Method:
    """``send`` of a model object of the framework, recorded, and sent where the turn goes."""
    if current_pin() is None:
        return _tapped(send) if is_recording() else send
    tapped = _tapped(send)
    return lambda *args, **kwargs: tapped(*args, **(sent_there(llm, kwargs) or kwargs))


def _by_route(get: _Method, asked: Any, path: tuple[str, ...], params: _Params) -> tuple[_Method, _Params] | None:
    route = route_for(asked, params.get("model"))
    if route is None:
        return None
    return functools.reduce(getattr, path, get(route.openai_client())), {**params, "model": route.model}


def _tapped(send: _Method) -> _Method:
    """``send``, which sends one request and returns or awaits its reply, with both recorded."""

    def tapped(*args: Any, **kwargs: Any) -> Any:
        call = open_call(kwargs)
        if call is None:
            return send(*args, **kwargs)
        try:
            answer = send(*args, **kwargs)
        except BaseException as error:
            call.failed(error)
            raise
        return _awaited(answer, call, kwargs) if inspect.isawaitable(answer) else _received(answer, call, kwargs)

    return tapped


async def _awaited(answer: Any, call: PendingCall, params: dict[str, Any]) -> Any:
    try:
        answer = await answer
    except BaseException as error:
        call.failed(error)
        raise
    return _received(answer, call, params)


def _received(answer: Any, call: PendingCall, params: dict[str, Any]) -> Any:
    """What the framework gets: the whole reply, recorded by now, or a stream that is recorded as it is read."""
    kind = _TAPES.get((hasattr(answer, "__next__"), hasattr(answer, "__anext__"))) if params.get("stream") else None
    if kind is None:  # a reply, even where a stream was asked for
        call.answered(answer)
        return answer
    call.streams()
    return kind(answer, call)


class _Client:
    """OpenAI's client, or a part of it, with its requests recorded and sent where the turn goes."""

    __slots__ = ("_inner", "_path", "_reroute")

    def __init__(self, inner: Any, reroute: _Reroute | None = None, path: tuple[str, ...] = ()) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_reroute", reroute)
        object.__setattr__(self, "_path", path)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        found, path = getattr(self._inner, name), (*self._path, name)
        if name in _RESOURCES:
            return _Client(found, self._reroute, path)
        if name not in _REQUESTS or not callable(found):
            return found
        return _tapped(found) if self._reroute is None else _tapped_there(found, self._reroute, path)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


def _tapped_there(send: _Method, reroute: _Reroute, path: tuple[str, ...]) -> _Method:
    def tapped(*args: Any, **kwargs: Any) -> Any:
        there, params = reroute(path, kwargs) or (send, kwargs)
        return _tapped(there)(*args, **params)

    return tapped


class _Tape:
    """A stream on its way to the agent."""

    def __init__(self, inner: Any, call: PendingCall) -> None:
        self._inner = inner
        self._call = call

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._closing(found) if name in ("close", "aclose") else found

    def __del__(self) -> None:
        self._call.dropped()

    def _closing(self, close: _Method) -> _Method:
        @functools.wraps(close)
        def closing(*args: Any, **kwargs: Any) -> Any:
            self._call.dropped()
            return close(*args, **kwargs)

        return closing


class _SyncTape(_Tape):
    def __iter__(self) -> "_SyncTape":
        return self

    def __next__(self) -> Any:
        try:
            chunk = next(self._inner)
        except StopIteration:
            self._call.ended()
            raise
        except BaseException as error:
            self._call.failed(error)
            raise
        self._call.add(chunk)
        return chunk

    def __enter__(self) -> "_SyncTape":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _AsyncTape(_Tape):
    def __aiter__(self) -> "_AsyncTape":
        return self

    async def __anext__(self) -> Any:
        try:
            chunk = await self._inner.__anext__()
        except StopAsyncIteration:
            self._call.ended()
            raise
        except BaseException as error:
            self._call.failed(error)
            raise
        self._call.add(chunk)
        return chunk

    async def __aenter__(self) -> "_AsyncTape":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _EitherTape(_SyncTape, _AsyncTape):
    """litellm's streams are read in either way."""


_TAPES = {(True, False): _SyncTape, (False, True): _AsyncTape, (True, True): _EitherTape}
"""By whether a stream can be read synchronously and asynchronously."""
