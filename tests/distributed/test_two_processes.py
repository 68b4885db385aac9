"""Two processes over gloo train a tiny model as a user has them do it: whole runs, a killed one, ends, two machines.

``make test-distributed`` sets PRAISON_AGENT_RL_DISTRIBUTED; each run imports its libraries three times and more.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import write_rows
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.records import Plan, PlannedReward
from praison_agent_rl.runs import RunFolder, now, write_record
from praison_agent_rl.training.launch import launch_stages
from praison_agent_rl.training.policy_server import API_KEY
from tests.conftest import make_tiny_model
from tests.vllm_stand_in import KEY, Drawing, serving

if not os.environ.get("PRAISON_AGENT_RL_DISTRIBUTED"):
    pytest.skip("PRAISON_AGENT_RL_DISTRIBUTED is not set; make test-distributed sets it", allow_module_level=True)

COMMAND = [sys.executable, "-c", "from praison_agent_rl.cli import main; main()", "train"]
SETTINGS: dict[str, Any] = {
    "lora_r": 4,
    "lora_alpha": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 6,
    "max_seq_length": 256,
    "learning_rate": 1e-2,
    "max_steps": 6,
    "save_steps": 1,
    "save_total_limit": 0,
    "watch_prompts": 5,
    "watch_steps": 3,
    "reward_cache": False,
}
WORDS = [f"word number {number}" for number in range(30)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", tied=True)


def project(folder: Path, base: Path, **keys: Any) -> Path:
    """A configuration file, whose run goes into ``folder/run``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"prompt": word}) for word in WORDS]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    config = {
        **SETTINGS, "model_name": str(base), "dataset": "prompts.jsonl", "output_dir": str(folder / "run"),
        "reward_funcs": ["tests.distributed.rewards:lower"], **keys,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def command(folder: Path, *words: str) -> "subprocess.Popen[str]":
    search = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [*COMMAND, *words], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def carried_out(folder: Path, *words: str) -> RunFolder:
    process = command(folder, *words)
    said, _ = process.communicate(timeout=400)
    log = folder / "run" / "log.txt"
    assert process.returncode == 0, said + (log.read_text() if log.exists() else "")
    return RunFolder(folder / "run")


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for _, event in run.events() if event["event"] == kind]


def wait_for(condition: Any, seconds: float = 400) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def all_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: Path) -> RunFolder:
    """A run of the command line with two processes."""
    return carried_out(project(tmp_path_factory.mktemp("whole"), base), "config.yaml", "--nproc", "2")


def test_a_run_of_two_processes_is_told_as_one(whole):
    assert [event["stage"] for event in events(whole, "stage")] == ["measure_base", "train", "merge", "measure_new"]
    assert [event["step"] for event in events(whole, "step")] == [1, 2, 3, 4, 5, 6]
    assert all(event["calls"]["lower"]["samples"] == 16 for event in events(whole, "step"))
    assert whole.comparison_file.exists() and whole.merge_file.exists() and not events(whole, "failed")
    assert events(whole, "launch")[0]["processes"] == 2
    looks = events(whole, "watched")
    assert [look["step"] for look in looks] == [0, 3, 6] and all(len(look["totals"]) == 5 for look in looks)
    texts = [event["text"] for event in events(whole, "note")]
    assert [sum(sign in text for text in texts) for sign in ("carried no signal", "the adapter is that of")] == [1, 1]
    random_states = {path.name for path in (whole.checkpoints / "checkpoint-6").glob("rng_state*")}
    assert random_states == {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.fixture
def met(tmp_path: Path, base: Path) -> Iterator[tuple[Path, "subprocess.Popen[str]", dict[int, int]]]:
    """A run of two processes after its second step: its folder, the command, and the processes that train, by rank.

    That step is saved by then, by both.
    """
    folder = project(tmp_path / "met", base)
    process = command(folder, "config.yaml", "--nproc", "2")
    run = RunFolder(folder / "run")
    saved = [run.checkpoints / "checkpoint-2" / name for name in ("trainer_state.json", "rng_state_1.pth")]
    wait_for(lambda: process.poll() is not None or all(file.exists() for file in saved))
    assert process.poll() is None, process.communicate()[0]
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        if (rank := child.environ().get("RANK")) is not None and "launcher" in child.cmdline():
            found[int(rank)] = child.pid
    yield folder, process, found
    process.kill()
    process.communicate()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_all_and_the_run_goes_on_from_its_checkpoint(met, whole, victim):
    folder, process, pids = met
    assert sorted(pids) == [0, 1]
    everyone = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    os.kill(pids[victim], signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"process {victim} of those that train was ended by SIGKILL (out of memory?)" in said, said
    assert "--resume" in said and "Traceback" not in said
    wait_for(lambda: all_gone(everyone), 5)
    run = RunFolder(folder / "run")
    assert (run.checkpoints / "checkpoint-2").is_dir() and not run.adapter.exists()
    done = carried_out(folder, "--resume", str(run.root))
    ours, uninterrupted = (load_file(each.adapter / "adapter_model.safetensors") for each in (done, whole))
    assert all(bool((ours[name] == tensor).all()) for name, tensor in uninterrupted.items())
    assert [step["reward"] for step in done.steps()] == [step["reward"] for step in whole.steps()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["asked to end", "killed"])
def test_the_processes_end_with_the_command(met, number):
    _, process, pids = met
    everyone = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert set(pids.values()) <= set(everyone)
    process.send_signal(number)
    process.communicate(timeout=300)
    wait_for(lambda: all_gone(everyone), 10)


# --- stages alone -----------------------------------------------------------------------------------------------------


def planned(root: Path, base: Path, *rewards: str, rows: Any = None, **changes: Any) -> RunFolder:
    """A run whose stage ``train`` two processes do."""
    keys = {**SETTINGS, "launch": 2, "max_steps": 3, "watch": False, **changes}
    if keys.get("method", "grpo") != "grpo":
        keys = {key: value for key, value in keys.items() if key not in _OF_GRPO}
    config = TrainConfig.load(keys, need_model=False, need_data=False)
    run = RunFolder.create(root)
    write_rows(run.train_rows, rows or [{"prompt": [{"role": "user", "content": word}]} for word in WORDS])
    write_rows(run.held_out_rows, [])
    found = [
        PlannedReward(spec=spec, name=spec.rpartition(":")[2], weight=1.0, prompts="text", completions="text")
        for spec in rewards
    ]
    facts = {"device": "cpu", "notes": [], "libraries": {}, "created": now()}
    write_record(run.plan_file, Plan(base=str(base), config=config.resolved(), rewards=found, **facts))
    return run


_OF_GRPO = {"num_generations", "max_completion_length", "watch", "watch_prompts", "watch_steps", "reward_cache"}


def trained(run: RunFolder) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    try:
        launch_stages(run, ["train"], told.append)
    except TrainingFailed:
        raise
    except Exception as error:
        raise AssertionError(run.log.read_text()) from error
    return told


def test_a_reward_that_fails_in_one_process_is_counted_with_the_other(tmp_path, base):
    run = planned(tmp_path / "run", base, "tests.distributed.rewards:broken_in_the_second")
    with pytest.raises(TrainingFailed, match=r"gave no sound score for \d+ of the last \d+ completions \(50%"):
        trained(run)
    (failed,) = {event["message"] for event in events(run, "failed")}
    assert "no judge here" in failed and "The checkpoint is kept" in failed
    assert all(step["calls"]["broken_in_the_second"]["failed"] == 0.5 for step in run.steps())
    run = planned(tmp_path / "lenient", base, "tests.distributed.rewards:broken_in_the_second", reward_failures=0.6)
    assert [event["event"] for event in trained(run)][-1] == "done"


PAIRS = [
    {
        "prompt": [{"role": "user", "content": word}],
        "chosen": [{"role": "assistant", "content": f"yes {word}"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    for word in WORDS
]


@pytest.mark.parametrize("method", ["cpo", "reward"])
def test_pairs_are_learned_by_two_processes(tmp_path, base, method):
    run = planned(tmp_path / "run", base, rows=PAIRS, method=method, per_device_train_batch_size=4)
    told = trained(run)
    assert [event["step"] for event in told if event["event"] == "step"] == [1, 2, 3]
    assert (run.adapter / "adapter_model.safetensors").exists() and told[-1]["event"] == "done"


def test_one_server_gets_each_policy_once_and_both_processes_draw_from_it(tmp_path, base, monkeypatch):
    monkeypatch.setenv(API_KEY, KEY)
    stand_in = Drawing(str(base))
    with serving(stand_in) as server:
        run = planned(
            tmp_path / "run", base, "tests.distributed.rewards:first_token", sampler="vllm",
            vllm_server_base_url=server.url,
        )  # fmt: skip
        trained(run)
    loads = [body["lora_name"] for body in stand_in.asked if body["verb"] == "load_lora_adapter"]
    assert [name.rsplit("-", 1)[0] for name in loads] == ["run-0", "run-1", "run-2"]
    by_policy = [sum(body["model"] == name for body in stand_in.completions()) for name in loads]
    assert by_policy == [4, 4, 4]  # two prompts of each process
    assert len({json.dumps(body["seed"]) for body in stand_in.completions()}) == len(stand_in.completions())
    assert not stand_in.adapters and not list((run.root / "policies").iterdir())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_two_machines_train_as_two_processes_of_one_do(tmp_path, base, whole):
    where = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
    folder = project(tmp_path / "machines", base, launch={**where, "node_rank": 0})
    shutil.copy(folder / "config.yaml", folder / "second.yaml")
    second = yaml.safe_load((folder / "second.yaml").read_text())
    second["launch"]["node_rank"] = 1
    (folder / "second.yaml").write_text(yaml.safe_dump(second))
    joined = command(folder, "second.yaml")
    try:
        run = carried_out(folder, "config.yaml")
        said, _ = joined.communicate(timeout=300)
        assert joined.returncode == 0 and "machine 1 of 2" in said, said
    finally:
        joined.kill()
    ours, of_one = (load_file(each.adapter / "adapter_model.safetensors") for each in (run, whole))
    assert all(bool((ours[name] == tensor).all()) for name, tensor in of_one.items())
    assert len(events(run, "step")) == 6 and run.comparison_file.exists()
