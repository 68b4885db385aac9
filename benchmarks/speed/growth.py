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
    made = []
    for axis in dict.fromkeys(line["axis"] for line in lines):
        curves = {
            variant: [(line["value"], line["seconds"]) for line in lines
                      if line["axis"] == axis and line["variant"] == variant and line["seconds"]]
            for variant in dict.fromkeys(line["variant"] for line in lines)
        }  # fmt: skip
        picture = folder / f"step_{axis}.png"
        made.append(_drawn(curves, picture, axis.replace("_", " "), "seconds a step"))
    return made


def plot_others(other: Mapping[str, Any], folder: Path) -> list[Path]:
    """The other scripts' tables: recording over messages, building over recorded calls, merging over model size."""
    recording = other.get("recording", {}).get("tables", [])
    merging = other.get("merging", {}).get("tables", [])
    made = []
    if recording:
        parts = ("open_turn", "open_call", "answered", "close")
        turns = [
            (row["turn"], int(row["messages sent"]), sum(int(row[part]) for part in parts)) for row in recording[0]
        ]
        curves = {kind: [(x, y) for turn, x, y in turns if turn == kind] for kind in ("sync", "async")}
        made.append(_drawn(curves, folder / "recording.png", "messages sent", "own code of recording, us a turn"))
    if len(recording) > 1:
        built = [row for row in recording[1] if row["calls a run"] == "4"]
        points = [(calls, calls / _number(row["built, calls a second"]))
                  for row in built for calls in [_number(row["recorded calls"])]]  # fmt: skip
        made.append(_drawn({"4 calls a run": points}, folder / "building.png", "recorded calls", "seconds to build"))
    if merging:
        ways = ("streamed and proved", "PEFT float32", "PEFT bfloat16")
        peaks = {
            way: [(float(row["base, GB"]), _number(row[f"{way}: s / peak MB"].partition("/")[2])) for row in merging[0]]
            for way in ways
        }
        made.append(_drawn(peaks, folder / "merging.png", "base, GB", "peak memory of a merge, MB"))
    return made


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _drawn(curves: Mapping[str, Sequence[tuple[float, float]]], picture: Path, across: str, up: str) -> Path:
    """A picture with a line for each curve that has points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture.parent.mkdir(parents=True, exist_ok=True)
    figure, place = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for name, points in curves.items():
        if points:
            place.plot(*zip(*points, strict=True), marker="o", label=name)
    place.set(xlabel=across, ylabel=up, ylim=(0, None))
    place.grid(alpha=0.3)
    place.legend()
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)
    return picture


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
