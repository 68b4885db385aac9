"""``TrainConfig``: every key of a training run with its pinned default, checked before anything heavy is imported.

This module may not import torch, transformers, trl or peft; it only writes the keyword arguments for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from . import config_keys as keys
from . import config_values as values
from . import trainer_arguments
from .config_files import read_source
from .config_values import (
    Amount,
    Count,
    Decay,
    Integer,
    Place,
    Positive,
    Rate,
    Real,
    Scaling,
    Steps,
    Switch,
    Weight,
    Whole,
    read_dataset,
)
from .errors import ConfigError

_PROBLEMS_SHOWN = 30


class TrainConfig(BaseModel):
    """Everything that one training run is told; make it with ``TrainConfig.load``."""

    model_config = values.SETTINGS

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
    """Load the frozen weights in 4 bits (QLoRA)."""
    load_in_8bit: bool = False
    """Load the frozen weights in 8 bits."""
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
    layers_pattern: str | list[str] | None = None
    """Name of the module list that ``layers_to_transform`` counts in."""
    target_parameters: list[str] | None = None
    """Parameters (not modules) that get an adapter, such as fused experts."""
    init_lora_weights: Switch = True
    """How the adapter starts; true is a zero change."""

    dataset: Annotated[Any, BeforeValidator(read_dataset)] = None
    """Datasets to train on: a list of ``DatasetSpec``, a name or path, or rows in memory."""
    held_out: Amount = 0.2
    """Prompts kept back for the comparison: a share below 1, or a count."""
    held_out_seed: Whole = 0
    """Seed of that choice, apart from the training seed so that a rerun keeps back the same prompts."""
    reward_funcs: Any = None
    """Reward functions: ``module:function`` texts or callables, as given."""
    reward_weights: list[Real] | None = None
    """One weight for each reward function; by default all 1."""
    judge_funcs: Any = None
    """Reward functions that judge the held-out answers and are not trained on, given as ``reward_funcs`` are."""
    reward_timeout: Positive = 60.0
    """Seconds for one call of one reward with up to 64 completions; a call with more may take longer in proportion."""
    reward_retries: Annotated[Whole, Field(le=10)] = 1
    """How often a reward's call that failed is made again before it is made in smaller parts."""
    reward_failures: Annotated[Weight, Field(le=1)] = 0.2
    """Share of completions without a sound score, by any one reward, above which the run stops; a None is sound."""
    reward_concurrency: Annotated[Count, Field(le=1024)] = 8
    """Calls of async rewards and judges in flight at once."""
    reward_cache: bool = True
    """Keep scores on disk (``.praisonai/rl/reward_cache.sqlite``) where a reward gives the same to the same."""
    eval_samples: Annotated[Count, Field(le=64)] = 2
    """Answers to each held-out prompt: the first greedy, the others sampled at ``temperature``."""
    min_gain: Weight = 0.0
    """What the lower end of the interval of the gain must lie above for the new model to be swapped in."""
    guards: dict[str, Weight] = {}
    """Rewards or judges, by name, whose mean may not fall by more than this: ``{correctness: 0.02}``."""
    guard_limits: dict[str, Weight] = {}
    """Limits of drift that differ from the defaults (``guards.LIMITS``): ``{longer: 3.0, empty: 0.05}``."""
    watch: bool = True
    """Say during training what goes wrong, end it where nothing more is learned, and keep the best checkpoint."""
    watch_prompts: Amount | None = None
    """Training prompts put aside to watch with: a share below 1, or a count; by default a tenth, 8 to 24, of 80 up."""
    watch_steps: Count | None = None
    """Updates between two looks at them; by default ``save_steps``."""
    patience: Whole = 200
    """Updates without a better reward on them after which training ends; 0 never ends it."""

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
    rollout_timeout: Positive = 120.0
    """Seconds that an agent may take for one answer, tools included."""
    parity: Literal["stop", "allow"] = "stop"
    """Whether training starts where a recorded request is rendered otherwise than the serving side renders it."""
    warm_start: Whole = 0
    """Steps of supervised training on good recorded runs before the first GRPO step."""
    sampler: Literal["auto", "generate", "exact", "bfloat16", "int8", "vllm"] = "auto"
    """What draws completions: ``generate`` of transformers; on a CPU a faster loop, with the weights as they are
    (``exact``) or in fewer bits; or a ``vllm`` server that gets each policy as an adapter. ``auto`` is exact where that
    can be, else generate. Completions are weighted by the log-probabilities that they were drawn with where these are
    others."""
    vllm_server_base_url: str | None = None
    """The vLLM server of ``sampler: vllm`` (or of TRL's ``vllm_mode: server``); without it one is started here."""
    vllm_server_sees: str | None = None
    """Path by which that server sees the folder ``policies`` of the run, where it is another than here."""
    vllm_server_options: list[str] | None = None
    """Further arguments of ``vllm serve`` for the server that is started here."""
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
    gradient_checkpointing: bool | None = None
    """Compute activations twice to save memory; by default on a GPU only."""
    bf16: bool | None = None
    """Compute in bfloat16; by default on a GPU only."""
    fp16: bool | None = None
    """Compute in float16; by default not."""
    output_dir: Place | None = None
    """Folder of the run."""
    resume_from_checkpoint: Switch = False
    """Go on from the last checkpoint (true) or from the one at this path."""

    extra: dict[str, Any] = {}
    """Further fields of the trainer's configuration, under TRL's names."""
    notes: tuple[str, ...] = ()
    """What reading the configuration has to say to a person, one sentence each."""

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any] | None = None,
        *,
        overrides: Iterable[str] | None = None,
        need_model: bool = True,
        need_data: bool = True,
        **keywords: Any,
    ) -> TrainConfig:
        """Read a YAML file or a mapping; keywords win over ``KEY=VALUE`` overrides, and these over the source.

        An empty value stands for the default, and a keyword that is None counts as not given. Raises one
        ``ConfigError`` that lists every problem, one a line.
        """
        found = keys.Findings()
        given = keys.rename(read_source(source), found)
        given |= keys.rename(keys.parse_overrides(overrides or (), found), found)
        given |= keys.rename({key: value for key, value in keywords.items() if value is not None}, found)
        given = {key: value for key, value in given.items() if value is not None}
        method = keys.method_of(given, found)
        fields = cls.model_fields.keys() - {"extra", "notes"}
        declared, extra = keys.sort_keys({**given, "method": method}, fields, method, found)
        if need_model and not declared.get("model_name"):
            found.problems.append("model_name is missing; name the model to train: a hub name, a folder or a GGUF file")
        data = declared.get("dataset")
        if need_data and (data is None or (isinstance(data, (str, list, dict)) and not data)):
            found.problems.append("dataset is missing; list what to train on, each with a 'name' (hub name or file)")
        config = cls._checked(declared, extra, found)
        if found.problems:
            where = f"in {str(source)!r}:\n" if isinstance(source, (str, Path)) else ""
            more = len(found.problems) - _PROBLEMS_SHOWN
            rest = [f"... and {more} more"] if more > 0 else []
            raise ConfigError(where + "\n".join([*found.problems[:_PROBLEMS_SHOWN], *rest]))
        return config

    @classmethod
    def _checked(cls, declared: dict[str, Any], extra: dict[str, Any], found: keys.Findings) -> TrainConfig:
        """The typed configuration; faulty keys are reported and read on with their defaults, to find the rest too."""
        method = declared["method"]
        wrong: dict[str, str] = {}
        passing: dict[str, Any] = {}
        for key, value in extra.items():
            kind: Any = values.PASSING[keys.METHOD_FIELDS[method][key]]
            try:
                passing |= TypeAdapter(dict[str, kind]).validate_python({key: value})
            except ValidationError as error:
                wrong |= keys.plain_errors(error)
        full = {**keys.METHOD_DEFAULTS[method], **declared}
        try:
            config = cls(**full)
        except ValidationError as error:
            wrong |= keys.plain_errors(error)
            config = cls(**{key: value for key, value in full.items() if key not in wrong})
        config = config.model_copy(update={"extra": passing})
        adapted = values.adapt_defaults(config, declared.keys())
        notes = tuple(dict.fromkeys([*found.notes, *adapted.notes]))
        config = config.model_copy(update={**adapted.updates, "notes": notes})
        found.problems += wrong.values()
        found.problems += [line for names, line in values.conflicts(config) if not wrong.keys() & set(names)]
        return config

    @property
    def prompts_per_batch(self) -> int:
        """Distinct prompts in one generation batch of one process."""
        return values.generation_batch(dict(self)) // self.num_generations

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM draws completions, in the process that trains or as a server."""
        return self.fast_inference or self.sampler == "vllm"

    def check_prompt_count(self, count: int) -> None:
        """Raise ``ConfigError`` where ``count`` training prompts do not fill one generation batch."""
        if self.method == "grpo" and count < self.prompts_per_batch:
            # TRL 1.16 drops incomplete chunks (trl/trainer/utils.py, RepeatSampler), here all there are
            also = ", without steps_per_generation and generation_batch_size"
            raise ConfigError(
                f"{count} prompts to train on are fewer prompts than one generation batch needs "
                f"({self.prompts_per_batch}): TRL would train zero steps and call it success. Add prompts, keep fewer "
                f"back with held_out, or set per_device_train_batch_size to {self.num_generations} and "
                "gradient_accumulation_steps to 1 (one prompt a batch"
                f"{also if self.steps_per_generation or self.generation_batch_size else ''})"
            )

    def grpo_arguments(self, *, device: str) -> dict[str, Any]:
        """Keyword arguments for ``trl.GRPOConfig``, all but ``output_dir``; ``device`` is cpu, cuda, cuda:1 or mps."""
        return trainer_arguments.of_grpo(self, device)

    def preference_arguments(self, *, device: str) -> dict[str, Any]:
        """Keyword arguments for ``trl.RewardConfig`` or ``CPOConfig``, by method; all but ``output_dir``."""
        return trainer_arguments.of_preferences(self, device)

    def lora_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``peft.LoraConfig``."""
        return trainer_arguments.of_lora(self)

    def resolved(self) -> dict[str, Any]:
        """Every setting as plain JSON values; callables by ``repr``, data in memory by a description.

        ``TrainConfig.load`` reads it again, without a note, as long as nothing in it lived in memory.
        """
        idle = set() if self.uses_vllm else {"gpu_memory_utilization", "max_lora_rank"}
        hidden = {"extra", "notes", *keys.NOT_FOR[self.method], *idle}
        shown = {name: value for name, value in self if value is not None and name not in hidden}
        if "dataset" in shown and not isinstance(self.dataset, str) and not values.is_specs(self.dataset):
            rows = f" of {len(self.dataset)} rows" if isinstance(self.dataset, Sized) else ""
            shown["dataset"] = f"<{type(self.dataset).__name__}{rows} in memory>"
        plain: dict[str, Any] = json.loads(json.dumps({**shown, **self.extra}, default=values.as_plain))
        return plain

    def to_yaml(self) -> str:
        """``resolved`` as a YAML file, with the notes as comments at its top."""
        notes = "".join(f"# {note}\n" for note in self.notes)
        return notes + yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True)
