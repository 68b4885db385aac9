"""The story of a run that happens on another machine: check it, send what it needs, follow it, and bring it home.

It has the contract of ``training.launch.launch_stages``: the run's folder was planned here, its events come as they
happen, and in the end the folder is as if all had happened here.
"""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from praison_agent_rl import errors
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError, PraisonRLError, TrainingFailed
from praison_agent_rl.libraries import library_versions
from praison_agent_rl.locks import locked
from praison_agent_rl.remote.checkpoints import bring_checkpoint
from praison_agent_rl.remote.checks import look_there
from praison_agent_rl.remote.connection import Link, patiently
from praison_agent_rl.remote.following import (
    RECORD,
    OnEvent,
    Place,
    asked,
    bring_home,
    fetch_log,
    follow,
    forget,
    place_of,
)
from praison_agent_rl.remote.refusals import check_possible
from praison_agent_rl.remote.starting import Journey, start_there
from praison_agent_rl.runs import RunFolder, write_record

_LOCK = ".following"


def run_there(
    run: RunFolder, remote: Remote, stages: Sequence[str], on_event: OnEvent, *, resume: bool = False
) -> None:
    """Do ``stages`` of a run on another machine, and wait for its end; a run that is there already is gone on with.

    The run there outlives this process and every connection. Ctrl-C stops the following alone, and says so.

    Raises:
        ConfigError: the run cannot happen there; all that keeps it from it is said at once, before anything is started.
        Unreachable: the machine cannot be reached at first; later on it is waited for.
        PraisonRLError: the run's own error there.
        TrainingFailed: it was stopped or died there; the message ends with the last lines of its log.
    """
    check_possible(run.plan)
    journey = Journey(run, remote, on_event)
    with _alone(run):
        place = _found_or_started(journey, stages, resume)
        with _saying_that_it_goes_on(journey, place):
            _follow_home(journey, place)
        forget(journey.link, place, run)


def _found_or_started(journey: Journey, stages: Sequence[str], resume: bool) -> Place:
    """Where the run goes on, or has ended well; else it is started, there where it was if it was."""
    run, place = journey.run, place_of(journey.run)
    place, state = _state_of(journey, place) if place is not None else (None, {"state": "gone"})
    if place is not None and (state["state"] == "running" or state.get("outcome") == "done"):
        for event in [event for _, event in run.events() if event["event"] == "stage"][-1:]:
            journey.on_event(event)  # who watches from now on has not heard it
        return place
    begun = state["state"] != "gone"
    return start_there(journey, stages, begun=begun, resume=resume or begun)


def _state_of(journey: Journey, place: Place) -> tuple[Place, Mapping[str, Any]]:
    """What the machine says of the run, and where it is; the package there may have moved since."""
    run, link = journey.run, journey.link
    try:
        return place, asked(link, place, "status")
    except TrainingFailed:
        found = look_there(link, journey.remote, run.plan.config)
        if found.get("script", place.script) == place.script:
            raise
        place = place.model_copy(update={"script": found["script"]})
        write_record(run.root / RECORD, place)
        return place, asked(link, place, "status")


def _follow_home(journey: Journey, place: Place) -> None:
    """Wait for the run's end there, across lost connections, and bring its result home; raises the run's error."""
    run, link = journey.run, journey.link
    wait = partial(patiently, on_lost=journey.say)
    wait(lambda: follow(link, place, run, journey.on_event))
    state = wait(lambda: asked(link, place, "status"))
    if state.get("outcome") != "done":
        raise _error_of(run, place, state, _bring_what_is_left(journey, place, state))
    journey.say(f"bringing the result home from {place.host}")
    wait(lambda: bring_home(link, place, run, state["sums"]))


def _bring_what_is_left(journey: Journey, place: Place, state: Mapping[str, Any]) -> Path | None:
    """Bring the log and the newest whole checkpoint home of a run that did not end well; the latter, if there is one.

    What cannot be brought is said, and stays there: it hides no error of the run.
    """
    if state["state"] == "gone":
        return None
    try:
        patiently(lambda: fetch_log(journey.link, place, journey.run, state), journey.say)
        return patiently(lambda: bring_checkpoint(journey.link, place, journey.run), journey.say)
    except (OSError, ValueError, PraisonRLError) as error:
        journey.say(f"not all that the run left on {place.host} could be brought home, and it is kept there: {error}")
        return None


def stop_there(run: RunFolder, say: Callable[[str], None] = lambda text: None) -> bool:
    """Stop the run where it happens, as Ctrl-C stops one here; False if none goes on.

    Its newest whole checkpoint comes home, by this process or by the one that follows the run.

    Raises:
        ConfigError: the run does not happen on another machine.
        Unreachable: the machine cannot be reached.
    """
    place, remote = place_of(run), remote_of(run)
    if place is None or remote is None:
        raise ConfigError(f"the run in {str(run.root)!r} does not happen on another machine, so there is none to stop")
    journey = Journey(run, remote, lambda event: say(str(event["text"])))
    stopped = bool(asked(journey.link, place, "stop"))
    with contextlib.suppress(_FollowedElsewhere), _alone(run):
        state = asked(journey.link, place, "status")
        if state.get("outcome") == "done":
            say(f"it has ended well on {place.host}; bring it home with --resume {shlex.quote(str(run.root))}")
            return stopped
        patiently(lambda: follow(journey.link, place, run, lambda event: None), journey.say)
        if (checkpoint := _bring_what_is_left(journey, place, state)) is not None:
            root = shlex.quote(str(run.root))
            say(
                f"{checkpoint.name} is here ({checkpoint}); go on from it on {place.host} with --resume {root}, and "
                f"here with --resume {root} --set remote=null"
            )
    return stopped


def move_run(run: RunFolder, given: Any, say: Callable[[str], None] = lambda text: None) -> None:
    """Let a run go on elsewhere than it was planned to: on the machine ``given``, or on this one where that is None.

    What the other machine has of it comes home first, and is taken away there.

    Raises:
        ConfigError: it still goes on there, has ended well there, or ``given`` is no machine.
        Unreachable: the machine where it was cannot be reached.
        TrainingFailed: what it left there cannot be brought home.
    """
    plan, place, remote = run.plan, place_of(run), remote_of(run)
    config = TrainConfig.load({**plan.config, "remote": given}, need_model=False, need_data=False)
    update: dict[str, Any] = {"config": {**plan.config, "remote": config.resolved().get("remote")}}
    if config.remote is None:
        update["libraries"] = library_versions()
    with _alone(run):
        left = place if config.remote is None or place is None or config.remote.host != place.host else None
        if left is not None and remote is not None:
            _bring_all_home(Journey(run, remote, lambda event: say(str(event["text"]))), left)
        write_record(run.plan_file, plan.model_copy(update=update))
        if left is not None and remote is not None:
            forget(Link(remote), left, run)


def _bring_all_home(journey: Journey, place: Place) -> None:
    run = journey.run
    place, state = _state_of(journey, place)
    if state["state"] == "running" or state.get("outcome") == "done":
        fate = f"goes on on {place.host}; stop it first" if state["state"] == "running" else f"is done on {place.host}"
        verb = "--stop" if state["state"] == "running" else "--resume"
        raise ConfigError(f"the run {fate}: praison-agent-rl train {verb} {shlex.quote(str(run.root))}")
    if state["state"] == "gone":
        return
    patiently(lambda: follow(journey.link, place, run, lambda event: None), journey.say)
    try:
        patiently(lambda: bring_checkpoint(journey.link, place, run), journey.say)
    except (OSError, ValueError) as error:
        raise TrainingFailed(f"what the run left on {place.host} cannot be brought home: {error}") from error


def remote_of(run: RunFolder) -> Remote | None:
    """The machine on which a run was planned to happen; None for this one."""
    return TrainConfig.load(run.plan.config, need_model=False, need_data=False).remote


class _FollowedElsewhere(ConfigError):
    """Another process has the run."""


def _alone(run: RunFolder) -> contextlib.AbstractContextManager[None]:
    """While the block lasts no other process follows the run, or brings anything of it home."""

    def refused(holder: str) -> ConfigError:
        return _FollowedElsewhere(
            f"the run in {str(run.root)!r} is followed already, by {holder}; leave it to that, or end that"
        )

    return locked(run.root / _LOCK, refused=refused)


@contextlib.contextmanager
def _saying_that_it_goes_on(journey: Journey, place: Place) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        root = shlex.quote(str(journey.run.root))
        journey.say(
            f"the run goes on on {place.host}, and only the following has ended; come back to it with: "
            f"praison-agent-rl train --resume {root}; end it with: praison-agent-rl train --stop {root}"
        )
        raise


def _error_of(run: RunFolder, place: Place, state: Mapping[str, Any], home: Path | None) -> PraisonRLError:
    """The error that the end of the run there means, with the paths and words that go on with it here."""
    root, there = shlex.quote(str(run.root)), f"{place.folder}/run"
    again = f"to go on from the last checkpoint there: --resume {root}"
    here = f"\n{home.name} is here too; to go on from it here: --resume {root} --set remote=null" if home else ""
    if state.get("outcome") == "failed":
        kind: type[PraisonRLError] = getattr(errors, state["kind"], TrainingFailed)
        text = state["message"].replace(f"{there}/{run.log.name}", str(run.log))
        for name in (shlex.quote(there), there):
            text = text.replace(f"--resume {name}", f"--resume {root}")
        return kind(f"on {place.host}: {text}{here}")
    if state.get("outcome") == "stopped":
        return TrainingFailed(f"the run on {place.host} was stopped\nthe whole log is {run.log}; {again}{here}")
    if state["state"] == "gone":
        return TrainingFailed(
            f"the run's folder {place.folder!r} on {place.host} is gone; to begin it anew, or to go on from a "
            f"checkpoint that is here: --resume {root}"
        )
    return TrainingFailed(
        f"the run on {place.host} died (out of memory, or the machine was restarted?); its last lines:\n"
        f"{state['log']}\n{again}{here}"
    )
