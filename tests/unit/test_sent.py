"""What an agent would send is found out exactly, and finding it out leaves agent, tools and server alone."""

import json
import threading
from typing import Any

import pytest
from praisonaiagents import Agent
from praisonaiagents.hooks import HookEvent, HookRegistry, HookResult

from praison_agent_rl.errors import AgentError
from praison_agent_rl.sent import sent_requests
from tests.fakes import AGENT_KINDS, FakeServer, build_agent

PATHS = ("environment", "provider")  # one kind for each of the framework's two clients
PROMPTS = ["What is 2+3? TOOL", 'Ünïcödé: "{braces}" \\n \U0001f600', "first line\nsecond line\n", "x" * 5000]


pytestmark = pytest.mark.usefixtures("agents_around")


def really_sent(kind: str, prompt: str, server: FakeServer, **options: Any) -> dict[str, Any]:
    """The first request that ``server`` gets from an agent that is built for this one prompt."""
    place = len(server.requests)
    build_agent(kind, server.url, **options).chat(prompt)
    return server.requests[place]


def in_bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


# --- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_messages_tools_and_settings_are_byte_for_byte_what_a_fresh_agent_sends_in_the_order_of_the_prompts(
    kind, server_a
):
    found = sent_requests(build_agent(kind, server_a.url), PROMPTS)
    assert server_a.requests == []
    assert len(found) == len(PROMPTS)
    for request, prompt in zip(found, PROMPTS, strict=True):
        real = really_sent(kind, prompt, server_a)
        assert in_bytes(request.messages) == in_bytes(real["messages"])
        assert in_bytes(request.tools) == in_bytes(real["tools"])
        rest = {key: value for key, value in real.items() if key not in ("messages", "tools", "model", "stream")}
        assert request.sampling == {key: value for key, value in rest.items() if value is not None}
        assert request.messages[-1] == {"role": "user", "content": prompt}


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        {"tools": []},
        {"instructions": None, "role": "Teacher", "goal": "Explain", "backstory": "You taught for years."},
        {"instructions": "Be brief.\nUse {braces} and “quotes”."},
        {"output": "stream"},
        {"reflection": True},
    ],
)
def test_it_is_the_same_request_for_agents_that_are_set_up_in_other_ways(kind, options, server_a):
    (found,) = sent_requests(build_agent(kind, server_a.url, **options), ["hello"])
    real = really_sent(kind, "hello", server_a, **options)
    assert in_bytes(found.messages) == in_bytes(real["messages"])
    assert in_bytes(found.tools) == in_bytes(real.get("tools") or [])


@pytest.mark.parametrize("kind", ["dict", "finished"])
def test_the_temperature_of_the_agent_is_among_the_settings(kind, server_a):
    (found,) = sent_requests(build_agent(kind, server_a.url), ["hello"])
    assert found.sampling == {"temperature": 0.3}


@pytest.mark.parametrize("kind", PATHS)
def test_progress_counts_the_prompts_that_are_done(kind, server_a):
    counts: list[int] = []
    sent_requests(build_agent(kind, server_a.url), ["a", "b", "c"], progress=counts.append)
    assert counts == [1, 2, 3]
    assert sent_requests(build_agent(kind, server_a.url), []) == []


# --- the live agent is left alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_a_used_agents_history_is_neither_sent_nor_changed(kind, server_a):
    agent = build_agent(kind, server_a.url)
    agent.chat("old question")
    agent.chat("TOOL old")
    history = json.dumps(agent.chat_history)
    asked = len(server_a.requests)
    found = sent_requests(agent, ["hello", "again"])
    assert [request.messages for request in found] == [
        really_sent(kind, prompt, server_a)["messages"] for prompt in ("hello", "again")
    ]
    assert len(server_a.requests) == asked + 2  # those of the two agents built to compare with, and no other
    assert json.dumps(agent.chat_history) == history


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_no_attribute_of_the_agent_is_another_afterwards(kind, server_a):
    agent = build_agent(kind, server_a.url)
    agent.chat("old question")
    before = dict(agent.__dict__)
    sent_requests(agent, ["hello"])
    assert agent.__dict__.keys() == before.keys()
    assert [name for name in before if agent.__dict__[name] is not before[name]] == []


@pytest.mark.parametrize("kind", PATHS)
def test_tools_are_listed_and_not_run(kind, server_a):
    runs: list[str] = []

    def delete_everything(path: str) -> str:
        """Delete all there is."""
        runs.append(path)
        raise RuntimeError("a tool ran")

    agent = build_agent(kind, server_a.url, tools=[delete_everything])
    (found,) = sent_requests(agent, ["TOOL: delete everything in /"])
    assert [tool["function"]["name"] for tool in found.tools] == ["delete_everything"]
    assert found.tools[0]["function"]["description"] == "Delete all there is."
    assert runs == []


@pytest.mark.parametrize("kind", PATHS)
def test_the_agents_next_real_turns_go_to_its_own_server_with_its_own_key(kind, server_a):
    agent = build_agent(kind, server_a.url)
    sent_requests(agent, ["hello"])
    assert agent.chat("real question").startswith("[A|m1]")
    sent_requests(agent, ["hello"])
    assert agent.chat("TOOL again").startswith("[A|m1]")
    assert [m["content"] for m in agent.chat_history if m["role"] == "user"] == ["real question", "TOOL again"]
    assert set(server_a.keys) == {"Bearer key-a"}


@pytest.mark.parametrize("kind", PATHS)
def test_a_live_agent_can_be_used_meanwhile(kind, server_a):
    agent = build_agent(kind, server_a.url)
    agent.chat("real 0")
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.extend(agent.chat(f"real {n}") for n in range(1, 9)))
    asking.start()
    found = sent_requests(agent, [f"asked {n}" for n in range(8)])
    asking.join()
    assert [answer[:6] for answer in answers] == ["[A|m1]"] * 8
    assert [m["content"] for m in agent.chat_history if m["role"] == "user"] == [f"real {n}" for n in range(9)]
    assert len(server_a.requests) == 9
    for number, request in enumerate(found):
        told = [m["content"] for m in request.messages if m["role"] != "system"]
        assert set(told) == {f"asked {number}"}  # litellm's path says a prompt twice, and nothing else is told


# --- guardrails, hooks and turns that are stopped -------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_a_guardrail_in_words_asks_no_model(kind, server_a):
    agent = build_agent(kind, server_a.url, guardrails="The answer must be polite")
    (found,) = sent_requests(agent, ["hello"])
    assert server_a.requests == []
    assert found.messages[-1]["content"] == "hello"


@pytest.mark.parametrize("kind", PATHS)
def test_a_guardrail_function_is_not_shown_an_answer_that_the_agent_never_gave(kind, server_a):
    judged: list[object] = []

    def polite(output):
        judged.append(output.raw)
        return True, output

    agent = build_agent(kind, server_a.url, guardrails=polite)
    assert len(sent_requests(agent, ["hello"])) == 1 and judged == []
    agent.chat("real question")
    assert len(judged) == 1  # the agent itself still has its guardrail


class InputGuard:
    """A guardrail that has a say before the model is asked."""

    def __call__(self, output):
        return True, output

    def validate_input(self, content, **options):
        return "forbidden" not in content, content.replace("colour", "color")


@pytest.mark.parametrize("kind", PATHS)
def test_a_guardrail_that_rewrites_prompts_has_its_say(kind, server_a):
    (found,) = sent_requests(build_agent(kind, server_a.url, guardrails=InputGuard()), ["Which colour?"])
    assert found.messages[-1]["content"] == "Which color?"


@pytest.mark.parametrize("kind", PATHS)
def test_a_prompt_that_a_guardrail_stops_is_named(kind, server_a):
    agent = build_agent(kind, server_a.url, guardrails=InputGuard())
    with pytest.raises(AgentError, match="'helper' sent no request for the prompt 'a forbidden question'"):
        sent_requests(agent, ["hello", "a forbidden question"])
    assert agent.chat("hello").startswith("[A|m1]")


@pytest.mark.parametrize("kind", PATHS)
def test_a_turn_that_a_hook_stops_is_an_agent_error(kind, server_a):
    async def deny(data):
        return HookResult(decision="deny", reason="not today")

    registry = HookRegistry()
    registry.register_function(HookEvent.BEFORE_AGENT, deny, is_async=True)
    with pytest.raises(AgentError, match="'helper' sent no request for the prompt 'hello'"):
        sent_requests(build_agent(kind, server_a.url, hooks=registry), ["hello"])
    assert server_a.requests == []


def test_a_long_prompt_is_cut_in_the_message():
    class Mute(Agent):
        def chat(self, prompt, **options):
            return None

    agent = Mute(name="mute", instructions="Be brief.", llm="m1", output="silent", rules=False)
    with pytest.raises(AgentError, match=f"'mute' sent no request for the prompt '{'y' * 80}'$"):
        sent_requests(agent, ["y" * 81])


def test_what_is_no_agent_or_is_answered_by_a_panel_is_refused():
    panel = Agent(name="many", instructions="Be brief.", llm="panel:council", output="silent", rules=False)
    with pytest.raises(AgentError, match="panel of models"):
        sent_requests(panel, ["hello"])


@pytest.mark.parametrize("kind", PATHS)
def test_nothing_is_printed(kind, server_a, capsys):
    sent_requests(build_agent(kind, server_a.url), ["hello"])
    assert capsys.readouterr().out == ""
