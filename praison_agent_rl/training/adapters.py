"""What training leaves behind: an adapter whose tensors are sound, published as a whole or not at all."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ModelError, TrainingFailed
from praison_agent_rl.ranks import is_first
from praison_agent_rl.runs import RunFolder, publish_folder

_FILES = ("adapter_model.safetensors", "adapter_config.json")


def check_weights(trainer: Any) -> None:
    """Raise TrainingFailed if a trained tensor holds NaN or infinity."""
    check_tensors(trained_parts(trainer), trainer.args.learning_rate)


def trained_parts(trainer: Any) -> Iterator[tuple[str, Any]]:
    """What this process holds of each tensor that is trained, by name."""
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.to_local() if trainer.is_fsdp_enabled else parameter


def check_tensors(trained: Iterable[tuple[str, Any]], learning_rate: float) -> None:
    """The same for named tensors."""
    broken = [name for name, tensor in trained if not tensor.isfinite().all()]
    if broken:
        raise TrainingFailed(
            f"{len(broken)} trained tensors hold NaN or infinity (first: {broken[0]}); lower learning_rate "
            f"({learning_rate:g}) and start again"
        )


def save_adapter(trainer: Any, tokenizer: Any, run: RunFolder) -> None:
    """Publish the adapter as it is in memory; raises ModelError if none was written.

    All processes call this, since each may hold a part of the weights; the first one writes.
    """
    temporary = _fresh(run) if is_first() else _temporary(run)
    trainer.save_model(str(temporary))
    if not is_first():
        return
    if not (temporary / _FILES[0]).exists():
        raise ModelError(f"training ended but left no adapter in {str(temporary)!r}")
    _publish(temporary, tokenizer, run)


def publish_adapter(checkpoint: Path, tokenizer: Any, run: RunFolder) -> None:
    """Publish the adapter that a checkpoint holds; the first process does."""
    if not is_first():
        return
    temporary = _fresh(run)
    temporary.mkdir()
    for name in _FILES:
        shutil.copy2(checkpoint / name, temporary / name)
    _publish(temporary, tokenizer, run)


def _fresh(run: RunFolder) -> Path:
    shutil.rmtree(_temporary(run), ignore_errors=True)
    return _temporary(run)


def _temporary(run: RunFolder) -> Path:
    return Path(f"{run.adapter}.part")


def _publish(temporary: Path, tokenizer: Any, run: RunFolder) -> None:
    tokenizer.save_pretrained(temporary)
    (temporary / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nothing of ours reads
    shutil.rmtree(temporary / "ref", ignore_errors=True)  # what TRL measures the distance from, after a warm start
    publish_folder(temporary, run.adapter)
