"""Which answer of a run came out of it, to which request, and which one the agent itself refused before; it reads only.

A run's answer is what its last calls say, but its request is the one that the user's turn led to: what a guardrail or
a reflection adds ("Previous response failed validation ...") is the framework's own retry and no turn of anybody's.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from praison_agent_rl.data_files import Row

# What the framework writes to the model, by which its retries are known (praisonaiagents 1.7.17, agent/agent.py:7302
# and agent/chat_mixin.py:4174); tests/contract holds it to these words
GUARDRAIL = "Previous response failed validation due to:"
GUARDRAIL_NOTE = "\n\nNote: "
REFLECT = "Reflect on your previous response: '"
REGENERATE = "Now regenerate your response using the reflection you made"


class Judged(NamedTuple):
    """The answer that came out of a run, and the request that it answers."""

    messages: list[Row]
    """As they were sent, with the tool turns before the answer."""
    tools: list[Row]
    answer: str
    refused: str | None
    """What the agent answered to the same request at first, and then took back by its guardrail or reflection."""


def judged_of(calls: Sequence[Row], output: Any) -> Judged | str:
    """The answer of a run, or why there is none.

    ``"no answer"``: no call said what came out (a refusal, an edited answer, a run that ended first).
    ``"tools"``: what came out rests on tools that were called after the first answer had been refused.
    """
    answers = [call for call in calls if _text_of(call) is not None and not _asks_for_verdict(call)]
    if isinstance(output, str):
        said = output.split()
        final = next((call for call in reversed(answers) if str(_text_of(call)).split() == said), None)
    else:
        final = answers[-1] if answers and not any(map(_is_retry, answers)) else None
    if final is None:
        return "no answer"
    first = final
    while _is_retry(first):
        if not _ends_with_user(first):
            return "tools"
        before = _before(answers, first)
        refused = next((call for call in before if _was_refused(call, first)), None)
        if refused is None:
            return "no answer"
        first = refused
    refused_text = None if first is final else _text_of(first)
    return Judged(first["messages"], first["tools"], str(_text_of(final)), refused_text)


def was_retried(calls: Sequence[Row]) -> bool:
    """Whether the agent took an answer of its own back; quick, since most runs have no such call."""
    return len(calls) > 1 and any(map(_is_retry, calls[1:]))


def _before(answers: Sequence[Row], call: Row) -> Iterator[Row]:
    """The answers before a call, the latest first."""
    place = next(place for place, answer in enumerate(answers) if answer is call)
    return reversed(answers[:place])


def _text_of(call: Row) -> str | None:
    """What a call answered, if it is a whole answer: those that ask for tools or failed are none."""
    reply = call.get("reply") or {}
    text = reply.get("content")
    broken = call.get("error") is not None or call.get("partial") or reply.get("tool_calls")
    return None if broken or not isinstance(text, str) else text


def _last_turn(call: Row) -> str:
    """What a user is said to have written last; it may be the framework."""
    for message in reversed(call["messages"]):
        if message.get("role") == "user":
            content = message.get("content")
            return content if isinstance(content, str) else ""
    return ""


def _ends_with_user(call: Row) -> bool:
    return bool(call["messages"]) and call["messages"][-1].get("role") == "user"


def _is_retry(call: Row) -> bool:
    turn = _last_turn(call)
    return turn.startswith(GUARDRAIL) or turn == REGENERATE or f"{GUARDRAIL_NOTE}{GUARDRAIL}" in turn


def _asks_for_verdict(call: Row) -> bool:
    """Whether a call asks the model what it thinks of its own answer."""
    return _last_turn(call).lstrip().startswith(REFLECT)


def _was_refused(call: Row, retry: Row) -> bool:
    """Whether it is the answer of ``call`` that ``retry`` asks to better: the framework repeats it in the request."""
    answer = str(_text_of(call)).strip()
    turn = _last_turn(retry)
    if turn == REGENERATE:
        turns = (message.get("content") for message in reversed(retry["messages"]) if message.get("role") == "user")
        asked = next((text for text in turns if isinstance(text, str) and text.lstrip().startswith(REFLECT)), "")
        return asked.lstrip().startswith(f"{REFLECT}{answer}'.")
    if turn.startswith(GUARDRAIL):
        before = retry["messages"][-2:-1]
        return bool(before) and before[0].get("role") == "assistant" and before[0].get("content") == answer
    # a client that keeps no conversation asks the first question again, with a note
    return _last_turn(call) == turn.partition(f"{GUARDRAIL_NOTE}{GUARDRAIL}")[0]
