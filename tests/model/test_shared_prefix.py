"""Computing shared prompts once gives the hidden states, gradients and completions of the plain computation."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from praison_agent_rl.shared_prefix import completion_states, group_equal, sample_completions

PAD, EOS = 2, 1
RELATIVE = 1e-5  # of the largest value: float32 has 24 bits, and the sums run in another order

SYSTEM = list(range(40, 60))
COMMON = [[*SYSTEM, 70], [*SYSTEM, 71, 72, 73, 74], [*SYSTEM, 75, 76]]
NOTHING_COMMON = [[70, 71], [80, 81, 82, 83, 84, 85], [90]]
ONE_BEGINS_THE_OTHER = [[70, 71, 72], [70, 71, 72, 73, 74], [70, 71]]


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def left_padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def right_padded(completions):
    width = max(map(len, completions))
    ids = torch.tensor([c + [PAD] * (width - len(c)) for c in completions])
    mask = torch.tensor([[1] * len(c) + [0] * (width - len(c)) for c in completions])
    return ids, mask


def completions_of(lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]


def plain_states(model, prompts, completions):
    """Each sequence alone, without any padding, mask or cache."""
    states = []
    for prompt, completion in zip(prompts, completions, strict=True):
        hidden = model.model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).last_hidden_state[0]
        states.append(hidden[len(prompt) - 1 : -1])
    return torch.cat(states)


def left_padded_states(model, prompts, completions):
    """The computation of TRL: one batch, prompts padded on the left and completions on the right."""
    (ids, mask), (tokens, kept) = left_padded(prompts), right_padded(completions)
    whole = torch.cat([mask, kept], 1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(
        input_ids=torch.cat([ids, tokens], 1), attention_mask=whole, position_ids=positions, use_cache=False
    ).last_hidden_state
    return hidden[:, ids.size(1) - 1 : -1][kept.bool()]


def shared_states(model, prompts, completions):
    return completion_states(model, prompts, *right_padded(completions), pad=PAD)


def gradients(model, states):
    """Gradients of a loss that weighs every number of ``states`` differently."""
    weights = torch.linspace(-1, 1, states.numel()).view(states.shape)
    model.zero_grad()
    (states * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def largest_relative(got, wanted):
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max() / wanted.abs().max())


GROUPS = {
    "a common beginning": (COMMON, [0, 0, 1, 1, 2, 2], [5, 3, 1, 9, 4, 5]),
    "nothing in common": (NOTHING_COMMON, [0, 0, 1, 1, 2, 2], [5, 3, 1, 9, 4, 5]),
    "one prompt begins the other": (ONE_BEGINS_THE_OTHER, [0, 1, 2, 0, 1, 2], [2, 7, 3, 3, 1, 6]),
    "groups of unequal size": (COMMON, [0, 1, 1, 1, 1, 2, 2], [4, 4, 2, 6, 1, 3, 5]),
    "groups that are mixed": (COMMON, [2, 0, 1, 0, 2, 1], [4, 11, 2, 6, 1, 3]),
    "one prompt": (COMMON[1:2], [0, 0, 0, 0], [3, 1, 8, 2]),
    "completions of one token": (COMMON, [0, 0, 1, 2], [1, 1, 1, 1]),
    "more rows than are run at once": (COMMON, [0] * 7 + [1] * 7 + [2] * 6, [(7 * i) % 13 + 1 for i in range(20)]),
}


@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("plain", [plain_states, left_padded_states])
def test_hidden_states_are_those_of_the_plain_computation(model, case, plain):
    distinct, owners, lengths = GROUPS[case]
    prompts, completions = [distinct[owner] for owner in owners], completions_of(lengths)
    with torch.no_grad():
        got, wanted = shared_states(model, prompts, completions), plain(model, prompts, completions)
    assert got.shape == (sum(lengths), 64)
    assert largest_relative(got, wanted) < RELATIVE


@pytest.mark.parametrize("case", GROUPS)
def test_every_gradient_is_that_of_the_left_padded_computation(model, case):
    distinct, owners, lengths = GROUPS[case]
    prompts, completions = [distinct[owner] for owner in owners], completions_of(lengths)
    got = gradients(model, shared_states(model, prompts, completions))
    wanted = gradients(model, left_padded_states(model, prompts, completions))
    assert got.keys() == wanted.keys() and len(got) == 2 * 9 + 2  # 9 tensors a layer, embeddings and last norm
    # sums over many tokens, in another order: a few roundings more than one state has
    assert max(largest_relative(got[name], wanted[name]) for name in wanted) < 5 * RELATIVE


def test_a_row_without_a_completion_gives_no_states(model):
    completions = [[70, 71], [], [72]]
    with torch.no_grad():
        got = shared_states(model, [COMMON[0]] * 3, completions)
        wanted = plain_states(model, [COMMON[0]] * 2, [[70, 71], [72]])
    assert largest_relative(got, wanted) < RELATIVE


def test_equal_prompts_are_found_in_order_of_appearance():
    assert group_equal([(5, 6), [7], [5, 6], [7], [8]]) == ([[5, 6], [7], [8]], [0, 1, 0, 1, 2])


# --- sampling ---------------------------------------------------------------------------------------------------------


def settings(**changes):
    return GenerationConfig(
        **{"do_sample": False, "max_new_tokens": 20, "pad_token_id": PAD, "eos_token_id": EOS, **changes}
    )


def generated(model, prompts, config):
    """What ``generate`` itself gives for prompts padded on the left, each cut behind its end token."""
    ids, mask = left_padded(prompts)
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=copy.copy(config))
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    completions = []
    for row in output[:, ids.size(1) :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        completions.append(row[: end + 1])
    return completions


def sampled(model, prompts, config, eos=(EOS,)):
    return sample_completions(model, prompts, generation_config=config, pad=PAD, eos=eos)


@pytest.mark.parametrize("prompts", [COMMON, NOTHING_COMMON[:2], ONE_BEGINS_THE_OTHER, [COMMON[0]] * 3 + COMMON])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 20])
def test_greedy_completions_are_those_of_generate_at_the_edges_of_a_block(model, prompts, tokens):
    config = settings(max_new_tokens=tokens)
    got = sampled(model, prompts, config)
    assert got == generated(model, prompts, config)
    assert max(map(len, got)) == tokens


@pytest.mark.parametrize(
    "changes",
    [{"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2}, {"suppress_tokens": [77]}],
)
def test_other_settings_have_the_effect_that_they_have_in_generate(model, changes):
    config = settings(**changes)
    got = sampled(model, COMMON, config)
    assert got == generated(model, COMMON, config)
    assert got != sampled(model, COMMON, settings()) or "suppress_tokens" in changes


def end_tokens_that_end_early(model):
    """Tokens of the greedy completions at places 3 and 11: with them as end tokens rows end in different blocks."""
    first, second, _ = sampled(model, COMMON, settings(repetition_penalty=1.8))
    return [first[3], second[11]]


def test_an_end_token_is_kept_and_nothing_follows_it(model):
    ends = end_tokens_that_end_early(model)
    config = settings(repetition_penalty=1.8, eos_token_id=ends)
    got = sampled(model, COMMON, config, eos=ends)
    assert got == generated(model, COMMON, config)
    assert [completion[-1] in ends or len(completion) == 20 for completion in got] == [True] * 3
    assert not any(token in ends for completion in got for token in completion[:-1])
    assert 4 in map(len, got) and len(set(map(len, got))) > 1


def test_a_least_length_counts_from_the_start_and_not_from_each_block(model):
    ends = end_tokens_that_end_early(model)
    config = settings(repetition_penalty=1.8, eos_token_id=ends, min_new_tokens=10)
    got = sampled(model, COMMON, config, eos=ends)
    assert got == generated(model, COMMON, config)
    assert min(map(len, got)) > 10 and min(map(len, got)) < 20


def test_a_least_length_that_the_model_brings_counts_from_the_start_too(model, monkeypatch):
    ends = end_tokens_that_end_early(model)
    config = settings(repetition_penalty=1.8, eos_token_id=ends)
    monkeypatch.setattr(model.generation_config, "min_new_tokens", 10)
    got = sampled(model, COMMON, config, eos=ends)
    assert got == generated(model, COMMON, config)
    assert 10 < min(map(len, got)) < 20


@pytest.mark.parametrize("brought", [False, True], ids=["asked for", "brought by the model"])
def test_pairs_of_tokens_count_where_a_prompt_leaves_what_it_shares(model, brought, monkeypatch):
    # the pair (72, 73) stands on the border of what both share and the first's own; five tokens soon repeat a pair
    prompts = [[70, 71, 72, 73, 74, 70], [70, 71, 72, *[74, 73, 72] * 3, 71, 70, 73]]
    config = settings(suppress_tokens=[token for token in range(259) if token not in range(70, 75)])
    free = sampled(model, prompts, config)
    if brought:
        monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 2)
    else:
        config.no_repeat_ngram_size = 2
    got = sampled(model, prompts, config)
    assert got == generated(model, prompts, config) and got != free


def test_first_tokens_are_drawn_from_the_softmax(model):
    n, temperature = 2000, 1.5
    torch.manual_seed(11)
    drawn = sampled(
        model,
        [COMMON[1]] * n,
        settings(do_sample=True, temperature=temperature, max_new_tokens=1, top_k=0, top_p=1.0),
    )
    counts = torch.bincount(torch.tensor([completion[0] for completion in drawn]), minlength=259).double()
    with torch.no_grad():
        wanted = (model(input_ids=torch.tensor([COMMON[1]])).logits[0, -1].double() / temperature).softmax(0)
    common = wanted * n >= 10  # below, a count is no bell curve; those tokens are taken together
    assert common.sum() >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([wanted[common], wanted[~common].sum()[None]])
    sigma = (n * wanted * (1 - wanted)).sqrt()
    assert counts.sum() == n
    assert float(((counts - n * wanted) / sigma).abs().max()) < 4


def test_top_k_leaves_only_the_likeliest_tokens_in_every_block(model):
    torch.manual_seed(5)
    got = sampled(model, [COMMON[0]] * 16, settings(do_sample=True, temperature=3.0, top_k=2, max_new_tokens=12))
    for completion in got:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*COMMON[0], *completion]])).logits[0, len(COMMON[0]) - 1 : -1]
        likeliest = logits.topk(2).indices.tolist()
        assert all(token in best for token, best in zip(completion, likeliest, strict=True))
    assert len({tuple(completion) for completion in got}) > 8


def test_the_same_seed_gives_the_same_completions(model):
    config = settings(do_sample=True, temperature=2.0, max_new_tokens=12)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(sampled(model, COMMON * 4, config))
    assert runs[0] == runs[1] != runs[2]
