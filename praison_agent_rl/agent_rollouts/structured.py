"""Structured output, which an agent is asked for call by call: whether its recorded runs were, and its copies will be.

The framework writes the schema into what it sends, or gives it beside (``response_format``) where it takes the model to
hold to one. A copy is asked by ``chat(prompt)`` and nothing else, so what asks for a schema has to be in its class.
"""

from collections.abc import Sequence
from typing import Any

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.records import Call, Run
from praison_agent_rl.run_views import text_in

WANTED = "\nReturn ONLY a valid JSON object. No other text or explanation."
"""What the framework puts behind a prompt (praisonaiagents/llm/openai_client.py and llm/llm.py).

Behind its first part of text, where it has parts.
"""


def check_structured(agent: Any, runs: Sequence[Run], *, allowed: bool = False) -> None:
    """See that copies of ``agent`` are asked as the agent was in ``runs``.

    Raises:
        ConfigError: they would be asked for no schema though it was, and that is not ``allowed``.
    """
    own = [run for run in runs if run.agent == agent.name and run.calls]
    wanted = sum(_wants_schema(run.calls[0], agent) for run in own)
    if wanted and not allowed and _asks_plainly(agent):
        raise ConfigError(
            f"{wanted} of {len(own)} recorded runs of agent {agent.name!r} were asked for structured output "
            "(output_json, output_pydantic), and its rollouts would not be: they call chat(prompt) alone. Give the "
            "agent a class whose chat() asks for it (docs/agents.md, 'Structured output'), or train all the same with "
            "parity: allow"
        )


def without_wanted(content: Any) -> str:
    """The text of a prompt as somebody wrote it."""
    return "".join(text.removesuffix(WANTED) for text in _parts(content))


def _parts(content: Any) -> list[str]:
    return [text_in([part]) for part in content] if isinstance(content, list | tuple) else [text_in(content)]


def _asks_plainly(agent: Any) -> bool:
    from praisonaiagents import Agent

    return type(agent).chat is Agent.chat


def _wants_schema(call: Call, agent: Any) -> bool:
    users = [message for message in call.messages if message.get("role") == "user"]
    if users and any(text.endswith(WANTED) for text in _parts(users[-1].get("content"))):
        return True
    always = agent._llm_init_params or getattr(agent._llm_instance, "__dict__", {})  # noqa: SLF001 - as `swap` reads it
    return is_schema(call.settings.get("response_format")) and not always.get("response_format")


def is_schema(form: Any) -> bool:
    """Whether a ``response_format`` asks for more than text, which logs from elsewhere may say or leave null."""
    return bool(form) and form != {"type": "text"}
