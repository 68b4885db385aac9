"""What another machine does for a run, one verb a call: a script that needs nothing but Python's standard library.

It is run by its path, so that no call waits for the imports of the package. A call reads a line of JSON and perhaps a
parcel, and answers behind the line `MARK`, since a login may say something of its own first. Both sides pack, unpack
and compare parcels by the functions here.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

MARK = b"praison-agent-rl:\n"
RESULT = "result.json"
"""What became of a run, in its folder; written last."""

SPARE = "spare"
"""Room in a run's folder that its process frees last, so that on a full disk it can still say what became of it."""

_RUNNING = "running"
"""Locked while the run's process lives, and holds its id."""
_ATTEMPT = "attempt"
"""Which request the run was started by; one that is made again, since its answer was lost, starts nothing."""
_ID_BYTES = 16
_SPARE_BYTES = 1 << 16
_OWN_LOG = "carrying.txt"
"""What that process itself said; what its children say is in the log of the run."""
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_LOG_LINES = 12


# --- parcels --------------------------------------------------------------------------------------------------------


def hash_file(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def lacking(folder: Path, sums: Mapping[str, str]) -> list[str]:
    """Those of the files in ``sums`` that ``folder`` has not, or not with that hash."""
    return [name for name, wanted in sums.items() if not _has(folder / name, wanted)]


def pack(files: Mapping[str, Path], stream: IO[bytes]) -> None:
    """Write the files into ``stream`` under their names in the parcel; links are followed."""
    with tarfile.open(fileobj=stream, mode="w|", dereference=True, format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            tar.add(path, arcname=name, recursive=False, filter=_without_owner)


def unpack(stream: IO[bytes], folder: Path, sums: Mapping[str, str]) -> None:
    """Keep the files of a parcel in ``folder``, each whole or not there.

    Raises:
        ValueError: a file is not one of ``sums``, or not what its hash says.
    """
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() and member.name in sums else None
            if content is None:
                raise ValueError(f"{member.name!r} came, and was not asked for")
            _keep(content, folder / member.name, sums[member.name])


def _has(path: Path, wanted: str) -> bool:
    return path.is_file() and hash_file(path) == wanted


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _keep(content: IO[bytes], path: Path, wanted: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own: two runs may be sent the same weights at once
    part, digest = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part"), hashlib.sha256()
    try:
        with part.open("wb") as file:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != wanted:
            raise ValueError(f"{path.name!r} is not what its checksum says")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# --- verbs ----------------------------------------------------------------------------------------------------------


def _lacking(request: dict[str, Any]) -> list[str]:
    return lacking(Path(request["folder"]), request["sums"])


def _receive(request: dict[str, Any]) -> bool:
    unpack(sys.stdin.buffer, Path(request["folder"]), request["sums"])
    return True


def _start(request: dict[str, Any]) -> bool:
    """Start the run in a session of its own, which no end of a connection ends; False if this was done already."""
    folder, attempt = Path(request["folder"]), Path(request["folder"]) / _ATTEMPT
    held = _hold(folder, tries=20)
    if held is None or (attempt.exists() and attempt.read_text(encoding="ascii") == request["attempt"]):
        return False
    held.write(b" " * _ID_BYTES)  # what has no room is to fail before the start and not after it
    (folder / SPARE).write_bytes(os.urandom(_SPARE_BYTES))
    attempt.write_text(request["attempt"], encoding="ascii")
    (folder / RESULT).unlink(missing_ok=True)
    words = ["carry_out", str(folder), *request["stages"], *(["--resume"] if request["resume"] else [])]
    with (folder / _OWN_LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "praison_agent_rl.remote.carrying", *words],
            cwd=folder / "project",
            env={**os.environ, **request["env"], "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[held.fileno()],  # the lock is the process's own from its first moment
        )
    held.seek(0)
    held.write(str(process.pid).encode())
    held.close()
    return True


def _status(request: dict[str, Any]) -> dict[str, Any]:
    """``state`` is gone, running, ended (with the result), or died: without a result, also where it never began."""
    folder = Path(request["folder"])
    if not (folder / "run" / "plan.json").is_file():
        return {"state": "gone"}
    if _runs(folder):
        return {"state": "running"}
    found = {"log": _last_lines(folder / "run" / "log.txt", folder / _OWN_LOG)}
    if not (folder / RESULT).is_file():
        return {"state": "died", **found}
    return {"state": "ended", **found, **json.loads((folder / RESULT).read_text(encoding="utf-8"))}


def _follow(request: dict[str, Any]) -> None:
    """Send the whole lines of the run's events from byte ``start`` on, as they come, until it ends."""
    threading.Thread(target=_end_with_the_connection, daemon=True).start()
    folder, place = Path(request["folder"]), int(request["start"])
    ended = False
    while not ended:
        ended = not _runs(folder)  # asked before reading, so that its last events are still read
        place += _send_lines(folder / "run" / "events.jsonl", place)
        if not ended:
            time.sleep(_POLL_SECONDS)


def _give(request: dict[str, Any]) -> None:
    pack({name: Path(request["folder"]) / "run" / name for name in request["names"]}, sys.stdout.buffer)


def _stop(request: dict[str, Any]) -> bool:
    """Ask the run's process to end, as Ctrl-C does, and wait for it; False if none runs."""
    folder = Path(request["folder"])
    if not _runs(folder):
        return False
    os.kill(int((folder / _RUNNING).read_text(encoding="ascii")), signal.SIGTERM)
    while _runs(folder):
        time.sleep(_POLL_SECONDS)
    return True


def _remove(request: dict[str, Any]) -> bool:
    folder = Path(request["folder"])
    if folder.is_dir():
        shutil.rmtree(folder)
    return True


# --- what they need -------------------------------------------------------------------------------------------------


def _hold(folder: Path, *, tries: int = 1) -> IO[bytes] | None:
    """The file that is locked while a run goes on, now locked and empty; None where somebody else has it."""
    import fcntl

    file = os.fdopen(os.open(folder / _RUNNING, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    for _ in range(tries):  # who only looks whether it is free has it for a moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            return file
        time.sleep(0.05)
    file.close()
    return None


def _runs(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    held = _hold(folder)
    if held is not None:
        held.close()
    return held is None


def _end_with_the_connection() -> None:
    while os.read(sys.stdin.fileno(), _CHUNK):  # ends when the other side is gone
        pass
    os._exit(0)


def _send_lines(events: Path, place: int) -> int:
    """Send what whole lines there are from ``place`` on; how many bytes."""
    if not events.exists():
        return 0
    with events.open("rb") as file:
        file.seek(place)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    sys.stdout.buffer.write(whole)
    sys.stdout.buffer.flush()
    return len(whole)


def _last_lines(*logs: Path) -> str:
    texts = (log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists())
    return "\n".join("".join(texts).splitlines()[-_LOG_LINES:]) or "(it wrote nothing)"


_VERBS = {
    "lacking": _lacking,
    "receive": _receive,
    "start": _start,
    "status": _status,
    "follow": _follow,
    "give": _give,
    "stop": _stop,
    "remove": _remove,
}


def answer(verb: Any, request: Any) -> None:
    """Say what a verb comes to, in a line behind the mark; one that sends something itself says nothing more."""
    sys.stdout.buffer.write(MARK)
    sys.stdout.buffer.flush()
    try:
        said = verb(request)
        if said is not None:
            sys.stdout.buffer.write(json.dumps(said).encode() + b"\n")
        sys.stdout.buffer.flush()
    except (OSError, ValueError) as error:  # a full disk, or a parcel that is not what it should be
        sys.exit(f"{type(error).__name__}: {error}")


def main() -> None:
    """Do the verb that the command line names."""
    os.umask(0o077)  # prompts and weights are nobody else's
    answer(_VERBS[sys.argv[1]], json.loads(sys.stdin.buffer.readline()))


if __name__ == "__main__":
    main()
