"""What a reward may ask of a run by name: the run itself, its final answer and its tool calls; it scores nothing.

Where nothing was recorded, as of an answer that a model gave at once, a run is made of prompt and completion.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from praison_agent_rl.scoring.names import RUN_VIEWS

from .records import Call, Run
from .text_measures import written_calls

Message = Mapping[str, Any]

_FAILED = re.compile(
    r"\s*(?:error\b|exception\b|traceback \(most recent|failed\b|tool .{0,80} not found)", re.IGNORECASE
)
_MARKS = ("<tool_call>", "[TOOL_CALLS]")
_NO_CONTENT: dict[str, Any] = {
    "id": True,
    "parent": True,
    "session": True,
    "time": True,
    "feedback": {"__all__": {"run", "time"}},
    "calls": {"__all__": {"id", "run", "time"}},
}


def run_columns(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    runs: Sequence[Run | None] | None = None,
    *,
    wanted: Collection[str] = RUN_VIEWS,
) -> dict[str, list[Any]]:
    """Those ``wanted`` of ``run``, ``final_answer`` and ``tool_calls``, one of each per completion.

    Completions are texts or message lists, with tool calls and their results. Where there is a run it counts instead.
    """
    rows = list(zip(prompts, completions, runs or [None] * len(completions), strict=True))
    views: dict[str, Callable[..., Any]] = {"run": _run, "final_answer": _final_answer, "tool_calls": _tool_calls}
    return {name: [view(*row) for row in rows] for name, view in views.items() if name in wanted}


def call_counts(completions: Sequence[Any], runs: Sequence[Run | None] | None = None) -> list[int]:
    """How often the model was called for each completion."""
    rows = zip(completions, runs or [None] * len(completions), strict=True)
    return [sum(map(by_assistant, messages_of(said))) if run is None else len(run.calls) for said, run in rows]


def run_messages(run: Run) -> list[dict[str, Any]]:
    """What was said after the prompt, answers, tool calls and results, as the agent that was asked first saw them.

    The last is what the agent answered, which a guardrail may have made of what the model said.
    """
    own = [call for call in run.calls if call.agent == run.calls[0].agent and call.reply is not None]
    if not own:
        return []
    first, last = own[0].messages, own[-1]
    pairs = enumerate(zip(first, last.messages, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), min(len(first), len(last.messages)))
    said = dict(last.reply or {})
    if isinstance(run.output, str) and not said.get("tool_calls"):
        said["content"] = run.output
    return [*last.messages[same:], said]


def run_content(run: Run) -> dict[str, Any]:
    """A run without ids and the times at which things were done, by which two of the same content are alike.

    How long it took stays, since a reward may pay for it.
    """
    content = run.model_dump(exclude=_NO_CONTENT)
    numbers: dict[Any, int] = {}
    for call in content["calls"]:
        call["messages"] = [_numbered(message, numbers) for message in call["messages"]]
        call["reply"] = None if call["reply"] is None else _numbered(call["reply"], numbers)
    return content


def messages_of(completion: Any) -> list[Message]:
    """A completion as messages; a text is one message of the assistant."""
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    given = [completion] if isinstance(completion, Mapping) else completion or []
    return [message for message in given if isinstance(message, Mapping)]


def by_assistant(message: Message) -> bool:
    """Whether the assistant wrote a message; one without a role is a completion, so it did."""
    return bool(message.get("role", "assistant") == "assistant")


def text_in(content: Any) -> str:
    """The text of a message's content: a string, or parts; None has none."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else []
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def reports_failure(result: str) -> bool:
    """Whether what a tool gave says that it failed."""
    try:
        value = json.loads(result)
    except (ValueError, RecursionError):
        return _FAILED.match(result) is not None
    if isinstance(value, Mapping):
        return bool(value.get("error")) or value.get("success") is False
    return isinstance(value, str) and _FAILED.match(value) is not None


class _Turn(NamedTuple):
    """What the model said once, and what the tools that it called gave."""

    reply: Message
    results: Sequence[Message]

    @property
    def calls(self) -> list[Any]:
        """As they stand in the message, else in its text as open models write them; None for one that is no JSON."""
        given = self.reply.get("tool_calls")
        if isinstance(given, list | tuple) and given:
            return list(given)
        text = text_in(self.reply.get("content"))
        written = list(written_calls(text))
        # an answer that is JSON may have a "name" too, and is no call by that
        return written if any(mark in text for mark in _MARKS) else [call for call in written if _has_arguments(call)]


def _has_arguments(call: Any) -> bool:
    inside = _inside(call)
    return isinstance(inside.get("name"), str) and bool({"arguments", "parameters"} & inside.keys())


def _turns(completion: Any, run: Run | None) -> list[_Turn]:
    if run is not None:
        rounds = [(call.reply, run.calls[place + 1 :]) for place, call in enumerate(run.calls)]
        return [_Turn(reply, _results_of(reply, later)) for reply, later in rounds if reply is not None]
    messages = messages_of(completion)
    said = [(place, message) for place, message in enumerate(messages) if by_assistant(message)]
    return [_Turn(message, results_after(messages, place)) for place, message in said]


def _results_of(reply: Message, later: Sequence[Call]) -> list[Message]:
    """What the tools gave that ``reply`` calls: it stands in the next request that repeats the reply."""
    asked = _asked(reply)
    for call in later if asked else ():
        repeated = [place for place, message in enumerate(call.messages) if _asked(message) == asked]
        if repeated:  # a model may number its calls anew in each round, so that only the last one is meant
            return results_after(call.messages, repeated[-1])
    return []


def _asked(message: Message) -> list[tuple[Any, Any]]:
    """The ids and names of the calls that a message of the assistant holds."""
    calls = message.get("tool_calls") if by_assistant(message) else None
    known = [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list | tuple) else []
    return [(call.get("id"), _inside(call).get("name")) for call in known]


def results_after(messages: Sequence[Message], place: int) -> list[Message]:
    """The results of tools that follow directly on the message at ``place``."""
    results = []
    for message in messages[place + 1 :]:
        if message.get("role") != "tool":
            break
        results.append(message)
    return results


def _run(prompt: Any, completion: Any, run: Run | None) -> Run:
    return _made(prompt, completion) if run is None else run


def _made(prompt: Any, completion: Any) -> Run:
    """The run of an answer: a call for each message of the assistant, at no time and taking none."""
    id = hashlib.blake2b(json.dumps([prompt, completion], default=str).encode(), digest_size=8).hexdigest()
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else messages_of(prompt)
    messages = messages_of(completion)
    places = [place for place, message in enumerate(messages) if by_assistant(message)]
    calls = [
        Call(
            id=f"{id}-{number}",
            run=id,
            time=0.0,
            messages=[dict(message) for message in (*before, *messages[:place])],
            reply=dict(messages[place]),
        )
        for number, place in enumerate(places)
    ]
    asked = next((m.get("content") for m in reversed(before) if m.get("role") == "user"), None)
    output = _final_answer(prompt, completion, None) or None
    return Run(id=id, style="answer", time=0.0, prompt=text_in(asked), output=output, calls=calls)


def _final_answer(_: Any, completion: Any, run: Run | None) -> str:
    """What the agent answered; where that is not known, the last message that calls no tool."""
    if run is not None and isinstance(run.output, str):
        return run.output
    answers = [turn.reply for turn in _turns(completion, run) if not turn.calls]
    return text_in(answers[-1].get("content")) if answers else ""


def _tool_calls(_: Any, completion: Any, run: Run | None) -> list[dict[str, Any]]:
    return [call for turn in _turns(completion, run) for call in _calls_of(turn)]


def _calls_of(turn: _Turn) -> list[dict[str, Any]]:
    found = []
    for call, result in zip(turn.calls, _in_order(turn), strict=True):
        name, arguments = _read(call)
        failed = not name or isinstance(arguments, str) or (result is not None and reports_failure(result))
        found.append({"name": name, "arguments": arguments, "result": result, "error": failed})
    return found


def _in_order(turn: _Turn) -> list[str | None]:
    """The result of each call: by its id, and those that name no call one after the other."""
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in turn.calls]
    ids = [id if isinstance(id, str) else None for id in ids]
    by_id = [(result.get("tool_call_id"), text_in(result.get("content"))) for result in turn.results]
    named = {id: text for id, text in by_id if isinstance(id, str)}
    unnamed = iter([text for id, text in by_id if id is None or id not in ids])
    return [named[id] if id in named else next(unnamed, None) for id in ids]


def _read(call: Any) -> tuple[str, dict[str, Any] | str]:
    """Name and arguments of a call; arguments that are no JSON object stay as they are written."""
    inside = _inside(call)
    name, written = inside.get("name"), inside.get("arguments", inside.get("parameters", {}))
    arguments = written
    if isinstance(written, str):
        try:
            arguments = json.loads(written or "{}")
        except (ValueError, RecursionError):
            arguments = None
    as_written = written if isinstance(written, str) else json.dumps(written, default=str)
    return name if isinstance(name, str) else "", dict(arguments) if isinstance(arguments, Mapping) else as_written


def _inside(call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else call if isinstance(call, Mapping) else {}


def _numbered(message: dict[str, Any], numbers: dict[Any, int]) -> dict[str, Any]:
    """A message whose tool calls are numbered in place of their ids, which are made up anew in each run."""
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        known = [{**call, "id": _number(call.get("id"), numbers)} if isinstance(call, dict) else call for call in calls]
        message = {**message, "tool_calls": known}
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _number(message["tool_call_id"], numbers)}
    return message


def _number(id: Any, numbers: dict[Any, int]) -> int | None:
    return None if id is None else numbers.setdefault(str(id), len(numbers))
