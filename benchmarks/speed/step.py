"""Seconds a GRPO step and peak memory: this package against TRL's own trainer, a step of each in turn."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .step_worker import TRL
from .workers import in_turn, started

Cell = tuple[int, int]
"""Tokens of the prompt, and completions of a group."""
LENGTHS, GROUPS, NEW_TOKENS = (100, 400, 800, 1600), (4, 8, 16), 64
ALL: tuple[Cell, ...] = tuple((length, group) for length in LENGTHS for group in GROUPS)
CROSS: tuple[Cell, ...] = ((100, 8), (400, 8), (800, 8), (1600, 8), (400, 4), (400, 16))
"""Each length at one group size, and each group size at one length: what larger models have time for."""
STEPS_AT_MOST = 5
_FAST = ("ours", "ours-bf16", "ours-int8")


def measure(
    model: str, cells: Iterable[Cell], *, variants: Sequence[str], minutes: float, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each cell; ``minutes`` for all of them are shared out by their tokens.

    A cell takes at least two steps of each variant, so a table may take longer. ``options``: ``home`` (folder for what
    is made), ``new_tokens`` and ``folder`` (of the model).
    """
    cells = list(cells)
    new = int(options["new_tokens"])
    whole = sum(group * (length + new) for length, group in cells)
    rows = []
    for length, group in cells:
        job = {"model": options["folder"], "home": options["home"], "prompt_tokens": length, "group": group}
        jobs = {v: ("step_worker", {**job, "variant": v, "new_tokens": new}) for v in variants}
        seconds = 60 * minutes * group * (length + new) / whole
        with started(jobs, Path(options["home"]) / "log") as workers:
            found = in_turn(workers, seconds=seconds, most=STEPS_AT_MOST)
            summary = {v: _summary(found[v], workers[v].failed) for v in variants}
        rows.append({"model": model, "prompt_tokens": length, "group": group, "new_tokens": new, "variants": summary})
    return rows


def _summary(steps: list[dict[str, Any]], failed: str | None) -> dict[str, Any]:
    first = steps[0] if steps else {}
    timed = [step["seconds"] for step in steps[1:]]  # the first makes all that is made once
    return {
        "seconds": statistics.median(timed) if timed else None,
        "all_seconds": timed,
        "peak_bytes": max((step["peak_bytes"] for step in steps), default=None),
        "first": {name: first.get(name) for name in ("reward", "grad_norm", "entropy")},
        "mean_length": statistics.fmean(lengths) if (lengths := _lengths(steps)) else None,
        "failed": failed,
    }


def _lengths(steps: list[dict[str, Any]]) -> list[float]:
    return [length for step in steps if (length := step.get("completions/mean_length")) is not None]


def _alike(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The variant of ours that draws with TRL's random numbers; any other samples other completions."""
    return found.get("ours-generate")


def same_to_four_digits(ours: dict[str, Any], theirs: dict[str, Any]) -> bool | None:
    """Whether the first steps' rewards and gradient norms agree; None where one is missing.

    >>> same_to_four_digits({"reward": 0.12341, "grad_norm": 2.0}, {"reward": 0.12342, "grad_norm": 2.0001})
    True
    >>> same_to_four_digits({"reward": 0.1234, "grad_norm": 2.0}, {"reward": 0.1235, "grad_norm": 2.0})
    False
    """
    pairs = [(ours.get(name), theirs.get(name)) for name in ("reward", "grad_norm")]
    if any(a is None or b is None for a, b in pairs):
        return None
    return all(abs(a - b) <= 1e-4 * max(abs(a), abs(b)) for a, b in pairs)


def tables(rows: list[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Speed and memory, and then the first steps, as heads and lines."""
    variants = list(rows[0]["variants"])
    pairs = [(theirs, ours) for theirs in variants if theirs in TRL for ours in variants if ours in _FAST]
    head = ["model", "prompt", "G", *(f"{v}, s" for v in variants), *(f"{a} / {b}" for a, b in pairs)]
    head += [f"{v}, GiB" for v in variants]
    speed, firsts = [], []
    for row in rows:
        found = row["variants"]
        place = [row["model"], str(row["prompt_tokens"]), str(row["group"])]
        times = [_cell(found[v]["seconds"], found[v]["failed"]) for v in variants]
        ratios = [_ratio(found[a]["seconds"], found[b]["seconds"]) for a, b in pairs]
        peaks = [f"{found[v]['peak_bytes'] / 2**30:.1f}" if found[v]["peak_bytes"] else "" for v in variants]
        speed.append([*place, *times, *ratios, *peaks])
        firsts += [[*place, v, *_first(found[v], _alike(found))] for v in variants]
    names = [
        "model",
        "prompt",
        "G",
        "variant",
        "reward",
        "gradient norm",
        "entropy",
        "tokens",
        "as ours-generate to 4 digits",
    ]
    return [(head, speed), (names, firsts)]


def _ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.1f}" if theirs and ours else ""


def _cell(seconds: float | None, failed: str | None) -> str:
    return f"{seconds:.2f}" if seconds is not None else failed or "not measured"


def _first(found: dict[str, Any], ours: dict[str, Any] | None) -> list[str]:
    first = found["first"]
    numbers = [f"{value:.6g}" if (value := first[n]) is not None else "" for n in ("reward", "grad_norm", "entropy")]
    same = same_to_four_digits(ours["first"], first) if ours else None
    length = f"{found['mean_length']:.0f}" if found["mean_length"] else ""
    return [*numbers, length, {True: "yes", False: "no", None: ""}[same]]
