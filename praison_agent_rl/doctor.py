"""Say what this machine and this installation can run, and what each part that cannot lacks."""

import importlib.util
import os
import platform
from pathlib import Path

from praison_agent_rl.errors import PraisonRLError
from praison_agent_rl.estimate import free_disk, total_memory
from praison_agent_rl.libraries import library_versions
from praison_agent_rl.models import EMBEDDED, find_weights
from praison_agent_rl.process_settings import (
    Setting,
    best_device,
    choose_settings,
    describe_cores,
    find_cores,
    too_many_threads,
)
from praison_agent_rl.records import Record

_NEEDS = {
    "recording and configuration": ("praisonaiagents", "pydantic", "yaml", "typer", "rich"),
    "training (GRPO on CPU or GPU)": ("torch", "transformers", "trl", "peft", "datasets", "accelerate"),
    "serving (transformers serve)": ("torch", "transformers", "fastapi", "uvicorn"),
    "GGUF models": ("gguf", "transformers"),
    "agents with base_url or provider/model names": ("litellm",),
    "report": ("matplotlib",),
    "vLLM rollouts and serving": ("vllm",),
    "unsloth": ("unsloth",),
}
_EXTRA = {"vLLM rollouts and serving": "vllm", "unsloth": "unsloth", "recording and configuration": ""}
_NEEDS_GPU = ("vLLM rollouts and serving", "unsloth")


class Part(Record):
    """One thing that the product does, and whether it can do it here."""

    name: str
    ready: bool
    lacks: str
    """What to do about it; empty where it is ready."""


def examine() -> tuple[dict[str, str], list[Part]]:
    """Facts of the machine and its libraries, and the state of each part; imports nothing heavy."""
    memory = total_memory()
    facts = {
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "cores": describe_cores(find_cores()),
        "memory": f"{memory / 2**30:.0f} GiB" if memory else "unknown",
        "free disk here": f"{free_disk(Path.cwd()) / 2**30:.0f} GiB",
        "GPU": "yes" if best_device() == "cuda" else "none seen",
        **library_versions(),
    }
    return facts, [*(_part(name, modules) for name, modules in _NEEDS.items()), _embedded()]


def examine_processes() -> tuple[list[Setting], str | None]:
    """What our processes that compute are given here and why, and a warning where torch would start too many threads.

    The warning is of this environment as it is: of a process that we do not start, or of what the user has set.
    """
    cores, device = find_cores(), best_device()
    warning = too_many_threads(cores, os.environ) if device == "cpu" else None
    return choose_settings(device=device, cores=cores, given=os.environ), warning


def _part(name: str, modules: tuple[str, ...]) -> Part:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    extra = _EXTRA.get(name, "train")
    install = f'pip install "praison-agent-rl{f"[{extra}]" if extra else ""}"'
    lacks = f"{', '.join(missing)}: {install}" if missing else ""
    if missing == ["unsloth"]:
        lacks = "unsloth: in an environment of its own, since it asks for an older trl (docs/backends.md)"
    if not missing and name in _NEEDS_GPU and best_device() != "cuda":
        lacks = "a GPU"
    return Part(name=name, ready=not lacks, lacks=lacks)


def _embedded() -> Part:
    try:
        find_weights(EMBEDDED)
    except PraisonRLError as error:
        return Part(name=f"embedded model {EMBEDDED}", ready=False, lacks=str(error))
    return Part(name=f"embedded model {EMBEDDED}", ready=True, lacks="")
