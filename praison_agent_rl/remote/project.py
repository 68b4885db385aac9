"""What of the user's project a run needs on another machine: modules of rewards, what they import, and named files."""

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.estimate import in_words
from praison_agent_rl.scoring.names import importing_from

_INSTALLED = {"site-packages", "dist-packages"}
_OURS = "praison_agent_rl"
_MOST_BYTES = 256 * 2**20
"""More than this is no code any more, and somebody should have a look."""


def files_of_modules(names: Iterable[str]) -> dict[str, Path]:
    """The files of the user's own modules among ``names``, and of own modules that these import, by their names there.

    A module is the user's own if it lies under the current folder and was not installed there; of a package all files
    go. What is imported by a computed name is not seen.
    """
    found: dict[str, Path] = {}
    waiting, seen = {name.partition(".")[0] for name in names}, set[str]()
    with importing_from(None):
        while waiting:
            name = waiting.pop()
            seen.add(name)
            own = _own_files(name)
            found |= own
            waiting |= {other for path in own.values() for other in _imports(path)} - seen
    return found


def files_brought(given: str) -> tuple[str, dict[str, Path]]:
    """The name there of a file or folder that goes along, and its files: under the current folder it keeps its place.

    Raises:
        ConfigError: it is not there.
    """
    path, here = Path(os.path.abspath(Path(given).expanduser())), Path.cwd()  # a link keeps its own name
    if not path.exists():
        raise ConfigError(f"{given!r} is to go along, but there is no such file or folder; look from {os.getcwd()!r}")
    if path.resolve() == here:
        raise ConfigError(f"{given!r} is the whole current folder; name the files and folders of it that are needed")
    if here not in path.parents and here in path.resolve().parents:  # named by another way to this folder
        path = path.resolve()
    name = path.relative_to(here).as_posix() if here in path.parents else path.name
    files = {name: path} if path.is_file() else {f"{name}/{inner}": file for inner, file in _below(path)}
    return name, files


def check_size(files: dict[str, Path], host: str) -> None:
    """Raise ConfigError where the files are too large to be code."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    if total > _MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"{in_words(total)} of files of the project would go to {host!r}, most of it in {largest!r} "
            f"({in_words(sizes[largest])}); of a package all files go, so keep rewards in a module or package that "
            "holds no data"
        )


def _own_files(name: str) -> dict[str, Path]:
    """The files of a top-level module or package by their places beside it; empty where it is not the user's own."""
    spec = PathFinder.find_spec(name) if name not in sys.stdlib_module_names and name != _OURS else None
    if spec is None:
        return {}
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    path = Path(os.path.abspath(places[0]))  # a link is imported by its own name
    here = Path.cwd() in {*path.parents, *path.resolve().parents}
    if not here or _INSTALLED & {*path.parts, *path.resolve().parts}:
        return {}
    return {path.name: path} if path.is_file() else {f"{path.name}/{inner}": file for inner, file in _below(path)}


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files below a folder, without hidden ones and compiled modules; links are followed, unless to nowhere."""
    for root, folders, files in os.walk(folder, followlinks=True):
        above = {Path(root).resolve(), *Path(root).resolve().parents}
        seen = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        folders[:] = [name for name in seen if (Path(root) / name).resolve() not in above]  # else it would never end
        for file in files:
            path = Path(root) / file
            if not file.startswith(".") and path.is_file():  # no pipe, which would be waited for
                yield path.relative_to(folder).as_posix(), path


def _imports(path: Path) -> Iterator[str]:
    """The top-level modules that a file of Python names in its imports, wherever in it."""
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # it may never be imported; if it is, the run says what is wrong
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
