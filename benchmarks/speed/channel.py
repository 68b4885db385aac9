"""What a measuring process and the one that started it say to each other: lines of JSON, and words to go on.

Imported before torch: it sets what the processes of a user's run get too.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "@@ "


class Channel:
    """The measuring process's side; what its libraries print goes to the log, not between the messages."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, **record: Any) -> None:
        """Tell ``record``, with the peak of this process's memory so far."""
        self._out.write(MARK + json.dumps({**record, "peak_bytes": peak_memory()}) + "\n")
        self._out.flush()

    def wait(self) -> None:
        """Return when told to go on; end the process where there is nothing more to do."""
        if sys.stdin.readline().strip() != "go":
            os._exit(0)


def peak_memory() -> int:
    """Bytes of this process that were resident at most (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(job_of: Callable[[Channel, dict[str, Any]], None]) -> None:
    """Do the job that stands in the arguments; a failure, such as a lack of memory, is told as one."""
    channel, job = Channel(), json.loads(sys.argv[1])
    # one process that takes too much is to fail, and not to have the system kill another
    limit = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.85)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        job_of(channel, job)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this cell's result
        text = str(error)
        lacks = isinstance(error, MemoryError) or "allocate memory" in text
        channel.say(failed="out of memory" if lacks else f"{type(error).__name__}: {text[:300]}")
        os._exit(0)
    channel.wait()
