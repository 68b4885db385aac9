"""The verb ``praison-agent-rl serve``: the server of a version alone, in the foreground, for agents elsewhere."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from praison_agent_rl.errors import ConfigError, ServerFailed, VersionError
from praison_agent_rl.records import Version

KEY_VARIABLE = "PRAISON_AGENT_RL_KEY"
"""Variable of the environment with the key that clients send; without it one is made."""
console = Console(soft_wrap=True, emoji=False)


def serve_alone(agent: str, version: str | None, *, port: int | None, device: str, home: Path) -> None:
    """Serve the agent's current version, or another one, until Ctrl-C or SIGTERM.

    Raises:
        VersionError: there is no such version, or none is current.
        ConfigError: the port cannot be had.
        ServerFailed: the server did not come up, or ended by itself.
    """
    from praison_agent_rl.child import last_lines
    from praison_agent_rl.registry import model_of, served_name
    from praison_agent_rl.serving import LOG, start_server

    found = _version(home, agent, version)
    if port is not None:
        _check_free(port)
    given = os.environ.get(KEY_VARIABLE)
    with _ended_as_by_ctrl_c():
        _say(f"starting the server of {found.name} of agent {found.agent!r}; Ctrl-C ends it")
        server = start_server(model_of(found), name=served_name(found), device=device, port=port, api_key=given)
        try:
            _say("for the agent's configuration:")
            _say(f'  llm="openai/{server.model}", base_url="{server.url}"')
            _say(f'  api_key=os.environ["{KEY_VARIABLE}"]' if given else f'  api_key="{server.api_key}"')
            while server.running:
                time.sleep(0.2)
            log = last_lines(server.home / LOG)
            raise ServerFailed(f"the server ended by itself; the last lines of its log:\n{log}")
        finally:
            server.stop()


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        if os.name == "posix":  # as servers do: what was only just let go of is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or error
            raise ConfigError(f"port {port} of 127.0.0.1 cannot be had ({said}); give another with --port") from error


def _version(home: Path, agent: str, name: str | None) -> Version:
    from praison_agent_rl import registry

    known = registry.agent_named(home, agent)
    pointer = registry.current(home, known)
    chosen = name or (pointer.version if pointer else None)
    if chosen is None:
        there = ", ".join(registry.version_names(home, known))
        raise VersionError(f"no version of agent {known!r} is current; name one with --version; it has: {there}")
    return registry.read_version(home, known, chosen)


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """A block that Ctrl-C and SIGTERM end without a fault."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        _say("the server has ended")
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False)
