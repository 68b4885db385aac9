"""The HTTP interface of a rollout endpoint, on 127.0.0.1 and behind a key: jobs for hosts, a model for their agents."""

import contextlib
import hmac
import json
import logging
import selectors
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from pydantic import ValidationError

from praison_agent_rl.agent_rollouts.chat_forms import Refusal
from praison_agent_rl.agent_rollouts.desk import Desk
from praison_agent_rl.agent_rollouts.jobs import RolloutOutcome
from praison_agent_rl.agent_rollouts.policy_chat import PolicyChat

LARGEST_BODY = 32 * 2**20
"""Bytes of a request."""
LONGEST_WAIT = 30.0
"""Seconds that a host can wait for jobs in one request."""
_log = logging.getLogger(__name__)


class Door(ThreadingHTTPServer):
    """Takes requests, each connection in a thread of its own."""

    daemon_threads = True
    request_queue_size = 128  # many copies of an agent connect at once

    def __init__(self, desk: Desk, chat: PolicyChat, key: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.desk = desk
        self.chat = chat
        self._wanted = f"Bearer {key}".encode()
        self._connections: set[Any] = set()

    def start(self) -> None:
        """Answer from now on."""
        serve = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        serve.name = "praison-agent-rl-rollouts"
        serve.start()

    def stop(self) -> None:
        """Take no more requests; answers that are due are still sent."""
        self.shutdown()
        self.server_close()
        for connection in tuple(self._connections):
            with contextlib.suppress(OSError):  # the other side was faster
                connection.shutdown(socket.SHUT_RD)

    def is_key(self, header: str) -> bool:
        """Whether an Authorization header has the key."""
        return hmac.compare_digest(header.encode(), self._wanted)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Called by socketserver for each connection."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Called by socketserver at the end of each connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Called by socketserver where a handler raises; connections break off, which is nobody's fault."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log.error("a request to the rollout endpoint failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else an answer waits 40 ms for the acknowledgement of its own headers
    server: Door

    def do_GET(self) -> None:
        """Called by http.server."""
        self._serve()

    def do_POST(self) -> None:
        """Called by http.server."""
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""

    def _serve(self) -> None:
        try:
            body = self._body() if self.command == "POST" or "content-length" in self.headers else b""
            if not self.server.is_key(self.headers.get("authorization", "")):
                raise Refusal(401, "wrong or missing API key", code="invalid_api_key")
            self._answer(body)
        except Refusal as refusal:
            self._send(refusal.body(), refusal.status)
        except OSError:  # whoever asked has gone; this ends the connection
            raise
        except Exception:
            self._send(Refusal(500, "the rollout endpoint has a fault; see its process's log").body(), 500)
            raise

    def _answer(self, body: bytes) -> None:
        path, _, query = self.path.partition("?")
        parts = [unquote(part) for part in path.split("/")[1:]]
        match self.command, parts:
            case "GET", ["jobs"]:
                self._give_jobs(parse_qs(query))
            case "POST", ["jobs", job]:
                self._end(job, body)
            case "GET", ["rollouts", job, _, "v1", "models"]:
                self._list_models(job)
            case "POST", ["rollouts", job, agent, "v1", "chat", "completions"]:
                self._chat(job, agent, body)
            case _:
                raise Refusal(404, f"there is no {self.command} {path[:200]!r} here")

    def _give_jobs(self, query: dict[str, list[str]]) -> None:
        wait = _number(query, "wait", 0.0)
        limit = int(_number(query, "limit", 0.0)) or None
        jobs = self.server.desk.take(limit=limit, wait=min(wait, LONGEST_WAIT), is_connected=self._is_connected)
        try:
            self._send(json.dumps({"jobs": [job.model_dump(mode="json") for job in jobs]}).encode())
        except OSError:
            self.server.desk.take_back(jobs)
            raise

    def _end(self, job: str, body: bytes) -> None:
        try:
            outcome = RolloutOutcome.model_validate_json(body)
        except ValidationError as error:
            raise Refusal(400, f"the body is no outcome of a rollout: {error}") from error
        if outcome.id != job:
            raise Refusal(400, f"the outcome is of {outcome.id!r}, not of {job!r}")
        self.server.desk.end(outcome)
        self._send(b"{}")

    def _list_models(self, job: str) -> None:
        self.server.desk.check_under_way(job)
        model = {"id": self.server.chat.model, "object": "model", "created": 0, "owned_by": "praison-agent-rl"}
        self._send(json.dumps({"object": "list", "data": [model]}).encode())

    def _chat(self, job: str, agent: str, body: bytes) -> None:
        self.close_connection = True  # each copy of an agent has a client of its own, which would be held open
        call, answer = self.server.chat.answer(job, agent, body, self._is_connected)
        try:
            if not self._is_connected():
                raise ConnectionError("whoever asked has gone")
            if call.asked.streamed:
                options = call.asked.settings.get("stream_options") or {}
                self._send(answer.events(with_usage=bool(options.get("include_usage"))), kind="text/event-stream")
            else:
                self._send(answer.body())
        except OSError:
            self.server.chat.fail(call, "whoever asked had gone before the answer was there")
            raise

    def _body(self) -> bytes:
        """The whole body, also of a request that is refused: what is left would be taken for the next one."""
        length = self.headers.get("content-length", "")
        self.close_connection, kept = True, self.close_connection
        if (not length and "transfer-encoding" in self.headers) or not length:
            raise Refusal(411, "a Content-Length is needed")
        if not (length.isascii() and length.isdigit()):
            raise Refusal(400, f"Content-Length is {length[:80]!r}")
        if len(length) > 12 or int(length) > LARGEST_BODY:
            raise Refusal(413, f"the body has {length[:80]} bytes, and {LARGEST_BODY} is the most that is taken")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the connection ended within a request")
        self.close_connection = kept
        return body

    def _send(self, body: bytes, status: int = 200, *, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        if status >= 500:
            self.send_header("x-should-retry", "false")  # OpenAI's clients would ask again
        if self.close_connection or not self.server.desk.is_open:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _is_connected(self) -> bool:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                return not selector.select(0) or bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # it was reset, or closed by this side
            return False


def _number(query: dict[str, list[str]], name: str, default: float) -> float:
    given = query.get(name, [str(default)])[-1]
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise Refusal(400, f"{name} must be a number of at least 0, not {given[:80]!r}")
    return number
