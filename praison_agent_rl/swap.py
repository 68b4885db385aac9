"""Point a live agent at another model, and back; the only writer of the framework's internals.

``Agent.switch_model`` does not do: with litellm installed it breaks agents that use the OpenAI client, and it drops
the base URL and the sampling settings of the others. Each private name that is written here is held by a contract
test against the installed framework (``tests/contract/test_framework.py``).
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from praison_agent_rl.errors import AgentError

WRITTEN_NAMES = (
    "llm",
    "_llm_init_params",
    "_llm_instance",
    "_using_custom_llm",
    "_panel_descriptor",
    "_Agent__openai_client",
    "base_url",
    "_openai_base_url",
    "api_key",
    "_openai_api_key",
    "_unified_dispatcher",
    "_llm_explicit",
    "harness_base_prompt",
    "_rl_server",
    "_rl_home",
    "_rl_route",
)
"""Attributes of an agent that say which model answers; a swap sets them and its undo restores them, in this order.

The last three are ours: the server, which lives as long as an agent, or the way back of a swap, holds it; what the
agent was built with; and where a turn that begins now is answered. What others are made of comes before them: a turn
that finds no client or dispatcher makes one of what it finds then.
"""

_SAMPLING = (
    *("temperature", "top_p", "n", "max_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
    *("stop_phrases", "response_format", "logprobs", "top_logprobs", "timeout"),
)
# An endpoint of its own or a way in; a failover manager brings both and would send its key to the new server.
_CONNECTION = ("api_base", "auth", "failover_manager")
_PROVIDERS_KEPT = ("openai", "hosted_vllm")
_ABSENT = object()


@dataclass(frozen=True, eq=False)
class Route:
    """Where the requests of a turn go; a turn that keeps it is answered by one model from its beginning to its end."""

    model: str
    base_url: str
    api_key: str
    server: Any = field(default=None, repr=False)
    """Whatever must stay alive while a turn is answered from there."""
    client: Any = field(default=None, repr=False)
    """OpenAI client of the framework; made when it is first needed."""

    def openai_client(self) -> Any:
        """The framework's client for this place."""
        if self.client is None:
            from praisonaiagents.llm import OpenAIClient

            client = OpenAIClient(api_key=self.api_key, base_url=str(self.base_url))
            client._rl_route = self.model
            object.__setattr__(self, "client", client)
        return self.client


def swap_model(agent: Any, model: str, *, base_url: str, api_key: str, server: Any = None) -> Callable[[], None]:
    """Let ``agent`` be answered by ``model`` at the OpenAI-compatible ``base_url``; return what undoes it.

    ``server`` is whatever must stay alive for as long as the agent is answered from there.

    System prompt, history, tools and sampling settings stay as they are, on both of the framework's client paths. A
    turn under way ends on the model that it began with, but for one kind: streamed, on the OpenAI client, and calling a
    tool; the framework reads the client anew for what follows the tool, so that is asked of the new server.

    Raises:
        AgentError: the agent is answered by something that is no model endpoint.
    """
    check_swappable(agent)
    # The framework chooses a part of the system prompt by the model's name; the prompt must not change with the model.
    prompt_fragment = agent._resolve_harness_base_prompt()
    route = Route(model, base_url, api_key, server)
    with agent._get_model_fallback_lock().sync():
        before = {name: agent.__dict__.get(name, _ABSENT) for name in WRITTEN_NAMES}
        agent._rl_route = route  # first: whatever a turn that begins meanwhile reads below, it goes there
        if agent._using_custom_llm:
            agent.llm = f"{_provider(agent)}/{model}"
            agent._llm_init_params = {**_settings(agent), "model": agent.llm, "base_url": base_url, "api_key": api_key}
            agent._llm_instance = _built(agent) if before["_llm_instance"] is not None else None
        else:
            agent.llm = model
            agent._Agent__openai_client = route.openai_client()
        agent.base_url = agent._openai_base_url = base_url
        agent.api_key = agent._openai_api_key = api_key
        agent._unified_dispatcher = _dispatcher(agent) if before["_unified_dispatcher"] is not None else None
        agent._llm_explicit = True  # so that a team's default model does not replace it
        agent.harness_base_prompt = prompt_fragment
        agent._rl_server = server
        agent._rl_home = before if before["_rl_home"] is _ABSENT else before["_rl_home"]
    return lambda: _restore(agent, before)


def swap_back(agent: Any) -> None:
    """Let the model that ``agent`` was built with answer it, however often it was swapped."""
    if home := agent.__dict__.get("_rl_home"):
        _restore(agent, home)


def server_of(agent: Any) -> Any:
    """The server of ours that answers ``agent`` now, or None."""
    return agent.__dict__.get("_rl_server")


def route_of(agent: Any) -> Route | None:
    """Where a swap has sent ``agent``, or None if what it was built with answers it."""
    route: Route | None = agent.__dict__.get("_rl_route")
    return route


def home_route(agent: Any) -> Route | None:
    """What an agent that no swap has sent away asks now, on the OpenAI client; None on others, which need no pinning.

    A swap writes the agent's route before all else, so that what was read while there was none belongs together.
    """
    state = agent.__dict__
    model, client = state.get("llm"), state.get("_Agent__openai_client")
    if state.get("_using_custom_llm", True) or client is None or "_rl_route" in state:
        return None
    return Route(str(model), "", "", client=client)


def endpoint_of(agent: Any) -> tuple[str | None, str | None]:
    """Base URL and key of the server that answers ``agent`` now, as far as they are given anywhere."""
    settings = agent._llm_init_params or getattr(agent._llm_instance, "__dict__", {})
    from_environment = os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL")
    url = settings.get("base_url") or settings.get("api_base") or agent.base_url or from_environment
    key = settings.get("api_key") or agent.api_key or os.environ.get("OPENAI_API_KEY")
    return (str(url) if url else None), key


def asks_for(agent: Any, client: Any) -> bool:
    """Whether a client of the framework, of either kind, asks for ``agent`` itself and not for a tool of it."""
    state = agent.__dict__
    for known in (state, state.get("_rl_home") or {}):
        if client is known.get("_llm_instance") or client is known.get("_Agent__openai_client"):
            return True
    wired = getattr(client, "_agent_history_append", None)  # the framework ties its model objects to their agent so
    return getattr(wired, "__self__", None) is agent or "_rl_route" in getattr(client, "__dict__", {})


def model_names(agent: Any) -> set[str]:
    """Names by which the framework asks for the model of ``agent`` now or did before it was swapped."""
    state = agent.__dict__
    home = state.get("_rl_home") or {}
    clients = (known.get("_Agent__openai_client") for known in (state, home))
    ours = (getattr(client, "__dict__", {}).get("_rl_route") for client in clients)
    return {str(name) for name in (state.get("llm"), home.get("llm"), *ours) if name}


def check_swappable(agent: Any) -> None:
    """Raise `AgentError` if what answers this agent is not a single model behind a client of the framework."""
    name = getattr(agent, "name", None)
    if not all(key in getattr(agent, "__dict__", {}) for key in ("_llm_init_params", "_using_custom_llm", "llm")):
        raise AgentError(f"{agent!r} is not a praisonaiagents Agent")
    if agent._panel_descriptor is not None:
        raise AgentError(f"agent {name!r} is answered by a panel of models; improve the panel's members one by one")
    if agent.__dict__.get("_cli_backend") is not None:
        raise AgentError(f"agent {name!r} is answered by a command-line back end, which has no weights to train")
    if agent.__dict__.get("backend") is not None:
        raise AgentError(f"agent {name!r} is answered by a managed back end (backend=), which has no weights to train")


def fresh_copy(agent: Any, *, judged: bool = False) -> Any:
    """A copy of ``agent`` with an empty history, whose turns leave no trace in the original.

    Memory, knowledge, sessions and hooks are left out; tools are shared objects. With ``judged`` the guardrails stay
    that judge answers and ask for better ones; else only those do that can change a request.
    """
    twin = copy.copy(agent)
    state = twin.__dict__
    state["_Agent__chat_history_state"] = type(state["_Agent__chat_history_state"])([])
    state["_system_prompt_cache"] = type(state["_system_prompt_cache"])()
    state["_Agent__hook_runner"] = None
    state["_unified_dispatcher"] = None
    state["_turn_tools_used"] = []
    for name in ("_memory_instance", "knowledge", "_session_id", "_db", "_loop_guard"):
        if name in state:
            state[name] = None
    for name in ("_rl_canary", "_rl_attachment"):
        state.pop(name, None)
    state["_closed"] = True  # so that its end gives back nothing that the original holds: approvals, files
    guardrail = state["_guardrail_fn"]
    if judged:
        return twin
    if getattr(guardrail, "_praison_output_only", False) or not callable(getattr(guardrail, "validate_input", None)):
        state["_guardrail_fn"] = None  # it judges answers, some by asking a model, and can change no request
    return twin


def _restore(agent: Any, before: dict[str, Any]) -> None:
    with agent._get_model_fallback_lock().sync():
        for name, value in before.items():
            if value is _ABSENT:
                agent.__dict__.pop(name, None)
            else:
                agent.__dict__[name] = value


def _built(agent: Any) -> Any:
    """The model object of an agent that has used one, so that no turn makes one of halves."""
    from praisonaiagents.llm import LLM

    return LLM(**agent._llm_init_params)


def _dispatcher(agent: Any) -> Any:
    """What the framework keeps of client and model, for an agent that has asked before."""
    from praisonaiagents.llm import create_llm_dispatcher

    if agent._using_custom_llm:
        return create_llm_dispatcher(llm_instance=agent.llm_instance)
    return create_llm_dispatcher(openai_client=agent._Agent__openai_client, model=agent.llm)


def _provider(agent: Any) -> str:
    """The litellm provider to reach an OpenAI-compatible server by: the agent's own where it is one."""
    prefix = str(agent.llm).partition("/")[0]
    return prefix if prefix in _PROVIDERS_KEPT else "openai"


def _settings(agent: Any) -> dict[str, Any]:
    """What the agent's model object was or would be built with, less where it is and how one gets in."""
    if agent._llm_init_params is not None:
        given = dict(agent._llm_init_params)
    else:  # the agent was given a finished model object
        given = {name: getattr(agent._llm_instance, name, None) for name in _SAMPLING}
        given = {name: value for name, value in given.items() if value is not None}
        given |= {"max_iter": agent.max_iter, **(getattr(agent._llm_instance, "extra_settings", None) or {})}
    return {key: value for key, value in given.items() if key not in _CONNECTION}
