"""Takes logs that people have already into a store of transcripts, and counts what could not be taken and why.

The kind of a log is told by its content. The file is only read; what is taken goes through a `TranscriptWriter`, which
masks secrets, under the tag ``imported``.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from praison_agent_rl.errors import DataError
from praison_agent_rl.foreign_logs.chats import PARSERS, ForeignRun, Unusable, new_id
from praison_agent_rl.foreign_logs.spans import from_otel, spans_in
from praison_agent_rl.foreign_logs.traces import from_langfuse, observations_in, runs_of
from praison_agent_rl.records import Record
from praison_agent_rl.transcripts import DEFAULT_STORE, TranscriptWriter
from praison_agent_rl.transcripts.redaction import find_redactor

_Found = TypeVar("_Found")

TAG = "imported"
KINDS = (*PARSERS, "otel", "langfuse")

_LOOKED_AT = 20
_OTHER_SPAN = "is no model call (a tool, a chain, an agent)"


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
    calls: int
    left_out: dict[str, int]
    """Records that were not taken, by reason."""
    dropped: int
    """Lines that could not be written."""

    def __str__(self) -> str:
        lines = [
            f"{self.runs:,} runs with {self.calls:,} calls from {self.taken:,} of {self.records:,} records of "
            f"{self.file} ({self.kind}), written to {self.store}",
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
        DataError: the file cannot be read, or is of none of these kinds.
    """
    path, left_out = Path(path), Counter[str]()
    documents = _documents(path, left_out)
    first = list(islice(documents, _LOOKED_AT))
    kind = _told_kind(first, path) if kind is None else _known_kind(kind)
    taken = Counter[str]()
    found = _runs(kind, chain(first, documents), taken=taken, left_out=left_out)
    writer = TranscriptWriter(Path(store) if store is not None else DEFAULT_STORE, redact=find_redactor(redact))
    try:
        for run in found:
            _write(run, writer, otherwise=path.stat().st_mtime)
            taken.update(runs=1, calls=len(run.calls))
    finally:
        writer.close()
    return ImportReport(
        file=str(path),
        kind=kind,
        store=str(writer.store),
        records=taken["records"] + sum(left_out.values()),
        taken=taken["records"],
        runs=taken["runs"],
        calls=taken["calls"],
        left_out=dict(left_out.most_common()),
        dropped=writer.dropped,
    )


# --- the file --------------------------------------------------------------------------------------------------------


def _documents(path: Path, left_out: Counter[str]) -> Iterator[Any]:
    """What a file of JSON lines, or of JSON, holds; lines that are no JSON are counted."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = next((line for line in file if line.strip()), "")
            if not _is_json(head):
                file.seek(0)
                yield from _unwrapped(_whole(file.read(), path))
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


def _whole(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is neither JSON nor JSON lines: {error}") from error


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
    spans = list(_parsed(parse, chain.from_iterable(map(inside, documents)), left_out=left_out))
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
        except (AttributeError, KeyError, TypeError, ValueError):  # others' files: anything may be anywhere
            left_out["has a form that is not known"] += 1


def _write(run: ForeignRun, writer: TranscriptWriter, *, otherwise: float) -> None:
    """Write a run as if it had been recorded; where its time is not known it is that of the file."""
    name, first, last = new_id(), run.calls[0], run.calls[-1]
    asked = [message for message in first.messages if message.get("role") == "user"]
    about = {"run": name, "agent": run.agent, "parent": None, "session": run.session, "tags": [TAG]}
    prompt = asked[-1].get("content") if asked else None
    times = {"time": first.time or otherwise, "version": None}
    writer.begin({**about, "style": TAG, "prompt": prompt, **times})
    for call in run.calls:
        said = vars(call) | {"time": call.time or otherwise}
        writer.call({"id": new_id(), "run": name, "agent": run.agent, "version": None, "logprobs": None, **said})
    output = last.reply.get("content") if last.reply else None
    writer.end(name, output=output, error=run.error, seconds=sum(call.seconds for call in run.calls))
