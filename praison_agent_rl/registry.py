"""Versions of an agent's model on disk; a version is whole or not there."""

import os
import shutil
import tempfile
from pathlib import Path

from praison_agent_rl.records import Comparison, MergeProof, Version
from praison_agent_rl.runs import RunFolder, now, read_record, write_record

_RECORD = "version.json"
_KEPT = ("plan.json", "comparison.json", "merge.json", "answers_base.jsonl", "answers_new.jsonl", "held_out.jsonl")


def publish_version(
    home: Path, agent: str, run: RunFolder, *, comparison: Comparison, merge: MergeProof, parent: str | None
) -> Version:
    """Make the next version of ``agent`` from a finished run; its model is moved, the rest is copied.

    The version is put together under a temporary name and renamed when it is whole.
    """
    folder = home / "versions" / agent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    for name in _KEPT:
        if (run.root / name).exists():
            shutil.copy2(run.root / name, temporary / name)
    shutil.copytree(run.adapter, temporary / "adapter")
    shutil.move(run.merged, temporary / "model")
    while True:
        number = 1 + max((int(path.name[1:]) for path in _version_folders(folder)), default=0)
        final = folder / f"v{number}"
        version = Version(
            name=final.name,
            agent=agent,
            folder=str(final.resolve()),
            base=run.plan.base,
            parent=parent,
            created=now(),
            comparison=comparison,
            merge=merge,
        )
        write_record(temporary / _RECORD, version)
        try:
            os.rename(temporary, final)
            return version
        except OSError:
            if not final.exists():
                raise
            # another run took this number in between: take the next one


def list_versions(home: Path, agent: str) -> list[Version]:
    """The versions of ``agent``, oldest first."""
    folders = sorted(_version_folders(home / "versions" / agent), key=lambda path: int(path.name[1:]))
    return [read_record(path / _RECORD, Version) for path in folders]


def _version_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("v*") if path.name[1:].isdigit() and (path / _RECORD).exists()]
