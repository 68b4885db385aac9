"""Make a praisonaiagents agent better at its own job: train the model beneath it, prove it, and swap it in.

Importing this package adds ``improve`` to every ``Agent``, those that exist already and subclasses included. It loads
nothing heavy: the training stack is imported by what needs it.
"""

from typing import TYPE_CHECKING, Any

from praisonaiagents import Agent

if TYPE_CHECKING:
    from praison_agent_rl.improvement import Improvement

__version__ = "0.1.0"
__all__ = ["__version__", "improve"]


def improve(agent: Any, **options: Any) -> "Improvement":
    """Train the model beneath ``agent`` and swap it in if it is better; see ``praison_agent_rl.improvement.improve``.

    The usual call is ``improve(agent, data="questions.jsonl", reward_funcs=["myproject.rewards:length_penalty"])``.
    """
    from praison_agent_rl.improvement import improve as tell_the_story

    return tell_the_story(agent, **options)


if not hasattr(Agent, "improve"):  # a later framework may bring one of its own; ours is still there as a function
    Agent.improve = improve
