"""Tokens sampled a second, at 1, 8 and 32 rows: transformers, this package, and vLLM on the CPU where there is one."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .rollouts_worker import VARIANTS
from .workers import ROOT, in_turn, started

ROWS = (1, 8, 32)
PROMPT_TOKENS = 200


def measure(
    model: str, *, rows: Sequence[int] = ROWS, seconds: float = 60.0, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A line for each number of rows, of one prompt (as in a group) and of as many prompts; ``options`` as in step."""
    found = []
    for count in rows:
        for distinct in (False, True) if count > 1 else (False,):
            job = {"model": options["folder"], "rows": count, "distinct": distinct}
            job |= {
                "prompt_tokens": int(options.get("prompt_tokens", PROMPT_TOKENS)),
                "new_tokens": options["new_tokens"],
            }
            jobs = {v: ("rollouts_worker", {**job, "variant": v}) for v in VARIANTS}
            with started(jobs, Path(options["home"]) / "log") as workers:
                timed = in_turn(workers, seconds=seconds, most=5)
                speeds = {v: _speed(timed[v]) for v in VARIANTS}
                failed = {v: workers[v].failed for v in VARIANTS if workers[v].failed}
            peaks = {v: max((m["peak_bytes"] for m in timed[v]), default=None) for v in VARIANTS}
            place = {"model": model, "rows": count, "prompts": count if distinct else 1}
            found.append({**place, "tokens_per_second": speeds, "peak_bytes": peaks, "failed": failed})
    return found


def by_vllm() -> dict[str, Any] | None:
    """What ``benchmarks/vllm_rollouts.py`` prints; None where no vLLM is named (``PRAISON_AGENT_RL_VLLM``)."""
    script = ROOT / "benchmarks" / "vllm_rollouts.py"
    if not os.environ.get("PRAISON_AGENT_RL_VLLM") or not script.exists():
        return None
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        return {"failed": done.stderr.strip()[-500:]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _speed(timed: list[dict[str, Any]]) -> float | None:
    return statistics.median(m["tokens"] / m["seconds"] for m in timed[1:]) if len(timed) > 1 else None


def tables(lines: list[dict[str, Any]], vllm: dict[str, Any] | None) -> list[tuple[list[str], list[list[str]]]]:
    """Tokens a second, and vLLM's as it told them."""
    body = []
    for line in lines:
        speeds = line["tokens_per_second"]
        shown = [f"{speeds[v]:.0f}" if speeds[v] else line["failed"].get(v, "not measured") for v in VARIANTS]
        body.append([line["model"], str(line["rows"]), str(line["prompts"]), *shown])
    found = [(["model", "rows", "prompts", *(f"{v}, tokens/s" for v in VARIANTS)], body)]
    if vllm and "tokens_per_second" in vllm:
        rates = vllm["tokens_per_second"]
        heads = ["vLLM", *(f"{rows}, tokens/s" for rows in next(iter(rates.values())))]
        found.append((heads, [[kind, *(f"{rate:.0f}" for rate in by.values())] for kind, by in rates.items()]))
    return found
