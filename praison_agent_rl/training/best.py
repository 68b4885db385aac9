"""Keep the adapter of the best step by the watched reward beside the checkpoints, which come and go."""

import contextlib
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.runs import RunFolder, publish_folder

_RECORD = "watched.json"


class Best(NamedTuple):
    """An adapter that was kept."""

    step: int
    gain: float
    """Mean difference of the watched total to that before training, prompt by prompt."""
    totals: list[float | None]
    """By watched prompt."""
    folder: Path


class Paired(NamedTuple):
    """A mean difference over prompts, and its standard error."""

    difference: float
    error: float


def paired(new: Sequence[float | None], old: Sequence[float | None]) -> Paired | None:
    """``new`` less ``old``, over the prompts that have both; None if there is none.

    >>> paired([1.0, 1.0, None], [0.0, 1.0, 1.0])
    Paired(difference=0.5, error=0.5)
    """
    found = [a - b for a, b in zip(new, old, strict=True) if a is not None and b is not None]
    if not found:
        return None
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.inf
    return Paired(statistics.fmean(found), error)


def keep(run: RunFolder, trainer: Any, event: dict[str, Any]) -> None:
    """Save the adapter as it is now, with the watched ``event`` that speaks for it; it takes the place of others.

    A process that is killed on the way leaves the one before, or both.
    """
    temporary, final = run.best / ".part", run.best / f"step-{event['step']}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        trainer.save_model(str(temporary))
        (temporary / "training_args.bin").unlink(missing_ok=True)  # a pickle
        record = {name: event[name] for name in ("step", "gain", "totals")}
        (temporary / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        publish_folder(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it is room that is missing
    for other in run.best.glob("step-*"):
        if other != final:
            shutil.rmtree(other, ignore_errors=True)


def best_of(run: RunFolder) -> Best | None:
    """The best adapter that was kept, of equal ones the later; None if there is none."""
    found = []
    for folder in run.best.glob("step-*"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # of a folder that was being taken away
            record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            found.append(Best(record["step"], record["gain"], record["totals"], folder))
    return max(found, key=lambda best: (best.gain, best.step), default=None)


def surely_better(best: Best, last: Sequence[float | None]) -> bool:
    """Whether ``best`` is above the totals of the last step by more than the standard error of their difference.

    Within it the last is taken, which has learned from more: of ten looks at steps that are equally good, the highest
    is above the last by one error and more in any case, and choosing by that alone would throw training away.
    """
    found = paired(best.totals, last)
    return found is not None and found.difference > found.error
