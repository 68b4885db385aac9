"""How vLLM is started and asked, held by a stand-in: one server for a base, adapters by name, a key from outside."""

import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import praison_agent_rl as rl
from praison_agent_rl import registry, server_pool
from praison_agent_rl.endpoints import list_models
from praison_agent_rl.errors import MissingExtra, ServerFailed, VersionError
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.records import Version
from praison_agent_rl.server_pool import ServerPool, serve_version
from praison_agent_rl.swap import server_of
from praison_agent_rl.vllm_servers.serving import (
    EXECUTABLE,
    VllmServer,
    find_vllm,
    fitting_rank,
    rank_of,
    start_vllm_server,
)
from tests.fakes import build_agent
from tests.finished_runs import finished_run, weights_in
from tests.gateways import answered_by, ask, gateway, get, opener

STAND_IN = '''\
#!{python}
"""Takes the arguments of `vllm serve`, and offers a base and adapters; what it was told is in told.json beside it."""
import argparse, json, os, pathlib, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("verb", choices=["serve"])
parser.add_argument("model")
for name in ("--host", "--served-model-name", "--dtype"):
    parser.add_argument(name)
for name in ("--port", "--max-lora-rank", "--max-loras"):
    parser.add_argument(name, type=int)
for name in ("--enable-lora", "--disable-uvicorn-access-log"):
    parser.add_argument(name, action="store_true")
given = parser.parse_args()
told = pathlib.Path(__file__).with_name("told.jsonl")
kept = ("VLLM_API_KEY", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "PYTHONPATH")


def note(**facts):
    with told.open("a") as file:
        file.write(json.dumps(facts) + "\\n")


note(started=vars(given), environment={{name: os.environ.get(name) for name in kept}}, pid=os.getpid())
if given.model.endswith("broken"):
    sys.exit("no such model")
adapters = {{}}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send(self, status, body):
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def known(self):
        if self.headers.get("authorization") == "Bearer " + os.environ["VLLM_API_KEY"]:
            return True
        self.send(401, {{"error": "Unauthorized"}})

    def do_GET(self):
        if self.known():
            self.send(200, {{"data": [{{"id": name}} for name in (given.served_model_name, *adapters)]}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.known():
            return
        verb = self.path.rpartition("/")[2]
        if verb == "load_lora_adapter":
            note(loaded=body)
            if body["lora_name"] in adapters or not pathlib.Path(body["lora_path"], "adapter_config.json").exists():
                self.send(400, {{"message": "cannot load " + body["lora_name"]}})
                return
            adapters[body["lora_name"]] = body["lora_path"]
            self.send(200, "Success")
        elif verb == "unload_lora_adapter":
            note(unloaded=body)
            self.send(200 if adapters.pop(body["lora_name"], None) else 404, {{}})
        elif body["model"] not in (given.served_model_name, *adapters):
            self.send(404, {{"error": {{"message": "The model does not exist"}}}})
        else:
            message = {{"role": "assistant", "content": "[v|" + body["model"] + "] yes"}}
            choice = {{"index": 0, "message": message, "finish_reason": "stop"}}
            usage = {{"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
            answer = {{"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "usage": usage}}
            self.send(200, {{**answer, "choices": [choice]}})


ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()
'''


class StandIn:
    """The command in the place of vLLM's, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.command = folder / "vllm"
        self.command.write_text(STAND_IN.format(python=sys.executable))
        self.command.chmod(0o755)
        self._told = folder / "told.jsonl"

    def told(self, kind: str) -> list[Any]:
        lines = self._told.read_text().splitlines() if self._told.exists() else []
        return [line[kind] for line in map(json.loads, lines) if kind in line]


@pytest.fixture
def vllm(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(in_tmp)
    monkeypatch.setenv(EXECUTABLE, str(stand_in.command))
    return stand_in


@pytest.fixture(autouse=True)
def quick_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerPool]:
    pool = ServerPool(grace=0.2)
    monkeypatch.setattr(server_pool, "_POOL", pool)
    yield pool
    gc.collect()


def gone(pid: int) -> bool:
    """Whether a process has ended, whoever has yet to take note of it."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def published(home: Path, base: Path, name: str, *, agent: str, rank: int = 16) -> Version:
    run = finished_run(home / "runs" / f"{agent}-{name}", base, agent=agent)
    (run.adapter / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return publish_version(home, agent, run)


@pytest.fixture
def home(in_tmp: Path) -> Path:
    return in_tmp / ".praisonai" / "rl"


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_the_server_is_started_for_adapters_on_this_machine_alone_with_a_key_that_no_list_of_processes_shows(vllm):
    server = start_vllm_server("/models/base", max_rank=20, options=["--dtype", "float16"], timeout=60)
    try:
        started = vllm.told("started")[0]
        assert started == {
            "verb": "serve", "model": "/models/base", "host": "127.0.0.1", "port": int(server.url.split(":")[2][:-3]),
            "served_model_name": "/models/base", "enable_lora": True, "max_lora_rank": 32,
            "max_loras": 4, "dtype": "float16", "disable_uvicorn_access_log": True,
        }  # fmt: skip
        told = vllm.told("environment")[0]
        assert told["VLLM_API_KEY"] == server.api_key and len(server.api_key) > 20
        assert told["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
        assert told["PYTHONPATH"] is None  # it may be of another environment
        family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        assert server.api_key not in " ".join(" ".join(process.cmdline()) for process in family)
        assert list(list_models(server.url, server.api_key)) == ["/models/base"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.url}/models")
    finally:
        server.stop()
    assert all(gone(pid) for pid in vllm.told("pid"))


def test_adapters_come_and_go_by_name(vllm, in_tmp):
    adapter = in_tmp / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    server = start_vllm_server("base", timeout=60)
    try:
        first = server.load("rl-a-v1", adapter, in_tmp / "model")
        assert (first.url, first.model, first.folder) == (server.url, "rl-a-v1", (in_tmp / "model").resolve())
        server.load("rl-a-v2", adapter, in_tmp / "model")
        assert list(list_models(server.url, server.api_key)) == ["base", "rl-a-v1", "rl-a-v2"]
        with pytest.raises(ServerFailed, match=r"400: .*cannot load rl-a-v1"):
            server.load("rl-a-v1", adapter, in_tmp / "model")
        first.stop()
        first.stop()
        assert list(list_models(server.url, server.api_key)) == ["base", "rl-a-v2"]
        assert vllm.told("loaded")[0] == {"lora_name": "rl-a-v1", "lora_path": str(adapter.resolve())}
    finally:
        server.stop()
    with pytest.raises(ServerFailed, match="did not answer load_lora_adapter"):
        server.load("rl-a-v3", adapter, in_tmp / "model")


def test_a_server_that_does_not_come_up_shows_its_log(vllm):
    with pytest.raises(ServerFailed, match=r"(?s)ended with code 1.*no such model"):
        start_vllm_server("broken", timeout=60)


def test_without_vllm_it_is_said_how_to_name_it(monkeypatch, in_tmp):
    monkeypatch.setenv(EXECUTABLE, str(in_tmp / "nowhere"))
    with pytest.raises(MissingExtra, match=f"{EXECUTABLE}"):
        find_vllm()


@pytest.mark.parametrize(("rank", "fitting"), [(1, 8), (8, 8), (9, 16), (65, 128), (300, 320), (512, 512)])
def test_the_smallest_rank_that_vllm_takes_is_asked_for(rank, fitting):
    assert fitting_rank(rank) == fitting


def test_a_rank_that_is_too_large_or_not_there_is_said(in_tmp):
    with pytest.raises(ServerFailed, match="rank 513"):
        fitting_rank(513)
    (in_tmp / "adapter_config.json").write_text('{"r": 8, "rank_pattern": {"q_proj": 24}}')
    assert rank_of(in_tmp) == 24
    with pytest.raises(ServerFailed, match="no adapter"):
        rank_of(in_tmp / "nowhere")


def test_agents_with_one_base_share_one_server_and_it_ends_with_the_last(vllm, home, in_tmp, server_a):
    # The first agent of a process that asks through litellm lives for ever: a thread of litellm's keeps the context.
    build_agent("provider", server_a.url, name="first", tools=[]).chat("hello")
    base, other = weights_in(in_tmp / "base", b"one"), weights_in(in_tmp / "other", b"two")
    for agent, weights in (("ada", base), ("bob", base), ("cy", other)):
        published(home, weights, "1", agent=agent)
        registry.promote(home, agent, "v1")
    agents = {
        name: build_agent(kind, server_a.url, name=name, tools=[])
        for name, kind in (("ada", "provider"), ("bob", "bare"), ("cy", "provider"))
    }
    for agent in agents.values():
        rl.attach(agent, backend="vllm")
    answers = {name: agent.chat("hello") for name, agent in agents.items()}
    assert answers == {name: f"[v|rl-{name}-v1] yes" for name in agents}
    assert [started["model"] for started in vllm.told("started")] == [str(base), str(other)]
    served = server_of(agents["ada"])
    assert served.folder == (home / "versions" / "ada" / "v1" / "model").resolve()  # what it would be improved from
    published(home, base, "2", agent="ada")
    registry.promote(home, "ada", "v2")
    assert rl.attach(agents["ada"], backend="vllm").version == "v2"
    assert agents["ada"].chat("hello") == "[v|rl-ada-v2] yes"
    gc.collect()
    assert eventually(lambda: vllm.told("unloaded") == [{"lora_name": "rl-ada-v1"}])
    assert len(vllm.told("started")) == 2
    pids = vllm.told("pid")
    agents.clear()
    del agent, served
    gc.collect()
    assert eventually(lambda: all(gone(pid) for pid in pids))


def test_an_adapter_is_not_loaded_onto_another_base_than_its_own(vllm, home, in_tmp):
    base = weights_in(in_tmp / "base", b"one")
    version = published(home, base, "1", agent="ada")
    weights_in(base, b"something else")
    with pytest.raises(VersionError, match="is not what v1 was trained on.*" + str(version.base_hash)):
        serve_version(version, backend="vllm")
    assert vllm.told("started") == []


def test_a_server_that_died_is_started_again_with_its_adapter(vllm, home, in_tmp):
    version = published(home, weights_in(in_tmp / "base", b"one"), "1", agent="ada")
    first = serve_version(version, backend="vllm")
    host = first.server.host  # type: ignore[attr-defined]
    assert isinstance(host, VllmServer)
    kill(host)
    assert not first.server.running
    second = serve_version(version, backend="vllm")
    assert second.server.running and second.server is not first.server
    assert list(list_models(str(second), second.server.api_key))[1:] == ["rl-ada-v1"]
    second.server.host.stop()  # type: ignore[attr-defined]


def test_what_a_server_that_died_leaves_behind_is_ended_before_another_is_started(vllm):
    server = start_vllm_server("base", timeout=60)
    os.kill(server.process.pid, signal.SIGKILL)
    assert eventually(lambda: not server.running)
    assert eventually(lambda: all(gone(pid) for pid in vllm.told("pid")))
    assert server.process.returncode == -signal.SIGKILL and not server.running


def kill(server: VllmServer) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)  # the server too: its watcher is not there any more to end it
    server.process.wait()


def test_one_server_of_a_base_answers_for_several_agents_behind_one_address_and_is_back_after_a_kill(
    vllm, home, in_tmp
):
    base = weights_in(in_tmp / "base", b"one")
    for agent in ("ada", "bob", "cy"):
        published(home, base, "1", agent=agent)
    published(home, base, "2", agent="ada")
    for agent in ("ada", "bob"):
        registry.promote(home, agent, "v1")
    open_ = opener(backend="vllm", vllm_options=["--dtype", "half"])
    with gateway(home, ["ada", "bob", "cy"], open_, patience=60.0) as running:
        assert [ask(running, name).json()["model"] for name in ("ada", "bob", "cy")] == [
            "rl-ada-v1",
            "rl-bob-v1",
            str(base),
        ]
        registry.promote(home, "ada", "v2")
        assert eventually(lambda: ask(running, "ada").json()["model"] == "rl-ada-v2")
        assert eventually(lambda: vllm.told("unloaded") == [{"lora_name": "rl-ada-v1"}])
        assert [started["dtype"] for started in vllm.told("started")] == ["half"]
        line = running.offering.line("bob")
        assert line is not None and line.address is not None
        kill(line.address.server.host)  # type: ignore[attr-defined]
        assert get(running, "/health").status_code == 503
        assert answered_by(ask(running, "ada")) == "rl-ada-v2"  # it waits
        assert answered_by(ask(running, "bob")) == "rl-bob-v1"
        assert eventually(lambda: get(running, "/health").status_code == 200)
        assert len(vllm.told("started")) == 2
        assert sorted(told["lora_name"] for told in vllm.told("loaded")[3:]) == ["rl-ada-v2", "rl-bob-v1"]
    pids = vllm.told("pid")
    assert eventually(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"r": 8, "use_dora": True}, "vLLM serves no adapter with use_dora"),
        ({"r": 8, "rank_pattern": {"q_proj": 16}}, "rank_pattern"),
        ({"r": 8, "target_modules": ["lm_head"]}, "on embeddings or the output head"),
    ],
)
def test_an_adapter_that_vllm_would_serve_as_another_model_is_refused(vllm, home, in_tmp, config, reason):
    run = finished_run(home / "runs" / "ada-1", weights_in(in_tmp / "base", b"one"), agent="ada")
    (run.adapter / "adapter_config.json").write_text(json.dumps(config))
    version = publish_version(home, "ada", run)
    with pytest.raises(VersionError, match=f"{reason}.*backend transformers"):
        serve_version(version, backend="vllm")
    assert vllm.told("started") == []


def test_the_real_vllm_takes_the_arguments_that_it_is_given():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("the package vllm is not installed")
    command = shutil.which("vllm", path=os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)]))
    assert command is not None
    shown = subprocess.run([command, "serve", "--help=all"], capture_output=True, text=True, timeout=300, check=True)
    for option in (
        "--host",
        "--port",
        "--served-model-name",
        "--enable-lora",
        "--max-lora-rank",
        "--max-loras",
        "--disable-uvicorn-access-log",
    ):
        assert option in shown.stdout
