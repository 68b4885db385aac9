"""What ``praison-agent-rl serve`` is told: the address, the key and the options; and how often a server is started."""

import re
import resource
import shlex
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import praison_agent_rl as rl
from praison_agent_rl import registry, server_pool
from praison_agent_rl.cli import app
from praison_agent_rl.commands import serve
from praison_agent_rl.commands.serve import KEY_VARIABLE, ServeOptions, serve_agents
from praison_agent_rl.errors import ConfigError, ServerFailed, VersionError
from praison_agent_rl.gateway.counting import merged
from praison_agent_rl.gateway.running import listen
from praison_agent_rl.server_pool import ServerPool, serve_base
from tests.fakes import FakeStart, build_agent
from tests.finished_runs import weights_in
from tests.gateways import eventually, publish


@pytest.fixture
def home(in_tmp: Path) -> Path:
    publish(in_tmp / "home", weights_in(in_tmp / "base", b"the base"), "helper", 1)
    return in_tmp / "home"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_other_machines_may_ask_only_with_a_key_of_the_user(home, host, monkeypatch, capsys):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"--host {host} lets other machines ask.*set {KEY_VARIABLE}"):
        serve_agents(["helper"], ServeOptions(home=home, host=host))
    monkeypatch.setenv(KEY_VARIABLE, "ours")
    with pytest.raises(VersionError, match="agent 'nobody' has no versions"):
        serve_agents(["nobody"], ServeOptions(home=home, host=host))
    said = capsys.readouterr().out
    assert f"warning: {host} is reached by other machines over plain HTTP" in said and "ours" not in said


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_alone_needs_no_key_and_hears_no_warning(home, host, monkeypatch, capsys):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(VersionError, match="nobody"):
        serve_agents(["nobody"], ServeOptions(home=home, host=host))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("key", ["", "two\nlines", "schlüssel", " spaced", "spaced ", "\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(home, key, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=f"the key in {KEY_VARIABLE}") as told:
        serve_agents(["helper"], ServeOptions(home=home))
    assert not key or key.strip() not in str(told.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vllm_options": "--dtype 'half"}, "cannot be read as in a shell"),
        ({"vllm_options": "--dtype half", "backend": "transformers"}, "are for --backend vllm"),
        ({"backend": "ollama"}, "--backend 'ollama' is none; give transformers or vllm"),
        ({"drain": float("nan")}, "--drain nan is no time; give seconds"),
        ({"drain": float("inf")}, "--drain inf is no time"),
        ({"drain": -1.0}, "--drain -1 is no time"),
    ],
)
def test_options_are_checked_before_anything_starts(home, options, said):
    with pytest.raises(ConfigError, match=said):
        serve_agents(["helper"], ServeOptions(**{"home": home, "backend": "vllm", **options}))


def test_a_version_is_of_one_agent():
    assert serve.named(["Help Desk"], "v3") == ["Help Desk@v3"] and serve.named(["a", "b"], None) == ["a", "b"]
    with pytest.raises(ConfigError, match="--version v3 is of one agent; of several, write AGENT@v3"):
        serve.named(["a", "b"], "v3")


def test_a_port_that_is_taken_and_a_host_that_is_none_are_told(in_tmp):
    with listen("127.0.0.1", None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be had .*give another with --port"):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", port):  # what was only just let go of is free
        pass
    for host in ("192.0.2.7", "no host", "a..b", "ä" * 100, "a" * 300):
        with pytest.raises(ConfigError, match=f"a port of {host} cannot be had"):
            listen(host, None)
    for port in (-1, 65_536, 10**20):
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be had"):
            listen("127.0.0.1", port)


def test_as_many_files_may_be_open_as_the_system_lets_it_and_never_fewer(monkeypatch):
    def allowed(soft: int, hard: int) -> tuple[int, int]:
        limits = [(soft, hard)]
        monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
        serve._allow_all_connections()
        return limits[-1]

    endless = resource.RLIM_INFINITY
    assert allowed(1024, 4096) == (4096, 4096) and allowed(1024, endless) == (65_536, endless)
    assert allowed(1024, 10**9) == (65_536, 10**9) and allowed(100_000, 10**9) == (100_000, 10**9)
    assert allowed(endless, endless) == (endless, endless) and allowed(4096, 4096) == (4096, 4096)


def test_it_says_how_to_ask_and_ends_where_nothing_ever_comes_up(home, monkeypatch, capsys):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with FakeStart() as start:
        open_ = lambda weights: serve_base(weights.version, start=start)  # noqa: E731
        monkeypatch.setattr(serve, "_opener", lambda given: open_)
        monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.1))
        start.failing = {"rl-helper-base"}
        with pytest.raises(ServerFailed, match="was told not to come up"):
            serve_agents(["helper"], ServeOptions(home=home))
        assert "for the agent's configuration" not in capsys.readouterr().out


# --- how often a server is started ----------------------------------------------------------------------------------


def test_many_who_want_a_server_that_does_not_come_up_start_it_once():
    pool, at_once, started, failures = ServerPool(), threading.Barrier(20), [], []

    def fails() -> Any:
        started.append(1)
        raise ServerFailed("no memory")

    def want() -> None:
        at_once.wait()
        with pytest.raises(ServerFailed, match="no memory") as told:
            pool.address("v1", fails)
        failures.append(told.value)

    threads = [threading.Thread(target=want) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(failures) == 20 and len(started) == 1
    with pytest.raises(ServerFailed):
        pool.address("v2", fails)  # another one is not taken for it
    assert len(started) == 2


def test_a_failure_is_everybodys_for_a_moment_only(monkeypatch):
    monkeypatch.setattr(server_pool, "_SHARED", 0.0)
    started: list[int] = []

    def fails() -> Any:
        started.append(1)
        raise ServerFailed("no memory")

    pool = ServerPool()
    for _ in range(3):
        with pytest.raises(ServerFailed):
            pool.address("v1", fails)
    assert len(started) == 3


@pytest.mark.usefixtures("agents_around")
def test_a_watch_that_loses_its_server_again_and_again_starts_it_less_and_less_often(home, server_a, monkeypatch):
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.1))
    registry.promote(home, "helper", "v1")
    with FakeStart() as start:

        def start_and_die(folder: Any, *, name: str, device: str) -> Any:
            served = start(folder, name=name, device=device)
            if len(start.started) > 1:
                served.stop()
            return served

        agent = build_agent("environment", server_a.url)
        attached = rl.attach(agent, home=home, watch=0.01, start=start_and_die)
        assert start.names == ["v1"]
        start.of("v1").stop()
        assert eventually(lambda: len(start.names) == 3)  # at once, and after a second
        assert not eventually(lambda: len(start.names) == 4, seconds=1.0)  # the next pause is of two
        attached.stop()


# --- metrics --------------------------------------------------------------------------------------------------------


def test_what_two_servers_count_is_described_once_and_told_apart():
    first = "\n".join(
        [
            "# HELP time Time to the first token.",
            "# TYPE time histogram",
            'time_bucket{le="0.1",model_name="a}b"} 1.0',
            "time_count 4.0 1700000000000",
            "# HELP up Up.",
            "up 1",
            "nonsense",
        ]
    )
    second = '# HELP time Time to the first token.\n# TYPE time histogram\ntime_bucket{le="0.1",} 2.0\n'
    assert merged({"a:1": first, "b:2": second}) == [
        "# HELP time Time to the first token.",
        "# TYPE time histogram",
        'time_bucket{server="a:1",le="0.1",model_name="a}b"} 1.0',
        'time_count{server="a:1"} 4.0 1700000000000',
        'time_bucket{server="b:2",le="0.1"} 2.0',
        "# HELP up Up.",
        'up{server="a:1"} 1',
    ]
    assert merged({}) == []


def test_a_free_port_is_taken_where_none_is_named():
    with listen("127.0.0.1", None) as one, listen("127.0.0.1", None) as other:
        assert one.getsockname()[1] != other.getsockname()[1] and one.family == socket.AF_INET


# --- the examples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["docs/serving.md", "examples/serving/praison-agent-rl.service", "examples/serving/compose.yaml"]
)
def test_each_command_of_the_examples_is_one_of_ours_with_options_that_it_has(file):
    text = (Path(__file__).parents[2] / file).read_text()
    lines = re.findall(r"praison-agent-rl ([a-z][^`\n#]*)", text)
    assert lines
    for line in lines:
        command: Any = typer.main.get_command(app)
        words = shlex.split(line)
        while commands := getattr(command, "commands", None):
            command = commands[words.pop(0)]
        given = command.make_context(command.name, words).params  # raises for an option that it does not have
        assert command.name != "serve" or (given["agents"] == ["helper", "cook"] and given["port"] == 8100), line


def test_the_examples_stop_only_after_the_drain():
    folder = Path(__file__).parents[2] / "examples" / "serving"
    unit = (folder / "praison-agent-rl.service").read_text()
    service = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["agents"]
    for text, patience in (
        (unit, re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0]),
        (service["command"], service["stop_grace_period"].removesuffix("s")),
    ):
        assert int(patience) > float(re.findall(r"--drain (\d+)", text)[0])
    assert re.findall(r"^KillMode=(.*)$", unit, re.M) == ["mixed"]
