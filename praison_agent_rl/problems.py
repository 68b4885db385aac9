"""Collects what is wrong before a run, so that a user sees all of it at once."""

from collections.abc import Callable
from typing import TypeVar

from praison_agent_rl.errors import ConfigError, PraisonRLError

T = TypeVar("T")


class Problems:
    """Collects what is wrong, so that a user sees all of it at once."""

    def __init__(self) -> None:
        self.found: list[PraisonRLError] = []

    def attempt(self, check: Callable[[], T]) -> T | None:
        """The result of ``check``, or None if it found a problem, which is kept."""
        try:
            return check()
        except PraisonRLError as problem:
            self.found.append(problem)
            return None

    def raise_all(self) -> None:
        """Raise the only problem, however often it was found, as it is, or several as one ConfigError."""
        texts = list(dict.fromkeys(map(str, self.found)))
        if len(texts) == 1:
            raise self.found[0]
        if texts:
            raise ConfigError("\n".join(texts))
