"""Traces from other tools' files as turns with their calls, and the exports of Langfuse.

A trace is told in many records, so all of a file are held in memory until its turns are put together.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from praison_agent_rl.foreign_logs.chats import (
    ForeignCall,
    ForeignRun,
    Unusable,
    messages_of,
    new_id,
    parsed,
    reply_of,
    tools_of,
    unix_seconds,
)


@dataclass(frozen=True)
class Span:
    """A record of a trace, whoever wrote it."""

    id: str
    parent: str | None
    trace: str | None
    """None where it is not named; such a span is a turn of its own."""
    session: str | None = None
    agent: str | None = None
    """Name of the agent, where the span is an agent's turn."""
    call: ForeignCall | None = None
    """The request, where the span is one."""


def runs_of(spans: Iterable[Span]) -> Iterator[ForeignRun]:
    """One turn for the calls under each agent's span, or for those of a trace that are under none, in their order.

    No two of the spans may have one id in one trace.
    """
    by_id = {(span.trace, span.id): span for span in spans}
    sessions = {span.trace: span.session for span in by_id.values() if span.session and span.trace}
    turns: dict[tuple[str | None, str], list[Span]] = {}
    agents: dict[tuple[str | None, str], str | None] = {}
    for span in by_id.values():
        if span.call is not None:
            owner = _owner(span, by_id)
            turn = (span.trace, owner.id if owner else "" if span.trace else span.id)
            turns.setdefault(turn, []).append(span)
            agents[turn] = owner.agent if owner else span.agent
    for turn, made in turns.items():
        calls = sorted((span.call for span in made if span.call), key=lambda call: call.time)
        trace = made[0].trace
        session = sessions.get(trace or "") or made[0].session or trace
        yield ForeignRun(calls, session=session, agent=agents[turn], error=calls[-1].error)


def _owner(span: Span, by_id: Mapping[tuple[str | None, str], Span]) -> Span | None:
    """The agent's span that a span is under, the nearest."""
    seen: set[str] = set()
    above = by_id.get((span.trace, span.parent or ""))
    while above is not None and above.id not in seen:
        if above.agent is not None and above.call is None:
            return above
        seen.add(above.id)
        above = by_id.get((span.trace, above.parent or ""))
    return None


def from_langfuse(record: Any) -> Span:
    """An observation, with names in camel or snake case, as exports from the table, the API and storage have them."""
    if not isinstance(record, dict):
        raise Unusable("is no object")
    given = {_camel(key): value for key, value in record.items()}
    kind = str(given.get("type") or "").upper()
    call = _langfuse_call(given) if kind == "GENERATION" else None
    trace = given.get("traceId")
    return Span(
        id=str(given.get("id") or new_id()),
        parent=str(given.get("parentObservationId") or "") or None,
        trace=str(trace) if trace else None,
        session=str(given.get("sessionId") or "") or None,
        agent=given.get("name") if kind == "AGENT" else None,
        call=call,
    )


def observations_in(document: Any) -> Iterator[Any]:
    """The observations of a trace or a session that was downloaded, or the record itself."""
    traces = document.get("traces") if isinstance(document, dict) else None
    for trace in traces if isinstance(traces, list) else [document]:
        observations = trace.get("observations") if isinstance(trace, dict) else None
        if not isinstance(observations, list):
            yield trace
            continue
        about = trace.get("trace") if isinstance(trace.get("trace"), dict) else trace
        session = about.get("sessionId") or document.get("id") if traces else about.get("sessionId")
        for observation in observations:
            yield {"traceId": about.get("id"), "sessionId": session, **observation}


def _langfuse_call(given: dict[str, Any]) -> ForeignCall:
    request = parsed(given.get("input"))
    if isinstance(request, str):
        request = [{"role": "user", "content": request}]
    request = request if isinstance(request, dict) else {"messages": request}
    usage = given_of(given, "usageDetails", "usage")
    began, ended = unix_seconds(given.get("startTime")), unix_seconds(given.get("endTime"))
    settings = parsed(given.get("modelParameters"))
    failed = given.get("level") == "ERROR"
    return ForeignCall(
        messages_of(request.get("messages")),
        reply_of(given.get("output")),
        tools=tools_of(request),
        settings=settings if isinstance(settings, dict) else {},
        model=given_of(given, "model", "providedModelName"),
        time=began,
        seconds=max(0.0, ended - began),
        usage=parsed(usage) if isinstance(parsed(usage), dict) else None,
        error=str(given.get("statusMessage") or "error") if failed else None,
    )


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def given_of(record: Mapping[str, Any], *names: str) -> Any:
    """What a record has under the first of these names that is given."""
    return next((record[name] for name in names if record.get(name) not in (None, "")), None)
