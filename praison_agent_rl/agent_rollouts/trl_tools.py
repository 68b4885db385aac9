"""Tools in the form that TRL's own loop takes: functions with a type for each parameter and a Google docstring."""

import inspect
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import reduce, wraps
from operator import or_
from typing import Any, Literal, Optional

from praison_agent_rl.agent_rollouts.agent_tools import AgentTool, own_tool, own_tools
from praison_agent_rl.agent_rollouts.tool_answers import told_result
from praison_agent_rl.agent_rollouts.tools import PlannedTool, ToolPlan, plan_tools, stand_in
from praison_agent_rl.environments import GENERATES, yields
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.scoring.names import short

Tool = Callable[..., Any]

_SECTIONS = re.compile(r"\b(Args|Returns|Raises):")
_TYPES: dict[str, Any] = {
    **{"string": str, "integer": int, "number": float, "boolean": bool},
    **{"array": list, "object": dict, "null": type(None)},
}
_SCALARS = (str, int, float, bool, type(None))
_DEEPEST = 8
"""Schemas within schemas that are followed; deeper ones, and those that contain themselves, are any value."""


def trl_tools(tools: Any, *, plan: ToolPlan | None = None) -> list[Tool]:
    """The tools of an agent, or given ones, as TRL takes them; what they return is text.

    Of an agent each tool is what its ``plan`` says: itself, or what answers in its place; without a plan only tools
    that are marked pure run. Given ones would run: functions as they describe themselves, others by their schemas. The
    text is the one that the framework would tell the model. `check_trl_tools` says whether TRL accepts them.

    Raises:
        ConfigError: tools that cannot be described to TRL, or that hand over to another agent; all at once.
    """
    if callable(getattr(tools, "chat", None)) and hasattr(tools, "tools"):
        known = plan or plan_tools(tools)
        own = {id(tool.tool) for tool in own_tools(tools)}
        planned = [one for one in known.tools if one.tool.agent == tools.name and id(one.tool.tool) in own]
        planned = [one for one in planned if one.tool.kind not in ("hosted", "name")]
    else:
        planned = [one for tool in _listed(tools) for one in _as_given(tool)]
    problems = [text for one in planned if isinstance(one, PlannedTool) for text in _unfit(one)]
    if problems:
        raise ConfigError("TRL's tool loop cannot take these tools:\n" + "\n".join(problems))
    return [_as_function(one) if isinstance(one, PlannedTool) else one for one in planned]


def check_trl_tools(tools: Iterable[Any]) -> None:
    """Say of every tool what TRL, or the chat template that it renders them with, would reject.

    Raises:
        ConfigError: any is rejected; all of them with the reasons.
    """
    given = list(tools)
    counted = Counter(_name(tool) for tool in given)
    lines = [f"{_name(tool)}: {'; '.join(faults)}" for tool in given if (faults := _faults(tool))]
    lines += [f"{name}: {count} tools have this name" for name, count in counted.items() if count > 1]
    if lines:
        raise ConfigError(
            "TRL would reject these tools; each needs a name, a type for every parameter, and a docstring with what it "
            "does and an Args section (Google style) that describes every parameter:\n" + "\n".join(lines)
        )


def _faults(tool: Any) -> list[str]:
    """What is wrong with one tool; the last word is transformers' own."""
    from transformers.utils.chat_template_utils import get_json_schema

    if not callable(tool) or inspect.isclass(tool):
        what = "a class" if inspect.isclass(tool) else f"a {type(tool).__name__}"
        return [f"it is {what}, not a function"]
    wrong = [*_name_faults(tool), *_parameter_faults(tool)]
    if inspect.iscoroutinefunction(getattr(type(tool), "__call__", None)):  # noqa: B004 - of the class, not of functions
        wrong.append("TRL does not await an object with an async __call__; make it an async function")
    if wrong:
        return wrong
    try:
        get_json_schema(tool)
    except Exception as error:  # noqa: BLE001 - whatever a user's types and docstring make it raise, TRL would too
        return [_in_plain_words(error)]
    return []


def _name_faults(tool: Any) -> list[str]:
    name = getattr(tool, "__name__", None)
    if not isinstance(name, str):
        return ["it has no __name__ by which a model could call it; wrap it in a function"]
    if not name.isidentifier() or keyword.iskeyword(name):
        return [f"its name {name!r} is no name of a function; define it with def"]
    return []


def _parameter_faults(tool: Any) -> list[str]:
    """Parameters that cannot be given, or of which the model would not learn the type or the meaning."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    try:
        taken = list(inspect.signature(tool).parameters.values())
    except (TypeError, ValueError):
        return ["its parameters cannot be read"]
    wrong = []
    if starred := [str(p) for p in taken if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        wrong.append(f"{' and '.join(starred)} cannot be described; name the parameters")
    if only_placed := [p.name for p in taken if p.kind is p.POSITIONAL_ONLY]:
        wrong.append(f"it is called by names, and {_listing(only_placed)} cannot be given by name")
    named = [p for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if untyped := [p.name for p in named if p.annotation is p.empty]:
        wrong.append(f"no type hint for {_listing(untyped)}")
    text = inspect.getdoc(tool)
    if not text:
        return [*wrong, "no docstring"]
    described = parse_google_format_docstring(text.strip())[1] or {}
    if undescribed := [p.name for p in named if p.name not in described]:
        wrong.append(f"its docstring's Args section does not describe {_listing(undescribed)}")
    return wrong


def _in_plain_words(error: Exception) -> str:
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, TypeHintParsingException):
        return f"the type of a parameter cannot be told to a model ({said})"
    if isinstance(error, DocstringParsingException):
        return f"its docstring cannot be read ({said})"
    if isinstance(error, NameError):
        return f"a type hint names something that is not there ({said})"
    return f"no schema can be made of it ({type(error).__name__}: {said})"


def _listing(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _name(tool: Any) -> str:
    name = getattr(tool, "__name__", None)
    return name if isinstance(name, str) else short(tool)


def _listed(tools: Any) -> list[Any]:
    return list(tools) if isinstance(tools, list | tuple) else [tools]


def _as_given(tool: Any) -> list[Any]:
    """What a given tool is made of, to be wrapped; itself if it is nothing that is known."""
    made = own_tool(tool)
    return [PlannedTool(one, "runs", "given") for one in made] or [tool]


def _unfit(planned: PlannedTool) -> list[str]:
    tool = planned.tool
    if tool.kind == "handoff" and planned.how == "runs":
        return [f"{tool.name}: it hands over to {tool.hands_over_to!r}, which TRL's loop cannot; use rollout: agent"]
    if planned.how == "runs" and tool.callable is not None and yields(tool.callable):
        return [f"{tool.name}: it {GENERATES}"]
    if _fits_as_it_is(planned):
        return []
    if not tool.name.isidentifier() or keyword.iskeyword(tool.name):
        return [f"{tool.name}: its name is no name of a function"]
    if planned.answer is None and tool.callable is None:
        return [f"{tool.name}: there is nothing to call"]
    odd = [name for name in tool.parameters if not name.isidentifier() or keyword.iskeyword(name)]
    return [f"{tool.name}: {_listing(odd)} cannot be the name of a parameter in Python"] if odd else []


def _fits_as_it_is(planned: PlannedTool) -> bool:
    """Whether the tool is a function of the user's own, which is theirs to describe."""
    return planned.tool.kind in ("function", "method")


def _as_function(planned: PlannedTool) -> Tool:
    """A function that TRL calls: the user's own description if it is a function, else one made of the schema."""
    tool, answer = planned.tool, stand_in(planned) or planned.tool.callable
    assert answer is not None  # `_unfit` has seen to it
    telling = _telling(answer, tool.name, is_async=tool.is_async and planned.how == "runs")
    return wraps(tool.tool)(telling) if _fits_as_it_is(planned) else described_function(tool, telling)


def _telling(answer: Tool, name: str, *, is_async: bool) -> Tool:
    """Calls ``answer`` and returns what the framework tells of its result; what it raises is TRL's to catch."""

    async def tell_later(*given: Any, **arguments: Any) -> str:
        return told_result(name, await answer(*given, **arguments))

    def tell(*given: Any, **arguments: Any) -> str:
        return told_result(name, answer(*given, **arguments))

    return tell_later if is_async else tell


def described_function(tool: AgentTool, function: Tool) -> Tool:
    """Give ``function`` the name, types and docstring from which `get_json_schema` makes the tool's parameters again.

    What a schema can say and a type cannot is lost: the properties of an object within, formats, and bounds.
    """
    definitions = tool.described.get("parameters") or {}
    hints = {name: hint_of(schema, definitions) for name, schema in tool.parameters.items()}
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hints[name],
                default=inspect.Parameter.empty if name in tool.required else schema.get("default"),
            )
            for name, schema in tool.parameters.items()
        ]
    )
    function.__annotations__ = hints
    function.__name__ = function.__qualname__ = tool.name
    said = inspect.cleandoc(str(tool.described.get("description") or "")) or tool.name
    lines = [_no_section(said)]
    if tool.parameters:
        about = {name: schema.get("description") or name for name, schema in tool.parameters.items()}
        lines += ["", "Args:"]
        lines += [f"    {name}: {_no_section(' '.join(str(text).split()))}" for name, text in about.items()]
    function.__doc__ = "\n".join(lines)
    return function


def _no_section(text: str) -> str:
    """A text in which nothing is taken for the beginning of a section of a docstring."""
    return _SECTIONS.sub(r"\1 -", text)


def hint_of(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> Any:
    """The Python type that a JSON schema describes, as far as there is one; ``definitions`` holds what it refers to."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return Any
    if "$ref" in schema:
        return hint_of(_referred(str(schema["$ref"]), definitions), definitions, depth + 1)
    hint = _hint(schema, definitions, depth)
    return Optional[hint] if schema.get("nullable") and hint is not Any else hint  # noqa: UP045 - of a value


def _hint(schema: dict[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values and all(type(value) in _SCALARS for value in values):
        return Literal[tuple(values)]
    if any_of := schema.get("anyOf") or schema.get("oneOf"):
        return _union([hint_of(one, definitions, depth + 1) for one in any_of])
    kind = schema.get("type")
    if isinstance(kind, list):
        return _union([hint_of({**schema, "type": one}, definitions, depth + 1) for one in kind])
    if kind == "array" and schema.get("items"):
        return list[hint_of(schema["items"], definitions, depth + 1)]  # type: ignore[misc]
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return dict[str, hint_of(schema["additionalProperties"], definitions, depth + 1)]  # type: ignore[misc]
    return _TYPES.get(str(kind), Any)


def _union(hints: list[Any]) -> Any:
    return Any if not hints or Any in hints else reduce(or_, hints) if len(hints) > 1 else hints[0]


def _referred(reference: str, definitions: Mapping[str, Any]) -> Any:
    """What ``#/$defs/City`` stands for."""
    found: Any = definitions
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found
