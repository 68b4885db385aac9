"""Estimate what a run will take in memory, disk and time, from sizes alone: no weights are loaded."""

import math
import os
import shutil
from pathlib import Path

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.control_groups import memory_limit
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.records import Record
from praison_agent_rl.resource_plan import formulas
from praison_agent_rl.resource_plan.demands import bits_of
from praison_agent_rl.resource_plan.shapes import Shape, find_shape
from praison_agent_rl.trainer_arguments import checkpointing

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
    """Parameters of the model; None where nothing is known of its size."""
    memory_bytes: int | None
    disk_bytes: int | None
    seconds: float | None
    steps: int


def estimate_run(
    config: TrainConfig, base: str, *, train: int, held_out: int, device: str, pair_tokens: float = 0.0
) -> Estimate:
    """Expected cost of a run on ``train`` prompts, judged on ``held_out`` prompts, by one process.

    ``pair_tokens`` are those of both sides of a pair, prompts included, for the methods that train on pairs. Prompts of
    the others are not counted: how long they are is not known yet.
    """
    steps = count_steps(config, train)
    try:
        shape = find_shape(base)
    except ConfigError:
        return Estimate(parameters=None, memory_bytes=None, disk_bytes=None, seconds=None, steps=steps)
    adapter = formulas.adapter_parameters(shape, config)
    kept = kept_checkpoints(config, steps)
    measuring = _served_bytes(config, shape, device) if held_out else 0
    return Estimate(
        parameters=shape.parameters,
        memory_bytes=_BYTES_AROUND_WEIGHTS + max(_training_bytes(config, shape, device, pair_tokens), measuring),
        disk_bytes=disk_bytes(formulas.weight_bytes(shape, 32 if device == "cpu" else 16), adapter, kept),
        seconds=_seconds(config, shape, device, asked=held_out, updates=steps, pair_tokens=pair_tokens),
        steps=steps,
    )


def count_steps(config: TrainConfig, prompts: int) -> int:
    """Updates that a run on so many prompts makes."""
    if config.max_steps > 0:
        return config.max_steps
    if config.method != "grpo":  # transformers: an epoch ends with a smaller batch
        processes = config.launch.processes if config.launch else 1
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * processes
        return math.ceil(math.ceil(prompts / batch) * config.num_train_epochs)
    batches = prompts // max(config.prompts_at_once, 1)
    return int(batches * config.num_iterations * config.num_train_epochs)


def kept_checkpoints(config: TrainConfig, steps: int) -> int:
    """Checkpoints that are on the disk at a time, one more than are kept while it is written."""
    every = config.save_steps if config.save_steps >= 1 else max(1, config.save_steps * steps)
    made = 0 if config.save_strategy == "no" else math.ceil(steps / every)
    return min(made, config.save_total_limit + 1) if config.save_total_limit else made


def disk_bytes(weights: int, adapter: int, kept: int) -> int:
    """The merged model and the copy that it is proved on, and each checkpoint: adapter, two Adam moments, tokenizer.

    ``weights`` are the bytes of the model, ``adapter`` are parameters.
    """
    return max(LEAST_DISK, 2 * weights + adapter * 4 + kept * (adapter * 12 + _BYTES_AROUND_ADAPTER))


def in_words(size: float) -> str:
    """Bytes for a person.

    >>> in_words(3 * 2**30), in_words(70_000_000)
    ('3.0 GiB', '67 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def free_disk(folder: Path) -> int:
    """Free bytes on the disk that ``folder`` is, or will be, on."""
    there = next(path for path in [folder, *folder.resolve().parents] if path.exists())
    return shutil.disk_usage(there).free


def total_memory() -> int | None:
    """Bytes of memory that this process may have: the machine's, or its container's; None where nothing says so."""
    limit = memory_limit()
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return limit
    return machine if limit is None else min(machine, limit)


def _served_bytes(config: TrainConfig, shape: Shape, device: str) -> int:
    """Weights as a server has them, and they are measured: in no fewer bits, however they are trained."""
    return formulas.weight_bytes(shape, 32 if device == "cpu" or config.dtype == "float32" else 16)


def _training_bytes(config: TrainConfig, shape: Shape, device: str, pair_tokens: float) -> int:
    """Weights, the adapter with gradient and moments, and what a micro-batch needs for its backward pass."""
    on_cpu = device == "cpu"
    of_pairs = config.method != "grpo"
    tokens = config.per_device_train_batch_size * (2 * pair_tokens if of_pairs else config.max_completion_length)
    # on a CPU twice: the merged copy that rollouts are sampled from
    weights = 2 * formulas.weight_bytes(shape, 32) if on_cpu else formulas.weight_bytes(shape, bits_of(config, shape))
    activations = formulas.activation_bytes(
        shape, tokens, checkpointing=bool(checkpointing(config, device)), width=4 if on_cpu else 2
    )
    number = 4 if on_cpu else formulas.number_bytes(config, bits_of(config, shape))
    trained = formulas.trained_bytes(shape, config, number=number)
    return weights + trained + activations + formulas.logit_bytes(shape, config, tokens)


def _seconds(config: TrainConfig, shape: Shape, device: str, *, asked: int, updates: int, pair_tokens: float) -> float:
    """Sampling costs about twice its operations; what is held out is asked twice, and scored where it is pairs."""
    answers = asked * config.eval_samples + (_CONTROL_PROMPTS if asked else 0)
    sampled = float(2 * answers * config.max_completion_length) if config.method != "reward" else 0.0
    if config.method == "grpo":
        trained = float(updates * config.prompts_per_batch * config.num_generations * config.max_completion_length)
        sampled += trained
    else:
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
        trained = updates * batch * pair_tokens
        sampled += asked * pair_tokens  # scored twice, each a forward pass alone: half of what is sampled
    context = config.max_completion_length if config.method == "grpo" else pair_tokens / 2
    worth = formulas.passes(checkpointing=bool(checkpointing(config, device)))
    operations = formulas.forward_operations(shape, 2 * sampled + worth * trained, context)
    return operations / (_CPU_FLOPS_PER_CORE * (os.cpu_count() or 1) if device == "cpu" else _GPU_FLOPS)
