"""A fake OpenAI-compatible server on 127.0.0.1 that remembers what it was sent and says who it is."""

import contextlib
import gc
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """Answers chat requests with ``[tag|model] reply to: ...``; use as a context manager.

    Words in the last user message steer it: ``TOOL`` calls the tool ``add`` once, ``SLOW`` waits 0.3 s, ``HOLD`` waits
    until ``gate`` is set, ``FAIL500`` answers with HTTP 500. ``listing`` replaces the answer to ``GET /v1/models``.
    """

    def __init__(self, tag: str, *, models: list[dict[str, Any]] | None = None) -> None:
        self.tag = tag
        self.models = models or [{"id": "m1", "object": "model"}]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.listed: list[tuple[str, str]] = []
        """Path and key of each GET."""
        self.listing: bytes | None = None
        self.gate = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.fake = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> "FakeServer":
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def reply_to(self, request: dict[str, Any]) -> dict[str, Any]:
        """The assistant message for a request."""
        messages = request.get("messages", [])
        user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
        text = str(messages[user]["content"]) if messages else ""
        answered = any(m["role"] == "tool" for m in messages[user:])
        if "SLOW" in text:
            time.sleep(0.3)
        if "HOLD" in text:
            self.gate.wait(20)
        if request.get("tools") and "TOOL" in text and not answered:
            call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"role": "assistant", "content": f"[{self.tag}|{request.get('model')}] reply to: {text[-60:]}"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def fake(self) -> FakeServer:
        return self.server.fake  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.fake.listed.append((self.path, self.headers.get("authorization", "")))
        self._send_bytes(self.fake.listing or json.dumps({"object": "list", "data": self.fake.models}).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.fake.requests.append(request)
        self.fake.keys.append(self.headers.get("authorization", ""))
        if any("FAIL500" in str(m.get("content")) for m in request.get("messages", [])):
            self._send({"error": {"message": "boom", "type": "server_error"}}, 500)
            return
        message = self.fake.reply_to(request)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        base = {"id": "c1", "created": 1, "model": request.get("model")}
        if request.get("stream"):
            self._stream(base, message, reason)
            return
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        self._send({**base, "object": "chat.completion", "choices": [choice], "usage": usage})

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        self._send_bytes(json.dumps(answer).encode(), status)

    def _send_bytes(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, base: dict[str, Any], message: dict[str, Any], reason: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": word} for word in re.findall(r"\S+\s*", message["content"] or "")]
        for place, call in enumerate(message.get("tool_calls") or []):
            # the name first and the arguments in a later chunk, as model servers do
            head = {**call, "index": place, "function": {"name": call["function"]["name"], "arguments": ""}}
            tail = {"index": place, "function": {"arguments": call["function"]["arguments"]}}
            deltas += [{"tool_calls": [head]}, {"tool_calls": [tail]}]
        chunks = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        chunks.append({"index": 0, "delta": {}, "finish_reason": reason})
        for chunk in chunks:
            line = json.dumps({**base, "object": "chat.completion.chunk", "choices": [chunk]})
            self.wfile.write(f"data: {line}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


@contextlib.contextmanager
def garbage_collected_only_afterwards() -> Iterator[None]:
    """Keep cyclic garbage until the end, for tests that stream through litellm.

    litellm leaves some streams unclosed, and they close themselves when they are collected. Where that happens while
    the same thread holds their connection pool's lock, httpcore 1.0.9 waits for itself for ever (seen with
    ``hosted_vllm/`` names, whose connections all agents share).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect(1)  # nothing was moved to an older generation meanwhile
        gc.enable()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


AGENT_KINDS = ("environment", "provider", "dict", "hosted_vllm", "bare", "finished", "subclass")
"""Ways to say what answers an agent; the first and the last take the framework's OpenAI client, the others litellm."""


def build_agent(kind: str, url: str, **options: Any) -> Any:
    """An agent of ``kind`` that asks for ``m1`` at ``url`` with the key ``key-a``.

    Two of the kinds know the address and the key from ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` only.
    """
    from praisonaiagents import Agent

    class PoliteAgent(Agent):  # type: ignore[misc]
        pass

    place = {"base_url": url, "api_key": "key-a"}
    given: dict[str, Any] = {
        "environment": {"llm": "m1"},
        "provider": {"llm": "openai/m1", **place},
        "dict": {"llm": {"model": "openai/m1", "temperature": 0.3, **place}},
        "hosted_vllm": {"llm": "hosted_vllm/m1", **place},
        "bare": {"llm": "m1", **place},
        "subclass": {"llm": "m1"},
    }
    if kind == "finished":
        from praisonaiagents.llm import LLM

        given["finished"] = {"llm": LLM(model="openai/m1", temperature=0.3, **place)}
    plain = {"name": "helper", "instructions": "Be brief.", "tools": [add], "output": "silent", "rules": False}
    return (PoliteAgent if kind == "subclass" else Agent)(**{**plain, **given[kind], **options})
