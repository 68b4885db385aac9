"""Keys of a training file: which model is trained, and what of it: the adapter."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from praison_agent_rl.config_values import SETTINGS, Count, Decay, Place, Switch, Whole


class ModelFields(BaseModel):
    """Which model is trained, and what of it: the adapter."""

    model_config = SETTINGS

    method: Literal["grpo", "reward", "cpo"] = "grpo"
    """What is trained: a policy by rewards (grpo), a reward model (reward), or a policy by preferences (cpo)."""
    model_name: Place | None = None
    """Model on the hub, or path of a folder or GGUF file."""
    revision: str | None = None
    """Commit, tag or branch of the model on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Number format of the frozen weights; ``auto`` is decided by the device."""
    max_seq_length: Count = 2048
    """Prompt and completion together, in tokens."""
    load_in_4bit: bool = False
    """Train on weights in 4 bits (QLoRA); what is merged, measured and served has them as they are stored."""
    load_in_8bit: bool = False
    """The same in 8 bits."""
    chat_template: str | None = None
    """Path or text of a chat template that replaces the model's own; one line without a brace is a path, or
    ``chatml_tools``, which is for ChatML models whose own has no tools."""

    lora_r: Count = 16
    """Rank of the adapter."""
    lora_alpha: Count = 16
    """Scale of the adapter: its output is multiplied by alpha / r."""
    # TRL samples rollouts in train mode, so dropout would make the sampled policy another one than the trained one
    lora_dropout: Decay = 0.0
    """Share of adapter inputs dropped in training."""
    lora_bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained."""
    lora_target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter, by name."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv 2312.03732)."""
    use_dora: bool = False
    """Train magnitude and direction apart (arXiv 2402.09353)."""
    modules_to_save: list[str] | None = None
    """Modules trained in full and kept beside the adapter."""
    rank_pattern: dict[str, Count] | None = None
    """Rank for layers whose name matches, where it differs from ``lora_r``."""
    alpha_pattern: dict[str, Count] | None = None
    """Alpha for layers whose name matches, where it differs from ``lora_alpha``."""
    layers_to_transform: Whole | list[Whole] | None = None
    """Numbers of the layers that get an adapter; by default all."""
    finetune_last_n_layers: Count | None = None
    """How many layers get an adapter, counted from the last; the other way to say ``layers_to_transform``."""
    layers_pattern: str | list[str] | None = None
    """Name of the module list that ``layers_to_transform`` counts in."""
    target_parameters: list[str] | None = None
    """Parameters (not modules) that get an adapter, such as fused experts."""
    init_lora_weights: Switch = True
    """How the adapter starts; true is a zero change."""

    @property
    def layers_chosen_by(self) -> str | None:
        """The key that chooses among the layers; None where all of them get an adapter."""
        keys = ("layers_to_transform", "finetune_last_n_layers")
        return next((key for key in keys if getattr(self, key) is not None), None)
