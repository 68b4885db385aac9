"""What one call of a reward brought, read without trust: a score, None, or a fault for each sample."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from praison_agent_rl.deadlines import TimedOut
from praison_agent_rl.rewards import Score, sum_of_steps, wrong_steps
from praison_agent_rl.scoring.names import cause_of, plain_value, short

FaultKind = Literal[
    "raised",
    "timed out",
    "not a list",
    "wrong length",
    "wrong steps",
    "not a number",
    "NaN",
    "infinite",
    "out of time",
    "no verdict",
]


class Fault(NamedTuple):
    """Why there is no sound score."""

    kind: FaultKind
    text: str


_LARGEST = (2 - 2**-23) * 2.0**127  # of float32

Outcome = Score | Fault


class Stepped(NamedTuple):
    """The score of a run whose steps were scored."""

    score: Score
    """Their sum; None where none has a score."""
    steps: list[Score]
    """One for each call of the model."""


Value = Outcome | Stepped


class Unsound(Exception):
    """A whole call is worth nothing; ``fault`` says why, and ``got`` how many values came, if that is why."""

    def __init__(self, fault: Fault, got: int | None = None) -> None:
        super().__init__(fault.text)
        self.fault = fault
        self.got = got


def told(error: BaseException, seconds: float) -> Unsound:
    """Any error of a call that had ``seconds`` as the fault that it is."""
    if isinstance(error, Unsound):
        return error
    if isinstance(error, TimedOut):
        return Unsound(Fault("timed out", f"did not end within {seconds:g} s"))
    return Unsound(Fault("raised", f"failed: {cause_of(error)}"))


def outcome_of(value: Value) -> Outcome:
    """What counts of a value: of steps their sum."""
    return value.score if isinstance(value, Stepped) else value


def read_values(values: object, n: int, counts: Sequence[int] | None = None) -> list[Value]:
    """What a reward returned for ``n`` completions; one that is no sound score costs only its own sample.

    With ``counts``, how often the model was called for each, a list with one score for each call is sound too.

    Raises:
        Unsound: it is no list, or not one of ``n`` values.
    """
    given = plain_value(values)
    if not isinstance(given, list | tuple):  # a dict's keys, or the letters of a text, are no scores
        kind = type(values).__name__
        raise Unsound(Fault("not a list", f"returned a {kind}, {short(values)}, instead of a list of numbers"))
    if len(given) != n:
        text = f"returned {len(given)} values for {n} completions, {short(values)}"
        raise Unsound(Fault("wrong length", text), len(given))
    if counts is None:
        outcomes: list[Value] = [_read(value) for value in given]
    else:
        outcomes = [_read_with_steps(value, count) for value, count in zip(given, counts, strict=True)]
    failed = getattr(values, "failed", None)  # a judge's None: it says why, and is no judgement
    for place, why in failed.items() if isinstance(failed, Mapping) else ():
        if isinstance(place, int) and 0 <= place < n and outcomes[place] is None:
            outcomes[place] = Fault("no verdict", f"gave no score: {str(why)[:300]}")
    if outcomes and all(isinstance(outcome, Fault) and outcome.kind == "no verdict" for outcome in outcomes):
        raise Unsound(outcomes[0])  # type: ignore[arg-type]  # worth another try, as a call that raised
    return outcomes


def _read_with_steps(value: object, count: int) -> Value:
    try:
        given = plain_value(value)
    except Exception:  # noqa: BLE001 - an object of the reward's own may fail at anything
        return _read(value)
    if not isinstance(given, list | tuple):
        return _read(value)
    if len(given) != count:
        return Fault("wrong steps", wrong_steps(len(given), count))
    steps = [_read(step) for step in given]
    sound = [step for step in steps if not isinstance(step, Fault)]
    if len(sound) < len(steps):
        fault = next(step for step in steps if isinstance(step, Fault))
        return fault._replace(text=f"{fault.text} of a step")
    total = _read(sum_of_steps(sound))
    return total if isinstance(total, Fault) else Stepped(total, sound)


def _read(value: object) -> Outcome:
    try:
        score = plain_value(value)
        if score is None:
            return None
        if not isinstance(score, numbers.Real):
            return Fault("not a number", f"returned {short(score)} as a score")
        size: Any = abs(score)
        # TRL keeps scores in float32, and would turn the gradient of a group with infinity into 0 without a word
        if size > _LARGEST:  # also an integer too large for a float
            return Fault("infinite", f"returned {short(score)} as a score")
        number = float(score)
        return Fault("NaN", "returned NaN as a score") if math.isnan(number) else number
    except Exception as error:  # noqa: BLE001 - an object of the reward's own may fail at anything
        return Fault("not a number", f"returned {short(value)} as a score ({type(error).__name__})")


class Said:
    """What a reward logs in one call; it is passed on only if the call brought scores, and in the samples' order."""

    def __init__(self) -> None:
        self.extra: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, Any]] = []
        self.over = False  # a call that was given up may still go on talking

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """In place of TRL's."""
        if not self.over:
            self.extra.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: Any) -> None:
        """In place of TRL's."""
        if not self.over:
            self.metrics.append((name, value))

    def stands_in(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """``columns`` with these in place of those that are there."""
        own = {"log_extra": self.log_extra, "log_metric": self.log_metric}
        return {name: own.get(name, value) for name, value in columns.items()}
