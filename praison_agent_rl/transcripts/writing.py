"""Writes what agents say to a store, from any thread and process; it never raises into the caller.

A call that extends an earlier one stores what is new and names the other, so that a long conversation grows with its
length and not with its square. What was written when a method has returned survives the end of the process.
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praison_agent_rl.transcripts.files import GrowingFile, store_at
from praison_agent_rl.transcripts.masking import Mask, Masks
from praison_agent_rl.transcripts.process_writing import ProcessWriter
from praison_agent_rl.transcripts.redaction import Redactor

logger = logging.getLogger(__name__)

_PROCESS = [os.getpid()]  # asking the system each time takes as long as a part of a line
if sys.platform != "win32":
    os.register_at_fork(after_in_child=lambda: _PROCESS.__setitem__(0, os.getpid()))


class TranscriptWriter:
    """Appends to a store; never raises into the caller."""

    def __init__(
        self,
        store: Path,
        *,
        redact: Redactor | None = None,
        max_bytes: int | None = None,
        max_file_bytes: int | None = None,
    ) -> None:
        """Write to the folder ``store``, each text as ``redact`` gives it back (by default, secrets are masked).

        ``max_file_bytes`` is the size at which another file is begun, ``max_bytes`` that of the store beyond which the
        oldest files that nobody writes to are removed.
        """
        self.store = store_at(store)  # the process may change its folder
        self.masks = Masks([Mask(redact, redact)] if redact is not None else ())
        """What is masked in lines from now on; a run that has begun keeps to what was masked then, too."""
        self._file = functools.partial(GrowingFile, self.store, max_bytes=max_bytes, max_file_bytes=max_file_bytes)
        self._writers: dict[int, ProcessWriter] = {}
        self.dropped = 0
        """Lines that could not be written."""
        self.failure: Exception | None = None
        """Why the first of them could not."""

    def begin(self, run: Mapping[str, Any]) -> None:
        """A run has started; the keys are those of a ``begin`` line, less ``kind``."""
        self._writer().attempt(ProcessWriter.begin, run)

    def expect(self, call: Mapping[str, Any]) -> None:
        """A model is asked; the keys are those of a call that are known by then, as the call itself has them."""
        self._writer().attempt(ProcessWriter.expect, call)

    def call(self, call: Mapping[str, Any]) -> None:
        """A model has answered, or failed to; the keys are those of `Call`, with whole messages and tools."""
        writer = self._writers.get(_PROCESS[0])
        (self._writer() if writer is None else writer).attempt(ProcessWriter.call, call)

    def end(self, run_id: str, *, output: Any, error: str | None, seconds: float) -> None:
        """A run has ended."""
        ended = {"run": run_id, "output": output, "error": error, "seconds": seconds}
        self._writer().attempt(ProcessWriter.end, ended)

    def feedback(
        self, feedback: Mapping[str, Any], *, masks: Masks | None = None, names: dict[str, str] | None = None
    ) -> None:
        """Somebody has rated a run; the keys are those of `Feedback`. Raises OSError where it cannot be written.

        ``masks`` come on top of those of the store; ``names`` are the placeholders to go on from, where `knows` is not.
        """
        writer = self._writer()
        with writer.lock:
            writer.feedback(feedback, masks or self.masks, {} if names is None else names)

    def knows(self, run_id: str) -> bool:
        """Whether this process has written that run not long ago, and remembers what its placeholders stand for."""
        return self._writer().knows(run_id)

    def close(self) -> None:
        """Say what was lost, if that was not said yet, and close the file; a later line opens another."""
        self._writer().attempt(ProcessWriter.close, {})

    def _writer(self) -> "ProcessWriter":
        """That of this process: a forked child has a file, a memory and a lock of its own."""
        writer = self._writers.get(_PROCESS[0])
        if writer is None:
            new = ProcessWriter(self._file(), self, self._count)
            writer = self._writers.setdefault(_PROCESS[0], new)
        return writer

    def _count(self, error: Exception) -> None:
        self.dropped += 1
        self.failure = self.failure or error
        if self.dropped == 1:
            with contextlib.suppress(Exception):  # handlers are another's code
                logger.warning(
                    "a line could not be recorded in %r (%s: %s); the agent goes on, and what is lost is counted",
                    *(str(self.store), type(error).__name__, error),
                )
