"""Conversations from other tools' files as turns with their calls: OpenAI chat, ShareGPT, praisonaiagents sessions.

Each parser takes one record of a file and gives what it found there, or raises `Unusable` with the reason.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_SHAREGPT_ROLES = {
    **{"human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool"},
    **{"function_response": "tool", "gpt": "assistant", "assistant": "assistant", "model": "assistant"},
    **{"chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "function_call": "assistant"},
}


class Unusable(ValueError):
    """A record of a file from which nothing can be taken; its text is the reason, to be counted."""


@dataclass(frozen=True)
class ForeignCall:
    """A model request that another tool wrote down."""

    messages: list[Message]
    reply: Message | None
    tools: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    time: float = 0.0
    """Unix seconds; 0 where it is not known."""
    seconds: float = 0.0
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class ForeignRun:
    """One turn of a conversation."""

    calls: list[ForeignCall]
    session: str | None = None
    """As the log names it."""
    agent: str | None = None
    error: str | None = None
    conversation: str | None = None
    """What the turns of a conversation have in common where the log names no session."""


def from_openai(record: Any) -> list[ForeignRun]:
    """A line of a fine-tuning file (a whole conversation), or a request with its response."""
    if not isinstance(record, dict):
        raise Unusable("is no object")
    request = _first(record, "request", "body", "kwargs", kind=dict) or record
    request = _first(request, "body", kind=dict) or request
    response = _first(record, "response", "completion", "output", kind=dict)
    answer = (_first(response, "body", kind=dict) or response) if response is not None else {}
    error = _error_in(record.get("error")) or _error_in(answer.get("error"))
    if response is not None or (error and (request is not record or "response" in record)):
        return [ForeignRun([_answered(request, answer, error)], error=error)]
    session = record.get("conversation_id") or record.get("session_id")
    *earlier, last = turns_of(messages_of(request.get("messages")), tools=tools_of(record), session=session)
    return [*earlier, replace(last, error=error)]


def from_sharegpt(record: Any) -> list[ForeignRun]:
    """A conversation with ``from`` and ``value``."""
    said = record.get("conversations") or record.get("conversation") if isinstance(record, dict) else None
    if not isinstance(said, list) or not said:
        raise Unusable("has no conversation")
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    messages = [*system, *(_from_value(turn) for turn in said)]
    return turns_of(messages_of(messages), tools=tools_of(record), session=record.get("id"))


def from_session(record: Any) -> list[ForeignRun]:
    """A session of praisonaiagents (``~/.praisonai/sessions/*.json``), which holds no system prompts and no tools."""
    said = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(said, list):
        raise Unusable("is no session")
    runs: list[ForeignRun] = []
    for part in (record.get("archived_messages") or [], said):  # an archive is what a summary stands for in the other
        times = [message.get("timestamp") for message in part if isinstance(message, dict)]
        messages = messages_of([_chat_message(message) for message in part]) if part else []
        session, agent = record.get("session_id"), record.get("agent_name")
        runs += turns_of(messages, session=session, agent=agent, times=times) if messages else []
    if not runs:
        raise Unusable("has no message of a user")
    return runs


def turns_of(
    messages: list[Message],
    *,
    session: Any,
    agent: str | None = None,
    tools: Sequence[dict[str, Any]] = (),
    times: Sequence[Any] = (),
) -> list[ForeignRun]:
    """A conversation cut into turns: each begins with a user, and each answer of the model in it was one request.

    Raises:
        Unusable: nobody asks anything.
    """
    runs = []
    conversation = None if session else digest_of(messages)
    for start, end in _spans(messages):
        answers = [at for at in range(start, end) if messages[at]["role"] == "assistant"]
        # a question at the end was not answered, and is a prompt nevertheless
        began = unix_seconds(times[start]) if start < len(times) else 0.0
        asked = answers or [end]
        calls = [
            ForeignCall(messages[:at], messages[at] if answers else None, tools=list(tools), time=began) for at in asked
        ]
        named = str(session) if session else None
        runs.append(ForeignRun(calls, session=named, agent=agent, conversation=conversation))
    if not runs:
        raise Unusable("has no message of a user")
    return runs


def messages_of(value: Any) -> list[Message]:
    """Messages in OpenAI chat form, or Unusable; only what training files add to them is taken off."""
    if not isinstance(value, list) or not value:
        raise Unusable("has no messages")
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise Unusable("has a message without a known role")
    return [{key: item for key, item in message.items() if key != "weight"} for message in value]


def tools_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The tool schemas of a request, in the form of today."""
    tools = parsed(record.get("tools") or record.get("functions") or [])
    found = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return [tool if "function" in tool or "type" in tool else {"type": "function", "function": tool} for tool in found]


def reply_of(response: Any) -> Message | None:
    """The message in a reply: a chat completion, a message, or its text."""
    response = parsed(response)
    if isinstance(response, list):
        response = response[-1] if response else None
    if isinstance(response, str):
        return {"role": "assistant", "content": response}
    if not isinstance(response, dict):
        return None
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        response = choices[0].get("message") or {"content": choices[0].get("text")}
    if not isinstance(response, dict) or not {"content", "tool_calls", "function_call"} & response.keys():
        return None
    return {"role": "assistant", **response}


def parsed(value: Any) -> Any:
    """What JSON text stands for; other texts and values as they are."""
    if isinstance(value, str) and value[:1] in ("{", "[", '"'):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def unix_seconds(value: Any) -> float:
    """A time in seconds, milliseconds or nanoseconds since 1970, or as ISO text; 0.0 where it is none of these."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
            return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
        except ValueError:
            value = float(value) if value.isdecimal() else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return 0.0
    return value / (1e9 if value > 1e16 else 1e3 if value > 1e11 else 1)


def new_id() -> str:
    """A name for what has none."""
    return os.urandom(8).hex()


def digest_of(value: Any) -> str:
    """A name for what has none, the same for the same value of JSON whenever it is read."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _answered(request: dict[str, Any], response: dict[str, Any], error: str | None) -> ForeignCall:
    reply = reply_of(response)
    if reply is None and error is None:
        raise Unusable("has a response without a message")
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    apart = ("messages", "tools", "functions", "model", "stream", "response", "request", "error")
    return ForeignCall(
        messages_of(request.get("messages")),
        reply,
        tools=tools_of(request),
        settings={key: value for key, value in request.items() if key not in apart},
        model=response.get("model") or request.get("model"),
        time=unix_seconds(response.get("created")),
        finish=choice.get("finish_reason") if isinstance(choice, dict) else None,
        usage=response.get("usage"),
        error=error,
    )


def _error_in(value: Any) -> str | None:
    """An error that a log tells, as text: ``{"message": ...}`` as APIs have it, or text."""
    told = value.get("message") or value if isinstance(value, dict) else value
    return None if not told else told if isinstance(told, str) else json.dumps(told)


def _spans(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """Where each turn begins and ends; users who write twice before an answer are in one turn."""
    starts = [
        at
        for at, message in enumerate(messages)
        if message["role"] == "user" and not (at and messages[at - 1]["role"] == "user")
    ]
    return zip(starts, [*starts, len(messages)][1:], strict=True)


def _from_value(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise Unusable("has a message without a known role")
    if "role" in turn:
        return _chat_message(turn)
    role, value = _SHAREGPT_ROLES.get(str(turn.get("from"))), turn.get("value")
    call = parsed(value)
    if turn.get("from") == "function_call" and isinstance(call, dict):
        return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
    return {"role": role, "content": value}


def _chat_message(message: Any) -> Message:
    """What of a message goes to a model."""
    if not isinstance(message, dict):
        raise Unusable("has a message without a known role")
    known = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content")
    return {key: message[key] for key in known if key in message}


def _first(record: dict[str, Any], *names: str, kind: type) -> Any:
    return next((record[name] for name in names if isinstance(record.get(name), kind)), None)


PARSERS: dict[str, Callable[[Any], list[ForeignRun]]] = {
    "openai": from_openai,
    "sharegpt": from_sharegpt,
    "praisonai-session": from_session,
}
