"""Takes logs that people have already into a store of transcripts, and counts what could not be taken and why.

The kind of a log is told by its content. The file is only read; what is taken goes through a `TranscriptWriter`, which
masks secrets, under the tag ``imported``. A run's id is made of what the log says of it, so that a file that is brought
in twice does not double its runs.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from praison_agent_rl.errors import DataError
from praison_agent_rl.foreign_logs.chats import PARSERS, ForeignCall, ForeignRun, Message, Unusable, digest_of, new_id
from praison_agent_rl.foreign_logs.spans import from_otel, spans_in
from praison_agent_rl.foreign_logs.traces import from_langfuse, observations_in, runs_of
from praison_agent_rl.records import Record
from praison_agent_rl.transcripts import DEFAULT_STORE, TranscriptWriter, iter_run_dicts
from praison_agent_rl.transcripts.redaction import Redactor, find_redactor, redact_value

_Found = TypeVar("_Found")

TAG = "imported"
KINDS = (*PARSERS, "otel", "langfuse")

_LOOKED_AT = 20
_OTHER_SPAN = "is no model call (a tool, a chain, an agent)"
_TWICE = "is there twice (the same id in the same trace)"
_MOST_REMEMBERED = 4096
_DECODER = json.JSONDecoder()
_BEGINNING = re.compile(r"\n([^\s\]}])")


class ImportReport(Record):
    """What became of a file."""

    file: str
    kind: str
    store: str
    records: int
    """Lines, items or spans in the file."""
    taken: int
    """Records that runs were made of."""
    runs: int
    """Runs that were written."""
    calls: int
    """Calls of these."""
    already_there: int = 0
    """Runs that the store has from an earlier import; they were not written again."""
    left_out: dict[str, int]
    """Records that were not taken, by reason."""
    dropped: int
    """Lines that could not be written."""

    def __str__(self) -> str:
        lines = [
            f"{self.runs:,} runs with {self.calls:,} calls from {self.taken:,} of {self.records:,} records of "
            f"{self.file} ({self.kind}), {'written' if not self.dropped else 'written in part'} to {self.store}",
            *([f"{self.already_there:>11,}  runs were already there"] if self.already_there else []),
            *(f"{count:>11,}  not taken: {reason}" for reason, count in self.left_out.items()),
            *([f"{self.dropped:>11,}  lines could not be written"] if self.dropped else []),
        ]
        return "\n".join(lines)


def import_log(
    path: str | Path, store: str | Path | None = None, *, kind: str | None = None, redact: Any = None
) -> ImportReport:
    """Write the conversations of a log file to a store of transcripts.

    ``kind`` is ``openai`` (fine-tuning lines, or requests with responses), ``sharegpt``, ``praisonai-session``,
    ``otel`` (OpenTelemetry or OpenInference spans) or ``langfuse``; it is told by the content if it is not given.
    ``redact`` masks more than secrets, as in ``record``.

    Raises:
        DataError: the file cannot be read, is of none of these kinds, or nothing of it can be written.
    """
    path, left_out = Path(path), Counter[str]()
    documents = _documents(path, left_out)
    first = list(islice(documents, _LOOKED_AT))
    kind = _told_kind(first, path) if kind is None else _known_kind(kind)
    taken = Counter[str]()
    found = _runs(kind, chain(first, documents), taken=taken, left_out=left_out)
    redactor = find_redactor(redact)
    writer = TranscriptWriter(Path(store) if store is not None else DEFAULT_STORE, redact=redactor)
    try:
        _write_new(found, writer, names=_Names(redactor), otherwise=path.stat().st_mtime, taken=taken)
    finally:
        writer.close()
    if writer.failure is not None and writer.dropped >= 2 * taken["runs"] + taken["calls"]:
        raise DataError(f"nothing of {path} could be written to the store {str(writer.store)!r}: {writer.failure}")
    return ImportReport(
        file=str(path),
        kind=kind,
        store=str(writer.store),
        records=taken["records"] + sum(left_out.values()),
        taken=taken["records"],
        runs=taken["runs"],
        calls=taken["calls"],
        already_there=taken["already there"],
        left_out=dict(left_out.most_common()),
        dropped=writer.dropped,
    )


# --- the file --------------------------------------------------------------------------------------------------------


def _documents(path: Path, left_out: Counter[str]) -> Iterator[Any]:
    """What a file of JSON lines, of JSON, or of several of it one after another holds; what is no JSON is counted."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = next((line for line in file if line.strip()), "")
            if not _is_json(head):
                file.seek(0)
                yield from _spread_out(file.read(), path, left_out)
                return
            rest = (line for line in file if line.strip())
            second = next(rest, None)
            if second is None:
                yield from _unwrapped(json.loads(head))
                return
            for line in chain((head, second), rest):
                if _is_json(line):
                    yield json.loads(line)
                else:
                    left_out["is no JSON"] += 1
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _spread_out(text: str, path: Path, left_out: Counter[str]) -> Iterator[Any]:
    """The items of JSON over several lines, or of several such values, as OpenTelemetry's console exporter writes them.

    A value that is torn is counted once; the next begins at a line that is not indented.
    """
    try:
        yield from _unwrapped(json.loads(text))
        return
    except (ValueError, RecursionError) as error:
        fault = error
    at, torn, found = 0, 0, False
    while at < len(text):
        if text[at].isspace() or text[at] == ",":
            at += 1
            continue
        value, end = _value_at(text, at)
        if end > at:
            yield from _unwrapped(value)
            at, found = end, True
            continue
        torn += 1
        following = _BEGINNING.search(text, at)
        at = following.start(1) if following else len(text)
    if not found:
        raise DataError(f"{path} is neither JSON nor JSON lines: {fault}") from fault
    if torn:
        left_out["is no JSON"] += torn


def _value_at(text: str, at: int) -> tuple[Any, int]:
    """The object or array that begins there and where it ends; where there is none, that is where it would begin."""
    if text[at] in "{[":
        with contextlib.suppress(ValueError, RecursionError):
            return _DECODER.raw_decode(text, at)
    return None, at


def _unwrapped(document: Any) -> Iterator[Any]:
    """The items of a file that is one array, or one object around an array."""
    if isinstance(document, dict):
        for name in ("data", "sessions", "spans"):
            if isinstance(document.get(name), list):
                document = document[name]
                break
    yield from document if isinstance(document, list) else [document]


# --- its kind --------------------------------------------------------------------------------------------------------


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise DataError(f"kind={kind!r} is unknown; known: {', '.join(KINDS)}")
    return kind


def _told_kind(documents: list[Any], path: Path) -> str:
    """The kind that most of the first documents look like."""
    told = Counter(kind for kind in map(_kind_of, documents) if kind)
    if told:
        return told.most_common(1)[0][0]
    keys = next((", ".join(map(str, document)) for document in documents if isinstance(document, dict)), "no object")
    raise DataError(f"{path} is no log of a known kind ({', '.join(KINDS)}); its first record has: {keys[:200]}")


def _kind_of(document: Any) -> str | None:
    if not isinstance(document, dict):
        return None
    keys = {str(key) for key in document}
    of_trace = bool(keys & {"traceId", "trace_id", "spanId", "span_id", "context", "parent_id", "context.span_id"})
    if "resourceSpans" in keys or (of_trace and any(key.partition(".")[0] == "attributes" for key in keys)):
        return "otel"
    if keys & {"observations", "traces"} or (of_trace and "type" in keys):
        return "langfuse"
    if isinstance(document.get("conversations") or document.get("conversation"), list):
        return "sharegpt"
    if "messages" in keys and "session_id" in keys and keys & {"agent_name", "created_at", "runtime_state"}:
        return "praisonai-session"
    return "openai" if keys & {"messages", "request", "body"} else None


# --- its runs --------------------------------------------------------------------------------------------------------


def _runs(kind: str, documents: Iterable[Any], *, taken: Counter[str], left_out: Counter[str]) -> Iterator[ForeignRun]:
    """The runs of all documents; counts each record as taken or left out."""
    if kind in PARSERS:
        for runs in _parsed(PARSERS[kind], documents, left_out=left_out):
            taken["records"] += 1
            yield from runs
        return
    parse, inside = (from_otel, spans_in) if kind == "otel" else (from_langfuse, observations_in)
    parsed = list(_parsed(parse, chain.from_iterable(map(inside, documents)), left_out=left_out))
    spans = list({(span.trace, span.id): span for span in parsed}.values())
    if len(spans) < len(parsed):
        left_out[_TWICE] += len(parsed) - len(spans)
    calls = sum(span.call is not None for span in spans)
    taken["records"] += calls
    if calls < len(spans):
        left_out[_OTHER_SPAN] += len(spans) - calls
    yield from runs_of(spans)


def _parsed(parse: Callable[[Any], _Found], records: Iterable[Any], *, left_out: Counter[str]) -> Iterator[_Found]:
    for record in records:
        try:
            yield parse(record)
        except Unusable as error:
            left_out[str(error)] += 1
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
            # others' files: anything may be anywhere
            left_out["has a form that is not known"] += 1


def _write_new(
    runs: Iterable[ForeignRun], writer: TranscriptWriter, *, names: "_Names", otherwise: float, taken: Counter[str]
) -> None:
    """Write the runs that the store has not got yet, and count all."""
    known = _imported_before(writer.store)
    for run in runs:
        name = names.of(run)
        if name in known:
            taken["already there"] += 1
        else:
            _write(run, name, writer, otherwise=otherwise)
            taken.update(runs=1, calls=len(run.calls))


def _imported_before(store: Path) -> set[str]:
    """The ids of the runs in a store that were imported to their end."""
    if not store.is_dir():
        return set()
    return {run["id"] for run in iter_run_dicts(store) if run["finished"] and TAG in run["tags"]}


class _Names:
    """Gives runs ids that are the same whenever a log is read; runs that are alike in all get different ones.

    They are made of what is left of a run once it is masked: of an id, what was masked could be guessed.
    """

    def __init__(self, redact: Redactor) -> None:
        self._redact = redact
        self._met = Counter[str]()
        self._messages: dict[int, tuple[Message, str]] = {}

    def of(self, run: ForeignRun) -> str:
        """The id of the next run of a log."""
        try:
            about = self._masked([run.session, run.agent, run.error])
            told = digest_of([about, *map(self._digest_of_call, run.calls)])
        except Exception:  # noqa: BLE001 - a redactor may be a user's code; the writer counts what it fails on
            return new_id()
        self._met[told] += 1
        return told if self._met[told] == 1 else digest_of([told, self._met[told]])

    def _digest_of_call(self, call: ForeignCall) -> list[Any]:
        parts = (call.reply or {}, *call.tools, *call.messages)
        return [call.time, call.model, len(call.tools), *map(self._digest_of, parts)]

    def _masked(self, value: Any) -> Any:
        return redact_value(value, self._redact, {})

    def _digest_of(self, message: Message) -> str:
        # the turns of a conversation share their messages; what is kept here cannot lose its id to another
        if len(self._messages) > _MOST_REMEMBERED:
            self._messages.clear()
        if id(message) not in self._messages:
            self._messages[id(message)] = (message, digest_of(self._masked(message)))
        return self._messages[id(message)][1]


def _write(run: ForeignRun, name: str, writer: TranscriptWriter, *, otherwise: float) -> None:
    """Write a run as if it had been recorded; where its time is not known it is that of the file."""
    first, last = run.calls[0], run.calls[-1]
    asked = [message for message in first.messages if message.get("role") == "user"]
    session = run.session or run.conversation
    about = {"run": name, "agent": run.agent, "parent": None, "session": session, "tags": [TAG]}
    prompt = asked[-1].get("content") if asked else None
    times = {"time": first.time or otherwise, "version": None}
    writer.begin({**about, "style": TAG, "prompt": prompt, **times})
    for call in run.calls:
        said = vars(call) | {"time": call.time or otherwise}
        writer.call({"id": new_id(), "run": name, "agent": run.agent, "version": None, "logprobs": None, **said})
    output = last.reply.get("content") if last.reply else None
    writer.end(name, output=output, error=run.error, seconds=sum(call.seconds for call in run.calls))
