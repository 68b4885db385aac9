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
from typing import Any, TypeVar

from praison_agent_rl.transcripts.comparing import Names, Recent, Written, instructions, same, shared
from praison_agent_rl.transcripts.files import REFERENCE_WINDOW, GrowingFile, encode_line, store_at
from praison_agent_rl.transcripts.masking import Mask, Masks
from praison_agent_rl.transcripts.plain_values import Kept, plain
from praison_agent_rl.transcripts.redaction import Redactor, redact_value

_Value = TypeVar("_Value")

logger = logging.getLogger(__name__)

_CANDIDATES = 8
"""Calls to which one that extends none is compared, for a beginning that they share."""
_OPEN_RUNS = 10_000
"""Runs whose placeholders are remembered; more are not open at once, but some may never be ended."""
_ENDED_RUNS = 10_000
"""Runs whose placeholders are remembered for feedback."""
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
        self.store = store_at(store)  # the process may change its folder
        self.masks = Masks([Mask(redact, redact)] if redact is not None else ())
        """What is masked in lines from now on; a run that has begun keeps to what was masked then, too."""
        self._file = functools.partial(GrowingFile, self.store, max_bytes=max_bytes, max_file_bytes=max_file_bytes)
        self._writers: dict[int, _ProcessWriter] = {}
        self.dropped = 0
        """Lines that could not be written."""
        self.failure: Exception | None = None
        """Why the first of them could not."""

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

    def feedback(
        self, feedback: Mapping[str, Any], *, masks: Masks | None = None, names: dict[str, str] | None = None
    ) -> None:
        """Somebody has rated a run; the keys are those of `Feedback`. Raises OSError where it cannot be written.

        ``masks`` come on top of those of the store; ``names`` are the placeholders to go on from, where `knows` is not.
        """
        writer = self._writer()
        with writer.lock:
            writer.feedback(feedback, masks or self.masks, {} if names is None else names)

    def knows(self, run_id: str) -> bool:
        """Whether this process has written that run not long ago, and remembers what its placeholders stand for."""
        return self._writer().knows(run_id)

    def close(self) -> None:
        """Say what was lost, if that was not said yet, and close the file; a later line opens another."""
        self._writer().attempt(_ProcessWriter.close, {})

    def _writer(self) -> "_ProcessWriter":
        """That of this process: a forked child has a file, a memory and a lock of its own."""
        pid = os.getpid()
        writer = self._writers.get(pid)
        if writer is None:
            new = _ProcessWriter(self._file(), lambda: self.masks, self._count)
            writer = self._writers.setdefault(pid, new)
        return writer

    def _count(self, error: Exception) -> None:
        self.dropped += 1
        self.failure = self.failure or error
        if self.dropped == 1:
            with contextlib.suppress(Exception):  # handlers are another's code
                logger.warning(
                    "a line could not be recorded in %r (%s: %s); the agent goes on, and what is lost is counted",
                    *(str(self.store), type(error).__name__, error),
                )


class _OpenRun:
    """A run that has begun."""

    __slots__ = ("line", "masks", "names")
    masks: Masks
    names: Names

    def __init__(self, line: dict[str, Any], parent: "_OpenRun | None", masks: Masks) -> None:
        self.names = parent.names if parent else Names()
        """Placeholders of the conversation that it is in; what a run hands to another is one conversation."""
        self.masks = parent.masks | masks if parent else masks
        self.line: dict[str, Any] | None = line
        """Its ``begin`` line, until that is written."""


class _ProcessWriter:
    """What one process knows of what it has written."""

    def __init__(self, file: GrowingFile, masks: Callable[[], Masks], count: Callable[[Exception], None]) -> None:
        # Reentrant: a finaliser may record a broken stream at any moment, in the midst of recording too.
        self.lock = threading.RLock()
        self._file = file
        self._masks = masks
        self._count = count
        self._waiting: deque[tuple[Callable[..., None], Mapping[str, Any]]] = deque()
        self._busy = False
        self._written = Recent(REFERENCE_WINDOW)
        self._runs: dict[str, _OpenRun] = {}
        self._ended: dict[str, Masks] = {}
        self._ended_names: dict[str, Names] = {}
        """Of those runs in which something was masked."""
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

    def knows(self, run_id: str) -> bool:
        """Whether it has written that run, as far as it remembers."""
        return run_id in self._runs or run_id in self._ended

    # --- the kinds of lines, each under the lock ---

    def begin(self, run: Mapping[str, Any]) -> None:
        """Write that a run has begun, or keep the line where its placeholders are not known yet."""
        self._renew()
        line = {"kind": "begin", "parent": None, "prompt": None, **{key: plain(value) for key, value in run.items()}}
        opened = _OpenRun(line, self._runs.get(line["parent"]), self._masks())
        line.update({key: _name(line[key], opened.masks) for key in ("agent", "session", "tags") if key in line})
        if opened.masks.specs:
            line["redact"] = opened.masks.specs
        _remember(self._runs, line["run"], opened, _OPEN_RUNS)
        # If something in the prompt is masked, the first call says which conversation this is, and so as what.
        trial = opened.names if opened.names else Names()
        if self._masked(line["prompt"], trial, opened.masks) == line["prompt"] or opened.names:
            opened.names.masked.update(trial.masked)
            self._write_begin(opened)

    def call(self, call: Mapping[str, Any]) -> None:
        """Write what is new in a call."""
        self._renew()
        call = {**_DEFAULTS, **call}
        agent, messages, opened = call["agent"], call["messages"], self._run(call["run"])
        masks = opened.masks if opened else self._masks()
        earlier, keep = (
            self._written.extended_by(messages, agent, masks) or self._alike(agent, messages, masks) or (None, 0)
        )
        names = self._names(opened, earlier)
        new, reply = messages[keep:] if type(messages) is Kept else plain(messages[keep:]), plain(call["reply"])
        tools, tools_of = self._known_tools(agent, call["tools"], masks)
        masked_reply = self._masked(reply, names, masks)
        line = {
            "kind": "call",
            **{name: plain(call[name]) for name in _SCALARS},
            "agent": _name(agent, masks),
            "after": earlier.id if earlier else None,
            "keep": keep,
            "messages": self._masked(new, names, masks),
            "tools": self._masked(tools, names, masks) if tools and not tools_of else None,
            "tools_of": tools_of,
            "settings": self._masked(plain(call["settings"]), names, masks),
            "reply": masked_reply,
            # tokens would spell what was masked
            "logprobs": plain(call["logprobs"]) if masked_reply == reply else None,
            "error": self._masked(plain(call["error"]), names, masks),
        }
        self._append(line)
        sent = messages if type(messages) is Kept else [*(earlier.conversation[:keep] if earlier else ()), *new]
        conversation = sent if reply is None else [*sent, reply]
        self._written.add(Written(call["id"], agent, conversation, len(sent), tools, names, masks))
        if opened is None:
            names.masked.clear()

    def end(self, ended: Mapping[str, Any]) -> None:
        """Write how a run ended."""
        self._renew()
        opened = self._run(ended["run"])
        names, masks = (opened.names, opened.masks) if opened else (Names(), self._masks())
        if opened:
            del self._runs[ended["run"]]
            self._write_begin(opened)
            _remember(self._ended, ended["run"], masks, _ENDED_RUNS)
        said = {key: self._masked(plain(ended[key]), names, masks) for key in ("output", "error")}
        names.masked.clear()
        if opened and names:
            _remember(self._ended_names, ended["run"], names, _ENDED_RUNS)
        self._append({"kind": "end", **ended, **said})

    def feedback(self, feedback: Mapping[str, Any], masks: Masks, names: dict[str, str]) -> None:
        """Write what somebody said of a run."""
        self._renew()
        run_id = feedback["run"]
        opened = self._run(run_id)
        table = opened.names if opened else self._ended_names.get(run_id) or Names(names)
        masks = (opened.masks if opened else self._ended.get(run_id) or self._masks()) | masks
        said = {key: self._masked(plain(feedback[key]), table, masks) for key in ("label", "correction")}
        table.masked.clear()
        if table and run_id in self._ended:
            _remember(self._ended_names, run_id, table, _ENDED_RUNS)
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

    def _alike(self, agent: str | None, messages: list[Any], masks: Masks) -> tuple[Written, int] | None:
        """The one of the agent's latest calls that has the most in common with ``messages``, from the first on."""
        begun = [
            (earlier, shared(messages, earlier.conversation))
            for earlier in itertools.islice(self._written.latest(agent, masks), _CANDIDATES)
        ]
        # Of another conversation, with which it has only the instructions in common, it takes no placeholders over.
        least = instructions(messages)
        fitting = [(earlier, most) for earlier, most in begun if most > (least if earlier.names else 0)]
        return max(fitting, key=lambda found: found[1], default=None)

    def _known_tools(self, agent: str | None, tools: list[Any] | None, masks: Masks) -> tuple[list[Any], str | None]:
        """The tools as plain values, and the latest call that has the same."""
        if not tools:
            return [], None
        latest = (earlier for earlier in self._written.latest(agent, masks) if earlier.tools)
        for earlier in itertools.islice(latest, _CANDIDATES):
            if same(tools, earlier.tools):
                return earlier.tools, earlier.id
        return tools if type(tools) is Kept else plain(tools), None

    def _run(self, run_id: str | None) -> _OpenRun | None:
        """A run that has begun, masked as it was then and as is asked for now."""
        opened = self._runs.get(run_id) if run_id else None
        if opened and opened.masks is not self._masks():
            opened.masks = opened.masks | self._masks()
        return opened

    def _names(self, opened: _OpenRun | None, earlier: Written | None) -> Names:
        """Placeholders of the conversation that a call goes on with, or of its run; the run goes on with them."""
        names = (earlier.names if earlier else None) or (opened.names if opened else Names())
        if opened:
            opened.names = names
            self._write_begin(opened)
        return names

    def _write_begin(self, opened: _OpenRun) -> None:
        if opened.line is not None:
            line, opened.line = opened.line, None
            masked = {**line, "prompt": self._masked(line["prompt"], opened.names, opened.masks)}
            try:
                self._append(masked)
            except OSError:  # the next line of the run may find room
                opened.line = line
                raise

    # --- lines ---

    def _masked(self, value: Any, names: Names, masks: Masks) -> Any:
        """``value`` with each of its texts masked, once in a run."""
        known = names.masked

        def once(text: str, names: dict[str, str]) -> str:
            masked = known.get((text, masks))
            if masked is None:
                masked = known[text, masks] = masks(text, names)
            return masked

        return redact_value(value, once, names)

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


def _name(value: Any, masks: Masks) -> Any:
    """A name, or the names in a list, masked in the same way in every run."""
    if type(value) is list:
        return [_name(item, masks) for item in value]
    return masks.name(value) if type(value) is str else value


def _remember(runs: dict[str, _Value], run_id: str, kept: _Value, most: int) -> None:
    while len(runs) >= most:
        del runs[next(iter(runs))]
    runs[run_id] = kept
