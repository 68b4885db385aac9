"""An agent follows its current version: no turn is lost, each is answered by one model, and old servers end."""

import gc
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from praisonaiagents import Agent

import praison_agent_rl as rl
from praison_agent_rl import registry, server_pool
from praison_agent_rl.attachment import Attachment, attachment_of
from praison_agent_rl.errors import AgentError, ConfigError, ServerFailed, VersionDamaged, VersionError
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.sent import sent_requests
from praison_agent_rl.server_pool import ServerPool
from praison_agent_rl.swap import WRITTEN_NAMES, fresh_copy, route_of, server_of, swap_model
from tests.fakes import AGENT_KINDS, STYLES, FakeServer, FakeStart, build_agent
from tests.finished_runs import finished_run, flip_a_byte, weights_in

PATHS = ("environment", "provider")  # one kind for each of the framework's two clients
NAME = "helper"

pytestmark = pytest.mark.usefixtures("agents_around")


@pytest.fixture
def home(in_tmp: Path) -> Path:
    return in_tmp / ".praisonai" / "rl"


@pytest.fixture
def start() -> Iterator[FakeStart]:
    with FakeStart() as starting:
        yield starting


@pytest.fixture
def three(home: Path, in_tmp: Path) -> Path:
    """The home of an agent with v1, v2 and v3, none of which is promoted."""
    base = weights_in(in_tmp / "base", b"the base")
    for number in range(3):
        publish_version(home, NAME, finished_run(home / "runs" / str(number), base, agent=NAME))
    return home


def promote(home: Path, version: str) -> None:
    registry.promote(home, NAME, version)


def speaker(answer: object) -> str:
    """Who gave an answer, as ``2 rl-helper-v2``; the answer itself where it is not one of a fake server."""
    found = re.search(r"\[(\w)\|([^\]]+)\]", str(answer))
    return f"{found[1]} {found[2]}" if found else repr(answer)


def v(number: int) -> str:
    return f"{number} rl-helper-v{number}"


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# --- following ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_an_agent_goes_to_its_version_on_to_the_next_and_all_the_way_back(kind, server_a, three, start):
    agent = build_agent(kind, server_a.url)
    assert speaker(agent.chat("hello")) == "A m1"
    before = {name: agent.__dict__.get(name) for name in WRITTEN_NAMES}
    promote(three, "v1")
    attached = rl.attach(agent, start=start)
    assert speaker(agent.chat("hello")) == v(1) and attached.version == "v1"
    promote(three, "v2")
    assert speaker(agent.chat("hello")) == v(1)  # it follows when it is told to
    assert attached.refresh() == "v2"
    assert speaker(agent.chat("TOOL")) == v(2)
    registry.rollback(three, NAME)
    attached.refresh()
    assert speaker(agent.chat("hello")) == v(1)
    registry.rollback(three, NAME)
    assert attached.refresh() is None
    assert speaker(agent.chat("hello")) == "A m1"
    assert {name: agent.__dict__.get(name) for name in WRITTEN_NAMES} == before
    assert start.names == ["v1", "v2"]  # on the way back v1 was still there
    assert {key for served in start.started for key in served.fake.keys} == {
        "Bearer key-rl-helper-v1",
        "Bearer key-rl-helper-v2",
    }


def test_an_agent_without_a_version_keeps_its_model_and_is_told(server_a, home, start, caplog):
    agent = build_agent("environment", server_a.url)
    before = dict(agent.__dict__)
    with caplog.at_level(logging.WARNING):
        attached = rl.attach(agent, start=start)
    assert "agent 'helper' has no promoted version" in caplog.text and str(home) in caplog.text
    assert attached.version is None and start.names == [] and speaker(agent.chat("hello")) == "A m1"
    assert [name for name in WRITTEN_NAMES if name in before and agent.__dict__[name] is not before[name]] in (
        [],
        ["_unified_dispatcher"],
        ["_Agent__openai_client"],
        ["_Agent__openai_client", "_unified_dispatcher"],
    )


def test_what_is_promoted_and_rolled_back_elsewhere_reaches_a_watching_agent(server_a, three, start):
    agent = build_agent("provider", server_a.url)
    attached = rl.attach(agent, watch=0.02, start=start)
    assert attached.watching and speaker(agent.chat("hello")) == "A m1"
    promote(three, "v1")
    assert eventually(lambda: attached.version == "v1") and speaker(agent.chat("hello")) == v(1)
    promote(three, "v3")
    assert eventually(lambda: attached.version == "v3") and speaker(agent.chat("hello")) == v(3)
    registry.rollback(three, NAME)
    assert eventually(lambda: attached.version == "v1") and speaker(agent.chat("hello")) == v(1)
    attached.stop()
    assert not attached.watching
    registry.rollback(three, NAME)
    time.sleep(0.1)
    assert speaker(agent.chat("hello")) == v(1)


def test_a_watch_ends_with_its_agent(server_a, three, start):
    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    attached = rl.attach(agent, watch=0.02, start=start)
    del agent
    gc.collect()
    assert eventually(lambda: not attached.watching)


def test_agents_of_one_name_and_their_clones_share_one_server(server_a, three, start):
    promote(three, "v1")
    agents = [build_agent(kind, server_a.url) for kind in PATHS]
    threads = [threading.Thread(target=rl.attach, args=(agent,), kwargs={"start": start}) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clone = agents[1].clone_for_channel()
    assert [speaker(agent.chat("hello")) for agent in (*agents, clone)] == [v(1)] * 3
    assert start.names == ["v1"]


def test_a_server_that_does_not_come_up_leaves_the_old_one_in_place_and_is_told_once(server_a, three, start, caplog):
    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    attached = rl.attach(agent, start=start)
    start.failing = {"rl-helper-v2"}
    promote(three, "v2")
    with pytest.raises(ServerFailed, match="v2 was told not to come up"):
        attached.refresh()
    assert speaker(agent.chat("hello")) == v(1) and attached.version == "v1"
    attached.watch(0.01)
    with caplog.at_level(logging.WARNING):
        assert eventually(lambda: "v2 was told not to come up" in caplog.text)
        time.sleep(0.2)
    assert caplog.text.count("was told not to come up") == 1 and attached.watching
    promote(three, "v3")  # it does not wait until the failed one is due again
    assert eventually(lambda: attached.version == "v3") and speaker(agent.chat("hello")) == v(3)
    attached.stop()


def test_an_attachment_that_fails_at_once_leaves_the_agent_as_it_was(server_a, three, start):
    promote(three, "v1")
    start.failing = {"rl-helper-v1"}
    agent = build_agent("environment", server_a.url)
    with pytest.raises(ServerFailed):
        rl.attach(agent, start=start)
    assert attachment_of(agent) is None and speaker(agent.chat("hello")) == "A m1"


@pytest.mark.parametrize("failure", [OSError("no port"), KeyboardInterrupt()])
def test_whatever_a_start_raises_leaves_the_agent_as_it_was(failure, server_a, three, start):
    def fails(folder: Path, **_: Any) -> Any:
        raise failure

    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    with pytest.raises(type(failure)):
        rl.attach(agent, start=fails)
    assert attachment_of(agent) is None and speaker(agent.chat("hello")) == "A m1"
    attached = rl.attach(agent, start=start)
    with pytest.raises(type(failure)):
        rl.attach(agent, canary=1.0, candidate="v2", start=fails)
    assert attachment_of(agent) is attached


def test_a_damaged_version_is_not_served_and_what_answered_goes_on(server_a, three, start):
    promote(three, "v1")
    promote(three, "v2")
    flip_a_byte(three / "versions" / NAME / "v2" / "model" / "model.safetensors")
    agent = build_agent("environment", server_a.url)
    with pytest.raises(VersionDamaged, match=r"v2 of agent 'helper' is damaged .* model/model.safetensors was changed"):
        rl.attach(agent, start=start)
    assert attachment_of(agent) is None and speaker(agent.chat("hello")) == "A m1" and start.names == []
    registry.rollback(three, NAME)
    attached = rl.attach(agent, start=start)
    flip_a_byte(three / "versions" / NAME / "v3" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(VersionDamaged, match="v3"):
        rl.attach(agent, canary=1.0, candidate="v3", start=start)
    assert attachment_of(agent) is attached and speaker(agent.chat("hello")) == v(1) and start.names == ["v1"]


def swap_to(agent: Any, home: Path, version: str, start: FakeStart) -> Callable[[], None]:
    """As an improvement does that is not promoted."""
    folder = home / "versions" / NAME / version / "model"
    served = start(folder.resolve(), name=f"rl-helper-{version}", device="cpu")
    return swap_model(agent, served.model, base_url=served.address, api_key=served.api_key, server=served)


def test_what_was_swapped_in_without_a_promotion_stays_until_something_is_decided(server_a, three, start):
    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    attached = rl.attach(agent, watch=0.02, start=start)
    assert attached.version == "v1"
    undo = swap_to(agent, three, "v2", start)
    assert eventually(lambda: attached.version is None)
    time.sleep(0.1)
    assert speaker(agent.chat("hello")) == v(2)
    undo()
    assert eventually(lambda: attached.version == "v1") and speaker(agent.chat("hello")) == v(1)
    swap_to(agent, three, "v2", start)
    promote(three, "v3")
    assert eventually(lambda: attached.version == "v3") and speaker(agent.chat("hello")) == v(3)
    attached.stop()
    swap_to(agent, three, "v2", start)
    start.of("v2").stop()
    assert attached.refresh() == "v3" and speaker(agent.chat("hello")) == v(3)


def test_without_a_promotion_a_swap_is_left_alone(server_a, three, start):
    agent = build_agent("environment", server_a.url)
    attached = rl.attach(agent, start=start)
    swap_to(agent, three, "v2", start)
    assert attached.refresh() is None and speaker(agent.chat("hello")) == v(2)


def test_pruned_weights_are_said_with_the_way_to_make_them_again(server_a, three, start):
    promote(three, "v1")
    (three / "versions" / NAME / "v1" / "model" / "config.json").unlink()
    with pytest.raises(VersionError, match="versions restore 'helper' v1"):
        rl.attach(build_agent("environment", server_a.url), start=start)


def test_a_server_that_died_is_started_again(server_a, three, start):
    promote(three, "v1")
    agent = build_agent("provider", server_a.url)
    attached = rl.attach(agent, watch=0.02, start=start)
    start.of("v1").stop()
    assert eventually(lambda: start.names == ["v1", "v1"])
    assert eventually(lambda: server_of(agent) is start.started[1]) and speaker(agent.chat("hello")) == v(1)
    attached.stop()


def test_detaching_gives_the_agent_its_own_model_back(server_a, three, start):
    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    attached = rl.attach(agent, watch=0.02, canary=1.0, candidate="v2", start=start)
    attached.detach()
    assert speaker(agent.chat("hello")) == "A m1" and not attached.watching
    assert attachment_of(agent) is None and not [n for n in vars(agent) if n.startswith("_rl_")]


def test_attaching_anew_takes_the_place_of_what_was_there(server_a, three, start):
    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    first = rl.attach(agent, watch=0.02, start=start)
    second = rl.attach(agent, canary=1.0, candidate="v2", start=start)
    assert attachment_of(agent) is second and not first.watching
    assert speaker(agent.chat("hello")) == v(2)
    start.failing = {"rl-helper-v3"}
    with pytest.raises(ServerFailed):
        rl.attach(agent, canary=1.0, candidate="v3", start=start)
    assert attachment_of(agent) is second


def test_a_version_that_improve_put_in_place_is_not_started_a_second_time(server_a, three, start):
    folder = three / "versions" / NAME / "v1" / "model"
    served = start(folder.resolve(), name="rl-helper-v1", device="cpu")
    agent = build_agent("environment", server_a.url)
    undo = swap_model(agent, served.model, base_url=served.address, api_key=served.api_key, server=served)
    promote(three, "v1")
    attached = rl.attach(agent, start=start)
    assert attached.version == "v1" and start.names == ["v1"] and server_of(agent) is served
    undo()  # as a rollback of an improvement does it, beside that of the pointer
    registry.rollback(three, NAME)
    assert attached.refresh() is None and speaker(agent.chat("hello")) == "A m1"
    promote(three, "v1")
    attached.refresh()
    registry.rollback(three, NAME)
    attached.refresh()
    assert speaker(agent.chat("hello")) == "A m1"


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"backend": "ollama"}, ConfigError, "'ollama'"),
        ({"canary": 0}, ConfigError, "canary=0"),
        ({"canary": 1.5}, ConfigError, "canary=1.5"),
        ({"canary": True}, ConfigError, "canary=True"),
        ({"candidate": "v2"}, ConfigError, "wants a share"),
        ({"canary": 0.1, "candidate": "v9"}, VersionError, "has: v1, v2, v3"),
        ({"watch": "yes"}, ConfigError, "watch='yes'"),
        ({"watch": []}, ConfigError, r"watch=\[\]"),
        ({"watch": -1}, ConfigError, "watch=-1"),
        ({"watch": 0.0}, ConfigError, "watch=0.0"),
        ({"watch": float("nan")}, ConfigError, "watch=nan"),
        ({"watch": 1e300}, ConfigError, r"watch=1e\+300"),
        ({"name": 5}, ConfigError, "name=5"),
    ],
)
def test_what_is_given_wrongly_is_said_and_changes_nothing(options, error, reason, server_a, three, start):
    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    with pytest.raises(error, match=reason):
        rl.attach(agent, start=start, **options)
    assert attachment_of(agent) is None and speaker(agent.chat("hello")) == "A m1"


def test_what_is_no_agent_is_refused(home):
    with pytest.raises(AgentError, match="is not a praisonaiagents Agent"):
        rl.attach("helper")


# --- turns under way ------------------------------------------------------------------------------------------------


def ask_in_thread(agent: Any, ask: Callable[[Any, str], Any], text: str, fake: FakeServer) -> Callable[[], object]:
    """Begin a turn; return once ``fake`` has its request. What is returned opens the gate and gives the answer."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(ask(agent, text)), daemon=True)
    thread.start()
    assert eventually(lambda: bool(fake.requests))

    def finish() -> object:
        assert thread.is_alive() and answers == []
        fake.gate.set()
        thread.join(20)
        return answers[0]

    return finish


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", PATHS)
def test_a_tool_turn_under_way_ends_on_the_version_that_it_began_with(kind, style, server_a, three, start):
    promote(three, "v1")
    agent = build_agent(kind, server_a.url)
    attached = rl.attach(agent, start=start)
    finish = ask_in_thread(agent, STYLES[style], "HOLD the TOOL", start.of("v1").fake)
    promote(three, "v2")
    attached.refresh()
    assert speaker(STYLES[style](agent, "next")) == v(2)
    assert speaker(finish()) == v(1)
    assert len(start.of("v2").fake.requests) == 1
    assert {request["model"] for request in start.of("v1").fake.requests} == {"rl-helper-v1"}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", PATHS)
def test_a_tool_turn_under_way_ends_on_the_model_that_the_agent_was_built_with(kind, style, server_a, three, start):
    agent = build_agent(kind, server_a.url)
    attached = rl.attach(agent, start=start)
    agent.chat("hello")
    server_a.requests.clear()
    finish = ask_in_thread(agent, STYLES[style], "HOLD the TOOL", server_a)
    promote(three, "v1")
    attached.refresh()
    assert speaker(finish()) == "A m1" and start.of("v1").fake.requests == []
    assert speaker(STYLES[style](agent, "next")) == v(1)


@pytest.mark.parametrize("kind", PATHS)
def test_under_load_no_turn_is_lost_and_after_a_switch_only_the_new_version_answers(kind, server_a, three, start):
    promote(three, "v1")
    agents = [build_agent(kind, server_a.url) for _ in range(2)]
    attached = [rl.attach(agent, watch=0.02, start=start) for agent in agents]
    styles = [STYLES[name] for name in ("chat", "chat streaming", "achat", "iter_stream")]
    answers: list[tuple[float, float, str]] = []
    going = threading.Event()
    going.set()

    def ask_without_pause(number: int) -> None:
        agent = build_agent(kind, server_a.url) if number >= 2 else agents[number]
        if number >= 2:
            attached.append(rl.attach(agent, watch=0.02, start=start))
        turn = 0
        while going.is_set():
            began = time.monotonic()
            text = "TOOL please" if turn % 3 == 0 else "hello"
            answer = styles[(turn + number) % len(styles)](agent, text)
            answers.append((began, time.monotonic(), speaker(answer)))
            turn += 1
            if turn % 10 == 0:
                agent.clear_history()

    threads = [threading.Thread(target=ask_without_pause, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    switched: list[tuple[float, str]] = []

    def until(version: str | None) -> None:
        time.sleep(1.0)
        assert eventually(lambda: len(attached) == 8 and all(one.version == version for one in attached))
        switched.append((time.monotonic(), v(int(version[1:])) if version else "A m1"))
        time.sleep(1.0)

    until("v1")
    promote(three, "v2")
    until("v2")
    registry.rollback(three, NAME)
    until("v1")
    registry.rollback(three, NAME)
    until(None)
    promote(three, "v3")
    until("v3")
    going.clear()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads) and len(answers) > 100
    for attachment in attached:
        attachment.stop()
    assert {speaker for *_, speaker in answers} == {v(1), v(2), "A m1", v(3)}  # none was lost, and none an error
    for (at, now), (then, after) in zip(switched, [*switched[1:], (float("inf"), "")], strict=True):
        settled = {speaker for began, _, speaker in answers if at <= began < then - 1.5}
        assert settled <= {now}, f"{after} came after {now}"
    for served in start.started:
        assert {request["model"] for request in served.fake.requests} == {served.model}
    assert {request["model"] for request in server_a.requests} == {"m1"}


@pytest.mark.parametrize("kind", PATHS)
def test_eight_threads_on_one_agent_lose_no_turn_while_it_goes_on_and_back(kind, server_a, three, start):
    agent = build_agent(kind, server_a.url)
    agent.chat("hello")
    attached = rl.attach(agent, start=start)
    answers: list[str] = []
    going = threading.Event()
    going.set()

    def ask_without_pause() -> None:
        while going.is_set():
            answers.append(speaker(agent.chat("hello")))
            agent.clear_history()

    threads = [threading.Thread(target=ask_without_pause, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        for move in (lambda: promote(three, "v1"), lambda: promote(three, "v2")):
            move()
            attached.refresh()
            time.sleep(0.05)
        for _ in range(2):
            registry.rollback(three, NAME)
            attached.refresh()
            time.sleep(0.05)
    going.clear()
    for thread in threads:
        thread.join(30)
    assert set(answers) == {v(1), v(2), "A m1"}
    assert speaker(agent.chat("last")) == "A m1"
    for served in start.started:
        assert {request["model"] for request in served.fake.requests} <= {served.model}
    assert {request["model"] for request in server_a.requests} == {"m1"}


# --- what ends, and when --------------------------------------------------------------------------------------------


@pytest.fixture
def quick_pool(monkeypatch: pytest.MonkeyPatch, server_a: FakeServer) -> None:
    # The first agent of a process that asks through litellm lives for ever: a thread of litellm's keeps the context.
    build_agent("provider", server_a.url, name="first").chat("hello")
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.1))


@pytest.mark.parametrize("kind", PATHS)
def test_an_old_server_ends_once_the_turns_on_it_have_ended(kind, server_a, three, start, quick_pool):
    promote(three, "v1")
    agent = build_agent(kind, server_a.url)
    attached = rl.attach(agent, start=start)
    agent.chat("hello")
    start.of("v1").fake.requests.clear()
    finish = ask_in_thread(agent, STYLES["chat"], "HOLD on", start.of("v1").fake)
    promote(three, "v2")
    attached.refresh()
    agent.chat("hello")
    time.sleep(0.5)
    assert start.alive == ["v1", "v2"]
    assert speaker(finish()) == v(1)
    gc.collect()
    assert eventually(lambda: start.alive == ["v2"])
    del agent, finish
    gc.collect()
    assert eventually(lambda: start.alive == [])


def test_a_server_stays_for_a_clone_of_the_agent(server_a, three, start, quick_pool):
    promote(three, "v1")
    agent = build_agent("provider", server_a.url)
    attached = rl.attach(agent, start=start)
    clone = agent.clone_for_channel()
    promote(three, "v2")
    attached.refresh()
    gc.collect()
    time.sleep(0.5)
    assert start.alive == ["v1", "v2"] and speaker(clone.chat("hello")) == v(1)


def test_a_server_that_is_wanted_again_in_time_goes_on(server_a, three, start, monkeypatch):
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.5))
    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    attached = rl.attach(agent, start=start)
    for _ in range(4):
        promote(three, "v2")
        attached.refresh()
        registry.rollback(three, NAME)
        attached.refresh()
        time.sleep(0.2)
    assert start.names == ["v1", "v2"] and "v1" in start.alive and speaker(agent.chat("hello")) == v(1)


def test_a_context_that_outlives_its_turn_keeps_no_server(server_a, three, start, quick_pool):
    import contextvars

    kept = []

    def remember() -> str:
        """Remember."""
        kept.append(contextvars.copy_context())
        return "done"

    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    agent.tools.append(remember)
    attached = rl.attach(agent, start=start)
    agent.chat("TOOL")
    kept.append(contextvars.copy_context())
    promote(three, "v2")
    attached.refresh()
    gc.collect()
    assert eventually(lambda: start.alive == ["v2"]) and kept


# --- what is not the agent's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
def test_what_a_tool_asks_of_another_model_or_agent_goes_there(kind, server_a, server_b, three, start):
    from praisonaiagents.llm import LLM, OpenAIClient

    other = build_agent(kind, server_a.url, name="other", tools=[])
    heard: list[str] = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        client = OpenAIClient(api_key="key-b", base_url=server_b.url)
        said = client.sync_client.chat.completions.create(model="m7", messages=[{"role": "user", "content": "x"}])
        heard.append(speaker(said.choices[0].message.content))
        llm = LLM(model="openai/m8", base_url=server_b.url, api_key="key-b")
        heard.append(speaker(llm.get_response("x", verbose=False)))
        heard.append(speaker(other.chat("x")))
        return a + b

    promote(three, "v1")
    agent = build_agent(kind, server_a.url, tools=[add])
    rl.attach(agent, start=start)
    assert speaker(agent.chat("TOOL")) == v(1)
    assert heard == ["B m7", "B m8", "A m1"]


@pytest.mark.parametrize("kind", PATHS)
def test_a_copy_that_is_pointed_elsewhere_goes_there_alone(kind, server_a, server_b, three, start):
    promote(three, "v1")
    agent = build_agent(kind, server_a.url)
    rl.attach(agent, canary=1.0, candidate="v2", start=start)
    twin = fresh_copy(agent)
    swap_model(twin, "m2", base_url=server_b.url, api_key="key-b")
    assert speaker(twin.chat("hello")) == "B m2" and speaker(agent.chat("hello")) == v(2)
    assert sent_requests(agent, ["hello"])[0].messages[-1]["content"] == "hello"


def test_the_route_says_where_the_agent_is(server_a, three, start):
    promote(three, "v1")
    agent = build_agent("environment", server_a.url)
    assert route_of(agent) is None
    attached = rl.attach(agent, start=start)
    assert (route_of(agent).model, route_of(agent).base_url) == ("rl-helper-v1", start.of("v1").url)
    assert str(attached).startswith("agent 'helper': v1 answers; versions: ") and isinstance(attached, Attachment)


def test_a_subclass_of_agent_is_attached_as_it_is(server_a, three, start):
    class Shouting(Agent):
        def chat(self, prompt, **options):
            return super().chat(prompt, **options).upper()

    promote(three, "v1")
    agent = Shouting(name=NAME, instructions="Be brief.", llm="m1", output="silent", rules=False)
    rl.attach(agent, start=start)
    assert agent.chat("hello") == "[1|RL-HELPER-V1] REPLY TO: HELLO"
