"""What a run has shown so far, as lines of numbers, and how a symptom is told; nothing here reads files or trains."""

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from praison_agent_rl.records import Record

WINDOW = 6
"""Steps whose mean is looked at: one step is 8 answers by default, and 50 tell a share to within 0.07."""
SURE = 4.0
"""Standard errors by which the first and the last window differ before a change counts: it is asked again after each
of hundreds of steps, and of as many looks at mere noise one in a hundred goes beyond 3.5."""
_MOST_NEIGHBOURS = 200


class Symptom(Record):
    """Something that went wrong in a run, told once."""

    name: str
    step: int
    text: str
    """What was seen, in plain words with the numbers."""
    advice: str
    """What to change, by the names of the keys."""
    severity: Literal["stop", "warning"]


@dataclass(frozen=True)
class WatchRules:
    """What a run is watched by."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration, whose values are told with the names of the keys."""
    patience: int = 0
    """Steps without a better watched reward after which the run ends; 0 is never."""
    guards: frozenset[str] = frozenset()
    """Rewards that are not to fall, by name."""

    def key(self, name: str) -> str:
        """The name of a key with its value, as far as it is known.

        >>> WatchRules({"num_generations": 8}).key("num_generations")
        'num_generations (8)'
        """
        value = self.settings.get(name)
        return name if value is None else f"{name} ({value:g})" if isinstance(value, float) else f"{name} ({value})"


class Change(NamedTuple):
    """The mean of a line's first window and of its last one."""

    before: float
    now: float
    errors: float
    """The difference in its standard errors."""

    @property
    def rose(self) -> bool:
        """Whether it is surely higher now."""
        return self.errors > SURE

    @property
    def fell(self) -> bool:
        """Whether it is surely lower now."""
        return self.errors < -SURE


class Seen:
    """The steps of a run, and its watched evaluations, in their order."""

    def __init__(self, rules: WatchRules) -> None:
        self.rules = rules
        self.steps: list[Mapping[str, Any]] = []
        self.watched: list[Mapping[str, Any]] = []
        self._lines: dict[str, list[float]] = {}
        self._range: tuple[float, float] | None = None
        self._changes: dict[str, tuple[int, Change | None]] = {}

    @property
    def step(self) -> int:
        """The number of the last step."""
        return max((int(event.get("step") or 0) for event in (*self.steps[-1:], *self.watched[-1:])), default=0)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in one event, of a step or of a watched evaluation."""
        if event.get("event") == "watched":
            self.watched.append(event)
            return
        self.steps.append(event)
        for name, value in event.items():
            if isinstance(value, Mapping):
                for inner, number in value.items():
                    self._append(f"{name}.{inner}", number)
            else:
                self._append(name, value)
        lows = [value for key in ("low", "high", "reward") if (value := number_of(event, key)) is not None]
        if lows:
            low, high = self._range or (lows[0], lows[0])
            self._range = (min(low, *lows), max(high, *lows))

    def _append(self, name: str, value: Any) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            self._lines.setdefault(name, []).append(float(value))

    def line(self, name: str) -> list[float]:
        """The numbers of a metric, of the steps that have it; what is inside another is called ``rewards.brevity``."""
        return self._lines.get(name, [])

    def first(self, name: str, steps: int = WINDOW) -> float | None:
        """The median of the first steps."""
        line = self.line(name)[:steps]
        return statistics.median(line) if line else None

    def now(self, name: str, steps: int = WINDOW) -> float | None:
        """The mean of the last steps; None before there are as many."""
        line = self.line(name)
        return statistics.fmean(line[-steps:]) if len(line) >= steps else None

    def change(self, name: str) -> Change | None:
        """From the first window to the last; None while they overlap."""
        line = self.line(name)
        known = self._changes.get(name)
        if known is None or known[0] != len(line):
            known = self._changes[name] = (len(line), _change(line))
        return known[1]

    @property
    def reward_rose(self) -> bool:
        """Whether the trained reward is surely higher than at first."""
        change = self.change("reward")
        return change is not None and change.rose

    @property
    def reward_stays(self) -> bool:
        """Whether it is known to be no higher; while that cannot be told yet it is neither."""
        change = self.change("reward")
        return change is not None and not change.rose

    def height(self, steps: int = WINDOW) -> float | None:
        """Where the mean reward of the last steps lies between the lowest (0) and the highest (1) that was seen."""
        now = self.now("reward", steps)
        if now is None or self._range is None or self._range[0] == self._range[1]:
            return None
        low, high = self._range
        return (now - low) / (high - low)

    @property
    def range(self) -> tuple[float, float] | None:
        """The lowest and the highest total that an answer got; means where single ones are not known."""
        return self._range

    def recent(self, count: str, enough: int, *, each: int = 0) -> list[Mapping[str, Any]] | None:
        """The last steps that have ``enough`` of what ``count`` counts, a window at least; None if there are fewer.

        A step that does not say has ``each``.
        """
        total = 0.0
        for taken, step in enumerate(reversed(self.steps), 1):
            total += number_of(step, count) or each
            if total >= enough and taken >= WINDOW:
                return self.steps[-taken:]
        return None

    def warning(self, name: str, text: str, advice: str) -> Symptom:
        """A symptom that is told and lets the run go on."""
        return Symptom(name=name, step=self.step, text=text, advice=advice, severity="warning")

    def stop(self, name: str, text: str, advice: str) -> Symptom:
        """A symptom that ends the run."""
        return Symptom(name=name, step=self.step, text=text, advice=advice, severity="stop")


def number_of(event: Mapping[str, Any], name: str) -> float | None:
    """A metric of an event; None for what is no finite number."""
    value = event.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number and value is not None else None


def of_each(events: list[Mapping[str, Any]], name: str) -> list[float]:
    """A metric of the events that have it."""
    return [value for event in events if (value := number_of(event, name)) is not None]


def _change(line: list[float]) -> Change | None:
    if len(line) < 2 * WINDOW:
        return None
    before, now = statistics.fmean(line[:WINDOW]), statistics.fmean(line[-WINDOW:])
    # noise by the differences of neighbours (von Neumann 1941): what the mean does meanwhile is not part of it
    noise = statistics.fmean((b - a) ** 2 for a, b in itertools.pairwise(line[-_MOST_NEIGHBOURS:])) / 2
    error = math.sqrt(2 * noise / WINDOW)
    # sums of equal numbers differ in the last digits
    difference = 0.0 if math.isclose(before, now, rel_tol=1e-6, abs_tol=1e-9) else now - before
    if error:
        return Change(before, now, difference / error)
    return Change(before, now, math.copysign(math.inf, difference) if difference else 0.0)
