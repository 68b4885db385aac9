"""Hand lines to a transcript writer; what goes wrong there is counted, said once, and never reaches an agent."""

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from praison_agent_rl.capture.replies import Request
from praison_agent_rl.transcripts.masking import Mask, Masks
from praison_agent_rl.transcripts.unwritten import Lane

_LOG = logging.getLogger(__name__)
Write = Callable[..., None]
_REQUESTS = 4
"""Of an agent that are remembered: as many conversations of one agent can go on in turn at no cost."""


class Writer(Protocol):
    """What a recording needs of a transcript writer; its methods are called by many threads."""

    dropped: int
    masks: Masks

    def begin(self, run: Mapping[str, Any], /) -> None:
        """Say that a run began."""

    def expect(self, call: Mapping[str, Any], /) -> None:
        """Get ready for a call, of which all but the reply is known."""

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
        self._sent: dict[int, tuple[weakref.ref[Any], tuple[Request, ...]]] = {}
        """By the ids of agents, which are found so even if they have no hash."""
        self._failures = -writer.dropped  # before this outlet
        self._told = False
        self._asked: dict[int, Mask] = {}
        self._masks: Masks | None = None
        self.lane = Lane()
        """The order of all that is written here."""

    def join(self, recording: int, mask: Mask) -> None:
        """A recording writes here too, and wants ``mask`` on everything."""
        self._asked[recording] = mask
        self._ask()

    def leave(self, recording: int) -> bool:
        """A recording has stopped; whether it was the last, whose masks stay for what is said of its runs later."""
        del self._asked[recording]
        if self._asked:
            self.lane.later(self._ask)  # what waits is of runs that it is to mask
            return False
        self._sent.clear()
        return True

    def latest(self, owner: Any) -> tuple[Request, ...]:
        """The latest requests of ``owner``."""
        found = self._sent.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else ()

    def remember(self, owner: Any, request: Request) -> None:
        """Another request of ``owner`` is sent, for the next to go on from."""
        if owner is not None:
            key = id(owner)
            gone = weakref.ref(owner, lambda gone: self._forget(key, gone))
            self._sent[key] = gone, (*self.latest(owner)[1 - _REQUESTS :], request)

    def _forget(self, key: int, gone: "weakref.ref[Any]") -> None:
        if (found := self._sent.get(key)) is not None and found[0] is gone:
            self._sent.pop(key, None)

    @property
    def dropped(self) -> int:
        """Lines that are not in the store."""
        return self._failures + self.writer.dropped

    def _ask(self) -> None:
        if not self._asked:
            return
        masks = Masks(self._asked.values())
        if self._masks is None or masks.masks != self._masks.masks:
            self._masks = self.writer.masks = masks

    def now(self, write: Write, *given: Any) -> None:
        """``write(writer, *given)`` at once: it is there then, whatever ends the process."""
        self.lane.now(self.attempt, write, *given)

    def later(self, write: Write, *given: Any) -> None:
        """The same before long, while the agent goes on."""
        self.lane.later(functools.partial(self.attempt, write, *given))

    def settle(self) -> None:
        """Have all written that was left for later."""
        self.lane.settle()

    def lose(self, error: Exception) -> None:
        """Count a line that could not even be made, so that the store tells of it."""
        self.now(lambda writer: writer.call(_Unreadable(error)))

    def attempt(self, write: Write, *given: Any) -> None:
        """``write(writer, *given)`` in the lane, whatever goes wrong in it."""
        try:
            write(self.writer, *given)
        except Exception as error:  # noqa: BLE001 - the recorder's boundary
            self._failures += 1
            if not self._told:
                self._told = True
                _LOG.warning(
                    "recording to %r failed (%s: %s); the agent goes on, and what is lost is counted",
                    *(str(self.store), type(error).__name__, error),
                )


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
