"""The story of a run that happens on another machine: check it, send what it needs, follow it, and bring it home.

It has the contract of ``training.launch.launch_stages``: the run's folder was planned here, its events come as they
happen, and in the end the folder is as if all had happened here.
"""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from praison_agent_rl import errors
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError, PraisonRLError, TrainingFailed
from praison_agent_rl.locks import locked
from praison_agent_rl.remote.connection import Link, patiently
from praison_agent_rl.remote.following import OnEvent, Place, asked, bring_home, fetch_log, follow, forget, place_of
from praison_agent_rl.remote.refusals import check_possible
from praison_agent_rl.remote.starting import Journey, start_there
from praison_agent_rl.runs import RunFolder

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
    with locked(run.root / _LOCK, refused=lambda holder: _followed(run, holder)):
        place = _found_or_started(journey, stages, resume)
        with _saying_that_it_goes_on(journey, place):
            _follow_home(journey, place)
        forget(journey.link, place, run)


def _found_or_started(journey: Journey, stages: Sequence[str], resume: bool) -> Place:
    """Where the run goes on, or has ended well; else it is started, there where it was if it was."""
    run, place = journey.run, place_of(journey.run)
    state = asked(journey.link, place, "status") if place is not None else {"state": "gone"}
    if place is not None and (state["state"] == "running" or state.get("outcome") == "done"):
        for event in [event for _, event in run.events() if event["event"] == "stage"][-1:]:
            journey.on_event(event)  # who watches from now on has not heard it
        return place
    begun = state["state"] != "gone"
    return start_there(journey, stages, begun=begun, resume=resume or begun)


def _follow_home(journey: Journey, place: Place) -> None:
    """Wait for the run's end there, across lost connections, and bring its result home; raises the run's error."""
    run, link = journey.run, journey.link
    wait = partial(patiently, on_lost=journey.say)
    wait(lambda: follow(link, place, run, journey.on_event))
    state = wait(lambda: asked(link, place, "status"))
    if state.get("outcome") != "done":
        wait(lambda: fetch_log(link, place, run, state))
        raise _error_of(run, place, state)
    journey.say(f"bringing the result home from {place.host}")
    wait(lambda: bring_home(link, place, run, state["sums"]))


def stop_there(run: RunFolder) -> bool:
    """Stop the run where it happens, as Ctrl-C stops one here; its checkpoints stay there. False if none goes on.

    Raises:
        ConfigError: the run does not happen on another machine.
        Unreachable: the machine cannot be reached.
    """
    place, remote = place_of(run), remote_of(run)
    if place is None or remote is None:
        raise ConfigError(f"the run in {str(run.root)!r} does not happen on another machine, so there is none to stop")
    return bool(asked(Link(remote), place, "stop"))


def remote_of(run: RunFolder) -> Remote | None:
    """The machine on which a run was planned to happen; None for this one."""
    return TrainConfig.load(run.plan.config, need_model=False, need_data=False).remote


def _followed(run: RunFolder, holder: str) -> ConfigError:
    return ConfigError(f"the run in {str(run.root)!r} is followed already, by {holder}; leave it to that, or end that")


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


def _error_of(run: RunFolder, place: Place, state: Mapping[str, Any]) -> PraisonRLError:
    """The error that the end of the run there means, with the paths and words that go on with it here."""
    where = f"the whole log is {run.log}; to go on from the last checkpoint there: --resume {run.root}"
    if state.get("outcome") == "failed":
        kind: type[PraisonRLError] = getattr(errors, state["kind"], TrainingFailed)
        there = f"{place.folder}/run"
        text = state["message"].replace(f"{there}/{run.log.name}", str(run.log))
        return kind(f"on {place.host}: {text.replace(f'--resume {there}', f'--resume {run.root}')}")
    if state.get("outcome") == "stopped":
        return TrainingFailed(f"the run on {place.host} was stopped\n{where}")
    if state["state"] == "gone":
        return TrainingFailed(
            f"the run's folder {place.folder!r} on {place.host} is gone; to begin it anew: --resume {run.root}"
        )
    return TrainingFailed(
        f"the run on {place.host} died (out of memory, or the machine was restarted?); its last lines:\n"
        f"{state['log']}\nto go on from the last checkpoint there: --resume {run.root}"
    )
