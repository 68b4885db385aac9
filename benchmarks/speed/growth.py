"""How the time of a step grows with its prompt, group and completion, and that of recording, building and merging."""

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import read_tables
from .workers import ROOT, in_turn, started

AXES: dict[str, tuple[int, ...]] = {
    "prompt_tokens": (100, 200, 400, 800, 1600, 3200),
    "group": (2, 4, 8, 16, 32),
    "new_tokens": (16, 32, 64, 128, 256),
}
BASE = {"prompt_tokens": 400, "group": 8, "new_tokens": 64}
QUICK: dict[str, tuple[int, ...]] = {"prompt_tokens": (60, 120), "group": (2, 4), "new_tokens": (4, 8)}
OTHERS = {"recording": ["recording.py", "1000", "10000", "100000"], "merging": ["merging.py"]}
QUICK_OTHERS = {"merging": ["merging.py", "0.05"]}


def steps(model: str, *, variants: Sequence[str], quick: bool, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each value of each axis, the others held at ``BASE``."""
    lines = []
    base = {"prompt_tokens": 60, "group": 2, "new_tokens": 4} if quick else BASE
    for axis, values in (QUICK if quick else AXES).items():
        for value in values:
            job = {**base, axis: value, "model": options["folder"], "home": options["home"]}
            jobs = {v: ("step_worker", {**job, "variant": v}) for v in variants}
            with started(jobs, Path(options["home"]) / "log") as workers:
                found = in_turn(workers, seconds=30, most=3)
                for v in variants:
                    timed = [step["seconds"] for step in found[v][1:]]
                    middle = statistics.median(timed) if timed else None
                    peak = max((step["peak_bytes"] for step in found[v]), default=None)
                    lines.append({"model": model, "axis": axis, "value": value, "variant": v, "seconds": middle,
                                  "peak_bytes": peak, "failed": workers[v].failed})  # fmt: skip
    return lines


def others(*, quick: bool) -> dict[str, Any]:
    """The tables that the other scripts print, by script; a script that is not there or fails says so."""
    found: dict[str, Any] = {}
    for name, words in (QUICK_OTHERS if quick else OTHERS).items():
        script = ROOT / "benchmarks" / words[0]
        if not script.exists():
            found[name] = {"failed": f"there is no {script.name}"}
            continue
        done = subprocess.run([sys.executable, str(script), *words[1:]], capture_output=True, text=True, cwd=ROOT)
        tables = read_tables(done.stdout)
        found[name] = {"tables": tables} if tables else {"failed": done.stderr.strip()[-500:]}
    return found


def tables(lines: list[dict[str, Any]], other: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """The growth of a step, and the other scripts' tables as they were printed."""
    body = [
        [line["axis"], str(line["value"]), line["variant"],
         f"{line['seconds']:.2f}" if line["seconds"] else line["failed"] or "not measured",
         f"{line['peak_bytes'] / 2**30:.2f}" if line["peak_bytes"] else ""]
        for line in lines
    ]  # fmt: skip
    found = [(["grows", "to", "variant", "s a step", "GiB"], body)]
    for entry in other.values():
        found += [(list(t[0]), [list(row.values()) for row in t]) for t in entry.get("tables", []) if t]
    return found


def plot(lines: list[dict[str, Any]], folder: Path) -> list[Path]:
    """A small picture for each axis, in ``folder``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for axis in dict.fromkeys(line["axis"] for line in lines):
        figure, place = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
        for variant in dict.fromkeys(line["variant"] for line in lines):
            points = [(line["value"], line["seconds"]) for line in lines
                      if line["axis"] == axis and line["variant"] == variant and line["seconds"]]  # fmt: skip
            if points:
                place.plot(*zip(*points, strict=True), marker="o", label=variant)
        place.set(xlabel=axis.replace("_", " "), ylabel="seconds a step", ylim=(0, None))
        place.grid(alpha=0.3)
        place.legend()
        made.append(folder / f"step_{axis}.png")
        figure.savefig(made[-1], dpi=90)
        pyplot.close(figure)
    return made


def plot_curves(curves: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Held-out reward over seconds of training, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, place = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    variants = list(dict.fromkeys(curve["variant"] for curve in curves))
    for curve in curves:
        points = [(point["seconds"], point["reward"]) for point in curve["points"]]
        if points:
            number = variants.index(curve["variant"])
            first = curve["seed"] == curves[0]["seed"]
            label = curve["variant"] if first else None
            place.plot(*zip(*points, strict=True), color=f"C{number}", marker=".", label=label)
    place.set(xlabel="seconds of training", ylabel="held-out reward")
    place.grid(alpha=0.3)
    place.legend()
    figure.savefig(folder / "reward.png", dpi=90)
    pyplot.close(figure)
    return [folder / "reward.png"]
