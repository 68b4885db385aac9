"""A vLLM server that answers anything at all, and a disk that takes nothing: one plain error, and no key told."""

import errno
import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.endpoints import list_models
from praison_agent_rl.errors import ConfigError, ServerFailed, TrainingFailed
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.vllm_servers import adapters as vllm_adapters
from praison_agent_rl.vllm_servers.calls import Refused, ask
from praison_agent_rl.vllm_servers.rollouts import VllmSampler
from praison_agent_rl.vllm_servers.sources import ForeignServer, Patience
from tests.vllm_stand_in import END, StandIn, serving

PLAIN = Sampling(max_tokens=3, ends=(END,))


def save(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["q_proj"]}))


def sampler_of(server: ForeignServer, folder: Path) -> VllmSampler:
    return VllmSampler(server, folder, base="owner/base", run_id="r", patience=Patience(timeout=30, retries=0))


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The address of a server that does ``answer`` whatever it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            answer(self)

        do_POST = do_GET

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http_server.server_port}"
    finally:
        http_server.shutdown()
        http_server.server_close()


def reply(status: int, body: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"content-length": str(len(body))} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return send


ODD: list[Any] = [
    None,
    "x",
    3,
    -3,
    1.5,
    True,
    [],
    ["x"],
    [[]],
    [None],
    {},
    {"x": "y"},
    [{}],
    ["7", "9"],
    [-7, 9],
    [7.5, 9],
]
PLACES = ("index", "token_ids", "prompt_token_ids", "finish_reason", "logprobs", "token_logprobs", "top_logprobs")


@pytest.mark.parametrize("place", [*PLACES, "choices", "model"])
def test_any_value_at_any_place_of_an_answer_gives_plain_ids_or_one_plain_error(tmp_path, place):
    stand_in = StandIn()
    with serving(stand_in) as server:
        sampler = sampler_of(server, tmp_path)
        sampler.offer(0, save)
        for value in ODD:

            def spoil(answer: dict[str, Any], value: Any = value) -> None:
                choice = answer["choices"][0]
                inner = choice["logprobs"] if place.endswith("_logprobs") else choice
                (inner if place in PLACES else answer)[place] = value

            stand_in.change = spoil
            for sampling in (PLAIN, Sampling(max_tokens=3, ends=(END,), temperature=0.5)):
                try:
                    drawn = sampler.sample([[1]], sampling)
                except ServerFailed as error:
                    assert "vLLM server at http" in str(error)
                else:
                    assert drawn.ids == [[7, END]], value


@pytest.mark.parametrize("body", [b'{"model": "r', b"[1]", b"\xff\xfe", b""])
def test_what_is_no_json_object_is_not_taken_for_completions(tmp_path, body):
    with answering(reply(200, body)) as url:
        sampler = sampler_of(ForeignServer(url=url), tmp_path)
        sampler.offer(0, save)  # vLLM confirms an adapter in plain words
        with pytest.raises(ServerFailed, match="answered completions with no JSON object"):
            sampler.sample([[1]], PLAIN)


@pytest.mark.parametrize("status", [200, 401, 429, 500])
def test_an_answer_that_breaks_off_is_one_plain_error(tmp_path, status):
    with answering(reply(status, b'{"err', **{"content-length": "500"})) as url:
        sampler = sampler_of(ForeignServer(url=url), tmp_path)
        with pytest.raises(ServerFailed, match=f"HTTP {status}: {http.client.responses[status]}|IncompleteRead"):
            sampler.offer(0, save)
        assert not list(tmp_path.iterdir())
        with pytest.raises(ServerFailed, match="does not say which models it has"):
            sampler.check(8)


def test_a_key_that_is_asked_for_is_said(tmp_path):
    with (
        answering(reply(401, b'{"error": "Unauthorized"}')) as url,
        pytest.raises(ServerFailed, match=r"HTTP 401.*give the key that it asks for"),
    ):
        sampler_of(ForeignServer(url=url), tmp_path).offer(0, save)


@pytest.mark.parametrize("status", [301, 302, 303, 307])
def test_a_key_is_shown_to_no_address_that_a_server_sends_on_to(status):
    seen: list[tuple[str, str | None]] = []

    def other(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.command, handler.headers["authorization"]))
        reply(200, b'{"data": [{"id": "m"}]}')(handler)

    with answering(other) as elsewhere, answering(reply(status, b"", Location=f"{elsewhere}/v1/x")) as url:
        assert list(list_models(url, "s3cret")) == ["m"] and seen == [("GET", None)]
        with pytest.raises(Refused, match=f"HTTP {status}: .*{elsewhere}/v1/x.*give the address that answers itself"):
            ask(f"{url}/v1/load_lora_adapter", {}, api_key="s3cret", timeout=30)
    assert len(seen) == 1  # nothing that was posted went there as a GET


@pytest.mark.parametrize("key", ["s3cret\n", "s3\r\ncret", "s3cret\u2026"])
def test_a_key_that_no_header_can_carry_is_not_shown(tmp_path, key):
    sampler = sampler_of(ForeignServer(url="http://127.0.0.1:9", api_key=key), tmp_path)
    for call in (lambda: sampler.check(8), lambda: sampler.offer(0, save)):
        with pytest.raises(ServerFailed, match="no HTTP header can carry") as caught:
            call()
        assert "s3" not in str(caught.value)


def test_a_key_that_a_server_repeats_is_not_told(tmp_path):
    told: list[str] = []
    body = b'{"error": {"message": "no such key: s3cret"}, "data": "s3cret"}'
    with answering(reply(403, body)) as url, answering(reply(200, body)) as other:
        servers = [ForeignServer(url=each, api_key="s3cret") for each in (url, other)]
        sampler = VllmSampler(servers, tmp_path, base="owner/base", run_id="r", tell=told.append)
        assert sampler.offer(0, save)  # the other says yes to anything
        for call in (lambda: sampler.check(8), lambda: sampler.sample([[1]], PLAIN)):
            with pytest.raises((ConfigError, ServerFailed)) as failed:
                call()
            told.append(str(failed.value))
    assert "no such key: ***" in told[0] and len(told) == 4 and "s3cret" not in "".join(told)


@pytest.mark.parametrize("where", ["save", "make_servable", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_takes_no_policy_is_one_plain_error_and_leaves_the_former(tmp_path, monkeypatch, where, number):
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "/some/file")

    stand_in = StandIn()
    with serving(stand_in) as server, sampler_of(server, tmp_path) as sampler:
        former = sampler.offer(0, save)
        with monkeypatch.context() as patch, pytest.raises(TrainingFailed, match=f"{os.strerror(number)}; make room"):
            if where != "save":
                patch.setattr(*((Path, "mkdir") if where == "mkdir" else (vllm_adapters, "make_servable")), fails)
            sampler.offer(1, fails if where == "save" else save)
        assert list(stand_in.adapters) == [former] == [path.name for path in tmp_path.iterdir()]
        assert sampler.sample([[1]], PLAIN).ids == [[7, END]]
