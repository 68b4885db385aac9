"""The files of a store: their names, how one process appends to them, and how their lines are read back.

A store is a folder of ``<day>-<pid>-<6 hex>.jsonl``, each written by one process. Nothing that was written is changed.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from praison_agent_rl.errors import DataError
from praison_agent_rl.transcripts.plain_values import revive
from praison_agent_rl.transcripts.unwritten import settle

DEFAULT_STORE = Path(".praisonai/rl/transcripts")
FORMAT = 1
REFERENCE_WINDOW = 256
"""A call refers to one of the last so many of its file, so that a reader need not remember more of them."""

_NAME = re.compile(r"\d{4}-\d\d-\d\d-\d+-[0-9a-f]{6}\.jsonl")
_NEEDED = {"begin": "run", "call": "id", "end": "run", "feedback": "run", "dropped": "count"}
"""What a line of a kind cannot be without."""
_DAY = 86_400
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
_DECODER = json.JSONDecoder()


@dataclass
class Losses:
    """What a reader could not give, and what the writers of a store say they lost."""

    dropped: int = 0
    """Lines that a writer could not write."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why, with the number of lines."""
    torn: int = 0
    """Lines that were written in part, in the middle of a file."""
    unresolved: int = 0
    """Calls that go on from one that is not there."""


def encode_line(line: dict[str, Any]) -> bytes:
    """One line of a file: JSON in UTF-8, or in ASCII, which keeps lone surrogates, and a new line."""
    try:
        return to_json(line) + b"\n"  # in a quarter of the time
    except ValueError:
        return _ENCODER.encode(line).encode("ascii") + b"\n"


class GrowingFile:
    """What one process appends to: a file, and the next one when the day ends, it is full, or somebody removed it.

    Raises whatever the system raises; `TranscriptWriter` is what never does.
    """

    def __init__(
        self,
        store: Path,
        *,
        max_file_bytes: int | None = None,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        # an eighth: whole files are what is removed, and never the one being written
        self._max_file_bytes = max_file_bytes or (max_bytes // 8 if max_bytes else sys.maxsize)
        self._clock = clock
        self._file: FileIO | None = None
        self._day = 0
        self._name: str | None = None
        self._left: tuple[int, int, int] | None = None
        """Device, inode and size of the file that was closed and can be gone on with."""
        # names of one process sort in the order in which it wrote them
        self._number = int.from_bytes(os.urandom(3), "big") >> 1
        self._due = b""
        """Written before the next line: the header of a new file, or a new line after a torn one."""

    def renew(self) -> bool:
        """Begin another file if there is reason to; whether it did."""
        if self._file is None:
            self._reopen()
        if self._file is not None:
            state = os.fstat(self._file.fileno())
            full, another_day = state.st_size >= self._max_file_bytes, self._today() != self._day
            if state.st_nlink and not full and not another_day:
                return False
            self.close()
        self._open()
        return True

    def append(self, lines: bytes) -> None:
        """Write whole lines by one call of the system; `renew` comes first."""
        assert self._file is not None, "renew() opens the file"
        due = self._due + lines
        written = self._file.write(due)
        if written != len(due):
            self._due = b"\n" + self._due.lstrip(b"\n")
            raise OSError(f"{written} of {len(due)} bytes could be written")
        self._due = b""

    def close(self) -> None:
        """Close the file; the next line goes on with it if it is as it was left."""
        if self._file is not None:
            file, self._file = self._file, None
            state = os.fstat(file.fileno())
            self._left = state.st_dev, state.st_ino, state.st_size
            file.close()

    def _reopen(self) -> None:
        left, self._left = self._left, None
        if left is None or self._name is None:
            return
        try:
            file = FileIO(self._store / self._name, "ab", opener=_existing)
        except OSError:  # removed, or not to be written any more
            return
        state = os.fstat(file.fileno())
        if (state.st_dev, state.st_ino, state.st_size) == left:
            self._file = file
            _hold(file.fileno())
        else:
            file.close()

    def _today(self) -> int:
        return int(self._clock() // _DAY)

    def _open(self) -> None:
        self._store.mkdir(parents=True, exist_ok=True)
        if self._max_bytes:
            self._make_room(self._max_bytes - self._max_file_bytes)
        self._day = self._today()
        date = time.strftime("%Y-%m-%d", time.gmtime(self._day * _DAY))
        while self._file is None:
            self._number += 1
            name = f"{date}-{os.getpid()}-{self._number:06x}.jsonl"
            with contextlib.suppress(FileExistsError):  # of a process in another container, with the same id
                self._file = FileIO(self._store / name, "ab", opener=_create)
        _hold(self._file.fileno())
        self._due, self._name = encode_line(self._header()), name

    def _header(self) -> dict[str, Any]:
        from praison_agent_rl import __version__

        about = {"format": FORMAT, "pid": os.getpid(), "time": self._clock(), "package": __version__}
        return {"kind": "header", **about, "continues": self._name}

    def _make_room(self, room: int) -> None:
        """Remove the oldest files that nobody writes to, until those that are left fit into ``room`` bytes."""
        found = []
        for path in _files_in(self._store):
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        excess = sum(size for _, size, _ in found) - room
        for _, size, path in sorted(found):
            if excess > 0 and not _is_held(path):
                with contextlib.suppress(OSError):
                    path.unlink()
                    excess -= size


def _create(path: str, flags: int) -> int:
    """Open for appending, new, and for its owner alone: these are conversations."""
    return os.open(path, flags | os.O_EXCL, 0o600)


def _existing(path: str, flags: int) -> int:
    """Open for appending, but make no file."""
    return os.open(path, flags & ~os.O_CREAT)


if sys.platform == "win32":  # where a file that is open cannot be removed

    def _hold(descriptor: int) -> None: ...

    def _is_held(path: Path) -> bool:
        return False

else:
    import fcntl

    def _hold(descriptor: int) -> None:
        """Show that somebody writes to this file, for as long as the process lives, whatever ends it."""
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _is_held(path: Path) -> bool:
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def store_at(store: str | Path) -> Path:
    """The folder that a user names, in the one spelling that all names of it have: absolute, without links."""
    return Path(store).expanduser().resolve()


def store_files(store: str | Path) -> list[Path]:
    """The files of a store in the order of their names, or the one file that ``store`` is, with all of this process.

    Raises:
        DataError: there is no such folder.
    """
    settle()
    store = Path(store).expanduser()
    if store.is_file():
        return [store]
    if not store.is_dir():
        raise DataError(f"{str(store)!r} is no store of transcripts; record an agent with agent.record(), or name it")
    return _files_in(store)


def _files_in(store: Path) -> list[Path]:
    return sorted(path for path in store.iterdir() if _NAME.fullmatch(path.name))


def lines_of(path: Path, losses: Losses) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; one still being written is left, one torn by a full disk is counted.

    Raises:
        DataError: the file is of a format that this version does not know.
    """
    for line in raw_lines(path):
        try:
            read = _decoded(line)
            kind = read["kind"]
            read[_NEEDED.get(kind, "kind")]
        except (ValueError, TypeError, KeyError, RecursionError):
            losses.torn += bool(line.strip())
            continue
        if kind == "header":
            _check_format(path, read.get("format"))
        elif kind == "dropped":
            losses.dropped += read["count"]
            losses.reasons[str(read.get("reason"))] += read["count"]
        else:
            # one byte is sought ten times as fast as three
            yield revive(read) if b"$" in line and b'{"$' in line else read


def _decoded(line: bytes) -> Any:
    """What ``json`` makes of a line, in half the time; keys are shared by all lines, which saves memory too."""
    try:
        return from_json(line, cache_strings="keys")
    except ValueError:  # torn; or it holds half an emoji, which only ``json`` reads
        return _DECODER.raw_decode(line.decode("utf-8"))[0]


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file that have been written to their end; none if the file has been removed meanwhile."""
    with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=1 << 20) as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def continued_file(path: Path) -> str | None:
    """The name of the file that the same process wrote before this one.

    Raises:
        DataError: the file is of a format that this version does not know.
    """
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
    except (ValueError, RecursionError, FileNotFoundError):  # torn: the rest can still be read; or removed meanwhile
        return None
    if not isinstance(header, dict) or header.get("kind") != "header":
        return None
    _check_format(path, header.get("format"))
    continued: str | None = header.get("continues")
    return continued


def _check_format(path: Path, version: Any) -> None:
    if not isinstance(version, int) or version > FORMAT:
        raise DataError(
            f"{str(path)!r} is of format {version!r}, and this version of praison-agent-rl reads up to {FORMAT}; "
            "pip install --upgrade praison-agent-rl"
        )
