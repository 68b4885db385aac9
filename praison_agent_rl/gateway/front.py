"""The HTTP interface of the gateway, behind a key: maps names, passes requests on, and says how it is.

A request is answered by one server from its first byte to its last. Which server that is, is decided in `offering`.
"""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from praison_agent_rl.gateway.counting import KIND, Counts, family, merged
from praison_agent_rl.gateway.lines import Line
from praison_agent_rl.gateway.offering import Offering
from praison_agent_rl.serving import ServerAddress

LARGEST_BODY = 32 * 2**20
"""Bytes of a request."""
PASSED_ON = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_GONE = 499
"""Counted where whoever asked has gone; nobody sees it (nginx's number)."""
_KEPT_HEADERS = ("content-type", "x-request-id", "retry-after")
_END_RETRY = 5
"""Seconds after which who was broken off at the end may ask again: of whatever comes after."""
_PAUSE = 0.05
"""Seconds between two looks at whether a server is back."""
_IDLE = 2.0
"""Seconds for which a connection to a server is kept unused: less than the server does (uvicorn: 5), or a request would
be sent as the server closes it."""

Send = Callable[[Any], Awaitable[None]]


class Refusal(Exception):
    """An answer of the gateway's own; an error as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, *, code: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after

    def response(self) -> Response:
        """What is sent."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return JSONResponse({"error": error}, status_code=self.status, headers=headers)


class Front:
    """ASGI application: ``/v1/models``, chat completions, completions, responses, ``/health`` and ``/metrics``."""

    def __init__(self, offering: Offering, *, key: str, patience: float) -> None:
        self.counts = Counts()
        self._offering = offering
        self._wanted = f"Bearer {key}".encode()
        self._patience = patience
        # a version's server decides how many it answers at once, and nobody but the client how long that may take
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=_IDLE)
        timeout = httpx.Timeout(None, connect=5.0)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        """Let go of the connections to the servers."""
        await self._client.aclose()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer a request; whoever asked may go at any moment, which ends what is done for them."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            if request.method == "POST" and scope["path"] in PASSED_ON:
                self._check_key(request)
                await self._answer(request, await _body_of(request), send)
            else:
                await (await self._own_answer(request))(scope, receive, send)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
        except ClientDisconnect:
            pass

    def _knows_key(self, request: Request) -> bool:
        return hmac.compare_digest(request.headers.get("authorization", "").encode(), self._wanted)

    def _check_key(self, request: Request) -> None:
        if not self._knows_key(request):
            raise Refusal(401, "wrong or missing API key", code="invalid_api_key")

    # --- what it says itself ------------------------------------------------------------------------------------------

    async def _own_answer(self, request: Request) -> Response:
        place = request.method, request.scope["path"]  # what a client says of the host has no part in it
        if place == ("GET", "/health"):
            return self._health(request)
        self._check_key(request)
        if place == ("GET", "/v1/models"):
            data = [_model_card(name, line) for name, line in self._offering.models().items()]
            return JSONResponse({"object": "list", "data": data})
        if place == ("GET", "/metrics"):
            return PlainTextResponse(await self._metrics(), media_type=KIND)
        raise Refusal(404, f"there is no {request.method[:20]} {place[1][:200]!r} here", code="not_found")

    def _health(self, request: Request) -> Response:
        """Whoever has no key learns whether it is well, and no names."""
        healthy = self._offering.healthy
        said: dict[str, Any] = {"status": "ok" if healthy else "unavailable"}
        if self._knows_key(request):
            said["models"] = self._offering.state()
        return JSONResponse(said, status_code=200 if healthy else 503)

    async def _metrics(self) -> str:
        lines = self._offering.lines()
        up = [({"version": line.weights.model}, float(line.address is not None)) for line in lines]
        starts = [({"version": line.weights.model}, float(line.attempts)) for line in lines]
        addresses = {str(line.address): line.address for line in lines if line.address is not None}
        texts = await asyncio.gather(*map(self._counts_of, addresses.values()))
        counted = {httpx.URL(url).netloc.decode(): text for url, text in zip(addresses, texts, strict=True) if text}
        counts = [
            *self.counts.lines(),
            *family("praison_agent_rl_up", "gauge", "Whether a version's server answers.", up),
            *family("praison_agent_rl_starts_total", "counter", "Attempts to start a version's server.", starts),
            *merged(counted),
        ]
        return "".join(f"{count}\n" for count in counts)

    async def _counts_of(self, address: ServerAddress) -> str:
        """What a server counts; nothing where it counts nothing, as ``transformers serve``, or has just died."""
        with suppress(httpx.HTTPError):
            url = f"{address.removesuffix('/v1')}/metrics"
            reply = await self._client.get(url, headers=_key_of(address), timeout=5.0)
            return reply.text if reply.status_code == 200 else ""
        return ""

    # --- what it passes on --------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        passing = _Passing(request, _asked(body), body)
        if not self._offering.knows(passing.name):
            raise self._unknown(passing.name)
        began = time.monotonic()
        self.counts.under_way[passing.name] += 1
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_when_gone, request, group.cancel_scope)
                await self._pass_on(passing, send)
                group.cancel_scope.cancel()
        except asyncio.CancelledError:  # the time that requests get at the end of the gateway is over
            if passing.status == _GONE:
                passing.status = 503
                raise Refusal(503, "the server is ending", code="ending", retry_after=_END_RETRY) from None
        finally:
            self.counts.under_way[passing.name] -= 1
            self.counts.add(passing.name, passing.version, passing.status, time.monotonic() - began)

    async def _pass_on(self, passing: "_Passing", send: Send) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                passing.status = message["status"]
            await send(message)

        try:
            reply = await self._reply(passing)
        except Refusal as refusal:
            await refusal.response()(passing.request.scope, passing.request.receive, sent)
            return
        try:
            await _send_on(reply, passing.model, sent)
        except httpx.RequestError:  # the response is not completed, by which whoever asked sees that it broke
            passing.status = 502
        finally:
            await reply.aclose()

    async def _reply(self, passing: "_Passing") -> httpx.Response:
        """The answer of the server behind the name that was asked for.

        What was not answered because the server died is asked once more, of the one that comes after it: answering
        changes nothing, and a request that kills servers does not kill many.
        """
        deadline, broken = time.monotonic() + self._patience, 0
        while True:
            line, passing.address = await self._line(passing.name, deadline)
            passing.version, passing.model = line.weights.label, line.weights.model
            try:
                reply = await self._client.send(passing.for_server(self._client), stream=True)
                if not _is_stream(reply):
                    await reply.aread()  # whole, or it is asked again
                return reply
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # it was not asked
                if time.monotonic() >= deadline:
                    raise _not_up(line) from error
                await asyncio.sleep(_PAUSE)
            except httpx.RequestError as error:  # it has gone, or what it says is no HTTP
                broken += 1
                if broken > 1:
                    message = f"the server of {passing.model} went away twice while it answered, or gave no answer"
                    raise Refusal(502, message, code="server_went_away") from error
                await asyncio.sleep(_PAUSE)

    async def _line(self, name: str, deadline: float) -> tuple[Line, ServerAddress]:
        while True:
            line = self._offering.line(name)
            if line is not None and (address := line.address) is not None:
                return line, address
            if not self._offering.knows(name):  # it went over to others while this request waited
                raise self._unknown(name)
            if time.monotonic() >= deadline:
                raise _not_up(line) if line is not None else _not_known(name)
            await asyncio.sleep(_PAUSE)

    def _unknown(self, name: str) -> Refusal:
        there = ", ".join(self._offering.models())
        return Refusal(404, f"there is no model {name[:200]!r} here; there are: {there}", code="model_not_found")


class _Passing:
    """A request that is passed on; it holds the address of the server that answers it."""

    def __init__(self, request: Request, asked: dict[str, Any], body: bytes) -> None:
        self.request = request
        self.name = str(asked["model"])
        self.version = ""
        self.model = ""
        """Of the weights that answer."""
        self.status = _GONE
        self.address: ServerAddress | None = None
        self._asked = asked
        self._body = body

    def for_server(self, client: httpx.AsyncClient) -> httpx.Request:
        """The same for the server that was found, under the name by which that knows the model."""
        assert self.address is not None
        known = self.address.server.model
        body = self._body if self.name == known else _as_json({**self._asked, "model": known})
        given = self.request.headers
        kept = [(name, given[name].encode("latin-1")) for name in ("accept", "x-request-id") if name in given]
        own = {"content-type": "application/json", "accept-encoding": "identity", **_key_of(self.address)}
        headers = [(name.encode(), value) for name, value in (*kept, *((name, own[name].encode()) for name in own))]
        url = f"{self.address}{self.request.scope['path'].removeprefix('/v1')}"
        return client.build_request("POST", url, content=body, headers=headers)


def _not_up(line: Line) -> Refusal:
    why = f": {line.fault}" if line.fault else ""
    message = f"the server of {line.weights.model} is not up{why}"
    return Refusal(503, message, code="server_not_up", retry_after=line.retry_after)


def _not_known(name: str) -> Refusal:
    return Refusal(503, f"it is not known yet what answers {name!r}", code="server_not_up", retry_after=_END_RETRY)


def _asked(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(asked, dict) or not isinstance(asked.get("model"), str):
        raise Refusal(400, "the body names no model; it must be an object with a text as 'model'", code="no_model")
    return asked


def _as_json(asked: dict[str, Any]) -> bytes:
    try:
        return json.dumps(asked).encode()
    except RecursionError as error:  # it was read at fewer levels of the stack
        raise Refusal(400, "the body is nested too deeply", code="invalid_json") from error


async def _body_of(request: Request) -> bytes:
    too_large = Refusal(413, f"a request may have {LARGEST_BODY} bytes at most", code="too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 12 or int(length) > LARGEST_BODY):
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY:
            raise too_large
    return bytes(body)


async def _send_on(reply: httpx.Response, model: str, send: Send) -> None:
    headers = [(name.encode(), reply.headers[name].encode()) for name in _KEPT_HEADERS if name in reply.headers]
    headers.append((b"x-served-model", model.encode()))
    if _is_stream(reply):
        await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
        async for chunk in reply.aiter_bytes():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    headers.append((b"content-length", str(len(reply.content)).encode()))
    await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": reply.content})


def _is_stream(reply: httpx.Response) -> bool:
    return bool(reply.headers.get("content-type", "").startswith("text/event-stream"))


def _key_of(address: ServerAddress) -> dict[str, str]:
    return {"authorization": f"Bearer {address.server.api_key}"}


def _model_card(name: str, line: Line) -> dict[str, Any]:
    """As vLLM tells of its models; ``version`` is our own."""
    root, label = line.weights.root, line.weights.label
    card = {"id": name, "object": "model", "created": 0, "owned_by": "praison-agent-rl", "parent": None}
    return {**card, "root": root, "version": label}


async def _cancel_when_gone(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
