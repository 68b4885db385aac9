"""A policy by Unsloth: its model and its adapter, in Unsloth's own words (release 2026.10).

Imported only by the process that trains; ``backends.open_backend`` has imported Unsloth before.
"""

from typing import Any

from praison_agent_rl import trainer_arguments
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError

_NAMED_OTHERWISE = ("task_type",)
"""Keywords of ``peft.LoraConfig`` that Unsloth sets by itself."""


def load_by_unsloth(source: str, config: TrainConfig, *, device: str) -> Any:
    """The language model of ``source`` with a fresh adapter.

    Raises:
        ModelError: Unsloth cannot load the model or put the adapter on it, or has loaded it in other numbers.
    """
    from unsloth import FastLanguageModel

    try:
        model, _ = FastLanguageModel.from_pretrained(**loading_arguments(source, config, device))
        if device != "cpu":
            model.forward_by = "Unsloth"  # its attention takes masks of its own
        layers = model.config.get_text_config().num_hidden_layers
        adapted = FastLanguageModel.get_peft_model(model, **adapter_arguments(config, layers, device))
    except Exception as error:  # it raises whatever its checks and the packages beneath it raise
        raise ModelError(
            f"Unsloth cannot make a policy of {source!r}: {type(error).__name__}: {error}; change what it names, or "
            "set backend: transformers"
        ) from error
    if (config.load_in_4bit or config.load_in_8bit) and not getattr(model, "is_quantized", False):
        raise ModelError(
            f"Unsloth has loaded {source!r} in 16 or more bits, though fewer were asked for: bitsandbytes does not "
            "work here; put it right, or leave load_in_4bit and load_in_8bit out"
        )
    return adapted


def loading_arguments(source: str, config: TrainConfig, device: str) -> dict[str, Any]:
    """Keyword arguments for ``FastLanguageModel.from_pretrained``."""
    import torch

    dtype = ("float32" if device == "cpu" else None) if config.dtype == "auto" else config.dtype
    arguments: dict[str, Any] = {
        "model_name": source,
        "max_seq_length": config.max_seq_length,
        "dtype": dtype and getattr(torch, dtype),
        "load_in_4bit": config.load_in_4bit,
        "load_in_8bit": config.load_in_8bit,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "use_gradient_checkpointing": _checkpointing(config, device),
        "random_state": config.seed,
        # else it takes a copy of its own that is quantised already, and the adapter is merged into the original
        "use_exact_model_name": True,
    }
    if config.fast_inference:
        arguments |= {
            "fast_inference": True,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "max_lora_rank": config.max_lora_rank or config.lora_r,
        }
    return arguments


def adapter_arguments(config: TrainConfig, layers: int, device: str) -> dict[str, Any]:
    """Keyword arguments for ``FastLanguageModel.get_peft_model``; those that it does not name go on to PEFT."""
    of_peft = trainer_arguments.of_lora(config, layers=layers)
    return {
        **{name: value for name, value in of_peft.items() if name not in _NAMED_OTHERWISE},
        "use_gradient_checkpointing": _checkpointing(config, device),
        "random_state": config.seed,
    }


def _checkpointing(config: TrainConfig, device: str) -> bool | str:
    """Unsloth's own way unless another is asked for, or none is needed."""
    kept = trainer_arguments.checkpointing(config, device)
    return "unsloth" if kept and config.gradient_checkpointing is None else kept
