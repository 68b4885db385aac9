"""How the processes of ``launch`` are started: what is checked before, and the command line of torchrun or accelerate.

Nothing heavy is imported, and nothing is started here.
"""

import importlib.util
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.launching import Launch
from praison_agent_rl.errors import ConfigError, MissingExtra

Sharding = Literal["zero1", "zero2", "zero3", "fsdp2"]
"""What is shared out between processes, as ``launch.sharding`` names it."""
WORKER = "praison_agent_rl.child"
"""Module that each process runs; it ends with the launcher, which starts it in a session of its own."""
NODE_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "PET_NODE_RANK")
"""Where Slurm, an indexed job of Kubernetes, and torchrun's own environment say which machine this is."""
_SEVERAL = ("DEEPSPEED", "FSDP", "MULTI_GPU")
"""Types of accelerate's file by which it starts several processes."""
_SAID = {
    "nnodes": "nodes", "nproc-per-node": "nproc", "node-rank": "node_rank", "master-addr": "rendezvous",
    "master-port": "rendezvous", "num-processes": "nproc", "num-machines": "nodes", "machine-rank": "node_rank",
    "main-process-ip": "rendezvous", "main-process-port": "rendezvous", "config-file": "accelerate_config",
}  # fmt: skip
"""Arguments of the launchers that keys of ``launch`` give; a later one would silently go before them."""
_RESTARTS = "max-restarts"
_STAGES: dict[str, Sharding] = {"1": "zero1", "2": "zero2", "3": "zero3"}


class Command(NamedTuple):
    """What starts the processes: a module of Python and its arguments."""

    launcher: str
    """``torchrun`` or ``accelerate``."""
    arguments: list[str]


def launch_of(config: TrainConfig) -> Launch | None:
    """What starts several processes; None where one trains in the usual way."""
    found = config.launch
    return found if found and (found.processes > 1 or _by_accelerate(found)) else None


def node_of(launch: Launch | None) -> int:
    """Number of this machine among those that train, from 0."""
    if launch is None or launch.nodes == 1:
        return 0
    return launch.node_rank if launch.node_rank is not None else _node_said() or 0


def sharding_of(launch: Launch | None) -> Sharding | None:
    """What is shared out between the processes, as ``sharding`` names it or a file of ``accelerate config`` says."""
    if launch is None or launch.sharding or not launch.accelerate_config:
        return launch.sharding if launch else None
    found = _read(launch.accelerate_config)
    if found.get("distributed_type") == "FSDP":
        return "fsdp2"
    return _STAGES.get(_zero_stage(found)) if found.get("distributed_type") == "DEEPSPEED" else None


def splits_weights(launch: Launch | None) -> bool:
    """Whether no process holds all weights (ZeRO-3, FSDP)."""
    return sharding_of(launch) in ("zero3", "fsdp2")


def loading_device(config: TrainConfig, device: str) -> str:
    """Where a process loads the weights: on the CPU where FSDP then moves its part of them to the GPU."""
    return "cpu" if sharding_of(launch_of(config)) == "fsdp2" else device


def check_launch(config: TrainConfig, *, device: str, nameable: bool = True) -> None:
    """Check what can be checked of ``launch`` before anything is loaded; ``nameable`` says that rewards have names.

    Raises:
        ConfigError: all that is wrong, one a line.
        MissingExtra: DeepSpeed is asked for and not installed.
    """
    launch = launch_of(config)
    if launch is None:
        return
    problems = [*_of_accelerate(launch, device), *_of_machines(config, launch), *_of_devices(launch, device)]
    problems += [*_of_options(launch), *_of_run(config, launch, nameable)]
    if problems:
        raise ConfigError("\n".join(problems))
    if _needs_deepspeed(launch) and importlib.util.find_spec("deepspeed") is None:
        raise MissingExtra("launch: ZeRO needs DeepSpeed: pip install deepspeed (or take sharding: fsdp2)")


def launch_command(launch: Launch, worker: list[str]) -> Command:
    """What starts ``worker``, the arguments of ``WORKER``, in each process of this machine."""
    node, where = node_of(launch), _rendezvous(launch)
    if _by_accelerate(launch):
        return Command("accelerate", [*_accelerate(launch, node, where), *launch.options, "--module", WORKER, *worker])
    if launch.nodes == 1:  # said, since torchrun takes PET_NNODES of a cluster else, and waits for other machines
        machines = ["--standalone", "--nnodes", "1", "--local-addr", "127.0.0.1"]
    else:
        host, _, port = where.rpartition(":")
        machines = ["--nnodes", str(launch.nodes), "--node-rank", str(node)]
        machines += ["--master-addr", host, "--master-port", port]
    own = [*machines, "--nproc-per-node", str(launch.nproc), "--max-restarts", "0"]
    return Command("torchrun", [*own, *launch.options, "-m", WORKER, *worker])


def _accelerate(launch: Launch, node: int, where: str) -> list[str]:
    words = ["--config_file", str(_file_of(launch)), "--num_processes", str(launch.processes)]
    words += ["--num_machines", str(launch.nodes), "--machine_rank", str(node)]
    if launch.nodes == 1:
        return [*words, "--main_process_port", "0"]  # a free one
    host, _, port = where.rpartition(":")
    return [*words, "--main_process_ip", host, "--main_process_port", port]


def _by_accelerate(launch: Launch) -> bool:
    return bool(launch.sharding or launch.accelerate_config)


def _file_of(launch: Launch) -> Path:
    """The file of ``accelerate config``: the given one, or the one that TRL brings for the kind of sharding."""
    if launch.accelerate_config:
        return Path(launch.accelerate_config).expanduser()
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        raise MissingExtra('launch needs TRL: pip install "praison-agent-rl[train]"')
    return Path(trl.origin).parent / "accelerate_configs" / f"{launch.sharding}.yaml"


def _read(path: str) -> dict[str, Any]:
    """A file of ``accelerate config``, or one of DeepSpeed's in JSON; empty where it is none."""
    try:
        found = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _part(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping in such a file; empty where there is none of that name."""
    part = found.get(name)
    return part if isinstance(part, dict) else {}


def _zero_stage(found: Mapping[str, Any]) -> str:
    """The stage of ZeRO by a file of ``accelerate config``, or by the file of DeepSpeed that it names."""
    own = _part(found, "deepspeed_config")
    if theirs := own.get("deepspeed_config_file"):
        return str(_part(_read(str(theirs)), "zero_optimization").get("stage"))
    return str(own.get("zero_stage"))


def _needs_deepspeed(launch: Launch) -> bool:
    if launch.sharding:
        return launch.sharding.startswith("zero")
    return bool(launch.accelerate_config and _read(launch.accelerate_config).get("distributed_type") == "DEEPSPEED")


def _node_said() -> int | None:
    said = (os.environ.get(name) for name in NODE_VARIABLES)
    return next((int(number) for number in said if number and number.isdecimal()), None)


def _rendezvous(launch: Launch) -> str:
    """``host:port`` of machine 0, or what there is of it."""
    if launch.rendezvous:
        return launch.rendezvous
    address = os.environ.get("MASTER_ADDR")
    return f"{address}:{os.environ.get('MASTER_PORT') or '29500'}" if address else ""


def _of_accelerate(launch: Launch, device: str) -> Iterator[str]:
    if not _by_accelerate(launch):
        return
    if device == "cpu":  # accelerate/commands/launch.py, launch_command: simple_launcher
        yield (
            "launch: on a CPU `accelerate launch` starts one process and says nothing; leave sharding and "
            "accelerate_config out (torchrun then starts them)"
        )
    if launch.sharding and launch.accelerate_config:
        yield (
            f"launch: sharding {launch.sharding!r} and accelerate_config {launch.accelerate_config!r} both say what is "
            "shared out; keep one of them"
        )
    if launch.accelerate_config:
        yield from _of_file(launch, launch.accelerate_config)


def _of_file(launch: Launch, path: str) -> Iterator[str]:
    where, found = f"launch.accelerate_config {path!r}", _read(path)
    if not Path(path).expanduser().is_file():
        yield f"{where}: there is no such file; make one with `accelerate config --config_file FILE`"
        return
    if not found:
        yield f"{where}: that is no file of `accelerate config`; make one with `accelerate config --config_file FILE`"
        return
    kind, count = found.get("distributed_type"), found.get("num_processes")
    if kind not in _SEVERAL:
        kinds = ", ".join(_SEVERAL)
        yield f"{where}: distributed_type is {kind!r}, by which one process would start; it must be one of {kinds}"
    version = _part(found, "fsdp_config").get("fsdp_version")
    if kind == "FSDP" and str(version) != "2":
        yield f"{where}: fsdp_version is {version!r}, but must be 2: the first does not train adapters as they are"
    if str(count) != str(launch.processes):
        yield (
            f"{where}: num_processes is {count!r}, but launch starts {launch.processes} (nproc {launch.nproc} x nodes "
            f"{launch.nodes}); make them equal"
        )


def _of_machines(config: TrainConfig, launch: Launch) -> Iterator[str]:
    if launch.nodes == 1:
        return
    if launch.node_rank is None and _node_said() is None:
        yield (
            f"launch.nodes is {launch.nodes}, but nothing says which of them this machine is; give node_rank, 0 to "
            f"{launch.nodes - 1} (not set: {', '.join(NODE_VARIABLES)})"
        )
    elif node_of(launch) >= launch.nodes:
        yield f"launch.node_rank is {node_of(launch)}, but must be 0 to {launch.nodes - 1} (nodes is {launch.nodes})"
    said = os.environ.get("SLURM_NNODES")
    if said and said != str(launch.nodes):
        yield f"launch.nodes is {launch.nodes}, but Slurm gave {said} machines (SLURM_NNODES); make them equal"
    host, _, port = _rendezvous(launch).rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        where = _rendezvous(launch)
        given = f"is {where!r}" if where else "is missing, and MASTER_ADDR is not set"
        yield f"launch.rendezvous {given}; give host:port of machine 0, such as 10.0.0.5:29500"
    if not config.output_dir:
        yield "launch.nodes is above 1, so output_dir must be given: a folder that all machines see"


def _of_devices(launch: Launch, device: str) -> Iterator[str]:
    if not device.startswith("cuda"):
        return
    if device != "cuda":
        yield (
            f"PRAISON_AGENT_RL_DEVICE is {device!r}, but several processes take a GPU each; set it to cuda, and "
            "CUDA_VISIBLE_DEVICES to the GPUs"
        )
    gpus = visible_gpus()
    if gpus is not None and launch.nproc > gpus:
        yield f"launch.nproc is {launch.nproc}, but this machine shows {gpus} GPUs; lower it to {gpus}"


def _of_options(launch: Launch) -> Iterator[str]:
    for word in launch.options:
        name = word.partition("=")[0].lstrip("-").replace("_", "-")
        if not word.startswith("--") or len(name) < 2:
            continue
        if key := next((key for own, key in _SAID.items() if own.startswith(name)), None):
            yield f"launch.options has {word!r}, which {key} says; give launch.{key} instead"
        elif _RESTARTS.startswith(name):
            yield (
                f"launch.options has {word!r}, but processes that are started again would begin anew; leave it out, "
                "and go on with --resume"
            )


def _of_run(config: TrainConfig, launch: Launch, nameable: bool) -> Iterator[str]:
    if not nameable:
        yield (
            "launch starts other processes, which cannot find a reward that is a lambda, a notebook function or a "
            "local one; move it into a module and name it as module:function"
        )
    if launch.processes > 1 and config.rollout == "agent":
        yield "launch: rollout: agent needs one process that trains; leave launch out, or take rollout: tools or direct"
    if config.sampler == "vllm" and not config.vllm_server_base_url:
        yield (
            "launch: sampler: vllm needs a server that runs already, since each process would start one; give "
            "vllm_server_base_url"
        )
    whole, count = config.generation_batch_size, launch.processes  # TRL counts it over all processes
    each = math.lcm(config.per_device_train_batch_size, config.num_generations) * count
    if config.method == "grpo" and whole and whole % each:
        yield (
            f"generation_batch_size {whole} is what {count} processes sample together, and gives each no whole groups "
            f"of {config.num_generations} in micro-batches of {config.per_device_train_batch_size}; set it to "
            f"{-(-whole // each) * each}"
        )
    if splits_weights(launch):
        yield from _of_split_weights(config)


def _of_split_weights(config: TrainConfig) -> Iterator[str]:
    if config.sampler == "vllm":
        yield (
            "launch: sampler: vllm sends the policy from a process that holds it whole, and ZeRO-3 and FSDP leave none "
            "that does; take fast_inference, or sharding: zero2"
        )
    if config.rollout == "tools":  # each answer that calls a tool is sampled on, and generating gathers the weights
        yield (
            "launch: rollout: tools samples in each process as often as its answers call tools, and with ZeRO-3 and "
            "FSDP all processes must sample at the same time; take sharding: zero2, or leave it out"
        )
    if config.warm_start:
        yield "launch: warm_start needs whole weights in each process; set it to 0, or take sharding: zero2"
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, key):
            yield f"launch: {key} cannot be split over processes; leave it out, or sharding and accelerate_config"


def visible_gpus() -> int | None:
    """GPUs that this machine shows to processes, counted without torch; None where that cannot be known."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        named = itertools.takewhile(lambda word: not word.strip().startswith("-"), given.split(","))  # as CUDA does
        return len([word for word in named if word.strip()])
    found = Path("/proc/driver/nvidia/gpus")
    return len(list(found.iterdir())) if found.is_dir() else None
