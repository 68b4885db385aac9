"""Reads stores of transcripts: lines become calls, calls become runs; runs can be chosen, rated and exported.

Reading streams: it remembers open runs and the last calls of one file, however many files there are. Dicts and lists
in what is read are shared between the calls of a run; they are to be read and not changed.
"""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from praison_agent_rl.errors import DataError
from praison_agent_rl.records import Call, Feedback, Run
from praison_agent_rl.transcripts.files import (
    DEFAULT_STORE,
    REFERENCE_WINDOW,
    Losses,
    continued_file,
    lines_of,
    raw_lines,
    store_at,
    store_files,
)
from praison_agent_rl.transcripts.plain_values import plain, revive
from praison_agent_rl.transcripts.ratings import feedback
from praison_agent_rl.transcripts.run_filters import run_tests
from praison_agent_rl.transcripts.run_ids import RunId
from praison_agent_rl.transcripts.writing import TranscriptWriter

__all__ = [
    "DEFAULT_STORE",
    "Losses",
    "TranscriptWriter",
    "as_run",
    "export_runs",
    "feedback",
    "iter_call_dicts",
    "iter_run_dicts",
    "read_calls",
    "read_runs",
]

AnyRecord = TypeVar("AnyRecord", Call, Run)
_FIELDS: dict[type[BaseModel], set[str]] = {kind: set(kind.model_fields) for kind in (Call, Run)}
_FEEDBACK = b'{"kind":"feedback"'
_NOTHING_SAID: dict[str, Any] = {
    **{"agent": None, "parent": None, "session": None, "tags": [], "style": "chat", "time": 0.0, "seconds": 0.0},
    **{"version": None, "prompt": None, "output": None, "error": None, "finished": False},
}
"""Of a run of which no line is known."""


def read_runs(
    store: str | Path = DEFAULT_STORE,
    *,
    agent: str | None = None,
    since: float | str | datetime | None = None,
    until: float | str | datetime | None = None,
    tags: str | Sequence[str] = (),
    has_error: bool | None = None,
    used_tool: str | bool | None = None,
    rated: bool | float | None = None,
    text: str | None = None,
    losses: Losses | None = None,
) -> Iterator[Run]:
    """The runs in a store that pass all that is asked for, file by file, in the order in which they ended.

    ``agent`` is a name or a pattern (``"support-*"``); ``since`` and ``until`` are unix seconds, ISO text or datetimes,
    the second of them excluded; ``tags`` must all be there; ``has_error`` counts the run's and its calls';
    ``used_tool`` is a name, or whether any was called; ``rated`` is the least score, or whether there is any feedback;
    ``text`` is sought in the prompt, the output and all messages, in upper and lower case. ``losses`` is filled.

    Raises:
        DataError: there is no store, it is of a later format, or a time is none.
    """
    about = run_tests(agent=agent, since=since, until=until, tags=tags)
    within = run_tests(has_error=has_error, used_tool=used_tool, rated=rated, text=text)
    found = iter_run_dicts(store, losses=losses)
    place = store_at(store)
    folder = place.parent if place.is_file() else place
    return (as_run(_placed(run, folder)) for run in found if all(test(run) for test in (*about, *within)))


def read_calls(store: str | Path = DEFAULT_STORE, *, losses: Losses | None = None) -> Iterator[Call]:
    """Every call in a store, those outside of runs too, in the order in which they were written."""
    return (_as_record(Call, call) for call in iter_call_dicts(store, losses=losses))


def iter_call_dicts(store: str | Path = DEFAULT_STORE, *, losses: Losses | None = None) -> Iterator[dict[str, Any]]:
    """As `read_calls`, with plain dicts, which are quicker to make."""
    losses = losses if losses is not None else Losses()
    files = [path for path, _ in _in_order(store)]
    return (line for path in files for kind, line in _whole_lines(path, losses) if kind == "call")


def iter_run_dicts(store: str | Path = DEFAULT_STORE, *, losses: Losses | None = None) -> Iterator[dict[str, Any]]:
    """As `read_runs` without a filter, with plain dicts, which are quicker to make."""
    return _folded(_in_order(store), losses if losses is not None else Losses())


def export_runs(runs: Iterable[Run], path: str | Path, format: Literal["jsonl", "openai"] = "jsonl") -> int:
    """Write runs to a file and return how many rows that made; the file is whole or not there.

    ``"jsonl"`` holds a whole `Run` a line, ``"openai"`` what was asked with the rounds of tools, the answer that came
    out, and the tools: the form of fine-tuning files. A run that no call has answered makes no row of the second.

    Raises:
        DataError: there is no such format, or the file cannot be written.
    """
    forms: dict[str, Callable[[Run], dict[str, Any] | None]] = {"jsonl": _whole_row, "openai": _openai_row}
    if format not in forms:
        raise DataError(f"format={format!r} is none that runs are exported in; give one of {', '.join(forms)}")
    path, count = Path(path), 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            for row in filter(None, map(forms[format], runs)):
                file.write(json.dumps(plain(row)) + "\n")
                count += 1
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"runs cannot be exported to {str(path)!r}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return count


# --- lines to calls -------------------------------------------------------------------------------------------------


def _in_order(store: str | Path) -> list[tuple[Path, str | None]]:
    """The files of a store, each with the name of the one that its process wrote before; checks their formats."""
    return [(path, continued_file(path)) for path in store_files(store)]


def _whole_lines(path: Path, losses: Losses) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file by their kind; calls are as they were before the writer shortened them."""
    window: deque[str] = deque()
    known: dict[str, dict[str, Any]] = {}
    for line in lines_of(path, losses):
        kind = line.pop("kind")
        if kind == "call":
            try:
                _lengthen(line, known)
            except KeyError:
                losses.unresolved += 1
                continue
            known[line["id"]] = line
            window.append(line["id"])
            if len(window) > REFERENCE_WINDOW:
                known.pop(window.popleft(), None)
        yield kind, line


def _lengthen(call: dict[str, Any], known: dict[str, dict[str, Any]]) -> None:
    """Give a call the messages and tools that it has in common with earlier ones; KeyError where these are missing."""
    after, keep, tools_of = call.pop("after"), call.pop("keep"), call.pop("tools_of")
    if after is not None:
        earlier = known[after]
        messages = earlier["messages"][:keep]
        if len(messages) < keep:
            messages.append(earlier["reply"])
        call["messages"] = messages + call["messages"]
    call["tools"] = known[tools_of]["tools"] if tools_of is not None else call["tools"] or []


# --- calls to runs --------------------------------------------------------------------------------------------------


def _folded(files: list[tuple[Path, str | None]], losses: Losses) -> Iterator[dict[str, Any]]:
    """The runs of all files, each as soon as it has ended, the unended ones when their process has no further file."""
    ratings = _ratings([path for path, _ in files])
    continued = {before for _, before in files}
    unended: dict[str | None, _Fold] = {}
    for path, before in files:
        fold = unended.pop(before, None) or _Fold(ratings)
        for kind, line in _whole_lines(path, losses):
            if ended := fold.take(kind, line):
                yield ended
        yield from fold.ended()
        if path.name in continued:
            unended[path.name] = fold
        else:
            yield from fold.unended()
    for fold in unended.values():  # of processes whose clock was put back
        yield from fold.unended()


class _Fold:
    """The runs of one process that have not been given yet."""

    def __init__(self, ratings: dict[str, list[dict[str, Any]]]) -> None:
        self._ratings = ratings
        self._open: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        """Kept a while: a call that somebody else waits for may end after its run."""

    def take(self, kind: str, line: dict[str, Any]) -> dict[str, Any] | None:
        """Add a line; a run that has ended a while ago, if there is one."""
        if kind == "begin":
            run_id = line.pop("run")
            if "redact" in line:
                line["id"] = RunId(run_id, redact=tuple(line.pop("redact")))
            run = self._open[run_id] = self._open.get(run_id) or _empty_run(run_id)
            run |= line
        elif kind == "call" and line["run"] is not None:
            run_id = line["run"]
            run = self._open.get(run_id) or self._ended.get(run_id) or self._unbegun(line)
            run["calls"].append(line)
        elif kind == "end":
            run_id = line.pop("run")
            run = self._ended[run_id] = self._open.pop(run_id, {}) or _empty_run(run_id)
            run |= {**line, "finished": True}
            if len(self._ended) > REFERENCE_WINDOW:
                return self._given(self._ended.pop(next(iter(self._ended))))
        return None

    def ended(self) -> Iterator[dict[str, Any]]:
        """The runs that have ended, in that order; they are forgotten."""
        runs, self._ended = self._ended, {}
        return map(self._given, runs.values())

    def unended(self) -> Iterator[dict[str, Any]]:
        """The runs whose process ended first, or that are under way."""
        return map(self._given, self._open.values())

    def _unbegun(self, call: dict[str, Any]) -> dict[str, Any]:
        """A run whose first line is gone, with a removed file or on a full disk, as far as a call of it tells."""
        run_id = call["run"]
        about = {key: call[key] for key in ("agent", "time", "version")}
        run = self._open[run_id] = _empty_run(run_id) | about
        return run

    def _given(self, run: dict[str, Any]) -> dict[str, Any]:
        run["calls"].sort(key=itemgetter("time"))
        run["feedback"] = self._ratings.get(run["id"], [])
        if run["version"] is None:  # where a name goes over, only replies say which one answered
            run["version"] = _only({call["version"] for call in run["calls"] if call["version"]})
        return run


def _empty_run(run_id: str) -> dict[str, Any]:
    return {"id": run_id, **_NOTHING_SAID, "tags": [], "calls": [], "feedback": []}


def _only(versions: set[str]) -> str | None:
    return next(iter(versions)) if len(versions) == 1 else None


def _ratings(files: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """All feedback by run, in the order of its time: it may be in any file, long after the run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in files:
        for raw in raw_lines(path):
            if raw.startswith(_FEEDBACK):
                with contextlib.suppress(ValueError):  # torn; counted where the lines are read
                    said = revive(json.loads(raw))
                    del said["kind"]
                    found.setdefault(said["run"], []).append(said)
    for ratings in found.values():
        ratings.sort(key=lambda said: said["time"])
    return found


# --- dicts to records, without checking again what was checked when it was written -----------------------------------


def as_run(run: dict[str, Any]) -> Run:
    """The record that a dict of `iter_run_dicts` stands for."""
    calls = [_as_record(Call, call) for call in run["calls"]]
    ratings = [Feedback.model_construct(**said) for said in run["feedback"]]
    return _as_record(Run, {**run, "calls": calls, "feedback": ratings})


def _placed(run: dict[str, Any], store: Path) -> dict[str, Any]:
    """The same with an id that knows where it is from, so that feedback on it goes there."""
    known = run["id"]
    return {**run, "id": RunId(known, store, known.redact if isinstance(known, RunId) else ())}


def _as_record(kind: type[AnyRecord], values: dict[str, Any]) -> AnyRecord:
    """As pydantic's ``model_construct``, in a fifth of its time, which would be a third of all reading."""
    if values.keys() != _FIELDS[kind]:  # written by another version
        return kind.model_construct(**values)
    record = kind.__new__(kind)
    object.__setattr__(record, "__dict__", values)
    object.__setattr__(record, "__pydantic_fields_set__", set(_FIELDS[kind]))
    object.__setattr__(record, "__pydantic_extra__", None)
    object.__setattr__(record, "__pydantic_private__", None)
    return record


def _whole_row(run: Run) -> dict[str, Any]:
    return run.model_dump(warnings=False)  # dicts with keys that are no texts are meant


def _openai_row(run: Run) -> dict[str, Any] | None:
    """What was asked, and what came out: a reflection or a guardrail's retry is no turn of the user's."""
    answered = [call for call in run.calls if call.reply is not None and call.error is None]
    final = next((call for call in reversed(answered) if _says(call.reply, run.output)), None)
    began = next((at for at, call in enumerate(answered) if final is None or _extends(final, call)), 0)
    rounds = _tool_rounds(answered[began:])
    if not rounds or (final is None and isinstance(run.output, str) and len(rounds) < len(answered)):
        return None  # no call has said it, such as a guardrail's refusal
    asked = next((call for call in rounds if call is final), rounds[-1])
    final = final or asked
    messages = [*asked.messages, *(_last_round(final.messages) if final is not asked else ()), final.reply]
    return {"messages": messages, **({"tools": asked.tools} if asked.tools else {})}


def _says(reply: dict[str, Any] | None, output: Any) -> bool:
    text = reply.get("content") if reply else None
    return isinstance(text, str) and isinstance(output, str) and text.split() == output.split()


def _tool_rounds(calls: list[Call]) -> list[Call]:
    """The first call, and those that go on from it with nothing but tools' results."""
    rounds = calls[:1]
    for call in calls[1:]:
        added = _spoken(call.messages)[len(_spoken(rounds[-1].messages)) :]
        if added and _extends(call, rounds[-1]) and all(map(_is_of_tools, added)):
            rounds.append(call)
    return rounds


def _last_round(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools' turns at the end of a request."""
    start = len(messages)
    while start and _is_of_tools(messages[start - 1]):
        start -= 1
    return messages[start:]


def _extends(call: Call, earlier: Call) -> bool:
    sent, before = _spoken(call.messages), _spoken(earlier.messages)
    return sent[: len(before)] == before


def _spoken(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without system prompts, which some retries lack, and user turns that the framework sends twice."""
    turns = [message for message in messages if message.get("role") not in ("system", "developer")]
    return [turn for at, turn in enumerate(turns) if not at or turn != turns[at - 1]]


def _is_of_tools(message: dict[str, Any]) -> bool:
    asks = message.get("tool_calls") or message.get("function_call")
    return bool(asks) or message.get("role") in ("tool", "function")
