"""Folders of runs as the stages leave them, with a few bytes in place of weights."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from praison_agent_rl.records import FEWEST_PROMPTS, Comparison, Interval, MergeProof, Plan, Verdict
from praison_agent_rl.runs import RunFolder, write_record

EMPTY_SAFETENSORS = struct.pack("<Q", 2) + b"{}"


def weights_in(folder: Path, content: bytes = b"") -> Path:
    """A model folder whose weights are told apart by ``content``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(EMPTY_SAFETENSORS + content)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def comparison_of(difference: float, *, low: float | None = None, prompts: int = FEWEST_PROMPTS) -> Comparison:
    """Base 0.5, candidate 0.5 + ``difference``, on ``prompts`` prompts."""
    low = difference - 0.1 if low is None else low
    total = Interval(base=0.5, new=0.5 + difference, difference=difference, low=low, high=difference + 0.1)
    counts = {"prompts": prompts, "samples": 2, "wins": prompts, "ties": 0, "losses": 0, "unscored": 0}
    return Comparison(total=total, rewards={"letters": total}, **counts)


def finished_run(root: Path, base: Path, *, difference: float = 0.2, agent: str = "Helper", **plan: Any) -> RunFolder:
    """A run of ``agent`` that is merged and judged: better if ``difference`` is above 0.1."""
    root.mkdir(parents=True)
    run = RunFolder(root)
    comparison = comparison_of(difference)
    status = "promoted" if comparison.better else "not better"
    (root / "train.jsonl").write_text('{"prompt": "one"}\n' * 3)
    (root / "held_out.jsonl").write_text('{"prompt": "two"}\n' * 2)
    (root / "answers_base.jsonl").write_text("{}\n")
    (root / "answers_new.jsonl").write_text("{}\n")
    (root / "log.txt").write_text("noise")
    run.report_event("done", stages=[])
    weights_in(run.merged, content=root.name.encode() + os.urandom(2000))
    run.adapter.mkdir()
    (run.adapter / "adapter_model.safetensors").write_bytes(EMPTY_SAFETENSORS + root.name.encode())
    (run.adapter / "adapter_config.json").write_text("{}")
    write_record(run.comparison_file, comparison)
    write_record(run.verdict_file, Verdict(status=status, text=status))  # type: ignore[arg-type]
    write_record(run.merge_file, MergeProof(tokens=9, merge_error=0.0, saved_error=0.0, tolerance=1e-3, change=0.5))
    facts: dict[str, Any] = {
        "config": {"learning_rate": 1e-5, "dataset": "q.jsonl"}, "rewards": [], "device": "cpu", "notes": [],
        "libraries": {"python": "3.x"}, "created": "2099-01-01T00:00:00+00:00",
    }  # fmt: skip
    write_record(run.plan_file, Plan(**{**facts, "base": str(base), "agent": agent, **plan}))
    return run


def flip_a_byte(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files below a folder with their bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def as_json(path: Path) -> Any:
    return json.loads(path.read_text())
