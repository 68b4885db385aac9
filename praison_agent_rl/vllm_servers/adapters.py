"""Which adapters vLLM can serve as PEFT means them; nothing is sent to a server here."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ConfigError, ServerFailed, TrainingFailed

_MOVED_BASE = ("pissa", "olora", "corda", "loftq")
"""Starts of an adapter for which PEFT changes the base weights (vllm/lora/peft_helper.py, _init_is_supported)."""
_ONE_FOR_ALL = (
    "use_dora modules_to_save rank_pattern alpha_pattern target_parameters trainable_token_indices lora_bias "
    "use_qalora use_bdlora alora_invocation_tokens layer_replication arrow_config "
    "kasa_config velora_config monteclora_config"
)
_OUTER = ("lm_head", "embed_out", "output_layer", "embed_tokens", "wte", "word_embeddings", "embed_in")
_NOT_KEPT = ("base_model_name_or_path", "auto_mapping", "revision")
"""What an adapter's configuration says of this machine or of PEFT's own classes; a server needs none of it."""


def why_not_servable(config: Mapping[str, Any]) -> str | None:
    """Why vLLM cannot serve an adapter with these settings of ``LoraConfig`` as PEFT means them; None if it can.

    Settings for single layers are among the reasons: vLLM before 0.32 reads one rank and one alpha for all.
    """
    for name in _ONE_FOR_ALL.split():
        if config.get(name):
            return f"vLLM serves no adapter with {name} (it is {config[name]!r})"
    if (bias := config.get("bias") or "none") != "none":
        return f"vLLM serves no adapter that trains biases (bias is {bias!r})"
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_MOVED_BASE):
        return (
            f"an adapter with init_lora_weights {start!r} changes the base weights, which a vLLM server does not have"
        )
    targets = config.get("target_modules") or []
    names = [targets] if isinstance(targets, str) else list(targets)
    if outer := sorted({name.rpartition(".")[2] for name in names} & set(_OUTER)):
        return f"vLLM serves no adapter on embeddings or the output head (target_modules names {', '.join(outer)})"
    return None


def save_servable(folder: Path, save: Callable[[Path], None]) -> None:
    """Have ``save`` write an adapter to ``folder``, which is made, and take out of it what no server needs.

    Raises:
        ConfigError: vLLM cannot serve such an adapter.
        ServerFailed: ``save`` wrote none.
        TrainingFailed: it cannot be written there.
    """
    from safetensors import SafetensorError

    try:
        folder.mkdir(parents=True)
        save(folder)
        make_servable(folder)
    except (OSError, SafetensorError) as error:
        raise TrainingFailed(
            f"the policy cannot be written to {str(folder)!r} for the vLLM server: "
            f"{getattr(error, 'strerror', None) or error}; make room there and see that it may be written to, or put "
            "the run's folder (output_dir) on another disk"
        ) from error


def save_empty(folder: Path, *, rank: int) -> None:
    """Write an adapter of ``rank`` without a tensor, which changes nothing: a server says of it what it takes."""
    from safetensors import serialize_file

    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    serialize_file({}, folder / "adapter_model.safetensors")


def make_servable(folder: Path) -> None:
    """Take out of a PEFT folder what no server needs.

    Raises:
        ConfigError: vLLM cannot serve such an adapter.
        ServerFailed: there is no adapter in it.
    """
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServerFailed(f"what was saved in {str(folder)!r} is no adapter: {error}") from error
    if reason := why_not_servable(config):
        raise ConfigError(f"{reason}; change the adapter, or sample without vLLM")
    file.write_text(json.dumps({k: v for k, v in config.items() if k not in _NOT_KEPT}), encoding="utf-8")
