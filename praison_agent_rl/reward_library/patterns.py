"""Searches with a user's regular expression that end in time; it scores nothing.

Python's own ``re`` holds the interpreter while it backtracks, so that no other thread could end such a search: a
pattern like ``(a+)+$`` would stop the whole training. The package ``regex`` stops by itself.
"""

import logging
from functools import cache, lru_cache
from typing import Any

from praison_agent_rl.errors import RewardError

from .making import missing_extra

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

MODES = ("search", "match", "fullmatch")


@lru_cache(maxsize=64)
def compiled(pattern: str, name: str, *, ignore_case: bool = False, dot_all: bool = True) -> Any:
    """``pattern`` as the package ``regex`` reads it; raises RewardError if it is none."""
    try:
        import regex
    except ImportError as error:
        raise missing_extra(name, error.name) from error
    flags = (regex.IGNORECASE if ignore_case else 0) | (regex.DOTALL if dot_all else 0)
    try:
        return regex.compile(pattern, flags)
    except regex.error as error:
        raise RewardError(f"{name} {pattern!r} is no regular expression: {error}") from error


def found_in(pattern: Any, text: str, *, mode: str = "search", seconds: float = 1.0) -> bool | None:
    """Whether ``pattern`` is found; None, with a warning, if the search took longer than ``seconds``."""
    try:
        return getattr(pattern, mode)(text, timeout=seconds) is not None
    except TimeoutError:
        _warn_once(f"the pattern {pattern.pattern!r} took longer than {seconds:g} s on a text; it has no score there")
        return None
