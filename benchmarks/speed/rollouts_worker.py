"""A measuring process that samples completions, by transformers' ``generate`` or by this package, each time it is told.

Nothing ends a completion before its last token, so that all sample the same number of tokens.
"""

import time
from collections.abc import Callable
from typing import Any

from .channel import Channel, measured

VARIANTS = ("generate-fp32", "generate-bf16", "ours-fp32", "ours-bf16", "ours-int8")

Sample = Callable[[], int]
"""Sample one completion for each prompt, and give back the number of tokens."""


def sample(channel: Channel, job: dict[str, Any]) -> None:
    """Sample twice, each time, and time the second; tell seconds and tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .material import exact_prompts

    engine, numbers = job["variant"].split("-")
    # ours keeps the policy's float32 weights and samples with a copy in fewer bits
    stored = torch.bfloat16 if (engine, numbers) == ("generate", "bf16") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=stored).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    distinct = job["rows"] if job["distinct"] else 1
    messages = exact_prompts(tokenizer, tokens=job["prompt_tokens"], count=distinct)
    ids = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"] for m in messages
    ]
    prompts = [list(ids[row % distinct]) for row in range(job["rows"])]
    once = (_by_generate if engine == "generate" else _by_ours)(model, prompts, job["new_tokens"], numbers)
    torch.manual_seed(0)
    channel.say(ready=True)
    while True:
        channel.wait()
        once()  # not timed: the memory of this process grew cold while the others had their turns
        began = time.perf_counter()
        tokens = once()
        seconds = time.perf_counter() - began
        channel.say(seconds=seconds, tokens=tokens)


def _by_generate(model: Any, prompts: list[list[int]], new_tokens: int, numbers: str) -> Sample:
    import torch

    settings = _endless(model, new_tokens)
    ids = torch.tensor(prompts)

    def once() -> int:
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return int(output.size(0) * (output.size(1) - ids.size(1)))

    return once


def _by_ours(model: Any, prompts: list[list[int]], new_tokens: int, numbers: str) -> Sample:
    """This package's sampler, of which all that is known here is in this function."""
    from praison_agent_rl.decoding.loop import draw
    from praison_agent_rl.decoding.weights import SamplingModel
    from praison_agent_rl.rollouts import Sampling

    sampler = SamplingModel(model, {"fp32": "own", "bf16": "bfloat16", "int8": "int8"}[numbers])  # type: ignore[arg-type]
    sampler.refresh()
    sampling = Sampling(max_tokens=new_tokens)  # no token ends a completion
    return lambda: sum(map(len, draw(sampler, prompts, sampling, pad=0).ids))


def _endless(model: Any, new_tokens: int) -> Any:
    from transformers import GenerationConfig

    model.generation_config.eos_token_id = None
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        eos_token_id=None,
    )


if __name__ == "__main__":
    measured(sample)
