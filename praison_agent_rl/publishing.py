"""Make a version of an agent from a finished run: put together under a temporary name, renamed when it is whole.

Killed at any moment it leaves the version whole or not there, and the run such that it can be done again. Which version
answers is not changed here.
"""

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from praison_agent_rl.checksums import hash_file, hash_template, hash_weights, sums_of, write_sums
from praison_agent_rl.errors import ModelError, VersionError
from praison_agent_rl.forcing import RECORD
from praison_agent_rl.locks import AVAILABLE
from praison_agent_rl.pointers import held
from praison_agent_rl.records import Comparison, MergeProof, Plan, Verdict, Version
from praison_agent_rl.registry import MODEL, claimed_folder, list_versions, used_numbers
from praison_agent_rl.runs import RunFolder, now, read_record, sync_to_disk, write_record, write_text

PART = ".part-"
_LEFT_OUT = ("train.jsonl", "log.txt")
"""Of the files of a run: the rows that were trained on may be many and private, and the log is of the machine."""


def publish_version(home: Path, agent: str, run: RunFolder) -> Version:
    """The next version of ``agent``, from a run that is merged and judged; a run that has become one gives that one.

    Its model moves; the run keeps the rest. What the gate said is recorded and not asked about here.

    Raises:
        VersionError: the run is not finished, or nothing can be written.
        ConfigError: it is a version already.
    """
    RunFolder.open(run.root)
    with held(claimed_folder(home, agent) / ".publishing"):
        folder = claimed_folder(home, agent)
        remove_leftovers(folder)
        if (known := _made_of(home, agent, run)) is None:
            _check_finished(run)
            known = _publish(home, agent, run, folder)
        if (Path(known.folder) / MODEL).is_dir():  # else the run's may be the only one
            _remove_model(run)
        return known


def base_hash_of(plan: Plan) -> str | None:
    """The hash of the weights that a run trained on; None where they are not on this machine."""
    with contextlib.suppress(ModelError):
        return hash_weights(plan.base, revision=plan.config.get("revision"))
    return None


def remove_leftovers(folder: Path) -> None:
    """Remove what killed publications left; only for who holds the lock of publishing."""
    for left in folder.glob(f"{PART}*") if AVAILABLE else ():
        shutil.rmtree(left, ignore_errors=True)


def sync_all(folder: Path) -> None:
    """Wait until all files below ``folder``, and their names, would outlive a loss of power."""
    for root, _, files in os.walk(folder):
        for file in files:
            sync_to_disk(Path(root) / file)
        sync_to_disk(Path(root))


def _check_finished(run: RunFolder) -> None:
    there = [run.plan_file, run.merge_file, run.comparison_file, run.adapter, run.merged / "config.json"]
    if missing := [path.relative_to(run.root).as_posix() for path in there if not path.exists()]:
        raise VersionError(
            f"the run in {str(run.root)!r} cannot become a version: it has no {', '.join(missing)}; if it was "
            f"interrupted, go on with it: praison-agent-rl train --resume {run.root}"
        )


def _made_of(home: Path, agent: str, run: RunFolder) -> Version | None:
    """The version that the run has become already."""
    root, plan = str(run.root.resolve()), run.plan_file.read_bytes()
    for version in list_versions(home, agent):
        copy = Path(version.folder) / "plan.json"
        # a folder of the same name may be another run's by now
        if version.run == root and copy.exists() and copy.read_bytes() == plan:
            return version
    return None


def _publish(home: Path, agent: str, run: RunFolder, folder: Path) -> Version:
    temporary = folder / f"{PART}{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        _put_together(run, temporary)
        number = 1 + max(used_numbers(home, agent), default=0)
        while True:
            final = folder / f"v{number}"
            version = _describe(agent, run, final, temporary / MODEL)
            write_record(temporary / RECORD, version)
            write_sums(temporary, sums_of(temporary))
            sync_all(temporary)
            try:
                os.rename(temporary, final)
            except OSError:
                if not final.exists():
                    raise
                number += 1  # taken in between, where there are no locks
            else:
                sync_to_disk(folder)
                return version
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_together(run: RunFolder, temporary: Path) -> None:
    for path in run.root.iterdir():
        if path.is_file() and path.name not in _LEFT_OUT and not path.name.startswith("."):
            shutil.copy2(path, temporary / path.name)
    write_text(temporary / "data.json", _data_of(run))
    shutil.copytree(run.adapter, temporary / "adapter")
    shutil.copytree(run.merged, temporary / MODEL, copy_function=link_or_copy)


def link_or_copy(source: str, target: str) -> Any:
    """Give a file a second name; where that cannot be, a copy of it."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # on another disk, or one without links
        return shutil.copy2(source, target)
    return target


def _data_of(run: RunFolder) -> str:
    sides = {"train": run.train_rows, "held_out": run.held_out_rows}
    found: dict[str, Any] = {"dataset": run.plan.config.get("dataset")}
    for side, path in sides.items():
        if path.exists():
            with path.open("rb") as file:
                found[side] = {"rows": sum(1 for _ in file), "sha256": hash_file(path)}
    return json.dumps(found, indent=1, default=str) + "\n"


def _describe(agent: str, run: RunFolder, final: Path, model: Path) -> Version:
    plan = run.plan
    return Version(
        name=final.name,
        agent=agent,
        folder=str(final.resolve()),
        base=plan.base,
        parent=plan.parent,
        created=now(),
        comparison=read_record(run.comparison_file, Comparison),
        merge=read_record(run.merge_file, MergeProof),
        base_hash=base_hash_of(plan),
        template_hash=hash_template(model),
        libraries=plan.libraries,
        verdict=read_record(run.verdict_file, Verdict) if run.verdict_file.exists() else None,
        run=str(run.root.resolve()),
    )


def _remove_model(run: RunFolder) -> None:
    """Take the run's own names of the model away; half a model is never left under its name."""
    gone = run.root / ".model-gone"
    with contextlib.suppress(OSError):  # then it stays, at no cost where it is linked
        shutil.rmtree(gone, ignore_errors=True)
        if run.merged.exists():
            os.rename(run.merged, gone)
        shutil.rmtree(gone)
