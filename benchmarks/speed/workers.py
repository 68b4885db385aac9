"""Measuring processes, seen from the one that starts them: each has its own memory, and measures when it is told to."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from praison_agent_rl.process_settings import choose_settings, find_cores

from .channel import MARK

ROOT = Path(__file__).resolve().parents[2]
_OF_THREADS = ("OMP_", "GOMP_", "MKL_")
"""Variables that the measuring processes do not take over: they get what a run gets where nothing is set."""


class Worker:
    """One measuring process."""

    def __init__(self, module: str, job: Mapping[str, Any], *, log: IO[bytes]) -> None:
        settings = job["environment"] if "environment" in job else _chosen()
        given = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THREADS)}
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.failed: str | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.speed.{module}", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**given, **settings, **quiet},
        )

    def hear(self) -> dict[str, Any] | None:
        """The next message; None once it has failed, which ``failed`` then explains."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                message: dict[str, Any] = json.loads(line.removeprefix(MARK))
                self.failed = message.get("failed")
                return None if self.failed else message
        self.failed = f"the process ended with code {self._process.wait()}; see the log"
        return None

    def ask(self) -> dict[str, Any] | None:
        """Have it measure once, and what it found; None if it has failed, now or before."""
        if self.failed is not None:
            return None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # hear() finds out why
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        """End it, and wait until its memory is free."""
        self._process.kill()
        self._process.wait()


def _chosen() -> dict[str, str]:
    settings = choose_settings(device="cpu", cores=find_cores(), given={})
    return {setting.name: setting.value for setting in settings if setting.value}


@contextlib.contextmanager
def started(jobs: Mapping[str, tuple[str, Mapping[str, Any]]], log: Path) -> Iterator[dict[str, Worker]]:
    """A worker for each job (its module, and what it is told), all of them loaded and waiting."""
    log.parent.mkdir(parents=True, exist_ok=True)
    workers: dict[str, Worker] = {}
    with log.open("ab") as output:
        try:
            for name, (module, job) in jobs.items():  # one after the other: loading takes both cores
                output.write(f"\n--- {name}: {module} {json.dumps(job)}\n".encode())
                output.flush()
                workers[name] = Worker(module, job, log=output)
                workers[name].hear()
            yield workers
        finally:
            for worker in workers.values():
                worker.end()


def in_turn(workers: Mapping[str, Worker], *, seconds: float, most: int) -> dict[str, list[dict[str, Any]]]:
    """What each worker measures, A B A B; the first round, in which all is new to them, comes first in each list.

    At least two rounds, and as many as fit into ``seconds``, but no more than ``most`` after the first.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    start = time.perf_counter()
    for done in range(most + 1):
        began = time.perf_counter()
        for name, worker in workers.items():
            if (message := worker.ask()) is not None:
                found[name].append(message)
        now = time.perf_counter()
        if done >= 1 and now - start + (now - began) > seconds:
            break
    return found
