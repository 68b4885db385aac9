"""The two files that say which version of an agent answers: ``current.json`` and the history of its changes.

Killed or out of disk at any moment, they say the same afterwards. Which version may answer is decided in `registry`.
"""

import errno
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path

from praison_agent_rl.errors import ConfigError, VersionError
from praison_agent_rl.locks import locked
from praison_agent_rl.records import Pointer
from praison_agent_rl.runs import append_line, read_record, write_record, write_text

log = logging.getLogger(__name__)

CURRENT, HISTORY = "current.json", "history.jsonl"


def current_in(folder: Path, agent: str) -> Pointer | None:
    """What is to answer now by the files in ``folder``; None where nothing was ever promoted.

    Where its file is damaged or gone, the last change of the history counts, with a warning.

    Raises:
        VersionError: there is a file, and neither it nor the history can be read.
    """
    file = folder / CURRENT
    known = [] if file.exists() else _logged(folder)
    fault: object = "it is gone"
    if file.exists():  # by now, if a first promotion has written the history since: see `write_pointer`
        try:
            return read_record(file, Pointer)
        except ConfigError as error:
            fault, known = error, _logged(folder)
    elif not known:
        return None
    if known:
        _warn(file, str(fault), known[-1].changed)
        return known[-1]
    raise VersionError(
        f"it is not known which version of agent {agent!r} answers: {fault}, and its history cannot be read either; "
        f"say it anew: praison-agent-rl versions promote {shlex.quote(agent)} VERSION"
    )


@lru_cache(maxsize=256)
def _warn(file: Path, fault: str, _: str) -> None:
    """Once for each decision: whoever follows an agent looks every second."""
    log.warning("%s is not used, the last change in the history is: %s", file, fault)


def history_in(folder: Path, agent: str) -> list[Pointer]:
    """Every change of what answers, the oldest first."""
    known, pointer = _logged(folder), current_in(folder, agent)
    if pointer is None or pointer in known[-1:]:
        return known
    # a process that was killed between the two files has left the last change in one of them only
    last = max((place for place, change in enumerate(known) if change == pointer), default=None)
    return [*known, pointer] if last is None else known[: last + 1]


def write_pointer(folder: Path, agent: str, pointer: Pointer) -> Pointer:
    """The history first, so that no change that took place is missing from it; where that fails nothing is changed.

    Where no file says yet what answers, that file comes first: whoever looks between the two would take it for lost.
    """
    file, logged = folder / HISTORY, _logged(folder)
    with suppress(VersionError):  # then neither file can be read, and both begin anew
        if (known := history_in(folder, agent)) != logged:  # as a killed process left it
            write_text(file, "".join(f"{change.model_dump_json()}\n" for change in known), sync=True)
    size = file.stat().st_size if file.exists() else 0
    steps = [
        partial(append_line, file, pointer.model_dump_json(), sync=True),
        partial(write_record, folder / CURRENT, pointer, sync=True),
    ]
    if not (folder / CURRENT).exists():
        steps.reverse()
    try:
        for step in steps:
            step()
    except BaseException as error:
        if written_pointer(folder) != pointer:
            with suppress(OSError):
                os.truncate(file, size)
            raise
        if not isinstance(error, OSError):
            raise
        log.warning("what answers was changed, but may not outlive a loss of power: %s", error)
    return pointer


def written_pointer(folder: Path) -> Pointer | None:
    """What ``current.json`` says, if it can be read."""
    with suppress(ConfigError):
        return read_record(folder / CURRENT, Pointer)
    return None


def _logged(folder: Path) -> list[Pointer]:
    file, known = folder / HISTORY, []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    for line in lines:
        with suppress(ValueError):  # half a line that a killed process left
            known.append(Pointer.model_validate_json(line))
    return known


@contextmanager
def held(path: Path, *, refused: Callable[[str], Exception] | None = None) -> Iterator[None]:
    """`locks.locked`; raises VersionError where the lock's file cannot be written."""
    with ExitStack() as stack:
        with told(path.parent):
            stack.enter_context(locked(path, refused=refused))
        yield


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """A place that cannot be written is a VersionError; a full disk stays what it is."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise VersionError(
            f"nothing can be written in {str(folder)!r}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}; make that place writable, or give another home"
        ) from error
