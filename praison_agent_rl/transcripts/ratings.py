"""Feedback on runs: says where it goes, checks it, and masks it as the run was masked; changes nothing else."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import DataError
from praison_agent_rl.records import Feedback, Run
from praison_agent_rl.transcripts.corrections import says_nothing
from praison_agent_rl.transcripts.files import DEFAULT_STORE, store_at
from praison_agent_rl.transcripts.masking import Masks, find_mask
from praison_agent_rl.transcripts.run_ids import Found, RunId, find_run
from praison_agent_rl.transcripts.shared_writers import shared_writer, writers
from praison_agent_rl.transcripts.unwritten import settle
from praison_agent_rl.transcripts.writing import TranscriptWriter

_FOUND = Found()


def feedback(
    run: Run | str,
    *,
    score: float | None = None,
    label: str | None = None,
    correction: str | None = None,
    store: str | Path | None = None,
    redact: str | Callable[..., str] | None = None,
) -> Feedback:
    """Say how good a run was, or what its answer should have been; what was recorded before stays as it is.

    ``run`` is ``agent.last_run`` or a run that was read, which know where they were recorded, or an id; without a
    ``store`` that is sought where this process recorded it, and then in the default one.

    What the run's recording masked is masked here too, and what ``redact`` says, as for a recording. In the process
    that recorded it a placeholder means the same as in the run; in another one the run's cannot be read back, so
    those of the feedback have numbers that it does not have.

    Raises:
        DataError: nothing is said, or something that cannot be said; the store has no such run or cannot be written.
        ConfigError: there is no such redactor.
    """
    given = _checked(run, score, label, correction)
    settle()
    writer = _writer(run, given.run, store)
    known = writer.knows(given.run)
    texts = given.label is not None or given.correction is not None
    found = _FOUND if known else find_run(writer.store, given.run, briefly=not texts)
    if found is None:
        raise DataError(
            f"run={given.run!r} is in no file of the store {str(writer.store)!r}; give agent.last_run, a run of "
            "read_runs(), or an id with the store= that it is in"
        )
    masks = Masks(find_mask(spec) for spec in (*_redact_of(run), *found.redact, redact))
    try:
        writer.feedback(given.model_dump(), masks=masks, names=None if known else found.names())
    except OSError as error:
        raise DataError(f"feedback cannot be written to the store {str(writer.store)!r}: {error}") from error
    return given


def _checked(run: Any, score: Any, label: Any, correction: Any) -> Feedback:
    if not isinstance(run, Run | str) or not (run if isinstance(run, str) else run.id):
        raise DataError(
            f"run={run!r} is no run; give agent.last_run of a recorded agent, a run of read_runs(), or an id"
        )
    if score is None and label is None and correction is None:
        raise DataError("feedback says nothing; give at least one of score=, label= and correction=")
    for name, text in (("label", label), ("correction", correction)):
        if not isinstance(text, str | None):
            raise DataError(f"{name}={text!r} is no text")
    if correction is not None and says_nothing(correction):
        raise DataError(
            f"correction={_short(correction)} says nothing, and would be learned as the answer; give the answer that "
            "should have been given, or say by score= how good the given one was"
        )
    try:
        number = None if score is None else float(score)
        finite = isinstance(score, int | float | None) and (number is None or math.isfinite(number))
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        raise DataError(f"score={_short(score)} is no finite number")
    run_id = str(run if isinstance(run, str) else run.id)
    return Feedback(run=run_id, time=time.time(), score=number, label=label, correction=correction)


def _short(value: Any) -> str:
    try:
        return repr(value)[:100]
    except ValueError:  # an integer of more digits than Python writes
        return f"an integer of {value.bit_length()} bits"


def _writer(run: Run | str, run_id: str, store: str | Path | None) -> TranscriptWriter:
    told = run if isinstance(run, str) else run.id
    if store is None and isinstance(told, RunId):
        store = told.store
    if store is None:
        recorded = next((writer for writer in writers() if writer.knows(run_id)), None)
        if recorded is not None:
            return recorded
    return shared_writer(store_at(store if store is not None else DEFAULT_STORE))


def _redact_of(run: Run | str) -> tuple[str, ...]:
    told = run if isinstance(run, str) else run.id
    return told.redact if isinstance(told, RunId) else ()
