"""The folder of one run: what it was told, what it reported, and where its results lie.

The folder is the whole contract between the process that plans a run and those that carry it out (DESIGN 14).
"""

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic_core import PydanticSerializationError

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.locks import locked
from praison_agent_rl.records import Plan, Record

AnyRecord = TypeVar("AnyRecord", bound=Record)

HOME = Path(".praisonai") / "rl"
"""Where runs and versions are kept, under the current folder."""
_LOCK = ".working"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What file systems say that have none, such as Lustre as it is usually mounted."""


class RunFolder:
    """Names and files of a run; holds no state but its path and who listens."""

    def __init__(self, root: str | Path, *, listener: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.root = Path(root)
        self.listener = listener
        self.plan_file = self.root / "plan.json"
        self.train_rows = self.root / "train.jsonl"
        self.held_out_rows = self.root / "held_out.jsonl"
        self.watch_rows = self.root / "watch.jsonl"
        """Training prompts that were put aside to watch with, if any."""
        self.recorded = self.root / "recorded.jsonl"
        """Answers of what the agent runs on to held-out prompts, where that is another model."""
        self.calls = self.root / "calls.jsonl"
        """Calls of good recorded runs of the agent, if any."""
        self.sampled = self.root / "sampled.jsonl"
        """Token ids of the last completions, with their log-probabilities under the policy as it ended."""
        self.answered = self.root / "answered.jsonl"
        """Recorded answers to training prompts, several to each."""
        self.events_file = self.root / "events.jsonl"
        self.log = self.root / "log.txt"
        self.checkpoints = self.root / "checkpoints"
        self.best = self.root / "best"
        """Adapters of the best steps so far by the watched reward."""
        self.adapter = self.root / "adapter"
        self.merged = self.root / "model"
        self.merge_file = self.root / "merge.json"
        self.comparison_file = self.root / "comparison.json"
        self.verdict_file = self.root / "verdict.json"
        self.card = self.root / "card.json"
        """What a reward model is worth."""
        self.pair_scores = self.root / "pair_scores.jsonl"
        """What it said of both sides of each held-out pair."""
        self.report = self.root / "report.html"
        self.numbers = self.root / "report.json"
        self.manifest = self.root / "manifest.json"
        """Of the dataset, where it was built from recorded runs."""

    @classmethod
    def create(cls, root: Path) -> "RunFolder":
        """Make the folder; raises ConfigError if it holds something else already."""
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            begun = (root / "plan.json").exists()
            more = ", or continue that run with --resume" if begun else "; no run was planned to its end in this one"
            raise ConfigError(
                f"the run's folder {str(root)!r} already exists and is not empty; give another output_dir{more}"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the run's folder {str(root)!r} cannot be made: {error}") from error
        return cls(root)

    @classmethod
    def open(cls, root: Path) -> "RunFolder":
        """The folder of a run that was planned before; raises ConfigError if there is none, and for a version's."""
        run = cls(root)
        if (root / "version.json").exists():  # going on in it would take its model away
            name, agent = root.resolve().name, _agent_of(root)
            raise ConfigError(
                f"{str(root)!r} is not the folder of a run: that is version {name} of agent {agent!r}; to let it "
                f"answer, name it: praison-agent-rl versions promote {shlex.quote(agent)} {name}"
            )
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

    def guard_rows(self, kind: str) -> Path:
        """Prompts that are asked besides the held-out ones: ``control``, or ``earlier``, of earlier versions."""
        return self.root / f"{kind}.jsonl"

    def guard_answers(self, kind: str, side: str) -> Path:
        """Where the answers of ``side`` to those prompts lie."""
        return self.root / f"{kind}_{side}.jsonl"

    def report_event(self, event: str, **facts: Any) -> None:
        """Append one line for whoever watches; ``event`` is its kind."""
        entry = {"time": now(), "event": event, **facts}
        append_line(self.events_file, json.dumps(entry, default=str))
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


@contextlib.contextmanager
def alone_in(run: RunFolder) -> Iterator[None]:
    """Hold ``run`` while the block lasts, so that no other process works on it; where there are no locks, do not.

    Raises:
        ConfigError: another one does, which is named; or nothing can be written there.
    """

    def refused(holder: str) -> ConfigError:
        return ConfigError(
            f"the run in {str(run.root)!r} is under way already, by {holder}; wait for its end, or end that first"
        )

    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(run.root / _LOCK, refused=refused))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            if error.errno not in _NO_LOCKS:
                raise ConfigError(
                    f"the run's folder {str(run.root)!r} cannot be written: {error.strerror or error}; make it "
                    "writable, or go on with a copy of it elsewhere"
                ) from error
        yield


def _agent_of(version: Path) -> str:
    """Whose version lies in the folder; the name of the folder above where the record is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads((version / "version.json").read_text(encoding="utf-8"))["agent"])
    return version.resolve().parent.name


def _ends_a_line(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def slug(name: str | None) -> str:
    """``name`` as a plain file name: lower-case letters, digits and dashes.

    >>> slug("Support Bot (EU)")
    'support-bot-eu'
    """
    return re.sub(r"[^a-z0-9]+", "-", (name or "").lower()).strip("-")[:40] or "agent"


def now(timespec: str = "seconds") -> str:
    """The time in UTC as ISO text, to the second, or as finely as ``timespec`` says."""
    return datetime.now(timezone.utc).isoformat(timespec=timespec)


def write_record(path: Path, record: Record, *, sync: bool = False) -> None:
    """Write ``record`` as JSON; the file is whole or not there. Raises ConfigError for text that is no Unicode."""
    try:
        text = record.model_dump_json(indent=2)
    except PydanticSerializationError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}; a text in it is no whole Unicode") from error
    write_text(path, text + "\n", sync=sync)


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write ``text`` to ``path``; the file is whole or not there. With ``sync`` it is on the disk on return."""
    write_bytes(path, text.encode(), sync=sync)


def write_bytes(path: Path, content: bytes, *, sync: bool = False) -> None:
    """The same for bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        if sync:
            sync_to_disk(temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_to_disk(path.parent)


def append_line(path: Path, line: str, *, sync: bool = False) -> None:
    """Append a line, on a line of its own even where a killed process has left half of one."""
    with path.open("ab+") as file:
        start = b"" if _ends_a_line(file) else b"\n"
        file.write(start + line.encode() + b"\n")
    if sync:
        sync_to_disk(path)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would outlive a loss of power; Windows is not asked for folders."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """Read a record that `write_record` wrote; raises ConfigError for a file that is not one."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a {kind.__name__}: {str(error)[:300]}") from error


def publish_folder(temporary: Path, final: Path) -> None:
    """Give a finished folder its name at once, replacing what an earlier attempt left there.

    Whatever moment the process is killed at, or the power lost, ``final`` is the old folder, the new one, or not there:
    never half of one.
    """
    for path in [*temporary.rglob("*"), temporary]:
        sync_to_disk(path)
    former = final.with_name(f"{final.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if final.exists():
        os.replace(final, former)
    os.replace(temporary, final)
    sync_to_disk(final.parent)
    shutil.rmtree(former, ignore_errors=True)
