"""A run that shares prompts logs what the same run by TRL alone logs, also where it was stopped and resumed."""

import shutil

import pytest

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
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
    ours, theirs = run.steps(), trl.steps()
    assert [step["step"] for step in ours] == [step["step"] for step in theirs] and len(ours) > 4
    for one, other in zip(ours, theirs, strict=True):
        assert {name: one[name] for name in SAME} == {name: other[name] for name in SAME}, one["step"]
        for name in NEAR:
            if other[name] is None:  # of a run without a reference
                assert one[name] is None
                continue
            assert one[name] == pytest.approx(other[name], rel=RELATIVE, abs=1e-6), (one["step"], name)
    # what is left out of a step is told, and is at least the groups of which all answers scored the same
    assert all(0 <= step["skipped"] <= 1 for step in ours) and not any("skipped" in step for step in theirs)
    assert len({step["reward"] for step in ours}) > 4 and any(step["grad_norm"] > 0.01 for step in ours)


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
