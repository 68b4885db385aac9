"""Every kind of run is killed again and again, on a full disk and from the command line too: ``make test-faults``."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.killed_runs import KINDS, rows_of
from tests.model.test_interruptions import done_by

if "PRAISON_AGENT_RL_FAULTS" not in os.environ:
    pytest.skip("PRAISON_AGENT_RL_FAULTS is not set; make test-faults sets it", allow_module_level=True)

KILLS = 12
"""For each kind of run."""
REWARD = '''
def letters(completions, **_):
    """Share of small letters."""
    return [sum(char.islower() for char in text) / max(len(text), 1) for text in completions]
'''


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_come_to_the_result_that_they_would_have_had(tmp_path: Path, kind: str) -> None:
    found = done_by(tmp_path, f"kills:{kind}:{KILLS}")
    assert len(found) == KILLS
    assert [one for one in found if one["code"] or one["different"]] == []
    moments = [moment for one in found for moment in one["killed"]]
    assert sum(moment != "after its end" for moment in moments) >= KILLS // 2, moments


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_disk_that_holds_one_checkpoint_and_not_two_costs_none(tmp_path: Path) -> None:
    (full,) = done_by(tmp_path, "tmpfs")
    assert full["code"] == 1 and "is full (stage train); make room there, then go on with the run" in full["said"]
    assert full["checkpoints"] == ["checkpoint-3"] and full["different"] == []


def test_at_whatever_operation_on_files_a_save_dies_something_whole_is_there(tmp_path: Path) -> None:
    saves = {one["of"]: one for one in done_by(tmp_path, "operations")}
    assert saves.keys() == {"a checkpoint", "the best", "the adapter"}
    assert all(one["deaths"] > 40 for one in saves.values()), saves
    assert [one["faults"] for one in saves.values()] == [[], [], []]


def test_ctrl_c_in_the_process_that_trains_is_an_interrupt_once_it_has_saved(tmp_path: Path) -> None:
    asked, twice = done_by(tmp_path, "signals:SIGINT")
    assert "KeyboardInterrupt: the run was asked to end and did so after step" in asked["said"], asked
    assert asked["different"] == [] and twice["code"] == 1


# --- from the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration in a folder of its own, and a run of it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "lettered.py").write_text(REWARD)
    asked = [f"{n} {row['prompt'][0]['content']}" for n, row in enumerate(rows_of("grpo") * 3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    config = {
        "model_name": str(tiny_model), "dataset": "prompts.jsonl", "reward_funcs": ["lettered:letters"], "held_out": 0,
        "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 6, "learning_rate": 1e-2,
        "max_steps": 40, "save_steps": 10, "lora_r": 4,
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config))
    done = command(folder, "train", "config.yaml", "--set", "output_dir=whole")
    _, said = done.communicate(timeout=300)
    assert done.returncode == 0, said
    return folder


def command(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """The command of the package, on one thread."""
    call = [sys.executable, "-c", "from praison_agent_rl.cli import main; main()", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        call, cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def events(run: Path) -> list[dict[str, Any]]:
    file = run / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(event["event"] == "step" and event["step"] >= step for event in events(run)):
        assert time.monotonic() < deadline, events(run)
        time.sleep(0.02)


def adapter(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_saves_after_the_step_under_way_says_how_to_go_on_and_does(project, number, code) -> None:
    run = project / f"asked-{code}"
    started = command(project, "train", "config.yaml", "--set", f"output_dir={run.name}")
    wait_for_step(run, 3)
    started.send_signal(number)
    shown, said = started.communicate(timeout=120)
    assert started.returncode == code, said
    assert f"train --resume {run.name}" in said and "again to end at once" in shown + said
    last = max(event["step"] for event in events(run) if event["event"] == "step")
    assert 3 <= last < 40 and (run / "checkpoints" / f"checkpoint-{last}").is_dir()
    assert not (run / "stop").exists()
    went_on = command(project, "train", "--resume", run.name)
    _, said = went_on.communicate(timeout=300)
    assert went_on.returncode == 0, said
    assert any(event.get("text") == f"going on from checkpoint-{last}" for event in events(run))
    assert adapter(run) == adapter(project / "whole")


def test_a_command_whose_training_process_is_killed_says_so_and_goes_on(project: Path) -> None:
    run = project / "killed"
    started = command(project, "train", "config.yaml", "--set", f"output_dir={run.name}")
    wait_for_step(run, 13)
    for child in psutil.Process(started.pid).children():
        child.kill()  # as the kernel does where memory runs out
    _, said = started.communicate(timeout=120)
    assert started.returncode == 1 and "was killed (out of memory?)" in said and f"--resume {run.name}" in said, said
    went_on = command(project, "train", "--resume", run.name)
    _, said = went_on.communicate(timeout=300)
    assert went_on.returncode == 0, said
    assert adapter(run) == adapter(project / "whole")
    shutil.rmtree(run)
