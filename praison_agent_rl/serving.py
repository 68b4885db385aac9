"""Start, watch and stop a model server for a folder of merged weights; which agent uses it is not decided here.

The server is ``transformers serve`` (DESIGN 10), run in a child process that ends when this one does. It listens on
127.0.0.1 only and wants a key, which ``transformers serve`` itself has no option for.
"""

import hmac
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from praison_agent_rl.child import last_lines, start_child, stop_child
from praison_agent_rl.endpoints import list_models
from praison_agent_rl.errors import MissingExtra, ServerFailed
from praison_agent_rl.models import plain_weights

_KEY_VARIABLE = "PRAISON_AGENT_RL_SERVER_KEY"
_ATTEMPTS = 3


@dataclass
class Server:
    """A running model server: where it listens, what its model is called, and the key that it wants."""

    url: str
    """Base URL of the OpenAI-compatible interface, ending in ``/v1``."""
    model: str
    """Name to send as ``model``."""
    api_key: str
    folder: Path
    """Folder of the weights that it serves."""
    process: "subprocess.Popen[bytes]" = field(repr=False)
    log: Path

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End the server; it is safe to call this twice."""
        stop_child(self.process)


def start_server(folder: Path, *, name: str, device: str = "auto", timeout: float = 300.0) -> Server:
    """Serve the weights in ``folder`` (or a GGUF file) as ``name`` on a free port of 127.0.0.1; wait until it answers.

    ``timeout`` is in seconds. The server is stopped when this process ends, if nobody has stopped it before.

    Raises:
        ServerFailed: it did not come up; the message ends with the last lines of its log.
    """
    for attempt in range(_ATTEMPTS):
        server = _launch(folder.resolve(), name, device)
        try:
            _wait_until_ready(server, timeout)
            return server
        except ServerFailed as failure:
            server.stop()
            # Between our choosing a free port and the server's binding it, somebody else may have taken it.
            if "address already in use" not in str(failure).lower() or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable: the loop returns or raises")


def _launch(folder: Path, name: str, device: str) -> Server:
    port = _free_port()
    key = secrets.token_urlsafe(24)
    home = Path(tempfile.mkdtemp(prefix="praison-agent-rl-server-"))
    process = start_child(
        "praison_agent_rl.serving",
        [str(folder), name, str(port), device, str(home)],
        log=home / "server.log",
        env={_KEY_VARIABLE: key, "HF_HUB_OFFLINE": "1"},
    )
    server = Server(f"http://127.0.0.1:{port}/v1", name, key, folder, process, home / "server.log")
    weakref.finalize(server, _clean_up, process, home)  # runs at exit too
    return server


def _clean_up(process: "subprocess.Popen[bytes]", home: Path) -> None:
    import shutil

    stop_child(process, patience=2.0)
    shutil.rmtree(home, ignore_errors=True)


def _free_port() -> int:
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
            time.sleep(0.2)
    state = f"was not ready after {timeout:.0f} s" if server.running else f"ended with code {server.process.returncode}"
    raise ServerFailed(
        f"the server for {str(server.folder)!r} {state}; the last lines of its log:\n{last_lines(server.log)}"
    )


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
    Serve(force_model=name, host="127.0.0.1", port=int(port), device=device)


def _behind_key(build: Callable[..., Any], key: str) -> Callable[..., Any]:
    """Wrap ``transformers serve``'s app factory so that each request must carry the bearer key."""
    wanted = f"Bearer {key}".encode()

    def build_with_key(*arguments: Any, **options: Any) -> Any:
        from starlette.responses import JSONResponse

        async def require_key(request: Any, call_next: Callable[[Any], Any]) -> Any:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, wanted):
                return JSONResponse({"error": {"message": "wrong or missing API key"}}, status_code=401)
            return await call_next(request)

        app = build(*arguments, **options)
        app.middleware("http")(require_key)
        return app

    return build_with_key


if __name__ == "__main__":
    main()
