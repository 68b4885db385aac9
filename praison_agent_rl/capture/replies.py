"""Requests and replies of model providers in one plain form, whichever client they pass through; nothing is written.

Plain means dicts, lists and values that cannot change later, in the form of OpenAI's chat interface. Requests and
replies of its Responses interface are turned into that form.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from praison_agent_rl.transcripts.plain_values import Kept, equal_prefix, plain

# Where a request goes and how it gets there: true of the client, not of what the model is asked.
_NOT_SENT = {
    *("base_url", "api_base", "api_version", "timeout", "request_timeout", "max_retries", "num_retries", "client"),
    *("http_client", "custom_llm_provider", "drop_params", "extra_query", "organization", "project", "fallbacks"),
    *("model_list", "caching", "cache", "litellm_params", "model_info", "aws_region_name", "vertex_project"),
}
_SECRET = re.compile(r"(api_?key|access_key|secret|password|passwd|credential|authorization|headers?|token|auth)", re.I)
_NO_SECRET = re.compile(r"tokens|token_ids|logprob", re.I)
_APART = {"messages", "input", "instructions", "tools", "model", "extra_body"}
_TAKEN_APART = {"messages", "input", "tools"}
_DERIVED = {"parsed", "parsed_arguments", "provider_specific_fields", "index"}
"""What a client adds to a reply: said elsewhere in it, or in no message at all."""
_UNSENT_TYPES = {"NotGiven", "Omit"}
_ATOMS = {str, int, float, bool, type(None), bytes}


class Request(NamedTuple):
    """The part of a recorded call that is known before the reply."""

    api: str
    model: str | None
    messages: list[Any]
    tools: list[Any]
    settings: dict[str, Any]
    sent: list[Any]
    """The messages, or the input of the Responses interface, with which later requests are compared."""
    tools_sent: list[Any]
    """The same of the tools."""


class Taken(NamedTuple):
    """A request as it was when it was sent: of all that may change since there is a copy, and no more was done yet."""

    api: str
    sent: list[Any]
    fresh: list[int]
    """Places in ``sent`` of what no earlier request had; the rest is in its plain form."""
    tools: list[Any]
    params: dict[str, Any]
    """What else is sent, and keys."""
    before: Request | None
    """The one that it goes on from."""
    last: Request | None
    """The one that the agent sent before it."""


class Reply(NamedTuple):
    """The part of a recorded call that the model gave."""

    message: dict[str, Any] | None = None
    finish: str | None = None
    usage: dict[str, Any] | None = None
    logprobs: Any = None


def snapshot(value: Any) -> Any:
    """A plain copy, so that nobody can change it later; what is neither plain nor a record is kept as it is."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: item if type(item) is str else snapshot(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [snapshot(item) for item in value]
    if isinstance(value, BaseModel):
        return {key: snapshot(item) for key, item in _given_fields(value).items() if key not in _DERIVED}
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset, bytearray)):
        return kind(value)
    return value


def take(params: Mapping[str, Any], latest: Sequence[Request] = ()) -> Taken | None:
    """What is about to be sent, or None if it is no request for a chat reply.

    ``latest`` are earlier requests of the same agent: what is as it was in one of them is not copied again.
    """
    api = "chat" if "messages" in params else "responses" if "input" in params else None
    if api is None:
        return None
    given = params["messages" if api == "chat" else "input"]
    sent = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    last = latest[-1] if latest else None
    before, same = _before(sent, latest)
    fresh = _copy_fresh(sent, before.sent if before is not None else [], same)
    tools = params.get("tools")
    tools = list(tools) if tools is not None and _is_sent(tools) else []
    if last is not None and len(tools) == len(last.tools_sent) == equal_prefix(tools, last.tools_sent):
        tools = last.tools_sent
    else:
        tools = snapshot(tools)
    rest = {
        key: value if type(value) in _ATOMS else snapshot(value)
        for key, value in params.items()
        if key not in _TAKEN_APART and key not in _NOT_SENT
    }
    return Taken(api, sent, fresh, tools, rest, before, last)


def _before(sent: list[Any], latest: Sequence[Request]) -> tuple[Request | None, int]:
    """The request that ``sent`` seems to go on from (its last message is where it was), and how much they share."""
    for earlier in reversed(latest):
        length = len(earlier.sent)
        if 0 < length <= len(sent) and equal_prefix(sent[length - 1 : length], earlier.sent[-1:]):
            return earlier, equal_prefix(sent, earlier.sent)
    return (latest[-1], equal_prefix(sent, latest[-1].sent)) if latest else (None, 0)


def _copy_fresh(sent: list[Any], known: list[Any], same: int) -> list[int]:
    """Put copies in the place of what may change yet: of ``known``, as the first ``same`` are equal, or new ones."""
    sent[:same] = known[:same]
    fresh = []
    for place in range(same, len(sent)):
        if place < len(known) and equal_prefix(sent[place : place + 1], known[place : place + 1]):
            sent[place] = known[place]
        else:
            sent[place] = snapshot(sent[place])
            fresh.append(place)
    return fresh


def request_of(taken: Taken) -> Request:
    """The whole of a request in its plain form. Keys and headers are left out."""
    sent, before, last = Kept(taken.sent), taken.before, taken.last
    for place in taken.fresh:
        sent[place] = plain(sent[place])
    messages = sent
    if taken.api == "responses":
        messages = Kept(chat_messages(sent, taken.params.get("instructions")))
        same = equal_prefix(messages, before.messages) if before is not None else 0
        messages[:same] = before.messages[:same] if before is not None else ()
    if last is not None and taken.tools is last.tools_sent:
        tools, tools_sent = last.tools, last.tools_sent
    else:
        tools = tools_sent = Kept(plain(taken.tools))
        if taken.api == "responses":
            tools = Kept(map(_chat_tool, tools))
    return Request(
        taken.api, taken.params.get("model"), messages, tools, _settings(taken.params), sent=sent, tools_sent=tools_sent
    )


def reply_of(answer: Any) -> Reply:
    """The first choice of a whole answer, or the output of a Responses answer.

    Of a streamed Responses answer the framework makes a tuple: text, tool calls, and the response that ended it.
    """
    if isinstance(answer, tuple):
        text, calls, last = answer
        if last is not None:
            return reply_of(last)
        message = {"role": "assistant", "content": text, **({"tool_calls": snapshot(calls)} if calls else {})}
        return Reply(message)
    found = fields(answer)
    if "choices" not in found:
        return _responses_reply(found)
    choice = fields(found["choices"][0])
    message = {"role": "assistant", "content": None}
    for key, value in fields(choice["message"]).items():
        if value is not None and key not in _DERIVED and value != []:
            message[key] = value if type(value) is str else snapshot(value)
    if "reasoning" in message:
        message = _one_name_for_reasoning(message)
    logprobs = choice.get("logprobs")
    usage = _usage(found.get("usage"))
    return Reply(message, choice.get("finish_reason"), usage, logprobs and snapshot(logprobs))


def reply_in(error: BaseException) -> Reply:
    """The reply in `answer_in`."""
    answer = answer_in(error)
    return Reply() if answer is None else reply_of(answer)


def answer_in(error: BaseException) -> BaseModel | None:
    """The answer that OpenAI's client had got when it could not turn it into the object that was asked for.

    Its `LengthFinishReasonError` carries the answer; a ValidationError only leaves it in the frames that it passed.
    """
    found, trace = getattr(error, "completion", None), error.__traceback__
    while found is None and trace is not None:
        found, trace = trace.tb_frame.f_locals.get("chat_completion"), trace.tb_next
    return found if isinstance(found, BaseModel) and "choices" in fields(found) else None


class Fold:
    """Puts the chunks of one stream together again."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[Any, dict[str, Any]] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._whole: Any = None
        self.finish: str | None = None
        self.usage: dict[str, Any] | None = None

    def add(self, chunk: Any) -> None:
        """Take the next chunk of a chat stream, or the next event of a Responses stream."""
        found = fields(chunk)
        if "choices" not in found:
            self._add_event(found)
            return
        if found.get("usage") is not None:
            self.usage = _usage(found["usage"])
        for choice in map(fields, found["choices"] or ()):
            if choice.get("index") in (0, None):  # further choices of one request are not kept
                self._add_choice(choice)

    def reply(self) -> Reply:
        """What has come so far."""
        if self._whole is not None:
            return _responses_reply(fields(self._whole))
        message = {**self._message, **{key: "".join(parts) for key, parts in tuple(self._texts.items())}}
        if self._calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(call["function"]["arguments"])}}
                for call in tuple(self._calls.values())
            ]
        return Reply(_one_name_for_reasoning(message), self.finish, self.usage, self._logprobs or None)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        self.finish = choice.get("finish_reason") or self.finish
        # some providers end a stream with the whole message
        delta = fields(choice.get("delta") if choice.get("delta") is not None else choice.get("message"))
        for key, value in delta.items():
            if value is None or key == "role" or key in _DERIVED:
                continue
            if key == "tool_calls":
                for part in map(fields, value):
                    self._add_tool_call(part)
            elif isinstance(value, str):
                self._texts.setdefault(key, []).append(value)
            elif isinstance(value, list):
                self._message.setdefault(key, []).extend(snapshot(value))
            else:
                self._message[key] = snapshot(value)
        for key, value in fields(choice.get("logprobs")).items():
            if isinstance(value, list):
                self._logprobs.setdefault(key, []).extend(snapshot(value))

    def _add_tool_call(self, part: dict[str, Any]) -> None:
        place = part.get("index")
        if place is None:  # without an index, an id begins a call and the rest goes on with the last one
            place = part["id"] if part.get("id") else next(reversed(self._calls), 0)
        empty = {"id": None, "type": "function", "function": {"name": "", "arguments": []}}
        call = self._calls.setdefault(place, empty)
        function = fields(part.get("function"))
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"].append(function.get("arguments") or "")

    def _add_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "response.output_text.delta":
            self._texts.setdefault("content", []).append(event.get("delta") or "")
        elif kind in ("response.completed", "response.incomplete"):
            self._whole = event.get("response")
            self.finish = "stop"


def fields(record: Any) -> dict[str, Any]:
    """The fields of a record of either client (pydantic, plain class or dict) with those it did not declare."""
    if record is None:
        return {}
    if BaseModel in type(record).__mro__:  # in a tenth of the time that its isinstance() takes
        declared, more = record.__dict__, record.__pydantic_extra__
        return {**declared, **more} if more else declared
    return dict(record) if isinstance(record, Mapping) else vars(record)


def chat_messages(items: Any, instructions: Any = None) -> list[dict[str, Any]]:
    """The input of a Responses request as chat messages."""
    messages: list[dict[str, Any]] = []
    if isinstance(instructions, str):
        messages.append({"role": "system", "content": instructions})
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "function_call":
            last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
            if last is None:
                messages.append(last := {"role": "assistant", "content": None})
            last.setdefault("tool_calls", []).append(_tool_call(item))
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _chat_content(item.get("content"))})
        else:
            messages.append({"role": "assistant", **item})
    return messages


def _responses_reply(found: dict[str, Any]) -> Reply:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for item in map(fields, found["output"]):
        if item.get("type") == "message":
            texts += [part["text"] for part in map(fields, item.get("content") or ()) if part.get("text")]
        elif item.get("type") == "reasoning":
            parts = [*map(fields, item.get("summary") or ()), *map(fields, item.get("content") or ())]
            thoughts += [part["text"] for part in parts if part.get("text")]
        elif item.get("type") == "function_call":
            calls.append(_tool_call(item))
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    cut = fields(found.get("incomplete_details")).get("reason")
    return Reply(message, cut or ("tool_calls" if calls else "stop"), _usage(found.get("usage")))


def _one_name_for_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Some servers (vLLM, OpenRouter) say ``reasoning``, the others ``reasoning_content``."""
    thoughts = message.pop("reasoning", None)
    if thoughts is not None:
        message.setdefault("reasoning_content", thoughts)
    return message


def _usage(record: Any) -> dict[str, Any] | None:
    return {key: snapshot(value) for key, value in fields(record).items() if value is not None} or None


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Tool choice, response format, sampling and the rest of the request's body."""
    body = params.get("extra_body")  # the clients send its entries beside the others
    settings = {}
    for source in (params, body if isinstance(body, Mapping) else {}):
        for key, value in source.items():
            if key in _APART or key in _NOT_SENT or not _is_sent(value) or _is_secret(key):
                continue
            settings[key] = _schema_of(value) if isinstance(value, type) else snapshot(value)
    if settings.get("stream") is False:  # litellm leaves it out, and it says nothing
        del settings["stream"]
    return settings


def _is_sent(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, BaseModel)
    return value is not None and type(value).__name__ not in _UNSENT_TYPES and not callable(value)


def _is_secret(key: str) -> bool:
    return bool(_SECRET.search(key)) and not _NO_SECRET.search(key)


def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The response format that both clients send for a pydantic class: by OpenAI's own conversion."""
    from openai.lib._parsing._completions import type_to_response_format_param

    return dict(type_to_response_format_param(model))  # type: ignore[arg-type]


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}


def _chat_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_chat_part(part) for part in content]


def _chat_part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if part.get("type") == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


def _given_fields(record: BaseModel) -> dict[str, Any]:
    """Fields that were set, which are those that a client sends."""
    given = {key: value for key, value in record.__dict__.items() if key in record.__pydantic_fields_set__}
    return {**given, **(record.__pydantic_extra__ or {})}
