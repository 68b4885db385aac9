"""What a machine has of what a run needs: a text that is sent to a Python there, of which nothing else is assumed.

It leaves nothing there. Until it has seen this package there it uses the standard library alone, in words that an old
Python reads too.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from typing import Any


def look(request: "dict[str, Any]") -> "dict[str, Any]":
    """What is there: Python, folder, free disk, GPUs, the package, and what the package itself finds wrong."""
    sys.dont_write_bytecode = True
    os.environ.update(request["env"])
    workdir = os.path.abspath(os.path.expanduser(request["workdir"]))
    found: dict[str, Any] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": os.name,
        "workdir": workdir,
        "folder_fault": _folder_fault(workdir),
        "free": _free(workdir),
        "held": _bytes_below(request["folder"]) if request["folder"] else 0,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpus": _gpus(),
        "package": None,
        "faults": [],
    }
    _see_package(request, found)
    return found


def _see_package(request: "dict[str, Any]", found: "dict[str, Any]") -> None:
    try:
        from importlib.metadata import version
        from importlib.util import find_spec

        found["package"] = version("praison-agent-rl")
    except ImportError:  # it is not installed, or this Python is older than what would say so
        return
    if found["package"] != request["version"]:
        return
    try:
        from praison_agent_rl.remote.carrying import describe

        found.update(describe(request["config"], request["hub"]))
    except ImportError as error:
        found["faults"].append(f"the package there cannot be imported: {error}")
    spec = find_spec("praison_agent_rl")
    if spec is not None and spec.origin is not None:
        found["script"] = os.path.join(os.path.dirname(spec.origin), "remote", "there.py")


def _folder_fault(workdir: str) -> "str | None":
    """Why nothing can be written there; it is made to see that, and taken away again."""
    made = []
    place = workdir
    while not os.path.lexists(place):
        made.append(place)
        place = os.path.dirname(place)
    try:
        os.makedirs(workdir, mode=0o700, exist_ok=True)
        return None if os.access(workdir, os.W_OK | os.X_OK) else "nothing can be written in it"
    except OSError as error:
        return str(error)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it was not made, or another run is there by now
                os.rmdir(folder)


def _free(workdir: str) -> int:
    while not os.path.exists(workdir):
        workdir = os.path.dirname(workdir)
    return shutil.disk_usage(workdir).free


def _bytes_below(folder: str) -> int:
    return sum(os.lstat(os.path.join(root, name)).st_size for root, _, files in os.walk(folder) for name in files)


def _gpus() -> "list[str]":
    """Name and free memory of each."""
    words = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]


def say(request: str, mark: str) -> None:
    """Write what is found as JSON, behind the mark."""
    sys.stdout.write(mark)
    sys.stdout.flush()
    sys.stdout.write(json.dumps(look(json.loads(request))) + "\n")
    sys.stdout.flush()
