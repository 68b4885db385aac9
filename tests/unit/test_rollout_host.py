"""A host makes the rollouts that an endpoint asks for: apart from each other, some at a time, whatever tools do."""

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.agent_rollouts.host import RolloutHost
from praison_agent_rl.errors import AgentError, ConfigError
from praison_agent_rl.sent import silent_thread
from tests.fakes import build_agent
from tests.rollout_stand_in import KEY, Asked, ScriptedEndpoint, calls, job, says

PATHS = ("environment", "provider")  # one kind for each of the framework's two clients
MARK = re.compile(r"mark-(\d+)-")

pytestmark = pytest.mark.usefixtures("agents_around")


def look_up(key: str) -> str:
    """Look something up."""
    return f"{key} was found"


def tools_once(asked: Asked) -> dict[str, Any]:
    """Calls each tool that it is shown once, with the words of the prompt, and then answers."""
    marks = sorted(set(MARK.findall(asked.text)))
    if len(asked.results) < len(asked.tools):
        name = sorted(asked.tools)[len(asked.results)]
        return calls(name, **({} if name.startswith("transfer") else {"key": f"mark-{marks[0]}-key"}))
    return says(f"{asked.agent} answers mark-{marks[0]}-answer")


def one_call(asked: Asked) -> dict[str, Any]:
    """Calls the first tool once, and then answers."""
    if asked.results:
        return says(f"answer of {asked.job}")
    return calls(asked.tools[0], key=asked.job)


def followed(endpoint: ScriptedEndpoint, agent: Any, **options: Any) -> RolloutHost:
    host = RolloutHost(agent, **options)
    host.follow(endpoint.address, KEY)
    return host


def warm(kind: str, url: str) -> None:
    """Have the framework import what it imports for its first turn, which takes longer than the limits of tests."""
    build_agent(kind, url, name="first").chat("hello")


# --- apart from each other --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_of_64_rollouts_8_at_a_time_none_sees_a_message_of_another(
    kind: str, server_a: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from praisonaiagents import MemoryConfig

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    memory = MemoryConfig(session_id="one-for-all", auto_memory=True, history=True)
    other = build_agent(kind, server_a.url, name="Bob", tools=[look_up], memory=memory)
    agent = build_agent(kind, server_a.url, tools=[look_up], handoffs=[other], memory=memory)
    agent.chat("mark-999-prompt, a turn of the user")
    before = list(agent.chat_history)
    asked_before = len(server_a.requests)
    with ScriptedEndpoint(tools_once) as endpoint:
        host = followed(endpoint, agent, at_once=8)
        endpoint.offer(*(job(f"j{number}", f"mark-{number}-prompt") for number in range(64)))
        outcomes = endpoint.ended(64, seconds=300)
        host.close()
    for number in range(64):
        rollout = [asked for asked in endpoint.asked if asked.job == f"j{number}"]
        assert [asked.agent for asked in rollout] == ["helper", "helper", "Bob", "Bob", "helper"]
        assert {mark for asked in rollout for mark in MARK.findall(asked.text)} == {str(number)}
        outcome = outcomes[f"j{number}"]
        assert (outcome["output"], outcome["error"]) == (f"helper answers mark-{number}-answer", None)
        assert outcome["tool_errors"] == [] and 0 < outcome["tool_seconds"] < outcome["seconds"]
    assert agent.chat_history == before and other.chat_history == [] and len(server_a.requests) == asked_before
    kept = "".join(path.read_text() for path in tmp_path.rglob("*.json*"))
    assert set(MARK.findall(kept)) <= {"999"}, "no memory and no session has anything of a rollout"
    assert endpoint.keys == {f"Bearer {KEY}"}
    assert all(1 <= int(poll["limit"][0]) <= 8 for poll in endpoint.polls)


def test_history_of_a_job_comes_before_its_prompt(server_a: Any) -> None:
    history = [{"role": "user", "content": "I am Ann."}, {"role": "assistant", "content": "Hello Ann."}]
    with ScriptedEndpoint(lambda asked: says("hm"), [job("j1", "Who am I?", history=history)]) as endpoint:
        host = followed(endpoint, build_agent("environment", server_a.url, tools=[]))
        assert endpoint.ended(1)["j1"]["output"] == "hm"
        host.close()
    said = [message["content"] for message in endpoint.asked[0].body["messages"]]
    assert said[1:] == ["I am Ann.", "Hello Ann.", "Who am I?"]


def test_what_rollouts_print_is_not_seen_and_what_others_print_is(
    server_a: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def look_up(key: str) -> str:
        """Look something up."""
        print("printed by a tool")
        return key

    agent = build_agent("environment", server_a.url, tools=[look_up], output="verbose")
    warm("environment", server_a.url)
    capsys.readouterr()
    with ScriptedEndpoint(one_call, [job(f"j{number}", "hello") for number in range(4)]) as endpoint:
        host = followed(endpoint, agent, at_once=4)
        endpoint.ended(4)
        print("printed by the user")
        host.close()
    assert capsys.readouterr().out == "printed by the user\n"


# --- at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_more_rollouts_run_at_once_than_were_allowed(server_a: Any, at_once: int) -> None:
    lock, seen, all_of_them = threading.Lock(), [0, 0], threading.Barrier(at_once)

    def look_up(key: str) -> str:
        """Look something up."""
        with lock:
            seen[0] += 1
            seen[1] = max(seen)
        all_of_them.wait(60)
        with lock:
            seen[0] -= 1
        return key

    with ScriptedEndpoint(one_call, [job(f"j{number}", "hello") for number in range(4 * at_once)]) as endpoint:
        host = followed(endpoint, build_agent("environment", server_a.url, tools=[look_up]), at_once=at_once)
        endpoint.ended(4 * at_once)
        host.close()
    assert seen == [0, at_once]


# --- tools that hang, raise, or end the process -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_a_tool_that_hangs_costs_its_rollout_only_and_ends_at_its_next_call(kind: str, server_a: Any) -> None:
    gate = threading.Event()

    def look_up(key: str) -> str:
        """Look something up."""
        if key == "hangs":
            gate.wait(60)
        return key

    warm(kind, server_a.url)
    jobs = [job("hangs", "hello", seconds=1.5), *(job(f"j{number}", "hello") for number in range(3))]
    with ScriptedEndpoint(one_call, jobs) as endpoint:
        host = followed(endpoint, build_agent(kind, server_a.url, tools=[look_up]), at_once=1)
        outcomes = endpoint.ended(4)
        assert outcomes["hangs"]["error"] == "took longer than 1.5 s" and outcomes["hangs"]["output"] is None
        assert 0 < outcomes["hangs"]["tool_seconds"] <= outcomes["hangs"]["seconds"]
        assert [outcomes[f"j{number}"]["output"] for number in range(3)] == [f"answer of j{n}" for n in range(3)]
        gate.set()
        assert endpoint.until(lambda: [asked.job for asked in endpoint.refused] == ["hangs"])
        assert endpoint.until(lambda: not rollouts_alive()), "its thread has ended"
        host.close()
    assert len(endpoint.outcomes) == 4


def rollouts_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "praison-agent-rl-rollout"]


@pytest.mark.parametrize("kind", PATHS)
def test_what_a_tool_raises_is_the_error_of_its_rollout_and_the_others_go_on(
    kind: str, server_a: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    raised: dict[str, Callable[[], BaseException]] = {
        "value": lambda: ValueError("half an emoji: \ud83d"),
        "exit": lambda: SystemExit(3),
        "interrupt": lambda: KeyboardInterrupt(),
        "unspeakable": Unspeakable,
    }

    def look_up(key: str) -> str:
        """Look something up."""
        if key in raised:
            raise raised[key]()
        return key

    agent = build_agent(kind, server_a.url, tools=[look_up], execution=impatient())
    monkeypatch.setattr(logging.root, "disabled", True)  # the framework logs half an emoji, which xdist cannot pass on
    with ScriptedEndpoint(one_call, [job(name, "hello") for name in (*raised, "fine")]) as endpoint:
        host = followed(endpoint, agent, at_once=2)
        outcomes = endpoint.ended(5)
        assert host.following
        host.close()
    assert outcomes["fine"]["output"] == "answer of fine" and outcomes["fine"]["error"] is None
    assert all(outcomes[name]["output"] is None and outcomes[name]["error"] for name in raised)
    assert "half an emoji: ?" in outcomes["value"]["error"]
    assert outcomes["value"]["tool_errors"] == ["look_up: ValueError: half an emoji: ?"]
    assert outcomes["exit"]["tool_errors"] == ["look_up: SystemExit: 3"]
    assert outcomes["exit"]["error"] == "SystemExit: 3"
    assert outcomes["interrupt"]["error"].startswith("KeyboardInterrupt")
    assert outcomes["unspeakable"]["tool_errors"] == ["look_up: Unspeakable"]


def impatient() -> Any:
    from praisonaiagents import ExecutionConfig

    return ExecutionConfig(max_retry_limit=0)


@pytest.mark.parametrize("kind", PATHS)
def test_an_agent_that_gives_no_answer_is_told_with_the_frameworks_error(kind: str, server_a: Any) -> None:
    with ScriptedEndpoint(lambda asked: 400, [job("j1", "hello")]) as endpoint:
        host = followed(endpoint, build_agent(kind, server_a.url))
        outcome = endpoint.ended(1)["j1"]
        host.close()
    assert outcome["output"] is None and outcome["error"].startswith("the agent gave no answer: ")
    assert "refused with 400" in outcome["error"] and "│" not in outcome["error"]


def test_an_agent_that_cannot_be_copied_any_more_is_the_error_of_the_rollout(server_a: Any) -> None:
    agent = build_agent("environment", server_a.url)
    with ScriptedEndpoint(one_call) as endpoint:
        host = followed(endpoint, agent)
        agent.backend = object()
        endpoint.offer(job("j1", "hello"))
        assert endpoint.ended(1)["j1"]["error"].startswith("AgentError: agents that cannot be copied for rollouts: ")
        host.close()


def test_stand_ins_run_in_rollouts(server_a: Any) -> None:
    def really(key: str) -> str:
        """Look something up."""
        raise AssertionError("the tool itself ran")

    agent = build_agent("environment", server_a.url, tools=[really])
    with ScriptedEndpoint(
        lambda asked: says(asked.results[0]) if asked.results else calls("really", key="x")
    ) as endpoint:
        host = followed(endpoint, agent, tools={"really": lambda key: f"instead of {key}"})
        endpoint.offer(job("j1", "hello"))
        assert endpoint.ended(1)["j1"]["output"] == '"instead of x"'
        host.close()


HANGING = """
import logging, sys, time
from praison_agent_rl.agent_rollouts.host import RolloutHost
from tests.fakes import build_agent

def look_up(key: str) -> str:
    \"\"\"Look something up.\"\"\"
    print("the tool runs", flush=True, file=sys.stderr)
    time.sleep(600)

kind, url, address, key = sys.argv[1:]
host = RolloutHost(build_agent(kind, url, tools=[look_up]))
host.follow(address, key)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", PATHS)
def test_a_process_ends_though_a_tool_hangs(kind: str, server_a: Any) -> None:
    with ScriptedEndpoint(one_call, [job("j1", "hello")]) as endpoint:
        command = [sys.executable, "-c", HANGING, kind, server_a.url, endpoint.address, KEY]
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as child:
            assert child.stdin and child.stderr
            try:
                assert any("the tool runs" in line for line in child.stderr)
                child.stdin.close()
                assert child.wait(60) == 0
            finally:
                child.kill()


# --- beginning and end ------------------------------------------------------------------------------------------------


def test_it_follows_until_the_endpoint_says_that_it_is_over(server_a: Any) -> None:
    agent = build_agent("environment", server_a.url)
    with ScriptedEndpoint(one_call, over=True) as endpoint:
        host = followed(endpoint, agent)
        assert host.wait(30) and not host.following and host.failure is None


def test_it_follows_no_longer_when_the_endpoint_is_gone(server_a: Any, caplog: pytest.LogCaptureFixture) -> None:
    agent = build_agent("environment", server_a.url)
    endpoint = ScriptedEndpoint(one_call)  # nothing answers there, and then nothing listens
    endpoint._http.server_close()
    with caplog.at_level(logging.WARNING):
        host = followed(endpoint, agent)
        assert host.wait(30)
    assert not host.following and "does not answer" in str(host.failure)
    assert endpoint.address in caplog.text and KEY not in caplog.text


def test_a_wrong_key_is_told_and_shown_nowhere(server_a: Any, caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedEndpoint(one_call) as endpoint:
        host = RolloutHost(build_agent("environment", server_a.url))
        host.follow(endpoint.address, "another-key")
        assert host.wait(30) and "HTTP 401" in str(host.failure)
    assert "another-key" not in caplog.text + str(host.failure)


def test_what_is_no_job_ends_the_following_with_what_it_was(server_a: Any) -> None:
    with ScriptedEndpoint(one_call, [{"id": "j1"}]) as endpoint:
        host = followed(endpoint, build_agent("environment", server_a.url))
        assert host.wait(30) and "prompt" in str(host.failure)


def test_closing_breaks_rollouts_off_takes_no_more_and_can_be_done_twice(server_a: Any) -> None:
    gate, began = threading.Event(), threading.Event()

    def look_up(key: str) -> str:
        """Look something up."""
        began.set()
        gate.wait(60)
        return key

    with ScriptedEndpoint(one_call, [job("j1", "hello")]) as endpoint:
        host = followed(endpoint, build_agent("environment", server_a.url, tools=[look_up]), at_once=2)
        assert began.wait(60)
        host.close()
        host.close()
        assert host.wait(30) and not host.following and host.failure is None
        assert endpoint.ended(1)["j1"]["error"] == "the host was closed before the rollout had ended"
        endpoint.offer(job("j2", "hello"))
        assert len(endpoint.outcomes) == 1
        gate.set()
        assert endpoint.until(lambda: not rollouts_alive())
        host.follow(endpoint.address, KEY)
        assert endpoint.ended(2)["j2"]["output"] == "answer of j2"
        host.close()
    RolloutHost(build_agent("environment", server_a.url)).close()


def test_settings_that_are_none_are_refused(server_a: Any) -> None:
    agent = build_agent("environment", server_a.url)
    for wrong in (0, -1, True, 1.5, "8"):
        with pytest.raises(ConfigError, match="at_once="):
            RolloutHost(agent, at_once=wrong)
    with pytest.raises(AgentError, match="not a praisonaiagents Agent"):
        RolloutHost("helper")
    with pytest.raises(AgentError, match="trained="):
        RolloutHost(agent, trained=["Bob"])
    with pytest.raises(ConfigError, match="'localhost:8000'"):
        RolloutHost(agent).follow("localhost:8000", KEY)
    with pytest.raises(ConfigError, match="no HTTP header") as found:
        RolloutHost(agent).follow("http://127.0.0.1:1", "secret\nkey")
    assert "secret" not in str(found.value)
    with ScriptedEndpoint(one_call) as endpoint:
        host = followed(endpoint, agent)
        with pytest.raises(ConfigError, match="follows an endpoint already"):
            host.follow(endpoint.address, KEY)
        host.close()


# --- silence ----------------------------------------------------------------------------------------------------------


def test_many_threads_are_silent_at_once_and_output_is_as_it_was_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, both, seen = sys.stdout, threading.Barrier(3), threading.Barrier(3)
    kept: list[str] = []

    def quiet(name: str) -> None:
        with silent_thread() as silence:
            print(f"printed by {name}")
            both.wait()
            seen.wait()
            print("and more", end="")
            kept.append(silence.said)
        print(f"{name} is heard again")

    threads = [threading.Thread(target=quiet, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    both.wait()
    print("heard", flush=True)
    seen.wait()
    for thread in threads:
        thread.join()
    assert sys.stdout is before
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "heard" and sorted(out[1:]) == ["one is heard again", "two is heard again"]
    assert sorted(kept) == ["printed by one\nand more", "printed by two\nand more"]
