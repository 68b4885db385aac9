"""Versions of an agent's model on disk, and which of them is to answer; a version is whole or not there.

``HOME/versions/<agent>/v<n>/`` holds a version, ``current.json`` beside it says which one answers, and
``history.jsonl`` every change of that. No weights are loaded here.
"""

import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from praison_agent_rl.checksums import faults_of, hash_bytes, in_short
from praison_agent_rl.errors import ConfigError, VersionDamaged, VersionError
from praison_agent_rl.forcing import RECORD, mark_forced, unmark_forced
from praison_agent_rl.pointers import CURRENT, current_in, held, history_in, told, write_pointer, written_pointer
from praison_agent_rl.records import Plan, Pointer, Record, Version
from praison_agent_rl.runs import now, read_record, slug, write_record

log = logging.getLogger(__name__)

MODEL = "model"
_NAME = re.compile(r"v[1-9][0-9]*")
_AGENT = "agent.json"


class NamedAgent(Record):
    """Whose versions a folder holds."""

    name: str


# --- where ----------------------------------------------------------------------------------------------------------


def agent_folder(home: Path, agent: str) -> Path:
    """Where the versions of the agent with this name lie, or would lie.

    Two names that make the same file name do not share a folder: the second gets a suffix.
    """
    folder, digest = home / "versions" / slug(agent), _digest(agent)
    if not folder.is_dir() or _owner(folder) in (None, agent):
        return folder
    return folder.with_name(f"{folder.name}-{digest}")


def _digest(agent: str) -> str:
    try:
        return hash_bytes(agent.encode())[:8]
    except UnicodeEncodeError as error:
        raise VersionError(f"the agent's name {agent!r} cannot be written to a file; give it another") from error


def claimed_folder(home: Path, agent: str) -> Path:
    """The same, made and marked as this agent's; raises VersionError where nothing can be written."""
    while True:
        folder = agent_folder(home, agent)
        with told(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if _owner(folder) == agent:
            return folder
        _claim(folder, agent)  # where another agent was faster, the next round takes one of its own


def _claim(folder: Path, agent: str) -> None:
    with held(folder / ".claiming"), told(folder):
        if not (folder / _AGENT).exists():
            write_record(folder / _AGENT, NamedAgent(name=agent), sync=True)


def _owner(folder: Path) -> str | None:
    """Name of the agent whose folder it is; None for one of before names were written down."""
    file = folder / _AGENT
    return read_record(file, NamedAgent).name if file.exists() else None


def list_agents(home: Path) -> list[str]:
    """Names of the agents that have versions; one whose name cannot be read is left out with a warning."""
    folders = sorted(path for path in (home / "versions").glob("*") if path.is_dir() and any(_version_folders(path)))
    names = []
    for folder in folders:
        try:
            names.append(_owner(folder) or folder.name)
        except ConfigError as error:
            log.warning("the versions in %s are passed over: %s", folder, error)
    return names


def agent_named(home: Path, given: str) -> str:
    """Name of the agent that a person means: by its name, or by that of its folder.

    Raises:
        VersionError: there is none; the message lists those that there are.
    """
    if any(_version_folders(agent_folder(home, given))):
        return given
    folder = home / "versions" / given
    if Path(given).name == given and any(_version_folders(folder)):
        return _owner(folder) or given
    known = ", ".join(map(repr, list_agents(home))) or "none"
    raise VersionError(f"agent {given!r} has no versions in {str(home / 'versions')!r}; agents with versions: {known}")


def name_of(home: Path, agent: Any) -> str:
    """The name of an agent, or of the one that a text means: see `agent_named`."""
    if isinstance(agent, str):
        return agent_named(home, agent)
    return str(getattr(agent, "name", None) or "agent")


def served_name(version: Version) -> str:
    """Under which name a server offers the version's model: a plain one, and no other version's."""
    folder = Path(version.folder)
    return f"rl-{folder.parent.name}-{folder.name}"


# --- reading --------------------------------------------------------------------------------------------------------


def version_names(home: Path, agent: str) -> list[str]:
    """Names of the agent's versions, oldest first, also of those that are damaged."""
    return [path.name for path in _version_folders(agent_folder(home, agent))]


def list_versions(home: Path, agent: str) -> list[Version]:
    """The versions of ``agent``, oldest first; one whose record is damaged is left out with a warning."""
    found = []
    for folder in _version_folders(agent_folder(home, agent)):
        try:
            found.append(_read(folder))
        except ConfigError as error:
            _warn(folder, str(error))
    return found


@lru_cache(maxsize=256)
def _warn(folder: Path, fault: str) -> None:
    """Once for each fault: a canary looks every second."""
    log.warning("%s is left out: %s", folder.name, fault)


def read_version(home: Path, agent: str, name: str) -> Version:
    """The version called ``name``, as ``v3``; its ``folder`` is where it was found.

    Raises:
        VersionError: there is none; the message lists those that there are.
        ConfigError: its record is damaged.
    """
    folder = agent_folder(home, agent) / name
    if not _NAME.fullmatch(name) or not (folder / RECORD).exists():
        known = ", ".join(version_names(home, agent)) or "none"
        raise VersionError(f"agent {agent!r} has no version {name!r}; it has: {known}")
    return _read(folder)


def find_version(home: Path, text: str) -> Version:
    """The version that ``agent/v3`` names; raises VersionError for a text of another form, or where there is none."""
    agent, slash, name = text.rpartition("/")
    if not slash or not _NAME.fullmatch(name):
        raise VersionError(f"{text!r} names no version; write AGENT/v3")
    return read_version(home, agent_named(home, agent), name)


def model_of(version: Version) -> Path:
    """Folder of the merged weights; raises VersionError where they were pruned, or are gone."""
    folder = Path(version.folder) / MODEL
    if not (folder / "config.json").exists():
        agent = _owner(Path(version.folder).parent) or version.agent
        raise VersionError(
            f"the merged weights of {version.name} of agent {agent!r} are not there any more; they are made again from "
            f"its adapter by: praison-agent-rl versions restore {agent!r} {version.name}"
        )
    return folder


def _read(folder: Path) -> Version:
    return read_record(folder / RECORD, Version).model_copy(update={"folder": str(folder.resolve())})


def _version_folders(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("v*") if _NAME.fullmatch(path.name) and (path / RECORD).exists()]
    return sorted(found, key=lambda path: int(path.name[1:]))


def verify(version: Version) -> list[str]:
    """What is wrong with a version's files: each changed, missing or additional one; pruned weights are in order."""
    return faults_of(Path(version.folder))


# --- which one answers ----------------------------------------------------------------------------------------------


def pointer_file(home: Path, agent: str) -> Path:
    """The file that says which version is to answer; it is replaced at once and never changed in place."""
    return agent_folder(home, agent) / CURRENT


def current(home: Path, agent: str) -> Pointer | None:
    """What is to answer now; None where nothing was ever promoted. See `pointers.current_in`."""
    return current_in(agent_folder(home, agent), agent)


def history(home: Path, agent: str) -> list[Pointer]:
    """Every change of what answers, the oldest first."""
    return history_in(agent_folder(home, agent), agent)


def promote(
    home: Path,
    agent: str,
    name: str,
    *,
    by: Literal["improve", "promote"] = "promote",
    force: bool = False,
    since: str | None = None,
) -> Pointer:
    """Let the version answer from now on; where it does already, that is decided anew.

    ``since`` is when what it was compared with was made to answer: `Pointer.changed`, "" for what was built in.

    Raises:
        VersionError: there is none of that name, the gate did not let it through and ``force`` was not given, or
            (``since``, ``by="improve"``) something else was made to answer while it was trained.
        VersionDamaged: its files are not what they were.
    """
    version = read_version(home, agent, name)
    _check_gate(version, force=force)
    if by == "promote" and (faults := verify(version)):
        raise VersionDamaged(f"{name} of agent {agent!r} is damaged and was not promoted: {in_short(faults)}")
    with pointing(home, agent):
        model_of(version)  # here, as they can be pruned while they are verified
        before = _before(home, agent, by)
        if by == "improve" or since is not None:
            _check_unchanged(version, before, since)
        way_back: list[str | None] = [*before.previous, before.version] if before else [None]
        if before and before.version == name:
            way_back.pop()  # a decision for what answers already, which ends a canary
        pointer = Pointer(
            version=name, previous=way_back, changed=now("microseconds"), by=by, forced=not version.passed
        )
        if version.passed:
            return write_pointer(agent_folder(home, agent), agent, pointer)
        kept = mark_forced(version)  # before it answers, so that nothing answers unmarked
        try:
            return write_pointer(agent_folder(home, agent), agent, pointer)
        except BaseException:
            if kept and written_pointer(agent_folder(home, agent)) != pointer:
                unmark_forced(version, kept)
            raise


def rollback(home: Path, agent: str, *, force: bool = False) -> Pointer:
    """Let what answered before answer again; at the end of the way back is the model that the agent was built with.

    Versions on the way back that were deleted are passed over.

    Raises:
        VersionError: nothing answered before, or its merged weights were pruned.
        VersionDamaged: its files are not what they were, and ``force`` was not given.
    """
    while True:
        target, _ = _step_back(home, agent)
        version = _version_back(home, agent, target, force=force) if target else None
        with pointing(home, agent):
            found, way_back = _step_back(home, agent)
            if found != target:
                continue  # somebody was faster
            if version:
                model_of(version)  # here, as they can be pruned while they are verified
            forced, changed = bool(version and not version.passed), now("microseconds")
            pointer = Pointer(version=target, previous=way_back, changed=changed, by="rollback", forced=forced)
            return write_pointer(agent_folder(home, agent), agent, pointer)


def _step_back(home: Path, agent: str) -> tuple[str | None, list[str | None]]:
    """What answered before what answers now, and the way back from there."""
    before = _check_way_back(agent, current(home, agent))
    there = {None, *version_names(home, agent)}
    way_back = [name for name in before.previous if name in there]
    while way_back[-1:] == [before.version]:
        way_back.pop()
    target = way_back.pop() if way_back else None
    return target, way_back


def _version_back(home: Path, agent: str, name: str, *, force: bool) -> Version:
    try:
        version = read_version(home, agent, name)
    except ConfigError as error:
        raise VersionDamaged(
            f"{name} of agent {agent!r}, which answered before, is damaged: {error}; promote another version"
        ) from error
    model_of(version)
    if not force and (faults := verify(version)):
        raise VersionDamaged(
            f"{name} of agent {agent!r}, which answered before, is damaged and does not answer: {in_short(faults)}; "
            f"make its weights again: praison-agent-rl versions restore {shlex.quote(agent)} {name}, or promote "
            "another version; --force (force=True) goes back to it all the same"
        )
    return version


def _check_way_back(agent: str, pointer: Pointer | None) -> Pointer:
    if pointer is None or not pointer.previous:
        what = "nothing was ever promoted" if pointer is None else "it is back at the model that it was built with"
        raise VersionError(f"agent {agent!r} cannot be rolled back: {what}")
    return pointer


def improvement_lock(home: Path, agent: str) -> AbstractContextManager[None]:
    """Held while an agent is improved.

    Raises:
        VersionError: on entering, where another one improves it; says who and since when.
    """

    def refused(holder: str) -> VersionError:
        return VersionError(f"agent {agent!r} is being improved already, by {holder}; wait for its end")

    return held(home / "locks" / f"{slug(agent)}-{_digest(agent)}.improving", refused=refused)


def _check_gate(version: Version, *, force: bool) -> None:
    if version.passed or force:
        return
    said = version.verdict.text if version.verdict else "not better"
    raise VersionError(
        f"{version.name} was not let through by the gate ({said}), so it is not promoted; --force (force=True) does it "
        "all the same, which is recorded and shown from then on"
    )


def _check_unchanged(version: Version, pointer: Pointer | None, since: str | None) -> None:
    """What a version was compared with must still be what answers; that it answers already itself is in order."""
    if pointer and pointer.version == version.name:
        return
    planned = _planned_at(version)
    if since is not None:
        changed = (pointer.changed if pointer else "") != since
    elif pointer is None or pointer.version == version.parent:
        changed = False
    else:  # a plan knows its time to the second
        changed = planned is not None and pointer.changed[:19] > planned[:19]
    if changed:
        answers = (pointer and pointer.version) or "the model that the agent was built with"
        when = f" at {pointer.changed}" if pointer else ""
        raise VersionError(
            f"{version.name} is kept but does not answer: {answers} was made to answer{when}, and the run of "
            f"{version.name} (planned at {planned or 'an unknown time'}) was not compared with that; promote it by "
            "hand if it is wanted"
        )


def _planned_at(version: Version) -> str | None:
    file = Path(version.folder) / "plan.json"
    return read_record(file, Plan).created if file.exists() else None


def pointing(home: Path, agent: str) -> AbstractContextManager[None]:
    """Held while what answers is changed, or what must not change meanwhile."""
    return held(claimed_folder(home, agent) / ".pointing")


def _before(home: Path, agent: str, by: str) -> Pointer | None:
    try:
        return current(home, agent)
    except VersionError:
        if by == "improve":
            raise
        return None  # a decision by hand mends it


def used_numbers(home: Path, agent: str) -> Iterator[int]:
    """Numbers of versions that are there, or were: a name is not given twice."""
    folder = agent_folder(home, agent)
    yield from (int(path.name[1:]) for path in folder.glob("v*") if _NAME.fullmatch(path.name))
    for pointer in history(home, agent):
        yield from (int(name[1:]) for name in (pointer.version, *pointer.previous) if name and _NAME.fullmatch(name))
