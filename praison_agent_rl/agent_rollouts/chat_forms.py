"""Chat requests as agents send them and answers as they expect them, in OpenAI's form; nothing is drawn here."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

_APART = ("messages", "tools", "model")
_LIMITS = ("max_tokens", "max_completion_tokens")


class Words(Protocol):
    """Turns messages into the tokens that the policy reads, and its tokens into messages."""

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """The prompt.

        Raises:
            ModelError: the template refuses the messages.
        """
        ...

    def parse(self, prompt_ids: list[int], completion_ids: list[int], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """The assistant message: role, content, and tool_calls where there are any."""
        ...


class Refusal(Exception):
    """Why a request gets no answer, for whoever sent it."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP."""
        self.message = message
        self.code = code
        """OpenAI's word for it, where clients look for one."""

    def body(self) -> bytes:
        """In OpenAI's form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return _as_json({"error": {"message": self.message, "type": kind, "param": None, "code": self.code}})


class Drawn(NamedTuple):
    """A completion."""

    ids: list[int]
    log_probs: list[float] | None
    """Of each token; None if they are not known."""
    ended: bool
    """Whether an end token is its last."""


@dataclass(frozen=True)
class Asked:
    """A chat request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    model: str | None
    settings: dict[str, Any]
    """Whatever else was sent."""

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have; None if that is left open."""
        return min((self.settings[name] for name in _LIMITS if name in self.settings), default=None)

    @property
    def streamed(self) -> bool:
        """Whether the answer is to come in parts."""
        return bool(self.settings.get("stream"))


def read_request(body: bytes) -> Asked:
    """The chat request that a client sent.

    Raises:
        Refusal: it is none, or wants something that is not offered; all that is wrong is named.
    """
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}") from error
    if problems := list(_problems(sent)):
        raise Refusal(400, "; ".join(problems))
    settings = {key: value for key, value in sent.items() if key not in _APART and value is not None}
    return Asked(sent["messages"], sent.get("tools") or [], sent.get("model"), settings)


def _problems(sent: Any) -> Iterator[str]:
    if not isinstance(sent, dict):
        yield f"the body is a JSON {type(sent).__name__}, not an object"
        return
    messages = sent.get("messages")
    if not _are_objects(messages) or not messages:
        yield "messages must be a list of at least one object"
    elif odd := [place for place, message in enumerate(messages) if not isinstance(message.get("role"), str)]:
        yield f"messages {odd} have no role"
    if not _are_objects(sent.get("tools") or []):
        yield "tools must be a list of objects"
    kinds: dict[str, type] = {"model": str, "stream": bool, "stream_options": dict, "logprobs": bool}
    for name, kind in kinds.items():
        if not isinstance(sent.get(name), kind | None):
            yield f"{name} must be of type {kind.__name__}, not {sent[name]!r:.80}"
    for name in _LIMITS:
        if (limit := sent.get(name)) is not None and (type(limit) is not int or limit < 1):
            yield f"{name} must be a whole number of at least 1, not {limit!r:.80}"
    if sent.get("n") not in (None, 1):
        yield f"n must be 1, not {sent['n']!r:.80}: each call of a rollout is answered once"


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


@dataclass(frozen=True)
class Answer:
    """What the policy said to a request."""

    head: dict[str, Any]
    """Id, time and model, which stand at the beginning of each part."""
    message: dict[str, Any]
    finish: str
    usage: dict[str, int]
    logprobs: dict[str, Any] | None
    """None if they were not asked for, or are not known."""

    def body(self) -> bytes:
        """In one piece."""
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish, "logprobs": self.logprobs}
        return _as_json({**self.head, "object": "chat.completion", "choices": [choice], "usage": self.usage})

    def events(self, *, with_usage: bool) -> bytes:
        """As server-sent events."""
        parts: list[dict[str, Any]] = [
            {"index": 0, "delta": delta, "finish_reason": None} for delta in _deltas(self.message)
        ]
        parts[0]["logprobs"] = self.logprobs
        parts.append({"index": 0, "delta": {}, "finish_reason": self.finish})
        chunks: list[dict[str, Any]] = [{"choices": [part]} for part in parts]
        if with_usage:
            chunks.append({"choices": [], "usage": self.usage})
        events = [_as_json({**self.head, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
        return b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"])


def answer_to(asked: Asked, head: dict[str, Any], said: dict[str, Any], prompt_tokens: int, drawn: Drawn) -> Answer:
    """What the policy ``said``, as whoever asked gets it.

    The reason for its end is ``tool_calls`` where there are any, also if the limit was reached within the last, as
    with ``transformers serve`` and vLLM.
    """
    message = {"role": "assistant", "content": None, **said}
    calls = [
        _tool_call(call, f"call_{head['id']}{place:02x}") for place, call in enumerate(said.get("tool_calls") or [])
    ]
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls
    finish = "tool_calls" if calls else "stop" if drawn.ended else "length"
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": len(drawn.ids)}
    logprobs = _logprobs(drawn) if asked.settings.get("logprobs") else None
    head = {**head, "id": f"chatcmpl-{head['id']}"}
    return Answer(head, message, finish, {**counts, "total_tokens": sum(counts.values())}, logprobs)


def _tool_call(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function", call)
    given = function.get("arguments")
    text = given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _logprobs(drawn: Drawn) -> dict[str, Any] | None:
    """Tokens are named by their ids, since a part of a character has no text."""
    if drawn.log_probs is None:
        return None
    pairs = zip(drawn.ids, drawn.log_probs, strict=True)
    rest: dict[str, Any] = {"bytes": None, "top_logprobs": []}
    return {"content": [{"token": f"token_id:{token}", "logprob": value, **rest} for token, value in pairs]}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message in parts.

    The name and id of a tool call come first and its arguments in the next part, as from other servers: the framework
    drops arguments that come with the id.
    """
    yield {"role": "assistant", "content": ""}
    thoughts = [key for key in message if key not in ("role", "content", "tool_calls")]
    for key in (*thoughts, "content"):
        if message[key]:
            yield {key: message[key]}
    for place, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        yield {"tool_calls": [{**call, "index": place, "function": {"name": function["name"], "arguments": ""}}]}
        yield {"tool_calls": [{"index": place, "function": {"arguments": function["arguments"]}}]}


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
