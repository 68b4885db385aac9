"""The environment of a child process that computes on a CPU: chosen from the machine, before torch loads.

The module reads files and variables only; it may not import torch, and it changes no variable itself.
"""

import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from praison_agent_rl.control_groups import own_folders

_SPINS = "1000"
"""Turns that a waiting thread of libgomp, which torch's CPU wheels bring, spins before it sleeps.

Measured in a decoding loop of 30 layers of width 576 on 2 cores of an AMD EPYC, in ms a step of 8 rows (256 rows), in
two rounds alone and two with other work on the machine (``benchmarks/speed/threads.py``):
libgomp's default of 300,000: 29 and 36 (215 and 265) alone, 136 and 336 (300 and 1703) beside others; PASSIVE, so
none: 35 and 42 (247 and 265), 51 and 61 (426 and 488); 1000: 29 and 30 (231 and 230), 39 and 73 (439 and 285);
10,000: 27 and 28 (203 and 207), 142 and 128 (293 and 657). So 1000 seemed to
cost little in either case; two later rounds on busy cores saw no gain over PASSIVE alone.
Not set, since it changed nothing measurable there: KMP_BLOCKTIME (there is no Intel OpenMP in the wheel),
MKL_NUM_THREADS (MKL takes OMP_NUM_THREADS), MALLOC_ARENA_MAX, OMP_PROC_BIND (alone as fast; beside others twice as
slow). Allocators by LD_PRELOAD and NUMA hints were not there to be measured.
"""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Either decides how many threads torch starts: built with MKL it asks MKL, which takes the other where it has none
(ParallelOpenMP.cpp@v2.13.0, ``init_num_threads``)."""


class Cores(NamedTuple):
    """Cores that this process may use, counted in four ways."""

    logical: int
    """Logical cores of the machine."""
    allowed: int
    """Logical cores that the process may be put on (``taskset``, cpusets)."""
    quota: float | None
    """Cores' worth of time that the control groups allow; None where they set no limit."""
    physical: int | None
    """Physical cores beneath the allowed logical ones; None where the system does not say."""

    @property
    def usable(self) -> int:
        """How many threads can compute at once: one for each physical core, and no more than the quota allows."""
        limits = [self.allowed, self.physical or self.allowed]
        if self.quota is not None:
            limits.append(math.floor(self.quota))
        return max(1, min(limits))


@dataclass(frozen=True)
class Setting:
    """One variable of a child's environment."""

    name: str
    value: str | None
    """What the child gets; None where the variable is left unset."""
    why: str


def best_device() -> str:
    """``cuda`` where this machine shows a GPU to processes, else ``cpu``; asked without importing torch.

    ``PRAISON_AGENT_RL_DEVICE`` decides if it is set.
    """
    if given := os.environ.get("PRAISON_AGENT_RL_DEVICE"):
        return given
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if Path("/proc/driver/nvidia/version").exists() and not hidden else "cpu"


def find_cores(
    *, allowed: frozenset[int] | None = None, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")
) -> Cores:
    """The cores of this process; ``allowed`` are the numbers of those that it may be put on, by default asked.

    >>> Cores(logical=64, allowed=64, quota=2.0, physical=32).usable
    2
    """
    machine = os.cpu_count() or 1
    if allowed is None:
        # macOS and Windows know no affinity
        allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(range(machine))
    return Cores(
        logical=max(machine, len(allowed)),
        allowed=len(allowed),
        quota=_quota(sys_root / "fs" / "cgroup", proc_root / "self" / "cgroup"),
        physical=_physical(allowed, sys_root / "devices" / "system" / "cpu"),
    )


def choose_settings(
    *, device: str, cores: Cores, given: Mapping[str, str], processes: int = 1, system: str | None = None
) -> list[Setting]:
    """What a child that computes on ``device`` gets; ``processes`` of them share this machine.

    ``given`` are the variables that are set already: they are never overridden. On a GPU nothing is set, since the
    threads of its host have little to do.
    """
    if device != "cpu":
        return []
    settings = [_threads(cores, given, processes)]
    policy = given.get("OMP_WAIT_POLICY")
    settings.append(
        Setting("OMP_WAIT_POLICY", policy, "set by you")
        if policy
        else Setting("OMP_WAIT_POLICY", "PASSIVE", "threads that spin while they wait take the cores from others")
    )
    if (system or platform.system()) == "Linux":  # elsewhere torch brings another OpenMP
        settings.append(_spins(given))
    return settings


def child_environment(*, device: str, processes: int = 1) -> dict[str, str]:
    """Variables to add for a child that computes on ``device``: those that are chosen, without what is set already."""
    chosen = choose_settings(device=device, cores=find_cores(), given=os.environ, processes=processes)
    return {setting.name: setting.value for setting in chosen if setting.value and not os.environ.get(setting.name)}


def too_many_threads(cores: Cores, given: Mapping[str, str], *, machine: str | None = None) -> str | None:
    """What is wrong where torch, started as this process is, would take more threads than there are cores for.

    On x86 MKL takes no more threads than it sees physical cores, whatever it is told, unless MKL_DYNAMIC is false; it
    sees the affinity and no quota (measured with torch 2.13: OMP_NUM_THREADS=5 starts 2 threads on 2 cores).

    >>> too_many_threads(Cores(logical=2, allowed=2, quota=None, physical=2), {})
    >>> text = too_many_threads(Cores(logical=64, allowed=64, quota=2.0, physical=32), {})
    >>> text.split(";")[0]
    'torch would start 32 threads on 2 usable cores'
    """
    seen = cores.physical or cores.allowed
    if name := _thread_variable(given):
        capped = (machine or platform.machine()) in ("x86_64", "AMD64") and not _is_false(given.get("MKL_DYNAMIC"))
        asked = _leading_int(given[name]) or 0
        threads, remedy = min(asked, seen) if capped else asked, f"set {name} to {cores.usable} or unset it"
    else:
        threads = seen
        remedy = f"the processes that we start are given {cores.usable}; elsewhere set OMP_NUM_THREADS={cores.usable}"
    if threads <= cores.usable:
        return None
    return f"torch would start {threads} threads on {cores.usable} usable core{'s' * (cores.usable != 1)}; {remedy}"


def describe_cores(cores: Cores) -> str:
    """The cores for a person.

    >>> describe_cores(Cores(logical=64, allowed=64, quota=2.5, physical=32))
    '2 usable: 64 logical, 32 physical, a quota of 2.5'
    """
    parts = [f"{cores.logical} logical"]
    if cores.allowed != cores.logical:
        parts.append(f"{cores.allowed} allowed to this process")
    if cores.physical:
        parts.append(f"{cores.physical} physical")
    if cores.quota is not None:
        parts.append(f"a quota of {cores.quota:g}")
    return f"{cores.usable} usable: {', '.join(parts)}"


def _threads(cores: Cores, given: Mapping[str, str], processes: int) -> Setting:
    if name := _thread_variable(given):
        return Setting(name, given[name], "set by you")
    threads = max(1, cores.usable // max(1, processes))
    shared = f", shared by {processes} processes" if processes > 1 else ""
    return Setting("OMP_NUM_THREADS", str(threads), f"{describe_cores(cores)}{shared}")


def _spins(given: Mapping[str, str]) -> Setting:
    if spins := given.get("GOMP_SPINCOUNT"):
        return Setting("GOMP_SPINCOUNT", spins, "set by you")
    if given.get("OMP_WAIT_POLICY"):  # it would take back what the user chose
        return Setting("GOMP_SPINCOUNT", None, "left to your OMP_WAIT_POLICY")
    return Setting("GOMP_SPINCOUNT", _SPINS, "a short spin costs little beside others, and saves a wake-up when alone")


def _thread_variable(given: Mapping[str, str]) -> str | None:
    """The variable that decides the number of threads; MKL's own goes before OpenMP's."""
    return next((name for name in reversed(_THREAD_VARIABLES) if given.get(name)), None)


def _is_false(value: str | None) -> bool:
    return (value or "").strip().lower() in ("false", "0", "no", "off")


def _leading_int(text: str) -> int | None:
    """The first number of a value such as ``4`` or ``4,2`` (threads by level of nesting)."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() else None


def _quota(cgroup: Path, own: Path) -> float | None:
    """Cores' worth of time by the tightest limit of the process's control group and those above it, in v2 or v1."""
    quotas = [_quota_of(folder) for folder in own_folders("cpu", mounts=cgroup, own=own)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    if text := _text(folder / "cpu.max"):  # v2: "200000 100000" or "max 100000", microseconds
        limit, _, period = text.partition(" ")
        return int(limit) / int(period or 100_000) if limit != "max" else None
    limit, period = _text(folder / "cpu.cfs_quota_us") or "", _text(folder / "cpu.cfs_period_us") or ""
    return int(limit) / int(period) if limit.isdecimal() and period.isdecimal() and int(period) else None  # -1: none


def _physical(allowed: frozenset[int], cpus: Path) -> int | None:
    """Cores whose logical siblings are told apart; None if one of them does not say."""
    siblings = [_text(cpus / f"cpu{number}" / "topology" / "thread_siblings_list") for number in sorted(allowed)]
    return len(set(siblings)) if siblings and all(siblings) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
