"""Rewards for the use of tools in a whole rollout: the right tool, the right arguments, no failed call, few calls.

All assistant messages are read: ``tool_calls`` in OpenAI's form (arguments as JSON text or as a mapping), and calls
written in a text as open models write them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from praison_agent_rl.errors import RewardError
from praison_agent_rl.run_views import reports_failure, results_after
from praison_agent_rl.text_measures import faulty_tool_call, written_calls

from .making import Score, Scores, a_count, a_flag, library_reward, per_sample, texts_of
from .reading import by_assistant, messages_of, plain, text_in


class Call(NamedTuple):
    """One tool call."""

    name: str
    arguments: Mapping[str, Any] | None
    """None where they are no JSON object."""
    id: str | None = None


@library_reward("tool")
def right_tool(completions: Sequence[Any], tool: Any) -> Scores:
    """The share of tools called or wanted that are both, from 0.0 to 1.0: 1.0 for the right ones and no other.

    The column ``tool`` names a row's tool or several; an empty list wants none to be called, None gives no score.

    >>> call = {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": "{}"}}]}
    >>> right_tool([[call], [call], "No call.", [call]], ["search", ["search", "read"], "search", None])
    [1.0, 0.5, 0.0, None]
    """

    def score(calls: list[Call], value: Any) -> Score:
        if value is None or value == "" or value != value:
            return None
        wanted = set(texts_of(value, "tool", "search")) if value else set()
        used = {call.name for call in calls}
        return len(wanted & used) / len(wanted | used) if wanted | used else 1.0

    rows = zip(completions, per_sample(tool, "tool", len(completions)), strict=True)
    return [score(calls_of(completion), value) for completion, value in rows]


@library_reward("calls")
def right_arguments(
    completions: Sequence[Any], calls: Any, *, ignore: Sequence[str] = (), whole: bool = False
) -> Scores:
    """How right the arguments of the wanted calls are, from 0.0 to 1.0; with ``whole: true`` only 1.0 or 0.0.

    The column ``calls`` has a row's calls, ``{name: ..., arguments: {...}}`` or a list of them, also as JSON text. Each
    is compared with the call of that name that fits best: the share of arguments, wanted or given, that are equal.
    Arguments in ``ignore`` do not count, and more calls cost nothing. None where a row has no calls.

    >>> call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": 3}'}}]}
    >>> right_arguments([[call], [call]], [{"name": "add", "arguments": {"a": 1, "b": 2}}, None])
    [0.5, None]
    """
    skipped = set(texts_of(ignore, "ignore", "[user_id]")) if ignore else set()
    a_flag(whole, "whole")

    def score(made: list[Call], value: Any) -> Score:
        wanted = _wanted(value)
        if not wanted:
            return None
        left, sums = list(made), 0.0
        for call in wanted:
            likeness = [_likeness(call, other, skipped) for other in left]
            best = max(likeness, default=0.0)
            if best:
                left.pop(likeness.index(best))
            sums += best
        mean = sums / len(wanted)
        return float(mean == 1.0) if whole else mean

    given = per_sample([calls] * len(completions) if isinstance(calls, Mapping) else calls, "calls", len(completions))
    return [score(calls_of(completion), value) for completion, value in zip(completions, given, strict=True)]


@library_reward("tools")
def no_failed_call(completions: Sequence[Any], tools: Any = None) -> Scores:
    """The share of tool calls that did not fail, from 0.0 to 1.0; 1.0 where none was made.

    A call failed if its arguments are no JSON object, if the tool's message reports an error, or, where the column
    ``tools`` has the definitions, if it names no tool or lacks a required argument.

    >>> call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]}
    >>> answers = [{"role": "tool", "tool_call_id": "1", "content": c} for c in ('{"error": "no a"}', "3")]
    >>> no_failed_call([[call, answers[0]], [call, answers[1]], "No call."])
    [0.0, 1.0, 1.0]
    """
    rows = per_sample([tools] * len(completions) if tools is None else tools, "tools", len(completions))
    return [_share_unfailed(completion, row) for completion, row in zip(completions, rows, strict=True)]


@library_reward()
def few_calls(completions: Sequence[Any], *, free: int = 1, most: int = 5) -> Scores:
    """1.0 up to ``free`` tool calls, falling in a straight line to 0.0 at ``most``.

    >>> call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    >>> few_calls(["No call.", [call], [call] * 3, [call] * 9])
    [1.0, 1.0, 0.5, 0.0]
    """
    a_count(free, "free")
    a_count(most, "most")
    if most <= free:
        raise RewardError(f"most must be more than free ({free}), not {most}")
    counts = [len(calls_of(completion)) for completion in completions]
    return [min(1.0, max(0.0, (most - count) / (most - free))) for count in counts]


def calls_of(completion: Any) -> list[Call]:
    """Every tool call of a completion, in order; one that cannot be read has an empty name."""
    return [call for message in messages_of(completion) if by_assistant(message) for call in _calls_in(message)]


def _calls_in(message: Mapping[str, Any]) -> list[Call]:
    given = message.get("tool_calls")
    written = given if isinstance(given, list | tuple) and given else written_calls(text_in(message.get("content")))
    return [_call(one) for one in written]


def _call(given: Any) -> Call:
    if not isinstance(given, Mapping):
        return Call("", None)
    function = given.get("function")
    inside = function if isinstance(function, Mapping) else given
    name, place = inside.get("name"), given.get("id")
    arguments = inside.get("arguments", inside.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    sound = arguments if isinstance(arguments, Mapping) else None
    return Call(name if isinstance(name, str) else "", sound, place if isinstance(place, str) else None)


def _wanted(value: Any) -> list[Call]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise RewardError(f"calls must be JSON where it is a text, not {value[:80]!r}: {error}") from error
    given = [value] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else []
    made = [_call(one) for one in given if one is not None]
    if odd := [one for one, call in zip(given, made, strict=False) if not call.name or call.arguments is None]:
        raise RewardError(f"calls must be {{name: ..., arguments: {{...}}}} or a list of them, not {odd[0]!r}")
    return made


def _likeness(wanted: Call, made: Call, skipped: set[str]) -> float:
    if wanted.name != made.name or made.arguments is None:
        return 0.0
    # a missing argument and None are the same: Arrow fills the columns of a dataset up with None
    right, given = (
        {key: value for key, value in (call.arguments or {}).items() if value is not None and key not in skipped}
        for call in (wanted, made)
    )
    names = right.keys() | given.keys()
    equal = [key for key in names if key in right and key in given and _equal(right[key], given[key])]
    return len(equal) / len(names) if names else 1.0


def _equal(right: Any, given: Any) -> bool:
    if isinstance(right, str) and isinstance(given, str):
        return plain(right) == plain(given)
    if isinstance(right, bool) or isinstance(given, bool):
        return right is given
    return bool(right == given)


def _share_unfailed(completion: Any, tools: Any) -> float:
    messages = messages_of(completion)
    failed, count = 0, 0
    for place, message in enumerate(messages):
        calls = _calls_in(message) if by_assistant(message) else []
        count += len(calls)
        answers = results_after(messages, place)
        unnamed = [answer for answer in answers if not answer.get("tool_call_id")]
        for number, call in enumerate(calls):
            named = [answer for answer in answers if call.id and answer.get("tool_call_id") == call.id]
            answer = named[0] if named else unnamed[number] if number < len(unnamed) else None
            failed += _faulty(call, tools) or (answer is not None and reports_failure(text_in(answer.get("content"))))
    return 1.0 - failed / count if count else 1.0


def _faulty(call: Call, tools: Any) -> bool:
    if not call.name or call.arguments is None:
        return True
    if not isinstance(tools, list | tuple) or not tools:
        return False
    known = [tool for tool in tools if isinstance(tool, Mapping)]
    text = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, default=str)
    return faulty_tool_call(f"<tool_call>{text}</tool_call>", known)
