"""Check another machine, send it what a run needs, and start the run there."""

import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError, TrainingFailed
from praison_agent_rl.estimate import in_words
from praison_agent_rl.measuring import results_of
from praison_agent_rl.remote.checkpoints import checkpoint_for
from praison_agent_rl.remote.checks import Load, in_short, variables_of
from praison_agent_rl.remote.connection import Link, patiently
from praison_agent_rl.remote.following import CARRYING, RECORD, OnEvent, Place, asked, forget, place_of
from praison_agent_rl.remote.luggage import Weights, plan_for
from praison_agent_rl.remote.there import hash_file, pack
from praison_agent_rl.remote.visiting import Visit, visit
from praison_agent_rl.runs import RunFolder, slug, write_record

_STAY = (RECORD, "plan.json", "checkpoints")
"""Of the run's folder here; the plan and the newest checkpoint go over as they are told there."""


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
        TrainingFailed: what it needs cannot be brought there.
    """
    run, remote, known = journey.run, journey.remote, place_of(journey.run)
    plan = run.plan
    load = Load(plan, train=_lines(run.train_rows), held_out=_lines(run.held_out_rows))
    visited = visit(remote, load, folder=known.folder if known else None)
    found = visited.found
    journey.say(in_short(found, remote.host))
    if not begun:  # the events go over with the folder, and are the same on both sides from here on, in time too
        run.report_event("note", text=in_short(found, remote.host), time=found["time"])
    place = _place(run, remote, found)
    write_record(run.root / RECORD, place)
    try:
        _send(journey, place, visited, begun=begun)
    except ConfigError:
        if not begun:
            forget(journey.link, place, run)
        raise
    write_record(run.plan_file, plan.model_copy(update={"libraries": found["libraries"]}))  # the result depends on them
    request = {"stages": list(stages), "resume": resume, "env": variables_of(remote), "attempt": secrets.token_hex(8)}
    patiently(lambda: asked(journey.link, place, "start", **request), journey.say)
    return place


def _place(run: RunFolder, remote: Remote, found: Mapping[str, Any]) -> Place:
    """Where the run is there, or will be; the package there may have moved since."""
    known = place_of(run)
    name = f"{slug(run.root.resolve().name)}-{secrets.token_hex(4)}"
    folder = known.folder if known else f"{found['workdir']}/runs/{name}"
    return Place(host=remote.host, folder=folder, script=found["script"])


def _send(journey: Journey, place: Place, visited: Visit, *, begun: bool) -> None:
    """Send the project, the run's folder if it is not there yet, and weights that are not there yet."""
    plan, found = journey.run.plan, visited.found
    if visited.project.files:
        journey.say(f"of the project {visited.files_in_words} go along")
    files = {f"project/{name}": path for name, path in visited.project.files.items()}
    with TemporaryDirectory() as temporary:
        if not begun:
            places = {source: one.place(found["workdir"]) for source, one in visited.weights.items()}
            told = plan_for(plan, found, visited.project, places)
            write_record(Path(temporary) / "plan.json", told)
            files |= _of_run(journey.run) | checkpoint_for(journey.run, told, Path(temporary))
            files["run/plan.json"] = Path(temporary) / "plan.json"  # last: a folder with a plan is a whole one
        _deliver(journey, place, place.folder, files)
    patiently(lambda: _check_rewards(journey, place), journey.say)
    for one in visited.weights.values():
        _deliver_weights(journey, place, one, found)


def _of_run(run: RunFolder) -> dict[str, Path]:
    """The files of the run's folder, but for what was measured here: both sides are to be measured on one machine."""
    measured = {path for side in ("base", "new") for path in results_of(run, side)}
    files = (path for path in sorted(run.root.rglob("*")) if path.is_file() and path not in measured)
    names = {path.relative_to(run.root).as_posix(): path for path in files}
    return {f"run/{name}": path for name, path in names.items() if name.split("/")[0] not in _STAY and name[0] != "."}


def _check_rewards(journey: Journey, place: Place) -> None:
    """Raise ConfigError for rewards, tools and environments that cannot be found there, or be imported."""
    request = {"folder": place.folder, "env": variables_of(journey.remote)}
    faults = journey.link.ask(["-m", CARRYING, "check"], request)
    if faults:
        raise ConfigError(
            f"on {place.host!r} not everything that the run names can be used:\n" + "\n".join(faults) + "\nWhat is not "
            "installed there goes along if it lies under the current folder and is imported by name, or is named in "
            "remote.bring"
        )


def _deliver_weights(journey: Journey, place: Place, weights: Weights, found: Mapping[str, Any]) -> None:
    folder = weights.folder(found["workdir"])
    request = {"folder": folder, "sums": weights.sums}
    names = patiently(lambda: journey.link.ask([place.script, "lacking"], request), journey.say)
    if names:
        size = in_words(sum(weights.files[name].stat().st_size for name in names))
        journey.say(f"sending the weights {weights.path} ({size}); they stay there for further runs")
        _deliver(journey, place, folder, weights.files)


def _deliver(journey: Journey, place: Place, folder: str, files: Mapping[str, Path]) -> None:
    """Bring files into a folder there; what is there already is not sent again, nor after a lost connection."""
    request = {"folder": folder, "sums": _sums(files)}

    def send() -> None:
        names = journey.link.ask([place.script, "lacking"], request)
        if names:
            missing = {name: files[name] for name in names}
            journey.link.ask([place.script, "receive"], request, body=lambda stream: pack(missing, stream))

    try:
        patiently(send, journey.say)
    except TrainingFailed as error:
        raise TrainingFailed(
            f"{folder!r} on {place.host!r} cannot be filled: {error}\nput that right (a full disk?), then: "
            f"praison-agent-rl train --resume {shlex.quote(str(journey.run.root))}; what has arrived is not sent again"
        ) from error


def _sums(files: Mapping[str, Path]) -> dict[str, str]:
    try:
        return {name: hash_file(path) for name, path in files.items()}
    except OSError as error:
        raise ConfigError(f"{error.filename!r} is to go along, but cannot be read: {error.strerror}") from error


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)
