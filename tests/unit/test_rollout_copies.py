"""Copies of an agent for rollouts share nothing with it or with each other, and the model sees no difference."""

import gc
import inspect
import json
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from praisonaiagents import Agent, Handoff, HandoffConfig, handoff
from praisonaiagents.llm import LLM
from praisonaiagents.tools import BaseTool, tool

import praison_agent_rl as rl
from praison_agent_rl.agent_rollouts.copies import (
    BLANK,
    EMPTIED,
    HANDOFF,
    RolloutPlace,
    agents_of,
    check_copyable,
    end_rollout,
    policy_agents,
    rollout_copy,
    tool_log,
)
from praison_agent_rl.errors import AgentError
from praison_agent_rl.swap import fresh_copy, swap_model
from tests.fakes import build_agent
from tests.rollout_stand_in import KEY, Asked, ScriptedEndpoint, calls, says

PATHS = ("environment", "provider")  # one kind for each of the framework's two clients

pytestmark = pytest.mark.usefixtures("agents_around")

ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


def look_up(key: str, limit: int = 3) -> str:
    """Look something up.

    Args:
        key: What to look for.
        limit: How many to return.
    """
    ran.append(f"look_up {key}")
    return f"found {key}"


@tool
def weigh(thing: str) -> str:
    """Weigh a thing."""
    ran.append(f"weigh {thing}")
    return f"{thing} weighs 3"


class Ruler(BaseTool):
    name = "measure"
    description = "Measure a thing."

    def run(self, thing: str, unit: str = "cm") -> str:
        """Measure."""
        ran.append(f"measure {thing}")
        return f"{thing} is 4 {unit}"


class Oracle:
    """Ask the oracle."""

    def run(self, question: str) -> str:
        """Ask the oracle."""
        ran.append(f"oracle {question}")
        return "maybe"


async def wait_for(thing: str) -> str:
    """Wait for a thing."""
    ran.append(f"wait_for {thing}")
    return f"{thing} came"


def by_turns(asked: Asked) -> dict[str, Any]:
    """Calls each tool that it is shown, one after the other, and then says what they answered."""
    if len(asked.results) < len(asked.tools):
        name = sorted(asked.tools)[len(asked.results)]
        tools = {shown["function"]["name"]: shown["function"] for shown in asked.body["tools"]}
        names = tools[name]["parameters"].get("required") or []
        return calls(name, **{parameter: f"x-{asked.job}" for parameter in names})
    return says(f"{asked.agent} heard: {' / '.join(asked.results)}")


def place_at(endpoint: ScriptedEndpoint, id: str = "j1") -> RolloutPlace:
    return RolloutPlace(endpoint.address, KEY, id)


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(by_turns) as scripted:
        yield scripted


# --- where the calls go -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_each_agent_asks_at_the_place_under_its_own_name_and_nothing_else_is_asked(kind, server_a, endpoint):
    other = build_agent(kind, server_a.url, name="Bob & Söhne/2", tools=[look_up])
    agent = build_agent(kind, server_a.url, tools=[look_up], handoffs=[other])
    answer = rollout_copy(agent, place_at(endpoint, "a/b c")).chat("hello")
    assert [(asked.job, asked.agent) for asked in endpoint.asked] == [
        *[("a/b c", "helper")] * 2,
        *[("a/b c", "Bob & Söhne/2")] * 2,
        ("a/b c", "helper"),
    ]
    assert {asked.body["model"] for asked in endpoint.asked} == {"policy"} and endpoint.keys == {f"Bearer {KEY}"}
    assert server_a.requests == [] and ran == ["look_up x-a/b c"] * 2
    assert answer.startswith("helper heard: ") and "/2 heard: " in answer


@pytest.mark.parametrize("kind", PATHS)
def test_what_the_model_is_shown_is_what_the_original_shows(kind, server_a, endpoint):
    tools = [look_up, weigh, Ruler(), Oracle, wait_for]
    other = build_agent(kind, server_a.url, name="Bob", role="Teller", goal="Tell")
    agent = build_agent(kind, server_a.url, tools=tools, handoffs=[other])
    other.goal = "changed since the agent was built"
    agent.chat("hello")
    for stand_ins in (None, {name: lambda **_: "x" for name in ("look_up", "weigh", "measure", "Oracle", "wait_for")}):
        rollout_copy(agent, place_at(endpoint), tools=stand_ins).chat("hello")
        first = next(asked for asked in endpoint.asked if not asked.results)
        assert json.dumps(first.body["tools"]) == json.dumps(server_a.requests[0]["tools"])
        assert first.body["messages"] == server_a.requests[0]["messages"]
        kept = {"model", "messages", "tools"}
        assert {k: v for k, v in first.body.items() if k not in kept} == {
            k: v for k, v in server_a.requests[0].items() if k not in kept
        }
        endpoint.asked.clear()


@pytest.mark.parametrize("kind", PATHS)
def test_an_agent_on_another_model_keeps_it_and_is_isolated_all_the_same(kind, server_a, server_b, endpoint):
    place = {"base_url": server_b.url, "api_key": "key-b"}
    for llm in ({"llm": "openai/m2", **place}, {"llm": LLM(model="openai/m2", **place)}):
        other = build_agent("provider", server_b.url, name="Bob", tools=[], **llm)
        other.chat("before")
        agent = build_agent(kind, server_a.url, tools=[], handoffs=[other])
        assert [one.name for one in policy_agents(agent)] == ["helper"] and agents_of(agent) == [agent, other]
        server_b.requests.clear()
        twin = rollout_copy(agent, place_at(endpoint))
        assert "[B|m2] reply to" in twin.chat("hello")
        assert [request["model"] for request in server_b.requests] == ["m2"]
        assert "before" not in json.dumps(server_b.requests) and len(other.chat_history) == 2
        (copied,) = twin.handoffs
        assert copied is not other and copied.llm_instance is not other.llm_instance
        assert other.llm_instance._agent_history_append.__self__ is other
    assert {asked.agent for asked in endpoint.asked} == {"helper"} and server_a.requests == []


def test_the_same_model_is_told_by_address_and_name_whichever_client_asks(server_a, server_b):
    agent = build_agent("environment", server_a.url)
    names = {"bare": server_a.url, "provider": server_a.url + "/", "hosted_vllm": server_a.url, "dict": server_b.url}
    others = {kind: build_agent(kind, url, name=kind) for kind, url in names.items()}
    far = build_agent("provider", server_a.url, name="far", llm="openai/m9")
    asking = build_agent("environment", server_a.url, handoffs=[*others.values(), far])
    assert [one.name for one in policy_agents(asking)] == ["helper", "bare", "provider", "hosted_vllm"]
    swap_model(others["bare"], "m1", base_url=server_b.url, api_key="k")
    assert [one.name for one in policy_agents(asking)] == ["helper", "provider", "hosted_vllm"]
    assert policy_agents(agent) == [agent]


@pytest.mark.parametrize("kind", PATHS)
def test_where_the_policy_refuses_no_other_model_is_asked(kind, server_a):
    agent = build_agent(kind, server_a.url)
    agent.fallback_models = ["openai/m2"]
    with ScriptedEndpoint(lambda asked: 400) as refusing:
        assert rollout_copy(agent, place_at(refusing)).chat("hello") is None
    assert len(refusing.asked) == 1 and server_a.requests == [] and agent.fallback_models == ["openai/m2"]


@pytest.mark.parametrize("kind", PATHS)
def test_an_agent_that_was_swapped_is_copied_to_the_place_though_its_turns_are_pinned(
    kind, server_a, server_b, endpoint, tmp_path
):
    agent = build_agent(kind, server_a.url, tools=[])
    swap_model(agent, "v1", base_url=server_b.url, api_key="key-b")
    with rl.record(agent, store=tmp_path / "runs"):
        assert rollout_copy(agent, place_at(endpoint)).chat("hello") == "helper heard:"
        assert agent.chat("hello") == "[B|v1] reply to: hello"
    assert len(endpoint.asked) == 1 and len(server_b.requests) == 1 and server_a.requests == []


# --- what is not shared -----------------------------------------------------------------------------------------------


def state_of(agent: Any) -> dict[str, Any]:
    """What an agent holds: which object by which name, and what is in those that can change."""
    held = {name: value for name, value in vars(agent).items() if name not in LAZY}
    return {name: (id(value), list(value) if isinstance(value, list) else None) for name, value in held.items()}


LAZY = {"harness_base_prompt", "_context_manager", "_context_manager_initialized", "_model_fallback_lock"}


@pytest.mark.parametrize("kind", PATHS)
def test_a_rollout_leaves_no_trace_in_the_agents(kind, server_a, endpoint, tmp_path):
    options = {"tools": [look_up, weigh, Ruler()], "memory": True}
    other = build_agent(kind, server_a.url, name="Bob", **options)
    agent = build_agent(kind, server_a.url, handoffs=[other], **options)
    for one in (agent, other):
        one.chat("TOOL")
    agent.chat_history.append({"role": "user", "content": "planted in the original"})
    before = [state_of(one) for one in (agent, other)]
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    endpoint_texts = []
    for _ in range(2):
        rollout_copy(agent, place_at(endpoint)).chat("hello")
        endpoint_texts += [asked.text for asked in endpoint.asked]
    assert [state_of(one) for one in (agent, other)] == before
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert len(endpoint_texts) > 10 and not any("planted" in text or "TOOL" in text for text in endpoint_texts)


@pytest.mark.parametrize("kind", PATHS)
def test_copies_share_no_list_dictionary_lock_or_state_with_the_agent(kind, server_a, endpoint):
    agent = build_agent(kind, server_a.url, tools=[look_up])
    agent.chat("hello")
    one, two = (rollout_copy(agent, place_at(endpoint)) for _ in range(2))
    plain = (str, int, float, bool, type(None), frozenset, tuple, type, types.FunctionType)
    shared = {name for name, value in vars(agent).items() if vars(one).get(name) is value}
    shared = {name for name in shared if not isinstance(vars(agent)[name], plain)}
    configurations = {name for name in shared if name.endswith(("_config", "execution")) or name == "_telemetry"}
    assert shared - configurations <= {"_console", "_Agent__telemetry"}, "configurations alone are shared"
    assert not any(
        vars(one)[name] is vars(two)[name] for name in vars(one) if isinstance(vars(one)[name], (list, dict, set))
    )


def test_the_names_that_a_copy_has_other_values_for_are_the_frameworks(server_a):
    source = "\n".join(inspect.getsource(c) for c in Agent.__mro__ if c is not object)
    missing = {name for name in (*BLANK, *EMPTIED) if f"self.{name.removeprefix('_Agent')}" not in source}
    assert missing - {"interrupt_controller"} == set()
    assert "self.interrupt_controller = " in source and f'"{HANDOFF}"' in source
    made = handoff(build_agent("environment", server_a.url))
    assert {"agent", "_semaphore", "_semaphore_loop"} <= vars(made).keys()


@pytest.mark.parametrize("copied", ["for a rollout", "fresh"])
def test_the_end_of_a_copy_takes_no_approval_from_the_agent(copied, server_a, endpoint):
    from praisonaiagents.approval import get_approval_registry

    agent = build_agent("environment", server_a.url)
    registry, scope = get_approval_registry(), agent._approval_scope_id
    registry.auto_approve_tool(scope, "execute_command")
    before = dict(registry._agent_tool_auto_approve)
    twin = rollout_copy(agent, place_at(endpoint)) if copied == "for a rollout" else fresh_copy(agent)
    del twin
    gc.collect()
    assert before and dict(registry._agent_tool_auto_approve) == before


def test_the_end_of_a_rollout_closes_its_own_connections_and_no_others(server_a, server_b, endpoint):
    other = build_agent("environment", server_a.url, name="Bob", tools=[])
    swap_model(other, "v1", base_url=server_b.url, api_key="key-b")
    agent = build_agent("environment", server_a.url, tools=[], handoffs=[other])
    twin = rollout_copy(agent, place_at(endpoint))
    twin.chat("hello")
    clients = [vars(one)["_Agent__openai_client"] for one in agents_of(twin)]
    closed: list[Any] = []
    for client in clients:
        client.close = lambda client=client: closed.append(client)
    end_rollout(twin, place_at(endpoint))
    assert closed == clients[:1] and clients[1] is other._openai_client


def test_history_is_what_the_first_agent_was_told_before(server_a, endpoint):
    agent = build_agent("environment", server_a.url, tools=[])
    history = [{"role": "user", "content": "I am Ann."}, {"role": "assistant", "content": "Hello Ann."}]
    rollout_copy(agent, place_at(endpoint), history=history).chat("Who am I?")
    said = [(message["role"], message["content"]) for message in endpoint.asked[0].body["messages"]]
    assert said[1:] == [("user", "I am Ann."), ("assistant", "Hello Ann."), ("user", "Who am I?")]
    assert len(history) == 2 and agent.chat_history == []


@pytest.mark.parametrize("kind", PATHS)
def test_no_recording_takes_a_rollout_nor_what_is_asked_in_one(kind, server_a, endpoint, tmp_path):
    asked_within = build_agent(kind, server_a.url, name="within")

    def ask(question: str) -> str:
        """Ask."""
        return str(asked_within.chat(question))

    other = build_agent(kind, server_a.url, name="Bob", tools=[ask])
    agent = build_agent(kind, server_a.url, tools=[ask], handoffs=[other])
    with rl.record(store=tmp_path / "all") as everything, rl.record("helper", store=tmp_path / "named") as named:
        rollout_copy(agent, place_at(endpoint)).chat("hello")
        assert len(endpoint.asked) == 5 and len(server_a.requests) == 2
        assert (everything.counts["runs"], everything.counts["calls"]) == (0, 0)
        agent.chat("hello")
        assert (everything.counts["runs"], everything.counts["calls"]) == (1, 1)
        assert (named.counts["runs"], named.counts["calls"]) == (1, 1)
        assert {**everything.counts, **named.counts}["dropped"] == 0


# --- handing over -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_handoffs_keep_their_configuration_and_callbacks_and_reach_copies(kind, server_a, endpoint):
    sources: list[Any] = []
    other = build_agent(kind, server_a.url, name="Bob", tools=[])
    third = build_agent(kind, server_a.url, name="Cleo", tools=[])
    passed = handoff(other, tool_name_override="ask_bob", on_handoff=sources.append, context_policy="full")
    agent = build_agent(kind, server_a.url, tools=[third.as_tool("Invoke Cleo")], handoffs=[passed])
    for one in (agent, other, third):
        one.chat("planted")
    twin = rollout_copy(agent, place_at(endpoint))
    twin.chat("hello")
    assert [asked.agent for asked in endpoint.asked] == ["helper", "Bob", "helper", "Cleo", "helper"]
    assert sources == [twin], "the callback is told of the copy"
    assert not any("planted" in asked.text for asked in endpoint.asked)
    assert endpoint.asked[3].body["messages"][-1]["content"] == "x-j1", "a tool of an agent is given its task"
    copied = twin.handoffs[0]
    assert isinstance(copied, Handoff) and copied is not passed and copied.agent is not other
    assert copied.config is passed.config and passed.agent is other
    assert [len(one.chat_history) for one in (agent, other, third)] == [2, 2, 2]


@pytest.mark.parametrize("kind", PATHS)
def test_agents_that_hand_over_to_each_other_do_so_as_copies(kind, server_a, endpoint):
    one = build_agent(kind, server_a.url, name="one", tools=[])
    two = build_agent(kind, server_a.url, name="two", tools=[], handoffs=[one])
    one.handoffs.append(handoff(two, config=HandoffConfig(), tool_policy_mode="passthrough"))
    made = one.handoffs[0].to_tool_function(one)
    setattr(made, HANDOFF, one.handoffs[0])
    one.tools.append(made)
    assert agents_of(one) == [one, two] and agents_of(two) == [two, one]
    twin = rollout_copy(one, place_at(endpoint))
    (there,) = twin.handoffs
    assert there.agent.handoffs == [twin] and twin is not one and there.agent is not two
    twin.chat("hello")
    assert [asked.agent for asked in endpoint.asked] == ["one", "two", "two", "one"], "back to one is a cycle"
    assert one.chat_history == two.chat_history == [] and server_a.requests == []


def test_a_method_of_an_agent_that_is_a_tool_becomes_one_of_its_copy(server_a, endpoint):
    other = build_agent("environment", server_a.url, name="Bob", tools=[])
    agent = build_agent("environment", server_a.url, tools=[other.chat])
    assert agents_of(agent) == [agent, other]
    rollout_copy(agent, place_at(endpoint)).chat("hello")
    assert [asked.agent for asked in endpoint.asked] == ["helper", "Bob", "helper"]
    assert other.chat_history == [] and server_a.requests == []


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_stand_ins_run_and_the_originals_do_not_in_any_of_the_copies(kind, server_a, endpoint):
    stood: list[tuple[str, dict[str, Any]]] = []

    def standing(name: str) -> Any:
        def stand_in(**arguments: Any) -> str:
            stood.append((name, arguments))
            return f"instead of {name}"

        return stand_in

    tools = [look_up, weigh, Ruler(), Oracle, wait_for]
    other = build_agent(kind, server_a.url, name="Bob", tools=[look_up])
    agent = build_agent(kind, server_a.url, tools=tools, handoffs=[other])
    names = ("look_up", "weigh", "measure", "Oracle", "wait_for")
    twin = rollout_copy(agent, place_at(endpoint), tools={name: standing(name) for name in names})
    answer = twin.chat("hello")
    asked = {shown["function"]["name"] for shown in endpoint.asked[0].body["tools"]} - {"transfer_to_bob"}
    assert ran == [] and {name for name, _ in stood} == asked and len(asked) >= 4
    assert [name for name, _ in stood].count("look_up") == 2, "that of the other agent, too"
    assert ("look_up", {"key": "x-j1"}) in stood and "instead of look_up" in answer
    agent.execute_tool("look_up", {"key": "y"})
    assert ran == ["look_up y"], "the agent's own tools are as they were"


@pytest.mark.parametrize("kind", PATHS)
def test_the_tools_themselves_run_where_nothing_stands_in_and_are_timed(kind, server_a, endpoint):
    def fails(thing: str) -> str:
        """Fail."""
        raise ValueError(f"no {thing}")

    agent = build_agent(kind, server_a.url, tools=[look_up, weigh, wait_for])
    twin = rollout_copy(agent, place_at(endpoint))
    twin.chat("hello")
    assert sorted(ran) == ["look_up x-j1", "wait_for x-j1", "weigh x-j1"]
    assert tool_log(twin).errors == [] and 0 < tool_log(twin).seconds < 60
    failing = rollout_copy(build_agent(kind, server_a.url, tools=[fails]), place_at(endpoint, "j2"))
    with pytest.raises(Exception, match="no x-j2"):
        failing.chat("hello")
    assert tool_log(failing).errors == ["fails: ValueError: no x-j2"]


def test_arguments_of_a_stand_in_are_converted_as_those_of_the_tool_are(server_a, endpoint):
    given: list[Any] = []
    agent = build_agent("environment", server_a.url, tools=[look_up])
    twin = rollout_copy(agent, place_at(endpoint), tools={"look_up": lambda **arguments: given.append(arguments)})
    twin.execute_tool("look_up", {"key": "x", "limit": "7"})
    assert given == [{"key": "x", "limit": 7}]


def test_a_function_says_what_a_copy_has_instead_of_a_list_of_tools(server_a, endpoint):
    from praison_agent_rl.agent_rollouts.agent_tools import own_tools
    from praison_agent_rl.agent_rollouts.stand_ins import StandIn, with_tools

    agent = build_agent("environment", server_a.url, tools=[look_up, weigh])
    (known,) = [found for found in own_tools(agent) if found.name == "look_up"]
    made = StandIn(known, lambda **arguments: f"recorded for {arguments['key']}")
    twin = rollout_copy(agent, place_at(endpoint), tools=lambda tools: with_tools(tools, {"look_up": made}))
    assert "recorded for x-j1" in twin.chat("hello")
    assert "look_up x-j1" not in ran and tool_log(twin).seconds > 0


# --- answers are judged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_an_answer_that_a_guardrail_refuses_is_asked_for_again_as_in_production(kind, server_a):
    def polite(answer: Any) -> tuple[bool, Any]:
        return ("please" in answer.raw, answer.raw if "please" in answer.raw else "say please")

    def waits(count: int) -> float:
        waited.append(count)
        return 0.0

    waited: list[int] = []
    agent = build_agent(kind, server_a.url, tools=[], guardrails=polite)
    agent._guardrail_retry_delay = waits
    with ScriptedEndpoint(lambda asked: says("yes please" if "say please" in asked.text else "no")) as judged:
        answer = rollout_copy(agent, place_at(judged)).chat("hello")
        assert waited == [], "a copy asks again at once"
        asked, judged.asked = list(judged.asked), []
        assert agent.guardrail_retry_count == 0
        swap_model(agent, "policy", base_url=place_at(judged).url_of("helper"), api_key=KEY)
        assert answer == agent.chat("hello") and asked == judged.asked and waited == [1]
    if kind == "environment":  # by litellm this framework's own retry fails, and says so in its place
        assert answer == "yes please" and len(asked) == 2
    assert fresh_copy(agent)._guardrail_fn is None and fresh_copy(agent, judged=True)._guardrail_fn is polite


# --- what cannot be copied --------------------------------------------------------------------------------------------


def test_all_that_cannot_be_copied_is_said_at_once(server_a):
    class Looks:
        name = "duck"

        def chat(self, prompt: str) -> str:
            return prompt

    panel = Agent(name="many", instructions="x", llm="panel:council", output="silent", rules=False)
    hosted = build_agent("environment", server_a.url, name="far", backend=object())
    learned = build_agent("environment", server_a.url, name="learned", knowledge=["facts.txt"])
    agent = build_agent("environment", server_a.url, handoffs=[panel, hosted, learned, Looks()])
    with pytest.raises(AgentError) as found:
        check_copyable(agent)
    told = str(found.value)
    assert "agent 'many' is answered by a panel" in told and "agent 'far' is answered by a managed back end" in told
    assert "agent 'learned' has knowledge=" in told and "is not a praisonaiagents Agent" in told
    with pytest.raises(AgentError, match="panel"):
        rollout_copy(agent, RolloutPlace("http://127.0.0.1:1", KEY, "j1"))


def test_agents_that_their_names_do_not_tell_apart_are_refused(server_a):
    agent = build_agent("environment", server_a.url, handoffs=[build_agent("environment", server_a.url)])
    with pytest.raises(AgentError, match="several agents are called 'helper'"):
        check_copyable(agent)


def test_a_model_object_that_copies_would_share_is_refused(server_a):
    class Model:
        def get_response(self, **_: Any) -> str:
            return "x"

        get_response_async = get_response_stream = get_response

    other = build_agent("environment", server_a.url, name="Bob", llm=Model())
    with pytest.raises(AgentError, match="'Bob' has llm=Model, which its copies would share"):
        check_copyable(build_agent("environment", server_a.url, handoffs=[other]))


def test_names_of_no_agent_and_no_tool_are_refused_with_those_that_there_are(server_a):
    agent = build_agent("environment", server_a.url, tools=[look_up, weigh])
    place = RolloutPlace("http://127.0.0.1:1", KEY, "j1")
    with pytest.raises(AgentError, match=r"trained=\['Bob'\] are none of the agents .*\['helper'\]"):
        rollout_copy(agent, place, trained=["Bob", "helper"])
    with pytest.raises(AgentError, match=r"tools=\['look'\] can stand in for nothing: .*\['look_up', 'weigh'\]"):
        rollout_copy(agent, place, tools={"look": look_up})


def test_the_address_of_a_call_says_rollout_and_agent():
    place = RolloutPlace("http://127.0.0.1:80/", KEY, "r/1")
    assert place.url_of("a b?/é") == "http://127.0.0.1:80/rollouts/r%2F1/a%20b%3F%2F%C3%A9/v1"


def test_copies_can_be_made_in_many_threads_at_once(server_a, endpoint, tmp_path: Path):
    agent = build_agent("environment", server_a.url, tools=[look_up], handoffs=[])
    answers: list[str] = []

    def roll(number: int) -> None:
        answers.append(rollout_copy(agent, place_at(endpoint, f"j{number}")).chat(f"hello {number}"))

    threads = [threading.Thread(target=roll, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [f'helper heard: "found x-j{number}"' for number in range(8)]
