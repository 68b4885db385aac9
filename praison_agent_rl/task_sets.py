"""Puzzles that are made and not collected: rows of a named task of reasoning_gym, and the scores of answers to them.

Both are asked of a process of its own (``task_set_worker``), which says why.
"""

import atexit
import importlib.util
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from praison_agent_rl.scoring.names import did_you_mean, short

from .data_files import Row
from .errors import DataError, MissingExtra, RewardError
from .line_process import LineProcess

PREFIX = "reasoning_gym:"
COLUMN = "reasoning_gym"
"""Column with what scoring needs, as JSON text: Arrow would change numbers and tuples in it."""

_SECONDS = 5.0
"""For the score of one answer; formulas can take for ever (``9**9**9``)."""


def is_task_set(name: Any) -> bool:
    """Whether the name of a dataset is that of a task set, such as ``reasoning_gym:chain_sum``."""
    return isinstance(name, str) and name.startswith(PREFIX)


def rows_of_task_set(name: str, *, size: int = 500, seed: int = 0, instruction: str = "", **options: Any) -> list[Row]:
    """``size`` puzzles, the same for the same ``seed`` and ``options``, which are those of the task's own config.

    A row has ``prompt`` (the question, and ``instruction`` behind it), ``answer`` (None where several are right) and
    what the reward ``praison_agent_rl.reward_library.puzzles:reasoning_gym`` scores by.

    Raises:
        DataError: there is no such task, or it refuses an option.
        MissingExtra: the package reasoning-gym is not installed.
    """
    task = name.removeprefix(PREFIX)
    _check(name, size, seed, options)
    process = TaskProcess()
    try:
        found = process.ask({"rows": {"task": task, "options": {**options, "size": size, "seed": seed}}})
    finally:
        process.close()
    if found is None:
        raise DataError(f"{name}: the process that makes its puzzles ended; was it out of memory? Make size smaller")
    _check_made(name, found, options)
    behind = f"\n\n{instruction}" if instruction else ""
    rows: list[Row] = []
    for question, answer, metadata in found["entries"]:
        kept = {"task": task, "options": options, "question": question, "right": answer, "metadata": metadata}
        rows.append({"prompt": question + behind, "answer": answer, COLUMN: json.dumps(kept)})
    return rows


def score_of(entry: str, answer: str) -> float:
    """The task's own score of ``answer`` to the puzzle of a row, whose column ``reasoning_gym`` is ``entry``.

    An answer that takes longer than 5 s, as ``9**9**9`` does, gets 0.0.

    Raises:
        RewardError: ``entry`` is none, or the task cannot score at all.
        MissingExtra: the package reasoning-gym is not installed.
    """
    _require()
    try:
        kept = json.loads(entry)
        request = {name: kept[name] for name in ("task", "options", "question", "right", "metadata")}
    except (TypeError, ValueError, KeyError) as error:
        raise RewardError(
            f"the column {COLUMN!r} holds {short(entry)}, but must be as a dataset named {PREFIX}<task> has it"
        ) from error
    found = _process_of(os.getpid()).ask({"score": {**request, "answer": answer, "seconds": _SECONDS}})
    if isinstance(found, dict):
        raise RewardError(f"{PREFIX}{request['task']} cannot score an answer: {found['failed']}")
    return 0.0 if found is None else float(found)


class TaskProcess(LineProcess):
    """A process of `task_set_worker`."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("task_set_worker.py"), {"PYTHONHASHSEED": "0"})

    def ask(self, request: dict[str, Any]) -> Any:
        """What the process says; None if it ended over the request."""
        line = self.line_for(request)
        return json.loads(line) if line else None


@cache
def _process_of(parent: int) -> TaskProcess:
    """One for each process: a fork may not read from its parent's."""
    process = TaskProcess()
    atexit.register(process.close)
    return process


def _require() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingExtra('task sets need the package reasoning-gym: pip install "praison-agent-rl[environments]"')


def _check(name: str, size: Any, seed: Any, options: dict[str, Any]) -> None:
    for key, value, least in (("size", size, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise DataError(f"{name}: {key} must be a whole number of at least {least}, not {short(value)}")
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: its options {short(options)} are more than JSON holds: {error}") from error
    _require()


def _check_made(name: str, found: dict[str, Any], options: dict[str, Any]) -> None:
    task = name.removeprefix(PREFIX)
    if "names" in found:
        near = did_you_mean(task, found["names"])
        raise DataError(f"reasoning_gym has no task {task!r}{near}. It has: {', '.join(found['names'])}")
    if "options" in found:
        odd = [f"{key!r}{did_you_mean(key, found['options'])}" for key in options if key not in found["options"]]
        raise DataError(f"{name} takes no {', '.join(odd)}; it takes: {', '.join(found['options'])}")
    if "refused" in found:
        raise DataError(f"{name} is refused: {found['refused']}")
    if "failed" in found:
        raise DataError(f"{name} cannot make its puzzles: {found['failed']}")
