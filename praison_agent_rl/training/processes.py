"""Start the processes that train one model, and tell which of them ended badly: ``RUN LAUNCHER ARGUMENT ...``.

An error that one of them reported itself is left as it is; what this adds is what no process can say of its own death.
"""

import errno
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praison_agent_rl.child import last_lines
from praison_agent_rl.ranks import LOST
from praison_agent_rl.runs import RunFolder


def main() -> None:
    """What the child process of ``launch_stages`` runs; it ends with 0 if all processes did."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder, launcher, *arguments = sys.argv[1:]
    run = RunFolder.open(Path(folder))
    start = run.events_file.stat().st_size if run.events_file.exists() else 0
    try:
        _start(launcher, arguments)
    except ChildFailedError as error:
        traceback.print_exc()
        codes = {place: failure.exitcode for place, failure in error.failures.items()}
        if errno.ENOSPC in codes.values():  # nothing can be written any more
            sys.exit(errno.ENOSPC)
        if not any(event["event"] == "failed" for _, event in run.events(start)):
            run.report_event("failed", kind="TrainingFailed", message=_what_happened(codes, run))
        sys.exit(1)


def _start(launcher: str, arguments: list[str]) -> None:
    if launcher == "torchrun":
        from torch.distributed.run import main as torchrun

        torchrun(arguments)
    else:
        from accelerate.commands.launch import launch_command, launch_command_parser

        launch_command(launch_command_parser().parse_args(arguments))


def _what_happened(codes: Mapping[int, int], run: RunFolder) -> str:
    """How the processes of this machine ended, by rank, in words."""
    # the others are asked to end (SIGTERM), and NCCL aborts those that wait for one that is gone (SIGABRT)
    own = {place: -code for place, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    first = sorted(own, key=lambda place: own[place] == signal.SIGABRT)
    if first:
        number = own[first[0]]
        why = " (out of memory?)" if number == signal.SIGKILL else ""
        return f"process {first[0]} of those that train was ended by {_name(number)}{why}, and the others with it"
    if all(code == LOST for code in codes.values()):
        return (
            "the connection to another process that trains was lost; if that was on another machine, its log says why. "
            f"The last lines of this one:\n{last_lines(run.log)}"
        )
    ends = ", ".join(f"process {place} with code {code}" for place, code in sorted(codes.items()) if code != LOST)
    return f"of the processes that train ended {ends}; the last lines:\n{last_lines(run.log)}"


def _name(number: int) -> Any:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    main()
