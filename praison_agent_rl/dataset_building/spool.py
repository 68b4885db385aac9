"""Texts put aside in a file while runs are read, and taken back by their place; memory holds places only."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class Spool:
    """JSON values in an open file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._end = 0
        self._at_end = True

    def put(self, value: Any) -> int:
        """Keep a value and return its place; raises TypeError or ValueError if JSON has no form for it."""
        line = json.dumps(value, allow_nan=False).encode() + b"\n"
        if not self._at_end:
            self._file.seek(self._end)
            self._at_end = True
        place = self._end
        self._file.write(line)
        self._end += len(line)
        return place

    def get(self, place: int) -> Any:
        """The value at a place."""
        self._file.seek(place)
        self._at_end = False
        return json.loads(self._file.readline())


@contextmanager
def spooling(path: Path) -> Iterator[Spool]:
    """A spool in the file ``path``, which is removed afterwards."""
    try:
        with path.open("w+b") as file:
            yield Spool(file)
    finally:
        path.unlink(missing_ok=True)
