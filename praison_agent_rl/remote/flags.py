"""What the options ``--remote-...`` of a command say; they are those of praisonai-train."""

from typing import Any


def remote_of_flags(
    *, host: str | None = None, python: str | None = None, workdir: str | None = None, gpus: int | None = None
) -> dict[str, Any] | None:
    """The part of ``remote`` that options give; it goes over what the training file says. None where none is given.

    >>> remote_of_flags(host="gpubox", gpus=2)
    {'host': 'gpubox', 'gpus': 2}
    """
    given = {"host": host, "python": python, "workdir": workdir, "gpus": gpus}
    return {name: value for name, value in given.items() if value is not None} or None
