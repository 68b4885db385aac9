"""The tools of an agent and of those that it can hand over to: what each is, how it is sent, and what would run.

Nothing here runs a tool.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_type_hints

from praison_agent_rl.errors import ConfigError

Kind = Literal["function", "method", "class", "framework", "mcp", "handoff", "schema", "hosted", "name"]
Marked = TypeVar("Marked")

_PURE = "_praison_agent_rl_pure"
_NOT_MARKED = object()
_CALL = "__call__"
_CALLBACKS = ("on_handoff", "on_complete", "on_error")


def pure(tool: Marked) -> Marked:
    """Mark a tool that changes nothing outside of itself, so that it may run as often as training asks.

    It may stand above or below the framework's ``@tool``; a whole MCP object can be marked too. What is derived from
    the tool, by ``functools.wraps`` or as a subclass, is not marked with it.

    Raises:
        ConfigError: nothing can be written on this object.
    """
    target = getattr(tool, "__func__", tool)
    try:
        setattr(target, _PURE, target)  # the object itself: a copy of its attributes marks nothing else
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(f"{tool!r} cannot be marked as pure; name the tool in run_tools instead") from None
    return tool


def is_pure(tool: Any) -> bool:
    """Whether the tool itself is marked, or its class, or the function that a ``@tool`` or a partial calls."""
    if isinstance(tool, partial):
        return is_pure(tool.func)
    target = getattr(tool, "__func__", tool)
    if any(getattr(one, "__dict__", {}).get(_PURE, _NOT_MARKED) is one for one in (target, type(target))):
        return True
    return _is_function_tool(tool) and is_pure(tool.__wrapped__)


@dataclass(frozen=True, eq=False)
class AgentTool:
    """A tool as an agent has it."""

    name: str
    kind: Kind
    agent: str
    """Name of the agent that has it."""
    tool: Any
    """What stands in the agent's list; for a tool of an MCP object, its callable."""
    callable: Callable[..., Any] | None
    """What would run; None where nothing here can."""
    offered: dict[str, Any] | None
    """Its schema as the framework takes it from the tool; None if it takes none."""
    is_async: bool = False
    pure: bool = False
    litellm: bool = False
    """Whether its agent asks by litellm; the framework takes the schemas from another place then."""

    @property
    def schema(self) -> dict[str, Any] | None:
        """As it is sent; None if nothing is sent. By litellm even the framework's own mark of MCP tools is."""
        if self.offered is None or self.litellm:
            return self.offered
        return {key: value for key, value in self.offered.items() if not key.startswith("__")}

    @property
    def described(self) -> dict[str, Any]:
        """Name, description and parameters: what is sent, or else what the tool says of itself."""
        schema = self.offered or (self.tool.get_schema() if callable(getattr(self.tool, "get_schema", None)) else {})
        function = schema.get("function")
        return function if isinstance(function, dict) else {}

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """JSON schema of each parameter that a model may give."""
        properties = (self.described.get("parameters") or {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    @property
    def required(self) -> list[str]:
        """Parameters that a model must give."""
        return [str(name) for name in (self.described.get("parameters") or {}).get("required") or []]

    @property
    def signature(self) -> inspect.Signature:
        """By which the framework turns "3" into 3 before it calls."""
        try:
            known = inspect.signature(_method(self.callable)) if self.callable is not None else None
        except (TypeError, ValueError):
            known = None
        if known is None:
            return inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)])
        parameters = list(known.parameters.values())
        unbound = bool(parameters) and parameters[0].name == "self"
        return known.replace(parameters=parameters[1:] if unbound else parameters)

    @property
    def hints(self) -> dict[str, Any]:
        """Types of its parameters."""
        runs = _method(self.callable)
        try:
            return get_type_hints(runs) if runs is not None else {}
        except (NameError, TypeError, AttributeError):
            return dict(getattr(runs, "__annotations__", {}))

    @property
    def hands_over_to(self) -> str | None:
        """Name of the agent that a handoff calls."""
        return getattr(self._handoff.agent, "name", None) if self.kind == "handoff" else None

    @property
    def callbacks(self) -> list[str]:
        """Functions of the user's that a handoff calls besides and that are not marked pure."""
        if self.kind != "handoff":
            return []
        holders = (self._handoff, getattr(self._handoff, "config", None))
        given = {name: getattr(holder, name, None) for holder in holders for name in _CALLBACKS}
        given |= {name: own for name in _CALLBACKS if (own := getattr(self._handoff, name, None)) is not None}
        return [name for name, callback in given.items() if callback is not None and not is_pure(callback)]

    @property
    def _handoff(self) -> Any:
        return self.tool._praison_handoff_source  # noqa: SLF001 - the framework's mark of a handoff


def agent_tools(agent: Any) -> list[AgentTool]:
    """The tools of ``agent`` and of every agent that it can hand over to, as they stand in their lists."""
    from praison_agent_rl.agent_rollouts.copies import agents_of

    return [tool for one in agents_of(agent) for tool in own_tools(one)]


def own_tools(agent: Any) -> list[AgentTool]:
    """The tools of this agent alone."""
    litellm = bool(vars(agent).get("_using_custom_llm"))
    tools = agent.tools
    if is_container(tools) and not litellm:  # on this path the framework itself goes through it
        parts: Iterator[tuple[Any, Any, Any]] = ((part, None, tools) for part in tools)
    else:
        parts = parts_of(tools)
    made = (made_tool(part, schema, container, agent.name, litellm) for part, schema, container in parts)
    return [tool for tool in made if tool is not None]


def own_tool(given: Any) -> list[AgentTool]:
    """What a tool, or an MCP object, is that belongs to no agent."""
    made = (made_tool(part, schema, container, "", False) for part, schema, container in parts_of(given))
    return [tool for tool in made if tool is not None]


def parts_of(tools: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Each tool with the schema and the MCP object that it comes from, if it comes from one."""
    for item in tools if isinstance(tools, list | tuple) else [tools] if tools else []:
        if isinstance(item, list | tuple):
            yield from parts_of(item)
        elif is_container(item):
            callables = {part.__name__: part for part in item}
            for schema in sent_by(item):  # also those that a filter took from the callables: the framework sends them
                yield callables.get(schema["function"]["name"]), schema, item
        else:
            yield item, None, None


def is_container(tool: Any) -> bool:
    """Whether this is an object with several tools, as the framework's MCP is: iterable, and no tool by itself."""
    return not callable(tool) and callable(getattr(tool, "to_openai_tool", None)) and hasattr(tool, "__iter__")


def sent_by(container: Any) -> list[dict[str, Any]]:
    """The schemas that an MCP object sends."""
    sent = container.to_openai_tool()
    return sent if isinstance(sent, list) else [sent] if sent else []


def made_tool(tool: Any, schema: Any, container: Any, agent: str, litellm: bool) -> AgentTool | None:
    """None for what has no name: the framework neither sends nor runs it."""
    kind = "mcp" if container is not None else _kind(tool)
    if schema is None:
        schema = _schema_of(tool, litellm)
    name = name_of(tool) or ((schema or {}).get("function") or {}).get("name") or (schema or {}).get("type")
    if not name:
        return None
    runs = _runs(tool)
    return AgentTool(
        name=str(name),
        kind=kind,
        agent=str(agent),
        tool=tool,
        callable=runs,
        offered=schema or None,
        is_async=_is_async(runs),
        pure=is_pure(tool) or (container is not None and is_pure(container)),
        litellm=litellm,
    )


def _kind(tool: Any) -> Kind:
    if isinstance(tool, dict):
        return "schema" if tool.get("type") == "function" else "hosted"
    if isinstance(tool, str):
        return "name"
    if "_praison_handoff_source" in getattr(tool, "__dict__", {}):
        return "handoff"
    if inspect.isclass(tool):
        return "class"
    if callable(getattr(tool, "to_openai_tool", None)):
        return "mcp"
    if getattr(tool, "name", None) and (hasattr(tool, "run") or hasattr(tool, "_run")):
        return "framework"
    return "method" if inspect.ismethod(tool) else "function"


def name_of(tool: Any) -> str | None:
    """The name by which the framework runs a tool, where it says one of itself."""
    if isinstance(tool, str):
        return tool
    names = (getattr(tool, "name", None), getattr(tool, "__name__", None))
    return next((name for name in names if isinstance(name, str) and name), None)


def _runs(tool: Any) -> Callable[..., Any] | None:
    """What the framework calls: ``run`` or ``_run`` of an instance for a class or a tool of its own."""
    if tool is None or isinstance(tool, str | dict):
        return None
    if inspect.isclass(tool):
        method = "_run" if hasattr(tool, "_run") else "run" if hasattr(tool, "run") else None
        return partial(_run_new, tool, method) if method else tool
    if _is_base_tool(tool) or not callable(tool):
        run = getattr(tool, "run", None) or getattr(tool, "_run", None)
        return run if callable(run) else None
    return tool  # type: ignore[no-any-return]


def _run_new(made: type, method: str, **arguments: Any) -> Any:
    run = getattr(made(), method)
    taken = inspect.signature(run).parameters
    return run(**{name: value for name, value in arguments.items() if name in taken})


def _method(runs: Any) -> Any:
    """What ends up being called: of a class, its method."""
    return getattr(*runs.args[:2]) if isinstance(runs, partial) and runs.func is _run_new else runs


def _is_async(runs: Any) -> bool:
    runs = _method(runs)
    within = getattr(getattr(runs, "__self__", None), "__wrapped__", None)  # the function that a @tool calls
    return any(map(inspect.iscoroutinefunction, (runs, within, getattr(type(runs), _CALL, None))))


def _is_base_tool(tool: Any) -> bool:
    from praisonaiagents.tools.base import BaseTool

    return isinstance(tool, BaseTool)


def _is_function_tool(tool: Any) -> bool:
    if "_func" not in getattr(tool, "__dict__", {}):
        return False
    from praisonaiagents.tools.decorator import FunctionTool

    return isinstance(tool, FunctionTool)


def _schema_of(tool: Any, litellm: bool) -> dict[str, Any] | None:
    """As ``Agent._format_tools_for_completion`` or, by litellm, ``LLM._format_tools_for_litellm`` make it."""
    from praisonaiagents.tools.schema import build_tool_definition, fix_array_schemas

    if isinstance(tool, dict):
        return tool
    if tool is None or isinstance(tool, str):
        return None
    if not litellm and callable(getattr(tool, "to_openai_tool", None)):
        return tool.to_openai_tool()  # type: ignore[no-any-return]
    if litellm and callable(tool) and hasattr(tool, "get_schema"):
        schema = dict(tool.get_schema())
        function = dict(schema.get("function") or {})
        return {**schema, "function": {**function, "parameters": fix_array_schemas(function.get("parameters") or {})}}
    if not callable(tool) or not hasattr(tool, "__name__"):
        return None
    if not litellm and tool.__name__ != name_of(tool):
        return None  # it is looked for by the one and sent by the other name
    try:
        return build_tool_definition(tool)  # type: ignore[no-any-return]
    except (TypeError, ValueError):  # a signature that cannot be read; the framework logs it and sends nothing
        return None
