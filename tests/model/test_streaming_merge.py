"""A merge shard by shard makes what PEFT's own merge makes, in little memory, and leaves nothing half done."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from praison_agent_rl import merging
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError
from praison_agent_rl.merging import merge_adapter, merge_scorer
from praison_agent_rl.records import MergeProof
from praison_agent_rl.report.sections import _merge_proof
from praison_agent_rl.streaming_merge import files as streaming_merge_files
from praison_agent_rl.streaming_merge import merge as streaming_merge
from praison_agent_rl.streaming_merge.merge import write_merge
from praison_agent_rl.streaming_merge.plan import CannotStream, plan_merge
from praison_agent_rl.streaming_merge.proof import prove_tensors

PROMPTS = [[0, 20, 30, 40], [0, 50, 60, 70, 80, 90, 100], [0, 11]]
SIZES = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "tied": LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True),
    "untied": LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False),
    "biased": Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=False),
    "turned": GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=4),
    "experts": Qwen3MoeConfig(
        **SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False
    ),
}
PROJECTIONS = ["q_proj", "down_proj"]
KINDS = {
    "all projections": ("tied", {"target_modules": "all-linear"}),
    "an untied head": ("untied", {"target_modules": ["lm_head", "v_proj"]}),
    "rank-stabilised": ("untied", {"target_modules": PROJECTIONS, "use_rslora": True}),
    "ranks and alphas by pattern": (
        "untied",
        {"target_modules": PROJECTIONS, "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.1.*q_proj": 3}},
    ),
    "turned weights": ("turned", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "embeddings": ("untied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "whole modules": ("untied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "down_proj"]}),
    "a bias in LoRA": ("biased", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "trained biases": ("biased", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "attention beside experts": ("experts", {"target_modules": ["q_proj", "o_proj"]}),
    "some layers": ("tied", {"target_modules": PROJECTIONS, "layers_to_transform": [1]}),
}


def config_of(**changes) -> TrainConfig:
    return TrainConfig.load({"lora_r": 4, "lora_alpha": 8, **changes}, need_model=False, need_data=False)


def base_of(kind, folder, *, dtype=torch.float32, shards="60KB"):
    """A random model in several shards, without a tokenizer."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def adapter_for(base, folder, *, head=False, dtype=None, **options):
    """An adapter of random numbers in everything that it would train."""
    torch.manual_seed(4)
    kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    model = kind.from_pretrained(base, dtype=torch.float32, **({"num_labels": 1} if head else {}))
    task = "SEQ_CLS" if head else "CAUSAL_LM"
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type=task, **options))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape) * 0.05
    if dtype is not None:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    adapted.save_pretrained(folder)
    return folder


def by_peft(base, adapter):
    """Tensors of PEFT's own merge in float32, by the model's names; what is tied to another is left out."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tied = set(plain.all_tied_weights_keys)
    merged = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()
    return {name: tensor for name, tensor in merged.state_dict().items() if name not in tied}


def read_back(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return {name: t for name, t in model.state_dict().items() if name not in model.all_tied_weights_keys}


def on_disk(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def with_tokenizer(base, tiny_model):
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    return base


def streamed(base, adapter, out):
    plan = plan_merge(str(base), adapter, config=config_of())
    write_merge(plan, out)
    plan.model.get_base_model().config.save_pretrained(out)
    return plan


@pytest.mark.parametrize("name", KINDS)
def test_in_float32_each_tensor_is_that_of_pefts_merge(name, tmp_path):
    kind, options = KINDS[name]
    base = base_of(kind, tmp_path / "base")
    adapter = adapter_for(base, tmp_path / "adapter", **options)
    before, wanted = on_disk(base), by_peft(base, adapter)
    plan = streamed(base, adapter, tmp_path / "out")
    got = read_back(tmp_path / "out")
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert float((got[key] - tensor).abs().max()) <= 1e-6 * float(tensor.abs().max()), key
    changed = {key for key, tensor in on_disk(tmp_path / "out").items() if not torch.equal(tensor, before[key])}
    assert changed == plan.changes.keys() != set()
    proof = prove_tensors(plan, tmp_path / "out")
    assert proof.problems == [] and proof.error <= 1e-6
    assert (proof.changed, proof.unchanged) == (len(changed), len(before) - len(changed))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_in_16_bits_each_tensor_is_the_merge_in_float32_rounded_once(name, stored, tmp_path):
    kind, options = KINDS[name]
    base = base_of(kind, tmp_path / "base", dtype=stored)
    adapter = adapter_for(base, tmp_path / "adapter", **options)
    plan = streamed(base, adapter, tmp_path / "out")
    got = read_back(tmp_path / "out")
    for key, tensor in by_peft(base, adapter).items():
        assert torch.equal(got[key], tensor.to(stored)), key
    assert {tensor.dtype for tensor in on_disk(tmp_path / "out").values()} == {stored}
    assert prove_tensors(plan, tmp_path / "out").problems == []


def test_an_adapter_in_16_bits_is_added_in_float32(tmp_path):
    base = base_of("untied", tmp_path / "base", dtype=torch.bfloat16)
    adapter = adapter_for(base, tmp_path / "adapter", target_modules=PROJECTIONS, dtype=torch.bfloat16)
    assert next(iter(load_file(adapter / "adapter_model.safetensors").values())).dtype == torch.bfloat16
    streamed(base, adapter, tmp_path / "out")
    got = read_back(tmp_path / "out")
    assert all(torch.equal(got[key], tensor.to(torch.bfloat16)) for key, tensor in by_peft(base, adapter).items())


def test_a_tensor_is_merged_in_many_pieces_as_in_one(tmp_path, monkeypatch):
    base = base_of("untied", tmp_path / "base")
    adapter = adapter_for(base, tmp_path / "adapter", target_modules=["embed_tokens", "up_proj"])
    monkeypatch.setattr(streaming_merge_files, "PIECE", 64 * 10)  # ten rows; 259 and 128 are no multiples of it
    streamed(base, adapter, tmp_path / "out")
    got = read_back(tmp_path / "out")
    for key, tensor in by_peft(base, adapter).items():
        assert float((got[key] - tensor).abs().max()) <= 1e-6 * float(tensor.abs().max()), key


def test_shards_keep_their_names_and_the_index_names_each_tensor_and_the_size(tmp_path):
    base = base_of("untied", tmp_path / "base")
    streamed(base, adapter_for(base, tmp_path / "adapter", target_modules=PROJECTIONS), tmp_path / "out")
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (base, tmp_path / "out")]
    assert names[0] == names[1] and len(names[0]) > 3
    given, made = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (base, tmp_path / "out")
    )
    assert made["weight_map"] == given["weight_map"] and made["metadata"] == given["metadata"]
    with safe_open(tmp_path / "out" / names[1][0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


# --- what cannot be streamed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("untied", {"target_modules": PROJECTIONS, "use_dora": True}, "the adapter has use_dora"),
        ("untied", {"target_modules": PROJECTIONS, "init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ("untied", {"target_modules": PROJECTIONS, "trainable_token_indices": [3]}, "trainable_token_indices"),
        ("untied", {"target_modules": PROJECTIONS, "layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
        ("experts", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ("tied", {"target_modules": ["embed_tokens"]}, "is tied"),
        ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "is tied"),
    ],
)
def test_what_is_more_than_a_product_added_to_a_weight_is_left_to_peft(kind, options, said, tmp_path):
    base = base_of(kind, tmp_path / "base")
    adapter = adapter_for(base, tmp_path / "adapter", **options)
    with pytest.raises(CannotStream, match=said.replace("[", r"\[")):
        plan_merge(str(base), adapter, config=config_of())


def test_a_merge_that_peft_makes_in_memory_says_why(tiny_model, in_tmp):
    adapter = adapter_for(tiny_model, in_tmp / "adapter", target_modules=PROJECTIONS, use_dora=True)
    proof = merge_adapter(str(tiny_model), adapter, in_tmp / "model", config=config_of(), prompts=PROMPTS)
    assert proof.note == "merged in memory by PEFT: the adapter has use_dora"
    assert proof.by == "logits" and proof.tensors == 0
    wanted, got = by_peft(tiny_model, adapter), on_disk(in_tmp / "model")
    assert all(torch.allclose(got[key], wanted[key], rtol=0, atol=1e-6) for key in wanted)


def spoil(adapter, change):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_an_adapters_tensor_that_finds_no_layer_is_not_passed_over(tmp_path):
    base = base_of("untied", tmp_path / "base")
    adapter = adapter_for(base, tmp_path / "adapter", target_modules=PROJECTIONS)
    name = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    spoil(adapter, lambda tensors: tensors.update({name: torch.ones(4, 64)}))
    with pytest.raises(CannotStream, match=r"layers.7.self_attn.q_proj.lora_A.weight belongs to no plain LoRA layer"):
        plan_merge(str(base), adapter, config=config_of())
    spoil(adapter, lambda tensors: tensors.pop(name))
    spoil(adapter, lambda tensors: tensors.pop(name.replace("layers.7", "layers.1")))
    with pytest.raises(CannotStream, match=r"the adapter lacks model.layers.1.self_attn.q_proj.lora_A.weight"):
        plan_merge(str(base), adapter, config=config_of())


def test_a_quantised_base_and_one_without_safetensors_are_left_to_peft(tmp_path):
    base = base_of("untied", tmp_path / "base")
    adapter = adapter_for(base, tmp_path / "adapter", target_modules=PROJECTIONS)
    described = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**described, "quantization_config": {"load_in_4bit": True}}))
    with pytest.raises(CannotStream, match="stored quantised"):
        plan_merge(str(base), adapter, config=config_of())
    (base / "config.json").write_text(json.dumps(described))
    for path in [*base.glob("*.safetensors"), base / "model.safetensors.index.json"]:
        path.unlink()
    (base / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(CannotStream, match=r"neither model.safetensors nor model.safetensors.index.json"):
        plan_merge(str(base), adapter, config=config_of())


def test_load_in_4bit_merges_into_the_full_precision_weights(untied_model, in_tmp):
    adapter = adapter_for(untied_model, in_tmp / "adapter", target_modules=PROJECTIONS)
    merge_adapter(str(untied_model), adapter, in_tmp / "out", config=config_of(load_in_4bit=True), prompts=PROMPTS)
    got, wanted = on_disk(in_tmp / "out"), by_peft(untied_model, adapter)
    assert all(torch.allclose(got[key], wanted[key], rtol=0, atol=1e-6) for key in wanted)


# --- reward models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_reward_model_gets_the_adapters_head_and_loses_the_languages_one(kind, tiny_model, in_tmp):
    base = with_tokenizer(base_of(kind, in_tmp / "base"), tiny_model)
    adapter = adapter_for(base, in_tmp / "adapter", head=True, target_modules=PROJECTIONS)
    proof = merge_scorer(str(base), adapter, in_tmp / "out", config=config_of(), sequences=PROMPTS)
    assert proof.by == "both" and proof.note is None and proof.tensors == 5  # two projections of two layers, the head
    model, found = AutoModelForSequenceClassification.from_pretrained(in_tmp / "out", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    head = load_file(adapter / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(model.score.weight, head) and model.config.num_labels == 1
    assert model.config.architectures == ["LlamaForSequenceClassification"] and model.config.pad_token_id == 2
    assert "lm_head.weight" not in on_disk(in_tmp / "out")


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_machine(monkeypatch):
    monkeypatch.setattr(merging, "total_memory", lambda: 2**30)

    def loads_nothing(*given, **options):
        raise AssertionError("the whole model was loaded")

    monkeypatch.setattr(merging, "load_model", loads_nothing)


def test_where_the_model_does_not_fit_in_memory_it_is_proved_by_tensors_alone(tiny_model, in_tmp, small_machine):
    adapter = adapter_for(tiny_model, in_tmp / "adapter", target_modules=PROJECTIONS)
    before, wanted = on_disk(tiny_model), by_peft(tiny_model, adapter)
    proof = merge_adapter(str(tiny_model), adapter, in_tmp / "out", config=config_of(), prompts=PROMPTS)
    assert (proof.by, proof.tokens, proof.tensors, proof.unchanged) == ("tensors", 0, 4, len(before) - 4)
    assert proof.saved_error <= proof.tolerance == 1e-6
    assert proof.change == pytest.approx(max(float((wanted[k] - t).abs().max()) for k, t in before.items()), rel=1e-5)
    assert "too large for the memory" in (proof.note or "")


def test_an_adapter_that_changes_nothing_is_refused_without_logits_too(tiny_model, in_tmp, small_machine):
    adapter = adapter_for(tiny_model, in_tmp / "adapter", target_modules=PROJECTIONS)
    spoil(adapter, lambda tensors: [tensor.zero_() for name, tensor in tensors.items() if "lora_B" in name])
    with pytest.raises(ModelError, match="its weights are those of the base model"):
        merge_adapter(str(tiny_model), adapter, in_tmp / "out", config=config_of(), prompts=PROMPTS)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "saved weights differ from base + adapter: "),
        ("model.norm.weight", "changed, and the adapter does not speak of it"),
    ],
)
def test_one_bit_in_one_saved_weight_is_found(stored, spoilt, said, tmp_path):
    base = base_of("untied", tmp_path / "base", dtype=stored, shards="1GB")
    adapter = adapter_for(base, tmp_path / "adapter", target_modules=PROJECTIONS)
    plan = streamed(base, adapter, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[spoilt].view(-1).view(torch.uint8)[-1] ^= 1  # of the exponent
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    (problem,) = prove_tensors(plan, tmp_path / "out").problems
    assert said in problem and spoilt in problem


def test_a_tensor_too_few_or_too_many_is_found(tmp_path):
    base = base_of("untied", tmp_path / "base", shards="1GB")
    plan = streamed(base, adapter_for(base, tmp_path / "adapter", target_modules=PROJECTIONS), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["another"] = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert prove_tensors(plan, tmp_path / "out").problems == [
        "the tensor lm_head.weight was not saved",
        "the tensor another was saved and is none of the model's",
    ]


def test_a_proof_that_was_written_before_is_still_read_and_the_report_says_which_one_it_was():
    old = {"tokens": 9, "merge_error": 0.0, "saved_error": 0.0, "tolerance": 1e-3, "change": 0.5}
    proof = MergeProof.model_validate(old)
    assert (proof.by, proof.tensors, proof.note) == ("logits", 0, None)

    class Shown:
        method = "grpo"
        merge = proof

    assert _merge_proof(Shown()) == (
        "<p>Merge: on 9 tokens the saved model's logits differ from base + adapter by at most 0 (allowed 0.001); "
        "training moved them by up to 0.5.</p>"
    )
    Shown.merge = proof.model_copy(update={"by": "tensors", "tensors": 14, "unchanged": 6, "note": "no <memory>"})
    assert _merge_proof(Shown()) == (
        "<p>Merge: as saved, 14 tensors are what PEFT makes of base and adapter, and 6 others the base's to the byte. "
        "Beyond rounding, weights differ by at most 0 of the largest near them (allowed 0.001); training moved "
        "them by up to 0.5. No &lt;memory&gt;.</p>"
    )


# --- disk -------------------------------------------------------------------------------------------------------------


def test_too_little_disk_is_said_before_anything_is_written(tiny_model, in_tmp, monkeypatch):
    adapter = adapter_for(tiny_model, in_tmp / "adapter", target_modules=PROJECTIONS)
    monkeypatch.setattr(streaming_merge, "free_disk", lambda folder: 2**20)
    with pytest.raises(ModelError, match=r"takes 32 MiB, and the disk of .* has 1 MiB free; free some"):
        merge_adapter(str(tiny_model), adapter, in_tmp / "out", config=config_of(), prompts=PROMPTS)
    assert sorted(path.name for path in in_tmp.iterdir()) == ["adapter"]


CHILD = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    from praison_agent_rl.config import TrainConfig
    from praison_agent_rl.merging import merge_adapter
    from praison_agent_rl.errors import ModelError
    import torch, transformers, peft, signal
    base, adapter, out, limit = sys.argv[1:]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    config = TrainConfig.load({"lora_r": 4, "lora_alpha": 8}, need_model=False, need_data=False)
    try:
        merge_adapter(base, Path(adapter), Path(out), config=config, prompts=[[0, 5]])
    except ModelError as error:
        print(error)
    """
)


def test_a_disk_that_fills_up_midway_is_a_plain_error_and_leaves_nothing(tiny_model, in_tmp):
    adapter = adapter_for(tiny_model, in_tmp / "adapter", target_modules=PROJECTIONS)
    arguments = [str(tiny_model), str(adapter), str(in_tmp / "out"), "100000"]  # bytes that a file may have
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"the merged model cannot be written to {str(in_tmp)!r}: {os.strerror(errno.EFBIG)};")
    assert sorted(path.name for path in in_tmp.iterdir()) == ["adapter"]


def test_a_merge_killed_midway_leaves_no_version_and_the_next_one_succeeds(tiny_model, in_tmp):
    adapter = adapter_for(tiny_model, in_tmp / "adapter", target_modules=PROJECTIONS)
    out = in_tmp / "out"
    code = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from praison_agent_rl import merging
        from praison_agent_rl.streaming_merge import files as streaming_merge_files
        from praison_agent_rl.config import TrainConfig
        write = streaming_merge_files._write
        def stops(file, content):
            write(file, content)
            file.flush()
            print("midway", flush=True)
            time.sleep(60)
        streaming_merge_files._write = stops
        config = TrainConfig.load({"lora_r": 4, "lora_alpha": 8}, need_model=False, need_data=False)
        base, adapter, out = sys.argv[1:]
        merging.merge_adapter(base, Path(adapter), Path(out), config=config, prompts=[[0, 5]])
        """
    )
    command = [sys.executable, "-c", code, str(tiny_model), str(adapter), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and "midway" in child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert not out.exists() and (in_tmp / ".out.part" / "model.safetensors").exists()
    merge_adapter(str(tiny_model), adapter, out, config=config_of(), prompts=PROMPTS)
    assert out.exists() and not (in_tmp / ".out.part").exists()


# --- memory -----------------------------------------------------------------------------------------------------------

SHARD = 64 * 2**20
"""Bytes of each of the four large shards, or a little less."""
ALLOWANCE = 16 * 2**20
"""Bytes that torch's and Python's allocators may take for themselves in the meantime."""

MEASURED = textwrap.dedent(
    """
    import gc, re, sys
    from pathlib import Path
    import torch
    from praison_agent_rl.config import TrainConfig
    from praison_agent_rl.streaming_merge.merge import merge_shards
    from praison_agent_rl.streaming_merge.proof import prove_tensors

    def kib(name):
        return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

    torch.set_num_threads(1)
    config = TrainConfig.load({"lora_r": 4, "lora_alpha": 8}, need_model=False, need_data=False)
    small, small_adapter, base, adapter, out = map(Path, sys.argv[1:])
    prove_tensors(merge_shards(small, small_adapter, out / "small", config=config), out / "small")  # imports everything
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on: proc(5)
    start = kib("VmRSS")
    plan = merge_shards(base, adapter, out / "large", config=config)
    print((kib("VmHWM") - start) * 1024)
    proof = prove_tensors(plan, out / "large")
    assert not proof.problems, proof.problems
    print((kib("VmHWM") - start) * 1024)
    """
)


def large_base(folder, tokenizer_of):
    """Four shards of 64 MB at most, written without a model."""
    config = LlamaConfig(
        vocab_size=259, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16
    )
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    config.save_pretrained(folder)
    with_tokenizer(folder, tokenizer_of)
    torch.manual_seed(0)
    places = {}
    for layer in range(4):
        mine = [n for n in shapes if f"layers.{layer}." in n or (layer == 3 and "layers." not in n)]
        file = f"model-0000{layer + 1}-of-00004.safetensors"
        save_file({n: torch.randn(shapes[n]) * 0.02 for n in mine}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def lora_numbers(base, folder):
    """An adapter on every projection, written without a model: r 4."""
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "inference_mode": True}
    LoraConfig(r=4, lora_alpha=8, **options).save_pretrained(folder)
    tensors = {}
    for file in base.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in (n for n in opened.keys() if n.endswith("_proj.weight")):  # noqa: SIM118 - it is no mapping
                outputs, inputs = opened.get_slice(name).get_shape()
                start = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                tensors[f"{start}A.weight"] = torch.randn(4, inputs) * 0.05
                tensors[f"{start}B.weight"] = torch.randn(outputs, 4) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return (folder / "adapter_model.safetensors").stat().st_size


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="there is no /proc/self/clear_refs (Linux)")
def test_peak_memory_is_at_most_the_largest_shard_and_a_third_and_the_adapter(tiny_model, tmp_path):
    """Resident memory as the kernel counts it, mapped pages and all, from after the imports and a first small merge."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    large_base(base, tiny_model)
    size = lora_numbers(base, adapter)
    sizes = [file.stat().st_size for file in base.glob("*.safetensors")]
    assert len(sizes) == 4 and 0.8 * SHARD < max(sizes) < SHARD
    small_adapter = adapter_for(tiny_model, tmp_path / "small", target_modules="all-linear")
    arguments = map(str, [tiny_model, small_adapter, base, adapter, tmp_path / "out"])
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    merging_peak, proving_peak = map(int, done.stdout.split()[-2:])
    limit = 1.3 * max(sizes) + size + ALLOWANCE
    assert merging_peak <= limit and proving_peak <= limit, (merging_peak, proving_peak, limit)
