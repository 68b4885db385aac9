"""Keys of a training file: how completions come about in training, and what the loss makes of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from praison_agent_rl.config_values import (
    SETTINGS,
    Count,
    Integer,
    Positive,
    Rate,
    Scaling,
    Seconds,
    Switch,
    Weight,
    Whole,
)
from praison_agent_rl.vllm_servers.addresses import as_written


class SamplingFields(BaseModel):
    """How completions come about in training, and what the loss makes of them."""

    model_config = SETTINGS

    num_generations: Annotated[Integer, Field(ge=2)] = 8
    """Completions sampled for one prompt and compared with each other."""
    max_completion_length: Count = 256
    """Length of a completion, in tokens (TRL: 512; sampling is most of a step's time)."""
    max_prompt_length: Count | None = None
    """Prompts longer than this, in tokens, are left out and counted."""
    max_length: Count | None = None
    """Longest pair of reward and CPO training, in tokens; by default ``max_seq_length``."""
    beta: Weight = 0.0
    """GRPO: weight of the KL penalty. CPO: temperature of the loss."""
    temperature: Positive = 1.0
    """Sampling temperature of the rollouts."""
    top_p: Rate = 1.0
    """Sample from the likeliest tokens that make up this share."""
    top_k: Whole = 0
    """Sample from this many likeliest tokens; 0 is all."""
    min_p: Annotated[Weight, Field(le=1)] | None = None
    """Leave out tokens less likely than this share of the likeliest one."""
    loss_type: str = "dapo"
    """Form of the loss (``config_keys.LOSS_TYPES``); pinned, since TRL changed its default (bnpo before 0.22)."""
    scale_rewards: Scaling = "group"
    """What a reward's advantage is divided by: the spread in its group, in the batch, or nothing."""
    epsilon: Positive = 0.2
    """Clip range of the policy ratio, downwards (and upwards without ``epsilon_high``)."""
    epsilon_high: Positive | None = None
    """Clip range upwards."""
    num_iterations: Count = 1
    """Updates made with one generation batch."""
    steps_per_generation: Count | None = None
    """Micro-batches sampled at once; by default ``gradient_accumulation_steps``."""
    generation_batch_size: Count | None = None
    """Completions sampled at once; the other way to say ``steps_per_generation``."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the length limit out of the loss."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Policy ratio for each token, or one for the sequence (GSPO)."""
    sync_ref_model: bool = False
    """Refused when true: a LoRA run has no reference model of its own."""
    fast_inference: bool = False
    """Sample rollouts with vLLM."""
    gpu_memory_utilization: Rate = 0.3
    """Share of the GPU's memory that vLLM may take."""
    max_lora_rank: Count | None = None
    """Highest adapter rank that vLLM makes room for."""

    rollout: Literal["auto", "direct", "tools", "agent"] = "auto"
    """How answers come about in training: ``direct``, one to each prompt; ``tools``, with TRL's loop that runs
    ``tools`` or ``environment``; ``agent``, the agent itself answers, with its tools, handoffs and retries. ``auto``
    looks at what was given, and says what it chose."""
    rollout_agent: str | None = None
    """The agent that answers in ``rollout: agent``, as ``module:name``; by default the one that is improved."""
    tools: str | list[str] | None = None
    """Tools of ``rollout: tools``, as ``module:function``."""
    environment: str | None = None
    """A class in TRL's ``environment_factory`` form, as ``module:Class``; its methods are the tools."""
    tools_for_training: dict[str, Any] | None = None
    """Stand-ins for the agent's tools while it is trained and measured, by the tool's name: ``module:function``."""
    run_tools: Switch | list[str] = False
    """Tools of the agent that really run in training: all (true), or by name; those marked ``pure`` always do."""
    train_agents: list[str] | None = None
    """Names of the agents whose answers are trained, of those that the agent hands over to; by default all that share
    its model."""
    credit: Literal["last", "all", "discounted"] = "all"
    """Which token sequences of a run get its advantage where the agent rewrote what was said: all, the last, or earlier
    ones by ``credit_discount`` less."""
    credit_discount: Rate = 0.9
    """Share of the advantage of the following sequence that one gets in ``credit: discounted``."""
    rollouts_at_once: Annotated[Count, Field(le=1024)] = 8
    """Copies of the agent that answer at a time."""
    rollout_timeout: Seconds = 120.0
    """Seconds that an agent may take for one answer, tools included; in ``rollout: tools``, that one call of a tool may
    take."""
    parity: Literal["stop", "allow"] = "stop"
    """Whether training starts where a recorded request is rendered otherwise than the serving side renders it."""
    warm_start: Whole = 0
    """Steps of supervised training on good recorded runs before the first GRPO step."""
    sampler: Literal["auto", "generate", "exact", "bfloat16", "int8", "vllm"] = "auto"
    """What draws completions: ``generate`` of transformers; on a CPU a faster loop, with the weights as they are
    (``exact``) or in fewer bits; or a ``vllm`` server that gets each policy as an adapter. ``auto`` is exact where that
    can be, else generate. Completions are weighted by the log-probabilities that they were drawn with where these are
    others."""
    vllm_server_base_url: Annotated[str | list[str] | None, BeforeValidator(as_written)] = None
    """The vLLM server of ``sampler: vllm`` (or of TRL's ``vllm_mode: server``), or a list of servers among which the
    prompts are divided; without it one is started here."""
    vllm_server_sees: str | None = None
    """Path by which those servers see the folder ``policies`` of the run, where it is another than here."""
    vllm_server_options: list[str] | None = None
    """Further arguments of ``vllm serve`` for the server that is started here."""

    @property
    def vllm_servers(self) -> list[str]:
        """Base URLs of the vLLM servers that run already."""
        named = self.vllm_server_base_url
        return ([named] if isinstance(named, str) else named) if named else []
