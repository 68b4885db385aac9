"""The servers of this process: one for each version, however many agents it answers, ended when nobody holds it.

Whoever is answered from a server holds its address: an agent, its clones, each turn under way, the way back of a swap.
When the last address is let go, the server has a few seconds to be wanted again, and then ends.
"""

import functools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from praison_agent_rl.checksums import faults_of, in_short
from praison_agent_rl.errors import PraisonRLError, VersionDamaged
from praison_agent_rl.records import Plan, Version
from praison_agent_rl.registry import MODEL, model_of, served_name
from praison_agent_rl.runs import read_record
from praison_agent_rl.serving import Served, ServerAddress, start_server

Backend = Literal["transformers", "vllm"]
Start = Callable[..., Served]
"""Called as ``start(folder, name=..., device=...)``; returns a server that answers."""

_LOG = logging.getLogger(__name__)
_GRACE = 5.0
"""Seconds for which a server that nobody holds is kept: a rollback may want it again."""
_SHARED = 1.0
"""Seconds for which a failure to start is everybody's."""
_RANK = 64
"""Adapters of up to this rank share a vLLM server."""


@dataclass
class _Starts:
    """The attempts at one server, one after another."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    failed_at: float = -math.inf
    failure: tuple[type[PraisonRLError], str] = (PraisonRLError, "")
    """The last one; not the error itself, whose traceback would hold addresses."""


class ServerPool:
    """Servers by what they serve; those that nobody holds end."""

    def __init__(self, *, grace: float = _GRACE) -> None:
        self._grace = grace
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._served: dict[Hashable, Served] = {}
        self._starts: dict[Hashable, _Starts] = {}
        self._free: queue.SimpleQueue[Hashable] = queue.SimpleQueue()  # a put of it may happen within another put
        self._reaper: threading.Thread | None = None

    def address(self, key: Hashable, start: Callable[[], Served]) -> ServerAddress:
        """An address of the running server for ``key``, which ``start`` starts where there is none.

        Who waited for an attempt of somebody else, or comes just after it, shares its failure: many agents that lose
        their server do not all start it.
        """
        with self._lock:
            starts = self._starts.setdefault(key, _Starts())
        with starts.lock:  # who wants it too waits here, and not for other servers
            with self._lock:
                served = self._served.get(key)
                if served is not None and served.running:
                    return served.address
            if time.monotonic() - starts.failed_at < _SHARED:
                kind, said = starts.failure
                raise kind(said)
            try:
                served = start()
            except PraisonRLError as error:
                starts.failure, starts.failed_at = (type(error), str(error)), time.monotonic()
                raise
            return self._keep(key, served)

    def _keep(self, key: Hashable, served: Served) -> ServerAddress:
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
    version: Version,
    *,
    device: str = "auto",
    backend: Backend = "transformers",
    vllm_options: Sequence[str] = (),
    start: Start | None = None,
) -> ServerAddress:
    """An address at which ``version`` answers; its ``server`` says the model's name and the key.

    Raises:
        ServerFailed: its server did not come up.
        VersionDamaged: its files are not what they were; they are read whole whenever a server is started.
        VersionError: its merged weights are not there, or (vLLM) what it was trained on is not there or another now, or
            it has an adapter that vLLM does not serve.
    """
    name = served_name(version)
    if backend == "vllm":
        return _by_vllm(version, name, tuple(vllm_options))
    folder = model_of(version).resolve()

    def launch() -> Served:
        _check_files(version)
        return (start or start_server)(folder, name=name, device=device)

    return _pool().address((start or start_server, folder, device), launch)


def serve_base(
    version: Version,
    *,
    device: str = "auto",
    backend: Backend = "transformers",
    vllm_options: Sequence[str] = (),
    start: Start | None = None,
) -> ServerAddress:
    """An address at which the weights answer that ``version`` was trained on.

    Raises:
        ServerFailed: their server did not come up.
        ModelError: they are not on this machine any more.
        VersionError: they are others now.
    """
    if backend == "vllm":
        return _vllm_of(version, Path(version.folder) / "adapter", tuple(vllm_options))

    def launch() -> Served:
        return (start or start_server)(_checked_base(version).resolve(), name=base_name(version), device=device)

    return _pool().address((start or start_server, base_name(version), version.base_hash, device), launch)


def base_name(version: Version) -> str:
    """Under which name a server offers the weights that the version was trained on, where it is not vLLM's."""
    return f"{served_name(version).rpartition('-')[0]}-base"


def _by_vllm(version: Version, name: str, options: tuple[str, ...]) -> ServerAddress:
    from praison_agent_rl.stacked_adapters import lineage, one_adapter
    from praison_agent_rl.vllm_servers.serving import check_servable

    folder = Path(version.folder)

    def load() -> Served:
        versions = lineage(version)
        for each in versions:
            _check_files(each, without=f"{MODEL}/")  # the merged weights have no part in it
            check_servable(Path(each.folder) / "adapter")
        adapter = one_adapter(versions)
        host = _vllm_of(versions[0], adapter, options)  # held while it loads
        return host.server.load(name, adapter, folder / MODEL)  # type: ignore[attr-defined, no-any-return]

    return _pool().address(("vllm", folder, options), load)


def _vllm_of(version: Version, adapter: Path, options: tuple[str, ...]) -> ServerAddress:
    """An address of the vLLM server for the weights that the version was trained on, and for such adapters."""
    from praison_agent_rl.models import plain_weights
    from praison_agent_rl.vllm_servers.serving import fitting_rank, rank_of, start_vllm_server

    base = plain_weights(str(_checked_base(version)))
    # where the options have a rank, vLLM takes theirs, as the later of two
    rank = _RANK if "--max-lora-rank" in options else fitting_rank(max(_RANK, rank_of(adapter)))
    start = functools.partial(start_vllm_server, base, max_rank=rank, options=options)
    return _pool().address(("vllm", version.base_hash or version.base, rank, options), start)


def _checked_base(version: Version) -> Path:
    """Where the weights lie that the version was trained on, which are still the same."""
    from praison_agent_rl.upkeep import check_base

    check_base(version, version.base)
    if (place := Path(version.base)).exists():
        return place
    from huggingface_hub import snapshot_download  # it has a hub name, and is in the local cache: it was just read

    plan = read_record(Path(version.folder) / "plan.json", Plan)
    return Path(snapshot_download(version.base, revision=plan.config.get("revision"), local_files_only=True))


def _check_files(version: Version, *, without: str | None = None) -> None:
    if faults := faults_of(Path(version.folder), without=without):
        raise VersionDamaged(
            f"{version.name} of agent {version.agent!r} is damaged and is not served: {in_short(faults)}"
        )
