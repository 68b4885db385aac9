"""Tools in training: none with side effects runs by accident, and the model sees the same tools as in production."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from praison_agent_rl.agent_rollouts.agent_tools import own_tools
from praison_agent_rl.agent_rollouts.replays import Replays, call_key, text_told, value_told_as
from praison_agent_rl.agent_rollouts.stand_ins import StandIn
from praison_agent_rl.agent_rollouts.tools import agent_tools, is_pure, plan_tools, pure
from praison_agent_rl.errors import AgentError, ConfigError
from praison_agent_rl.records import Call, Run
from tests.fakes import FakeServer, build_agent

RAN: list[str] = []
"""Tools that really ran."""
NONE_RECORDED = {"error": "no recorded result for this call in training"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, in_tmp: Any, server_a: FakeServer) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_BASE_URL", server_a.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key-a")
    RAN.clear()
    yield


def add(a: int, b: int) -> int:
    """Add two numbers."""
    RAN.append("add")
    return a + b


@pure
def length(text: str) -> int:
    """Count the letters.

    Args:
        text: What to count.
    """
    RAN.append("length")
    return len(text)


def send_mail(to: str, body: str = "") -> str:
    """Send a mail.

    Args:
        to: Who gets it.
        body: What it says.
    """
    RAN.append("send_mail")
    return "sent"


async def fetch(url: str, times: int = 1) -> str:
    """Fetch a page.

    Args:
        url: Its address.
        times: How often.
    """
    RAN.append("fetch")
    return "page"


class Desk:
    """Something with a method that is a tool."""

    def book(self, seat: int) -> str:
        """Book a seat."""
        RAN.append("book")
        return f"seat {seat}"


class Wiki:
    """A tool as LangChain has them: a class with ``run``."""

    def __init__(self) -> None:
        RAN.append("Wiki made")

    def run(self, page: str) -> str:
        """Read a page."""
        RAN.append("Wiki")
        return "text"


class Scraper:
    """A tool as CrewAI has them: a class with ``_run``."""

    def _run(self, page: str) -> str:
        """Scrape a page."""
        RAN.append("Scraper")
        return "text"


class Runner:
    """What the framework's MCP object asks for a stdio server: its tools, and a way to call one."""

    resources = resource_templates = prompts = ()
    _dead = None

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        RAN.append(name)
        return f"{name} {json.dumps(arguments, sort_keys=True)}"


def mcp_tool(name: str, properties: dict[str, Any], required: tuple[str, ...] = (), said: str = "Do it.") -> Any:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return SimpleNamespace(name=name, description=said, inputSchema=schema)


def mcp_of(*tools: Any) -> Any:
    """The framework's own MCP object, without a server behind it."""
    from praisonaiagents.mcp.mcp import MCP

    mcp = MCP.__new__(MCP)
    mcp.is_sse = mcp.is_http_stream = mcp.is_websocket = False
    mcp.allowed_tools = mcp.disabled_tools = mcp._tool_prefix = None
    mcp.runner = Runner(list(tools))
    mcp._tools = mcp._generate_tool_functions()
    return mcp


ROOMS = mcp_tool("rooms", {"city": {"type": "string", "description": "Where."}}, ("city",), "List rooms.")
BOOK = mcp_tool("book_room", {"room": {"type": "integer"}, "nights": {"type": "integer", "default": 1}}, ("room",))


@pytest.fixture
def make(server_a: FakeServer) -> Callable[..., Any]:
    def made(*tools: Any, kind: str = "environment", **options: Any) -> Any:
        return build_agent(kind, server_a.url, tools=list(tools), **options)

    return made


def asked(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def round_of(*pairs: tuple[dict[str, Any], str | None]) -> list[dict[str, Any]]:
    """An assistant's calls, and the results of those that have any."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in pairs if text is not None
    ]
    return [{"role": "assistant", "content": None, "tool_calls": [call for call, _ in pairs]}, *results]


def a_run(*rounds: list[dict[str, Any]], time: float = 1.0) -> Run:
    """A run whose last request shows all of ``rounds``, the one before it one less, and so on."""
    first = [{"role": "user", "content": "Go."}]
    shown = [first + [message for one in rounds[:count] for message in one] for count in range(len(rounds) + 1)]
    calls = [Call(id=f"k{at}", time=time + at, messages=messages) for at, messages in enumerate(shown)]
    return Run(id=f"r{time}", time=time, calls=calls)


def sent_tools(agent: Any, server: FakeServer) -> list[Any]:
    """The schemas, and the system prompt, that the agent sends."""
    server.requests.clear()
    agent.chat("hello")
    request = server.requests[0]
    return [request.get("tools"), request["messages"][0]]


def test_tools_of_every_kind_are_found_with_what_would_run() -> None:
    from praisonaiagents import Agent, tool

    @tool
    def search(query: str) -> str:
        """Search."""
        return query

    lister = Agent(name="lister", instructions="List.", tools=[fetch], llm="m1")
    hosted, only_schema = {"type": "web_search"}, {"type": "function", "function": {"name": "far", "parameters": {}}}
    tools = [add, Desk().book, Wiki, Scraper, search, mcp_of(ROOMS, BOOK), hosted, only_schema]
    agent = Agent(name="main", instructions="Help.", tools=tools, handoffs=[lister], llm="m1")
    found = {tool.name: tool for tool in agent_tools(agent)}
    assert {name: tool.kind for name, tool in found.items()} == {
        **{"add": "function", "book": "method", "Wiki": "class", "Scraper": "class", "search": "framework"},
        **{"rooms": "mcp", "book_room": "mcp", "web_search": "hosted", "far": "schema"},
        **{"transfer_to_lister": "handoff", "fetch": "function"},
    }
    assert [name for name, tool in found.items() if tool.callable is None] == ["web_search", "far"]
    assert [name for name, tool in found.items() if tool.is_async] == ["fetch"]
    assert found["fetch"].agent == "lister" and found["add"].agent == "main"
    assert found["rooms"].schema["function"]["parameters"]["required"] == ["city"]
    assert found["Wiki"].callable(page="x", unknown=1) == "text"
    assert found["Scraper"].callable(page="x") == "text"
    assert found["search"].callable(query="x") == "x"
    assert RAN == ["Wiki made", "Wiki", "Scraper"]  # only what was called here


@pytest.mark.parametrize("kind", ["environment", "provider"])
def test_schemas_are_those_that_are_sent(kind: str, make: Callable[..., Any], server_a: FakeServer) -> None:
    from praisonaiagents import tool

    @tool(description="Look it up.")
    def search(query: str, limit: int = 5) -> str:
        """Search.

        At length.
        """
        return query

    agent = make(add, Desk().book, Wiki, search, mcp_of(ROOMS, BOOK), kind=kind)
    sent = sent_tools(agent, server_a)[0]
    known = [tool.schema for tool in own_tools(agent)]
    assert len(sent) == 6
    assert sorted(sent, key=str) == sorted(known, key=str)


@pytest.mark.parametrize("kind", ["environment", "provider"])
def test_stand_ins_change_nothing_of_what_the_model_sees(
    kind: str, make: Callable[..., Any], server_a: FakeServer
) -> None:
    from praisonaiagents import tool

    @tool
    def search(query: str, limit: int = 5) -> str:
        """Search."""
        return query

    lister = make(add, name="lister")
    tools = [add, Desk().book, Wiki, search, mcp_of(ROOMS, BOOK)]
    agent = make(*tools, kind=kind, handoffs=[lister])
    plan = plan_tools(agent, run_tools=["rooms"])
    before = sent_tools(agent, server_a)
    agent.tools = plan.in_place(agent.tools)
    agent._formatted_tools_cache.clear()
    agent._system_prompt_cache.clear()
    assert sent_tools(agent, server_a) == before
    assert [type(one).__name__ for one in agent.tools] == [*["StandIn"] * 6, "function"]  # the handoff stays


@pytest.mark.parametrize("kind", ["environment", "provider"])
def test_a_refused_tool_tells_the_model_and_does_not_run(
    kind: str, make: Callable[..., Any], server_a: FakeServer
) -> None:
    agent = make(add, kind=kind)
    plan = plan_tools(agent)
    agent.tools = plan.in_place(agent.tools)
    agent.chat("TOOL")
    told = [message["content"] for message in server_a.requests[-1]["messages"] if message["role"] == "tool"]
    assert len(told) == 1 and "this tool does not run in training" in told[0]
    assert RAN == [] and plan.misses == {"add": 1} and plan.refused == ["add"]


@pytest.mark.parametrize("kind", ["environment", "provider"])
def test_a_recorded_result_reaches_the_model_as_it_did(
    kind: str, make: Callable[..., Any], server_a: FakeServer
) -> None:
    agent = make(add, kind=kind)
    plan = plan_tools(agent, runs=[a_run(round_of((asked("add", '{"b": "3", "a": 2}'), '"seventeen"')))])
    agent.tools = plan.in_place(agent.tools)
    agent.chat("TOOL")
    told = [message["content"] for message in server_a.requests[-1]["messages"] if message["role"] == "tool"]
    assert told == ['"seventeen"'] and RAN == [] and plan.misses == {}


def test_what_is_marked_pure_and_what_comes_of_it_is_not() -> None:
    import functools

    from praisonaiagents import tool
    from praisonaiagents.tools.base import BaseTool

    @functools.wraps(length)
    def logged(text: str) -> int:
        return length(text)

    @pure
    class Reader(BaseTool):
        name = "reader"
        description = "Reads."

        def run(self, page: str) -> str:
            return page

    class Writer(Reader):
        name = "writer"

    below, above, other = tool(length), pure(tool(send_mail)), tool(add)
    desk = Desk()
    assert [is_pure(one) for one in (length, functools.partial(length, "x"), below, above, Reader())] == [True] * 5
    assert [is_pure(one) for one in (logged, other, send_mail, Writer(), desk.book, None, add)] == [False] * 7
    marked = mcp_of(ROOMS)
    pure(marked)
    assert is_pure(marked)
    with pytest.raises(ConfigError, match="name the tool in run_tools instead"):
        pure(len)


def test_pure_methods_are_marked_through_their_function() -> None:
    class Clock:
        @pure
        def now(self) -> str:
            return "noon"

    assert is_pure(Clock().now)


def test_a_plan_says_what_becomes_of_each_tool(make: Callable[..., Any]) -> None:
    runs = [a_run(round_of((asked("fetch", '{"url": "a"}'), '"one"')))]
    agent = make(add, length, send_mail, fetch, mcp_of(ROOMS, BOOK))
    plan = plan_tools(
        agent, tools_for_training={"send_mail": lambda to, body="": "noted"}, run_tools=["rooms"], runs=runs
    )
    assert {one.tool.name: one.how for one in plan.tools} == {
        **{"add": "refused", "length": "runs", "send_mail": "stand-in", "fetch": "replayed"},
        **{"rooms": "runs", "book_room": "refused"},
    }
    assert plan.refused == ["add", "book_room"]
    assert sorted(plan.callables()) == ["add", "book_room", "fetch", "send_mail"]
    assert plan.callables()["send_mail"](to="x") == "noted"
    assert plan.callables()["fetch"](url="a") == "one"
    assert plan.callables()["fetch"](url="b") == NONE_RECORDED
    assert plan.misses == {"fetch": 1} and RAN == []


def test_the_rehearsal_is_a_table_and_runs_nothing(make: Callable[..., Any]) -> None:
    plan = plan_tools(make(add, length), tools_for_training={"add": max_of})
    assert plan.rehearsal().splitlines() == [
        "tool    kind      in training  why",
        "add     function  stand-in     max_of answers, by tools_for_training",
        "length  function  runs         marked pure",
        "Would really run: length.",
    ]
    assert plan_tools(make(), run_tools=True).rehearsal() == "The agent has no tools."
    assert RAN == []


def max_of(a: int, b: int) -> int:
    return max(a, b)


def test_a_handoff_runs_unless_it_calls_functions_of_the_user(make: Callable[..., Any]) -> None:
    from praisonaiagents import handoff

    def told(*_: Any) -> None:
        RAN.append("told")

    plain, loud, quiet = (make(name=name) for name in ("plain", "loud", "quiet"))
    given = [plain, handoff(loud, on_handoff=told), handoff(quiet, on_handoff=pure(lambda *_: None))]
    agent = make(handoffs=given)
    hows = {one.tool.name: (one.how, one.why) for one in plan_tools(agent).tools}
    assert hows["transfer_to_plain"] == ("runs", "hands over to 'plain', whose tools stand in this table")
    assert hows["transfer_to_loud"][0] == "refused" and "on_handoff" in hows["transfer_to_loud"][1]
    assert hows["transfer_to_quiet"][0] == "runs"
    assert plan_tools(agent, run_tools=["transfer_to_loud"]).refused == []


def test_all_that_is_wrong_is_said_at_once(make: Callable[..., Any]) -> None:
    given = {
        "sendmail": max_of,
        "add": "tests.unit.test_rollout_tools:nothing",
        "length": 3,
        "send_mail": lambda to, subject: "",
        "fetch": lambda url, times: "",
    }
    with pytest.raises(ConfigError) as caught:
        plan_tools(make(add, length, send_mail, fetch), tools_for_training=given, run_tools=["ad", "fetch"])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "tools_for_training['sendmail']: no tool is called 'sendmail' (did you mean 'send_mail'?)"
    )
    assert "tools_for_training['add']" in lines[1] and "has no 'nothing'" in lines[1]
    assert lines[2] == "tools_for_training['length']: 3 is a int, not a function or 'module:function'"
    assert lines[3].endswith("does not take 'body', which calls of the tool have")
    assert lines[4].endswith("needs 'subject', which the tool does not have")
    assert lines[5].endswith("needs 'times', which calls of the tool may leave out")
    assert lines[6].startswith("run_tools: no tool is called 'ad' (did you mean 'add'?)")
    assert lines[7] == "run_tools and tools_for_training both name 'fetch'; leave it out of one"
    assert len(lines) == 8


@pytest.mark.parametrize("given", ["add", None, 3])
def test_run_tools_is_a_list_or_true(given: Any, make: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="give a list of tools' names, or True"):
        plan_tools(make(add), run_tools=given)


def test_all_tools_run_when_that_is_said(make: Callable[..., Any]) -> None:
    plan = plan_tools(make(add, send_mail, {"type": "web_search"}), run_tools=True)
    assert {one.tool.name: one.how for one in plan.tools} == {
        **{"add": "runs", "send_mail": "runs", "web_search": "refused"},
    }


def test_a_stand_in_is_found_by_its_module_and_name(make: Callable[..., Any]) -> None:
    plan = plan_tools(make(add), tools_for_training={"add": "tests.unit.test_rollout_tools:max_of"})
    assert plan.callables()["add"](a=2, b=9) == 9


def test_an_async_stand_in_is_waited_for(make: Callable[..., Any], server_a: FakeServer) -> None:
    async def later(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return 10 * a + b

    agent = make(add)
    plan = plan_tools(agent, tools_for_training={"add": later})
    agent.tools = plan.in_place(agent.tools)
    agent.chat("TOOL")
    assert [m["content"] for m in server_a.requests[-1]["messages"] if m["role"] == "tool"] == ["23"] and RAN == []


def test_an_mcp_object_of_which_one_tool_is_refused_is_taken_apart(make: Callable[..., Any]) -> None:
    agent = make(mcp_of(ROOMS, BOOK))
    plan = plan_tools(agent, run_tools=["rooms"])
    agent.tools = plan.in_place(agent.tools)
    assert [tool.name for tool in agent.tools] == ["rooms", "book_room"]
    assert agent.execute_tool("rooms", {"city": "Bern"}) == 'rooms {"city": "Bern"}'
    assert agent.execute_tool("book_room", {"room": 1})["error"] == "this tool does not run in training"
    assert RAN == ["rooms"]


def test_an_mcp_object_of_which_all_tools_run_stays(make: Callable[..., Any]) -> None:
    mcp = mcp_of(ROOMS, BOOK)
    agent = make(mcp)
    assert plan_tools(agent, run_tools=True).in_place(agent.tools)[0] is mcp


def test_a_tool_that_an_mcp_object_filters_out_is_refused(make: Callable[..., Any]) -> None:
    mcp = mcp_of(ROOMS, BOOK)
    mcp._tools = mcp._tools[:1]  # as allowed_tools=["rooms"] does; the framework sends, and would run, the other too
    agent = make(mcp)
    plan = plan_tools(agent, run_tools=True)
    agent.tools = plan.in_place(agent.tools)
    assert plan.refused == ["book_room"]
    assert agent.execute_tool("book_room", {"room": 1})["error"] == "this tool does not run in training" and RAN == []


def test_a_schema_without_a_function_gets_its_stand_in(make: Callable[..., Any], server_a: FakeServer) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    schema = {"type": "function", "function": {"name": "far", "description": "Far away.", "parameters": parameters}}
    agent = make(schema)
    before = sent_tools(agent, server_a)
    plan = plan_tools(agent, tools_for_training={"far": lambda x: x * 2})
    agent.tools = plan.in_place(agent.tools)
    agent._formatted_tools_cache.clear()
    assert sent_tools(agent, server_a) == before
    assert agent.execute_tool("far", {"x": "ab"}) == "abab"


def test_tools_of_one_name_that_differ_are_not_mixed_up(make: Callable[..., Any]) -> None:
    def other(x: str) -> str:
        """Something else."""
        return x

    other.__name__ = "add"
    agent = make(add, handoffs=[make(other, name="second")])
    with pytest.raises(AgentError, match="agents 'helper' and 'second' each have a tool 'add' and the two differ"):
        plan_tools(agent)
    assert plan_tools(agent, run_tools=["add"]).refused == []


def test_a_name_runs_as_pure_only_if_all_its_tools_are(make: Callable[..., Any]) -> None:
    def same(text: str) -> int:
        RAN.append("same")
        return 0

    same.__name__, same.__doc__ = "length", length.__doc__
    agent = make(length, handoffs=[make(same, name="second")])
    assert plan_tools(agent).refused == ["length"]


def test_a_copy_of_the_agent_takes_what_stands_in(make: Callable[..., Any]) -> None:
    from praison_agent_rl.agent_rollouts.copies import RolloutPlace, rollout_copy

    agent = make(add, Wiki, send_mail)
    plan = plan_tools(agent, runs=[a_run(round_of((asked("add", '{"a": "2", "b": 3}'), "99")))])
    twin = rollout_copy(agent, RolloutPlace("http://127.0.0.1:9", "key", "job"), tools=plan.callables())
    assert twin.execute_tool("add", {"a": "2", "b": 3}) == 99
    refused = {"error": "this tool does not run in training"}
    assert [twin.execute_tool("Wiki", {"page": "x"}), twin.execute_tool("send_mail", {"to": "x"})] == [refused] * 2
    assert RAN == [] and plan.misses == {"Wiki": 1, "send_mail": 1}


def test_misses_are_counted_from_many_threads(make: Callable[..., Any]) -> None:
    plan = plan_tools(make(fetch), runs=[a_run(round_of((asked("fetch", '{"url": "a"}'), '"one"')))])
    standing = plan.callables()["fetch"]
    threads = [
        threading.Thread(target=lambda: [standing(url=url) for _ in range(200) for url in "ab"]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plan.misses == {"fetch": 1600}


def test_the_framework_reads_of_a_stand_in_what_it_reads_of_the_tool() -> None:
    from praisonaiagents import tool

    @tool(restart_safe=False, to_model_output=lambda result: "short")
    def search(query: str) -> str:
        """Search."""
        return query

    made = own_tools(SimpleNamespace(name="a", tools=[search]))[0]
    live, recorded = StandIn(made, max_of), StandIn(made, max_of, recorded=True)
    assert live.restart_safe is recorded.restart_safe is False
    assert live.to_model_output("x") == "short" and not hasattr(recorded, "to_model_output")


# replays


def test_a_call_is_its_arguments_as_json() -> None:
    same = [
        ('{"a": 1, "b": [1.0, {"c": null}]}', {"b": [1, {"c": None}], "a": 1.0}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ('{"a": "é"}', {"a": "\u00e9"}),
    ]
    different = [({"a": 1}, {"a": "1"}), ({"a": True}, {"a": 1}), ({"a": None}, {}), ({"a": [1, 2]}, {"a": [2, 1]})]
    assert all(call_key(one) == call_key(other) for one, other in same)
    assert all(call_key(one) != call_key(other) for one, other in different)
    assert call_key('{"a": 1') == '{"a": 1'


def test_results_go_with_the_calls_of_their_ids() -> None:
    first, second, third = asked("add", '{"a": 1}', "x"), asked("add", '{"a": 2}', "y"), asked("mail", "{}", "z")
    block = [
        {"role": "assistant", "content": None, "tool_calls": [first, second, third]},
        {"role": "tool", "tool_call_id": "y", "content": "two"},
        {"role": "tool", "tool_call_id": "x", "content": "one"},
    ]
    known = Replays.of([a_run(block)])
    assert known.results == {("add", '{"a": 1}'): "one", ("add", '{"a": 2}'): "two"}  # that of z is left out
    assert known.find("mail", "{}") is None and known.calls("add") == 2 and known.differing == {}


def test_ids_that_come_again_are_those_of_their_own_round() -> None:
    rounds = [round_of((asked("add", f'{{"a": {n}}}', "call_0"), f"result {n}")) for n in range(3)]
    known = Replays.of([a_run(*rounds)])
    assert [known.find("add", {"a": n}) for n in range(3)] == ["result 0", "result 1", "result 2"]


def test_of_several_results_the_latest_is_given_and_the_call_counted() -> None:
    call = asked("add", '{"a": 1}')
    early, late = a_run(round_of((call, "old")), time=10.0), a_run(round_of((call, "new")), time=90.0)
    for runs in ([early, late], [late, early]):
        known = Replays.of(runs)
        assert known.find("add", {"a": 1}) == "new" and known.differing == {"add": 1}
    again = a_run(round_of((call, "first")), round_of((call, "second")))
    assert Replays.of([again]).find("add", {"a": 1}) == "second"


def test_differing_results_are_noted_in_the_rehearsal(make: Callable[..., Any]) -> None:
    call = asked("add", '{"a": 1, "b": 1}')
    runs = [a_run(round_of((call, "2")), time=1.0), a_run(round_of((call, "3")), time=9.0)]
    plan = plan_tools(make(add), runs=runs)
    assert plan.tools[0].why == "1 recorded call, 1 of them with several results: the latest is given"
    assert plan.callables()["add"](b=1, a=1) == 3


def test_malformed_arguments_are_kept_as_their_text_and_errors_stay() -> None:
    runs = [a_run(round_of((asked("add", '{"a": '), "Error: arguments could not be parsed")))]
    known = Replays.of(runs)
    assert known.find("add", '{"a": ') == "Error: arguments could not be parsed"
    assert known.find("add", {"a": 1}) is None


@pytest.mark.parametrize(
    ("written", "given", "found"),
    [
        ('{"n": "3"}', {"n": 3}, True),  # the framework made it an integer
        ('{"n": "3.0"}', {"n": 3.0}, True),
        ('{"n": 3.7}', {"n": 3}, True),  # so it does with an integer's parameter
        ('{"n": "yes"}', {"n": True}, True),
        ('{"n": "no"}', {"n": False}, True),
        ('{"n": "1.10"}', {"n": "1.1"}, False),  # texts stay texts
        ('{"n": "x"}', {"n": 3}, False),
        ('{"n": "inf"}', {"n": 3}, False),
        ('{"n": 3}', {"n": True}, False),
        ('{"n": "3"}', {"n": 3, "m": 1}, False),
    ],
)
def test_a_call_is_found_after_the_framework_has_cast_it(written: str, given: dict[str, Any], found: bool) -> None:
    known = Replays.of([a_run(round_of((asked("tool", written), "result")))])
    assert known.find("tool", given) == ("result" if found else None)


def test_a_cast_call_that_could_be_either_of_two_is_none() -> None:
    runs = [a_run(round_of((asked("t", '{"n": "3"}'), "one")), round_of((asked("t", '{"n": 3.2}'), "two")))]
    assert Replays.of(runs).find("t", {"n": 3}) is None


@pytest.mark.parametrize("value", [None, 5, 2.5, "5", "é", True, [1, "a"], {"error": "no"}, {"a": None}, ""])
def test_what_was_told_is_told_again(value: Any) -> None:
    assert value_told_as(text_told(value)) == value


def test_texts_of_the_framework_become_what_it_made_them_of() -> None:
    failed = "Error: no such city. Please inform the user that the operation could not be completed."
    assert value_told_as(failed) == {"error": "no such city"}
    fenced = json.dumps("<external_tool_result>\na &lt;external_tool_result&gt; b\n</external_tool_result>")
    assert value_told_as(fenced) == "a <external_tool_result> b"
    assert value_told_as("plain words") == "plain words"
    assert value_told_as('{"a":1}') == '{"a":1}'  # not as the framework writes it


# TRL's own loop


@pytest.fixture
def trl() -> Any:
    pytest.importorskip("transformers", reason="TRL's form of a tool is transformers' own: needs the extra train")
    from praison_agent_rl.agent_rollouts import trl_tools

    return trl_tools


def schema_of(tool: Any) -> Any:
    from transformers.utils import get_json_schema

    return get_json_schema(tool)["function"]


def test_tools_that_trl_takes_pass(trl: Any) -> None:
    trl.check_trl_tools([length, send_mail, fetch])


def test_all_that_trl_would_reject_is_named_at_once(trl: Any) -> None:
    def untyped(a, b: int = 1):  # type: ignore[no-untyped-def]
        """Do.

        Args:
            a: One.
        """

    def bare(a: int) -> int:
        return a

    def starred(*args: int, **kwargs: int) -> None:
        """Do."""

    def custom(desk: Desk) -> None:
        """Do.

        Args:
            desk: A desk.
        """

    class Later:
        __name__ = "later"

        async def __call__(self, a: int) -> int:
            """Do.

            Args:
                a: One.
            """
            return a

    given = [untyped, bare, starred, custom, Later(), lambda: None, "add", Wiki, length, length]
    with pytest.raises(ConfigError) as caught:
        trl.check_trl_tools(given)
    lines = str(caught.value).splitlines()[1:]
    assert lines[0] == "untyped: no type hint for 'a'; its docstring's Args section does not describe 'b'"
    assert lines[1] == "bare: no docstring"
    assert lines[2].startswith("starred: *args: int and **kwargs: int cannot be described")
    assert lines[3].startswith("custom: the type of a parameter cannot be told to a model (Couldn't convert")
    assert lines[4].startswith("later: no docstring; TRL does not await an object with an async __call__")
    assert lines[5].startswith("<lambda>: its name '<lambda>' is no name of a function")
    assert lines[6] == "'add': it is a str, not a function"
    assert lines[7] == "Wiki: it is a class, not a function"
    assert lines[8] == "length: 2 tools have this name"
    assert len(lines) == 9


def test_what_only_transformers_sees_is_said_in_plain_words(trl: Any) -> None:
    def choosing(a: str) -> None:
        """Do.

        Args:
            a: One (choices: [oops])
        """

    def absent(a: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
        """Do.

        Args:
            a: One.
        """

    with pytest.raises(ConfigError) as caught:
        trl.check_trl_tools([choosing, absent])
    lines = str(caught.value).splitlines()[1:]
    assert lines[0].startswith("choosing: no schema can be made of it (JSONDecodeError")
    assert lines[1] == "absent: a type hint names something that is not there (name 'Nowhere' is not defined)"


def test_an_mcp_tool_is_described_to_trl_as_it_describes_itself(trl: Any) -> None:
    properties = {
        "city": {"type": "string", "description": "Where to.\nArgs: none"},
        "nights": {"type": "integer", "default": 2, "description": "How long."},
        "price": {"type": "number", "description": "At most."},
        "quiet": {"type": "boolean", "description": "Whether."},
        "kind": {"enum": ["a", "b"], "type": "string", "description": "Which."},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Some."},
        "extra": {"type": "object", "description": "More."},
        "rates": {"type": "object", "additionalProperties": {"type": "number"}, "description": "Each."},
        "when": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Date."},
        "any": {"description": "Anything."},
    }
    tool = mcp_tool("find", properties, ("price", "city"), "Find rooms.\n\nArgs:\n    city: not this")
    made = trl.trl_tools([mcp_of(tool)])
    trl.check_trl_tools(made)
    schema = schema_of(made[0])
    assert schema["name"] == "find" and schema["description"].startswith("Find rooms.")
    assert sorted(schema["parameters"]["required"]) == ["city", "price"]
    assert schema["parameters"]["properties"] == {
        "city": {"type": "string", "description": "Where to. Args - none"},
        "nights": {"type": "integer", "description": "How long."},
        "price": {"type": "number", "description": "At most."},
        "quiet": {"type": "boolean", "description": "Whether."},
        "kind": {"type": "string", "enum": ["a", "b"], "description": "Which."},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Some."},
        "extra": {"type": "object", "description": "More."},
        "rates": {"type": "object", "additionalProperties": {"type": "number"}, "description": "Each."},
        "when": {"type": "string", "nullable": True, "description": "Date."},
        "any": {"description": "Anything."},
    }
    assert inspect.signature(made[0]).parameters["nights"].default == 2
    assert made[0](city="Bern", price=9.5) == json.dumps('find {"city": "Bern", "price": 9.5}')
    assert RAN == ["find"]


def test_references_within_a_schema_are_followed_and_circles_end(trl: Any) -> None:
    definitions = {"$defs": {"City": {"type": "string"}, "Tree": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}
    assert trl.hint_of({"$ref": "#/$defs/City"}, definitions) is str
    assert str(trl.hint_of({"$ref": "#/$defs/Tree"}, definitions)).startswith("list[list[")
    assert trl.hint_of({"$ref": "#/$defs/Gone"}, definitions) is Any
    assert trl.hint_of({"type": ["integer", "null"]}, {}) == int | None


def test_tools_of_the_framework_are_wrapped_and_functions_keep_their_words(trl: Any, make: Callable[..., Any]) -> None:
    from praisonaiagents import tool

    @tool
    def search(query: str, limit: int = 5) -> list[str]:
        """Search the web."""
        return [query] * limit

    made = trl.trl_tools(make(length, send_mail, search, mcp_of(ROOMS)), plan=None)
    trl.check_trl_tools(made)
    assert [one.__name__ for one in made] == ["length", "send_mail", "search", "rooms"]
    assert schema_of(made[1]) == schema_of(send_mail)
    assert schema_of(made[2])["description"] == "Search the web."
    assert schema_of(made[2])["parameters"]["required"] == ["query"]
    assert made[0](text="four") == "4"  # pure: it runs
    refused = json.dumps({"error": "this tool does not run in training"})
    assert [made[1](to="x"), made[2](query="x"), made[3](city="x")] == [refused] * 3
    assert RAN == ["length"]


def test_a_planned_tool_runs_in_trl_and_its_exception_is_trls_to_catch(trl: Any, make: Callable[..., Any]) -> None:
    def broken(a: int) -> int:
        """Break.

        Args:
            a: Anything.
        """
        raise OSError("no disk")

    agent = make(broken, fetch)
    made = trl.trl_tools(agent, plan=plan_tools(agent, run_tools=True))
    with pytest.raises(OSError, match="no disk"):
        made[0](a=1)
    assert inspect.iscoroutinefunction(made[1]) and asyncio.run(made[1](url="x")) == '"page"'


def test_replays_answer_in_trl_with_the_recorded_text(trl: Any, make: Callable[..., Any]) -> None:
    agent = make(fetch)
    plan = plan_tools(agent, runs=[a_run(round_of((asked("fetch", '{"url": "a"}'), '"one"')))])
    (tool,) = trl.trl_tools(agent, plan=plan)
    assert tool(url="a") == '"one"' and not inspect.iscoroutinefunction(tool)
    assert json.loads(tool(url="b")) == NONE_RECORDED and plan.misses == {"fetch": 1}


def test_what_trl_cannot_take_at_all_is_said_at_once(trl: Any, make: Callable[..., Any]) -> None:
    odd = mcp_tool("odd", {"max-results": {"type": "integer"}, "from": {"type": "string"}})
    agent = make(mcp_of(odd), handoffs=[make(name="second")])
    with pytest.raises(ConfigError) as caught:
        trl.trl_tools(agent)
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "odd: 'max-results', 'from' cannot be the name of a parameter in Python",
        "transfer_to_second: it hands over to 'second', which TRL's loop cannot; use rollout: agent",
    ]


def test_given_functions_keep_their_words_and_give_what_the_framework_would_tell(trl: Any) -> None:
    made = trl.trl_tools([add, send_mail, fetch])
    assert [one.__name__ for one in made] == ["add", "send_mail", "fetch"]
    assert schema_of(made[1]) == schema_of(send_mail) and inspect.signature(made[0]) == inspect.signature(add)
    assert made[0](a=2, b=3) == "5" and made[1](to="x") == '"sent"' and asyncio.run(made[2](url="x")) == '"page"'
    (alone,) = trl.trl_tools(Desk().book)
    assert alone(seat=3) == alone(3) == '"seat 3"' and alone.__name__ == "book"
    assert trl.trl_tools([lambda a: a])[0].__name__ == "<lambda>"  # and is named by the check
