"""What every reward of the library is made with: the columns it declares, the checks of its parameters; no scoring."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

from praison_agent_rl.errors import MissingExtra, RewardError
from praison_agent_rl.rewards import Shape

P = ParamSpec("P")
Score = float | None
Scores = list[Score]


def library_reward(*columns: str) -> Callable[[Callable[P, Scores]], Callable[P, Scores]]:
    """Declare the dataset ``columns`` that a reward takes, and let it be called as TRL calls it.

    The function keeps its own signature. What TRL passes beside it is dropped, since a column may have any name; a
    single number, text or mapping can be no column, so it is a parameter with a wrong name.
    """

    def declare(fn: Callable[P, Scores]) -> Callable[P, Scores]:
        known = inspect.signature(fn).parameters

        @functools.wraps(fn)
        def called(*args: P.args, **given: P.kwargs) -> Scores:
            wrong = [name for name in given if name not in known and isinstance(given[name], str | int | float | dict)]
            if wrong:
                own = [name for name, p in known.items() if p.kind is p.KEYWORD_ONLY]
                there = f"it takes: {', '.join(own)}" if own else "it takes none"
                raise RewardError(f"{fn.__name__} has no parameter {wrong[0]!r}; {there}")
            given = {name: value for name, value in given.items() if name in known}  # type: ignore[assignment]
            try:
                return fn(*args, **given)
            except RewardError as error:
                raise RewardError(f"{fn.__name__}: {error}") from error.__cause__

        vars(called).update(takes=columns, reads=Shape("messages", "messages"))
        return called

    return declare


def missing_extra(what: str, package: str | None, *, extra: str = "rewards", advice: str = "") -> MissingExtra:
    """The error of a reward whose ``package`` is not installed."""
    return MissingExtra(f'{what} needs {package}: pip install "praison-agent-rl[{extra}]"{advice}')


def per_sample(values: Any, name: str, n: int) -> list[Any]:
    """The value of a column for each of ``n`` completions; a single value holds for all."""
    if not isinstance(values, list | tuple):
        return [values] * n
    if len(values) != n:
        raise RewardError(f"{name} has {len(values)} values for {n} completions; it needs one for each")
    return list(values)


def a_number(value: Any, name: str, *, least: float | None = None, most: float | None = None) -> None:
    """Raise RewardError unless ``value`` is a finite number in the range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value - value != 0:
        raise RewardError(f"{name} must be a number, not {value!r}{_column(value, name)}")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least:g}" if most is None else f"at most {most:g}" if least is None else ""
        raise RewardError(f"{name} must be {bounds or f'from {least:g} to {most:g}'}, not {value!r}")


def a_count(value: Any, name: str, *, least: int = 0) -> None:
    """Raise RewardError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RewardError(f"{name} must be a whole number, not {value!r}{_column(value, name)}")
    a_number(value, name, least=least)


def one_of(value: Any, name: str, allowed: Sequence[str]) -> None:
    """Raise RewardError unless ``value`` is one of the words ``allowed``."""
    if value not in allowed:
        raise RewardError(f"{name} must be one of {', '.join(allowed)}; not {value!r}{_column(value, name)}")


def a_flag(value: Any, name: str) -> None:
    """Raise RewardError unless ``value`` is true or false."""
    if not isinstance(value, bool):
        raise RewardError(f"{name} must be true or false, not {value!r}{_column(value, name)}")


def a_text(value: Any, name: str, example: str) -> None:
    """Raise RewardError unless ``value`` is a text with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise RewardError(f"{name} must be a text, for example {example}; not {value!r}{_column(value, name)}")


def texts_of(value: Any, name: str, example: str) -> list[str]:
    """``value``, one text or several, as a list; raises RewardError where there is none."""
    given = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not given or not all(isinstance(text, str) and text.strip() for text in given):
        raise RewardError(f"{name} must be a text or a list of texts, for example {example}; not {value!r}")
    return given


def a_mapping(value: Any, name: str, example: str) -> None:
    """Raise RewardError unless ``value`` is a mapping with something in it."""
    if not isinstance(value, Mapping) or not value:
        raise RewardError(f"{name} must be a mapping, for example {example}; not {value!r}{_column(value, name)}")


def _column(value: Any, name: str) -> str:
    return f" (has the dataset a column {name!r}?)" if isinstance(value, list | tuple) else ""
