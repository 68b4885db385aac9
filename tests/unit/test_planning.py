"""A run is checked and written whole, or not at all; a file that cannot be read is not blamed for what is in it."""

import json
from pathlib import Path

import pytest

from praison_agent_rl import planning
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, DataError, PraisonRLError
from praison_agent_rl.estimate import LEAST_DISK, estimate_run, in_words
from praison_agent_rl.planning import Draft, draft_from_config, write_run


def draft(rows=({"prompt": "a"},), base="owner/name", **changes) -> Draft:
    config = TrainConfig.load({"reward_funcs": [], **changes}, need_model=False, need_data=False)
    return Draft(config, base, list(rows), [], [])


@pytest.mark.parametrize("value", [b"raw", object(), {1, 2}])
def test_a_run_that_cannot_be_written_leaves_no_folder(tmp_path, value):
    with pytest.raises(DataError, match="row 2 cannot be written as JSON"):
        write_run(draft([{"prompt": "a"}, {"prompt": value}]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_a_run_is_written_leaves_no_folder(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "write_record", stop)
    with pytest.raises(KeyboardInterrupt):
        write_run(draft(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_on_a_nearly_full_disk_is_refused_in_units_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "free_disk", lambda root: LEAST_DISK - 2**20)
    with pytest.raises(ConfigError, match=r"needs about 64 MiB of disk .* with 63 MiB free"):
        write_run(draft(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_disk_holds_the_merged_model_twice_and_one_checkpoint_more_than_are_kept(tmp_path):
    shape = {"model_type": "llama", "hidden_size": 1000, "num_hidden_layers": 10}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    header = json.dumps({"w": {"dtype": "F32", "shape": [50_000_000], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = TrainConfig.load({"lora_r": 10, "max_steps": 100, "save_steps": 10}, need_model=False, need_data=False)
    needed = estimate_run(config, str(tmp_path), train=100, held_out=0, device="cpu").disk_bytes
    adapter = 14 * 10 * 1000 * 10
    assert needed == 2 * 50_000_000 * 4 + adapter * 4 + 3 * (adapter * 12 + 16 * 2**20)
    assert (in_words(2**30), in_words(2**30 - 1), in_words(0)) == ("1.0 GiB", "1024 MiB", "0 MiB")


@pytest.mark.parametrize("text", [None, "a: [1", b"\xff\xfe\x00", "- a\n"])
def test_of_a_file_that_cannot_be_read_only_that_is_said(tmp_path: Path, text):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        draft_from_config(path)
    assert len(str(caught.value).splitlines()) == 1 and "reward_funcs" not in str(caught.value)


@pytest.mark.parametrize("entry", [{"name": None}, {"name": ""}, {"name": None, "split": "test"}])
def test_a_dataset_without_a_name_is_looked_up_nowhere(entry):
    with pytest.raises(PraisonRLError) as caught:
        draft_from_config({"model_name": "./nothing", "dataset": [entry], "reward_funcs": "json:dumps"})
    lines = str(caught.value).splitlines()
    assert any("dataset[0] needs a name" in line for line in lines) and "hub" not in str(caught.value).replace(
        "on the hub", ""
    ).replace("hub name", "")
