"""Rows in files: read JSON, JSON lines, CSV, TSV and Parquet, write JSON lines; it judges the form of a file only.

Rows are plain Python and rest on disk as JSON lines, because Arrow merges tool-call arguments of different shapes
(``{"a": 1}`` and ``{"b": 2}`` become ``{"a": 1, "b": None}``), and JSON lines do not.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import DataError, MissingExtra
from .shown import shown

Row = dict[str, Any]

FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}

# The csv module refuses cells above 131072 characters; agent prompts are longer. The most that a C long holds anywhere.
LONGEST_CELL = 2**31 - 1


def has_known_ending(name: str) -> bool:
    """Whether a file of this name is one that ``read_file`` can read."""
    return Path(name).suffix.lower() in FORMATS


def read_file(path: str | Path, *, format: str | None = None) -> list[Row]:
    """The rows of one file; ``format`` overrides what its ending says.

    Raises:
        DataError: the file is missing, empty, of an unknown kind or badly formed; with the path and the line.
    """
    path = Path(os.path.expanduser(path))
    _check_is_file(path)
    kind = _kind(path, format)
    if kind == "parquet":
        return _read_parquet(path)
    text = _read_text(path)
    if not text.strip():
        raise DataError(f"{path} is empty; give a file with at least one row")
    if kind == "json":
        return _read_json(path, text)
    if kind == "jsonl":
        return _read_lines(path, text)
    return _read_table(path, text, "\t" if kind == "tsv" else ",")


def read_rows(path: str | Path) -> list[Row]:
    """The rows that ``write_rows`` wrote; none for an empty file."""
    path = Path(os.path.expanduser(path))
    _check_is_file(path)
    return _read_lines(path, _read_text(path))


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Write JSON lines in UTF-8; the file appears whole or not at all.

    Raises:
        DataError: a row holds something that JSON has no form for.
    """
    path = Path(os.path.expanduser(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    rough = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with rough.open("wb") as file:
            file.writelines(_line(row, number) for number, row in enumerate(rows, 1))
        os.replace(rough, path)
    finally:
        rough.unlink(missing_ok=True)


def _line(row: Row, number: int) -> bytes:
    try:
        line = json.dumps(row, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"row {number} cannot be written as JSON: {error}. Its columns: "
            f"{', '.join(f'{name} ({type(value).__name__})' for name, value in row.items())}. Turn the value into text"
        ) from error
    try:
        return line.encode() + b"\n"
    except UnicodeEncodeError:  # half an emoji, as models cut them off: UTF-8 has no form for it, a JSON escape has
        return json.dumps(row).encode() + b"\n"


def _check_is_file(path: Path) -> None:
    # os.path and not Path's own methods, which raise where a long text was given as a name
    if os.path.isfile(path):
        return
    if os.path.isdir(path):
        inside = [name for name in sorted(os.listdir(path)) if has_known_ending(name)]
        raise DataError(f"{path} is a folder, not a file. Files in it that can be read: {', '.join(inside) or 'none'}")
    if not os.path.isdir(path.parent):
        raise DataError(f"{path} does not exist, nor does its folder {str(path.parent)!r}")
    near = difflib.get_close_matches(path.name, os.listdir(path.parent), cutoff=0.5)
    raise DataError(
        f"{path} does not exist." + (f" Did you mean {' or '.join(map(repr, near))}?" if near else " Check the path")
    )


def _kind(path: Path, format: str | None) -> str:
    ending = FORMATS.get(path.suffix.lower())
    if format is None:
        if ending is None:
            raise DataError(f"{path} has an unknown ending {path.suffix!r}; known: {', '.join(FORMATS)}")
        return ending
    if format not in FORMATS.values():
        raise DataError(f"{path}: format {format!r} is unknown; known: {', '.join(dict.fromkeys(FORMATS.values()))}")
    # praisonai-train and Hugging Face call both kinds "json"
    return "jsonl" if format == "json" and ending == "jsonl" else format


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # the codec counts from behind the byte-order mark
        place = error.start + len(content) - len(error.object)
        line = content.count(b"\n", 0, place) + 1
        raise DataError(
            f"{path} is not UTF-8: byte {content[place]:#04x} at position {place} (line {line}). Save it as UTF-8"
        ) from error


def _read_lines(path: Path, text: str) -> list[Row]:
    rows = []
    # not splitlines(): that also cuts at U+2028, which is legal inside a JSON string
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            value = _parse(path, line, number)
            rows.append(_an_object(value, f"{path} line {number}", "A file with one array is a .json file."))
    return rows


def _read_json(path: Path, text: str) -> list[Row]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _read_lines(path, text)  # JSON lines under the wrong name, which is common
        raise DataError(f"{path} line {error.lineno} column {error.colno}: invalid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nesting without end
        raise DataError(f"{path}: JSON that cannot be read: {error}") from error
    items = value.get("data") if isinstance(value, dict) else value
    if not isinstance(items, list):
        found = f"an object with the keys {', '.join(value)}" if isinstance(value, dict) else _shown(value)
        raise DataError(f"{path}: expected an array of objects, or an object with an array under 'data'; got {found}")
    at_top = items is value
    return [
        item if isinstance(item, dict) else _an_object(item, _place(path, text, number, at_top), "")
        for number, item in enumerate(items, 1)
    ]


def _place(path: Path, text: str, number: int, at_top: bool) -> str:
    """Where item ``number`` of an array begins; the json module does not keep lines, so the items are walked again."""
    if not at_top:
        return f"{path} item {number} of 'data'"
    decoder, start, after = json.JSONDecoder(), 0, text.index("[") + 1
    for _ in range(number):
        start = after
        while text[start] in " \t\r\n,":
            start += 1
        _, after = decoder.raw_decode(text, start)
    return f"{path} line {text.count(chr(10), 0, start) + 1} (item {number})"


def _parse(path: Path, line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {number} column {error.colno}: invalid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} line {number}: JSON that cannot be read: {error}") from error


def _an_object(value: Any, where: str, advice: str) -> Row:
    if isinstance(value, dict):
        return value
    raise DataError(f"{where}: expected an object, got {_shown(value)}. {advice}".rstrip())


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {shown(value)}"


def _read_table(path: Path, text: str, delimiter: str) -> list[Row]:
    old_limit = csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(reader)
        doubled = sorted({name for name in header if header.count(name) > 1})
        if doubled:
            raise DataError(f"{path} line 1: the column {doubled[0]!r} occurs more than once; rename one")
        rows, line = [], reader.line_num + 1
        for cells in reader:
            if len(cells) not in (0, len(header)):
                raise DataError(
                    f"{path} line {line}: {len(cells)} cells where the header has {len(header)} "
                    f"({', '.join(header)}); put quotes round a cell that holds {delimiter!r} or a line break"
                )
            if cells:  # a blank line is no row
                rows.append(dict(zip(header, cells, strict=True)))
            line = reader.line_num + 1
        return rows
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num}: not well-formed: {error}") from error
    finally:
        csv.field_size_limit(old_limit)


def _read_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(
            f'reading {path} needs pyarrow, which is not installed: pip install "praison-agent-rl[train]"'
        ) from error
    try:
        # a plain file, not a dataset: otherwise folder names such as "split=train" would become columns
        table = pyarrow.parquet.ParquetFile(path).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {error}") from error
    kinds = dict(zip(table.schema.names, table.schema.types, strict=True))
    return [
        {name: without_padding(_decoded(value, kinds[name])) for name, value in row.items()}
        for row in table.to_pylist()
    ]


def _decoded(value: Any, kind: Any) -> Any:
    """Undo Arrow's JSON type, as which ``datasets`` stores ``Json`` columns."""
    if value is None:
        return None
    if str(kind) == "extension<arrow.json>":
        return json.loads(value)
    inner = getattr(kind, "value_type", None)  # lists have it, maps do not
    if isinstance(value, list) and inner is not None:
        return [_decoded(item, inner) for item in value]
    return value


def without_padding(value: Any) -> Any:
    """Messages without the ``tool_calls: None`` that Arrow gives to each message when one has tool calls."""
    if not isinstance(value, list):
        return value
    return [
        {key: inner for key, inner in item.items() if inner is not None or key == "content"}
        if isinstance(item, dict) and "role" in item
        else item
        for item in value
    ]
