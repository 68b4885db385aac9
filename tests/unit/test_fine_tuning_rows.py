"""Runs as rows of a fine-tuning file: what a user asked and what came out, and nothing that a framework asked."""

import contextlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.records import Call, Run
from praison_agent_rl.transcripts import export_runs, read_runs
from tests.fakes import FakeServer, build_agent

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "2+3?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "add"}}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
AGAIN = {"role": "assistant", "content": "", "tool_calls": [{"id": "c2", "function": {"name": "add"}}]}
CHECKED = {"role": "tool", "tool_call_id": "c2", "content": "still 5"}
RETRY = {"role": "user", "content": "Previous response failed validation due to: too short."}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def row_of(tmp_path: Path, *calls: tuple[list[Any], Any], output: Any, tools: Any = ()) -> list[Any] | None:
    """The messages of the row of a run that made these calls, each a request and its reply."""
    made = [
        Call(id=f"c{at}", time=float(at), messages=sent, reply=reply, tools=list(tools), error=None if reply else "500")
        for at, (sent, reply) in enumerate(calls)
    ]
    if not export_runs([Run(id="r", time=1.0, calls=made, output=output)], tmp_path / "out.jsonl", "openai"):
        return None
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row.get("tools", []) == list(tools)
    messages: list[Any] = row["messages"]
    return messages


def test_rounds_of_tools_belong_to_the_answer(tmp_path: Path) -> None:
    calls = ([SYSTEM, ASK], CALL), ([SYSTEM, ASK, CALL, RESULT], None), ([SYSTEM, ASK, CALL, RESULT], said("5"))
    for output in ("5", " 5\n", None, {"sum": 5}, "The answer, as the program has edited it: 5"):
        assert row_of(tmp_path, *calls, output=output, tools=TOOLS) == [SYSTEM, ASK, CALL, RESULT, said("5")]


@pytest.mark.parametrize("before", [[SYSTEM, ASK], [SYSTEM, ASK, ASK], [ASK], [SYSTEM, ASK, said("5"), ASK]])
@pytest.mark.parametrize("again", [[SYSTEM, ASK], [ASK]])
def test_a_retry_is_no_turn_and_its_answer_is_that_of_the_question(
    tmp_path: Path, before: list[Any], again: list[Any]
) -> None:
    retried = [*again, *before[before.index(ASK) + 1 :], said("short"), RETRY]
    retried = [turn for at, turn in enumerate(retried) if not at or turn != retried[at - 1]]
    calls = (before, said("short")), (retried, said("It is 5."))
    assert row_of(tmp_path, *calls, output="It is 5.") == [*before, said("It is 5.")]
    assert row_of(tmp_path, *calls, output="short") == [*before, said("short")]
    assert row_of(tmp_path, *calls, output="Sorry, I cannot share that.") is None


def test_a_retry_after_tools_keeps_their_rounds_and_its_own(tmp_path: Path) -> None:
    first = [SYSTEM, ASK, CALL, RESULT]
    calls = ([SYSTEM, ASK], CALL), (first, said("short")), ([*first, said("short"), RETRY], said("It is 5."))
    assert row_of(tmp_path, *calls, output="It is 5.") == [*first, said("It is 5.")]
    further = [*first, said("short"), RETRY, AGAIN, CHECKED]
    calls = *calls[:2], ([*first, said("short"), RETRY], AGAIN), (further, said("It is still 5."))
    assert row_of(tmp_path, *calls, output="It is still 5.") == [*first, AGAIN, CHECKED, said("It is still 5.")]


@pytest.mark.parametrize("place", [0, 1])
def test_what_else_the_framework_asks_makes_no_row(tmp_path: Path, place: int) -> None:
    aside = ([{"role": "user", "content": "What of this is worth remembering: 2+3?"}], said("nothing"))
    calls = [([SYSTEM, ASK], said("5"))]
    calls.insert(place, aside)
    assert row_of(tmp_path, *calls, output="5") == [SYSTEM, ASK, said("5")]


@pytest.mark.parametrize("kind", ["environment", "provider"])
@pytest.mark.parametrize("checks", ["none", "reflection", "guardrail"])
def test_no_row_of_an_agent_has_a_turn_that_no_user_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, checks: str
) -> None:
    counter = itertools.count()

    def passes_the_second_time(output: Any) -> tuple[bool, Any]:
        return (True, output) if next(counter) % 2 else (False, "too short")

    options: dict[str, Any] = {"none": {}, "reflection": {"reflection": True}}.get(
        checks, {"guardrails": passes_the_second_time}
    )
    asked = ["Name a river.", "And a lake?"]
    with FakeServer("A") as server, contextlib.redirect_stdout(io.StringIO()):
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        agent = build_agent(kind, server.url, **options)
        with agent.record(store=tmp_path / "store"):
            for text in asked:
                agent.chat(text)
    runs = list(read_runs(tmp_path / "store"))
    export_runs(runs, tmp_path / "out.jsonl", "openai")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    outputs = [run.output.split() for run in runs]  # the framework strips some
    assert rows and all(row["messages"][-1]["content"].split() in outputs for row in rows)
    for row in rows:
        turns = [message["content"] for message in row["messages"] if message["role"] == "user"]
        assert set(turns) <= set(asked)
