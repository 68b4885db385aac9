"""Rows from wherever a user keeps them: files, the Hugging Face Hub, ``datasets``, lists, praisonai-train entries.

It never guesses: columns are renamed, rows dropped and functions run only when an entry says so.
"""

from __future__ import annotations

import glob
import logging
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .data_files import Row, has_known_ending, read_file, without_padding
from .errors import DataError, MissingExtra
from .shown import shown
from .task_sets import is_task_set, rows_of_task_set

log = logging.getLogger(__name__)

# The keys of one item under ``dataset:`` in a praisonai-train YAML
ENTRY_KEYS = frozenset(
    {"name", "split", "split_type", "data_files", "format", "rename", "filter_data", "filter_column_value"}
    | {"filter_value", "num_samples", "shuffle", "seed", "processing_func"}
)
ENTRY_SEED = 3407  # praisonai-train 0.1.16, train/llm/trainer.py


def load_rows(source: Any, *, split: str = "train") -> list[Row]:
    """Rows from a file, a Hub dataset, a task set, a ``datasets`` object, a list of rows, prompts or dataset entries.

    ``split`` chooses where there are splits (the Hub, a dict of splits); a file has none.

    Raises:
        DataError: nothing can be read there; with what was tried.
    """
    if is_task_set(source):
        return rows_of_task_set(source)
    if isinstance(source, str | Path):
        return read_file(source) if _is_path(source) else _from_hub(str(source), split)
    if callable(getattr(source, "to_list", None)):
        return _from_dataset(source)
    if isinstance(source, Mapping):
        return _from_entries([source], split) if _is_entry(source) else _from_splits(source, split)
    if callable(getattr(source, "to_dict", None)):  # a pandas frame: iterating over it would give its column names
        return [dict(row) for row in source.to_dict("records")]
    if isinstance(source, bytes) or not isinstance(source, Iterable):
        raise DataError(
            f"cannot read rows from {shown(source)} ({type(source).__name__}); give a file, the name of a Hugging Face "
            "dataset, a datasets.Dataset, or a list of dicts, prompts or message lists"
        )
    items = list(source)
    if items and all(_is_entry(item) for item in items):
        return _from_entries(items, split)
    if items and all(isinstance(item, str) and has_known_ending(item) for item in items):
        raise DataError(
            f"these look like file names, not prompts: {', '.join(items[:3])}. "
            "For several files give dataset entries: [{'name': 'all', 'data_files': [...]}]"
        )
    return [_as_row(item, number) for number, item in enumerate(items, 1)]


def _is_path(source: Any) -> bool:
    name = str(source)
    if isinstance(source, Path) or has_known_ending(name) or os.path.exists(os.path.expanduser(name)):
        return True
    # Hub names are "name" or "owner/name"; whatever else a string holds, it was meant as a path
    return not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)


def _from_hub(name: str, split: str) -> list[Row]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise MissingExtra(
            f"no file is called {name!r}, and reading it from the Hugging Face Hub needs the package datasets: "
            'pip install "praison-agent-rl[train]"'
        ) from error
    try:
        dataset = load_dataset(name, split=split)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"cannot read the dataset {name!r}: no file has this name, and datasets.load_dataset({name!r}, "
            f"split={split!r}) failed with {type(error).__name__}: {error}. Check the name and the network, "
            "or give a local .jsonl, .json, .csv, .tsv or .parquet file"
        ) from error
    return _from_dataset(dataset)


def _from_dataset(dataset: Any) -> list[Row]:
    rows = [_as_row(item, number) for number, item in enumerate(dataset.to_list(), 1)]
    return [{name: without_padding(value) for name, value in row.items()} for row in rows]


def _from_splits(splits: Mapping[str, Any], split: str) -> list[Row]:
    if split in splits:
        return load_rows(splits[split])
    raise DataError(
        f"the dataset has no split {split!r}; it has: {', '.join(map(str, splits)) or 'none'}. "
        "Choose one of these, or give a list of rows if this is one row or a dict of columns"
    )


def _as_row(item: Any, number: int) -> Row:
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, str | list):
        return {"prompt": item}
    raise DataError(
        f"item {number} is {shown(item)} ({type(item).__name__}); each must be a dict of columns, a prompt text or a "
        "list of messages"
    )


def _is_entry(item: Any) -> bool:
    if not isinstance(item, Mapping) or not {"name", "data_files"} & set(item):
        return False
    return ENTRY_KEYS.issuperset(item) or (is_task_set(item.get("name")) and "prompt" not in item)


def _from_entries(entries: Sequence[Mapping[str, Any]], split: str) -> list[Row]:
    rows = []
    for number, entry in enumerate(entries, 1):
        try:
            rows += _from_entry(entry, split)
        except DataError as error:
            raise DataError(f"dataset entry {number} ({_label(entry)}): {error}") from error
    return rows


def _label(entry: Mapping[str, Any]) -> str:
    return shown(entry["name"] if entry.get("name") else entry.get("data_files"))


def _from_entry(entry: Mapping[str, Any], split: str) -> list[Row]:
    rows = _renamed(_entry_rows(entry, split), entry.get("rename") or {})
    if _flag(entry, "filter_data"):
        rows = _filtered(rows, entry.get("filter_column_value"), entry.get("filter_value"))
    elif "filter_column_value" in entry or "filter_value" in entry:
        log.warning("dataset entry %s: its filter is off; set filter_data: true to use it", _label(entry))
    if _flag(entry, "shuffle"):
        random.Random(_integer(entry, "seed", ENTRY_SEED)).shuffle(rows)
    if entry.get("num_samples") is not None:
        rows = rows[: _integer(entry, "num_samples", 0, least=1)]
    return _processed(rows, entry.get("processing_func"))


def _entry_rows(entry: Mapping[str, Any], split: str) -> list[Row]:
    if is_task_set(entry.get("name")):
        return _task_set_rows(entry)
    asked = {str(entry[key]) for key in ("split", "split_type") if entry.get(key)}
    if len(asked) > 1:
        raise DataError(f"split {entry['split']!r} and split_type {entry['split_type']!r} contradict; give one")
    chosen = next(iter(asked), split)
    name, files, format = entry.get("name"), entry.get("data_files"), entry.get("format")
    if not name and not files:
        raise DataError("it needs a name (a file's path, or a dataset on the hub) or data_files")
    if isinstance(files, Mapping):
        if chosen not in files:
            raise DataError(f"data_files has no split {chosen!r}; it has: {', '.join(map(str, files))}")
        files, asked = files[chosen], set()
    paths = _paths(files) if files else [str(name)] if _is_path(name) else []
    if not paths:
        return _from_hub(str(name), chosen)
    if asked and chosen != "train":
        raise DataError(f"a file has no splits, so {chosen!r} cannot be taken; use num_samples or a file per split")
    return [row for path in paths for row in read_file(path, format=format)]


def _task_set_rows(entry: Mapping[str, Any]) -> list[Row]:
    """Keys that are not those of every entry are the task's own, and so is the seed."""
    idle = [key for key in ("split", "split_type", "data_files", "format") if entry.get(key) not in (None, "train")]
    if idle:
        raise DataError(f"a task set has no {', '.join(idle)}: its puzzles are made; take another seed for other ones")
    own = {key: value for key, value in entry.items() if key not in {*ENTRY_KEYS, "options"}}
    seed = {"seed": _integer(entry, "seed", 0)} if entry.get("seed") is not None else {}
    return rows_of_task_set(entry["name"], **{**(entry.get("options") or {}), **own, **seed})


def _paths(files: Any) -> list[str | Path]:
    listed = [files] if isinstance(files, str | Path) else files
    if not isinstance(listed, list | tuple) or not all(isinstance(path, str | Path) for path in listed):
        raise DataError(f"data_files must be a path or a list of paths, got {shown(files)}")
    # a pattern that fits nothing stays as it is, and reading says that there is no such file
    return [path for item in listed for path in sorted(glob.glob(os.path.expanduser(item))) or [item]]


def _renamed(rows: list[Row], rename: Any) -> list[Row]:
    if not isinstance(rename, Mapping):
        raise DataError(f"rename must map old names to new ones, as rename: {{question: prompt}}; got {shown(rename)}")
    present = dict.fromkeys(name for row in rows for name in row)
    absent = [str(old) for old in rename if old not in present]
    if absent:
        raise DataError(f"rename: no column is called {', '.join(absent)}; it has: {', '.join(present) or 'none'}")
    named = [{rename.get(name, name): value for name, value in row.items()} for row in rows]
    for number, (row, new) in enumerate(zip(rows, named, strict=True), 1):
        if len(new) < len(row):
            raise DataError(
                f"rename {shown(dict(rename))} gives two columns of row {number} one name; it has: {', '.join(row)}"
            )
    return named


def _filtered(rows: list[Row], column: Any, value: Any) -> list[Row]:
    present = dict.fromkeys(name for row in rows for name in row)
    if column not in present:
        raise DataError(
            f"filter_column_value must name a column, got {shown(column)}; it has: {', '.join(present) or 'none'}"
        )
    kept = [row for row in rows if column in row and row[column] == value]
    if rows and not kept:
        found = list(dict.fromkeys(shown(row.get(column)) for row in rows))
        raise DataError(
            f"no row has {column} equal to filter_value {shown(value)}; values there: {', '.join(found[:8])}"
            f"{', ...' if len(found) > 8 else ''}"
        )
    return kept


def _processed(rows: list[Row], spec: Any) -> list[Row]:
    if not spec:
        return rows
    if isinstance(spec, str) and ":" not in spec:
        # praisonai-train warns and goes on too; its own templates carry such names
        log.warning("processing_func %r is not a 'module:function' path and is not run", spec)
        return rows
    from .rewards import resolve

    process = resolve(spec)
    processed = [process(row) for row in rows]
    for number, row in enumerate(processed, 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"processing_func {spec!r} returned {shown(row)} for row {number}; it must return the row, a dict"
            )
    return [dict(row) for row in processed]


def _flag(entry: Mapping[str, Any], key: str) -> bool:
    """YAML for praisonai-train may hold "true" and "false" as strings."""
    value = entry.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise DataError(f"{key} must be true or false, got {shown(value)}")


def _integer(entry: Mapping[str, Any], key: str, default: int, *, least: int = 0) -> int:
    value = entry.get(key, default)
    if isinstance(value, str) and re.fullmatch(r"\s*\d+\s*", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{key} must be an integer of at least {least}, got {shown(value)}")
    return value
