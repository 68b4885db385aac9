"""Run the gateway: it listens, follows what is decided, and drains when it is told to end."""

import asyncio
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from praison_agent_rl.backoff import Backoff
from praison_agent_rl.errors import ConfigError, MissingExtra, ServerFailed
from praison_agent_rl.gateway.lines import Open
from praison_agent_rl.gateway.names import Target
from praison_agent_rl.gateway.offering import EVERY, Offering

_log = logging.getLogger(__name__)

DRAIN = 60.0
"""Seconds that requests under way get when the gateway is to end."""
_WAITING_CONNECTIONS = 2048


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Who may ask, and how patient the gateway is."""

    key: str = field(repr=False)
    drain: float = DRAIN
    """Seconds that requests under way get when it is to end."""
    patience: float = 10.0
    """Seconds for which a request waits for a server that has died."""
    every: float = EVERY
    """Seconds between two looks at what was decided."""
    tell: Callable[[str], None] = lambda text: None
    """Hears of swaps, deaths and failures; what goes wrong in it ends nothing."""
    new_backoff: Callable[[], Backoff] = Backoff


class Gateway:
    """Answers on ``listener`` in a thread of its own, within ``with``; leaving it drains."""

    def __init__(self, targets: Sequence[Target], open_: Open, listener: socket.socket, terms: Terms) -> None:
        try:
            import uvicorn

            from praison_agent_rl.gateway.front import Front
        except ImportError as error:
            raise MissingExtra(f'serving needs {error.name}: pip install "praison-agent-rl[train]"') from error
        self.offering = Offering(targets, open_, tell=partial(_tell, terms.tell), new_backoff=terms.new_backoff)
        self.url = f"http://{_place_of(listener)}/v1"
        self._front = Front(self.offering, key=terms.key, patience=terms.patience)
        self._listener = listener
        self._every = terms.every
        config: Any = uvicorn.Config(
            self._front,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(terms.drain),
        )
        self._server: Any = uvicorn.Server(config)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="praison-agent-rl-gateway", daemon=True)

    def __enter__(self) -> "Gateway":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raise ServerFailed if it has ended by a fault, or if no name could be answered from the beginning."""
        if not self._thread.is_alive():
            raise ServerFailed(f"the gateway has ended by itself: {self._failure!r}") from self._failure
        faults = self.offering.stillborn()
        if faults:
            raise ServerFailed("\n".join(faults))

    def stop(self) -> None:
        """Take no more requests, and wait for those under way as long as was said; it is safe to call this twice."""
        self._server.should_exit = True
        self._thread.join()

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001 - whoever waits for the thread is told
            self._failure = error

    async def _run(self) -> None:
        following = asyncio.create_task(self.offering.follow(every=self._every))
        following.add_done_callback(self._end)
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            following.cancel()
            await asyncio.wait([following])
            await self._front.close()

    def _end(self, following: "asyncio.Task[None]") -> None:
        if not following.cancelled():
            self._failure = following.exception()
        self._server.should_exit = True


def listen(host: str, port: int | None) -> socket.socket:
    """Listen on ``port`` of ``host``, or on a free one; raises ConfigError where it cannot be had."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port or 0), family=kind, backlog=_WAITING_CONNECTIONS)
    except (OSError, OverflowError, TypeError, UnicodeError) as error:  # the others: no port, no name of a host
        number = getattr(error, "errno", None)
        said = os.strerror(number) if number and number > 0 else error  # Python adds the address to it
        place = f"port {port} of {host}" if port else f"a port of {host}"
        raise ConfigError(f"{place} cannot be had ({said}); give another with --port or --host") from error


def _tell(tell: Callable[[str], None], text: str) -> None:
    try:
        tell(text)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a full disk, a pipe that nobody reads (rich ends with it)
        _log.warning("%s (which could not be told: %r)", text, error)


def _place_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
