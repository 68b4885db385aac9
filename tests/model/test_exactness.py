"""A step that computes shared prompts once gives TRL's numbers on every family of models, or is known not to.

Models are random, of two layers of 32 numbers. A difference is the largest of a tensor over the largest of TRL's.
"""

import contextlib
import copy
import os
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from praison_agent_rl.data import to_dataset
from praison_agent_rl.rewards import Reward
from praison_agent_rl.shareable import cache_name, why_not_shareable, why_not_trainable
from praison_agent_rl.training import exactness
from praison_agent_rl.training.exactness import why_measured_otherwise, why_not_shared
from praison_agent_rl.training.grpo import PolicyTrainer

DEVICE = os.environ.get("PRAISON_AGENT_RL_DEVICE", "cpu")  # as tests/gpu/run.sh sets it
FLOAT32 = 1e-5 if DEVICE == "cpu" else 1e-4  # other kernels for other shapes: other orders of summing
BFLOAT16 = 0.05  # 6 roundings of 8 bits (2**-7): each layer rounds, and a gradient sums over all tokens
LONGEST = 40
SIZES = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SMALL_HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.0}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
REACH = {"original_max_position_embeddings": 16}
OLD_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


def tiny(config, **changes):
    """A random model of the family ``config``, as it is when it is trained."""
    torch.manual_seed(0)
    described = getattr(transformers, f"{config}Config")(**{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(described, dtype=torch.float32)


def trainer_of(model, tokenizer, tmp_path, *, share=True, longest=LONGEST, lora=None, **changes):
    """A trainer whose adapter already does something."""
    arguments = {
        "num_generations": 2, "per_device_train_batch_size": 6, "max_completion_length": 9, "report_to": "none",
        "bf16": False, "use_cpu": DEVICE == "cpu", "disable_dropout": True, "save_strategy": "no", "disable_tqdm": True,
        "gradient_checkpointing": False, "remove_unused_columns": False, "logging_steps": 1,
    }  # fmt: skip
    trainer = PolicyTrainer(
        model=model,
        reward_funcs=[Reward(odd_tokens, "odd")],
        args=GRPOConfig(str(tmp_path), **{**arguments, **changes}),
        train_dataset=to_dataset([{"prompt": [{"role": "user", "content": "x" * n}]} for n in range(1, 9)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **(lora or {})}),
        share=share,
        longest=longest,
    )
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # set by train()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter)
    return trainer


def odd_tokens(completion_ids, **_):
    return [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]


SYSTEM = list(range(40, 52))
PROMPTS = {
    "one length": [[*SYSTEM, 70], [*SYSTEM, 71], [*SYSTEM, 72]],
    "mixed lengths": [[*SYSTEM, 70], [*SYSTEM, *range(71, 80)], [*SYSTEM, 75, 76]],
    "nothing in common": [[70, 71, 72], list(range(80, 97)), [90, 91]],
    "one prompt": [[*SYSTEM, 70, 71, 72]],
}
MIXED = PROMPTS["mixed lengths"]
LENGTHS = [5, 9, 1, 7, 4, 3]


def batch_of(prompts, lengths, *, masked=(), old=False, reference=False, zeros=()):
    """Inputs of TRL's loss: as many completions for each prompt, of ``lengths`` tokens; ``masked`` rows count nothing.

    Where rows ended early they are padded on the right, and prompts are padded on the left.
    """
    generator = torch.Generator().manual_seed(2)
    size = len(lengths) // len(prompts)
    before, after = max(map(len, prompts)), max(lengths)
    rows = range(len(lengths))
    gaps = [before - len(prompts[row // size]) for row in rows]
    prompt_ids = torch.tensor([[2] * gaps[row] + prompts[row // size] for row in rows])
    completion_ids = torch.randint(3, 259, (len(lengths), after), generator=generator)
    completion_mask = torch.tensor([[int(place < length) for place in range(after)] for length in lengths])
    completion_ids = completion_ids.masked_fill(completion_mask == 0, 2)
    completion_mask[list(masked)] = 0  # as mask_truncated_completions does
    advantages = torch.linspace(-1.5, 1.3, len(lengths))  # none is 0
    advantages[list(zeros)] = 0
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.tensor([[int(place >= gap) for place in range(before)] for gap in gaps]),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages,
        "num_items_in_batch": completion_mask.sum(),
    }  # fmt: skip
    near = -5 + 0.1 * torch.randn(completion_ids.shape, generator=generator)
    return {
        **inputs,
        **({"old_per_token_logps": near} if old else {}),
        **({"ref_per_token_logps": near} if reference else {}),
    }


def computed(trainer, inputs):
    """Log-probabilities, entropies, loss and gradients of one batch, as the trainer computes them."""
    seen = {}
    score = trainer._get_per_token_logps_and_entropies

    def keep(*given, **options):
        seen["log-probabilities"], seen["entropy"], aux = score(*given, **options)
        return seen["log-probabilities"], seen["entropy"], aux

    inputs = {name: tensor.to(trainer.accelerator.device) for name, tensor in inputs.items()}
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._get_per_token_logps_and_entropies = keep
    try:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, dict(inputs))
    finally:
        del trainer._get_per_token_logps_and_entropies
    loss.backward()
    kept = inputs["completion_mask"].bool()
    gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return {name: tensor.detach()[kept] for name, tensor in seen.items()} | {"loss": loss.detach()} | gradients


def differences(trainer, inputs):
    """The largest relative difference of each number between our step and TRL's, by name."""
    reason = trainer.not_shared_because
    assert reason is None
    ours = computed(trainer, inputs)
    trainer.not_shared_because = "for this test"
    theirs = computed(trainer, inputs)
    trainer.not_shared_because = reason
    assert ours.keys() == theirs.keys()
    assert all(bool((tensor != 0).any()) for tensor in theirs.values())
    return {name: float((ours[name] - wanted).abs().max() / wanted.abs().max()) for name, wanted in theirs.items()}


def largest(found):
    name = max(found, key=found.get)
    return found[name], name


# --- families ---------------------------------------------------------------------------------------------------------

SHORT_AND_FULL = {**SMALL_HEAD, "layer_types": ["sliding_attention", "full_attention"]}
GPT_OSS = {**SMALL_HEAD, **rope("default"), "num_local_experts": 4, "router_aux_loss_coef": 0.0}


def longrope(reach):
    return {
        **rope("longrope", factor=256 / reach, short_factor=[1.0] * 4, long_factor=[2.0] * 4),
        "original_max_position_embeddings": reach,
    }


EXACT = {
    "llama": ("Llama", {}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama3 rope": ("Llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **REACH)),
    "yarn": ("Llama", rope("yarn", factor=16.0, **REACH)),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SMALL_HEAD),
    "smollm3": ("SmolLM3", {}),
    "gemma": ("Gemma", SMALL_HEAD),
    "gemma3 within its window": ("Gemma3Text", {**SHORT_AND_FULL, "sliding_window": LONGEST}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral within its window": ("Mistral", {"sliding_window": LONGEST}),
    "phi": ("Phi", {}),  # its head has a bias
    "phi3": ("Phi3", {}),
    "phi3 within its rope": ("Phi3", longrope(LONGEST)),
    "olmo2": ("Olmo2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "router_aux_loss_coef": 0.0}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "gpt-oss within its window": ("GptOss", {**GPT_OSS, "sliding_window": LONGEST}),  # with attention sinks
    "deepseek": ("DeepseekV3", LATENT),
}


@pytest.mark.parametrize("family", EXACT)
def test_every_number_of_a_step_is_that_of_trl(family, tokenizer, tmp_path):
    name, changes = EXACT[family]
    trainer = trainer_of(tiny(name, **changes), tokenizer, tmp_path)
    assert trainer.not_shared_because is None
    inputs = batch_of(MIXED, LENGTHS)
    found, where = largest(differences(trainer, inputs))
    print(f"{family}: {found:.1e} ({where})")
    assert found < FLOAT32, where


OTHERWISE = {
    "gemma2": (
        "Gemma2",
        {**SHORT_AND_FULL, "sliding_window": LONGEST},
        "rescales its logits (final_logit_softcapping)",
    ),
    "gemma2 with a shorter window": (
        "Gemma2",
        {**SHORT_AND_FULL, "final_logit_softcapping": None, "sliding_window": LONGEST - 1},
        "slides over a window of 39 tokens",
    ),
    "gemma3": ("Gemma3Text", {**SHORT_AND_FULL, "sliding_window": 8}, "slides over a window of 8 tokens"),
    "mistral": ("Mistral", {"sliding_window": 8}, "slides over a window of 8 tokens"),
    "gpt-oss": ("GptOss", {**GPT_OSS, "sliding_window": 8}, "slides over a window of 8 tokens"),
    "phi3 beyond its rope": ("Phi3", longrope(16), "(longrope) changes with the length of a call beyond 16 tokens"),
    "dynamic rope": (
        "Llama",
        {"max_position_embeddings": 16, **rope("dynamic", factor=4.0)},
        "(dynamic) changes with the length of a call beyond 16 tokens",
    ),
    "gpt2": ("GPT2", OLD_NAMES, "embeds more than its tokens (wpe), such as learned positions"),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}, "embeds more than its tokens (decoder.embed_positions)"),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}, "its decoder takes no position_ids"),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "its decoder takes no position_ids"),
    "rwkv": ("Rwkv", {}, "its decoder takes no position_ids"),
    "granite": ("Granite", {"logits_scaling": 8.0}, "it rescales its logits (logits_scaling)"),
    "cohere": ("Cohere", {}, "it rescales its logits (logit_scale)"),
    "mamba": ("Mamba", {}, "do not attend to everything before them (linear_attention)"),
    "jamba": ("Jamba", {"num_experts": 1}, "linear_attention"),
    "falcon-h1": ("FalconH1", {}, "do not attend to everything before them (hybrid)"),
    "qwen3-next": ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "do not attend to everything before them (conv"),
    "llama4": ("Llama4Text", {"num_local_experts": 2}, "chunked_attention"),
}


@pytest.mark.parametrize("family", OTHERWISE)
def test_a_family_that_is_not_exact_is_known_and_why(family):
    name, changes, reason = OTHERWISE[family]
    assert reason in why_not_shareable(tiny(name, **changes), longest=LONGEST)


@pytest.mark.parametrize("family", ["gemma3 within its window", "mistral within its window", "phi3 within its rope"])
def test_what_depends_on_length_is_exact_only_where_none_is_longer(family):
    name, changes = EXACT[family]
    model = tiny(name, **changes)
    assert why_not_shareable(model, longest=LONGEST) is None
    assert why_not_shareable(model, longest=LONGEST + 1) and why_not_shareable(model)


def test_a_window_that_is_switched_off_is_no_window():
    assert why_not_shareable(tiny("Qwen2", sliding_window=4, use_sliding_window=False)) is None
    model = tiny("Qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=0)
    assert "window of 4" in why_not_shareable(model)


def test_a_model_that_takes_pictures_is_not_shared():
    text = {name: value for name, value in {**SIZES, **SMALL_HEAD}.items() if not name.endswith("token_id")}
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sight |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4)
    assert why_not_shareable(transformers.Gemma3ForConditionalGeneration(config)) == "it takes more than text"


def elsewhere(model):
    model.lm_head = model.lm_head.to("meta")


def without_a_head(model):
    model.get_output_embeddings = lambda: None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.config, "_attn_implementation", "flash_attention_2"), "takes no mask with a gap"),
        (lambda model: setattr(model.config, "use_bidirectional_attention", True), "looks ahead"),
        (lambda model: setattr(model.config, "lm_head_multiplier", 0.5), "rescales its logits (lm_head_multiplier)"),
        (lambda model: setattr(model, "base_model_prefix", "gone"), "not a decoder with a language-model head"),
        (lambda model: setattr(model, "is_quantized", True), "quantised"),
        (without_a_head, "not a decoder with a language-model head"),
        (elsewhere, "on several devices"),
    ],
)
def test_a_llama_that_was_changed_is_not_shared(change, reason):
    model = tiny("Llama")
    assert why_not_shareable(model) is None
    change(model)
    assert reason in why_not_shareable(model)


def test_weights_of_4_bits_are_the_same_numbers_in_every_batch():
    model = tiny("Llama")
    model.is_quantized = model.is_loaded_in_4bit = True  # as transformers marks it
    assert why_not_shareable(model) is None


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Llama", {"attention_dropout": 0.1}, "attention_dropout (0.1) of 'model.layers.0.self_attn' is random"),
        ("Phi", {"resid_pdrop": 0.1}, "the dropout 'model.layers.0.resid_dropout' (0.1) is random"),
        ("Mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}, "jitter_noise (0.1)"),
    ],
)
def test_what_is_random_in_training_is_found_in_the_model(family, changes, reason):
    assert why_not_trainable(tiny(family)) is None
    assert reason in why_not_trainable(tiny(family, **changes))


def test_a_cache_is_given_by_the_name_that_the_decoder_takes():
    def new(input_ids, cache, past_key_values=None): ...
    def old(input_ids, past_key_values): ...

    assert cache_name(SimpleNamespace(forward=new)) == "cache"
    assert cache_name(SimpleNamespace(forward=old)) == "past_key_values"
    taken = cache_name(tiny("Llama").base_model)
    assert taken in ("cache", "past_key_values")


# --- settings of a run ------------------------------------------------------------------------------------------------

UNSHARED = [
    ({"lora": {"lora_dropout": 0.1}, "disable_dropout": False}, "lora_dropout"),
    ({"gradient_checkpointing": True}, "gradient checkpointing"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
]


@pytest.mark.parametrize(("changes", "reason"), UNSHARED)
def test_a_setting_by_which_the_numbers_would_be_others_is_known(changes, reason, tokenizer, tmp_path):
    assert reason in trainer_of(tiny("Llama"), tokenizer, tmp_path, **changes).not_shared_because


def test_a_router_that_is_trained_to_balance_needs_every_prompt(tokenizer, tmp_path):
    trainer = trainer_of(tiny("Mixtral", num_local_experts=4, router_aux_loss_coef=0.02), tokenizer, tmp_path)
    assert "router_aux_loss_coef" in trainer.not_shared_because
    found = computed(trainer, batch_of(PROMPTS["one length"], [3, 2, 4, 1, 5, 2]))  # and TRL's own path goes on
    assert torch.isfinite(found["loss"])


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = trainer_of(tiny("Llama"), tokenizer, tmp_path_factory.mktemp("llama"))
    torch.set_num_threads(threads)
    return made


class Seen:
    """A trainer of which some attributes are others."""

    def __init__(self, trainer, **others):
        self.__dict__.update({**vars(trainer), **others})
        self.__class__ = type("Seen", (type(trainer),), {})


@pytest.mark.parametrize(
    ("accelerator", "reason"),
    [
        ({"num_processes": 1, "distributed_type": DistributedType.DEEPSPEED}, "own forward (DEEPSPEED)"),
        ({"num_processes": 1, "distributed_type": DistributedType.FSDP}, "own forward (FSDP)"),
    ],
)
def test_weights_that_are_spread_over_processes_are_not_shared(llama, accelerator, reason):
    spread = Seen(llama, accelerator=SimpleNamespace(**accelerator))
    assert reason in why_not_shared(spread, llama._policy(), longest=None)


def test_learned_tokens_before_a_prompt_are_known(llama):
    learned = get_peft_model(tiny("Llama"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    assert "learned tokens" in why_not_shared(Seen(llama, model=learned), llama._policy(), longest=None)


def test_a_model_whose_own_code_does_something_else_is_found_by_measuring(tokenizer, tmp_path):
    class Counting(transformers.LlamaModel):
        """Adds to each state the place of its token in the call, which no configuration tells."""

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, **more):
            out = super().forward(input_ids, attention_mask, position_ids, cache, use_cache=use_cache, **more)
            out.last_hidden_state = out.last_hidden_state + 0.01 * torch.arange(input_ids.size(1))[None, :, None]
            return out

    model = tiny("Llama")
    model.model.__class__ = Counting
    reason = trainer_of(model, tokenizer, tmp_path).not_shared_because
    assert "a few completions scored otherwise than by the plain computation" in reason


def test_a_model_that_refuses_to_be_measured_is_not_shared(tokenizer, tmp_path):
    class Refusing(transformers.LlamaModel):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, **more):
            if use_cache:
                raise ValueError("no cache here")
            return super().forward(input_ids, attention_mask, position_ids, use_cache=False)

    model = tiny("Llama")
    model.model.__class__ = Refusing
    assert "ValueError: no cache here" in trainer_of(model, tokenizer, tmp_path).not_shared_because


def test_measuring_draws_no_random_numbers_and_allows_for_rounding():
    def scored(by):
        return lambda ids, mask, length: (torch.full((6, length), -10.0) + by, torch.ones(6, length))

    before = torch.get_rng_state()
    told = {"vocabulary": 50, "device": torch.device("cpu")}
    assert why_measured_otherwise(scored(5e-4), scored(0), dtype=torch.float32, **told) is None
    assert "5.0e-03" in why_measured_otherwise(scored(0.05), scored(0), dtype=torch.float32, **told)
    assert why_measured_otherwise(scored(0.5), scored(0), dtype=torch.bfloat16, **told) is None
    assert why_measured_otherwise(scored(1.5), scored(0), dtype=torch.bfloat16, **told)
    assert why_measured_otherwise(scored(float("nan")), scored(0), dtype=torch.bfloat16, **told)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_measured_has_prompts_of_every_kind():
    ids, mask = exactness._probe(7)
    assert ids.min() >= 0 and ids.max() < 7
    prompts = [row[kept].tolist() for row, kept in zip(ids[:, :9], mask[:, :9].bool(), strict=True)]
    assert [len(prompt) for prompt in prompts] == [3, 3, 9, 9, 6, 6]
    assert mask[:, 9:].sum(1).tolist() == [1, 6, 4, 2, 5, 3]
    _, wide = exactness._probe(259)
    assert torch.equal(mask, wide)


# --- batches and settings of a step -----------------------------------------------------------------------------------

BATCHES = {
    "prompts of one length": (PROMPTS["one length"], LENGTHS, {}),
    "prompts with nothing in common": (PROMPTS["nothing in common"], LENGTHS, {}),
    "one group of eight": (PROMPTS["one prompt"], [3, 1, 8, 2, 7, 7, 5, 4], {}),
    "groups of four": (MIXED, [(5 * n) % 9 + 1 for n in range(12)], {}),
    "all completions end at once": (MIXED, [1] * 6, {}),
    "some that were cut do not count": (MIXED, [5, 9, 1, 9, 4, 9], {"masked": [1, 3, 5]}),
    "an older policy sampled them": (MIXED, LENGTHS, {"old": True}),
    "a group without a signal": (MIXED, LENGTHS, {"zeros": [2, 3]}),
    "one without a signal, of an older policy": (MIXED, LENGTHS, {"zeros": [0, 3], "old": True}),
    "without a signal and cut": (MIXED, [5, 9, 1, 9, 4, 9], {"zeros": [2, 3], "masked": [3, 5]}),
}


@pytest.mark.parametrize("case", BATCHES)
def test_every_number_is_that_of_trl_whatever_the_batch(case, llama):
    prompts, lengths, options = BATCHES[case]
    found = differences_of_loss(llama, batch_of(prompts, lengths, **options))
    assert largest(found)[0] < FLOAT32, largest(found)


def differences_of_loss(trainer, inputs):
    """As ``differences``; where rows are left out, without what is not computed of them."""
    of_tokens = {"log-probabilities", "entropy"} if (inputs["advantages"] == 0).any() else set()
    return {name: value for name, value in differences(trainer, inputs).items() if name not in of_tokens}


STEPS = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")},
    "a colder policy": {"temperature": 0.7},
    "by sequence": {"importance_sampling_level": "sequence"},
    "accumulated": {"gradient_accumulation_steps": 2},
    "a reference": {"beta": 0.1},
    "an entropy bonus": {"entropy_coef": 0.1},
    "the least certain tokens": {"top_entropy_quantile": 0.5},
    "a head in full precision": {"cast_lm_head_to_fp32": True},
}


@pytest.mark.parametrize("case", STEPS)
def test_loss_and_gradients_are_those_of_trl_whatever_the_loss(case, tokenizer, tmp_path):
    trainer = trainer_of(tiny("Llama"), tokenizer, tmp_path, **STEPS[case])
    options = {"old": True, "reference": "beta" in STEPS[case], "zeros": [2, 3]}
    inputs = batch_of(MIXED, LENGTHS, **options)
    found = differences_of_loss(trainer, inputs)
    assert largest(found)[0] < FLOAT32, largest(found)


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
@pytest.mark.parametrize("in_full", [False, True])
def test_with_fewer_bits_a_step_is_that_of_trl_to_a_few_roundings(weights, in_full, tokenizer, tmp_path):
    model = tiny("Llama").to(getattr(torch, weights))
    trainer = trainer_of(copy.deepcopy(model), tokenizer, tmp_path, bf16=True, cast_lm_head_to_fp32=in_full)
    inputs = batch_of(MIXED, LENGTHS)
    assert largest(differences(trainer, inputs))[0] < BFLOAT16
    exact = computed(trainer_of(copy.deepcopy(model).float(), tokenizer, tmp_path), inputs)
    errors = []
    for reason in (None, "for this test"):
        trainer.not_shared_because = reason
        found = computed(trainer, inputs)
        errors.append(sum(float((found[n] - exact[n]).norm() / exact[n].norm()) for n in exact) / len(exact))
    assert 0 < errors[0] < 1.2 * errors[1]  # no further from the truth than TRL is


# --- completions without a signal -------------------------------------------------------------------------------------


def rows_run(trainer, monkeypatch):
    """Numbers of rows that were scored, with and without gradients, as they come."""
    rows, score = [], trainer._score

    def counted(ids, mask, length):
        rows.append((len(ids), torch.is_grad_enabled()))
        return score(ids, mask, length)

    monkeypatch.setattr(trainer, "_score", counted)
    return rows


def entropy_logged(trainer):
    return trainer._metrics["train"]["entropy"][-1]


def test_completions_without_an_advantage_are_not_run_and_their_share_is_told(llama, monkeypatch):
    rows = rows_run(llama, monkeypatch)
    inputs = batch_of(MIXED, LENGTHS, zeros=[0, 1, 4])
    computed(llama, inputs)
    assert rows == [(3, True)]
    assert llama._metrics["train"]["skipped"][-1] == 0.5
    loud = {name: value[[2, 3, 5]] for name, value in inputs.items() if name != "num_items_in_batch"}
    seen = entropy_logged(llama)
    computed(llama, {**loud, "num_items_in_batch": inputs["num_items_in_batch"]})
    assert seen == pytest.approx(entropy_logged(llama), rel=1e-6)  # the mean of those that were run
    assert llama._metrics["train"]["skipped"][-1] == 0


def test_a_step_without_any_signal_runs_nothing_backward_and_has_gradients_of_zero(llama, monkeypatch):
    rows = rows_run(llama, monkeypatch)
    inputs = batch_of(MIXED, LENGTHS, zeros=range(6))
    ours, seen = computed(llama, inputs), entropy_logged(llama)
    assert rows == [(6, False)]  # for the entropy
    assert llama._metrics["train"]["skipped"][-1] == 1
    monkeypatch.setattr(llama, "not_shared_because", "for this test")
    theirs = computed(llama, inputs)
    assert seen == pytest.approx(entropy_logged(llama), rel=1e-5)
    assert ours.keys() == theirs.keys()  # none is None: Adam goes on by momentum, as in TRL
    assert all(bool((found == 0).all()) for name, found in ours.items() if "lora" in name or name == "loss")


@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}])
def test_nothing_is_left_out_where_more_than_the_advantage_counts(changes, tokenizer, tmp_path, monkeypatch):
    trainer = trainer_of(tiny("Llama"), tokenizer, tmp_path, **changes)
    rows = rows_run(trainer, monkeypatch)
    inputs = batch_of(MIXED, LENGTHS, zeros=[0, 1], reference=True)
    computed(trainer, inputs)
    assert rows == [(6, True)]
    assert trainer._metrics["train"]["skipped"] == [0.0]


def test_nothing_is_left_out_of_a_trial(llama, monkeypatch):
    rows = rows_run(llama, monkeypatch)
    llama.model.eval()
    with torch.no_grad(), contextlib.suppress(ZeroDivisionError):
        inputs = batch_of(MIXED, LENGTHS, zeros=[0, 1])
        llama.compute_loss(llama.model, {name: tensor.to(llama.model.device) for name, tensor in inputs.items()})
    assert rows == [(6, False)]


@pytest.mark.parametrize("prompts", ["one length", "mixed lengths"])
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_the_reference_and_the_older_policy_are_scored_as_trl_scores_them(prompts, beta, tokenizer, tmp_path):
    # what TRL asks for while it samples: without gradients, in chunks, and with the adapter switched off
    trainer = trainer_of(tiny("Qwen2"), tokenizer, tmp_path, beta=beta)
    inputs = batch_of(PROMPTS[prompts], [5, 9, 1, 7, 4, 3])
    inputs = {name: tensor.to(trainer.accelerator.device) for name, tensor in inputs.items()}
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    kept, found = inputs["completion_mask"].bool(), []
    for reason in (None, "for this test"):
        trainer.not_shared_because = reason
        with torch.no_grad(), trainer.model.disable_adapter() if beta else contextlib.nullcontext():
            log_probs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 9, batch_size=4)
        found.append(log_probs[kept])
    assert float((found[0] - found[1]).abs().max() / found[1].abs().max()) < FLOAT32
