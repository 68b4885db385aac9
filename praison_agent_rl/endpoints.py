"""Ask an OpenAI-compatible server which models it has, and reach those of this machine directly."""

import http.client
import json
import os
import urllib.request
from typing import Any


def list_models(url: str, api_key: str | None, *, timeout: float = 5.0) -> dict[str, dict[str, Any]]:
    """The models that an OpenAI-compatible server lists, by id, as it describes them.

    Raises:
        OSError: the server cannot be reached or refuses.
        ValueError: what it answers is not a list of models.
    """
    request = urllib.request.Request(f"{url.rstrip('/')}/models")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            answer = json.load(reply)
    except http.client.HTTPException as error:  # no OSError, though what is there is no HTTP server
        raise OSError(f"{url} does not speak HTTP: {type(error).__name__}: {error}") from error
    try:
        return {str(model["id"]): dict(model) for model in answer["data"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{url}/models did not answer with a list of models: {str(answer)[:200]}") from error


def keep_loopback_off_proxies() -> None:
    """Let this process reach 127.0.0.1 directly where it has a proxy; a proxy cannot, and would be shown the keys."""
    if not any(name.lower() in ("http_proxy", "all_proxy") for name in os.environ):
        return
    for name in ("NO_PROXY", "no_proxy"):
        kept = [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
        if "*" not in kept:
            os.environ[name] = ",".join(dict.fromkeys([*kept, "127.0.0.1", "localhost"]))
