"""Which tools of an agent run while it is trained, and what answers in the place of the others.

A tool runs only if somebody said that it may: by marking it pure, or by naming it in ``run_tools``.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Literal, NamedTuple

from praison_agent_rl.agent_rollouts.agent_tools import AgentTool, agent_tools, is_pure, pure
from praison_agent_rl.agent_rollouts.replays import Replays, value_told_as
from praison_agent_rl.agent_rollouts.stand_ins import StandIn, with_tools
from praison_agent_rl.errors import AgentError, ConfigError, RewardError
from praison_agent_rl.records import Run
from praison_agent_rl.scoring.names import did_you_mean, find, parameters_of, short, takes

__all__ = ["PlannedTool", "ToolPlan", "agent_tools", "is_pure", "plan_tools", "pure", "stand_in"]

How = Literal["runs", "stand-in", "replayed", "refused"]
Given = Callable[..., Any] | str
NOT_RECORDED = {"error": "no recorded result for this call in training"}
NOT_RUN = {"error": "this tool does not run in training"}


class PlannedTool(NamedTuple):
    """A tool, and what becomes of it."""

    tool: AgentTool
    how: How
    why: str
    answer: Callable[..., Any] | None = None
    """What is asked in its place; None where the tool itself runs."""


@dataclass
class ToolPlan:
    """What becomes of each tool of an agent, and of the agents that it hands over to."""

    tools: list[PlannedTool]
    replays: Replays = field(default_factory=Replays)
    _misses: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def refused(self) -> list[str]:
        """Names of the tools that answer every call with an error."""
        return sorted({planned.tool.name for planned in self.tools if planned.how == "refused"})

    @property
    def misses(self) -> dict[str, int]:
        """By tool: calls that were answered with an error, since no result is recorded or the tool is refused."""
        with self._lock:
            return dict(self._misses)

    def callables(self) -> dict[str, Callable[..., Any]]:
        """What is put in the place of each tool that does not just run, by the tool's name."""
        return {planned.tool.name: standing for planned in self.tools if (standing := stand_in(planned)) is not None}

    def in_place(self, tools: Any) -> Any:
        """An agent's list of tools as a copy of it is to have it."""
        return with_tools(tools, self.callables())

    def rehearsal(self) -> str:
        """A table of what would become of each tool; nothing is run for it."""
        if not self.tools:
            return "The agent has no tools."
        several = len({planned.tool.agent for planned in self.tools}) > 1
        head = ["tool", *(["agent"] if several else []), "kind", "in training", "why"]
        rows = [
            [one.tool.name, *([one.tool.agent] if several else []), one.tool.kind, one.how, one.why]
            for one in self.tools
        ]
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head) - 1)]
        lines = [
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]] for row in (head, *rows)
        ]
        running = sorted({one.tool.name for one in self.tools if one.how == "runs"})
        said = f"Would really run: {', '.join(running) or 'none'}."
        return "\n".join(["  ".join(line) for line in lines] + [said])

    def replay(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The recorded result of this call, or an error that the model can read."""
        text = self.replays.find(name, arguments)
        return self._missed(name, NOT_RECORDED) if text is None else value_told_as(text)

    def refuse(self, name: str) -> Any:
        """What a tool answers that does not run."""
        return self._missed(name, NOT_RUN)

    def _missed(self, name: str, error: dict[str, str]) -> dict[str, str]:
        with self._lock:
            self._misses[name] += 1
        return dict(error)


def plan_tools(
    agent: Any,
    *,
    tools_for_training: Mapping[str, Given] | None = None,
    run_tools: bool | Sequence[str] = (),
    runs: Iterable[Run] = (),
) -> ToolPlan:
    """Say for each tool whether it runs in training, and what answers if it does not.

    ``tools_for_training`` gives callables, or ``module:function`` texts, that answer in a tool's place. ``run_tools``
    names tools that may run though they are not marked pure; True is all of them. Of the others those are replayed
    whose results are recorded in ``runs``, and the rest is refused: the model is told an error.

    Raises:
        ConfigError: names that no tool has, and stand-ins that cannot be found or do not take what their tools take;
            all of them at once.
        AgentError: tools of one name that differ, of which neither runs.
    """
    tools = agent_tools(agent)
    stand_ins, problems = _found(dict(tools_for_training or {}), tools)
    problems += _run_problems(run_tools, tools, stand_ins)
    if problems:
        raise ConfigError("\n".join(problems))
    plan = ToolPlan([], Replays.of(runs))
    by_name: dict[str, list[AgentTool]] = {}
    for tool in tools:
        by_name.setdefault(tool.name, []).append(tool)
    hows = {name: _how(named, stand_ins.get(name), run_tools, plan) for name, named in by_name.items()}
    plan.tools += [PlannedTool(tool, *hows[tool.name]) for tool in tools]
    _check_alike(by_name, hows)
    return plan


def stand_in(planned: PlannedTool) -> StandIn | None:
    """What is put in the tool's place; None if the tool runs."""
    if planned.answer is None:
        return None
    return StandIn(planned.tool, planned.answer, recorded=planned.how != "stand-in")


def _how(
    tools: list[AgentTool], given: Callable[..., Any] | None, run_tools: bool | Sequence[str], plan: ToolPlan
) -> tuple[How, str, Callable[..., Any] | None]:
    """What becomes of the tools of one name, why, and what answers instead."""
    tool, name = tools[0], tools[0].name
    if given is not None:
        return "stand-in", f"{_said(given)} answers, by tools_for_training", given
    if any(one.callable is None for one in tools):
        return "refused", _WITHOUT_CALLABLE.get(tool.kind, "nothing here can call it"), _refusing(plan, name)
    if run_tools is True or (not isinstance(run_tools, bool) and name in run_tools):
        return "runs", "all of them do, by run_tools=True" if run_tools is True else "named in run_tools", None
    if all(one.kind == "handoff" for one in tools):
        called = sorted({callback for one in tools for callback in one.callbacks})
        if not called:
            return "runs", f"hands over to {tool.hands_over_to!r}, whose tools stand in this table", None
        why = f"calls your {' and '.join(called)}, not marked pure: name it in run_tools if that may happen"
        return "refused", why, _refusing(plan, name)
    if all(one.pure for one in tools):
        return "runs", "marked pure", None
    if known := plan.replays.calls(name):
        differing = plan.replays.differing.get(name, 0)
        noted = f", {differing} of them with several results: the latest is given" if differing else ""
        return "replayed", f"{known} recorded {'call' if known == 1 else 'calls'}{noted}", _replaying(plan, name)
    why = "not marked pure, no stand-in, nothing recorded: mark it @pure, or give it in tools_for_training or run_tools"
    return "refused", why, _refusing(plan, name)


_WITHOUT_CALLABLE = {
    "hosted": "the provider of a model runs it; the model in training has none: give it in tools_for_training",
    "schema": "a schema without a function: give one in tools_for_training",
    "name": "a name that the framework did not find a tool for",
    "mcp": "the MCP object's own filter takes it out, though the framework sends it",
}


def _replaying(plan: ToolPlan, name: str) -> Callable[..., Any]:
    return lambda **arguments: plan.replay(name, arguments)


def _refusing(plan: ToolPlan, name: str) -> Callable[..., Any]:
    return lambda **_: plan.refuse(name)


def _said(given: Callable[..., Any]) -> str:
    return str(getattr(given, "__qualname__", None) or type(given).__name__)


def _found(given: dict[str, Given], tools: list[AgentTool]) -> tuple[dict[str, Callable[..., Any]], list[str]]:
    """The stand-ins by tool, and what is wrong with those that are not usable."""
    known = sorted({tool.name for tool in tools})
    found: dict[str, Callable[..., Any]] = {}
    problems = []
    for name, value in given.items():
        where = f"tools_for_training[{name!r}]"
        if name not in known:
            problems.append(f"{where}: {_no_tool(name, known)}")
            continue
        if not callable(value) and not isinstance(value, str):
            problems.append(f"{where}: {short(value)} is a {type(value).__name__}, not a function or 'module:function'")
            continue
        try:
            found[name] = find(value)
        except RewardError as error:
            problems.append(f"{where}: {str(error).replace('reward function', 'stand-in')}")
            continue
        problems += [f"{where}: {text}" for tool in tools if tool.name == name for text in _misfits(tool, found[name])]
    return found, list(dict.fromkeys(problems))


def _misfits(tool: AgentTool, given: Callable[..., Any]) -> list[str]:
    """Why calls of the tool could fail on ``given`` where they would not on the tool."""
    taken = parameters_of(given)
    if taken is None or not tool.described:
        return []
    said, wrong = _said(given), []
    if untaken := [name for name in tool.parameters if not takes(given, name)]:
        wrong.append(f"{said} does not take {', '.join(map(repr, untaken))}, which calls of the tool have")
    starred = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = [p.name for p in taken if p.default is p.empty and p.kind not in starred]
    if unknown := [name for name in needed if name not in tool.parameters]:
        wrong.append(f"{said} needs {', '.join(map(repr, unknown))}, which the tool does not have")
    if left_out := [name for name in needed if name in tool.parameters and name not in tool.required]:
        wrong.append(f"{said} needs {', '.join(map(repr, left_out))}, which calls of the tool may leave out")
    return wrong


def _run_problems(run_tools: Any, tools: list[AgentTool], stand_ins: Mapping[str, Any]) -> list[str]:
    if isinstance(run_tools, bool):
        return []
    if isinstance(run_tools, str) or not isinstance(run_tools, Sequence | set | frozenset):
        return [f"run_tools is {short(run_tools)}; give a list of tools' names, or True for all of them"]
    known = sorted({tool.name for tool in tools})
    problems = [f"run_tools: {_no_tool(name, known)}" for name in run_tools if name not in known]
    both = [name for name in run_tools if name in stand_ins]
    return problems + [f"run_tools and tools_for_training both name {name!r}; leave it out of one" for name in both]


def _no_tool(name: Any, known: list[str]) -> str:
    return f"no tool is called {short(name)}{did_you_mean(str(name), known)}. Tools: {', '.join(known) or 'none'}"


def _check_alike(by_name: Mapping[str, list[AgentTool]], hows: Mapping[str, tuple[How, str, Any]]) -> None:
    """One thing stands in for all tools of a name, so they must look the same to the model."""
    for name, tools in by_name.items():
        other = next((tool for tool in tools if tool.schema != tools[0].schema), None)
        if hows[name][0] != "runs" and other is not None:
            raise AgentError(
                f"agents {tools[0].agent!r} and {other.agent!r} each have a tool {name!r} and the two differ; "
                "rename one, or let both run (@pure, run_tools): what stands in for a tool is found by its name"
            )
