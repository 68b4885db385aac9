"""Locks on files between processes; the system lets go of them when their process ends, however it ends."""

import importlib.util
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

AVAILABLE = importlib.util.find_spec("fcntl") is not None
"""Whether this system has them; on Windows nothing is held, and two writers at once are not prevented."""


@contextmanager
def locked(path: Path, *, refused: Callable[[str], Exception] | None = None) -> Iterator[None]:
    """Hold the lock that is the file ``path``, also against other threads of this process.

    Where somebody else has it: raise what ``refused`` makes of who that is, or wait if there is no ``refused``. The
    file stays; removing it would let two hold locks of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        if AVAILABLE:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if refused else 0))
            except BlockingIOError as error:
                assert refused is not None
                raise refused(_holder(path)) from error
        with suppress(OSError):  # on a full disk only the note is missing
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}))
            file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)


def _holder(path: Path) -> str:
    """Who holds the lock, in words, by the note that it left."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        host = "" if note["host"] == socket.gethostname() else f" on {note['host']}"
        return f"process {note['pid']}{host}, since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun
        return "another process"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
