"""Training on what a vLLM server draws, by a stand-in: each step's policy, its loss, and a server that goes away."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load, load_file

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.errors import ServerFailed, TrainingFailed
from praison_agent_rl.records import Plan
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder, now, write_record
from praison_agent_rl.training.grpo import train_grpo
from praison_agent_rl.training.policy_server import API_KEY
from praison_agent_rl.vllm_servers import calls as vllm_calls
from praison_agent_rl.vllm_servers.serving import EXECUTABLE
from tests.model.test_grpo import SETTINGS as OF_GRPO
from tests.vllm_stand_in import KEY, Command, Drawing, ended, serving

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {
    **OF_GRPO,
    "sampler": "vllm",
    "watch": False,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 0,
}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
"""Two prompts a step, so a pass over them has four steps."""
PROMPTS_A_STEP = 2


@pytest.fixture
def vllm(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Drawing, str]]:
    stand_in = Drawing(str(tiny_model))
    monkeypatch.setenv(API_KEY, KEY)
    monkeypatch.setattr(vllm_calls, "time", SimpleNamespace(sleep=lambda _: None))  # one that is gone stays gone
    with serving(stand_in) as server:
        yield stand_in, server.url


def rows() -> list[Row]:
    return [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]


def planned(root: Path, base: Path, **changes: Any) -> RunFolder:
    config = TrainConfig.load({**SETTINGS, **changes}, need_model=False, need_data=False)
    run = RunFolder.create(root)
    write_record(
        run.plan_file,
        Plan(
            base=str(base), config=config.resolved(), rewards=[], tools=[], device="cpu", notes=[], libraries={},
            created=now(),
        ),
    )  # fmt: skip
    return run


def score_of(ids: list[int]) -> float:
    return ids[0] % 5 / 4


def by_first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [score_of(ids) for ids in completion_ids]


def train(run: RunFolder, **options: Any) -> None:
    train_grpo(run, rows(), [Reward(by_first_token, "first")], **options)


def notes(run: RunFolder) -> list[str]:
    return [event["text"] for _, event in run.events() if event["event"] == "note"]


def adapter_of(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.adapter / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- each step's policy -----------------------------------------------------------------------------------------------


def test_each_step_draws_from_the_policy_as_it_is_then_under_a_name_of_its_own(tiny_model, in_tmp, vllm):
    stand_in, url = vllm
    run = planned(in_tmp / "run", tiny_model, vllm_server_base_url=url, max_steps=3)
    train(run)
    prompts = ["completions"] * PROMPTS_A_STEP
    load_, unload = "load_lora_adapter", "unload_lora_adapter"
    verbs = [body["verb"] for body in stand_in.asked]
    assert verbs == [load_, *prompts, load_, unload, *prompts, load_, unload, *prompts, unload]
    names = [body["lora_name"] for body in stand_in.asked if body["verb"] == load_]
    assert len(set(names)) == 3 and [name.rsplit("-", 1)[0] for name in names] == ["run-0", "run-1", "run-2"]
    assert [body["model"] for body in stand_in.completions()] == [name for name in names for _ in prompts]

    offered = [load(stand_in.weights[name]) for name in names]
    assert all(bool((tensor == 0).all()) for name, tensor in offered[0].items() if "lora_B" in name)
    for step in (1, 2):
        assert same(offered[step], load_file(run.checkpoints / f"checkpoint-{step}" / "adapter_model.safetensors"))
        assert not same(offered[step], offered[step - 1])
    assert not same(adapter_of(run), offered[2])
    assert not stand_in.adapters and list((run.root / "policies").iterdir()) == []
    assert [step["step"] for step in run.steps()] == [1, 2, 3] and url.removeprefix("http://") in notes(run)[0]


def test_completions_that_serve_two_updates_are_of_one_policy(tiny_model, in_tmp, vllm):
    stand_in, url = vllm
    run = planned(in_tmp / "run", tiny_model, vllm_server_base_url=url, max_steps=4, num_iterations=2)
    train(run)
    names = [body["lora_name"] for body in stand_in.asked if body["verb"] == "load_lora_adapter"]
    assert [name.rsplit("-", 1)[0] for name in names] == ["run-0", "run-2"]
    assert len(stand_in.completions()) == 2 * PROMPTS_A_STEP


def test_the_same_seed_asks_the_same_and_another_seed_does_not(tiny_model, in_tmp, vllm):
    stand_in, url = vllm
    asked, adapters = [], []
    for number, seed in enumerate((1, 1, 2)):
        run = planned(in_tmp / f"run{number}", tiny_model, vllm_server_base_url=url, seed=seed, max_steps=3)
        train(run)
        sent = [{**body, "model": body["model"].split("-")[1]} for body in stand_in.completions()]
        asked.append(sorted(json.dumps(body, sort_keys=True) for body in sent))  # two are under way at a time
        adapters.append(adapter_of(run))
        stand_in.asked.clear()
    assert asked[0] == asked[1] and same(adapters[0], adapters[1])
    assert {json.loads(body)["seed"] for body in asked[0]}.isdisjoint(json.loads(body)["seed"] for body in asked[2])
    assert len({json.loads(body)["seed"] for body in asked[0]}) == 3 * PROMPTS_A_STEP


# --- several servers --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(vllm: tuple[Drawing, str]) -> Iterator[tuple[list[Drawing], list[str]]]:
    """The server of ``vllm`` and another one."""
    first, url = vllm
    second = Drawing(str(first.base["id"]))
    with serving(second) as server:
        yield [first, second], [url, server.url]


def asked_of(stand_ins: list[Drawing]) -> list[str]:
    """What all were asked to draw, but for the random part of a policy's name."""
    sent = [body for each in stand_ins for body in each.completions()]
    return sorted(json.dumps({**body, "model": body["model"].split("-")[1]}, sort_keys=True) for body in sent)


@pytest.mark.parametrize("answered", [None, 1])
def test_two_servers_draw_what_one_would_have_drawn_also_when_one_goes_away(tiny_model, in_tmp, two, answered):
    stand_ins, urls = two
    alone = planned(in_tmp / "run", tiny_model, vllm_server_base_url=urls[0], max_steps=3)
    train(alone)
    whole, steps = adapter_of(alone), [step["loss"] for step in alone.steps()]
    asked = asked_of(stand_ins)
    stand_ins[0].asked.clear()

    run = planned(in_tmp / "other" / "run", tiny_model, vllm_server_base_url=urls, max_steps=3)
    stand_ins[1].dies_at = answered
    train(run)
    assert same(adapter_of(run), whole) and [step["loss"] for step in run.steps()] == steps
    assert asked_of(stand_ins) == asked
    drawn = [len(each.completions()) for each in stand_ins]
    assert drawn == ([3, 3] if answered is None else [2 * 3 - answered, answered])
    left_out = [note for note in notes(run) if "It is left out" in note]
    assert len(left_out) == (answered is not None) and all(f"{urls[1]}/v1 did not answer" in note for note in left_out)
    assert not stand_ins[0].adapters and not list((run.root / "policies").iterdir())


def test_a_run_whose_servers_all_went_away_goes_on_when_they_are_back(tiny_model, in_tmp, two):
    stand_ins, urls = two
    settings = {"vllm_server_base_url": urls, "max_steps": 4, "save_steps": 50}
    whole = planned(in_tmp / "whole", tiny_model, **settings)
    train(whole)
    run = planned(in_tmp / "run", tiny_model, **settings)
    for each in stand_ins:
        each.asked.clear()
        each.dies_at = 2
    with pytest.raises(ServerFailed, match=r"(?s)none of the 2 vLLM servers is left:.*checkpoint of step 2 is kept"):
        train(run)
    for each in stand_ins:
        each.dies_at = None
    train(run, resume=True)
    assert same(adapter_of(run), adapter_of(whole))


# --- the loss ---------------------------------------------------------------------------------------------------------


def by_hand(base: Path, given: list[dict[str, Any]], epsilon: float) -> tuple[float, float]:
    """Loss of the first step and share of tokens at which it is clipped, by the formulas of arXiv 2402.03300, eq. 3.

    The adapter does nothing yet. The sum over tokens is divided by their number (arXiv 2503.14476, eq. 8).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in given:
        groups.setdefault(str(row["prompt"]), []).append(row)
    total, clipped, tokens = 0.0, 0, 0
    for group in groups.values():
        scores = [score_of(row["ids"]) for row in group]
        mean = sum(scores) / len(scores)
        spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
        for row, score in zip(group, scores, strict=True):
            advantage = (score - mean) / (spread + 1e-4)
            with torch.no_grad():
                logits = model(torch.tensor([row["prompt"] + row["ids"]])).logits[0, len(row["prompt"]) - 1 : -1]
            ours = logits.log_softmax(-1).gather(-1, torch.tensor(row["ids"])[:, None])[:, 0].tolist()
            for new, old in zip(ours, row["log_probs"], strict=True):
                ratio = math.exp(new - old)
                inside = min(max(ratio, 1 - epsilon), 1 + epsilon)
                total -= min(ratio * advantage, inside * advantage)
                clipped += (ratio < 1 - epsilon and advantage < 0) or (ratio > 1 + epsilon and advantage > 0)
                tokens += 1
    return total / tokens, clipped / tokens


def test_the_loss_weighs_each_token_by_the_probability_that_the_server_drew_it_with(tiny_model, in_tmp, vllm):
    stand_in, url = vllm
    run = planned(in_tmp / "run", tiny_model, vllm_server_base_url=url, max_steps=1, epsilon=0.5)
    train(run)
    assert len(stand_in.given) == 8 and len({len(row["ids"]) for row in stand_in.given}) > 1
    loss, clipped = by_hand(tiny_model, stand_in.given, 0.5)
    (step,) = run.steps()
    assert abs(loss) > 0.1 and 0.1 < clipped < 0.9
    assert step["loss"] == pytest.approx(loss, rel=1e-4)
    assert step["clip_ratio"] == pytest.approx(clipped, abs=1e-6)
    assert step["reward"] == pytest.approx(sum(score_of(row["ids"]) for row in stand_in.given) / 8)


def test_log_probabilities_of_another_distribution_are_not_used_and_that_is_said(tiny_model, in_tmp, vllm):
    stand_in, url = vllm
    # a server that gives them after top_p: its likeliest token changes with the temperature
    stand_in.change = lambda answer: scaled(answer, stand_in.completions()[-1]["temperature"])
    run = planned(in_tmp / "run", tiny_model, vllm_server_base_url=url, max_steps=1, top_p=0.5)
    train(run)
    assert any("as drawn by the policy that is trained" in note and "top_p" in note for note in notes(run))
    (step,) = run.steps()
    assert step["clip_ratio"] == 0


def scaled(answer: dict[str, Any], temperature: float) -> None:
    for choice in answer["choices"]:
        choice["logprobs"]["top_logprobs"] = [{"x": -1.0 * temperature}]


# --- a server that goes away ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "answered", "changes"),
    [
        (2, 0, {}),
        (2, 1, {}),  # prompts of the step after it
        (4, 0, {}),  # at the end of a pass over the prompts
        (2, 1, {"logging_steps": 3}),
        (2, 0, {"num_iterations": 2}),
        (3, 0, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    ],
)
def test_a_run_whose_server_went_away_goes_on_when_it_is_back_as_if_nothing_had_been(
    tiny_model, in_tmp, vllm, steps, answered, changes
):
    stand_in, url = vllm
    settings = {"vllm_server_base_url": url, "max_steps": 6, "save_steps": 50, **changes}
    whole = planned(in_tmp / "whole", tiny_model, **settings)
    train(whole)
    assert not list(whole.checkpoints.glob("checkpoint-[1-5]"))
    stand_in.asked.clear()

    run = planned(in_tmp / "run", tiny_model, **settings)
    generations = steps // changes.get("num_iterations", 1)
    stand_in.dies_at = generations * PROMPTS_A_STEP + answered
    with pytest.raises(ServerFailed) as failed:
        train(run)
    text = str(failed.value)
    assert text.startswith(f"the vLLM server at {url}/v1 did not answer ") and "see that it runs" in text
    assert f"The checkpoint of step {steps} is kept in {str(run.checkpoints / f'checkpoint-{steps}')!r}" in text
    assert text.endswith(f"go on with `praison-agent-rl train --resume {run.root}`")
    assert not run.adapter.exists() and not list((run.root / "policies").iterdir())

    stand_in.dies_at = None
    train(run, resume=True)
    assert f"going on from checkpoint-{steps}" in notes(run)
    assert same(adapter_of(run), adapter_of(whole))
    if not changes:
        assert [step["loss"] for step in run.steps()] == [step["loss"] for step in whole.steps()]


def test_a_server_that_goes_away_at_once_or_again_leaves_the_checkpoint_that_is_there(tiny_model, in_tmp, vllm):
    stand_in, url = vllm
    run = planned(in_tmp / "run", tiny_model, vllm_server_base_url=url, max_steps=3, save_steps=50)
    stand_in.dies_at = 0
    with pytest.raises(ServerFailed, match=r"No step was saved; when .* train --resume"):
        train(run)
    stand_in.dies_at = PROMPTS_A_STEP
    for _ in range(2):
        with pytest.raises(ServerFailed, match="The checkpoint of step 1 is kept"):
            train(run, resume=True)
    assert [path.name for path in run.checkpoints.glob("checkpoint-*")] == ["checkpoint-1"]


def test_an_answer_to_half_a_step_is_no_place_to_go_on_from(tiny_model, in_tmp, vllm):
    stand_in, url = vllm
    # a generation for each half of a step, of one prompt
    halves = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "per_device_train_batch_size": 4}
    run = planned(in_tmp / "run", tiny_model, vllm_server_base_url=url, save_steps=50, **halves)
    stand_in.dies_at = 3
    with pytest.raises(ServerFailed, match="No step was saved"):
        train(run)
    assert [step["step"] for step in run.steps()] == [1]


def test_weights_that_became_nan_are_said_and_not_saved(tiny_model, in_tmp, vllm):
    stand_in, url = vllm

    def broken_from_the_second_step(answer: dict[str, Any]) -> None:
        if len(stand_in.weights) > 1:
            for choice in answer["choices"]:
                choice["logprobs"]["token_logprobs"][0] = math.nan

    stand_in.change = broken_from_the_second_step
    settings = {"vllm_server_base_url": url, "save_steps": 50, "max_grad_norm": 0}
    run = planned(in_tmp / "run", tiny_model, optim="sgd", learning_rate=3e38, **settings)
    with pytest.raises(TrainingFailed, match=r"hold NaN or infinity .*lower learning_rate"):
        train(run)
    assert not list(run.checkpoints.glob("checkpoint-*"))


def test_a_server_of_the_runs_own_that_dies_ends_it_with_its_log_and_leaves_no_process(tiny_model, in_tmp, monkeypatch):
    command = Command(in_tmp, dies_at=PROMPTS_A_STEP)
    monkeypatch.setenv(EXECUTABLE, str(command.path))
    run = planned(in_tmp / "run", tiny_model, max_lora_rank=8, vllm_server_options=["--seed", "3"], save_steps=50)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ServerFailed, match=r"(?s)its log:.*EngineCore died.*The checkpoint of step 1 is kept in"):
        train(run)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not list((run.root / "policies").iterdir())

    healthy = Command(shutil.copytree(in_tmp, in_tmp.parent / "healthy", ignore=lambda *_: os.listdir(in_tmp)))
    monkeypatch.setenv(EXECUTABLE, str(healthy.path))
    train(run, resume=True)
    assert "going on from checkpoint-1" in notes(run) and run.adapter.is_dir()
    assert set(psutil.Process().children(recursive=True)) <= before
    (started,) = healthy.told()
    words = started["words"]
    assert words[:2] == ["serve", str(tiny_model)] and words[words.index("--max-lora-rank") + 1] == "8"
    assert words[-2:] == ["--seed", "3"] and "--enforce-eager" in words and ended(started["pid"])


def test_a_server_without_memory_is_not_taken_for_a_run_without(tiny_model, in_tmp, monkeypatch):
    monkeypatch.setenv(EXECUTABLE, str(Command(in_tmp, says="torch.OutOfMemoryError: CUDA out of memory").path))
    run = planned(in_tmp / "run", tiny_model)
    with pytest.raises(ServerFailed, match=r"(?s)ended with code 1.*CUDA out of memory"):
        train(run)
    assert [event for _, event in run.events() if event["event"] == "diagnosis"] == []
