"""A run that is killed, asked to end, or meets a full disk loses nothing: gone on with, it is the same run.

A small part of what ``make test-faults`` does.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.stop_requests import ask_to_end, is_asked_to_end
from praison_agent_rl.training import grpo, interruptions
from praison_agent_rl.training.interruptions import Ending

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are forked and killed, which Windows cannot")


def done_by(folder: Path, *whats: str) -> list[dict[str, Any]]:
    """What ``tests.disturbed_saves`` has done, in a process that has imported everything once."""
    words = [sys.executable, "-m", "tests.disturbed_saves", str(folder), *whats]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found = done_by(
        tmp_path_factory.mktemp("disturbed"), "kills:blocks:3", "operations:3", "signals:SIGTERM:file", "full"
    )
    return {what: [one for one in found if one["what"] == what] for what in ("kills", "operations", "signals", "full")}


def test_killed_runs_come_to_the_result_that_they_would_have_had_bit_for_bit(disturbed: Any) -> None:
    assert [(one["code"], one["different"]) for one in disturbed["kills"]] == [(0, [])] * 3, disturbed["kills"]


def test_at_whichever_operation_on_files_a_save_dies_something_whole_is_there(disturbed: Any) -> None:
    saves = {one["of"]: one for one in disturbed["operations"]}
    assert saves.keys() == {"a checkpoint", "the best", "the adapter"}
    assert all(one["deaths"] > 10 for one in saves.values()), saves
    assert [one["faults"] for one in saves.values()] == [[], [], []]


@pytest.mark.parametrize("way", ["SIGTERM", "file"])
def test_a_run_that_is_asked_to_end_saves_between_two_generations_and_goes_on_exactly(disturbed: Any, way: str) -> None:
    (one,) = [one for one in disturbed["signals"] if one["way"] == way]
    # asked at step 5 or soon after; a generation is used up in 4 updates
    assert one["code"] == 1 and one["checkpoints"][-1] in (8, 12) and one["different"] == []
    step = one["checkpoints"][-1]
    assert f"RunInterrupted: the run was asked to end and did so after step {step} of 16; its checkpoint" in one["said"]
    assert "Go on with `praison-agent-rl train --resume " in one["said"]


def test_a_second_signal_ends_the_process_within_the_step(disturbed: Any) -> None:
    (twice,) = [one for one in disturbed["signals"] if one["way"] == "twice"]
    assert twice["still"] and twice["code"] == 1 and twice["said"].endswith("Terminated")


def test_a_full_disk_costs_no_checkpoint_and_the_run_goes_on_exactly(disturbed: Any) -> None:
    (full,) = disturbed["full"]
    assert full["code"] == 1 and "is full (stage train); make room there, then go on with the run" in full["said"]
    assert full["checkpoints"] == ["checkpoint-3"] and full["different"] == []


# --- where a run is saved ---------------------------------------------------------------------------------------------


class Updates:
    """A trainer of which no more is there than where it stands: ``used`` micro-batches, ``block`` for a generation."""

    def __init__(self, block: int) -> None:
        self.block, self.used = block, 0
        self.accelerator = SimpleNamespace(num_processes=1, is_main_process=True)
        self.state = SimpleNamespace(global_step=0, max_steps=100)

    def is_exact_here(self) -> bool:
        return self.used % self.block == 0


def saved_at(run: RunFolder, updates: list[int], block: int, due: set[int], asked_at: int = 0) -> list[int]:
    """The updates after which is saved, of updates that take so many micro-batches; it ends where it is asked to."""
    trainer = Updates(block)
    ending, saved = Ending(run, trainer), []
    for number, batches in enumerate(updates, 1):
        trainer.used += batches
        control = TrainerControl(should_save=number in due, should_training_stop=number == len(updates))
        if number == asked_at:
            ask_to_end(run)
        ending.on_step_end(None, trainer.state, control)
        if control.should_save:
            saved.append(number)
        if control.should_training_stop:
            break
    return saved


@pytest.mark.parametrize(
    ("updates", "block", "due", "saved"),
    [
        ([1] * 6, 1, {2, 4, 6}, [2, 4, 6]),
        ([2] * 9, 8, {2, 3, 5}, [4, 8]),  # 4 updates use a generation up; two that were due in it are one
        ([2] * 8, 8, {8}, [8]),
        ([2] * 7, 8, {3, 7}, [4, 7]),  # of the last update nothing is trained
        ([4, 2] * 3, 3, {1, 3}, [2, 4]),  # passes of 6 micro-batches, the last update of each is short
        ([3] * 4, 2, {1, 4}, [2, 4]),
    ],
)
def test_a_save_that_is_due_is_put_off_until_no_rollout_is_left(tmp_path, updates, block, due, saved) -> None:
    assert saved_at(RunFolder(tmp_path), updates, block, due) == saved


def test_a_run_ends_where_it_can_be_gone_on_with_and_is_not_asked_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert saved_at(run, [2] * 8, 8, set(), asked_at=2) == [4]
    assert not is_asked_to_end(run)
    assert saved_at(run, [2] * 9, 8, {6}) == [8]


@pytest.mark.parametrize(
    ("keys", "saves"),
    [
        ({"save_steps": 5}, 5),
        ({"save_steps": 5, "num_iterations": 2}, 6),
        ({"save_steps": 5, "gradient_accumulation_steps": 4, "steps_per_generation": 6}, 6),  # 12 batches are 3 updates
        ({"save_steps": 5, "gradient_accumulation_steps": 2, "generation_batch_size": 64}, 8),  # 8 batches are 4
        ({"save_steps": 0.1, "num_iterations": 2}, 0.1),
    ],
)
def test_whole_numbers_of_steps_between_saves_are_rounded_up_to_generations(tmp_path, keys, saves) -> None:
    given = {"num_generations": 4, "per_device_train_batch_size": 8, **keys}
    config = TrainConfig.load(given, need_model=False, need_data=False)
    assert grpo._arguments(RunFolder(tmp_path), config, [1.0], "cpu").save_steps == saves


def test_a_full_disk_does_not_keep_a_signal_from_ending_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    run = RunFolder(tmp_path)
    monkeypatch.setattr(run, "report_event", full)
    ending = Ending(run, Updates(1))
    with ending.heeded():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ending.asked


def test_processes_that_see_different_checkpoints_do_not_begin(tmp_path: Path, monkeypatch: Any) -> None:
    run, trainer = RunFolder(tmp_path), Updates(1)
    trainer.state.global_step = 6
    ending = Ending(run, trainer)
    ending.on_train_begin(None, trainer.state, None)
    monkeypatch.setattr(interruptions, "everywhere", lambda own: [6, 6, 4])
    with pytest.raises(TrainingFailed, match=r"would go on from different steps \(6, 6, 4, by rank\)"):
        ending.on_train_begin(None, trainer.state, None)
