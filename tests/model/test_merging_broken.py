"""A base or an adapter that is not whole, or not of each other, is merged by nobody, and what was there stays."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from praison_agent_rl.errors import ModelError
from praison_agent_rl.merging import merge_adapter
from praison_agent_rl.streaming_merge.plan import CannotStream, plan_merge
from tests.model.test_streaming_merge import PROJECTIONS, PROMPTS, adapter_for, base_of, config_of, on_disk

INDEX = "model.safetensors.index.json"
TENSORS = "adapter_model.safetensors"


def rewritten(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def without(*parts):
    def change(tensors):
        for name in [name for name in tensors if all(part in name for part in parts)]:
            del tensors[name]

    return lambda base, adapter: rewritten(adapter / TENSORS, change)


def deeper(base, adapter):
    rewritten(
        adapter / TENSORS, lambda t: t.update({k.replace("layers.1", "layers.7"): v.clone() for k, v in t.items()})
    )


def of_another_prefix(base, adapter):
    rewritten(adapter / TENSORS, lambda t: [t.update({k[11:]: t.pop(k)}) for k in list(t) if "layers.1" in k] and None)


def of_another_rank(base, adapter):
    rewritten(adapter / TENSORS, lambda t: t.update({k: torch.ones(3, 64) for k in t if "q_proj.lora_A" in k}))


def cut(name):
    def spoil(base, adapter):
        path = sorted([*base.glob(name), *adapter.glob(name)])[0]
        path.write_bytes(path.read_bytes()[:-40])

    return spoil


def gone(name):
    return lambda base, adapter: (adapter / name).unlink()


def index(change):
    def spoil(base, adapter):
        found = json.loads((base / INDEX).read_text())
        (base / INDEX).write_text(json.dumps(change(found)))

    return spoil


def unnamed(name):
    return index(lambda found: {**found, "weight_map": {k: v for k, v in found["weight_map"].items() if k != name}})


def lost_from_its_file(name):
    def spoil(base, adapter):
        file = json.loads((base / INDEX).read_text())["weight_map"][name]
        rewritten(base / file, lambda tensors: tensors.pop(name))
        unnamed(name)(base, adapter)

    return spoil


PASSED_OVER = {
    "of a deeper model": (deeper, "has no place for its .*layers.7.*4 such tensors"),
    "lacks a layer": (without("layers.1"), "it has no .*layers.1.*4 such tensors"),
    "lacks half a product": (without("layers.1", "lora_B"), "it has no .*lora_B"),
    "of another prefix": (of_another_prefix, "has no place for its"),
    "of another rank": (of_another_rank, "does not fit the base model: .*size mismatch"),
}
BROKEN = {
    "adapter cut off": (cut(TENSORS), "its header speaks of"),
    "adapter without tensors": (gone(TENSORS), "adapter_model.safetensors' cannot be read"),
    "adapter without config": (gone("adapter_config.json"), "adapter_config.json' cannot be read"),
    "adapter config cut off": (cut("adapter_config.json"), "adapter_config.json' cannot be read as JSON"),
    "base cut off": (cut("model-*.safetensors"), "its header speaks of"),
    "index cut off": (cut(INDEX), "cannot be read as JSON"),
    "index without map": (index(lambda found: {}), "has no weight_map"),
    "index with a list": (index(lambda found: {"weight_map": [1]}), "has no weight_map"),
    "index of a lost file": (index(lambda found: {"weight_map": {"x": "lost.safetensors"}}), "lacks lost.safetensors"),
    "index without the head": (unnamed("lm_head.weight"), "no weights for lm_head.weight .1 in all., so random ones"),
    "base without a norm": (lost_from_its_file("model.norm.weight"), "no weights for model.norm.weight"),
}


@pytest.mark.parametrize("what", [*PASSED_OVER, *BROKEN])
def test_what_is_not_whole_is_merged_by_nobody_and_leaves_what_was_there(what, tiny_model, in_tmp):
    spoil, said = {**PASSED_OVER, **BROKEN}[what]
    base = base_of("untied", in_tmp / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    adapter = adapter_for(base, in_tmp / "adapter", target_modules=PROJECTIONS)
    spoil(base, adapter)
    (in_tmp / "out").mkdir()
    (in_tmp / "out" / "earlier").write_text("kept")
    with pytest.raises(ModelError, match=f"(?s){said}"):
        merge_adapter(str(base), adapter, in_tmp / "out", config=config_of(), prompts=PROMPTS)
    assert [path.name for path in (in_tmp / "out").iterdir()] == ["earlier"]
    assert sorted(path.name for path in in_tmp.iterdir() if path.name != "cache") == ["adapter", "base", "out"]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"], "use_dora": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
        {"target_modules": PROJECTIONS, "lora_bias": True, "bias": "all"},
    ],
)
def test_a_whole_adapter_that_only_peft_can_merge_is_not_found_wanting(options, tiny_model, in_tmp):
    base = base_of("biased" if "bias" in options else "untied", in_tmp / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    if "lora_bias" in options:
        options = {**options, "target_modules": ["q_proj"]}
    adapter = adapter_for(base, in_tmp / "adapter", **options)
    merge_adapter(str(base), adapter, in_tmp / "out", config=config_of(), prompts=PROMPTS)


def test_a_tensor_that_only_the_index_leaves_out_is_merged_as_transformers_reads_it(tiny_model, in_tmp):
    base = base_of("untied", in_tmp / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    adapter = adapter_for(base, in_tmp / "adapter", target_modules=PROJECTIONS)
    merge_adapter(str(base), adapter, in_tmp / "whole", config=config_of(), prompts=PROMPTS)
    unnamed("model.norm.weight")(base, adapter)
    merge_adapter(str(base), adapter, in_tmp / "out", config=config_of(), prompts=PROMPTS)
    whole, out = on_disk(in_tmp / "whole"), on_disk(in_tmp / "out")
    assert whole.keys() == out.keys() and all(torch.equal(whole[name], out[name]) for name in whole)


def test_a_rank_that_the_config_does_not_say_is_refused_before_its_scaling_is_used(in_tmp):
    base = base_of("untied", in_tmp / "base")
    adapter = adapter_for(base, in_tmp / "adapter", target_modules=PROJECTIONS)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))  # alpha / 8 would halve what is added
    with pytest.raises(CannotStream, match=r"has several ranks .*\[4, 8\]"):
        plan_merge(str(base), adapter, config=config_of())
