"""Compare the versions that are kept, thin them out, and make whole again what was thinned out.

Nothing here says which version answers, but for ``promote_run``, which does it by hand.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from praison_agent_rl.checksums import Sums, combined, faults_of, hash_file, hash_weights, read_sums, write_sums
from praison_agent_rl.data_files import read_rows, write_rows
from praison_agent_rl.errors import ConfigError, ModelError, TrainingFailed, VersionDamaged, VersionError
from praison_agent_rl.locks import AVAILABLE
from praison_agent_rl.pointers import held
from praison_agent_rl.publishing import publish_version, sync_all
from praison_agent_rl.records import Comparison, Interval, Plan, Pointer, Verdict, Version
from praison_agent_rl.registry import (
    MODEL,
    agent_folder,
    current,
    improvement_lock,
    list_versions,
    pointing,
    promote,
    read_version,
    verify,
    version_names,
)
from praison_agent_rl.runs import RunFolder, read_record, sync_to_disk, write_record
from praison_agent_rl.training.launch import launch_stages

OnEvent = Callable[[dict[str, Any]], None]

_RESTORING = ".restoring-"
_GONE = ".pruned-"
_PROOF_ROWS = 8


# --- differences ----------------------------------------------------------------------------------------------------


def diff(a: Version, b: Version) -> dict[str, tuple[Any, Any]]:
    """In what two versions differ: of each such thing its name, as ``config.beta``, and the two values.

    Raises:
        VersionDamaged: what is written down of one of them cannot be read.
    """
    left, right = _facts(a), _facts(b)
    names = [*left, *(name for name in right if name not in left)]
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def _facts(version: Version) -> dict[str, Any]:
    folder = Path(version.folder)
    facts: dict[str, Any] = {"base": version.base, "base hash": version.base_hash, "parent": version.parent}
    facts["template"] = version.template_hash
    if (folder / "plan.json").exists():
        plan = read_record(folder / "plan.json", Plan)
        facts |= _flat("config", plan.config)
        facts |= {f"reward {reward.name}": f"{reward.spec}, weight {reward.weight:g}" for reward in plan.rewards}
        facts |= {f"judge {reward.name}": reward.spec for reward in plan.judges}
    for name in ("data", "manifest"):
        if (folder / f"{name}.json").exists():
            facts |= _flat(name, _json_of(folder / f"{name}.json"))
    compared = version.comparison
    for name, interval in {"total": compared.total, **compared.rewards, **compared.judged}.items():
        facts[f"result {name}"] = _said(interval)
    facts["verdict"] = version.verdict.text if version.verdict else None
    return {**facts, **{f"library {name}": number for name, number in version.libraries.items()}}


def _json_of(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise VersionDamaged(
            f"{str(file)!r} cannot be read, so it is not known in what the versions differ: {error}; what else is "
            "damaged is told by: praison-agent-rl versions verify"
        ) from error


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: leaf for key, inner in value.items() for name, leaf in _flat(f"{prefix}.{key}", inner).items()}


def _said(interval: Interval) -> str:
    return f"{interval.base:.4g} -> {interval.new:.4g} ({interval.low:+.4g}..{interval.high:+.4g})"


# --- thinning out ---------------------------------------------------------------------------------------------------


@dataclass
class Pruned:
    """What ``prune`` did."""

    removed: list[str] = field(default_factory=list)
    """Versions whose merged weights are gone; everything else of them stays."""
    kept: dict[str, str] = field(default_factory=dict)
    """The others that have theirs, each with the reason."""
    freed: int = 0
    """Bytes."""


def prune(home: Path, agent: str, keep: int = 2) -> Pruned:
    """Remove merged weights that are not needed soon and can be made again from base and adapter by ``restore``.

    Kept are those of the version that answers, of the last ``keep`` on the way back (one at least), of the newest
    ``keep``, of the bases of all these, of bases of runs that are not finished, and whatever could not be made again.

    Raises:
        VersionError: the agent is being improved; ConfigError: ``keep`` is negative.
    """
    if keep < 0:
        raise ConfigError(f"keep is {keep}; give how many versions keep their weights, 0 or more")
    folder, done = agent_folder(home, agent), Pruned()
    if not version_names(home, agent):
        return done
    with improvement_lock(home, agent), _restoring(folder):
        _remove_leftovers(folder)
        versions = {version.name: version for version in list_versions(home, agent)}
        for name, version in versions.items():
            if not (Path(version.folder) / MODEL).is_dir():
                continue
            reason = _wanted(home, agent, versions, keep).get(name) or _cannot_be_made(home, agent, version)
            with pointing(home, agent):  # asked again: it may have been made to answer while it was looked at
                if reason := reason or _wanted(home, agent, versions, keep).get(name):
                    done.kept[name] = reason
                else:
                    done.freed += _remove_weights(version)
                    done.removed.append(name)
        return done


def _wanted(home: Path, agent: str, versions: dict[str, Version], keep: int) -> dict[str, str]:
    """Versions that keep their weights, each with the reason."""
    reasons = {name: f"one of the newest {keep}" for name in list(versions)[max(len(versions) - keep, 0) :]}
    pointer = current(home, agent)
    for name in pointer.previous[-max(keep, 1) :] if pointer else ():
        reasons[str(name)] = "on the way back"
    if pointer and pointer.version:
        reasons[pointer.version] = "it answers"
    for version in [versions[name] for name in reasons if name in versions]:
        if base := _base_version(home, agent, version):
            reasons.setdefault(base.name, f"{version.name} was trained on it")
    for plan in _unfinished(home):
        for name, version in versions.items():
            if Path(plan.base).is_relative_to(version.folder):
                reasons.setdefault(name, "a run that is not finished trains on it")
    return reasons


def _unfinished(home: Path) -> list[Plan]:
    files = [path for path in home.glob("runs/*/plan.json") if not path.with_name("comparison.json").exists()]
    plans = []
    for file in files:
        try:
            plans.append(read_record(file, Plan))
        except ConfigError:  # of an older format: nothing can go on with it
            continue
    return plans


def _cannot_be_made(home: Path, agent: str, version: Version) -> str | None:
    """Why the version's merged weights could not be made again; None where they can."""
    if version.base_hash is None:
        return "the hash of its base is not known"
    if faults := faults_of(Path(version.folder), without=f"{MODEL}/"):
        return f"it is damaged: {faults[0]}"
    base = _base_version(home, agent, version)
    if base is not None:
        if (Path(base.folder) / MODEL).is_dir():
            return None
        inner = _cannot_be_made(home, agent, base)
        return f"its base {base.name} cannot be made again: {inner}" if inner else None
    try:
        check_base(version, version.base)
    except (ModelError, VersionError) as error:
        return str(error)
    return None


def _remove_weights(version: Version) -> int:
    folder = Path(version.folder)
    others, of_model = _divided(read_sums(folder))
    size = sum((folder / name).stat().st_size for name in of_model if (folder / name).exists())
    write_sums(folder, Sums(files=others, pruned=of_model))
    _take_away(folder / MODEL)
    return size


def _divided(sums: Sums) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The sums of the other files, and those of the merged weights, be they there or pruned."""
    of_model = {name: known for name, known in sums.files.items() if name.startswith(f"{MODEL}/")}
    others = {name: known for name, known in sums.files.items() if name not in of_model}
    return others, {**sums.pruned, **of_model}


def _take_away(model: Path) -> None:
    """Remove a model such that half of one is never found under its name."""
    gone = model.parent.parent / f"{_GONE}{model.parent.name}-{secrets.token_hex(4)}"
    os.rename(model, gone)
    shutil.rmtree(gone)


def _remove_leftovers(folder: Path) -> None:
    for left in [*folder.glob(f"{_GONE}*"), *folder.glob(f"{_RESTORING}*")] if AVAILABLE else ():
        shutil.rmtree(left, ignore_errors=True)


# --- making whole again ---------------------------------------------------------------------------------------------


def restore(home: Path, agent: str, name: str, *, on_event: OnEvent = lambda event: None) -> Version:
    """Make the merged weights of a version again, from its base and its adapter, in a child process.

    Weights that are there and in order stay. Where the base is a version whose weights were pruned too, that one is
    restored first. The result is proved as after training; it need not have the same bits where libraries have changed.

    Raises:
        VersionDamaged: its adapter or its records are damaged.
        VersionError: the base is not the one that it was trained on.
        PraisonRLError: the merge failed.
    """
    version = read_version(home, agent, name)
    folder = Path(version.folder)
    faults = verify(version)
    if others := [fault for fault in faults if not fault.startswith(f"{MODEL}/")]:
        raise VersionDamaged(f"{name} of agent {agent!r} cannot be restored, it is damaged: {'; '.join(others[:5])}")
    if not faults and (folder / MODEL).is_dir():
        with pointing(home, agent):
            _settle(folder)
        return version
    base = _whole_base(home, agent, version, on_event)
    with _restoring(folder.parent):
        _remove_leftovers(folder.parent)
        scratch = folder.parent / f"{_RESTORING}{secrets.token_hex(4)}"
        scratch.mkdir()
        try:
            run = _draft_merge(version, base, scratch)
            launch_stages(run, ["merge"], on_event)
            _put_back(home, agent, version, run.merged)
        except TrainingFailed as error:
            said = str(error).partition("\nthe whole log is")[0]  # the log is not kept, and no run goes on
            raise TrainingFailed(f"{name} of agent {agent!r} could not be restored: {said}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return version


def _restoring(folder: Path) -> AbstractContextManager[None]:
    def refused(holder: str) -> VersionError:
        return VersionError(f"versions in {str(folder)!r} are being restored or pruned by {holder}; wait for its end")

    return held(folder / ".restoring", refused=refused)


def _whole_base(home: Path, agent: str, version: Version, on_event: OnEvent) -> str:
    """Where the weights lie that the version was trained on, restored if they were pruned, and their hash is right."""
    source, base = version.base, _base_version(home, agent, version)
    if base is not None:
        restore(home, agent, base.name, on_event=on_event)
        source = str(Path(base.folder) / MODEL)
    if base is None or not _stands_for(base, version.base_hash):
        check_base(version, source)
    return source


def _base_version(home: Path, agent: str, version: Version) -> Version | None:
    """The version that this one was trained on; looked for where the versions are now."""
    base = Path(version.base)
    if version.parent is None or base.name != MODEL or base.parent.name != version.parent:
        return None
    try:
        return read_version(home, agent, version.parent)
    except (VersionError, ConfigError):
        return None


def check_base(version: Version, source: str) -> None:
    """Raise VersionError, with both hashes, unless ``source`` holds the weights that the version was trained on."""
    if version.base_hash is None:
        raise VersionError(f"the hash of the base of {version.name} was not recorded, so no base can be checked by it")
    plan = read_record(Path(version.folder) / "plan.json", Plan)
    found = hash_weights(source, revision=plan.config.get("revision") if source == plan.base else None)
    if found != version.base_hash:
        raise VersionError(
            f"{source!r} is not what {version.name} was trained on: its weights have the hash {found}, and those that "
            f"the adapter belongs to had {version.base_hash}; find the weights of that hash again"
        )


def _stands_for(base: Version, wanted: str | None) -> bool:
    """Whether a version's weights are in order, and those that were published had the hash ``wanted``.

    Weights that were made again with other libraries can differ in their last bits from those of then.
    """
    sums = read_sums(Path(base.folder))
    names = sorted(name for name in sums.files if name.startswith(f"{MODEL}/") and name.endswith(".safetensors"))
    return bool(names) and combined(sums.files[name][0] for name in names) == wanted


def _draft_merge(version: Version, base: str, scratch: Path) -> RunFolder:
    """A run of which only the merge is left to do."""
    folder, run = Path(version.folder), RunFolder(scratch)
    plan = read_record(folder / "plan.json", Plan)
    # rewards have no part in it, and may not be there any more
    write_record(run.plan_file, plan.model_copy(update={"base": base, "rewards": [], "judges": []}))
    write_rows(run.train_rows, read_rows(folder / "held_out.jsonl")[:_PROOF_ROWS])
    shutil.copytree(folder / "adapter", run.adapter)
    return run


def _put_back(home: Path, agent: str, version: Version, model: Path) -> None:
    """Move the model that was made into the version; the sums of the first one stay first."""
    folder = Path(version.folder)
    sync_all(model)
    names = [f"{MODEL}/{path.relative_to(model).as_posix()}" for path in model.rglob("*") if path.is_file()]
    made = {name: hash_file(model / name.removeprefix(f"{MODEL}/")) for name in names}
    with pointing(home, agent):  # a promotion by force writes sums, too
        others, earlier = _divided(read_sums(folder))
        known = {name: list(dict.fromkeys([*earlier.get(name, [])[:1], new])) for name, new in made.items()}
        if (folder / MODEL).exists():  # a damaged one
            _take_away(folder / MODEL)
        write_sums(folder, Sums(files=others, pruned={**earlier, **known}))  # in order with the model and without
        os.rename(model, folder / MODEL)
        sync_to_disk(folder)
        write_sums(folder, Sums(files={**others, **known}))


def _settle(folder: Path) -> None:
    """Count the weights that are there as there, also where a restoring or pruning was killed just before its end."""
    sums = read_sums(folder)
    if sums.pruned and (folder / MODEL).is_dir():
        write_sums(folder, Sums(files={**sums.files, **sums.pruned}))


# --- by hand --------------------------------------------------------------------------------------------------------


def promote_run(home: Path, run: RunFolder, *, agent: str | None = None, force: bool = False) -> Pointer:
    """Make a version of a run that has none yet, and let it answer; ``agent`` is needed where the run names none.

    Raises:
        VersionError: the run is not finished or is no agent's, or its gate did not let it through and ``force`` was not
            given; then no version is made.
    """
    plan = run.plan
    name = agent or plan.agent
    if name is None:
        raise VersionError(
            f"the run in {str(run.root)!r} was of a model and of no agent; say whose version it becomes: --agent NAME "
            "(agent=)"
        )
    _check_judged(run, force=force)
    version = publish_version(home, name, run)
    return promote(home, name, version.name, force=force)


def _check_judged(run: RunFolder, *, force: bool) -> None:
    if not run.comparison_file.exists():
        raise VersionError(
            f"the run in {str(run.root)!r} was not judged; go on with it: praison-agent-rl train --resume {run.root}"
        )
    verdict = read_record(run.verdict_file, Verdict) if run.verdict_file.exists() else None
    passed = verdict.passed if verdict else read_record(run.comparison_file, Comparison).better
    if not passed and not force:
        raise VersionError(
            f"the run in {str(run.root)!r} was not let through by the gate ({verdict.text if verdict else 'not better'}"
            "); --force (force=True) makes a version of it all the same, which is recorded and shown from then on"
        )
