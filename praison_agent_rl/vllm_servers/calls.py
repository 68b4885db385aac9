"""One request to a vLLM server, repeated where the connection broke; what the answer means is not decided here."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

from praison_agent_rl.endpoints import show_key


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
        ValueError: no header can carry the key.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    show_key(request, api_key)
    opener, left = urllib.request.build_opener(_NotSentOn), iter(pauses)
    while True:
        try:
            with opener.open(request, timeout=timeout) as reply:
                return _as_object(reply.read())
        except urllib.error.HTTPError as error:
            raise Refused(error.code, without_key(_said_by(error), api_key)) from error
        except (OSError, http.client.HTTPException) as error:
            pause = next(left, None) if _broken(error) else None
            if pause is None:
                raise error if isinstance(error, OSError) else ConnectionError(repr(error)) from error
            time.sleep(pause)


def without_key(said: str, api_key: str | None) -> str:
    """What a server said, which may have repeated the key that it was shown.

    >>> without_key("no such key: s3cret", "s3cret")
    'no such key: ***'
    """
    return said.replace(api_key, "***") if api_key else said


class _NotSentOn(urllib.request.HTTPRedirectHandler):
    """Follows to no other address: urllib would go there with a GET, so nothing that is posted would arrive."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Called by urllib where a server names another address."""
        reason = f"it sends what is asked on to {newurl!r}; give the address that answers itself"
        raise urllib.error.HTTPError(req.full_url, code, reason, headers, fp)


def _said_by(error: urllib.error.HTTPError) -> str:
    if 300 <= error.code < 400:
        return str(error.reason)
    try:
        return _message_of(error.read())
    except (OSError, http.client.HTTPException):  # the connection broke in the middle of the refusal
        return str(error.reason)


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
