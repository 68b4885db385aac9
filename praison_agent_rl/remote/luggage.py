"""What goes to another machine for a run: its folder, the user's modules, and weights that no hub has."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

from praison_agent_rl.checksums import combined
from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.preflight import is_template_file
from praison_agent_rl.problems import Problems
from praison_agent_rl.records import Plan, PlannedReward
from praison_agent_rl.remote.project import check_size, files_brought, files_of_modules
from praison_agent_rl.remote.refusals import planned_in
from praison_agent_rl.remote.there import hash_file
from praison_agent_rl.reward_cards import find_reward_model, is_model_name
from praison_agent_rl.templates import ready_template


@dataclass(frozen=True)
class Project:
    """Files of the user's project that a run needs."""

    files: dict[str, Path]
    """By their names in the folder in which the run happens there."""
    renamed: dict[str, str]
    """Files that the configuration names, and what they are called there."""


@dataclass(frozen=True)
class Weights:
    """A folder of weights or a GGUF file of this machine."""

    path: Path
    files: dict[str, Path]

    @cached_property
    def sums(self) -> dict[str, str]:
        """The hash of each file; raises ConfigError where one cannot be read."""
        try:
            return {name: hash_file(file) for name, file in self.files.items()}
        except OSError as error:
            raise ConfigError(f"the weights {str(self.path)!r} cannot be read: {error}") from error

    def folder(self, workdir: str) -> str:
        """Where they lie there, by their content: what is there by this name is not sent again."""
        key = combined(f"{name} {self.sums[name]}" for name in sorted(self.sums))
        return str(PurePosixPath(workdir) / "weights" / key[:32])

    def place(self, workdir: str) -> str:
        """What a plan there calls them."""
        return f"{self.folder(workdir)}/{self.path.name}" if self.path.is_file() else self.folder(workdir)


def project_of(plan: Plan, remote: Remote) -> Project:
    """The modules of rewards, tools and environment, the files that the configuration names, and what is to be brought.

    Raises:
        ConfigError: a file is not there, or they are too many; all problems at once.
    """
    files, problems = files_of_modules(_modules_of(plan)), Problems()
    renamed: dict[str, str] = {}
    for given in [*_files_of(plan.config), *remote.bring]:
        brought = problems.attempt(partial(files_brought, given))
        if brought is not None:
            renamed[given] = brought[0]
            problems.attempt(partial(_check_apart, files, brought[1]))
            files |= brought[1]
    problems.attempt(lambda: check_size(files, remote.host))
    problems.raise_all()
    return Project(files, renamed)


def weights_of(plan: Plan) -> dict[str, Weights]:
    """The weights of a plan that lie on this machine, by what the plan calls them."""
    found: dict[str, Weights] = {}
    for source in filter(None, [plan.base, plan.incumbent_weights]):
        if Path(source).exists():
            found[source] = _weights_in(Path(source))
    for reward in planned_in(plan):
        if reward.spec and is_model_name(reward.spec) and (folder := _model_folder(reward.spec)) is not None:
            found[reward.spec] = _weights_in(folder)
    return found


def on_the_hub(plan: Plan) -> list[str]:
    """The models of a plan that the other machine loads from the hub itself."""
    scorers = [reward.spec for reward in planned_in(plan) if reward.spec and is_model_name(reward.spec)]
    models, here = filter(None, [plan.base, plan.incumbent_weights, *scorers]), weights_of(plan)
    return [name for name in dict.fromkeys(models) if name not in here]


def plan_for(plan: Plan, there: Mapping[str, Any], project: Project, places: Mapping[str, str]) -> Plan:
    """The plan as the machine there is told it: its own device and libraries, and what lies where."""

    def moved(rewards: list[PlannedReward]) -> list[PlannedReward]:
        return [reward.model_copy(update={"spec": places.get(str(reward.spec), reward.spec)}) for reward in rewards]

    return plan.model_copy(
        update={
            "base": places.get(plan.base, plan.base),
            "incumbent_weights": places.get(str(plan.incumbent_weights), plan.incumbent_weights),
            "rewards": moved(plan.rewards),
            "judges": moved(plan.judges),
            "earlier": {name: moved(rewards) for name, rewards in plan.earlier.items()},
            "config": _config_for(plan.config, project.renamed),
            "device": there["device"],
            "libraries": there["libraries"],
        }
    )


def _check_apart(files: Mapping[str, Path], more: Mapping[str, Path]) -> None:
    """Raise ConfigError for two files that would have one name there."""
    if taken := [name for name in more if name in files and not files[name].samefile(more[name])]:
        raise ConfigError(
            f"{str(files[taken[0]])!r} and {str(more[taken[0]])!r} would both be {taken[0]!r} in the folder of the "
            "run there; rename one of them, or put it under the current folder, where it keeps its place"
        )


def _modules_of(plan: Plan) -> list[str]:
    """The modules that the plan names functions and classes of."""
    config = plan.config
    tools = config.get("tools") or []
    named = [*([tools] if isinstance(tools, str) else tools), config.get("environment") or ""]
    specs = [*(reward.spec or "" for reward in planned_in(plan)), *named]
    return [spec.rpartition(":")[0].strip() for spec in specs if ":" in spec]


def _files_of(config: Mapping[str, Any]) -> list[str]:
    """The files that a configuration names and that the run itself reads."""
    named, template = [(config.get("launch") or {}).get("accelerate_config")], config.get("chat_template")
    if template and not ready_template(template) and is_template_file(template):
        named.append(template)
    return [name for name in named if name]


def _config_for(config: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    told = {key: value for key, value in config.items() if key != "remote"}
    if told.get("chat_template") in renamed:
        told["chat_template"] = renamed[told["chat_template"]]
    launch = told.get("launch") or {}
    if launch.get("accelerate_config") in renamed:
        told["launch"] = {**launch, "accelerate_config": renamed[launch["accelerate_config"]]}
    return told


def _model_folder(spec: str) -> Path | None:
    """The folder of a reward model of this machine, with its card if it has one; None for one of the hub."""
    source, card = find_reward_model(spec)
    path = Path(source)
    if not path.exists():
        return None
    return path.parent if card is not None else path


def _weights_in(path: Path) -> Weights:
    inside = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return Weights(path, {file.name if file == path else file.relative_to(path).as_posix(): file for file in inside})
