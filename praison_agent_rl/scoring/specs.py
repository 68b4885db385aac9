"""What an entry of ``reward_funcs`` may be, and the callable that it stands for.

A ``module:function`` text, a callable, or a mapping with parameters:
``{reward: praison_agent_rl.reward_library:length_band, min: 5, max: 30, weight: 0.5}``, also as a text, for a command.
"""

import functools
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from praison_agent_rl.errors import RewardError
from praison_agent_rl.records import PlannedReward
from praison_agent_rl.reward_cards import is_model_name
from praison_agent_rl.scoring.names import (
    Function,
    cause_of,
    collect,
    declared,
    did_you_mean,
    find,
    parameters_of,
    short,
    spec_of,
    takes,
)

_OWN_KEYS = ("reward", "weight", "columns", "name")


@dataclass(frozen=True)
class RewardSpec:
    """One entry, read but not looked for."""

    reward: Any
    """``module:function``, ``module:Class`` or a callable."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """A function is called with them besides; a class is made with them."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Which column of the dataset fills which parameter, where the two are called differently."""
    weight: float | None = None
    name: str | None = None
    plain: bool = True
    """Whether the entry was a text or a callable, not a mapping."""


def read_spec(given: object) -> RewardSpec:
    """One entry of ``reward_funcs``; raises RewardError for a mapping with a faulty key of ours."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = _mapping_in(given)
    if not isinstance(given, Mapping) or "reward" not in given:
        if isinstance(given, Mapping) and any(":" in str(key) or did_you_mean(str(key), ["reward"]) for key in given):
            lacks = "A mapping needs the key 'reward', as in {reward: module:function, weight: 0.5}"
            raise RewardError(f"reward function {short(_without_keys(given))} is not a 'module:function' path. {lacks}")
        return RewardSpec(given)
    faults = []
    reward = given.get("reward")
    if not (callable(reward) or (isinstance(reward, str) and reward.strip())):
        faults.append(f"its 'reward' is {short(reward)}, but must be a 'module:function' path or a callable")
    weight, columns, name = given.get("weight"), given.get("columns") or {}, given.get("name")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float) or weight != weight):
        faults.append(f"its weight is {short(weight)}, but must be a number")
    if not isinstance(columns, Mapping) or not all(isinstance(text, str) for pair in columns.items() for text in pair):
        faults.append(f"its columns are {short(columns)}, but must say {{parameter: column of the dataset}}")
    if name is not None and not (isinstance(name, str) and name.strip()):
        faults.append(f"its name is {short(name)}, but must be a text")
    if odd := [key for key in given if not isinstance(key, str)]:
        faults.append(f"its key {short(odd[0])} is no text")
    if faults:
        raise RewardError(f"the reward {short(_without_keys(given))} cannot be read: {'; '.join(faults)}")
    parameters = {key: value for key, value in given.items() if key not in _OWN_KEYS}
    return RewardSpec(reward, parameters, dict(columns), None if weight is None else float(weight), name, plain=False)


def _mapping_in(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "it is not well-formed"
        why += f" (at letter {mark.index + 1})" if mark else ""
        raise RewardError(f"reward function {short(text)} is no mapping that YAML can read: {why}") from error


def _without_keys(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """``given`` as it may be shown: a key or a password that somebody wrote into a config is not."""
    secret = re.compile(r"(?i)key|token|secret|passw")
    return {
        name: "***" if isinstance(value, str) and secret.search(str(name)) else value for name, value in given.items()
    }


def listed_specs(given: object) -> list[Any]:
    """The entries of ``reward_funcs``: a list as it is, one entry alone as a list of it."""
    return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]


def resolve(spec: object, *, base: str | os.PathLike[str] | None = None) -> Function:
    """The callable that an entry stands for, sought in folder ``base`` too; a callable stands for itself."""
    read = read_spec(spec)
    if isinstance(read.reward, str) and is_model_name(read.reward):
        return _model_reward(read.reward, read.parameters)
    found = find(read.reward, base=base, made=not read.plain)
    label = repr(read.reward) if isinstance(read.reward, str) else short(read.reward)
    if inspect.isclass(found):
        return _instance(found, read.parameters, label)
    lacking = [name for name in {**read.parameters, **read.columns} if not takes(found, name)]
    if lacking:
        there = [p.name for p in parameters_of(found) or [] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        odd = ", ".join(f"{name!r}{did_you_mean(name, [*there, *_OWN_KEYS])}" for name in lacking)
        raise RewardError(f"reward function {label} takes no {odd}; it takes: {', '.join(there)}")
    return functools.partial(found, **read.parameters) if read.parameters else found


def _model_reward(name: str, parameters: Mapping[str, Any]) -> Function:
    from praison_agent_rl.reward_models import ModelReward

    return _instance(functools.partial(ModelReward, name), parameters, f"reward model {name!r}")


def _instance(kind: Any, parameters: Mapping[str, Any], label: str) -> Function:
    try:
        made = kind(**parameters)
    except Exception as error:  # a user's class may raise anything
        why = str(error) if isinstance(error, RewardError) else cause_of(error)
        given = f" with {short(_without_keys(parameters))}" if parameters else ""
        raise RewardError(f"{label} cannot be made{given}: {why}") from error
    if not callable(made):
        raise RewardError(f"{label} is a class whose instances are no rewards: they cannot be called")
    return made  # type: ignore[no-any-return]  # what has been called a class is typed as Any


def resolve_all(specs: object) -> list[Function]:
    """Resolve one entry or a list of them; raises RewardError once, with every failure on a line of its own."""
    found, failures = collect(resolve, specs)
    if failures:
        raise RewardError("\n".join(failures))
    return found


def require(method: str, resolved: Sequence[Function]) -> None:
    """Raise RewardError if ``method`` is GRPO, the one that learns from scores, and there is nothing to score with."""
    if method == "grpo" and not resolved:
        raise RewardError(
            f"method {method!r} needs reward_funcs: a list of 'module:function' import paths\n"
            "that score completions. Example:\n  reward_funcs:\n    - myproject.rewards:length_penalty"
        )


def weights_of(specs: Sequence[RewardSpec], weights: Sequence[float] | None) -> list[float]:
    """The weight of each reward, from its own entry or from the list of all; raises RewardError where both speak."""
    own = [spec for spec in specs if spec.weight is not None]
    if weights is None:
        return [1.0 if spec.weight is None else spec.weight for spec in specs]
    if len(weights) != len(specs):
        raise RewardError(f"{len(specs)} reward_funcs but {len(weights)} reward_weights")
    if own:
        raise RewardError(
            f"reward_weights is given, and the entry of {short(own[0].reward)} has a weight too; take one of them out"
        )
    return [float(weight) for weight in weights]


def portable(given: object) -> tuple[str | None, dict[str, Any]]:
    """The name and the parameters under which another process makes the same reward; the name is None if it cannot.

    An object may say both itself, by an attribute ``reward_spec`` that is a mapping as `read_spec` takes it.
    """
    read = read_spec(given)
    if isinstance(read.reward, str) and is_model_name(read.reward):
        read = RewardSpec(resolve(given))  # it says which version it is
    said = declared(read.reward, "reward_spec") if callable(read.reward) and not inspect.isclass(read.reward) else None
    if isinstance(said, Mapping):
        own = read_spec(said)
        return (own.reward if isinstance(own.reward, str) else None), {**own.parameters, **read.parameters}
    name = read.reward.strip() if isinstance(read.reward, str) else spec_of(read.reward)
    return (name if _is_plain(read.parameters) else None), dict(read.parameters)


def _is_plain(value: Any) -> bool:
    """Whether JSON holds ``value`` as it is."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def as_entry(planned: PlannedReward) -> dict[str, Any]:
    """A planned reward as an entry of ``reward_funcs`` again, without weight and name."""
    columns = {"columns": planned.columns} if planned.columns else {}
    return {"reward": planned.spec, **planned.parameters, **columns}
