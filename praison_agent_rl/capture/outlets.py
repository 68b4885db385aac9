"""Hand lines to a transcript writer; what goes wrong there is counted, said once, and never reaches an agent."""

import contextlib
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from praison_agent_rl.capture.replies import Request
from praison_agent_rl.transcripts.masking import Mask, Masks

_LOG = logging.getLogger(__name__)
_REQUESTS = 4
"""Of an agent that are remembered: as many conversations of one agent can go on in turn at no cost."""


class Writer(Protocol):
    """What a recording needs of a transcript writer; its methods are called by many threads."""

    dropped: int
    masks: Masks

    def begin(self, run: Mapping[str, Any], /) -> None:
        """Say that a run began."""

    def call(self, call: Mapping[str, Any], /) -> None:
        """Keep a call."""

    def end(self, run_id: str, /, *, output: Any, error: str | None, seconds: float) -> None:
        """Say how a run ended."""

    def close(self) -> None:
        """Write what is left."""


class Outlet:
    """A writer with its store, shared by the recordings that write there; all of them mask what it writes."""

    def __init__(self, writer: Writer, store: Path) -> None:
        self.writer = writer
        self.store = store
        self._sent: weakref.WeakKeyDictionary[Any, tuple[Request, ...]] = weakref.WeakKeyDictionary()
        self._failures = -writer.dropped  # before this outlet
        self._told = False
        self._asked: dict[int, Mask] = {}
        self._masks: Masks | None = None

    def join(self, recording: int, mask: Mask) -> None:
        """A recording writes here too, and wants ``mask`` on everything."""
        self._asked[recording] = mask
        self._ask()

    def leave(self, recording: int) -> bool:
        """A recording has stopped; whether it was the last, whose masks stay for what is said of its runs later."""
        del self._asked[recording]
        if self._asked:
            self._ask()
            return False
        self._sent.clear()
        return True

    def latest(self, owner: Any) -> tuple[Request, ...]:
        """The latest requests of ``owner``."""
        with contextlib.suppress(TypeError):  # an agent without a hash, or none
            return self._sent.get(owner, ())
        return ()

    def remember(self, owner: Any, request: Request) -> None:
        """Another request of ``owner`` is sent, for the next to go on from."""
        with contextlib.suppress(TypeError):
            self._sent[owner] = (*self._sent.get(owner, ())[1 - _REQUESTS :], request)

    @property
    def dropped(self) -> int:
        """Lines that are not in the store."""
        return self._failures + self.writer.dropped

    def _ask(self) -> None:
        masks = Masks(self._asked.values())
        if self._masks is None or masks.masks != self._masks.masks:
            self._masks = self.writer.masks = masks

    def send(self, write: Callable[[Writer], None], written: Callable[[], None] = lambda: None) -> None:
        """Let the writer ``write`` one line, then say that it is ``written``.

        A stream may be collected as garbage, and recorded, at any moment, also while this same thread is within a
        writer. Waiting for that or another writer's lock there could be for ever, so such a line waits for its turn.
        """
        _THREAD.waiting.append(functools.partial(self._attempt, write, written))
        if _THREAD.sending:
            return
        _THREAD.sending = True
        try:
            while _THREAD.waiting:
                _THREAD.waiting.popleft()()
        finally:
            _THREAD.sending = False

    def lose(self, error: Exception) -> None:
        """Count a line that could not even be made, so that the store tells of it."""
        self.send(lambda writer: writer.call(_Unreadable(error)))

    def _attempt(self, write: Callable[[Writer], None], written: Callable[[], None]) -> None:
        try:
            write(self.writer)
            written()
        except Exception as error:  # noqa: BLE001 - the recorder's boundary
            self._failures += 1
            if not self._told:
                self._told = True
                _LOG.warning(
                    "recording to %r failed (%s: %s); the agent goes on, and what is lost is counted",
                    *(str(self.store), type(error).__name__, error),
                )


class _Thread(threading.local):
    """What one thread is sending."""

    def __init__(self) -> None:
        self.sending = False
        self.waiting: deque[Callable[[], None]] = deque()


_THREAD = _Thread()


class _Unreadable(Mapping[str, Any]):
    """Stands for a call that could not be read: so says the first attempt to write it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, _: str) -> Any:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> int:
        raise self._error
