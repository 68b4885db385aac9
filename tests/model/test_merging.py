"""A merge is believed only if it is base + adapter, in memory and read back, with all that a model's folder needs."""

import json
import math

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from praison_agent_rl import merging
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError
from praison_agent_rl.merging import TOLERANCE_16_BIT, TOLERANCE_FLOAT32, merge_adapter
from praison_agent_rl.preflight import check_adapter_targets
from praison_agent_rl.streaming_merge import merge as streaming_merge

PROMPTS = [[0, 20, 30, 40], [0, 50, 60, 70, 80, 90, 100], [0, 11]]


def config_of(**changes) -> TrainConfig:
    return TrainConfig.load({"lora_r": 4, "lora_alpha": 8, **changes}, need_model=False, need_data=False)


def adapter_for(base, folder, *, size=0.05, dtype=torch.float32, targets="all-linear"):
    """An adapter of random numbers; ``size`` 0 is one that training never moved."""
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape).to(parameter.dtype) * size
    adapted.save_pretrained(folder)
    return folder


def logits_of(model, prompts=PROMPTS):
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0].float() for ids in prompts]


def largest_difference(left, right):
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


def spoil(adapter, change):
    """Write the adapter's tensors again, changed."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["tiny_model", "untied_model"])
def test_merged_logits_are_those_of_base_and_adapter(kind, in_tmp, request):
    base = request.getfixturevalue(kind)
    adapter = adapter_for(base, in_tmp / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits_of(plain)
    wanted = logits_of(PeftModel.from_pretrained(plain, adapter).eval())

    proof = merge_adapter(str(base), adapter, in_tmp / "model", config=config_of(), prompts=PROMPTS)

    got = logits_of(AutoModelForCausalLM.from_pretrained(in_tmp / "model", dtype=torch.float32))
    assert largest_difference(got, wanted) < TOLERANCE_FLOAT32
    assert largest_difference(got, before) > 100 * TOLERANCE_FLOAT32
    assert proof.tokens == 13 and proof.tolerance == TOLERANCE_FLOAT32
    assert proof.merge_error < TOLERANCE_FLOAT32 and proof.saved_error < TOLERANCE_FLOAT32
    assert proof.change == pytest.approx(largest_difference(wanted, before), rel=1e-5)
    assert not (in_tmp / ".model.part").exists()


def test_each_merged_tensor_is_base_plus_scaled_product_and_the_others_are_the_base(untied_model, in_tmp):
    adapter = adapter_for(untied_model, in_tmp / "adapter", targets=["q_proj", "down_proj"])
    merge_adapter(str(untied_model), adapter, in_tmp / "model", config=config_of(), prompts=PROMPTS)
    base, merged = (load_file(folder / "model.safetensors") for folder in (untied_model, in_tmp / "model"))
    lora = load_file(adapter / "adapter_model.safetensors")
    assert base.keys() == merged.keys() and len(lora) == 8
    for name, tensor in base.items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            a, b = (lora[f"base_model.model.{name.replace('.weight', f'.lora_{side}.weight')}"] for side in "AB")
            torch.testing.assert_close(merged[name], tensor + 2.0 * b @ a, rtol=0, atol=1e-6)  # alpha 8 / r 4
        else:
            assert torch.equal(merged[name], tensor), name


@pytest.mark.parametrize(("kind", "tied"), [("tiny_model", True), ("untied_model", False)])
def test_a_model_stays_tied_or_untied_in_its_file_and_in_its_config(kind, tied, in_tmp, request):
    base = request.getfixturevalue(kind)
    adapter = adapter_for(base, in_tmp / "adapter")
    merge_adapter(str(base), adapter, in_tmp / "model", config=config_of(), prompts=PROMPTS)
    with safe_open(in_tmp / "model" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert ("lm_head.weight" in names) is not tied
    assert "model.embed_tokens.weight" in names
    assert json.loads((in_tmp / "model" / "config.json").read_text())["tie_word_embeddings"] is tied


def test_tokenizer_chat_template_and_generation_settings_go_with_the_model(tiny_model, in_tmp):
    adapter = adapter_for(tiny_model, in_tmp / "adapter")
    merge_adapter(str(tiny_model), adapter, in_tmp / "model", config=config_of(), prompts=PROMPTS)
    given, saved = AutoTokenizer.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(in_tmp / "model")
    assert saved.chat_template == given.chat_template != ""
    assert saved.get_vocab() == given.get_vocab() and saved.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "Hi"}]
    assert saved.apply_chat_template(messages, add_generation_prompt=True) == given.apply_chat_template(
        messages, add_generation_prompt=True
    )
    settings = json.loads((in_tmp / "model" / "generation_config.json").read_text())
    assert settings["do_sample"] is True  # or `transformers serve` would ignore a request's temperature
    assert (settings["bos_token_id"], settings["eos_token_id"], settings["pad_token_id"]) == (0, 1, 2)


def test_the_template_of_the_config_is_the_one_that_is_saved(tiny_model, in_tmp):
    adapter = adapter_for(tiny_model, in_tmp / "adapter")
    own = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    merge_adapter(str(tiny_model), adapter, in_tmp / "model", config=config_of(chat_template=own), prompts=PROMPTS)
    assert AutoTokenizer.from_pretrained(in_tmp / "model").chat_template == own


@pytest.fixture
def bfloat16_model(tiny_model, tmp_path):
    folder = tmp_path / "bfloat16"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("trained_in", ["auto", "bfloat16"])
def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once(bfloat16_model, in_tmp, trained_in):
    # all-linear with this size moves logits by several units; rounding to 8 bits moves them by a few hundredths
    adapter = adapter_for(bfloat16_model, in_tmp / "adapter", size=0.02)
    proof = merge_adapter(
        str(bfloat16_model), adapter, in_tmp / "model", config=config_of(dtype=trained_in), prompts=PROMPTS
    )
    base, merged = (load_file(folder / "model.safetensors") for folder in (bfloat16_model, in_tmp / "model"))
    lora = load_file(adapter / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert json.loads((in_tmp / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    name = "model.layers.1.self_attn.v_proj.weight"
    a, b = (lora[f"base_model.model.{name.replace('.weight', f'.lora_{side}.weight')}"] for side in "AB")
    exact = base[name].float() + 2.0 * b.float() @ a.float()
    # to the nearest: half of a step of 2**-7 of the number's power of two
    assert bool(((merged[name].float() - exact).abs() <= exact.abs() * 2**-8 + 1e-7).all())
    assert proof.merge_error < TOLERANCE_FLOAT32
    assert proof.tolerance == TOLERANCE_16_BIT and TOLERANCE_FLOAT32 < proof.saved_error < TOLERANCE_16_BIT


# --- merges that are refused ------------------------------------------------------------------------------------------


def refusal(base, adapter, out, **changes) -> str:
    with pytest.raises(ModelError) as caught:
        merge_adapter(str(base), adapter, out, config=config_of(**changes), prompts=PROMPTS)
    assert not out.exists()
    return str(caught.value)


def test_an_adapter_that_changes_nothing_makes_no_version(tiny_model, in_tmp):
    adapter = adapter_for(tiny_model, in_tmp / "adapter", size=0)
    assert "the adapter changes nothing" in refusal(tiny_model, adapter, in_tmp / "model")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_with_numbers_that_are_none_makes_no_version(tiny_model, in_tmp, value):
    adapter = adapter_for(tiny_model, in_tmp / "adapter")
    spoil(adapter, lambda tensors: tensors[min(tensors)].view(-1)[3:4].fill_(value))
    assert "cannot be merged" in refusal(tiny_model, adapter, in_tmp / "model")


def test_nan_in_the_logits_of_any_one_prompt_is_the_largest_difference():
    zero, nan = torch.zeros(3), torch.tensor([0.0, float("nan"), 0.0])
    assert math.isnan(merging._largest_difference([zero, nan], [zero, zero]))
    assert math.isnan(merging._largest_difference([nan, zero], [zero, zero]))
    assert merging._largest_difference([zero, zero + 2], [zero - 1, zero]) == 2.0


@pytest.mark.parametrize("kind", ["tiny_model", "untied_model"])
def test_a_merge_that_leaves_one_tensor_out_is_caught(kind, in_tmp, request, monkeypatch):
    base = request.getfixturevalue(kind)
    adapter = adapter_for(base, in_tmp / "adapter")
    merge = LoraModel.merge_and_unload

    def forgetful(self, *given, **options):
        kept = self.model.model.layers[1].self_attn.v_proj.base_layer.weight.detach().clone()
        merged = merge(self, *given, **options)
        merged.model.layers[1].self_attn.v_proj.weight.data = kept
        return merged

    monkeypatch.setattr(LoraModel, "merge_and_unload", forgetful)
    message = refusal(base, adapter, in_tmp / "model")
    assert "merged logits differ from base + adapter by" in message
    assert "saved weights differ" not in message  # they were merged shard by shard, without PEFT


def test_a_streamed_merge_that_leaves_one_tensor_out_is_caught(tiny_model, in_tmp, monkeypatch):
    adapter = adapter_for(tiny_model, in_tmp / "adapter")
    pieces, name = streaming_merge.merged_pieces, "model.layers.1.self_attn.v_proj.weight"

    def forgetful(made, stored, change):
        return pieces(made, stored, change._replace(b=None) if made == name else change)

    monkeypatch.setattr(streaming_merge, "merged_pieces", forgetful)
    message = refusal(tiny_model, adapter, in_tmp / "model")
    assert f"saved weights differ from base + adapter: {name} by" in message
    assert "saved weights differ from base + adapter by" in message  # the logits see it too


def test_weights_that_change_on_their_way_to_the_disk_are_caught(tiny_model, in_tmp, monkeypatch):
    adapter = adapter_for(tiny_model, in_tmp / "adapter")
    save = merging._save_streamed

    def careless(plan, tokenizer, folder):
        save(plan, tokenizer, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][5] *= 1.1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(merging, "_save_streamed", careless)
    message = refusal(tiny_model, adapter, in_tmp / "model")
    assert "saved weights differ from base + adapter by" in message and "merged logits differ" not in message


def test_a_lost_tying_is_caught(tiny_model, in_tmp, monkeypatch):
    adapter = adapter_for(tiny_model, in_tmp / "adapter")
    save = merging._save_streamed

    def unties(plan, tokenizer, folder):
        save(plan, tokenizer, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))

    monkeypatch.setattr(merging, "_save_streamed", unties)
    assert "the tying of embeddings and output head was lost" in refusal(tiny_model, adapter, in_tmp / "model")


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("generation_config.json", "generation_config.json was not saved"),
        ("chat_template.jinja", "the chat template was not saved"),
    ],
)
def test_a_file_that_was_not_saved_is_named(tiny_model, in_tmp, monkeypatch, lost, said):
    adapter = adapter_for(tiny_model, in_tmp / "adapter")
    save = merging._save_streamed

    def forgetful(plan, tokenizer, folder):
        save(plan, tokenizer, folder)
        (folder / lost).unlink()

    monkeypatch.setattr(merging, "_save_streamed", forgetful)
    assert said in refusal(tiny_model, adapter, in_tmp / "model")


def test_an_adapter_on_a_tied_head_would_make_another_model_and_the_proof_sees_it(tiny_model, in_tmp):
    adapter = adapter_for(tiny_model, in_tmp / "adapter", targets=["lm_head"])
    assert "differ from base + adapter" in refusal(tiny_model, adapter, in_tmp / "model")


def test_what_a_killed_merge_left_does_not_disturb(tiny_model, in_tmp):
    adapter = adapter_for(tiny_model, in_tmp / "adapter")
    left = in_tmp / ".model.part"
    left.mkdir()
    (left / "model-00001-of-00002.safetensors").write_bytes(b"half")
    (left / "model.safetensors.index.json").write_text("{")
    merge_adapter(str(tiny_model), adapter, in_tmp / "model", config=config_of(), prompts=PROMPTS)
    assert not left.exists()
    assert "model.safetensors.index.json" not in {path.name for path in (in_tmp / "model").iterdir()}
    assert AutoModelForCausalLM.from_pretrained(in_tmp / "model").num_parameters() > 0


def test_an_earlier_result_is_replaced_only_by_a_proven_one(tiny_model, in_tmp):
    adapter, out = adapter_for(tiny_model, in_tmp / "adapter"), in_tmp / "model"
    merge_adapter(str(tiny_model), adapter, out, config=config_of(), prompts=PROMPTS)
    first = (out / "model.safetensors").read_bytes()
    nothing = adapter_for(tiny_model, in_tmp / "nothing", size=0)
    with pytest.raises(ModelError, match="changes nothing"):
        merge_adapter(str(tiny_model), nothing, out, config=config_of(), prompts=PROMPTS)
    assert (out / "model.safetensors").read_bytes() == first
    other = adapter_for(tiny_model, in_tmp / "other", size=0.1)
    merge_adapter(str(tiny_model), other, out, config=config_of(), prompts=PROMPTS)
    assert (out / "model.safetensors").read_bytes() != first


# --- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_target_modules": ["q_proj", "lm_head"]},
        {"lora_target_modules": ["embed_tokens"]},
        {"lora_target_modules": ["model.embed_tokens", "v_proj"]},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_on_embeddings_or_head_is_refused_for_a_tied_model_only(changes):
    name = next(n for names in changes.values() for n in names if "head" in n or "embed" in n).removeprefix("model.")
    with pytest.raises(ModelError) as caught:
        check_adapter_targets(config_of(**changes), tied=True, source="some/model")
    assert name in str(caught.value) and "'some/model' ties its input embeddings" in str(caught.value)
    if "lm_head" not in changes.get("lora_target_modules", []):
        assert check_adapter_targets(config_of(**changes), tied=False, source="some/model") is None


@pytest.mark.parametrize(
    "targets", [["q_proj", "lm_head"], ["model.lm_head"], ["embed_out"], ".*lm_head", r".*(q_proj|head)"]
)
def test_an_adapter_on_the_head_is_refused_for_every_model_since_trl_would_not_train_it(targets):
    with pytest.raises(ModelError, match=r"computes log-probabilities from its weights directly"):
        check_adapter_targets(config_of(lora_target_modules=targets), tied=False, source="some/model")


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], r".*\.(q|v)_proj"])
def test_an_adapter_on_the_projections_passes_for_a_tied_model(targets):
    assert check_adapter_targets(config_of(lora_target_modules=targets), tied=True, source="some/model") is None


def test_a_head_of_its_own_may_have_an_adapter_and_merges_exactly(untied_model, in_tmp):
    adapter = adapter_for(untied_model, in_tmp / "adapter", targets=["lm_head", "q_proj"])
    proof = merge_adapter(str(untied_model), adapter, in_tmp / "model", config=config_of(), prompts=PROMPTS)
    assert proof.saved_error < TOLERANCE_FLOAT32 < proof.change
