"""Attention over one sequence of prompts and completions is the attention of each sequence by itself."""

import logging

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from praison_agent_rl import shared_attention as module
from praison_agent_rl.shared_attention import Part, lay_out, run_laid_out, shared_attention
from praison_agent_rl.shared_prefix import completion_states, prefill
from tests.model.test_shared_prefix import COMMON, PAD, completions_of, largest_relative, right_padded

RELATIVE = 1e-5  # of the largest value: float32 has 24 bits, and the sums run in another order
SIZES = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": False},
    "Qwen3": {"head_dim": 32},
    "Gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "Mistral": {"sliding_window": 64},  # longer than any sequence here
}
OWNERS, LENGTHS = [2, 0, 1, 0, 2, 1, 1, 1], [4, 11, 2, 6, 1, 3, 9, 5]


def tiny(family, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES.get(family, {}), **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def with_lora(model):
    """The model with adapters that already do something on all of its linear layers."""
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).get_base_model()


def batch():
    return [COMMON[owner] for owner in OWNERS], completions_of(LENGTHS)


def states_of(model):
    prompts, completions = batch()
    return completion_states(model, prompts, *right_padded(completions), pad=PAD)


def plain_states(model):
    """Each sequence alone, without any padding, mask or cache."""
    states = []
    for prompt, completion in zip(*batch(), strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        states.append(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1])
    return torch.cat(states)


def gradients(model, states):
    weights = torch.linspace(-1, 1, states.numel()).view(states.shape)
    model.zero_grad()
    (states * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def laid_out(monkeypatch):
    """Whether each batch was laid out as one sequence, or None."""
    seen = []

    def watched(*given):
        states = run_laid_out(*given)
        seen.append(states is not None)
        return states

    monkeypatch.setattr(module, "run_laid_out", watched)
    return seen


# --- the layout -------------------------------------------------------------------------------------------------------


def test_what_is_shared_comes_before_all_that_shares_it():
    layout, places = lay_out([[5, 6], [5, 7, 8]], [1, 0, 1], [[20, 21, 22], [30], [40, 41]], common=1)
    #                       0  1  2  3   4   5   6
    assert layout.ids == [5, 6, 7, 8, 20, 21, 40]
    assert layout.positions == [0, 1, 1, 2, 3, 4, 3]
    assert layout.longest == 5
    assert places == [3, 4, 5, 1, 3, 6]  # of the tokens 20, 21, 22, then 30, then 40, 41
    own = [slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 6), slice(6, 7)]
    before = [(slice(4, 7), slice(2, 4)), (slice(1, 7), slice(0, 1))]
    assert layout.parts == [
        *(Part(piece, piece, causal=True) for piece in own),
        *(Part(queries, keys, causal=False) for queries, keys in before),
    ]


def test_a_completion_without_tokens_has_no_places_and_one_of_one_token_adds_nothing():
    layout, places = lay_out([[5, 6]], [0, 0, 0], [[], [9], [7, 8]], common=0)
    assert (layout.ids, places) == ([5, 6, 7], [1, 1, 2])


# --- the attention ----------------------------------------------------------------------------------------------------


def tokens_seen(prompts, owner, completions, common):
    """Of each token of the layout those that it attends to, (tokens, tokens), found by walking each sequence."""
    layout, places = lay_out(prompts, owner, completions, common=common)
    seen = torch.zeros(len(layout.ids), len(layout.ids), dtype=torch.bool)
    for row, its in enumerate(owner):
        first = sum(len(each) for each in completions[:row])
        walked = list(range(common))
        last = places[first]
        walked += range(last + 1 - (len(prompts[its]) - common), last + 1)
        walked += places[first + 1 : first + len(completions[row])]
        for place, token in enumerate(walked):
            seen[token, walked[: place + 1]] = True
    return layout, seen


def attention_inputs(heads, kinds, tokens, dtype):
    """Queries, keys, values and the gradient of the output, drawn in ``dtype``."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, heads, tokens, 16), (1, kinds, tokens, 16), (1, kinds, tokens, 16), (1, tokens, heads, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def with_gradients(attend, inputs):
    """What ``attend`` gives, and the gradients of queries, keys and values, in float64."""
    *states, grad = inputs
    states = [each.clone().requires_grad_() for each in states]
    out = attend(*states)
    return [each.double() for each in (out.detach(), *torch.autograd.grad(out, states, grad.to(out.dtype)))]


def errors(dtype, heads, kinds):
    """Largest relative differences from float64 of this attention, and of PyTorch's with an explicit mask."""
    prompts, completions = [COMMON[0], COMMON[1], COMMON[2]], completions_of(LENGTHS)
    layout, seen = tokens_seen(prompts, OWNERS, completions, common=20)
    inputs = attention_inputs(heads, kinds, len(layout.ids), dtype)

    def ours(query, key, value):
        return shared_attention(torch.nn.Module(), query, key, value, None, layout=layout)[0]

    def theirs(query, key, value):
        key, value = (each.repeat_interleave(heads // kinds, 1) for each in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2)

    exact = with_gradients(theirs, [each.double() for each in inputs])
    found = (with_gradients(attend, inputs) for attend in (ours, theirs))
    return [[largest_relative(*pair) for pair in zip(each, exact, strict=True)] for each in found]


@pytest.mark.parametrize(("heads", "kinds"), [(4, 2), (3, 1), (2, 2)])
def test_values_and_gradients_are_those_of_one_softmax_over_all_that_a_token_sees(heads, kinds):
    ours, _ = errors(torch.float32, heads, kinds)
    assert max(ours) < RELATIVE / 2


@pytest.mark.parametrize(("heads", "kinds"), [(4, 2), (3, 1), (2, 2)])
def test_with_fewer_bits_the_error_is_at_most_twice_that_of_torch(heads, kinds):
    ours, theirs = errors(torch.bfloat16, heads, kinds)
    assert all(one <= 2 * other for one, other in zip(ours, theirs, strict=True))


def test_under_autocast_it_works_in_its_format_as_torch_does():
    layout, _ = lay_out([[5, 6]], [0, 0], [[7, 8], [9, 10]], common=0)
    query, key, value, _ = attention_inputs(2, 1, len(layout.ids), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = shared_attention(torch.nn.Module(), query, key, value.bfloat16(), None, layout=layout)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.ones(2)}, "s_aux"),
        ({"position_bias": torch.ones(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"sliding_window": 3}, "a window"),  # the longest sequence has 4 tokens, of which one is not laid out
        ({"is_causal": False}, "to look ahead"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "a mask"),
        ({"layout": None}, "hands nothing on"),
    ],
)
def test_what_it_does_not_do_is_refused(asked, reason):
    layout, _ = lay_out([[5, 6, 4]], [0, 0], [[7, 8], [9, 10]], common=0)
    query, key, value, _ = attention_inputs(2, 1, len(layout.ids), torch.float32)
    given = {"attention_mask": None, "layout": layout, **asked}
    if reason == "a window":
        shared_attention(torch.nn.Module(), query, key, value, **{**given, "sliding_window": 4})
    with pytest.raises(NotImplementedError, match=reason):
        shared_attention(torch.nn.Module(), query, key, value, **given)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_of_adapters_are_those_of_each_sequence_alone(family, laid_out):
    model = with_lora(tiny(family))
    states, wanted = states_of(model), plain_states(model)
    assert largest_relative(states, wanted) < RELATIVE
    got, plain = gradients(model, states), gradients(model, wanted)
    assert got.keys() == plain.keys() and len(got) == 2 * 7 * 2  # layers, linear layers of each, tensors of each
    assert max(largest_relative(got[name], plain[name]) for name in plain) < RELATIVE
    assert laid_out == [True]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_those_of_copied_keys_and_values(family, laid_out):
    model = with_lora(tiny(family))
    got = gradients(model, states := states_of(model))
    module._UNFIT.add(model)
    copied = gradients(model, wanted := states_of(model))
    assert laid_out == [True, False]
    assert largest_relative(states, wanted) < RELATIVE
    assert max(largest_relative(got[name], copied[name]) for name in copied) < RELATIVE


def test_under_autocast_states_are_as_near_to_the_exact_ones_as_by_copies():
    model = with_lora(tiny("Qwen2"))
    with torch.no_grad():
        exact = plain_states(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = states_of(model)
            module._UNFIT.add(model)
            copied = states_of(model)
    assert largest_relative(ours.float(), exact) <= 2 * largest_relative(copied.float(), exact)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_states_are_the_same(without, laid_out):
    model = tiny("Llama")
    wanted = states_of(model)
    with without():
        states = states_of(model)
    assert laid_out == [True, True] and not states.requires_grad
    assert torch.equal(states, wanted)


def test_the_model_has_its_own_attention_again_whatever_happens(monkeypatch):
    model = tiny("Llama")
    states_of(model)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", lambda states: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        states_of(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_configured_attention_other_than_sdpa_is_kept(laid_out):
    model = tiny("Llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert largest_relative(states_of(model), plain_states(model)) < RELATIVE
    assert laid_out == [False] and model not in module._UNFIT


class OwnAttention(torch.nn.Module):
    """An attention layer that calls no interface: it is the one of PyTorch whatever the configuration says."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **given):
        set_one = self.layer.config._attn_implementation
        self.layer.config._attn_implementation_internal = "sdpa"
        given.pop("layout", None)
        try:
            return self.layer(hidden_states=hidden_states, **given)
        finally:
            self.layer.config._attn_implementation_internal = set_one


def own_attention_in_one_layer(model):
    model.model.layers[1].self_attn = OwnAttention(model.model.layers[1].self_attn)


def attention_that_cannot_be_set(model):
    model.set_attn_implementation = lambda name: None


def layers_that_get_nothing(model):
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda layout=None, attend=attend, **given: attend(**given)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_attention_in_one_layer, "1 of its 2 layers attend through transformers' interface"),
        (attention_that_cannot_be_set, "the attention cannot be set"),
        (layers_that_get_nothing, "hands nothing on to its attention"),
    ],
)
def test_a_model_that_does_not_attend_so_is_noticed_once_and_its_keys_are_copied(change, reason, laid_out, caplog):
    caplog.set_level(logging.INFO, logger=module.__name__)
    model = tiny("Llama")
    wanted = plain_states(model)
    change(model)
    for _ in range(2):
        assert largest_relative(states_of(model), wanted) < RELATIVE
    assert laid_out == [False, False]
    assert [record for record in caplog.messages if reason in record] == caplog.messages and len(caplog.messages) == 1
    assert model.config._attn_implementation == "sdpa"


def test_values_of_another_size_than_keys_are_left_to_copies(laid_out):
    latent = {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "first_k_dense_replace": 2,
    }  # fmt: skip
    model = tiny("DeepseekV3", **latent)
    with torch.no_grad():
        assert largest_relative(states_of(model), plain_states(model)) < RELATIVE
    assert laid_out == [False]


def test_a_prompt_alone_is_computed_in_one_piece_without_a_mask(monkeypatch):
    seen = []

    def watched(query, key, value, *, attn_mask=None, is_causal=False, **given):
        seen.append((query.size(2), attn_mask, is_causal))
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    start = prefill(tiny("Llama"), [COMMON[1]], pad=PAD)
    assert seen == [(24, None, True)] * 2  # once a layer
    assert start.cache.get_seq_length() == 24
