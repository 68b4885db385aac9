"""Find out what an agent really sends for a prompt, by letting a copy of it ask a listener of our own.

The framework puts more into a request than anyone would guess (a user turn twice, text of its own in the system
prompt), so the request is observed and never rebuilt from ``instructions`` (DESIGN 3). No tool runs and no model is
asked: the listener on 127.0.0.1 answers each request with a fixed word.
"""

import contextlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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


class _Muted(io.TextIOBase):
    """Standard output, less what one thread writes."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> int:
        """Write for every thread but the muted one."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_one_at_a_time = threading.Lock()  # two that replace sys.stdout at once could each put back the other's


@contextlib.contextmanager
def silent_thread() -> Iterator[None]:
    """Drop what this thread prints; what other threads print is shown."""
    with _one_at_a_time:
        before = sys.stdout
        sys.stdout = _Muted(before, threading.get_ident())
        try:
            yield
        finally:
            sys.stdout = before


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
