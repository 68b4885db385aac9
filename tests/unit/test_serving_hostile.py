"""One address under attack: clients and servers that speak HTTP badly or not at all, logs that cannot be written."""

import contextlib
import http.client
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from praison_agent_rl import pointers, registry, server_pool
from praison_agent_rl.backoff import Backoff
from praison_agent_rl.gateway import front
from praison_agent_rl.gateway.counting import samples
from praison_agent_rl.gateway.names import find_targets
from praison_agent_rl.gateway.offering import Offering
from praison_agent_rl.gateway.running import Gateway, Terms, listen
from praison_agent_rl.server_pool import ServerPool
from praison_agent_rl.serving import ServerAddress
from tests.fakes import FakeStart
from tests.finished_runs import weights_in
from tests.gateways import HEADERS, KEY, answered_by, ask, eventually, gateway, get, opener, publish, request


@pytest.fixture
def start() -> Iterator[FakeStart]:
    with FakeStart() as starting:
        yield starting


@pytest.fixture(autouse=True)
def quick_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "_POOL", ServerPool(grace=0.1))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    publish(folder / "home", weights_in(folder / "base", b"the base"), "helper", 2)
    return folder


@pytest.fixture
def home(in_tmp: Path, published: Path) -> Path:
    """The home of agent "helper" with v1 and v2, of which v1 is current."""
    place = Path(shutil.copytree(published / "home", in_tmp / "home"))
    registry.promote(place, "helper", "v1")
    return place


def exchange(running: Gateway, sent: bytes) -> bytes:
    """All that comes back, until the other side closes or has answered and waits."""
    with socket.create_connection(("127.0.0.1", httpx.URL(running.url).port), timeout=20) as connection:
        connection.sendall(sent)
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        with contextlib.suppress(ConnectionResetError):  # it did not read all of what it refuses
            return b"%d " % reply.status + reply.read()
        return b"%d " % reply.status


# --- clients --------------------------------------------------------------------------------------------------------

_BODY = json.dumps(request("helper")).encode()
_KEYED = f"authorization: Bearer {KEY}\r\n".encode()


def _post(path: str, *lines: str, body: bytes = _BODY, version: str = "1.1", keyed: bool = True) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"POST {path} HTTP/{version}", *lines))
    return head.encode("latin-1") + (_KEYED if keyed else b"") + b"\r\n" + body


def _chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


_TWICE = "transfer-encoding: chunked, chunked"
_LENGTH = f"content-length: {len(_BODY)}"
_CHAT = "/v1/chat/completions"
_ODD: dict[str, tuple[bytes, tuple[int, ...], int]] = {
    # what is sent, what may come back, and how many requests may reach a server
    "a host that is no address": (_post(_CHAT, "host: [::1", _LENGTH), (200,), 1),
    "a host that is a path": (_post("/v1/nothing", f"host: x{_CHAT}?", _LENGTH), (404,), 0),
    "no key and a host that is none": (b"GET /health HTTP/1.1\r\nhost: [\r\n\r\n", (200,), 0),
    "a host that would be health": (b"GET /metrics HTTP/1.1\r\nhost: x/health?\r\n\r\n", (401,), 0),
    "HTTP/1.0": (_post(_CHAT, _LENGTH, version="1.0"), (200,), 1),
    "HTTP/1.0 without a length": (_post(_CHAT, version="1.0"), (400,), 0),
    "two lengths": (_post(_CHAT, "host: x", _LENGTH, f"content-length: {len(_BODY) + 1}"), (400,), 0),
    "a length that is none": (_post(_CHAT, "host: x", "content-length: -1"), (400,), 0),
    "chunks and a length": (
        _post(_CHAT, "host: x", "content-length: 3", "transfer-encoding: chunked", body=_chunked(_BODY)),
        (200, 400),
        1,
    ),
    "chunks twice": (
        _post(_CHAT, "host: x", "transfer-encoding: chunked, chunked", body=_chunked(_BODY)),
        (501, 400),
        0,
    ),
    "chunks that are none": (_post(_CHAT, "host: x", "transfer-encoding: chunked", body=b"zz\r\n{}\r\n"), (400,), 0),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,), 0),
    "an enormous header": (_post(_CHAT, "host: x", "x: " + "y" * 200_000, _LENGTH), (400, 431), 0),
    "the way up": (_post("/v1/../v1/load_lora_adapter", "host: x", _LENGTH), (404,), 0),
    "the way up, hidden": (_post("/v1/chat/completions/..%2f..%2fload_model", "host: x", _LENGTH), (404,), 0),
    "what unloads": (_post("/v1/unload_lora_adapter", "host: x", _LENGTH), (404,), 0),
    "a path with a query": (_post(f"{_CHAT}?stream=1", "host: x", _LENGTH), (200,), 1),
    "a path with bytes": (_post("/v1/%ff%00%0d%0a", "host: x", _LENGTH), (404,), 0),
    "another method": (_post(_CHAT, "host: x", _LENGTH).replace(b"POST", b"PUT", 1), (404,), 0),
    "a key of bytes": (_post(_CHAT, "host: x", "authorization: Bearer \xff\xe9", _LENGTH, keyed=False), (401,), 0),
    "two keys, the first wrong": (_post(_CHAT, "host: x", "authorization: Bearer no", _LENGTH), (401,), 0),
    "other headers of bytes": (_post(_CHAT, "host: x", "accept: \xff", "x-request-id: \xe9", _LENGTH), (200,), 1),
    "no key and a body": (_post(_CHAT, "host: x", _LENGTH, keyed=False), (401,), 0),
}


@pytest.mark.parametrize("case", _ODD)
def test_odd_requests_are_answered_or_refused_and_the_next_one_is_answered(case, home, start):
    sent, statuses, reaching = _ODD[case]
    with gateway(home, ["helper"], opener(start=start)) as running:
        reply = exchange(running, sent)
        assert int(reply.split()[0]) in statuses, reply
        assert KEY.encode() not in reply and b"Traceback" not in reply
        asked = len(start.of("v1").fake.requests)
        assert asked <= reaching and (200 not in statuses[:1] or asked == reaching)
        assert answered_by(ask(running, "helper")) == "rl-helper-v1"


@pytest.mark.parametrize(
    "model", ["../helper", "helper/../helper", "help\x00er", "hel\ud800per", "ｈelper", "h" * 10**6]
)
def test_names_of_any_signs_are_told_to_be_none(model, home, start):
    with gateway(home, ["helper"], opener(start=start)) as running:
        body = json.dumps(request(model)).encode()
        refused = httpx.post(f"{running.url}/chat/completions", content=body, headers=HEADERS, trust_env=False)
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
        assert len(refused.content) < 2000 and start.of("v1").fake.requests == []


def test_a_body_is_passed_on_or_refused_however_deep_it_is(home, start):
    with gateway(home, ["helper"], opener(start=start)) as running, httpx.Client(trust_env=False) as client:
        statuses = []
        for depth in range(940, 1000):  # Python's limit is a thousand, of which its own calls take some
            body = _BODY[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
            statuses.append(client.post(f"{running.url}/chat/completions", content=body, headers=HEADERS).status_code)
        assert set(statuses) <= {200, 400} and statuses[-1] == 400
        assert answered_by(ask(running, "helper")) == "rl-helper-v1"


def test_clients_that_never_end_their_requests_keep_nobody_from_answers_nor_the_end(home, start):
    with gateway(home, ["helper"], opener(start=start), drain=0.5) as running, contextlib.ExitStack() as open_:
        port = httpx.URL(running.url).port
        for number in range(200):
            connection = open_.enter_context(socket.create_connection(("127.0.0.1", port)))
            half = (b"", b"POST /v1/chat/comp", _post(_CHAT, "host: x", "content-length: 9999"))[number % 3]
            connection.sendall(half)
        assert answered_by(ask(running, "helper")) == "rl-helper-v1"
        ending = threading.Thread(target=running.stop)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()


# --- servers behind it ----------------------------------------------------------------------------------------------


class Babbling:
    """A server that answers each request with the same bytes and closes."""

    def __init__(self, said: bytes) -> None:
        self.said = said
        self.running = True
        self.model, self.api_key = "rl-helper-v1", "k"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
                    headers = http.client.parse_headers(lines) if lines.readline() else None
                    lines.read(int((headers or {}).get("content-length", 0)))
                    connection.sendall(self.said)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


_OK = b"HTTP/1.1 200 OK\r\n"
_STREAM = _OK + b"content-type: text/event-stream\r\n"
_GARBAGE: dict[str, tuple[bytes, int | None]] = {
    # what the server says, and the status in front; None where the answer breaks off
    "nothing": (b"", 502),
    "no HTTP": (b"\x00\xff" * 50 + b"\r\n\r\n", 502),
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", 502),
    "half a head": (_OK + b"content-ty", 502),
    "less than it promises": (_OK + b"content-length: 100\r\n\r\n{}", 502),
    "packed, and not": (_OK + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope", 502),
    "packed by nobody": (_OK + b"content-encoding: nonsense\r\ncontent-length: 2\r\n\r\n{}", 200),
    "chunks that are none": (_OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 502),
    "a header that ends the head": (_OK + b"x-request-id: a\nset-cookie: b\r\ncontent-length: 2\r\n\r\n{}", 200),
    "a header of bytes": (_OK + b"x-request-id: \xff\xfe\r\ncontent-length: 2\r\n\r\n{}", 200),
    "no JSON": (_OK + b"content-type: application/json\r\ncontent-length: 4\r\n\r\nnope", 200),
    "a move": (b"HTTP/1.1 307 Moved\r\nlocation: http://192.0.2.1/\r\ncontent-length: 0\r\n\r\n", 307),
    "a stream that is packed, and not": (_STREAM + b"content-encoding: gzip\r\n\r\nnope", None),
    "a stream of chunks that are none": (_STREAM + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n", None),
}


@pytest.mark.parametrize("case", _GARBAGE)
def test_whatever_a_server_says_the_gateway_stays_up_and_says_whose_fault_it_is(case, home):
    said, status = _GARBAGE[case]
    server = Babbling(said)
    try:
        open_: Any = lambda weights: ServerAddress(server.url, server)  # type: ignore[arg-type]  # noqa: E731
        with gateway(home, ["helper"], open_) as running:
            if status is None:
                with pytest.raises(httpx.RemoteProtocolError):
                    ask(running, "helper", stream=True)
            else:
                reply = ask(running, "helper")
                assert reply.status_code == status and "set-cookie" not in reply.headers
                assert status != 502 or reply.json()["error"]["code"] == "server_went_away"
            counted = f'code="{status or 502}"}} 1'
            assert eventually(lambda: counted in get(running, "/metrics").text)
    finally:
        server.close()


def test_a_connection_that_lay_idle_is_let_go_before_the_server_closes_it():
    """Both back ends are uvicorn's; a request that is sent into a connection as it is closed is lost."""
    assert uvicorn.Config(lambda: None).timeout_keep_alive > front._IDLE


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["Help Desk", "help-desk"], ["help-desk", "Help Desk"]])
def test_a_name_that_is_listed_is_never_taken_by_an_agent_of_that_name_in_another_folder(words, in_tmp, start):
    base = weights_in(in_tmp / "base", b"the base")
    for agent in ("Help Desk", "help-desk"):  # the first has the folder help-desk, the second one with a suffix
        publish(in_tmp / "home", base, agent, 1)
        registry.promote(in_tmp / "home", agent, "v1")
    with gateway(in_tmp / "home", words, opener(start=start)) as running:
        cards = {card["id"]: card["root"] for card in get(running, "/v1/models").json()["data"]}
        for name, root in cards.items():
            assert answered_by(ask(running, name)) == f"rl-{Path(root).parent.parent.name}-v1"


def test_what_is_asked_before_it_is_known_what_answers_waits_and_is_not_told_that_there_is_none(home, start):
    folder = home / "versions" / "helper"
    targets = find_targets(home, ["helper"])
    kept = {name: (folder / name).read_bytes() for name in ("current.json", "history.jsonl")}
    for name in kept:
        (folder / name).write_text("{")
    terms = Terms(key=KEY, patience=0.0, every=0.02, drain=5.0)
    with Gateway(targets, opener(start=start), listen("127.0.0.1", None), terms) as running:
        assert eventually(lambda: "registry" in get(running, "/health").json()["models"]["helper"])
        refused = ask(running, "helper")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert ask(running, "cook").status_code == 404
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        assert eventually(lambda: ask(running, "helper").status_code == 200)


# --- what is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SystemExit(1), RuntimeError("closed")])
def test_a_log_that_cannot_be_written_keeps_nobody_from_swaps_and_restarts(fault, home, start):
    def tell(_: str) -> None:
        raise fault

    with gateway(home, ["helper"], opener(start=start), patience=30.0, tell=tell) as running:
        start.of("v1").stop()
        assert answered_by(ask(running, "helper")) == "rl-helper-v1" and start.names == ["v1", "v1"]
        registry.promote(home, "helper", "v2")
        assert eventually(lambda: running.offering.line("helper").weights.label == "v2")  # type: ignore[union-attr]
        running.check()


def test_counts_are_exact_however_large_they_are():
    told = samples("n", [({}, 1_234_567), ({}, 1_234_568), ({}, 123456789.25), ({}, 1.0), ({}, 0.1)])
    assert told == ["n{} 1234567", "n{} 1234568", "n{} 123456789.25", "n{} 1", "n{} 0.1"]


# --- what is current, as it is decided ------------------------------------------------------------------------------


def test_who_looks_at_any_moment_of_a_first_promotion_hears_no_alarm(in_tmp, published, monkeypatch, caplog):
    home = Path(shutil.copytree(published / "home", in_tmp / "home"))
    seen: list[Any] = []

    def look() -> None:
        pointer = registry.current(home, "helper")
        assert registry.history(home, "helper") == ([pointer] if pointer else [])
        seen.append(pointer and pointer.version)

    def looking(write: Callable[..., None]) -> Callable[..., None]:
        def writes(*given: Any, **options: Any) -> None:
            look()
            write(*given, **options)
            look()

        return writes

    for name in ("append_line", "write_record"):
        monkeypatch.setattr(pointers, name, looking(getattr(pointers, name)))
    registry.promote(home, "helper", "v1")
    assert seen[0] is None and seen[-1] == "v1" and seen == sorted(seen, key=lambda version: version or "")
    assert not caplog.text


def test_a_first_promotion_between_the_looks_at_two_files_is_no_alarm(in_tmp, published, monkeypatch, caplog):
    home = Path(shutil.copytree(published / "home", in_tmp / "home"))
    read = pointers._logged

    def read_later(folder: Path) -> Any:
        monkeypatch.setattr(pointers, "_logged", read)
        registry.promote(home, "helper", "v1")  # after it was seen that there is no current.json
        return read(folder)

    monkeypatch.setattr(pointers, "_logged", read_later)
    pointer = registry.current(home, "helper")
    assert pointer is not None and pointer.version == "v1" and not caplog.text


def test_a_file_that_is_gone_is_told_once_and_not_every_second(home, caplog):
    (home / "versions" / "helper" / "current.json").unlink()
    (name,) = find_targets(home, ["helper"])
    offering = Offering([name], lambda weights: pytest.fail("nothing is started"), new_backoff=Backoff)
    for _ in range(5):
        offering._names[0].look()
    assert caplog.text.count("the last change in the history is") == 1
    registry.promote(home, "helper", "v2")
    registry.promote(home, "helper", "v1")
    (home / "versions" / "helper" / "current.json").unlink()
    caplog.clear()
    offering._names[0].look()
    assert caplog.text.count("the last change in the history is") == 1  # another loss is told again
