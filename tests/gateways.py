"""A gateway in this process, for tests: agents with versions, servers that are fakes, and a client with the key."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from praison_agent_rl.gateway.lines import Open
from praison_agent_rl.gateway.names import Weights, find_targets
from praison_agent_rl.gateway.running import Gateway, Terms, listen
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.server_pool import serve_base, serve_version
from praison_agent_rl.serving import ServerAddress
from tests.finished_runs import finished_run

KEY = "the-key-of-the-team"
HEADERS = {"authorization": f"Bearer {KEY}"}


def publish(home: Path, base: Path, agent: str, count: int) -> None:
    """Versions v1 to v<count> of an agent, none of them promoted."""
    for number in range(count):
        publish_version(home, agent, finished_run(home / "runs" / f"{agent}-{number}", base, agent=agent))


def opener(**options: Any) -> Open:
    """Opens weights as the command does."""

    def open_(weights: Weights) -> ServerAddress:
        return (serve_base if weights.is_base else serve_version)(weights.version, **options)

    return open_


@contextlib.contextmanager
def gateway(home: Path, words: Sequence[str], open_: Open, *, settled: bool = True, **terms: Any) -> Iterator[Gateway]:
    """A gateway on a port of 127.0.0.1 that looks often, once each name was answered or has failed."""
    given = {"key": KEY, "every": 0.02, "drain": 20.0, **terms}
    with Gateway(find_targets(home, words), open_, listen("127.0.0.1", None), Terms(**given)) as running:
        assert not settled or eventually(lambda: running.offering.tried)
        yield running


def root(running: Gateway) -> str:
    return running.url.removesuffix("/v1")


def request(model: str, text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def ask(running: Gateway, model: str, text: str = "hello", **more: Any) -> httpx.Response:
    url = f"{running.url}/chat/completions"
    return httpx.post(url, json=request(model, text, **more), headers=HEADERS, timeout=60, trust_env=False)


def get(running: Gateway, path: str, *, key: str | None = KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{root(running)}{path}", headers=headers, timeout=30, trust_env=False)


def answered_by(reply: httpx.Response) -> str:
    """Which model's server has answered, and that the answer is of that one."""
    assert reply.status_code == 200, reply.text
    model = reply.json()["model"]
    assert reply.headers["x-served-model"] == model and f"|{model}]" in reply.json()["choices"][0]["message"]["content"]
    return str(model)


class Crowd:
    """Requests that are under way at once, in a loop and a thread of their own."""

    def __init__(self, running: Gateway, bodies: Sequence[dict[str, Any]]) -> None:
        self.replies: list[httpx.Response] = []
        self._url = f"{running.url}/chat/completions"
        self._bodies = bodies
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()), daemon=True)
        self._thread.start()

    async def _ask_all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(headers=HEADERS, timeout=60, limits=limits, trust_env=False) as client:
            self.replies = await asyncio.gather(*(client.post(self._url, json=body) for body in self._bodies))

    def end(self) -> list[httpx.Response]:
        self._thread.join(60)
        assert not self._thread.is_alive() and len(self.replies) == len(self._bodies)
        return self.replies


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
