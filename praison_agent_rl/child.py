"""Run a module of Python in a child process that cannot outlive its parent, however the parent ends.

``python -m praison_agent_rl.child PARENT MODULE [ARGUMENT ...]`` is what the child runs: it watches for its parent to
go and then ends itself and everything that it started. What the module does is not this module's business. A launcher
such as torchrun starts its processes so too, each in a session of its own and with ``LAUNCHER`` as the parent.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from praison_agent_rl.process_settings import best_device, child_environment

LAUNCHER = "launcher"
"""In place of the parent's process id: whatever process started this one."""
_POLL_SECONDS = 0.5

_QUIET: dict[str, str] = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",
}


def start_child(
    module: str,
    arguments: Sequence[str] = (),
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    device: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module arguments...`` with its output appended to ``log``; it ends when this process does.

    The child sees the modules that this process sees. One that computes on a CPU gets the threads that the machine has
    cores for (``process_settings``); ``device`` is by default the one that this machine shows. Variables that the user
    has set are kept, but for those in ``env``.
    """
    # The current folder comes last: there a rewards module is found, but a file such as datasets.py hides no package.
    search_path = os.pathsep.join(dict.fromkeys([*(entry or os.getcwd() for entry in sys.path), os.getcwd()]))
    settings = child_environment(device=device or best_device())
    environment = {**_QUIET, **os.environ, **settings, "PYTHONPATH": search_path, **(env or {})}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "praison_agent_rl.child", str(os.getpid()), module, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is the parent's to handle, and the whole group can be ended at once
        )


def stop_child(process: "subprocess.Popen[bytes]", *, patience: float = 5.0) -> None:
    """End the child and everything that it started: asked first, and made to after ``patience`` seconds."""
    hard = signal.SIGKILL if os.name == "posix" else signal.SIGTERM
    if process.returncode is None:  # nobody has waited for it yet, so its id is still its group's and nobody else's
        _signal_group(process, signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            _signal_group(process, hard)
            process.wait()
        _signal_group(process, hard)  # what it started and left behind
    if process.stdin is not None:
        process.stdin.close()


def last_lines(log: Path, count: int = 12) -> str:
    """The last ``count`` lines of a child's log, or a note that it wrote none."""
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    return "\n".join(text.splitlines()[-count:]) or "(it wrote nothing)"


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    try:
        if os.name == "posix":
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    except (ProcessLookupError, PermissionError):  # macOS answers with the second for a group of zombies
        pass  # it has just ended by itself


def _die_with(parent: int) -> None:
    if os.name == "posix":
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.killpg(0, signal.SIGKILL)
    else:
        sys.stdin.buffer.read()  # ends when the parent's side of the pipe is closed, which its death does
        os._exit(1)


def main() -> None:
    """What the child runs; the arguments are the parent's process id, the module, and the module's own arguments."""
    given, module, *arguments = sys.argv[1:]
    parent = os.getppid() if given == LAUNCHER else int(given)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
