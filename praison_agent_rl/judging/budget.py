"""What a judge may spend and has spent: counted before a request is sent, so that many at once do not overshoot it."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from praison_agent_rl.records import Record

_PAUSE = 0.02


class JudgeUsage(Record):
    """What a judge was asked and what that cost, in this process."""

    calls: int = 0
    """Requests that were sent, each repeated one too."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """USD; None where the price is not known."""
    failed: int = 0
    """Questions to which no reply came."""
    unparsed: int = 0
    """Replies from which a score, or all of them, could not be taken."""
    reused: int = 0
    """Answers that were sent once for several that were the same."""
    kinds: Mapping[str, int] = Field(default_factory=dict)
    """Samples without a score, by why they have none."""


class Claim(NamedTuple):
    """What was set aside for a request: tokens asked and said, and USD."""

    worst: tuple[int, int, float | None]


class Budget:
    """Limits on USD, requests and tokens; whoever would pass one waits for what is under way, or is refused."""

    def __init__(self, cost: float | None, calls: int | None, tokens: int | None) -> None:
        self._limits = {"max_cost": cost, "max_calls": calls, "max_tokens": tokens}
        self._spent = {"max_cost": 0.0, "max_calls": 0.0, "max_tokens": 0.0}
        self._held = dict(self._spent)
        self._told: dict[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0, "cost": None}
        self._unpriced = False
        self._lock = threading.Lock()
        self.exhausted: str | None = None
        """Why nothing is asked any more; None while there is budget left."""

    @property
    def told(self) -> dict[str, Any]:
        """Tokens and USD of the replies that came, as fields of `JudgeUsage`."""
        with self._lock:
            return {**self._told, "cost": None if self._unpriced else self._told["cost"]}

    async def claim(self, asked: int, said: int, cost: float | None) -> Claim | None:
        """Set aside what a request costs at most; None where the budget does not hold it."""
        claim = Claim((asked, said, cost))
        while True:
            with self._lock:
                short = self._short(claim)
                if short is None:
                    self._add(self._held, claim.worst, 1)
                    return claim
                if self._held["max_calls"] == 0 or self.exhausted:
                    self.exhausted = self.exhausted or short
                    return None
            await asyncio.sleep(_PAUSE)  # what is under way may cost less than was set aside

    def settle(self, claim: Claim, spent: tuple[int, int, float | None] | None, *, lost: bool = False) -> None:
        """Say what a request did cost: None for one that was refused, ``lost`` for one that may have been charged."""
        with self._lock:
            self._add(self._held, claim.worst, -1)
            self._add(self._spent, spent or (0, 0, 0.0), 1)
            if spent is None or lost:
                return
            self._told["prompt_tokens"] += spent[0]
            self._told["completion_tokens"] += spent[1]
            self._unpriced = self._unpriced or spent[2] is None
            self._told["cost"] = (self._told["cost"] or 0.0) + (spent[2] or 0.0)

    def _short(self, claim: Claim) -> str | None:
        asked = {"max_cost": claim.worst[2] or 0.0, "max_calls": 1, "max_tokens": claim.worst[0] + claim.worst[1]}
        for name, limit in self._limits.items():
            # a hair more, as sums of fractions are
            if limit is not None and self._spent[name] + self._held[name] + asked[name] > limit * (1 + 1e-9):
                return (
                    f"the judge's budget {name}={limit:g} is used up: {self._spent[name]:.6g} spent, and the next "
                    f"request may take {asked[name]:.6g}; raise {name}, or let it judge less"
                )
        return None

    @staticmethod
    def _add(sums: dict[str, float], amount: tuple[int, int, float | None], sign: int) -> None:
        sums["max_calls"] += sign
        sums["max_tokens"] += sign * (amount[0] + amount[1])
        sums["max_cost"] += sign * (amount[2] or 0.0)
