"""Rewards of these tests, found by the processes that train."""

import os
import time
from typing import Any


def lower(completions: list[str], **_: Any) -> list[float]:
    """Share of an answer's characters that are lower-case letters; slow enough for a run to be met on its way."""
    time.sleep(0.3)
    return [sum(char.isascii() and char.islower() for char in text) / max(len(text), 1) for text in completions]


def broken_in_the_second(completions: list[str], **_: Any) -> list[float]:
    """As ``lower``, but fails in one process."""
    if os.environ.get("RANK") == "1":
        raise ValueError("no judge here")
    return lower(completions)


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """By the first token."""
    return [ids[0] % 5 / 4 for ids in completion_ids]
