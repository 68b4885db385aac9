"""One address for several agents and versions: names, swaps without a lost request, restarts, health, and drain."""

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from praison_agent_rl import backoff, registry, server_pool
from praison_agent_rl.backoff import Backoff
from praison_agent_rl.errors import ConfigError, ServerFailed, VersionError
from praison_agent_rl.gateway import front
from praison_agent_rl.gateway.names import find_targets
from praison_agent_rl.gateway.running import Gateway
from praison_agent_rl.server_pool import ServerPool
from tests.fakes import FakeStart
from tests.finished_runs import flip_a_byte, weights_in
from tests.gateways import (
    HEADERS,
    KEY,
    Crowd,
    answered_by,
    ask,
    eventually,
    gateway,
    get,
    opener,
    publish,
    request,
    root,
)


@pytest.fixture
def start() -> Iterator[FakeStart]:
    with FakeStart() as starting:
        yield starting


@pytest.fixture(autouse=True)
def quick_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.1))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``base`` and the home of agent "Help Desk" (v1 to v3) and of agent "cook" (v1), none promoted."""
    folder = tmp_path_factory.mktemp("published")
    base = weights_in(folder / "base", b"the base")
    publish(folder / "home", base, "Help Desk", 3)
    publish(folder / "home", base, "cook", 1)
    return folder


@pytest.fixture
def home(in_tmp: Path, published: Path) -> Path:
    """A copy of that home."""
    return Path(shutil.copytree(published / "home", in_tmp / "home"))


def promote(home: Path, version: str, agent: str = "Help Desk") -> None:
    registry.promote(home, agent, version)


def model_of(running: Gateway, name: str) -> str:
    line = running.offering.line(name)
    assert line is not None
    return line.weights.model


# --- names ----------------------------------------------------------------------------------------------------------


def test_an_agent_is_named_by_its_folder_and_answers_to_its_own_name_too(home, start):
    promote(home, "v1")
    with gateway(home, ["Help Desk", "cook@v1"], opener(start=start)) as running:
        cards = get(running, "/v1/models").json()["data"]
        folder = home / "versions" / "help-desk" / "v1" / "model"
        assert [(card["id"], card["version"]) for card in cards] == [
            ("help-desk", "v1"), ("cook@v1", "v1"), ("rl-help-desk-v1", "v1"), ("rl-cook-v1", "v1"),
        ]  # fmt: skip
        assert Path(cards[0]["root"]).resolve() == folder.resolve()
        names = ("help-desk", "Help Desk", "rl-help-desk-v1")
        assert [answered_by(ask(running, name)) for name in names] == ["rl-help-desk-v1"] * 3
        assert answered_by(ask(running, "cook@v1")) == "rl-cook-v1"
        assert start.of("v1").fake.keys  # and each server is asked with its own key
        assert {key for served in start.started for key in served.fake.keys} == {
            "Bearer key-rl-help-desk-v1",
            "Bearer key-rl-cook-v1",
        }


def test_all_that_is_named_wrongly_is_said_at_once(home):
    with pytest.raises(ConfigError) as told:
        find_targets(home, ["nobody", "cook@v9", "cook@v1", "cook@v1"])
    said = str(told.value)
    assert "agent 'nobody' has no versions" in said and "has no version 'v9'; it has: v1" in said
    assert "cook@v1 is to be served twice" in said
    with pytest.raises(VersionError, match="agent 'nobody' has no versions"):
        find_targets(home, ["nobody@v1"])


def test_an_agent_whose_name_holds_the_sign_of_versions_is_found(home, published):
    publish(home, published / "base", "a@v1", 1)
    (target,) = find_targets(home, ["a@v1"])
    assert (target.agent, target.pinned) == ("a@v1", None)


def test_a_model_that_is_not_there_is_told_with_those_that_are(home, start):
    promote(home, "v2")
    with gateway(home, ["help-desk"], opener(start=start)) as running:
        refused = ask(running, "gpt-4")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
        assert "no model 'gpt-4' here; there are: help-desk, rl-help-desk-v2" in refused.json()["error"]["message"]
        assert ask(running, "rl-help-desk-v1").status_code == 404  # it exists, and is not served


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "names no model"),
        (b'{"messages": []}', "names no model"),
        (b'{"model": 3}', "names no model"),
    ],
)
def test_a_body_that_names_no_model_is_refused(home, start, body, said):
    with gateway(home, ["cook"], opener(start=start)) as running:
        refused = httpx.post(f"{running.url}/chat/completions", content=body, headers=HEADERS, trust_env=False)
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]
        assert httpx.post(f"{running.url}/nonsense", content=body, headers=HEADERS).status_code == 404


# --- who may ask ----------------------------------------------------------------------------------------------------


def test_only_the_key_opens_it_and_without_it_health_tells_no_names(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk"], opener(start=start)) as running, httpx.Client(trust_env=False) as client:
        for given in (None, "", "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY):
            headers = {"authorization": given} if given is not None else {}
            for path in ("chat/completions", "completions", "responses", "load_lora_adapter"):
                refused = client.post(f"{running.url}/{path}", json=request("help-desk"), headers=headers)
                assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            for path in ("/v1/models", "/metrics", "/", "/docs"):
                assert client.get(f"{root(running)}{path}", headers=headers).status_code == 401
            health = client.get(f"{root(running)}/health", headers=headers)
            assert (health.status_code, health.json()) == (200, {"status": "ok"})
        assert client.post(f"{running.url}/load_lora_adapter", json=request("help-desk"), headers=HEADERS).is_error
        assert start.of("v1").fake.requests == []  # what changes a server is not passed on, whoever asks


def test_an_enormous_body_is_refused_and_a_large_one_arrives_whole(home, start, monkeypatch):
    monkeypatch.setattr(front, "LARGEST_BODY", 3_000_000)
    promote(home, "v1")
    with gateway(home, ["help-desk"], opener(start=start)) as running:
        text = "y" * 2_900_000
        assert answered_by(ask(running, "help-desk", text)) == "rl-help-desk-v1"
        sent = json.loads(start.of("v1").fake.bodies[0])
        assert sent["messages"][0]["content"] == text and sent["model"] == "rl-help-desk-v1"
        for headers in (
            ["content-length: 999999999"],
            ["content-length: " + "9" * 400],
            ["transfer-encoding: chunked"],
        ):
            with socket.create_connection(("127.0.0.1", httpx.URL(running.url).port)) as connection:
                lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"authorization: Bearer {KEY}", *headers]
                connection.sendall("\r\n".join([*lines, "", ""]).encode())
                if "chunked" in headers[0]:
                    connection.sendall(b"%x\r\n" % 3_000_001 + b"z" * 3_000_001 + b"\r\n")
                first = connection.makefile("rb").readline()
                assert first.split()[1] in (b"413", b"400"), first  # the HTTP library refuses 400 digits itself
        assert len(start.of("v1").fake.bodies) == 1


# --- following ------------------------------------------------------------------------------------------------------


def test_a_name_follows_every_decision_all_the_way_back_to_the_base(home, published, start):
    told: list[str] = []
    with gateway(home, ["help-desk"], opener(start=start), tell=told.append) as running:
        assert answered_by(ask(running, "help-desk")) == "rl-help-desk-base"
        card = get(running, "/v1/models").json()["data"][0]
        assert (card["version"], card["root"]) == ("base", str(published / "base"))
        for decide, model in (
            (lambda: promote(home, "v1"), "rl-help-desk-v1"),
            (lambda: promote(home, "v3"), "rl-help-desk-v3"),
            (lambda: registry.rollback(home, "Help Desk"), "rl-help-desk-v1"),
            (lambda: registry.rollback(home, "Help Desk"), "rl-help-desk-base"),
        ):
            decide()
            assert eventually(lambda model=model: model_of(running, "help-desk") == model)
            assert answered_by(ask(running, "help-desk")) == model
    assert told == [
        "help-desk: v1 answers, after base",
        "help-desk: v3 answers, after v1",
        "help-desk: v1 answers, after v3",
        "help-desk: base answers, after v1",
    ]


def test_a_version_that_is_named_answers_whatever_is_decided(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk", "help-desk@v1"], opener(start=start)) as running:
        assert start.names == ["v1"]  # two names, one server
        promote(home, "v2")
        assert eventually(lambda: model_of(running, "help-desk") == "rl-help-desk-v2")
        assert answered_by(ask(running, "help-desk@v1")) == "rl-help-desk-v1"
        assert get(running, "/health").json()["models"] == {
            "help-desk": {"version": "v2", "up": True},
            "help-desk@v1": {"version": "v1", "up": True},
        }


def test_a_hundred_requests_under_way_over_a_swap_all_end_where_they_began(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk"], opener(start=start)) as running:
        plain = [request("help-desk", f"HOLD on, number {number}") for number in range(50)]
        texts = [f"DRIP on, number {number} of many words" for number in range(50)]
        streamed = [request("help-desk", text, stream=True) for text in texts]
        first = start.of("v1").fake
        first._http.socket.listen(128)  # the fake's five at once would be refused, which is not what is tried here
        crowd = Crowd(running, [*plain, *streamed])
        assert eventually(lambda: len(first.requests) == 100)
        promote(home, "v2")
        assert eventually(lambda: model_of(running, "help-desk") == "rl-help-desk-v2")
        assert answered_by(ask(running, "help-desk")) == "rl-help-desk-v2"
        time.sleep(0.5)  # longer than a server is kept that nobody holds
        assert start.alive == ["v1", "v2"]
        first.gate.set()
        replies = crowd.end()
        assert [answered_by(reply) for reply in replies[:50]] == ["rl-help-desk-v1"] * 50
        for said, reply in zip(texts, replies[50:], strict=True):
            *events, end = [line[6:] for line in reply.text.splitlines() if line]
            chunks = [json.loads(event) for event in events]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == f"[1|rl-help-desk-v1] reply to: {said}"
            assert end == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert eventually(lambda: start.alive == ["v2"])
        assert len(start.of("v2").fake.requests) == 1


def test_requests_without_pause_over_many_swaps_none_of_which_fails(home, start):
    promote(home, "v1")
    served: list[str] = []
    going = threading.Event()
    going.set()
    with gateway(home, ["help-desk"], opener(start=start)) as running:

        def ask_without_pause() -> None:
            while going.is_set():
                served.append(answered_by(ask(running, "help-desk")))

        threads = [threading.Thread(target=ask_without_pause, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for version in ("v2", "v3", "v1", "v2"):
            promote(home, version)
            before = len(served)
            assert eventually(lambda version=version: model_of(running, "help-desk") == f"rl-help-desk-{version}")
            assert eventually(lambda before=before: len(served) > before + 20)
        going.clear()
        for thread in threads:
            thread.join(30)
        metrics = get(running, "/metrics").text
    assert set(served) == {f"rl-help-desk-v{number}" for number in (1, 2, 3)}
    named = "praison_agent_rl_requests_total{"
    counted = [line.rpartition(" ") for line in metrics.splitlines() if line.startswith(named)]
    assert sum(int(count) for *_, count in counted) == len(served) and all('code="200"' in name for name, *_ in counted)


def test_a_version_that_cannot_be_served_leaves_the_former_in_place_and_health_says_why(home, start):
    promote(home, "v1")
    promote(home, "v2")
    registry.rollback(home, "Help Desk")
    flip_a_byte(home / "versions" / "help-desk" / "v3" / "model" / "model.safetensors")
    told: list[str] = []
    with gateway(home, ["help-desk"], opener(start=start), tell=told.append) as running:
        registry.promote(home, "Help Desk", "v3", by="improve")  # who promotes by hand is told of the damage
        assert eventually(lambda: len(told) == 1)
        assert (
            "rl-help-desk-v3 is not served, and is tried again. What failed: v3 of agent 'Help Desk' is dam" in told[0]
        )
        assert answered_by(ask(running, "help-desk")) == "rl-help-desk-v1"
        health = get(running, "/health")
        state = health.json()["models"]["help-desk"]
        assert health.status_code == 200 and (state["version"], state["next"]["version"]) == ("v1", "v3")
        assert "model/model.safetensors was changed" in state["next"]["fault"]
        promote(home, "v2")
        assert eventually(lambda: model_of(running, "help-desk") == "rl-help-desk-v2")
        assert "next" not in get(running, "/health").json()["models"]["help-desk"]


def test_what_was_decided_and_cannot_be_read_changes_nothing_and_is_told(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk"], opener(start=start)) as running:
        folder = home / "versions" / "help-desk"
        (folder / "history.jsonl").write_text("{")
        (folder / "current.json").write_text("{")
        assert eventually(lambda: "registry" in get(running, "/health").json()["models"]["help-desk"])
        assert answered_by(ask(running, "help-desk")) == "rl-help-desk-v1"
        promote(home, "v2")
        assert eventually(lambda: model_of(running, "help-desk") == "rl-help-desk-v2")
        assert "registry" not in get(running, "/health").json()["models"]["help-desk"]


# --- servers that die -----------------------------------------------------------------------------------------------


def test_a_server_that_died_is_started_again_and_requests_wait_for_it(home, start):
    promote(home, "v1")
    told: list[str] = []
    with gateway(home, ["help-desk"], opener(start=start), patience=30.0, tell=told.append) as running:
        start.of("v1").stop()
        assert answered_by(ask(running, "help-desk")) == "rl-help-desk-v1"
        assert start.names == ["v1", "v1"] and get(running, "/health").status_code == 200
    assert told == [
        "the server of rl-help-desk-v1 has ended and is started again",
        "rl-help-desk-v1 is up again",
    ]


def test_while_no_server_comes_up_who_asks_is_told_when_to_come_again(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk"], opener(start=start), patience=0.0) as running:
        start.failing = {"rl-help-desk-v1"}
        start.of("v1").stop()
        assert eventually(lambda: get(running, "/health").status_code == 503)
        assert eventually(lambda: "fault" in get(running, "/health").json()["models"]["help-desk"])
        refused = ask(running, "help-desk")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 2
        assert (
            "rl-help-desk-v1 is not up: the server for rl-help-desk-v1 was told not"
            in refused.json()["error"]["message"]
        )
        assert get(running, "/health", key=None).json() == {"status": "unavailable"}
        start.failing = set()
        assert eventually(lambda: get(running, "/health").status_code == 200)
        assert answered_by(ask(running, "help-desk")) == "rl-help-desk-v1"


def test_the_pauses_double_up_to_a_minute_and_begin_anew_after_two_calm_ones():
    now = 1000.0
    pause = Backoff(clock=lambda: now)
    assert pause.seconds_left == 0.0
    pauses = []
    for _ in range(8):
        now += pause.seconds_left
        with pause.attempt():
            now += 7  # an attempt takes its time; the pause counts from its end
        pauses.append(pause.seconds_left)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    now += 90
    assert pause.seconds_left == 0.0
    with pause.attempt():
        pass
    assert pause.seconds_left == 60  # thirty seconds of health are none yet
    now += 121
    with pause.attempt():
        pass
    assert pause.seconds_left == 1


def test_attempts_keep_to_the_pauses(home, monkeypatch):
    monkeypatch.setattr(backoff, "_FIRST", 0.1)
    at: list[float] = []

    def fails(_: Any) -> Any:
        at.append(time.monotonic())
        raise ServerFailed("no memory")

    promote(home, "v1")
    with gateway(home, ["help-desk"], fails, patience=0.0) as running:
        assert eventually(lambda: len(at) == 5)
        with pytest.raises(ServerFailed, match="no memory"):
            running.check()  # none ever came up, so the command ends with that
        assert 'praison_agent_rl_starts_total{version="rl-help-desk-v1"} 5' in get(running, "/metrics").text
    gaps = [after - before for before, after in pairwise(at)]
    assert [gap > pause for gap, pause in zip(gaps, (0.1, 0.2, 0.4, 0.8), strict=False)] == [True] * 4


def test_one_agent_that_cannot_be_served_does_not_keep_the_others_from_it(home, start):
    promote(home, "v1")
    start.failing = {"rl-cook-base"}
    with gateway(home, ["help-desk", "cook"], opener(start=start), patience=0.0) as running:
        running.check()
        assert answered_by(ask(running, "help-desk")) == "rl-help-desk-v1"
        assert ask(running, "cook").status_code == 503 and get(running, "/health").status_code == 503
        assert get(running, "/health").json()["models"]["help-desk"]["up"] is True


class Fickle:
    """A server behind the gateway that closes connections, or drips until nobody listens any more."""

    def __init__(self, *, drops: int = 0) -> None:
        self.drops = drops
        self.asked = 0
        self.broken = threading.Event()
        self.running = True
        self.model, self.api_key = "rl-cook-base", "k"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            headers = http.client.parse_headers(lines) if lines.readline() else None
            if headers is None or "content-length" not in headers:
                return  # the other side has gone, or asks for counts
            body = json.loads(lines.read(int(headers["content-length"])))
            self.asked += 1
            if self.asked <= self.drops:
                return
            if "WAIT" in str(body):
                self.broken.set() if lines.read(1) == b"" else None  # the other side has gone
                return
            if body.get("stream"):
                self._drip(connection, end="ENDS" in str(body))
                return
            text = json.dumps({"model": body["model"], "choices": [{"message": {"content": f"|{body['model']}]"}}]})
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
            connection.sendall((head + text).encode())

    def _drip(self, connection: socket.socket, *, end: bool) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for number in range(1000):
                event = f"data: {number}\n\n".encode()
                connection.sendall(b"%x\r\n%s\r\n" % (len(event), event))
                time.sleep(0.02)
                if end and number == 3:
                    return  # in the middle, as a server that was killed
        except OSError:
            self.broken.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # or the thread in accept() keeps it
        self._listener.close()


@pytest.fixture
def fickle() -> Iterator[Fickle]:
    server = Fickle()
    yield server
    server.close()


def at_fickle(server: Fickle) -> Any:
    from praison_agent_rl.serving import ServerAddress

    return lambda weights: ServerAddress(server.url, server)  # type: ignore[arg-type]


@pytest.mark.parametrize(("drops", "status", "asked"), [(0, 200, 1), (1, 200, 2), (2, 502, 2)])
def test_what_a_server_lost_is_asked_once_more_and_not_again(home, fickle, drops, status, asked):
    fickle.drops = drops
    with gateway(home, ["cook"], at_fickle(fickle)) as running:
        reply = ask(running, "cook")
        assert (reply.status_code, fickle.asked) == (status, asked)
        assert status == 200 or reply.json()["error"]["code"] == "server_went_away"


def test_a_server_that_takes_no_connection_was_not_asked(home, fickle):
    with gateway(home, ["cook"], at_fickle(fickle), patience=0.3) as running:
        fickle.close()
        refused = ask(running, "cook")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "2" and fickle.asked == 0


# --- streams and those that leave -----------------------------------------------------------------------------------


def test_a_stream_is_passed_on_chunk_by_chunk(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk"], opener(start=start)) as running:
        asked = request("help-desk", "DRIP slowly, please", stream=True)
        url = f"{running.url}/chat/completions"
        with httpx.stream("POST", url, json=asked, headers=HEADERS, timeout=30) as reply:
            assert reply.headers["content-type"] == "text/event-stream"
            events = (line for line in reply.iter_lines() if line)
            first = [next(events) for _ in range(3)]  # the server behind waits now, and these are here
            assert not start.of("v1").fake.gate.is_set() and "[1|rl-help-desk-v1]" in first[1]
            start.of("v1").fake.gate.set()
            assert [*events][-1] == "data: [DONE]"


def test_who_leaves_within_a_stream_ends_it_at_the_server_too(home, fickle):
    with gateway(home, ["cook"], at_fickle(fickle)) as running:
        url = f"{running.url}/chat/completions"
        with httpx.stream("POST", url, json=request("cook", stream=True), headers=HEADERS, timeout=30) as reply:
            assert next(reply.iter_lines()) == "data: 0"
        assert fickle.broken.wait(20)
        counted = 'praison_agent_rl_requests_total{model="cook",version="base",code="200"} 1'
        assert eventually(lambda: counted in get(running, "/metrics").text)
        assert 'under_way{model="cook"} 0' in get(running, "/metrics").text


def test_who_leaves_before_the_answer_ends_it_at_the_server_too(home, fickle):
    with gateway(home, ["cook"], at_fickle(fickle)) as running:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/chat/completions", json=request("cook", "WAIT"), headers=HEADERS, timeout=0.5)
        assert fickle.broken.wait(20)
        counted = 'praison_agent_rl_requests_total{model="cook",version="base",code="499"} 1'
        assert eventually(lambda: counted in get(running, "/metrics").text)


def test_a_stream_that_breaks_behind_breaks_in_front_and_is_not_taken_for_whole(home, fickle):
    with gateway(home, ["cook"], at_fickle(fickle)) as running:
        url, asked = f"{running.url}/chat/completions", request("cook", "ENDS", stream=True)
        with pytest.raises(httpx.RemoteProtocolError), httpx.stream("POST", url, json=asked, headers=HEADERS) as reply:
            assert [line for line in reply.iter_lines() if line][:4] == [f"data: {n}" for n in range(4)]
        assert eventually(lambda: 'code="502"} 1' in get(running, "/metrics").text)
        assert fickle.asked == 1  # half of it was there already


# --- the end --------------------------------------------------------------------------------------------------------


def test_it_takes_no_more_and_lets_those_under_way_end(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk"], opener(start=start)) as running:
        crowd = Crowd(running, [request("help-desk", "HOLD")] * 5)
        fake = start.of("v1").fake
        assert eventually(lambda: len(fake.requests) == 5)
        ending = threading.Thread(target=running.stop)
        ending.start()
        port = httpx.URL(running.url).port
        assert eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) != 0)
        assert ending.is_alive()
        fake.gate.set()
        assert [answered_by(reply) for reply in crowd.end()] == ["rl-help-desk-v1"] * 5
        ending.join(20)
        assert not ending.is_alive()
    assert eventually(lambda: start.alive == [])


def test_who_does_not_end_in_time_is_broken_off(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk"], opener(start=start), drain=0.5) as running:
        ended: list[Any] = []

        def hold() -> None:
            try:
                ended.append(ask(running, "help-desk", "HOLD").status_code)
            except httpx.TransportError as error:
                ended.append(error)

        holding = threading.Thread(target=hold)
        holding.start()
        assert eventually(lambda: len(start.of("v1").fake.requests) == 1)
        running.stop()
        holding.join(20)
        assert len(ended) == 1 and ended[0] != 200
        start.of("v1").fake.gate.set()


def test_it_ends_at_once_while_a_server_is_coming_up(home):
    held = threading.Event()

    def slow(_: Any) -> Any:
        held.wait(60)
        raise ServerFailed("too late")

    try:
        with gateway(home, ["cook"], slow, settled=False, patience=0.0) as running:
            assert eventually(lambda: ask(running, "cook").status_code == 503)
            assert get(running, "/health").status_code == 503
        assert not held.is_set()
    finally:
        held.set()


# --- metrics --------------------------------------------------------------------------------------------------------


def test_requests_are_counted_by_name_version_and_status_and_the_servers_counts_come_along(home, start):
    promote(home, "v1")
    with gateway(home, ["help-desk", "cook"], opener(start=start)) as running:
        for _ in range(2):
            ask(running, "help-desk")
        assert ask(running, "help-desk", "FAIL500").status_code == 500
        ask(running, "cook")
        (desk, cook) = sorted(start.started, key=lambda served: served.model, reverse=True)
        desk.fake.listing = b'# HELP vllm:running Running.\n# TYPE vllm:running gauge\nvllm:running{engine="0"} 3\n'
        cook.fake.listing = b"# HELP vllm:running Running.\n# TYPE vllm:running gauge\nvllm:running 4\n"
        lines = get(running, "/metrics").text.splitlines()
    named = 'praison_agent_rl_requests_total{model="help-desk",version="v1"'
    assert f'{named},code="200"}} 2' in lines and f'{named},code="500"}} 1' in lines
    assert 'praison_agent_rl_requests_total{model="cook",version="base",code="200"} 1' in lines
    assert 'praison_agent_rl_request_seconds_count{model="help-desk",version="v1"} 3' in lines
    assert 'praison_agent_rl_up{version="rl-help-desk-v1"} 1' in lines
    at = {served.model: httpx.URL(served.url).netloc.decode() for served in (desk, cook)}
    start_ = lines.index("# HELP vllm:running Running.")
    assert lines[start_:] == [
        "# HELP vllm:running Running.",
        "# TYPE vllm:running gauge",
        f'vllm:running{{server="{at["rl-help-desk-v1"]}",engine="0"}} 3',
        f'vllm:running{{server="{at["rl-cook-base"]}"}} 4',
    ]
