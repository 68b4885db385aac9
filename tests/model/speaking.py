"""A tiny model that answers: a few words, then an end, as a trained one does; made on the spot in a few seconds."""

import random
from pathlib import Path

NOUNS = ["cat", "dog", "sun", "sea", "tree", "bird", "fish", "moon"]
FILLERS = ["the", "a", "is", "was", "very", "quite", "good", "and"]
PLACES = [f"p{number}" for number in range(12)]
WORDS = [*NOUNS, *FILLERS, *PLACES, "say"]
TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}{{ '<go>' }}"


def prompts() -> list[str]:
    """Every thing to say at every place: 96 prompts."""
    return [f"{place} say {noun}" for place in PLACES for noun in NOUNS]


def rows() -> list[dict]:
    """One row a prompt."""
    return [{"prompt": [{"role": "user", "content": text}]} for text in prompts()]


def make_speaking_model(folder: Path) -> Path:
    """A model that begins with a noun, any of the eight, and goes on for a bit with words that fill."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(["<pad>", "<end>", "<go>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    _teach(model, vocabulary)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _teach(model, vocabulary: dict[str, int], steps: int = 60) -> None:
    import torch

    rng, optimiser = random.Random(0), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        batch = [_example(rng, vocabulary) for _ in range(32)]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
        labels = torch.tensor([[-100] * start + i[start:] + [-100] * (width - len(i)) for i, start in batch])
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()


def _example(rng: random.Random, vocabulary: dict[str, int]) -> tuple[list[int], int]:
    asked = rng.choice(prompts())
    length = 2 + min(int(rng.expovariate(1 / 4)), 16)  # so that much longer answers are rare, and not unknown
    rest: list[str] = []
    for _ in range(length):
        rest.append(rest[-1] if rest and rng.random() < 0.15 else rng.choice(FILLERS))  # it can say a word twice
    words = [*asked.split(), "<go>", rng.choice(NOUNS), *rest, "<end>"]
    return [vocabulary[word] for word in words], len(asked.split()) + 1
