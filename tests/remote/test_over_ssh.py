"""Runs of a tiny model over a real SSH server: equal to local ones bit for bit, whatever breaks meanwhile."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from praison_agent_rl.errors import ConfigError, TrainingFailed
from praison_agent_rl.remote.connection import Unreachable
from praison_agent_rl.remote.running import run_there, stop_there
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.stages import stages_of
from tests.remote.machine import SSHD, Machine
from tests.remote.tiny_runs import ENVIRONMENT, SECRET, notes, once, planned, results, steps

if SSHD is None or shutil.which("ssh") is None:
    pytest.skip("there is no sshd or no ssh; apt-get install openssh-server openssh-client", allow_module_level=True)

FOLLOWING = """
    import json, sys
    from pathlib import Path
    from praison_agent_rl.config_fields.remote import Remote
    from praison_agent_rl.remote.running import run_there
    from praison_agent_rl.runs import RunFolder
    from praison_agent_rl.stages import stages_of

    run = RunFolder.open(Path(sys.argv[1]))
    remote = Remote(**json.loads(sys.argv[2]))
    run_there(run, remote, stages_of(run), lambda event: print(json.dumps(event), flush=True))
"""


def test_a_run_there_makes_what_it_makes_here_and_uses_nothing_of_here(
    project: Path, machine: Machine, tiny_model: Path, at_home: dict[str, Any]
) -> None:
    run, shown, events = planned(project, tiny_model, "run"), list[str](), list[dict[str, Any]]()
    (project / "seen.txt").unlink(missing_ok=True)

    def watch(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step":
            shown.extend(str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"]))
            shown.extend(machine.holds(SECRET))
            for name in ("scoring.py", "letters.py"):  # nobody there may need them
                (project / name).unlink(missing_ok=True)

    run_there(run, machine.remote(env=ENVIRONMENT), stages_of(run), watch)
    assert steps(events) == [1, 2, 3, 4] == [event["step"] for event in run.steps()]
    assert results(run) == at_home
    assert any("praison_agent_rl.stages" in words for words in shown) and SECRET not in "\n".join(shown)
    seen = (machine.home / "seen.txt").read_text()
    assert str(project) not in seen and str(machine.home) in seen and not (project / "seen.txt").exists()
    assert machine.runs() == [] and "scoring.py" in notes(events) and "letters.py" in notes(events)
    (machine.home / "seen.txt").unlink()


def test_the_command_trains_there_by_its_option(
    project: Path, machine: Machine, tiny_model: Path, at_home: dict[str, Any]
) -> None:
    run = planned(project, tiny_model, "as_planned")
    there = machine.remote(env=ENVIRONMENT).model_dump(exclude={"host"}, exclude_none=True)
    rows = [{"prompt": f"Say something about {n}."} for n in range(28)]
    (project / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {**run.plan.config, "dataset": [{"name": "rows.jsonl"}], "remote": there, "output_dir": "by_command"}
    (project / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "praison_agent_rl.cli", "train", "config.yaml", "--remote-host", "gpubox"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(RunFolder(project / "by_command")) == at_home
    assert (project / "by_command" / "report.html").exists() and machine.runs() == []


def test_killed_connections_stop_nothing(
    project: Path, machine: Machine, tiny_model: Path, at_home: dict[str, Any]
) -> None:
    (project / "slow").touch()  # so that the run still goes on at both kills
    run, events = planned(project, tiny_model, "run"), list[dict[str, Any]]()
    of_server = once(lambda: [process.kill() for process in machine.sessions()], at=1)
    of_client = once(lambda: [child.kill() for child in psutil.Process().children() if child.name() == "ssh"], at=2)

    def watch(event: dict[str, Any]) -> None:
        events.append(event)
        of_server(event)
        of_client(event)

    run_there(run, machine.remote(env=ENVIRONMENT, bring=["slow"]), stages_of(run), watch)
    assert notes(events).count("the next try is in") >= 2
    assert steps(events) == [1, 2, 3, 4] == [event["step"] for event in run.steps()]
    assert results(run) == at_home


def test_a_command_that_was_killed_finds_its_run_again(
    project: Path, machine: Machine, tiny_model: Path, at_home: dict[str, Any]
) -> None:
    run, remote = planned(project, tiny_model, "run"), machine.remote(env=ENVIRONMENT)
    words = [sys.executable, "-c", textwrap.dedent(FOLLOWING), str(run.root), remote.model_dump_json()]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    told = next(line for line in command.stdout if '"event": "step"' in line)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    command.stdout.close()
    assert json.loads(told)["step"] == 1
    events: list[dict[str, Any]] = []
    run_there(run, remote, stages_of(run), events.append, resume=True)
    assert [event["step"] for event in run.steps()] == [1, 2, 3, 4] and "run happens on" not in notes(events)
    assert results(run) == at_home


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint_there(
    project: Path, machine: Machine, tiny_model: Path, at_home: dict[str, Any]
) -> None:
    run, remote = planned(project, tiny_model, "run"), machine.remote(env=ENVIRONMENT, bring=["slow"])
    (project / "slow").touch()  # so that there is something left to stop
    run.plan_file.write_text(run.plan_file.read_text().replace('"config": {', _with_remote(remote), 1))
    stopped: list[bool] = []
    with pytest.raises(TrainingFailed, match=rf"(?s)(was stopped|stopp|interrupt).*--resume {run.root}"):
        run_there(run, remote, stages_of(run), once(lambda: stopped.append(stop_there(run)), at=1))
    [folder] = machine.runs()
    (folder / "project" / "slow").unlink()
    assert stopped == [True] and run.log.exists() and list(run.checkpoints.glob("checkpoint-*"))
    events: list[dict[str, Any]] = []
    run_there(run, machine.remote(env=ENVIRONMENT), stages_of(run), events.append, resume=True)
    assert "going on from checkpoint" in notes(events), "not from the start"
    assert [event["step"] for event in run.steps()] == [1, 2, 3, 4]
    assert results(run) == at_home


def _with_remote(remote: Any) -> str:
    return f'"config": {{"remote": {json.dumps(remote.model_dump(exclude_none=True))},'


def test_an_error_there_is_told_as_one_here_and_put_right_from_here(
    project: Path, machine: Machine, tiny_model: Path
) -> None:
    run, remote = planned(project, tiny_model, "run"), machine.remote(env=ENVIRONMENT)
    broken = once(lambda: (machine.runs()[0] / "project" / "broken").touch(), at=1)
    with pytest.raises(TrainingFailed) as failed:
        run_there(run, remote, stages_of(run), broken)
    said = str(failed.value)
    assert said.startswith("on gpubox: ") and "it is broken" in said
    assert str(run.log) in said and f"--resume {run.root}" in said and f"--resume {machine.home}" not in said
    assert run.log.stat().st_size > 0
    [folder] = machine.runs()
    (folder / "project" / "broken").unlink()
    run_there(run, machine.remote(env=ENVIRONMENT), stages_of(run), lambda event: None, resume=True)
    assert run.comparison_file.exists() and machine.runs() == []


def test_a_reward_module_that_cannot_be_imported_there_is_told_before_anything_starts(
    project: Path, machine: Machine, tiny_model: Path
) -> None:
    run = planned(project, tiny_model, "run")
    (project / "letters.py").unlink()
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"(?s)on 'gpubox'.*needs 'letters', which is not installed.*remote\.bring"):
        run_there(run, machine.remote(env=ENVIRONMENT), stages_of(run), lambda event: None)
    assert machine.runs() == [] and not run.log.exists() and time.monotonic() > began


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("stranger", "Host key verification failed.*confirm its key"),
        ("keyless", "Permission denied.*ssh-copy-id"),
        ("silent", "Connection refused.*remote.port"),
        ("hanging", "timed out.*firewall"),
        ("no-such-machine.invalid", "Could not resolve hostname.*spelling"),
    ],
)
def test_what_ssh_refuses_is_told_with_what_to_do(
    project: Path, machine: Machine, tiny_model: Path, host: str, said: str
) -> None:
    run = planned(project, tiny_model, "run")
    with pytest.raises(Unreachable, match=f"'{host}' cannot be reached: .*{said}"):
        run_there(run, machine.remote(host=host), stages_of(run), lambda event: None)
    assert not (run.root / "remote.json").exists()


def test_a_folder_that_nobody_may_write_and_a_python_without_the_package_are_told_at_once(
    project: Path, machine: Machine, tiny_model: Path
) -> None:
    import venv

    venv.create(machine.home / "bare", with_pip=False)
    run = planned(project, tiny_model, "run")
    remote = machine.remote(python="~/bare/bin/python", workdir="/proc/nowhere", gpus=64)
    with pytest.raises(ConfigError) as refused:
        run_there(run, remote, stages_of(run), lambda event: None)
    said = str(refused.value)
    assert "has not this package" in said and "-m pip install" in said
    assert "remote.workdir '/proc/nowhere' cannot be used" in said and "remote.gpus is 64" in said
