"""What a model's name means: an agent's current version, or always the same one; nothing is started here."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from praison_agent_rl import registry
from praison_agent_rl.errors import ConfigError, VersionError
from praison_agent_rl.problems import Problems
from praison_agent_rl.records import Pointer, Version
from praison_agent_rl.server_pool import base_name


@dataclass(frozen=True, kw_only=True)
class Target:
    """A name that stays, whatever answers under it."""

    name: str
    """As it is asked for: the agent's folder of versions, with ``@v3`` where that one always answers."""
    home: Path
    agent: str
    pinned: str | None = None
    """The version that always answers; None is the current one."""

    @property
    def names(self) -> set[str]:
        """All that it is asked for by; the agent's own name need not be that of a folder."""
        return {self.name, f"{self.agent}@{self.pinned}" if self.pinned else self.agent}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights that answer: a version's, or those that it was trained on."""

    model: str
    """Name under which they are served, and no others."""
    label: str
    """``v3``, or ``base``."""
    version: Version

    @property
    def is_base(self) -> bool:
        """Whether they are those that the version was trained on."""
        return self.label == "base"

    @property
    def root(self) -> str:
        """Folder or hub name of the weights, as vLLM tells it of a model: an improvement of the agent begins there."""
        return self.version.base if self.is_base else str(Path(self.version.folder) / registry.MODEL)


def find_targets(home: Path, words: Sequence[str]) -> list[Target]:
    """What is to be served by ``AGENT`` and ``AGENT@v3``.

    Raises:
        VersionError: there is no such agent or version, or an agent has none that could answer.
        ConfigError: a name is there twice, or several things are wrong, which are said at once.
    """
    problems = Problems()
    found = [target for word in words if (target := problems.attempt(partial(_target, home, word)))]
    names = [target.name for target in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.found.append(ConfigError(f"{', '.join(twice)} is to be served twice; name it once"))
    problems.raise_all()
    return found


def _target(home: Path, word: str) -> Target:
    agent, sign, version = word.rpartition("@")
    pinned = None
    try:
        known = registry.agent_named(home, word)  # an agent's own name may hold the sign
    except VersionError:
        if not sign:
            raise
        known = registry.agent_named(home, agent)
        pinned = registry.read_version(home, known, version).name
    folder = registry.agent_folder(home, known).name
    target = Target(name=f"{folder}@{pinned}" if pinned else folder, home=home, agent=known, pinned=pinned)
    wanted(target, None if pinned else registry.current(home, known))
    return target


def wanted(target: Target, pointer: Pointer | None) -> Weights:
    """What is to answer under a name, where ``pointer`` is what was last decided for its agent.

    Before anything was promoted, and after a rollback of all, that is what the agent's first version was trained on.

    Raises:
        VersionError: the version, or every one that could say what the base is, is not there.
        ConfigError: its record is damaged.
    """
    name = target.pinned or (pointer.version if pointer else None)
    if name is not None:
        version = registry.read_version(target.home, target.agent, name)
        return Weights(model=registry.served_name(version), label=version.name, version=version)
    first = next((v for v in registry.list_versions(target.home, target.agent) if v.parent is None), None)
    if first is None:
        raise VersionError(
            f"no version of agent {target.agent!r} is current, and none is left that was trained on its own model; "
            "promote a version, or serve one by its name, as AGENT@v3"
        )
    return Weights(model=base_name(first), label="base", version=first)
