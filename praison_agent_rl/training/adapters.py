"""What training leaves behind: an adapter whose tensors are sound, published as a whole or not at all."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ModelError, TrainingFailed
from praison_agent_rl.runs import RunFolder, publish_folder

_FILES = ("adapter_model.safetensors", "adapter_config.json")


def check_weights(trainer: Any) -> None:
    """Raise TrainingFailed if a trained tensor holds NaN or infinity."""
    trained = ((name, p) for name, p in trainer.model.named_parameters() if p.requires_grad)
    check_tensors(trained, trainer.args.learning_rate)


def check_tensors(trained: Iterable[tuple[str, Any]], learning_rate: float) -> None:
    """The same for named tensors."""
    broken = [name for name, tensor in trained if not tensor.isfinite().all()]
    if broken:
        raise TrainingFailed(
            f"{len(broken)} trained tensors hold NaN or infinity (first: {broken[0]}); lower learning_rate "
            f"({learning_rate:g}) and start again"
        )


def save_adapter(trainer: Any, tokenizer: Any, run: RunFolder) -> None:
    """Publish the adapter as it is in memory; raises ModelError if none was written."""
    if not trainer.accelerator.is_main_process:
        return
    temporary = _fresh(run)
    trainer.save_model(str(temporary))
    if not (temporary / _FILES[0]).exists():
        raise ModelError(f"training ended but left no adapter in {str(temporary)!r}")
    _publish(temporary, tokenizer, run)


def publish_adapter(checkpoint: Path, tokenizer: Any, run: RunFolder) -> None:
    """Publish the adapter that a checkpoint holds."""
    temporary = _fresh(run)
    temporary.mkdir()
    for name in _FILES:
        shutil.copy2(checkpoint / name, temporary / name)
    _publish(temporary, tokenizer, run)


def _fresh(run: RunFolder) -> Path:
    temporary = Path(f"{run.adapter}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


def _publish(temporary: Path, tokenizer: Any, run: RunFolder) -> None:
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(temporary / "ref", ignore_errors=True)  # what TRL measures the distance from, after a warm start
    publish_folder(temporary, run.adapter)
