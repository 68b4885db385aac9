"""The servers of this process: one for each version, however many agents it answers, ended when nobody holds it.

Whoever is answered from a server holds its address: an agent, its clones, each turn under way, the way back of a swap.
When the last address is let go, the server has a few seconds to be wanted again, and then ends.
"""

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Literal

from praison_agent_rl.errors import VersionDamaged
from praison_agent_rl.records import Version
from praison_agent_rl.registry import model_of, served_name, verify
from praison_agent_rl.serving import Served, ServerAddress, start_server

Backend = Literal["transformers", "vllm"]
Start = Callable[..., Served]
"""Called as ``start(folder, name=..., device=...)``; returns a server that answers."""

_LOG = logging.getLogger(__name__)
_GRACE = 5.0
"""Seconds for which a server that nobody holds is kept: a rollback may want it again."""


class ServerPool:
    """Servers by what they serve; those that nobody holds end."""

    def __init__(self, *, grace: float = _GRACE) -> None:
        self._grace = grace
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._served: dict[Hashable, Served] = {}
        self._starting: dict[Hashable, threading.Lock] = {}
        self._free: queue.SimpleQueue[Hashable] = queue.SimpleQueue()  # a put of it may happen within another put
        self._reaper: threading.Thread | None = None

    def address(self, key: Hashable, start: Callable[[], Served]) -> ServerAddress:
        """An address of the running server for ``key``, which ``start`` starts where there is none."""
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:  # who wants it too waits here, and not for other servers
            with self._lock:
                served = self._served.get(key)
                if served is not None and served.running:
                    return served.address
            served = start()
            served.holders.when_free = functools.partial(self._free.put, key)
            with self._lock:
                self._served[key] = served
                if self._reaper is None:
                    self._reaper = threading.Thread(target=self._reap, name="praison-agent-rl-servers", daemon=True)
                    self._reaper.start()
                return served.address

    def _reap(self) -> None:
        due: dict[Hashable, float] = {}
        while True:
            try:
                key = self._free.get(timeout=self._grace / 10 if due else None)
                due[key] = time.monotonic() + self._grace
            except queue.Empty:
                pass
            for key in [key for key, at in due.items() if time.monotonic() >= at]:
                del due[key]
                self._end_if_free(key)

    def _end_if_free(self, key: Hashable) -> None:
        with self._lock:
            served = self._served.get(key)
            if served is None or len(served.holders) or os.getpid() != self._owner:
                return
            del self._served[key]
        _LOG.info("%s is not held by anybody any more and ends", served.model)
        served.stop()


_POOL = ServerPool()
"""One for the process: agents that know nothing of each other share their servers."""


def _pool() -> ServerPool:
    global _POOL
    if _POOL._owner != os.getpid():  # noqa: SLF001 - a fork has its parent's pool, with locks that nobody may open
        _POOL = ServerPool()
    return _POOL


def serve_version(
    version: Version, *, device: str = "auto", backend: Backend = "transformers", start: Start | None = None
) -> ServerAddress:
    """An address at which ``version`` answers; its ``server`` says the model's name and the key.

    Raises:
        ServerFailed: its server did not come up.
        VersionDamaged: its files are not what they were; they are read whole whenever a server is started.
        VersionError: its merged weights are not there, or (vLLM) its base is another than it was trained on.
    """
    name = served_name(version)
    if backend == "vllm":
        return _by_vllm(version, name)
    folder = model_of(version).resolve()

    def launch() -> Served:
        _check_files(version)
        return (start or start_server)(folder, name=name, device=device)

    return _pool().address((start or start_server, folder, device), launch)


def _by_vllm(version: Version, name: str) -> ServerAddress:
    from praison_agent_rl.upkeep import check_base
    from praison_agent_rl.vllm_serving import fitting_rank, rank_of, start_vllm_server

    folder = Path(version.folder)
    rank = fitting_rank(max(64, rank_of(folder / "adapter")))

    def load() -> Served:
        check_base(version, version.base)
        _check_files(version)
        start = functools.partial(start_vllm_server, version.base, max_rank=rank)
        host = _pool().address(("vllm", version.base_hash or version.base, rank), start)  # held while it loads
        return host.server.load(name, folder / "adapter", folder / "model")  # type: ignore[attr-defined, no-any-return]

    return _pool().address(("vllm", folder), load)


def _check_files(version: Version) -> None:
    if faults := verify(version):
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise VersionDamaged(
            f"{version.name} of agent {version.agent!r} is damaged and is not served: {'; '.join(faults[:5])}{more}"
        )
