"""A run that happens on another machine: what goes there, what comes home, and what is said where it cannot be."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError, RewardError, TrainingFailed
from praison_agent_rl.records import Plan, PlannedReward
from praison_agent_rl.remote import checkpoints, connection, following, starting, there, visiting
from praison_agent_rl.remote.checks import Load
from praison_agent_rl.remote.connection import Link, Unreachable
from praison_agent_rl.remote.flags import remote_of_flags
from praison_agent_rl.remote.luggage import project_of
from praison_agent_rl.remote.project import check_size, files_brought, files_of_modules
from praison_agent_rl.remote.running import move_run, remote_of, run_there, stop_there
from praison_agent_rl.remote.there import hash_file, lacking, pack, unpack
from praison_agent_rl.remote.visiting import in_words_of, visit
from praison_agent_rl.runs import RunFolder, write_record
from praison_agent_rl.training.checkpoints import (
    Made,
    fault_of,
    newest_whole_checkpoint,
    publish_checkpoint,
    settings_of,
)
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


@pytest.mark.parametrize("greeting", ["Welcome to gpubox!\n{}\n", "no end of a line"])
def test_what_a_login_says_of_its_own_does_no_harm(here: Path, machine: Machine, greeting: str) -> None:
    (machine.home / "greeting").write_text(greeting)
    (machine.home / "farewell").write_text("Come back!\n")
    machine.tell(events=[])  # of a stream of events all is taken for one
    run = planned(here)
    carried_out(run, machine)
    assert (run.root / "comparison.json").read_text() == "{}"


def test_names_may_have_blanks_quotes_and_letters_of_any_kind(here: Path, machine: Machine) -> None:
    strange = "wörter 'und' \"zeichen\" $x"
    (here / strange).mkdir()
    (here / strange / f"{strange}.txt").write_text("one")
    machine.tell(events=[*STEPS, {"fail": "RewardError"}])
    run = planned(here / strange)
    with pytest.raises(RewardError) as failed:
        carried_out(run, machine, workdir=f"~/{strange}", bring=[f"{strange}/{strange}.txt"])
    root = shlex.quote(str(run.root))
    assert str(failed.value).endswith(f"the whole log is {run.log}; to go on from it: --resume {root}")
    [folder] = (machine.home / strange / "runs").iterdir()
    assert (folder / "project" / strange / f"{strange}.txt").read_text() == "one"
    machine.tell(events=[])
    carried_out(run, machine, workdir=f"~/{strange}", bring=[f"{strange}/{strange}.txt"])
    assert (run.root / "comparison.json").exists()


def test_the_clock_there_is_that_of_all_events(here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    look = visiting.look_there
    monkeypatch.setattr(visiting, "look_there", lambda *given, **named: {**look(*given, **named), "time": "2001"})
    run = planned(here)
    carried_out(run, machine)
    assert next(event["time"] for _, event in run.events()) == "2001"


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


# --- checkpoints ----------------------------------------------------------------------------------------------------


def saved(folder: Path, step: int) -> Path:
    """A whole checkpoint of an empty configuration, as a run leaves it."""
    made = folder / ".part" / f"checkpoint-{step}"
    made.mkdir(parents=True)
    save_file({"lora_A": np.full(8, step, dtype=np.float32)}, made / "adapter_model.safetensors")
    with zipfile.ZipFile(made / "optimizer.pt", "w") as file:
        file.writestr("data.pkl", f"moments of {step}")
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 100}))
    return publish_checkpoint(made, folder, Made(settings_of({}), {"torch": "9.9"}, 1))


def kept(machine: Machine, *saved_steps: int) -> list[dict[str, Any]]:
    """Events of a run there that saves these checkpoints."""
    for step in saved_steps:
        saved(machine.home / "checkpoints", step)
    return [{"save": f"checkpoints/checkpoint-{step}"} for step in saved_steps]


def whole_here(run: RunFolder) -> Path | None:
    return newest_whole_checkpoint(run.checkpoints, settings=settings_of(run.plan.config))


@pytest.mark.parametrize("end", [{"die": True}, {"fail": "TrainingFailed"}, {"wait": "never"}], ids=str)
def test_the_newest_checkpoint_of_a_run_that_did_not_end_well_comes_home(
    here: Path, machine: Machine, end: dict[str, Any]
) -> None:
    (machine.home / "best" / "step-1").mkdir(parents=True)
    (machine.home / "best" / "step-1" / "watched.json").write_text("{}")
    machine.tell(events=[*kept(machine, 2), {"save": "best"}, STEPS[0], end])
    run = planned(here)

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and "wait" in end:
            assert stop_there(run)

    with pytest.raises(TrainingFailed, match=rf"checkpoint-2 is here too; .*--resume {run.root} --set remote=null"):
        run_there(run, machine.remote(), STAGES, stop)
    home = whole_here(run)
    assert home == run.checkpoints / "checkpoint-2" and (run.best / "step-1" / "watched.json").exists()
    there_now = machine.runs()[0] / "run" / "checkpoints" / "checkpoint-2"
    for name in ("adapter_model.safetensors", "optimizer.pt", "trainer_state.json"):
        assert (home / name).read_bytes() == (there_now / name).read_bytes(), "and it stays there"
    assert not (run.root / ".arriving" / "checkpoints" / "checkpoint-2").exists()


def test_a_run_that_nobody_follows_is_stopped_and_its_checkpoint_and_events_brought_home(
    here: Path, machine: Machine
) -> None:
    machine.tell(events=[*kept(machine, 4), STEPS[0], {"wait": "go"}, STEPS[1], {"wait": "never"}])
    run, said = planned(here), list[str]()
    with pytest.raises(KeyboardInterrupt):
        run_there(run, machine.remote(), STAGES, _interrupt_at_a_step)
    (machine.home / "go").touch()
    wait_for(lambda: '"step": 2' in (machine.runs()[0] / "run" / "events.jsonl").read_text())
    assert stop_there(run, said.append) is True
    assert whole_here(run) == run.checkpoints / "checkpoint-4" and "--set remote=null" in said[-1]
    assert [event["step"] for event in run.steps()] == [1, 2], "a run that goes on reads what was seen before"
    assert run.log.exists()
    calls = len(machine.calls)
    assert stop_there(run, said.append) is False
    assert sum(" give" in call for call in machine.calls[calls:]) == 1, "of the log; the checkpoint is here already"


def test_what_is_not_as_it_was_there_is_no_checkpoint_and_hides_no_error(here: Path, machine: Machine) -> None:
    machine.tell(events=[*kept(machine, 2), {"fail": "RewardError"}])
    machine.tell(untrue={"checkpoints/checkpoint-2/optimizer.pt": "0" * 64})
    run, events = planned(here), list[dict[str, Any]]()
    with pytest.raises(RewardError, match="bad"):
        run_there(run, machine.remote(), STAGES, events.append)
    assert whole_here(run) is None and not list(run.root.glob("checkpoints/*"))
    assert "optimizer.pt' is not what its checksum says" in notes(events) and "kept there" in notes(events)
    (machine.home / "untrue.json").unlink()
    assert stop_there(run) is False and whole_here(run) == run.checkpoints / "checkpoint-2"


def test_what_an_earlier_arrival_left_is_no_part_of_a_checkpoint(here: Path, machine: Machine) -> None:
    machine.tell(events=[*kept(machine, 2), {"die": True}])
    run = planned(here)
    left = run.root / ".arriving" / "checkpoints" / "checkpoint-2"
    left.mkdir(parents=True)
    (left / ".optimizer.pt.0a1b2c3d.part").write_text("half")
    (left / "optimizer.pt").write_text("of another checkpoint")
    with pytest.raises(TrainingFailed):
        carried_out(run, machine)
    home = whole_here(run)
    assert home is not None and not [path for path in home.iterdir() if path.name.endswith(".part")]


@pytest.mark.parametrize(
    "names",
    [["checkpoints/../../x/y"], ["/etc/passwd"], ["plan.json"], ["checkpoints/checkpoint-1/a", "adapter/x"],
     ["checkpoints/checkpoint-1/a", "checkpoints/checkpoint-2/checkpoint.json"], ["checkpoints/checkpoint-1/a"]],
    ids=str,
)  # fmt: skip
def test_names_that_are_not_of_one_whole_checkpoint_are_refused(
    here: Path, machine: Machine, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "ask", lambda *given, **named: dict.fromkeys(names, "0" * 64))
    place = following.Place(host="gpubox", folder="/nowhere", script="there.py")
    with pytest.raises(ValueError, match="is no file of a checkpoint"):
        checkpoints.bring_checkpoint(Link(machine.remote()), place, planned(here))


def test_a_run_begun_anew_there_gets_the_checkpoint_that_is_here(here: Path, machine: Machine) -> None:
    template = here.parent / "own.jinja"  # outside of the project, so that its name there is another one
    template.write_text("{{ messages }}")
    machine.tell(events=[*kept(machine, 2), STEPS[0], {"die": True}])
    run = planned(here, config={"chat_template": str(template)})
    for measured in (run.answers("base"), run.root / "mine.txt"):
        measured.write_text("{}\n")
    with pytest.raises(TrainingFailed):
        carried_out(run, machine)
    shutil.rmtree(machine.workdir / "runs")
    machine.tell(events=[{"die": True}])
    with pytest.raises(TrainingFailed):
        run_there(run, machine.remote(), STAGES, lambda event: None, resume=True)
    [folder] = machine.runs()
    told, sent = machine.seen["plan"]["config"], folder / "run" / "checkpoints" / "checkpoint-2"
    assert told["chat_template"] == "own.jinja" and settings_of(told) != settings_of(run.plan.config)
    assert fault_of(sent, settings=settings_of(told)) is None and machine.seen["words"] == [*STAGES, "--resume"]
    assert not (folder / "run" / run.answers("base").name).exists(), "both sides are measured on one machine"
    assert (folder / "run" / "mine.txt").exists()


def test_a_run_moves_home_with_its_checkpoint_and_leaves_nothing_there(here: Path, machine: Machine) -> None:
    machine.tell(events=[*kept(machine, 2), STEPS[0], {"wait": "never"}])
    run = planned(here)
    with pytest.raises(KeyboardInterrupt):
        run_there(run, machine.remote(), STAGES, _interrupt_at_a_step)
    with pytest.raises(ConfigError, match=rf"goes on on gpubox; stop it first: .*--stop {run.root}"):
        move_run(run, None)
    assert remote_of(run) is not None, "nothing has changed"
    stop_there(run)
    shutil.rmtree(run.checkpoints)
    move_run(run, None)
    assert remote_of(run) is None and whole_here(run) == run.checkpoints / "checkpoint-2"
    assert machine.runs() == [] and not (run.root / "remote.json").exists()
    assert "torch" in run.plan.libraries and run.plan.libraries["torch"] != "9.9"
    move_run(run, {"host": "otherbox", "gpus": 2})
    found = remote_of(run)
    assert found is not None and (found.host, found.gpus) == ("otherbox", 2)


def test_a_run_that_is_done_there_is_not_moved(here: Path, machine: Machine) -> None:
    run = planned(here)
    with pytest.raises(KeyboardInterrupt):
        run_there(run, machine.remote(), STAGES, _interrupt_at_a_step)
    wait_for(lambda: (machine.runs()[0] / "result.json").exists())
    with pytest.raises(ConfigError, match=rf"is done on gpubox: .*--resume {run.root}"):
        move_run(run, None)


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


# --- a look beforehand ----------------------------------------------------------------------------------------------


def load_of(run: RunFolder) -> Load:
    return Load(run.plan, train=1, held_out=1)


def tree(folder: Path) -> dict[str, bytes]:
    """All that lies there, but for what the stand-in itself notes of calls."""
    found = [path for path in folder.rglob("*") if path.name not in ("calls.txt", "config.json")]
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


def test_a_look_beforehand_tells_what_is_there_and_leaves_nothing(here: Path, machine: Machine) -> None:
    run, before = planned(here), tree(machine.home)
    remote = machine.remote(workdir="~/deep/er/runs")
    visited = visit(remote, load_of(run))
    found = in_words_of(visited, remote)
    assert tree(machine.home) == before
    assert visited.device == "cuda" and "torch 9.9" in found["python there"]
    assert "MiB of weights would be sent" in found["model there"]
    assert found["goes along"] == "rewards.py, scales.py" and "deep/er/runs" in found["disk there"]
    assert not (run.root / "remote.json").exists()


def test_a_look_beforehand_tells_of_weights_that_are_there(here: Path, machine: Machine) -> None:
    carried_out(planned(here), machine)
    (here / "again").mkdir()
    visited = visit(machine.remote(), load_of(planned(here / "again")))
    assert visited.sent == 0 and "there already" in in_words_of(visited, machine.remote())["model there"]


def test_a_look_beforehand_asks_there_for_models_of_the_hub(here: Path, machine: Machine) -> None:
    judge = reward("owner/judge", "judge")
    visit(machine.remote(), load_of(planned(here, base="owner/model", rewards=[reward(), judge])))
    assert json.loads((machine.home / "config.json").read_text())["hub"] == ["owner/model", "owner/judge"]


def test_a_look_beforehand_says_all_that_is_wrong_here_and_there_at_once(here: Path, machine: Machine) -> None:
    machine.tell(lacks=["training needs trl", "the hub has no model 'owner/model' for you"])
    remote = machine.remote(workdir="/proc/nowhere", gpus=99, bring=["nothing.csv"])
    with pytest.raises(ConfigError) as refused:
        visit(remote, load_of(planned(here, base="owner/model")))
    said = str(refused.value)
    wanted = ["nothing.csv", "/proc/nowhere", "remote.gpus is 99", "training needs trl", "the hub has no model"]
    assert [word for word in wanted if word not in said] == []


def test_what_goes_there_and_what_lies_there_count_as_room(
    here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(here)
    look, needed = visiting.look_there, load_of(run).cost({"device": "cuda", "gpus": []}).disk_bytes
    free = {"free": needed, "held": 0}
    monkeypatch.setattr(visiting, "look_there", lambda *given, **named: {**look(*given, **named), **free})
    with pytest.raises(ConfigError, match=r"of it for weights that go there"):
        visit(machine.remote(), load_of(run))
    free["held"] = 2**20
    assert visit(machine.remote(), load_of(run)).sent > 0


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


def test_a_login_that_hangs_is_told(here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LONGEST_SILENCE", 0.3)
    (machine.home / "hangs").touch()
    with pytest.raises(Unreachable, match=r"let us in and started no Python.*\.bashrc"):
        carried_out(planned(here), machine)


@pytest.mark.parametrize("program", ["head -n 1 >&2; exit 1", 'echo "$*" >&2; exit 1', 'exec /bin/sh "$@"'])
def test_a_python_that_shows_its_program_shows_no_variable(
    here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    strange = machine.home / "strange"
    strange.write_text(f"#!/bin/sh\n{program}\n")
    strange.chmod(0o700)
    with pytest.raises(ConfigError, match=r"remote\.python") as failed:
        carried_out(planned(here), machine, python=str(strange), env=["HF_TOKEN"])
    assert "hf_very_secret" not in str(failed.value)


def test_a_start_whose_answer_was_lost_starts_nothing_twice(
    here: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, lost = following.asked, list[str]()

    def losing(link: Link, place: following.Place, verb: str, **request: Any) -> Any:
        said = ask(link, place, verb, **request)
        if verb == "start" and not lost:
            wait_for(lambda: (Path(place.folder) / "result.json").exists())
            lost.append(verb)
            raise Unreachable("lost")
        return said

    monkeypatch.setattr(starting, "asked", losing)
    assert steps(carried_out(planned(here), machine)) == [1, 2, 3]
    assert lost == ["start"] and len(machine.begun) == 1


def test_a_run_is_found_where_the_package_has_moved_there(here: Path, machine: Machine) -> None:
    run = planned(here)
    with pytest.raises(KeyboardInterrupt):
        run_there(run, machine.remote(), STAGES, _interrupt_at_a_step)
    record = json.loads((run.root / "remote.json").read_text())
    (run.root / "remote.json").write_text(json.dumps({**record, "script": "/old/python3.9/there.py"}))
    carried_out(run, machine)
    assert (run.root / "comparison.json").exists() and len(machine.begun) == 1


def test_a_fault_there_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    request = json.dumps({"folder": str(tmp_path / "file" / "inside"), "sums": {"a": hash_file(tmp_path / "file")}})
    sent = request.encode() + b"\n" + parcel({"a": tmp_path / "file"}).getvalue()
    words = [sys.executable, str(Path(there.__file__)), "receive"]
    done = subprocess.run(words, input=sent, capture_output=True)
    assert done.returncode == 1 and done.stderr.startswith(b"NotADirectoryError: ") and done.stderr.count(b"\n") == 1


def test_ssh_is_told_to_ask_nobody_and_to_let_the_users_options_win(machine: Machine) -> None:
    remote = machine.remote(port=2222, identity="~/.ssh/id", options=["-o", "ConnectTimeout=99"])
    words = Link(remote)._words
    assert words[:4] == ["ssh", "-T", "-o", "BatchMode=yes"] and words[-2:] == ["--", "gpubox"]
    assert "RemoteCommand=none" in words, "an alias may have a command for people"
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


def test_links_go_as_what_they_lead_to_under_their_own_names(here: Path, tmp_path: Path) -> None:
    (tmp_path / "shared" / "inner").mkdir(parents=True)
    for name in ("rewards_v2.py", "inner/deep.py", "data_v3.csv"):
        (tmp_path / "shared" / name).write_text("")
    (here / "linked.py").symlink_to(tmp_path / "shared" / "rewards_v2.py")
    (here / "kit").symlink_to(tmp_path / "shared")
    (tmp_path / "shared" / "inner" / "up").symlink_to(tmp_path / "shared")
    (tmp_path / "shared" / "gone").symlink_to("nowhere")
    (here / "data.csv").symlink_to(tmp_path / "shared" / "data_v3.csv")
    os.mkfifo(tmp_path / "shared" / "pipe")
    found = files_of_modules(["linked", "kit"])
    assert sorted(found) == ["kit/data_v3.csv", "kit/inner/deep.py", "kit/rewards_v2.py", "linked.py"]
    assert files_brought("data.csv")[0] == "data.csv" and files_brought("kit/inner")[0] == "kit/inner"


def test_two_files_of_one_name_are_told(here: Path, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "words.txt").write_text(folder)
    run = planned(here)
    remote = Remote(host="gpubox", bring=[str(tmp_path / folder / "words.txt") for folder in ("one", "two")])
    with pytest.raises(ConfigError, match=r"would both be 'words\.txt'"):
        project_of(run.plan, remote)


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


def test_one_file_may_arrive_twice_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(5_000_000))
    files = {"a": tmp_path / "a"}
    sums, content = {"a": hash_file(tmp_path / "a")}, parcel(files).getvalue()

    class Slow(io.BytesIO):
        """Another process brings the same file while this one has half of it."""

        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 2_500_000 and not (tmp_path / "out" / "a").exists():
                unpack(io.BytesIO(content), tmp_path / "out", sums)
            return super().read(size)

    unpack(Slow(content), tmp_path / "out", sums)
    assert lacking(tmp_path / "out", sums) == [] and [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


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
    assert done.stdout == there.MARK + b'{"state": "gone"}\n'


def test_a_run_there_has_a_session_of_its_own(here: Path, machine: Machine) -> None:
    machine.tell(events=[STEPS[0], {"wait": "go"}])
    run = planned(here)
    with pytest.raises(KeyboardInterrupt):
        run_there(run, machine.remote(), STAGES, _interrupt_at_a_step)
    [process] = machine.processes("carry_out")
    assert os.getsid(process.pid) == process.pid
    (machine.home / "go").touch()
    wait_for(lambda: (machine.runs()[0] / "result.json").exists())
