"""The keys of a training file: what each is called now, and which mean nothing here.

Only names and text live here. What a value may be, and which values contradict each other, is said in ``config``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from .peer_values import translate
from .shown import shown

METHODS = ("grpo", "reward", "cpo")
"""The training methods of this package."""

OTHER_METHODS = ("sft", "cpt", "dpo", "orpo", "kto")
"""Methods that praisonai-train 0.1.16 has and this package has not."""

SAID = {"grpo": "GRPO", "reward": "a reward model", "cpo": "CPO"}
"""Each method as a note calls it."""


def _kinds(**names: str) -> dict[str, str]:
    return {name: kind for kind, text in names.items() for name in text.split()}


TRAINING_FIELDS = _kinds(
    any="""accelerator_config activation_checkpointing_kwargs debug deepspeed eval_strategy fsdp_config
        gradient_checkpointing_kwargs hub_strategy include_for_metrics include_num_input_tokens_seen label_names
        liger_kernel_config logging_strategy lr_scheduler_kwargs lr_scheduler_type optim optim_target_modules
        parallelism_config report_to save_strategy trackio_static_space_id""",
    bool="""activation_checkpointing auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16
        bf16_full_eval dataloader_drop_last dataloader_in_order dataloader_persistent_workers dataloader_pin_memory
        ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph disable_tqdm do_eval do_predict do_train
        enable_jit_checkpoint eval_do_concat_batches eval_on_start eval_use_gather_object fp16 fp16_full_eval
        full_determinism gradient_checkpointing greater_is_better hub_always_push hub_private_repo ignore_data_skip
        load_best_model_at_end log_on_each_node logging_first_step logging_nan_inf_filter prediction_loss_only
        push_to_hub remove_unused_columns restore_callback_states_from_checkpoint save_on_each_node save_only_model
        skip_memory_metrics tf32 torch_compile use_cache use_cpu use_liger_kernel""",
    float="""adam_beta1 adam_beta2 adam_epsilon eval_delay eval_steps label_smoothing_factor learning_rate
        logging_steps max_grad_norm neftune_noise_alpha num_train_epochs save_steps warmup_steps weight_decay""",
    int="""data_seed dataloader_num_workers dataloader_prefetch_factor ddp_bucket_cap_mb ddp_timeout
        eval_accumulation_steps gradient_accumulation_steps local_rank max_steps per_device_eval_batch_size
        per_device_train_batch_size save_total_limit seed torch_empty_cache_steps""",
    str="""dataloader_multiprocessing_context ddp_backend fsdp hub_model_id hub_revision hub_token
        length_column_name log_level log_level_replica metric_for_best_model optim_args output_dir project
        resume_from_checkpoint run_name torch_compile_backend torch_compile_mode trackio_bucket_id trackio_space_id
        train_sampling_strategy""",
)
"""Field and kind of transformers 5.24 ``TrainingArguments``; pinned by a contract test."""

GRPO_OWN_FIELDS = _kinds(
    any="""chat_template_kwargs generation_kwargs model_init_kwargs pad_to_multiple_of reward_weights
        transformers_continuous_batching_config""",
    bool="""cast_lm_head_to_fp32 disable_dropout ds3_gather_for_generation log_completions log_multimodal
        log_unique_prompts mask_truncated_completions shuffle_dataset sync_ref_model trust_remote_code
        use_adaptive_entropy use_bias_correction_kl use_transformers_continuous_batching use_transformers_paged
        use_vllm vllm_enable_sleep_mode vllm_importance_sampling_correction""",
    float="""beta delta entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon
        epsilon_high min_p off_policy_mask_threshold ref_model_mixup_alpha repetition_penalty router_aux_loss_coef
        sapo_temperature_neg sapo_temperature_pos temperature top_entropy_quantile top_p vespo_k_neg vespo_k_pos
        vespo_lambda_neg vespo_lambda_pos vllm_gpu_memory_utilization vllm_importance_sampling_cap
        vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_server_timeout""",
    int="""generation_batch_size max_completion_length max_tool_calling_iterations num_completions_to_print
        num_generations num_generations_eval num_iterations ref_model_sync_steps steps_per_generation top_k
        vllm_group_port vllm_max_model_length vllm_server_port vllm_tensor_parallel_size""",
    str="""cache_implementation importance_sampling_level log_completions_hub_repo loss_type
        multi_objective_aggregation scale_rewards vllm_importance_sampling_mode vllm_mode vllm_model_impl
        vllm_server_base_url vllm_server_host vllm_structured_outputs_regex""",
)
"""Field and kind that TRL 1.16 ``GRPOConfig`` adds to ``TrainingArguments``; pinned by a contract test."""

GRPO_FIELDS = {**TRAINING_FIELDS, **GRPO_OWN_FIELDS}
"""Every field of TRL 1.16 ``GRPOConfig`` with its kind: bool, int, float, str or any."""

_REWARD_OWN = _kinds(float="center_rewards_coefficient", bool="activation_offloading disable_dropout", any="eos_token")
_CPO_OWN = _kinds(float="label_smoothing cpo_alpha simpo_gamma alpha", bool="disable_dropout")

METHOD_FIELDS = {
    "grpo": GRPO_FIELDS,
    "reward": {**TRAINING_FIELDS, **_REWARD_OWN},
    "cpo": {**TRAINING_FIELDS, **_CPO_OWN},
}
"""What may pass through to the trainer's configuration under its own name, by method."""

_OF_ANSWERS = _kinds(
    key="""reward_funcs reward_weights max_completion_length temperature reward_timeout reward_retries reward_failures
        reward_concurrency reward_cache"""
).keys()
"""How held-out answers are asked for and scored, whatever the policy was trained by."""
_OF_GRPO = _kinds(
    key="""max_prompt_length fast_inference gpu_memory_utilization max_lora_rank sampler vllm_server_sees
        vllm_server_options curriculum watch watch_prompts watch_steps patience rollout rollout_agent tools environment
        tools_for_training run_tools train_agents credit credit_discount rollouts_at_once rollout_timeout parity
        warm_start"""
).keys()
NOT_FOR = {
    "grpo": frozenset({"max_length"}),
    "cpo": (GRPO_OWN_FIELDS.keys() | _OF_GRPO)
    - _OF_ANSWERS
    - {"beta", "loss_type", "trust_remote_code", "disable_dropout"},
    "reward": (GRPO_OWN_FIELDS.keys() | _OF_GRPO | _OF_ANSWERS) - {"trust_remote_code", "disable_dropout"},
}
"""Keys that are known and have no meaning for the method."""

METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "reward": {},
    # TRL's CPO values (beta 0.1, sigmoid); its learning rate 1e-6 is for full finetuning, LoRA needs ten times that
    "cpo": {"beta": 0.1, "loss_type": "sigmoid", "learning_rate": 1e-5},
}
"""Defaults of a method where they differ from those written in ``TrainConfig``."""

LOSS_TYPES = {
    "grpo": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "reward": (),
    "cpo": ("sigmoid", "hinge", "ipo", "simpo", "alphapo"),
}
"""The values of ``loss_type``, by method (TRL 1.16 finds a wrong one only after the first generation)."""

EXTRA_CHOICES = {
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
}
"""Allowed values of keys that pass through, where TRL looks at them late or never."""

OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor", "adamw_anyprecision",
    "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad", "adamw_bnb_8bit", "adamw_8bit",
    "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
    "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo", "grokadamw",
    "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise",
    "stable_adamw",
)  # fmt: skip
"""The values of ``optim``: transformers 5.24 ``OptimizerNames``; pinned by a contract test."""

OPTIMIZER_PACKAGES = {
    "adamw_torch_4bit": "torchao", "adamw_torch_8bit": "torchao", "galore": "galore_torch", "apollo": "apollo_torch",
    "lomo": "lomo_optim", "grokadamw": "grokadamw", "schedule_free": "schedulefree", "stable_adamw": "optimi",
    "anyprecision": "torchdistx", "npu": "torch_npu", "xla": "torch_xla", "8bit": "bitsandbytes",
    "paged": "bitsandbytes", "bnb": "bitsandbytes", "lion": "bitsandbytes", "ademamix": "bitsandbytes",
}  # fmt: skip
"""Package that an optimiser with this in its name needs, the first that fits."""

TRACKERS = {
    "azure_ml": "azureml", "comet_ml": "comet_ml", "mlflow": "mlflow", "neptune": "neptune",
    "tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb", "codecarbon": "codecarbon",
    "clearml": "clearml", "dagshub": "dagshub", "flyte": "flytekit", "dvclive": "dvclive", "swanlab": "swanlab",
    "kubeflow": "kubeflow",
}  # fmt: skip
"""The services of ``report_to`` and the package that each needs; pinned by a contract test."""

RENAMED = {
    "model": "model_name",
    "base_model": "model_name",
    "val_split_ratio": "held_out",
    "kl_coef": "beta",
    "warmup_ratio": "warmup_steps",
    "random_state": "seed",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "no_cuda": "use_cpu",
    "use_liger_loss": "use_liger_kernel",
    "use_vllm": "fast_inference",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "evaluation_strategy": "eval_strategy",
    "hub_model_id": "hf_model_name",
    "hub_private_repo": "hf_private",
}
"""Old or foreign name to the name here (TRL removals: facts of 0.16 to 1.16; praisonai-train 0.1.16; Unsloth)."""

_WHY_NOT = {
    "checkpoints stay on this machine, what is pushed is the result (huggingface_save)": """push_to_hub hub_strategy
        hub_always_push hub_revision""",
    "it is the tag of ollama_model, which gives none or has one already": "model_parameters",
    "the adapter is in the run's folder, as adapter": "final_model_dir",
    "weights are always written as safetensors": "save_safetensors",
    "a token does not belong in a file, the one in the environment variable HF_TOKEN is used": "hf_token hub_token",
    "it has no meaning for {method}": """train_on_responses_only assistant_only_loss packing dataset_text_field
        embedding_learning_rate desirable_weight undesirable_weight mtp_draft mtp_draft_repo mtp_draft_file
        spec_draft_n_max""",
    "train always trains": "train do_train do_predict",
    "base and trained model are compared on held-out prompts after the training": """eval_strategy eval_steps do_eval
        eval_delay eval_on_start eval_accumulation_steps per_device_eval_batch_size num_generations_eval""",
    "GRPO keeps the best checkpoint, and ends where nothing more is learned, by watch and patience": """
        load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience
        early_stopping_threshold""",
    "a LoRA adapter is trained, never all weights": "full_finetuning",
    "LoftQ initialisation is not offered": "loftq_config",
    "the method decides it, and a reward model gives one number": "num_labels task_type",
    "the trainer orders whole prompt groups itself": "group_by_length",
    "rewards may need every column, so all are kept": "remove_unused_columns",
    "rows are prepared in one process": "dataset_num_proc",
    "dtype, revision and load_in_4bit say how the model is loaded": "model_init_kwargs",
    "the launcher sets it": "local_rank",
    "the tokenizer is the one that comes with model_name": "tokenizer processing_class",
    "TRL has no such option any more": "vllm_device vllm_dtype ref_model_init_kwargs logging_dir overwrite_output_dir",
}

WITHOUT_MEANING = {key: reason for reason, keys in _WHY_NOT.items() for key in keys.split()}
"""Keys that are understood and left out, each with the reason that is said aloud."""

_BY_NAME = ("guards", "guard_limits", "rank_pattern", "alpha_pattern")  # mappings whose entry is told by its key
_MOST_OF_A_KEY = 10
_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "text",
    "list": "a list",
    "dict": "a mapping",
}

_HINTS = {
    "num_generations": "GRPO compares the completions of one prompt with each other, so it needs 2 or more",
    "temperature": "at 0 all completions of a prompt are equal, and nothing is learned from them",
    "beta": "it weighs a penalty (0 switches it off); below 0 it would reward drifting away",
    "held_out": "a share from 0 up to, not including, 1, or a whole number of prompts",
}


@dataclass
class Findings:
    """What reading a configuration brought up: sentences to say aloud, and problems that stop the run."""

    notes: list[str] = field(default_factory=list)
    """Plain sentences for a person, one each."""
    problems: list[str] = field(default_factory=list)
    """One line for each thing to put right."""


class Sorted(NamedTuple):
    """Keys of a configuration by where they go."""

    declared: dict[str, Any]
    """Fields of ``TrainConfig``."""
    extra: dict[str, Any]
    """Fields of the trainer's own configuration."""


def parse_overrides(overrides: Iterable[str], findings: Findings) -> dict[str, Any]:
    """``KEY=VALUE`` texts as a mapping; each value is read as YAML reads it."""
    parsed: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            findings.problems.append(f"override {shown(text)} is not KEY=VALUE; write for example learning_rate=2e-4")
        elif "." in key:
            findings.problems.append(f"override {shown(text)} has a dotted key; a key within a key belongs in the file")
        else:
            try:
                parsed[key] = yaml.safe_load(value)
            except (yaml.YAMLError, ValueError):
                findings.problems.append(f"override {shown(text)} has a value that YAML cannot read; quote it")
    return parsed


def rename(layer: Mapping[Any, Any], findings: Findings) -> dict[Any, Any]:
    """One source's keys under the names used here; a name used here wins over an older one beside it."""
    passed_on = layer.get("training_arguments")
    if passed_on is not None and not isinstance(passed_on, Mapping):
        findings.problems.append(f"training_arguments is {shown(passed_on)}, but must be a mapping of keys and values")
    # praisonai-train lets training_arguments win over the keys beside it
    layer = {**layer, **(passed_on if isinstance(passed_on, Mapping) else {})}
    renamed = {key: value for key, value in layer.items() if key not in RENAMED and key != "training_arguments"}
    for old, new in RENAMED.items():
        value = layer.get(old)
        if value is None:
            continue
        # warmup_steps: 0 beside a ratio meant "use the ratio" while TrainingArguments still had both
        if renamed.get(new) is not None and not (old == "warmup_ratio" and renamed[new] == 0):
            findings.notes.append(f"`{old}` is left out, because `{new}` is given too.")
            continue
        if old == "warmup_ratio" and isinstance(value, (int, float)) and not 0 <= value < 1:
            findings.problems.append(
                f"warmup_ratio is {shown(value)}, but must be a share of all steps, from 0 to below 1"
            )
        renamed[new] = value
        findings.notes.append(f"`{old}` is called `{new}` here.")
    return renamed


def sort_keys(given: Mapping[Any, Any], fields: Collection[str], method: str, findings: Findings) -> Sorted:
    """Send each key to where it belongs; name those without meaning aloud, and unknown ones as problems."""
    result = Sorted({}, {})
    for key, value in translate(given, findings.notes).items():
        if key in WITHOUT_MEANING:
            reason = WITHOUT_MEANING[key].format(method=SAID[method])
            findings.notes.append(
                f"`{key}` has no meaning for {SAID[method]}; left out."
                if reason.startswith("it has no meaning")
                else f"`{key}` is left out: {reason}."
            )
        elif key in NOT_FOR[method] or (key not in fields and _belongs_elsewhere(key, method)):
            findings.notes.append(f"`{key}` has no meaning for {SAID[method]}; left out.")
        elif key in fields:
            result.declared[key] = value
        elif key in METHOD_FIELDS[method]:
            result.extra[key] = value
        else:
            known = sorted({*fields, *RENAMED, *WITHOUT_MEANING, *METHOD_FIELDS[method]})
            findings.problems.append(f"unknown key {shown(key)}{did_you_mean(key, known)}")
    return result


def _belongs_elsewhere(key: Any, method: str) -> bool:
    return key not in METHOD_FIELDS[method] and any(key in names for names in METHOD_FIELDS.values())


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """The end of an error line that names the nearest known word, if one is near."""
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else "; remove it, or check its spelling"


def method_of(given: Mapping[Any, Any], findings: Findings) -> str:
    """The method asked for; where it is not one of ours, a problem is noted and GRPO is assumed to read on."""
    named = given.get("method") or "grpo"
    method = named.strip().lower() if isinstance(named, str) else ""
    if method in METHODS:
        return method
    theirs = f" ({method!r} is one of praisonai-train's)" if method in OTHER_METHODS else ""
    findings.problems.append(f"method is {shown(given['method'])}, but must be one of {listed(METHODS)}{theirs}")
    return "grpo"


def listed(choices: Iterable[str]) -> str:
    """Values as an error line lists them."""
    *first, last = [repr(choice) for choice in choices]
    return f"{', '.join(first)} or {last}" if first else last


def plain_errors(
    error: ValidationError, prefix: str = "", *, nested: Mapping[str, Collection[str]] | None = None
) -> dict[str, str]:
    """Plain lines for each faulty key, instead of pydantic's dump; ``nested`` are the keys within keys."""
    lines: dict[str, dict[str, str]] = {}
    wanted: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        key, *within = detail["loc"]
        own = (nested or {}).get(str(key))
        name = str(key) + _entry(key, within, own)
        of_key = lines.setdefault(str(key), {})
        if detail["type"] == "value_error":  # raised by a validator of ours, whose text stands alone
            of_key[name] = str(detail["ctx"]["error"])
        elif detail["type"] == "extra_forbidden":
            of_key[name] = f"unknown key {shown(name)}{did_you_mean(within[-1], own or ())}"
        elif detail["type"] == "missing":
            of_key[name] = f"{name} is missing; add it"
        else:
            wanted.setdefault(name, []).append(_wanted(dict(detail)))
            place = prefix + name + "".join(f"[{part}]" for part in within if isinstance(part, int))
            hint = f" ({_HINTS[name]})" if name in _HINTS else ""
            choices = " or ".join(dict.fromkeys(wanted[name]))
            of_key[name] = f"{place} is {shown(detail['input'])}, but must be {choices}{hint}"
    return {key: "\n".join(_first(list(of_key.values()), key)) for key, of_key in lines.items()}


def _first(lines: list[str], key: str) -> list[str]:
    more = len(lines) - _MOST_OF_A_KEY
    return [*lines[:_MOST_OF_A_KEY], f"... and {more} more within {key}"] if more > 0 else lines


def _entry(key: int | str, within: Sequence[int | str], own: Collection[str] | None) -> str:
    """Which entry of a mapping is faulty: a dot and a key of its ``own``, or a name in brackets."""
    first = within[0] if within else None  # what follows may also be pydantic's name for one of several types
    if own is not None and isinstance(first, str):
        return f".{first}"
    return f"[{first}]" if key in _BY_NAME and isinstance(first, str) else ""


def _wanted(detail: dict[str, Any]) -> str:
    """What one pydantic error asks for, as the end of "must be ..."."""
    if detail["type"] == "literal_error":
        choices = str(detail["ctx"]["expected"])
        return f"one of {choices}" if " or " in choices else choices
    if detail["type"] == "string_pattern_mismatch":
        return f"text that matches {detail['ctx']['pattern']}"
    return _EXPECTED.get(detail["type"].split("_")[0]) or detail["msg"].replace("Input should be ", "").split(",")[0]
