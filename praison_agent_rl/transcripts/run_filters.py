"""Chooses recorded runs: by agent, time, tags, errors, tools, ratings and text."""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from praison_agent_rl.errors import DataError

RunDict = dict[str, Any]
Test = Callable[[RunDict], bool]


def run_tests(
    *,
    agent: str | None = None,
    since: float | str | datetime | None = None,
    until: float | str | datetime | None = None,
    tags: str | Sequence[str] = (),
    has_error: bool | None = None,
    used_tool: str | bool | None = None,
    rated: bool | float | None = None,
    text: str | None = None,
) -> list[Test]:
    """What a run has to pass, one test for each thing that was asked for; see `read_runs`."""
    tests: list[Test] = []
    if agent is not None:
        tests.append(lambda run: run["agent"] == agent or fnmatchcase(run["agent"] or "", agent))
    if since is not None:
        first = unix_time(since)
        tests.append(lambda run: run["time"] >= first)
    if until is not None:
        last = unix_time(until)
        tests.append(lambda run: run["time"] < last)
    if tags:
        wanted = {tags} if isinstance(tags, str) else set(tags)
        tests.append(lambda run: wanted <= set(run["tags"]))
    if has_error is not None:
        tests.append(lambda run: _has_error(run) == has_error)
    if used_tool is not None:
        tests.append(lambda run: _used(run, used_tool))
    if rated is not None:
        tests.append(lambda run: _is_rated(run, rated))
    if text is not None:
        tests.append(lambda run: _holds(run, text.casefold()))
    return tests


def unix_time(given: float | str | datetime) -> float:
    """Unix seconds; a date or time without a zone is local.

    Raises:
        DataError: it is no time.
    """
    try:
        if isinstance(given, str):
            # datetime.fromisoformat knows no "Z" before Python 3.11
            given = datetime.fromisoformat(given.strip().removesuffix("Z") + ("+00:00" if given.endswith("Z") else ""))
        return given.timestamp() if isinstance(given, datetime) else float(given)
    except (TypeError, ValueError) as error:
        raise DataError(f"{given!r} is no time; give unix seconds or ISO text such as '2025-12-31T18:00'") from error


def _has_error(run: RunDict) -> bool:
    return run["error"] is not None or any(call["error"] is not None for call in run["calls"])


def _used(run: RunDict, tool: str | bool) -> bool:
    used = {name for call in run["calls"] for name in _tools_called(call["reply"])}
    return bool(used) == tool if isinstance(tool, bool) else tool in used


def _tools_called(reply: Any) -> Iterator[str]:
    for called in (reply or {}).get("tool_calls") or ():
        yield called.get("function", called).get("name")


def _is_rated(run: RunDict, rated: bool | float) -> bool:
    """Whether it was rated; given a number, whether its latest score is at least that."""
    if isinstance(rated, bool):
        return bool(run["feedback"]) == rated
    scores = [feedback["score"] for feedback in run["feedback"] if feedback["score"] is not None]
    return bool(scores) and bool(scores[-1] >= rated)


def _holds(run: RunDict, text: str) -> bool:
    """Whether its prompt, its output or a message of it holds ``text``, in upper or lower case."""
    spoken = [run["prompt"], run["output"], *(call[part] for call in run["calls"] for part in ("messages", "reply"))]
    return any(text in said.casefold() for value in spoken for said in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
