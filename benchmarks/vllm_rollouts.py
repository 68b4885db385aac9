"""Tokens a second that a vLLM server of our own gives, with an adapter and without; prints JSON.

Prompts are as long as those of ``speed/rollouts.py``, of one prompt for all rows and of as many as rows, and new in
each call, as vLLM keeps what it has computed of a prompt.

PRAISON_AGENT_RL_VLLM=.venv-vllm/bin/vllm python benchmarks/vllm_rollouts.py [TOKENS]
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from praison_agent_rl.models import EMBEDDED, find_weights, plain_weights
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.vllm_servers.rollouts import VllmSampler, start_sampling_server

PROMPT_TOKENS = 200
SIZES = ((1, 1), (8, 1), (8, 8), (32, 1), (32, 32))
"""Rows, and distinct prompts among them."""


def save_adapter(base: str, folder: Path) -> None:
    """An adapter of rank 16 on all linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(folder)


def fresh_prompts(rng: random.Random, rows: int, distinct: int) -> list[list[int]]:
    """Prompts of tokens that no call had before."""
    made = [[rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(distinct)]
    return [made[row % distinct] for row in range(rows)]


def main() -> None:
    """Time one warm call at each size; the plain weights are asked for by the base's own name."""
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    base = plain_weights(find_weights(EMBEDDED))
    server = start_sampling_server(base, rank=16, longest=512, options=["--enforce-eager", "--dtype", "bfloat16"])
    rates: dict[str, dict[str, float]] = {"plain": {}, "lora": {}}
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, VllmSampler(server, Path(folder), base=base, run_id="b") as sampler:
        sampler.offer(0, lambda place: save_adapter(base, place))
        offered = sampler._offered  # noqa: SLF001 - only a benchmark samples from the base
        for kind, name in (("plain", base), ("lora", offered[1] if offered else base)):
            sampler._offered = (0, name)  # noqa: SLF001 - only a benchmark samples from the base
            for rows, distinct in SIZES:
                for _ in range(2):  # the second is timed
                    prompts = fresh_prompts(rng, rows, distinct)
                    start = time.perf_counter()
                    drawn = sampler.sample(prompts, Sampling(max_tokens=tokens, seed=0))
                    seconds = time.perf_counter() - start
                rates[kind][f"{rows} of {distinct}"] = round(sum(map(len, drawn.ids)) / seconds, 1)
        sampler._offered = offered  # noqa: SLF001 - only a benchmark samples from the base
    print(json.dumps({"model": EMBEDDED, "tokens": tokens, "cores": os.cpu_count(), "tokens_per_second": rates}))


if __name__ == "__main__":
    main()
