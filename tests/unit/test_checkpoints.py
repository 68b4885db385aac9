"""The newest checkpoint that is whole is found among what killed runs leave behind; nothing in it is unpickled."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from praison_agent_rl.training.checkpoints import newest_whole_checkpoint


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
