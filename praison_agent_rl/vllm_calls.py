"""One request to a vLLM server, repeated where the connection broke; what the answer means is not decided here."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any


class Refused(Exception):
    """The server answered, and refused."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"HTTP {status}: {said}")
        self.status = status
        self.said = said


def ask(
    url: str, body: dict[str, Any], *, api_key: str | None, timeout: float, pauses: Iterable[float] = ()
) -> dict[str, Any]:
    """What the server answers to a POST of ``body``; an answer that is no JSON object counts as an empty one.

    ``timeout`` and ``pauses`` are in seconds; after each pause a connection that was refused or broken is tried again.

    Raises:
        Refused: it answered with an error.
        OSError: it cannot be reached, or did not answer in time.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    left = iter(pauses)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return _as_object(reply.read())
        except urllib.error.HTTPError as error:
            raise Refused(error.code, _message_of(error.read())) from error
        except (OSError, http.client.HTTPException) as error:
            pause = next(left, None) if _broken(error) else None
            if pause is None:
                raise error if isinstance(error, OSError) else ConnectionError(repr(error)) from error
            time.sleep(pause)


def _broken(error: Exception) -> bool:
    """Whether the connection failed, as opposed to the time running out or a name that is not known."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(cause, (ConnectionError, http.client.HTTPException))


def _as_object(raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except ValueError:
        return {}  # the words with which vLLM confirms an adapter
    return answer if isinstance(answer, dict) else {}


def _message_of(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    try:
        said = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = text
    return str(said)[:500]
