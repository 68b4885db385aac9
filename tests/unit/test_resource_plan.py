"""What a run takes is computed by formulas that are worked out by hand here, or printed in the papers behind them."""

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from praison_agent_rl import estimate
from praison_agent_rl.commands.doctor import doctor
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.control_groups import memory_limit
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.estimate import estimate_run, in_words
from praison_agent_rl.resource_plan import formulas, shapes
from praison_agent_rl.resource_plan.demands import (
    UTILISATION,
    Machines,
    bits_of,
    memory_of,
    sampler_of,
    step_of,
    work_of,
)
from praison_agent_rl.resource_plan.hardware import GPUS, find_gpu
from praison_agent_rl.resource_plan.planned import machines_of, plan_run, usual_prompt
from praison_agent_rl.resource_plan.shapes import KNOWN, Shape, find_shape, read_count
from praison_agent_rl.resource_plan.telling import in_time, lines_of

SEVEN = KNOWN["Qwen/Qwen2.5-7B"]
SEVENTY = KNOWN["meta-llama/Llama-3.3-70B"]
# matrices of a layer: 4x4 + 4x2 + 4x2 + 4x4 + 3 x 4x8 = 144; a layer 152, two 304, embedding and head 40 each, norm 4
SMALL = Shape(name="small", hidden=4, layers=2, queries=4, keys=2, inner=8, vocabulary=10, small=8)


def config(**keys: object) -> TrainConfig:
    return TrainConfig.load({"model_name": "m", **keys}, need_data=False)


def on(gpu: str = "H100", **fields: object) -> Machines:
    return Machines(gpu=GPUS[gpu], **fields)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),  # as the hub counts them in the safetensors of each
    [
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.3-70B", 70_553_706_496),
        ("google/gemma-2-2b", 2_614_341_888),
        ("google/gemma-2-9b", 9_241_705_984),
        ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
    ],
)
def test_a_known_shape_has_as_many_parameters_as_its_files(name, parameters):
    assert KNOWN[name].parameters == parameters


def test_all_known_shapes_are_counted_above():
    mark = next(m for m in test_a_known_shape_has_as_many_parameters_as_its_files.pytestmark if m.args[0][0] == "name")
    assert {name for name, _ in mark.args[1]} == set(KNOWN)


def test_a_shape_s_parameters_are_those_of_its_layers_embedding_head_and_last_norm():
    assert SMALL.parameters == 2 * 152 + 2 * 40 + 4 and SMALL.in_layers == 308
    tied = SMALL.model_copy(update={"tied": True})
    assert tied.parameters == 2 * 152 + 40 + 4 and tied.in_layers == 308


@pytest.mark.parametrize(
    ("model", "shape", "bits"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B", 16),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B", 4),
        ("unsloth/gemma-2-2b-it-bnb-4bit", "google/gemma-2-2b", 4),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B", 4),
        ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M", 16),
    ],
)
def test_a_model_is_known_by_its_name_on_the_hub_whoever_has_copied_it(model, shape, bits):
    found = find_shape(model)
    assert (found.name, found.stored_bits) == (model, bits)
    assert found.model_copy(update={"name": shape, "stored_bits": 16}) == KNOWN[shape]


@pytest.mark.parametrize("model", ["someone/else", "Qwen/Qwen2.5-Coder-7B", "./nowhere", "a model"])
def test_a_model_of_which_nothing_is_known_needs_a_number(model):
    with pytest.raises(ConfigError, match=r"nothing is known here of the size of .* \(--parameters 7B\)"):
        find_shape(model)
    found = find_shape(model, 8_000_000_000)
    assert found.parameters == 8_000_000_000 and found.name == f"{model}, as meta-llama/Llama-3.1-8B"
    assert found.layers == 32


def folder(path: Path, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [30, 50], "data_offsets": [0, 0]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_a_folder_s_shape_is_read_and_its_parameters_are_counted(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = folder(tmp_path / "m", model_type="llama", **sizes, intermediate_size=20, vocab_size=7)
    found = find_shape(str(path))
    assert (found.hidden, found.layers, found.queries, found.keys, found.inner) == (8, 3, 8, 4, 20)
    assert (found.vocabulary, found.tied, found.parameters) == (7, False, 1500)
    wide = folder(tmp_path / "n", model_type="gemma2", **sizes, head_dim=16, intermediate_size=20, vocab_size=7)
    assert (find_shape(str(wide)).queries, find_shape(str(wide)).keys, find_shape(str(wide)).tied) == (64, 32, True)
    part = folder(tmp_path / "o", text_config={**sizes, "tie_word_embeddings": True}, vocab_size=7)
    assert (find_shape(str(part)).layers, find_shape(str(part)).tied) == (3, True)


SIZES = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 20, "vocab_size": 7}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, "many", 2.5, [], [4, "x"], {}])
def test_a_size_that_is_none_is_told_by_its_name(tmp_path, name, value):
    path = folder(tmp_path / "m", model_type="llama", **{**SIZES, name: value})
    with pytest.raises(ConfigError, match=f"config.json has {name} .*, not a whole number from 1 up"):
        find_shape(str(path))
    assert estimate_run(config(max_steps=7), str(path), train=9, held_out=0, device="cpu").parameters is None


def test_of_layers_with_sizes_of_their_own_the_largest_counts(tmp_path):
    of_each = {**SIZES, "intermediate_size": [20, 40, 20], "num_key_value_heads": [1, 2, 2], "head_dim": None}
    found = find_shape(str(folder(tmp_path / "m", model_type="nested", text_config=of_each, vocab_size=7)))
    assert (found.inner, found.keys) == (40, 4)
    plain = find_shape(str(folder(tmp_path / "n", model_type="llama", **SIZES, text_config=None)))
    assert (plain.inner, plain.keys) == (20, 8)


def test_the_parameters_of_a_model_in_the_hubs_cache_are_counted_there(tmp_path, monkeypatch):
    kept = folder(tmp_path / "kept", model_type="llama", **SIZES)
    monkeypatch.setattr(shapes, "_cached_folder", lambda model: str(kept))
    assert find_shape("someone/else").parameters == 1500
    (kept / "model.safetensors.index.json").write_text('{"weight_map": {"a": "another.safetensors"}}')
    assert (
        find_shape("someone/else").parameters
        == find_shape("someone/else").model_copy(update={"counted": None}).parameters
    )  # of a part of the files nothing is counted
    assert find_shape("someone/else", 9_000).parameters == 9_000


def test_packed_weights_of_a_folder_are_not_counted_one_by_one(tmp_path):
    sizes = {"hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    packed = {"quantization_config": {"load_in_4bit": True}, "intermediate_size": 8, "vocab_size": 10}
    found = find_shape(str(folder(tmp_path / "m", model_type="llama", **sizes, **packed)))
    assert found.stored_bits == 4 and found.parameters == SMALL.parameters


@pytest.mark.parametrize("text", ["7", "70", "1.5b", " 500M "])
def test_a_number_of_parameters_is_read_as_people_write_it(text):
    assert read_count(text) == {"7": 7, "70": 70, "1.5b": 1_500_000_000, " 500M ": 500_000_000}[text]


@pytest.mark.parametrize("text", ["", "B", "7 B", "seven", "-7B", "0B", "0.0000000001B", "7T", "nan"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(ConfigError, match="is no number of parameters; write for example 7B"):
        read_count(text)


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_frozen_weights_by_hand():
    assert formulas.weight_bytes(SMALL, 16) == 2 * 388
    assert formulas.weight_bytes(SMALL, 32) == 4 * 388
    assert formulas.weight_bytes(SMALL, 8) == 308 + 2 * 80
    # QLoRA, section 3: double quantisation brings the constants of a block of 64 from 0.5 bits down to 0.127
    assert formulas.BITS[4] == pytest.approx(4.127, abs=1e-4)
    assert formulas.weight_bytes(SMALL, 4) == int(308 * 4.126953125 / 8 + 2 * 80)


def test_the_adapter_by_hand():
    # in + out: 8, 6, 6, 8 of attention and 12 three times: 64
    assert formulas.adapter_parameters(SMALL, config(lora_r=2)) == 2 * 2 * 64
    two = config(lora_r=2, lora_target_modules=["q_proj", "v_proj"])
    assert formulas.adapter_parameters(SMALL, two) == 2 * 2 * (8 + 6)
    assert formulas.adapter_parameters(SMALL, two.model_copy(update={"layers_to_transform": [1]})) == 2 * 14
    assert formulas.adapter_parameters(SMALL, two.model_copy(update={"rank_pattern": {"q_proj": 5}})) == 2 * (40 + 12)
    whole = two.model_copy(update={"modules_to_save": ["lm_head", "score"]})
    assert formulas.adapter_parameters(SMALL, whole) == 56 + 40
    by_path = two.model_copy(update={"lora_target_modules": ["self_attn.q_proj", "self_attn.v_proj"]})
    assert formulas.adapter_parameters(SMALL, by_path) == 56
    of_others = two.model_copy(update={"lora_target_modules": ["query_key_value"]})  # as some models call them
    assert formulas.adapter_parameters(SMALL, of_others) == 2 * 2 * 64


def test_the_adapter_of_a_7b_model_is_the_one_that_peft_prints():
    # "trainable params: 40,370,176" is what get_peft_model(...).print_trainable_parameters says of it
    assert formulas.adapter_parameters(SEVEN, config(lora_r=16)) == 40_370_176


def test_what_peft_measured_on_an_l40s_is_what_the_formulas_say():
    # huggingface/peft@0a179c1e, method_comparison/MetaMathQA/results/lora--llama-3.2-3B-rank32.json: batches of 4 texts
    # of 210 tokens on the average, bfloat16, no checkpointing; 9,175,040 trained parameters and 3,221,924,864 in all
    shape, made = KNOWN["meta-llama/Llama-3.2-3B"], config(lora_r=32, lora_target_modules=["q_proj", "v_proj"])
    trained = formulas.adapter_parameters(shape, made)
    assert (trained, shape.parameters + trained) == (9_175_040, 3_221_924_864)
    operations = formulas.passes(checkpointing=False) * formulas.forward_operations(shape, 6744, 210)
    assert operations / GPUS["L40S"].operations == pytest.approx(UTILISATION, abs=0.02)


def test_what_is_trained_takes_sixteen_bytes_a_number_and_less_where_it_is_shared():
    two = config(lora_r=2)
    assert formulas.trained_bytes(SMALL, two) == 256 * 16
    assert formulas.trained_bytes(SMALL, two.model_copy(update={"optim": "adamw_8bit"})) == 256 * 10
    assert formulas.trained_bytes(SMALL, two, number=2) == 256 * (2 + 2 + 4)
    assert formulas.trained_bytes(SMALL, two, moments_by=4) == 256 * (4 + 4 + 2)
    assert formulas.trained_bytes(SMALL, two, gradients_by=4, moments_by=4) == 256 * (4 + 1 + 2)


def test_the_adapter_of_a_quantised_base_is_in_16_bits_but_cpo_s():
    assert [formulas.number_bytes(config(method=m), 4) for m in ("grpo", "reward", "cpo")] == [2, 2, 4]
    assert formulas.number_bytes(config(), 16) == 4


def test_qlora_trains_65b_on_one_gpu_of_48_gb_as_its_paper_says():
    # Dettmers et al. 2023, abstract and section 5.1: LLaMA-65B, r 64 on all layers, texts of 512 tokens
    sizes = {"hidden": 8192, "layers": 80, "queries": 8192, "keys": 8192, "inner": 22016, "vocabulary": 32000}
    llama = Shape(name="LLaMA-65B", **sizes, small=2 * 8192)
    assert llama.parameters == 65_285_660_672
    keys = {"lora_r": 64, "per_device_train_batch_size": 1, "max_seq_length": 512, "optim": "paged_adamw_32bit"}
    plan = plan_run(config(method="reward", load_in_4bit=True, **keys), llama, on("L40S"), prompt_tokens=256)
    assert 40e9 < plan.own.memory.total < 48e9
    assert plan_run(config(method="reward", **keys), llama, on("L40S"), prompt_tokens=256).own.memory.total > 130e9


def test_activations_by_hand():
    assert formulas.layer_bytes(SMALL) == 2 * (4 * 4 + 2 * 4 + 2 * 2 + 4 * 8) == 120
    assert formulas.layer_bytes(SEVEN) == 192 * 1024
    assert formulas.activation_bytes(SMALL, 10, checkpointing=False) == int(10 * 2 * 1.8 * 120)
    assert formulas.activation_bytes(SMALL, 10, checkpointing=True) == int(10 * (2 * 4 * 2 + 1.8 * 120))
    assert formulas.activation_bytes(SMALL, 10, checkpointing=False, width=4) == 2 * 10 * 2 * 1.8 * 120


def test_logits_by_hand():
    big = SMALL.model_copy(update={"vocabulary": 152_064})
    assert formulas.logit_bytes(big, config(), 100_000) == 4096 * 32768 * 4 * 2 == 2**30
    assert formulas.logit_bytes(SMALL, config(), 3) == 3 * 10 * 4 * 2
    assert formulas.logit_bytes(SMALL, config(method="cpo"), 5000) == 5000 * 10 * 8
    assert formulas.logit_bytes(SMALL, config(method="reward"), 5000) == 0


def test_the_cache_of_a_token_is_that_of_the_paper():
    # PagedAttention, section 3: of OPT-13B 800 KB = 2 (key and value) x 5120 (hidden) x 40 (layers) x 2 (bytes)
    opt = SMALL.model_copy(update={"hidden": 5120, "layers": 40, "queries": 5120, "keys": 5120})
    assert formulas.cache_bytes(opt, 1) == 800 * 1024
    assert formulas.cache_bytes(SEVEN, 1) == 2 * 28 * 4 * 128 * 2
    assert formulas.cache_bytes(SEVENTY, 3) == 3 * 320 * 1024


def test_operations_by_hand():
    # 2 x (308 in layers + 40 in the head) and 2 x 2 layers x 6 tokens x 4
    assert formulas.forward_operations(SMALL, 10, 6) == 10 * (2 * 348 + 2 * 2 * 6 * 4)
    assert formulas.passes(checkpointing=False) == 2
    assert formulas.passes(checkpointing=True) == 3 and formulas.passes(checkpointing=True, scored_before=True) == 4


def test_what_a_ring_sends_by_hand():
    # four processes with a quarter each: three quarters on the way to the sums, and three on the way back
    assert formulas.all_reduce_bytes(100, 4) == 150 and formulas.all_gather_bytes(100, 4) == 75
    assert formulas.all_reduce_bytes(100, 1) == formulas.all_gather_bytes(100, 1) == 0


# --- demands ----------------------------------------------------------------------------------------------------------


def test_what_a_7b_run_takes_of_one_gpu_by_hand():
    made = config()
    work = work_of(made, 512)
    assert (work.sequences, work.at_once, work.length, work.new, work.sampled) == (8, 8, 768, 256, 8)
    memory = memory_of(made, SEVEN, on(), work)
    assert memory.weights == 2 * 7_615_616_512
    assert memory.adapter == 16 * 40_370_176
    assert memory.activations == int(8 * 768 * (2 * 3584 * 28 + 1.8 * 192 * 1024))
    assert memory.logits == 8 * 256 * 32768 * 4 * 2
    assert memory.cache == 8 * 768 * 56 * 1024
    assert (memory.vllm, memory.gathered, memory.around) == (0, 0, 3 * 2**29)
    turns = memory.activations + memory.logits  # more than sampling takes
    assert memory.total == memory.weights + memory.adapter + turns + memory.around


def test_a_base_in_4_bits_is_held_whole_and_unpacks_a_matrix_at_a_time():
    made = config(load_in_4bit=True)
    for sharing in ("none", "zero3", "fsdp2"):
        memory = memory_of(made, SEVEN, on(gpus=8, sharing=sharing), work_of(made, 512))
        assert memory.weights == formulas.weight_bytes(SEVEN, 4)
        assert memory.around == 3 * 2**29 + 2 * 3584 * 18944
    assert bits_of(config(), find_shape("unsloth/gemma-2-2b-it-bnb-4bit")) == 4
    assert [bits_of(config(**k), SEVEN) for k in ({"load_in_8bit": True}, {"dtype": "float32"}, {})] == [8, 32, 16]


def test_shared_weights_are_an_eighth_with_two_layers_and_the_embedding_whole():
    made = config(sampler="vllm", vllm_server_base_url="http://x:1/v1")
    whole, layer = 2 * 7_615_616_512, 2 * (7_615_616_512 - 2 * 152_064 * 3584) // 28
    for sharing, held in (("none", whole), ("zero2", whole), ("zero3", None), ("fsdp2", None)):
        memory = memory_of(made, SEVEN, on(gpus=8, sharing=sharing), work_of(made, 512))
        wanted = held or whole // 8 + 2 * layer + 2 * 152_064 * 3584
        assert memory.weights == pytest.approx(wanted, abs=2) and memory.gathered == 0
    alone = memory_of(made, SEVEN, on(sharing="fsdp2"), work_of(made, 512))
    assert alone.weights == whole


def test_generate_gathers_all_weights_with_zero_3_and_none_with_fsdp2():
    made = config()
    by = {s: memory_of(made, SEVEN, on(gpus=8, sharing=s), work_of(made, 512)) for s in ("zero3", "fsdp2")}
    assert by["zero3"].gathered + by["zero3"].weights == 2 * 7_615_616_512 and by["fsdp2"].gathered == 0
    assert by["zero3"].total >= 2 * 7_615_616_512 > by["fsdp2"].total


def test_vllm_on_the_same_gpu_has_room_for_what_is_left_of_its_share():
    made = config(sampler="vllm", gpu_memory_utilization=0.3)
    work = work_of(made, 512)
    assert memory_of(made, SEVEN, on(), work).vllm == 24_000_000_000
    sampler = sampler_of(made, SEVEN, on(), work)
    assert sampler.where == "here" and sampler.room == 24_000_000_000 - 2 * 7_615_616_512 - 2**31
    assert sampler.at_once == sampler.room // (768 * 56 * 1024) == 150
    assert sampler_of(config(), SEVEN, on(), work) is None


def test_a_vllm_server_elsewhere_takes_nothing_of_the_gpu_that_trains():
    made = config(sampler="vllm", vllm_server_base_url="http://x:1/v1")
    work = work_of(made, 512)
    assert memory_of(made, SEVENTY, on(), work).vllm == 0
    rooms = {n: sampler_of(made, SEVENTY, on(servers=n), work).room for n in (1, 4)}
    assert rooms[1] == 72_000_000_000 - 2 * 70_553_706_496 - 2**31 < 0
    assert rooms[4] == 4 * 72_000_000_000 - 2 * 70_553_706_496 - 4 * 2**31
    assert sampler_of(made, SEVENTY, on(), work).at_once == 0


def test_gradients_cross_the_slowest_link_once_a_step():
    made = config(sampler="vllm", vllm_server_base_url="http://x:1/v1", gradient_accumulation_steps=4)
    step = step_of(made, SEVEN, on(gpus=8), work_of(made, 512))
    assert step.sent == 4 * 40_370_176 * 2 * 7 / 8 and step.network == pytest.approx(step.sent / 450e9)
    two = step_of(made, SEVEN, on(gpus=8, machines=2), work_of(made, 512))
    assert two.sent == 4 * 40_370_176 * 2 * 15 / 16
    # a ring of 16 has a link between the machines, over which as much goes as over each other one: 100 Gb/s
    assert two.network == pytest.approx(two.sent / 12.5e9)
    fast = step_of(made, SEVEN, on("L40S", gpus=8, machines=2, network=400e9 / 8), work_of(made, 512))
    assert fast.network == pytest.approx(fast.sent / 32e9)  # PCIe is the slower one
    assert step_of(made, SEVEN, on(), work_of(made, 512)).sent == 0


def test_shared_weights_cross_it_for_each_pass_of_each_micro_batch():
    # three passes: scores from before the update, forward and backward; four micro-batches
    made = config(sampler="vllm", vllm_server_base_url="http://x:1/v1", gradient_accumulation_steps=4)
    step = step_of(made, SEVEN, on(gpus=8, sharing="fsdp2"), work_of(made, 512))
    weights = 4 * 3 * 2 * 7_615_616_512 * 7 / 8
    assert step.sent == pytest.approx(weights + 4 * 40_370_176 * 2 * 7 / 8)
    # generate: two passes, and all weights again at each of 256 tokens, or once
    own = config()
    sent = {s: step_of(own, SEVEN, on(gpus=8, sharing=s), work_of(own, 512)).sent for s in ("zero3", "fsdp2")}
    once = 2 * 7_615_616_512 * 7 / 8
    assert sent["zero3"] == pytest.approx(3 * once + 4 * 40_370_176 * 2 * 7 / 8)
    assert sent["fsdp2"] == pytest.approx(258 * once + 4 * 40_370_176 * 2 * 7 / 8)


def test_the_seconds_of_a_step_by_hand():
    made = config(gradient_checkpointing=False)
    step = step_of(made, SEVEN, on("A100"), work_of(made, 512))
    forward = formulas.forward_operations(SEVEN, 8 * 768, 768)
    assert step.training == pytest.approx(2 * forward / (0.25 * 312e12))
    # the host takes 28 x 1.2 ms for a token, longer than the memory for 15 GB; before that the prompts
    prompts = formulas.forward_operations(SEVEN, 8 * 512, 512) / (0.25 * 312e12)
    assert step.sampling == pytest.approx(256 * 28 * 0.0012 + prompts)
    twice = made.model_copy(update={"num_iterations": 2})
    other = step_of(twice, SEVEN, on("A100"), work_of(twice, 512))
    assert other.sampling == pytest.approx(step.sampling / 2)  # each completion serves two updates
    assert other.training == pytest.approx(3 / 2 * step.training)  # and is scored before the first


@pytest.mark.parametrize(
    ("sizes", "scored"),
    [
        ({}, False),
        ({"gradient_accumulation_steps": 4}, False),
        ({"num_iterations": 2}, True),
        ({"steps_per_generation": 2}, True),
        ({"generation_batch_size": 32}, True),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, False),  # twice sampled for one update
    ],
)
def test_answers_that_outlive_an_update_are_scored_before_it(sizes, scored):
    # trl 1.16, _generate_and_score_completions: unless gradient_accumulation_steps is a multiple of generate_every
    made = config(gradient_checkpointing=False, **sizes)
    work = work_of(made, 512)
    forward = formulas.forward_operations(SEVEN, work.sequences * 768, 768)
    training = step_of(made, SEVEN, on("A100"), work).training
    assert training == pytest.approx((3 if scored else 2) * forward / (0.25 * 312e12))


def test_a_generation_batch_of_all_processes_is_shared_by_them():
    # 64 completions of 8 processes, each with micro-batches of 8: one generation an update in each
    made = config(generation_batch_size=64, launch={"nproc": 8})
    alone = config()
    assert work_of(made, 512, 8) == work_of(alone, 512)
    several = plan_run(made, SEVEN, on(gpus=8), prompt_tokens=512, prompts=800)
    usual = plan_run(config(launch={"nproc": 8}), SEVEN, on(gpus=8), prompt_tokens=512, prompts=800)
    assert several.own == usual.own and several.work.sampled == 8
    # a group of 8 for each process: 8 prompts an update
    assert (several.steps, usual.steps) == (100, 100)
    assert plan_run(alone, SEVEN, on(gpus=8), prompt_tokens=512, prompts=800).steps == 100
    assert several.ways[0].machines.processes == 1 and several.ways[0].memory.cache == 8 * several.own.memory.cache


def test_vllm_takes_as_long_for_a_token_as_its_memory_gives_the_weights():
    made = config(sampler="vllm", gpu_memory_utilization=0.5, num_generations=8)
    step = step_of(made, SEVEN, on("A100"), work_of(made, 512))
    read = 2 * 7_615_616_512 + 8 * (768 - 128) * 56 * 1024
    prompt = formulas.forward_operations(SEVEN, 512, 512) / (0.25 * 312e12)  # once for its group
    assert step.sampling == pytest.approx(256 * read / (0.6 * 2039e9) + prompt)


def test_texts_for_which_vllm_has_no_room_wait_for_the_others():
    made = config(sampler="vllm", gpu_memory_utilization=0.3, gradient_accumulation_steps=40)
    work = work_of(made, 512)
    assert (work.sampled, sampler_of(made, SEVEN, on(), work).at_once) == (320, 150)
    few = step_of(made, SEVEN, on(), work).sampling
    read = 2 * 7_615_616_512 + 150 * (768 - 128) * 56 * 1024
    prompts = formulas.forward_operations(SEVEN, 320 / 8 * 512, 512) / (0.25 * 989.5e12)
    assert few == pytest.approx(3 * 256 * read / (0.6 * 3350e9) + prompts)
    roomy = made.model_copy(update={"gpu_memory_utilization": 0.5})
    assert step_of(roomy, SEVEN, on(), work).sampling < few  # one batch instead of three


def test_pairs_are_as_long_as_they_may_be_and_nothing_is_sampled():
    made = config(method="cpo", max_seq_length=1000, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    work = work_of(made, 512)
    assert (work.sequences, work.at_once, work.length, work.new, work.sampled) == (12, 4, 1000, 0, 0)
    memory = memory_of(made, SEVEN, on(), work)
    assert (memory.cache, memory.vllm, memory.logits) == (0, 0, 4 * 1000 * 152_064 * 8)
    assert step_of(made, SEVEN, on(), work).sampling == 0
    assert sampler_of(made, SEVEN, on(), work) is None


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_each_remedy_makes_it_fit_and_the_plan_itself_does_not():
    made = config(gradient_checkpointing=False, max_completion_length=512)
    plan = plan_run(made, KNOWN["Qwen/Qwen2.5-3B"], on("4090"), prompt_tokens=512)
    assert not plan.own.fits and plan.own.memory.total > 24e9
    by = {remedy.change: remedy.way.memory.total for remedy in plan.remedies}
    assert [*by] == [
        "gradient_checkpointing: true",
        "per_device_train_batch_size: 1, gradient_accumulation_steps: 8",
        "A100 80 GB SXM instead",
        "H100 80 GB SXM instead",
        "H200 141 GB SXM instead",
    ]
    assert all(remedy.way.fits for remedy in plan.remedies)
    assert by["gradient_checkpointing: true"] < 24e9 < by["H100 80 GB SXM instead"] == plan.own.memory.total


@pytest.mark.parametrize(("bits", "gpu"), [("4bit", "A100 80 GB SXM"), ("8bit", "H200 141 GB SXM")])
def test_where_no_change_is_enough_several_are_made_and_then_the_smallest_gpu_is_taken(bits, gpu):
    keys = {"gradient_checkpointing": False, "max_completion_length": 1536, "max_seq_length": 4096}
    plan = plan_run(config(**keys, **{f"load_in_{bits}": True}), SEVENTY, on("L40S"), prompt_tokens=512)
    (remedy,) = plan.remedies
    batch = "per_device_train_batch_size: 1, gradient_accumulation_steps: 8"
    assert remedy.change == f"gradient_checkpointing: true; {batch}; {gpu} instead"
    assert remedy.way.fits and not plan.own.fits


def test_a_smaller_micro_batch_samples_as_many_at_once():
    keys = {"steps_per_generation": 2, "gradient_checkpointing": False, "max_completion_length": 512}
    plan = plan_run(config(**keys), KNOWN["Qwen/Qwen2.5-3B"], on("4090"), prompt_tokens=512)
    change = next(r.change for r in plan.remedies if r.change.startswith("per_device"))
    assert change.endswith("_size: 1, gradient_accumulation_steps: 8, steps_per_generation: 16")
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "steps_per_generation": 16}
    assert work_of(config(**keys), 512).sampled == plan.work.sampled == 16


def test_more_gpus_are_a_remedy_and_as_few_as_fit():
    made = config(sampler="vllm", vllm_server_base_url="http://x:1/v1")
    plan = plan_run(made, KNOWN["Qwen/Qwen2.5-32B"], on("A100-40", servers=4), prompt_tokens=512)
    by = {remedy.change: remedy.way for remedy in plan.remedies}
    assert "launch: {nproc: 4, sharding: fsdp2}" in by and "load_in_4bit: true" in by
    fewer = on("A100-40", servers=4, gpus=2, sharing="fsdp2")
    assert not plan_run(made, KNOWN["Qwen/Qwen2.5-32B"], fewer, prompt_tokens=512).own.fits


def test_a_server_with_too_few_gpus_is_told_how_many_it_needs():
    made = config(sampler="vllm", vllm_server_base_url="http://x:1/v1")
    plan = plan_run(made, SEVENTY, on(gpus=8, sharing="fsdp2"), prompt_tokens=512)
    assert plan.own.in_memory and not plan.own.fits
    assert plan.remedies[0].change == "a vLLM server on other GPUs, 4 of them (vllm_server_base_url)"
    told = "\n".join(lines_of(plan, made))
    assert "vLLM on 1 GPU elsewhere lacks 66.4 GiB for its own copy of the weights" in told
    assert "takes     more than there is" in told


def test_what_cannot_fit_is_said():
    huge = SEVENTY.model_copy(update={"counted": 10**13})
    plan = plan_run(config(), huge, on(), prompt_tokens=512)
    assert plan.remedies == [] and "nothing that was tried makes it fit" in lines_of(plan, config())


def test_the_other_ways_are_one_gpu_one_machine_and_several():
    plan = plan_run(config(), SEVEN, on(gpus=4, machines=3, sharing="zero2"), prompt_tokens=512)
    ways = [(w.machines.gpus, w.machines.machines, w.machines.sharing) for w in plan.ways]
    one = [(4, 1, s) for s in ("none", "zero2", "zero3", "fsdp2")]
    assert ways == [(1, 1, "none"), *one, *((4, 3, s) for s in ("none", "zero3", "fsdp2"))]
    assert [way.machines.gpu for way in plan.elsewhere] == list(GPUS.values())


def test_disk_holds_the_model_twice_and_one_checkpoint_more_than_are_kept():
    plan = plan_run(config(max_steps=100, save_steps=10), SEVEN, on(), prompt_tokens=512)
    checkpoint = 12 * 40_370_176
    assert plan.checkpoint == checkpoint and plan.steps == 100
    assert plan.disk == 4 * 7_615_616_512 + 4 * 40_370_176 + 3 * (checkpoint + 16 * 2**20)
    assert plan.merging == 5 * 7_615_616_512
    assert plan_run(config(), SEVEN, on(), prompt_tokens=512).steps is None
    assert plan_run(config(), SEVEN, on(gpus=2), prompt_tokens=512, prompts=1000).steps == 500


def test_the_machines_are_those_of_launch_unless_told_otherwise(tmp_path):
    launched = config(launch={"nproc": 4, "nodes": 2, "rendezvous": "a:1", "sharding": "zero2"})
    found = machines_of(launched, GPUS["L4"])
    assert (found.gpus, found.machines, found.sharing, found.processes) == (4, 2, "zero2", 8)
    (tmp_path / "own.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n")
    by_file = config(launch={"nproc": 4, "accelerate_config": str(tmp_path / "own.yaml")})
    assert machines_of(by_file, GPUS["L4"]).sharing == "zero3"
    assert machines_of(launched, GPUS["L4"], gpus=1, machines=1).processes == 1
    assert machines_of(config(), GPUS["L4"]).processes == 1


def test_a_prompt_is_as_long_as_the_configuration_lets_it_be_or_512_tokens():
    assert usual_prompt(config(max_prompt_length=100)) == 100
    assert (usual_prompt(config()), usual_prompt(config(max_seq_length=300, max_completion_length=200))) == (512, 100)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 ms"), (0.0994, "99 ms"), (119.94, "119.9 s"), (120, "2 min"), (7200, "2.0 h")]
)
def test_a_duration_is_told_in_a_unit_that_suits_it(seconds, words):
    assert in_time(seconds) == words


# --- GPUs and this machine --------------------------------------------------------------------------------------------


def test_a_gpu_is_taken_by_its_name_and_an_unknown_one_is_refused():
    assert find_gpu("l40s") is GPUS["L40S"]
    with pytest.raises(ConfigError, match="there is no GPU 'H900' in the table; take one of 4090, L4, L40S"):
        find_gpu("H900")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize(
    ("says", "name", "memory"),
    [
        ("NVIDIA L40S, 46068", "NVIDIA L40S", 46068 * 2**20),
        ("NVIDIA H100 80GB HBM3, 81559\nNVIDIA L4, 23034", "NVIDIA H100 80GB HBM3", 81559 * 2**20),
        ("NVIDIA A100-SXM4-40GB, 40960", "NVIDIA A100-SXM4-40GB", 40960 * 2**20),
        ("No devices were found", "H100 80 GB SXM", 80e9),
        ("", "H100 80 GB SXM", 80e9),
    ],
)
def test_the_gpu_of_this_machine_is_asked_for(says, name, memory, tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = find_gpu(None)
    assert (found.name, found.memory) == (name, memory)
    assert found.bandwidth == (1555e9 if "40GB" in name else GPUS["L40S" if "L40S" in name else "H100"].bandwidth)


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize(
    "name",
    ["NVIDIA T4", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 NVL",
     "NVIDIA GeForce RTX 4090 Laptop GPU"],
)  # fmt: skip
def test_a_gpu_of_this_machine_of_which_nothing_is_known_is_not_taken_for_another(name, tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{name}, 15360'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=f"the GPU of this machine, '{name}', is not in the table; name one of it"):
        find_gpu(None)
    assert find_gpu("L4") is GPUS["L4"]


def test_memory_is_no_more_than_the_container_may_take(tmp_path, monkeypatch):
    group = tmp_path / "cgroup" / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/a/b\n")
    (group / "memory.max").write_text("max\n")
    assert memory_limit(mounts=tmp_path / "cgroup", own=tmp_path / "own") is None
    (group.parent / "memory.max").write_text(f"{2**20}\n")
    assert memory_limit(mounts=tmp_path / "cgroup", own=tmp_path / "own") == 2**20
    monkeypatch.setattr(estimate, "memory_limit", lambda: 2**20)
    assert estimate.total_memory() == 2**20
    monkeypatch.setattr(estimate, "memory_limit", lambda: 2**63)
    assert 2**20 < estimate.total_memory() < 2**63


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("5:memory:/x\n0::/", {"memory/x/memory.limit_in_bytes": "4096"}, 4096),
        ("5:cpu,memory:/", {"cpu,memory/memory.limit_in_bytes": "9223372036854771712"}, 9223372036854771712),
        ("5:memory:/host/path", {"memory/memory.limit_in_bytes": "8192"}, 8192),
        ("0::/", {"memory.max": "4096"}, 4096),
        ("0::/", {"memory.max": "what"}, None),
        ("5:cpu:/x", {"cpu/x/memory.max": "4096"}, None),
    ],
)
def test_the_limit_is_found_in_both_kinds_of_control_groups(groups, files, limit, tmp_path):
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert memory_limit(mounts=tmp_path / "cgroup", own=tmp_path / "own") == limit


# --- the estimate of a run on this machine ----------------------------------------------------------------------------


def test_the_estimate_and_the_plan_count_the_same():
    made = config(max_steps=100, save_steps=10)
    found = estimate_run(made, "Qwen/Qwen2.5-7B", train=100, held_out=0, device="cuda")
    planned = plan_run(made, SEVEN, on(), prompt_tokens=512)
    assert (found.parameters, found.disk_bytes, found.steps) == (planned.parameters, planned.disk, planned.steps)
    tokens = 8 * 256
    trained = 16 * 40_370_176 + formulas.activation_bytes(SEVEN, tokens, checkpointing=True)
    assert found.memory_bytes == 2**31 + 2 * 7_615_616_512 + trained + tokens * 32768 * 8
    forward = formulas.forward_operations(SEVEN, 100 * tokens, 256)
    assert found.seconds == pytest.approx((2 + 3) * forward / 100e12)  # sampling twice; checkpointing thrice


def test_on_a_cpu_weights_are_float32_twice_and_nothing_is_computed_again():
    made = config(max_steps=10, lora_r=2)
    found = estimate_run(made, "HuggingFaceTB/SmolLM2-135M", train=100, held_out=0, device="cpu")
    shape, tokens = KNOWN["HuggingFaceTB/SmolLM2-135M"], 8 * 256
    kept = formulas.activation_bytes(shape, tokens, checkpointing=False, width=4)
    trained = formulas.trained_bytes(shape, made)
    assert found.memory_bytes == 2**31 + 8 * 134_515_008 + trained + kept + tokens * 32768 * 8
    forward = formulas.forward_operations(shape, 10 * tokens, 256)
    assert found.seconds == pytest.approx((2 + 2) * forward / (40e9 * (os.cpu_count() or 1)))


def test_of_a_model_that_is_not_known_only_the_steps_are_estimated():
    found = estimate_run(config(max_steps=7), "someone/else", train=100, held_out=10, device="cpu")
    assert (found.parameters, found.memory_bytes, found.disk_bytes, found.seconds) == (None,) * 4
    assert found.steps == 7 and in_words(0) == "0 MiB"


# --- the command ------------------------------------------------------------------------------------------------------


def asked(tmp_path: Path, text: str, *options: str) -> tuple[int, str]:
    (tmp_path / "c.yaml").write_text(text)
    done = CliRunner().invoke(doctor, ["plan", str(tmp_path / "c.yaml"), *options])
    return done.exit_code, done.output if done.exception is None else str(done.exception)


def test_the_command_gives_the_plan_as_text_and_as_json(tmp_path):
    text = "model_name: Qwen/Qwen2.5-7B\nmax_steps: 10\n"
    options = ["--gpu", "A100", "--gpus", "2", "--machines", "2", "--network", "200", "--prompt-tokens", "300"]
    made = config(model_name="Qwen/Qwen2.5-7B", max_steps=10)
    wanted = plan_run(made, SEVEN, on("A100", gpus=2, machines=2, network=25e9), prompt_tokens=300)
    assert asked(tmp_path, text, *options) == (0, "\n".join(lines_of(wanted, made)) + "\n")
    code, shown = asked(tmp_path, text, *options, "--json")
    assert code == 0 and json.loads(shown) == json.loads(wanted.model_dump_json())


def test_a_size_and_a_set_key_go_into_the_plan(tmp_path):
    options = ["--parameters", "8B", "--gpu", "L4", "--set", "load_in_4bit=true", "--json"]
    shown = json.loads(asked(tmp_path, "max_steps: 10\n", *options)[1])
    assert (shown["parameters"], shown["bits"]) == (8_000_000_000, 4)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("model_name: a/b\n", [], "nothing is known here of the size of 'a/b'"),
        ("max_steps: 1\n", [], "model_name is missing"),
        ("model_name: Qwen/Qwen2.5-7B\n", ["--gpu", "T9"], "there is no GPU 'T9'"),
        ("model_name: a/b\n", ["--parameters", "many"], "'many' is no number of parameters"),
        ("model_name: a/b\nlora_rr: 1\n", [], "unknown key 'lora_rr'"),
        ("model_name: Qwen/Qwen2.5-7B\n", ["--network", "inf"], "--network is inf"),
        (
            "model_name: Qwen/Qwen2.5-7B\n",
            ["--prompt-tokens", "1000000000"],
            "prompts of 1000000000 tokens would be left out: max_seq_length 2048 with max_completion_length 256 lets "
            "in 1792; raise max_seq_length (--set)",
        ),
        (
            "model_name: Qwen/Qwen2.5-7B\nmax_prompt_length: 100\n",
            ["--prompt-tokens", "101"],
            "lets in 100; raise max_seq_length and max_prompt_length",
        ),
    ],
)
def test_what_cannot_be_planned_is_told(tmp_path, text, options, said):
    code, shown = asked(tmp_path, text, *options)
    assert code == 1 and said in shown  # the exception itself; the whole command makes it exit code 2
