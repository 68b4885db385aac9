"""What stands in an agent's list for a tool while it is trained, so that the model sees the tool and it does not run.

The framework takes name, schema and description from what stands there; the same as of the tool, to the letter.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from praison_agent_rl.agent_rollouts.agent_tools import AgentTool, is_container, made_tool, name_of, parts_of, sent_by

_KEPT = ("retry_policy", "idempotent", "restart_safe")
"""What the framework reads of a tool beside its name and schema, whatever answers."""
_KEPT_OF_LIVE = (*_KEPT, "input_guardrails", "output_guardrails", "to_model_output")
"""And what it does to arguments and results; to those from a record it was done already."""


class StandIn:
    """Stands in an agent's list for a tool: the framework shows the model the tool, and asks this instead."""

    def __init__(self, tool: AgentTool, answer: Callable[..., Any], *, recorded: bool = False) -> None:
        """Take the place of ``tool``; to recorded results all was done already that its own hooks do to results."""
        self.name = tool.name
        self.__doc__ = getattr(tool.tool, "__doc__", None)
        named = hasattr(tool.tool, "__name__") or tool.kind in ("mcp", "schema", "name")
        if named:
            self.__name__ = self.__qualname__ = tool.name  # the system prompt names the tools that have this
        self.__signature__ = tool.signature
        self.__annotations__ = tool.hints
        self.answer = answer
        schema = tool.offered
        self.get_schema = lambda: schema
        if named or not tool.litellm:  # the system prompt names those that have this, too
            self.to_openai_tool = lambda: schema
        for name in _KEPT if recorded else _KEPT_OF_LIVE:
            if (value := getattr(tool.tool, name, None)) is not None:
                setattr(self, name, value)

    def __call__(self, **arguments: Any) -> Any:
        """What is answered in the tool's place."""
        result = self.answer(**arguments)
        if not inspect.iscoroutine(result):
            return result
        from praisonaiagents.agent.async_safety import run_async_in_sync_context

        return run_async_in_sync_context(result)

    def __repr__(self) -> str:
        return f"StandIn({self.name!r})"


def with_tools(tools: Any, callables: Mapping[str, Any]) -> Any:
    """An agent's list of tools in which each one that is named in ``callables`` is replaced by what is given there.

    An MCP object of which any tool is replaced is taken out and its tools stand there one by one: the framework would
    let the model call every tool that the server has. One that is all that an agent has for tools, and of which none is
    replaced, stays so: in a list the framework would describe its tools otherwise.
    """
    bare = is_container(tools)
    if bare and not _names_in(tools) & callables.keys():
        return tools
    placed: list[Any] = []
    for item in [tools] if bare else tools or []:
        if isinstance(item, list | tuple):
            placed.append(with_tools(item, callables))
        elif is_container(item):
            placed += _opened(item, callables, bare)
        else:
            name = name_of(item) or (((item.get("function") or {}).get("name")) if isinstance(item, dict) else None)
            placed.append(callables.get(name or "", item))
    return placed


def _opened(container: Any, callables: Mapping[str, Any], bare: bool) -> list[Any]:
    if not _names_in(container) & callables.keys():
        return [container]
    if bare:
        return [callables.get(part.__name__, part) for part in container]
    placed = []
    for part, schema, _ in parts_of([container]):
        name = schema["function"]["name"]
        kept = None if name in callables or part is None else made_tool(part, schema, container, "", False)
        if name in callables:
            placed.append(callables[name])
        elif kept is not None:
            placed.append(StandIn(kept, part))
    return placed


def _names_in(container: Any) -> set[str]:
    return {part.__name__ for part in container} | {schema["function"]["name"] for schema in sent_by(container)}
