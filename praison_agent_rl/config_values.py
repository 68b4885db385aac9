"""What a value of a training file may be, and which values go together.

Each check says what clashes, why that would hurt, and what to write instead. Nothing here reads files or trains.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from praison_agent_rl.vllm_servers.adapters import why_not_servable
from praison_agent_rl.vllm_servers.addresses import faults_in

from . import config_batches
from . import config_keys as keys
from .config_batches import generation_batch as generation_batch  # config finds it here
from .peer_values import NO, YES
from .shown import shown
from .task_sets import is_task_set

if TYPE_CHECKING:
    from .config import TrainConfig

SEVEN_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""praisonai-train's default targets; PEFT takes ``layers_to_transform`` with a list of names only."""

_STARTS = ("gaussian", "orthogonal", "olora", "pissa")
_STARTS_REFUSED = ("eva", "corda", "loftq", "lora_ga", "mica")  # peft 0.21: they need data or a config of their own


def _number(value: Any) -> Any:
    """A number written as text becomes one (YAML 1.1 reads ``2e-4`` as text); true and false are no numbers."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a number")
    for parse in (int, float) if isinstance(value, str) else ():
        try:
            return parse(value)
        except ValueError:
            continue
    return value


def _switch(value: Any) -> Any:
    """True or false written as text becomes one, where other texts are meant as texts."""
    written = value.strip().lower() if isinstance(value, str) else ""
    return True if written in YES else False if written in NO else value


def _scaling(value: Any) -> Any:
    """TRL once took true and false for ``scale_rewards``, and still does."""
    written = str(value).lower() if isinstance(value, str | bool) else ""
    return {"true": "group", "false": "none"}.get(written, value)


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _place(value: Any) -> Any:
    return str(value) if isinstance(value, PurePath) else value


Integer = Annotated[int, BeforeValidator(_number)]
# numpy's largest seed; and no count of steps, rows or tokens is larger, but torch and transformers fail on such late
Whole = Annotated[Integer, Field(ge=0, le=2**32 - 1)]
Count = Annotated[Integer, Field(ge=1, le=10**9)]
Real = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Weight = Annotated[Real, Field(ge=0)]
Positive = Annotated[Real, Field(gt=0)]
# of what somebody waits for: eleven days, and no system's threads can wait for as long as 10**10
Seconds = Annotated[Positive, Field(le=10**6)]
Decay = Annotated[Real, Field(ge=0, lt=1)]
Rate = Annotated[Real, Field(gt=0, le=1)]
# a whole number stays one: 1 held-out prompt is not a share of 1.0
Amount = Whole | Weight
Steps = Count | Positive
Switch = Annotated[bool | str, BeforeValidator(_switch)]
Scaling = Annotated[Literal["group", "batch", "none"], BeforeValidator(_scaling)]
Place = Annotated[str, BeforeValidator(_place)]
# one text alone counts as a list of it
Texts = Annotated[list[str], BeforeValidator(_several)]

PASSING = {"bool": bool, "int": Integer, "float": Real, "str": str, "any": Any}
"""The type of each kind of key that passes through (``config_keys.GRPO_FIELDS``)."""

SETTINGS = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class DatasetSpec(BaseModel):
    """One dataset of a training file: a name on the hub, or local files, and what to take from it."""

    model_config = SETTINGS

    name: str | None = None
    """Dataset on the hub, path of a local file, or a task set such as ``reasoning_gym:chain_sum``."""
    subset: str | None = None
    """Configuration of a hub dataset, such as ``main``."""
    split: str = "train"
    """Split to read (praisonai-train calls it ``split_type``)."""
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    """Files to read instead of ``name``."""
    format: str | None = None
    """How the files are written, such as ``json`` or ``csv``; by default the file's ending says it."""
    rename: dict[str, str] | None = None
    """New name of each column to rename: ``old: new``."""
    filter_data: bool = False
    """Keep only the rows whose ``filter_column_value`` column equals ``filter_value``."""
    filter_column_value: str | None = None
    """The column to filter by."""
    filter_value: Any = None
    """The value of that column in rows to keep."""
    num_samples: Count | None = None
    """Rows to take from the front, before shuffling."""
    shuffle: bool = False
    """Shuffle the rows that were taken."""
    seed: Whole | None = None
    """Seed of that shuffle, and of the puzzles of a task set; by default the run's seed, and 0."""
    options: dict[str, Any] | None = None
    """Of a task set: ``size``, ``instruction`` and the task's own options, which may also stand beside the name."""


def is_specs(value: Any) -> bool:
    """Whether ``value`` names datasets rather than being one."""
    return isinstance(value, list) and all(isinstance(entry, DatasetSpec) for entry in value)


def as_plain(value: Any) -> Any:
    """What JSON can hold of a value that it cannot."""
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else repr(value)


def read_dataset(value: Any) -> Any:
    """Specifications of datasets become ``DatasetSpec``; rows, texts and other objects in memory stay as they are."""
    value = _place(value)
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        return value
    fields = {*DatasetSpec.model_fields, "split_type", "processing_func"}
    # rows of a dataset have these columns, and may well have one called name or seed too
    if any({"prompt", "chosen", "messages"} & set(entry) for entry in entries):
        return value
    if not any(fields & set(entry) for entry in entries):
        return value
    specs, problems = [], []
    for index, entry in enumerate(entries):
        # processing_func was never read by praisonai-train either; the columns say how a row is read
        kept = {k: v for k, v in entry.items() if v is not None and k not in ("split_type", "processing_func")}
        kept.setdefault("split", entry.get("split_type") or "train")
        if is_task_set(kept.get("name")):
            own = {key: kept.pop(key) for key in [*kept] if key not in fields}
            kept["options"] = {**kept.get("options", {}), **own}
        unknown = [key for key in kept if key not in fields]
        problems += [
            f"dataset[{index}]: unknown key {shown(key)}{keys.did_you_mean(key, sorted(fields))}" for key in unknown
        ]
        if not kept.get("name") and not kept.get("data_files"):
            problems.append(f"dataset[{index}] needs a name (on the hub, or a file's path) or data_files")
        try:
            specs.append(DatasetSpec(**{key: value for key, value in kept.items() if key in fields}))
        except ValidationError as error:
            problems += keys.plain_errors(error, prefix=f"dataset[{index}].").values()
    if problems:
        raise ValueError("\n".join(problems))
    return specs


class Adapted(NamedTuple):
    """Defaults moved so that they fit what was given, and what to say about it."""

    updates: dict[str, Any]
    """New value of each field that was not given."""
    notes: list[str]
    """One sentence for each."""


def adapt_defaults(config: TrainConfig, given: Collection[str]) -> Adapted:
    """Move defaults, never given values, where they would contradict a given value."""
    given = set(given)
    updates: dict[str, Any] = {}
    notes: list[str] = []
    if (by := config.layers_chosen_by) and "lora_target_modules" not in given:
        updates["lora_target_modules"] = list(SEVEN_PROJECTIONS)
        notes.append(f"`lora_target_modules` is the seven usual projections, since {by} needs names.")
    if config.warmup_steps and "lr_scheduler_type" not in given:
        updates["lr_scheduler_type"] = "constant_with_warmup"
        notes.append("`lr_scheduler_type` is constant_with_warmup, since constant would ignore warmup_steps.")
    elif config.warmup_steps and config.lr_scheduler_type == "constant":
        notes.append("`warmup_steps` does nothing with lr_scheduler_type constant; constant_with_warmup uses it.")
    if config.held_out == 0:
        notes.append("`held_out` is 0, so no prompts are left to compare the trained model with the base on.")
    if not config.uses_vllm and given & {"gpu_memory_utilization", "max_lora_rank"}:
        notes.append(
            "`gpu_memory_utilization` and `max_lora_rank` do nothing without fast_inference or `sampler: vllm`."
        )
    notes += _idle_server_keys(config, given)
    notes += idle_rollout_keys(config).values()
    if config.method != "grpo":
        return Adapted(updates, notes)
    if config.max_completion_length >= config.max_seq_length > 1 and "max_completion_length" not in given:
        updates["max_completion_length"] = config.max_seq_length // 2
        notes.append(f"`max_completion_length` is {config.max_seq_length // 2}, half of max_seq_length.")
    batch = config_batches.fit_batch({key: getattr(config, key) for key in config_batches.KEYS}, given)
    updates.update(batch)
    notes += [f"`{key}` is {value}, so that a generation batch holds whole groups." for key, value in batch.items()]
    return Adapted(updates, notes)


def _idle_server_keys(config: TrainConfig, given: Collection[str]) -> list[str]:
    if config.method != "grpo" or config.sampler == "vllm":
        return []
    keys_of_server = {"vllm_server_base_url", "vllm_server_sees", "vllm_server_options"}
    if config.extra.get("vllm_mode") == "server":
        keys_of_server.remove("vllm_server_base_url")  # TRL's own server
    return [f"`{name}` does nothing without `sampler: vllm`." for name in sorted(keys_of_server & set(given))]


_ROUNDS = "max_tool_calling_iterations"
_OF_TOOLS = ("tools", "environment", _ROUNDS)
_OF_AGENT = (
    *("rollout_agent", "tools_for_training", "run_tools", "train_agents"),
    *("credit", "credit_discount", "rollouts_at_once"),
)
_IDLE = {"direct": (*_OF_TOOLS, *_OF_AGENT, "rollout_timeout"), "tools": _OF_AGENT, "agent": _OF_TOOLS}
"""Keys that do nothing, by the rollout; which one it is may not be known before the agent is looked at."""


def idle_rollout_keys(config: TrainConfig) -> dict[str, str]:
    """Keys that were given and that the rollout has no use for, each with the note that says so."""
    if config.method != "grpo":
        return {}
    acts = bool(config.tools or config.environment)
    mode = "tools" if config.rollout == "auto" and acts else config.rollout
    idle = [name for name in _IDLE.get(mode, (_ROUNDS,)) if _is_given(config, name)]
    if config.warm_start and "rollout_agent" in idle:
        idle.remove("rollout_agent")  # its recorded runs are what it starts from
    alone = {_ROUNDS: "without `tools` or `environment`"} if not acts else {}
    return {name: f"`{name}` does nothing {alone.get(name, f'with `rollout: {mode}`')}." for name in idle}


def _is_given(config: TrainConfig, name: str) -> bool:
    """By its value: of a configuration that is read again every key was given."""
    known = type(config).model_fields.get(name)
    return name in config.extra if known is None else bool(getattr(config, name) != known.default)


def conflicts(config: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Values that cannot stand together: the keys that take part, and a line that says what to do."""
    c = config
    if c.load_in_4bit and c.load_in_8bit:
        yield ("load_in_4bit", "load_in_8bit"), "load_in_4bit and load_in_8bit are both true; keep one of them"
    if c.bf16 and c.fp16:
        yield ("bf16", "fp16"), "bf16 and fp16 are both true; keep one of them (bf16 on an Ampere GPU or newer)"
    if isinstance(c.held_out, float) and c.held_out >= 1:
        yield (
            ("held_out",),
            f"held_out is {c.held_out!r}, but must be a share from 0 up to, not including, 1, "
            "or a whole number of prompts",
        )
    if isinstance(c.watch_prompts, float) and c.watch_prompts >= 1:
        yield (
            ("watch_prompts",),
            f"watch_prompts is {c.watch_prompts!r}, but must be a share from 0 up to, not including, 1, or a whole "
            "number of prompts",
        )
    if isinstance(c.warmup_steps, float) and c.warmup_steps >= 1 and not c.warmup_steps.is_integer():
        yield ("warmup_steps",), f"warmup_steps is {c.warmup_steps!r}; write a whole number, or a share below 1"
    if (by := c.layers_chosen_by) and isinstance(c.lora_target_modules, str):
        yield (
            (by, "lora_target_modules"),
            f"{by} needs lora_target_modules as a list of names, not {c.lora_target_modules!r}",
        )
    if c.layers_to_transform is not None and c.finetune_last_n_layers is not None:
        yield (
            ("layers_to_transform", "finetune_last_n_layers"),
            "layers_to_transform and finetune_last_n_layers both say which layers get an adapter; keep one of them",
        )
    if c.layers_pattern and not c.layers_chosen_by:
        yield ("layers_pattern", "layers_to_transform"), "layers_pattern needs layers_to_transform; add it"
    if c.method != "reward" and c.loss_type not in keys.LOSS_TYPES[c.method]:
        choices = keys.listed(keys.LOSS_TYPES[c.method])
        yield ("loss_type", "method"), f"loss_type is {c.loss_type!r}, but must be one of {choices}"
    yield from _unknown_names(c)
    for key, value in c.extra.items():
        if key in keys.EXTRA_CHOICES and value not in keys.EXTRA_CHOICES[key]:
            yield (key,), f"{key} is {shown(value)}, but must be one of {keys.listed(keys.EXTRA_CHOICES[key])}"
    if c.method == "grpo":
        yield from _grpo_conflicts(c)


def _unknown_names(c: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Values of the libraries' own that they look at late, after the model was loaded."""
    if c.optim not in keys.OPTIMIZERS:
        near = keys.did_you_mean(c.optim, keys.OPTIMIZERS)
        yield ("optim",), f"optim is {shown(c.optim)}, which is no optimiser of transformers (adamw_torch is){near}"
    services = [c.report_to] if isinstance(c.report_to, str) else c.report_to
    for name in services:
        if name not in ("none", "all", *keys.TRACKERS):
            choices = keys.listed(["none", "all", *keys.TRACKERS])
            yield ("report_to",), f"report_to is {shown(name)}, but must be one of {choices}"
    start = c.init_lora_weights
    if isinstance(start, str) and start not in _STARTS and not re.fullmatch(r"pissa_niter_[1-9]\d{0,3}", start):
        why = f"{start} needs a calibration of its own, which is not offered; " if start in _STARTS_REFUSED else ""
        yield (
            ("init_lora_weights",),
            f"init_lora_weights is {shown(start)}, but must be true, false, {', '.join(map(repr, _STARTS))} or "
            f"'pissa_niter_<number>'; {why}true starts with a zero change",
        )
    if not c.lora_target_modules and not c.target_parameters:
        yield (
            ("lora_target_modules",),
            f"lora_target_modules is {c.lora_target_modules!r}, so nothing would be trained; name layers, or leave it "
            "out (all-linear)",
        )


def _grpo_conflicts(c: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    if c.max_completion_length >= c.max_seq_length:
        yield (
            ("max_completion_length", "max_seq_length"),
            f"max_completion_length {c.max_completion_length} leaves no room for a prompt in max_seq_length "
            f"{c.max_seq_length}; lower the first or raise the second",
        )
    names = c.reward_funcs
    if isinstance(names, (list, tuple)) and c.reward_weights and len(c.reward_weights) != len(names):
        yield (
            ("reward_weights", "reward_funcs"),
            f"reward_weights has {len(c.reward_weights)} values for {len(names)} reward_funcs; give one for each",
        )
    if c.sync_ref_model:
        yield (
            ("sync_ref_model",),
            "sync_ref_model is true, but nothing can be synchronised: with beta 0 there is no reference model, and "
            "with LoRA the reference is the model without its adapter; remove the key",
        )
    if c.extra.get("auto_find_batch_size"):
        yield (
            ("auto_find_batch_size",),
            "auto_find_batch_size would break prompt groups; remove it and lower per_device_train_batch_size",
        )
    if c.fast_inference and c.sampler not in ("auto", "generate"):
        yield (
            ("fast_inference", "sampler"),
            f"fast_inference samples with vLLM in the process that trains, and sampler {c.sampler!r} otherwise; keep "
            "one of them",
        )
    yield from ((("vllm_server_base_url",), fault) for fault in faults_in(c.vllm_servers))
    if len(c.vllm_servers) > 1 and c.extra.get("vllm_mode") == "server":
        yield (
            ("vllm_server_base_url", "vllm_mode"),
            f"vllm_server_base_url names {len(c.vllm_servers)} servers, and TRL's own way to a vLLM server (vllm_mode: "
            "server) takes one; name one, or give sampler: vllm in place of vllm_mode, which divides the prompts among "
            "all",
        )
    if c.sampler == "vllm":
        yield from _server_conflicts(c)
    if c.uses_vllm and c.max_lora_rank is not None and c.max_lora_rank < c.lora_r:
        yield (
            ("max_lora_rank", "lora_r", "fast_inference"),
            f"max_lora_rank {c.max_lora_rank} is below lora_r {c.lora_r}, so vLLM would refuse the adapter; raise it",
        )
    yield from config_batches.conflicts(c)


def _server_conflicts(c: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    if c.vllm_servers and c.vllm_server_options:
        yield (
            ("vllm_server_base_url", "vllm_server_options"),
            "vllm_server_options are for a server that is started here, and vllm_server_base_url names what runs "
            "already; keep one of them",
        )
    if c.vllm_server_sees and not c.vllm_servers:
        yield (
            ("vllm_server_sees",),
            "vllm_server_sees is for a server that runs elsewhere; give its vllm_server_base_url too, or remove it",
        )
    if c.extra.get("generation_kwargs"):
        yield (
            ("generation_kwargs", "sampler"),
            "generation_kwargs are for generate of transformers, and a vLLM server is not told them; remove them, or "
            "sampler",
        )
    if reason := why_not_servable(c.lora_arguments()):
        yield ("sampler",), f"sampler 'vllm' cannot serve the adapter: {reason}; change the adapter, or remove sampler"
