"""Start a run's stages in a child process, follow its events, and turn its end into a result or an error.

Where several processes train one model, a launcher starts them for that stage alone; the others are of one process.
"""

import errno
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from praison_agent_rl import errors
from praison_agent_rl.backends import choose_backend
from praison_agent_rl.child import LAUNCHER, last_lines, start_child, stop_child
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.launching import Launch
from praison_agent_rl.errors import PraisonRLError, TrainingFailed
from praison_agent_rl.launchers import launch_command, launch_of
from praison_agent_rl.process_settings import best_device, child_environment
from praison_agent_rl.runs import RunFolder, alone_in
from praison_agent_rl.stop_requests import ENDING, Terminated, ask_to_end, heeding_signals, take_back

OnEvent = Callable[[dict[str, Any]], None]

_POLL_SECONDS = 0.2
_STAGES = "praison_agent_rl.stages"
_PROCESSES = "praison_agent_rl.training.processes"


class Child(NamedTuple):
    """One child process of a run."""

    module: str
    """What it runs."""
    words: list[str]
    """What that is told."""
    env: Mapping[str, str]


def launch_stages(
    run: RunFolder,
    stages: Sequence[str],
    on_event: OnEvent,
    *,
    resume: bool = False,
    env: Mapping[str, str] | None = None,
) -> None:
    """Do ``stages`` in a child process that is given the folder and ``env`` and nothing else, and wait for its end.

    The child ends when this process does. Ctrl-C and SIGTERM end it too: while it trains after the step under way, of
    which a checkpoint is saved, and at once if they come again. With ``launch`` in the run's configuration the stage
    ``train`` has a child of its own, which starts the processes that train.

    Raises:
        ConfigError: another process works on the run already, or nothing can be written in its folder.
        KeyboardInterrupt: the child was ended so; ``Terminated`` for SIGTERM.
        PraisonRLError: the child's own error, as if it had happened here.
        TrainingFailed: the child died; the message ends with the last lines of its log.
    """
    with alone_in(run):
        take_back(run)
        _launch(run, stages, on_event, {"resume": resume, "env": env or {}})


def _launch(run: RunFolder, stages: Sequence[str], on_event: OnEvent, given: dict[str, Any]) -> None:
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    training = "train" in stages and not run.adapter.exists()
    launch = launch_of(config) if training else None
    # what Unsloth changes in transformers is to have no part in what is measured and merged
    apart = training and (launch is not None or choose_backend(config, run.plan.device).name == "unsloth")
    if not apart:
        _follow(run, _in_one(run, stages, **given), on_event)
        return
    place = list(stages).index("train")
    before, after = stages[:place], stages[place + 1 :]
    if before:
        _follow(run, _in_one(run, before, **given), on_event, goes_on=True)
    if launch is not None:
        run.report_event("launch", processes=launch.processes)  # machines besides this one wait for it
    child = in_several(run, launch, **given) if launch else _in_one(run, ["train"], **given)
    _follow(run, child, on_event, goes_on=bool(after))
    if after:
        _follow(run, _in_one(run, after, **given), on_event)


def in_several(run: RunFolder, launch: Launch, *, resume: bool, env: Mapping[str, str]) -> Child:
    """What starts the processes of this machine that do the stage ``train``."""
    root = str(run.root.resolve())
    command = launch_command(launch, [LAUNCHER, _STAGES, root, "train", *_resuming(resume)])
    shared = child_environment(device=best_device(), processes=launch.nproc)  # the cores of this machine
    return Child(_PROCESSES, [root, command.launcher, *command.arguments], {**shared, **env})


def _in_one(run: RunFolder, stages: Sequence[str], *, resume: bool, env: Mapping[str, str]) -> Child:
    return Child(_STAGES, [str(run.root.resolve()), *stages, *_resuming(resume)], env)


def _resuming(resume: bool) -> list[str]:
    return ["--resume"] if resume else []


def _follow(run: RunFolder, planned: Child, on_event: OnEvent, *, goes_on: bool = False) -> None:
    """Start a child, hand on its events until it has ended, and raise its error if it failed.

    That it is done is not told where the run ``goes_on`` with another one.
    """
    followed = _Followed(run, on_event, goes_on)
    child = start_child(planned.module, planned.words, log=run.log, env=planned.env)
    try:
        with heeding_signals(followed.ask):
            while followed.tell(ended=child.poll() is not None):
                time.sleep(_POLL_SECONDS)
    finally:
        stop_child(child)
    if followed.signal is not None:
        raise Terminated if followed.signal == signal.SIGTERM else KeyboardInterrupt
    if followed.outcome.get("event") != "done":
        raise _error_of(run, child, followed.outcome)


class _Followed:
    """The events of a run that happens in another process, and the user's wish that it ends."""

    def __init__(self, run: RunFolder, on_event: OnEvent, goes_on: bool) -> None:
        self._run, self._on_event, self._goes_on = run, on_event, goes_on
        self._seen = run.events_file.stat().st_size if run.events_file.exists() else 0
        self._trains = self._told = False
        self.signal: int | None = None
        """By which the user asked that the run ends."""
        self.outcome: dict[str, Any] = {}

    def ask(self, number: int) -> bool:
        """Whether the run ends by itself after the step under way; else there is nothing to wait for."""
        if self.signal is not None or not self._trains:
            return False
        self.signal = number
        return True

    def tell(self, *, ended: bool) -> bool:
        """Hand on what happened since; ``ended`` was asked before, so that the last events are still read."""
        if self.signal is not None and not self._told:
            ask_to_end(self._run)
            self._on_event({"event": "note", "text": ENDING})
            self._told = True
        for after, event in list(self._run.events(self._seen)):
            self._seen = after
            if event["event"] == "stage":
                self._trains = event["stage"] == "train"
            if event["event"] in ("done", "failed") and self.outcome.get("event") != "failed":
                self.outcome = event  # of several processes that fail the first says why, and the others follow
            if not self._goes_on or event["event"] != "done":
                self._on_event(event)
        return not ended and (self._trains or self.signal is None)


def _error_of(run: RunFolder, child: "subprocess.Popen[bytes]", outcome: dict[str, Any]) -> PraisonRLError:
    where = f"the whole log is {run.log}; to go on from the last checkpoint: --resume {shlex.quote(str(run.root))}"
    if outcome.get("event") == "failed":
        # a reward that passed its checks and fails now is no wrong input any more
        failed_run = outcome["kind"] in ("TrainingFailed", "RewardError")
        kind: type[PraisonRLError] = TrainingFailed if failed_run else getattr(errors, outcome["kind"], TrainingFailed)
        return kind(f"{outcome['message']}\n{where}" if failed_run else outcome["message"])
    code = child.returncode
    if code == errno.ENOSPC or "No space left on device" in last_lines(run.log):
        return TrainingFailed(
            f"the disk that {str(run.root)!r} is on is full; make room there, then go on with the run\n{where}"
        )
    how = "was killed (out of memory?)" if code == -9 else f"ended with code {code}"
    return TrainingFailed(f"the training process {how}; its last lines:\n{last_lines(run.log)}\n{where}")
