"""A live agent answers from another server after a swap and from its own after the undo, whatever way it is asked."""

import gc
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from praisonaiagents import Agent, AgentTeam

from praison_agent_rl.errors import AgentError
from praison_agent_rl.swap import WRITTEN_NAMES, check_swappable, server_of, swap_model
from tests.fakes import AGENT_KINDS, STYLES, FakeServer, build_agent

PATHS = ("environment", "provider")  # one kind for each of the framework's two clients

pytestmark = pytest.mark.usefixtures("agents_around")


@pytest.fixture
def server_c() -> Iterator[FakeServer]:
    with FakeServer("C") as server:
        yield server


def speaker(answer: object) -> str:
    """Who gave an answer, as ``B m2``; the answer itself where it is not one of a fake server."""
    found = re.search(r"\[(\w)\|([^\]]+)\]", str(answer))
    return f"{found[1]} {found[2]}" if found else repr(answer)


def to_b(agent: Any, server_b: FakeServer, **options: Any) -> Callable[[], None]:
    return swap_model(agent, "m2", base_url=server_b.url, api_key="key-b", **options)


def settings(request: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in request.items() if key not in ("model", "messages")}


def written(agent: Any) -> dict[str, Any]:
    return {name: agent.__dict__[name] for name in WRITTEN_NAMES if name in agent.__dict__}


def user_texts(request: dict[str, Any]) -> list[str]:
    return [str(message["content"]) for message in request["messages"] if message["role"] == "user"]


# --- every kind of agent, every way to ask it -----------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_turns_with_and_without_a_tool_come_from_b_after_the_swap_and_from_a_after_the_undo(
    kind, style, server_a, server_b
):
    agent, ask = build_agent(kind, server_a.url), STYLES[style]
    assert [speaker(ask(agent, text)) for text in ("old question", "TOOL old")] == ["A m1", "A m1"]
    before = list(server_a.requests)
    assert server_b.requests == []

    undo = to_b(agent, server_b)
    assert [speaker(ask(agent, text)) for text in ("new question", "TOOL new")] == ["B m2", "B m2"]
    after = list(server_b.requests)
    assert server_a.requests == before

    # the same turns were asked the same way: as many requests, and all but the model and the history the same
    assert [settings(request) for request in after] == [settings(request) for request in before]
    assert {request["model"] for request in before} == {"m1"} and {request["model"] for request in after} == {"m2"}
    prompts = {json.dumps(request["messages"][0]) for request in [*before, *after]}
    assert len(prompts) == 1 and '"system"' in prompts.pop()
    # the tool ran: its answer, 2 + 3, is in what the second server was sent last
    assert [m["content"] for m in after[-1]["messages"] if m["role"] == "tool"][-1] == "5"
    # the turns before the swap are still told
    assert "old question" in user_texts(after[0]) and "TOOL old" in user_texts(after[0])

    undo()
    assert speaker(ask(agent, "newest question")) == "A m1"
    assert len(server_b.requests) == len(after)
    assert "old question" in user_texts(server_a.requests[-1]) and "new question" in user_texts(server_a.requests[-1])
    assert set(server_a.keys) == {"Bearer key-a"} and set(server_b.keys) == {"Bearer key-b"}


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_the_history_grows_by_two_messages_a_turn_across_the_swap_and_its_undo(kind, server_a, server_b):
    agent = build_agent(kind, server_a.url)
    agent.chat("one")
    undo = to_b(agent, server_b)
    kept = list(agent.chat_history)
    agent.chat("two")
    undo()
    agent.chat("three")
    assert agent.chat_history[:2] == kept and len(kept) == 2
    assert [m["content"] for m in agent.chat_history if m["role"] == "user"] == ["one", "two", "three"]
    answers = [speaker(m["content"]) for m in agent.chat_history if m["role"] == "assistant"]
    assert answers == ["A m1", "B m2", "A m1"]


def test_answers_are_of_the_subclass_that_the_agent_is_of(server_a, server_b):
    class Shouting(Agent):
        def chat(self, prompt, **options):
            return super().chat(prompt, **options).upper() + "!"

    agent = Shouting(name="loud", instructions="Be brief.", llm="m1", output="silent", rules=False)
    undo = to_b(agent, server_b)
    assert agent.chat("hello") == "[B|M2] REPLY TO: HELLO!"
    undo()
    assert agent.chat("hello") == "[A|M1] REPLY TO: HELLO!" and type(agent) is Shouting


# --- what stays on the wire -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["chat", "chat streaming", "achat", "achat streaming", "start", "astart"])
@pytest.mark.parametrize("kind", ["dict", "finished"])
def test_the_temperature_of_the_agent_is_sent_to_the_new_server(kind, style, server_a, server_b):
    agent = build_agent(kind, server_a.url)
    to_b(agent, server_b)
    STYLES[style](agent, "hello")
    assert [request["temperature"] for request in server_b.requests] == [0.3]


SAMPLING = {
    "top_p": 0.5,
    "max_tokens": 9,
    "seed": 7,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.75,
    "stop_phrases": ["END"],
    "logprobs": True,
    "top_logprobs": 2,
    "extra_body": {"top_k": 5},
}
SAMPLING_SENT = {"stop": ["END"], "top_k": 5} | {
    key: value for key, value in SAMPLING.items() if key not in ("stop_phrases", "extra_body")
}


@pytest.mark.parametrize("finished", [False, True])
def test_every_sampling_setting_is_sent_to_the_new_server(finished, server_a, server_b):
    from praisonaiagents.llm import LLM

    options = {"model": "openai/m1", "base_url": server_a.url, "api_key": "key-a", **SAMPLING}
    agent = build_agent("provider", server_a.url, llm=LLM(**options) if finished else options, base_url=None)
    agent.chat("hello")
    to_b(agent, server_b)
    agent.chat("hello")
    for request in (server_a.requests[0], server_b.requests[0]):
        assert {key: request.get(key) for key in SAMPLING_SENT} == SAMPLING_SENT


@pytest.mark.parametrize(
    ("kind", "name"), [("environment", "gpt-4o"), ("environment", "claude-sonnet-4"), ("bare", "claude-sonnet-4")]
)
def test_a_model_name_that_brings_a_prompt_of_its_own_does_not_change_the_agents(kind, name, server_a, server_b):
    agent = build_agent(kind, server_a.url)
    swap_model(agent, name, base_url=server_b.url, api_key="key-b")
    agent.chat("hello")
    build_agent(kind, server_a.url).chat("hello")
    assert server_b.requests[0]["messages"] == server_a.requests[0]["messages"]
    named = build_agent(kind, server_a.url, llm=name)  # what the framework itself would send for that name
    assert "When editing files" in named._build_system_prompt()
    assert "When editing files" not in server_b.requests[0]["messages"][0]["content"]


def test_the_prompt_of_the_old_models_name_is_kept(server_a, server_b):
    agent = build_agent("environment", server_a.url, llm="gpt-4o")
    undo = to_b(agent, server_b)
    agent.chat("hello")
    undo()
    agent.clear_history()
    agent.chat("hello")
    assert "string-replacement" in server_b.requests[0]["messages"][0]["content"]
    assert server_b.requests[0]["messages"] == server_a.requests[0]["messages"]


@pytest.mark.parametrize("key", ["api_base", "base_url"])
def test_an_address_within_the_settings_is_replaced_and_comes_back(key, server_a, server_b):
    model = {"model": "openai/m1", key: server_a.url, "api_key": "key-a"}
    agent = build_agent("provider", server_a.url, llm=model, base_url=None)
    undo = to_b(agent, server_b)
    assert speaker(agent.chat("hello")) == "B m2"
    undo()
    assert speaker(agent.chat("hello")) == "A m1"


def test_an_address_from_the_environment_is_replaced_and_comes_back(server_a, server_b):
    agent = build_agent("provider", server_a.url, base_url=None)
    undo = to_b(agent, server_b)
    assert speaker(agent.chat("hello")) == "B m2"
    undo()
    assert speaker(agent.chat("hello")) == "A m1"


def test_a_failover_manager_sends_neither_its_key_nor_the_turn_elsewhere(server_a, server_b):
    from praisonaiagents.llm.failover import AuthProfile, FailoverManager

    manager = FailoverManager()
    manager.add_profile(AuthProfile(name="p", provider="openai", api_key="key-f", base_url=server_a.url))
    model = {"model": "openai/m1", "failover_manager": manager}
    agent = build_agent("provider", server_a.url, llm=model, base_url=None, api_key=None)
    agent.chat("hello")
    undo = to_b(agent, server_b)
    assert speaker(agent.chat("hello")) == "B m2"
    undo()
    agent.chat("hello")
    assert server_a.keys == ["Bearer key-f"] * 2 and server_b.keys == ["Bearer key-b"]


def test_the_default_model_of_a_team_does_not_replace_a_swapped_model(server_a, server_b):
    agent = build_agent("environment", server_a.url, llm=None)
    control = build_agent("environment", server_a.url, llm=None)
    to_b(agent, server_b)
    AgentTeam(agents=[agent, control], llm="m9")
    assert speaker(agent.chat("hello")) == "B m2"
    assert speaker(control.chat("hello")) == "A m9"


# --- turns under way ------------------------------------------------------------------------------------------------


def ask_in_thread(agent: Any, ask: Callable[[Any, str], Any], text: str, server: FakeServer) -> Callable[[], object]:
    """Begin a turn; return once ``server`` has its request. What is returned opens the gate and gives the answer."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(ask(agent, text)), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.requests and time.monotonic() < deadline:
        time.sleep(0.005)

    def finish() -> object:
        assert thread.is_alive() and answers == []
        server.gate.set()
        thread.join(20)
        return answers[0]

    return finish


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", PATHS)
def test_a_turn_under_way_ends_on_a_while_the_next_one_goes_to_b(kind, style, server_a, server_b):
    agent, ask = build_agent(kind, server_a.url), STYLES[style]
    finish = ask_in_thread(agent, ask, "HOLD on", server_a)
    to_b(agent, server_b)
    assert speaker(ask(agent, "next")) == "B m2"
    assert speaker(finish()) == "A m1"
    assert (len(server_a.requests), len(server_b.requests)) == (1, 1)
    assert speaker(ask(agent, "last")) == "B m2"


STREAMED_ON_THE_OPENAI_CLIENT = [("environment", "iter_stream"), ("environment", "start streaming")]


@pytest.mark.parametrize(
    ("kind", "style"),
    [(kind, style) for kind in PATHS for style in STYLES if (kind, style) not in STREAMED_ON_THE_OPENAI_CLIENT],
)
def test_a_tool_turn_under_way_asks_a_again_after_the_swap(kind, style, server_a, server_b):
    agent = build_agent(kind, server_a.url)
    finish = ask_in_thread(agent, STYLES[style], "HOLD the TOOL", server_a)
    to_b(agent, server_b)
    assert speaker(finish()) == "A m1"
    assert server_b.requests == [] and {request["model"] for request in server_a.requests} == {"m1"}


@pytest.mark.parametrize(("kind", "style"), STREAMED_ON_THE_OPENAI_CLIENT)
def test_a_streamed_tool_turn_under_way_on_the_openai_client_asks_b_for_its_end(kind, style, server_a, server_b):
    # The one exception, and the framework's: its generator reads the agent's client anew for the second request.
    agent = build_agent(kind, server_a.url)
    finish = ask_in_thread(agent, STYLES[style], "HOLD the TOOL", server_a)
    server_b.gate.set()
    to_b(agent, server_b)
    assert speaker(finish()) == "B m1"
    assert (len(server_a.requests), len(server_b.requests)) == (1, 1)


@pytest.mark.parametrize("kind", PATHS)
def test_a_turn_under_way_ends_on_b_after_the_undo(kind, server_a, server_b):
    agent = build_agent(kind, server_a.url)
    undo = to_b(agent, server_b)
    finish = ask_in_thread(agent, STYLES["chat"], "HOLD on", server_b)
    undo()
    assert speaker(agent.chat("next")) == "A m1"
    assert speaker(finish()) == "B m2"


# --- the way back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_two_swaps_undone_in_reverse_order_restore_exactly(kind, used, server_a, server_b, server_c):
    agent = build_agent(kind, server_a.url)
    if used:
        agent.chat("hello")
    original = written(agent)
    first = to_b(agent, server_b)
    assert speaker(agent.chat("hello")) == "B m2"
    between = written(agent)
    second = swap_model(agent, "m3", base_url=server_c.url, api_key="key-c")
    assert speaker(agent.chat("hello")) == "C m3"
    second()
    restored = written(agent)
    assert restored.keys() == between.keys() and all(restored[name] is between[name] for name in between)
    assert speaker(agent.chat("hello")) == "B m2"
    first()
    restored = written(agent)
    assert restored.keys() == original.keys() and all(restored[name] is original[name] for name in original)
    assert speaker(agent.chat("hello")) == "A m1"
    assert set(server_a.keys) == {"Bearer key-a"}
    assert set(server_b.keys) == {"Bearer key-b"} and set(server_c.keys) == {"Bearer key-c"}


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_an_undo_leaves_no_attribute_that_was_not_there(kind, server_a, server_b):
    agent = build_agent(kind, server_a.url)
    before = dict(agent.__dict__)
    to_b(agent, server_b)()
    # the framework makes its lock for changes of model when it is first asked for it, and keeps it
    assert agent.__dict__.keys() - before.keys() == {"_model_fallback_lock"}
    assert [name for name in before if agent.__dict__[name] is not before[name]] == []


@pytest.mark.parametrize("kind", PATHS)
def test_an_undo_may_be_called_twice(kind, server_a, server_b):
    agent = build_agent(kind, server_a.url)
    undo = to_b(agent, server_b)
    undo()
    undo()
    assert speaker(agent.chat("hello")) == "A m1"


class Held:
    """Stands for a server of ours."""


def test_the_server_is_held_by_the_agent_or_by_the_way_back_and_then_let_go(server_a, server_b):
    agent = build_agent("environment", server_a.url)
    assert server_of(agent) is None
    server = Held()
    held = weakref.ref(server)
    first = to_b(agent, server_b, server=server)
    del server
    gc.collect()
    assert server_of(agent) is held() is not None
    second = to_b(agent, server_b)
    gc.collect()
    assert server_of(agent) is None and held() is not None
    second()
    assert server_of(agent) is held()
    first()
    assert server_of(agent) is None and "_rl_server" not in agent.__dict__
    del first, second
    gc.collect()
    assert held() is None


def test_a_server_goes_with_its_agent(server_a, server_b):
    agent = build_agent("environment", server_a.url)
    server = Held()
    held = weakref.ref(server)
    to_b(agent, server_b, server=server)
    del server, agent
    gc.collect()
    assert held() is None


# --- what cannot be swapped -----------------------------------------------------------------------------------------


class Backend:
    """A managed back end that answers by itself."""

    async def execute(self, prompt, **options):
        return "from elsewhere"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"llm": "panel:council"}, "panel of models"),
        ({"llm": {"provider": "panel", "models": ["openai/m1", "openai/m2"]}}, "panel of models"),
        ({"llm": "m1", "backend": Backend()}, "managed back end"),
    ],
)
def test_an_agent_that_no_single_model_answers_is_refused_and_left_alone(options, reason, server_b):
    agent = Agent(name="many", instructions="Be brief.", output="silent", rules=False, **options)
    before = dict(agent.__dict__)
    with pytest.raises(AgentError, match=f"'many'.*{reason}"):
        check_swappable(agent)
    with pytest.raises(AgentError, match=reason):
        to_b(agent, server_b)
    assert agent.__dict__ == before


def test_an_agent_of_a_command_line_back_end_is_refused_and_left_alone(server_a, server_b):
    agent = build_agent("environment", server_a.url)
    agent._cli_backend = "claude-code"
    before = dict(agent.__dict__)
    with pytest.raises(AgentError, match="command-line back end"):
        to_b(agent, server_b)
    assert agent.__dict__ == before


@pytest.mark.parametrize("thing", [None, "agent", object(), Agent, SimpleNamespace(name="x", llm="m1")])
def test_what_is_no_agent_is_refused_and_left_alone(thing, server_b):
    before = dict(getattr(thing, "__dict__", {}))
    with pytest.raises(AgentError, match="is not a praisonaiagents Agent"):
        to_b(thing, server_b)
    assert dict(getattr(thing, "__dict__", {})) == before


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_every_kind_of_agent_here_is_swappable_and_the_check_changes_nothing(kind, server_a):
    agent = build_agent(kind, server_a.url)
    before = dict(agent.__dict__)
    check_swappable(agent)
    assert agent.__dict__ == before
