"""A training file becomes one checked configuration, or one error that lists everything to put right."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest
import yaml

from praison_agent_rl import config_keys
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_values import DatasetSpec
from praison_agent_rl.errors import ConfigError
from tests.praisonai_train import KEYS, SHIPPED, value_of

QUICK_START = """\
# config.yaml
method: grpo
model_name: "unsloth/gemma-2-2b-it-bnb-4bit"
max_seq_length: 2048
reward_funcs:
  - myproject.rewards:length_penalty
num_generations: 8
dataset:
  - name: "your-org/your-prompts"
    split: "train"
"""


def load(**keywords: object) -> TrainConfig:
    return TrainConfig.load({}, need_model=False, need_data=False, **keywords)


def problems(**keywords: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(**keywords)
    return str(caught.value).splitlines()


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- reading -------------------------------------------------------------------------------------------------------


def test_the_quick_start_file_loads_verbatim_and_without_a_note(tmp_path):
    config = TrainConfig.load(written(tmp_path, QUICK_START))
    assert config.model_name == "unsloth/gemma-2-2b-it-bnb-4bit"
    assert config.reward_funcs == ["myproject.rewards:length_penalty"]
    assert config.dataset == [DatasetSpec(name="your-org/your-prompts", split="train")]
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps, config.num_generations) == (8, 1, 8)
    assert config.notes == ()


def test_importing_the_config_loads_no_heavy_stack():
    code = (
        "import sys, praison_agent_rl.config; "
        "print([m for m in ('torch', 'trl', 'transformers', 'peft', 'datasets', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_keywords_win_over_overrides_and_overrides_over_the_file(tmp_path):
    path = written(tmp_path, QUICK_START + "seed: 1\nlora_r: 4\ntemperature: 0.7\n")
    config = TrainConfig.load(path, overrides=["lora_r=8", "seed=2"], seed=3)
    assert (config.temperature, config.lora_r, config.seed) == (0.7, 8, 3)


def test_an_override_by_an_old_name_still_wins_over_the_file(tmp_path):
    path = written(tmp_path, QUICK_START + "beta: 0.5\n")
    assert TrainConfig.load(path, overrides=["kl_coef=0.25"]).beta == 0.25


def test_a_keyword_that_is_none_leaves_the_file_as_it_is():
    assert TrainConfig.load({"model_name": "m", "dataset": "d", "seed": 7}, seed=None).seed == 7


def test_an_override_may_set_a_structure_or_clear_a_value():
    source = {"model_name": "m", "dataset": "d", "max_prompt_length": 5}
    config = TrainConfig.load(source, overrides=["lora_target_modules=[q_proj, v_proj]", "max_prompt_length="])
    assert config.lora_target_modules == ["q_proj", "v_proj"] and config.max_prompt_length is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learning_rate", "is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("dataset.name=x", "dotted key"),
        ("lora_r=[1", "YAML cannot read"),
        ("lora_rr=1", "unknown key 'lora_rr'; did you mean 'lora_r'?"),
    ],
)
def test_an_override_that_cannot_be_used_is_named(override, said):
    (line,) = problems(overrides=[override])
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method: grpo\n  lora_r: 3\n", ["config.yaml", "line 2, column 9"]),
        ("a: [1\n", ["config.yaml", "line 2, column 1"]),
        ("- method: grpo\n", ["config.yaml", "holds a list at its top"]),
        ("just text\n", ["config.yaml", "holds a str at its top"]),
        ("seed: 1\nlora_r: 2\nseed: 3\n", ["config.yaml", "the key 'seed' twice", "line 3, column 1"]),
        ("dataset:\n  - name: a\n    name: b\n", ["the key 'name' twice", "line 3, column 5"]),
        ("x: !!python/object/apply:os.getcwd []\n", ["config.yaml", "python/object/apply:os.getcwd"]),
        ("x: 2024-13-45\n", ["config.yaml", "month must be in 1..12"]),
    ],
)
def test_a_file_that_is_not_a_sound_mapping_is_named_with_the_place(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(written(tmp_path, text))
    assert all(fragment in str(caught.value) for fragment in said)


def test_a_missing_file_a_folder_and_a_binary_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file '.*gone\.yaml'"):
        TrainConfig.load(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        TrainConfig.load(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="binary' cannot be read as YAML"):
        TrainConfig.load(tmp_path / "binary")


def test_anchors_and_merge_keys_are_no_duplicates(tmp_path):
    text = QUICK_START + "rank_pattern: &a {q_proj: 4}\nalpha_pattern:\n  <<: *a\n  q_proj: 8\n"
    assert TrainConfig.load(written(tmp_path, text)).alpha_pattern == {"q_proj": 8}


def test_an_empty_file_lacks_its_model_and_its_dataset(tmp_path):
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(written(tmp_path, ""))
    assert "model_name is missing" in str(caught.value) and "dataset is missing" in str(caught.value)
    with pytest.raises(ConfigError, match="dataset is missing"):
        TrainConfig.load({"model_name": "m", "dataset": []})
    assert TrainConfig.load(need_model=False, need_data=False).method == "grpo"


# --- values --------------------------------------------------------------------------------------------------------


def test_numbers_and_switches_written_as_text_count_as_such(tmp_path):
    text = QUICK_START + (
        "learning_rate: 2e-4\nmax_steps: '50'\nload_in_4bit: 'true'\nuse_dora: \"false\"\n"
        "delta: 1e1\nlog_completions: 'true'\nresume_from_checkpoint: 'true'\nsave_steps: '1e2'\n"
    )
    config = TrainConfig.load(written(tmp_path, text))
    assert (config.learning_rate, config.max_steps, config.save_steps) == (0.0002, 50, 100)
    assert (config.load_in_4bit, config.use_dora, config.resume_from_checkpoint) == (True, False, True)
    assert config.extra == {"delta": 10.0, "log_completions": True}


def test_a_checkpoint_path_and_a_model_path_stay_paths():
    config = load(resume_from_checkpoint="out/checkpoint-50", model_name=Path("models/tiny"), output_dir=Path("out"))
    assert (config.resume_from_checkpoint, config.model_name) == ("out/checkpoint-50", str(Path("models/tiny")))
    assert config.output_dir == "out"


def test_an_empty_value_stands_for_the_default():
    config = TrainConfig.load({"model_name": "m", "dataset": "d", "lora_r": None, "report_to": None})
    assert (config.lora_r, config.report_to) == (16, "none")


@pytest.mark.parametrize(("value", "meant"), [(True, "group"), (False, "none"), ("false", "none"), ("batch", "batch")])
def test_scale_rewards_is_also_a_switch(value, meant):
    assert load(scale_rewards=value).scale_rewards == meant


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_generations", 1, "num_generations is 1, but must be greater than or equal to 2"),
        ("num_generations", 0, "num_generations is 0, but must be greater than or equal to 2"),
        ("num_generations", True, "num_generations is True, but must be a number"),
        ("num_generations", 4.5, "num_generations is 4.5, but must be a whole number"),
        ("temperature", 0, "temperature is 0, but must be greater than 0"),
        ("temperature", float("nan"), "temperature is nan, but must be a finite number"),
        ("max_completion_length", 0, "max_completion_length is 0"),
        ("loss_type", "ppo", "loss_type is 'ppo', but must be one of 'grpo', 'dr_grpo', 'dapo', 'bnpo', 'cispo'"),
        ("scale_rewards", "sometimes", "one of 'group', 'batch' or 'none'"),
        ("importance_sampling_level", "word", "one of 'token' or 'sequence'"),
        ("vllm_mode", "zzz", "vllm_mode is 'zzz', but must be one of 'colocate' or 'server'"),
        ("multi_objective_aggregation", "sum", "one of 'sum_then_normalize' or 'normalize_then_sum'"),
        ("beta", -0.1, "beta is -0.1, but must be greater than or equal to 0"),
        ("top_p", 0, "top_p is 0, but must be greater than 0"),
        ("top_p", 1.1, "top_p is 1.1, but must be less than or equal to 1"),
        ("learning_rate", 0, "learning_rate is 0, but must be greater than 0"),
        ("lora_r", 0, "lora_r is 0, but must be greater than or equal to 1"),
        ("lora_dropout", 1, "lora_dropout is 1, but must be less than 1"),
        ("held_out", -1, "held_out is -1"),
        ("held_out", 1.0, "held_out is 1.0, but must be a share"),
        ("held_out", 2.5, "held_out is 2.5, but must be a share"),
        ("watch_prompts", 1.5, "watch_prompts is 1.5, but must be a share"),
        ("watch_prompts", -1, "watch_prompts is -1"),
        ("watch_steps", 0, "watch_steps is 0"),
        ("patience", -5, "patience is -5"),
        ("load_in_4bit", "perhaps", "load_in_4bit is 'perhaps', but must be true or false"),
        ("run_name", 2024, "run_name is 2024, but must be text"),
        ("lora_target_modules", 3, "lora_target_modules is 3, but must be text or a list"),
        ("reward_weights", [1, "x"], "reward_weights[1] is 'x', but must be a number"),
        ("delta", "wide", "delta is 'wide', but must be a number"),
        ("sync_ref_model", True, "sync_ref_model is true, but nothing can be synchronised"),
        ("auto_find_batch_size", True, "auto_find_batch_size would break prompt groups"),
        ("warmup_steps", 2.5, "warmup_steps is 2.5"),
        ("warmup_ratio", 5, "warmup_ratio is 5, but must be a share"),
        ("layers_pattern", "layers", "layers_pattern needs layers_to_transform"),
        ("training_arguments", [1], "training_arguments is [1], but must be a mapping"),
        ("max_steps", 10**20, "max_steps is 100000000000000000000, but must be less than or equal to 1000000000"),
        ("num_train_epochs", 1e300, "num_train_epochs is 1e+300, but must be less than or equal to 1000000"),
        ("lora_r", 10**12, "lora_r is 1000000000000, but must be less than"),
        ("seed", 2**32, "seed is 4294967296, but must be less than or equal to 4294967295"),
        ("optim", "nonsense", "optim is 'nonsense', which is no optimiser"),
        ("optim", "adamw_torc", "did you mean 'adamw_torch'?"),
        ("report_to", "wandbb", "report_to is 'wandbb', but must be one of 'none', 'all', 'azure_ml'"),
        ("report_to", ["wandb", "x"], "report_to is 'x', but must be one of"),
        ("init_lora_weights", "nonsense", "init_lora_weights is 'nonsense', but must be true, false, 'gaussian'"),
        ("init_lora_weights", "pissa_niter_x", "init_lora_weights is 'pissa_niter_x'"),
        ("init_lora_weights", "eva", "eva needs a calibration of its own, which is not offered"),
        ("lora_target_modules", [], "lora_target_modules is [], so nothing would be trained"),
        ("lora_target_modules", "", "lora_target_modules is '', so nothing would be trained"),
        ("method", "dpo", "method is 'dpo', but must be one of 'grpo', 'reward' or 'cpo'"),
        ("min_gain", -0.1, "min_gain is -0.1, but must be greater than or equal to 0"),
        ("min_gain", "nan", "min_gain is 'nan', but must be a finite number"),
        ("eval_samples", 0, "eval_samples is 0, but must be greater than or equal to 1"),
        ("guards", ["correctness"], "guards is ['correctness'], but must be a mapping"),
        ("guards", {"correctness": -1}, "guards[correctness] is -1, but must be greater than or equal to 0"),
        ("guard_limits", {"longer": "two"}, "guard_limits[longer] is 'two', but must be a number"),
    ],
)
def test_a_wrong_value_is_one_plain_line(key, value, said):
    (line,) = problems(**{key: value})
    assert said in line


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"max_completion_length": 2048}, "leaves no room for a prompt"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit and load_in_8bit are both true"),
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
        ({"reward_funcs": ["a:b", "a:c"], "reward_weights": [1.0]}, "1 values for 2 reward_funcs"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "say the same thing"),
        ({"layers_to_transform": [0], "lora_target_modules": "all-linear"}, "as a list of names, not 'all-linear'"),
        ({"fast_inference": True, "max_lora_rank": 8}, "max_lora_rank 8 is below lora_r 16"),
    ],
)
def test_values_that_cannot_stand_together_are_one_line(keywords, said):
    (line,) = problems(**keywords)
    assert said in line


SECONDS = [name for name, field in TrainConfig.model_fields.items() if str(field.description).startswith("Seconds")]


@pytest.mark.parametrize("name", SECONDS)
def test_what_somebody_waits_for_is_no_longer_than_a_thread_can_wait(name):
    assert {"reward_timeout", "rollout_timeout"} <= set(SECONDS)
    for longer in (1e12, 1_000_001, "1e300"):
        (line,) = problems(**{name: longer})
        assert line.startswith(f"{name} is") and line.endswith("must be less than or equal to 1000000")
    (line,) = problems(**{name: float("inf")})
    assert f"{name} is inf, but must be a finite number" in line
    assert getattr(load(**{name: 1e6}), name) == 1e6 < threading.TIMEOUT_MAX


OF_AGENT = {
    "rollout_agent": "mine:helper",
    "tools_for_training": {"book": "mine:pretend"},
    "run_tools": True,
    "train_agents": ["helper"],
    "credit": "last",
    "credit_discount": 0.5,
    "rollouts_at_once": 2,
}
OF_TOOLS = {"tools": ["mine:size_of"], "environment": "mine:Game", "max_tool_calling_iterations": 3}


@pytest.mark.parametrize(
    ("rollout", "idle"),
    [
        ("direct", {**OF_TOOLS, **OF_AGENT, "rollout_timeout": 5.0}),
        ("tools", OF_AGENT),
        ("agent", OF_TOOLS),
    ],
)
def test_each_key_that_a_rollout_has_no_use_for_is_said(rollout, idle):
    given = {**OF_TOOLS, **OF_AGENT, "rollout_timeout": 5.0, "rollout": rollout}
    config = load(**given)
    assert sorted(config.notes) == sorted(f"`{key}` does nothing with `rollout: {rollout}`." for key in idle)
    assert load(rollout=rollout, **{key: given[key] for key in given.keys() - idle.keys() - {"rollout"}}).notes == ()


def test_keys_of_a_rollout_are_said_to_do_nothing_where_it_is_known_and_not_before():
    assert load(**OF_AGENT, rollout_timeout=5.0).notes == ()  # it depends on the agent
    (note,) = load(max_tool_calling_iterations=3).notes
    assert note == "`max_tool_calling_iterations` does nothing without `tools` or `environment`."
    assert load(tools="mine:size_of", credit="last").notes == ("`credit` does nothing with `rollout: tools`.",)
    assert load(rollout="direct", rollout_agent="mine:helper", warm_start=3).notes == ()
    again = load(**{**load(rollout="direct").resolved(), "model_name": None})
    assert again.rollout == "direct" and again.notes == ()


def test_a_file_with_three_different_faults_lists_all_three(tmp_path):
    path = written(tmp_path, QUICK_START + "learnin_rate: 1\nmax_steps: many\nload_in_4bit: true\nload_in_8bit: true\n")
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path)
    place, *lines = str(caught.value).splitlines()
    assert "config.yaml" in place
    assert lines == [
        "unknown key 'learnin_rate'; did you mean 'learning_rate'?",
        "max_steps is 'many', but must be a whole number",
        "load_in_4bit and load_in_8bit are both true; keep one of them",
    ]


def test_a_faulty_value_is_not_blamed_twice():
    assert len(problems(max_seq_length="long", max_completion_length=4096)) == 1
    assert len(problems(num_generations=0, per_device_train_batch_size=3, gradient_accumulation_steps=1)) == 1


BOMB = ["x"] * 9
for _ in range(12):  # 9 ** 13 items, as a few lines of YAML with anchors make them
    BOMB = [BOMB] * 9


@pytest.mark.parametrize("value", [BOMB, {"a": BOMB}, "x" * 100_000, {str(n): n for n in range(10_000)}])
@pytest.mark.parametrize(
    "key",
    [
        "learning_rate",
        "lora_target_modules",
        "reward_weights",
        "training_arguments",
        "report_to",
        "optim",
        "method",
        "scale_rewards",
    ],
)
def test_a_value_of_any_size_is_shown_in_a_few_words(key, value):
    if key == "optim" and not isinstance(value, str):
        key = "run_name"
    if key == "lora_target_modules" and isinstance(value, str):
        return  # a regular expression of any length may be meant
    lines = problems(**{key: value})
    assert all(len(line) < 500 for line in lines) and len(lines) <= 31


@pytest.mark.parametrize("value", [BOMB, {"a": BOMB}, "x" * 100_000, {str(n): -n for n in range(3_000)}, 10**300])
@pytest.mark.parametrize(
    "key",
    [
        *(
            "train",
            "push_to_hub",
            "model_parameters",
            "ollama_model",
            "chat_template",
            "save_method",
            "tags",
            "hf_token",
        ),
        *("quantization_method", "huggingface_save", "hf_model_name", "num_train_epochs", "launch", "remote", "guards"),
        "rank_pattern",
    ],
)
def test_a_value_of_any_size_is_read_in_a_few_words_too(key, value):
    try:
        lines = load(**{"ollama_model": "m", key: value}).notes
    except ConfigError as error:
        lines = tuple(str(error).splitlines())
    assert all(len(line) < 700 for line in lines) and len(lines) <= 31


def test_an_unknown_key_of_any_length_is_shown_in_a_few_words():
    (line,) = problems(**{"k" * 100_000: 1})
    assert line.startswith("unknown key 'kkk") and len(line) < 300


# --- names ---------------------------------------------------------------------------------------------------------


def told(key: str, config: TrainConfig) -> bool:
    """Whether a note speaks of the key, alone or with its value."""
    return any(f"`{key}`" in note or f"`{key}:" in note for note in config.notes)


def test_every_key_of_praisonai_train_is_used_or_named_aloud():
    together = {*KEYS} - {"finetune_last_n_layers"}  # contradicts layers_to_transform, which is told
    config = TrainConfig.load({key: value_of(key) for key in KEYS if key in together})
    used = set(config.resolved())
    assert {key for key in together if key not in used and not told(key, config)} == {"training_arguments"}
    assert config.extra["torch_compile"] is True


@pytest.mark.parametrize("method", ["grpo", "reward", "cpo"])
@pytest.mark.parametrize("key", sorted({*KEYS} - {"method", "training_arguments"}))
def test_each_key_of_praisonai_train_loads_alone_or_says_what_it_needs(key, method):
    needed = {"load_in_4bit": False, "max_seq_length": 2048, "hf_model_name": "me/model", "ollama_model": "me/model"}
    if key == "layers_pattern":
        needed["layers_to_transform"] = [0]
    if key in ("num_generations", "per_device_train_batch_size"):
        needed |= {"num_generations": 2, "per_device_train_batch_size": 2}
    config = TrainConfig.load({**needed, "method": method, key: value_of(key)}, need_model=False, need_data=False)
    assert key in config.resolved() or told(key, config)


def test_the_file_that_praisonai_train_ships_loads_with_each_key_meant_or_told(tmp_path):
    config = TrainConfig.load(written(tmp_path, SHIPPED + "method: grpo\nreward_funcs: [a:b]\n"))
    assert (config.num_generations, config.prompts_per_batch, config.seed) == (4, 1, 3407)
    assert (config.huggingface_save, config.ollama_save, config.hf_private) == (True, True, True)
    assert config.ollama_model == "mervinpraison/llama3.1-tamilan-test:8b"
    assert (config.quantization_method, config.gradient_checkpointing) == ("q4_k_m", "unsloth")
    assert config.notes == (
        "`random_state` is left out, because `seed` is given too.",
        "`use_gradient_checkpointing` is called `gradient_checkpointing` here.",
        "`model_parameters` is the tag of `ollama_model` here: mervinpraison/llama3.1-tamilan-test:8b.",
        "`dataset[0].processing_func` is left out: the columns say how a row is read.",
        "`train` is left out: train always trains.",
        "`dataset_text_field` has no meaning for GRPO; left out.",
        "`dataset_num_proc` is left out: rows are prepared in one process.",
        "`packing` has no meaning for GRPO; left out.",
        "`num_generations` is 4, so that a generation batch holds whole groups.",
    )
    again = TrainConfig.load(written(tmp_path, config.to_yaml()))
    assert again.resolved() == config.resolved() and again.notes == ()


# --- what is published ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant", "said"),
    [
        ({"save_method": "merged_16bit"}, {"save_method": "merged"}, "is called merged here"),
        ({"save_method": "merged_4bit"}, {"save_method": "merged"}, "in full precision"),
        ({"save_method": "lora"}, {"save_method": "lora"}, ""),
        ({"quantization_method": "Q8_0"}, {"quantization_method": "q8_0"}, ""),
        ({"quantization_method": ["q4_k_m"]}, {"quantization_method": "q4_k_m"}, ""),
        ({"quantization_method": ["q4_k_m", "q8_0"]}, {"quantization_method": ["q4_k_m", "q8_0"]}, ""),
        ({"quantization_method": ["fast_quantized"]}, {"quantization_method": "q8_0"}, "is q8_0 here"),
        ({"quantization_method": "not_quantized"}, {"quantization_method": "f16"}, "is f16 here"),
        ({"tags": "math"}, {"tags": ["math"]}, ""),
        ({"hub_model_id": "me/m"}, {"hf_model_name": "me/m"}, "`hub_model_id` is called `hf_model_name` here"),
        ({"hub_private_repo": "false"}, {"hf_private": False}, "`hub_private_repo` is called `hf_private` here"),
        ({"ollama_model": "me/m", "model_parameters": 8}, {"ollama_model": "me/m:8"}, "is the tag of `ollama_model`"),
        ({"ollama_model": "me/m:1b", "model_parameters": "8b"}, {"ollama_model": "me/m:1b"}, "or has one already"),
        ({"model_parameters": "8b"}, {"ollama_model": None}, "is left out: it is the tag of ollama_model"),
        (
            {"push_to_hub": "true", "hub_model_id": "me/m"},
            {"huggingface_save": True, "save_method": "lora", "hf_model_name": "me/m"},
            "`push_to_hub` is `huggingface_save` with `save_method: lora` here",
        ),
        (
            {"push_to_hub": True, "huggingface_save": "yes", "hf_model_name": "me/m"},
            {"huggingface_save": True, "save_method": "merged"},
            "`push_to_hub` is left out: checkpoints stay on this machine",
        ),
        ({"push_to_hub": "false"}, {"huggingface_save": False}, "`push_to_hub` is left out"),
        ({"chat_template": "llama-3.1"}, {"chat_template": None}, "it names a template of Unsloth's"),
        ({"chat_template": "./gemma"}, {"chat_template": "./gemma"}, ""),
        ({"train": "false"}, {}, "`train` is false, but this command trains"),
        ({"num_train_epochs": 0, "max_steps": 5}, {"num_train_epochs": 1.0}, "counts as not given"),
        ({"use_gradient_checkpointing": "True"}, {"gradient_checkpointing": True}, "is called"),
        ({"resume_from_checkpoint": "yes"}, {"resume_from_checkpoint": True}, ""),
        ({"resume_from_checkpoint": "0"}, {"resume_from_checkpoint": False}, ""),
    ],
)
def test_a_value_of_praisonai_train_means_here_what_it_means_there(given, meant, said):
    config = load(**given)
    assert {key: getattr(config, key) for key in meant} == meant
    assert (said in " ".join(config.notes)) if said else config.notes == ()
    assert load(**config.resolved()).resolved() == config.resolved()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"save_method": "torchao"}, "save_method is 'torchao', but must be one of 'merged' or 'lora'"),
        ({"huggingface_save": "perhaps"}, "huggingface_save is 'perhaps', but must be true or false"),
        ({"hf_private": "perhaps"}, "hf_private is 'perhaps', but must be true or false"),
        ({"tags": 3}, "tags is 3, but must be a list"),
        ({"gradient_checkpointing": "some"}, "but must be true or false or 'unsloth'"),
    ],
)
def test_a_value_of_publishing_that_cannot_be_meant_is_refused(keywords, said):
    (line,) = problems(**keywords)
    assert said in line


# --- keys within keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "lines"),
    [
        ({"launch": "many"}, ["launch.nproc is 'many', but must be a whole number"]),
        ({"launch": {"nproc": 0}}, ["launch.nproc is 0, but must be greater than or equal to 1"]),
        ({"launch": {"nproc": "x", "node": 2}}, [
            "launch.nproc is 'x', but must be a whole number",
            "unknown key 'launch.node'; did you mean 'nodes'?",
        ]),
        ({"remote": {"port": "x"}}, [
            "remote.host is missing; add it", "remote.port is 'x', but must be a whole number"
        ]),
        ({"remote": {"host": "a", "env": ["A", "b c"]}}, [
            r"remote.env[1] is 'b c', but must be text that matches ^[A-Za-z_]\w*$"
        ]),
        ({"remote": {"host": "a", "prot": 22}}, ["unknown key 'remote.prot'; did you mean 'port'?"]),
        ({"guards": {"a": -1, "b": "x"}}, [
            "guards[a] is -1, but must be greater than or equal to 0",
            "guards[b] is 'x', but must be a number",
        ]),
        ({"rank_pattern": {"q_proj": 0}}, ["rank_pattern[q_proj] is 0, but must be greater than or equal to 1"]),
    ],
)  # fmt: skip
def test_a_fault_within_a_mapping_is_told_by_the_whole_name(keywords, lines):
    assert problems(**keywords) == lines


def test_a_number_alone_says_how_many_processes_and_a_text_alone_which_machine():
    assert load(launch="2").launch.nproc == 2
    assert load(remote="gpubox").remote.host == "gpubox"


@pytest.mark.parametrize(
    ("old", "value", "new", "kept"),
    [
        ("model", "m", "model_name", "m"),
        ("base_model", "m", "model_name", "m"),
        ("kl_coef", 0.1, "beta", 0.1),
        ("val_split_ratio", 0.05, "held_out", 0.05),
        ("warmup_ratio", 0.03, "warmup_steps", 0.03),
        ("random_state", 3407, "seed", 3407),
        ("use_gradient_checkpointing", "unsloth", "gradient_checkpointing", "unsloth"),
        ("use_vllm", True, "fast_inference", True),
    ],
)
def test_a_renamed_key_is_used_and_said(old, value, new, kept):
    config = load(**{old: value})
    assert getattr(config, new) == kept
    assert f"`{old}` is called `{new}` here." in config.notes


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("no_cuda", True, "use_cpu"),
        ("use_liger_loss", True, "use_liger_kernel"),
        ("vllm_guided_decoding_regex", "a+", "vllm_structured_outputs_regex"),
        ("wandb_log_unique_prompts", True, "log_unique_prompts"),
    ],
)
def test_a_renamed_key_of_trl_passes_through_under_its_new_name(old, value, new):
    assert load(**{old: value}).extra == {new: value}


def test_the_present_name_wins_over_an_old_one_beside_it():
    config = load(random_state=1, seed=2)
    assert config.seed == 2 and config.notes == ("`random_state` is left out, because `seed` is given too.",)
    assert load(warmup_steps=0, warmup_ratio=0.1).warmup_steps == 0.1


def test_a_key_without_meaning_is_left_out_aloud():
    assert load(train_on_responses_only=True).notes == ("`train_on_responses_only` has no meaning for GRPO; left out.",)
    assert "`tokenizer` is left out: the tokenizer is the one that comes with model_name." in load(tokenizer="t").notes
    assert load(evaluation_strategy="steps").extra == {}


@pytest.mark.parametrize("key", ["hf_token", "hub_token"])
def test_a_token_never_reaches_the_resolved_config_or_the_notes(key):
    for given in ({key: "hf_secret"}, {"training_arguments": {key: "hf_secret"}}):
        config = load(**given)
        assert "hf_secret" not in config.to_yaml() + repr(config)
        told = "a token does not belong in a file, the one in the environment variable HF_TOKEN is used"
        assert config.notes == (f"`{key}` is left out: {told}.",)


def test_a_token_beside_a_fault_is_not_shown(tmp_path):
    for fault in ("lora_r: many\n", "lora_rr: 1\n", "hf_tokn: hf_other_secret\n"):
        with pytest.raises(ConfigError) as caught:
            TrainConfig.load(written(tmp_path, QUICK_START + "hf_token: hf_secret\n" + fault))
        assert "secret" not in str(caught.value)


def test_keys_of_grpo_have_no_meaning_for_a_reward_model_or_cpo():
    config = load(method="reward", num_generations=3, beta=0.1, reward_funcs="a:b", center_rewards_coefficient=0.01)
    assert config.notes == tuple(
        f"`{key}` has no meaning for a reward model; left out." for key in ("num_generations", "beta", "reward_funcs")
    )
    assert config.extra == {"center_rewards_coefficient": 0.01}
    config = load(method="CPO", num_generations=3, cpo_alpha=0.5)
    assert (config.method, config.beta, config.loss_type, config.learning_rate) == ("cpo", 0.1, "sigmoid", 1e-5)
    assert config.extra == {"cpo_alpha": 0.5} and len(config.notes) == 1
    assert load(cpo_alpha=0.5).notes == ("`cpo_alpha` has no meaning for GRPO; left out.",)


def test_the_internal_fields_are_no_keys():
    assert problems(notes=["x"])[0].startswith("unknown key 'notes'")
    assert problems(extra={"a": 1})[0].startswith("unknown key 'extra'")
    assert TrainConfig.load({"model_name": "m", "dataset": "d", "seed": 1}).seed == 1
    with pytest.raises(ConfigError, match="unknown key 1;"):
        TrainConfig.load({1: 2, "model_name": "m", "dataset": "d"})


# --- datasets ------------------------------------------------------------------------------------------------------


def test_one_mapping_a_name_and_rows_in_memory_are_all_datasets():
    rows = [{"prompt": "2+2?", "name": "a"}]
    assert load(dataset={"data_files": "a.jsonl"}).dataset == [DatasetSpec(data_files="a.jsonl")]
    assert load(dataset=Path("a.jsonl")).dataset == "a.jsonl"
    assert load(dataset=rows).dataset is rows
    assert load(dataset=["2+2?"]).dataset == ["2+2?"]


def test_all_faults_of_all_datasets_are_listed():
    lines = problems(dataset=[{"name": "a", "splitt": "train"}, {"split": 3, "num_samples": 0}])
    assert lines == [
        "dataset[0]: unknown key 'splitt'; did you mean 'split'?",
        "dataset[1] needs a name (on the hub, or a file's path) or data_files",
        "dataset[1].split is 3, but must be text",
        "dataset[1].num_samples is 0, but must be greater than or equal to 1",
    ]


# --- the batch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "micro", "accumulation", "group", "prompts"),
    [
        ({}, 8, 1, 8, 1),
        ({"num_generations": 8}, 8, 1, 8, 1),
        ({"num_generations": 16}, 8, 2, 16, 1),
        ({"num_generations": 6}, 8, 3, 6, 4),
        ({"per_device_train_batch_size": 1}, 1, 8, 8, 1),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 2, 2, 4, 1),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}, 3, 4, 6, 2),
        ({"gradient_accumulation_steps": 2, "num_generations": 12}, 6, 2, 12, 1),
        ({"gradient_accumulation_steps": 3, "num_generations": 2}, 8, 3, 2, 12),
        ({"steps_per_generation": 4}, 8, 1, 8, 4),
        ({"steps_per_generation": 3, "num_generations": 4, "per_device_train_batch_size": 4}, 4, 1, 4, 3),
        ({"generation_batch_size": 12}, 6, 1, 6, 2),
        ({"generation_batch_size": 32, "num_generations": 4}, 8, 1, 4, 8),
    ],
)
def test_only_sizes_that_were_not_given_move_to_fill_whole_groups(given, micro, accumulation, group, prompts):
    config = load(**given)
    moved = (config.per_device_train_batch_size, config.gradient_accumulation_steps, config.num_generations)
    assert (*moved, config.prompts_per_batch) == (micro, accumulation, group, prompts)
    assert all(getattr(config, key) == value for key, value in given.items())
    changed = sum(a != b for a, b in zip(moved, (8, 1, 8), strict=True)) - sum(
        given.get(key, default) != default
        for key, default in [
            ("per_device_train_batch_size", 8),
            ("gradient_accumulation_steps", 1),
            ("num_generations", 8),
        ]
    )
    assert len(config.notes) == changed


@pytest.mark.parametrize(
    ("sizes", "fixes"),
    [
        ((2, 2, 8), "set gradient_accumulation_steps to 4, or num_generations to 4"),
        ((1, 1, 8), "set gradient_accumulation_steps to 8, or per_device_train_batch_size to 8"),
        ((4, 3, 8), "set gradient_accumulation_steps to 4, or num_generations to 6"),
    ],
)
def test_given_sizes_that_clash_are_refused_with_two_fixes_that_work(sizes, fixes):
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    given = dict(zip(names, sizes, strict=True))
    (line,) = problems(**given)
    assert fixes in line and f"not divisible by num_generations {sizes[2]}" in line
    for fix in fixes.removeprefix("set ").split(", or "):
        key, value = fix.split(" to ")
        assert load(**{**given, key: int(value)}).prompts_per_batch >= 1


def test_a_generation_batch_that_holds_no_whole_micro_batch_is_refused():
    (line,) = problems(generation_batch_size=12, per_device_train_batch_size=8, num_generations=4)
    assert "set generation_batch_size to 16, or per_device_train_batch_size to 4" in line


def test_fewer_prompts_than_one_generation_batch_are_refused_before_training():
    config = load(num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    config.check_prompt_count(8)
    with pytest.raises(
        ConfigError, match=r"7 prompts .* fewer prompts than one generation batch needs \(8\)"
    ) as caught:
        config.check_prompt_count(7)
    assert "zero steps" in str(caught.value) and "per_device_train_batch_size to 4" in str(caught.value)
    load(method="cpo").check_prompt_count(0)


def test_a_default_that_a_given_value_contradicts_moves_aloud():
    short = load(max_seq_length=256)
    assert short.max_completion_length == 128 and "half of max_seq_length" in short.notes[0]
    warm = load(warmup_steps=5)
    assert warm.lr_scheduler_type == "constant_with_warmup" and len(warm.notes) == 1
    layered = load(layers_to_transform=[0, 1])
    assert "q_proj" in layered.lora_target_modules and len(layered.notes) == 1
    assert "nothing with lr_scheduler_type constant" in load(warmup_steps=5, lr_scheduler_type="constant").notes[0]
    assert "do nothing without fast_inference" in load(gpu_memory_utilization=0.6).notes[0]
    assert "no prompts are left to compare" in load(held_out=0).notes[0]


# --- what the trainers are told ------------------------------------------------------------------------------------


def test_on_a_cpu_half_precision_and_checkpointing_are_off_and_on_a_gpu_they_are_on():
    on_cpu, on_gpu = load().grpo_arguments(device="cpu"), load().grpo_arguments(device="cuda:0")
    switches = ("use_cpu", "bf16", "fp16", "gradient_checkpointing")
    assert [on_cpu[name] for name in switches] == [True, False, False, False]
    assert [on_gpu[name] for name in switches] == [False, True, False, True]
    assert load(fp16=True).grpo_arguments(device="cuda")["bf16"] is False
    assert load(fp16=True).grpo_arguments(device="cpu")["fp16"] is False
    assert load(no_cuda=True).grpo_arguments(device="cuda")["use_cpu"] is True
    assert load(gradient_checkpointing=False).grpo_arguments(device="cuda")["gradient_checkpointing"] is False


def test_the_trainer_gets_pinned_values_and_no_folder():
    arguments = load(max_steps=0, output_dir="x", delta=4).grpo_arguments(device="cpu")
    assert arguments["remove_unused_columns"] is False and arguments["disable_dropout"] is True
    assert (arguments["max_steps"], arguments["delta"], arguments["loss_type"]) == (-1, 4.0, "dapo")
    assert not {"output_dir", "resume_from_checkpoint", "use_vllm", "model_name"} & set(arguments)


def test_fast_inference_means_vllm_in_the_same_process():
    arguments = load(fast_inference=True, gpu_memory_utilization=0.6).grpo_arguments(device="cuda")
    assert (arguments["use_vllm"], arguments["vllm_mode"]) == (True, "colocate")
    assert (arguments["vllm_gpu_memory_utilization"], arguments["vllm_max_model_length"]) == (0.6, 2048)
    assert load(use_vllm=True, vllm_mode="server").grpo_arguments(device="cuda")["vllm_mode"] == "server"


def test_the_task_type_follows_the_method():
    assert load().lora_arguments()["task_type"] == "CAUSAL_LM"
    assert load(method="cpo").lora_arguments()["task_type"] == "CAUSAL_LM"
    assert load(method="reward").lora_arguments()["task_type"] == "SEQ_CLS"


# --- the record ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "reward", "cpo"])
def test_a_resolved_config_is_json_and_reads_back_the_same(method):
    source = {"method": method, "model": "m", "dataset": [{"name": "d", "num_samples": 5}], "warmup_ratio": "0.1"}
    config = TrainConfig.load({**source, "per_device_train_batch_size": 3, "logging_first_step": True, "lora_r": 4})
    again = TrainConfig.load(json.loads(json.dumps(config.resolved())))
    assert again.notes == () and again.model_copy(update={"notes": config.notes}) == config


def test_the_yaml_reads_back_and_says_the_notes_at_its_top(tmp_path):
    config = TrainConfig.load({"model": "m", "dataset": "d", "kl_coef": 0.1})
    text = config.to_yaml()
    assert text.startswith("# `model` is called `model_name` here.\n# `kl_coef` is called `beta` here.\n")
    assert yaml.safe_load(text) == config.resolved()
    assert TrainConfig.load(written(tmp_path, text)).resolved() == config.resolved()


def test_what_lives_in_memory_is_described():
    def short(prompts, completions, **kwargs):
        return [0.0 for _ in completions]

    shown = load(dataset=[{"prompt": "a"}, {"prompt": "b"}], reward_funcs=["a:b", short]).resolved()
    assert shown["dataset"] == "<list of 2 rows in memory>"
    assert shown["reward_funcs"] == ["a:b", repr(short)]


def test_a_config_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        load().seed = 3


# --- contracts with the installed libraries ------------------------------------------------------------------------


def kind(annotation: object) -> str:
    """One word for a field's type, as ``config_keys`` writes it."""
    named = [a for a in (typing.get_args(annotation) or (annotation,)) if a is not type(None)]
    plain = len(named) == 1 and typing.get_origin(annotation) is not list and named[0] in (bool, int, float, str)
    return named[0].__name__ if plain else "any"


def test_the_table_of_fields_is_that_of_the_installed_trl():
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    grpo = {field.name: kind(field.type) for field in dataclasses.fields(trl.GRPOConfig)}
    assert grpo == config_keys.GRPO_FIELDS
    training = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert training == set(config_keys.TRAINING_FIELDS)


def test_optimisers_and_services_are_those_of_the_installed_transformers():
    pytest.importorskip("transformers")
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.training_args import OptimizerNames

    assert list(config_keys.OPTIMIZERS) == [name.value for name in OptimizerNames]
    assert set(config_keys.TRACKERS) == set(INTEGRATION_TO_CALLBACK)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_4"])
def test_each_start_of_an_adapter_that_is_allowed_is_one_that_peft_makes(start):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    options = {**load(init_lora_weights=start, lora_r=2).lora_arguments(), "target_modules": ["0"], "task_type": None}
    made = peft.get_peft_model(model, peft.LoraConfig(**options))
    assert sum("lora_" in name for name, _ in made.named_parameters()) == 2


@pytest.mark.filterwarnings("ignore")
def test_the_installed_libraries_take_the_arguments(tmp_path):
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    given = {"warmup_ratio": 0.1, "generation_batch_size": 16, "epsilon_high": 0.28, "reward_weights": [1, 2]}
    config = load(**given, lr_scheduler_kwargs={}, rank_pattern={"q_proj": 4}, layers_to_transform=[0])
    told = trl.GRPOConfig(**config.grpo_arguments(device="cpu"), output_dir=str(tmp_path))
    assert (told.num_generations, told.generation_batch_size, told.steps_per_generation) == (8, 16, 2)
    assert (told.bf16, told.gradient_checkpointing, told.warmup_steps, told.report_to) == (False, False, 0.1, [])
    lora = peft.LoraConfig(**config.lora_arguments())
    assert (lora.r, lora.rank_pattern, lora.layers_to_transform) == (16, {"q_proj": 4}, [0])
    assert peft.LoraConfig(**load(method="reward").lora_arguments()).task_type == "SEQ_CLS"


@pytest.mark.filterwarnings("ignore")
def test_the_installed_preference_trainers_take_the_arguments(tmp_path):
    trl = pytest.importorskip("trl")
    from trl.experimental.cpo import CPOConfig

    reward = load(method="reward", center_rewards_coefficient=0.01, max_length=64)
    told = trl.RewardConfig(**reward.preference_arguments(device="cpu"), output_dir=str(tmp_path))
    assert (told.max_length, told.center_rewards_coefficient, told.learning_rate) == (64, 0.01, 1e-4)
    cpo = CPOConfig(**load(method="cpo", cpo_alpha=0.5).preference_arguments(device="cpu"), output_dir=str(tmp_path))
    assert (cpo.max_length, cpo.beta, cpo.loss_type, cpo.cpo_alpha) == (2048, 0.1, "sigmoid", 0.5)


@pytest.mark.filterwarnings("ignore")
def test_each_default_is_trl_s_own_or_differs_on_purpose():
    trl = pytest.importorskip("trl")
    theirs = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    ours = load().grpo_arguments(device="cuda")
    differing = {name for name, value in ours.items() if value != theirs[name]}
    assert differing == {
        "bf16",
        "disable_dropout",
        "learning_rate",
        "logging_nan_inf_filter",
        "logging_steps",
        "lr_scheduler_type",
        "max_completion_length",
        "num_train_epochs",
        "optim",
        "save_steps",
        "save_total_limit",
    }
