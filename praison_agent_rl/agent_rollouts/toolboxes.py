"""The tools that a configuration names for ``rollout: tools``, as TRL's loop and ours take them."""

import contextlib
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from praison_agent_rl.agent_rollouts.agent_tools import is_container
from praison_agent_rl.agent_rollouts.tool_answers import acting_in_time, in_time
from praison_agent_rl.agent_rollouts.tool_loop import Boxes, Toolbox
from praison_agent_rl.agent_rollouts.trl_tools import check_trl_tools, trl_tools
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.environments import check_environment, methods_that_act, resolve_environment
from praison_agent_rl.episodes import Telling, fault_of
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.scoring.names import cause_of, collect, find, importing_from

logger = logging.getLogger(__name__)

Tool = Callable[..., Any]


def tools_of(config: TrainConfig) -> list[Tool]:
    """The functions that ``tools`` names, in the form that TRL takes; a call may take ``rollout_timeout`` seconds.

    Raises:
        ConfigError: one cannot be found, or would be rejected by TRL; all of them at once.
    """
    found, failures = collect(_found, _names(config))
    problems = [text.replace("reward function", "tool") for text in failures]
    tools = trl_tools(found)
    try:
        check_trl_tools(tools)
    except ConfigError as rejected:
        problems.append(str(rejected))
    if problems:
        raise ConfigError("\n".join(problems))
    return [in_time(tool, config.rollout_timeout) for tool in tools]


def _names(config: TrainConfig) -> list[str]:
    return [config.tools] if isinstance(config.tools, str) else list(config.tools or [])


def _found(spec: str) -> Any:
    """The function that ``module:function`` names, or an object of the framework's that has tools, as its MCP does."""
    module, _, name = (part.strip() for part in spec.partition(":"))
    with importing_from(None), contextlib.suppress(Exception, SystemExit):  # `find` says what is wrong
        known = getattr(importlib.import_module(module), name, None)
        if is_container(known):
            return known
    return find(spec)


def environment_of(config: TrainConfig) -> type | None:
    """The class that ``environment`` names; what is done in it may take ``rollout_timeout`` seconds.

    Raises:
        ConfigError: it cannot be found, is no environment, or can do what ``tools`` name too; all reasons at once.
    """
    if not config.environment:
        return None
    found = resolve_environment(config.environment)
    if problems := [*check_environment(found), *_named_twice(config, found)]:
        raise ConfigError("\n".join(problems))
    try:
        return acting_in_time(found, config.rollout_timeout)
    except Exception as error:  # a user's class may have a say in how others are made of it
        what = f"the environment {config.environment} lets no class be made of it, by which its time is kept"
        raise ConfigError(f"{what}: {cause_of(error)}") from error


def _named_twice(config: TrainConfig, environment: type) -> list[str]:
    """What is wrong where a model that calls a tool could mean a method of the environment as well."""
    tools: list[Tool] = []
    with contextlib.suppress(ConfigError):  # `tools_of` says what is wrong with them
        tools = trl_tools(collect(_found, _names(config))[0])
    names = {getattr(tool, "__name__", None) for tool in tools}
    if not (both := [name for name in methods_that_act(environment) if name in names]):
        return []
    owner, methods = environment.__qualname__, ", ".join(f"{environment.__qualname__}.{name}" for name in both)
    return [
        f"tools name {', '.join(map(repr, both))}, and the environment {owner} has {methods}; a model that calls one "
        "of them could mean either, so rename one of each, or leave it out of tools"
    ]


def boxes_of(config: TrainConfig, *, tell: Callable[[str], None] = logger.warning) -> Boxes:
    """The tools for each row: those that are named, and the methods of an environment of the row's own.

    An episode that does not begin costs its row; ``tell`` is given the first fault of each kind.
    """
    from transformers.utils import get_json_schema

    tools, environment, telling = tools_of(config), environment_of(config), Telling(tell)

    def box(row: Mapping[str, Any]) -> Toolbox:
        own, said, acting = list(tools), None, None
        if environment is not None:
            acting = environment()
            said = acting.reset(**row)
            own += methods_of(acting)
        fault = fault_of(acting)
        telling.hear([fault])
        functions = {tool.__name__: tool for tool in own}
        return Toolbox(functions, [get_json_schema(tool) for tool in own], said, acting, fault and fault.text)

    return box


def methods_of(environment: Any) -> list[Tool]:
    """What a model can do in an environment, in the order in which TRL shows it."""
    return [getattr(environment, name) for name in methods_that_act(type(environment))]
