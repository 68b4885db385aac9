"""What a configuration says in the words of TRL and PEFT: the keyword arguments of their configurations.

This module may not import torch, transformers, trl or peft.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from . import config_keys as keys

if TYPE_CHECKING:
    from .config import TrainConfig

logger = logging.getLogger(__name__)

_TOOL_ROUNDS = 8
"""Rounds of tool calls in an answer of ``rollout: tools``, where ``max_tool_calling_iterations`` is not given."""


def of_grpo(config: TrainConfig, device: str) -> dict[str, Any]:
    """Keyword arguments for ``trl.GRPOConfig``, all but ``output_dir``; ``device`` is cpu, cuda, cuda:1 or mps."""
    arguments = _common(config, keys.GRPO_FIELDS, device)
    # rewards read any column; dropout would make the policy that samples another one than the one that is scored
    arguments |= {"remove_unused_columns": False, "disable_dropout": True}
    if config.fast_inference:
        arguments |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": config.max_seq_length}
        arguments["vllm_gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.extra.get("vllm_mode") != "server":
        arguments.pop("vllm_server_base_url", None)  # of the servers that this package draws from
    if config.tools or config.environment:
        arguments["max_tool_calling_iterations"] = _TOOL_ROUNDS  # without one TRL goes on for ever
    return {**arguments, **config.extra}


def of_preferences(config: TrainConfig, device: str) -> dict[str, Any]:
    """Keyword arguments for ``trl.RewardConfig`` or ``CPOConfig``, by method; all but ``output_dir``."""
    own = {"beta", "loss_type"} if config.method == "cpo" else set()
    arguments = _common(config, {*keys.TRAINING_FIELDS, "trust_remote_code", *own}, device)
    return {**arguments, "max_length": config.max_length or config.max_seq_length, **config.extra}


def _common(config: TrainConfig, fields: Collection[str], device: str) -> dict[str, Any]:
    on_cpu = device == "cpu" or bool(config.extra.get("use_cpu"))
    on_cuda = device.startswith("cuda") and not on_cpu
    if config.fp16 and on_cpu:
        logger.warning("fp16 is left out: a CPU cannot train in float16")
    fp16 = bool(config.fp16) and not on_cpu
    elsewhere = {"output_dir", "resume_from_checkpoint", "max_steps"}  # resuming is an argument of train()
    named = [name for name in type(config).model_fields if name in fields and name not in elsewhere]
    arguments = {name: getattr(config, name) for name in named if getattr(config, name) is not None}
    return {
        **arguments,
        "max_steps": config.max_steps or -1,
        "use_cpu": on_cpu,
        "fp16": fp16,
        "bf16": (on_cuda or needs_bfloat16(config)) and not fp16 if config.bf16 is None else config.bf16,
        # TRL's default True costs a fifth of the speed, and memory is not what a CPU lacks
        "gradient_checkpointing": bool(checkpointing(config, "cpu" if on_cpu else device)),
        # the filter shows the last good loss in place of NaN, and so hides a diverged run
        "logging_nan_inf_filter": False,
    }


def needs_bfloat16(config: TrainConfig) -> bool:
    """Whether a step fails without autocast: TRL makes what is trained beside rounded weights bfloat16.

    An adapter converts what it is given, and a score head does not (trl/trainer/reward_trainer.py, peft#2889).
    """
    return config.method == "reward" and (config.load_in_4bit or config.load_in_8bit)


def checkpointing(config: TrainConfig, device: str) -> bool | Literal["unsloth"]:
    """Whether activations are computed twice; ``unsloth`` is that back end's own way, and for others just true."""
    given = config.gradient_checkpointing
    return device.startswith("cuda") if given is None else given


def of_lora(config: TrainConfig, *, layers: int | None = None) -> dict[str, Any]:
    """Keyword arguments for ``peft.LoraConfig`` on a model of so many ``layers``, by which the last are counted."""
    same = (
        "lora_alpha lora_dropout use_rslora use_dora modules_to_save rank_pattern alpha_pattern "
        "layers_to_transform layers_pattern target_parameters init_lora_weights"
    )
    arguments = {name: getattr(config, name) for name in same.split() if getattr(config, name) is not None}
    if config.finetune_last_n_layers is not None and layers is not None:
        arguments["layers_to_transform"] = [*range(max(0, layers - config.finetune_last_n_layers), layers)]
    return {
        "r": config.lora_r,
        "bias": config.lora_bias,
        "target_modules": config.lora_target_modules,
        # with any other task type the score head of a reward model would stay untrained, without a word
        "task_type": "SEQ_CLS" if config.method == "reward" else "CAUSAL_LM",
        **arguments,
    }
