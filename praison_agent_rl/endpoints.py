"""Ask an OpenAI-compatible server which models it has, and reach those of this machine directly."""

import http.client
import json
import os
import urllib.parse
import urllib.request
from typing import Any


def list_models(url: str, api_key: str | None, *, timeout: float = 5.0) -> dict[str, dict[str, Any]]:
    """The models that an OpenAI-compatible server lists, by id, as it describes them.

    Raises:
        OSError: the server cannot be reached or refuses.
        ValueError: what it answers is not a list of models, or no header can carry the key.
    """
    request = urllib.request.Request(f"{url.rstrip('/')}/models")
    show_key(request, api_key)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            answer = json.load(reply)
    except http.client.HTTPException as error:  # no OSError, though what is there is no HTTP server
        raise OSError(f"{url} does not speak HTTP: {type(error).__name__}: {error}") from error
    try:
        return {str(model["id"]): dict(model) for model in answer["data"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{url}/models did not answer with a list of models: {str(answer)[:200]}") from error


def why_no_address(url: str) -> str | None:
    """What is wrong with the base URL of a server; None if nothing is. No password or key that is in it is shown.

    >>> why_no_address("localhost:8000")
    "is 'localhost:8000', which is no address; give it as http://host:port"
    """
    if any(sign in url for sign in "@?#"):
        return "holds a user, a query or a fragment, and would be kept and shown with it; give host and port alone"
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        known = False
    fits = known and url.isprintable() and not any(map(str.isspace, url))
    return None if fits else f"is {url!r}, which is no address; give it as http://host:port"


def show_key(request: urllib.request.Request, api_key: str | None) -> None:
    """Have ``request`` carry the key to the address that it names, and to no other that a server sends it on to.

    Raises:
        ValueError: no header can carry the key; the message does not show it.
    """
    if not api_key:
        return
    if not (api_key.isascii() and api_key.isprintable()):  # http.client would quote it, and it would be logged
        raise ValueError("the API key holds a line break or another character that no HTTP header can carry")
    request.add_unredirected_header("Authorization", f"Bearer {api_key}")


def keep_loopback_off_proxies() -> None:
    """Let this process reach 127.0.0.1 directly where it has a proxy; a proxy cannot, and would be shown the keys."""
    if not any(name.lower() in ("http_proxy", "all_proxy") for name in os.environ):
        return
    for name in ("NO_PROXY", "no_proxy"):
        kept = [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
        if "*" not in kept:
            os.environ[name] = ",".join(dict.fromkeys([*kept, "127.0.0.1", "localhost"]))
