"""Find the newest checkpoint that a run can go on from; a killed run may have left half of one."""

import json
import zipfile
import zlib
from pathlib import Path

from praison_agent_rl.errors import MissingExtra

_TORCH_FILES = ("optimizer.pt", "scheduler.pt")
# what zipfile raises for wrong bytes, found by changing each byte of a file
_NO_SOUND_ZIP = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the highest step in which every file that resuming needs is there and readable.

    transformers takes the highest number without a look, fails on half a file, and goes on with a fresh optimiser if
    ``optimizer.pt`` is missing (1 of 6 runs killed while saving left such a checkpoint).
    """
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    newest_first = sorted(found, key=step_of, reverse=True)
    return next((path for path in newest_first if _is_whole(path)), None)


def is_last(checkpoint: Path, max_steps: int) -> bool:
    """Whether a whole checkpoint is of the run's last step; without ``max_steps`` the number that it itself names."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    last = max_steps if max_steps > 0 else state.get("max_steps")
    return isinstance(last, int) and 0 < last <= step_of(checkpoint)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _is_whole(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    random_states = list(checkpoint.glob("rng_state*.pth"))
    return (
        isinstance(state, dict)
        and state.get("global_step") == step_of(checkpoint)
        and _opens_as_safetensors(checkpoint / "adapter_model.safetensors")
        and (checkpoint / "adapter_config.json").is_file()
        and bool(random_states)
        and all(_opens_as_zip(path) for path in [*(checkpoint / name for name in _TORCH_FILES), *random_states])
    )


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
