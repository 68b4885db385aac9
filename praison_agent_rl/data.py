"""The rows that training reads: split into training and held-out prompts, and given the forms that others want.

Reading is in ``data_files`` and ``data_sources`` and judging in ``data_checks``; this module also offers their names.
None of them changes what a row says without being told to.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from .data_checks import REQUIRED_COLUMNS, check_columns, check_rows
from .data_files import Row, read_rows, write_rows
from .data_sources import load_rows
from .errors import DataError, MissingExtra

__all__ = [
    "REQUIRED_COLUMNS",
    "Row",
    "as_messages",
    "check_columns",
    "check_rows",
    "columns_of",
    "fingerprint",
    "load_rows",
    "normalise",
    "prompt_key",
    "read_rows",
    "sample",
    "split_rows",
    "to_dataset",
    "write_rows",
]

log = logging.getLogger(__name__)

TRAIN_SIDE = frozenset({"train"})
HELD_OUT_SIDE = frozenset({"test", "held_out", "validation"})


def split_rows(rows: Sequence[Row], held_out: float | int, *, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, both in the given order; rows with the same prompt are on the same side.

    ``held_out`` is a share of the distinct prompts (float in 0..1) or a number of them (int); 0 is none. The side is a
    function of the seed and the prompts alone, so the order of the rows does not matter. A column ``split`` that says
    train, test, held_out or validation in every row decides instead, unless all say train; it is taken away, and a
    prompt that it holds out is not trained on where another row says train.

    Raises:
        DataError: no training prompt would remain, or ``held_out`` is neither.
    """
    sides = [row.get("split") for row in rows]
    if sides and all(isinstance(side, str) and side in TRAIN_SIDE | HELD_OUT_SIDE for side in sides):
        rows = [{name: value for name, value in row.items() if name != "split"} for row in rows]
        if not TRAIN_SIDE.issuperset(sides):
            return _split_as_said(rows, [side in HELD_OUT_SIDE for side in sides])
    keys = [prompt_key(row) for row in rows]
    distinct = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    count = _held_out_count(held_out, len(distinct))
    if count and count >= len(distinct):
        raise DataError(
            f"held_out={held_out!r} would hold out {count} of {len(distinct)} distinct prompts and leave none to train "
            "on; ask for less or give more prompts"
        )
    away = set(distinct[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in away]
    return train, [row for row, key in zip(rows, keys, strict=True) if key in away]


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """A prompt as messages: text becomes one user message, messages are copied.

    >>> as_messages("Hi")
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        return copy.deepcopy(prompt)
    raise DataError(f"a prompt must be text or a list of messages, got {prompt!r}")


def normalise(rows: Iterable[Row]) -> list[Row]:
    """The rows with every prompt as messages; TRL takes one form in a dataset."""
    return [{**row, "prompt": as_messages(row["prompt"])} if "prompt" in row else dict(row) for row in rows]


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """All columns but ``prompt``, one value per row, ``None`` where a row lacks it: what TRL hands to rewards."""
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {name: [row.get(name) for row in rows] for name in names}


def sample(rows: Sequence[Row], n: int = 3) -> tuple[list[Any], dict[str, list[Any]]]:
    """Prompts and columns of ``n`` rows from the first to the last, evenly spaced, to try rewards on."""
    if n < 1:
        raise DataError(f"a sample needs at least one row, got n={n!r}")
    last, steps = len(rows) - 1, max(n - 1, 1)
    picked = sorted({step * last // steps for step in range(n)}) if rows else []
    columns = {name: [values[at] for at in picked] for name, values in columns_of(rows).items()}
    return [rows[at].get("prompt") for at in picked], columns


def fingerprint(rows: Iterable[Row]) -> str:
    """16 hex digits of a SHA-256 of the rows in their order; the order of keys does not matter."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":"), default=repr).encode() + b"\n")
    return digest.hexdigest()[:16]


def to_dataset(rows: Sequence[Row]) -> Any:
    """A ``datasets.Dataset`` whose ``to_list()`` gives these rows back, with ``None`` where a row lacks a column.

    Nested and mixed columns are stored as JSON, since Arrow would give one shape to all rows.

    Raises:
        DataError: a value that JSON or Arrow would change: NaN within a nested value, half an emoji, huge integers.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            'training needs the package datasets, which is not installed: pip install "praison-agent-rl[train]"'
        ) from error
    try:
        from datasets import Dataset, Features, Json, List, Value
    except ImportError as error:
        raise DataError(
            f"datasets {datasets.__version__} has no Json columns, without which Arrow would change tool-call "
            'arguments: pip install -U "datasets>=5"'
        ) from error
    kinds = {"messages": List(Json()), "json": Json()}
    columns, features = {}, {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kind = _column_kind(values)
        columns[name] = _stored(values, kind, name)
        features[name] = kinds.get(kind) or Value(kind)
    try:
        dataset = Dataset.from_dict(columns, features=Features(features))
    except (ValueError, OverflowError, TypeError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"the rows do not fit into a datasets.Dataset: {error}") from error
    _check_kept(rows, dataset.to_list())
    return dataset


def _split_as_said(rows: Sequence[Row], is_held_out: list[bool]) -> tuple[list[Row], list[Row]]:
    asked = [row for row, away in zip(rows, is_held_out, strict=True) if not away]
    held_out = [row for row, away in zip(rows, is_held_out, strict=True) if away]
    kept_away = {prompt_key(row) for row in held_out}
    train = [row for row in asked if prompt_key(row) not in kept_away]
    if not train:
        raise DataError("the column 'split' holds out every prompt and leaves none to train on; mark some as 'train'")
    if len(train) < len(asked):
        log.warning(
            "%d rows that the column 'split' marks as 'train' are left out of training: it holds out the same prompts",
            len(asked) - len(train),
        )
    return train, held_out


def _held_out_count(held_out: float | int, prompts: int) -> int:
    if isinstance(held_out, float) and 0 <= held_out < 1:
        # rounded first: 0.1 * 30 is a little more than 3 in binary, and ceil would make 4 of it
        return math.ceil(round(held_out * prompts, 9))
    if isinstance(held_out, int) and not isinstance(held_out, bool) and held_out >= 0:
        return held_out
    raise DataError(f"held_out must be a share from 0 up to 1, as 0.2, or a number of prompts, as 40; got {held_out!r}")


def prompt_key(row: Row) -> str:
    """What two rows with the same prompt share: text and one user message are alike, so are case and white space."""
    prompt = row.get("prompt")
    if prompt is None:  # reward pairs: what comes before the chosen answer, or else the whole row
        chosen = row.get("chosen")
        prompt = chosen[:-1] if isinstance(chosen, list) and len(chosen) > 1 else row
    if isinstance(prompt, str):
        prompt = as_messages(prompt)
    return json.dumps(_folded(prompt), sort_keys=True, default=repr)


def _folded(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, list):
        return [_folded(item) for item in value]
    if isinstance(value, dict):
        return {name: _folded(item) for name, item in value.items()}
    return value


def _column_kind(values: list[Any]) -> str:
    """How Arrow can hold a column exactly: as one plain type, as a list of JSON messages, or as JSON."""
    given = [value for value in values if value is not None]
    for kind, name in ((str, "string"), (bool, "bool"), (int, "int64"), (float, "float64")):
        # type() and not isinstance: a bool is an int, but Arrow would not give it back as one
        if all(type(value) is kind for value in given):
            return name if kind is not int or all(-(2**63) <= value < 2**63 for value in given) else "json"
    if all(isinstance(value, list) and all(isinstance(item, dict) for item in value) for value in given):
        return "messages"
    return "json"


def _stored(values: list[Any], kind: str, name: str) -> list[Any]:
    """JSON kinds as JSON text: left to ``datasets``, the text ``"5"`` would come back as the number 5."""
    if kind not in ("json", "messages"):
        return values
    try:
        if kind == "messages":
            return [value if value is None else [json.dumps(item) for item in value] for value in values]
        return [value if value is None else json.dumps(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataError(f"column {name!r} holds a value that JSON has no form for: {error}") from error


def _check_kept(rows: Sequence[Row], kept: list[Row]) -> None:
    for number, (row, copied) in enumerate(zip(rows, kept, strict=True), 1):
        for name, value in row.items():
            if not _same(value, copied[name]):
                raise DataError(
                    f"row {number}: datasets cannot keep column {name!r} as it is (NaN, half an emoji or an integer "
                    f"beyond 64 bits within): {value!r} came back as {copied[name]!r}. Mend the value or leave it out"
                )


def _same(value: Any, copied: Any) -> bool:
    if isinstance(value, dict) and isinstance(copied, dict):
        return value.keys() == copied.keys() and all(_same(item, copied[name]) for name, item in value.items())
    if isinstance(value, list | tuple) and isinstance(copied, list):
        return len(value) == len(copied) and all(map(_same, value, copied))
    if isinstance(value, float) and isinstance(copied, float):
        # the JSON reader of datasets loses the last digit of some floats
        return math.isclose(value, copied, rel_tol=1e-12) or (math.isnan(value) and math.isnan(copied))
    return type(value) is type(copied) and bool(value == copied)
