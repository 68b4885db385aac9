"""The newest whole checkpoint of a run that did not end well on another machine: it comes home, and may go out again.

On either side a checkpoint says by a fingerprint of the settings which run it is of, and a file that the settings name
may have another name there; so the fingerprint is written anew on each way. Nothing is unpickled.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from praison_agent_rl.records import Plan
from praison_agent_rl.remote.connection import Link
from praison_agent_rl.remote.following import ARRIVING, CARRYING, Place, fetch
from praison_agent_rl.remote.there import lacking
from praison_agent_rl.runs import RunFolder, publish_folder
from praison_agent_rl.training.checkpoints import (
    RECORD,
    Made,
    fault_of,
    newest_whole_checkpoint,
    publish_checkpoint,
    settings_of,
)

_FILE = re.compile(r"(checkpoints/checkpoint-[0-9]+|best/step-[0-9]+)/([^/\\]+/)*[^/\\]+")


def bring_checkpoint(link: Link, place: Place, run: RunFolder) -> Path | None:
    """The newest whole checkpoint there, brought home with the adapters of the best steps; None if there is none.

    It takes its place when each of its files is what it was there; what has arrived before is not fetched again.

    Raises:
        Unreachable: the connection broke.
        ValueError: something arrived that was not asked for or is not what its checksum says.
        OSError: there is no room here.
    """
    sums: dict[str, str] = link.ask(["-m", CARRYING, "checkpoint"], {"folder": place.folder})
    if not sums:
        return None
    name = _checked_name(sums)
    home, settings = run.checkpoints / name, settings_of(run.plan.config)
    if set(lacking(run.root, sums)) <= {f"checkpoints/{name}/{RECORD}"} and fault_of(home, settings=settings) is None:
        return home
    arriving = run.root / ARRIVING
    fetch(link, place, arriving, {file: sums[file] for file in lacking(arriving, sums)})
    for folder in sorted({file.split("/")[1] for file in sums if file.startswith("best/")}):
        run.best.mkdir(exist_ok=True)
        publish_folder(_only(arriving / "best" / folder, arriving, sums), run.best / folder)
    return _publish(_only(arriving / "checkpoints" / name, arriving, sums), run)


def checkpoint_for(run: RunFolder, told: Plan, temporary: Path) -> dict[str, Path]:
    """The files of the newest whole checkpoint here, by their names there, where the plan is the one that is ``told``.

    What is written anew lies in the folder ``temporary``.
    """
    newest = newest_whole_checkpoint(run.checkpoints, settings=settings_of(run.plan.config))
    if newest is None:
        return {}
    files = {f"run/{path.relative_to(run.root).as_posix()}": path for path in newest.rglob("*") if path.is_file()}
    if (newest / RECORD).exists():
        record = json.loads((newest / RECORD).read_text(encoding="utf-8"))
        retold = temporary / RECORD
        retold.write_text(json.dumps({**record, "settings": settings_of(told.config)}), encoding="utf-8")
        files[f"run/checkpoints/{newest.name}/{RECORD}"] = retold
    return files


def _checked_name(sums: Mapping[str, str]) -> str:
    """The name of the one checkpoint that the files are of; raises ValueError where they are of something else."""
    strange = [file for file in sums if not _FILE.fullmatch(file) or {".", ".."} & set(file.split("/"))]
    names = {file.split("/")[1] for file in sums if file.startswith("checkpoints/")}
    if strange or len(names) != 1 or f"checkpoints/{min(names)}/{RECORD}" not in sums:
        raise ValueError(f"{(strange or sorted(sums))[0]!r} is no file of a checkpoint")
    return names.pop()


def _only(folder: Path, arriving: Path, sums: Mapping[str, str]) -> Path:
    """The folder, without what an earlier arrival left in it."""
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(arriving).as_posix() not in sums:
            path.unlink()
    return folder


def _publish(made: Path, run: RunFolder) -> Path:
    record, config = json.loads((made / RECORD).read_text(encoding="utf-8")), run.plan.config
    (made / RECORD).unlink()
    run.checkpoints.mkdir(exist_ok=True)
    by = Made(settings_of(config), record["libraries"], record["processes"])
    return publish_checkpoint(made, run.checkpoints, by, keep=config.get("save_total_limit"))
