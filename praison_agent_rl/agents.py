"""Find the agent that a text names; nothing is asked of it."""

import importlib
from typing import Any

from praison_agent_rl.errors import AgentError
from praison_agent_rl.rewards import importing_from


def find_agent(spec: str) -> Any:
    """The agent that ``module:name`` names, from the current folder too.

    Raises:
        AgentError: there is none, and why.
    """
    from praisonaiagents import Agent

    module, _, name = spec.partition(":")
    if not module or not name:
        raise AgentError(f"{spec!r} is not a 'module:agent' path. Example: myproject.agents:helper")
    with importing_from(None):
        try:
            loaded = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise AgentError(f"cannot import {module!r} for {spec!r}: {type(error).__name__}: {error}") from error
    found = getattr(loaded, name, None)
    if not isinstance(found, Agent):
        agents = sorted(key for key, value in vars(loaded).items() if isinstance(value, Agent))
        what = f"is a {type(found).__name__}, not an Agent" if found is not None else "is not there"
        raise AgentError(f"{spec!r} {what}. Agents in {module!r}: {', '.join(agents) or 'none'}")
    return found
