"""Scores kept on disk between runs: one SQLite file, shared by processes. It never ends a run: what fails is a miss."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from praison_agent_rl.runs import HOME

if TYPE_CHECKING:
    import sqlite3

logger = logging.getLogger(__name__)

T = TypeVar("T")
Score = float | None

FILE = HOME / "reward_cache.sqlite"
MOST = 1_000_000
"""Scores kept; the oldest make room. About 60 bytes each."""

_WAIT_SECONDS = 5.0  # for another process that writes
_ASKED_AT_ONCE = 500  # SQLite takes 999 variables in one statement, and more only since 3.32
_PRUNE_EVERY = 10_000  # scores written


class RewardCache:
    """Scores by key, in the file ``path``; use it from one thread.

    A damaged file is moved aside, and where nothing can be read or written nothing is kept; either is said once.
    """

    def __init__(
        self, path: str | os.PathLike[str] = FILE, *, most: int = MOST, warn: Callable[[str], None] = logger.warning
    ) -> None:
        self.path = Path(path)
        self._most = most
        self._warn = warn
        self._base: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._since_pruned = 0
        self._off = False

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Score]:
        """The scores of those of ``keys`` that there are."""
        return self._guarded(lambda base: _read(base, list(dict.fromkeys(keys))), {}) if keys else {}

    def write(self, scores: Mapping[bytes, Score]) -> None:
        """Keep ``scores``."""
        if scores:
            self._guarded(lambda base: self._write(base, scores), None)

    def close(self) -> None:
        """Let go of the file."""
        if self._base is not None:
            with contextlib.suppress(Exception):  # closing is no reason to fail
                self._base.close()
        self._base = None

    def _guarded(self, do: "Callable[[sqlite3.Connection], T]", otherwise: T) -> T:
        """What ``do`` returns, or ``otherwise`` where the file cannot be used."""
        for again in (True, False):
            if self._off:
                break
            try:
                return do(self._open())
            except ImportError as error:  # a Python built without SQLite
                self._give_up(error)
            except OSError as error:
                self._give_up(error)
            except Exception as error:  # noqa: BLE001 - sqlite3's errors, whose module may not be there to name them
                if _is_busy(error):
                    break
                if not (again and _is_damage(error) and self._move_aside(error)):
                    self._give_up(error)
        return otherwise

    def _open(self) -> "sqlite3.Connection":
        if self._base is None:
            import sqlite3

            self.path.parent.mkdir(parents=True, exist_ok=True)
            # any thread: a caller may be made in one and used in another, though never in two at once
            base = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
            self._base, self._file = base, _identity(self.path)
            base.execute("PRAGMA journal_mode = WAL")  # readers do not wait for a writer
            base.execute("PRAGMA synchronous = NORMAL")  # a loss of power costs the newest scores, not the file
            base.execute("CREATE TABLE IF NOT EXISTS scores (number INTEGER PRIMARY KEY, key BLOB UNIQUE, score REAL)")
            base.execute("SELECT number, key, score FROM scores LIMIT 1")
            self._prune(base)
        return self._base

    def _write(self, base: "sqlite3.Connection", scores: Mapping[bytes, Score]) -> None:
        base.execute("BEGIN IMMEDIATE")
        try:
            base.executemany("INSERT OR REPLACE INTO scores (key, score) VALUES (?, ?)", list(scores.items()))
            base.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                base.execute("ROLLBACK")
            raise
        self._since_pruned += len(scores)
        if self._since_pruned >= _PRUNE_EVERY:
            self._prune(base)

    def _prune(self, base: "sqlite3.Connection") -> None:
        base.execute("DELETE FROM scores WHERE number <= (SELECT max(number) FROM scores) - ?", (self._most,))
        self._since_pruned = 0

    def _move_aside(self, error: BaseException) -> bool:
        """Give a damaged file another name; False where that cannot be done."""
        own = self._file
        self.close()
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        try:
            if own is None or _identity(self.path) == own:  # else another process has moved it already
                os.replace(self.path, aside)
                for ending in ("-wal", "-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self.path}{ending}", f"{aside}{ending}")
                self._warn(f"the cache of rewards {str(self.path)!r} is damaged ({error}); it is now {aside.name!r}")
        except OSError:
            return False
        return True

    def _give_up(self, error: BaseException) -> None:
        self._off = True
        self.close()
        self._warn(
            f"scores are not kept from here on: {str(self.path)!r} cannot be used ({error}); make it writable and give "
            "its disk room, or set reward_cache to false"
        )


def _read(base: "sqlite3.Connection", keys: list[bytes]) -> dict[bytes, Score]:
    found: dict[bytes, Score] = {}
    for start in range(0, len(keys), _ASKED_AT_ONCE):
        some = keys[start : start + _ASKED_AT_ONCE]
        places = ", ".join("?" * len(some))
        rows = base.execute(f"SELECT key, score FROM scores WHERE key IN ({places})", some)
        found |= {key: score for key, score in rows if score is None or isinstance(score, float)}
    return found


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_busy(error: BaseException) -> bool:
    return "locked" in str(error) or "busy" in str(error)


def _is_damage(error: BaseException) -> bool:
    """Whether ``error`` is of what is in the file, and not of the disk or of rights to it."""
    import sqlite3

    if isinstance(error, sqlite3.OperationalError):  # a database of another make: "no such column: key"
        return "no such column" in str(error) or "has no column" in str(error) or "malformed" in str(error)
    return isinstance(error, sqlite3.DatabaseError)
