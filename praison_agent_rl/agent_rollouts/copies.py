"""Isolated copies of an agent and of all that it can hand over to, whose model calls go where a rollout is made.

The framework ties an agent to its history, memory, locks, caches and to those that it hands over to. A copy shares none
of these, so that many can run at once; instructions, tools, hooks and guardrails are those of production. What is
written here of the framework (`BLANK`, `EMPTIED`) is held by a test against the installed one.
"""

import asyncio
import concurrent.futures
import contextvars
import copy
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Any
from urllib.parse import quote

from praison_agent_rl.agent_rollouts.tool_copies import TOOL_LOG, ToolLog, names_of, replaceable, watched
from praison_agent_rl.capture.recordings import UNRECORDED
from praison_agent_rl.errors import AgentError
from praison_agent_rl.swap import check_swappable, endpoint_of, fresh_copy, model_names, route_of, swap_model

HANDOFF = "_praison_handoff_source"
"""Attribute of a tool that hands over: the framework's object that it was made of."""

BLANK: dict[str, Any] = {
    # what a conversation leaves behind, and where
    "_session_store": None,
    "_session_store_initialized": False,
    "_history_enabled": False,
    "_auto_memory": False,
    "_auto_memory_instance": None,
    "_learn_config": None,
    "_self_improve": False,
    "auto_save": None,
    "_output_file": None,
    "_last_guardrail_error": None,
    "_guardrail_retry_count": 0,
    "_total_cost": 0.0,
    "_total_tokens_in": 0,
    "_total_tokens_out": 0,
    "_llm_call_count": 0,
    # what belongs to a turn
    "_active_turn_token": None,
    "_loop_warned_this_turn": False,
    "_pending_self_correction": None,
    "_doom_loop_tracker": None,
    "_goal_state": None,
    "_file_snapshot": None,
    # what the framework makes for an agent when it is first needed, and holds on to
    "_context_manager": None,
    "_context_manager_initialized": False,
    "_session_dedup_cache": None,
    "_middleware_manager": None,
    "_planning_agent": None,
    "_sandbox_manager": None,
    "_tool_executor": None,
    # through which a user speaks to the original, or listens to it
    "_message_steering": None,
    "interrupt_controller": None,
    "_Agent__stream_emitter": None,
    "verbose": False,
    "stream": False,
    # so that the end of a copy gives back nothing that the original holds: approvals, connections, files
    "_closed": True,
}
"""Attributes of an agent and what a copy has instead, where it has them at all."""

EMPTIED = (
    *("_formatted_tools_cache", "_loop_detector_history", "_pending_approvals", "_snapshot_stack", "_redo_stack"),
)
"""Containers that are empty in a copy; all other lists, dictionaries and sets of an agent are copied."""

_PROVIDERS = ("openai/", "hosted_vllm/")
_REFUSED: tuple[tuple[str, Callable[[dict[str, Any]], Any], str], ...] = (
    (
        "knowledge",
        lambda state: state.get("knowledge") is not None or state.get("_knowledge_sources"),
        "copies would answer without what is looked up there",
    ),
    (
        "tools_run_on",
        lambda state: state.get("tools_run_on") is not None or state.get("_tools_sandbox") is not None,
        "copies would share one sandbox and find each other's files",
    ),
    ("runtime", lambda state: state.get("_runtime_config") is not None, "another runtime may answer than the model"),
    (
        "tool_config.enable_artifacts",
        lambda state: state.get("_artifact_store") is not None,
        "copies would share one store and read each other's tool results",
    ),
    (
        "chat",
        lambda state: "chat" in state,
        "it was set on this object, and its copies would ask the original; override it in a class",
    ),
    (
        "context",
        lambda state: hasattr(state.get("_context_param"), "process"),
        "it is a manager that holds the conversation; give its configuration",
    ),
)
"""What no copy can have to itself: the argument of Agent, when it is so, and why not."""


Tools = Mapping[str, Callable[..., Any]] | Callable[[Any], Any]
"""What runs in the place of an agent's tools: callables by name, or a function from an agent's tools to others."""


@dataclass(frozen=True)
class RolloutPlace:
    """Where the model calls of one rollout go."""

    address: str
    """``http://host:port`` of the endpoint."""
    key: str
    job: str
    """Id of the rollout."""
    model: str = "policy"

    def url_of(self, name: str) -> str:
        """Base URL for the calls of the agent that is called so."""
        return f"{self.address.rstrip('/')}/rollouts/{quote(self.job, safe='')}/{quote(name, safe='')}/v1"


def agents_of(agent: Any) -> list[Any]:
    """The agent and all that it can hand over to, each once, the nearest first."""
    found: list[Any] = []
    waiting = [agent]
    while waiting:
        one = waiting.pop(0)
        if not any(one is other for other in found):
            found.append(one)
            waiting.extend(_targets(one))
    return found


def policy_agents(agent: Any) -> list[Any]:
    """Of `agents_of` those that the model of ``agent`` answers: in a rollout, the policy does."""
    return [one for one in agents_of(agent) if one is agent or _same_model(one, agent)]


def check_copyable(agent: Any) -> None:
    """Raise `AgentError` if the agent, or one that it can hand over to, cannot be copied and isolated; says all why."""
    problems: list[str] = []
    agents = agents_of(agent)
    for one in agents:
        try:
            check_swappable(one)
        except AgentError as error:
            problems.append(str(error))
        else:
            problems += [f"agent {one.name!r} has {what}=: {why}" for what, is_so, why in _REFUSED if is_so(vars(one))]
    if not problems:
        problems += _unlike_others(agents) + _shared_models(agent)
    if problems:
        raise AgentError("agents that cannot be copied for rollouts: " + "; ".join(problems))


def check_names(agent: Any, trained: Iterable[str] | None, tools: Tools | None) -> None:
    """Raise `AgentError` for names in ``trained`` or ``tools`` that no agent, or no tool of the agents, has."""
    answered = [one.name for one in policy_agents(agent)]
    unknown = sorted(set(trained or ()) - set(answered))
    if unknown:
        raise AgentError(f"trained={unknown} are none of the agents that the model answers: {answered}")
    known = {name for one in agents_of(agent) for tool in _own_tools(one) for name in names_of(tool)}
    unknown = sorted(set(tools) - known) if isinstance(tools, Mapping) else []
    if unknown:
        raise AgentError(
            f"tools={unknown} can stand in for nothing: the agents have {sorted(known)}. Handoffs, tools of an MCP "
            "server and those given as a schema cannot be replaced"
        )


def rollout_copy(
    agent: Any,
    place: RolloutPlace,
    *,
    history: Sequence[Mapping[str, Any]] = (),
    trained: Iterable[str] | None = None,
    tools: Tools | None = None,
) -> Any:
    """A copy of ``agent`` for one rollout, with copies of all that it can hand over to; nothing of it is recorded.

    Those that the agent's own model answers ask at ``place``, each under its own name; the others keep their model.
    ``history`` are the messages so far, without a system prompt. ``trained`` are names of those whose calls are to be
    trained (by default all that ask at ``place``); they are only checked here, since the URL of a call says who asks.
    ``tools`` are callables that run instead of the tools of these names, and the model sees no difference; or a
    function that is given an agent's list of tools and returns what a copy has instead.

    Raises:
        AgentError: an agent cannot be isolated, or a name is of none.
    """
    check_copyable(agent)
    check_names(agent, trained, tools)
    copier = _Copier(place, tools or {}, {id(one) for one in policy_agents(agent)})
    twin = copier.copy(agent)
    twin.chat_history.extend(copy.deepcopy(dict(message)) for message in history)
    return twin


def tool_log(twin: Any) -> ToolLog:
    """What the tools of a rollout's copies did so far."""
    log: ToolLog = vars(twin)[TOOL_LOG]
    return log


def end_rollout(twin: Any, place: RolloutPlace) -> None:
    """Close the connections to ``place`` of a copy that has answered, and of those that it could hand over to."""
    for one in agents_of(twin):
        route, client = route_of(one), vars(one).get("_Agent__openai_client")
        if client is not None and route is not None and route.base_url == place.url_of(str(one.name)):
            client.close()


class _Copier:
    """Makes the copies of one rollout, each once, so that agents that hand over to each other do so as copies."""

    def __init__(self, place: RolloutPlace, tools: Tools, at_place: set[int]) -> None:
        self._place = place
        self._stand_ins = tools if isinstance(tools, Mapping) else {}
        self._in_place = tools if callable(tools) else None
        self._at_place = at_place
        self._log = ToolLog()
        self._twins: dict[int, Any] = {}

    def copy(self, agent: Any) -> Any:
        """The copy of ``agent``."""
        if id(agent) in self._twins:
            return self._twins[id(agent)]
        twin = self._twins[id(agent)] = _isolated(agent)
        state = vars(twin)
        state[TOOL_LOG] = self._log
        tools = agent.tools if self._in_place is None else self._in_place(agent.tools)
        if isinstance(tools, list | tuple):
            state["tools"] = [self._tool(tool, twin) for tool in tools]
        state["handoffs"] = [self._handoff(item) for item in agent.handoffs or []]
        if id(agent) in self._at_place:
            state["fallback_models"] = []  # what the policy refuses is not asked of another model
            state["_rate_limiter"] = None
            place = self._place
            swap_model(twin, place.model, base_url=place.url_of(str(agent.name)), api_key=place.key)
        else:
            _own_model(state)
        return twin

    def _tool(self, tool: Any, twin: Any) -> Any:
        source = _source_of(tool)
        if source is not None:
            return self._handing_over(tool, source, twin)
        owner = _bound_to(tool)
        if owner is not None:
            tool = types.MethodType(tool.__func__, self.copy(owner))
        return watched(tool, self._log, self._stand_ins)

    def _handing_over(self, tool: Any, source: Any, twin: Any) -> Any:
        """A tool that hands over from the copy to a copy; the framework's is bound to the agents it was made for."""
        handoff = self._handoff(source)
        made = handoff.to_tool_function(twin)
        setattr(made, HANDOFF, handoff)
        for name in ("__name__", "__doc__", "__signature__"):  # as it was described when the agent was built
            if name in dir(tool):
                setattr(made, name, getattr(tool, name))
        return made

    def _handoff(self, item: Any) -> Any:
        if not _is_handoff(item):
            return self.copy(item)
        handoff = copy.copy(item)
        handoff.agent = self.copy(item.agent)
        vars(handoff).update(_semaphore=None, _semaphore_loop=None)
        return handoff


def _isolated(agent: Any) -> Any:
    """A copy that shares no lock, container, memory or listener with ``agent``, only what it can hand over to."""
    twin = fresh_copy(agent, judged=True)
    state = vars(twin)
    _unshare(state)
    state.update({name: value for name, value in BLANK.items() if name in state})
    state["_guardrail_retry_delay"] = _no_delay
    for name in ("execution", "_execution_config"):
        if getattr(state.get(name), "durable", False):
            state[name] = copy.copy(state[name])
            state[name].durable = False  # its journal is for resuming what production was doing
    state[UNRECORDED] = True
    return twin


def _no_delay(_: int) -> float:
    """Seconds before an answer that a guardrail refused is asked for again; production waits, to spare its server."""
    return 0.0


def _unshare(state: dict[str, Any]) -> None:
    """Have locks and containers of its own in a copied object, and nothing that the framework makes as it needs it."""
    from praisonaiagents.agent.async_safety import AsyncSafeState, DualLock

    for name, value in list(state.items()):
        if isinstance(value, (contextvars.ContextVar, concurrent.futures.Executor, weakref.finalize)):
            del state[name]
        elif isinstance(value, (DualLock, asyncio.Lock, type(Lock()), type(RLock()))):
            state[name] = _new_lock(value)
        elif isinstance(value, AsyncSafeState):
            state[name] = AsyncSafeState(copy.copy(value.value))
        elif isinstance(value, (list, dict, set)):
            state[name] = type(value)() if name in EMPTIED else copy.copy(value)


def _new_lock(lock: Any) -> Any:
    if isinstance(lock, type(Lock())):
        return Lock()
    return RLock() if isinstance(lock, type(RLock())) else type(lock)()


def _own_model(state: dict[str, Any]) -> None:
    """Give an agent that keeps its model a client object of its own: the framework ties those to a history."""
    if state["_llm_init_params"] is not None:
        state["_llm_instance"] = None
    elif state["_llm_instance"] is not None:
        state["_llm_instance"] = copy.copy(state["_llm_instance"])
        _unshare(vars(state["_llm_instance"]))
        vars(state["_llm_instance"])["_agent_history_append"] = None


def _targets(agent: Any) -> list[Any]:
    """The agents that one agent can hand over to, or whose methods it has as tools."""
    known = [_source_of(tool) or _bound_to(tool) for tool in _tools(agent)]
    items = [item for item in known if item is not None] + list(getattr(agent, "handoffs", None) or [])
    return [item.agent if _is_handoff(item) else item for item in items]


def _own_tools(agent: Any) -> list[Any]:
    return [tool for tool in _tools(agent) if _source_of(tool) is None and replaceable(tool)]


def _tools(agent: Any) -> list[Any]:
    tools = getattr(agent, "tools", None)
    return list(tools) if isinstance(tools, list | tuple) else []


def _source_of(tool: Any) -> Any:
    return tool if _is_handoff(tool) else getattr(tool, "__dict__", {}).get(HANDOFF)


def _bound_to(tool: Any) -> Any:
    """The agent of which a tool is a method, if of any."""
    from praisonaiagents import Agent

    owner = getattr(tool, "__self__", None)
    return owner if isinstance(owner, Agent) and hasattr(tool, "__func__") else None


def _is_handoff(item: Any) -> bool:
    from praisonaiagents import Handoff

    return isinstance(item, Handoff)


def _same_model(one: Any, other: Any) -> bool:
    """Whether two agents ask the same server for the same model, by whichever client."""
    addresses = {str(endpoint_of(agent)[0] or "").rstrip("/") for agent in (one, other)}
    return len(addresses) == 1 and bool(_model_names(one) & _model_names(other))


def _model_names(agent: Any) -> set[str]:
    names = model_names(agent)
    return names | {name.removeprefix(prefix) for name in names for prefix in _PROVIDERS}


def _unlike_others(agents: Sequence[Any]) -> list[str]:
    """Names that do not tell the agents apart; the endpoint knows who asks by their names."""
    names = [str(agent.name or "") for agent in agents]
    twice = sorted({name for name in names if names.count(name) > 1 or name.strip(".") == ""})
    return [f"several agents are called {name!r}, or it is no name; give each one of its own" for name in twice]


def _shared_models(agent: Any) -> list[str]:
    """Agents that keep a model object which may keep a conversation, and which is not known to be copyable."""
    at_place = {id(one) for one in policy_agents(agent)}
    states = [vars(one) for one in agents_of(agent) if id(one) not in at_place]
    given = [s for s in states if s["_llm_init_params"] is None and s["_llm_instance"] is not None]
    if not given:
        return []
    from praisonaiagents.llm import LLM

    return [
        f"agent {state['name']!r} has llm={type(state['_llm_instance']).__name__}, which its copies would share"
        for state in given
        if not isinstance(state["_llm_instance"], LLM)
    ]
