"""A base in 4 or 8 bits is trained, and what is merged, measured and served has all its bits."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import read_rows
from praison_agent_rl.loading import load_deployed, load_model, load_scorer
from praison_agent_rl.planning import draft_from_config, write_run
from praison_agent_rl.rewards import Reward
from praison_agent_rl.stages import planned_rewards, run_stages
from praison_agent_rl.training.grpo import train_grpo
from tests.model.test_grpo import adapter_of, lower_case, notes, planned, rows_of
from tests.model.test_preferences import pairs

if importlib.util.find_spec("bitsandbytes") is None:
    pytest.skip(
        "bitsandbytes is not installed here; make test runs this file once more with it", allow_module_level=True
    )

BITS = ["load_in_4bit", "load_in_8bit"]
IDS = torch.tensor([[0, 20, 30, 40, 50, 60]])
REWARD = "def letters(completions, **_):\n    return [sum(map(str.islower, text)) / 9 for text in completions]\n"

pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(**changes) -> TrainConfig:
    return TrainConfig.load({"lora_r": 4, "lora_alpha": 8, **changes}, need_model=False, need_data=False)


def gradients(model):
    """Of a loss on ``IDS``, by the name of each tensor of a random adapter."""
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape) * 0.05
    adapted.train()
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    return {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_answers_before_a_step_leave_its_gradients_as_they_are(tiny_model, bits):
    fresh, asked = (load_model(str(tiny_model), config_of(**{bits: True}), device="cpu") for _ in range(2))
    assert fresh.is_quantized
    with torch.no_grad():
        asked.eval()(input_ids=IDS)  # at which bitsandbytes may pack weights anew, and gradients are lost
    wanted, got = gradients(fresh), gradients(asked)
    assert len(wanted) == 2 * 2 * 7
    assert [name for name in wanted if got[name] is None or not torch.equal(got[name], wanted[name])] == []


@pytest.mark.parametrize(("bits", "within"), [("load_in_4bit", 0.1), ("load_in_8bit", 0.1)])
def test_gradients_are_those_of_the_rounded_weights(tiny_model, bits, within):
    quantised = load_model(str(tiny_model), config_of(**{bits: True}), device="cpu")
    rounded = load_model(str(tiny_model), config_of(**{bits: True}), device="cpu").dequantize().float()
    got, wanted = gradients(quantised), gradients(rounded)
    for name, theirs in wanted.items():
        assert float((got[name] - theirs).norm() / theirs.norm()) < within, name


@pytest.mark.parametrize(("bits", "shared"), [("load_in_4bit", True), ("load_in_8bit", False)])
def test_a_policy_on_rounded_weights_learns(tiny_model, in_tmp, bits, shared):
    changes = {"lora_r": 8, "num_generations": 8, "per_device_train_batch_size": 32, "max_steps": 12}
    run = planned(in_tmp / "run", tiny_model, **{bits: True}, **changes)
    train_grpo(run, rows_of(), [Reward(lower_case, "lower_case")])
    rewards = [step["reward"] for step in run.steps()]
    print(bits, rewards, notes(run))
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert all(step["grad_norm"] > 0 for step in run.steps())
    assert any("its weights are quantised" in note for note in notes(run)) is not shared
    assert not any(tensor.isnan().any() for tensor in adapter_of(run).values())


# --- merging and measuring --------------------------------------------------------------------------------------------


@pytest.fixture
def here(in_tmp: Path, monkeypatch: pytest.MonkeyPatch):
    (in_tmp / "lettered.py").write_text(REWARD)
    monkeypatch.syspath_prepend(in_tmp)
    yield in_tmp
    sys.modules.pop("lettered", None)


def carried_out(base: Path, root: Path, stages: list[str], **changes):
    settings = {
        "model_name": str(base), "dataset": [{"prompt": f"Say {n}."} for n in range(16)], "held_out": 8,
        "reward_funcs": ["lettered:letters"], "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8,
        "max_completion_length": 6, "learning_rate": 1e-2, "lora_r": 4, "lora_alpha": 8, "watch": False,
    }  # fmt: skip
    run = write_run(draft_from_config({**settings, **changes}), root)
    run_stages(run, stages, planned_rewards(run))
    return run


def texts(run, side):
    return [answer["text"] for answer in read_rows(run.answers(side))]


def test_what_is_served_is_merged_and_measured_in_all_its_bits(tiny_model, here):
    run = carried_out(tiny_model, here / "run", ["measure_base", "train", "merge", "measure_new"], load_in_4bit=True)
    plain = carried_out(tiny_model, here / "plain", ["measure_base"])
    assert texts(run, "base") == texts(plain, "base")

    base, merged = (load_file(folder / "model.safetensors") for folder in (tiny_model, run.merged))
    adapter = {name.removeprefix("base_model.model."): value.float() for name, value in adapter_of(run).items()}
    assert merged.keys() == base.keys() and {value.dtype for value in merged.values()} == {torch.float32}
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        change = 0.0
        if f"{layer}.lora_A.weight" in adapter:
            change = 2 * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]  # alpha 8 / r 4
            assert float(change.abs().max()) > 0
        assert torch.allclose(merged[name], weight + change, atol=1e-6), name
    assert "quantization_config" not in json.loads((run.merged / "config.json").read_text())

    asked = carried_out(run.merged, here / "asked", ["measure_base"])
    assert texts(run, "new") == texts(asked, "base")
    assert run.comparison_file.exists() and run.verdict_file.exists()
    assert any(
        "in 4 bits; the adapter is merged into the weights as they are stored" in note for note in run.plan.notes
    )


@pytest.mark.parametrize("method", ["cpo", "reward"])
def test_pairs_are_learned_on_rounded_weights_too(tiny_model, here, method):
    changes = {"method": method, "dataset": pairs(24), "load_in_4bit": True}
    given = {
        "model_name": str(tiny_model), "max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-2,
        "held_out": 4, "lora_r": 4,
    }  # fmt: skip
    run = write_run(draft_from_config({**given, **changes}), here / "run")
    run_stages(run, ["train", "merge"], planned_rewards(run))
    assert len(run.steps()) == 3
    weights = load_file(run.merged / "model.safetensors")
    assert all(value.dtype == torch.float32 for value in weights.values())
    if method == "reward":
        before = load_scorer(str(tiny_model), run_config(run), device="cpu", new_head=True).score.weight
        assert weights["score.weight"].shape == (1, 64) and not torch.equal(weights["score.weight"], before)


def run_config(run) -> TrainConfig:
    return TrainConfig.load(run.plan.config, need_model=False, need_data=False)


# --- loading ----------------------------------------------------------------------------------------------------------


def test_deployed_means_unrounded(tiny_model):
    model = load_deployed(str(tiny_model), config_of(load_in_4bit=True), device="cpu")
    assert not getattr(model, "is_quantized", False)
    stored = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items() if name in stored)


def test_weights_that_are_stored_rounded_are_merged_into_plain_ones(tiny_model, in_tmp):
    rounded = load_model(str(tiny_model), config_of(load_in_4bit=True), device="cpu")
    rounded.save_pretrained(in_tmp / "rounded")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (in_tmp / "rounded" / name).write_bytes((tiny_model / name).read_bytes())
    source = str(in_tmp / "rounded")
    for loaded in (
        load_model(source, config_of(), device="cpu", full_precision=True),
        load_scorer(source, config_of(method="reward"), device="cpu", new_head=True, full_precision=True),
    ):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
        assert type(loaded.get_submodule("model.layers.0.mlp.up_proj")) is torch.nn.Linear
    assert AutoModelForCausalLM.from_pretrained(source).is_quantized
