"""The form in which any value fits into JSON, and the way back; what JSON cannot hold is marked by a ``$`` name."""

import base64
import math
from collections.abc import Mapping, Set
from typing import Any

from pydantic import BaseModel

_HUGE = 1 << 10_000
"""Python refuses to write or read integers of more than 4,300 decimal digits (``sys.set_int_max_str_digits``)."""
_HUGE_BELOW = -_HUGE  # made once: it has a thousand bytes
ATOMS = frozenset((str, bool, type(None)))
"""Types of values that are as plain as can be."""
_MARKS = frozenset(("$bytes", "$dict", "$float", "$int", "$repr"))


def plain(value: Any) -> Any:
    r"""A copy of ``value`` made of dicts with text keys, lists, texts, numbers, booleans and None alone.

    >>> plain({"image": b"\x00", 1: {2}})
    {'$dict': [['image', {'$bytes': 'AA=='}], [1, [2]]]}
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        for key in value:
            if type(key) is not str or key[:1] == "$":
                return {"$dict": [[plain(key), plain(item)] for key, item in value.items()]}
        return {key: item if type(item) is str else plain(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [plain(item) for item in value]
    if kind is int:
        return value if _HUGE_BELOW < value < _HUGE else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    return _plain_unusual(value)


_FEW = 24
"""So many values are compared one by one."""


class Kept(list[Any]):
    """Plain values that nobody changes any more: they need no copy, and equal ones are mostly the same object."""


def equal_prefix(values: list[Any], known: list[Any]) -> int:
    """Number of values, from the first on, that equal those of ``known``; many are compared at once."""
    place = 0
    step = length = min(len(values), len(known))
    while step:
        if _equal(values[place : place + step], known[place : place + step]):
            place += step
            step = length - place
        elif step > _FEW:
            step //= 2
        else:
            stop = place + step
            while place < stop and _equal(values[place], known[place]):
                place += 1
            return place
    return place


def _equal(values: Any, known: Any) -> bool:
    try:
        return bool(values == known)
    except Exception:  # noqa: BLE001 - another's code: comparing arrays, for one, gives no truth value
        return False


def revive(value: Any) -> Any:
    r"""What `plain` was given, as far as it can come back: tuples and sets are lists, others ``{"$repr": text}``.

    >>> revive({"$dict": [["image", {"$bytes": "AA=="}], [1, [2]]]})
    {'image': b'\x00', 1: [2]}
    """
    if type(value) is dict:
        if len(value) == 1 and (mark := next(iter(value))) in _MARKS:
            return _revive_marked(mark, value)
        return {key: revive(item) for key, item in value.items()}
    if type(value) is list:
        return [revive(item) for item in value]
    return value


def _plain_unusual(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(value)  # an Enum's or another subclass's text
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, int):
        return plain(int(value))
    if isinstance(value, float):
        return plain(float(value))
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if isinstance(value, Mapping):
        return plain(dict(value))
    if isinstance(value, Set):
        return [plain(item) for item in sorted(value, key=repr)]  # one order for equal sets
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {"$repr": _description(value)}


def _description(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - another's code, which may raise anything
        return f"<{type(value).__name__} without a description>"


def _revive_marked(mark: str, value: dict[str, Any]) -> Any:
    held = value[mark]
    if mark == "$bytes":
        return base64.b64decode(held)
    if mark == "$int":
        return int(held, 16)
    if mark == "$float":
        return float(held)
    if mark == "$dict":
        return {_as_key(revive(key)): revive(item) for key, item in held}
    return value


def _as_key(value: Any) -> Any:
    """A key that was a tuple is one again; lists cannot be keys."""
    return tuple(_as_key(item) for item in value) if isinstance(value, list) else value
