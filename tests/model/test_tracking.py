"""Whatever `report_to` names is told of each step, and of each reward by the name that the user knows."""

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from praison_agent_rl.rewards import Reward
from praison_agent_rl.training.grpo import train_grpo
from tests.model.test_grpo import lower_case, planned, rows_of

REWARDS = [Reward(lower_case, "lower case"), Reward(lambda completions, **_: [0.25] * len(completions), "quarter", 2.0)]


class Heard(TrainerCallback):
    """What a tracker's callback is given: the arguments that it sets itself up by, and each step's metrics."""

    def __init__(self):
        self.told: list[tuple[int, dict]] = []
        HEARD.append(self)

    def on_train_begin(self, args, state, control, **_):
        self.run_name, self.output_dir = args.run_name, args.output_dir

    def on_log(self, args, state, control, logs=None, **_):
        self.told.append((state.global_step, dict(logs)))


HEARD: list[Heard] = []


@pytest.mark.parametrize("service", ["tensorboard", "trackio", "wandb"])
def test_the_tracker_is_told_of_each_reward_by_name(service, tiny_model, in_tmp, monkeypatch):
    HEARD.clear()
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, service, Heard)
    run = planned(in_tmp / "run", tiny_model, report_to=service, run_name="attempt 7", max_steps=2)
    train_grpo(run, rows_of(), REWARDS)
    (heard,) = HEARD
    steps = [(step, logs) for step, logs in heard.told if "reward" in logs]
    assert [step for step, _ in steps] == [1, 2] and heard.run_name == "attempt 7"
    assert str(run.root) in heard.output_dir
    for (_, logs), event in zip(steps, run.steps(), strict=True):
        assert logs["rewards/quarter/mean"] == pytest.approx(0.25)
        assert logs["rewards/lower case/mean"] == pytest.approx(event["rewards"]["lower case"])
        assert logs["reward"] == pytest.approx(logs["rewards/lower case/mean"] + 2 * 0.25)
        assert {"rewards/quarter/std", "entropy", "grad_norm", "completions/mean_length"} <= logs.keys()
        assert {"frac_reward_zero_std", "completions/clipped_ratio"} <= logs.keys()


def test_no_tracker_is_called_unless_one_is_named(tiny_model, in_tmp, monkeypatch):
    HEARD.clear()
    for service in list(integration_utils.INTEGRATION_TO_CALLBACK):
        monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, service, Heard)
    train_grpo(planned(in_tmp / "run", tiny_model, max_steps=1), rows_of(), REWARDS)
    assert HEARD == []


def test_tensorboard_has_the_curves_of_each_reward(tiny_model, in_tmp):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = planned(in_tmp / "run", tiny_model, report_to="tensorboard", max_steps=2)
    train_grpo(run, rows_of(), REWARDS)
    (file,) = run.root.rglob("events.out.tfevents.*")
    read = EventAccumulator(str(file.parent)).Reload()
    for name in ("quarter", "lower case"):
        points = read.Scalars(f"train/rewards/{name}/mean")
        assert [point.step for point in points] == [1, 2]
        assert [point.value for point in points] == pytest.approx([step["rewards"][name] for step in run.steps()])
    assert (run.adapter / "adapter_model.safetensors").exists()
