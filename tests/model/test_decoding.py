"""The package's own decoder draws what the model itself would, from prompts that are computed once."""

import copy
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from praison_agent_rl.answering import Engine, Manner, answer_rows
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.decoding import weights
from praison_agent_rl.decoding.cascade import Places, cascade_attention, places_of
from praison_agent_rl.decoding.loop import _place_in_blocks, draw
from praison_agent_rl.decoding.probe import why_not_drawable
from praison_agent_rl.decoding.weights import Bfloat16Linear, PackedLinear, RepackedLinear, SamplingModel
from praison_agent_rl.rewards import Reward
from praison_agent_rl.rollouts import _SHAPING, Sampling, declared_settings
from praison_agent_rl.shared_prefix import sample_completions
from praison_agent_rl.training import drawing
from praison_agent_rl.training.grpo import train_grpo
from tests.model.test_grpo import adapter_of, lower_case, notes, planned, rows_of

PROMPTS = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8], [5, 6, 9]]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def policy(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    torch.manual_seed(3)
    with torch.no_grad():  # a fresh tiny model repeats one token
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def greedy(policy, prompts, tokens, ends):
    settings = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=list(ends) or None)
    return sample_completions(policy, prompts, generation_config=settings, pad=0, eos=list(ends))


def log_probs_of(policy, prompt, completion, temperature):
    """By the plain model: a sequence by itself."""
    logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def test_rows_stand_beside_those_of_their_prompt():
    assert places_of([0, 0, 1, 1], 2, "cpu") == Places(None, None, 2)
    ragged = places_of([0, 1, 0, 0], 2, "cpu")
    assert (ragged.grid.tolist(), ragged.of_row.tolist(), ragged.width) == ([[0, 2, 3], [1, 0, 0]], [0, 3, 1, 2], 3)


@pytest.mark.parametrize(
    ("asked", "tokens", "said"),
    [({"softcap": 30.0}, 1, "softcap"), ({"dropout": 0.1}, 1, "dropout"), ({}, 2, "more than one token of a row")],
    ids=str,
)
def test_an_attention_that_it_does_not_know_is_refused(asked, tokens, said):
    states = torch.zeros(1, 1, tokens, 4)
    with pytest.raises(NotImplementedError, match=said):
        cascade_attention(None, states, states, states, None, cascade=None, **asked)


def test_without_chance_it_writes_what_generate_writes(policy):
    wanted = greedy(policy, PROMPTS, 30, ())
    assert len(set(map(tuple, wanted))) == 3
    assert draw(SamplingModel(policy), PROMPTS, Sampling(30, 0), pad=0).ids == wanted


def test_rows_that_end_leave_and_the_others_are_not_changed(policy):
    whole = greedy(policy, PROMPTS, 30, ())
    end = whole[1][9]  # ends the rows of one prompt in the middle
    wanted = greedy(policy, PROMPTS, 30, (end,))
    sampled = draw(SamplingModel(policy), PROMPTS, Sampling(30, 0, ends=(end,)), pad=0)
    assert sampled.ids == wanted and len(set(map(len, wanted))) > 1
    assert [len(row) for row in sampled.log_probs] == [len(row) for row in wanted]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_token_has_the_log_probability_that_the_model_gives_it(policy, temperature):
    torch.manual_seed(0)
    sampled = draw(SamplingModel(policy), PROMPTS, Sampling(20, temperature), pad=0)
    assert len(set(map(tuple, sampled.ids))) == len(PROMPTS)
    for prompt, ids, log_probs in zip(PROMPTS, sampled.ids, sampled.log_probs, strict=True):
        assert log_probs == pytest.approx(log_probs_of(policy, prompt, ids, temperature), abs=1e-4)


def test_tokens_come_as_often_as_they_are_likely(policy):
    torch.manual_seed(0)
    sampled = draw(SamplingModel(policy), [PROMPTS[0]] * 4000, Sampling(1), pad=0)
    counted = torch.bincount(torch.tensor(sampled.ids)[:, 0], minlength=policy.config.vocab_size) / 4000
    likely = policy(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    # each share scatters by sqrt(p (1 - p) / 4000); five times that is met by chance once in a million
    assert ((counted - likely).abs() < 5 * (likely * (1 - likely) / 4000).sqrt() + 1e-3).all()


def test_a_place_is_drawn_as_often_as_its_weight_says_whatever_the_width():
    torch.manual_seed(3)
    for width in (3, 256, 300, 1000):
        shares = torch.zeros(width)
        shares[[0, width // 2, width - 1]] = torch.tensor([1.0, 2.0, 5.0])
        drawn = _place_in_blocks(shares.expand(4000, -1))[:, 0]
        counts = [int((drawn == place).sum()) for place in (0, width // 2, width - 1)]
        assert sum(counts) == 4000  # never a place of weight 0, nor one beyond the last
        assert all(abs(count - 500 * share) < 120 for count, share in zip(counts, (1, 2, 5), strict=True))


def test_packed_products_are_the_plain_ones_and_follow_their_weights():
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 40)
    states = torch.randn(2, 3, 24)
    packed = PackedLinear(layer)
    for _ in range(2):
        assert torch.allclose(packed(states), layer(states), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            layer.weight.mul_(3.0)
        packed.refresh()


def test_without_packed_products_weights_stay_as_they_are(policy, monkeypatch):
    monkeypatch.setattr(weights, "can_pack", lambda dtype: False)
    kinds = {type(layer) for layer in SamplingModel(policy).model.modules()}
    assert not any(issubclass(kind, RepackedLinear) for kind in kinds)
    assert Bfloat16Linear in {type(layer) for layer in SamplingModel(policy, "bfloat16").model.modules()}


@pytest.mark.parametrize(
    ("sampling", "allowed"), [({"top_k": 2}, 2), ({"top_p": 1e-6}, 1), ({"min_p": 1.0}, 1)], ids=str
)
def test_a_token_that_is_taken_out_is_never_drawn(policy, sampling, allowed):
    best = policy(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(allowed).indices.tolist()
    sampled = draw(SamplingModel(policy), [PROMPTS[0]] * 200, Sampling(1, **sampling), pad=0)
    assert {ids[0] for ids in sampled.ids} == set(best)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_model_that_gives_no_probabilities_is_an_error_and_says_so(policy, broken):
    with torch.no_grad():
        policy.get_output_embeddings().weight[3] = broken
    with pytest.raises(ValueError, match="no token can be drawn: the model gives NaN"):
        draw(SamplingModel(policy), PROMPTS, Sampling(4), pad=0)


@pytest.mark.parametrize(("precision", "near"), [("bfloat16", 0.15), ("int8", 0.3)])
def test_fewer_bits_are_near(policy, precision, near):
    sampler = SamplingModel(policy, precision)
    torch.manual_seed(0)
    sampled = draw(sampler, PROMPTS, Sampling(12), pad=0)
    exact = [log_probs_of(policy, p, ids, 1.0) for p, ids in zip(PROMPTS, sampled.ids, strict=True)]
    own = torch.tensor(sampled.log_probs)
    difference = (own - torch.tensor(exact)).abs()
    assert 0 < difference.mean() < near


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_fewer_bits_follow_the_weights_when_they_are_refreshed(policy, precision):
    sampler = SamplingModel(policy, precision)
    before = draw(sampler, PROMPTS, Sampling(8, 0), pad=0).ids
    moved = copy.deepcopy(policy)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    sampler.refresh()
    assert draw(sampler, PROMPTS, Sampling(8, 0), pad=0).ids != before
    assert (
        draw(sampler, PROMPTS, Sampling(8, 0), pad=0).ids
        == draw(SamplingModel(policy, precision), PROMPTS, Sampling(8, 0), pad=0).ids
    )
    assert not torch.equal(moved.get_input_embeddings().weight, policy.get_input_embeddings().weight)


def test_the_policy_keeps_its_attention_and_its_weights(policy):
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    draw(SamplingModel(policy, "int8"), PROMPTS, Sampling(4), pad=0)
    assert policy.config._attn_implementation == "sdpa"
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def learned(root, base, **changes):
    run = planned(root, base, max_steps=36, watch=False, curriculum=False, max_completion_length=8, **changes)
    train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
    return run


@pytest.mark.parametrize("sampler", ["exact", "bfloat16", "int8"])
def test_a_policy_learns_from_what_was_drawn(sampler, tiny_model, in_tmp):
    run = learned(in_tmp / "run", tiny_model, sampler=sampler)
    rewards = [step["reward"] for step in run.steps()]
    assert len(rewards) == 36 and not [note for note in notes(run) if "is not used" in note]
    assert sum(rewards[-12:]) / 12 > sum(rewards[:12]) / 12 + 0.05  # a mean of 96 such answers errs by about 0.01
    assert any(tensor.abs().max() > 0 for name, tensor in adapter_of(run).items() if "lora_B" in name)
    apart = [step["logp_difference"] for step in run.steps() if step.get("logp_difference") is not None]
    if sampler == "exact":
        assert apart == []
    else:  # a rounding of the format, and no more (a policy that had moved on would differ by more)
        assert len(apart) == 36 and all(0 < value < {"bfloat16": 0.1, "int8": 0.3}[sampler] for value in apart)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"repetition_penalty": 1.2}, "no other setting of generation"), ({"dtype": "bfloat16"}, "float32 weights")],
    ids=str,
)
def test_where_it_cannot_draw_generate_samples_and_it_is_said(changes, said, tiny_model, in_tmp):
    run = planned(in_tmp / "run", tiny_model, sampler="int8", watch=False, **changes)
    train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
    assert [note for note in notes(run) if "'int8' is not used" in note and said in note]
    assert len(run.steps()) == 2


def test_auto_draws_by_the_decoder_where_it_can_and_says_nothing_where_it_cannot(tiny_model, in_tmp, monkeypatch):
    seen = []
    monkeypatch.setattr(drawing, "draw", lambda *given, **options: seen.append(1) or draw(*given, **options))
    for dtype, expected in (("float32", 2), ("bfloat16", 0)):
        seen.clear()
        run = planned(in_tmp / dtype, tiny_model, watch=False, dtype=dtype)
        train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
        assert len(seen) == expected and len(run.steps()) == 2
        assert not [note for note in notes(run) if "is not used" in note]


@pytest.mark.parametrize("precision", ["own", "bfloat16", "int8"])
def test_the_decoder_is_tried_on_a_few_tokens(policy, precision):
    state = torch.get_rng_state()
    sampler = SamplingModel(policy, precision)
    assert why_not_drawable(sampler, policy, precision) is None
    with torch.no_grad():  # the decoder keeps what it was given
        policy.model.layers[0].self_attn.o_proj.weight.add_(
            5 * torch.randn(1, generator=torch.Generator().manual_seed(1))
        )
    assert "drawn otherwise" in (why_not_drawable(sampler, policy, precision) or "")
    assert torch.equal(torch.get_rng_state(), state)


def test_an_attention_that_the_decoder_does_not_know_is_found_out(policy, monkeypatch):
    monkeypatch.setattr(policy.model.layers[1].self_attn, "softcap", 3.0, raising=False)
    sampler = SamplingModel(policy)

    def capped(*given, **options):
        raise NotImplementedError("attention over shared prompts knows no softcap")

    monkeypatch.setattr("praison_agent_rl.decoding.probe.draw", capped)
    assert "knows no softcap" in (why_not_drawable(sampler, policy) or "")


def test_an_adapter_that_is_not_merged_is_not_drawn_without(policy):
    adapted = get_peft_model(policy, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    base = adapted.get_base_model()
    assert "not merged" in (why_not_drawable(SamplingModel(base), base) or "")
    adapted.merge_adapter()
    assert why_not_drawable(SamplingModel(base), base) is None


def test_answers_come_from_the_decoder_and_are_those_of_generate(policy, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    config = TrainConfig.load(need_model=False, need_data=False, max_completion_length=10, max_seq_length=128)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("a", "longer text here", "b c")]
    engine = Engine(policy, tokenizer, config, [1])
    assert engine.decoder is not None
    ours = answer_rows(engine, rows, Manner())
    plain = Engine(policy, tokenizer, config, [1])
    plain.__dict__["decoder"] = None
    assert [answer.ids for answer in ours] == [answer.ids for answer in answer_rows(plain, rows, Manner())]


# what `generate` keeps, hands out, counts with or computes faster by, and what always comes from who calls it
SHAPES_NOTHING = """
max_length max_new_tokens early_stopping do_sample use_mtp use_cache cache_implementation cache_config
max_cache_len temperature length_penalty renormalize_logits remove_invalid_values num_return_sequences output_attentions
output_hidden_states output_scores output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id
decoder_start_token_id is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
assistant_ensemble_weight speculation_type compile_config disable_compile continuous_batching_config low_memory
prefill_chunk_size _from_model_config transformers_version
"""


def test_every_setting_of_generate_is_known_to_shape_what_is_drawn_or_not_to():
    assert set(GenerationConfig().to_dict()) <= {*_SHAPING, *SHAPES_NOTHING.split()}


def test_what_a_model_alone_sets_is_named_unless_it_changes_nothing():
    asked = GenerationConfig(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
    usual = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1)
    assert declared_settings(usual, asked) == []
    idle = GenerationConfig(num_beams=1, typical_p=1.0, no_repeat_ngram_size=0, suppress_tokens=[], min_p=0.0)
    assert declared_settings(idle, asked) == []
    odd = GenerationConfig(do_sample=True, min_p=0.1, no_repeat_ngram_size=1, suppress_tokens=[5])
    assert declared_settings(odd, asked) == ["min_p", "no_repeat_ngram_size", "suppress_tokens"]
    assert declared_settings(odd, GenerationConfig(min_p=0.0, no_repeat_ngram_size=0)) == ["suppress_tokens"]


def test_a_model_that_shapes_its_own_answers_is_left_to_generate(tiny_model, in_tmp):
    folder = in_tmp / "model"
    shutil.copytree(tiny_model, folder)
    own = GenerationConfig.from_pretrained(folder)
    own.suppress_tokens = list(range(3, 40))
    own.save_pretrained(folder)
    run = planned(in_tmp / "run", folder, sampler="exact", watch=False)
    train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
    said = "'exact' is not used, but generate: it knows nothing of what the model's generation_config sets"
    assert [note for note in notes(run) if f"{said} (suppress_tokens)" in note]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config = TrainConfig.load(need_model=False, need_data=False)
    assert Engine(model, tokenizer, config, [1]).decoder is None


@pytest.mark.parametrize("decodes", [True, False], ids=["decoder", "generate"])
def test_sampled_answers_are_cut_short_by_no_setting_that_the_model_brings(policy, tiny_model, decodes):
    policy.generation_config.update(do_sample=True, top_k=3, top_p=0.5, min_p=0.5, repetition_penalty=1.5)
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(0.01)  # all 259 tokens become about as likely
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    config = TrainConfig.load(need_model=False, need_data=False, max_completion_length=1, max_seq_length=128)
    engine = Engine(policy, tokenizer, config, [1])
    if not decodes:
        engine.__dict__["decoder"] = None
    assert (engine.decoder is not None) == decodes
    answers = answer_rows(engine, [{"prompt": [{"role": "user", "content": "a"}]}] * 300, Manner(2))
    drawn = {answer.ids for answer in answers if answer.sample}
    # 300 draws of 259 tokens show 259 * (1 - exp(-300 / 259)) = 178 of them; `generate` alone would keep 50 at most
    assert 140 < len(drawn) < 215
