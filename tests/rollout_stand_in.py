"""A rollout endpoint on 127.0.0.1 whose model follows a script: it hands out jobs and remembers all that it is told."""

import json
import select
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

KEY = "key-of-the-endpoint"


class Asked(NamedTuple):
    """A request for a completion."""

    job: str
    agent: str
    body: dict[str, Any]

    @property
    def tools(self) -> list[str]:
        """Names of the tools that the model is shown."""
        return [tool["function"]["name"] for tool in self.body.get("tools") or []]

    @property
    def results(self) -> list[str]:
        """What tools answered so far in this conversation, the oldest first."""
        return [str(message["content"]) for message in self.body["messages"] if message["role"] == "tool"]

    @property
    def text(self) -> str:
        """All that was said so far."""
        return json.dumps(self.body["messages"])


Script = Callable[[Asked], dict[str, Any] | int]
"""The assistant message for a request, or the status of a refusal."""


def says(text: str) -> dict[str, Any]:
    """An answer."""
    return {"role": "assistant", "content": text}


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    """A call of one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


class ScriptedEndpoint:
    """Use as a context manager. ``over`` makes it answer that there will be no more jobs."""

    def __init__(self, script: Script, jobs: Sequence[dict[str, Any]] = (), *, over: bool = False) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.refused: list[Asked] = []
        """Requests of rollouts that had ended."""
        self.keys: set[str] = set()
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.polls: list[dict[str, list[str]]] = []
        self.over = over
        self._jobs = list(jobs)
        self._changed = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.endpoint = self  # type: ignore[attr-defined]
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "ScriptedEndpoint":
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self.over = True
            self._changed.notify_all()
        self._http.shutdown()
        self._http.server_close()

    def offer(self, *jobs: dict[str, Any]) -> None:
        """Have more jobs."""
        with self._changed:
            self._jobs += jobs
            self._changed.notify_all()

    def ended(self, count: int, seconds: float = 120.0) -> dict[str, dict[str, Any]]:
        """The outcomes, once there are ``count`` of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= count, seconds), self.outcomes
            return dict(self.outcomes)

    def until(self, true: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Whether ``true`` becomes so."""
        end = time.monotonic() + seconds
        while not true() and time.monotonic() < end:
            time.sleep(0.01)
        return true()

    def take(self, wait: float, limit: int) -> list[dict[str, Any]] | None:
        """Jobs, which are given away; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self.over, wait)
            if self.over:
                return None
            taken, self._jobs = self._jobs[:limit], self._jobs[limit:]
            return taken

    def end(self, job: str, outcome: dict[str, Any]) -> None:
        """Note how a rollout ended."""
        with self._changed:
            assert job not in self.outcomes, f"{job} is reported twice"
            self.outcomes[job] = outcome
            self._changed.notify_all()

    def answer(self, asked: Asked) -> dict[str, Any] | int:
        """What the model says, or why it says nothing."""
        with self._changed:
            if asked.job in self.outcomes:
                self.refused.append(asked)
                return 404
            self.asked.append(asked)
        return self.script(asked)


def job(id: str, prompt: str, **more: Any) -> dict[str, Any]:
    """A job as it is sent."""
    return {"id": id, "prompt": prompt, "seconds": 120.0, **more}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def endpoint(self) -> ScriptedEndpoint:
        return self.server.endpoint  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._may():
            return
        query = parse_qs(self.path.partition("?")[2])
        self.endpoint.polls.append(query)
        jobs = self.endpoint.take(float(query["wait"][0]), int(query.get("limit", ["1000"])[0]))
        if jobs and select.select([self.connection], [], [], 0)[0]:  # whoever asked has hung up
            self.endpoint.offer(*jobs)
            self.close_connection = True
        elif jobs is None:
            self._send({"error": {"message": "there are no more rollouts"}}, 410)
        else:
            self._send({"jobs": jobs})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._may():
            return
        parts = [unquote(part) for part in self.path.split("/")[1:]]
        if parts[0] == "jobs":
            assert body["id"] == parts[1]
            self.endpoint.end(parts[1], body)
            self._send({})
            return
        assert (parts[0], parts[3:]) == ("rollouts", ["v1", "chat", "completions"]), self.path
        answer = self.endpoint.answer(Asked(parts[1], parts[2], body))
        if isinstance(answer, int):
            self._send({"error": {"message": f"refused with {answer}", "type": "invalid_request_error"}}, answer)
            return
        assert not body.get("stream"), "a rollout streams nothing"
        finish = "tool_calls" if answer.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        choice = {"index": 0, "message": answer, "finish_reason": finish}
        reply = {"id": "c1", "object": "chat.completion", "created": 1, "model": body["model"], "usage": usage}
        self._send({**reply, "choices": [choice]})

    def _may(self) -> bool:
        self.endpoint.keys.add(self.headers.get("authorization", ""))
        if self.headers.get("authorization") == f"Bearer {KEY}":
            return True
        self._send({"error": {"message": "wrong or missing API key"}}, 401)
        return False

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.send_header("connection", "close")  # copies are many, and each has clients of its own
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
            self.close_connection = True
