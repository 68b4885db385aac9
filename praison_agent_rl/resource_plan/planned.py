"""The plan of a run: what its settings take, what other ways to share it take, and what would make it fit."""

from collections.abc import Iterator

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.estimate import count_steps, disk_bytes, kept_checkpoints
from praison_agent_rl.launchers import sharding_of
from praison_agent_rl.records import Record
from praison_agent_rl.resource_plan import formulas
from praison_agent_rl.resource_plan.demands import (
    SPARE,
    Machines,
    Memory,
    Sampler,
    Sharing,
    Step,
    Work,
    bits_of,
    checkpoints,
    memory_of,
    of_one,
    sampler_of,
    step_of,
    uses_server,
    work_of,
)
from praison_agent_rl.resource_plan.hardware import GPUS, Gpu
from praison_agent_rl.resource_plan.shapes import Shape

WAYS: dict[Sharing, str] = {"none": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
"""How each way to share a run between processes is called."""


class Way(Record):
    """One way to run it, and what that takes."""

    machines: Machines
    memory: Memory
    step: Step
    sampler: Sampler | None
    """What vLLM has room for, where it samples."""

    @property
    def in_memory(self) -> bool:
        """Whether what trains fits into each GPU, with some to spare."""
        return self.memory.total <= (1 - SPARE) * self.machines.gpu.memory

    @property
    def fits(self) -> bool:
        """Whether all of it fits, vLLM too."""
        return self.in_memory and (self.sampler is None or self.sampler.at_once > 0)


class Remedy(Record):
    """A change of the configuration, and what the run takes of each GPU then."""

    change: str
    """What to write or take instead."""
    way: Way


class ResourcePlan(Record):
    """What a run takes, by arithmetic; times within a factor of two or so."""

    shape: Shape
    parameters: int
    trained: int
    """Parameters of the adapter."""
    bits: int
    checkpointing: bool
    work: Work
    cache_token: int
    """Bytes of keys and values for one token."""
    own: Way
    """As it is configured."""
    ways: list[Way]
    """Others, on as many GPUs, and on several machines."""
    elsewhere: list[Way]
    """As it is configured, on each GPU of the table."""
    remedies: list[Remedy]
    """What makes it fit, each by itself, or several together; empty where it fits as it is configured."""
    checkpoint: int
    """Bytes of one checkpoint on disk."""
    disk: int
    """Bytes that the run's folder grows to."""
    merging: int
    """Bytes of host memory if the merge cannot be streamed."""
    steps: int | None
    """Updates; None where nothing says how many."""


def machines_of(config: TrainConfig, gpu: Gpu, *, gpus: int | None = None, machines: int | None = None) -> Machines:
    """What the configuration has to run on, unless ``gpus`` of a machine and ``machines`` say otherwise."""
    launch = config.launch
    return Machines(
        gpu=gpu,
        gpus=gpus or (launch.nproc if launch else 1),
        machines=machines or (launch.nodes if launch else 1),
        sharing=sharding_of(launch) or "none",
    )


def usual_prompt(config: TrainConfig) -> int:
    """Tokens of a prompt where nobody says: as many as are let in, or 512, where so many have room."""
    return config.max_prompt_length or max(1, min(512, config.max_seq_length - config.max_completion_length))


def check_prompt(config: TrainConfig, prompt_tokens: int) -> None:
    """Raise ConfigError for prompts so long that none of them would be trained on."""
    room = config.max_seq_length - config.max_completion_length
    limit = min(room, config.max_prompt_length or room)
    if config.method == "grpo" and prompt_tokens > limit:
        raise ConfigError(
            f"prompts of {prompt_tokens} tokens would be left out: max_seq_length {config.max_seq_length} with "
            f"max_completion_length {config.max_completion_length} lets in {limit}; raise max_seq_length"
            f"{' and max_prompt_length' if limit < room else ''} (--set)"
        )


def plan_run(
    config: TrainConfig, shape: Shape, machines: Machines, *, prompt_tokens: int, prompts: int | None = None
) -> ResourcePlan:
    """The plan of a run on ``machines``; ``prompts`` are those to train on."""
    own = _way(config, shape, machines, prompt_tokens)
    trained, bits = formulas.adapter_parameters(shape, config), bits_of(config, shape)
    each = of_one(config, machines.processes)
    steps = count_steps(each, (prompts or 0) // machines.processes) if prompts or config.max_steps > 0 else None
    kept = kept_checkpoints(config, steps) if steps else config.save_total_limit + 1
    stored = formulas.weight_bytes(shape, 16)  # the merged model is not quantised
    return ResourcePlan(
        shape=shape,
        parameters=shape.parameters,
        trained=trained,
        bits=bits,
        checkpointing=checkpoints(config),
        work=work_of(config, prompt_tokens, machines.processes),
        cache_token=formulas.cache_bytes(shape, 1),
        own=own,
        ways=[_way(config, shape, other, prompt_tokens) for other in _other_ways(machines)],
        elsewhere=[_way(config, shape, other, prompt_tokens) for other in _other_gpus(machines)],
        remedies=[] if own.fits else _remedies(config, shape, machines, prompt_tokens),
        checkpoint=3 * formulas.number_bytes(config, bits) * trained,
        disk=disk_bytes(stored, trained, kept),
        merging=int(4 * 1.25 * shape.parameters),
        steps=steps,
    )


def _way(config: TrainConfig, shape: Shape, machines: Machines, prompt_tokens: int) -> Way:
    work = work_of(config, prompt_tokens, machines.processes)
    return Way(
        machines=machines,
        memory=memory_of(config, shape, machines, work),
        step=step_of(config, shape, machines, work),
        sampler=sampler_of(config, shape, machines, work),
    )


def _other_gpus(machines: Machines) -> Iterator[Machines]:
    """As many of each kind in the table."""
    for gpu in GPUS.values():
        yield machines.model_copy(update={"gpu": gpu})


def _other_ways(machines: Machines) -> Iterator[Machines]:
    """One GPU; all of one machine, shared in each way; and several machines."""
    many = machines.gpus if machines.gpus > 1 else 8
    several = machines.machines if machines.machines > 1 else 2
    yield machines.model_copy(update={"gpus": 1, "machines": 1, "sharing": "none"})
    sharing: Sharing
    for sharing in ("none", "zero2", "zero3", "fsdp2"):
        yield machines.model_copy(update={"gpus": many, "machines": 1, "sharing": sharing})
    for sharing in ("none", "zero3", "fsdp2"):
        yield machines.model_copy(update={"gpus": many, "machines": several, "sharing": sharing})


def _remedies(config: TrainConfig, shape: Shape, machines: Machines, prompt_tokens: int) -> list[Remedy]:
    """Each change that is enough alone; where none is, one after the other until it fits."""
    changes = [*_changes(config, shape, machines, prompt_tokens), *_larger(config, machines)]
    alone = [_remedy(shape, prompt_tokens, change) for change in changes]
    return [remedy for remedy in alone if remedy.way.fits] or _together(config, shape, machines, prompt_tokens)


def _together(config: TrainConfig, shape: Shape, machines: Machines, prompt_tokens: int) -> list[Remedy]:
    words: list[str] = []
    while change := next((c for c in _changes(config, shape, machines, prompt_tokens) if c[0] not in words), None):
        words.append(change[0])
        config, machines = change[1:]
        remedy = _remedy(shape, prompt_tokens, ("; ".join(words), config, machines))
        if remedy.way.fits:
            return [remedy]
    with_all = [("; ".join([*words, gpu]), same, other) for gpu, same, other in _larger(config, machines)]
    tried = (_remedy(shape, prompt_tokens, change) for change in with_all)
    return [remedy for remedy in tried if remedy.way.fits][:1]


_Change = tuple[str, TrainConfig, Machines]
"""What to write or take instead, and the run as it is then."""


def _remedy(shape: Shape, prompt_tokens: int, change: _Change) -> Remedy:
    words, config, machines = change
    return Remedy(change=words, way=_way(config, shape, machines, prompt_tokens))


def _larger(config: TrainConfig, machines: Machines) -> list[_Change]:
    """GPUs with more memory, the smallest first."""
    gpus = sorted((gpu for gpu in GPUS.values() if gpu.memory > machines.gpu.memory), key=lambda gpu: gpu.memory)
    return [(f"{gpu.name} instead", config, machines.model_copy(update={"gpu": gpu})) for gpu in gpus]


def _changes(config: TrainConfig, shape: Shape, machines: Machines, prompt_tokens: int) -> Iterator[_Change]:
    """What makes a run smaller, the least harmful first."""
    micro, accumulated = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if not checkpoints(config):
        yield _written(config, machines, gradient_checkpointing=True)
    if micro > 1:
        smaller = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": micro * accumulated}
        if config.steps_per_generation:
            smaller["steps_per_generation"] = micro * config.steps_per_generation
        yield _written(config, machines, **smaller)
    if config.uses_vllm:
        yield from _servers(config, shape, machines, prompt_tokens)
    if bits_of(config, shape) >= 16:
        yield _written(config, machines, load_in_4bit=True)
        if machines.sharing not in ("zero3", "fsdp2"):
            yield from _more_gpus(config, shape, machines, prompt_tokens)


def _written(config: TrainConfig, machines: Machines, **keys: bool | int) -> _Change:
    words = ", ".join(f"{key}: {str(value).lower()}" for key, value in keys.items())
    return words, config.model_copy(update=keys), machines


def _servers(config: TrainConfig, shape: Shape, machines: Machines, prompt_tokens: int) -> Iterator[_Change]:
    """The fewest GPUs that hold a vLLM server of their own."""
    address = config.vllm_server_base_url or "http://other-machine:8000/v1"
    update = {"sampler": "vllm", "fast_inference": False, "vllm_server_base_url": address}
    changed = config.model_copy(update=update)
    for count in (1, 2, 4, 8):
        other = machines.model_copy(update={"servers": count})
        sampler = sampler_of(changed, shape, other, work_of(changed, prompt_tokens, other.processes))
        if sampler is not None and sampler.at_once and (count > machines.servers or not uses_server(config)):
            yield f"a vLLM server on other GPUs, {count} of them (vllm_server_base_url)", changed, other
            return


def _more_gpus(config: TrainConfig, shape: Shape, machines: Machines, prompt_tokens: int) -> Iterator[_Change]:
    """The fewest GPUs of one machine among which FSDP2 makes it fit, if so many can be had."""
    for count in (2, 4, 8):
        other = machines.model_copy(update={"gpus": count, "machines": 1, "sharing": "fsdp2"})
        if count >= machines.gpus and _way(config, shape, other, prompt_tokens).fits:
            yield f"launch: {{nproc: {count}, sharding: fsdp2}}", config, other
            return
