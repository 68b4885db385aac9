"""Keys of a training file: the optimiser, and what a run writes down."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from praison_agent_rl.config_values import (
    SETTINGS,
    Amount,
    Count,
    Decay,
    Integer,
    Place,
    Positive,
    Steps,
    Switch,
    Weight,
    Whole,
)


class OptimisingFields(BaseModel):
    """The optimiser, and what a run writes down."""

    model_config = SETTINGS

    # TRL's 1e-6 is for full finetuning; LoRA needs about ten times that and more ("LoRA Without Regret",
    # thinkingmachines.ai, 2025)
    learning_rate: Positive = 1e-4
    """Step size of the optimiser at its peak."""
    # constant: a run stopped early, or resumed with more steps, then equals one planned so
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
        "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
    ] = "constant"  # fmt: skip
    """How the step size changes over the run."""
    warmup_steps: Amount = 0
    """Steps over which the learning rate rises; below 1 it is a share of all steps."""
    per_device_train_batch_size: Count = 8
    """Completions in one micro-batch on one device."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches for one update."""
    max_steps: Annotated[Integer, Field(ge=-1, le=10**9)] = -1
    """Updates to make; -1 or 0 goes by ``num_train_epochs``."""
    num_train_epochs: Annotated[Positive, Field(le=10**6)] = 1.0
    """Passes over the training prompts (TRL: 3; one shows first whether it helps)."""
    optim: str = "adamw_torch"
    """Optimiser, by transformers' name (TRL: the fused one; this one is the same on every device)."""
    weight_decay: Weight = 0.0
    """Decay of the adapter's weights."""
    max_grad_norm: Weight = 1.0
    """Gradients longer than this are shortened; 0 leaves them."""
    adam_beta1: Decay = 0.9
    """Decay of Adam's mean."""
    adam_beta2: Decay = 0.999
    """Decay of Adam's variance."""
    adam_epsilon: Positive = 1e-8
    """Adam's guard against division by zero."""
    seed: Whole = 42
    """Seed of weights and sampling."""
    data_seed: Whole | None = None
    """Seed of the order of prompts; by default ``seed``."""

    curriculum: bool = True
    """From the second pass on, draw prompts less whose answers all scored the same, and others in their places."""
    logging_steps: Steps = 1
    """Updates between two log lines (TRL: 10; an RL run is judged by its curve, and a step costs seconds)."""
    save_steps: Steps = 25
    """Updates between two checkpoints (TRL: 500, more than most runs here have)."""
    save_total_limit: Whole = 2
    """Checkpoints kept (TRL: all); 0 keeps all."""
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    """When checkpoints are written."""
    report_to: str | list[str] = "none"
    """Services that get the metrics, such as ``wandb``; none unless asked for."""
    run_name: str | None = None
    """Name of the run in those services, and of a reward model."""
    gradient_checkpointing: bool | Literal["unsloth"] | None = None
    """Compute activations twice to save memory; by default on a GPU only. ``unsloth`` is Unsloth's own way."""
    bf16: bool | None = None
    """Compute in bfloat16; by default on a GPU only."""
    fp16: bool | None = None
    """Compute in float16; by default not."""
    output_dir: Place | None = None
    """Folder of the run."""
    resume_from_checkpoint: Switch = False
    """Go on from the last checkpoint (true) or from the one at this path."""
