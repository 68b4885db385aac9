"""A folder that appears whole or not at all; nothing that lay there before is touched."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from praison_agent_rl.errors import ConfigError, ModelError
from praison_agent_rl.estimate import free_disk, in_words
from praison_agent_rl.publishing import link_or_copy, sync_all
from praison_agent_rl.runs import sync_to_disk

_SPARE = 64 * 2**20
"""Bytes for what lies beside the weights."""


def check_free(out: Path) -> None:
    """Raise ConfigError unless ``out`` is not there yet, or an empty folder."""
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} holds something already; remove it, or give another folder (--out)")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder under a temporary name that becomes ``out`` at the end; of an export that fails nothing is left.

    Raises:
        ConfigError: there is something at ``out`` already, or nothing can be made there.
        ModelError: the disk takes no more.
    """
    check_free(out)
    with scratch_folder(out) as temporary:
        yield temporary
        check_free(out)  # much may have happened in the meantime
        with writing(out):
            sync_all(temporary)
            if out.is_dir():
                out.rmdir()  # it is empty; Windows replaces no folder
            os.replace(temporary, out)
            sync_to_disk(out.parent)


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that is gone afterwards, as is one that a killed process left; raises ConfigError."""
    temporary = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise ConfigError(f"{str(out)!r} cannot be made: {error.strerror or error}; give another --out") from error
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise ModelError where the disk takes no more."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"the export cannot be written to {str(out)!r}: {error.strerror or error}; make room on that disk, or give "
            "another folder (--out)"
        ) from error


def need_room(size: int, out: Path) -> None:
    """Raise ModelError unless ``size`` bytes of weights have room where ``out`` will be."""
    needed, free = size + _SPARE, free_disk(out.parent)
    if needed > free:
        raise ModelError(
            f"the export takes {in_words(needed)}, and the disk of {str(out.parent)!r} has {in_words(free)} free; free "
            "some, or give a folder on another disk (--out)"
        )


def copy_files(source: Path, folder: Path, *, linked: bool = False) -> None:
    """Copy a folder of files into ``folder``; ``linked`` ones share their bytes, for a copy that does not stay.

    What a user gets is copied: a program that saves into it would write into a version's own weights.
    """
    shutil.copytree(source, folder, copy_function=link_or_copy if linked else shutil.copy2, dirs_exist_ok=True)
