"""Spans of OpenTelemetry as parts of a trace, under OpenInference's names and those of GenAI, the old and the new."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from praison_agent_rl.foreign_logs.chats import (
    ForeignCall,
    Message,
    Unusable,
    messages_of,
    new_id,
    parsed,
    tools_of,
    unix_seconds,
)
from praison_agent_rl.foreign_logs.traces import Span, given_of

_DOTTED = ("message.", "message_content.", "tool_call.", "tool.", "image.")
"""How dotted names begin that stand within a list."""


def from_otel(record: Any) -> Span:
    """A span: of OTLP, of the Python SDK's ``to_json``, or of a Phoenix export."""
    if not isinstance(record, dict):
        raise Unusable("is no object")
    facts = nested(_attributes(record))
    context = record.get("context")
    given = {key.removeprefix("context."): value for key, value in record.items()}
    given |= context if isinstance(context, dict) else {}
    began = unix_seconds(given_of(given, "startTimeUnixNano", "start_time", "startTime"))
    ended = unix_seconds(given_of(given, "endTimeUnixNano", "end_time", "endTime"))
    kind = _at(facts, "openinference", "span", "kind") or _at(facts, "gen_ai", "operation", "name")
    agent = _at(facts, "gen_ai", "agent", "name") or _at(facts, "agent", "name")
    if kind in ("AGENT", "invoke_agent"):
        agent = agent or given.get("name")
    session = _at(facts, "session", "id") or _at(facts, "gen_ai", "conversation", "id")
    call = _otel_call(facts, began=began, seconds=max(0.0, ended - began), error=_status(given))
    if call is None and kind in ("LLM", "chat", "text_completion", "generate_content"):
        raise Unusable("is a model call whose messages were not recorded")
    trace = given_of(given, "traceId", "trace_id")
    return Span(
        id=str(given_of(given, "spanId", "span_id") or new_id()),
        parent=str(given_of(given, "parentSpanId", "parent_id", "parentId", "parent_span_id") or "") or None,
        trace=str(trace) if trace else None,
        session=str(session) if session else None,
        agent=str(agent) if agent else None,
        call=call,
    )


def spans_in(document: Any) -> Iterator[Any]:
    """The spans in an OTLP document, or the document itself."""
    if not (isinstance(document, dict) and isinstance(document.get("resourceSpans"), list)):
        yield document
        return
    for resource in _dicts(document["resourceSpans"]):
        for scope in _dicts(resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans")):
            yield from _dicts(scope.get("spans"))


def nested(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with dotted names as dicts in dicts.

    >>> nested({"llm.input_messages.0.message.role": "user"})
    {'llm': {'input_messages': {'0': {'message': {'role': 'user'}}}}}
    """
    tree: dict[str, Any] = {}
    for name, value in attributes.items():
        *path, last = name.split(".")
        node: Any = tree
        for part in path:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = _inner(value)
    return tree


def _inner(value: Any) -> Any:
    """Phoenix exports dotted names within lists too; others are a user's own, such as arguments of tools."""
    if isinstance(value, list):
        return [_inner(item) for item in value]
    if isinstance(value, dict):
        return nested(value) if any(key.startswith(_DOTTED) for key in value) else _inner_of(value)
    return value


def _inner_of(value: dict[str, Any]) -> dict[str, Any]:
    return {key: _inner(item) for key, item in value.items()}


def _attributes(record: dict[str, Any]) -> dict[str, Any]:
    given = record.get("attributes")
    if isinstance(given, list):  # OTLP
        pairs = [item for item in given if isinstance(item, dict) and "key" in item]
        return {item["key"]: _any_value(item.get("value")) for item in pairs}
    if isinstance(given, dict):
        return given
    flat = {key.removeprefix("attributes."): value for key, value in record.items() if key.startswith("attributes.")}
    if not flat:
        raise Unusable("has no attributes")
    return flat


def _any_value(value: Any) -> Any:
    """The value in OTLP's ``AnyValue``."""
    if not isinstance(value, dict) or not value:
        return None
    kind, inner = next(iter(value.items()))
    if kind == "intValue":
        return int(inner)
    if kind == "arrayValue":
        return [_any_value(item) for item in inner.get("values") or []]
    if kind == "kvlistValue":
        return {item["key"]: _any_value(item.get("value")) for item in inner.get("values") or []}
    return inner


def _otel_call(facts: dict[str, Any], *, began: float, seconds: float, error: str | None) -> ForeignCall | None:
    """The request that a span tells of, in whichever of the three ways."""
    told = _openinference(facts) or _gen_ai(facts) or _gen_ai_numbered(facts)
    if told is None:
        return None
    messages, reply, tools = told
    given = (parsed(_at(facts, "llm", "invocation_parameters")), _at(facts, "gen_ai", "request"))
    settings = next((told for told in given if isinstance(told, dict) and told), {})
    model = _at(facts, "gen_ai", "response", "model") or _at(facts, "gen_ai", "request", "model")
    reasons = parsed(_at(facts, "gen_ai", "response", "finish_reasons"))
    usage = _at(facts, "llm", "token_count") or _at(facts, "gen_ai", "usage")
    return ForeignCall(
        messages_of(messages),
        reply,
        tools=tools,
        settings={key: value for key, value in settings.items() if key not in ("model", "tools", "messages")},
        model=model or _at(facts, "llm", "model_name"),
        time=began,
        seconds=seconds,
        finish=str(reasons[0]) if isinstance(reasons, list) and reasons else None,
        usage=usage if isinstance(usage, dict) else None,
        error=error,
    )


Told = tuple[list[Message], Message | None, list[dict[str, Any]]]


def _openinference(facts: dict[str, Any]) -> Told | None:
    """``llm.input_messages.N.message.*``, with the tools' schemas as JSON text."""
    sent = [_openinference_message(item) for item in _listed(_at(facts, "llm", "input_messages"))]
    if not sent:
        return None
    said = [_openinference_message(item) for item in _listed(_at(facts, "llm", "output_messages"))]
    schemas = [parsed(_at(item, "tool", "json_schema")) for item in _listed(_at(facts, "llm", "tools"))]
    return sent, _reply(said), tools_of({"tools": schemas})


def _openinference_message(item: Any) -> Message:
    said = item.get("message", item) if isinstance(item, dict) else {}
    message = {key: said[key] for key in ("role", "content", "name", "tool_call_id") if key in said}
    parts = [_openinference_part(part) for part in _listed(said.get("contents"))]
    if parts and "content" not in message:
        message["content"] = parts
    calls = [call.get("tool_call", call) for call in _listed(said.get("tool_calls")) if isinstance(call, dict)]
    if calls:
        message.setdefault("content", None)
        message["tool_calls"] = [_tool_call(_at(call, "function") or {}, call.get("id")) for call in calls]
    return message


def _openinference_part(part: Any) -> dict[str, Any]:
    part = part.get("message_content", part) if isinstance(part, dict) else {}
    if part.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": _at(part, "image", "image", "url") or ""}}
    return {"type": "text", "text": str(part.get("text") or "")}


def _gen_ai(facts: dict[str, Any]) -> Told | None:
    """``gen_ai.input.messages`` of the semantic conventions from 1.37 on: messages that are made of parts."""
    sent = parsed(_at(facts, "gen_ai", "input", "messages"))
    if not isinstance(sent, list) or not sent:
        return None
    system = _text_of(parsed(_at(facts, "gen_ai", "system_instructions")))
    messages = [{"role": "system", "content": system}] if system else []
    messages += [message for item in sent for message in _gen_ai_messages(item)]
    said = parsed(_at(facts, "gen_ai", "output", "messages"))
    replies = [message for item in said or [] for message in _gen_ai_messages(item)] if isinstance(said, list) else []
    return messages, _reply(replies), tools_of({"tools": _at(facts, "gen_ai", "tool", "definitions")})


def _gen_ai_messages(item: Any) -> list[Message]:
    """One message, or one for each tool result, which OpenAI sends apart."""
    if not isinstance(item, dict):
        raise Unusable("has a message without a known role")
    parts = [part for part in item.get("parts") or [] if isinstance(part, dict)]
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    if results:
        answers = [given_of(part, "response", "result") for part in results]
        texts = [answer if isinstance(answer, str) else json.dumps(answer) for answer in answers]
        return [
            {"role": "tool", "tool_call_id": part.get("id"), "content": text}
            for part, text in zip(results, texts, strict=True)
        ]
    message: Message = {"role": item.get("role"), "content": item.get("content", _text_of(parts))}
    calls = [_tool_call(part, part.get("id")) for part in parts if part.get("type") == "tool_call"]
    thoughts = "".join(str(part.get("content") or "") for part in parts if part.get("type") == "reasoning")
    return [message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thoughts} if thoughts else {})]


def _gen_ai_numbered(facts: dict[str, Any]) -> Told | None:
    """``gen_ai.prompt.N.*`` and ``gen_ai.completion.N.*``, as OpenLLMetry has them."""
    sent = [_numbered_message(item) for item in _listed(_at(facts, "gen_ai", "prompt"))]
    if not sent:
        return None
    said = [_numbered_message(item) for item in _listed(_at(facts, "gen_ai", "completion"))]
    functions = _listed(_at(facts, "llm", "request", "functions"))
    tools = [{key: parsed(value) for key, value in item.items()} for item in functions if isinstance(item, dict)]
    return sent, _reply(said), tools_of({"tools": tools})


def _numbered_message(item: Any) -> Message:
    said = item if isinstance(item, dict) else {}
    message = {key: said[key] for key in ("role", "content", "tool_call_id") if key in said}
    calls = [call for call in _listed(said.get("tool_calls")) if isinstance(call, dict)]
    if calls:
        message.setdefault("content", None)
        message["tool_calls"] = [_tool_call(call, call.get("id")) for call in calls]
    return message


def _tool_call(function: dict[str, Any], id: Any) -> dict[str, Any]:
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    named = {"id": str(id)} if id is not None else {}
    return {**named, "type": "function", "function": {"name": function.get("name"), "arguments": text}}


def _reply(said: list[Message]) -> Message | None:
    return {**said[0], "role": "assistant"} if said else None


def _text_of(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    texts = [part for part in parts or [] if isinstance(part, dict) and part.get("type") == "text"]
    return "\n".join(str(part.get("content") or "") for part in texts)


def _status(span: dict[str, Any]) -> str | None:
    status = span.get("status")
    if not isinstance(status, dict):
        status = {"code": span.get("status_code"), "message": span.get("status_message")}
    code = given_of(status, "code", "status_code")
    if code in (2, "ERROR", "STATUS_CODE_ERROR"):
        return str(given_of(status, "message", "description") or "error")
    return None


def _listed(value: Any) -> list[Any]:
    """A list, also where its places are names: ``{"0": ..., "1": ...}``."""
    if isinstance(value, dict) and value and all(key.isdigit() for key in value):
        return [value[key] for key in sorted(value, key=int)]
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _at(tree: Any, *path: str) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
