"""A fake OpenAI-compatible server on 127.0.0.1 that remembers what it was sent and says who it is."""

import asyncio
import contextlib
import gc
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """Answers chat and Responses requests with ``[tag|model] reply to: ...``; use as a context manager.

    Words in the last user message steer it: ``TOOL`` calls the tool ``add`` once, ``TWICE`` two times in turn,
    ``PARALLEL`` two times at once, ``HANDOFF`` calls every handoff; ``STRUCT`` answers with JSON where JSON is wanted,
    ``THINK`` with reasoning; ``SLOW`` waits 0.3 s, ``HOLD`` waits until ``gate`` is set, ``DRIP`` does so within the
    stream; ``BREAK`` closes the connection within the stream, ``FAIL500`` answers with HTTP 500. ``failures`` is how
    many requests get a 500 before one is answered. ``listing`` replaces the answer to ``GET /v1/models``.
    """

    def __init__(self, tag: str, *, models: list[dict[str, Any]] | None = None) -> None:
        self.tag = tag
        self.models = models or [{"id": "m1", "object": "model"}]
        self.requests: list[dict[str, Any]] = []
        self.answers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Each request that was answered, with the assistant message, in the order of the answers."""
        self.bodies: list[bytes] = []
        self.failures = 0
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
        if "SLOW" in text:
            time.sleep(0.3)
        if "HOLD" in text:
            self.gate.wait(20)
        calls = self._calls_for(request, text, messages[user:])
        if calls:
            return {"role": "assistant", "content": None, "tool_calls": calls}
        if "STRUCT" in text and (request.get("response_format") or "JSON" in str(messages)):
            return {
                "role": "assistant",
                "content": json.dumps({"answer": f"{self.tag} {request['model']}", "score": 7}),
            }
        message = {"role": "assistant", "content": f"[{self.tag}|{request.get('model')}] reply to: {text[-60:]}"}
        return {**message, "reasoning_content": "Let me think."} if "THINK" in text else message

    def _calls_for(self, request: dict[str, Any], text: str, turn: list[dict[str, Any]]) -> list[dict[str, Any]]:
        tools = [tool.get("function", tool)["name"] for tool in request.get("tools") or []]
        round_ = sum(1 for message in turn if message["role"] == "assistant" and message.get("tool_calls"))
        calls: list[tuple[str, str]] = []
        if "TOOL" in text and round_ == 0 and "add" in tools:
            calls = [("add", '{"a": 2, "b": 3}')]
        elif "TWICE" in text and round_ < 2 and "add" in tools:
            calls = [("add", json.dumps({"a": round_, "b": 3}))]
        elif "PARALLEL" in text and round_ == 0 and "add" in tools:
            calls = [("add", '{"a": 2, "b": 3}'), ("add", '{"a": 40, "b": 5}')]
        elif "HANDOFF" in text and round_ == 0:
            calls = [(name, "{}") for name in tools if name.startswith("transfer_to")]
        return [
            {
                "id": f"call_{round_ + 1}{number or ''}",
                "type": "function",
                "function": {"name": name, "arguments": given},
            }
            for number, (name, given) in enumerate(calls)
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else an answer waits 40 ms for the acknowledgement of its own headers

    @property
    def fake(self) -> FakeServer:
        return self.server.fake  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.fake.listed.append((self.path, self.headers.get("authorization", "")))
        self._send_bytes(self.fake.listing or json.dumps({"object": "list", "data": self.fake.models}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        request = json.loads(body)
        self.fake.bodies.append(body)
        self.fake.requests.append(request)
        self.fake.keys.append(self.headers.get("authorization", ""))
        asked = request if "messages" in request else {**request, "messages": _as_chat(request)}
        if self.fake.failures > 0 or any("FAIL500" in str(m.get("content")) for m in asked["messages"]):
            self.fake.failures -= 1
            self._send({"error": {"message": "boom", "type": "server_error"}}, 500)
            return
        message = self.fake.reply_to(asked)
        self.fake.answers.append((request, message))
        if "messages" not in request:
            self._send_response(request, message)
            return
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        base = {"id": "c1", "created": 1, "model": request.get("model")}
        if request.get("stream"):
            self._stream(base, message, reason, request)
            return
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason}
        if request.get("logprobs"):
            choice["logprobs"] = LOGPROBS
        self._send({**base, "object": "chat.completion", "choices": [choice], "usage": USAGE})

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        self._send_bytes(json.dumps(answer).encode(), status)

    def _send_bytes(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, base: dict[str, Any], message: dict[str, Any], reason: str, request: dict[str, Any]) -> None:
        self._open_stream()
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if "reasoning_content" in message:
            deltas += [{"reasoning_content": word} for word in re.findall(r"\S+\s*", message["reasoning_content"])]
        deltas += [{"content": word} for word in re.findall(r"\S+\s*", message["content"] or "")]
        for place, call in enumerate(message.get("tool_calls") or []):
            # the name first and the arguments in a later chunk, as model servers do
            head = {**call, "index": place, "function": {"name": call["function"]["name"], "arguments": ""}}
            tail = {"index": place, "function": {"arguments": call["function"]["arguments"]}}
            deltas += [{"tool_calls": [head]}, {"tool_calls": [tail]}]
        chunks: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        chunks.append({"index": 0, "delta": {}, "finish_reason": reason})
        if request.get("logprobs"):
            chunks[1]["logprobs"] = LOGPROBS
        for number, chunk in enumerate(chunks):
            if number == 3 and "DRIP" in str(request["messages"]):
                self.fake.gate.wait(20)
            if number == 3 and "BREAK" in str(request["messages"]):
                self.wfile.write(b'data: {"error": {"message": "it broke", "code": 500}}\n\n')
                return
            self._event({**base, "object": "chat.completion.chunk", "choices": [chunk]})
        if (request.get("stream_options") or {}).get("include_usage"):
            self._event({**base, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody reads on
            self.wfile.write(b"data: [DONE]\n\n")

    def _open_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

    def _send_response(self, request: dict[str, Any], message: dict[str, Any]) -> None:
        """Answer a request of the Responses interface."""
        output: list[dict[str, Any]] = [
            {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
            | call["function"]
            for call in message.get("tool_calls") or []
        ]
        if message["content"] is not None:
            part = {"type": "output_text", "text": message["content"], "annotations": []}
            text = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
            output.append(text)
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        usage = {"input_tokens": 11, "output_tokens": 7, "total_tokens": 18, **details}
        base = {"id": "resp_1", "object": "response", "created_at": 1, "model": request["model"], "tools": []}
        base |= {"parallel_tool_calls": True, "tool_choice": "auto"}
        answer = {**base, "status": "completed", "output": output, "usage": usage}
        if not request.get("stream"):
            self._send(answer)
            return
        self._open_stream()
        self._event({"type": "response.created", "response": {**base, "status": "in_progress", "output": []}})
        for place, item in enumerate(output):
            self._event({"type": "response.output_item.added", "output_index": place, "item": item})
            for word in re.findall(r"\S+\s*", message["content"] or "") if item["type"] == "message" else []:
                delta = {"item_id": item["id"], "output_index": place, "content_index": 0, "delta": word}
                self._event({"type": "response.output_text.delta", **delta})
            self._event({"type": "response.output_item.done", "output_index": place, "item": item})
        self._event({"type": "response.completed", "response": answer})


USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
LOGPROBS = {"content": [{"token": "x", "logprob": -0.1, "bytes": [120], "top_logprobs": []}]}


def _as_chat(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a Responses request, as far as an answer depends on it."""
    given = request["input"]
    messages: list[dict[str, Any]] = []
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        if item.get("type") == "function_call":
            messages.append({"role": "assistant", "content": None, "tool_calls": [item]})
        elif item.get("type") == "function_call_output":
            messages.append({"role": "tool", "content": item["output"]})
        else:
            content = item["content"]
            text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            messages.append({"role": item["role"], "content": text})
    return messages


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


STYLES: dict[str, Callable[[Any, str], Any]] = {
    "chat": lambda agent, text: agent.chat(text),
    "chat streaming": lambda agent, text: agent.chat(text, stream=True),
    "achat": lambda agent, text: asyncio.run(agent.achat(text)),
    "achat streaming": lambda agent, text: asyncio.run(agent.achat(text, stream=True)),
    "iter_stream": lambda agent, text: "".join(agent.iter_stream(text)),
    "start": lambda agent, text: agent.start(text),
    "start streaming": lambda agent, text: "".join(agent.start(text, stream=True)),
    "astart": lambda agent, text: asyncio.run(agent.astart(text)),
}
"""Ways to let an agent take a turn and wait for its answer."""


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


class FakeStart:
    """Starts a `FakeServer` where a version's model server would be started; its tag is the version's number.

    ``failing`` names models whose server does not come up. Use as a context manager.
    """

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.failing: set[str] = set()

    def __enter__(self) -> "FakeStart":
        return self

    def __exit__(self, *_: object) -> None:
        for served in self.started:
            served.stop()

    def __call__(self, folder: Any, *, name: str, device: str) -> Any:
        """A server for the weights in ``folder``."""
        from praison_agent_rl.errors import ServerFailed

        if name in self.failing:
            raise ServerFailed(f"the server for {name} was told not to come up")
        self.started.append(_served(folder, name))
        return self.started[-1]

    def of(self, version: str) -> Any:
        """The server that was last started for a version."""
        return [served for served in self.started if served.model.endswith(f"-{version}")][-1]

    @property
    def names(self) -> list[str]:
        """The versions of the servers that were started, in order."""
        return [served.model.rpartition("-")[2] for served in self.started]

    @property
    def alive(self) -> list[str]:
        """The versions of those that have not ended."""
        return [served.model.rpartition("-")[2] for served in self.started if served.running]


def _served(folder: Any, name: str) -> Any:
    from praison_agent_rl.serving import Served

    class FakeServed(Served):
        fake: FakeServer
        alive = True

        @property
        def running(self) -> bool:
            return self.alive

        def stop(self) -> None:
            if self.alive:
                self.alive = False
                self.fake.__exit__()

    fake = FakeServer(name[-1]).__enter__()
    served = FakeServed(url=fake.url, model=name, api_key=f"key-{name}", folder=folder)
    served.fake = fake
    return served
