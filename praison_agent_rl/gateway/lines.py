"""Keep the server of one set of weights alive: it is started, and again whenever it has died, with pauses that grow."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from praison_agent_rl.backoff import Backoff
from praison_agent_rl.gateway.names import Weights
from praison_agent_rl.serving import ServerAddress

T = TypeVar("T")
Open = Callable[[Weights], ServerAddress]
"""Starts a server where there is none, and waits until it answers."""

_log = logging.getLogger(__name__)
_LOOK = 0.1
"""Seconds between two looks at whether a server is alive."""
_LEAST_WAIT = 2
"""Seconds after which who was refused may ask again, at least: no server is up sooner."""


class Line:
    """One set of weights, and the server that answers with them; it is kept up until it is closed."""

    def __init__(self, weights: Weights, open_: Open, *, tell: Callable[[str], None], backoff: Backoff) -> None:
        self.weights = weights
        self.fault: str | None = None
        """Why there is no server, where the last attempt at one failed."""
        self.attempts = 0
        """How often a server was started, or tried to."""
        self.was_up = False
        """Whether it has ever answered."""
        self._open = open_
        self._tell = tell
        self._backoff = backoff
        self._address: ServerAddress | None = None
        self._keeping = asyncio.create_task(self._keep())

    @property
    def address(self) -> ServerAddress | None:
        """Where it answers; the server stays for as long as anybody holds this."""
        return self._address if self._address is not None and self._address.server.running else None

    @property
    def retry_after(self) -> int:
        """Seconds after which it is worth asking again."""
        return max(_LEAST_WAIT, math.ceil(self._backoff.seconds_left))

    def close(self) -> None:
        """Keep the server no longer; it ends when the requests on it have."""
        self._keeping.cancel()
        self._address = None

    async def _keep(self) -> None:
        while True:
            if self.address is None:
                if self._address is not None:
                    self._tell(f"the server of {self.weights.model} has ended and is started again")
                self._address = None
                await asyncio.sleep(self._backoff.seconds_left)
                await self._bring_up()
            await asyncio.sleep(_LOOK)

    async def _bring_up(self) -> None:
        self.attempts += 1
        with self._backoff.attempt():
            try:
                self._address = await in_thread(lambda: self._open(self.weights))
                self.fault, self.was_up = None, True
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again, and health says it
                said, self.fault = self.fault, str(error)
                if self.fault != said:
                    self._tell(f"{self.weights.model} is not served, and is tried again. What failed: {self.fault}")
            else:
                if self.attempts > 1:
                    self._tell(f"{self.weights.model} is up again")


async def in_thread(call: Callable[[], T]) -> T:
    """The result of ``call``, which is left alone where nobody waits any more: no end of the process waits for it."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            try:
                value = call()
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, value, None)

    threading.Thread(target=work, name="praison-agent-rl-start", daemon=True).start()
    return await result
