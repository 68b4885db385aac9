"""A plan as lines of text for a person."""

from collections.abc import Iterator

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.estimate import in_words
from praison_agent_rl.resource_plan import formulas
from praison_agent_rl.resource_plan.demands import SPARE, Machines, Memory, Step
from praison_agent_rl.resource_plan.planned import WAYS, ResourcePlan, Way

_NOTE = "by arithmetic from what docs/planning.md assumes; none of it was measured on a GPU"


def lines_of(plan: ResourcePlan, config: TrainConfig) -> list[str]:
    """The plan, in the order in which a person asks."""
    return [
        *_what(plan, config),
        "",
        "memory of each GPU, as configured",
        *_memory(plan, config),
        "",
        *_remedies(plan),
        "other ways to run it",
        *(_row(_machines(way.machines), way) for way in plan.ways),
        "",
        "as configured, on other GPUs",
        *(_row(way.machines.gpu.name, way) for way in plan.elsewhere),
        "",
        *_elsewhere(plan),
        f"({_NOTE})",
    ]


def in_time(seconds: float) -> str:
    """A duration for a person.

    >>> in_time(0.0042), in_time(5.25), in_time(600), in_time(10800)
    ('4 ms', '5.2 s', '10 min', '3.0 h')
    """
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _what(plan: ResourcePlan, config: TrainConfig) -> Iterator[str]:
    work, width = plan.work, "bfloat16" if formulas.number_bytes(config, plan.bits) == 2 else "float32"
    yield _named("model", f"{plan.shape.name}: {_millions(plan.parameters)} parameters, in {plan.bits} bits")
    yield _named("adapter", f"{_millions(plan.trained)} parameters of rank {config.lora_r}, in {width}")
    parts = f"{work.length - work.new} of prompt, {work.new} new" if work.new else "as long as they may be"
    yield _named(
        "a step", f"{work.sequences} texts for each GPU, {work.at_once} at once, {work.length} tokens each ({parts})"
    )
    machines = plan.own.machines
    yield _named("runs on", f"{_machines(machines)}, {machines.gpu.name}")
    step = plan.own.step
    if not plan.own.fits:
        yield _named("takes", "more than there is")
        return
    yield _named("takes", f"{in_time(step.total)} a step: {_step(step)}")
    if plan.steps is not None:
        yield _named("", f"{in_time(plan.steps * step.total)} for {plan.steps:,} steps")


def _memory(plan: ResourcePlan, config: TrainConfig) -> Iterator[str]:
    memory = plan.own.memory
    kept = "the input of each layer, and one layer in full" if plan.checkpointing else "of all layers"
    yield _part("frozen weights", memory.weights, "")
    yield _part("adapter", memory.adapter, "with its gradient and moments")
    yield _part("activations", memory.activations, f"of {plan.work.at_once} texts: {kept}")
    yield _part("logits", memory.logits, "")
    if memory.cache:
        yield _part("or sampling", memory.cache, f"keys and values of {plan.work.sampled} texts, {_token(plan)}")
    if memory.gathered:
        yield _part("and gathered", memory.gathered, "all weights, while generate samples")
    if memory.vllm:
        yield _part("vLLM", memory.vllm, f"gpu_memory_utilization {config.gpu_memory_utilization:g}")
    yield _part("around it", memory.around, "")
    says = "fits" if plan.own.in_memory else f"does not fit, with {SPARE:.0%} to spare"
    yield _part("at most", memory.total, f"of {in_words(plan.own.machines.gpu.memory)}: {says}")
    yield from _sampler(plan, memory)


def _sampler(plan: ResourcePlan, memory: Memory) -> Iterator[str]:
    sampler, servers = plan.own.sampler, plan.own.machines.servers
    if sampler is None:
        return
    where = "in its share of the GPU" if memory.vllm else f"on {servers} GPU{'s' if servers > 1 else ''} elsewhere"
    if sampler.at_once:
        yield f"  vLLM {where} has {in_words(sampler.room)} for keys and values ({_token(plan)}): room for"
        yield f"  {sampler.at_once:,} texts of {plan.work.length} tokens at once"
    else:
        yield f"  vLLM {where} lacks {in_words(-sampler.room)} for its own copy of the weights in 16 bits: does not fit"


def _remedies(plan: ResourcePlan) -> Iterator[str]:
    if plan.own.fits:
        return
    yield "what would make it fit" if plan.remedies else "nothing that was tried makes it fit"
    yield from (
        f"  {in_words(remedy.way.memory.total):>10}  {in_time(remedy.way.step.total):>7} a step  {remedy.change}"
        for remedy in plan.remedies
    )
    yield ""


def _elsewhere(plan: ResourcePlan) -> Iterator[str]:
    """Disk and host."""
    copies = f"the merged model twice, and checkpoints of {in_words(plan.checkpoint)}"
    yield _named("disk", f"{in_words(plan.disk)}: {copies}")
    yield _named("merging", f"a few MiB of host memory shard by shard; {in_words(plan.merging)} where that cannot be")


def _row(name: str, way: Way) -> str:
    if not way.fits:
        why = "does not fit" if not way.in_memory else "vLLM's own copy of the weights does not fit"
        return f"  {name:<24}{in_words(way.memory.total):>10}  {why}"
    sent = f", {in_words(way.step.sent)} exchanged by each GPU" if way.step.sent else ""
    return f"  {name:<24}{in_words(way.memory.total):>10}  {in_time(way.step.total):>7} a step{sent}"


def _machines(machines: Machines) -> str:
    way = "" if machines.processes == 1 else f", {WAYS[machines.sharing]}"
    several = f"{machines.machines} x " if machines.machines > 1 else ""
    return f"{several}{machines.gpus} GPU{'s' if machines.gpus > 1 else ''}{way}"


def _step(step: Step) -> str:
    return f"{in_time(step.sampling)} sampling, {in_time(step.training)} training, {in_time(step.network)} network"


def _token(plan: ResourcePlan) -> str:
    return f"{plan.cache_token / 1024:.0f} KiB a token"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f} million" if count >= 100e6 else f"{count / 1e6:.1f} million"


def _named(name: str, text: str) -> str:
    return f"{name:<10}{text}"


def _part(name: str, size: float, text: str) -> str:
    return f"  {name:<16}{in_words(size):>10}  {text}".rstrip()
