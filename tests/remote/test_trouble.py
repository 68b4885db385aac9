"""What goes wrong between two machines, over a real SSH server: nothing of it changes what a run comes to."""

import contextlib
import json
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from praison_agent_rl.errors import ConfigError, TrainingFailed
from praison_agent_rl.remote.running import run_there, stop_there
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.stages import stages_of
from tests.remote.machine import Machine
from tests.remote.tiny_runs import ENVIRONMENT, notes, once, planned, results

COMMAND = [sys.executable, "-m", "praison_agent_rl.cli", "train"]
LISTED = """
    from pathlib import Path

    def listed(completions, **_):
        words = Path(__file__).with_name("words.txt").read_text().split()
        return [float(any(word in text for word in words)) for text in completions]
"""


def in_yaml(project: Path, run: RunFolder, machine: Machine) -> None:
    """The configuration of a planned run in a file, for a command."""
    there = machine.remote(env=ENVIRONMENT).model_dump(exclude_none=True)
    rows = [{"prompt": f"Say something about {n}."} for n in range(28)]
    (project / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {**run.plan.config, "dataset": [{"name": "rows.jsonl"}], "remote": there}
    (project / "config.yaml").write_text(json.dumps(config))


def tree(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def test_a_dry_run_looks_there_and_leaves_nothing(project: Path, machine: Machine, tiny_model: Path) -> None:
    in_yaml(project, planned(project, tiny_model, "as_planned"), machine)
    (machine.home / "greeting").write_text("Welcome, without an end of a line")
    before = tree(machine.home)
    told = subprocess.run([*COMMAND, "config.yaml", "--dry-run"], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    for word in ("gpubox: ", "torch ", "would be sent", "letters.py, scoring.py", "nothing was loaded, sent"):
        assert word in told.stdout
    wrong = [*COMMAND, "config.yaml", "--dry-run", "--remote-gpus", "64", "--remote-workdir", "/proc/nowhere"]
    refused = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "remote.gpus is 64" in refused.stderr and "/proc/nowhere" in refused.stderr
    assert tree(machine.home) == before
    (machine.home / "greeting").unlink()


def test_a_run_that_was_stopped_there_goes_on_here(
    project: Path, machine: Machine, tiny_model: Path, at_home: dict[str, Any]
) -> None:
    in_yaml(project, planned(project, tiny_model, "as_planned"), machine)
    (project / "slow").touch()  # so that there is something left to stop
    config = json.loads((project / "config.yaml").read_text())
    config["remote"]["bring"] = ["slow"]
    (project / "config.yaml").write_text(json.dumps({**config, "output_dir": "run"}))
    command = subprocess.Popen([*COMMAND, "config.yaml"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = RunFolder(project / "run")
    while not run.steps():
        assert command.poll() is None, command.communicate()[0]
        threading.Event().wait(0.2)
    assert stop_there(run)
    said = command.communicate()[0]
    assert command.returncode == 1 and "is here too" in said and "remote=null" in said
    (project / "slow").unlink()
    here = [*COMMAND, "--resume", "run", "--set", "remote=null"]
    done = subprocess.run(here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from checkpoint" in notes([event for _, event in run.events()])
    assert results(run) == at_home and machine.runs() == []


def test_connections_that_are_killed_at_any_moment_change_nothing(
    project: Path, machine: Machine, tiny_model: Path, at_home: dict[str, Any]
) -> None:
    run, events = planned(project, tiny_model, "run"), list[dict[str, Any]]()
    ended, at_random = threading.Event(), random.Random(7)

    def kill_now_and_then() -> None:
        for _ in range(10):
            ours = [child for child in psutil.Process().children() if child.name() == "ssh"]
            for process in at_random.choice([ours, machine.connections()]):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if ended.wait(at_random.uniform(0.3, 6.0)):
                return

    def watch(event: dict[str, Any]) -> None:
        events.append(event)
        if len(events) == 1:  # before, nothing is tried again
            killing.start()

    killing = threading.Thread(target=kill_now_and_then)
    try:
        run_there(run, machine.remote(env=ENVIRONMENT), stages_of(run), watch)
    finally:
        ended.set()
        killing.join()
    assert notes(events).count("the next try is in") >= 3
    assert results(run) == at_home


@pytest.fixture
def small_disk(machine: Machine) -> Iterator[Path]:
    """A folder there on a disk of its own that is soon full."""
    folder = machine.home / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


def fill(folder: Path) -> None:
    """Leave no room on the disk; the last bytes too."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def test_a_full_disk_there_is_told_and_the_run_goes_on_when_there_is_room(
    project: Path, machine: Machine, tiny_model: Path, at_home: dict[str, Any], small_disk: Path
) -> None:
    run, filled = planned(project, tiny_model, "run"), list[str]()
    remote = machine.remote(env=ENVIRONMENT, workdir=str(small_disk / "runs"))

    def before_sending(event: dict[str, Any]) -> None:
        if "go along" in event.get("text", "") and not filled:
            filled.append("sending")
            fill(small_disk)

    with pytest.raises(TrainingFailed, match=r"(?s)cannot be filled: .*No space left.*what has arrived is not sent"):
        run_there(run, remote, stages_of(run), before_sending)
    (small_disk / "filler").unlink()
    with pytest.raises(TrainingFailed, match="full"):
        run_there(run, remote, stages_of(run), once(lambda: fill(small_disk), at=1))
    (small_disk / "filler").unlink()
    run_there(run, remote, stages_of(run), lambda event: None, resume=True)
    assert results(run) == at_home and list((small_disk / "runs" / "runs").iterdir()) == []


def test_what_a_reward_reads_and_what_stays_here_is_told_before_anything_starts(
    project: Path, machine: Machine, tiny_model: Path
) -> None:
    (project / "scoring.py").write_text(textwrap.dedent(LISTED).replace("listed", "lower"))
    (project / "words.txt").write_text("a e i o u")
    run, before = planned(project, tiny_model, "run"), machine.runs()
    with pytest.raises(ConfigError, match=r"(?s)on 'gpubox'.*words\.txt.*remote\.bring"):
        run_there(run, machine.remote(env=ENVIRONMENT), stages_of(run), lambda event: None)
    assert machine.runs() == before and not run.log.exists() and not (run.root / "remote.json").exists()
