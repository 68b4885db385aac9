"""Start a run's stages in a child process, follow its events, and turn its end into a result or an error."""

import errno
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from praison_agent_rl import errors
from praison_agent_rl.child import last_lines, start_child, stop_child
from praison_agent_rl.errors import PraisonRLError, TrainingFailed
from praison_agent_rl.runs import RunFolder

OnEvent = Callable[[dict[str, Any]], None]

_POLL_SECONDS = 0.2


def launch_stages(
    run: RunFolder,
    stages: Sequence[str],
    on_event: OnEvent,
    *,
    resume: bool = False,
    env: Mapping[str, str] | None = None,
) -> None:
    """Do ``stages`` in a child process that is given the folder and ``env`` and nothing else, and wait for its end.

    The child ends when this process does. Interrupting (Ctrl-C) ends it too; its checkpoints stay.

    Raises:
        PraisonRLError: the child's own error, as if it had happened here.
        TrainingFailed: the child died; the message ends with the last lines of its log.
    """
    seen = run.events_file.stat().st_size if run.events_file.exists() else 0
    words = [str(run.root.resolve()), *stages, *(["--resume"] if resume else [])]
    child = start_child("praison_agent_rl.stages", words, log=run.log, env=env)
    outcome: dict[str, Any] = {}
    try:
        ended = False
        while not ended:
            ended = child.poll() is not None  # asked before reading, so that its last events are still read
            for after, event in list(run.events(seen)):
                seen = after
                outcome = event if event["event"] in ("done", "failed") else outcome
                on_event(event)
            if not ended:
                time.sleep(_POLL_SECONDS)
    finally:
        stop_child(child)
    if outcome.get("event") != "done":
        raise _error_of(run, child, outcome)


def _error_of(run: RunFolder, child: "subprocess.Popen[bytes]", outcome: dict[str, Any]) -> PraisonRLError:
    where = f"the whole log is {run.log}; to go on from the last checkpoint: --resume {run.root}"
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
