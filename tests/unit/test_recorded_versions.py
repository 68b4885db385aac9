"""Who asks `serve` for a name that goes over records which version answered, call by call; others' names are none."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl import capture, registry, server_pool
from praison_agent_rl.canary import compare_recorded
from praison_agent_rl.capture.versions import version_named
from praison_agent_rl.errors import DataError
from praison_agent_rl.server_pool import ServerPool
from praison_agent_rl.transcripts import read_calls, read_runs
from tests.fakes import FakeServer, FakeStart, build_agent
from tests.finished_runs import weights_in
from tests.gateways import eventually, gateway, opener, publish

KINDS = ("environment", "provider", "hosted_vllm", "responses")
WAYS: dict[str, Callable[[Any], Any]] = {
    "chat": lambda agent: agent.chat("hello"),
    "chat streaming": lambda agent: agent.chat("hello", stream=True),
    "achat streaming": lambda agent: asyncio.run(agent.achat("hello", stream=True)),
    "iter_stream": lambda agent: "".join(agent.iter_stream("hello")),
    "two rounds of a tool": lambda agent: agent.chat("TWICE"),
}
NAMES = {"responses": "gpt-4o-mini"}
"""litellm sends this model's requests to the Responses interface, wherever it is."""


@pytest.fixture(autouse=True)
def around(agents_around: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.1))
    yield
    for recording in capture.open_recordings():
        recording.stop()


@pytest.fixture
def start() -> Iterator[FakeStart]:
    with FakeStart() as starting:
        yield starting


@pytest.fixture
def home(in_tmp: Path) -> Path:
    """The home of "helper" and of "gpt-4o-mini", each with v1 and v2, neither of them promoted."""
    base = weights_in(in_tmp / "base", b"the base")
    for agent in ("helper", "gpt-4o-mini"):
        publish(in_tmp / "home", base, agent, 2)
    return in_tmp / "home"


def asking(kind: str, url: str, monkeypatch: pytest.MonkeyPatch, *, name: str | None = None, **options: Any) -> Any:
    """An agent of ``kind`` that asks for ``name`` at ``url``."""
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    name = name or NAMES.get(kind, "helper")
    if kind == "responses":
        return build_agent("provider", url, llm=f"openai/{name}", **options)
    llm: Any = {"provider": f"openai/{name}", "hosted_vllm": f"hosted_vllm/{name}"}.get(kind, name)
    return build_agent(kind, url, llm=llm, **options)


def versions_of(store: str = "calls") -> list[str | None]:
    return [call.version for call in read_calls(store)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_and_run_holds_the_version_that_answered_it(kind, way, home, start, monkeypatch):
    name = NAMES.get(kind, "helper")
    with gateway(home, [name], opener(start=start), key="key-a") as running:
        agent = asking(kind, running.url, monkeypatch)
        with capture.record(agent, store="calls"):
            WAYS[way](agent)
            for version in ("v1", "v2"):
                registry.promote(home, name, version)
                assert eventually(lambda version=version: running.offering.line(name).weights.label == version)
                WAYS[way](agent)
    calls = 3 if way == "two rounds of a tool" else 1
    served = [f"rl-{name}-{label}" for label in ("base", "v1", "v2")]
    assert versions_of() == [version for version in served for _ in range(calls)]
    assert [run.version for run in read_runs("calls")] == served
    assert {call.model.rpartition("/")[2] for call in read_calls("calls")} == {name}, "as it was asked for"


@pytest.mark.parametrize("kind", ["environment", "provider"])
def test_several_versions_in_one_run_are_each_with_their_calls_and_the_run_is_none_of_theirs(
    kind, home, start, monkeypatch
):
    registry.promote(home, "helper", "v1")
    with gateway(home, ["helper"], opener(start=start), key="key-a") as running:

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            registry.promote(home, "helper", "v2")
            assert eventually(lambda: running.offering.line("helper").weights.label == "v2")
            return a + b

        agent = asking(kind, running.url, monkeypatch, tools=[add])
        with capture.record(agent, store="calls"):
            agent.chat("TOOL")
    assert versions_of() == ["rl-helper-v1", "rl-helper-v2"]
    (run,) = read_runs("calls")
    assert run.version is None and run.finished
    for version in ("v1", "v2", "base"):
        with pytest.raises(DataError, match=f"answered by '{version}'"):
            compare_recorded("calls", "helper", version, "v7", home=home)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["environment", "provider"])
@pytest.mark.parametrize("name", ["helper@v1", "rl-helper-v1"])
def test_a_version_that_is_asked_for_by_name_is_recorded_too(name, kind, stream, home, start, monkeypatch):
    registry.promote(home, "helper", "v1")
    with gateway(home, ["helper", "helper@v1"], opener(start=start), key="key-a") as running:
        agent = asking(kind, running.url, monkeypatch, name=name)
        with capture.record(agent, store="calls"):
            agent.chat("hello", stream=stream)
    assert versions_of() == ["rl-helper-v1"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["environment", "provider", "hosted_vllm"])
def test_what_a_server_of_others_calls_its_model_is_no_version(kind, stream, server_a, monkeypatch):
    told, others = FakeServer.reply_to, ("helper", "rl-cook-v2", "rl-helper-v2-awq", "helper-v2", "v2", "gpt-4o", "")
    left = iter(others)

    def renaming(self: FakeServer, request: dict[str, Any]) -> dict[str, Any]:
        message = told(self, request)
        request["model"] = next(left)
        return message

    monkeypatch.setattr(FakeServer, "reply_to", renaming)
    agent = asking(kind, server_a.url, monkeypatch)
    with capture.record(agent, store="calls"):
        for _ in others:
            agent.chat("hello", stream=stream)
    assert versions_of() == [None] * len(others) == [run.version for run in read_runs("calls")]


@pytest.mark.parametrize(
    ("named", "asked", "version"),
    [
        ("rl-help-desk-v3", "Help Desk", "rl-help-desk-v3"),
        ("rl-help-desk-v3", "openai/help-desk", "rl-help-desk-v3"),
        ("rl-help-desk-v3", "help-desk@v3", "rl-help-desk-v3"),
        ("rl-help-desk-v12", "hosted_vllm/rl-help-desk-v12", "rl-help-desk-v12"),
        ("openai/rl-help-desk-base", "help-desk", "rl-help-desk-base"),
        ("rl-help-desk-0a1b2c3d-v3", "HELP DESK", "rl-help-desk-0a1b2c3d-v3"),
        ("rl-team-helper-v1", "team/helper", "rl-team-helper-v1"),
        ("rl-team-helper-v1", "openai/team/helper", "rl-team-helper-v1"),
        ("rl-a-v1-v2", "a@v1", "rl-a-v1-v2"),
        ("rl-help-desk-v0", "help-desk", None),
        ("rl-help-desk-v03", "help-desk", None),
        ("rl-help-desk-v3x", "help-desk", None),
        ("xrl-help-desk-v3", "help-desk", None),
        ("rl-agent-v1", "help-desk", None),
        ("rl-help-v3", "help-desk", None),
        ("rl-help-desk-v3", None, None),
        (None, "help-desk", None),
        ("", "", None),
    ],
)
def test_a_version_is_of_the_agent_that_was_asked_for(named, asked, version):
    assert version_named(named, asked) == version


@pytest.mark.parametrize("kind", ["environment", "provider"])
def test_a_reply_that_only_its_reader_refused_and_a_stream_that_was_left_have_their_version(
    kind, home, start, monkeypatch
):
    from pydantic import BaseModel

    class Verdict(BaseModel):
        verdict: int

    registry.promote(home, "helper", "v1")
    with gateway(home, ["helper"], opener(start=start), key="key-a") as running:
        agent = asking(kind, running.url, monkeypatch)
        with capture.record(agent, store="calls"):
            chunks = agent.iter_stream("one of many words")
            next(chunks)
            chunks.close()
            agent.chat("STRUCT", output_pydantic=Verdict)
    calls = list(read_calls("calls"))
    assert len(calls) >= 2 and {call.version for call in calls if call.reply} == {"rl-helper-v1"}


def test_the_runs_of_two_versions_behind_one_name_are_compared(home, start, monkeypatch):
    with gateway(home, ["helper"], opener(start=start), key="key-a") as running:
        agent = asking("environment", running.url, monkeypatch)
        with capture.record(agent, store="calls"):
            for version, runs in ((None, 2), ("v1", 3), ("v2", 4)):
                if version is not None:
                    registry.promote(home, "helper", version)
                    assert eventually(lambda version=version: running.offering.line("helper").weights.label == version)
                for _ in range(runs):
                    agent.chat("hello")

    def told(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        return [float("rl-helper-v2" in str(text)) for text in completions]

    for a, b, runs in (("v1", "v2", (3, 4)), ("base", "v1", (2, 3)), ("base", "v2", (2, 4))):
        found = compare_recorded("calls", "helper", a, b, reward_funcs=told, home=home)
        assert (found.a.runs, found.b.runs) == runs
        assert found.total is not None and found.total.new == float(b == "v2") and found.total.base == 0.0
