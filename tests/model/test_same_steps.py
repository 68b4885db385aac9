"""A run that shares prompts logs what the same run by TRL alone logs, also where it was stopped and resumed."""

import shutil

import pytest

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.drawing import DrawingTrainer
from praison_agent_rl.training.grpo import train_grpo
from tests.model.test_grpo import SAVING, lower_case, notes, plan, planned, rows_of

STEPS = 20
RELATIVE = 1e-5
SAME = ("reward", "reward_std", "rewards", "mean_length", "clipped", "frac_reward_zero_std")
NEAR = ("grad_norm", "loss", "kl")
# 8 tokens are one block of sampling, so that both ways draw the same random numbers in the same order. Rewards are then
# equal to the last bit as long as no draw falls within rounding of a border between two tokens; with these seeds none
# does. Plain gradient descent with a small rate: Adam makes a whole step of a gradient that is nothing but rounding,
# and with six times this rate a rounding grows tenfold in four steps.
SETTINGS = {"max_completion_length": 8, "optim": "sgd", "learning_rate": 0.05, "max_steps": STEPS, "seed": 7}
SETTINGS["sampler"] = "generate"  # as TRL does; the decoder of this package draws others of the same distribution
WAYS = {
    "plainly": {},
    "with a reference": {"beta": 0.05},
    "two updates with each sample": {"num_iterations": 2},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "sampled for four steps": {"steps_per_generation": 4, "num_generations": 4, "per_device_train_batch_size": 8},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def trained(root, base, *, share, **changes):
    run = planned(root, base, **{**SETTINGS, **changes})
    train_grpo(run, rows_of(), [Reward(lower_case, "lower")], share=share)
    return run


def assert_same(run, trl):
    assert_same_numbers(run, trl)
    # what is left out of a step is told, and is at least the groups of which all answers scored the same
    assert all(0 <= step["skipped"] <= 1 for step in run.steps())
    assert not any("skipped" in step for step in trl.steps())
    assert len({step["reward"] for step in run.steps()}) > 4 and any(step["grad_norm"] > 0.01 for step in run.steps())


def assert_same_numbers(run, trl):
    ours, theirs = run.steps(), trl.steps()
    assert [step["step"] for step in ours] == [step["step"] for step in theirs] and len(ours) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert {name: one[name] for name in SAME} == {name: other[name] for name in SAME}, one["step"]
        for name in NEAR:
            if other[name] is None:  # of a run without a reference
                assert one[name] is None
                continue
            assert one[name] == pytest.approx(other[name], rel=RELATIVE, abs=1e-6), (one["step"], name)


@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_log_what_trl_logs(way, tiny_model, in_tmp):
    run = trained(in_tmp / "ours", tiny_model, share=True, **WAYS[way])
    trl = trained(in_tmp / "trl", tiny_model, share=False, **WAYS[way])
    assert [note for note in notes(run) if "not shared" in note] == []
    assert [note for note in notes(trl) if "not shared" in note] == ["prompts are not shared: it was asked not to"]
    assert_same(run, trl)


def test_a_run_that_was_stopped_half_way_and_resumed_logs_what_trl_logs(tiny_model, in_tmp):
    saving = {**SETTINGS, **SAVING, "save_steps": STEPS // 2}
    stopped = trained(in_tmp / "stopped", tiny_model, share=True, **{**saving, "max_steps": STEPS // 2})
    shutil.copytree(stopped.root, in_tmp / "resumed")
    resumed = RunFolder(in_tmp / "resumed")
    config = TrainConfig.load({**stopped.plan.config, "max_steps": STEPS}, need_model=False, need_data=False)
    plan(resumed, tiny_model, config)
    train_grpo(resumed, rows_of(), [Reward(lower_case, "lower")], resume=True)
    assert "going on from checkpoint-10" in notes(resumed)
    assert_same(resumed, trained(in_tmp / "trl", tiny_model, share=False, **saving))


@pytest.mark.parametrize("way", ["two updates with each sample", "sampled for four steps"])
def test_log_probabilities_from_drawing_are_those_that_trl_computes_once_more(way, tiny_model, in_tmp, monkeypatch):
    changes = {**WAYS[way], "sampler": "exact", "max_steps": 8}  # a rounding grows from step to step
    run = trained(in_tmp / "known", tiny_model, share=True, **changes)
    known = []

    def ask_again(self, length):
        known.append(self._behaviour is not None)
        self._behaviour = None

    monkeypatch.setattr(DrawingTrainer, "_known_from_drawing", ask_again)
    again = trained(in_tmp / "again", tiny_model, share=True, **changes)
    assert any(known)
    assert_same_numbers(run, again)


def test_a_run_by_the_decoder_that_was_resumed_is_the_run_that_was_not(tiny_model, in_tmp):
    saving = {**SETTINGS, **SAVING, "save_steps": STEPS // 2, "sampler": "exact"}
    stopped = trained(in_tmp / "stopped", tiny_model, share=True, **{**saving, "max_steps": STEPS // 2})
    config = TrainConfig.load({**stopped.plan.config, "max_steps": STEPS}, need_model=False, need_data=False)
    plan(stopped, tiny_model, config)
    train_grpo(stopped, rows_of(), [Reward(lower_case, "lower")], resume=True)
    whole = trained(in_tmp / "whole", tiny_model, share=True, **saving)
    assert [(step["reward"], step["grad_norm"]) for step in stopped.steps()] == [
        (step["reward"], step["grad_norm"]) for step in whole.steps()
    ]
