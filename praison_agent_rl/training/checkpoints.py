"""Checkpoints of a run: each is whole or not there, and the newest that a run can go on from is found.

A killed run, a full disk or a loss of power may all the same leave half of one; nothing in them is unpickled here.
"""

import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.errors import MissingExtra
from praison_agent_rl.libraries import library_versions
from praison_agent_rl.ranks import is_first, process_count
from praison_agent_rl.runs import RunFolder, publish_folder, write_text

RECORD = "checkpoint.json"
"""Written last into a checkpoint: the sizes of all its files, and what it was made with."""
PART = ".part"
"""Folder beside the checkpoints in which one is made, and old ones are taken away."""
_TORCH_FILES = ("optimizer.pt", "scheduler.pt")
# what zipfile raises for wrong bytes, found by changing each byte of a file
_NO_SOUND_ZIP = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)
_OUTSIDE_A_STEP = {
    "max_steps", "num_train_epochs", "save_steps", "save_strategy", "save_total_limit", "logging_steps", "watch_steps",
    "patience", "output_dir", "report_to", "run_name", "resume_from_checkpoint", "launch", "remote", "model_name",
    "dataset",
}  # fmt: skip
"""Keys of a configuration that say how far a run goes and where things are, and not what a step does."""
_LIBRARIES = ("torch", "transformers", "trl", "peft")


class Made(NamedTuple):
    """What a checkpoint was made with."""

    settings: str
    """Of `settings_of`."""
    libraries: dict[str, str]
    """Versions, by name."""
    processes: int


def made_now(config: Mapping[str, Any]) -> Made:
    """What a checkpoint of a run with this configuration would be made with in this process."""
    installed = library_versions()
    return Made(settings_of(config), {name: installed[name] for name in _LIBRARIES}, process_count())


def settings_of(config: Mapping[str, Any]) -> str:
    """A fingerprint of all keys that decide what a step does, so that checkpoints of other runs are told apart."""
    kept = {name: value for name, value in config.items() if name not in _OUTSIDE_A_STEP}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def publish_checkpoint(made: Path, folder: Path, by: Made, *, keep: int | None = None) -> Path:
    """Give a finished checkpoint its place in ``folder``, and only then take older ones away, but for ``keep`` in all.

    Whatever moment the process is killed at, or the power lost, what was whole in ``folder`` before is there, or this
    one is.
    """
    sizes = {str(path.relative_to(made).as_posix()): path.stat().st_size for path in made.rglob("*") if path.is_file()}
    write_text(made / RECORD, json.dumps({"files": sizes, **by._asdict()}, indent=2))
    final = folder / made.name
    publish_folder(made, final)
    older = [path for path in _newest_first(folder) if step_of(path) < step_of(final)]
    for path in older[keep - 1 :] if keep else []:
        gone = made.parent / path.name
        os.replace(path, gone)  # at once: half of a folder could pass for a whole one
        shutil.rmtree(gone, ignore_errors=True)
    return final


def newest_whole_checkpoint(folder: Path, *, settings: str | None = None) -> Path | None:
    """The checkpoint with the highest step that has no fault; None if there is none.

    transformers takes the highest number without a look, fails on half a file, and goes on with a fresh optimiser if
    ``optimizer.pt`` is missing (1 of 6 runs killed while saving left such a checkpoint).
    """
    return next((path for path in _newest_first(folder) if fault_of(path, settings=settings) is None), None)


def checkpoint_of(run: RunFolder) -> Path | None:
    """The checkpoint that ``run`` goes on from; said in its events, with the newer ones that are passed over."""
    by = made_now(run.plan.config)
    checkpoint = newest_whole_checkpoint(run.checkpoints, settings=by.settings)
    said = []
    for path in _newest_first(run.checkpoints):
        if path == checkpoint:
            break
        said.append(f"{path.name} is passed over: {fault_of(path, settings=by.settings)}")
    said.append(f"going on from {checkpoint.name}" if checkpoint else "no whole checkpoint: from the start")
    if checkpoint and (other := _made_otherwise(checkpoint, by)):
        said.append(f"{other}, so what follows is not bit for bit what it would have been")
    if is_first():
        for text in said:
            run.report_event("note", text=text)
    return checkpoint


def is_last(checkpoint: Path, max_steps: int) -> bool:
    """Whether a whole checkpoint is of the run's last step; without ``max_steps`` the number that it itself names."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    last = max_steps if max_steps > 0 else state.get("max_steps")
    return isinstance(last, int) and 0 < last <= step_of(checkpoint)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def fault_of(checkpoint: Path, *, settings: str | None = None) -> str | None:
    """Why a run cannot go on from ``checkpoint``; None if it can. ``settings`` are those of the run."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json is missing or damaged"
    if not isinstance(state, dict) or state.get("global_step") != step_of(checkpoint):
        return f"trainer_state.json is not of step {step_of(checkpoint)}"
    try:
        record = _record_of(checkpoint)
    except (OSError, ValueError):
        return f"{RECORD} is damaged"
    missing = _missing_by_name(checkpoint) if record is None else _missing_by_record(checkpoint, record)
    if missing:
        return missing
    if record and settings and record["settings"] != settings:
        return "it is of a run with other settings"
    return _unreadable(checkpoint)


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def _record_of(checkpoint: Path) -> dict[str, Any] | None:
    """What was written last into it; None where an earlier release, or another program, made it."""
    path = checkpoint / RECORD
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not record.keys() >= {"files", *Made._fields}:
        raise ValueError(record)
    if not isinstance(record["files"], dict):
        raise ValueError(record)
    return record


def _missing_by_record(checkpoint: Path, record: Mapping[str, Any]) -> str | None:
    for name, size in record["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    if not any("optim" in name for name in record["files"]):
        return "it has no optimiser (save_only_model)"
    return None


def _missing_by_name(checkpoint: Path) -> str | None:
    wanted = ["adapter_model.safetensors", "adapter_config.json", *_TORCH_FILES]
    if missing := [name for name in wanted if not (checkpoint / name).is_file()]:
        return f"{missing[0]} is missing"
    random_states = {path.name for path in checkpoint.glob("rng_state*.pth")}
    of_each = {f"rng_state_{number}.pth" for number in range(len(random_states))}
    if random_states not in ({"rng_state.pth"}, of_each) or not random_states:
        return "the state of the random numbers is missing, or that of one process"
    return None


def _unreadable(checkpoint: Path) -> str | None:
    for path in sorted(checkpoint.rglob("*")):
        if path.suffix in (".pt", ".pth") and not _opens_as_zip(path):
            return f"{path.name} is damaged"
        if path.suffix == ".safetensors" and not _opens_as_safetensors(path):
            return f"{path.name} is damaged"
    return None


def _made_otherwise(checkpoint: Path, by: Made) -> str | None:
    """What is another than it was when the checkpoint was made, and changes roundings or random numbers."""
    record = _record_of(checkpoint)
    if record is None:
        return None
    others = {name: version for name, version in record["libraries"].items() if version != by.libraries.get(name)}
    if others:
        there = ", ".join(f"{name} {version} (here {by.libraries.get(name)})" for name, version in others.items())
        return f"{checkpoint.name} was made with {there}"
    if record["processes"] != by.processes:
        return f"{checkpoint.name} was made by {record['processes']} processes, and there are {by.processes}"
    return None


def _opens_as_zip(path: Path) -> bool:
    """Whether a file of ``torch.save`` is whole: it is a ZIP whose members carry checksums. Nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except _NO_SOUND_ZIP:
        return False


def _opens_as_safetensors(path: Path) -> bool:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingExtra('resuming needs safetensors: pip install "praison-agent-rl[train]"') from error
    try:
        with safe_open(path, framework="np") as file:
            return bool(file.keys())
    except (OSError, SafetensorError):
        return False
