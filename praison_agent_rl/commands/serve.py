"""The verb ``praison-agent-rl serve``: one address for agents and versions, in the foreground, for agents elsewhere."""

import ipaddress
import math
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.server_pool import Backend

if TYPE_CHECKING:
    from praison_agent_rl.gateway.lines import Open
    from praison_agent_rl.gateway.running import Gateway

KEY_VARIABLE = "PRAISON_AGENT_RL_KEY"
"""Variable of the environment with the key that clients send; without it one is made."""
_FILES = 65_536
console = Console(soft_wrap=True, emoji=False)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where it listens, and what runs the models."""

    home: Path
    """Holds ``versions/``."""
    host: str = "127.0.0.1"
    port: int | None = None
    """A free one by default."""
    backend: str = "transformers"
    """``transformers`` or ``vllm``."""
    device: str = "auto"
    """Of ``transformers serve``."""
    vllm_options: str = ""
    """Further arguments of ``vllm serve``, as in a shell."""
    drain: float = 60.0
    """Seconds that requests under way get when it is told to end."""


def named(agents: Sequence[str], version: str | None) -> list[str]:
    """The agents that are to be served; ``version`` is of the only one.

    Raises:
        ConfigError: there are several.
    """
    if version is None:
        return list(agents)
    if len(agents) != 1:
        raise ConfigError(
            f"--version {version} is of one agent; of several, write AGENT@{version} for each that it is of"
        )
    return [f"{agents[0]}@{version}"]


def serve_agents(words: Sequence[str], given: ServeOptions) -> None:
    """Serve agents (``AGENT``: whatever is current; ``AGENT@v3``: always that) until Ctrl-C or SIGTERM, and drain.

    Raises:
        VersionError: there is no such agent or version.
        ConfigError: an option is wrong, or the address cannot be had, or has no key and is not of this machine alone.
        ServerFailed: no server came up.
    """
    from praison_agent_rl.gateway.names import find_targets
    from praison_agent_rl.gateway.running import Gateway, Terms, listen

    key, open_ = _key_for(given), _opener(given)
    if not (math.isfinite(given.drain) and given.drain >= 0):
        raise ConfigError(f"--drain {given.drain:g} is no time; give seconds, as 60")
    _allow_all_connections()
    targets = find_targets(given.home, words)
    terms = Terms(key=key or secrets.token_urlsafe(24), drain=given.drain, tell=_say)
    with _ended_as_by_ctrl_c(), listen(given.host, given.port) as listener:
        _say(f"starting the servers of {', '.join(target.name for target in targets)}; Ctrl-C ends them")
        with Gateway(targets, open_, listener, terms) as gateway:
            _wait(gateway, until_tried=True)
            _say_how_to_ask(gateway, None if key else terms.key)
            try:
                _wait(gateway)
            except KeyboardInterrupt:
                _mention(f"no more requests are taken; those under way get up to {given.drain:g} s")
                raise


def _key_for(given: ServeOptions) -> str | None:
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"the key in {KEY_VARIABLE} is empty, or no HTTP header can carry it: it begins or ends with a space, or "
            "holds a character that is not of ASCII or cannot be seen"
        )
    if _is_of_this_machine(given.host):
        return key
    if key is None:
        raise ConfigError(
            f"--host {given.host} lets other machines ask, so the key must be yours: set {KEY_VARIABLE} to one"
        )
    _say(f"warning: {given.host} is reached by other machines over plain HTTP, which shows the key and all texts;")
    _say("put a proxy with TLS before it, or keep to a network that you trust")
    return key


def _is_of_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _opener(given: ServeOptions) -> "Open":
    from praison_agent_rl.server_pool import serve_base, serve_version

    try:
        words = shlex.split(given.vllm_options)
    except ValueError as error:
        raise ConfigError(f"--vllm-options {given.vllm_options!r} cannot be read as in a shell: {error}") from error
    if given.backend not in ("transformers", "vllm"):
        raise ConfigError(f"--backend {given.backend!r} is none; give transformers or vllm")
    if words and given.backend != "vllm":
        raise ConfigError("--vllm-options are for --backend vllm")
    backend: Backend = "vllm" if given.backend == "vllm" else "transformers"
    return lambda weights: (serve_base if weights.is_base else serve_version)(
        weights.version, device=given.device, backend=backend, vllm_options=words
    )


def _allow_all_connections() -> None:
    """Let this process have `_FILES` open, if the system does: a request takes two, and the default is 1024."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # macOS has a further limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _wait(gateway: "Gateway", *, until_tried: bool = False) -> None:
    while True:
        gateway.check()
        if until_tried and gateway.offering.tried:
            return
        time.sleep(0.1)


def _say_how_to_ask(gateway: "Gateway", made: str | None) -> None:
    _say("for the agent's configuration:")
    for name in gateway.offering.names:
        _say(f'  llm="openai/{name}", base_url="{gateway.url}"')
    _say(f'  api_key="{made}"' if made else f'  api_key=os.environ["{KEY_VARIABLE}"]')


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """A block that Ctrl-C and SIGTERM end without a fault."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        _mention("the server has ended")
    finally:
        signal.signal(signal.SIGTERM, before)


def _mention(text: str) -> None:
    with suppress(OSError, SystemExit):  # the disk is full, or nobody reads any more (where rich ends the process)
        _say(text)


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False)
