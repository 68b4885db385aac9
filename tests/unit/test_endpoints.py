"""A server is asked which models it has, and the weights beneath an agent are found or asked for in plain words."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from praison_agent_rl.endpoints import list_models
from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import weights_beneath
from praison_agent_rl.serving import KeyCheck
from tests.fakes import FakeServer, build_agent


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("OPENAI_", "OLLAMA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", "key-a")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with the files of a model, the smallest that are valid."""
    return make_weights(tmp_path / "weights")


def make_weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors: an empty header
    return folder


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL at which nobody listens; the port stays taken, so that nobody comes either."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


# --- list_models ----------------------------------------------------------------------------------------------------


def test_models_are_given_by_their_id_as_the_server_describes_them(server_a):
    server_a.models = [{"id": "m1", "root": "/weights"}, {"id": "owner/m2", "object": "model"}]
    assert list_models(server_a.url, "key-a") == {
        "m1": {"id": "m1", "root": "/weights"},
        "owner/m2": {"id": "owner/m2", "object": "model"},
    }
    assert server_a.listed == [("/v1/models", "Bearer key-a")]


@pytest.mark.parametrize("key", [None, ""])
def test_no_key_is_sent_where_there_is_none_and_a_slash_at_the_end_of_the_address_is_no_matter(key, server_a):
    assert list(list_models(server_a.url + "/", key)) == ["m1"]
    assert server_a.listed == [("/v1/models", "")]


def test_a_server_may_have_no_models(server_a):
    server_a.models = []
    assert list_models(server_a.url, None) == {}


def test_a_refused_connection_is_an_oserror(nobody):
    with pytest.raises(OSError, match="refused"):
        list_models(nobody, "key-a")


@pytest.mark.parametrize("answer", [b"<html>", b"\xff\xfe\x00", b"", b"[1, 2]", b'"m1"', b"7", b"null"])
def test_an_answer_that_is_no_object_is_a_valueerror(answer, server_a):
    server_a.listing = answer or b" "
    with pytest.raises(ValueError):
        list_models(server_a.url, None)


@pytest.mark.parametrize("answer", [{}, {"data": None}, {"data": ["m1"]}, {"data": [{"name": "m1"}]}, {"data": 3}])
def test_an_answer_without_a_list_of_models_is_quoted(answer, server_a):
    server_a.listing = json.dumps(answer).encode()
    with pytest.raises(ValueError, match=r"/v1/models did not answer with a list of models: \{"):
        list_models(server_a.url, None)


def test_something_that_speaks_no_http_is_an_oserror():
    with socket.create_server(("127.0.0.1", 0)) as door:

        def greet() -> None:
            visitor, _ = door.accept()
            visitor.recv(4096)
            visitor.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            visitor.close()

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(OSError, match="does not speak HTTP"):
            list_models(f"http://127.0.0.1:{door.getsockname()[1]}/v1", None)


def test_a_path_that_the_server_does_not_know_is_an_oserror(tmp_path):
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        with pytest.raises(OSError, match="404"):
            list_models(f"http://127.0.0.1:{server.server_port}/v1", None)
        server.shutdown()


def test_a_server_that_does_not_answer_is_an_oserror_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(OSError, match="timed out"):
        list_models(f"http://127.0.0.1:{mute.getsockname()[1]}/v1", None, timeout=0.2)


# --- weights_beneath ------------------------------------------------------------------------------------------------


def test_a_given_base_model_wins_over_what_the_server_says(server_a, weights, tmp_path):
    other = make_weights(tmp_path / "other")
    server_a.models = [{"id": "m1", "root": str(other)}]
    agent = build_agent("provider", server_a.url)
    assert weights_beneath(agent, str(weights)) == str(weights.resolve())
    assert server_a.listed == []


def test_a_given_base_model_wins_over_a_server_of_ours(server_a, weights, tmp_path):
    agent = build_agent("provider", server_a.url)
    agent._rl_server = SimpleNamespace(folder=make_weights(tmp_path / "version"))
    assert weights_beneath(agent, str(weights)) == str(weights.resolve())


def test_a_relative_folder_becomes_an_absolute_one(server_a, weights):
    assert weights_beneath(build_agent("provider", server_a.url), "weights") == str(weights.resolve())


def test_an_agent_on_a_server_of_ours_runs_on_that_servers_folder(server_a, weights):
    agent = build_agent("environment", server_a.url)
    agent._rl_server = SimpleNamespace(folder=weights)
    assert weights_beneath(agent) == str(weights.resolve())
    assert server_a.listed == []


@pytest.mark.parametrize("kind", ["provider", "hosted_vllm", "bare", "dict"])
def test_a_server_that_names_a_folder_is_believed(kind, server_a, weights):
    server_a.models = [{"id": "m0", "root": "/elsewhere"}, {"id": "m1", "root": str(weights)}]
    assert weights_beneath(build_agent(kind, server_a.url)) == str(weights.resolve())


@pytest.mark.parametrize("kind", ["provider", "hosted_vllm", "bare"])
def test_the_server_is_asked_with_the_agents_key(kind, server_a, weights):
    server_a.models = [{"id": "m1", "root": str(weights)}]
    weights_beneath(build_agent(kind, server_a.url))
    assert server_a.listed == [("/v1/models", "Bearer key-a")]


@pytest.mark.parametrize("prefix", ["hosted_vllm/", "huggingface/", "openai/", ""])
def test_a_name_that_is_a_folder_is_that_folder(prefix, server_a, weights):
    agent = build_agent("provider", server_a.url, llm=f"{prefix}{weights}")
    assert weights_beneath(agent) == str(weights.resolve())


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The hub name of a model in a cache of hub models, in the layout of huggingface_hub."""
    from huggingface_hub import constants

    folder = tmp_path / "hub" / "models--acme--tiny"
    make_weights(folder / "snapshots" / "abc123")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return "acme/tiny"


@pytest.mark.parametrize("prefix", ["hosted_vllm/", "huggingface/", "openai/"])
def test_a_hub_name_behind_a_provider_is_found_in_the_cache(prefix, cached, nobody):
    assert weights_beneath(build_agent("provider", nobody, llm=prefix + cached)) == "acme/tiny"


def test_a_hub_name_that_the_server_says_is_found_in_the_cache(cached, server_a):
    server_a.models = [{"id": "m1", "root": cached}]
    assert weights_beneath(build_agent("hosted_vllm", server_a.url)) == "acme/tiny"


@pytest.mark.parametrize("llm", ["hosted_vllm/acme/absent", "huggingface/acme/absent", "openai/acme/absent"])
def test_a_hub_name_that_is_not_cached_cannot_be_asked_for_offline(llm, cached, nobody):
    with pytest.raises(ModelError, match=r"'acme/absent' is not in the local cache.*HF_HUB_OFFLINE is set"):
        weights_beneath(build_agent("provider", nobody, llm=llm))


def test_a_given_hub_name_that_is_not_cached_cannot_be_asked_for_offline(cached, server_a):
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        weights_beneath(build_agent("provider", server_a.url), "acme/absent")


@pytest.mark.parametrize("llm", ["ollama/llama3.2", "ollama_chat/qwen2.5:0.5b"])
def test_ollama_does_not_say_its_weights_and_the_message_says_what_to_pass(llm, server_a):
    agent = build_agent("provider", server_a.url, llm=llm)
    with pytest.raises(
        ModelError, match=r"'helper' runs on 'ollama.*Ollama does not say.*pass base_model=: a hub name"
    ):
        weights_beneath(agent)


@pytest.mark.parametrize(
    "llm",
    ["gpt-4o", "openai/gpt-4o", "o3-mini", "anthropic/claude-sonnet-4", "gemini/gemini-2.5-pro", "groq/llama-3.1-8b"],
)
def test_closed_models_are_refused_with_what_to_pass(llm):
    agent = build_agent("environment", "", llm=llm)
    with pytest.raises(ModelError, match=r"'helper' runs on .*, a closed model; pass base_model=: a hub name"):
        weights_beneath(agent)


@pytest.mark.parametrize("kind", ["provider", "hosted_vllm", "bare"])
def test_a_server_that_is_down_leaves_a_name_that_says_nothing(kind, nobody):
    with pytest.raises(ModelError, match=r"a name that says nothing of its weights; pass base_model="):
        weights_beneath(build_agent(kind, nobody))


@pytest.mark.parametrize("models", [[{"id": "m1"}], [{"id": "m1", "root": None}], [{"id": "other", "root": "/x"}]])
def test_a_server_that_says_nothing_of_this_model_leaves_a_name_that_says_nothing(models, server_a):
    server_a.models = models
    with pytest.raises(ModelError, match="a name that says nothing of its weights"):
        weights_beneath(build_agent("provider", server_a.url))


def test_a_server_that_answers_garbage_leaves_a_name_that_says_nothing(server_a):
    server_a.listing = b"<html>"
    with pytest.raises(ModelError, match="a name that says nothing of its weights"):
        weights_beneath(build_agent("provider", server_a.url))


def test_a_folder_that_a_server_names_and_that_is_not_here_is_named(server_a):
    server_a.models = [{"id": "m1", "root": "/srv/models/gone"}]
    with pytest.raises(ModelError, match="there are no weights at '/srv/models/gone'"):
        weights_beneath(build_agent("provider", server_a.url))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "it has no config.json"),
        (["config.json"], r"it has no \*.safetensors file"),
        (["model.safetensors"], "it has no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], "is an adapter, not a model"),
        (["model.gguf"], "to use model.gguf, give the path of that file"),
    ],
)
def test_a_folder_that_is_no_models_says_what_it_lacks(files, message, server_a, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    with pytest.raises(ModelError, match=message):
        weights_beneath(build_agent("provider", server_a.url), str(folder))


@pytest.mark.parametrize("name", ["no/such/folder", "/nowhere", "./nowhere", "~/nowhere-at-all", "gone.gguf", "plain"])
def test_a_given_name_that_can_be_neither_a_folder_nor_a_hub_name_is_refused(name, server_a):
    with pytest.raises(ModelError, match="there are no weights at"):
        weights_beneath(build_agent("provider", server_a.url), name)


def test_a_gguf_file_is_taken_and_another_file_is_not(server_a, tmp_path):
    agent = build_agent("provider", server_a.url)
    (tmp_path / "m.GGUF").write_bytes(b"GGUF")
    (tmp_path / "m.bin").write_bytes(b"")
    assert weights_beneath(agent, "m.GGUF") == str((tmp_path / "m.GGUF").resolve())
    with pytest.raises(ModelError, match=r"'m.bin' is a file but no GGUF"):
        weights_beneath(agent, "m.bin")


def test_the_endpoint_of_an_agent_is_found_wherever_it_is_given(
    server_a: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from praisonaiagents import Agent
    from praisonaiagents.llm import LLM

    from praison_agent_rl.swap import endpoint_of

    monkeypatch.delenv("OPENAI_API_BASE", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", server_a.url)
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    elsewhere = "http://127.0.0.1:9/v1"
    found = [
        endpoint_of(Agent(name="a", llm={"model": "openai/m", "base_url": elsewhere, "api_key": "in-dict"})),
        endpoint_of(Agent(name="a", llm="openai/m", base_url=elsewhere, api_key="given")),
        endpoint_of(Agent(name="a", llm=LLM(model="openai/m", base_url=elsewhere, api_key="in-object"))),
        endpoint_of(Agent(name="a", llm="m")),
    ]
    assert found == [
        (elsewhere, "in-dict"),
        (elsewhere, "given"),
        (elsewhere, "in-object"),
        (server_a.url, "from-env"),
    ]


def test_a_server_of_ours_answers_only_who_has_the_key() -> None:
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    check = KeyCheck(app, key="k-1")
    right, wrong = [(b"authorization", b"Bearer k-1")], [(b"authorization", b"Bearer k-2")]
    for kind, headers in [("lifespan", []), ("http", right), ("websocket", right)]:
        asyncio.run(check({"type": kind, "headers": headers}, None, send))
    assert reached == ["lifespan", "http", "websocket"] and sent == []
    for headers in ([], wrong):
        asyncio.run(check({"type": "http", "headers": headers}, None, send))
        asyncio.run(check({"type": "websocket", "headers": headers}, None, send))
    assert reached == ["lifespan", "http", "websocket"]
    assert [message.get("status") or message.get("code") for message in sent if "body" not in message] == [
        401,
        1008,
    ] * 2
