"""A GRPO run goes on whatever its rewards do, and ends, with its checkpoint, where one of them fails too often."""

import asyncio
import json
import re
import threading
import time

import numpy as np
import pytest
import torch
from peft import LoraConfig

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import to_dataset
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.models import load_model, load_tokenizer
from praison_agent_rl.records import PlannedReward
from praison_agent_rl.rewards import Reward, prepare
from praison_agent_rl.runs import RunFolder, write_record
from praison_agent_rl.stages import planned_rewards
from praison_agent_rl.training import grpo
from praison_agent_rl.training.grpo import PolicyTrainer, train_grpo
from tests.model.test_grpo import lower_case, notes, planned, rows_of, trainer_for

pytestmark = pytest.mark.usefixtures("one_thread")

BAD = "three"  # of the 8 prompts, 2 in a batch of 8 completions: it comes once in 4 steps


def whole(tiny_model, folder, *, steps=4, **changes):
    return planned(folder, tiny_model, max_steps=steps, watch=False, curriculum=False, **changes)


def calls_of(run, name="r"):
    return [step["calls"][name] for step in run.steps()]


def only_for(prompts, completions, fault):
    """`lower_case`, but ``fault`` is called where the bad prompt is among those asked about."""
    if any(prompt == BAD for prompt in prompts):
        return fault(completions)
    return lower_case(completions)


def raises(completions):
    raise ValueError("row 7")


def exits(completions):
    raise SystemExit(3)


def hangs(completions):
    time.sleep(600)


def loops(completions):
    while True:
        pass


def backtracks(completions):
    re.match(r"(a+)+$", "a" * 50 + "b")


def waits_for_a_lock(completions):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# --- faults that cost only the samples that they concern --------------------------------------------------------------


@pytest.mark.parametrize("fault", [raises, exits, hangs, loops, backtracks, waits_for_a_lock])
def test_a_call_that_fails_on_one_prompt_costs_only_its_completions(fault, tiny_model, in_tmp):
    def reward(prompts, completions, **_):
        return only_for(prompts, completions, fault)

    run = whole(tiny_model, in_tmp / "run", reward_timeout=1.0, reward_retries=0, reward_failures=0.3)
    train_grpo(run, rows_of(), [Reward(reward, "r")])
    assert [step["step"] for step in run.steps()] == [1, 2, 3, 4] and run.adapter.is_dir()
    # its group of 4 completions is half of one batch; the other group keeps its scores, and its signal
    assert sorted(call["failed"] for call in calls_of(run)) == [0, 0, 0, 0.5]
    (bad,) = [step for step in run.steps() if step["calls"]["r"]["failed"]]
    assert bad["reward"] is not None and bad["calls"]["r"]["none"] == 0
    words = "did not end within" if fault not in (raises, exits) else "failed: "
    assert words in bad["calls"]["r"]["error"]
    said = [text for text in notes(run) if text.startswith("reward 'r'")]
    assert len(said) == 2 and "4 of 8 completions of this batch count as None" in said[0]
    assert said[1].startswith("reward 'r' gave no sound score for 4 of 32 completions (")


@pytest.mark.parametrize("fault", ["raises", "hangs", "blocks"])
def test_an_async_reward_that_fails_on_one_prompt_costs_only_its_completions(fault, tiny_model, in_tmp):
    async def reward(prompts, completions, **_):
        await asyncio.sleep(0)
        if BAD in prompts:
            if fault == "raises":
                raise ValueError("row 7")
            await asyncio.sleep(600 if fault == "hangs" else 0)
            if fault == "blocks":
                time.sleep(4)
        return lower_case(completions)

    async def steady(completions, **_):
        return [0.5] * len(completions)

    run = whole(tiny_model, in_tmp / "run", reward_timeout=1.0, reward_retries=0, reward_failures=0.5)
    train_grpo(run, rows_of(), [Reward(reward, "r"), Reward(steady, "s", 2.0)])
    assert len(run.steps()) == 4 and run.adapter.is_dir()
    assert sorted(call["failed"] for call in calls_of(run)) == [0, 0, 0, 0.5]
    assert [call["failed"] for call in calls_of(run, "s")] == [0, 0, 0, 0]
    assert [step["rewards"]["s"] for step in run.steps()] == [0.5] * 4


def test_a_training_run_off_the_main_thread_outlives_a_reward_that_hangs_on_one_sample(tiny_model, in_tmp):
    hung = []

    def reward(prompts, completions, **_):
        if BAD in prompts and not hung:
            worst = completions[0]
            hung.append(worst)
        while hung and hung[0] in completions and BAD in prompts:
            time.sleep(0.01)
        return lower_case(completions)

    run = whole(tiny_model, in_tmp / "run", reward_timeout=1.0, reward_retries=0)
    errors = []

    def train():
        try:
            train_grpo(run, rows_of(), [Reward(reward, "r")])
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert errors == [] and len(run.steps()) == 4 and run.adapter.is_dir()
    assert hung and sum(call["failed"] for call in calls_of(run)) == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    ("returned", "scored"),
    [
        (lambda c: [float("nan"), *[0.25] * 7], {"failed": 1 / 8, "nan": 1}),
        (lambda c: [float("inf"), -float("inf"), *[0.25] * 6], {"failed": 2 / 8, "infinite": 2}),
        (lambda c: ["good", "0.5", *[0.25] * 6], {"failed": 2 / 8}),
        (lambda c: [{"score": 1}, *[0.25] * 7], {"failed": 1 / 8}),
        (lambda c: [None, *[0.25] * 7], {"failed": 0, "none": 1 / 8}),
        (lambda c: torch.tensor([float("nan"), *[0.25] * 7]), {"failed": 1 / 8, "nan": 1}),
        (lambda c: np.array([1e39, *[0.25] * 7]), {"failed": 1 / 8, "infinite": 1}),  # TRL keeps them in float32
        (lambda c: c[:7] and [0.25] * 7, {"failed": 0}),  # asked one by one it gives one for each
        (lambda c: {text: 0.25 for text in c}, {"failed": 0}),
        (lambda c: 0.25, {"failed": 0}),
        (lambda c: "12345678", {"failed": 0}),
    ],
)
def test_what_is_no_score_at_one_step_costs_its_samples_and_not_the_run(returned, scored, tiny_model, in_tmp):
    steps = []

    def reward(completions, trainer_state, **_):
        if trainer_state.global_step == 1 and len(completions) == 8:
            steps.append(trainer_state.global_step)
            return returned(completions)
        return lower_case(completions)

    run = whole(tiny_model, in_tmp / "run", reward_failures=0.5)
    train_grpo(run, rows_of(), [Reward(reward, "r")])
    assert steps and len(run.steps()) == 4 and run.adapter.is_dir()
    for step, call in enumerate(calls_of(run)):
        found = {name: call[name] for name in scored}
        assert found == (
            {name: pytest.approx(value) for name, value in scored.items()}
            if step == 1
            else {**dict.fromkeys(scored, 0)}
        )
    assert all(step["reward"] is not None and step["grad_norm"] > 0 for step in run.steps() if step["step"] != 2)


def test_a_reward_cannot_change_what_the_others_and_the_trainer_are_given(tiny_model, in_tmp):
    seen = {"before": [], "after": []}

    def looks(name):
        def reward(prompts, completions, completion_ids, tag, **_):
            seen[name].append(json.dumps([prompts, completions, completion_ids, tag]))
            return lower_case(completions)

        return reward

    def vandal(prompts, completions, completion_ids, tag, **_):
        scores = lower_case(completions)
        for given in (prompts, completions, completion_ids, tag):
            given[:] = [None] * len(given)
        return scores

    rows = [{**row, "tag": ["x"]} for row in rows_of()]
    run = whole(tiny_model, in_tmp / "run", steps=2)
    rewards = [Reward(looks("before"), "b"), Reward(vandal, "v"), Reward(looks("after"), "a")]
    train_grpo(run, rows, rewards)
    assert len(seen["before"]) == 2 and seen["before"] == seen["after"]
    assert run.adapter.is_dir()


def test_what_a_reward_logs_is_passed_on_in_order_even_when_it_was_asked_in_parts(tiny_model, in_tmp):
    def reward(prompts, completions, log_extra, log_metric, **_):
        if BAD in prompts and len(completions) > 1:
            raise ValueError("too many")
        log_extra("letters", [len(text) for text in completions])
        log_metric("share", float(len(completions)))
        log_metric("share", "not a number")
        return lower_case(completions)

    run = whole(tiny_model, in_tmp / "run")
    logged = []
    trainer = trainer_for(run, tiny_model, rewards=[Reward(reward, "r")])
    log, metric = trainer._log_completion_extra, []
    trainer._log_completion_extra = lambda column, values: (logged.append((column, values)), log(column, values))
    trainer._log_metric = lambda name, value: metric.append((name, value))
    rows = [{"prompt": row["prompt"]} for row in rows_of([BAD] * 4 + ["one"] * 4)]
    texts = ["a", "ab", "abc", "", "a", "ab", "abc", "abcd"]
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    found = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], answers, [[1]] * 8)
    assert found.shape == (8, 1) and not found.isnan().any()
    assert logged == [("letters", [1, 2, 3, 0, 1, 2, 3, 4])]
    assert metric == [("share", 1.0)] * 4 + [("share", 4.0)]


def test_a_reward_model_is_left_to_trl_and_stands_in_its_place(tiny_model, in_tmp):
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    model = LlamaForSequenceClassification.from_pretrained(tiny_model, num_labels=1).eval()
    run = whole(tiny_model, in_tmp / "run")
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    trainer = PolicyTrainer(
        model=load_model(str(tiny_model), config, device="cpu"),
        reward_funcs=[Reward(lower_case, "lower"), model, Reward(lambda completions: [2.0] * len(completions), "two")],
        args=grpo._arguments(run, config, [1.0, 1.0, 1.0], "cpu"),
        train_dataset=to_dataset(rows_of()),
        processing_class=load_tokenizer(str(tiny_model), config),
        peft_config=LoraConfig(**config.lora_arguments()),
    )
    rows = rows_of(["one", "two"])
    answers = [[{"role": "assistant", "content": text}] for text in ("abc", "A")]
    found = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], answers, [[1], [2]])
    ids = [tiny_text(row["prompt"] + answer, config, tiny_model) for row, answer in zip(rows, answers, strict=True)]
    wanted = [float(model(input_ids=one).logits[0, 0].detach()) for one in ids]
    assert found[:, 0].tolist() == [1.0, 0.0] and found[:, 2].tolist() == [2.0, 2.0]
    assert found[:, 1].tolist() == pytest.approx(wanted, rel=1e-4)
    assert len(trainer.reward_funcs) == 3


def tiny_text(messages, config, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model), config)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]


# --- names ------------------------------------------------------------------------------------------------------------


def test_two_lambdas_keep_their_names_in_every_metric(tiny_model, in_tmp):
    fns = [
        lambda completions, **_: [0.25 + 0.001 * len(text) for text in completions],
        lambda completions, **_: [None, *[0.75] * (len(completions) - 1)],
    ]
    rewards = prepare(fns, prompts=[row["prompt"] for row in rows_of()], columns={})
    assert [reward.name for reward in rewards] == ["lambda_1", "lambda_2"]
    run = whole(tiny_model, in_tmp / "run", steps=2)
    train_grpo(run, rows_of(), rewards)
    for step in run.steps():
        assert step["rewards"].keys() == step["rewards_std"].keys() == step["calls"].keys() == {"lambda_1", "lambda_2"}
        assert 0.25 <= step["rewards"]["lambda_1"] < 0.3 and step["rewards"]["lambda_2"] == pytest.approx(0.75)
        assert (step["calls"]["lambda_1"]["none"], step["calls"]["lambda_2"]["none"]) == (0, 1 / 8)


# --- a run that ends --------------------------------------------------------------------------------------------------


def test_a_reward_that_fails_too_often_ends_the_run_with_its_reason_and_a_checkpoint(tiny_model, in_tmp):
    def reward(completions, trainer_state, **_):
        if trainer_state.global_step >= 3:
            raise ConnectionError("the judge is gone")
        return lower_case(completions)

    run = whole(tiny_model, in_tmp / "run", steps=20)
    with pytest.raises(TrainingFailed) as failed:
        train_grpo(run, rows_of(), [Reward(lower_case, "steady"), Reward(reward, "judge")])
    text = str(failed.value)
    # the calls of steps 1 to 5 hold 40 completions; with that of step 4, 8 of 32 or a quarter failed
    assert text.startswith(
        "training was stopped at step 4: reward 'judge' gave no sound score for 8 of the last 32 completions (25%; "
        "reward_failures allows 20%). The first: it failed: ConnectionError: the judge is gone (completion: "
    )
    assert f"'{run.checkpoints / 'checkpoint-4'}'" in text and f"praison-agent-rl train --resume {run.root}" in text
    assert not run.adapter.exists() and [step["step"] for step in run.steps()] == [1, 2, 3, 4]


def test_one_bad_call_alone_ends_no_run(tiny_model, in_tmp):
    def reward(completions, trainer_state, **_):
        if trainer_state.global_step == 0:
            raise ConnectionError("not up yet")
        return lower_case(completions)

    run = whole(tiny_model, in_tmp / "run", steps=6, reward_failures=0.5)
    train_grpo(run, rows_of(), [Reward(reward, "r")])
    assert [call["failed"] for call in calls_of(run)] == [1, 0, 0, 0, 0, 0] and run.adapter.is_dir()


REWARDS = """
def letters(completions, trainer_state, **_):
    if BROKEN and trainer_state.global_step >= 2:
        raise KeyError("gold")
    return [sum(char.isascii() and char.islower() for char in text) / max(len(text), 1) for text in completions]
"""


def test_a_stopped_run_is_gone_on_with_once_the_reward_is_mended(tiny_model, in_tmp, monkeypatch):
    import importlib
    import sys

    monkeypatch.syspath_prepend(str(in_tmp))
    (in_tmp / "mendable.py").write_text("BROKEN = True\n" + REWARDS)
    run = whole(tiny_model, in_tmp / "run", steps=6, save_strategy="steps", save_steps=100, save_total_limit=0)
    spec = PlannedReward(spec="mendable:letters", name="letters", weight=1.0, prompts="text", completions="text")
    write_record(run.plan_file, run.plan.model_copy(update={"rewards": [spec]}))
    with pytest.raises(TrainingFailed, match="stopped at step 3: reward 'letters' gave no sound score"):
        train_grpo(run, rows_of(), planned_rewards(run))

    (in_tmp / "mendable.py").write_text("BROKEN = False\n" + REWARDS)
    del sys.modules["mendable"]
    importlib.invalidate_caches()
    again = RunFolder(run.root)
    train_grpo(again, rows_of(), planned_rewards(again), resume=True)
    assert "going on from checkpoint-3" in notes(again)
    assert [step["step"] for step in again.steps()] == [1, 2, 3, 4, 5, 6]
    assert [call["failed"] for call in calls_of(again, "letters")] == [0, 0, 1, 0, 0, 0] and again.adapter.is_dir()
    sys.modules.pop("mendable", None)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_scores_that_are_known_are_not_asked_again_and_the_hits_are_told(tiny_model, in_tmp):
    first, second = (whole(tiny_model, in_tmp / name, steps=2) for name in ("one", "two"))
    for run in (first, second):
        train_grpo(run, rows_of(), [Reward(lower_case, "r")])
    # the same seed: the second run sees the same completions
    assert [call["hits"] for call in calls_of(first)] == [0, 0]
    assert [call["hits"] for call in calls_of(second)] == [8, 8]
    assert [step["reward"] for step in first.steps()] == [step["reward"] for step in second.steps()]
    off = whole(tiny_model, in_tmp / "off", steps=2, reward_cache=False)
    train_grpo(off, rows_of(), [Reward(lower_case, "r")])
    assert [call["hits"] for call in calls_of(off)] == [0, 0]
