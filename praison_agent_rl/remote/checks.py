"""What another machine has of what a run needs; all that it lacks is said at once."""

import importlib.metadata
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError, TrainingFailed
from praison_agent_rl.estimate import LEAST_DISK, estimate_run, in_words
from praison_agent_rl.records import Plan
from praison_agent_rl.remote.connection import Link
from praison_agent_rl.remote.there import MARK
from praison_agent_rl.runs import RunFolder

_PACKAGE = "praison-agent-rl"


def look_there(link: Link, remote: Remote, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the other machine says of itself (``probe.look``); raises Unreachable and ConfigError."""
    told = {key: value for key, value in config.items() if key != "remote"}
    request = {"workdir": remote.workdir, "version": own_version(), "config": told, "env": variables_of(remote)}
    # python reads the whole of its input before it does anything, so what is asked has to stand in the text itself
    source = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    text = f"{source}\n\nsay({json.dumps(json.dumps(request))}, {MARK.decode()!r})\n"
    try:
        with link.talk(["-"], text.encode()) as said:
            found: dict[str, Any] = json.loads(said.read())
    except TrainingFailed as error:  # nothing has run: what was named is no Python that can be used
        raise ConfigError(f"remote.python {remote.python!r}: {error}") from error
    return found


def check_there(found: Mapping[str, Any], remote: Remote, run: RunFolder) -> None:
    """Raise ConfigError, with all that it lacks at once, for a machine that says of itself what is ``found``."""
    if lacks := [*_lacks(found, remote, run.plan), *_lacks_room(found, run)]:
        raise ConfigError(f"the run cannot happen on {remote.host!r}:\n" + "\n".join(lacks))


def variables_of(remote: Remote) -> dict[str, str]:
    """The variables of this environment that the run gets; they go through the connection alone."""
    return {name: os.environ[name] for name in remote.env}


def own_version() -> str:
    """Of this package."""
    return importlib.metadata.version(_PACKAGE)


def in_short(found: Mapping[str, Any], host: str) -> str:
    """The machine for a person."""
    gpus = ", ".join(found["gpus"]) or "no GPU, so its CPU computes"
    return f"the run happens on {host}: {gpus}; {in_words(found['free'])} of disk free"


def _lacks(found: Mapping[str, Any], remote: Remote, plan: Plan) -> Iterator[str]:
    if found["system"] != "posix":
        yield "it is no Linux or other POSIX system, where alone a run can be left to itself"
    if found["folder_fault"]:
        yield f"remote.workdir {found['workdir']!r} cannot be used: {found['folder_fault']}; name another folder"
    version = tuple(map(int, found["python"].split(".")))
    if version < (3, 10):
        yield f"{remote.python!r} is Python {found['python']} there, and 3.10 is needed; name another by remote.python"
    elif found["package"] != own_version():
        has = f"has version {found['package']} of it" if found["package"] else "has not this package"
        yield f"its {remote.python!r} {has}, and {own_version()} is needed; install it with: {_install(remote)}"
    yield from found["faults"]
    yield from _lacks_gpus(found, remote, plan)


def _lacks_gpus(found: Mapping[str, Any], remote: Remote, plan: Plan) -> Iterator[str]:
    there, nproc = len(found["gpus"]), (plan.config.get("launch") or {}).get("nproc") or 1
    if remote.gpus and there < remote.gpus:
        yield f"remote.gpus is {remote.gpus}, and nvidia-smi shows {there} there"
    elif 0 < there < nproc:
        yield f"launch.nproc is {nproc}, and nvidia-smi shows {there} GPUs there; one process is for each"


def _lacks_room(found: Mapping[str, Any], run: RunFolder) -> Iterator[str]:
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    counts = {"train": _lines(run.train_rows), "held_out": _lines(run.held_out_rows)}
    device = str(found.get("device", "cuda" if found["gpus"] else "cpu"))
    needed = estimate_run(config, plan.base, **counts, device=device).disk_bytes or LEAST_DISK
    if needed > found["free"]:
        yield (
            f"the run needs about {in_words(needed)} of disk for its model and checkpoints, and {found['workdir']!r} "
            f"is on a disk with {in_words(found['free'])} free; make room, or name another folder by remote.workdir"
        )


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _install(remote: Remote) -> str:
    command = f'{remote.python} -m pip install "{_PACKAGE}[train]=={own_version()}"'
    return shlex.join(["ssh", remote.host, command])
