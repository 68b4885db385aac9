"""Calls of good recorded runs, put beside a run: what is rendered before it trains, and what it may start from."""

from collections.abc import Sequence
from pathlib import Path

from praison_agent_rl.data import read_rows, write_rows
from praison_agent_rl.records import Call, Run
from praison_agent_rl.transcripts.corrections import last_correction

MOST_CALLS = 2000
"""Calls kept for a run, the latest."""


def good_calls(runs: Sequence[Run]) -> list[Call]:
    """The calls of runs that came to an end without a fault, the latest ``MOST_CALLS``.

    Where somebody has scored runs, only those with a score above zero are good. Of a run that was corrected only its
    last call is, with the correction as its answer; a correction that says nothing corrects nothing.
    """
    sound = [run for run in runs if run.finished and run.error is None and run.output is not None]
    scored = any(_scores(run) for run in sound)
    calls = [call for run in sound for call in _good_calls(run, scored)]
    return [call for call in calls if _is_whole(call)][-MOST_CALLS:]


def write_calls(path: Path, calls: Sequence[Call]) -> None:
    """Write the calls that `read_calls` reads."""
    write_rows(path, [call.model_dump() for call in calls])


def read_calls(path: Path) -> list[Call]:
    """The calls that were put beside a run; none where there are none."""
    return [Call.model_validate(row) for row in read_rows(path)] if path.exists() else []


def _good_calls(run: Run, scored: bool) -> list[Call]:
    """Those of a sound run; ``scored`` says that runs without a score are not known to be good."""
    correction = last_correction(run.feedback)
    if correction is not None:
        return _corrected(run.calls[-1:], correction)
    scores = _scores(run)
    return run.calls if (scores[-1] > 0 if scores else not scored) else []


def _corrected(last: Sequence[Call], correction: str) -> list[Call]:
    """The call that ended a run, as if it had been answered so; none where it was not the answer."""
    said = {"role": "assistant", "content": correction}
    answers = [call for call in last if call.reply is not None and not call.reply.get("tool_calls")]
    return [call.model_copy(update={"reply": said, "finish": "stop", "logprobs": None}) for call in answers]


def _scores(run: Run) -> list[float]:
    return [said.score for said in run.feedback if said.score is not None]


def _is_whole(call: Call) -> bool:
    return call.reply is not None and not call.partial and call.error is None and call.api == "chat"
