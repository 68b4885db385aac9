"""``agent.improve`` from end to end on a tiny model: what it learns, what it swaps, and what it leaves behind."""

import asyncio
import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from praisonaiagents import Agent

import praison_agent_rl as rl
from praison_agent_rl import registry
from praison_agent_rl.data import read_rows
from praison_agent_rl.errors import AgentError, ConfigError, DataError, RewardError
from praison_agent_rl.improvement import Improvement
from praison_agent_rl.runs import HOME, RunFolder
from praison_agent_rl.swap import fresh_copy
from tests.fakes import FakeServer

REWARDS = '''
def letters(prompts, completions, **kwargs):
    """Share of characters that are lower-case letters."""
    return [sum(c.islower() for c in text) / max(len(text), 1) for text in completions]

def unlucky(completions, **kwargs):
    """A score that has nothing to do with the answer."""
    import random
    return [random.random() for _ in completions]
'''
SETTINGS: dict[str, Any] = {
    "max_steps": 20,
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 16,
    "learning_rate": 1e-2,
    "held_out": 12,
    "quiet": True,
}
PROMPTS = [f"Say something about the number {n}." for n in range(40)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def helper(server: FakeServer, **options: Any) -> Agent:
    model = {"model": "openai/m1", "base_url": server.url, "api_key": "old-key", "temperature": 0, "max_tokens": 12}
    return Agent(name="Helper", instructions="Be brief.", llm=model, output="silent", rules=False, **options)


@pytest.fixture
def project(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (in_tmp / "tinyrewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(in_tmp)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    yield in_tmp
    sys.modules.pop("tinyrewards", None)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_an_agent_is_improved_swapped_and_rolled_back(project: Path, tiny_model: Path, server_a: FakeServer) -> None:
    agent = helper(server_a, tools=[add])
    agent.chat("Hello")
    history = [dict(turn) for turn in agent.chat_history]
    result = agent.improve(data=PROMPTS, reward_funcs="tinyrewards:letters", base_model=str(tiny_model), **SETTINGS)

    assert isinstance(result, Improvement)
    assert result.new_score > result.base_score + 0.2
    assert str(result).startswith("v1: ") and "), swapped in" in str(result) and "\n" not in str(result)
    assert "signs of cheating: template answers" in str(result), "a reward for letters is won by repeating them"
    assert result.version == "v1" and result.swapped_in and result.report.exists()
    assert agent.chat_history == history, "asking how the agent asks leaves no trace"
    assert all("Say something" not in str(request) for request in server_a.requests), "no training prompt went out"

    server_a.requests.clear()
    answers = [
        agent.chat("one"),
        asyncio.run(agent.achat("two")),
        "".join(agent.iter_stream("three")),
        agent.chat("four", stream=True),
        agent.chat("please TOOL"),
    ]
    assert server_a.requests == [], "no turn went to the old model"
    assert all(answer is not None and "[A|" not in answer for answer in answers)
    assert agent.chat_history[: len(history)] == history

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        turns = [pool.submit(fresh_copy(agent).chat, f"turn {n}") for n in range(4)]
        time.sleep(0.3)
        result.rollback()
        assert all(turn.result() is not None for turn in turns), "turns under way have their answers"
    assert agent.chat("five").startswith("[A|m1]")
    assert server_a.keys[-1] == "Bearer old-key"
    result.rollback()
    assert agent.chat("six").startswith("[A|m1]")
    # ended turns hold their server in reference cycles, which a service that is at work collects by itself
    assert wait_for(lambda: gc.collect() >= 0 and children() == [], 20), "the new model's server has ended"


def test_a_second_improvement_trains_what_the_first_made(project: Path, tiny_model: Path, server_a: FakeServer) -> None:
    agent = helper(server_a)
    options = {**SETTINGS, "max_steps": 10, "data": PROMPTS, "reward_funcs": ["tinyrewards:letters"]}
    first = rl.improve(agent, base_model=str(tiny_model), **options)
    assert first.version == "v1" and first.swapped_in
    second = rl.improve(agent, **options)  # what the agent runs on is known now
    assert second.base_score == pytest.approx(first.new_score, abs=0.1)
    if second.swapped_in:
        with pytest.raises(AgentError, match="roll that back first"):
            first.rollback()
        assert "[A|" not in agent.chat("still there?")
        second.rollback()
    assert "[A|" not in agent.chat("who are you?"), "after the second way back, the first version answers"
    first.rollback()
    assert agent.chat("and now?").startswith("[A|m1]")


def test_other_weights_must_beat_the_version_that_answers_and_force_is_written_down(
    project: Path, tiny_model: Path, untied_model: Path, server_a: FakeServer
) -> None:
    options = {**SETTINGS, "data": PROMPTS, "reward_funcs": ["tinyrewards:letters"], "swap": False, "promote": True}
    first = helper(server_a).improve(base_model=str(tiny_model), **options)
    assert first.version == "v1" and first.promoted and not first.swapped_in
    short = {**options, "max_steps": 2, "learning_rate": 1e-3}
    other = helper(server_a).improve(base_model=str(untied_model), **short)
    assert other.version is None and RunFolder(other.run).plan.incumbent == "v1"
    assert other.verdict.status in ("not better", "worse", "undecided")
    assert [pointer.version for pointer in registry.history(HOME, "Helper")] == ["v1"]

    forced = helper(server_a).improve(base_model=str(untied_model), force=True, **short)
    assert forced.version == "v2" and forced.promoted and "BY FORCE" in str(forced)
    assert forced.verdict.forced and "force" in forced.report.read_text()
    assert registry.history(HOME, "Helper")[-1].forced
    assert registry.read_version(HOME, "Helper", "v2").verdict.forced


def test_a_model_that_is_not_better_is_not_swapped_in(project: Path, tiny_model: Path, server_a: FakeServer) -> None:
    agent = helper(server_a)
    settings = {**SETTINGS, "max_steps": 2, "learning_rate": 1e-5}
    result = agent.improve(data=PROMPTS, reward_funcs=["tinyrewards:unlucky"], base_model=str(tiny_model), **settings)
    assert not result.swapped_in and result.version is None
    assert result.verdict.status in ("not better", "worse", "undecided")
    assert str(result).startswith(result.verdict.status) and "keeps its model" in str(result)
    assert agent.chat("who?").startswith("[A|m1]")
    assert not (project / ".praisonai" / "rl" / "versions").exists()
    assert wait_for(lambda: children() == [], 5)
    result.rollback()  # nothing to undo, and no error


def test_a_reward_without_a_name_runs_here_and_says_so(
    project: Path, tiny_model: Path, server_a: FakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = helper(server_a)
    settings = {**SETTINGS, "max_steps": 1, "quiet": False, "swap": False}
    result = agent.improve(
        data=PROMPTS, reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        base_model=str(tiny_model), **settings,
    )  # fmt: skip
    assert "which no other process can find" in capfd.readouterr().err
    assert list(result.comparison.rewards) == ["lambda_1"]
    assert agent.chat("who?").startswith("[A|m1]")


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"reward_funcs": "tinyrewards:nope"}, RewardError, "'tinyrewards' has no 'nope'"),
        ({"reward_funcs": None}, RewardError, "needs reward_funcs"),
        ({"data": None}, DataError, "nothing is recorded"),
        ({"data": ["", "fine"]}, DataError, "row 1"),
        ({"data": ["one", "two"], "held_out": 1}, ConfigError, "fewer prompts than one generation batch needs"),
        ({"learnin_rate": 1}, ConfigError, "did you mean 'learning_rate'"),
        ({"held_out": 0}, DataError, "0 prompts are held out"),
        ({"method": "cpo", "data": PROMPTS}, Exception, "chosen"),
    ],
)
def test_wrong_input_changes_nothing(
    project: Path, tiny_model: Path, server_a: FakeServer, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    agent = helper(server_a)
    given = {"data": PROMPTS, "reward_funcs": "tinyrewards:letters", "base_model": str(tiny_model), **SETTINGS}
    with pytest.raises(kind, match=said):
        agent.improve(**{**given, **options})
    assert agent.chat("who?").startswith("[A|m1]")
    assert not (project / ".praisonai").exists()


def test_improve_is_there_for_old_agents_and_subclasses() -> None:
    class Special(Agent):
        pass

    assert Special(name="s", instructions="x").improve.__func__ is rl.improve
    code = (
        "from praisonaiagents import Agent; a = Agent(name='old', instructions='x'); import praison_agent_rl; "
        "print(callable(a.improve))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("True")


@pytest.mark.parametrize("how", ["kill", "exit", "error"])
def test_nothing_is_left_running_however_the_process_ends(
    project: Path, tiny_model: Path, server_a: FakeServer, how: str
) -> None:
    """A process with a served version is killed, exits, or raises; its server goes with it."""
    script = project / "service.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from praison_agent_rl.serving import start_server
        server = start_server(Path({str(tiny_model)!r}), name="rl-x-v1")
        print(server.process.pid, flush=True)
        if {how!r} == "exit":
            sys.exit(3)
        if {how!r} == "error":
            raise RuntimeError("user code")
        time.sleep(60)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    if how == "kill":
        os.kill(parent.pid, signal.SIGKILL)
    parent.wait(30)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE


def test_a_killed_improvement_leaves_no_process_and_can_be_resumed(
    project: Path, tiny_model: Path, server_a: FakeServer
) -> None:
    """kill -9 in the middle of training: the child ends, and the run goes on from its newest whole checkpoint."""
    script = project / "service.py"
    settings = {**SETTINGS, "max_steps": 400, "save_steps": 5}
    script.write_text(
        textwrap.dedent(f"""
        from praisonaiagents import Agent
        import praison_agent_rl
        model = {{"model": "openai/m1", "base_url": {server_a.url!r}, "api_key": "k"}}
        agent = Agent(name="Helper", instructions="Be brief.", llm=model, output="silent", rules=False)
        agent.improve(data={PROMPTS!r}, reward_funcs="tinyrewards:letters", base_model={str(tiny_model)!r},
                      **{settings!r})
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], cwd=project)
    checkpoints = ".praisonai/rl/runs/*/checkpoints/checkpoint-*/trainer_state.json"
    deadline = time.monotonic() + 120
    while not list(project.glob(checkpoints)) and parent.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    started = psutil.Process(parent.pid).children(recursive=True)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    gone, alive = psutil.wait_procs(started, timeout=10)
    assert gone and not alive
    (run,) = (project / ".praisonai" / "rl" / "runs").iterdir()

    plan = (run / "plan.json").read_text().replace('"max_steps": 400', '"max_steps": 30')
    (run / "plan.json").write_text(plan)
    from praison_agent_rl.improvement import resume_run

    result = resume_run(run, quiet=True)
    assert isinstance(result, Improvement) and result.new_score > result.base_score
    events = (run / "events.jsonl").read_text()
    assert "going on from checkpoint-" in events


def test_an_agent_that_was_recorded_is_improved_on_what_it_was_asked(
    project: Path, tiny_model: Path, server_a: FakeServer
) -> None:
    agent = helper(server_a, tools=[add])
    with agent.record(tags=["test"]) as recording:
        for prompt in PROMPTS[:10]:
            agent.clear_history()
            agent.chat(prompt)
    assert recording.counts["runs"] == 10 and agent.last_run
    settings = {**SETTINGS, "held_out": 0.5, "max_steps": 3, "swap": False}
    with pytest.raises(DataError, match="too few to train and to judge: at least 40"):
        agent.improve(reward_funcs=["tinyrewards:letters"], base_model=str(tiny_model), **settings)

    subjects = ["tides", "bees", "glass", "salt", "maps", "bread", "wool", "ice", "kites", "rust", "owls", "moss"]
    questions = [
        f"{verb} {what}" for verb in ("Tell me of", "Who found", "What are", "Sing of", "Draw") for what in subjects
    ]
    with agent.record(tags=["test"]):
        for question in questions:
            agent.clear_history()
            agent.chat(question)
    sent = [request["messages"] for request in server_a.requests]
    result = agent.improve(reward_funcs=["tinyrewards:letters"], base_model=str(tiny_model), **settings)
    rows = [*read_rows(result.run / "train.jsonl"), *read_rows(result.run / "held_out.jsonl")]
    assert len(rows) >= 40
    assert all(row["prompt"] in sent for row in rows), "what is trained on is what was sent"
    assert [tool["function"]["name"] for tool in RunFolder(result.run).plan.tools] == ["add"]
