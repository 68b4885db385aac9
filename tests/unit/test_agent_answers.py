"""The agent itself answers: its tools run, each prompt finds it fresh, and what fails is an answer that failed."""

from types import SimpleNamespace
from typing import Any

import pytest

from praison_agent_rl import agent_answers
from praison_agent_rl.agent_answers import answer_as_agent
from praison_agent_rl.errors import ModelError
from tests.fakes import FakeServer, build_agent

ran: list[tuple[int, int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    ran.append((a, b))
    return a + b


@pytest.fixture
def stopped(server_b: FakeServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weights are served by ``server_b``; the names of the servers that were stopped."""
    names: list[str] = []

    def start(folder: Any, *, name: str, device: str) -> Any:
        stop = SimpleNamespace(model=name, address=server_b.url, api_key="k", stop=lambda: names.append(name))
        return stop

    monkeypatch.setattr(agent_answers, "start_server", start)
    return names


@pytest.mark.parametrize("kind", ["dict", "environment"])
def test_tools_run_and_each_prompt_finds_the_agent_fresh(
    kind: str, server_a: FakeServer, server_b: FakeServer, stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server_a.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key-a")
    ran.clear()
    agent = build_agent(kind, server_a.url, tools=[add])
    seen: list[tuple[int, int]] = []
    found = answer_as_agent(agent, ["please TOOL", "and now?"], ".", progress=lambda done, of: seen.append((done, of)))
    assert [(answer.prompt, answer.sample, answer.error) for answer in found] == [(0, 0, None), (1, 0, None)]
    assert ran == [(2, 3)] and all("[B|rl-evaluated] reply to" in answer.text for answer in found)
    assert server_a.requests == [], "the agent's own model was not asked"
    assert all("TOOL" not in str(m) for m in server_b.requests[-1]["messages"]), "the history was empty"
    assert {request.get("temperature") for request in server_b.requests} == {0.0}
    assert seen == [(1, 2), (2, 2)] and stopped == ["rl-evaluated"] and agent.chat_history == []


def test_what_fails_is_an_answer_with_its_error_and_the_others_are_asked(
    server_a: FakeServer, stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = build_agent("dict", server_a.url)

    class Broken:
        def __init__(self, twin: Any) -> None:
            self._twin = twin

        def chat(self, prompt: str, **options: Any) -> Any:
            if prompt == "raise":
                raise SystemExit("a tool ended the process")
            return None if prompt == "nothing" else "half an emoji: \ud83d"

    monkeypatch.setattr(agent_answers, "fresh_copy", Broken)
    monkeypatch.setattr(agent_answers, "swap_model", lambda *_, **__: None)
    found = answer_as_agent(agent, ["raise", "nothing", "fine"], ".")
    errors = ["SystemExit: a tool ended the process", "the agent gave no answer", None]
    assert [answer.error for answer in found] == errors
    assert found[2].text == "half an emoji: ?" and stopped == ["rl-evaluated"]


def test_the_server_ends_where_the_asking_is_interrupted(server_a: FakeServer, stopped: list[str]) -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_as_agent(build_agent("dict", server_a.url), ["one", "two"], ".", progress=stop)
    assert stopped == ["rl-evaluated"]


def test_a_hub_name_that_cannot_be_had_is_told(server_a: FakeServer, stopped: list[str]) -> None:
    with pytest.raises(ModelError, match="'owner/nothing-at-all' cannot be had from the hub"):
        answer_as_agent(build_agent("dict", server_a.url), ["one"], "owner/nothing-at-all")
