"""A folder that appears whole or not at all; nothing that lay there before is touched."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from praison_agent_rl.errors import ConfigError, ModelError
from praison_agent_rl.estimate import free_disk, in_words
from praison_agent_rl.locks import AVAILABLE
from praison_agent_rl.publishing import link_or_copy, sync_all
from praison_agent_rl.runs import sync_to_disk

_SPARE = 64 * 2**20
"""Bytes for what lies beside the weights."""


def check_free(out: Path) -> None:
    """Raise ConfigError unless ``out`` is not there yet, or an empty folder that can be replaced."""
    there = os.path.lexists(out)
    if there and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} holds something already; remove it, or give another folder (--out)")
    if out.name in ("", "..") or (there and (out.is_mount() or out.samefile(os.curdir))):
        raise ConfigError(
            f"{str(out)!r} is the current folder or a disk, which an export cannot replace as a whole; give a new "
            "folder in it (--out)"
        )


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
    """A folder beside ``out`` that is gone afterwards, as is what a killed process left there.

    Its name is a new one each time: a program that a killed process had started may still write by the old one.

    Raises:
        ConfigError: nothing can be made there, or another export is about to fill ``out``.
    """
    place = out.with_name(f".{out.name}.part")
    temporary = place / secrets.token_hex(4)
    with ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_claimed(place))
            temporary.mkdir()
        except BlockingIOError as error:
            raise ConfigError(
                f"another export to {str(out)!r} is under way; let it end, or give another --out"
            ) from error
        except OSError as error:
            raise ConfigError(f"{str(out)!r} cannot be made: {error.strerror or error}; give another --out") from error
        try:
            yield temporary
        finally:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Make the folder, or empty it, and lock it itself, so that no file of a lock stays; BlockingIOError if taken."""
    if folder.is_symlink():
        raise FileExistsError(f"{str(folder)!r} is in the way")
    while True:
        folder.mkdir(exist_ok=True)
        lock = _locked(folder)
        if lock is None or _is(folder, lock):
            break
        os.close(lock)  # its holder renamed it, or took it away, in between
    try:
        for entry in list(folder.iterdir()):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """The folder, opened and locked; None where there are no locks. Raises BlockingIOError where another has it."""
    if not AVAILABLE:
        return None
    import fcntl

    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise
    except OSError:  # NFS locks no folders
        os.close(opened)
        return None
    return opened


def _is(folder: Path, opened: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise ModelError where the disk takes no more."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"the export cannot be written to {str(out)!r}: {_reason(error)}; make room on that disk, or give another "
            "folder (--out)"
        ) from error


def _reason(error: OSError) -> str:
    """Of a folder that could not be copied, why its first file could not."""
    listed = isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list)
    return str(error.args[0][0][2]) if listed else error.strerror or str(error)


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
