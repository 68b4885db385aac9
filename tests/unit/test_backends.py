"""Which back end trains, what it is told, and what is refused before anything is loaded."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from praison_agent_rl import backends, launchers
from praison_agent_rl.backends import check_backend, choose_backend, open_backend
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, MissingExtra, ModelError
from praison_agent_rl.loading import as_deployed
from praison_agent_rl.preflight import check_layers, check_packages
from praison_agent_rl.trainer_arguments import checkpointing, of_grpo, of_lora, of_preferences


def config_of(**changes) -> TrainConfig:
    return TrainConfig.load(changes, need_model=False, need_data=False)


@pytest.fixture
def with_unsloth(monkeypatch):
    """Unsloth can be found, as if it were installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: name if name == "unsloth" else find(name, *rest)
    )


@pytest.fixture
def without_unsloth(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "unsloth" else find(name, *rest)
    )


# --- the choice -------------------------------------------------------------------------------------------------------


def test_auto_is_unsloth_on_a_gpu_where_it_is_installed(with_unsloth):
    assert choose_backend(config_of(), "cuda") == ("unsloth", "it is installed and there is a GPU")
    assert choose_backend(config_of(), "cuda:1").name == "unsloth"
    assert check_backend(config_of(), "cuda") == ["back end: unsloth (it is installed and there is a GPU)"]


def test_auto_is_transformers_on_a_cpu_and_says_nothing(with_unsloth):
    assert choose_backend(config_of(), "cpu") == ("transformers", "there is no GPU here")
    assert check_backend(config_of(), "cpu") == []


def test_auto_is_transformers_where_unsloth_is_not_installed(without_unsloth):
    assert check_backend(config_of(), "cuda") == ["back end: transformers (unsloth is not installed)"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": "reward"}, "no reward model is trained"),
        ({"modules_to_save": ["model.norm", "q_proj"]}, "norms only, and not q_proj"),
        ({"fast_inference": True, "lora_bias": "all"}, "takes neither modules_to_save nor lora_bias"),
        ({"launch": {"nproc": 2, "sharding": "fsdp2"}}, "one process trains, and nothing is shared out"),
        ({"launch": 2}, "one process trains"),
    ],
)
def test_auto_leaves_to_transformers_what_unsloth_does_not_do(with_unsloth, changes, why):
    name, reason = choose_backend(config_of(**changes), "cuda")
    assert name == "transformers" and why in reason
    with pytest.raises(ConfigError, match=why):
        check_backend(config_of(backend="unsloth", **changes), "cuda")


@pytest.mark.parametrize("launch", [2, {"nproc": 2, "sharding": "fsdp2"}, {"sharding": "zero2"}])
def test_unsloth_in_several_processes_is_refused_in_one_line(with_unsloth, monkeypatch, launch):
    monkeypatch.setattr(launchers, "_needs_deepspeed", lambda launch: False)
    config = config_of(backend="unsloth", launch=launch)
    with pytest.raises(ConfigError) as said:
        check_backend(config, "cuda")
    assert len(str(said.value).splitlines()) == 1
    launchers.check_launch(config, device="cuda")  # has nothing to add


def test_what_is_asked_for_is_taken(with_unsloth):
    assert choose_backend(config_of(backend="transformers"), "cuda").name == "transformers"
    assert choose_backend(config_of(backend="unsloth"), "cpu").name == "unsloth"
    (said,) = check_backend(config_of(backend="unsloth"), "cpu")
    assert "without a GPU that is transformers and peft" in said


def test_unsloth_that_is_not_installed_is_missed_with_the_extra_that_brings_it(without_unsloth):
    with pytest.raises(MissingExtra, match=r"pip install \"praison-agent-rl\[unsloth\]\" in an environment of its own"):
        check_packages(config_of(backend="unsloth"))


def test_what_unsloth_would_do_otherwise_on_a_cpu_is_refused_all_at_once(with_unsloth):
    asked = config_of(backend="unsloth", load_in_8bit=True, fast_inference=True, dtype="float16")
    with pytest.raises(ConfigError) as found:
        check_backend(asked, "cpu")
    lines = str(found.value).splitlines()
    ours = [line for line in lines if line.endswith("change that, or set backend: transformers")]
    reasons = ("fast_inference needs a GPU", "load_in_8bit needs a GPU", "dtype float16 needs a GPU")
    assert len(ours) == 3 and all(reason in line for reason, line in zip(reasons, ours, strict=True))
    assert any(line.startswith("fast_inference cannot have load_in_8bit") for line in lines)


# --- opening it -------------------------------------------------------------------------------------------------------

STAND_IN = """
import json, os, sys
SEEN = {"early": [name for name in ("trl", "transformers", "peft") if name in sys.modules],
        "settings": {name: value for name, value in os.environ.items() if name.startswith("UNSLOTH_")}}
"""
OPENED = """
import json, sys
from praison_agent_rl.backends import open_backend
from praison_agent_rl.config import TrainConfig
config = TrainConfig.load({"backend": "unsloth"}, need_model=False, need_data=False)
choice = open_backend(config, "cpu")
assert open_backend(config, "cpu") == choice
import unsloth
print(json.dumps({**unsloth.SEEN, "choice": choice.name}))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a package unsloth that tells what it found when it was imported."""
    (tmp_path / "unsloth.py").write_text(STAND_IN)
    about = tmp_path / "unsloth-2026.10.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: unsloth\nVersion: 2026.10.9\n")
    return tmp_path


def run_python(code: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "PRAISON_AGENT_RL_CACHE": str(folder / "cache"), **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_unsloth_is_imported_first_and_writes_and_tells_nothing_elsewhere(stand_in):
    found = json.loads(run_python(OPENED, stand_in).stdout)
    assert found == {
        "early": [],
        "choice": "unsloth",
        "settings": {
            "UNSLOTH_COMPILE_LOCATION": str(stand_in / "cache" / "unsloth-2026.10.9"),
            "UNSLOTH_DISABLE_STATISTICS": "1",
            "UNSLOTH_FORCE_CPU": "1",
        },
    }


def test_what_a_user_has_set_for_unsloth_is_kept(stand_in):
    found = json.loads(run_python(OPENED, stand_in, UNSLOTH_COMPILE_LOCATION="/elsewhere").stdout)
    assert found["settings"]["UNSLOTH_COMPILE_LOCATION"] == "/elsewhere"


def test_unsloth_that_cannot_be_imported_says_why(stand_in):
    (stand_in / "unsloth.py").write_text("raise NotImplementedError('no GPU of mine')")
    said = run_python(OPENED, stand_in).stderr.splitlines()[-1]
    assert said.startswith("praison_agent_rl.errors.MissingExtra: unsloth is installed but cannot be imported")
    assert "NotImplementedError: no GPU of mine" in said


def test_unsloth_is_not_imported_too_late(with_unsloth, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", object())
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    with pytest.raises(ConfigError, match=r"has imported .*peft, before which unsloth .*'module:function'"):
        open_backend(config_of(backend="unsloth"), "cpu")
    name, why = open_backend(config_of(), "cuda")
    assert name == "transformers" and "peft, before which unsloth has to be imported" in why


def test_transformers_needs_no_opening(monkeypatch):
    monkeypatch.setattr(backends, "_import_unsloth", lambda device: pytest.fail("it was imported"))
    assert open_backend(config_of(), "cpu").name == "transformers"


# --- which layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "layers", "wanted"), [(1, 4, [3]), (3, 4, [1, 2, 3]), (4, 4, [0, 1, 2, 3]), (9, 2, [0, 1])]
)
def test_the_last_layers_are_counted_from_the_end(last, layers, wanted):
    asked = config_of(finetune_last_n_layers=last, lora_target_modules=["q_proj"])
    assert of_lora(asked, layers=layers)["layers_to_transform"] == wanted
    assert "layers_to_transform" not in of_lora(asked)  # while nobody knows how many there are


def test_other_layers_stay_as_they_were_asked_for():
    asked = config_of(layers_to_transform=[0, 2], lora_target_modules=["q_proj"])
    assert of_lora(asked, layers=4)["layers_to_transform"] == [0, 2]
    assert "layers_to_transform" not in of_lora(config_of(), layers=4)


@pytest.fixture
def four_layers(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    return tmp_path


def test_which_layers_those_are_is_said_before_anything_is_loaded(four_layers):
    def said(last):
        return check_layers(config_of(finetune_last_n_layers=last, lora_target_modules=["q_proj"]), str(four_layers))

    assert said(1) == ["`finetune_last_n_layers`: layers 3 to 3 of 0 to 3 get an adapter"]
    assert said(3) == ["`finetune_last_n_layers`: layers 1 to 3 of 0 to 3 get an adapter"]
    assert said(7) == ["`finetune_last_n_layers` is 7, and the model has 4 layers: all of them get an adapter"]
    with pytest.raises(ModelError, match="layers_to_transform names 4, but"):
        check_layers(config_of(layers_to_transform=[4], lora_target_modules=["q_proj"]), str(four_layers))


# --- checkpointing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "device", "wanted"),
    [
        (None, "cpu", False),
        (None, "cuda", True),
        (True, "cpu", True),
        (False, "cuda", False),
        ("unsloth", "cpu", "unsloth"),
    ],
)
def test_activations_are_computed_twice_where_that_is_asked_for_or_a_gpu_gains(given, device, wanted):
    asked = config_of() if given is None else config_of(gradient_checkpointing=given)
    assert checkpointing(asked, device) == wanted
    assert of_grpo(asked, device)["gradient_checkpointing"] is bool(wanted)  # trl knows no other word


def test_the_word_unsloth_is_said_to_be_a_plain_one_elsewhere(without_unsloth):
    plain = "`gradient_checkpointing: unsloth` is plain gradient checkpointing with the back end transformers"
    assert check_backend(config_of(gradient_checkpointing="unsloth"), "cpu") == [plain]


# --- fewer bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "bits"), [("load_in_4bit", 4), ("load_in_8bit", 8)])
def test_what_is_trained_in_fewer_bits_is_said_to_be_served_in_all_of_them(key, bits):
    (said,) = check_backend(config_of(**{key: True}), "cpu")
    assert said.startswith(f"training sees the weights in {bits} bits; the adapter is merged into the weights as they")
    assert (as_deployed(config_of(**{key: True})).load_in_4bit, as_deployed(config_of(**{key: True})).load_in_8bit) == (
        False,
        False,
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"init_lora_weights": "pissa"}, "takes the adapter's start out of the base weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "takes the adapter's start out of the base weights"),
        ({"init_lora_weights": "olora"}, "takes the adapter's start out of the base weights"),
        ({"modules_to_save": ["embed_tokens", "mlp.up_proj"]}, "modules_to_save names mlp.up_proj, whose weights"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "target_parameters names mlp.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_what_weights_in_fewer_bits_cannot_do_is_refused_before_they_are_loaded(changes, problem, key):
    with pytest.raises(ConfigError, match=f"(?s){problem}.*{key}|{key}.*{problem}"):
        check_backend(config_of(**{key: True}, **changes), "cpu")
    assert check_backend(config_of(**changes), "cpu") == []


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_a_reward_model_on_rounded_weights_computes_in_bfloat16(key):
    rounded = config_of(method="reward", **{key: True})
    assert (
        of_preferences(rounded, "cpu")["bf16"] is True
        and of_preferences(config_of(method="reward"), "cpu")["bf16"] is False
    )
    assert of_preferences(config_of(method="cpo", **{key: True}), "cpu")["bf16"] is False
    with pytest.raises(ConfigError, match=f"computes in bfloat16; leave bf16 out, or {key}"):
        check_backend(config_of(method="reward", bf16=False, **{key: True}), "cpu")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"finetune_last_n_layers": 2, "lora_target_modules": ["q_proj"]}, "finetune_last_n_layers chooses among"),
        ({"layers_to_transform": 1, "lora_target_modules": ["q_proj"]}, "layers_to_transform chooses among"),
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1, which target_parameters cannot have"),
        ({"use_dora": True}, "use_dora is True, which target_parameters cannot have"),
    ],
)
def test_what_peft_does_not_do_for_parameters_is_refused(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        check_backend(config_of(target_parameters=["experts.down_proj"], **changes), "cpu")
