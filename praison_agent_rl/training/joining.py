"""What the machines do that train beside machine 0: wait for it, and start their own processes on the same run."""

import time
from pathlib import Path

from praison_agent_rl.child import last_lines, start_child, stop_child
from praison_agent_rl.config_fields.launching import Launch
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.launchers import node_of
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.launch import in_several

_POLL_SECONDS = 0.5
_TURNS = ("launch", "done", "failed")


def join_run(root: Path, launch: Launch, *, patience: float = 1800.0) -> None:
    """Train on this machine what machine 0 of ``launch`` trains in ``root``, a folder that both see; wait for the end.

    Machine 0 plans and measures first; ``patience`` is how long its plan may take, in seconds. A run whose training is
    behind it is left alone.

    Raises:
        TrainingFailed: there is no plan, machine 0 failed before it trained, or a process of this machine ended badly.
    """
    run = RunFolder(root)
    _wait_for_plan(run, patience)
    if not _begins(run):
        return
    # whatever that start says, which may be of an attempt that was killed: of a fresh run there is no checkpoint yet
    planned = in_several(run, launch, resume=True, env={})
    log = root / f"log-{node_of(launch)}.txt"
    child = start_child(planned.module, planned.words, log=log, env=planned.env)
    try:
        code = child.wait()
    finally:
        stop_child(child)
    if code:
        raise TrainingFailed(f"training on this machine ended with code {code}; its last lines:\n{last_lines(log)}")


def _wait_for_plan(run: RunFolder, patience: float) -> None:
    began = time.monotonic()
    while not run.plan_file.is_file():
        if time.monotonic() - began > patience:
            raise TrainingFailed(
                f"machine 0 planned no run in {str(run.root)!r} within {patience / 60:.0f} minutes; output_dir must be "
                "a folder that all machines see"
            )
        time.sleep(_POLL_SECONDS)


def _begins(run: RunFolder) -> bool:
    """Wait until machine 0 begins to train; False if it has trained already.

    Raises:
        TrainingFailed: it failed since this was called.
    """
    seen = run.events_file.stat().st_size if run.events_file.exists() else 0
    while not run.adapter.exists():
        turns = [(after, event) for after, event in run.events() if event["event"] in _TURNS]
        after, last = turns[-1] if turns else (0, {"event": ""})
        if last["event"] == "launch":  # of an attempt that was killed too: machine 0 is waited for once more then
            return True
        if last["event"] == "failed" and after > seen:
            raise TrainingFailed(f"machine 0 failed before it trained: {last['message']}")
        time.sleep(_POLL_SECONDS)
    return False
