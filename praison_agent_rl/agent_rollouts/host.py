"""Makes the rollouts that an endpoint asks for, with copies of an agent of this process; nothing of them is shown.

A thread cannot be ended from outside: a rollout that takes too long is reported and left to itself, and ends at its
next model call, which the endpoint refuses.
"""

import contextlib
import http.client
import json
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import BaseModel

from praison_agent_rl.agent_rollouts.copies import (
    RolloutPlace,
    Tools,
    check_copyable,
    check_names,
    end_rollout,
    rollout_copy,
    tool_log,
)
from praison_agent_rl.agent_rollouts.jobs import RolloutJob, RolloutOutcome
from praison_agent_rl.agent_rollouts.tool_copies import ToolLog
from praison_agent_rl.capture.recordings import describe
from praison_agent_rl.endpoints import keep_loopback_off_proxies, why_no_address
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.sent import silent_thread

_LOG = logging.getLogger(__name__)
_WAIT = 10.0
"""Seconds that the endpoint may let a request for jobs wait."""
_PATIENCE = 30.0
"""Seconds in which the endpoint has to answer anything else."""
_TRIES = 3
"""Times that a request is sent before the endpoint counts as gone."""
_LONGEST_ERROR = 4000
"""Characters of an error that are reported."""


class RolloutHost:
    """Runs an agent for an endpoint: ``at_once`` rollouts at a time, each by copies that share nothing.

    ``tools`` and ``trained`` are as for `rollout_copy`.

    Raises:
        AgentError: the agent cannot be copied, or a name is of none.
        ConfigError: ``at_once`` is no number of rollouts.
    """

    def __init__(
        self, agent: Any, *, at_once: int = 8, tools: Tools | None = None, trained: Iterable[str] | None = None
    ) -> None:
        if isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1:
            raise ConfigError(f"at_once={at_once!r} is no number of rollouts at a time; give 1 or more")
        self._trained = None if trained is None else list(trained)
        check_copyable(agent)
        check_names(agent, self._trained, tools)
        self._agent = agent
        self._tools = tools
        self._at_once = at_once
        self._following: _Following | None = None

    @property
    def following(self) -> bool:
        """Whether it takes jobs from an endpoint."""
        return self._following is not None and not self._following.ended.is_set()

    @property
    def failure(self) -> str | None:
        """Why it follows no longer, if not because the endpoint said so or `close` was called."""
        return None if self._following is None else self._following.failure

    def follow(self, address: str, key: str) -> None:
        """Do the jobs of the endpoint at ``address``, in threads of its own, until `close` or the endpoint's end.

        Raises:
            ConfigError: the address or the key is none, or another endpoint is followed.
        """
        if (why := why_no_address(address)) is not None:
            raise ConfigError(f"the address of the rollout endpoint {why}")
        if not key or not (key.isascii() and key.isprintable()):
            raise ConfigError("the key of the rollout endpoint is empty, or no HTTP header can carry it")
        if self.following:
            raise ConfigError("this host follows an endpoint already; close it first")
        keep_loopback_off_proxies()
        self._following = _Following(_Wire(address, key), self._attempt, self._at_once)
        self._following.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it follows no longer; False if it still does after ``seconds``."""
        return self._following is None or self._following.ended.wait(seconds)

    def close(self) -> None:
        """Take no more jobs; rollouts under way are reported as broken off. It is safe to call this twice."""
        if self._following is not None:
            self._following.close()

    def _attempt(self, job: RolloutJob, wire: "_Wire") -> "_Attempt":
        return _Attempt(job, self._agent, RolloutPlace(wire.address, wire.key, job.id), self._tools, self._trained)


class _Attempt:
    """One rollout, in a thread of its own."""

    def __init__(
        self, job: RolloutJob, agent: Any, place: RolloutPlace, tools: Tools | None, trained: list[str] | None
    ) -> None:
        self._job, self._agent, self._place, self._tools, self._trained = job, agent, place, tools, trained
        self.over = threading.Event()
        """Set once there is something to report."""
        self._ended: tuple[str | None, str | None] = None, "the host was closed before the rollout had ended"
        self._tools_used: ToolLog | None = None

    def outcome(self) -> RolloutOutcome:
        """How it went; at the end of its time, or when it is broken off, so far."""
        began = time.monotonic()
        if not self.over.is_set():  # it was broken off before it began
            threading.Thread(target=self._run, name="praison-agent-rl-rollout", daemon=True).start()
        if self.over.wait(min(self._job.seconds, threading.TIMEOUT_MAX)):
            output, error = self._ended
        else:
            output, error = None, f"took longer than {self._job.seconds:g} s"
        used = self._tools_used
        return RolloutOutcome(
            id=self._job.id,
            output=_plain(output),
            error=_plain(error),
            seconds=time.monotonic() - began,
            tool_seconds=0.0 if used is None else used.seconds,
            tool_errors=[] if used is None else [str(_plain(error)) for error in used.errors],
        )

    def _run(self) -> None:
        try:
            self._ended = self._answer()
        except BaseException as error:  # noqa: BLE001 - tools and hooks may raise anything, SystemExit too
            self._ended = None, describe(error)[:_LONGEST_ERROR]
        finally:
            self.over.set()

    def _answer(self) -> tuple[str | None, str | None]:
        """The agent's answer, or why there is none."""
        with silent_thread() as silence:  # the framework prints panels even when it is silent
            twin = rollout_copy(
                self._agent, self._place, history=self._job.history, trained=self._trained, tools=self._tools
            )
            self._tools_used = tool_log(twin)
            try:
                said = twin.chat(self._job.prompt)
            finally:
                end_rollout(twin, self._place)
        if said is not None:  # of structured output the framework gives an object
            return said.model_dump_json() if isinstance(said, BaseModel) else str(said), None
        why = _last_panel(silence.said)
        return None, f"the agent gave no answer: {why}" if why else "the agent gave no answer"


class _Following:
    """The time in which a host does the jobs of one endpoint."""

    def __init__(self, wire: "_Wire", attempt: Any, at_once: int) -> None:
        self._wire, self._attempt = wire, attempt
        self._jobs: queue.SimpleQueue[RolloutJob | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(0)
        self._at_once = at_once
        self._under_way: set[_Attempt] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.ended = threading.Event()
        self.failure: str | None = None

    def start(self) -> None:
        """Ask for jobs, and do them."""
        for target in (self._ask, *[self._work] * self._at_once):
            threading.Thread(target=target, name="praison-agent-rl-rollout-host", daemon=True).start()

    def close(self) -> None:
        """Ask for no more jobs, and break off those under way."""
        with self._lock:
            self._closed.set()
            under_way = tuple(self._under_way)
        for attempt in under_way:
            attempt.over.set()
        self._free.release()
        self._wire.hang_up()

    def _ask(self) -> None:
        try:
            while not self._closed.is_set():
                self._free.acquire()  # one at least is free now
                free = 1 + sum(self._free.acquire(blocking=False) for _ in range(self._at_once - 1))
                jobs = None if self._closed.is_set() else self._wire.jobs(free)
                if jobs is None:
                    break
                for job in jobs:
                    self._jobs.put(job)
                for _ in range(free - len(jobs)):
                    self._free.release()
        except (OSError, ValueError) as error:
            if not self._closed.is_set():
                self.failure = f"{type(error).__name__}: {error}"
                _LOG.warning("the rollout endpoint is followed no longer: %s", self.failure)
        finally:
            for _ in range(self._at_once):
                self._jobs.put(None)
            self.ended.set()

    def _work(self) -> None:
        self._free.release()
        while (job := self._jobs.get()) is not None:
            attempt = self._attempt(job, self._wire)
            with self._lock:
                self._under_way.add(attempt)
                if self._closed.is_set():
                    attempt.over.set()
            outcome = attempt.outcome()
            with self._lock:
                self._under_way.discard(attempt)
            try:
                self._wire.report(outcome)
            except (OSError, ValueError) as error:
                _LOG.warning("the rollout %s could not be reported: %s: %s", job.id, type(error).__name__, error)
            self._free.release()


class _Wire:
    """Requests to one endpoint, past all proxies."""

    def __init__(self, address: str, key: str) -> None:
        self.address, self.key = address.rstrip("/"), key
        parts = urlsplit(self.address)
        self._path = parts.path
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = str(parts.hostname), parts.port
        self._asking: http.client.HTTPConnection | None = None
        self._hung_up = False

    def jobs(self, at_most: int) -> list[RolloutJob] | None:
        """Jobs to do now, if there are any within some seconds; None if there will be none."""
        status, body = self._request("GET", f"/jobs?wait={_WAIT:g}&limit={at_most}")
        if status == http.client.GONE:
            return None
        if status != http.client.OK:
            raise ValueError(f"{self.address}/jobs answered with HTTP {status}: {body[:200]!r}")
        try:
            return [RolloutJob.model_validate(job) for job in json.loads(body)["jobs"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.address}/jobs did not answer with jobs: {body[:200]!r}") from error

    def report(self, outcome: RolloutOutcome) -> None:
        """Say how a rollout ended; an endpoint that waits for it no longer is told in vain."""
        body = outcome.model_dump_json().encode()
        status, answer = self._request("POST", f"/jobs/{quote(outcome.id, safe='')}", body)
        if status >= 300:
            _LOG.info("the outcome of rollout %s was refused: HTTP %d %r", outcome.id, status, answer[:200])

    def hang_up(self) -> None:
        """End the request for jobs that is waiting."""
        self._hung_up = True
        connection = self._asking
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        for left in reversed(range(_TRIES)):
            try:
                return self._send(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                if left == 0 or (method == "GET" and self._hung_up):
                    raise OSError(f"{self.address} does not answer: {type(error).__name__}: {error}") from error
                time.sleep(0.1)
        raise AssertionError("unreachable")

    def _send(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = self._connect(self._host, self._port, timeout=_WAIT + _PATIENCE)
        if method == "GET":
            self._asking = connection
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        try:
            connection.request(method, self._path + path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


def _plain(text: str | None) -> str | None:
    """A text that UTF-8 can say."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _last_panel(printed: str) -> str:
    """What is in the last box that the framework printed: where it gives no answer, the error."""
    lines = printed.rpartition("⚠ Error")[2].splitlines()
    inside = [found[1].strip() for line in lines if (found := re.match(r"\s*[│|](.*)[│|]\s*$", line))]
    return " ".join(inside)[:_LONGEST_ERROR]
