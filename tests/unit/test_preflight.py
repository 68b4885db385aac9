"""What a run needs of its machine and of the model's files is missed before anything is loaded."""

import importlib.util
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, MissingExtra, ModelError
from praison_agent_rl.models import find_weights
from praison_agent_rl.preflight import check_chat_template, check_layers, check_packages, check_tokenizer
from praison_agent_rl.weight_files import modules_of, read_header

CONFIG = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 2}


def config_of(**changes) -> TrainConfig:
    return TrainConfig.load(changes, need_model=False, need_data=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Files of a model of two layers, made by hand."""
    folder = tmp_path / "model"
    folder.mkdir()
    layers = {
        f"model.layers.{n}.{part}.weight": np.zeros((4, 4), np.float32)
        for n in range(2)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    }
    norms = {f"model.layers.{n}.input_layernorm.weight": np.zeros(4, np.float32) for n in range(2)}
    save_file(
        {**layers, **norms, "model.embed_tokens.weight": np.zeros((9, 4), np.float32)}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


# --- files ------------------------------------------------------------------------------------------------------------


def test_sound_files_pass_and_their_tensors_are_known(model):
    assert find_weights(str(model)) == str(model)
    header = read_header(model / "model.safetensors")
    assert header["model.embed_tokens.weight"]["shape"] == [9, 4] and len(header) == 7
    assert modules_of(str(model))["model.layers.1.input_layernorm"] == 1
    assert modules_of("owner/name") == {}


def cut(size):
    return lambda folder: rewrite(folder, lambda content: content[:size])


def rewrite(folder, change):
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


def lacking_a_shard(folder):
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


DAMAGE = {
    "no byte": (cut(0), "has 0 bytes and no whole safetensors header"),
    "less than a length": (cut(5), "no whole safetensors header"),
    "half a header": (cut(100), "no whole safetensors header"),
    "half the data": (cut(-100), "but its header speaks of"),
    "one byte less": (cut(-1), "but its header speaks of"),
    "one byte more": (lambda folder: rewrite(folder, lambda content: content + b"x"), "but its header speaks of"),
    "other bytes": (
        lambda folder: rewrite(folder, lambda content: bytes(range(256)) * 9),
        "no whole safetensors header",
    ),
    "another JSON": (lambda folder: rewrite(folder, lambda _: struct.pack("<Q", 5) + b"[1,2]"), "is not one of safe"),
    "no JSON": (lambda folder: rewrite(folder, lambda _: struct.pack("<Q", 5) + b"{bad}"), "is not one of safetensors"),
    "a pointer of Git LFS": (
        lambda folder: rewrite(folder, lambda _: b"version https://git-lfs.github.com/spec/v1"),
        "no whole safetensors header",
    ),
    "a missing shard": (lacking_a_shard, "lacks model-2.safetensors of 2 weight files"),
    "a config that is no JSON": (lambda f: (f / "config.json").write_text("{bad"), "cannot be read as JSON"),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[1]"), "holds a list, not an object"),
    "a config that is no text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "cannot be read as JSON"),
    "a config without a type": (lambda f: (f / "config.json").write_text("{}"), "has no model_type"),
    "a config with a wrong size": (
        lambda f: (f / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": "x"})),
        "has hidden_size 'x', not a whole number",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_of_a_model_are_told_by_their_headers(model, damage):
    break_it, said = DAMAGE[damage]
    break_it(model)
    with pytest.raises(ModelError) as caught:
        find_weights(str(model))
    assert said in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"GG", "b'GG'"), (b"\x00" * 99, "no GGUF file")])
def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path, content, said):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=said):
        find_weights(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("chat_template.jinja", "{% for %}", "is not sound Jinja: line 1"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_told_before_it_is_loaded(model, name, content, said):
    check_tokenizer(config_of(), str(model))
    (model / name).unlink(missing_ok=True)
    if content is not None:
        (model / name).write_text(content)
    with pytest.raises(ModelError, match=said):
        check_tokenizer(config_of(), str(model))
    check_tokenizer(config_of(), "owner/name")


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_target_modules": ["q_proj", "up_proj"]},
        {"lora_target_modules": ["layers.1.mlp.up_proj"]},
        {"lora_target_modules": r".*\.layers\.0\..*_proj"},
        {"lora_target_modules": ["q_proj"], "layers_to_transform": [0, 1]},
        {"lora_target_modules": [], "target_parameters": ["mlp.up_proj.weight"]},
    ],
)
def test_targets_that_the_model_has_pass(model, changes):
    assert check_layers(config_of(**changes), str(model)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lora_target_modules": "nonsense"},
            "'nonsense', but .* has no such layer; it has: embed_tokens, q_proj, up_proj",
        ),
        ({"lora_target_modules": ["roj"]}, "has no such layer"),
        ({"lora_target_modules": r"q_proj"}, "has no such layer"),  # peft matches the whole path
        ({"lora_target_modules": "(q_proj"}, "is no regular expression"),
        ({"lora_target_modules": ["input_layernorm"]}, "input_layernorm, which are no linear layers"),
        ({"layers_to_transform": 99}, "layers_to_transform names 99, but .* has 2 layers, 0 to 1"),
        ({"layers_to_transform": [0, 2]}, "layers_to_transform names 2, "),
    ],
)
def test_targets_that_the_model_lacks_are_told_with_what_it_has(model, changes, said):
    with pytest.raises(ModelError, match=said):
        check_layers(config_of(**changes), str(model))


def test_a_target_that_only_some_models_have_is_said_aloud(model):
    (note,) = check_layers(config_of(lora_target_modules=["q_proj", "gate_proj"]), str(model))
    assert note == "lora_target_modules: the model has no gate_proj; it has: embed_tokens, q_proj, up_proj"


@pytest.mark.parametrize("source", ["owner/name", "some.gguf"])
def test_of_models_whose_files_do_not_say_nothing_is_claimed(source):
    assert check_layers(config_of(lora_target_modules=["nonsense"], layers_to_transform=[99]), source) == []


# --- packages and templates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "package"),
    [
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"fast_inference": True}, "vllm"),
        ({"report_to": "wandb"}, "wandb"),
        ({"report_to": ["none", "tensorboard"]}, "tensorboard"),
        ({"report_to": "trackio"}, "trackio"),
        ({"report_to": "mlflow"}, "mlflow"),
        ({"report_to": "comet_ml"}, "comet_ml"),
        ({"optim": "paged_adamw_8bit"}, "bitsandbytes"),
        ({"optim": "adamw_torch_4bit"}, "torchao"),
        ({"optim": "adalomo"}, "lomo_optim"),
    ],
)
def test_a_package_that_a_key_needs_is_missed_before_anything_runs(monkeypatch, changes, package):
    heavy = [name for name in ("vllm", "bitsandbytes", "wandb") if name in sys.modules]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name != package else None)
    with pytest.raises(MissingExtra) as caught:
        check_packages(config_of(**changes))
    (key,) = changes
    assert key in str(caught.value) and package in str(caught.value).lower()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_packages(config_of(**changes))
    assert heavy == [name for name in ("vllm", "bitsandbytes", "wandb") if name in sys.modules]


def test_all_missing_packages_are_told_at_once_and_the_defaults_need_none(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_packages(config_of())
    with pytest.raises(MissingExtra) as caught:
        check_packages(config_of(load_in_4bit=True, fast_inference=True, report_to=["wandb", "mlflow"]))
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("/nonexistent.jinja", "there is no such file"),
        ("nonexistent.j2", "there is no such file"),
        ("{{ looks }}.jinja", "there is no such file"),
        ("no-such-template", "there is no such file"),
        (".", "it cannot be read"),
        ("{{ oops", "is not sound Jinja: line 1"),
        ("{% for m in messages %}", "is not sound Jinja"),
    ],
)
def test_a_chat_template_that_is_neither_a_file_nor_a_template_is_refused(template, said):
    with pytest.raises(ConfigError, match=said):
        check_chat_template(config_of(chat_template=template))


def test_a_chat_template_may_be_a_file_or_a_text(in_tmp):
    (in_tmp / "own.jinja").write_text("{{ messages[0]['content'] }}")
    loop = "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    for template in ("own.jinja", str(in_tmp / "own.jinja"), "{{ messages }}", "two\nlines", loop, None):
        check_chat_template(config_of(chat_template=template))
    check_chat_template(config_of(chat_template="{% generation %}{{ messages }}{% endgeneration %}"))
