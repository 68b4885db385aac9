"""Training by Unsloth itself, as far as it goes without a GPU; in the environment that ``make test-unsloth`` makes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("unsloth") is None:
    pytest.skip("unsloth is not installed here; make test-unsloth installs it", allow_module_level=True)

from safetensors.torch import load_file

from praison_agent_rl.data import read_rows
from praison_agent_rl.planning import draft_from_config, write_run
from praison_agent_rl.recorded_calls import write_calls
from praison_agent_rl.runs import RunFolder, write_record
from praison_agent_rl.training.launch import launch_stages
from tests.model.two_processes import good_call

REWARD = "def letters(completions, **_):\n    return [sum(map(str.islower, text)) / 9 for text in completions]\n"
SETTINGS: dict[str, Any] = {
    "backend": "unsloth", "dataset": [{"prompt": f"Say {n}."} for n in range(16)], "held_out": 8, "watch": False,
    "reward_funcs": ["lettered:letters"], "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8,
    "max_completion_length": 6, "learning_rate": 1e-2, "lora_r": 4, "lora_alpha": 8, "save_steps": 1,
}  # fmt: skip
ALL = ["measure_base", "train", "merge", "measure_new"]


@pytest.fixture
def here(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (in_tmp / "lettered.py").write_text(REWARD)
    monkeypatch.syspath_prepend(in_tmp)
    return in_tmp


def trained(base: Path, root: Path, stages: list[str], **changes: Any) -> RunFolder:
    """A run whose stages happened in a process of their own, as they do for a user."""
    run = write_run(draft_from_config({**SETTINGS, "model_name": str(base), **changes}), root)
    launch_stages(run, stages, lambda event: None)
    return run


def adapted(run: RunFolder) -> dict[str, Any]:
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    return {name: value for name, value in tensors.items() if "lora_B" in name and value.any()}


def test_a_policy_of_unsloths_is_trained_merged_and_measured(tiny_model: Path, here: Path) -> None:
    run = trained(tiny_model, here / "run", ALL)
    said = run.log.read_text()
    assert "Unsloth" in said and "no GPU found, training on CPU" in said
    assert "should be imported before" not in said
    # a process of its own, so that what it changes in transformers has no part in the rest
    ended = [event["stages"] for _, event in run.events() if event["event"] == "done"]
    assert ended == [["measure_base"], ["train"], ["merge", "measure_new"]]
    assert [step["step"] for step in run.steps()] == [1, 2] and all(step["grad_norm"] > 0 for step in run.steps())
    assert len(adapted(run)) == 2 * 7
    proof = json.loads(run.merge_file.read_text())
    assert proof["change"] > 0 and proof["merge_error"] <= 1e-3
    assert len(read_rows(run.answers("new"))) == len(read_rows(run.answers("base"))) == 16
    assert not (here / "unsloth_compiled_cache").exists()
    told = [event["text"] for _, event in run.events() if event["event"] == "note"]
    # TRL 1.15 imports the function that a shared step needs only together with Triton
    without_triton = importlib.util.find_spec("triton") is None
    assert any(text.startswith("prompts are not shared: TRL 1.15.0 has no") for text in told) == without_triton
    assert run.plan.libraries["unsloth"].startswith("2026.10")


def test_the_last_layer_alone_is_trained_where_that_is_asked_for(tiny_model: Path, here: Path) -> None:
    run = trained(tiny_model, here / "run", ["train"], finetune_last_n_layers=1, rank_pattern={"q_proj": 2})
    assert {name.split("layers.")[1].split(".")[0] for name in adapted(run)} == {"1"}
    ranks = {name.split(".")[-3]: value.shape[1] for name, value in adapted(run).items()}
    assert ranks["q_proj"] == 2 and ranks["up_proj"] == 4 and len(ranks) == 7


@pytest.mark.parametrize("changes", [{"load_in_4bit": True}, {"use_dora": True, "gradient_checkpointing": "unsloth"}])
def test_further_keys_reach_unsloth(tiny_model: Path, here: Path, changes: dict[str, Any]) -> None:
    run = trained(tiny_model, here / "run", ["train", "merge"], **changes)
    assert len(adapted(run)) == 2 * 7 and all(step["grad_norm"] > 0 for step in run.steps())


def test_a_run_that_was_interrupted_goes_on(tiny_model: Path, here: Path) -> None:
    whole = trained(tiny_model, here / "whole", ["train"], max_steps=3)
    cut = write_run(draft_from_config({**SETTINGS, "model_name": str(tiny_model), "max_steps": 3}), here / "cut")
    (cut.root / "checkpoints").mkdir()
    os.rename(whole.checkpoints / "checkpoint-2", cut.checkpoints / "checkpoint-2")
    launch_stages(cut, ["train"], lambda event: None, resume=True)
    assert [step["step"] for step in cut.steps()] == [3]
    one, other = (load_file(run.adapter / "adapter_model.safetensors") for run in (whole, cut))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_a_policy_of_unsloths_takes_a_warm_start(tiny_model: Path, here: Path) -> None:
    run = write_run(draft_from_config({**SETTINGS, "model_name": str(tiny_model)}), here / "run")
    plan = run.plan
    write_record(run.plan_file, plan.model_copy(update={"config": {**plan.config, "warm_start": 3}}))
    write_calls(run.calls, [good_call(number) for number in range(24)])
    launch_stages(run, ["train", "merge"], lambda event: None)
    losses = [event["loss"] for _, event in run.events() if event["event"] == "warm_step"]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert [step["step"] for step in run.steps()] == [1, 2] and len(adapted(run)) == 2 * 7


def test_pairs_are_learned_by_unsloth(tiny_model: Path, here: Path) -> None:
    pairs = [{"prompt": f"Say {n}.", "chosen": "aaa", "rejected": "zzz"} for n in range(16)]
    changes = {"method": "cpo", "dataset": pairs, "reward_funcs": None, "num_generations": None, "watch": None}
    run = trained(tiny_model, here / "run", ["train", "merge"], **changes)
    assert len(adapted(run)) == 2 * 7


# --- what Unsloth puts in place of TRL's trainer on a GPU -------------------------------------------------------------

REWRITTEN = """
import json
import unsloth
from unsloth.models.rl import _patch_trl_rl_trainers
_patch_trl_rl_trainers("grpo_trainer")
import inspect, trl
from praison_agent_rl.training import trl_names
from praison_agent_rl.training.policy_trainer import PolicyTrainer
owner = trl_names.base_of(PolicyTrainer)
print("FOUND", json.dumps({
    "owner": owner.__name__,
    "told": trl_names.told(PolicyTrainer),
    "step": {name: list(inspect.signature(getattr(owner, name)).parameters) for name in trl_names.STEP},
}))
"""


def test_what_it_makes_of_the_trainer_on_a_gpu_is_recognised(here: Path) -> None:
    environment = {**os.environ, "UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_COMPILE_LOCATION": str(here / "compiled")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", REWRITTEN], capture_output=True, text=True, env=environment, cwd=here)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stderr[-3000:]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["owner"] == "UnslothGRPOTrainer" and found["told"] == {}
    # the first of these is the reason why steps go Unsloth's way there: it gives hidden states, or nothing at all
    assert found["step"]["_get_per_token_logps_and_entropies"][:5] == [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep",
    ]  # fmt: skip
    assert found["step"]["_generate_single_turn"][:2] == ["self", "prompt_ids"]
