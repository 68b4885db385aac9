"""Check another machine, send it what a run needs, and start the run there."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.estimate import in_words
from praison_agent_rl.remote.checks import check_there, in_short, look_there, variables_of
from praison_agent_rl.remote.connection import Link, patiently
from praison_agent_rl.remote.following import RECORD, OnEvent, Place, asked, forget, place_of
from praison_agent_rl.remote.luggage import Project, Weights, plan_for, project_of, weights_of
from praison_agent_rl.remote.there import hash_file, pack
from praison_agent_rl.runs import RunFolder, slug, write_record

_NAMES_SHOWN = 8
_STAY = (RECORD, "plan.json", "checkpoints")
"""Of the run's folder here; the plan goes over as it is told there."""


@dataclass(frozen=True)
class Journey:
    """A run, the machine that it goes to, and who watches."""

    run: RunFolder
    remote: Remote
    on_event: OnEvent

    @property
    def link(self) -> Link:
        """To the machine."""
        return Link(self.remote)

    def say(self, text: str) -> None:
        """A note for who watches."""
        self.on_event({"event": "note", "text": text})


def start_there(journey: Journey, stages: Sequence[str], *, begun: bool, resume: bool) -> Place:
    """Start a run there, and say where it is; where it has ``begun`` there, its folder is gone on with.

    Raises:
        ConfigError: the run cannot happen there; everything that is known to keep it from it is said at once.
    """
    run, remote = journey.run, journey.remote
    plan, project = run.plan, project_of(run.plan, remote)
    found = look_there(journey.link, remote, plan.config)
    check_there(found, remote, run)
    journey.say(in_short(found, remote.host))
    if not begun:  # the events go over with the folder, and are the same on both sides from here on
        run.report_event("note", text=in_short(found, remote.host))
    place = _place(run, remote, found)
    write_record(run.root / RECORD, place)
    try:
        _send(journey, place, found, project, begun=begun)
    except ConfigError:
        if not begun:
            forget(journey.link, place, run)
        raise
    write_record(run.plan_file, plan.model_copy(update={"libraries": found["libraries"]}))  # the result depends on them
    asked(journey.link, place, "start", stages=list(stages), resume=resume, env=variables_of(remote))
    return place


def _place(run: RunFolder, remote: Remote, found: Mapping[str, Any]) -> Place:
    """Where the run is there, or will be; the package there may have moved since."""
    known = place_of(run)
    name = f"{slug(run.root.resolve().name)}-{secrets.token_hex(4)}"
    folder = known.folder if known else f"{found['workdir']}/runs/{name}"
    return Place(host=remote.host, folder=folder, script=found["script"])


def _send(journey: Journey, place: Place, found: Mapping[str, Any], project: Project, *, begun: bool) -> None:
    """Send the project, the run's folder if it is not there yet, and weights that are not there yet."""
    plan = journey.run.plan
    weights = weights_of(plan)
    if project.files:
        names = ", ".join(sorted(project.files)[:_NAMES_SHOWN])
        more = f" and {len(project.files) - _NAMES_SHOWN} more" if len(project.files) > _NAMES_SHOWN else ""
        journey.say(f"of the project {names}{more} go along")
    files = {f"project/{name}": path for name, path in project.files.items()}
    with TemporaryDirectory() as temporary:
        if not begun:
            told = Path(temporary) / "plan.json"
            places = {source: one.place(found["workdir"]) for source, one in weights.items()}
            write_record(told, plan_for(plan, found, project, places))
            files |= _of_run(journey.run) | {"run/plan.json": told}  # last: a folder with a plan is a whole one
        _deliver(journey, place, place.folder, files)
    _check_rewards(journey, place)
    for one in weights.values():
        _deliver_weights(journey, place, one, found)


def _of_run(run: RunFolder) -> dict[str, Path]:
    """The files of the run's folder as it was planned."""
    files = (path for path in sorted(run.root.rglob("*")) if path.is_file())
    names = {path.relative_to(run.root).as_posix(): path for path in files}
    return {f"run/{name}": path for name, path in names.items() if name.split("/")[0] not in _STAY and name[0] != "."}


def _check_rewards(journey: Journey, place: Place) -> None:
    """Raise ConfigError for rewards, tools and environments that cannot be found there, or be imported."""
    request = {"folder": place.folder, "env": variables_of(journey.remote)}
    faults = journey.link.ask(["-m", "praison_agent_rl.remote.carrying", "check"], request)
    if faults:
        raise ConfigError(
            f"on {place.host!r} not everything that the run names can be used:\n" + "\n".join(faults) + "\nWhat is not "
            "installed there goes along if it lies under the current folder and is imported by name, or is named in "
            "remote.bring"
        )


def _deliver_weights(journey: Journey, place: Place, weights: Weights, found: Mapping[str, Any]) -> None:
    folder = weights.folder(found["workdir"])
    names = journey.link.ask([place.script, "lacking"], {"folder": folder, "sums": weights.sums})
    size = sum(weights.files[name].stat().st_size for name in names)
    if size > found["free"]:
        raise ConfigError(
            f"the weights {str(weights.path)!r} ({in_words(size)}) have no room on {place.host!r}, where "
            f"{in_words(found['free'])} are free; make room there, or name another folder by remote.workdir"
        )
    if names:
        journey.say(f"sending the weights {weights.path} ({in_words(size)}); they stay there for further runs")
        _deliver(journey, place, folder, weights.files)


def _deliver(journey: Journey, place: Place, folder: str, files: Mapping[str, Path]) -> None:
    """Bring files into a folder there; what is there already is not sent again, nor after a lost connection."""
    sums = {name: hash_file(path) for name, path in files.items()}
    request = {"folder": folder, "sums": sums}

    def send() -> None:
        names = journey.link.ask([place.script, "lacking"], request)
        if names:
            missing = {name: files[name] for name in names}
            journey.link.ask([place.script, "receive"], request, body=lambda stream: pack(missing, stream))

    patiently(send, journey.say)
