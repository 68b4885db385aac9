"""What an agent is to be asked, out of rows whose prompts may be the messages that it once sent."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from praison_agent_rl.agent_rollouts.structured import without_wanted

Row = dict[str, Any]

HISTORY = "history"
"""Column with the messages of the conversation so far, where there are any."""


class Asked(NamedTuple):
    """Rows that an agent can be asked."""

    rows: list[Row]
    left_out: int
    """Rows that end within a turn, on a tool's result or an answer, which nobody can ask."""


def rows_to_ask(rows: Sequence[Row]) -> Asked:
    """The rows with text as their prompt and with what was said before it as their history.

    System messages are left out, since the agent sends its own, and so is what the framework puts behind a prompt that
    asks for structured output. It sends a user's turn twice on one of its two ways (``facts/praisonaiagents.md``), so
    two equal ones at the end are one.
    """
    asked = [_asked(row) for row in rows]
    found = [row for row in asked if row is not None]
    return Asked(found, len(asked) - len(found))


def _asked(row: Row) -> Row | None:
    if isinstance(row["prompt"], str):
        return row
    said = [message for message in row["prompt"] if message.get("role") not in ("system", "developer")]
    if not said or said[-1].get("role") != "user":
        return None
    text = without_wanted(said.pop().get("content"))
    while said and said[-1].get("role") == "user" and without_wanted(said[-1].get("content")) == text:
        said.pop()
    return {**row, "prompt": text, **({HISTORY: said} if said else {})}
