"""The newest checkpoint that is whole is found among what killed runs leave behind; nothing in it is unpickled."""

import io
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from praison_agent_rl.records import Plan
from praison_agent_rl.runs import RunFolder, now, write_record
from praison_agent_rl.training.checkpoints import (
    RECORD,
    Made,
    checkpoint_of,
    fault_of,
    made_now,
    newest_whole_checkpoint,
    publish_checkpoint,
    settings_of,
)


def checkpoint(folder: Path, step: int) -> Path:
    """A checkpoint by hand with every file that resuming needs, and one that it does not."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"lora_A": np.arange(64, dtype=np.float32)}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (path / name).write_bytes(archive(f"{name} of {step}"))
    (path / "README.md").write_text("not needed")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 100}))
    return path


def archive(text: str) -> bytes:
    """What `torch.save` writes is a ZIP without compression."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as file:
        file.writestr("archive/data.pkl", text * 20)
    return written.getvalue()


def cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def flip_a_byte_of_the_data(path: Path) -> None:
    """Damage that leaves the ZIP's list of members readable."""
    content = bytearray(path.read_bytes())
    place = content.index(b" of ")
    content[place] ^= 1
    path.write_bytes(content)


def write_state(path: Path, text: str) -> None:
    (path / "trainer_state.json").write_text(text)


def test_of_whole_checkpoints_the_highest_number_is_taken_and_not_the_last_by_name(tmp_path):
    for step in (10, 9, 100):
        checkpoint(tmp_path, step)
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_without_checkpoints_there_is_none(tmp_path):
    assert newest_whole_checkpoint(tmp_path) is None
    assert newest_whole_checkpoint(tmp_path / "nothing here") is None


DAMAGE = {
    "half an adapter": lambda path: cut(path / "adapter_model.safetensors", 0.5),
    "an adapter that lacks its last byte": lambda path: (path / "adapter_model.safetensors").write_bytes(
        (path / "adapter_model.safetensors").read_bytes()[:-1]
    ),
    "an empty adapter": lambda path: (path / "adapter_model.safetensors").write_bytes(b""),
    "no adapter": lambda path: (path / "adapter_model.safetensors").unlink(),
    "an adapter without tensors": lambda path: save_file({}, path / "adapter_model.safetensors"),
    "no adapter_config": lambda path: (path / "adapter_config.json").unlink(),
    "no optimizer": lambda path: (path / "optimizer.pt").unlink(),
    "half an optimizer": lambda path: cut(path / "optimizer.pt", 0.5),
    "an empty optimizer": lambda path: (path / "optimizer.pt").write_bytes(b""),
    "an optimizer with a wrong byte": lambda path: flip_a_byte_of_the_data(path / "optimizer.pt"),
    "no scheduler": lambda path: (path / "scheduler.pt").unlink(),
    "half a scheduler": lambda path: cut(path / "scheduler.pt", 0.9),
    "no random state": lambda path: (path / "rng_state.pth").unlink(),
    "half a random state": lambda path: cut(path / "rng_state.pth", 0.3),
    "one broken random state of two": lambda path: (path / "rng_state_1.pth").write_bytes(b"PK"),
    "no trainer_state": lambda path: (path / "trainer_state.json").unlink(),
    "half a trainer_state": lambda path: write_state(path, '{"global_step": 20, "max_st'),
    "an empty trainer_state": lambda path: write_state(path, ""),
    "a trainer_state that is no mapping": lambda path: write_state(path, "[20]"),
    "a trainer_state that is not text": lambda path: (path / "trainer_state.json").write_bytes(b"\xff\xfe\x00"),
    "the state of another step": lambda path: write_state(path, '{"global_step": 19}'),
    "a state without a step": lambda path: write_state(path, "{}"),
    "a folder as optimizer": lambda path: ((path / "optimizer.pt").unlink(), (path / "optimizer.pt").mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage):
    before = checkpoint(tmp_path, 10)
    newest = checkpoint(tmp_path, 20)
    assert newest_whole_checkpoint(tmp_path) == newest
    DAMAGE[damage](newest)
    assert newest_whole_checkpoint(tmp_path) == before


@pytest.mark.parametrize("damage", DAMAGE)
def test_if_the_only_checkpoint_is_damaged_there_is_none(tmp_path, damage):
    DAMAGE[damage](checkpoint(tmp_path, 20))
    assert newest_whole_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "name",
    ["checkpoint-", "checkpoint-best", "checkpoint-30.part", "checkpoint--30", "tmp-checkpoint-30", "checkpoint-³"],
)
def test_folders_with_other_names_are_not_checkpoints(tmp_path, name):
    whole = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 30).rename(tmp_path / name)
    assert newest_whole_checkpoint(tmp_path) == whole


def test_a_file_with_a_checkpoints_name_is_passed_over(tmp_path):
    whole = checkpoint(tmp_path, 10)
    (tmp_path / "checkpoint-30").write_text("not a folder")
    assert newest_whole_checkpoint(tmp_path) == whole


def test_no_single_wrong_byte_ends_the_search(tmp_path):
    before, newest = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    content = (newest / "optimizer.pt").read_bytes()
    found = []
    for place in range(len(content)):
        for mask in (0x01, 0x08, 0x80):
            (newest / "optimizer.pt").write_bytes(
                content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]
            )
            found.append(newest_whole_checkpoint(tmp_path))
    assert set(found) == {before, newest}  # some bytes say nothing that matters, such as the time of writing
    assert found.count(before) > 0.8 * len(found)


def test_each_process_of_several_has_a_random_state_of_its_own(tmp_path):
    whole = checkpoint(tmp_path, 10)
    (whole / "rng_state.pth").unlink()
    for number in (0, 1):
        (whole / f"rng_state_{number}.pth").write_bytes(archive("state"))
    assert newest_whole_checkpoint(tmp_path) == whole


# --- a checkpoint with a record of its files --------------------------------------------------------------------------

MADE = Made("settings", {"torch": "2.0"}, 1)


def published(folder: Path, step: int, keep: int | None = None, **more: bytes) -> Path:
    """A checkpoint that was made aside, with ``more`` files, and put in its place."""
    made = checkpoint(folder / ".part", step)
    for name, content in more.items():
        path = made / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return publish_checkpoint(made, folder, MADE, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_checkpoint_that_was_made_aside_is_taken_and_older_ones_make_room(tmp_path):
    assert published(tmp_path, 9, keep=2) == tmp_path / "checkpoint-9"
    assert names(tmp_path) == ["checkpoint-9"]
    published(tmp_path, 10, keep=2)
    published(tmp_path, 11, keep=2)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-11"]
    published(tmp_path, 12, keep=1)
    assert names(tmp_path) == ["checkpoint-12"]
    published(tmp_path, 13)
    published(tmp_path, 14, keep=0)
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-13", "checkpoint-14"]
    assert newest_whole_checkpoint(tmp_path, settings="settings") == tmp_path / "checkpoint-14"


def test_a_damaged_newer_one_never_costs_the_whole_one(tmp_path):
    published(tmp_path, 10, keep=1)
    (checkpoint(tmp_path, 30) / "optimizer.pt").write_bytes(b"")
    published(tmp_path, 20, keep=1)  # transformers would keep 30, the highest, and take 10 and 20 away
    assert names(tmp_path) == ["checkpoint-20", "checkpoint-30"]
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-20"
    published(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["checkpoint-30"] and fault_of(tmp_path / "checkpoint-30") is None


def test_everything_is_on_the_disk_before_it_has_its_name_and_before_the_older_one_goes(tmp_path, monkeypatch):
    done: list[tuple[str, str]] = []
    sync, replace, remove = os.fsync, os.replace, shutil.rmtree

    def synced(descriptor: int) -> None:
        done.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)))
        sync(descriptor)

    def renamed(old: Any, new: Any) -> None:
        done.append(("rename", os.path.relpath(new, tmp_path)))
        replace(old, new)

    def removed(path: Any, **options: Any) -> None:
        done.append(("remove", os.path.relpath(path, tmp_path)))
        remove(path, **options)

    published(tmp_path, 1)
    made = checkpoint(tmp_path / ".part", 2)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    files = {f".part/checkpoint-2/{path.name}" for path in made.iterdir()} | {f".part/checkpoint-2/{RECORD}"}
    publish_checkpoint(made, tmp_path, MADE, keep=1)
    named = done.index(("rename", "checkpoint-2"))
    assert {path for what, path in done[:named] if what == "sync"} == {*files, ".part/checkpoint-2"}
    assert done[named + 1] == ("sync", ".")
    assert ("rename", ".part/checkpoint-1") in done[named:] and ("remove", ".part/checkpoint-1") in done[named:]


RANKS = {"rng_state_0.pth": archive("0"), "rng_state_1.pth": archive("1")}
DEEPSPEED = {"global_step7__zero_pp_rank_0_mp_rank_00_optim_states.pt": archive("moments"), "latest": b"global_step7"}
FSDP = {"optimizer_0__0_0.distcp": b"moments", "pytorch_model_fsdp_0__0_0.distcp": b"weights"}


@pytest.mark.parametrize("layout", [RANKS, {**RANKS, **DEEPSPEED}, {**RANKS, **FSDP}], ids=["ranks", "zero", "fsdp"])
def test_whatever_the_engine_every_file_that_was_there_must_be_there(tmp_path, layout):
    whole = published(tmp_path, 7, **layout)
    assert fault_of(whole) is None
    recorded = json.loads((whole / RECORD).read_text())["files"]
    assert set(recorded) == {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()} - {RECORD}
    for name in layout:
        path = whole / name.replace("__", "/")
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        assert fault_of(whole) == f"{path.relative_to(whole)} has {len(content) - 1} bytes of {len(content)}"
        path.unlink()
        assert fault_of(whole) == f"{path.relative_to(whole)} is missing"
        path.write_bytes(content)
    assert fault_of(whole) is None


def test_a_frozen_copy_of_the_adapter_beside_it_is_not_forgotten(tmp_path):
    content = (checkpoint(tmp_path / "other", 1) / "adapter_model.safetensors").read_bytes()
    whole = published(tmp_path, 7, **{"ref__adapter_model.safetensors": content})
    assert fault_of(whole) is None
    (whole / "ref" / "adapter_model.safetensors").unlink()  # transformers would go on with a fresh one
    assert fault_of(whole) == "ref/adapter_model.safetensors is missing"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / RECORD).write_text('{"files": {}}'), f"{RECORD} is damaged"),
        (lambda path: (path / RECORD).write_text(""), f"{RECORD} is damaged"),
        (lambda path: (path / RECORD).write_text("[]"), f"{RECORD} is damaged"),
        (
            lambda path: (path / RECORD).write_text('{"files": [], "settings": "", "libraries": {}, "processes": 1}'),
            f"{RECORD} is damaged",
        ),
        (lambda path: flip_a_byte_of_the_data(path / "optimizer.pt"), "optimizer.pt is damaged"),
        (lambda path: write_state(path, '{"global_step": 6}'), "trainer_state.json is not of step 7"),
        (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json is missing or damaged"),
    ],
)
def test_a_fault_is_said_in_words(tmp_path, damage, said):
    whole = published(tmp_path, 7)
    damage(whole)
    assert fault_of(whole) == said and newest_whole_checkpoint(tmp_path) is None


def test_a_checkpoint_without_an_optimiser_is_none_to_go_on_from(tmp_path):
    made = checkpoint(tmp_path / ".part", 7)
    (made / "optimizer.pt").unlink()
    assert fault_of(publish_checkpoint(made, tmp_path, MADE)) == "it has no optimiser (save_only_model)"


def test_the_random_numbers_of_every_process_are_wanted_where_nothing_was_recorded(tmp_path):
    whole = checkpoint(tmp_path, 10)
    (whole / "rng_state.pth").rename(whole / "rng_state_1.pth")
    assert fault_of(whole) == "the state of the random numbers is missing, or that of one process"
    (whole / "rng_state_0.pth").write_bytes(archive("0"))
    assert fault_of(whole) is None


# --- what a run goes on from ------------------------------------------------------------------------------------------

CONFIG = {"learning_rate": 1e-4, "lora_r": 8, "max_steps": 40, "save_steps": 10}


def planned(root: Path, **changes: Any) -> RunFolder:
    run = RunFolder.create(root)
    facts = {"rewards": [], "device": "cpu", "notes": [], "libraries": {}, "created": now()}
    write_record(run.plan_file, Plan(base="b", config={**CONFIG, **changes}, **facts))
    return run


def notes(run: RunFolder) -> list[str]:
    return [event["text"] for _, event in run.events()]


def saved(run: RunFolder, step: int, made: Made | None = None) -> Path:
    return publish_checkpoint(checkpoint(run.checkpoints / ".part", step), run.checkpoints, made or made_now(CONFIG))


def test_a_run_says_what_it_goes_on_from_and_why_not_from_a_newer_one(tmp_path):
    run = planned(tmp_path / "run")
    whole = saved(run, 10)
    (saved(run, 20) / "scheduler.pt").unlink()
    (saved(run, 30) / "optimizer.pt").write_bytes(b"")
    assert checkpoint_of(run) == whole
    assert notes(run)[1:] == ["checkpoint-20 is passed over: scheduler.pt is missing", "going on from checkpoint-10"]
    assert notes(run)[0].startswith("checkpoint-30 is passed over: optimizer.pt has 0 bytes of ")


def test_without_a_whole_one_it_begins_again(tmp_path):
    run = planned(tmp_path / "run")
    assert checkpoint_of(run) is None and notes(run) == ["no whole checkpoint: from the start"]


def test_a_checkpoint_of_a_run_with_other_settings_is_passed_over(tmp_path):
    run, other = planned(tmp_path / "run"), planned(tmp_path / "other", lora_r=16)
    whole = saved(run, 10)
    shutil.copytree(saved(other, 20, made_now(other.plan.config)), run.checkpoints / "checkpoint-20")
    assert checkpoint_of(run) == whole
    assert notes(run)[0] == "checkpoint-20 is passed over: it is of a run with other settings"


def test_how_far_a_run_goes_and_where_it_writes_makes_no_other_run():
    assert settings_of({**CONFIG, "max_steps": 80, "save_steps": 5, "output_dir": "x"}) == settings_of(CONFIG)
    assert settings_of({**CONFIG, "learning_rate": 2e-4}) != settings_of(CONFIG)


def test_another_release_or_number_of_processes_is_said_and_goes_on(tmp_path, monkeypatch):
    run, here = planned(tmp_path / "run"), made_now(CONFIG)
    older = saved(run, 10, here._replace(libraries={**here.libraries, "trl": "1.0.0"}))
    assert checkpoint_of(run) == older
    exact = "so what follows is not bit for bit what it would have been"
    assert notes(run)[-1] == f"checkpoint-10 was made with trl 1.0.0 (here {here.libraries['trl']}), {exact}"
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = planned(tmp_path / "two")
    assert saved(two, 10, here) == checkpoint_of(two)
    assert notes(two)[-1] == f"checkpoint-10 was made by 1 processes, and there are 2, {exact}"


def test_of_several_processes_one_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run = planned(tmp_path / "run")
    assert saved(run, 10) == checkpoint_of(run) and not run.events_file.exists()
