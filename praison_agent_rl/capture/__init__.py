"""Record agents: each model request as it was sent, the whole reply, and the turn that it belongs to.

Recording sits where the framework hands a request to a provider's client, since its hooks miss most requests and make
concurrent turns fail (DESIGN 1). Each such place is a method that is wrapped once, at the first recording of the
process (`TAPS`); while nothing is recorded, a wrapped method does what it did before.
"""

import atexit
import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from praison_agent_rl.capture.calls import tap_attempts, tap_client, tap_responses_stream
from praison_agent_rl.capture.opened import Recording, open_recordings, outlet_at, stop_forsaken
from praison_agent_rl.capture.turns import SAME_TURN, tap_entry, tap_middleware, tap_streamed_turn, tap_turn
from praison_agent_rl.errors import AgentError, ConfigError
from praison_agent_rl.transcripts import DEFAULT_STORE
from praison_agent_rl.transcripts.files import store_at
from praison_agent_rl.transcripts.masking import find_mask
from praison_agent_rl.transcripts.run_ids import RunId
from praison_agent_rl.transcripts.shared_writers import shared_writer

__all__ = ["TAPS", "Recording", "install_taps", "last_run", "record"]

_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()

_CHAT = ("praisonaiagents.agent.chat_mixin", "ChatMixin")
_EXECUTION = ("praisonaiagents.agent.execution_mixin", "ExecutionMixin")
_PLANNER = ("praisonaiagents.planning.planner", "PlanningAgent")
_TEAM = ("praisonaiagents.agents.agents", "AgentTeam")
_FLOW = ("praisonaiagents.workflows.workflows", "AgentFlow")
_OPENAI = ("praisonaiagents.llm.openai_client", "OpenAIClient")
_LITELLM = ("praisonaiagents.llm.llm", "LLM")

TAPS: tuple[tuple[tuple[str, str], str, Callable[[Any, str], Any], str], ...] = (
    (_CHAT, "chat", tap_turn, "chat"),
    (_CHAT, "achat", tap_turn, "achat"),
    (_CHAT, "_start_stream", tap_streamed_turn, "stream"),
    (_CHAT, "_stream_fallback_chat", tap_entry, SAME_TURN),
    (_CHAT, "_get_model_middleware_manager", tap_middleware, ""),
    (_EXECUTION, "start", tap_entry, "start"),
    (_EXECUTION, "astart", tap_entry, "astart"),
    (_EXECUTION, "run", tap_entry, "run"),
    (_EXECUTION, "arun", tap_entry, "arun"),
    (_EXECUTION, "_start_with_planning", tap_turn, "planning"),
    (_PLANNER, "create_plan_sync", tap_turn, "plan"),
    (_PLANNER, "create_plan", tap_turn, "plan"),
    (_TEAM, "start", tap_turn, "team"),
    (_TEAM, "astart", tap_turn, "team"),
    (_FLOW, "run", tap_turn, "flow"),
    (_OPENAI, "sync_client", tap_client, ""),
    (_OPENAI, "async_client", tap_client, ""),
    (_LITELLM, "_call_with_retry", tap_attempts, ""),
    (_LITELLM, "_call_with_retry_async", tap_attempts, ""),
    (_LITELLM, "_stream_responses_api", tap_responses_stream, ""),
    (_LITELLM, "_stream_responses_api_async", tap_responses_stream, ""),
)
"""Class of the framework, its method, what wraps it, and the style of the turn that begins there."""

_TAPPED: set[tuple[str, str]] = set()


def record(
    *agents: Any,
    store: str | Path | None = None,
    tags: Sequence[str] | None = None,
    redact: Any = None,
    sample: float = 1.0,
) -> Recording:
    """Record the turns of ``agents`` from now on; without any, those of all agents of the process.

    An agent is given itself, or as its name or a pattern of names (``"support-*"``); a team or a flow stands for its
    agents. ``sample`` is the share of turns that is recorded. Keys and headers of requests are never kept, and secrets
    within texts are masked; ``redact`` says what else is (see `find_redactor`). Several recordings to one store make
    one copy, on which the tags of all are, and the masks: each says what must not be in that store.

    Raises:
        AgentError: one of ``agents`` is none.
        ConfigError: an option is wrong.
    """
    tags = () if tags is None else tags
    _check(agents, store, tags, sample)
    place = store_at(store if store is not None else DEFAULT_STORE)
    mask = find_mask(redact)
    with _LOCK:
        _install()
        stop_forsaken()
        outlet = outlet_at(place, shared_writer)
        return Recording(outlet, agents, mask=mask, tags=tags, sample=sample).start()


def last_run(agent: Any) -> RunId | None:
    """Id of the last recorded run of ``agent``, to give feedback on; None if there is none. It knows its store."""
    found: RunId | None = vars(agent).get("_rl_last_run")
    return found


def _check(agents: Sequence[Any], store: Any, tags: Any, sample: Any) -> None:
    for agent in agents:
        if isinstance(agent, str):
            continue
        if isinstance(agent, type) or not any(callable(getattr(agent, name, None)) for name in ("chat", "start")):
            raise AgentError(f"{agent!r} is no agent, team, flow or name of one; record() takes these")
    if store is not None and not (isinstance(store, str | os.PathLike) and os.fspath(store)):
        raise ConfigError(f"store={store!r} is no folder; give its path, or leave it out for {str(DEFAULT_STORE)!r}")
    if not isinstance(tags, list | tuple | set | frozenset) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError(f"tags={tags!r} is no list of texts; write tags=[...]")
    if isinstance(sample, bool) or not isinstance(sample, (int, float)) or not 0 <= sample <= 1:
        raise ConfigError(f"sample={sample!r} is no share of turns; give a number from 0 to 1")


def install_taps() -> None:
    """Let each turn be seen and sent where it goes, once in a process; what is not recorded is only passed on."""
    with _LOCK:
        _install()


def _install() -> None:
    """Wrap the framework's methods, once in a process; a method that is not there is said and left out."""
    if not _TAPPED:
        atexit.register(_stop_all)
    for (module, owner), name, tap, style in TAPS:
        if (owner, name) in _TAPPED:
            continue
        _TAPPED.add((owner, name))
        try:
            found = getattr(importlib.import_module(module), owner)
            setattr(found, name, tap(vars(found)[name], style))
        except (ImportError, AttributeError, KeyError) as error:
            _LOG.warning("%s.%s cannot be recorded: this praisonaiagents has no such method (%r)", owner, name, error)


def _stop_all() -> None:
    for recording in open_recordings():
        recording.stop()
