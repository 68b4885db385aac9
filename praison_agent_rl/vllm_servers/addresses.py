"""The addresses of the vLLM servers that completions are drawn from, as a training file writes them."""

from collections.abc import Iterator, Sequence
from typing import Any

from praison_agent_rl.endpoints import why_no_address


def as_written(value: Any) -> Any:
    """One address as a text and several as a list; several may stand in one text, with commas between them.

    >>> as_written("http://a:8000, http://b:8000")
    ['http://a:8000', 'http://b:8000']
    >>> as_written(["http://a:8000"])
    'http://a:8000'

    Raises:
        ValueError: it is an empty list.
    """
    if isinstance(value, str) and "," in value:
        value = [part for part in map(str.strip, value.split(",")) if part]
    if not isinstance(value, list | tuple):
        return value
    if not value:
        raise ValueError("vllm_server_base_url is an empty list; name a server, or leave the key out")
    return value[0] if len(value) == 1 else list(value)


def faults_in(urls: Sequence[str]) -> Iterator[str]:
    """What is wrong with the base URLs of servers; no password or key that is in one is shown."""
    seen: dict[str, int] = {}
    for number, url in enumerate(urls):
        place = f"vllm_server_base_url[{number}]" if len(urls) > 1 else "vllm_server_base_url"
        if reason := why_no_address(url):
            yield f"{place} {reason}"
        elif (first := seen.setdefault(api_root(url), number)) != number:
            yield f"{place} names the same server as vllm_server_base_url[{first}], {url!r}; name each server once"


def api_root(url: str) -> str:
    """Where the API of a server begins, whose base URL is written with or without ``/v1``.

    >>> api_root("http://a:8000/")
    'http://a:8000/v1'
    """
    return url.rstrip("/").removesuffix("/v1") + "/v1"
