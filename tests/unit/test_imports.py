"""Imports point one way, and importing the package stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import praison_agent_rl

PACKAGE = Path(praison_agent_rl.__file__).parent

# What each module may import from the package. DESIGN's table, with the modules that grew out of its rows.
LOW = {"errors"}
CONFIG = {"config", "config_keys", "config_values"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "records": LOW,
    "runs": {*LOW, "records"},
    "child": LOW,
    "endpoints": LOW,
    "swap": LOW,
    "shared_prefix": LOW,
    "transcripts.plain_values": LOW,
    "transcripts.secret_values": set(),
    "transcripts.secret_keys": {"transcripts.secret_values"},
    "transcripts.secret_patterns": {"transcripts.secret_values", "transcripts.secret_keys"},
    "transcripts.personal_patterns": {"transcripts.secret_patterns"},
    "transcripts.redaction": {
        *LOW,
        "transcripts.secret_values",
        "transcripts.secret_patterns",
        "transcripts.personal_patterns",
    },
    "transcripts.run_filters": LOW,
    "transcripts.files": {*LOW, "transcripts.plain_values"},
    "transcripts.masking": {*LOW, "transcripts.redaction"},
    "transcripts.comparing": {*LOW, "transcripts.plain_values", "transcripts.masking"},
    "transcripts.run_ids": {*LOW, "transcripts.files"},
    "transcripts.writing": {
        *LOW,
        "transcripts.plain_values",
        "transcripts.comparing",
        "transcripts.redaction",
        "transcripts.masking",
        "transcripts.files",
    },
    "transcripts.shared_writers": {*LOW, "transcripts.writing"},
    "transcripts.ratings": {
        *LOW,
        "records",
        "transcripts.shared_writers",
        "transcripts.files",
        "transcripts.masking",
        "transcripts.run_ids",
        "transcripts.writing",
    },
    "transcripts": {
        *LOW,
        "records",
        "transcripts.plain_values",
        "transcripts.run_filters",
        "transcripts.run_ids",
        "transcripts.files",
        "transcripts.writing",
        "transcripts.ratings",
    },
    "intervals": {*LOW, "records"},
    "pairing": {*LOW, "records", "intervals"},
    "text_measures": LOW,
    "guards": {*LOW, "records", "intervals", "pairing", "text_measures"},
    "cheating": {*LOW, "records", "intervals", "pairing", "text_measures", "guards"},
    "gate": {*LOW, "records", "intervals", "pairing", "guards", "cheating"},
    "rewards": {*LOW, "records"},
    "demo_rewards": LOW,
    "agents": {*LOW, "rewards"},
    "shown": set(),
    "weight_files": LOW,
    "data_files": {*LOW, "shown"},
    "data_checks": {*LOW, "shown", "data_files"},
    "data_sources": {*LOW, "shown", "data_files", "rewards"},
    "data": {*LOW, "records", "rewards", "data_files", "data_checks", "data_sources"},
    "config_keys": {*LOW, "shown"},
    "config_values": {*LOW, "shown", "config_keys"},
    "config": {*LOW, *CONFIG},
    "sent": {*LOW, "swap", "endpoints"},
    "preflight": {*LOW, "shown", "config", "config_keys", "weight_files"},
    "models": {*LOW, "config", "records", "runs", "endpoints", "swap", "preflight", "weight_files"},
    "merging": {*LOW, "config", "records", "runs", "models"},
    "dataset_building.row_texts": LOW,
    "dataset_building.brief_runs": {*LOW, "records", "data_files", "transcripts"},
    "dataset_building.conversations": {*LOW, "dataset_building.brief_runs", "dataset_building.row_texts"},
    "dataset_building.near_duplicates": LOW,
    "dataset_building.rows": {
        *LOW,
        "records",
        "rewards",
        "data_files",
        "data_checks",
        "dataset_building.brief_runs",
        "dataset_building.row_texts",
        "dataset_building.conversations",
        "dataset_building.near_duplicates",
    },
    "dataset_building.report": {*LOW, "records", "dataset_building.rows"},
    "dataset_building.files": {
        *LOW,
        "locks",
        "data",
        "data_files",
        "dataset_building.row_texts",
        "dataset_building.conversations",
        "dataset_building.rows",
    },
    "dataset_building": {
        *LOW,
        "records",
        "runs",
        "dataset_building.brief_runs",
        "dataset_building.conversations",
        "dataset_building.near_duplicates",
        "dataset_building.rows",
        "dataset_building.report",
        "dataset_building.files",
        "transcripts.files",
        "transcripts",
    },
    "foreign_logs.chats": LOW,
    "foreign_logs.traces": {*LOW, "foreign_logs.chats"},
    "foreign_logs.spans": {*LOW, "foreign_logs.chats", "foreign_logs.traces"},
    "foreign_logs": {
        *LOW,
        "records",
        "foreign_logs.chats",
        "foreign_logs.traces",
        "foreign_logs.spans",
        "transcripts.redaction",
        "transcripts",
    },
    "training": set(),
    "training.checkpoints": LOW,
    "training.grpo": {
        *LOW,
        "config",
        "data",
        "models",
        "preflight",
        "rewards",
        "runs",
        "shared_prefix",
        "training.checkpoints",
    },
    "training.launch": {*LOW, "child", "runs"},
    "answering": {*LOW, "config", "records", "data", "models", "shared_prefix"},
    "evaluation": {*LOW, "intervals", "pairing", "records", "data", "rewards", "answering"},
    "control": {*LOW, "data", "rewards", "demo_rewards"},
    "past": {*LOW, "records", "runs", "data", "models", "transcripts"},
    "measuring": {
        *LOW,
        "config",
        "records",
        "runs",
        "data",
        "rewards",
        "models",
        "answering",
        "evaluation",
        "control",
        "past",
        "gate",
    },
    "locks": set(),
    "checksums": {*LOW, "models", "records", "runs"},
    "forcing": {*LOW, "checksums", "records", "report", "runs"},
    "agent_answers": {*LOW, "answering", "sent", "serving", "swap"},
    "pointers": {*LOW, "locks", "records", "runs"},
    "registry": {*LOW, "checksums", "forcing", "pointers", "records", "runs"},
    "upkeep": {
        "pointers",
        *LOW,
        "checksums",
        "data_files",
        "locks",
        "publishing",
        "records",
        "registry",
        "runs",
        "training.launch",
    },
    "publishing": {"pointers", *LOW, "checksums", "forcing", "locks", "records", "registry", "runs"},
    "serving": {*LOW, "child", "endpoints", "models", "registry"},
    "vllm_serving": {*LOW, "child", "serving"},
    "server_pool": {*LOW, "records", "registry", "serving", "upkeep", "vllm_serving"},
    "canary": {
        *LOW,
        "records",
        "runs",
        "intervals",
        "registry",
        "rewards",
        "transcripts",
        "capture.recordings",
    },
    "attachment": {
        *LOW,
        "records",
        "runs",
        "registry",
        "swap",
        "capture",
        "capture.routes",
        "canary",
        "serving",
        "server_pool",
    },
    "report.page": LOW,
    "report.plots": {*LOW, "records", "report.page"},
    "report.answers": {*LOW, "data"},
    "report.verdicts": {*LOW, "records", "report.page"},
    "report.numbers": {*LOW, "records", "runs", "report.page", "report.answers", "report.verdicts"},
    "report.examples": {*LOW, "data", "report.page", "report.answers", "report.numbers"},
    "report.sections": {
        *LOW,
        "records",
        "dataset_building.rows",
        "report.page",
        "report.plots",
        "report.answers",
        "report.verdicts",
        "report.numbers",
    },
    "report": {*LOW, "runs", "report.page", "report.verdicts", "report.numbers", "report.examples", "report.sections"},
    "progress": LOW,
    "estimate": {*LOW, "config", "records", "weight_files"},
    "stages": {*LOW, "config", "records", "runs", "rewards", "models", "merging", "measuring", "training.grpo"},
    "planning": {
        *LOW,
        *CONFIG,
        "records",
        "runs",
        "data",
        "rewards",
        "models",
        "estimate",
        "preflight",
        "weight_files",
        "control",
        "guards",
        "past",
    },
    "doctor": {*LOW, "records", "models", "estimate", "planning"},
    "capture.replies": {"transcripts.plain_values"},
    "capture.outlets": {"capture.replies", "transcripts.masking"},
    "capture.opened": {"capture.outlets", "transcripts.masking"},
    "capture.recordings": {
        "capture.outlets",
        "capture.opened",
        "capture.replies",
        "swap",
        "transcripts.run_ids",
    },
    "capture.routes": {"swap"},
    "capture.turns": {"capture.recordings", "capture.routes"},
    "capture.calls": {"capture.recordings", "capture.routes"},
    "capture": {
        *LOW,
        "capture.opened",
        "transcripts.files",
        "transcripts.masking",
        "transcripts.run_ids",
        "transcripts.shared_writers",
        "capture.calls",
        "capture.turns",
        "transcripts",
    },
    "plugin": {*LOW, "capture"},
}
TOP = ("drafting", "improvement", "evaluating", "demo", "cli_recorded", "cli_versions", "cli_serve", "cli", "__init__")
"""These tell the story and may import everything below them."""


def modules() -> dict[str, Path]:
    paths = [path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts]
    named = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def imported_by(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in the file; those for type checking alone left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    known, found = modules(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"praison_agent_rl.{base}".rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names] + [base]
        else:
            continue
        inside = [name.removeprefix("praison_agent_rl.") for name in names if name.startswith("praison_agent_rl")]
        found |= {name for name in inside if name in known}
    return found - {"training"}


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name: str) -> None:
    used = imported_by(modules()[name])
    if name in TOP:
        assert not used & set(TOP[TOP.index(name) + 1 :]) - {"__init__"}, f"{name} may not import what tells its story"
        return
    assert name in ALLOWED, f"{name} is new: say in ALLOWED what it may import"
    assert used <= ALLOWED[name], f"{name} may not import {sorted(used - ALLOWED[name])}"


def test_the_table_of_imports_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {name for name, allowed in ALLOWED.items() if name not in done and allowed - {name} <= done}
        assert ready, f"these import each other: {sorted(ALLOWED.keys() - done)}"
        done |= ready


@pytest.mark.parametrize("module", ["praison_agent_rl", "praison_agent_rl.improvement", "praison_agent_rl.cli"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    heavy = ["torch", "transformers", "trl", "peft", "datasets", "accelerate", "numpy", "pyarrow"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


def test_importing_the_package_costs_little_beyond_the_framework() -> None:
    """Under 60 ms, counted by the interpreter itself; the smallest of five runs, since the machine may be busy."""
    code = (
        "import time; from praisonaiagents import Agent; start = time.perf_counter(); import praison_agent_rl; "
        "print(time.perf_counter() - start)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    assert min(float(run.stdout) for run in runs) < 0.060
