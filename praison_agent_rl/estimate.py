"""Estimate what a run will take in memory, disk and time, from sizes alone: no weights are loaded."""

import math
import os
import shutil
from pathlib import Path

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.records import Record
from praison_agent_rl.weight_files import read_config, read_header

_CPU_FLOPS_PER_CORE = 40e9
"""float32 multiply-adds of torch on one core of an AMD EPYC with AVX-512, measured in a 280 x 576 x 1536 product."""
_GPU_FLOPS = 100e12
"""bfloat16 on one data-centre GPU at a fifth to a third of its peak, as small batches reach."""
_BYTES_AROUND_WEIGHTS = 2 * 2**30
"""What torch, transformers and TRL take before any weight is there: 1.2 to 1.6 GB resident, rounded up."""


_BYTES_AROUND_ADAPTER = 16 * 2**20
"""The tokenizer that lies beside each adapter: up to 12 MB with a vocabulary of 150 000 (Qwen2.5)."""
_CONTROL_PROMPTS = 40
"""Asked besides the held-out ones (``control``)."""
LEAST_DISK = 64 * 2**20
"""Room that even the smallest run is to have: events, logs, answers and the report."""


class Estimate(Record):
    """What a run is expected to take; within a factor of about two."""

    parameters: int | None
    """Parameters of the model; None where its files are not here to be read."""
    memory_bytes: int | None
    disk_bytes: int | None
    seconds: float | None
    steps: int


def estimate_run(
    config: TrainConfig, base: str, *, train: int, held_out: int, device: str, pair_tokens: float = 0.0
) -> Estimate:
    """Expected cost of a run on ``train`` prompts, judged on ``held_out`` prompts.

    ``pair_tokens`` are those of both sides of a pair, prompts included, for the methods that train on pairs.

    Memory: weights, the adapter four times (itself, its gradient, two Adam moments), and the logits of one micro-batch
    in a chunk of the vocabulary. Time: 2 operations a parameter and token forward, 6 with backward (Kaplan et al. 2020,
    arXiv 2001.08361, sec. 2.1).
    """
    steps = _steps(config, train)
    parameters = count_parameters(base)
    if parameters is None:
        return Estimate(parameters=None, memory_bytes=None, disk_bytes=None, seconds=None, steps=steps)
    shape = read_config(base)
    width, layers = int(shape.get("hidden_size", 2048)), int(shape.get("num_hidden_layers", 24))
    adapter = 14 * layers * width * config.lora_r  # seven projections, two matrices each
    # on a CPU twice: the merged copy that rollouts are sampled from
    weight_bytes = 8 if device == "cpu" else 1 if config.load_in_4bit else 2
    of_pairs = config.method != "grpo"
    tokens = config.per_device_train_batch_size * (2 * pair_tokens if of_pairs else config.max_completion_length)
    activations = tokens * (
        layers * width * 34 + 32768 * 4 * 2
    )  # 34 bytes: Korthikanti et al. 2022, eq. 2, less attention
    asked = held_out * config.eval_samples + (_CONTROL_PROMPTS if held_out else 0)
    sampled = float(2 * asked * config.max_completion_length) if config.method != "reward" else 0.0
    if of_pairs:
        trained = steps * config.per_device_train_batch_size * config.gradient_accumulation_steps * pair_tokens
        sampled += held_out * pair_tokens  # scored twice, each a forward pass alone: half of what is sampled
    else:
        rows = config.prompts_per_batch * config.num_generations
        trained = steps * rows * config.max_completion_length
        sampled += trained
    speed = _CPU_FLOPS_PER_CORE * (os.cpu_count() or 1) if device == "cpu" else _GPU_FLOPS
    return Estimate(
        parameters=parameters,
        memory_bytes=int(_BYTES_AROUND_WEIGHTS + parameters * weight_bytes + adapter * 16 + activations),
        disk_bytes=_disk_bytes(config, parameters * (4 if device == "cpu" else 2), adapter, steps),
        seconds=parameters * (2 * 2 * sampled + 6 * trained) / speed,
        steps=steps,
    )


def in_words(size: float) -> str:
    """Bytes for a person.

    >>> in_words(3 * 2**30), in_words(70_000_000)
    ('3.0 GiB', '67 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def count_parameters(base: str) -> int | None:
    """Parameters of a folder of safetensors or a GGUF file, from the files' headers; None for a hub name."""
    path = Path(base)
    if path.is_dir():
        tensors = (tensor for file in path.glob("*.safetensors") for tensor in read_header(file).values())
        return sum(math.prod(map(int, tensor["shape"])) for tensor in tensors)
    if path.suffix.lower() == ".gguf":
        return int(path.stat().st_size * 8 / 4.9)  # 4-bit blocks with their scales take 4.5 to 5 bits a parameter
    return None


def free_disk(folder: Path) -> int:
    """Free bytes on the disk that ``folder`` is, or will be, on."""
    there = next(path for path in [folder, *folder.resolve().parents] if path.exists())
    return shutil.disk_usage(there).free


def total_memory() -> int | None:
    """Bytes of memory of this machine, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _disk_bytes(config: TrainConfig, weights: int, adapter: int, steps: int) -> int:
    """The merged model and the copy that it is proved on, and each checkpoint: adapter, two Adam moments, tokenizer."""
    every = config.save_steps if config.save_steps >= 1 else max(1, config.save_steps * steps)
    made = 0 if config.save_strategy == "no" else math.ceil(steps / every)
    kept = min(made, config.save_total_limit + 1) if config.save_total_limit else made  # one more while one is written
    return max(LEAST_DISK, 2 * weights + adapter * 4 + kept * (adapter * 12 + _BYTES_AROUND_ADAPTER))


def _steps(config: TrainConfig, prompts: int) -> int:
    if config.max_steps > 0:
        return config.max_steps
    if config.method != "grpo":  # transformers: an epoch ends with a smaller batch
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
        return math.ceil(math.ceil(prompts / batch) * config.num_train_epochs)
    batches = prompts // max(config.prompts_per_batch, 1)
    return int(batches * config.num_iterations * config.num_train_epochs)
