"""Find out what an agent really sends for a prompt, by letting a copy of it ask a listener of our own.

The framework puts more into a request than anyone would guess (a user turn twice, text of its own in the system
prompt), so the request is observed and never rebuilt from ``instructions`` (DESIGN 3). No tool runs and no model is
asked: the listener on 127.0.0.1 answers each request with a fixed word.
"""

import collections
import contextlib
import contextvars
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from praison_agent_rl.endpoints import keep_loopback_off_proxies
from praison_agent_rl.errors import AgentError
from praison_agent_rl.swap import fresh_copy, swap_model


@dataclass(frozen=True)
class SentRequest:
    """The part of a request that the model's answer depends on."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    sampling: dict[str, Any]
    """Whatever else was sent: temperature, max_tokens, response_format, ..."""


def sent_requests(
    agent: Any, prompts: Sequence[str], *, progress: Callable[[int], None] = lambda done: None
) -> list[SentRequest]:
    """The first request that ``agent``, with an empty history, sends for each of ``prompts``.

    Raises:
        AgentError: the agent sent nothing for a prompt (a guardrail or hook of its own may have stopped it).
    """
    requests = []
    keep_loopback_off_proxies()
    with _listener() as (url, received):
        for number, prompt in enumerate(prompts):
            received.clear()
            twin = fresh_copy(agent)
            swap_model(twin, "listener", base_url=url, api_key="none")
            with silent_thread():  # the framework prints panels even when it is silent
                twin.chat(prompt)
            if not received:
                raise AgentError(f"agent {agent.name!r} sent no request for the prompt {prompt[:80]!r}")
            requests.append(_as_request(received[0]))
            progress(number + 1)
    return requests


def _as_request(body: dict[str, Any]) -> SentRequest:
    rest = {k: v for k, v in body.items() if k not in ("messages", "tools", "model", "stream") and v is not None}
    return SentRequest(body["messages"], body.get("tools") or [], rest)


class Silence:
    """A block of a thread that nothing is heard of; what the thread printed last is kept here."""

    def __init__(self) -> None:
        self.over = False
        self._said: collections.deque[str] = collections.deque(maxlen=_KEPT)

    @property
    def said(self) -> str:
        """The last of what was printed in the block."""
        return "".join(self._said)

    def keep(self, text: str) -> int:
        """Take what is printed."""
        self._said.append(text)
        return len(text)


_KEPT = 200
"""Pieces that a silence keeps of what is printed in it."""
_SILENCE: "contextvars.ContextVar[Silence | None]" = contextvars.ContextVar("praison_agent_rl_silence", default=None)


class _Muted:
    """Standard output, less what is printed within a silence."""

    installed = threading.Lock()
    silences = 0

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def silence(self) -> Silence | None:
        """The silence that the running code is in."""
        found = _SILENCE.get()
        return None if found is None or found.over else found

    def write(self, text: str) -> Any:
        """Write for all that is in no silence."""
        silence = self.silence
        return self.stream.write(text) if silence is None else silence.keep(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """Whether a person sees what is written now: nobody sees a silence, nor is anything animated in it."""
        return self.silence is None and bool(self.stream.isatty())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def silent_thread() -> Iterator[Silence]:
    """Drop what this thread prints; what other threads print is shown. Any number of threads can be silent at once."""
    silence = Silence()
    with _Muted.installed:
        _Muted.silences += 1
        if not isinstance(sys.stdout, _Muted):
            sys.stdout = _Muted(sys.stdout)
    token = _SILENCE.set(silence)
    try:
        yield silence
    finally:
        silence.over = True  # copies of this context may live on
        _SILENCE.reset(token)
        with _Muted.installed:
            _Muted.silences -= 1
            if _Muted.silences == 0 and isinstance(sys.stdout, _Muted):
                sys.stdout = sys.stdout.stream


@contextlib.contextmanager
def _listener() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible endpoint that keeps each request body and answers with one word."""
    received: list[dict[str, Any]] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Keep the request and answer it."""
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = {"role": "assistant", "content": "ok"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            reply = {"id": "0", "object": "chat.completion", "created": 0, "model": "listener", "usage": usage}
            body = json.dumps({**reply, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", received
    finally:
        server.shutdown()
        server.server_close()
