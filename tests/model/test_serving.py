"""A model server: who may use it, who keeps it alive, and what ends it."""

import copy
import os
import pickle
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from praisonaiagents import Agent

from praison_agent_rl import registry, server_pool
from praison_agent_rl.endpoints import list_models
from praison_agent_rl.errors import ServerFailed
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.server_pool import ServerPool
from praison_agent_rl.serving import LOG, Server, start_server
from praison_agent_rl.swap import swap_model
from tests.fakes import FakeServer
from tests.finished_runs import finished_run, weights_in
from tests.gateways import ask, eventually, gateway, get, opener


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    started = start_server(tiny_model, name="rl-x-v1")
    yield started
    started.stop()


def status_of(url: str, key: str | None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_the_key_opens_the_server(server: Server) -> None:
    for path in ("/models", "/chat/completions", "/responses", "/../load_model", "/../reset", "/../health"):
        assert status_of(server.url + path, None) == 401
        assert status_of(server.url + path, "wrong") == 401
    assert list(list_models(server.url, server.api_key)) == ["rl-x-v1"]


def test_the_server_listens_on_this_machine_alone_and_hides_its_key(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    listening = [c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert set(listening) == {"127.0.0.1"}
    assert server.api_key not in " ".join(process.cmdline())


def test_no_request_makes_its_log_longer(server: Server) -> None:
    def ask_it(path: str, body: dict[str, object]) -> None:
        headers = {"authorization": f"Bearer {server.api_key}"}
        reply = httpx.post(f"{server.url}/{path}", json=body, headers=headers, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text

    told = {"model": server.model, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    ask_it("chat/completions", told)
    log = server.home / LOG
    before = log.read_text()
    for stream in (False, True, False):
        ask_it("chat/completions", {**told, "stream": stream})
        list_models(server.url, server.api_key)
    assert log.read_text() == before


def test_a_fork_of_the_owner_never_ends_the_server(server: Server) -> None:
    pid = os.fork()
    if pid == 0:
        server.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.5)
    assert server.running and list_models(server.url, server.api_key)


def test_the_address_keeps_the_server_and_is_a_plain_text_elsewhere(server: Server) -> None:
    assert server.address == server.url and server.address.server is server
    assert type(pickle.loads(pickle.dumps(server.address))) is str
    assert type(copy.deepcopy(server.address)) is str


def test_a_clone_of_the_agent_keeps_the_server(server: Server, server_a: FakeServer) -> None:
    agent = Agent(name="x", instructions="y", llm="openai/m1", base_url=server_a.url, api_key="k", output="silent")
    swap_model(agent, server.model, base_url=server.address, api_key=server.api_key, server=server)
    clone = agent.clone_for_channel()
    assert clone.base_url.server is server


def test_a_folder_that_is_no_model_is_a_server_that_fails_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="the last lines of its log"):
        start_server(tmp_path, name="rl-z-v1", timeout=60)


def test_a_proxy_of_the_user_is_not_asked_for_this_machine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, server_a: FakeServer
) -> None:
    monkeypatch.setenv("http_proxy", server_a.url.removesuffix("/v1"))
    monkeypatch.setenv("no_proxy", "intranet.example")
    server = start_server(tiny_model, name="rl-p-v1", timeout=60)
    try:
        assert os.environ["no_proxy"] == "intranet.example,127.0.0.1,localhost"
        assert server_a.keys == [], "the proxy never saw the key"
    finally:
        server.stop()


def test_threads_that_find_out_what_is_sent_leave_the_output_as_it_was(server_a: FakeServer) -> None:
    import sys

    from praison_agent_rl.sent import sent_requests

    agent = Agent(name="x", instructions="y", llm="openai/m1", base_url=server_a.url, api_key="k", output="silent")
    before = sys.stdout
    threads = [threading.Thread(target=sent_requests, args=(agent, ["a"] * n)) for n in (8, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.stdout is before


# --- several versions behind one address ----------------------------------------------------------------------------


@pytest.fixture
def home(in_tmp: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of an agent with v1, which is current, and v2; both of the tiny model."""
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=20.0))  # a rollback finds its server still there
    place = in_tmp / "home"
    for number in range(2):
        run = finished_run(place / "runs" / str(number), weights_in(in_tmp / "base"), agent="helper")
        shutil.rmtree(run.merged)
        shutil.copytree(tiny_model, run.merged)
        publish_version(place, "helper", run)
    registry.promote(place, "helper", "v1")
    return place


def test_real_servers_are_swapped_under_load_behind_one_address(home: Path) -> None:
    replies: list[tuple[int, str]] = []
    going = threading.Event()
    going.set()
    with gateway(home, ["helper"], opener(device="cpu"), patience=120.0) as running:

        def ask_without_pause(place: int) -> None:
            while going.is_set():
                reply = ask(running, "helper", "Say something.", max_tokens=4, stream=place % 2 == 0)
                assert '"finish_reason":"' in reply.text  # whole
                replies.append((reply.status_code, reply.headers["x-served-model"]))

        def eight_more() -> bool:
            before = len(replies)
            return eventually(lambda: len(replies) > before + 8, seconds=120)

        threads = [threading.Thread(target=ask_without_pause, args=(place,), daemon=True) for place in range(4)]
        for thread in threads:
            thread.start()
        for move in (lambda: registry.promote(home, "helper", "v2"), lambda: registry.rollback(home, "helper")):
            assert eight_more()
            line = running.offering.line("helper")
            move()
            assert eventually(lambda line=line: running.offering.line("helper") is not line, seconds=120)
        assert eight_more() and get(running, "/health").status_code == 200
        going.clear()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
    assert {status for status, _ in replies} == {200}
    assert {model for _, model in replies} == {"rl-helper-v1", "rl-helper-v2"}
