"""Writes what agents say to a store, from any thread and process; it never raises into the caller.

A call that extends an earlier one stores what is new and names the other, so that a long conversation grows with its
length and not with its square. What was written when a method has returned survives the end of the process.
"""

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.transcripts.files import REFERENCE_WINDOW, GrowingFile, encode_line
from praison_agent_rl.transcripts.plain_values import plain
from praison_agent_rl.transcripts.redaction import Redactor, mask_secrets, redact_value

logger = logging.getLogger(__name__)

_CANDIDATES = 8
"""Calls to which one that extends none is compared, for a beginning that they share."""
_OPEN_RUNS = 10_000
"""Runs whose placeholders are remembered; more are not open at once, but some may never be ended."""
_SCALARS = ("id", "run", "agent", "time", "seconds", "model", "version", "api", "finish", "usage", "partial")
_DEFAULTS = {
    **dict.fromkeys(("run", "agent", "model", "version", "tools", "reply", "finish", "usage", "logprobs", "error")),
    **{"seconds": 0.0, "api": "chat", "settings": {}, "partial": False},
}


class TranscriptWriter:
    """Appends to a store; never raises into the caller."""

    def __init__(
        self,
        store: Path,
        *,
        redact: Redactor | None = None,
        max_bytes: int | None = None,
        max_file_bytes: int | None = None,
    ) -> None:
        """Write to the folder ``store``, each text as ``redact`` gives it back (by default, secrets are masked).

        ``max_file_bytes`` is the size at which another file is begun, ``max_bytes`` that of the store beyond which the
        oldest files that nobody writes to are removed.
        """
        self.store = Path(store).absolute()  # the process may change its folder
        self._redact = redact or mask_secrets
        self._file = functools.partial(GrowingFile, self.store, max_bytes=max_bytes, max_file_bytes=max_file_bytes)
        self._writers: dict[int, _ProcessWriter] = {}
        self.dropped = 0
        """Lines that could not be written."""

    def begin(self, run: Mapping[str, Any]) -> None:
        """A run has started; the keys are those of a ``begin`` line, less ``kind``."""
        self._writer().attempt(_ProcessWriter.begin, run)

    def call(self, call: Mapping[str, Any]) -> None:
        """A model has answered, or failed to; the keys are those of `Call`, with whole messages and tools."""
        self._writer().attempt(_ProcessWriter.call, call)

    def end(self, run_id: str, *, output: Any, error: str | None, seconds: float) -> None:
        """A run has ended."""
        ended = {"run": run_id, "output": output, "error": error, "seconds": seconds}
        self._writer().attempt(_ProcessWriter.end, ended)

    def feedback(self, feedback: Mapping[str, Any]) -> None:
        """Somebody has rated a run; the keys are those of `Feedback`. Raises OSError where it cannot be written."""
        writer = self._writer()
        with writer.lock:
            writer.feedback(feedback)

    def close(self) -> None:
        """Say what was lost, if that was not said yet, and close the file; a later line opens another."""
        self._writer().attempt(_ProcessWriter.close, {})

    def _writer(self) -> "_ProcessWriter":
        """That of this process: a forked child has a file, a memory and a lock of its own."""
        pid = os.getpid()
        writer = self._writers.get(pid)
        if writer is None:
            new = _ProcessWriter(self._file(), self._redact, self._count)
            writer = self._writers.setdefault(pid, new)
        return writer

    def _count(self, error: Exception) -> None:
        self.dropped += 1
        if self.dropped == 1:
            with contextlib.suppress(Exception):  # handlers are another's code
                logger.warning(
                    "a line could not be recorded in %r (%s: %s); the agent goes on, and what is lost is counted",
                    *(str(self.store), type(error).__name__, error),
                )


class _Written(NamedTuple):
    """A call that later ones may refer to."""

    id: str
    agent: str | None
    conversation: list[Any]
    """Its messages and the reply, plain and not redacted: what later requests are compared with."""
    sent: int
    """Length of the messages alone."""
    tools: list[Any]
    names: dict[str, str]


class _OpenRun:
    """A run that has begun and not ended."""

    def __init__(self, line: dict[str, Any], parent: "_OpenRun | None") -> None:
        self.names: dict[str, str] = parent.names if parent else {}
        """Placeholders of the conversation that it is in; what a run hands to another is one conversation."""
        self.line: dict[str, Any] | None = line
        """Its ``begin`` line, until that is written."""


class _ProcessWriter:
    """What one process knows of what it has written."""

    def __init__(self, file: GrowingFile, redact: Redactor, count: Callable[[Exception], None]) -> None:
        # Reentrant: a finaliser may record a broken stream at any moment, in the midst of recording too.
        self.lock = threading.RLock()
        self._file = file
        self._redact = redact
        self._count = count
        self._waiting: deque[tuple[Callable[..., None], Mapping[str, Any]]] = deque()
        self._busy = False
        self._written: deque[_Written] = deque(maxlen=REFERENCE_WINDOW)
        self._runs: dict[str, _OpenRun] = {}
        self._untold = 0
        """Lost lines of which no line tells yet."""
        self._reason = ""

    def attempt(self, write: "Callable[[_ProcessWriter, Mapping[str, Any]], None]", given: Mapping[str, Any]) -> None:
        """Write, and count what cannot be written."""
        with self.lock:
            self._waiting.append((write, given))
            if self._busy:  # this thread is writing already; it goes on with this one then
                return
            self._busy = True
            try:
                while self._waiting:
                    next_write, next_given = self._waiting.popleft()
                    try:
                        next_write(self, next_given)
                    except Exception as error:  # noqa: BLE001 - the recorder's boundary
                        self._lose(error)
            finally:
                self._busy = False

    # --- the kinds of lines, each under the lock ---

    def begin(self, run: Mapping[str, Any]) -> None:
        """Write that a run has begun, or keep the line where its placeholders are not known yet."""
        self._renew()
        line = {"kind": "begin", "parent": None, "prompt": None, **{key: plain(value) for key, value in run.items()}}
        opened = _OpenRun(line, self._runs.get(line["parent"]))
        while len(self._runs) >= _OPEN_RUNS:
            del self._runs[next(iter(self._runs))]
        self._runs[line["run"]] = opened
        # If something in the prompt is masked, the first call says which conversation this is, and so as what.
        trial = dict(opened.names)
        if self._masked(line["prompt"], trial) == line["prompt"] or opened.names:
            self._write_begin(opened)

    def call(self, call: Mapping[str, Any]) -> None:
        """Write what is new in a call."""
        self._renew()
        call = {**_DEFAULTS, **call}
        agent, messages = call["agent"], call["messages"]
        earlier, keep = self._extended(agent, messages) or self._alike(agent, messages) or (None, 0)
        names = self._names(call["run"], earlier)
        new, reply = plain(messages[keep:]), plain(call["reply"])
        tools, tools_of = self._known_tools(agent, call["tools"])
        masked_reply = self._masked(reply, names)
        line = {
            "kind": "call",
            **{name: plain(call[name]) for name in _SCALARS},
            "after": earlier.id if earlier else None,
            "keep": keep,
            "messages": self._masked(new, names),
            "tools": self._masked(tools, names) if tools and not tools_of else None,
            "tools_of": tools_of,
            "settings": self._masked(plain(call["settings"]), names),
            "reply": masked_reply,
            # tokens would spell what was masked
            "logprobs": plain(call["logprobs"]) if masked_reply == reply else None,
            "error": self._masked(plain(call["error"]), names),
        }
        self._append(line)
        sent = [*(earlier.conversation[:keep] if earlier else ()), *new]
        conversation = sent if reply is None else [*sent, reply]
        self._written.append(_Written(call["id"], agent, conversation, len(sent), tools, names))

    def end(self, ended: Mapping[str, Any]) -> None:
        """Write how a run ended."""
        self._renew()
        opened = self._runs.pop(ended["run"], None)
        names = opened.names if opened else {}
        if opened:
            self._write_begin(opened)
        said = {key: self._masked(plain(ended[key]), names) for key in ("output", "error")}
        self._append({"kind": "end", **ended, **said})

    def feedback(self, feedback: Mapping[str, Any]) -> None:
        """Write what somebody said of a run."""
        self._renew()
        said = {key: self._masked(plain(feedback[key]), {}) for key in ("label", "correction")}
        self._append({"kind": "feedback", **feedback, **said})

    def close(self, _: Mapping[str, Any]) -> None:
        """Tell of what was lost, and close the file."""
        with contextlib.suppress(OSError):  # of what it would tell, which is counted already
            if self._untold:
                self._renew()
                self._tell()
        self._file.close()
        self._written.clear()

    # --- what is new in a call ---

    def _extended(self, agent: str | None, messages: list[Any]) -> tuple[_Written, int] | None:
        """The latest call of the agent whose messages are all in ``messages``, and how much of it is."""
        for earlier in reversed(self._written):
            sent = earlier.sent
            # its last message first: that tells most conversations apart
            if earlier.agent != agent or not 0 < sent <= len(messages):
                continue
            if _equal(messages[sent - 1], earlier.conversation[sent - 1]):
                shared = _shared(messages, earlier.conversation)
                if shared >= sent:
                    return earlier, shared
        return None

    def _alike(self, agent: str | None, messages: list[Any]) -> tuple[_Written, int] | None:
        """The one of the agent's latest calls that has the most in common with ``messages``, from the first on."""
        latest = itertools.islice((e for e in reversed(self._written) if e.agent == agent), _CANDIDATES)
        shared = [(earlier, _shared(messages, earlier.conversation)) for earlier in latest]
        # Of another conversation, with which it has only the instructions in common, it takes no placeholders over.
        least = _instructions(messages)
        fitting = [(earlier, most) for earlier, most in shared if most > (least if earlier.names else 0)]
        return max(fitting, key=lambda found: found[1], default=None)

    def _known_tools(self, agent: str | None, tools: list[Any] | None) -> tuple[list[Any], str | None]:
        """The tools as plain values, and the latest call that has the same."""
        if not tools:
            return [], None
        latest = (earlier for earlier in reversed(self._written) if earlier.agent == agent and earlier.tools)
        for earlier in itertools.islice(latest, _CANDIDATES):
            if _same(tools, earlier.tools):
                return earlier.tools, earlier.id
        copied: list[Any] = plain(tools)
        return copied, None

    def _names(self, run_id: str | None, earlier: _Written | None) -> dict[str, str]:
        """Placeholders of the conversation that a call goes on with, or of its run; the run goes on with them."""
        opened = self._runs.get(run_id) if run_id else None
        names = (earlier.names if earlier else None) or (opened.names if opened else {})
        if opened:
            opened.names = names
            self._write_begin(opened)
        return names

    def _write_begin(self, opened: _OpenRun) -> None:
        if opened.line is not None:
            line, opened.line = opened.line, None
            masked = {**line, "prompt": self._masked(line["prompt"], opened.names)}
            try:
                self._append(masked)
            except OSError:  # the next line of the run may find room
                opened.line = line
                raise

    # --- lines ---

    def _masked(self, value: Any, names: dict[str, str]) -> Any:
        return redact_value(value, self._redact, names)

    def _renew(self) -> None:
        if self._file.renew():
            self._written.clear()  # each file can be read without the others

    def _append(self, line: dict[str, Any]) -> None:
        self._tell()
        self._file.append(encode_line(line))

    def _tell(self) -> None:
        """Say how many lines were lost, now that writing works again."""
        if self._untold:
            lost = {"count": self._untold, "reason": self._reason, "time": time.time()}
            self._file.append(encode_line({"kind": "dropped", **lost}))
            self._untold = 0

    def _lose(self, error: Exception) -> None:
        self._untold += 1
        # the text of another error may hold what it could not write
        self._reason = (error.strerror or str(error)) if isinstance(error, OSError) else type(error).__name__
        self._count(error)


def _shared(messages: list[Any], conversation: list[Any]) -> int:
    """Number of messages, from the first on, that are the same in both."""
    length = min(len(messages), len(conversation))
    if _equal(messages[:length], conversation[:length]):
        return length
    for place in range(length):
        if not _same(messages[place], conversation[place]):
            return place
    return length


def _same(value: Any, known: Any) -> bool:
    """Whether ``value`` would be written as ``known``, which is plain, was."""
    return _equal(value, known) or bool(plain(value) == known)


def _equal(value: Any, known: Any) -> bool:
    try:
        return bool(value == known)
    except Exception:  # noqa: BLE001 - another's code: comparing arrays, for one, gives no truth value
        return False


def _instructions(messages: list[Any]) -> int:
    """Number of messages at the beginning that are the agent's instructions."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages[:8]]
    return next((place for place, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
