"""Adapters trained one on another's merged weights are one adapter for the base, and give the same logits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from praison_agent_rl import server_pool
from praison_agent_rl.errors import VersionDamaged, VersionError
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.records import Version
from praison_agent_rl.registry import read_version
from praison_agent_rl.server_pool import ServerPool
from praison_agent_rl.stacked_adapters import lineage, one_adapter, stack
from tests.finished_runs import finished_run, flip_a_byte

IDS = torch.tensor([[3, 70, 100, 42, 9, 200, 31]])
SETTINGS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 8, "lora_alpha": 4, "target_modules": ["v_proj", "down_proj"], "use_rslora": True},
    {"r": 2, "lora_alpha": 2, "target_modules": ["gate_proj"]},
]


def trained(base: Path, adapter: Path, merged: Path, settings: dict[str, Any], seed: int) -> torch.Tensor:
    """Save an adapter of random weights and the model that it makes of ``base``; return its logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    policy = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, weights in policy.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=0.3)
    policy.save_pretrained(adapter)
    whole = policy.merge_and_unload().eval()
    whole.save_pretrained(merged)
    with torch.no_grad():
        return whole(IDS).logits


def logits_of(base: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        return PeftModel.from_pretrained(model, adapter).eval()(IDS).logits


def test_three_adapters_one_on_another_are_one_on_the_base(tiny_model: Path, tmp_path: Path) -> None:
    base, adapters, logits = tiny_model, [], torch.empty(0)
    for number, settings in enumerate(SETTINGS):
        adapters.append(tmp_path / f"adapter-{number}")
        merged = tmp_path / f"merged-{number}"
        logits = trained(base, adapters[-1], merged, settings, seed=number)
        base = merged
    folder = tmp_path / "stacked"
    folder.mkdir()
    stack(adapters, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (14, 14, False)
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "v_proj"]
    assert torch.allclose(logits_of(tiny_model, folder), logits, atol=1e-4)
    assert not torch.allclose(logits_of(tiny_model, adapters[0]), logits, atol=0.1)  # so the others count


@pytest.fixture
def versions(in_tmp: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> list[Version]:
    """v1, v2 trained on it, and v3 trained on that."""
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.1))
    home, base, parent, made = in_tmp / "home", tiny_model, None, []
    for number, settings in enumerate(SETTINGS):
        run = finished_run(home / "runs" / str(number), base, agent="helper", parent=parent)
        shutil.rmtree(run.adapter)
        shutil.rmtree(run.merged)
        trained(base, run.adapter, run.merged, settings, seed=number)
        made.append(read_version(home, "helper", publish_version(home, "helper", run).name))
        base, parent = Path(made[-1].folder) / "model", made[-1].name
    return made


def test_a_version_is_traced_to_the_first_and_its_adapter_is_made_once(versions: list[Version], in_tmp: Path) -> None:
    first, _, last = versions
    assert [version.name for version in lineage(last)] == ["v1", "v2", "v3"] and lineage(first) == [first]
    assert one_adapter([first]) == Path(first.folder) / "adapter"
    shutil.rmtree(Path(versions[0].folder) / "model")  # merged weights have no part in it
    made = one_adapter(lineage(last))
    stamp = (made / "adapter_model.safetensors").stat().st_mtime_ns
    assert one_adapter(lineage(last)) == made and (made / "adapter_model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in (in_tmp / "cache" / "stacked").iterdir()] == [made.name]


def test_all_versions_are_loaded_by_one_server_of_the_first_base(versions, tiny_model, monkeypatch):
    started: list[tuple[str, int]] = []
    loaded: dict[str, Path] = {}

    class FakeVllm:
        running, url, api_key = True, "http://127.0.0.1:1/v1", "k"

        def __init__(self) -> None:
            from praison_agent_rl.serving import Holders

            self.holders, self.model = Holders(), "base"

        @property
        def address(self):
            from praison_agent_rl.serving import ServerAddress

            return self.holders.add(ServerAddress(self.url, self))

        def load(self, name, folder, weights):
            loaded[name] = folder
            other = FakeVllm()
            other.model = name
            return other

        def stop(self):
            pass

    def start(base, *, max_rank, options):
        started.append((base, max_rank))
        return FakeVllm()

    monkeypatch.setattr("praison_agent_rl.vllm_servers.serving.start_vllm_server", start)
    addresses = [server_pool.serve_version(version, backend="vllm") for version in versions]
    addresses.append(server_pool.serve_base(versions[0], backend="vllm"))
    assert started == [(str(tiny_model), 64)]
    assert list(loaded) == ["rl-helper-v1", "rl-helper-v2", "rl-helper-v3"]
    assert json.loads((loaded["rl-helper-v3"] / "adapter_config.json").read_text())["r"] == 14


def test_a_lineage_that_is_broken_is_not_served(versions: list[Version]) -> None:
    first, second, last = versions
    flip_a_byte(Path(second.folder) / "adapter" / "adapter_model.safetensors")
    with pytest.raises(VersionDamaged, match="v2 of agent 'helper' is damaged and is not served: adapter/"):
        server_pool.serve_version(last, backend="vllm")
    other = second.model_copy(update={"base_hash": "0" * 64})
    with pytest.raises(VersionError, match="v2 of agent 'helper' was trained on other weights than those of v1"):
        lineage(other)
    shutil.rmtree(first.folder)
    with pytest.raises(VersionError, match="has no version 'v1'"):
        lineage(second)
