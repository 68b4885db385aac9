"""Calls of good recorded runs, put beside a run: what is rendered before it trains, and what it may start from."""

from collections.abc import Sequence
from pathlib import Path

from praison_agent_rl.data import read_rows, write_rows
from praison_agent_rl.records import Call, Run

MOST_CALLS = 2000
"""Calls kept for a run, the latest."""


def good_calls(runs: Sequence[Run]) -> list[Call]:
    """The calls of runs that came to an end without a fault, the latest ``MOST_CALLS``.

    Where somebody has scored runs, only those with a score above zero are good; a run that was corrected is not.
    """
    sound = [run for run in runs if run.finished and run.error is None and run.output is not None]
    scored = [run for run in sound if any(said.score is not None for said in run.feedback)]
    good = [run for run in scored or sound if _is_good(run)]
    calls = [call for run in good for call in run.calls if call.reply is not None and not call.partial]
    return [call for call in calls if call.error is None and call.api == "chat"][-MOST_CALLS:]


def write_calls(path: Path, calls: Sequence[Call]) -> None:
    """Write the calls that `read_calls` reads."""
    write_rows(path, [call.model_dump() for call in calls])


def read_calls(path: Path) -> list[Call]:
    """The calls that were put beside a run; none where there are none."""
    return [Call.model_validate(row) for row in read_rows(path)] if path.exists() else []


def _is_good(run: Run) -> bool:
    corrected = any(said.correction is not None for said in run.feedback)
    scores = [said.score for said in run.feedback if said.score is not None]
    return not corrected and (not scores or scores[-1] > 0)
