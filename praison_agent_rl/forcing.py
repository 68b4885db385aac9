"""Write into a version, for ever, that it was promoted against its verdict; whether it may be is not decided here."""

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

from praison_agent_rl.checksums import SUMS, amend
from praison_agent_rl.errors import MissingExtra
from praison_agent_rl.records import Verdict, Version
from praison_agent_rl.report import write_report
from praison_agent_rl.runs import RunFolder, read_record, write_bytes, write_record

log = logging.getLogger(__name__)

RECORD = "version.json"


def mark_forced(version: Version) -> dict[str, bytes]:
    """Say so in the version's record, its verdict and its report; a second call changes nothing.

    Returns the files as they were, for `unmark_forced`; where it fails they are so again.
    """
    if version.verdict and version.verdict.forced:
        return {}
    run = RunFolder(version.folder)
    files = [path for path in (run.root / RECORD, run.verdict_file, run.report, run.numbers) if path.exists()]
    kept = {path.name: path.read_bytes() for path in files}
    try:
        _mark(version)
    except BaseException:
        unmark_forced(version, kept)
        raise
    return kept


def unmark_forced(version: Version, kept: Mapping[str, bytes]) -> None:
    """Undo `mark_forced`, for a promotion that failed; on a full disk that can fail too, with a warning."""
    folder = Path(version.folder)
    try:
        if (folder / SUMS).exists():
            amend(folder, kept)
        else:
            for name, content in kept.items():
                write_bytes(folder / name, content, sync=True)
    except (OSError, ValueError) as error:
        log.warning("%s was not promoted but may be marked as promoted by force: %s", version.name, error)


def _mark(version: Version) -> None:
    folder = Path(version.folder)
    run = RunFolder(folder)
    verdict = version.verdict or Verdict(status="not better", text="not better (of before there were verdicts)")
    verdict = verdict.model_copy(update={"forced": True})
    record = read_record(folder / RECORD, Version).model_copy(update={"verdict": verdict})
    if not (folder / SUMS).exists():  # published before there were checksums
        write_record(folder / RECORD, record, sync=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        new = RunFolder(Path(scratch))
        write_record(new.root / RECORD, record)
        if run.verdict_file.exists():
            write_record(new.verdict_file, verdict)
        if run.report.exists():
            _write_report(run, new, verdict)
        changed = [path for path in new.root.iterdir() if (folder / path.name).exists()]
        changed.sort(key=lambda path: path.name == RECORD)  # last: where it says so, everything does
        amend(folder, {path.name: path.read_bytes() for path in changed})


def _write_report(run: RunFolder, new: RunFolder, verdict: Verdict) -> None:
    """The run's report with its new verdict, into the folder ``new``."""
    write_record(new.verdict_file, verdict)
    run.report, run.numbers, run.verdict_file = new.report, new.numbers, new.verdict_file
    try:
        write_report(run)
    except MissingExtra as error:
        log.warning("the report of %s does not say that it was promoted by force: %s", run.root, error)
