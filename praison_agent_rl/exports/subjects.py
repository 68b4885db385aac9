"""What a text names that can be exported: a version of an agent, or the finished run of a model trained from a file."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from praison_agent_rl import registry
from praison_agent_rl.checksums import SUMS, in_short
from praison_agent_rl.errors import ConfigError, VersionDamaged, VersionError
from praison_agent_rl.records import Comparison, MergeProof, Plan, Verdict, Version
from praison_agent_rl.runs import RunFolder, read_record, slug
from praison_agent_rl.weight_files import check_weight_files

_OF_A_VERSION = re.compile(r"(?P<agent>.+)[@/](?P<name>v[1-9][0-9]*)")


@dataclass(frozen=True)
class Subject:
    """A trained model with what is known of it."""

    label: str
    """As a person names it: ``helper/v3``, or the folder of a run."""
    name: str
    """As a plain file name: ``helper-v3``."""
    records: RunFolder
    """Where its plan, its held-out prompts and its answers lie; nothing is written there."""
    model: Path
    """Folder of the merged weights."""
    passed: bool | None
    """Whether the gate let it through; None where nothing was held out."""
    version: Version | None = None

    @property
    def plan(self) -> Plan:
        """What its run was told."""
        return self.records.plan

    @property
    def adapter(self) -> Path:
        """Folder of the adapter."""
        return self.records.adapter

    @property
    def trusted(self) -> bool:
        """Whether code that comes with the model may run (``trust_remote_code``)."""
        return bool(self.plan.config.get("trust_remote_code"))

    @property
    def unmeasured(self) -> bool:
        """Whether prompts were held out and nobody has said yet what came of them."""
        rows = self.records.held_out_rows
        return self.passed is None and rows.is_file() and rows.stat().st_size > 0

    @property
    def title(self) -> str:
        """As others may know it; where it lies on this machine is nobody's business."""
        return self.label if self.version else self.records.root.resolve().name

    @property
    def comparison(self) -> Comparison | None:
        """Base and trained model on held-out prompts; None where nothing was held out."""
        file = self.records.comparison_file
        return read_record(file, Comparison) if file.exists() else None

    @property
    def verdict(self) -> Verdict | None:
        """What the gate said."""
        file = self.records.verdict_file
        return read_record(file, Verdict) if file.exists() else None

    @property
    def merge(self) -> MergeProof | None:
        """What the merge was proved by."""
        file = self.records.merge_file
        return read_record(file, MergeProof) if file.exists() else None


def find_subject(subject: str | Path, home: Path) -> Subject:
    """What ``subject`` names: AGENT (its current version), AGENT@v3, AGENT/v3, or the folder of a run or a version.

    Raises:
        ConfigError: the folder is not that of a finished run that trained a model to answer.
        VersionError: there is no such version, or its merged weights are gone.
    """
    text, folder = str(subject), Path(subject)
    if isinstance(subject, Path) or (folder.is_dir() and not _names_a_version(text, home)):
        return _of_folder(folder, home)
    if match := _OF_A_VERSION.fullmatch(text):
        agent = registry.agent_named(home, match["agent"])
        return _of_version(registry.read_version(home, agent, match["name"]))
    return _of_version(_current_version(registry.agent_named(home, text), home))


def check_exportable(subject: Subject, *, force: bool) -> None:
    """Whether it may leave: its files are what they were, and the gate let it through, or ``force``.

    Raises:
        VersionDamaged: its files were changed.
        ModelError: the weights of a run are broken.
        VersionError: the gate did not let it through.
    """
    if subject.version is None:
        check_weight_files(subject.model)
    if subject.version is not None and (faults := registry.verify(subject.version)):
        agent, name = shlex.quote(subject.version.agent), subject.version.name
        raise VersionDamaged(
            f"{subject.label} is damaged and was not exported: {in_short(faults)}; make its weights again: "
            f"praison-agent-rl versions restore {agent} {name}"
        )
    if subject.passed is False and not force:
        said = subject.verdict.text if subject.verdict else "not better"
        raise VersionError(
            f"{subject.label} was not let through by the gate ({said}), so it is not exported; --force (force=True) "
            "does it all the same, which its model card then says"
        )
    if subject.unmeasured and not force:
        raise VersionError(
            f"{subject.label} has held-out prompts and was not compared on them yet, so it is not exported; go on with "
            f"it: praison-agent-rl train --resume {shlex.quote(subject.label)}, or --force (force=True)"
        )


def check_outside(subject: Subject, out: Path) -> None:
    """Raise ConfigError for a folder in a version, which would then be damaged, or among what is exported."""
    own = (subject.model.resolve(), subject.adapter.resolve())
    for folder in out.resolve().parents:
        if folder in own or all((folder / name).exists() for name in ("version.json", SUMS)):
            raise ConfigError(
                f"{str(out)!r} lies in {str(folder)!r}, whose files must stay as they are; give another --out"
            )


def _names_a_version(text: str, home: Path) -> bool:
    """Whether there is an agent of that name: a folder that happens to be called so does not hide it."""
    match = _OF_A_VERSION.fullmatch(text)
    try:
        agent = registry.agent_named(home, match["agent"] if match else text)
    except VersionError:
        return False
    return match is None or match["name"] in registry.version_names(home, agent)


def _current_version(agent: str, home: Path) -> Version:
    pointer = registry.current(home, agent)
    if pointer is None or pointer.version is None:
        there = ", ".join(registry.version_names(home, agent))
        raise VersionError(f"no version of agent {agent!r} is current; name one, as {agent}@v1; it has: {there}")
    return registry.read_version(home, agent, pointer.version)


def _of_version(version: Version) -> Subject:
    folder = Path(version.folder)
    return Subject(
        label=f"{version.agent}/{version.name}",
        name=f"{folder.parent.name}-{folder.name}",
        records=RunFolder(folder),
        model=registry.model_of(version),
        passed=version.passed,
        version=version,
    )


def _of_folder(folder: Path, home: Path) -> Subject:
    if (folder / "version.json").exists():
        version = read_record(folder / "version.json", Version)
        return _of_version(version.model_copy(update={"folder": str(folder.resolve())}))
    run = RunFolder.open(folder)
    if run.plan.config.get("method") == "reward":
        raise ConfigError(
            f"{str(folder)!r} is the run of a reward model, which gives scores and no answers; its folder "
            f"{str(run.merged)!r} can be copied as it is"
        )
    if (run.merged / "config.json").exists():
        verdict = read_record(run.verdict_file, Verdict) if run.verdict_file.exists() else None
        label = str(folder)
        return Subject(label, slug(folder.resolve().name), run, run.merged, verdict.passed if verdict else None)
    if (made := version_made_of(run, home)) is not None:
        return _of_version(made)
    raise ConfigError(
        f"the run in {str(folder)!r} has no merged model; if it was interrupted, go on with it: praison-agent-rl train "
        f"--resume {shlex.quote(str(folder))}"
    )


def version_made_of(run: RunFolder, home: Path) -> Version | None:
    """The version that a run has become."""
    root = str(run.root.resolve())
    known = (version for agent in registry.list_agents(home) for version in registry.list_versions(home, agent))
    return next((version for version in known if version.run == root), None)
