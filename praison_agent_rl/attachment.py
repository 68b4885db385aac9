"""Point a live agent at its current version and let it follow: what is promoted or rolled back elsewhere reaches it.

An agent of a service has an `Attachment`. The new version's server comes up first, then the agent is pointed at it, and
the turns that are under way end where they began (`capture.routes`); what nobody holds any more then ends
(`server_pool`). Which version is current is decided in `registry`, and only followed here.
"""

import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from praison_agent_rl.backoff import Backoff
from praison_agent_rl.canary import candidate_of, check_share, is_recorded
from praison_agent_rl.capture import install_taps
from praison_agent_rl.capture.routes import CANARY, FOLLOWS, Canary
from praison_agent_rl.errors import AgentError, ConfigError
from praison_agent_rl.records import Pointer, Version
from praison_agent_rl.registry import agent_folder, current, read_version, served_name
from praison_agent_rl.runs import HOME
from praison_agent_rl.server_pool import Backend, Start, serve_version
from praison_agent_rl.serving import ServerAddress
from praison_agent_rl.swap import Route, check_swappable, route_of, server_of, swap_back, swap_model

_LOG = logging.getLogger(__name__)
_EVERY = 1.0
"""Seconds between two looks at which version is current."""
_LONGEST = 86_400.0
"""Seconds between two looks, at most: a day."""


class Attachment:
    """An agent that is answered by its current version; it lives as long as the agent does."""

    def __init__(
        self,
        agent: Any,
        home: Path,
        name: str,
        *,
        serve: Callable[[Version], ServerAddress] = serve_version,
        canary: float | None = None,
        candidate: str | None = None,
    ) -> None:
        self.home = home
        self.name = name
        """The agent's name among those that have versions."""
        self.version: str | None = None
        """What answers; None is the model that the agent was built with, or one that somebody else put there."""
        self.candidate: str | None = None
        """What answers the share of the canary."""
        self._agent = weakref.ref(agent)
        self.share = canary
        """Of its runs, for a candidate; None is no canary."""
        self.every = _EVERY
        """Seconds between two looks, while it watches."""
        self._wanted = candidate
        self._serve = serve
        self._looked = False
        """Whether it has seen what is current; only from then on is another pointer a decision."""
        self._pointer: Pointer | None = None
        self._pointed: tuple[str | None, str | None] = (None, None)
        """The version that it last pointed the agent at, and the name of the model there."""
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._watcher: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Attachment: {self}>"

    def __str__(self) -> str:
        answers = self.version or "the model that it was built with"
        share = f", {self.candidate} answers {self.share:.0%} of its runs" if self.candidate else ""
        return f"agent {self.name!r}: {answers} answers{share}; versions: {agent_folder(self.home, self.name)}"

    @property
    def watching(self) -> bool:
        """Whether it follows by itself."""
        return self._watcher is not None and self._watcher.is_alive()

    def refresh(self) -> str | None:
        """Follow what is current now, and return what answers; None is the model that the agent was built with.

        The agent is pointed elsewhere only where something was decided since the last look, or its server has died,
        which is started again: an improvement that was swapped in and not promoted stays.

        Raises:
            PraisonRLError: a version is not there, or could not be served; the agent is answered as before.
        """
        with self._lock:
            agent = self._agent()
            if agent is None:
                return None
            pointer = current(self.home, self.name)
            decided = pointer != self._pointer
            if self._looked and decided:
                self._wanted = None  # a canary ends with the next decision
            if pointer is not None and (decided or _is_dead(agent)):
                self._point(agent, pointer.version)
                self._pointed = (pointer.version, _model_of(agent))
            version, model = self._pointed
            self.version = version if _model_of(agent) == model else None
            self._pointer, self._looked = pointer, True
            self._try(agent, pointer)
            return self.version

    def end_canary(self) -> None:
        """Let no further run go to the candidate."""
        with self._lock:
            self.share = None
            self._drop_canary()

    def stop(self) -> None:
        """Follow no longer; the agent stays with what answers it."""
        self._stopped.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def detach(self) -> None:
        """Follow no longer, and let the model answer that the agent was built with."""
        self.stop()
        with self._lock:
            agent = self._agent()
            if agent is not None and vars(agent).get(FOLLOWS) is self:
                self._drop_canary()
                swap_back(agent)
                del vars(agent)[FOLLOWS]
            self.version = None

    def watch(self, every: float = _EVERY) -> None:
        """Follow by itself, looking each ``every`` seconds, until `stop` or the end of the agent."""
        check_seconds(every)
        if not self.watching:
            self._stopped.clear()
            self.every = every
            self._watcher = threading.Thread(
                target=self._watch, name=f"praison-agent-rl-follows-{self.name}", daemon=True
            )
            self._watcher.start()

    def _watch(self) -> None:
        backoff, failed, tried_for, said = Backoff(), False, self._pointer, ""
        while not self._stopped.wait(self.every) and self._agent() is not None:
            try:
                seen = current(self.home, self.name)
                if not (failed or seen != self._pointer or self._has_lost_a_server()):
                    self.refresh()  # nothing is started, but somebody else may have pointed the agent elsewhere
                elif seen != tried_for or not backoff.seconds_left:
                    tried_for = seen
                    with backoff.attempt():
                        self.refresh()
                    failed, said = False, ""
            except Exception as error:  # noqa: BLE001 - a thread of ours may not end of itself and be missed by nobody
                failed = True
                if str(error) != said:
                    said = str(error)
                    _LOG.warning("%s; it is tried again. What failed: %s", self, said)

    def _has_lost_a_server(self) -> bool:
        agent = self._agent()
        if agent is None:
            return False
        canary = vars(agent).get(CANARY)
        return _is_dead(agent) or (isinstance(canary, Canary) and not canary.candidate.server.running)

    def _point(self, agent: Any, target: str | None) -> None:
        if target is None:
            if route_of(agent) is not None:
                self._drop_canary()
                swap_back(agent)
                _LOG.info("agent %r is answered by the model that it was built with", self.name)
        else:
            version = read_version(self.home, self.name, target)
            if not _is_answered_by(agent, version):
                _swap(agent, self._serve(version))
                _LOG.info("agent %r is answered by %s", self.name, target)

    def _try(self, agent: Any, pointer: Pointer | None) -> None:
        """Let the candidate have its share, if there is one."""
        found = None
        if self.share is not None:
            found = candidate_of(self.home, self.name, pointer, wanted=self._wanted)
        if found is None:
            self._drop_canary()
            return
        share, stable, now = self.share or 0.0, route_of(agent), vars(agent).get(CANARY)
        if isinstance(now, Canary) and now.candidate.model == served_name(found) and now.candidate.server.running:
            route = now.candidate
        else:
            route, now = _route_to(self._serve(found)), None
        if now != Canary(stable, route, share):
            setattr(agent, CANARY, Canary(stable, route, share))
            _LOG.info("agent %r: %s answers %.0f %% of its runs", self.name, found.name, 100 * share)
        self.candidate = found.name

    def _drop_canary(self) -> None:
        agent = self._agent()
        if agent is not None and vars(agent).pop(CANARY, None) is not None:
            _LOG.info("agent %r: the canary of %s is over", self.name, self.candidate)
        self.candidate = None


def check_seconds(every: Any) -> None:
    """Raise ConfigError for a time between two looks that is none."""
    number = isinstance(every, (int, float)) and not isinstance(every, bool) and math.isfinite(every)
    if not number or not 0 < every <= _LONGEST:
        raise ConfigError(
            f"watch={every!r} is no time between two looks; give True, or seconds above 0 and up to {_LONGEST:g}"
        )


def attach(
    agent: Any,
    *,
    watch: bool | float = False,
    canary: float | None = None,
    candidate: str | None = None,
    home: str | Path = HOME,
    name: str | None = None,
    device: str = "auto",
    backend: Backend = "transformers",
    vllm_options: Sequence[str] = (),
    start: Start | None = None,
) -> Attachment:
    """Let ``agent`` be answered by its current version, whose server is started if need be; call it at start-up.

    ``watch=True`` follows what is promoted or rolled back from then on, within a second (a number: within as many
    seconds); else `Attachment.refresh` does. Where there is no version the agent keeps its model, and a warning says
    so. With ``canary=0.1`` a tenth of its runs goes to the newest version that passed the gate and was made since the
    current one was promoted, or to ``candidate="v4"``, which may be any, a session always to the same of the two; the
    next promotion or rollback ends that. The files of a version are verified before it is served. ``name`` is the
    agent's own by default. Agents of one process share the servers of their versions, and with ``backend="vllm"``
    versions of one base share one server, which is started with ``vllm_options`` too; processes do not: see
    ``praison-agent-rl serve``. A watch starts a server that has died again at once; where that fails, or it dies again,
    after 1, 2, 4 ... 60 s. A process that forks attaches afterwards, and a clone of an agent stays with the version
    that it was made with.
    ``start`` is called instead of `serving.start_server`. An agent that was attached before is attached anew.

    Raises:
        PraisonRLError: something given is wrong, or a server did not come up; the agent is answered as before.
    """
    check_swappable(agent)
    if backend not in ("transformers", "vllm"):
        raise ConfigError(f"backend={backend!r} is none; give 'transformers' or 'vllm'")
    check_share(canary, candidate)
    if watch is not False:
        check_seconds(_EVERY if watch is True else watch)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"name={name!r} is no name of an agent; give a text")
    if not (name or getattr(agent, "name", None)):
        raise AgentError("the agent has no name by which its versions could be found; pass name=")
    place = Path(home).absolute()
    made = Attachment(
        agent,
        place,
        name or str(agent.name),
        serve=partial(serve_version, device=device, backend=backend, vllm_options=vllm_options, start=start),
        canary=canary,
        candidate=candidate,
    )
    install_taps()
    _begin(made, agent)
    _say_what_is_missing(made, agent)
    if watch is not False:
        made.watch(_EVERY if watch is True else float(watch))
    return made


def attachment_of(agent: Any) -> Attachment | None:
    """What points ``agent`` at its versions, if anything does."""
    found: Attachment | None = vars(agent).get(FOLLOWS)
    return found


def _begin(made: Attachment, agent: Any) -> None:
    before = attachment_of(agent)
    watched = before is not None and before.watching
    if before is not None:
        before.stop()
    was_away = route_of(agent) is not None
    setattr(agent, FOLLOWS, made)
    try:
        made.refresh()
    except BaseException:  # a start= that was given may raise anything
        if before is not None:
            setattr(agent, FOLLOWS, before)
            if watched:
                before.watch(before.every)
        else:
            del vars(agent)[FOLLOWS]
            if not was_away:
                swap_back(agent)  # only the candidate's server failed
        raise


def _say_what_is_missing(made: Attachment, agent: Any) -> None:
    if current(made.home, made.name) is None:
        place = agent_folder(made.home, made.name)
        _LOG.warning("agent %r has no promoted version in %s and keeps its model", made.name, place)
    if made.share is None:
        return
    if made.candidate is None:
        _LOG.warning(
            "agent %r has no version to try: none that passed the gate was made since the last promotion or rollback; "
            "candidate= names one",
            made.name,
        )
    elif not is_recorded(agent):
        _LOG.warning(
            "agent %r is not recorded, so what its two versions answer cannot be compared: agent.record()", made.name
        )


def _model_of(agent: Any) -> str | None:
    route = route_of(agent)
    return route.model if route else None


def _is_dead(agent: Any) -> bool:
    served = server_of(agent)
    return served is not None and not served.running


def _is_answered_by(agent: Any, version: Version) -> bool:
    """Whether the agent is there already, whoever brought it there."""
    served, route = server_of(agent), route_of(agent)
    if served is None or route is None or not served.running:
        return False
    weights = (Path(version.folder) / "model").resolve()
    return bool(route.model == served_name(version) and served.folder == weights)


def _swap(agent: Any, address: ServerAddress) -> None:
    served = address.server
    swap_model(agent, served.model, base_url=address, api_key=served.api_key, server=served)


def _route_to(address: ServerAddress) -> Route:
    served = address.server
    return Route(served.model, address, served.api_key, served)
