"""Fixtures that all tests share: a quiet offline environment, fake servers, and a tiny model made on the spot."""

import os

# before torch is imported anywhere: see "OMP_WAIT_POLICY" in praison_agent_rl/child.py
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("DO_NOT_TRACK", "true")

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import FakeServer, garbage_collected_only_afterwards

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def server_a() -> Iterator[FakeServer]:
    with FakeServer("A") as server:
        yield server


@pytest.fixture
def server_b() -> Iterator[FakeServer]:
    with FakeServer("B") as server:
        yield server


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is an empty temporary one, and the cache of converted models is inside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRAISON_AGENT_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def agents_around(monkeypatch: pytest.MonkeyPatch, in_tmp: Path, server_a: FakeServer) -> Iterator[None]:
    """What the agents find around them names server A and its key, and nothing else of a provider."""
    for name in [n for n in os.environ if n.startswith(("OPENAI_", "OLLAMA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_BASE_URL", server_a.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key-a")
    with garbage_collected_only_afterwards():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order, so that two equal runs are equal bit for bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random chat model of 0.1 million parameters with tied embeddings, tokenizer and chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an output head of its own."""
    return make_tiny_model(tmp_path_factory.mktemp("untied") / "model", tied=False)


def make_tiny_model(folder: Path, *, tied: bool) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # one token per byte: nothing to train, and every text has an encoding
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    vocabulary = {token: place for place, token in enumerate([*special, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.3,  # so that logits differ enough for a random model to prefer some tokens
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
