"""Environments that a policy acts in: finds the class that a configuration names, and says what keeps it from use.

The form is that of TRL's ``environment_factory``: ``reset(**row)`` begins an episode and may return a text that is put
behind the prompt, every other public method is a tool, and ``get_reward()`` may score the episode. Nothing is made or
run here.
"""

import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

from praison_agent_rl.episodes import EpisodeFault, EpisodeScores, score_of_episode
from praison_agent_rl.errors import ConfigError, MissingExtra
from praison_agent_rl.records import Feedback, Run
from praison_agent_rl.scoring.names import cause_of, did_you_mean, importing_from, parameters_of, short

_NO_TOOLS = ("reset", "get_reward")
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def resolve_environment(spec: str) -> type:
    """The class that ``module:Class`` names, from the current folder too.

    Raises:
        ConfigError: there is none, and why.
    """
    module, _, name = (part.strip() for part in str(spec).partition(":"))
    if not module or not name.isidentifier():
        raise ConfigError(f"environment {short(spec)} is not a 'module:Class' path. Example: myproject.games:Guessing")
    with importing_from(None):
        try:
            loaded = importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            raise ConfigError(f"cannot import {module!r} for environment {spec!r}: {cause_of(error)}") from error
    found = getattr(loaded, name, None)
    if not inspect.isclass(found):
        classes = sorted(key for key, value in vars(loaded).items() if inspect.isclass(value) and key[0] != "_")
        what = f"is a {type(found).__name__}, not a class" if found is not None else "is not there"
        near = did_you_mean(name, classes)
        raise ConfigError(f"environment {spec!r} {what}{near}. Classes in {module!r}: {', '.join(classes) or 'none'}")
    return found


def check_environment(cls: type) -> list[str]:
    """All that keeps ``cls`` from being an environment, one sentence each; it is looked at and not made.

    Raises:
        MissingExtra: transformers, which describes tools to a model, is not installed.
    """
    name = cls.__qualname__
    tools = methods_that_act(cls)
    problems = [*_making_problems(cls, name), *_reset_problems(cls, name), *_reward_problems(cls, name)]
    if not tools:
        problems.append(f"{name} has no public method besides reset and get_reward, so the model can do nothing in it")
    for key, method in tools.items():
        problems += _method_problems(cls, key, method)
    return problems


def methods_that_act(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods of an environment that are its tools, in the order in which TRL shows them."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    return {name: method for name, method in methods if name[0] != "_" and name not in _NO_TOOLS}


def _method_problems(cls: type, key: str, method: Callable[..., Any]) -> list[str]:
    name = f"{cls.__qualname__}.{key}"
    if isinstance(inspect.getattr_static(cls, key), staticmethod):
        return tool_problems(method, name)
    bound = types.MethodType(method, cls)  # of an object of the class, which is not made here
    if parameters_of(bound) is None:
        return [f"{name} takes no self, with which it is called; write def {key}(self, ...), or make it a staticmethod"]
    return tool_problems(bound, name)


GENERATES = "is a generator, of which a model would be told neither what it yields nor what it returns; return a value"


def yields(tool: Callable[..., Any]) -> bool:
    """Whether a call gives a generator, that is, nothing that was done."""
    return inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool)


def tool_problems(tool: Callable[..., Any], name: str) -> list[str]:
    """What keeps a function or a method from being described to a model as a tool, one sentence each.

    Raises:
        MissingExtra: transformers is not installed.
    """
    try:
        from transformers.utils import get_json_schema
    except ImportError as error:
        raise MissingExtra(f'tools need {error.name}: pip install "praison-agent-rl[train]"') from error
    taken = parameters_of(tool) or []
    problems = [
        f"{name} takes {'*' if p.kind is p.VAR_POSITIONAL else '**'}{p.name}, but a model gives each argument by name"
        for p in taken
        if p.kind in _STARRED
    ]
    if placed := [p.name for p in taken if p.kind is p.POSITIONAL_ONLY]:
        problems.append(f"{name} takes {', '.join(placed)} by place alone, but a model gives each by name; drop the /")
    if yields(tool):
        problems.append(f"{name} {GENERATES}")
    bare = [p.name for p in taken if p.kind not in _STARRED and p.annotation is p.empty]
    if bare:
        problems.append(f"{name} has no type hint for {', '.join(bare)}; the model is told the types")
    if not inspect.getdoc(tool):
        problems.append(f"{name} has no docstring; the model is told what it does, and each argument under Args:")
    if problems:
        return problems
    try:
        get_json_schema(tool)
    except Exception as error:  # noqa: BLE001 - hints are a user's code, and names in them may raise anything
        return [f"{name} cannot be described to a model: {cause_of(error)}"]
    return []


def _making_problems(cls: type, name: str) -> list[str]:
    if left := sorted(getattr(cls, "__abstractmethods__", ())):
        return [f"{name} is abstract, it lacks {', '.join(left)}; name a class that can be made"]
    needed = [p.name for p in parameters_of(cls) or [] if p.default is p.empty and p.kind not in _STARRED]
    if not needed:
        return []
    return [f"{name}.__init__ needs {', '.join(needed)}, but it is made without arguments; give them defaults"]


def _reset_problems(cls: type, name: str) -> list[str]:
    reset = getattr(cls, "reset", None)
    if reset is None:
        return [f"{name} has no method reset; it begins an episode: def reset(self, **row)"]
    if not inspect.isfunction(reset):
        return [f"{name}.reset is {_kind_of(reset)}; write def reset(self, **row)"]
    if inspect.iscoroutinefunction(reset):
        return [f"{name}.reset is async, but it is called without await; write def reset(self, **row)"]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters_of(reset) or []):
        return [f"{name}.reset takes no **row, but it is given every column of a row by name; add **row"]
    return []


def _kind_of(found: Any) -> str:
    return "a class method" if inspect.ismethod(found) else f"a {type(found).__name__}, not a method"


def _reward_problems(cls: type, name: str) -> list[str]:
    reward = getattr(cls, "get_reward", None)
    if reward is None:
        return []
    if not inspect.isfunction(reward):
        return [f"{name}.get_reward is {_kind_of(reward)}; write def get_reward(self) -> float"]
    taken = (parameters_of(reward) or [])[1:]
    needed = [p.name for p in taken if p.default is p.empty and p.kind not in _STARRED]
    return [f"{name}.get_reward needs {', '.join(needed)}, but it is called without arguments"] if needed else []


def episode_reward(completions: Sequence[Any], run: Sequence[Run], environments: Any = None, **_: Any) -> list[Any]:
    """What each environment says of its episode; None where no environment was acted in, or none says anything.

    While a policy trains the environments are at hand; of a held-out episode its run tells the score. One that says
    nothing sound has failed, as a reward that fails.
    """
    said = list(map(score_of_episode, environments)) if environments else list(map(_told, run))
    failed = {place: score.text for place, score in enumerate(said) if isinstance(score, EpisodeFault)}
    return EpisodeScores([None if isinstance(score, EpisodeFault) else score for score in said], failed)


# an environment may hold what neither prompt nor answer shows, so an equal answer may be another episode
episode_reward.cacheable = False  # type: ignore[attr-defined]


def noted(score: float | EpisodeFault | None, run: Run) -> Run:
    """``run`` with what an environment said of its episode, as `episode_reward` finds it there."""
    if score is None:
        return run
    said, label = (None, score.text) if isinstance(score, EpisodeFault) else (score, None)
    return run.model_copy(update={"feedback": [Feedback(run=run.id, time=run.time, score=said, label=label)]})


def _told(run: Run) -> float | EpisodeFault | None:
    scores = [note.score for note in run.feedback if note.score is not None]
    faults = [note.label for note in run.feedback if note.label is not None]
    return scores[-1] if scores else EpisodeFault(faults[-1], faults[-1]) if faults else None
