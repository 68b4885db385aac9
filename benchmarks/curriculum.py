"""Groups and steps without a signal, with the curriculum and without it: a tiny policy on prompts of three kinds.

    python benchmarks/curriculum.py [SEEDS]

60 prompts: 24 that every answer gets right, 18 that every answer gets wrong, and 18 where an answer is right if more
than a tenth of it are lower-case letters, which the policy does more often as it learns. 3 passes, 2 prompts x 8
completions a step, on a random model of 0.1 million parameters. Both ways make the same number of steps.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import contextlib
import io
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.curriculum import groups_of
from praison_agent_rl.records import Plan
from praison_agent_rl.rewards import Reward, Shape
from praison_agent_rl.runs import RunFolder, now, write_record
from tests.conftest import make_tiny_model

KINDS = [kind for kind, count in {"right": 24, "wrong": 18, "learnable": 18}.items() for _ in range(count)]
ROWS = [{"prompt": [{"role": "user", "content": f"{n}"}], "kind": kind} for n, kind in enumerate(KINDS)]
SETTINGS: dict[str, Any] = {
    "lora_r": 8,
    "lora_alpha": 16,
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "num_train_epochs": 3,
    "save_strategy": "no",
}


class Seen(NamedTuple):
    """What one run showed."""

    silent: list[float]
    """By pass: share of groups without a signal."""
    idle: list[float]
    """By pass: share of steps whose gradient was zero."""
    learnable: float
    """Share of the groups of the second and third pass that were of prompts that can be learned."""
    score: float
    """Mean of these prompts in the third pass."""
    seconds: float


def right_or_wrong(completions: list[str], kind: list[str], **_: Any) -> list[float]:
    """All right, all wrong, or right if more than a tenth are lower-case letters."""
    share = [sum(char.isascii() and char.islower() for char in text) / max(len(text), 1) for text in completions]
    return [{"right": 1.0, "wrong": 0.0}.get(one, float(part > 0.1)) for one, part in zip(kind, share, strict=True)]


def measure(base: Path, seed: int, *, curriculum: bool) -> Seen:
    """One run of three passes."""
    from praison_agent_rl.training.grpo import train_grpo

    config = TrainConfig.load(need_model=False, need_data=False, seed=seed, curriculum=curriculum, **SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run")
        plan = Plan(
            base=str(base), config=config.resolved(), rewards=[], device="cpu", notes=[], libraries={}, created=now()
        )
        write_record(run.plan_file, plan)
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train_grpo(run, ROWS, [Reward(right_or_wrong, "right", 1.0, Shape("text", "text"))])
        return _seen(run.steps(), time.perf_counter() - began)


def _seen(steps: list[dict[str, Any]], seconds: float) -> Seen:
    groups = groups_of(steps)
    passes = [[group for group in groups if group.turn == turn] for turn in range(3)]
    idle = [[step["grad_norm"] == 0 for step in steps if step["signal"][0][3] == turn] for turn in range(3)]
    later = [KINDS[group.row] == "learnable" for group in [*passes[1], *passes[2]]]
    scores = [group.mean or 0.0 for group in passes[2] if KINDS[group.row] == "learnable"]
    return Seen(
        silent=[statistics.fmean(group.silent for group in asked) for asked in passes],
        idle=[statistics.fmean(flags) for flags in idle],
        learnable=statistics.fmean(later),
        score=statistics.fmean(scores),
        seconds=seconds,
    )


def _percent(values: list[float]) -> str:
    return f"{statistics.fmean(values):.0%} ({min(values):.0%}..{max(values):.0%})"


def main() -> None:
    """Print a table in Markdown: means over the seeds, with the least and the greatest."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {seeds} seeds")
    columns = "groups without signal: pass 1 | pass 2 | pass 3 | steps with gradient 0: pass 1 | pass 2 | pass 3"
    print(f"| curriculum | {columns} | groups of learnable prompts, passes 2 and 3 | their score in pass 3 | seconds |")
    print("| --- " * 10 + "|")
    with tempfile.TemporaryDirectory() as folder:
        base = make_tiny_model(Path(folder) / "model", tied=True)
        for curriculum in (False, True):
            runs = [measure(base, seed, curriculum=curriculum) for seed in range(seeds)]
            parts = [_percent([run.silent[turn] for run in runs]) for turn in range(3)]
            parts += [_percent([run.idle[turn] for run in runs]) for turn in range(3)]
            parts += [_percent([run.learnable for run in runs])]
            scores = [run.score for run in runs]
            parts += [f"{statistics.fmean(scores):.2f} ({min(scores):.2f}..{max(scores):.2f})"]
            parts += [f"{statistics.fmean(run.seconds for run in runs):.0f}"]
            print(f"| {'on' if curriculum else 'off'} | {' | '.join(parts)} |", flush=True)


if __name__ == "__main__":
    main()
