"""One writer for each store in a process, so that all that the process writes there is in one file a day."""

import threading
from pathlib import Path

from praison_agent_rl.transcripts.writing import TranscriptWriter

_MOST = 64
_SHARED: dict[Path, TranscriptWriter] = {}
_SHARING = threading.Lock()


def shared_writer(store: Path) -> TranscriptWriter:
    """The writer of this process for a store (see `store_at`)."""
    with _SHARING:
        writer = _SHARED.pop(store, None) or TranscriptWriter(store)
        while len(_SHARED) >= _MOST:
            _SHARED.pop(next(iter(_SHARED))).close()  # whoever still uses it opens the file again
        _SHARED[store] = writer
        return writer


def writers() -> tuple[TranscriptWriter, ...]:
    """The writers of this process that were last asked for, the last of them first."""
    return tuple(reversed(tuple(_SHARED.values())))
