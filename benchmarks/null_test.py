"""How often the gate promotes where there is nothing to promote, and where there is; prints Markdown.

Run: ``python benchmarks/null_test.py [--seeds 100] [--real 10]``; about five minutes on two cores, and five more with
``--real 10``. A random chat model of 0.1 million parameters takes the place of the trained one, once for each seed:

- no gain: its weights are disturbed at random. It answers differently, and the rewards (random numbers, a constant, a
  meaningless number made of prompt and answer) know no better or worse.
- a planted gain: one letter is made likelier by its row of the output head, and an answer that holds it earns 1.

Both sides answer 40 prompts, one greedy and one sampled answer each, by the engine of the package, and `judge` decides.
With ``--real`` the package trains: whole runs, with the random and with the constant reward. Training refuses a reward
that tells no answers apart.
"""

import argparse
import contextlib
import hashlib
import io
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from praison_agent_rl import planning
from praison_agent_rl.answering import RawAnswer, answer_prompts
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.evaluation import compare, score_answers
from praison_agent_rl.gate import Evidence, judge
from praison_agent_rl.improvement import carry_out
from praison_agent_rl.intervals import differences
from praison_agent_rl.pairing import by_prompt, paired, total_of
from praison_agent_rl.records import Answer, Comparison, GateRules, Plan, Verdict
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import now, read_record

PROMPTS = 40
LETTER = "e"
DISTURBANCE = 0.1
"""Standard deviation of what is added to the weights, in standard deviations of each tensor."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STATUSES = ("undecided", "not better", "worse", "guard broken", "refused")
RowsScorer = Callable[..., list[float]]


def make_model(folder: Path) -> Path:
    """A random chat model with one token a byte."""
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    vocabulary = {token: at for at, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=special[0], eos_token=special[1], pad_token=special[2]
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
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def changed_model(base: Path, folder: Path, seed: int, *, gain: float) -> Path:
    """The base with its weights disturbed at random, and its letter likelier by about ``gain`` nats."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    model = AutoModelForCausalLM.from_pretrained(base)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            size = DISTURBANCE * float(weights.std()) if weights.dim() > 1 else 0.0
            weights += size * torch.randn(weights.shape, generator=noise)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
        prompts = tokenizer([row["prompt"][0]["content"] for row in rows(PROMPTS)], padding=True, return_tensors="pt")
        state = model.model(**prompts).last_hidden_state.mean((0, 1))
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(LETTER)] += gain * state / (state @ state)
    model.save_pretrained(folder)
    return folder


def rows(count: int) -> list[dict[str, Any]]:
    """Prompts of different lengths."""
    return [
        {"prompt": [{"role": "user", "content": f"Say {'very ' * (i % 7)}much of number {i}."}]} for i in range(count)
    ]


def random_numbers(seed: int) -> RowsScorer:
    """A reward that throws dice."""
    dice = random.Random(seed)
    return lambda completions, **_: [dice.random() for _ in completions]


def constant(seed: int) -> RowsScorer:
    """A reward that likes everything alike."""
    return lambda completions, **_: [0.5] * len(completions)


def meaningless(seed: int) -> RowsScorer:
    """A reward that gives each answer to each prompt a fixed number that has no meaning."""

    def number(prompt: Any, text: str) -> float:
        digest = hashlib.sha256(f"{seed}\0{prompt}\0{text}".encode(errors="replace")).digest()
        return int.from_bytes(digest[:4], "big") / 2**32

    return lambda prompts, completions, **_: [number(*pair) for pair in zip(prompts, completions, strict=True)]


def has_letter(seed: int) -> RowsScorer:
    """A reward for answers that hold the letter."""
    return lambda completions, **_: [float(LETTER in text) for text in completions]


NULL = {"random numbers": random_numbers, "a constant": constant, "a meaningless number": meaningless}


def verdict_of(sides: Sequence[Sequence[RawAnswer]], reward: RowsScorer) -> tuple[Verdict, list[list[Answer]]]:
    """What the gate says of scored answers of base and candidate."""
    scored = [score_answers(side, rows(PROMPTS), [Reward(reward, "reward", 1.0)]) for side in sides]
    evidence = Evidence(comparison=compare(*scored), base=scored[0], new=scored[1])
    return judge(evidence, GateRules()), scored


def plan_of(base: Path, seed: int) -> Plan:
    """How both sides are asked."""
    config = {"max_completion_length": 24, "max_seq_length": 256, "seed": seed, "temperature": 1.0}
    return Plan(
        base=str(base), config=config, rewards=[], device="cpu", notes=[], libraries={}, created=now(), samples=2
    )


def line(name: str, outcomes: Counter[str], seeds: int) -> str:
    """A row of the table."""
    shares = [f"{100 * outcomes[what] / seeds:.3g} %" for what in ("promoted", "above zero")]
    counts = [str(outcomes[status]) for status in STATUSES]
    return f"| {' | '.join([name, str(seeds), *shares, *counts])} |"


def disturbed(base: Path, folder: Path, seeds: int, gain: float) -> None:
    """Print what the gate says of models that are not better, and of ones that are."""
    found = {name: Counter[str]() for name in [*NULL, "planted"]}
    effects = []
    for seed in range(seeds):
        plan = plan_of(base, seed)
        of_base = answer_prompts(str(base), rows(PROMPTS), plan)
        same, better = (
            answer_prompts(str(changed_model(base, folder, seed, gain=size)), rows(PROMPTS), plan) for size in (0, gain)
        )
        for name, made in NULL.items():
            verdict, scored = verdict_of((of_base, same), made(seed))
            found[name].update([verdict.status, *["above zero"] * compare(*scored).better])
        verdict, scored = verdict_of((of_base, better), has_letter(seed))
        found["planted"].update([verdict.status, *["above zero"] * compare(*scored).better])
        gains = differences(*paired(*(by_prompt(side, total_of) for side in scored)))
        effects.append((by_prompt(scored[0], total_of).values(), gains.mean(), gains.std(ddof=1)))
    for name in NULL:
        print(line(f"no gain, {name}", found[name], seeds))
    before = sum(sum(scores) / PROMPTS for scores, _, _ in effects) / seeds
    size, spread = (sum(effect[place] for effect in effects) / seeds for place in (1, 2))
    name = f"gain from {before:.2f} to {before + size:.2f} ({size / spread:.2f} deviations of the prompts' gains)"
    print(line(name, found["planted"], seeds))


def trained(base: Path, root: Path, runs: int) -> None:
    """Print what the gate says after whole runs of the package."""
    for name in ("random numbers", "a constant"):
        outcomes: Counter[str] = Counter()
        for seed in range(runs):
            config = {
                "model_name": str(base),
                "dataset": [{"prompt": row["prompt"]} for row in rows(8 + PROMPTS)],
                "held_out": PROMPTS,
                "reward_funcs": [NULL[name](seed)],
                "num_generations": 4,
                "per_device_train_batch_size": 8,
                "max_completion_length": 24,
                "max_seq_length": 256,
                "learning_rate": 1e-2,
                "max_steps": 5,
                "seed": seed,
            }
            draft = planning.draft_from_config(config)
            run = planning.write_run(draft, root / f"{name}-{seed}")
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # the trainer prints each step
                    carry_out(draft, run, lambda event: None)
            except TrainingFailed as refusal:
                outcomes["refused"] += "had a signal" in str(refusal)
                continue
            verdict = read_record(run.verdict_file, Verdict)
            comparison = read_record(run.comparison_file, Comparison)
            outcomes.update([verdict.status, *["above zero"] * comparison.better])
            print(seed, verdict.text, file=sys.stderr, flush=True)
        print(line(f"trained on {name}", outcomes, runs), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--gain", type=float, default=2.5, help="nats by which the letter is made likelier")
    parser.add_argument("--real", type=int, default=0, help="runs with real training, of each of two rewards")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for two
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    columns = ("candidate", "runs", "promoted", "interval above zero", *STATUSES)
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        base = make_model(Path(folder) / "base")
        if options.seeds:
            disturbed(base, Path(folder) / "changed", options.seeds, options.gain)
        if options.real:
            trained(base, Path(folder) / "runs", options.real)


if __name__ == "__main__":
    main()
