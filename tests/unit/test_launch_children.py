"""The processes of a run with ``launch``: which there are, what is told of their ends, and who reports."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from praison_agent_rl import ranks
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.launching import Launch
from praison_agent_rl.errors import ConfigError, RewardError, TrainingFailed
from praison_agent_rl.launchers import NODE_VARIABLES
from praison_agent_rl.locks import AVAILABLE
from praison_agent_rl.records import Plan
from praison_agent_rl.runs import RunFolder, alone_in, now, write_record
from praison_agent_rl.stop_requests import ask_to_end, is_asked_to_end
from praison_agent_rl.training import joining, launch, processes
from tests.unit.test_child import alive, wait_for

HOST = "10.0.0.5:29500"


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only one."""
    for name in (*NODE_VARIABLES, "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


# --- the children of a run --------------------------------------------------------------------------------------------


def planned(root: Path, **keys: Any) -> RunFolder:
    run = RunFolder.create(root)
    config = TrainConfig.load(keys, need_model=False, need_data=False).resolved()
    plan = Plan(base="owner/name", config=config, rewards=[], device="cpu", notes=[], libraries={}, created=now())
    write_record(run.plan_file, plan)
    return run


class Children:
    """Stand-ins for the child processes of a run; each writes the events that it is to write, and ends."""

    def __init__(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch, *events: list[dict[str, Any]], code: int = 0):
        self.run, self.events, self.code = run, list(events), code
        self.started: list[tuple[str, list[str], dict[str, str]]] = []
        monkeypatch.setattr(launch, "start_child", self.start)

    def start(self, module: str, words: list[str], *, log: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
        for event in self.events[len(self.started)]:
            self.run.report_event(**event)
        self.started.append((module, words, env))
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({self.code})"], stdin=subprocess.PIPE)


DONE = {"event": "done", "stages": []}
ALL = ["measure_base", "train", "merge", "measure_new"]


def test_only_training_is_done_by_several_processes_and_the_end_is_told_once(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    children = Children(run, monkeypatch, [{"event": "stage", "stage": "measure_base"}, DONE], [DONE], [DONE])
    told: list[str] = []
    launch.launch_stages(run, ALL, lambda event: told.append(event["event"]), env={"KEY": "x"})
    root = str(run.root.resolve())
    modules = [(module, words) for module, words, _ in children.started]
    assert modules[0] == ("praison_agent_rl.stages", [root, "measure_base"])
    assert modules[2] == ("praison_agent_rl.stages", [root, "merge", "measure_new"])
    module, words = modules[1]
    assert module == "praison_agent_rl.training.processes" and words[:2] == [root, "torchrun"]
    assert words[-5:] == ["praison_agent_rl.child", "launcher", "praison_agent_rl.stages", root, "train"]
    assert told == ["stage", "done"]
    said = [event for _, event in run.events() if event["event"] == "launch"]
    assert [event["processes"] for event in said] == [2]
    assert all(env["KEY"] == "x" for _, _, env in children.started)


def test_processes_share_the_cores_of_their_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("PRAISON_AGENT_RL_DEVICE", "cpu")
    child = launch.in_several(planned(tmp_path / "run", launch=999), Launch(nproc=999), resume=True, env={})
    assert child.env["OMP_NUM_THREADS"] == "1" and child.words[-2:] == ["train", "--resume"]


def test_a_run_that_is_trained_or_not_to_be_is_one_child(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    children = Children(run, monkeypatch, [DONE], [DONE])
    launch.launch_stages(run, ["merge"], lambda event: None)
    run.adapter.mkdir()
    launch.launch_stages(run, ["train", "merge"], lambda event: None, resume=True)
    assert [module for module, _, _ in children.started] == ["praison_agent_rl.stages"] * 2
    assert children.started[1][1][1:] == ["train", "merge", "--resume"]


def test_the_first_process_that_fails_says_why_and_nothing_follows(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    failures = [
        {"event": "failed", "kind": "TrainingFailed", "message": "the reward broke"},
        {"event": "failed", "kind": "ConfigError", "message": "and then the others did"},
        DONE,
    ]
    children = Children(run, monkeypatch, failures, code=1)
    with pytest.raises(TrainingFailed, match="the reward broke"):
        launch.launch_stages(run, ["train", "merge"], lambda event: None)
    assert len(children.started) == 1


@pytest.mark.skipif(not AVAILABLE, reason="there are no locks on files on this system")
def test_a_run_that_is_under_way_is_not_touched_by_another_process(tmp_path, monkeypatch):
    run = planned(tmp_path / "run")
    children = Children(run, monkeypatch, [DONE])
    ask_to_end(run)
    with alone_in(run), pytest.raises(ConfigError, match="is under way already, by process"):
        launch.launch_stages(run, ["merge"], lambda event: None, resume=True)
    assert children.started == [] and is_asked_to_end(run) and not run.events_file.exists()
    launch.launch_stages(run, ["merge"], lambda event: None, resume=True)
    assert len(children.started) == 1 and not is_asked_to_end(run)


def test_a_wish_to_end_that_comes_while_the_base_is_measured_is_there_when_training_begins(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    children, asked = Children(run, monkeypatch, [DONE], [DONE], [DONE]), []

    def start(*given: Any, **options: Any) -> "subprocess.Popen[bytes]":
        asked.append(is_asked_to_end(run))
        ask_to_end(run)
        return children.start(*given, **options)

    monkeypatch.setattr(launch, "start_child", start)
    launch.launch_stages(run, ALL, lambda event: None)
    assert asked == [False, True, True]


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({1: -9, 0: ranks.LOST}, "process 1 of those that train was ended by SIGKILL (out of memory?)"),
        ({0: -6, 1: -11}, "process 1 of those that train was ended by SIGSEGV, and the others with it"),
        ({0: -6}, "process 0 of those that train was ended by SIGABRT"),
        ({0: ranks.LOST, 1: ranks.LOST}, "the connection to another process that trains was lost"),
        ({0: 3, 1: ranks.LOST}, "of the processes that train ended process 0 with code 3; the last lines:\nlast words"),
    ],
)
def test_what_no_process_can_say_of_its_own_end_is_told(tmp_path, codes, said):
    run = planned(tmp_path / "run", launch=2)
    run.log.write_text("last words\n")
    assert said in processes._what_happened(codes, run)


LAUNCHER = """
    import subprocess, sys, time
    child = subprocess.Popen(
        [sys.executable, "-m", "praison_agent_rl.child", "launcher", "worker", sys.argv[1]], start_new_session=True
    )
    time.sleep(120)
"""
SLEEPER = """
    import os, sys, time
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(120)
"""


@pytest.mark.skipif(os.name != "posix", reason="sessions and SIGKILL are missing on this system")
def test_a_process_in_a_session_of_its_own_ends_with_its_launcher(tmp_path):
    (tmp_path / "launcher.py").write_text(textwrap.dedent(LAUNCHER))
    (tmp_path / "worker.py").write_text(textwrap.dedent(SLEEPER))
    pids = tmp_path / "pid"
    search = os.pathsep.join([str(tmp_path), str(Path(launch.__file__).parents[2])])
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "launcher.py"), str(pids)], env={**os.environ, "PYTHONPATH": search}
    )
    try:
        assert wait_for(pids.exists, 30)
        worker = int(pids.read_text())
        assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    assert wait_for(lambda: not alive(worker), 3)


# --- one among several ------------------------------------------------------------------------------------------------


def test_the_first_process_reports_and_the_others_read(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    assert ranks.is_first() and ranks.process_count() == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not ranks.is_first() and (ranks.rank(), ranks.process_count()) == (1, 2)
    follower = ranks.Follower(run.root)
    follower.report_event("note", text="twice")
    run.report_event("note", text="once")
    assert [event["text"] for _, event in follower.events()] == ["once"] and follower.plan == run.plan


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RewardError("Connection reset by peer"), False),
        (TrainingFailed("no step had a signal"), False),
        (OSError("Connection reset by peer"), False),
    ],
)
def test_what_says_only_that_another_process_is_gone_is_known_as_such(monkeypatch, error, lost):
    assert not ranks.is_lost_connection(error)  # in one process it is something else
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.is_lost_connection(error) == lost


# --- machines besides the first ---------------------------------------------------------------------------------------


def told_later(run: RunFolder, monkeypatch: pytest.MonkeyPatch, *events: dict[str, Any]) -> None:
    """Each wait brings one event of machine 0."""
    left = list(events)

    def sleep(_: float) -> None:
        run.report_event(**left.pop(0))

    # of this module alone: the recorder's thread sleeps, too
    monkeypatch.setattr(joining, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


TWO = Launch(nproc=1, nodes=2, node_rank=1, rendezvous=HOST)


def joined(run: RunFolder, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> list[str]:
    """The words of the child that a machine starts that joins ``run``."""
    words: list[list[str]] = []

    def start(module: str, given: list[str], *, log: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
        words.append([module, *given])
        log.write_text("last words of this machine\n")
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], stdin=subprocess.PIPE)

    monkeypatch.setattr(joining, "start_child", start)
    joining.join_run(run.root, TWO)
    return words[0] if words else []


@pytest.mark.parametrize(
    "before",
    [
        [],
        [{"event": "failed", "kind": "TrainingFailed", "message": "of an earlier attempt"}],
        # of an attempt that was killed and began from the start: this machine may come before machine 0 goes on with it
        [{"event": "launch", "processes": 2}, {"event": "stage", "stage": "train"}],
    ],
    ids=["fresh", "failed before", "killed before"],
)
def test_a_machine_starts_when_machine_0_trains_and_goes_on_from_where_that_does(tmp_path, monkeypatch, before):
    run = planned(tmp_path / "run", launch={**TWO.model_dump(exclude_none=True)}, output_dir="x")
    for event in before:
        run.report_event(**event)
    told_later(run, monkeypatch, DONE, {"event": "launch", "processes": 2})
    words = joined(run, monkeypatch)
    assert words[0] == "praison_agent_rl.training.processes" and words[-2:] == ["train", "--resume"]
    assert words[words.index("--node-rank") + 1] == "1"


def test_a_machine_ends_with_machine_0(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    told_later(run, monkeypatch, {"event": "failed", "kind": "DataError", "message": "no prompts"})
    with pytest.raises(TrainingFailed, match="machine 0 failed before it trained: no prompts"):
        joined(run, monkeypatch)


def test_a_machine_leaves_a_run_alone_that_is_trained(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    run.adapter.mkdir()
    assert joined(run, monkeypatch) == []


def test_a_machine_whose_processes_fail_says_so(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    run.report_event("launch", processes=2)
    with pytest.raises(TrainingFailed, match="ended with code 1; its last lines:\nlast words of this machine"):
        joined(run, monkeypatch, code=1)


def test_a_folder_that_machine_0_does_not_share_is_told(tmp_path):
    with pytest.raises(TrainingFailed, match="output_dir must be a folder that all machines see"):
        joining.join_run(tmp_path / "elsewhere", TWO, patience=0)
