"""Makes the lines of one process and remembers what of each conversation is written already; knows no agent.

What is known of a call before its reply can be made ready while that is awaited, so that little is left to do then.
"""

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from praison_agent_rl.transcripts.comparing import Names, Recent, Written, instructions, same, shared
from praison_agent_rl.transcripts.files import REFERENCE_WINDOW, GrowingFile, encode_line
from praison_agent_rl.transcripts.masking import Masks
from praison_agent_rl.transcripts.plain_values import Kept, plain
from praison_agent_rl.transcripts.redaction import redact_value

_Value = TypeVar("_Value")

_CANDIDATES = 8
"""Calls to which one that extends none is compared, for a beginning that they share."""
_OPEN_RUNS = 10_000
"""Runs whose placeholders are remembered; more are not open at once, but some may never be ended."""
_ENDED_RUNS = 10_000
"""Runs whose placeholders are remembered for feedback."""
_OPEN_CALLS = 1000
"""Calls whose replies are awaited; more are not at once, but of some none may ever be told."""
_SURE = 5.0
"""Seconds for which a file that was there is trusted to be: asking the system takes as long as the rest of a line."""
_SCALARS_OF_REQUEST = ("id", "run", "time", "model", "api")
_DEFAULTS = {
    **dict.fromkeys(("run", "agent", "model", "version", "tools", "reply", "finish", "usage", "logprobs", "error")),
    **{"seconds": 0.0, "api": "chat", "settings": {}, "partial": False},
}


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


class _BegunCall(NamedTuple):
    """A call whose reply is awaited."""

    time: float
    messages: list[Any]
    asked: Masks
    """What everything was masked by."""
    opened: _OpenRun | None
    names: Names
    masks: Masks
    sent: list[Any]
    """The messages, plain and not redacted."""
    tools: list[Any]
    needed: frozenset[str]
    """Calls to which it refers."""
    line: bytes
    """The beginning of its line, up to what only the reply tells."""


class Asked(Protocol):
    """What is asked for now."""

    masks: Masks


class ProcessWriter:
    """What one process knows of what it has written."""

    def __init__(self, file: GrowingFile, asked: Asked, count: Callable[[Exception], None]) -> None:
        # Reentrant: a finaliser may record a broken stream at any moment, in the midst of recording too.
        self.lock = threading.RLock()
        self._file = file
        self._asked = asked
        self._count = count
        self._waiting: deque[tuple[Callable[..., None], Mapping[str, Any]]] = deque()
        self._busy = False
        self._written = Recent(REFERENCE_WINDOW)
        self._runs: dict[str, _OpenRun] = {}
        self._ended: dict[str, Masks] = {}
        self._ended_names: dict[str, Names] = {}
        """Of those runs in which something was masked."""
        self._expected: dict[str, _BegunCall] = {}
        self._unfiled: deque[tuple[str, str | None, _BegunCall, Any]] = deque()
        self._untold = 0
        """Lost lines of which no line tells yet."""
        self._reason = ""

    def attempt(self, write: "Callable[[ProcessWriter, Mapping[str, Any]], None]", given: Mapping[str, Any]) -> None:
        """Write, and count what cannot be written."""
        with self.lock:
            if self._busy:  # this thread is writing already; it goes on with this one then
                self._waiting.append((write, given))
                return
            self._busy = True
            try:
                while True:
                    try:
                        write(self, given)
                    except Exception as error:  # noqa: BLE001 - the recorder's boundary
                        self._lose(error)
                    if not self._waiting:
                        return
                    write, given = self._waiting.popleft()
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
        opened = _OpenRun(line, self._runs.get(line["parent"]), self._asked.masks)
        line.update({key: _name(line[key], opened.masks) for key in ("agent", "session", "tags") if key in line})
        if opened.masks.specs:
            line["redact"] = opened.masks.specs
        _remember(self._runs, line["run"], opened, _OPEN_RUNS)
        # If something in the prompt is masked, the first call says which conversation this is, and so as what.
        trial = opened.names if opened.names else Names()
        if self._masked(line["prompt"], trial, opened.masks) == line["prompt"] or opened.names:
            opened.names.masked.update(trial.masked)
            self._write_begin(opened)

    def expect(self, call: Mapping[str, Any]) -> None:
        """Make what can be made of a call before its reply, if it is written at all."""
        with contextlib.suppress(Exception):  # that is told of when the call itself is written
            self._renew()
            _remember(self._expected, call["id"], self._begun({**_DEFAULTS, **call}), _OPEN_CALLS)

    def call(self, call: Mapping[str, Any]) -> None:
        """Write what is new in a call."""
        begun = self._expected.pop(call["id"], None)
        if begun is None or not self._holds(begun, call):
            self._renew()
            begun = self._begun({**_DEFAULTS, **call})
        reply: Any = call.get("reply")
        finish, usage, logprobs, error = map(call.get, ("finish", "usage", "logprobs", "error"))
        if _says_only(reply):  # as most do: this is what an agent waits for
            reply = {**reply}
            masked_reply = {**reply, "content": _masked_text(reply["content"], begun.names, begun.masks)}
        else:
            reply = plain(reply)
            masked_reply = self._masked(reply, begun.names, begun.masks)
        line = {
            "version": plain(call.get("version")),  # the reply may be the first to say which one answered
            "seconds": plain(call.get("seconds", 0.0)),
            "finish": finish if type(finish) is str else plain(finish),
            "usage": usage and plain(usage),
            "partial": call.get("partial", False),
            "reply": masked_reply,
            # tokens would spell what was masked
            "logprobs": plain(logprobs) if logprobs is not None and masked_reply == reply else None,
            "error": error and self._masked(plain(error), begun.names, begun.masks),
        }
        if self._untold:
            self._tell()
        self._file.append(begun.line + encode_line(line)[1:])
        self._unfiled.append((call["id"], call.get("agent"), begun, reply))

    def end(self, ended: Mapping[str, Any]) -> None:
        """Write how a run ended."""
        self._renew()
        opened = self._run(ended["run"])
        names, masks = (opened.names, opened.masks) if opened else (Names(), self._asked.masks)
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
        masks = (opened.masks if opened else self._ended.get(run_id) or self._asked.masks) | masks
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
        self._forget()

    # --- what is new in a call ---

    def _begun(self, call: Mapping[str, Any]) -> "_BegunCall":
        """The part of a call's line that its request is."""
        self._file_calls()
        agent, messages, opened = call["agent"], call["messages"], self._run(call["run"])
        masks = opened.masks if opened else self._asked.masks
        earlier, keep = (
            self._written.extended_by(messages, agent, masks) or self._alike(agent, messages, masks) or (None, 0)
        )
        names = self._names(opened, earlier)
        new = messages[keep:] if type(messages) is Kept else plain(messages[keep:])
        tools, tools_of = self._known_tools(agent, call["tools"], masks)
        line = {
            "kind": "call",
            **{name: plain(call[name]) for name in _SCALARS_OF_REQUEST},
            "agent": _name(agent, masks),
            "after": earlier.id if earlier else None,
            "keep": keep,
            "messages": self._masked(new, names, masks),
            "tools": self._masked(tools, names, masks) if tools and not tools_of else None,
            "tools_of": tools_of,
            "settings": self._masked(plain(call["settings"]), names, masks),
        }
        sent = messages if type(messages) is Kept else [*(earlier.conversation[:keep] if earlier else ()), *new]
        needed = frozenset(other for other in (line["after"], tools_of) if other is not None)
        head = encode_line(line)[:-2] + b","
        return _BegunCall(
            time.monotonic(), messages, self._asked.masks, opened, names, masks, sent, tools, needed, head
        )

    def _file_calls(self) -> None:
        """Remember the calls that were written since, for others to refer to: this need not be done at once."""
        while self._unfiled:
            call_id, agent, begun, reply = self._unfiled.popleft()
            conversation = begun.sent if reply is None else [*begun.sent, reply]
            self._written.add(
                Written(call_id, agent, conversation, len(begun.sent), begun.tools, begun.names, begun.masks)
            )
            if begun.opened is None:
                begun.names.masked.clear()

    def _holds(self, begun: "_BegunCall", call: Mapping[str, Any]) -> bool:
        """Whether what was made of a call is still to be written as it is."""
        if time.monotonic() - begun.time > _SURE and self._renew():
            return False
        if self._unfiled:
            self._file_calls()
        return (
            begun.messages is call["messages"]
            and begun.opened is self._runs.get(call.get("run", ""))
            and begun.asked is self._asked.masks
            and begun.needed <= self._written.ids
        )

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
        if opened and opened.masks is not self._asked.masks:
            opened.masks = opened.masks | self._asked.masks
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
        return redact_value(value, lambda text, names: _masked_text(text, names, masks), names)  # type: ignore[arg-type]

    def _renew(self) -> bool:
        renewed = self._file.renew()
        if renewed:
            self._forget()  # each file can be read without the others
        return renewed

    def _forget(self) -> None:
        self._unfiled.clear()
        self._written.clear()
        self._expected.clear()

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


def _says_only(reply: Any) -> bool:
    """Whether it is a text of the assistant's and no more."""
    return (
        type(reply) is dict
        and len(reply) == 2
        and reply.get("role") == "assistant"
        and type(reply.get("content")) is str
    )


def _masked_text(text: str, names: Names, masks: Masks) -> str:
    masked = names.masked.get((text, masks))
    if masked is None:
        masked = names.masked[text, masks] = masks(text, names)
    return masked


def _name(value: Any, masks: Masks) -> Any:
    """A name, or the names in a list, masked in the same way in every run."""
    if type(value) is list:
        return [_name(item, masks) for item in value]
    return masks.name(value) if type(value) is str else value


def _remember(runs: dict[str, _Value], run_id: str, kept: _Value, most: int) -> None:
    while len(runs) >= most:
        del runs[next(iter(runs))]
    runs[run_id] = kept
