"""Seconds of training to a given held-out reward, in the demo's task: this package against TRL's own trainer."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .workers import started

TARGETS = (1.2, 1.3, 1.4)
"""Mean of the demo's two rewards together; the untrained model has about 1.08, trained for 24 steps 1.47."""


def measure(
    *, variants: Sequence[str], seeds: Sequence[int], minutes: float, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A curve for each seed and variant, in turn; ``minutes`` of training are the most that one may take."""
    curves = []
    for seed in seeds:
        for variant in variants:
            job = {"variant": variant, "seed": seed, "minutes": minutes, "model": options["folder"], **options}
            with started({variant: ("reward_worker", job)}, Path(options["home"]) / "log") as workers:
                points = []
                message = workers[variant].ask()
                while message is not None and "done" not in message:
                    points.append({name: value for name, value in message.items() if name != "peak_bytes"})
                    message = workers[variant].hear()
                failed = workers[variant].failed
            curves.append({"variant": variant, "seed": seed, "points": points, "failed": failed})
    return curves


def seconds_to(points: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Seconds at which the straight line between two looks first meets ``target``; None if it is never met.

    >>> seconds_to([{"seconds": 0, "reward": 1.0}, {"seconds": 10, "reward": 1.2}], 1.1)
    5.0
    """
    before = None
    for point in points:
        if point["reward"] >= target:
            if before is None:
                return float(point["seconds"])
            share = (target - before["reward"]) / (point["reward"] - before["reward"])
            return float(round(before["seconds"] + share * (point["seconds"] - before["seconds"]), 6))
        before = point
    return None


def tables(curves: list[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """For each target and variant the median of the seeds, and how many of them met it."""
    variants = list(dict.fromkeys(curve["variant"] for curve in curves))
    lines = []
    for target in TARGETS:
        line = [f"{target:g}"]
        for variant in variants:
            own = [curve for curve in curves if curve["variant"] == variant]
            times = [t for curve in own if (t := seconds_to(curve["points"], target)) is not None]
            line.append(f"{statistics.median(times):.0f} ({len(times)} of {len(own)})" if times else "not met")
        lines.append(line)
    return [(["held-out reward", *(f"{v}, s (seeds that met it)" for v in variants)], lines)]
