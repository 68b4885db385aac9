"""The control groups of this process, by which Linux and containers limit it; nothing is changed."""

from pathlib import Path

MOUNTS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def memory_limit(*, mounts: Path = MOUNTS, own: Path = OWN) -> int | None:
    """Bytes that this process may take by the tightest limit of its groups, in v2 or v1; None without one."""
    texts = [
        _text(folder / name)
        for folder in own_folders("memory", mounts=mounts, own=own)
        for name in ("memory.max", "memory.limit_in_bytes")  # v2: a number or "max"; v1: a number, huge for none
    ]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def own_folders(controller: str, *, mounts: Path = MOUNTS, own: Path = OWN) -> list[Path]:
    """The process's own folder in each hierarchy that has ``controller``, and those above it."""
    places = [(mounts, mounts)]
    for line in _text(own).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            found = [folder for folder in sorted(mounts.glob("*")) if controller in folder.name.split(",")]
        else:
            continue
        # in a container the path is often the host's, and is not there: then the mount itself is the process's own
        places += [(mount, mount / path.lstrip("/")) for mount in found]
    above = [(place, [below, *below.parents]) for place, below in places]
    return [folder for place, chain in above for folder in chain if folder == place or place in folder.parents]


def _text(path: Path) -> str:
    """What a file holds; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
