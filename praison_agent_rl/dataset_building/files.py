"""The files of a prompt dataset: written under temporary names and renamed when they are whole.

All rows are in one file, so that one rename replaces all of them: whoever reads finds the old dataset or the new one,
and a build that was killed has changed neither.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from praison_agent_rl.data import read_rows, to_dataset
from praison_agent_rl.data_files import Row
from praison_agent_rl.dataset_building.conversations import SIDES
from praison_agent_rl.dataset_building.row_texts import RowText
from praison_agent_rl.dataset_building.rows import KeptRow
from praison_agent_rl.errors import DataError
from praison_agent_rl.locks import locked

SPLIT_FORMAT = 1
TEMPORARY = ".building-"
LOCK = ".lock"


class GivenSide(NamedTuple):
    """A line of ``split.jsonl``: the side that a prompt was given once and keeps."""

    key: int
    side: str
    links: list[int]
    near: str | None


class DatasetFolder:
    """Names of the files of a dataset; it holds no state but its path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.split_file = root / "split.jsonl"
        self.manifest_file = root / "manifest.json"
        self.card_file = root / "README.md"

    def rows_file(self, format: str) -> Path:
        """Where the rows lie."""
        return self.root / f"rows.{format}"

    def given_sides(self) -> Iterator[GivenSide]:
        """The sides that earlier builds gave, the oldest first."""
        if not self.split_file.exists():
            return
        with self.split_file.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                    if number > 1:
                        yield GivenSide(line["key"], line["side"], line["links"], line.get("near"))
                    elif line["format"] != SPLIT_FORMAT:
                        raise ValueError(f"its format is {line['format']!r}, not {SPLIT_FORMAT}")
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"{self.split_file} line {number} cannot be read: {error}. It remembers the side of every "
                        "prompt; put back a copy of it, or build into another folder"
                    ) from error


@contextmanager
def drafting(folder: DatasetFolder) -> Iterator["Draft"]:
    """A draft of the dataset in ``folder``, removed unless it was published.

    Raises:
        DataError: another build is writing there, or the folder cannot be made or written to.
    """

    def refused(holder: str) -> DataError:
        return DataError(
            f"another build is writing to {str(folder.root)!r} ({holder}); wait for its end, or give another out"
        )

    made = [path for path in (folder.root, *folder.root.parents) if not os.path.exists(path)]
    try:
        with locked(folder.root / LOCK, refused=refused):
            try:
                yield Draft(folder)
            finally:
                # of builds that were killed, too: nobody else writes while the lock is held
                for left in folder.root.glob(f"{TEMPORARY}*"):
                    left.unlink(missing_ok=True)
                _remove_empty(made)
    except OSError as error:
        raise DataError(f"the dataset in {str(folder.root)!r} cannot be built: {error}; give another out") from error


def _remove_empty(made: list[Path]) -> None:
    """Remove the folders that this build has made, the innermost first, if all that it put there is its lock."""
    with suppress(OSError):  # on Windows a lock that is held cannot be removed
        if made and [path.name for path in made[0].iterdir()] == [LOCK]:
            (made[0] / LOCK).unlink()
            for path in made:
                path.rmdir()


class Draft:
    """The new files of a dataset under temporary names."""

    def __init__(self, folder: DatasetFolder) -> None:
        self.folder = folder
        self._gathered = folder.root / f"{TEMPORARY}gathered"
        self._rows = folder.root / f"{TEMPORARY}rows"
        self._split = folder.root / f"{TEMPORARY}split"
        self.spool = folder.root / f"{TEMPORARY}spool"
        """A file for what is put aside meanwhile."""
        self.fingerprint = ""
        """``data.fingerprint`` of the rows, once they are divided."""

    def gather(self, rows: Iterable[KeptRow]) -> None:
        """Write down rows whose sides are not known yet, each in four lines."""
        with self._gathered.open("wb") as file:
            file.writelines(b"%s\n%s\n%s\n%s\n" % (row.note, *row.text) for row in rows)

    def divide(self, sides: Iterable[str | None], lent: dict[int, Row]) -> dict[str | None, int]:
        """Give each gathered row its side, and what was lent to it; returns the rows of each side."""
        counts: dict[str | None, int] = dict.fromkeys((*SIDES, None), 0)
        digest = hashlib.sha256()
        self._begin_split()
        with (
            self._gathered.open("rb") as gathered,
            self._rows.open("wb") as rows,
            self._split.open("ab") as split,
        ):
            lines = map(bytes.rstrip, gathered)
            for number, (side, note, *text) in enumerate(zip(sides, lines, lines, lines, lines, strict=True)):
                counts[side] += 1
                if side is None:
                    continue
                row, canonical = RowText(*text).on(side, lent.get(number))
                rows.write(row + b"\n")
                # as data.fingerprint does, which would have to read all rows again
                digest.update(canonical + b"\n")
                if note:
                    split.write(b'%s, "side": "%s"}\n' % (note[:-1], side.encode()))
        self.fingerprint = digest.hexdigest()[:16]
        return counts

    def publish(self, format: str) -> Path:
        """Give the files their names; returns that of the rows.

        The sides go first: they only add to the older ones, which stay true of the older rows.
        """
        if format == "parquet":
            parquet = self._rows.with_suffix(".parquet")
            to_dataset(read_rows(self._rows)).to_parquet(parquet)
            self._rows = parquet
        final = self.folder.rows_file(format)
        os.replace(self._split, self.folder.split_file)
        os.replace(self._rows, final)
        self.folder.rows_file("parquet" if format == "jsonl" else "jsonl").unlink(missing_ok=True)
        return final

    def _begin_split(self) -> None:
        if self.folder.split_file.exists():
            shutil.copyfile(self.folder.split_file, self._split)
        else:
            self._split.write_text(json.dumps({"format": SPLIT_FORMAT}) + "\n", encoding="ascii")
