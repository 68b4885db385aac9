"""What another machine has of what a run needs; all that it lacks is said at once."""

import importlib.metadata
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError, TrainingFailed
from praison_agent_rl.estimate import LEAST_DISK, Estimate, estimate_run, in_words
from praison_agent_rl.records import Plan
from praison_agent_rl.remote.connection import Link
from praison_agent_rl.remote.there import MARK

_PACKAGE = "praison-agent-rl"
_READ = "import json, sys; exec(json.loads(sys.stdin.readline()))"
"""Has a Python there do our own text, which is the first line of its input. What is asked, with variables that may be
secrets, is the second one: no error that shows a line of its program shows those."""


class Load(NamedTuple):
    """What a run has another machine do."""

    plan: Plan
    train: int
    """Rows to train on."""
    held_out: int
    pair_tokens: float = 0.0
    """See `estimate_run`."""

    def cost(self, found: Mapping[str, Any]) -> Estimate:
        """What it is expected to take on a machine that says of itself what is ``found``."""
        config = TrainConfig.load(self.plan.config, need_model=False, need_data=False)
        counts: dict[str, Any] = {"train": self.train, "held_out": self.held_out, "pair_tokens": self.pair_tokens}
        return estimate_run(config, self.plan.base, **counts, device=device_of(found))


def look_there(
    link: Link, remote: Remote, config: Mapping[str, Any], *, hub: Sequence[str] = (), folder: str | None = None
) -> dict[str, Any]:
    """What the other machine says of itself (``probe.look``): also of models of the ``hub``, and of a run's folder.

    Raises:
        Unreachable: it cannot be reached.
        ConfigError: there is no Python that can be used.
    """
    told = {key: value for key, value in config.items() if key != "remote"}
    facts = {"workdir": remote.workdir, "version": own_version(), "hub": list(hub), "folder": folder}
    request = {**facts, "config": told, "env": variables_of(remote)}
    source = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    text = f"{source}\n\nsay(sys.stdin.readline(), {MARK.decode()!r})\n"
    lines = [json.dumps(line).encode() + b"\n" for line in (text, request)]
    try:
        with link.talk(["-c", _READ], b"".join(lines)) as said:
            answer = said.readline()
            said.read()
    except TrainingFailed as error:  # nothing has run: what was named is no Python that can be used
        raise ConfigError(f"remote.python {remote.python!r}: {error}") from error
    found: dict[str, Any] = json.loads(answer)
    return found


def check_there(found: Mapping[str, Any], remote: Remote, load: Load, *, sent: int) -> None:
    """Raise ConfigError, with all that it lacks at once, for a machine that says of itself what is ``found``.

    ``sent`` are the bytes of weights that go there.
    """
    if lacks := [*_lacks(found, remote, load.plan), *_lacks_room(found, load, sent)]:
        raise ConfigError(f"the run cannot happen on {remote.host!r}:\n" + "\n".join(lacks))


def device_of(found: Mapping[str, Any]) -> str:
    """What the machine computes on; guessed where the package there could not be asked."""
    return str(found.get("device", "cuda" if found["gpus"] else "cpu"))


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


def _lacks_room(found: Mapping[str, Any], load: Load, sent: int) -> Iterator[str]:
    needed = (load.cost(found).disk_bytes or LEAST_DISK) + sent
    free = found["free"] + found["held"]  # what a run that is gone on with has written is part of what it needs
    if needed > free:
        weights = f", {in_words(sent)} of it for weights that go there" if sent else ""
        yield (
            f"the run needs about {in_words(needed)} of disk for its model and checkpoints{weights}, and "
            f"{found['workdir']!r} is on a disk with {in_words(free)} free; make room, or name another folder by "
            "remote.workdir"
        )


def _install(remote: Remote) -> str:
    command = f'{remote.python} -m pip install "{_PACKAGE}[train]=={own_version()}"'
    return shlex.join(["ssh", remote.host, command])
