"""Tools of a real MCP server, in copies of an agent and in TRL's own loop: shown, run and refused as others are."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason='a server needs the package mcp: pip install "praisonaiagents[mcp]"')

from praison_agent_rl.agent_rollouts.copies import RolloutPlace, rollout_copy
from praison_agent_rl.agent_rollouts.host import RolloutHost
from praison_agent_rl.agent_rollouts.toolboxes import tools_of
from praison_agent_rl.agent_rollouts.tools import plan_tools, pure
from praison_agent_rl.config import TrainConfig
from tests.fakes import FakeServer, build_agent
from tests.rollout_stand_in import KEY, Asked, ScriptedEndpoint, calls, job, says

PATHS = ("environment", "provider")  # one kind for each of the framework's two clients

pytestmark = pytest.mark.usefixtures("agents_around")

SERVER = '''
import os, time
from mcp.server.fastmcp import FastMCP

server = FastMCP("rooms")
kept = []

@server.tool()
def keep(word: str, times: int = 1) -> str:
    """Keep a word.

    Args:
        word: What to keep.
        times: How often.
    """
    kept.extend([word] * times)
    return f"{word} is kept, {len(kept)} in all by {os.getpid()}"

@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)

@server.tool()
def hang(why: str) -> str:
    """Hang."""
    time.sleep(600)
    return why

server.run()
'''


def started(folder: Path, *, timeout: int = 60) -> Any:
    """The framework's MCP object, with a server of its own."""
    from praisonaiagents.mcp import MCP

    file = folder / "server.py"
    file.write_text(SERVER)
    return MCP(sys.executable, [str(file)], timeout=timeout)


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that all tests of this module share, which a configuration can name."""
    found = sys.modules[__name__].ROOMS = started(tmp_path_factory.mktemp("mcp"))  # type: ignore[attr-defined]
    yield found
    found.shutdown()


def kept_by(result: str) -> tuple[int, str]:
    """How many words are kept, and by which process, of what ``keep`` gave."""
    words = result.replace('"', "").split()
    return int(words[3]), words[-1]


def keeps(asked: Asked) -> dict[str, Any]:
    """Keeps one word and says what came of it."""
    return says(asked.results[0]) if asked.results else calls("keep", word=asked.job)


def sent(agent: Any, server: FakeServer) -> dict[str, Any]:
    before = len(server.requests)
    agent.chat("hello")
    return server.requests[before]


@pytest.mark.parametrize("bare", [True, False], ids=["the server alone", "in a list"])
@pytest.mark.parametrize("kind", PATHS)
def test_a_copy_shows_the_model_what_the_original_shows(
    kind: str, bare: bool, rooms: Any, server_a: FakeServer
) -> None:
    agent = build_agent(kind, server_a.url, tools=rooms if bare else [rooms])
    shown = sent(agent, server_a)
    for plan in (plan_tools(agent, run_tools=True), plan_tools(agent, tools_for_training={"keep": print_nothing})):
        with ScriptedEndpoint(lambda asked: says("done")) as endpoint:
            rollout_copy(agent, RolloutPlace(endpoint.address, KEY, "j1"), tools=plan.in_place).chat("hello")
        (asked,) = endpoint.asked
        assert json.dumps(asked.body["tools"]) == json.dumps(shown["tools"])
        assert asked.body["messages"] == shown["messages"] and sorted(asked.tools) == ["fail", "hang", "keep"]


def print_nothing(word: str, times: int = 1) -> str:
    return f"{word} is not kept"


@pytest.mark.parametrize("kind", PATHS)
def test_copies_share_the_one_session_of_the_original(kind: str, rooms: Any, server_a: FakeServer) -> None:
    agent = build_agent(kind, server_a.url, tools=[rooms])
    already, process = kept_by(rooms.runner.call_tool("keep", {"word": "mine"}))
    with ScriptedEndpoint(keeps, [job(f"j{number}", "hello") for number in range(6)]) as endpoint:
        host = RolloutHost(agent, at_once=3, tools=plan_tools(agent, run_tools=["keep"]).in_place)
        host.follow(endpoint.address, KEY)
        outcomes = endpoint.ended(6)
        host.close()
    assert all(outcomes[f"j{number}"]["output"].strip('"').startswith(f"j{number} is kept") for number in range(6))
    counted = sorted(kept_by(outcome["output"]) for outcome in outcomes.values())
    assert counted == [(already + number, process) for number in range(1, 7)]
    assert kept_by(rooms.runner.call_tool("keep", {"word": "mine"})) == (already + 7, process), "it was left open"


@pytest.mark.parametrize("kind", PATHS)
def test_what_may_not_run_is_refused_and_what_stands_in_answers(kind: str, rooms: Any, server_a: FakeServer) -> None:
    agent = build_agent(kind, server_a.url, tools=[rooms])
    before, _ = kept_by(rooms.runner.call_tool("keep", {"word": "mine"}))
    assert plan_tools(agent).refused == ["fail", "hang", "keep"]
    plan = plan_tools(agent, tools_for_training={"keep": print_nothing}, run_tools=["fail"])
    assert plan.refused == ["hang"]
    with ScriptedEndpoint(keeps) as endpoint:
        twin = rollout_copy(agent, RolloutPlace(endpoint.address, KEY, "j1"), tools=plan.in_place)
        assert "j1 is not kept" in twin.chat("hello")
    assert kept_by(rooms.runner.call_tool("keep", {"word": "mine"}))[0] == before + 1


@pytest.mark.parametrize("kind", PATHS)
def test_a_tool_that_says_no_is_told_the_model_and_the_run_goes_on(kind: str, rooms: Any, server_a: FakeServer) -> None:
    agent = build_agent(kind, server_a.url, tools=[rooms])

    def fails(asked: Asked) -> dict[str, Any]:
        return says("it failed") if asked.results else calls("fail", why="full")

    with ScriptedEndpoint(fails) as endpoint:
        twin = rollout_copy(
            agent, RolloutPlace(endpoint.address, KEY, "j1"), tools=plan_tools(agent, run_tools=True).in_place
        )
        assert twin.chat("hello") == "it failed"
    assert "full" in endpoint.asked[-1].results[0]


def test_a_whole_server_can_be_marked_pure(rooms: Any, server_a: FakeServer) -> None:
    agent = build_agent("environment", server_a.url, tools=[rooms])
    pure(rooms)
    try:
        assert {planned.how for planned in plan_tools(agent).tools} == {"runs"}
    finally:
        del rooms._praison_agent_rl_pure


# --- TRL's own loop ---------------------------------------------------------------------------------------------------


@pytest.fixture
def named(rooms: Any) -> Callable[..., Any]:
    """The tools of the server as a configuration names them, by their names."""
    pytest.importorskip("transformers", reason="TRL's form of a tool is transformers' own: needs the extra train")
    config = TrainConfig(tools=[f"{__name__}:ROOMS"], rollout_timeout=60.0)
    return {tool.__name__: tool for tool in tools_of(config)}.__getitem__


def test_a_server_that_is_named_is_described_to_trl_as_it_describes_itself(named: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    schema = get_json_schema(named("keep"))["function"]
    assert schema["description"].startswith("Keep a word.")
    assert schema["parameters"]["required"] == ["word"]
    kinds = {name: one["type"] for name, one in schema["parameters"]["properties"].items()}
    assert kinds == {"word": "string", "times": "integer"}


def test_calls_by_trl_give_what_the_deployed_agent_would_be_told(
    named: Callable[..., Any], rooms: Any, server_a: FakeServer
) -> None:
    count, process = kept_by(named("keep")(word="lamp", times=2))
    assert named("keep")(word="lamp") == json.dumps(f"lamp is kept, {count + 1} in all by {process}")
    agent = build_agent("environment", server_a.url, tools=[rooms])

    def fails(asked: Asked) -> dict[str, Any]:
        return says("it failed") if asked.results else calls("fail", why="full")

    with ScriptedEndpoint(fails) as endpoint:
        rollout_copy(agent, RolloutPlace(endpoint.address, KEY, "j1")).chat("hello")
    assert named("fail")(why="full") == endpoint.asked[-1].results[0]


def test_a_call_of_a_server_that_hangs_fails_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="TRL's form of a tool is transformers' own: needs the extra train")
    own = started(tmp_path)
    own.runner.timeout = 2.0  # of what is under way, which the end waits for
    monkeypatch.setattr(sys.modules[__name__], "ROOMS", own, raising=False)
    tools = {tool.__name__: tool for tool in tools_of(TrainConfig(tools=[f"{__name__}:ROOMS"], rollout_timeout=1.0))}
    with pytest.raises(TimeoutError, match="Tool timed out after 1s"):
        tools["hang"](why="full")
    own.shutdown()


def test_a_name_that_is_no_tool_says_so() -> None:
    with pytest.raises(Exception, match=r"PATHS.* is a tuple, not a function"):
        tools_of(TrainConfig(tools=[f"{__name__}:PATHS"]))
