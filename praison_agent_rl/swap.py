"""Point a live agent at another model, and back; the only writer of the framework's internals.

``Agent.switch_model`` does not do: with litellm installed it breaks agents that use the OpenAI client, and it drops
the base URL and the sampling settings of the others. Each private name that is written here is held by a contract
test against the installed framework (``tests/contract/test_framework.py``).
"""

import copy
import os
from collections.abc import Callable
from typing import Any

from praison_agent_rl.errors import AgentError

WRITTEN_NAMES = (
    "llm",
    "_llm_instance",
    "_llm_init_params",
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
)
"""Attributes of an agent that say which model answers; a swap sets them and its undo restores them.

``_rl_server`` is ours: the server lives as long as an agent, or the way back of a swap, holds it.
"""

_SAMPLING = (
    *("temperature", "top_p", "n", "max_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
    *("stop_phrases", "response_format", "logprobs", "top_logprobs", "timeout"),
)
# An endpoint of its own or a way in; a failover manager brings both and would send its key to the new server.
_CONNECTION = ("api_base", "auth", "failover_manager")
_PROVIDERS_KEPT = ("openai", "hosted_vllm")
_ABSENT = object()


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
    before = {name: agent.__dict__.get(name, _ABSENT) for name in WRITTEN_NAMES}
    # The framework chooses a part of the system prompt by the model's name; the prompt must not change with the model.
    prompt_fragment = agent._resolve_harness_base_prompt()
    with agent._get_model_fallback_lock().sync():
        if agent._using_custom_llm:
            agent.llm = f"{_provider(agent)}/{model}"
            agent._llm_init_params = {**_settings(agent), "model": agent.llm, "base_url": base_url, "api_key": api_key}
            agent._llm_instance = None
        else:
            from praisonaiagents.llm import OpenAIClient

            agent.llm = model
            agent._Agent__openai_client = OpenAIClient(api_key=api_key, base_url=base_url)
        agent.base_url = agent._openai_base_url = base_url
        agent.api_key = agent._openai_api_key = api_key
        agent._unified_dispatcher = None  # it holds the old client and model
        agent._llm_explicit = True  # so that a team's default model does not replace it
        agent.harness_base_prompt = prompt_fragment
        agent._rl_server = server
    return lambda: _restore(agent, before)


def server_of(agent: Any) -> Any:
    """The server of ours that answers ``agent`` now, or None."""
    return agent.__dict__.get("_rl_server")


def endpoint_of(agent: Any) -> tuple[str | None, str | None]:
    """Base URL and key of the server that answers ``agent`` now, as far as they are given anywhere."""
    settings = agent._llm_init_params or getattr(agent._llm_instance, "__dict__", {})
    from_environment = os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL")
    url = settings.get("base_url") or settings.get("api_base") or agent.base_url or from_environment
    key = settings.get("api_key") or agent.api_key or os.environ.get("OPENAI_API_KEY")
    return (str(url) if url else None), key


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


def fresh_copy(agent: Any) -> Any:
    """A copy of ``agent`` with an empty history, whose turns leave no trace in the original.

    Memory, knowledge, sessions and hooks are left out; tools are shared objects.
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
    guardrail = state["_guardrail_fn"]
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
