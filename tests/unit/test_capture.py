"""Whatever way an agent is asked, each request is recorded as the server got it, and the reply as it gave it."""

import asyncio
import contextlib
import inspect
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from praisonaiagents import Agent, AgentFlow, AgentTeam, Task
from pydantic import BaseModel

from praison_agent_rl import capture
from praison_agent_rl.capture import TAPS, last_run, record
from praison_agent_rl.errors import AgentError, ConfigError
from praison_agent_rl.transcripts import read_calls, read_runs
from praison_agent_rl.transcripts.unwritten import settle
from tests.fakes import LOGPROBS, USAGE, FakeServer, build_agent

PATHS = ("environment", "provider")  # one kind for each of the framework's two clients
KINDS = ("environment", "provider", "dict", "hosted_vllm", "finished", "subclass", "responses")


class Notebook:
    """A transcript writer that keeps what it is told; the text of each line is taken at once."""

    def __init__(self) -> None:
        self.dropped = 0
        self.closed = 0
        self._lines: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def _note(self, kind: str, facts: Any) -> None:
        with self._lock:
            self._lines.append((kind, json.dumps(facts, default=repr)))

    @property
    def lines(self) -> list[tuple[str, str]]:
        """All that was to be told by now, as whoever reads a store gets it."""
        settle()
        return self._lines

    def expect(self, call: Any) -> None:
        pass

    def begin(self, run: Any) -> None:
        self._note("begin", run)

    def call(self, call: Any) -> None:
        self._note("call", dict(call))

    def end(self, run_id: str, *, output: Any, error: Any, seconds: float) -> None:
        self._note("end", {"run": run_id, "output": output, "error": error, "seconds": seconds})

    def close(self) -> None:
        self.closed += 1

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads(facts) for told, facts in self.lines if told == kind]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.told("call")

    def runs(self) -> list[tuple[str, str, str | None]]:
        """Agent, style and the parent's agent of each run, in the order in which they began."""
        agents = {run["run"]: run["agent"] for run in self.told("begin")}
        return [(run["agent"], run["style"], agents.get(run["parent"])) for run in self.told("begin")]

    def ends(self) -> dict[str, dict[str, Any]]:
        """How each run ended, by the agent's name."""
        agents = {run["run"]: run["agent"] for run in self.told("begin")}
        return {agents[end["run"]]: end for end in self.told("end")}


@pytest.fixture(autouse=True)
def environment(agents_around: None) -> Iterator[None]:
    yield
    for recording in capture.open_recordings():
        recording.stop()


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Notebook]:
    """The writers that recordings get, by the name of their store."""
    made: dict[str, Notebook] = {}
    monkeypatch.setattr(capture, "shared_writer", lambda store: made.setdefault(store.name, Notebook()))
    return made


@pytest.fixture
def notebook(notebooks: dict[str, Notebook]) -> Iterator[Notebook]:
    """What a recording of all agents writes."""
    with record(store="all"):
        yield notebooks["all"]


def build(kind: str, server: FakeServer, **options: Any) -> Any:
    if kind != "responses":
        return build_agent(kind, server.url, **options)
    # litellm sends this model's requests to the Responses interface, wherever it is
    return build_agent("provider", server.url, llm="openai/gpt-4o-mini", **options)


# --- the matrix: every kind of agent, every way to ask --------------------------------------------------------------


class Verdict(BaseModel):
    answer: str
    score: int


WAYS: dict[str, Callable[[Any], Any]] = {
    "chat": lambda agent: agent.chat("hello"),
    "chat with a tool": lambda agent: agent.chat("TOOL"),
    "chat with two rounds of tools": lambda agent: agent.chat("TWICE"),
    "chat with parallel tools": lambda agent: agent.chat("PARALLEL"),
    "chat with reasoning": lambda agent: agent.chat("THINK"),
    "two turns": lambda agent: [agent.chat("one"), agent.chat("two")][1],
    "chat streaming": lambda agent: agent.chat("hello THINK", stream=True),
    "chat streaming with parallel tools": lambda agent: agent.chat("PARALLEL", stream=True),
    "start": lambda agent: agent.start("hello"),
    "start with a tool": lambda agent: agent.start("TOOL"),
    "start streaming": lambda agent: "".join(agent.start("TOOL", stream=True)),
    "run": lambda agent: agent.run("TOOL"),
    "iter_stream": lambda agent: "".join(agent.iter_stream("hello")),
    "iter_stream with a tool": lambda agent: "".join(agent.iter_stream("TOOL")),
    "achat": lambda agent: asyncio.run(agent.achat("hello THINK")),
    "achat with a tool": lambda agent: asyncio.run(agent.achat("TOOL")),
    "achat with parallel tools": lambda agent: asyncio.run(agent.achat("PARALLEL")),
    "achat streaming": lambda agent: asyncio.run(agent.achat("hello", stream=True)),
    "achat streaming with a tool": lambda agent: asyncio.run(agent.achat("TOOL", stream=True)),
    "astart": lambda agent: asyncio.run(agent.astart("TOOL")),
    "arun": lambda agent: asyncio.run(agent.arun("hello")),
    "output_pydantic": lambda agent: agent.chat("STRUCT", output_pydantic=Verdict),
    "output_json": lambda agent: agent.chat("STRUCT", output_json=Verdict),
    "output_pydantic async": lambda agent: asyncio.run(agent.achat("STRUCT", output_pydantic=Verdict)),
}
STYLES = {"two": "chat", "output_pydantic": "chat", "output_json": "chat", "iter_stream": "stream"}


def style_of(way: str) -> str:
    if way == "start streaming":
        return "stream"
    return "achat" if way == "output_pydantic async" else STYLES.get(way.split()[0], way.split()[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_is_what_was_sent_and_what_came_back(kind, way, server_a, notebook):
    answer = WAYS[way](build(kind, server_a))
    assert answer is not None
    compare(notebook, server_a)
    begun = notebook.told("begin")
    assert {(run["agent"], run["style"], run["parent"]) for run in begun} == {("helper", style_of(way), None)}
    assert len(begun) == (2 if way == "two turns" else 1)
    assert {call["run"] for call in notebook.calls} == {run["run"] for run in begun}
    assert {call["agent"] for call in notebook.calls} == {"helper"}
    end = notebook.told("end")[-1]
    kept = answer.model_dump() if isinstance(answer, BaseModel) else answer
    assert (end["output"], end["error"], end["run"]) == (kept, None, begun[-1]["run"])
    assert [entry[0] for entry in notebook.lines][:1] == ["begin"] and notebook.lines[-1][0] == "end"


def compare(notebook: Notebook, server: FakeServer) -> None:
    """Every request that the server got, in order, against the calls that were recorded."""
    assert len(notebook.calls) == len(server.requests) == len(server.answers)
    for call, request, (_, message) in zip(notebook.calls, server.requests, server.answers, strict=True):
        assert call["messages"] == in_chat_form(request)
        assert call["tools"] == [in_chat_form_tool(tool) for tool in request.get("tools") or []]
        apart = ("messages", "input", "instructions", "tools", "model")
        sent = {key: value for key, value in request.items() if key not in apart and value is not None}
        assert call["settings"] == {key: value for key, value in sent.items() if (key, value) != ("stream", False)}
        assert call["model"].rpartition("/")[2] == request["model"]
        assert call["api"] == ("chat" if "messages" in request else "responses")
        compare_reply(call, request, message)
    assert "key-a" not in "".join(facts for _, facts in notebook.lines)


def compare_reply(call: dict[str, Any], request: dict[str, Any], message: dict[str, Any]) -> None:
    reply = call["reply"]
    assert (reply["role"], reply["content"] or None) == ("assistant", message["content"])
    assert reply.get("tool_calls") == message.get("tool_calls")
    if call["api"] == "chat":
        assert reply.get("reasoning_content") == message.get("reasoning_content")
    assert reply.keys() <= {"role", "content", "tool_calls", "reasoning_content"}
    assert call["finish"] == ("tool_calls" if message.get("tool_calls") else "stop")
    if not request.get("stream") or "stream_options" in request:
        names = ("prompt_tokens", "completion_tokens") if call["api"] == "chat" else ("input_tokens", "output_tokens")
        assert [call["usage"][name] for name in names] == [USAGE["prompt_tokens"], USAGE["completion_tokens"]]
    assert call["error"] is None and call["partial"] is False
    assert 0 < call["seconds"] < 60 and abs(call["time"] - time.time()) < 600


def in_chat_form(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request as it came in, those of the Responses interface in the form of the other one."""
    if "messages" in request:
        return list(request["messages"])
    messages: list[dict[str, Any]] = []
    if "instructions" in request:
        messages.append({"role": "system", "content": request["instructions"]})
    for item in request["input"]:
        if item.get("type") == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif item.get("type") == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            messages.append({"role": item["role"], "content": item["content"]})
    return messages


def in_chat_form_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


# --- several agents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_a_handoff_belong_to_the_other_agent_whose_parent_is_the_first(kind, asynchronous, server_a, notebook):
    agent = build(kind, server_a, handoffs=[build(kind, server_a, name="bob"), build(kind, server_a, name="eve")])
    asyncio.run(agent.achat("HANDOFF")) if asynchronous else agent.chat("HANDOFF")
    compare_in_any_order(notebook, server_a)
    style = "achat" if asynchronous else "chat"
    assert notebook.runs()[0] == ("helper", style, None)
    assert sorted((agent, parent) for agent, _, parent in notebook.runs()[1:]) == [("bob", "helper"), ("eve", "helper")]
    agents = [call["agent"] for call in notebook.calls]
    assert (agents[0], agents[-1], agents.count("bob"), agents.count("eve")) == ("helper", "helper", 1, 1)
    assert {agent for agent, end in notebook.ends().items() if end["output"] and not end["error"]} == {
        *("helper", "bob", "eve"),
    }


def compare_in_any_order(notebook: Notebook, server: FakeServer) -> None:
    """The recorded requests against those that the server got, where two may be under way at once."""
    sent = [json.dumps([in_chat_form(request), message["content"]]) for request, message in server.answers]
    kept = [json.dumps([call["messages"], call["reply"]["content"] or None]) for call in notebook.calls]
    assert sorted(kept) == sorted(sent) and len(sent) == len(server.requests)


@pytest.mark.parametrize("kind", PATHS)
def test_a_handoff_within_a_stream_has_the_stream_as_its_parent(kind, server_a, notebook):
    agent = build(kind, server_a, handoffs=[build(kind, server_a, name="bob")])
    "".join(agent.iter_stream("HANDOFF"))
    compare_in_any_order(notebook, server_a)
    assert notebook.runs() == [("helper", "stream", None), ("bob", "chat", "helper")]


def team_of(kind: str, server: FakeServer, **options: Any) -> Any:
    agents = [build(kind, server, name="ann"), build(kind, server, name="bob")]
    tasks = [
        Task(name=f"task {agent.name}", description=f"do it, {agent.name}", expected_output="text", agent=agent)
        for agent in agents
    ]
    return AgentTeam(agents=agents, tasks=tasks, name="crew", output="silent", **options)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", PATHS)
def test_turns_in_a_team_have_the_teams_run_as_their_parent(kind, asynchronous, server_a, notebook):
    team = team_of(kind, server_a)
    asyncio.run(team.astart()) if asynchronous else team.start()
    compare_in_any_order(notebook, server_a)
    assert [(agent, parent) for agent, _, parent in notebook.runs() if agent != "crew"] == [
        *(("ann", "crew"), ("bob", "crew")),
    ]
    assert {call["agent"] for call in notebook.calls} == {"ann", "bob"}
    assert notebook.ends()["crew"]["error"] is None and notebook.told("begin")[-1]["agent"] in ("crew", "bob")


def test_the_manager_of_a_team_asks_within_the_teams_run(server_a, notebook):
    team = team_of("provider", server_a, process="hierarchical", manager_llm="openai/m1")
    with contextlib.suppress(Exception):
        team.start()  # the fake server does not manage well
    assert len(notebook.calls) == len(server_a.requests) > 0
    assert None not in {call["agent"] for call in notebook.calls}


@pytest.mark.parametrize("kind", PATHS)
def test_turns_in_a_flow_have_the_flows_run_as_their_parent_also_in_parallel_steps(kind, server_a, notebook):
    from praisonaiagents.workflows import parallel

    agents = [build(kind, server_a, name=name) for name in ("ann", "bob", "eve")]
    flow = AgentFlow(name="line", steps=[agents[0], parallel(agents[1:])])
    answer = flow.start("hello")
    compare_in_any_order(notebook, server_a)
    runs = notebook.runs()
    assert runs[-1][:2] == ("line", "flow") or runs[0][:2] == ("line", "flow")
    ids = {run["agent"]: run["run"] for run in notebook.told("begin")}
    parents = {run["agent"]: run["parent"] for run in notebook.told("begin")}
    assert parents == {"line": None, "ann": ids["line"], "bob": ids["line"], "eve": ids["line"]}
    assert notebook.ends()["line"]["output"] == answer["output"]


@pytest.mark.parametrize("kind", PATHS)
def test_what_is_asked_outside_of_any_turn_is_kept_without_a_run(kind, server_a, notebooks):
    agent = build(kind, server_a)
    with record(store="all"), record(agent, store="one"):
        if kind == "environment":
            agent._openai_client.create_completion([{"role": "user", "content": "hello"}], model="m1")
        else:
            agent.llm_instance.response("hello", stream=False)
    (call,) = notebooks["all"].calls
    assert (call["run"], call["agent"], call["messages"]) == (None, None, server_a.requests[0]["messages"])
    assert notebooks["one"].calls == []


# --- who is recorded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_a_recording_of_one_agent_keeps_its_turns_only_and_names_the_parent(kind, server_a, notebooks):
    bob = build(kind, server_a, name="bob")
    agent = build(kind, server_a, handoffs=[bob])
    with record(bob, store="bob"), record(agent, store="helper"), record(store="all"):
        agent.chat("HANDOFF")
    begun = {run["agent"]: run for run in notebooks["all"].told("begin")}
    assert {call["agent"] for call in notebooks["bob"].calls} == {"bob"}
    assert {call["agent"] for call in notebooks["helper"].calls} == {"helper"}
    assert notebooks["bob"].told("begin") == [begun["bob"]]
    assert begun["bob"]["parent"] == begun["helper"]["run"]
    assert [len(notebooks[name].calls) for name in ("bob", "helper", "all")] == [1, 2, 3]


def test_agents_are_recorded_by_name_and_by_pattern(server_a, notebooks):
    with record("support-*", "bob", store="some") as recording:
        for name in ("support-de", "bob", "bobby", "support"):
            build("environment", server_a, name=name).chat("hello")
    assert [call["agent"] for call in notebooks["some"].calls] == ["support-de", "bob"]
    assert recording.counts == {"runs": 2, "calls": 2, "dropped": 0}


def test_a_recorded_team_stands_for_its_agents(server_a, notebooks):
    team = team_of("environment", server_a)
    with record(team, store="team"):
        team.start()
        team.agents[0].chat("alone")
    assert [call["agent"] for call in notebooks["team"].calls] == ["ann", "bob"]


def test_two_recordings_to_one_store_make_one_copy_with_the_tags_of_both(server_a, notebooks):
    agent = build("environment", server_a)
    with record(store="same", tags=["a", "b"]) as first:
        with record(agent, store="same", tags=["b", "c"]) as second:
            agent.chat("hello")
        assert notebooks["same"].closed == 0
        agent.chat("hello")
    assert notebooks["same"].closed == 1
    assert [run["tags"] for run in notebooks["same"].told("begin")] == [["a", "b", "c"], ["a", "b"]]
    assert len(notebooks["same"].calls) == 2
    assert (first.counts["calls"], second.counts["calls"]) == (2, 1)


@pytest.mark.parametrize("kind", PATHS)
def test_nothing_is_recorded_before_and_after(kind, server_a, notebooks):
    agent = build(kind, server_a)
    agent.chat("before")
    with record(store="all") as recording:
        agent.chat("meanwhile")
    recording.stop()
    assert agent.chat("after").startswith("[A|m1]")
    assert [call["messages"][-1]["content"] for call in notebooks["all"].calls] == ["meanwhile"]
    assert notebooks["all"].closed == 1 and len(server_a.requests) == 3
    from openai import OpenAI

    if kind == "environment":
        assert type(agent._openai_client.sync_client) is OpenAI


def test_a_client_that_is_seen_through_is_still_of_its_class(server_a, notebook):
    from openai import AsyncOpenAI, OpenAI

    client = build("environment", server_a)._openai_client
    assert isinstance(client.sync_client, OpenAI) and isinstance(client.async_client, AsyncOpenAI)
    client.sync_client.max_retries = 5
    assert client._sync_client.max_retries == 5


def test_a_turn_under_way_when_recording_stops_or_starts_ends_as_it_would(server_a, notebooks):
    agent = build("environment", server_a)
    with ThreadPoolExecutor(1) as pool:
        with record(store="early"):
            answer = pool.submit(agent.chat, "HOLD")
            wait_for(lambda: server_a.requests)
        with record(agent, store="late"):
            server_a.gate.set()
            assert answer.result(20).startswith("[A|m1]")
    assert [kind for kind, _ in notebooks["early"].lines] == ["begin"]
    assert notebooks["late"].lines == []


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_sample_is_the_share_of_turns_and_a_nested_turn_goes_with_the_outer_one(share, server_a, notebooks):
    turns = 60
    with record(store="all", sample=share):
        for _ in range(turns):
            agent = build("environment", server_a, handoffs=[build("environment", server_a, name="bob")])
            agent.chat("HANDOFF")
    runs = notebooks["all"].runs() if "all" in notebooks else []
    assert runs.count(("helper", "chat", None)) == runs.count(("bob", "chat", "helper"))
    kept = len(runs) / 2 / turns
    assert kept == share if share in (0, 1) else 0.05 < kept < 0.6  # five standard deviations
    assert len(notebooks["all"].calls) == 3 * len(runs) / 2


def test_a_recording_does_not_keep_its_agent_alive_and_ends_with_it(server_a, notebooks):
    agent = build("environment", server_a)
    record(agent, store="gone")
    agent.chat("hello")
    del agent
    import gc

    gc.collect()
    record(store="all").stop()
    assert notebooks["gone"].closed == 1


def test_the_last_run_of_an_agent_is_at_hand(server_a, notebooks):
    agent, other = build("environment", server_a), build("environment", server_a, name="bob")
    with record(agent, store="one"):
        assert last_run(agent) is None
        agent.chat("one")
        agent.chat("two")
        other.chat("three")
    assert last_run(agent) == notebooks["one"].told("begin")[-1]["run"]
    assert last_run(other) is None


@pytest.mark.parametrize("kind", PATHS)
def test_a_run_says_session_tags_version_and_prompt(kind, server_a, notebooks):
    agent = build(kind, server_a)
    agent._session_id = "monday"
    agent._rl_server = SimpleNamespace(model="m1")
    with record(agent, store="one", tags=("x",)):
        agent.chat("hello")
        agent._rl_server = SimpleNamespace(model="v2")
        agent.chat("hello")
    first, second = notebooks["one"].told("begin")
    assert (first["session"], first["tags"], first["version"], first["prompt"]) == ("monday", ["x"], "m1", "hello")
    assert second["version"] == "v2"
    # the second call was answered by another model than the version that the agent is said to have
    assert [call["version"] for call in notebooks["one"].calls] == ["m1", None]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sample": 2}, ConfigError),
        ({"sample": True}, ConfigError),
        ({"tags": "x"}, ConfigError),
        ({"tags": [1]}, ConfigError),
        ({"redact": "no_such_module:f"}, ConfigError),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, error):
    with pytest.raises(error):
        record(store="all", **options)
    with pytest.raises(AgentError, match="42 is no agent"):
        record(42)
    assert capture.open_recordings() == ()


# --- errors, cancelled and half-read streams ------------------------------------------------------------------------


def test_openais_client_tries_three_times_within_one_call_that_is_recorded_once(server_a, notebook):
    # The one place where requests and calls differ: the client of the provider tries again by itself.
    assert build("environment", server_a, retry=False).chat("FAIL500") is None
    (call,) = notebook.calls
    assert len(server_a.requests) == 3
    assert call["reply"] is None and call["error"].startswith("InternalServerError: Error code: 500")
    assert call["messages"] == server_a.requests[-1]["messages"]
    (end,) = notebook.told("end")
    assert (end["output"], end["error"]) == (None, call["error"])


def test_an_attempt_of_openais_client_that_helps_is_one_call_with_its_reply(server_a, notebook):
    server_a.failures = 1
    assert build("environment", server_a).chat("hello").startswith("[A|m1]")
    assert [call["error"] for call in notebook.calls] == [None] and len(server_a.requests) == 2
    assert notebook.told("end")[0]["error"] is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_attempt_of_the_framework_is_a_call(asynchronous, server_a, notebook, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    if asynchronous:
        monkeypatch.setattr(asyncio, "sleep", wait)
    llm = {"model": "openai/m1", "base_url": server_a.url, "api_key": "key-a", "max_retries": 0}
    agent = build("provider", server_a, llm=llm, base_url=None)
    server_a.failures = 2
    answer = asyncio.run(agent.achat("hello")) if asynchronous else agent.chat("hello")
    assert len(notebook.calls) == len(server_a.requests)
    assert [bool(call["error"]) for call in notebook.calls] == [*[True] * (len(notebook.calls) - 1), answer is None]


@pytest.mark.parametrize("kind", PATHS)
def test_a_failed_turn_of_a_stream_is_one_run_with_all_its_attempts(kind, server_a, notebook):
    agent = build(kind, server_a, tools=[])
    server_a.failures = 3
    assert "".join(agent.iter_stream("hello")).startswith("[A|m1]")
    assert notebook.runs() == [("helper", "stream", None)]
    assert notebook.calls[0]["error"] and not notebook.calls[-1]["error"]
    assert {call["agent"] for call in notebook.calls} == {"helper"}
    assert notebook.told("end")[0]["error"] is None


def test_a_reply_that_cannot_be_parsed_is_kept_with_the_error(server_a, notebook):
    build("environment", server_a, reflection=True).chat("hello")
    refused = [call for call in notebook.calls if call["error"]]
    assert refused and all(call["error"].startswith("ValidationError") for call in refused)
    assert len(notebook.calls) == len(server_a.answers)
    for call, (request, message) in zip(notebook.calls, server_a.answers, strict=True):
        assert (call["messages"], call["reply"]["content"]) == (request["messages"], message["content"])


@pytest.mark.parametrize("kind", PATHS)
def test_a_stream_that_nobody_reads_to_its_end_is_recorded_as_far_as_it_came(kind, server_a, notebook):
    chunks = build(kind, server_a, tools=[]).iter_stream("one two three four five")
    read = [next(chunks), next(chunks)]
    chunks.close()
    (call,) = notebook.calls
    assert call["partial"] is True and call["error"] is None and call["finish"] is None
    assert call["reply"]["content"].startswith("".join(read)) and "five" not in call["reply"]["content"]
    (end,) = notebook.told("end")
    assert (end["output"], end["error"]) == ("".join(read), "the stream was closed before its end")
    assert notebook.lines[-1][0] == "end"


@pytest.mark.parametrize("kind", PATHS)
def test_a_stream_that_is_dropped_is_recorded_too(kind, server_a, notebook):
    def read_a_little() -> None:
        for _ in build(kind, server_a, tools=[]).iter_stream("one two three four five"):
            break

    read_a_little()
    assert [call["partial"] for call in notebook.calls] == [True] and len(notebook.told("end")) == 1


def stream_of(agent: Any) -> Any:
    messages = [{"role": "user", "content": "one two three"}]
    return agent._openai_client.sync_client.chat.completions.create(model="m1", messages=messages, stream=True)


@pytest.mark.parametrize("way", ["collected", "closed", "left"])
def test_a_stream_outside_of_any_turn_is_recorded_when_it_is_let_go(way, server_a, notebook):
    stream = stream_of(build("environment", server_a))
    if way == "left":
        with stream:
            next(stream)
    else:
        next(stream)
    if way == "closed":
        stream.close()
        assert stream.response.is_closed
    if way == "collected":
        assert notebook.calls == []
        del stream
    assert [(call["partial"], call["error"], call["run"]) for call in notebook.calls] == [(True, None, None)]


def test_a_stream_that_outlives_its_turn_is_recorded_before_the_turns_end(server_a, notebook):
    kept: list[Any] = []

    class Hoarder(Agent):
        def _chat_impl(self, *args: Any, **options: Any) -> Any:
            kept.append(stream_of(self))
            next(kept[0])
            return "answer"

    Hoarder(name="hoarder", instructions="Be brief.", llm="m1", output="silent").chat("hello")
    assert [kind for kind, _ in notebook.lines] == ["begin", "call", "end"]
    assert notebook.calls[0]["partial"] is True
    assert "".join(chunk.choices[0].delta.content or "" for chunk in kept[0]).endswith("reply to: one two three")
    assert len(notebook.calls) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", PATHS)
def test_a_stream_that_breaks_is_recorded_with_its_error_and_as_far_as_it_came(kind, asynchronous, server_a, notebook):
    agent = build(kind, server_a, tools=[], retry=False)
    with contextlib.suppress(Exception):
        asyncio.run(agent.achat("BREAK it", stream=True)) if asynchronous else list(agent.iter_stream("BREAK it"))
    assert len(notebook.calls) == len(server_a.requests)
    broken = notebook.calls[0]
    assert broken["error"] and broken["partial"] is True
    assert broken["reply"]["content"] == "[A|m1] reply "


@pytest.mark.parametrize("word", ["HOLD", "DRIP"])
@pytest.mark.parametrize("kind", PATHS)
def test_a_cancelled_turn_is_recorded_as_cancelled(kind, word, server_a, notebook):
    async def cancel_it() -> None:
        agent = build(kind, server_a, tools=[])
        turn = asyncio.create_task(agent.achat(f"{word} on", stream=word == "DRIP"))
        while not server_a.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(cancel_it())
    server_a.gate.set()
    (call,) = notebook.calls
    assert call["error"].startswith("CancelledError") and call["partial"] is (word == "DRIP")
    assert notebook.told("end")[0]["error"].startswith("CancelledError")


def test_an_error_of_the_agents_own_is_the_runs_error_and_is_raised(server_a, notebook):
    class Broken(Agent):
        def _chat_impl(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        Broken(name="broken", instructions="Be brief.", llm="m1", output="silent").chat("hello")
    assert [end["error"] for end in notebook.told("end")] == ["RuntimeError: no luck"]
    assert notebook.runs() == [("broken", "chat", None)]


def test_an_error_that_cannot_be_put_into_words_is_raised_as_it_is(server_a, notebook):
    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    class Broken(Agent):
        def _chat_impl(self, *args: Any, **options: Any) -> Any:
            raise Mute

    with pytest.raises(Mute):
        Broken(name="broken", instructions="Be brief.", llm="m1", output="silent").chat("hello")
    assert [end["error"] for end in notebook.told("end")] == ["Mute"]


def test_logprobs_are_kept_of_whole_replies_and_of_streams(server_a, notebook):
    model = {"model": "openai/m1", "base_url": server_a.url, "api_key": "key-a", "logprobs": True}
    for stream in (False, True):
        build("provider", server_a, llm=model, base_url=None).chat("hello", stream=stream)
    assert [call["logprobs"]["content"][0]["token"] for call in notebook.calls] == ["x", "x"]
    assert notebook.calls[0]["logprobs"]["content"] == LOGPROBS["content"]


# --- many turns at once ---------------------------------------------------------------------------------------------


def marked(number: int) -> str:
    return f"SLOW question-{number:02d}"


def misattributed(notebook: Notebook) -> list[str]:
    """Calls whose last question is not the prompt of the run that they are said to belong to."""
    prompts = {run["run"]: run["prompt"] for run in notebook.told("begin")}
    asked = [(call["messages"][-1]["content"], call["reply"]["content"], call["run"]) for call in notebook.calls]
    return [text for text, reply, run in asked if text != prompts[run] or text[-11:] not in reply]


@pytest.mark.parametrize("kind", PATHS)
def test_eight_threads_that_share_one_agent_are_told_apart(kind, server_a, notebook):
    agent = build(kind, server_a, tools=[])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(agent.chat, map(marked, range(16))))
    assert all(answers) and len(notebook.calls) == 16 and misattributed(notebook) == []
    outputs = {run["prompt"]: run["run"] for run in notebook.told("begin")}
    ended = {end["run"]: end["output"] for end in notebook.told("end")}
    assert [ended[outputs[marked(number)]] for number in range(16)] == answers


@pytest.mark.parametrize("kind", PATHS)
def test_gathered_turns_of_one_agent_are_told_apart(kind, server_a, notebook):
    async def ask() -> list[Any]:
        agent = build(kind, server_a, tools=[])
        return await asyncio.gather(*(agent.achat(marked(number)) for number in range(12)))

    answers = asyncio.run(ask())
    assert all(answers) and len(notebook.calls) == 12 and misattributed(notebook) == []


@pytest.mark.parametrize("kind", PATHS)
def test_interleaved_streams_are_told_apart(kind, server_a, notebook):
    agents = [build(kind, server_a, name=f"agent {number}", tools=[]) for number in range(4)]
    streams = [agent.iter_stream(marked(number)) for number, agent in enumerate(agents)]
    texts = [""] * 4
    while streams.count(None) < 4:
        for number, stream in enumerate(streams):
            chunk = next(stream, None) if stream is not None else None
            if chunk is None:
                streams[number] = None
            else:
                texts[number] += chunk
    assert len(notebook.calls) == 4 and misattributed(notebook) == []
    assert [notebook.ends()[f"agent {number}"]["output"] for number in range(4)] == texts


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_turn_whose_model_middleware_runs_in_another_thread_is_known(asynchronous, server_a, notebook):
    from praisonaiagents.hooks import before_model

    @before_model
    def as_it_is(request: Any) -> Any:
        return request

    agent = build("environment", server_a, hooks=[as_it_is])
    assert asyncio.run(agent.achat("hello")) if asynchronous else agent.chat("hello")
    assert [call["agent"] for call in notebook.calls] == ["helper"]


# --- the agent never notices ----------------------------------------------------------------------------------------


class Failing:
    """A writer that fails at everything."""

    dropped = 0

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError("no space left on device")

        return fail


@pytest.mark.parametrize("way", ["chat with a tool", "achat with a tool", "iter_stream with a tool", "start streaming"])
@pytest.mark.parametrize("kind", PATHS)
def test_a_writer_that_fails_changes_no_answer_and_is_reported_once(kind, way, server_a, monkeypatch, caplog):
    expected = WAYS[way](build(kind, server_a))
    monkeypatch.setattr(capture, "shared_writer", lambda store: Failing())
    requests = list(server_a.requests)
    with caplog.at_level(logging.WARNING, "praison_agent_rl"), record(store="all") as recording:
        assert WAYS[way](build(kind, server_a)) == expected
    assert server_a.requests[len(requests) :] == requests
    # begin, each call, end and close
    assert recording.counts["dropped"] == len(requests) + 3
    (said,) = [entry for entry in caplog.records if entry.name.startswith("praison_agent_rl")]
    assert "no space left on device" in said.getMessage() and "all" in said.getMessage()


def test_a_fault_in_the_recorder_itself_changes_no_answer_and_is_counted(server_a, notebook, monkeypatch):
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    agent = build("environment", server_a)
    places = ("Turn.__init__", "Turn.announce", "PendingCall.__init__", "PendingCall._record")
    for name in (*places, "reply_of", "request_of", "take", "Fold"):
        with monkeypatch.context() as patch:
            patch.setattr(f"praison_agent_rl.capture.recordings.{name}", broken)
            assert agent.chat("TOOL").startswith("[A|m1]")
            assert agent.chat("hello", stream=True).startswith("[A|m1]")
    (recording,) = capture.open_recordings()
    assert recording.counts["dropped"] > 5


def test_a_request_is_kept_as_it_was_when_it_was_sent(server_a, notebook):
    """The framework's lists live on, and grow while a reply is under way."""
    agent = build("environment", server_a)
    reply = {"choices": [{"message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}
    messages = [{"role": "user", "content": [{"type": "text", "text": "before"}]}]

    def create(**sent: Any) -> Any:
        sent["messages"][0]["content"][0]["text"] = "after"
        sent["messages"].append({"role": "user", "content": "more"})
        return reply

    agent._openai_client._sync_client = SimpleNamespace(
        chat=SimpleNamespace(completions=SimpleNamespace(create=create))
    )
    assert agent._openai_client.create_completion(messages, model="m1") is reply
    assert notebook.calls[-1]["messages"] == [{"role": "user", "content": [{"type": "text", "text": "before"}]}]


def test_streams_collected_within_two_writers_at_once_do_not_wait_for_each_other(server_a, monkeypatch):
    """Each of two threads collects a stream of the other's store while it is within its own writer."""
    both = threading.Barrier(2, timeout=20)
    locks = {name: threading.RLock() for name in ("one", "two")}
    half_read: dict[str, list[Any]] = {}

    class Locking(Notebook):
        def __init__(self, store: Path) -> None:
            super().__init__()
            self.name = store.name

        def call(self, call: Any) -> None:
            with locks[self.name]:
                if "meet" in str(call["messages"]):
                    both.wait()
                    half_read["two" if self.name == "one" else "one"].clear()
                super().call(call)

    writers: dict[str, Locking] = {}
    monkeypatch.setattr(capture, "shared_writer", lambda store: writers.setdefault(store.name, Locking(store)))
    agents = {name: build("environment", server_a, name=name, tools=[]) for name in locks}
    with record(agents["one"], store="one"), record(agents["two"], store="two"):
        for name, agent in agents.items():
            half_read[name] = [agent.iter_stream("a b c d")]
            next(half_read[name][0])
        asking = [threading.Thread(target=agent.chat, args=("meet",), daemon=True) for agent in agents.values()]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(30)
    assert not any(thread.is_alive() for thread in asking)
    assert [sorted(call["partial"] for call in writers[name].calls) for name in locks] == [[False, True]] * 2


def test_a_stream_that_is_collected_while_its_thread_is_writing_does_not_wait_for_itself(server_a, monkeypatch):
    """Garbage can be collected anywhere, also where the writer holds its lock."""
    from praison_agent_rl.transcripts import process_writing

    plain = process_writing.plain

    def plain_after_a_collection(value: Any) -> Any:
        half_read.clear()
        return plain(value)

    with record(store="all"):
        agent = build("environment", server_a, tools=[])
        half_read = [agent.iter_stream("one two three four")]
        next(half_read[0])
        monkeypatch.setattr(process_writing, "plain", plain_after_a_collection)
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(agent.chat("hello")), daemon=True)
        asking.start()
        asking.join(20)
    assert answers and sorted(call.partial for call in read_calls("all")) == [False, True]


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, name, _, _ in TAPS])
def test_the_framework_has_every_method_that_is_tapped_and_a_tap_keeps_its_kind(place, name, notebook):
    import importlib

    tapped = vars(getattr(importlib.import_module(place[0]), place[1]))[name]
    if isinstance(tapped, property):
        assert name in ("sync_client", "async_client")
        return
    original = tapped.__wrapped__
    assert inspect.iscoroutinefunction(tapped) == inspect.iscoroutinefunction(original)
    assert inspect.isgeneratorfunction(tapped) == inspect.isgeneratorfunction(original)
    assert inspect.signature(tapped) == inspect.signature(original)


def test_a_method_that_a_later_framework_lacks_is_said_and_the_rest_is_recorded(
    server_a, notebooks, monkeypatch, caplog
):
    missing = (("praisonaiagents.llm.llm", "LLM"), "no_such_method", TAPS[0][2], "")
    gone = (("praisonaiagents.no_such_module", "LLM"), "chat", TAPS[0][2], "")
    monkeypatch.setattr(capture, "TAPS", (missing, gone, *TAPS))
    with caplog.at_level(logging.WARNING, "praison_agent_rl"), record(store="all"):
        build("environment", server_a).chat("hello")
    assert len(notebooks["all"].calls) == 1
    assert ["LLM.no_such_method" in caplog.text, "LLM.chat" in caplog.text] == [True, True]


def test_open_recordings_are_closed_when_the_process_ends(server_a):
    code = """
from praison_agent_rl import capture
class Writer:
    dropped = 0
    def __init__(self, store): pass
    def __getattr__(self, name): return lambda *a, **k: print(name, flush=True)
capture.shared_writer = Writer
capture.record(store="all")
from praisonaiagents import Agent
Agent(name="a", instructions="Be brief.", llm="m1", output="silent").chat("hello")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["begin", "expect", "call", "end", "close"], ran.stderr


# --- with the writer that is used ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_can_be_read_back_from_the_store(kind, server_a):
    agent = build(kind, server_a, handoffs=[build(kind, server_a, name="bob")])
    with record(store="all", tags=["demo"]) as recording:
        agent.chat("TWICE")
        agent.chat("HANDOFF")
        asyncio.run(agent.achat("hello", stream=True))
    runs = {run.prompt: run for run in read_runs("all")}
    calls = list(read_calls("all"))
    assert [call.messages for call in calls] == [in_chat_form(request) for request in server_a.requests]
    assert [call.reply["content"] or None for call in calls] == [message["content"] for _, message in server_a.answers]
    assert [len(runs[prompt].calls) for prompt in ("TWICE", "HANDOFF", "hello")] == [3, 2, 1]
    bob = next(run for run in runs.values() if run.agent == "bob")
    assert (bob.parent, bob.tags, len(bob.calls)) == (runs["HANDOFF"].id, ["demo"], 1)
    assert runs["hello"].output == server_a.answers[-1][1]["content"] and runs["hello"].id == last_run(agent)
    assert recording.counts == {"runs": 4, "calls": 7, "dropped": 0}
    assert all("key-a" not in file.read_text() for file in Path("all").iterdir())


def test_what_could_not_even_be_read_is_counted_in_the_store(server_a, monkeypatch):
    agent = build("environment", server_a)
    with record(store="all") as recording:
        with monkeypatch.context() as patch:
            patch.setattr("praison_agent_rl.capture.recordings.reply_of", lambda _: 1 / 0)
            agent.chat("hello")
        agent.chat("hello")
    assert recording.counts["dropped"] == 1
    told = [json.loads(line) for file in Path("all").iterdir() for line in file.read_text().splitlines()]
    assert [(line["count"], line["reason"]) for line in told if line["kind"] == "dropped"] == [(1, "ZeroDivisionError")]
    assert len(list(read_calls("all"))) == 1


def test_the_default_store_is_in_the_folder_in_which_recording_began(server_a, in_tmp, monkeypatch):
    with record() as recording:
        (in_tmp / "elsewhere").mkdir()
        monkeypatch.chdir(in_tmp / "elsewhere")
        build("environment", server_a).chat("hello")
    assert recording.store == in_tmp / ".praisonai/rl/transcripts"
    assert len(list(read_runs(recording.store))) == 1
