"""Ids of runs that know where their run was recorded, and how a run is found in a store by its id; writes nothing."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from praison_agent_rl.transcripts.files import encode_line, raw_lines, store_files

_PLACEHOLDER = re.compile(rb"<([A-Z][A-Z_]*)_(\d{1,9})>")


class RunId(str):
    """A run's id, and like any text otherwise, with the store that it was recorded in (None: not known)."""

    __slots__ = ("redact", "store")
    store: Path | None
    redact: tuple[str, ...]
    """What its recording masked besides secrets, as far as that has a name."""

    def __new__(cls, run: str, store: Path | None = None, redact: tuple[str, ...] = ()) -> "RunId":
        """Say where a run is."""
        made = super().__new__(cls, run)
        made.store, made.redact = store, redact
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.store, self.redact


@dataclass
class Found:
    """What a store says of a run, as far as it matters to who writes about that run."""

    redact: tuple[str, ...] = ()
    """Names of what its recording masked besides secrets."""
    numbers: dict[str, int] = field(default_factory=dict)
    """The last placeholder of each kind in the files that it is in: what it stands for is not there."""

    def names(self) -> dict[str, str]:
        """A table in which the next placeholder of each kind is none that the run can have."""
        return {(last := f"<{kind}_{number}>"): last for kind, number in self.numbers.items()}


def find_run(store: Path, run: str, *, briefly: bool = False) -> Found | None:
    """A run by its id, or None if no file of the store names it; ``briefly`` tells no more than that it is there."""
    found: Found | None = None
    wanted = encode_line({"run": run}).strip(b"{}\n")
    for path in reversed(store_files(store)) if store.is_dir() else ():
        if not any(wanted in line for line in raw_lines(path)):
            continue
        found = found or Found()
        if briefly:
            break
        _read_mentions(path, wanted, found)
    return found


def _read_mentions(path: Path, wanted: bytes, found: Found) -> None:
    for line in raw_lines(path):
        if wanted in line and line.startswith(b'{"kind":"begin"'):
            found.redact = tuple(json.loads(line).get("redact") or ())
        if b"<" in line:
            for kind, number in _PLACEHOLDER.findall(line):
                found.numbers[kind.decode()] = max(int(number), found.numbers.get(kind.decode(), 0))
