"""What a build reads of each run; a whole `Run` takes long to make and is made only for functions of the user's."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from praison_agent_rl.data_files import Row
from praison_agent_rl.records import Feedback, Run
from praison_agent_rl.transcripts import as_run

_NO_CALL: Row = {"messages": [], "tools": []}


class BriefRun(NamedTuple):
    """A run as far as rows are made of it."""

    id: str
    agent: str | None
    parent: str | None
    session: str | None
    tags: list[str]
    time: float
    error: str | None
    feedback: list[Feedback]
    calls: int
    messages: list[Row]
    """Of the first call."""
    tools: list[Row]
    """Of the first call."""
    answers: list[str]
    """What a history may hold as its answer: reflection, guardrails and memory make calls after the one that counts."""
    whole: Callable[[], Run]
    output: Any
    """What came out of it."""
    all_calls: list[Row]


def brief(run: Run) -> BriefRun:
    """Of a run that was handed over."""
    return _brief(vars(run), [vars(call) for call in run.calls], run.feedback, lambda: run)


def recorded(run: dict[str, Any]) -> BriefRun:
    """Of a run as ``transcripts.iter_run_dicts`` gives it."""
    ratings = [Feedback.model_construct(**said) for said in run["feedback"]]
    return _brief(run, run["calls"], ratings, functools.partial(as_run, run))


def _brief(run: Row, calls: list[Row], feedback: list[Feedback], whole: Callable[[], Run]) -> BriefRun:
    first = calls[0] if calls else _NO_CALL
    return BriefRun(
        id=run["id"],
        agent=run["agent"],
        parent=run["parent"],
        session=run["session"],
        tags=run["tags"],
        time=run["time"],
        error=run["error"],
        feedback=feedback,
        calls=len(calls),
        messages=first["messages"],
        tools=first["tools"],
        answers=_answers(run["output"], calls),
        whole=whole,
        output=run["output"],
        all_calls=calls,
    )


def _answers(output: Any, calls: list[Row]) -> list[str]:
    """What came out, and every reply that is a text; those that ask for tools only where nothing follows."""
    texts = {output: None} if isinstance(output, str) else {}
    for call in calls:
        reply: Row = call.get("reply") or {}
        text = reply.get("content")
        if isinstance(text, str) and (call is calls[-1] or not reply.get("tool_calls")):
            texts[text] = None
    return list(texts)
