"""Start, watch and stop a model server for a folder of merged weights; which agent uses it is not decided here.

The server is ``transformers serve`` (DESIGN 10), run in a child process that ends when this one does. It listens on
127.0.0.1 only and wants a key, which ``transformers serve`` itself has no option for.
"""

import hmac
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from praison_agent_rl.child import last_lines, start_child, stop_child
from praison_agent_rl.endpoints import keep_loopback_off_proxies, list_models
from praison_agent_rl.errors import MissingExtra, ServerFailed
from praison_agent_rl.models import plain_weights

_KEY_VARIABLE = "PRAISON_AGENT_RL_SERVER_KEY"
_ATTEMPTS = 3
LOG = "server.log"
"""A server's log in its folder."""
_SPOKEN_BY_REQUESTS = (
    "uvicorn.access",
    *(f"transformers.cli.serving.{n}" for n in ("chat_completion", "completion", "response")),
)
"""Loggers of ``transformers serve`` that have a line for each request."""


class ServerAddress(str):
    """A server's base URL; whoever keeps the URL (an agent, its clone, a turn, a client) keeps the server."""

    __slots__ = ("__weakref__", "server")
    server: "Served"

    def __new__(cls, url: str, server: "Served") -> "ServerAddress":
        """A text that is immutable gets its server here."""
        address = super().__new__(cls, url)
        address.server = server
        return address

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy in another process holds nothing


class Holders:
    """How many addresses of a server are held; says when the last is let go."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[ServerAddress]] = {}
        self.when_free: Callable[[], None] = lambda: None
        """Called within a garbage collection, perhaps: it may take no lock."""

    def __len__(self) -> int:
        return len(self._held)

    def add(self, address: ServerAddress) -> ServerAddress:
        """Count ``address`` for as long as anybody holds it."""
        key = id(address)
        self._held[key] = weakref.ref(address, lambda _: self._let_go(key))
        return address

    def _let_go(self, key: int) -> None:
        self._held.pop(key, None)
        if not self._held:
            self.when_free()


@dataclass(kw_only=True)
class Served:
    """A model that a server of ours offers: where, under which name, and the key that it wants."""

    url: str
    """Base URL of the OpenAI-compatible interface, ending in ``/v1``."""
    model: str
    """Name to send as ``model``."""
    api_key: str = field(repr=False)
    folder: Path
    """Folder of its weights."""
    holders: Holders = field(default_factory=Holders, repr=False)

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        raise NotImplementedError

    @property
    def address(self) -> ServerAddress:
        """The base URL as a text that keeps the server alive for as long as anything holds it."""
        return self.holders.add(ServerAddress(self.url, self))

    def stop(self) -> None:
        """Offer it no longer; it is safe to call this twice."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Server(Served):
    """A running model server."""

    process: "subprocess.Popen[bytes]" = field(repr=False)
    home: Path
    """Folder of the server's own files, such as its log."""
    owner: int = field(default_factory=os.getpid, repr=False)
    """Process that started it; a fork of that process may use the server but never ends it."""

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        if os.getpid() == self.owner:
            if self.process.returncode is None and _has_ended(self.process.pid):
                stop_child(self.process)  # what it left behind: an engine of vLLM would keep its memory
            return self.process.poll() is None
        try:
            os.kill(self.process.pid, 0)  # a fork cannot wait for it
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """End the server; it is safe to call this twice."""
        if os.getpid() == self.owner:
            stop_child(self.process)


def _has_ended(child: int) -> bool:
    """Whether a child has ended, of which nobody has taken note; nor is it by this, so its group is still its own."""
    if sys.platform != "linux":
        return False
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def start_server(
    folder: Path,
    *,
    name: str,
    device: str = "auto",
    timeout: float = 300.0,
    port: int | None = None,
    api_key: str | None = None,
) -> Server:
    """Serve the weights in ``folder`` (or a GGUF file) as ``name`` on a port of 127.0.0.1; wait until it answers.

    ``timeout`` is in seconds. Without ``port`` a free one is taken, without ``api_key`` a new key is made. The server
    is stopped when this process ends, if nobody has stopped it before.

    Raises:
        ServerFailed: it did not come up; the message ends with the last lines of its log.
    """
    folder = folder.resolve()

    def launch() -> Server:
        place, home, key = port or free_port(), new_home(), api_key or secrets.token_urlsafe(24)
        arguments = [str(folder), name, str(place), device, str(home)]
        environment = {_KEY_VARIABLE: key, "HF_HUB_OFFLINE": "1"}
        process = start_child("praison_agent_rl.serving", arguments, log=home / LOG, env=environment)
        url = f"http://127.0.0.1:{place}/v1"
        return Server(url=url, model=name, api_key=key, folder=folder, process=process, home=home)

    return bring_up(launch, timeout=timeout, attempts=1 if port else _ATTEMPTS)


AnyServer = TypeVar("AnyServer", bound=Server)


def bring_up(launch: Callable[[], AnyServer], *, timeout: float, attempts: int = _ATTEMPTS) -> AnyServer:
    """A server that ``launch`` starts, once it answers; it is ended with this process, and with its last reference.

    Raises:
        ServerFailed: it did not come up; the message ends with the last lines of its log.
    """
    keep_loopback_off_proxies()
    for attempt in range(attempts):
        server = launch()
        weakref.finalize(server, _clean_up, server.process, server.home, os.getpid())  # runs at exit too
        try:
            _wait_until_ready(server, timeout)
            return server
        except ServerFailed as failure:
            server.stop()
            # Between our choosing a free port and the server's binding it, somebody else may have taken it.
            if "address already in use" not in str(failure).lower() or attempt == attempts - 1:
                raise
    raise AssertionError("unreachable: the loop returns or raises")


def new_home() -> Path:
    """A new folder for a server's own files."""
    return Path(tempfile.mkdtemp(prefix="praison-agent-rl-server-"))


def _clean_up(process: "subprocess.Popen[bytes]", home: Path, owner: int) -> None:
    if os.getpid() == owner:
        stop_child(process, patience=2.0)
        shutil.rmtree(home, ignore_errors=True)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while server.running and time.monotonic() < deadline:
        try:
            if server.model in list_models(server.url, server.api_key, timeout=5.0):
                return
        except (OSError, ValueError):
            pass  # not yet
        time.sleep(0.2)
    state = f"was not ready after {timeout:.0f} s" if server.running else f"ended with code {server.process.returncode}"
    log = last_lines(server.home / LOG)
    raise ServerFailed(f"the server for {str(server.folder)!r} {state}; the last lines of its log:\n{log}")


def main() -> None:
    """What the server's child process runs: ``transformers serve`` pinned to one folder, behind a key."""
    folder, name, port, device, home = sys.argv[1:]
    try:
        from transformers.cli.serve import Serve
        from transformers.cli.serving import server as app_factory
    except ImportError as error:
        raise MissingExtra(f'serving needs {error.name}: pip install "praison-agent-rl[train]"') from error
    # The model is known by the path that it is asked for under, so a link of the right name gives it a plain name.
    os.chdir(home)
    os.symlink(plain_weights(folder), name, target_is_directory=True)
    app_factory.build_server = _behind_key(app_factory.build_server, os.environ.pop(_KEY_VARIABLE))
    _log_no_requests()
    Serve(force_model=name, host="127.0.0.1", port=int(port), device=device)


def _log_no_requests() -> None:
    """Keep the lines that each request makes out of the log: it would fill the disk of a server that runs for weeks."""
    for name in _SPOKEN_BY_REQUESTS:
        logging.getLogger(name).addFilter(lambda line: line.levelno > logging.WARNING)


def _behind_key(build: Callable[..., Any], key: str) -> Callable[..., Any]:
    """Wrap ``transformers serve``'s app factory so that each request must carry the bearer key."""

    def build_with_key(*arguments: Any, **options: Any) -> Any:
        app = build(*arguments, **options)
        app.add_middleware(KeyCheck, key=key)
        return app

    return build_with_key


class KeyCheck:
    """ASGI middleware: refuses requests without the key."""

    def __init__(self, app: Any, *, key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hand on a request, or answer it with 401."""
        given = dict(scope.get("headers") or []).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # policy violation, RFC 6455 section 7.4.1
            return
        from starlette.responses import JSONResponse

        refusal = JSONResponse({"error": {"message": "wrong or missing API key"}}, status_code=401)
        await refusal(scope, receive, send)


if __name__ == "__main__":
    main()
