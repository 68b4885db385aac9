"""Follows a run on another machine: its events here as they come, and its results home when it has ended."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.records import Record
from praison_agent_rl.remote.carrying import STAYS
from praison_agent_rl.remote.connection import Link, Unreachable
from praison_agent_rl.remote.there import lacking, unpack
from praison_agent_rl.runs import RunFolder, publish_folder, read_record

OnEvent = Callable[[dict[str, Any]], None]

RECORD = "remote.json"
ARRIVING = ".arriving"
"""Where files lie that come home, until all of them are there."""
CARRYING = "praison_agent_rl.remote.carrying"
"""What the Python there runs for what needs this package."""
_LAST = ("card.json", "comparison.json", "verdict.json")
"""What says that a run is finished comes to its place last."""


class Place(Record):
    """Where a run is that happens on another machine; kept in the run's folder here until it is home."""

    host: str
    folder: str
    """There."""
    script: str
    """``there.py`` of the package there."""


def place_of(run: RunFolder) -> Place | None:
    """Where the run is, if it is on another machine."""
    path = run.root / RECORD
    return read_record(path, Place) if path.exists() else None


def asked(link: Link, place: Place, verb: str, **request: Any) -> Any:
    """What the script there answers for this run; raises as ``Link.ask`` does."""
    return link.ask([place.script, verb], {"folder": place.folder, **request})


def follow(link: Link, place: Place, run: RunFolder, on_event: OnEvent) -> None:
    """Write the events there into the run's own file and hand them on, until the run there has ended.

    The file here is a beginning of the one there, byte for byte, so its size says where to go on.
    """
    start = _cut_to_whole_lines(run.events_file)
    request = json.dumps({"folder": place.folder, "start": start}).encode() + b"\n"
    with link.talk([place.script, "follow"], request, hold=True) as said, run.events_file.open("ab") as events:
        for line in said:
            if not line.endswith(b"\n"):
                return  # the connection broke in it, which the end of the call tells
            events.write(line)
            events.flush()
            if (event := _as_event(line)) is not None:
                on_event(event)


def fetch_log(link: Link, place: Place, run: RunFolder, state: Mapping[str, Any]) -> None:
    """Bring the log of a run home that did not end well, if it left one."""
    if "log_sum" in state:
        fetch(link, place, run.root, {run.log.name: state["log_sum"]})


def forget(link: Link, place: Place, run: RunFolder) -> None:
    """Take away the run's folder there, and the record of it here."""
    (run.root / RECORD).unlink()
    with contextlib.suppress(Unreachable):  # then it takes up disk there, and nothing else
        asked(link, place, "remove")


def bring_home(link: Link, place: Place, run: RunFolder, sums: Mapping[str, str]) -> None:
    """Fetch what the run there has made and put it in its place here when all of it is what it was there.

    What has arrived before is not fetched again.

    Raises:
        TrainingFailed: something arrived that was not asked for or is not what its checksum says, or there is no room.
    """
    arriving = run.root / ARRIVING
    try:
        _check_names(sums)
        wanted = {name: sums[name] for name in _not_in_place(run.root, sums)}
        fetch(link, place, arriving, {name: sums[name] for name in lacking(arriving, wanted)})
        _publish(arriving, run.root, wanted)
    except ValueError as error:
        raise TrainingFailed(
            f"what came home from {place.host!r} cannot be believed: {error}; nothing of it was taken, and it is still "
            f"in {place.folder!r} there"
        ) from error
    except OSError as error:
        raise TrainingFailed(
            f"the result cannot be written to {str(run.root)!r}: {error}; it is kept in {place.folder!r} on "
            f"{place.host!r}. Make room here, then: praison-agent-rl train --resume {run.root}"
        ) from error


def fetch(link: Link, place: Place, folder: Path, sums: Mapping[str, str]) -> None:
    """Bring files of the run there into a folder here; raises ValueError where one is not what its checksum says."""
    if not sums:
        return
    request = json.dumps({"folder": place.folder, "names": list(sums)}).encode() + b"\n"
    with link.talk([place.script, "give"], request) as said:
        unpack(said, folder, sums)
    if left := lacking(folder, sums):
        raise ValueError(f"{left[0]!r} did not come")


def _cut_to_whole_lines(path: Path) -> int:
    """Take half a line off the end of a file, which a killed process may have left; its size then."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return whole


def _as_event(line: bytes) -> dict[str, Any] | None:
    """None for half a line that a killed process left there."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event


def _check_names(sums: Mapping[str, str]) -> None:
    """Raise ValueError for a name that lies outside of the run's folder, or is none that comes home."""
    for name in sums:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or parts[0] in (*STAYS, RECORD):
            raise ValueError(f"{name!r} is no file of a result")


def _entries(sums: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """The files and folders at the top of a run's folder, each with all its names in ``sums``."""
    for top, names in groupby(sorted(sums, key=_top), key=_top):
        yield top, list(names)


def _top(name: str) -> str:
    return name.partition("/")[0]


def _not_in_place(root: Path, sums: Mapping[str, str]) -> list[str]:
    """The names of all entries of which something is not here as it is there."""
    lacks = set(lacking(root, sums))
    return [name for _, names in _entries(sums) if lacks & set(names) for name in names]


def _publish(arriving: Path, root: Path, wanted: Mapping[str, str]) -> None:
    for path in arriving.rglob("*"):
        if path.is_file() and path.relative_to(arriving).as_posix() not in wanted:  # left by an earlier arrival
            path.unlink()
    tops = [top for top, _ in _entries(wanted)]
    for top in sorted(tops, key=lambda top: (top in _LAST, top)):
        if (arriving / top).is_dir():
            publish_folder(arriving / top, root / top)
        else:
            os.replace(arriving / top, root / top)
    shutil.rmtree(arriving, ignore_errors=True)
