"""What is measured on: models made on the spot or embedded, and chat prompts of an exact number of tokens."""

import random
import sysconfig
from pathlib import Path
from typing import Any

from praison_agent_rl.models import EMBEDDED, find_weights, plain_weights

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<pad>"]
SIZES = {
    # 28.3 million parameters, of which 7.3 are the embedding; small enough that all cells are done within an hour
    "random-28m": {"hidden_size": 448, "intermediate_size": 1216, "num_hidden_layers": 10, "num_attention_heads": 7,
                   "num_key_value_heads": 1, "vocabulary": 16384},
    "random-tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "vocabulary": 600},
}  # fmt: skip
MODELS = (*SIZES, "smollm2")
_TEXT = (
    "answer the question briefly and say what you know of rivers salt maps bread wool ice kites rust owls glass bees "
    "tides when a tool gives a result read it first then write one line for the user"
)
_FILLERS = (" a", " the", ".", " 1", "!", "\n", "b")


def model_folder(name: str, home: Path) -> str:
    """Folder of the weights of ``name``, one of ``MODELS``; made beneath ``home`` if it is not there yet."""
    if name == "smollm2":
        return plain_weights(find_weights(EMBEDDED))
    folder = home / "models" / name
    if not (folder / "config.json").exists():
        _make(folder, dict(SIZES[name]))
    return str(folder)


def _make(folder: Path, sizes: dict[str, int]) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = sizes.pop("vocabulary")
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))  # text that is on every machine
    raw.train([str(path) for path in texts], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2]
    )
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = Qwen2Config(
        **sizes,
        vocab_size=size,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_sliding_window=False,
        **ends,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def exact_prompts(tokenizer: Any, *, tokens: int, count: int) -> list[list[dict[str, str]]]:
    """``count`` different chat prompts of exactly ``tokens`` tokens each, by the model's own template."""
    return [_exact_prompt(tokenizer, tokens, seed) for seed in range(count)]


def _exact_prompt(tokenizer: Any, tokens: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    known = _TEXT.split()
    words = [f"Case {seed}:", *(draw.choice(known) for _ in range(2 * tokens))]

    def prompt(text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": text}, {"role": "user", "content": "Tell a long story of it."}]

    def length(text: str) -> int:
        encoded = tokenizer.apply_chat_template(prompt(text), add_generation_prompt=True, return_dict=True)
        return len(encoded["input_ids"])

    low, high = 1, len(words)
    while low < high:  # the most words that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length(" ".join(words[:middle])) <= tokens else (low, middle - 1)
    text = " ".join(words[:low])
    for _ in range(200):
        if (now := length(text)) == tokens:
            return prompt(text)
        if now > tokens:
            break
        text += draw.choice(_FILLERS)
        if length(text) > tokens:
            text = text[:-1]
    raise ValueError(
        f"no prompt of exactly {tokens} tokens was found; the least that this template makes is {length('')}"
    )
