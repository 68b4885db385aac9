"""Real model servers: an agent follows its versions without a lost turn, and a version is served alone."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import praison_agent_rl as rl
from praison_agent_rl import registry, server_pool
from praison_agent_rl.endpoints import list_models
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.server_pool import ServerPool
from praison_agent_rl.serving import Server
from praison_agent_rl.swap import server_of
from praison_agent_rl.transcripts import read_runs
from tests.fakes import FakeServer, build_agent
from tests.finished_runs import finished_run, weights_in

NAME = "helper"


@pytest.fixture
def home(in_tmp: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of an agent with v1, which is current, and v2; both of the tiny model."""
    for name in [n for n in os.environ if n.startswith("OPENAI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.5))
    place = in_tmp / ".praisonai" / "rl"
    for number in range(2):
        run = finished_run(place / "runs" / str(number), weights_in(in_tmp / "base"), agent=NAME)
        shutil.rmtree(run.merged)
        shutil.copytree(tiny_model, run.merged)
        publish_version(place, NAME, run)
    registry.promote(place, NAME, "v1")
    return place


def test_real_servers_change_under_threads_that_ask_without_pause(home, server_a: FakeServer):
    model = {"model": "openai/m1", "base_url": server_a.url, "api_key": "key-a", "max_tokens": 4}
    agents = [build_agent("dict", server_a.url, llm=model, tools=[]) for _ in range(4)]
    recording = rl.record(NAME)
    attached = [rl.attach(agent, watch=0.05, device="cpu") for agent in agents]
    first = server_of(agents[0])
    assert isinstance(first, Server) and all(server_of(agent) is first for agent in agents)
    going, lost = threading.Event(), []
    going.set()

    def ask_without_pause(agent) -> None:
        while going.is_set():
            if not isinstance(agent.chat("Say something."), str):
                lost.append(agent)
            agent.clear_history()

    threads = [threading.Thread(target=ask_without_pause, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()

    def until(version: str) -> None:
        deadline = time.monotonic() + 120
        while any(one.version != version for one in attached):
            assert time.monotonic() < deadline, f"{version} was not reached"
            time.sleep(0.05)
        time.sleep(2)

    until("v1")
    registry.promote(home, NAME, "v2")
    until("v2")
    second = server_of(agents[0])
    assert second is not first and all(server_of(agent) is second for agent in agents)
    registry.rollback(home, NAME)
    until("v1")
    going.clear()
    for thread in threads:
        thread.join(60)
    for one in attached:
        one.stop()
    recording.stop()
    runs = list(read_runs())
    assert lost == [] and len(runs) > 12
    assert {run.error for run in runs} == {call.error for run in runs for call in run.calls} == {None}
    assert {run.version for run in runs} == {"rl-helper-v1", "rl-helper-v2"}
    assert all({call.version for call in run.calls} == {run.version} for run in runs)
    third = server_of(agents[0])
    for agent in agents:
        attached_to = rl.attach(agent)
        attached_to.detach()
    deadline = time.monotonic() + 30
    while any(server.running for server in (first, second, third)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(server.running for server in (first, second, third))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_the_current_version_alone_until_it_is_told_to_end(home, number):
    given = {"PRAISON_AGENT_RL_KEY": "a key of the user"} if number == signal.SIGTERM else {}
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", **given}
    command = [sys.executable, "-m", "praison_agent_rl.cli", "serve", NAME, "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None
        try:
            said = [run.stdout.readline() for _ in range(4)]
            place = re.fullmatch(r'  llm="openai/(helper)", base_url="(http://127\.0\.0\.1:\d+/v1)"\n', said[2])
            assert place, said
            key = "a key of the user"
            if given:
                assert said[3] == '  api_key=os.environ["PRAISON_AGENT_RL_KEY"]\n' and key not in "".join(said)
            else:
                key = said[3].split('"')[1]
            assert list(list_models(place[2], key)) == ["helper", "rl-helper-v1"]
            agent = build_agent("dict", "", llm={"model": f"openai/{place[1]}", "base_url": place[2], "api_key": key})
            assert isinstance(agent.chat("Say something."), str)
            family = psutil.Process(run.pid).children(recursive=True)
            assert family
            run.send_signal(number)
            rest = run.stdout.read()
            assert run.wait(30) == 0 and "the server has ended" in rest and "Traceback" not in rest
            assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
        finally:
            run.kill()


def test_the_command_says_what_there_is_to_serve(home):
    from typer.testing import CliRunner

    from praison_agent_rl.cli import app

    asked = CliRunner().invoke(app, ["serve", "nobody"])
    assert asked.exit_code == 2 and "agents with versions: 'helper'" in asked.output
    asked = CliRunner().invoke(app, ["serve", NAME, "--version", "v9"])
    assert asked.exit_code == 2 and "it has: v1, v2" in asked.output
    asked = CliRunner().invoke(app, ["serve", "nobody", f"{NAME}@v9"])
    assert asked.exit_code == 2 and "'nobody' has no versions" in asked.output and "has no version 'v9'" in asked.output
