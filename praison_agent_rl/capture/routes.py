"""Keep each turn of a swapped agent on one model: where a turn's requests go is settled when it begins.

While an agent is swapped its attributes change one by one, and a turn reads them at several moments. So a turn takes
its route at its beginning, and its requests are sent there at the place where the framework hands them to a client,
whatever they were made of. A share of the turns can go to another model than the others in the same way.
"""

import contextlib
import contextvars
import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from praison_agent_rl.swap import Route, asks_for, home_route, model_names, route_of

CANARY = "_rl_canary"
"""Attribute of an agent some of whose turns go to a candidate."""
FOLLOWS = "_rl_attachment"
"""Attribute of an agent that is pointed at its versions, so that swaps come while it works."""

_ATTRIBUTES = ("_rl_route", CANARY, FOLLOWS)

_PINNED: "contextvars.ContextVar[Pin | None]" = contextvars.ContextVar("praison_agent_rl_pin", default=None)
"""The innermost turn whose requests go where it says."""

_KEPT_PROVIDERS = ("openai", "hosted_vllm")
_PLACE = (
    *("base_url", "api_base", "api_key", "api_version", "organization", "custom_llm_provider", "headers"),
    *("extra_headers", "fallbacks", "client"),
)
"""Where a litellm request goes and how it gets in; none of it may reach another server."""


@dataclass(frozen=True)
class Canary:
    """A share of an agent's turns for a candidate, as long as the others are answered from where they were."""

    stable: Route | None
    candidate: Route
    share: float

    def takes(self, key: str) -> bool:
        """Whether the turns of ``key`` (a session, or a turn that is of none) go to the candidate; always the same."""
        digest = hashlib.sha256(f"{self.candidate.model}\0{key}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < self.share * 2**64


class Pin:
    """The route of one turn. It is let go of when the turn ends: copies of its context may live for ever."""

    def __init__(self, owner: Any, route: Route | None, home: Route | None) -> None:
        self.owner: weakref.ref[Any] | None = weakref.ref(owner)
        self.route = route
        self.home = home
        """What it asks where there is no route, on the OpenAI client."""

    def close(self) -> None:
        """The turn is over."""
        self.owner = self.route = self.home = None


def is_routed(owner: Any) -> bool:
    """Whether a turn of ``owner`` that begins now may need a pin."""
    return _PINNED.get() is not None or any(name in vars(owner) for name in _ATTRIBUTES)


def pin_turn(owner: Any) -> Pin | None:
    """The pin of a turn of ``owner`` that begins now; None where nothing is to be kept.

    A turn of an agent within a turn of its own stays where that one is.
    """
    outer = _PINNED.get()
    if outer is not None and outer.owner is not None and outer.owner() is owner:
        return outer
    state = vars(owner)
    route, canary = route_of(owner), state.get(CANARY)
    # a copy of the agent that was pointed elsewhere has the attribute too, and no part in it
    if canary is not None and canary.stable is route:
        session = state.get("_session_id")
        if canary.takes(os.urandom(8).hex() if session is None else f"session {session}"):
            return Pin(owner, canary.candidate, None)
    home = home_route(owner) if route is None and FOLLOWS in state else None
    return None if route is None and home is None and outer is None else Pin(owner, route, home)


def current_pin() -> Pin | None:
    """The pin of the turn that the running code belongs to."""
    return _PINNED.get()


@contextlib.contextmanager
def pinned(pin: Pin | None, *, whole: bool = True) -> Iterator[None]:
    """A block of the turn of ``pin``: all of it, or one part of several."""
    if pin is None or pin is _PINNED.get():
        yield
        return
    token = _PINNED.set(pin)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a collected coroutine ends in another context
            _PINNED.reset(token)
        if whole:
            pin.close()


def sent_there(llm: Any, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters of a litellm request of the running turn, for where that turn goes; None if they stay."""
    pin = _PINNED.get()
    owner = pin.owner and pin.owner() if pin is not None else None
    if pin is None or owner is None or pin.route is None or not asks_for(owner, llm):
        return None
    provider = str(params.get("model")).partition("/")[0]
    provider = provider if provider in _KEPT_PROVIDERS else "openai"
    kept = {key: value for key, value in params.items() if key not in _PLACE}
    url = str(pin.route.base_url)  # a plain text: litellm may remember it
    place = {"base_url": url, "api_base": url, "api_key": pin.route.api_key}  # Responses requests read the second only
    return {**kept, "model": f"{provider}/{pin.route.model}", **place}


def route_for(client: Any, model: object) -> Route | None:
    """Where a request for ``model`` by the framework's OpenAI ``client`` has to go instead, if anywhere."""
    pin = _PINNED.get()
    owner = pin.owner and pin.owner() if pin is not None else None
    if pin is None or owner is None or not asks_for(owner, client):
        return None
    names = model_names(owner)
    if pin.route is not None:
        known = str(model) in names or str(model) == pin.route.model
        return pin.route if known else None  # a fallback model, say, stays what it is
    if pin.home is None or (client is pin.home.client and str(model) not in names - {pin.home.model}):
        return None
    return pin.home
