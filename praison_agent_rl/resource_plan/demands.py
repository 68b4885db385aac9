"""What one step of a run takes of one GPU, of the network and of time, for one way to share it between processes."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_batches import KEYS, generation_batch
from praison_agent_rl.records import Record
from praison_agent_rl.resource_plan import formulas
from praison_agent_rl.resource_plan.hardware import Gpu
from praison_agent_rl.resource_plan.shapes import Shape
from praison_agent_rl.trainer_arguments import checkpointing

Sharing = Literal["none", "zero1", "zero2", "zero3", "fsdp2"]
"""As ``launch.sharding`` names it; ``none`` is DDP: each process holds all."""

UTILISATION = 0.25
"""Of the GPU's operations, in training and prefill. PEFT's benchmark reaches 0.24 with transformers and small batches:
6,744 tokens a second of Llama-3.2-3B without checkpointing on an L40S (huggingface/peft@0a179c1e,
method_comparison/MetaMathQA/results/lora--llama-3.2-3B-rank32.json); Megatron 0.5 and more (Korthikanti et al. 2022,
table 5)."""
OF_BANDWIDTH = 0.6
"""Of the memory's bandwidth, in sampling. Assumed."""
HOST_SECONDS = 0.0012
"""What a layer costs the host in each token that is sampled without compilation: 1.2 ms in PyTorch's blog (Llama-7B of
32 layers, 25.5 tokens a second on an A100; pytorch.org/blog/accelerating-generative-ai-2), 1.1 ms in transformers' own
benchmark (gemma-2b of 18 layers, 19.7 ms a token; hf-internal-testing/benchmark_results@993304e4)."""

AROUND = 1.5 * 2**30
"""CUDA's context, libraries, fragments. Assumed."""
AROUND_VLLM = 2 * 2**30
"""What vLLM keeps beside weights and cache: activations of its longest batch, CUDA graphs. Assumed."""
SPARE = 0.05
"""Of a GPU's memory that is to stay free, since allocators leave gaps. Assumed."""
SERVER_SHARE = 0.9
"""Of a GPU's memory that vLLM takes by default where it is alone."""


class Machines(Record):
    """What a run has to run on."""

    gpu: Gpu
    gpus: int = 1
    """On each machine."""
    machines: int = 1
    network: float = 100e9 / 8
    """Bytes a second between two machines, one way."""
    servers: int = 1
    """GPUs of a vLLM server elsewhere, by tensor parallelism."""
    sharing: Sharing = "none"

    @property
    def processes(self) -> int:
        """One for each GPU."""
        return self.gpus * self.machines


class Work(Record):
    """What one process does in one step."""

    sequences: int
    """Texts that one update learns from."""
    at_once: int
    """Texts in one micro-batch."""
    length: int
    """Tokens of a text: prompt and completion."""
    new: int
    """Tokens of it that are sampled; 0 where nothing is."""
    sampled: int
    """Texts that one call of the sampler makes."""
    reused: int = 1
    """Updates made with each of them."""


class Memory(Record):
    """Bytes of one GPU."""

    weights: int
    adapter: int
    activations: int
    logits: int
    cache: int
    """Keys and values while ``generate`` samples."""
    gathered: int
    """Weights of the others, held while ``generate`` samples (ZeRO-3)."""
    vllm: int
    """Share that vLLM takes on the same GPU."""
    around: int

    @property
    def total(self) -> int:
        """At most: training and sampling take turns."""
        turns = max(self.activations + self.logits, self.cache + self.gathered)
        return self.weights + self.adapter + turns + self.vllm + self.around


class Sampler(Record):
    """What vLLM has room for."""

    where: Literal["here", "elsewhere"]
    room: int
    """Bytes for keys and values, beside weights; below 0 the weights do not fit."""
    at_once: int
    """Texts of full length that fit."""


class Step(Record):
    """Seconds of one update, with nothing done at the same time."""

    sampling: float
    training: float
    network: float
    sent: int
    """Bytes that each GPU exchanges with the others."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.sampling + self.training + self.network


def of_one(config: TrainConfig, processes: int) -> TrainConfig:
    """The configuration as one of so many processes sees it: TRL counts ``generation_batch_size`` over all of them."""
    whole = config.generation_batch_size
    own = max(config.per_device_train_batch_size, whole // processes) if whole else None
    return config.model_copy(update={"launch": None, "generation_batch_size": own})


def work_of(config: TrainConfig, prompt: int, processes: int = 1) -> Work:
    """What one of so many processes does in a step; ``prompt`` is the length of a prompt in tokens."""
    config = of_one(config, processes)
    micro, updates = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if config.method != "grpo":
        longest = config.max_length or config.max_seq_length
        return Work(sequences=2 * micro * updates, at_once=2 * micro, length=longest, new=0, sampled=0)
    sizes: Mapping[str, Any] = {key: getattr(config, key) for key in KEYS}
    return Work(
        sequences=micro * updates,
        at_once=micro,
        length=prompt + config.max_completion_length,
        new=config.max_completion_length,
        sampled=generation_batch(sizes),
        reused=config.num_iterations,
    )


def bits_of(config: TrainConfig, shape: Shape) -> int:
    """Bits of a frozen weight on a GPU."""
    if config.load_in_4bit or shape.stored_bits == 4:
        return 4
    if config.load_in_8bit or shape.stored_bits == 8:
        return 8
    return 32 if config.dtype == "float32" else 16


def uses_server(config: TrainConfig) -> bool:
    """Whether completions are drawn by vLLM on other GPUs."""
    return config.method == "grpo" and config.sampler == "vllm" and config.vllm_server_base_url is not None


def shares_gpu(config: TrainConfig) -> bool:
    """Whether completions are drawn by vLLM on the GPU that trains."""
    return config.method == "grpo" and config.uses_vllm and not uses_server(config)


def memory_of(config: TrainConfig, shape: Shape, machines: Machines, work: Work) -> Memory:
    """Bytes that one process takes of its GPU."""
    bits, processes = bits_of(config, shape), machines.processes
    whole = formulas.weight_bytes(shape, bits)
    # quantised weights are not shared out: that needs a storage format that is not set here
    apart = machines.sharing in ("zero3", "fsdp2") and bits >= 16 and processes > 1
    held = min(whole, whole // processes + _gathered_layers(shape, bits)) if apart else whole
    tokens = work.at_once * work.length
    generates = work.new > 0 and not config.uses_vllm
    largest = max(math.prod(sizes) for sizes in shape.matrices.values())
    return Memory(
        weights=held,
        adapter=formulas.trained_bytes(
            shape,
            config,
            number=formulas.number_bytes(config, bits),
            gradients_by=processes if machines.sharing in ("zero2", "zero3", "fsdp2") else 1,
            moments_by=processes if machines.sharing != "none" else 1,
        ),
        activations=formulas.activation_bytes(shape, tokens, checkpointing=checkpoints(config)),
        logits=formulas.logit_bytes(shape, config, work.at_once * (work.new or work.length)),
        cache=formulas.cache_bytes(shape, work.sampled * work.length) if generates else 0,
        gathered=whole - held if generates and machines.sharing == "zero3" else 0,
        vllm=int(config.gpu_memory_utilization * machines.gpu.memory) if shares_gpu(config) else 0,
        around=int(AROUND + (2 * largest if bits < 16 else 0)),  # one matrix at a time is unpacked
    )


def sampler_of(config: TrainConfig, shape: Shape, machines: Machines, work: Work) -> Sampler | None:
    """What vLLM has room for; None where ``generate`` samples."""
    if not config.uses_vllm or not work.new:
        return None
    elsewhere = uses_server(config)
    share = SERVER_SHARE * machines.servers if elsewhere else config.gpu_memory_utilization
    beside = AROUND_VLLM * (machines.servers if elsewhere else 1)
    room = int(share * machines.gpu.memory - formulas.weight_bytes(shape, 16) - beside)
    fitting = max(0, room // formulas.cache_bytes(shape, work.length))
    return Sampler(where="elsewhere" if elsewhere else "here", room=room, at_once=fitting)


def step_of(config: TrainConfig, shape: Shape, machines: Machines, work: Work) -> Step:
    """Seconds of one update, and the bytes that each GPU exchanges."""
    tokens = work.sequences * work.length
    scored = work.new > 0 and (config.uses_vllm or _outlives_an_update(work))
    worth = formulas.passes(checkpointing=checkpoints(config), scored_before=scored)
    training = worth * formulas.forward_operations(shape, tokens, work.length)
    sent, network = _exchanged(config, shape, machines, work, scored=scored)
    return Step(
        sampling=_sampling_seconds(config, shape, machines, work),
        training=training / (UTILISATION * machines.gpu.operations),
        network=network,
        sent=int(sent),
    )


def checkpoints(config: TrainConfig) -> bool:
    """Whether activations are computed twice; on a GPU that is the default."""
    return bool(checkpointing(config, "cuda"))


def _outlives_an_update(work: Work) -> bool:
    """Whether completions are used after an update, so that TRL scores them once more before it."""
    return work.sequences % (work.sampled * work.reused) != 0


def _gathered_layers(shape: Shape, bits: int) -> int:
    """The layer that is computed, the next one, and the embedding, which are whole at a time."""
    return int((2 * shape.in_layers / shape.layers + shape.embedding) * bits / 8)


def _sampling_seconds(config: TrainConfig, shape: Shape, machines: Machines, work: Work) -> float:
    if not work.new:
        return 0.0
    sampler = sampler_of(config, shape, machines, work)
    server = sampler is not None and sampler.where == "elsewhere"
    wanted = work.sampled * (machines.processes if server else 1)
    fitting = wanted if sampler is None else max(1, min(wanted, sampler.at_once))
    cards = machines.servers if server else 1
    weights = formulas.weight_bytes(shape, bits_of(config, shape) if sampler is None else 16)
    read = weights + formulas.cache_bytes(shape, fitting * (work.length - work.new / 2))
    computed = formulas.forward_operations(shape, fitting, work.length)
    token = max(
        read / (OF_BANDWIDTH * machines.gpu.bandwidth * cards),
        computed / (UTILISATION * machines.gpu.operations * cards),
        HOST_SECONDS * shape.layers if sampler is None else 0.0,
    )
    prompt = work.length - work.new
    prefilled = wanted / (config.num_generations if sampler else 1)  # vLLM computes a prompt once for its group
    before = formulas.forward_operations(shape, prefilled * prompt, prompt)
    call = math.ceil(wanted / fitting) * work.new * token + before / (UTILISATION * machines.gpu.operations * cards)
    calls = work.sequences / work.sampled / work.reused
    return call * calls


def _exchanged(
    config: TrainConfig, shape: Shape, machines: Machines, work: Work, *, scored: bool
) -> tuple[float, float]:
    """Bytes that each GPU exchanges in one update, and the seconds that its slowest link takes for them."""
    processes, bits = machines.processes, bits_of(config, shape)
    if processes == 1:
        return 0.0, 0.0
    gradients = formulas.number_bytes(config, bits) * formulas.adapter_parameters(shape, config)
    weights = 0.0
    if machines.sharing in ("zero3", "fsdp2") and bits >= 16:
        micro_batches = work.sequences / work.at_once
        whole = formulas.weight_bytes(shape, bits)
        weights = (2 + scored) * micro_batches * whole  # for the forward, and for the backward
        if work.new and not config.uses_vllm:
            calls = work.sequences / work.sampled / work.reused
            weights += whole * calls * (1 if machines.sharing == "zero3" else work.new)
    sent = formulas.all_reduce_bytes(gradients, processes) + formulas.all_gather_bytes(weights, processes)
    link = machines.gpu.link if machines.machines == 1 else min(machines.gpu.link, machines.network)
    return sent, sent / link  # of a ring: what goes over one of its links goes over each
