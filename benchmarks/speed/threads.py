"""What the settings of OpenMP cost and save, with the cores free and with another process on one of them."""

import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .workers import in_turn, started

SETTINGS: dict[str, dict[str, str]] = {
    "libgomp's own": {},
    "PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spins 1000": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"},
    "spins 10000": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def measure(*, seconds: float, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each setting and number of busy neighbours."""
    lines = []
    for neighbours in (0, 1):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
        try:
            jobs = {name: ("threads_worker", {"environment": given}) for name, given in SETTINGS.items()}
            with started(jobs, Path(options["home"]) / "log") as workers:
                found = in_turn(workers, seconds=seconds, most=7)
        finally:
            for process in busy:
                process.kill()
                process.wait()
        for name, messages in found.items():
            rounds = [message["milliseconds"] for message in messages[1:]]
            middle = {rows: statistics.median(r[rows] for r in rounds) for rows in rounds[0]} if rounds else {}
            lines.append({"settings": name, "neighbours": neighbours, "milliseconds": middle})
    return lines


def tables(lines: list[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Milliseconds by rows."""
    head = ["settings", "busy neighbours", *(f"{rows} rows, ms" for rows in lines[0]["milliseconds"])]
    body = [[x["settings"], str(x["neighbours"]), *(f"{ms:.1f}" for ms in x["milliseconds"].values())] for x in lines]
    return [(head, body)]
