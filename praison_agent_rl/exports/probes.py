"""Conversations by which two chat templates are compared."""

from typing import Any

Conversation = dict[str, Any]
"""``name`` and ``messages``, and ``tools`` and ``enable_thinking`` where they are given."""

SYSTEM = "Answer briefly."
_ASKED = {"role": "user", "content": 'What is 2 < 3 & 4?\n\nSay "yes" or "no", and über <b>why</b>.'}
_SAID = {"role": "assistant", "content": "Yes: 2 is less."}
_AGAIN = {"role": "user", "content": "And 5?"}
_SYSTEM = {"role": "system", "content": SYSTEM}
_NO_SYSTEM = {"role": "system", "content": ""}
"""By which a person takes away the one that a template makes up."""


def _tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": f"The {parameter}."} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _calls(content: str, *names: str, **more: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": {"city": "Köln"}}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def _result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": content}


_TOOLS = [_tool("weather", 'Weather of a "city" & more', "city"), _tool("time", "Time <there>", "city", "zone")]

PROBES: dict[str, list[Conversation]] = {
    "plain": [
        {"name": "question", "messages": [_ASKED]},
        {"name": "system", "messages": [_SYSTEM, _ASKED]},
        {"name": "empty system", "messages": [_NO_SYSTEM, _ASKED]},
        {"name": "second question", "messages": [_ASKED, _SAID, _AGAIN]},
        {"name": "second question with system", "messages": [_SYSTEM, _ASKED, _SAID, _AGAIN]},
    ],
    "tools": [
        {"name": "tools", "messages": [_ASKED], "tools": _TOOLS},
        {"name": "tools with system", "messages": [_SYSTEM, _ASKED], "tools": _TOOLS},
        {"name": "tools with empty system", "messages": [_NO_SYSTEM, _ASKED], "tools": _TOOLS},
        {"name": "result", "messages": [_ASKED, _calls("", "weather"), _result("weather", "rain")], "tools": _TOOLS},
        {
            "name": "two results, and on",
            "messages": [
                *(_SYSTEM, _ASKED, _calls("I look.", "weather", "time")),
                *(_result("weather", "rain\nand wind"), _result("time", "12:00"), _SAID, _AGAIN),
            ],
            "tools": _TOOLS,
        },
    ],
    "thinking": [
        {"name": "no thinking", "messages": [_ASKED], "enable_thinking": False},
        {
            "name": "thought before a call",
            "messages": [_ASKED, _calls("", "weather", reasoning_content="Hm."), _result("weather", "rain")],
            "tools": _TOOLS,
        },
    ],
}
"""By what a template may render or not: each kind counts only if all of it is rendered alike."""
