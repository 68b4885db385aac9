"""The machine and the libraries that a table was measured with, and how tables are written."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from praison_agent_rl.process_settings import choose_settings, describe_cores, find_cores

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "praisonaiagents", "praison-agent-rl")


def describe() -> dict[str, Any]:
    """CPU, cores, memory, load, libraries and the settings of the processes that measure."""
    cpu = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cores = find_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = choose_settings(device="cpu", cores=cores, given={})
    return {
        "cpu": cpu[0] if cpu else platform.processor() or platform.machine(),
        "cores": describe_cores(cores),
        "memory_gib": round(memory / 2**30, 1),
        "load_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "settings": {setting.name: setting.value for setting in given},
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def read_tables(text: str) -> list[list[dict[str, str]]]:
    r"""The tables in what another script printed, each a list of lines by their heads.

    >>> read_tables("x\n| a | b |\n| --- | --- |\n| 1 | 2 |\n")
    [[{'a': '1', 'b': '2'}]]
    """
    tables: list[list[dict[str, str]]] = []
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            head = []
        elif not head:
            head = cells
            tables.append([])
        elif set("".join(cells)) - set("-: "):
            tables[-1].append(dict(zip(head, cells, strict=False)))
    return tables


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
