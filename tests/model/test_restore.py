"""Weights that were pruned are made again from base and adapter, and are what they were."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from praison_agent_rl import registry
from praison_agent_rl.checksums import hash_weights
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError, VersionError
from praison_agent_rl.merging import merge_adapter
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.records import Version
from praison_agent_rl.registry import promote, verify
from praison_agent_rl.runs import RunFolder, write_record
from praison_agent_rl.upkeep import prune, restore
from tests.finished_runs import finished_run, flip_a_byte, snapshot


@pytest.fixture
def home(in_tmp: Path) -> Path:
    return in_tmp / ".praisonai" / "rl"


def trained(home: Path, base: Path, name: str, parent: str | None = None) -> RunFolder:
    """A run with a real adapter and its real merge, as training leaves them."""
    config = TrainConfig.load({"lora_r": 4, "lora_alpha": 8}, need_model=False, need_data=False)
    # a reward that nobody has any more must not keep the weights from being made again
    reward = {"spec": "gone.module:reward", "name": "r", "weight": 1.0, "prompts": "text", "completions": "text"}
    run = finished_run(home / "runs" / name, base, config=config.resolved(), parent=parent, rewards=[reward])
    shutil.rmtree(run.merged)
    shutil.rmtree(run.adapter)
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data = torch.randn(parameter.shape) * 0.05
    adapted.save_pretrained(run.adapter)
    proof = merge_adapter(str(base), run.adapter, run.merged, config=config, prompts=[[0, 20, 30, 40]])
    write_record(run.merge_file, proof)
    return run


def two_versions(home: Path, base: Path) -> tuple[Version, Version]:
    first = publish_version(home, "Helper", trained(home, base, "one"))
    second = publish_version(home, "Helper", trained(home, Path(first.folder) / "model", "second", parent="v1"))
    return first, second


def test_pruned_weights_come_back_as_they_were_also_those_of_the_base(home: Path, tiny_model: Path) -> None:
    first, second = two_versions(home, tiny_model)
    before = [snapshot(Path(version.folder) / "model") for version in (first, second)]
    third = publish_version(home, "Helper", trained(home, tiny_model, "other one"))
    promote(home, "Helper", third.name)
    assert prune(home, "Helper", 0).removed == ["v1", "v2"]
    with pytest.raises(VersionError, match="versions restore 'Helper' v2"):
        promote(home, "Helper", "v2")

    restore(home, "Helper", "v2")
    assert [snapshot(Path(version.folder) / "model") for version in (first, second)] == before
    assert [verify(version) for version in registry.list_versions(home, "Helper")] == [[], [], []]
    promote(home, "Helper", "v2")
    assert not list((home / "versions" / "helper").glob(".restoring-*"))


def test_versions_that_were_moved_are_restored_where_they_are(home: Path, tiny_model: Path, in_tmp: Path) -> None:
    _, second = two_versions(home, tiny_model)
    before = snapshot(Path(second.folder) / "model")
    moved = in_tmp / "elsewhere"
    home.rename(moved)
    folder = moved / "versions" / "helper" / "v2"
    flip_a_byte(folder / "model" / "model.safetensors")
    restored = restore(moved, "Helper", "v2")
    assert restored.folder == str(folder.resolve()) and snapshot(folder / "model") == before
    assert verify(restored) == []


def test_a_base_that_was_made_again_with_other_last_bits_stands_for_the_one_of_then(
    home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of a library can round otherwise; here the proof is the same and a tensor differs by 1e-6."""
    from praison_agent_rl import upkeep

    first, second = two_versions(home, tiny_model)
    real = upkeep.launch_stages

    def rounding_otherwise(run: RunFolder, *given: object, **options: object) -> None:
        real(run, *given, **options)  # type: ignore[arg-type]
        tensors = load_file(run.merged / "model.safetensors")
        tensors["model.norm.weight"] += 1e-6
        save_file(tensors, run.merged / "model.safetensors", metadata={"format": "pt"})

    for version in (first, second):
        shutil.rmtree(Path(version.folder) / "model")
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "launch_stages", rounding_otherwise)
        restore(home, "Helper", "v1")
    assert hash_weights(str(Path(first.folder) / "model")) != second.base_hash
    restore(home, "Helper", "v2")
    assert verify(first) == verify(second) == []
    flip_a_byte(Path(first.folder) / "model" / "model.safetensors")
    assert verify(first) == ["model/model.safetensors was changed"]


def test_a_merge_that_fails_leaves_the_version_as_it_was(home: Path, tiny_model: Path, in_tmp: Path) -> None:
    base = in_tmp / "base"
    shutil.copytree(tiny_model, base)
    version = publish_version(home, "Helper", trained(home, base, "one"))
    shutil.rmtree(Path(version.folder) / "model")
    before = snapshot(Path(version.folder))
    (base / "config.json").write_text('{"model_type": "llama", "hidden_size": 32}')  # not a part of the hash
    with pytest.raises(ModelError, match="cannot be loaded") as failure:
        restore(home, "Helper", "v1")
    assert "--resume" not in str(failure.value) and "log" not in str(failure.value)
    assert snapshot(Path(version.folder)) == before
    assert not list((home / "versions" / "helper").glob(".restoring-*"))
