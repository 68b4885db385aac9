"""SHA-256 of files, folders and weights: is what is there what was there once? Nothing is repaired here."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import cache_folder
from praison_agent_rl.records import Record
from praison_agent_rl.runs import write_bytes, write_text

SUMS = "checksums.json"
_CHUNK = 1 << 20
_LEFTOVER = re.compile(r"\.[^/]+\.\d+")
"""What ``runs.write_bytes`` leaves where it is killed."""


class Sums(Record):
    """SHA-256 of every file of a folder but this one, by its path in it."""

    files: dict[str, list[str]]
    """The last one is of the file as it is now. More than one stands where the file was made again, or is being."""
    pruned: dict[str, list[str]] = Field(default_factory=dict)
    """Of files that were taken away and can be made again."""


def hash_file(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def hash_bytes(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


def sums_of(folder: Path) -> Sums:
    """The sums of all files below ``folder`` as they are."""
    return Sums(files={name: [hash_file(folder / name)] for name in _names(folder)})


def write_sums(folder: Path, sums: Sums) -> None:
    """Write the sums into the folder; the file is whole or not there."""
    write_text(folder / SUMS, _as_text(sums), sync=True)


def read_sums(folder: Path) -> Sums:
    """The sums of a folder; raises ValueError or OSError where they are not as they were written."""
    text = (folder / SUMS).read_text(encoding="utf-8")
    sums = Sums.model_validate_json(text)
    if text != _as_text(sums):
        raise ValueError("it was changed by somebody else")
    return sums


def in_short(faults: list[str]) -> str:
    """The first faults, and how many more there are."""
    return "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")


def faults_of(folder: Path, *, without: str | None = None) -> list[str]:
    """Every changed, missing and additional file of a folder with sums, one sentence each.

    Those whose path begins with ``without`` are left out, and not read.
    """
    try:
        sums = read_sums(folder)
    except FileNotFoundError:
        return [f"{SUMS} is missing, so nothing can be verified"]
    except (OSError, ValueError) as error:
        return [f"{SUMS} cannot be believed: {str(error)[:200]}"]
    found = {name for name in _names(folder) if without is None or not name.startswith(without)}
    known = {name: hashes for name, hashes in sums.files.items() if without is None or not name.startswith(without)}
    faults = [f"{name} is missing" for name in known.keys() - found]
    faults += [f"{name} is additional" for name in found - known.keys() - sums.pruned.keys()]
    for name in found & {*known, *sums.pruned}:
        try:
            if hash_file(folder / name) not in {**sums.pruned, **known}[name]:
                faults.append(f"{name} was changed")
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror or error}")
    return sorted(faults)


def amend(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace files of a folder with sums; it is in order at every moment, also where this is killed."""
    sums = read_sums(folder)
    new = {name: hash_bytes(content) for name, content in contents.items()}
    between = {**sums.files, **{name: [*sums.files.get(name, []), new[name]] for name in new}}
    if fresh := [name for name in new if name not in sums.files]:
        raise ValueError(f"{', '.join(fresh)} is not of {str(folder)!r}")
    write_sums(folder, sums.model_copy(update={"files": between}))
    for name, content in contents.items():
        write_bytes(folder / name, content, sync=True)
    write_sums(folder, sums.model_copy(update={"files": {**sums.files, **{name: [new[name]] for name in new}}}))


def _as_text(sums: Sums) -> str:
    return json.dumps(sums.model_dump(), indent=1, sort_keys=True) + "\n"


def _names(folder: Path) -> Iterable[str]:
    for root, _, files in os.walk(folder):
        for file in files:
            name = (Path(root) / file).relative_to(folder).as_posix()
            if name != SUMS and not _LEFTOVER.fullmatch(name):
                yield name


# --- weights --------------------------------------------------------------------------------------------------------


def hash_weights(source: str, *, revision: str | None = None) -> str:
    """A hash of the weights of ``source``: a folder, a GGUF file, or a hub name that is in the local cache.

    It is the SHA-256 over those of its files in the order of their names. Each is read once and remembered in the cache
    folder by its path, size and times.

    Raises:
        ModelError: they are not on this machine.
    """
    files = weight_files(_place_of(source, revision))
    try:
        return combined(map(_remembered_hash, files))
    except OSError as error:
        raise ModelError(f"the weights of {source!r} cannot be read: {error}") from error


def combined(hashes: Iterable[str]) -> str:
    """The hash of weights from those of their files, in the order of the files' names."""
    return hash_bytes("\n".join(hashes).encode())


def weight_files(place: Path) -> list[Path]:
    """The files of a model that hold its weights; raises ModelError where there are none."""
    if place.is_file():
        return [place]
    files = sorted(place.glob("*.safetensors")) or sorted(place.glob("*.bin"))
    if not files:
        raise ModelError(f"there are no weights in {str(place)!r}")
    return files


def hash_template(folder: Path) -> str | None:
    """A hash of the chat template that a saved model has; None where it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return hash_file(file)
    try:
        template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return hash_bytes(json.dumps(template).encode()) if template else None


def _place_of(source: str, revision: str | None) -> Path:
    path = Path(source)
    if path.exists() or path.is_absolute():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        found = None
    else:
        found = try_to_load_from_cache(source, "config.json", revision=revision)
    if not isinstance(found, str):
        raise ModelError(f"the weights of {source!r} are not in the local cache of hub models; fetch them again")
    return Path(found).parent


def _remembered_hash(path: Path) -> str:
    stat = path.stat()
    # ctime, too: a file that was edited and given its old time back has another
    stamp = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ctime_ns}"
    kept = cache_folder() / "hashes" / hash_bytes(stamp.encode())
    with suppress(OSError, ValueError):
        known = kept.read_text(encoding="ascii")
        if len(known) == 64:
            return known
    value = hash_file(path)
    with suppress(OSError):  # then it is read again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, value)
    return value
