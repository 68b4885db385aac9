"""Weights are found or it is said why not, a GGUF file becomes plain weights once, and prompts become tokens."""

import json
import os

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import (
    cache_folder,
    find_weights,
    load_model,
    load_tokenizer,
    plain_weights,
    render_prompts,
    stored_dtype,
)
from praison_agent_rl.weight_files import read_config
from tests.conftest import CHATML

IDS = torch.tensor([[0, 20, 30, 40, 50, 60, 70, 80]])


def config_of(**changes) -> TrainConfig:
    return TrainConfig.load(changes, need_model=False, need_data=False)


def refusal(call, *given) -> str:
    with pytest.raises(ModelError) as caught:
        call(*given)
    return str(caught.value)


# --- finding ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_found_as_its_absolute_path(tiny_model, monkeypatch):
    monkeypatch.chdir(tiny_model.parent)
    assert find_weights("./model") == find_weights(str(tiny_model)) == str(tiny_model.resolve())


def test_a_folder_that_looks_like_a_hub_name_is_the_folder(tiny_model, monkeypatch):
    monkeypatch.chdir(tiny_model.parent.parent)
    assert find_weights(f"{tiny_model.parent.name}/model") == str(tiny_model.resolve())


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing_here", "nothing", "a/b/c", "a/b.gguf"])
def test_a_path_that_leads_nowhere_is_said_to(in_tmp, name):
    text = refusal(find_weights, name)
    assert text == f"there are no weights at {name!r}: no such folder or file, and it is no hub name (owner/name)"


def test_an_adapter_is_not_a_model(in_tmp):
    (in_tmp / "adapter").mkdir()
    (in_tmp / "adapter" / "adapter_config.json").write_text("{}")
    (in_tmp / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    text = refusal(find_weights, "adapter")
    assert text == "'adapter' is an adapter, not a model; give its merged model or its base model"


def test_a_folder_without_a_config_is_not_a_model(in_tmp):
    (in_tmp / "m").mkdir()
    (in_tmp / "m" / "model.safetensors").write_bytes(b"")
    assert refusal(find_weights, "m") == "'m' is not the folder of a model: it has no config.json"


def test_a_folder_without_safetensors_is_not_a_model_and_a_gguf_in_it_is_pointed_at(in_tmp):
    (in_tmp / "m").mkdir()
    (in_tmp / "m" / "config.json").write_text("{}")
    (in_tmp / "m" / "pytorch_model.bin").write_bytes(b"")
    text = refusal(find_weights, "m")
    assert text == "'m' is not the folder of a model: it has no *.safetensors file"
    (in_tmp / "m" / "small.gguf").write_bytes(b"")
    assert refusal(find_weights, "m") == f"{text}; to use small.gguf, give the path of that file"


def test_a_file_that_is_no_gguf_is_refused(in_tmp):
    (in_tmp / "model.safetensors").write_bytes(b"")
    text = refusal(find_weights, "model.safetensors")
    assert text.startswith("'model.safetensors' is a file but no GGUF; give the folder that holds config.json")


def test_a_gguf_file_is_found_whatever_the_case_of_its_ending(in_tmp):
    (in_tmp / "small.GGUF").write_bytes(b"GGUF")
    assert find_weights("small.GGUF") == str((in_tmp / "small.GGUF").resolve())


def test_a_hub_name_that_is_not_cached_is_refused_without_a_network(in_tmp):
    text = refusal(find_weights, "nobody-at-all/no-such-model")
    assert text.startswith("'nobody-at-all/no-such-model' is not in the local cache of hub models")
    assert text.endswith(
        "(HF_HUB_OFFLINE is set); there is no folder of that name here either; give a local folder or GGUF file"
    )


def test_a_name_that_no_hub_could_have_is_refused(in_tmp):
    assert (
        refusal(find_weights, "no spaces/in names") == "'no spaces/in names' is neither a folder nor a valid hub name"
    )


def test_the_config_of_a_folder_is_read_and_that_of_anything_else_is_empty(tiny_model, in_tmp):
    assert read_config(str(tiny_model))["hidden_size"] == 64
    assert read_config("owner/name") == {}


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_cpu_computes_in_float32_whatever_is_stored(tiny_model, in_tmp):
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(in_tmp / "b16")
    source = str(in_tmp / "b16")
    assert stored_dtype(source, config_of()) == "bfloat16" and stored_dtype(str(tiny_model), config_of()) == "float32"
    assert load_model(source, config_of(), device="cpu").dtype == torch.float32
    assert load_model(source, config_of(dtype="bfloat16"), device="cpu").dtype == torch.bfloat16
    assert load_model(source, config_of(dtype="bfloat16"), device="cpu", full_precision=True).dtype == torch.float32


def test_weights_that_cannot_be_read_are_a_model_error(tiny_model, in_tmp):
    (in_tmp / "m").mkdir()
    (in_tmp / "m" / "config.json").write_text((tiny_model / "config.json").read_text())
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(in_tmp / "m"), config_of(), device="cpu")
    (in_tmp / "m" / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(in_tmp / "m"), config_of(), device="cpu")
    other_shape = {**read_config(str(tiny_model)), "intermediate_size": 96}
    (in_tmp / "m" / "config.json").write_text(json.dumps(other_shape))
    (in_tmp / "m" / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(in_tmp / "m"), config_of(), device="cpu")


def test_a_tokenizer_that_is_not_there_is_a_model_error(in_tmp):
    (in_tmp / "m").mkdir()
    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be loaded"):
        load_tokenizer(str(in_tmp / "m"), config_of())


def test_a_tokenizer_pads_on_the_left_and_with_its_end_token_if_it_has_no_other(tiny_model, in_tmp):
    assert load_tokenizer(str(tiny_model), config_of()).pad_token == "<pad>"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(in_tmp / "m")
    loaded = load_tokenizer(str(in_tmp / "m"), config_of())
    assert loaded.pad_token == "<|im_end|>" and loaded.padding_side == "left"


def test_a_chat_template_is_given_as_text_or_as_the_path_of_a_file(tiny_model, in_tmp):
    (in_tmp / "own.jinja").write_text("from the file")
    assert load_tokenizer(str(tiny_model), config_of()).chat_template == CHATML
    assert load_tokenizer(str(tiny_model), config_of(chat_template="own.jinja")).chat_template == "from the file"
    long = "{# " + "x" * 5000 + " #}text"  # too long for a file's name
    assert load_tokenizer(str(tiny_model), config_of(chat_template=long)).chat_template == long


# --- GGUF -------------------------------------------------------------------------------------------------------------

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def in_order_of_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp's rotary embedding pairs them: (0, d/2), (1, d/2 + 1), ... become neighbours."""
    by_head = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return by_head.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model_folder, path, *, quantised=None, merges=()):
    """The model of ``model_folder`` as llama.cpp's converter writes it, tokenizer and chat template included."""
    config = json.loads((model_folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if place < 3 else gguf.TokenType.NORMAL for place in range(len(tokens))]
    writer.add_token_types(kinds)
    if merges:
        writer.add_token_merges(list(merges))
    else:
        writer.add_token_scores([0.0] * len(tokens))  # from which a reader makes the merges that there are: none
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    whole["lm_head.weight"] = "output.weight"
    for name, tensor in load_file(model_folder / "model.safetensors").items():
        array = tensor.float().numpy()
        if name in whole:
            gguf_name = whole[name]
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            gguf_name = f"blk.{layer}.{NAMES[part]}.weight"
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(NAMES[part])
            array = in_order_of_pairs(array, config[heads]) if heads else array
        if quantised and array.ndim == 2:
            writer.add_tensor(gguf_name, gguf.quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(("kind", "tied"), [("tiny_model", True), ("untied_model", False)])
def test_a_gguf_file_becomes_the_weights_that_it_was_made_of(kind, tied, in_tmp, request):
    base = request.getfixturevalue(kind)
    folder = plain_weights(str(write_gguf(base, in_tmp / "small.gguf")))
    assert folder.startswith(str(in_tmp / "cache")) and cache_folder() == in_tmp / "cache"
    got, wanted = (load_model(source, config_of(), device="cpu") for source in (folder, str(base)))
    assert got.config.tie_word_embeddings is tied
    torch.testing.assert_close(logits_of(got), logits_of(wanted), rtol=0, atol=1e-5)
    there, here = load_tokenizer(str(base), config_of()), load_tokenizer(folder, config_of())
    prompt = [{"role": "user", "content": "Grüße,  Welt!"}]
    assert render_prompts(here, [prompt]) == render_prompts(there, [prompt])
    assert (here.eos_token, here.pad_token) == ("<|im_end|>", "<pad>")
    assert find_weights(folder) == folder


def test_quantised_weights_become_what_transformers_itself_reads_from_them(tiny_model, in_tmp):
    path = write_gguf(tiny_model, in_tmp / "small.gguf", quantised=gguf.GGMLQuantizationType.Q8_0)
    folder = plain_weights(str(path))
    assert {tensor.dtype for tensor in load_file(f"{folder}/model.safetensors").values()} == {torch.float32}
    assert "quantization_config" not in read_config(folder)
    got = logits_of(load_model(folder, config_of(), device="cpu"))
    wanted = logits_of(AutoModelForCausalLM.from_pretrained(in_tmp, gguf_file=path.name, dtype=torch.float32))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    exact = logits_of(load_model(str(tiny_model), config_of(), device="cpu"))
    assert 1e-3 < float((got - exact).abs().max()) < 0.1 * float(exact.abs().max())  # 8 bits: near, not equal


def test_a_gguf_file_is_converted_once_until_it_changes(tiny_model, untied_model, in_tmp):
    path = write_gguf(tiny_model, in_tmp / "small.gguf")
    first = plain_weights(str(path))
    mark = f"{first}/mark"
    open(mark, "w").close()
    assert plain_weights(str(path)) == first and os.path.exists(mark)
    stamp = path.stat()
    write_gguf(untied_model, path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = plain_weights(str(path))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    third = plain_weights(str(path))
    assert len({first, second, third}) == 3  # another size, and the same size of a later time
    assert {path.name for path in (in_tmp / "cache" / "converted").iterdir()} == {
        os.path.basename(folder) for folder in (first, second, third)
    }


def test_what_is_no_gguf_is_plain_already(tiny_model, in_tmp):
    assert plain_weights(str(tiny_model)) == str(tiny_model) and plain_weights("owner/name") == "owner/name"
    assert not (in_tmp / "cache").exists()


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


BROKEN = {
    "an empty file": lambda content: b"",
    "half a file": half,
    "a cut header": lambda content: content[:200],
    "another kind of file": lambda content: b"PK\x03\x04" + content[4:],
    "only the first word": lambda content: b"GGUF",
    "text": lambda content: b"not a model at all\n" * 50,
    "an architecture that nobody knows": lambda content: content.replace(b"llama", b"zebra"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_gguf_file_is_a_model_error_and_leaves_nothing_in_the_cache(tiny_model, in_tmp, kind):
    path = write_gguf(tiny_model, in_tmp / "small.gguf")
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    text = refusal(plain_weights, str(path))
    assert text.startswith(f"the GGUF file {str(path)!r} cannot be read: ")
    assert os.listdir(in_tmp / "cache" / "converted") == []


def test_a_gguf_file_whose_tokenizer_contradicts_itself_is_a_model_error(tiny_model, in_tmp):
    path = write_gguf(tiny_model, in_tmp / "small.gguf", merges=["Ġ Ġ"])  # the merged token is not in the vocabulary
    assert "cannot be read: Error while initializing BPE" in refusal(plain_weights, str(path))
    assert os.listdir(in_tmp / "cache" / "converted") == []


# --- prompts ----------------------------------------------------------------------------------------------------------

SHOWING = (
    "{% if tools %}[{{ tools | map(attribute='function.name') | join(',') }}]{% endif %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    loaded = AutoTokenizer.from_pretrained(tiny_model)
    loaded.chat_template = SHOWING
    return loaded


def shown(tokenizer, *messages, tools=()):
    """What the model sees of one conversation."""
    (ids,) = render_prompts(tokenizer, [list(messages)], tools)
    return tokenizer.decode(ids)


def called(arguments):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_a_prompt_of_text_is_its_tokens_and_nothing_more(tokenizer):
    # three marks come first in the vocabulary, then the 256 letters of bytes in order: "A" is the 33rd after "!"
    first = tokenizer.get_vocab()["!"]
    assert render_prompts(tokenizer, ["!A", ""]) == [[first, first + 32], []]


def test_messages_end_where_the_answer_begins(tokenizer):
    assert shown(tokenizer, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}) == (
        "system=Be brief.;user=Hi;answer:"
    )


def test_texts_and_messages_may_be_mixed_and_keep_their_order(tokenizer):
    rendered = render_prompts(tokenizer, ["x", [{"role": "user", "content": "y"}], "z"])
    assert tokenizer.batch_decode(rendered) == ["x", "user=y;answer:", "z"]


def test_content_in_parts_is_joined(tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, {"type": "image_url", "image_url": {}}]
    assert shown(tokenizer, {"role": "user", "content": parts}) == "user=one two;answer:"  # as transformers serve does


def test_missing_content_is_shown_as_empty(tokenizer):
    assert shown(tokenizer, {"role": "user", "content": None}, {"role": "user"}) == "user=;user=;answer:"


def test_arguments_of_tool_calls_are_shown_alike_as_text_and_as_mapping(tokenizer):
    wanted = 'assistant=<add {"a": 1, "b": [2]}>;answer:'
    assert shown(tokenizer, called('{"a": 1, "b": [2]}')) == wanted
    assert shown(tokenizer, called({"a": 1, "b": [2]})) == wanted


def test_arguments_that_are_no_json_are_shown_as_they_were_written(tokenizer):
    assert shown(tokenizer, called("{a: 1")) == 'assistant=<add "{a: 1">;answer:'


def test_messages_are_not_changed_by_rendering(tokenizer):
    message = called('{"a": 1}')
    before = json.dumps(message)
    shown(tokenizer, message)
    assert json.dumps(message) == before


def test_tool_schemas_are_given_to_the_template(tokenizer):
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub")]
    assert shown(tokenizer, {"role": "user", "content": "2+3"}, tools=tools) == "[add,sub]user=2+3;answer:"


@pytest.fixture
def strict(tiny_model):
    loaded = AutoTokenizer.from_pretrained(tiny_model)
    loaded.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    return loaded


def test_a_template_that_refuses_names_the_prompt_and_its_own_words(strict):
    prompts = ["text", [{"role": "user", "content": "fine"}], [{"role": "system", "content": "not"}]]
    text = refusal(render_prompts, strict, prompts)
    assert text.startswith("the chat template refuses prompt 3: ") and text.endswith("no system messages")


def test_a_template_that_is_broken_is_a_model_error(strict):
    strict.chat_template = "{% for %}"
    assert "refuses prompt 1: TemplateSyntaxError" in refusal(
        render_prompts, strict, [[{"role": "user", "content": "Hi"}]]
    )


def test_messages_for_a_model_without_a_template_are_refused_and_texts_are_not(strict):
    strict.chat_template = None
    assert len(render_prompts(strict, ["Hi"])[0]) == 2
    text = refusal(render_prompts, strict, [[{"role": "user", "content": "Hi"}]])
    assert text == "the prompts are messages, but the model has no chat template; set chat_template"
