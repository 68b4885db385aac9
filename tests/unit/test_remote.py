"""A run that happens on another machine: what goes there, what comes home, and what is said where it cannot be."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError, RewardError, TrainingFailed
from praison_agent_rl.records import Plan, PlannedReward
from praison_agent_rl.remote import following, starting, there
from praison_agent_rl.remote.connection import Link, Unreachable
from praison_agent_rl.remote.flags import remote_of_flags
from praison_agent_rl.remote.project import check_size, files_brought, files_of_modules
from praison_agent_rl.remote.running import remote_of, run_there, stop_there
from praison_agent_rl.remote.there import hash_file, lacking, pack, unpack
from praison_agent_rl.runs import RunFolder, write_record
from tests.finished_runs import weights_in
from tests.ssh_stand_in import Machine, on_path

STAGES = ["measure_base", "train"]
STEPS: list[dict[str, Any]] = [{"event": "step", "step": n, "of": 3} for n in (1, 2, 3)]
MADE = {"adapter/adapter_model.safetensors": "adapted", "model/model.safetensors": "merged", "comparison.json": "{}"}


@pytest.fixture
def machine(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Another machine, on which a run makes what it is told to."""
    made = Machine(in_tmp / "elsewhere", in_tmp / "commands")
    monkeypatch.setenv("PATH", on_path(in_tmp / "commands"))
    made.tell(events=STEPS, makes=MADE)
    yield made
    for process in [*made.processes("carry_out"), *made.processes("follow")]:  # what a test that failed leaves
        process.kill()


@pytest.fixture
def here(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's project."""
    folder = in_tmp / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "rewards.py").write_text("import scales\n\ndef short(completions, **_):\n    return [0.0]\n")
    (folder / "scales.py").write_text("UNIT = 1\n")
    (folder / "unused.py").write_text("import scales\n")
    return folder


def reward(spec: str | None = "rewards:short", name: str = "short") -> PlannedReward:
    return PlannedReward(spec=spec, name=name, weight=1.0, prompts="text", completions="text")


def planned(folder: Path, **plan: Any) -> RunFolder:
    """The folder of a run that is planned and not begun; it trains weights of a few bytes."""
    weights = weights_in(folder / "base")
    run = RunFolder.create(folder / "run")
    run.train_rows.write_text('{"prompt": "one"}\n')
    run.held_out_rows.write_text('{"prompt": "two"}\n')
    config = {
        "remote": {"host": "gpubox", "python": str(folder.parent / "elsewhere" / "python")},
        **plan.pop("config", {}),
    }
    facts: dict[str, Any] = {
        "base": str(weights), "rewards": [reward()], "device": "cpu", "notes": [], "libraries": {"torch": "1.0"},
        "created": "2099-01-01T00:00:00+00:00",
    }  # fmt: skip
    write_record(run.plan_file, Plan(**{**facts, **plan, "config": config}))
    return run


def carried_out(run: RunFolder, machine: Machine, **given: Any) -> list[dict[str, Any]]:
    """The events of a run that happens there."""
    events: list[dict[str, Any]] = []
    run_there(run, machine.remote(**given), STAGES, events.append)
    return events


def steps(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events if event["event"] == "step"]


def notes(events: list[dict[str, Any]]) -> str:
    return "\n".join(event["text"] for event in events if event["event"] == "note")


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        threading.Event().wait(0.02)


# --- the whole way --------------------------------------------------------------------------------------------------


def test_a_run_there_leaves_the_folder_as_if_it_had_happened_here(here: Path, machine: Machine) -> None:
    run = planned(here)
    events = carried_out(run, machine)
    assert steps(events) == [1, 2, 3] == [event["step"] for event in run.steps()]
    assert {name: (run.root / name).read_text() for name in MADE} == MADE
    assert run.log.read_text() == "training\n"
    assert machine.runs() == [], "what is home is not kept there"
    assert not [path for path in run.root.iterdir() if path.name in ("remote.json", ".arriving")]
    assert run.plan.device == "cpu", "this machine serves the result"
    assert run.plan.libraries == {"torch": "9.9"}, "the result depends on what is there"


def test_the_plan_there_names_the_device_and_the_places_there(here: Path, machine: Machine) -> None:
    run = planned(here, incumbent_weights=str(weights_in(here / "v1", b"other")))
    carried_out(run, machine)
    plan = machine.seen["plan"]
    assert plan["device"] == "cuda" and "remote" not in plan["config"]
    for source, place in ((run.plan.base, plan["base"]), (run.plan.incumbent_weights, plan["incumbent_weights"])):
        assert Path(place).parent == machine.workdir / "weights"
        assert (Path(place) / "model.safetensors").read_bytes() == (Path(source) / "model.safetensors").read_bytes()
    assert machine.seen["words"] == STAGES


def test_weights_that_are_there_are_not_sent_again(here: Path, machine: Machine) -> None:
    (here / "one").mkdir()
    (here / "two").mkdir()
    sent, again = (notes(carried_out(planned(here / name), machine)) for name in ("one", "two"))
    assert "sending the weights" in sent and "sending the weights" not in again
    assert len(list((machine.workdir / "weights").iterdir())) == 1, "they are known by their content"


def test_a_hub_name_is_left_for_the_machine_to_load(here: Path, machine: Machine) -> None:
    carried_out(planned(here, base="owner/model"), machine)
    assert machine.seen["plan"]["base"] == "owner/model" and not (machine.workdir / "weights").exists()


def test_own_modules_go_along_with_what_they_import_and_nothing_else(here: Path, machine: Machine) -> None:
    (here / "words.txt").write_text("one two")
    events = carried_out(planned(here), machine, bring=["words.txt"])
    assert machine.seen["project"] == ["rewards.py", "scales.py", "words.txt"]
    assert "rewards.py, scales.py, words.txt" in notes(events)


def test_variables_go_along_and_stand_on_no_command_line_and_on_no_disk(
    here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("OTHER", "not asked for")
    machine.tell(events=[*STEPS, {"wait": "go"}])
    run = planned(here)
    thread = threading.Thread(target=lambda: carried_out(run, machine, env=["HF_TOKEN"]))
    thread.start()
    wait_for(lambda: (machine.home / "seen.json").exists() and len(run.steps()) == 3)
    shown = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert "hf_very_secret" not in str(shown) and machine.holds("hf_very_secret") == []
    (machine.home / "go").touch()
    thread.join(20)
    seen = machine.seen["environment"]
    assert seen["HF_TOKEN"] == "hf_very_secret" and "OTHER" not in seen
    assert "hf_very_secret" not in "\n".join(machine.calls) and machine.holds("hf_very_secret") == []
    assert not [path for path in run.root.rglob("*") if path.is_file() and b"hf_very_secret" in path.read_bytes()]


def test_what_a_login_says_of_its_own_does_no_harm(here: Path, machine: Machine) -> None:
    (machine.home / "greeting").write_text("Welcome to gpubox!\n{}\n")
    run = planned(here)
    assert steps(carried_out(run, machine)) == [1, 2, 3]
    assert (run.root / "comparison.json").read_text() == "{}"


# --- lost and found -------------------------------------------------------------------------------------------------


def test_a_lost_connection_does_not_stop_the_run_and_is_made_again(here: Path, machine: Machine) -> None:
    machine.tell(events=[STEPS[0], {"wait": "go"}, *STEPS[1:]])
    run, events = planned(here), list[dict[str, Any]]()
    thread = threading.Thread(target=lambda: run_there(run, machine.remote(), STAGES, events.append))
    thread.start()
    wait_for(lambda: steps(events) == [1])
    (machine.home / "unreachable").write_text("ssh: connect to host gpubox port 22: Connection timed out\n")
    [followed] = machine.processes("follow")
    followed.kill()
    wait_for(lambda: "firewall" in notes(events))
    (machine.home / "go").touch()
    wait_for(lambda: (machine.runs()[0] / "result.json").exists())
    (machine.home / "unreachable").unlink()
    thread.join(20)
    assert steps(events) == [1, 2, 3] == [event["step"] for event in run.steps()]
    assert (run.root / "comparison.json").exists()


def test_what_was_sent_before_the_connection_broke_is_not_sent_again(
    here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []

    def fall_once(files: dict[str, Path], stream: Any) -> None:
        sent.append(list(files))
        content = parcel(files).getvalue()
        half = len(content) // 2 if len(sent) == 1 else len(content)
        stream.write(content[:half])
        stream.flush()
        if len(sent) == 1:
            wait_for(lambda: list(machine.workdir.rglob("rewards.py")))
            [receiving] = machine.processes("receive")
            receiving.kill()
        stream.write(content[half:])

    monkeypatch.setattr(starting, "pack", fall_once)
    events = carried_out(planned(here), machine)
    assert steps(events) == [1, 2, 3] and "the next try is in 1 s" in notes(events)
    assert "project/rewards.py" in sent[0] and set(sent[1]) < set(sent[0]) and "project/rewards.py" not in sent[1]
    assert sent[1][-1] == "run/plan.json", "a folder with a plan is a whole one"


def test_a_run_is_found_again_by_another_process(here: Path, machine: Machine) -> None:
    stage = {"event": "stage", "stage": "train"}
    machine.tell(events=[stage, STEPS[0], {"wait": "go"}, *STEPS[1:]])
    run = planned(here)

    def interrupt(event: dict[str, Any]) -> None:
        said.append(event)
        if event["event"] == "step":
            raise KeyboardInterrupt

    said: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        run_there(run, machine.remote(), STAGES, interrupt)
    assert f"--resume {run.root}" in notes(said) and f"--stop {run.root}" in notes(said)
    assert machine.processes("carry_out"), "the run goes on there"
    with run.events_file.open("ab") as file:
        file.write(b'{"half a li')  # as a process leaves it that is killed while it writes
    calls = len(machine.calls)
    (machine.home / "go").touch()
    events = carried_out(run, machine)
    assert steps(events) == [2, 3] and [event["step"] for event in run.steps()] == [1, 2, 3]
    assert stage == events[0], "what goes on is told to who comes later"
    assert not any("carrying" in call or " start" in call for call in machine.calls[calls:]), "it is not begun again"


def test_one_process_follows_a_run(here: Path, machine: Machine) -> None:
    run = planned(here)

    def follow_too(event: dict[str, Any]) -> None:
        if event["event"] == "step" and not refused:
            with pytest.raises(ConfigError, match="is followed already, by process"):
                carried_out(run, machine)
            refused.append(event["step"])

    refused: list[int] = []
    run_there(run, machine.remote(), STAGES, follow_too)
    assert refused == [1] and (run.root / "comparison.json").exists()


def test_a_run_that_ended_meanwhile_is_brought_home(here: Path, machine: Machine) -> None:
    run = planned(here)
    with pytest.raises(KeyboardInterrupt):
        run_there(run, machine.remote(), STAGES, lambda event: _interrupt_at_a_step(event))
    wait_for(lambda: not machine.processes("carry_out"))
    carried_out(run, machine)
    assert [event["step"] for event in run.steps()] == [1, 2, 3] and (run.root / "comparison.json").exists()


def _interrupt_at_a_step(event: dict[str, Any]) -> None:
    if event["event"] == "step":
        raise KeyboardInterrupt


def test_a_run_that_died_is_gone_on_with_from_what_it_left_there(here: Path, machine: Machine) -> None:
    machine.tell(events=[STEPS[0], {"die": True}])
    run = planned(here)
    with pytest.raises(TrainingFailed, match=r"died .out of memory(.|\n)*training\n(.|\n)*--resume"):
        carried_out(run, machine)
    [folder] = machine.runs()
    (folder / "run" / "checkpoints").mkdir()
    (here / "rewards.py").write_text("def short(completions, **_):\n    return [1.0]\n")
    machine.tell(events=STEPS[1:])
    events = carried_out(run, machine)
    assert machine.seen["words"] == [*STAGES, "--resume"] and machine.seen["folder"] == str(folder)
    assert steps(events) == [2, 3] and [event["step"] for event in run.steps()] == [1, 2, 3]
    assert not run.checkpoints.exists(), "checkpoints stay there"


def test_a_run_whose_folder_is_gone_is_begun_anew(here: Path, machine: Machine) -> None:
    machine.tell(events=[{"die": True}])
    run = planned(here)
    with pytest.raises(TrainingFailed):
        carried_out(run, machine)
    shutil.rmtree(machine.workdir)
    machine.tell(events=STEPS)
    assert steps(carried_out(run, machine)) == [1, 2, 3]


def test_a_run_is_stopped_from_here(here: Path, machine: Machine) -> None:
    machine.tell(events=[STEPS[0], {"wait": "never"}])
    run, events, ended = planned(here), list[dict[str, Any]](), list[BaseException]()

    def following() -> None:
        try:
            run_there(run, machine.remote(), STAGES, events.append)
        except TrainingFailed as error:
            ended.append(error)

    thread = threading.Thread(target=following)
    thread.start()
    wait_for(lambda: steps(events) == [1])
    assert stop_there(run) is True
    thread.join(20)
    assert "was stopped" in str(ended[0]) and f"--resume {run.root}" in str(ended[0])
    assert machine.processes("carry_out") == [] and stop_there(run) is False
    assert len(machine.runs()) == 1, "its checkpoints stay there"


def test_no_other_run_is_stopped(here: Path, machine: Machine) -> None:
    with pytest.raises(ConfigError, match="does not happen on another machine"):
        stop_there(planned(here))


# --- coming home ----------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_what_its_checksum_says_is_refused_with_all_others(here: Path, machine: Machine) -> None:
    machine.tell(tampering={"model/model.safetensors": "merger"})
    run = planned(here)
    with pytest.raises(TrainingFailed, match=r"model\.safetensors' is not what its checksum says; nothing of it was"):
        carried_out(run, machine)
    assert not run.adapter.exists() and not run.merged.exists() and not run.comparison_file.exists()
    [folder] = machine.runs()
    (folder / "run" / "model" / "model.safetensors").write_text("merged")
    (machine.home / "tampering.json").unlink()
    carried_out(run, machine)
    assert {name: (run.root / name).read_text() for name in MADE} == MADE


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "plan.json", "remote.json", "a/../../b", "checkpoints/x"]
)
def test_a_name_that_is_no_result_is_refused(here: Path, machine: Machine, name: str) -> None:
    run = planned(here)
    place = following.Place(host="gpubox", folder="/nowhere", script="there.py")
    with pytest.raises(TrainingFailed, match="is no file of a result"):
        following.bring_home(Link(machine.remote()), place, run, {name: "0" * 64})


def test_what_has_arrived_is_not_fetched_again(here: Path, machine: Machine) -> None:
    run, asked = planned(here), list[list[str]]()
    machine.tell(tampering={"model/model.safetensors": "merger"})
    with pytest.raises(TrainingFailed):
        carried_out(run, machine)
    [folder] = machine.runs()
    (folder / "run" / "model" / "model.safetensors").write_text("merged")
    fetch = following.unpack
    patched = lambda stream, into, sums: (asked.append(sorted(sums)), fetch(stream, into, sums))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "unpack", patched)
        carried_out(run, machine)
    assert asked == [["model/model.safetensors"]]


def test_no_room_here_is_told_and_nothing_there_is_lost(
    here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    run = planned(here)
    with monkeypatch.context() as patch:
        patch.setattr(following, "unpack", full)
        with pytest.raises(TrainingFailed, match=rf"No space left on device; it is kept in .*--resume {run.root}"):
            carried_out(run, machine)
    carried_out(run, machine)
    assert {name: (run.root / name).read_text() for name in MADE} == MADE


# --- errors there ---------------------------------------------------------------------------------------------------


def test_the_error_of_the_run_there_is_raised_here_with_the_ways_of_here(here: Path, machine: Machine) -> None:
    machine.tell(events=[STEPS[0], {"fail": "RewardError"}])
    run = planned(here)
    with pytest.raises(RewardError) as failed:
        carried_out(run, machine)
    where = f"the whole log is {run.log}; to go on from it: --resume {run.root}"
    assert str(failed.value) == f"on gpubox: bad\n{where}"
    assert run.log.read_text() == "training\n"


def test_rewards_that_cannot_be_found_there_are_told_before_weights_go(here: Path, machine: Machine) -> None:
    machine.tell(faults=["cannot import 'mylib'"])
    run = planned(here)
    with pytest.raises(ConfigError, match=r"(?s)on 'gpubox'.*cannot import 'mylib'.*remote\.bring"):
        carried_out(run, machine)
    assert machine.runs() == [] and not (machine.workdir / "weights").exists()
    assert not (run.root / "remote.json").exists()


# --- what keeps a run from it ---------------------------------------------------------------------------------------


def test_all_that_keeps_a_run_here_is_said_before_anything_is_asked(here: Path, machine: Machine) -> None:
    config = {"rollout": "agent", "launch": {"nproc": 2, "nodes": 2}, "remote": {"host": "gpubox", "env": ["NO_SUCH"]}}
    run = planned(here, rewards=[reward(None, "lambda_1")], config=config)
    with pytest.raises(ConfigError) as refused:
        carried_out(run, machine)
    said = str(refused.value)
    assert all(word in said for word in ("lambda_1", "rollout: agent", "launch.nodes", "NO_SUCH"))
    assert not (machine.home / "calls.txt").exists()


def test_all_that_the_machine_lacks_is_said_at_once(here: Path, machine: Machine) -> None:
    machine.tell(lacks=["load_in_4bit needs bitsandbytes"])
    run = planned(here, config={"launch": {"nproc": 4}})
    with pytest.raises(ConfigError) as refused:
        carried_out(run, machine, gpus=2, workdir="/proc/nowhere")
    said = str(refused.value)
    assert "load_in_4bit needs bitsandbytes" in said
    assert "remote.gpus is 2, and nvidia-smi shows" in said
    assert "remote.workdir '/proc/nowhere' cannot be used" in said


def test_another_version_of_the_package_there_is_told_with_the_command_that_installs_ours(
    here: Path, machine: Machine
) -> None:
    machine.install("0.0.1")
    with pytest.raises(ConfigError, match=r"has version 0\.0\.1 of it.*is needed; install it with: ssh gpubox"):
        carried_out(planned(here), machine)


def test_a_missing_package_is_told(here: Path, machine: Machine) -> None:
    bare = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if bare is None or subprocess.run([bare, "-c", "import praison_agent_rl"], capture_output=True).returncode == 0:
        pytest.skip("there is no Python without this package on this machine")
    with pytest.raises(ConfigError, match=r"has not this package|3\.10 is needed"):
        carried_out(planned(here), machine, python=bare)


def test_a_python_that_is_not_there_is_told(here: Path, machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"'gpubox' has no Python '~/no/python' that can be run .*as a whole path"):
        carried_out(planned(here), machine, python="~/no/python")


def test_what_is_no_python_is_told(here: Path, machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"remote\.python '/bin/true'"):
        carried_out(planned(here), machine, python="/bin/true")


def test_no_room_there_is_told(here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("praison_agent_rl.remote.checks.LEAST_DISK", 2**60)
    with pytest.raises(ConfigError, match=r"needs about 1073741824\.0 GiB of disk.*remote\.workdir"):
        carried_out(planned(here, base="owner/model"), machine)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Host key verification failed.", "confirm its key"),
        ("me@gpubox: Permission denied (publickey).", "ssh-copy-id"),
        ("ssh: Could not resolve hostname gpubox: Name or service not known", "spelling"),
        ("ssh: connect to host gpubox port 22: Connection refused", "remote.port"),
    ],
)
def test_a_machine_that_cannot_be_reached_is_told_with_what_to_do(
    here: Path, machine: Machine, said: str, advice: str
) -> None:
    (machine.home / "unreachable").write_text(f"some warning\n{said}\n")
    with pytest.raises(Unreachable) as failed:
        carried_out(planned(here), machine)
    assert said in str(failed.value) and advice in str(failed.value) and "warning" not in str(failed.value)


def test_ssh_is_told_to_ask_nobody_and_to_let_the_users_options_win(machine: Machine) -> None:
    remote = machine.remote(port=2222, identity="~/.ssh/id", options=["-o", "ConnectTimeout=99"])
    words = Link(remote)._words
    assert words[:4] == ["ssh", "-T", "-o", "BatchMode=yes"] and words[-2:] == ["--", "gpubox"]
    assert words.index("ConnectTimeout=99") < words.index("ConnectTimeout=15"), "ssh takes the first"
    assert words[words.index("-p") + 1] == "2222" and words[words.index("-i") + 1] == "~/.ssh/id"


# --- the keys -------------------------------------------------------------------------------------------------------


def loaded(remote: Any) -> Any:
    return TrainConfig.load({"remote": remote}, need_model=False, need_data=False).remote


def test_a_name_alone_is_the_machine() -> None:
    assert loaded("me@gpu.example").host == "me@gpu.example"
    assert loaded({"host": "gpubox", "workdir": "/data", "gpus": 2}).gpus == 2
    assert loaded(None) is None


@pytest.mark.parametrize("host", ["-oProxyCommand=evil", "gpu box", "gpubox;id", ""])
def test_what_is_no_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="must be a machine or an alias"):
        loaded({"host": host})


@pytest.mark.parametrize("key", ["password", "token", "private_key"])
def test_a_secret_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="does not belong in a training file"):
        loaded({"host": "gpubox", key: "abc"})


def test_an_unknown_key_and_a_name_that_is_no_variable_are_refused() -> None:
    with pytest.raises(ValidationError, match="nodes"):
        Remote(host="gpubox", nodes=2)
    with pytest.raises(ValidationError, match="env"):
        Remote(host="gpubox", env=["A=b"])


def test_a_plan_says_where_its_run_happens(here: Path) -> None:
    (here / "x").mkdir()
    found = remote_of(planned(here / "x"))
    assert found is not None and found.host == "gpubox"


def test_options_of_the_command_are_keys() -> None:
    assert remote_of_flags() is None
    assert remote_of_flags(host="gpubox", gpus=2) == {"host": "gpubox", "gpus": 2}


# --- modules and parcels --------------------------------------------------------------------------------------------


def test_packages_go_whole_without_what_is_hidden_or_compiled(here: Path) -> None:
    for name in ("kit/inner/deep.py", "kit/data.txt", "kit/__pycache__/a.pyc", "kit/.git/x", "loose/one.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("import scales, numpy, os\n" if name.endswith("deep.py") else "")
    (here / "kit" / "__init__.py").write_text("from .inner import deep\n")
    found = files_of_modules(["kit.inner.deep", "loose.one", "praison_agent_rl.rewards", "json", "no_such_module"])
    names = ["kit/__init__.py", "kit/data.txt", "kit/inner/deep.py", "loose/one.py", "scales.py"]
    assert sorted(found) == names


def test_an_installed_module_stays_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = here / "venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "bought.py").write_text("")
    monkeypatch.syspath_prepend(site)
    assert files_of_modules(["bought"]) == {}


def test_a_module_beside_the_sources_goes_under_its_own_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "src").mkdir()
    (here / "src" / "mine.py").write_text("")
    monkeypatch.syspath_prepend(here / "src")
    assert files_of_modules(["mine"]) == {"mine.py": here / "src" / "mine.py"}


def test_what_is_brought_keeps_its_place(here: Path, tmp_path: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "a.csv").write_text("")
    (tmp_path / "other.txt").write_text("")
    assert files_brought("data") == ("data", {"data/a.csv": here / "data" / "a.csv"})
    assert files_brought(str(tmp_path / "other.txt"))[0] == "other.txt"
    with pytest.raises(ConfigError, match="no such file or folder"):
        files_brought("nothing")
    with pytest.raises(ConfigError, match="whole current folder"):
        files_brought(".")


def test_a_package_full_of_data_is_not_sent_unasked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("praison_agent_rl.remote.project._MOST_BYTES", 10)
    with pytest.raises(ConfigError, match=r"most of it in 'rewards\.py'"):
        check_size(files_of_modules(["rewards"]), "gpubox")


def parcel(files: dict[str, Path]) -> io.BytesIO:
    stream = io.BytesIO()
    pack(files, stream)
    stream.seek(0)
    return stream


def test_a_parcel_is_unpacked_as_it_was_packed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    files = {"one": tmp_path / "a", "deep/er": tmp_path / "link"}
    sums = {name: hash_file(path) for name, path in files.items()}
    out = tmp_path / "out"
    assert lacking(out, sums) == ["one", "deep/er"]
    unpack(parcel(files), out, sums)
    assert lacking(out, sums) == [] and not (out / "deep" / "er").is_symlink()
    (out / "one").write_bytes(b"y")
    assert lacking(out, sums) == ["one"]


def test_a_parcel_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    with pytest.raises(ValueError, match="was not asked for"):
        unpack(parcel({"../b": tmp_path / "a"}), tmp_path / "out", {"b": "0"})
    with pytest.raises(ValueError, match="not what its checksum says"):
        unpack(parcel({"b": tmp_path / "a"}), tmp_path / "out", {"b": "0"})
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as tar:
        link = tarfile.TarInfo("b")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    stream.seek(0)
    with pytest.raises(ValueError, match="was not asked for"):
        unpack(stream, tmp_path / "out", {"b": "0"})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "a"]


def test_half_a_parcel_leaves_only_whole_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 50_000)
    files = {"a": tmp_path / "a", "b": tmp_path / "b"}
    half = io.BytesIO(parcel(files).getvalue()[:70_000])
    with pytest.raises(tarfile.TarError):
        unpack(half, tmp_path / "out", {name: hash_file(path) for name, path in files.items()})
    assert (tmp_path / "out" / "a").exists() and not (tmp_path / "out" / "b").exists()


def test_the_script_there_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    script = Path(there.__file__)
    words = [sys.executable, "-I", "-S", str(script), "status"]
    request = json.dumps({"folder": str(tmp_path)}).encode() + b"\n"
    done = subprocess.run(words, input=request, capture_output=True, check=True)
    assert done.stdout == there.MARK + b'{"state": "gone"}'


def test_a_run_there_has_a_session_of_its_own(here: Path, machine: Machine) -> None:
    machine.tell(events=[STEPS[0], {"wait": "go"}])
    run = planned(here)
    with pytest.raises(KeyboardInterrupt):
        run_there(run, machine.remote(), STAGES, _interrupt_at_a_step)
    [process] = machine.processes("carry_out")
    assert os.getsid(process.pid) == process.pid
    (machine.home / "go").touch()
    wait_for(lambda: (machine.runs()[0] / "result.json").exists())
