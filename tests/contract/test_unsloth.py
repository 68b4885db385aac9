"""Every keyword that Unsloth is given is one of its release's; read from its wheels, which are not installed."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from inspect import signature
from pathlib import Path

import pytest
from peft import LoraConfig

from praison_agent_rl import backends
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.training.unsloth import adapter_arguments, loading_arguments

RELEASE = "2026.10.9"
GPU, CPU = "cuda", "cpu"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Text of a file of Unsloth's two wheels, which are downloaded once."""
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "praison_agent_rl" / "wheels"
    names = [f"{package}-{RELEASE}-py3-none-any.whl" for package in ("unsloth", "unsloth_zoo")]
    if not all((kept / name).exists() for name in names):
        fetched = tmp_path_factory.mktemp("wheels")
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        wanted = [f"{package}=={RELEASE}" for package in ("unsloth", "unsloth_zoo")]
        done = subprocess.run([*fetch, "--dest", str(fetched), *wanted], capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"the wheels of unsloth {RELEASE} cannot be downloaded: {done.stderr.strip()[-200:]}")
        kept.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.move(fetched / name, kept / f"{name}.{os.getpid()}")
            os.replace(kept / f"{name}.{os.getpid()}", kept / name)
    opened = [zipfile.ZipFile(kept / name) for name in names]
    holder = {file: wheel for wheel in opened for file in wheel.namelist()}
    yield lambda file: holder[file].read(file).decode()
    for wheel in opened:
        wheel.close()


def function_of(text, owner, name):
    (found,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == owner]
    return next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == name)


def named(function):
    return {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}


def config_of(**changes):
    full = {
        "revision": "main", "trust_remote_code": True, "dtype": "bfloat16", "load_in_4bit": True, "use_dora": True,
        "fast_inference": True, "max_lora_rank": 32, "gradient_checkpointing": "unsloth", "use_rslora": True,
        "lora_target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"q_proj": 8}, "layers_pattern": "layers", "layers_to_transform": [0],
        "target_parameters": ["experts.down_proj"], "init_lora_weights": "gaussian", "lora_bias": "all",
    }  # fmt: skip
    return TrainConfig.load({**full, **changes}, need_model=False, need_data=False)


def test_the_loader_of_a_gpu_takes_every_keyword(sources):
    loader = function_of(sources("unsloth/models/loader.py"), "FastLanguageModel", "from_pretrained")
    given = loading_arguments("owner/name", config_of(), GPU)
    assert set(given) <= named(loader)
    defaults = dict(
        zip([a.arg for a in loader.args.args][-len(loader.args.defaults) :], loader.args.defaults, strict=True)
    )
    usual = {
        name: ast.literal_eval(defaults[name]) for name in ("load_in_4bit", "use_exact_model_name", "random_state")
    }
    assert usual == {"load_in_4bit": True, "use_exact_model_name": False, "random_state": 3407}  # none is left to it
    plain = loading_arguments(
        "owner/name", config_of(load_in_4bit=False, fast_inference=False, max_lora_rank=None), GPU
    )
    assert (plain["load_in_4bit"], plain["use_exact_model_name"], plain["random_state"]) == (False, True, 42)


def test_the_adapter_of_a_gpu_takes_every_keyword_once(sources):
    maker = function_of(sources("unsloth/models/llama.py"), "FastLlamaModel", "get_peft_model")
    given = set(adapter_arguments(config_of(), 2, GPU))
    passed_on = given - named(maker)
    assert passed_on == {"use_dora", "rank_pattern", "alpha_pattern"} <= set(signature(LoraConfig).parameters)
    calls = [node for node in ast.walk(maker) if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict"]
    (its_own,) = [{word.arg for word in call.keywords} for call in calls if len(call.keywords) > 9]
    assert "task_type" in its_own and not passed_on & its_own


def test_a_cpu_takes_every_keyword_or_drops_it(sources):
    text = sources("unsloth_zoo/cpu/loader.py")
    loader, maker = (function_of(text, "FastCPUModel", name) for name in ("from_pretrained", "get_peft_model"))
    dropped = [
        set(ast.literal_eval(node.iter))
        for node in ast.walk(loader)
        if isinstance(node, ast.For) and ast.unparse(node.body[0]) == "kwargs.pop(key, None)"
    ]
    assert set(loading_arguments("owner/name", config_of(), CPU)) - named(loader) <= dropped[0]
    passed_on = set(adapter_arguments(config_of(), 2, CPU)) - named(maker)
    assert passed_on <= set(signature(LoraConfig).parameters) and "finetune_last_n_layers" not in passed_on


def test_what_unsloth_comes_before_is_what_it_looks_for(sources):
    tree = ast.parse(sources("unsloth/_gpu_init.py"))
    (found,) = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "critical_modules"]
    assert tuple(ast.literal_eval(found.value)) == backends._FIRST


def test_its_trainers_put_on_no_adapter_so_a_policy_brings_its_own(sources):
    assert 'init.replace("get_peft_model(model, peft_config)", "model")' in sources("unsloth/models/rl.py")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("unsloth_zoo/compiler.py", 'os.getenv("UNSLOTH_COMPILE_LOCATION"'),
        ("unsloth/models/_utils.py", '"UNSLOTH_DISABLE_STATISTICS" in os.environ'),
        ("unsloth_zoo/device_type.py", 'os.environ.get("UNSLOTH_FORCE_CPU", "0") == "1"'),
        ("unsloth/models/llama.py", "Only 'lm_head', 'embed_tokens' and"),
        ("unsloth_zoo/cpu/loader.py", "8-bit loading is not supported on CPU"),
        ("unsloth_zoo/cpu/loader.py", "fast_inference (vLLM) needs a GPU"),
    ],
)
def test_what_is_known_of_it_stands_in_its_source(sources, file, words):
    assert words in sources(file)
