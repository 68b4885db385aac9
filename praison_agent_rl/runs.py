"""The folder of one run: what it was told, what it reported, and where its results lie.

The folder is the whole contract between the process that plans a run and those that carry it out (DESIGN 14).
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.records import Plan, Record

AnyRecord = TypeVar("AnyRecord", bound=Record)


class RunFolder:
    """Names and files of a run; holds no state but its path and who listens."""

    def __init__(self, root: str | Path, *, listener: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.root = Path(root)
        self.listener = listener
        self.plan_file = self.root / "plan.json"
        self.train_rows = self.root / "train.jsonl"
        self.held_out_rows = self.root / "held_out.jsonl"
        self.events_file = self.root / "events.jsonl"
        self.log = self.root / "log.txt"
        self.checkpoints = self.root / "checkpoints"
        self.adapter = self.root / "adapter"
        self.merged = self.root / "model"
        self.merge_file = self.root / "merge.json"
        self.comparison_file = self.root / "comparison.json"
        self.report = self.root / "report.html"

    @classmethod
    def create(cls, root: Path) -> "RunFolder":
        """Make the folder; raises ConfigError if it holds something else already."""
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise ConfigError(
                f"the run's folder {str(root)!r} already exists and is not empty; "
                "give another output_dir, or continue that run with --resume"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the run's folder {str(root)!r} cannot be made: {error}") from error
        return cls(root)

    @classmethod
    def open(cls, root: Path) -> "RunFolder":
        """The folder of a run that was planned before; raises ConfigError if there is none."""
        run = cls(root)
        if not run.plan_file.is_file():
            raise ConfigError(f"{str(root)!r} is not the folder of a run: it has no plan.json")
        return run

    @property
    def plan(self) -> Plan:
        """What the run was told."""
        return read_record(self.plan_file, Plan)

    def answers(self, side: str) -> Path:
        """Where the held-out answers of ``side`` (``base`` or ``new``) lie."""
        return self.root / f"answers_{side}.jsonl"

    def report_event(self, event: str, **facts: Any) -> None:
        """Append one line for whoever watches; ``event`` is its kind."""
        entry = {"time": now(), "event": event, **facts}
        with self.events_file.open("ab+") as file:
            start = b"" if _ends_a_line(file) else b"\n"  # a killed process may have left half a line
            file.write(start + json.dumps(entry, default=str).encode() + b"\n")
        if self.listener:
            self.listener(entry)

    def events(self, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Whole events from byte ``start`` on, each with the byte after it.

        A line still being written is left for later, and half a line that a killed process left is passed over.
        """
        if not self.events_file.exists():
            return
        with self.events_file.open("rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                with contextlib.suppress(ValueError):
                    yield start, json.loads(line)

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each training step, in order; a step done again after a resume counts once."""
        by_step = {event["step"]: event for _, event in self.events() if event["event"] == "step"}
        return [by_step[step] for step in sorted(by_step)]


def _ends_a_line(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def now() -> str:
    """The time in UTC as ISO text, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_record(path: Path, record: Record) -> None:
    """Write ``record`` as JSON; the file is whole or not there."""
    write_text(path, record.model_dump_json(indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; the file is whole or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """Read a record that `write_record` wrote; raises ConfigError for a file that is not one."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a {kind.__name__}: {str(error)[:300]}") from error


def publish_folder(temporary: Path, final: Path) -> None:
    """Give a finished folder its name at once, replacing what an earlier attempt left there."""
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
