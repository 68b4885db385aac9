"""When something that keeps failing is tried again: at once, then after 1, 2, 4 ... 60 s; it is never given up."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FIRST, _LONGEST = 1.0, 60.0
_CALM = 2 * _LONGEST
"""Seconds without an attempt after which the pauses begin anew."""


class Backoff:
    """The pauses between attempts at one thing."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = _FIRST
        self._ended = self._due = -math.inf

    @property
    def seconds_left(self) -> float:
        """Until the next attempt is due."""
        return max(0.0, self._due - self._clock())

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """An attempt; the pause before the next one counts from its end, however it ended."""
        if self._clock() - self._ended > _CALM:
            self._pause = _FIRST
        try:
            yield
        finally:
            self._ended = self._clock()
            self._due = self._ended + self._pause
            self._pause = min(2 * self._pause, _LONGEST)
