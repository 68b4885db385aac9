"""A real vLLM serves two versions of an agent behind one address: they are swapped under load, and it may be killed."""

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from praison_agent_rl import registry
from praison_agent_rl.models import EMBEDDED, find_weights, plain_weights
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.vllm_servers.serving import EXECUTABLE, VllmServer
from tests.finished_runs import finished_run
from tests.gateways import ask, eventually, gateway, get, opener
from tests.vllm.policies import adapted

if shutil.which(os.environ.get(EXECUTABLE, "")) is None:
    pytest.skip(f"{EXECUTABLE} names no command vllm; make test-vllm installs one", allow_module_level=True)

OPTIONS = ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "512"]


@pytest.fixture(scope="module")
def base() -> str:
    return plain_weights(find_weights(EMBEDDED))


@pytest.fixture
def home(in_tmp: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of an agent with v1 and v2, trained on the base, and v3, trained on v2; none is promoted."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    place = in_tmp / "home"
    trained_on, parent = Path(base), None
    for number in range(3):
        run = finished_run(place / "runs" / str(number), trained_on, agent="helper", parent=parent)
        shutil.rmtree(run.adapter)
        adapted(base, seed=number).save_pretrained(run.adapter)
        made = publish_version(place, "helper", run)
        if number == 1:
            trained_on, parent = Path(made.folder) / "model", made.name
    return place


def said(running: Any, name: str, **more: Any) -> tuple[str, str]:
    """Who answers, and what."""
    reply = ask(running, name, "Name a river.", max_tokens=12, temperature=0, **more)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-served-model"], reply.json()["choices"][0]["message"]["content"]


def test_two_versions_are_loaded_while_it_runs_and_swapped_under_load_and_it_comes_back_after_a_kill(home, base):
    began = time.monotonic()
    open_ = opener(backend="vllm", vllm_options=OPTIONS)
    with gateway(home, ["helper"], open_, settled=False, patience=300.0) as running:
        assert eventually(lambda: running.offering.healthy, seconds=300)
        up = time.monotonic() - began
        texts = {"base": said(running, "helper")[1]}
        assert get(running, "/v1/models").json()["data"][0]["root"] == base
        loads, server = [], host_of(running).process.pid
        for version in ("v1", "v2", "v3"):
            registry.promote(home, "helper", version)
            began = time.monotonic()
            assert eventually(lambda version=version: said(running, "helper")[0] == f"rl-helper-{version}", seconds=120)
            loads.append(time.monotonic() - began)
            texts[version] = said(running, "helper")[1]
        assert len(set(texts.values())) == 4  # each is a model of its own
        assert host_of(running).process.pid == server  # also v3's, whose base is v2
        registry.rollback(home, "helper")

        going, heard, faults = threading.Event(), [], []
        going.set()

        def ask_without_pause() -> None:
            while going.is_set():
                try:
                    heard.append(said(running, "helper"))
                except Exception as error:  # noqa: BLE001 - counted below
                    faults.append(error)

        threads = [threading.Thread(target=ask_without_pause, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: heard[-1:] and heard[-1][0] == "rl-helper-v2", seconds=120)
        heard.clear()  # v3's last answers
        for _ in range(3):
            registry.rollback(home, "helper")
            assert eventually(lambda: heard[-1:] and heard[-1][0] == "rl-helper-v1", seconds=120)
            registry.promote(home, "helper", "v2")
            assert eventually(lambda: heard[-1][0] == "rl-helper-v2", seconds=120)
        going.clear()
        for thread in threads:
            thread.join(120)
        assert faults == [] and len(heard) > 20
        # in a batch, bfloat16 rounds otherwise; what is the same must be of the version that is named
        versions = {text: version for version, text in texts.items()}
        known = [(name, versions[text]) for name, text in heard if text in versions]
        assert known and all(name == f"rl-helper-{version}" for name, version in known)

        counted = get(running, "/metrics").text
        assert "# TYPE vllm:num_requests_running gauge" in counted and 'server="127.0.0.1:' in counted
        again = restarted_after_a_kill(running)
        assert said(running, "helper") == ("rl-helper-v2", texts["v2"])
    seconds = ", ".join(f"{load:.1f}" for load in loads)
    print(f"\nvLLM was up after {up:.0f} s, and {again:.0f} s after a kill; versions answered {seconds} s after their")
    print(f"promotion; {len(heard)} requests over 6 swaps, {len(faults)} failed")


def host_of(running: Any) -> VllmServer:
    """The server that answers now."""
    server = running.offering.line("helper").address.server
    return server if isinstance(server, VllmServer) else server.host  # type: ignore[no-any-return]


def restarted_after_a_kill(running: Any) -> float:
    """Seconds until it answers again after vLLM was killed; the engine that it leaves behind is ended, too."""
    family = psutil.Process(host_of(running).process.pid).children(recursive=True)
    assert len(family) > 1
    family[0].kill()
    began = time.monotonic()
    assert eventually(lambda: get(running, "/health").status_code == 503)
    assert eventually(lambda: running.offering.healthy, seconds=300)
    assert eventually(lambda: not any(process.is_running() for process in family))
    return time.monotonic() - began
