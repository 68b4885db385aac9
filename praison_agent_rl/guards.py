"""What may not get worse while the reward gets better: drift of the answers, guarded rewards, and earlier gains.

A guard is broken by what is proved and not by noise: a change must be larger than its limit, and the interval of it
must lie on the bad side of zero, on at least as many prompts as anything is decided on. The guarded rewards alone go by
the mean that was seen, since their tolerance was set by a person.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from praison_agent_rl.intervals import CONFIDENCE
from praison_agent_rl.pairing import Change, Value, change_of, total_of
from praison_agent_rl.records import FEWEST_PROMPTS, Answer, Comparison, Guard, Interval
from praison_agent_rl.text_measures import faulty_tool_call, repetition, scripts

LIMITS: dict[str, float] = {
    "longer": 2.0,
    "shorter": 0.1,
    "empty": 0.02,
    "repetition": 0.1,
    "errors": 0.0,
    "tool_calls": 0.02,
    "language": 0.05,
}
"""How far the answers may drift from those of the base.

``longer``, ``shorter``: mean length in tokens, new by base, at most and at least. The others are rises of a share:
``empty`` answers, ``repetition`` (4-grams that stood in the answer before), ``errors`` (answers that failed),
``tool_calls`` (answers with a call that cannot be parsed or names no tool), ``language`` (letters of a script that the
base's answers do not use; English become German is not seen).
"""

_OWN_SCRIPT = 0.01
"""Share of the base's letters from which on a script is one that it uses."""


def drift_guards(
    base: Sequence[Answer],
    new: Sequence[Answer],
    *,
    limits: Mapping[str, float] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Guard]:
    """How the answers themselves changed; ``limits`` are those that differ from `LIMITS`."""
    allowed = {**LIMITS, **(limits or {})}
    own = scripts("".join(answer.text for answer in base if answer.error is None))
    letters = own.total()
    used = {script for script, times in own.items() if times >= _OWN_SCRIPT * letters}
    shares: list[tuple[str, str, Value]] = [
        ("empty", "empty answers", _unless_failed(lambda text: float(not text.strip()))),
        ("repetition", "4-grams repeated within an answer", _unless_failed(repetition)),
        ("errors", "answers that failed", lambda answer: float(answer.error is not None)),
    ]
    if tools:
        fault = _unless_failed(lambda text: float(faulty_tool_call(text, tools)))
        shares.append(("tool_calls", "answers with a faulty tool call", fault))
    if used:
        foreign = _unless_failed(lambda text: _foreign_letters(text, used))
        shares.append(("language", f"letters that are not {' or '.join(sorted(map(str.title, used)))}", foreign))
    drifts = [_share_guard(name, what, change_of(base, new, value), allowed[name]) for name, what, value in shares]
    return [*_length_guards(base, new, allowed), *drifts]


def reward_guards(comparison: Comparison, guards: Mapping[str, float]) -> list[Guard]:
    """Whether a guarded reward fell by more than its tolerance; one that could not be measured is broken."""
    measured = {**comparison.judged, **comparison.rewards}
    made = []
    for name, tolerance in guards.items():
        seen = measured.get(name) or _nothing()
        text = f"reward {name} went from {seen.base:.3g} to {seen.new:.3g}"
        broken = not seen.difference >= -tolerance  # so that NaN is broken
        if seen.difference != seen.difference:
            text = f"reward {name} is guarded and could not be measured"
        limit = f"may fall by {tolerance:g}" if tolerance else "may not fall"
        made.append(Guard(name=f"reward {name}", base=seen.base, new=seen.new, limit=limit, broken=broken, text=text))
    return made


def failure_guards(base: Sequence[Answer], new: Sequence[Answer], min_gain: float) -> list[Guard]:
    """Whether the gain rests on prompts that the candidate failed at being left out; none where it never failed.

    Each answer of it that failed is taken for as bad as the worst that either side gave. That is no score, only a test
    of the gain: a candidate that fails at hard prompts would otherwise be measured on the easy ones.
    """
    scores = [score for answer in [*base, *new] if (score := total_of(answer)) is not None]
    if not scores or not any(answer.error is not None for answer in new):
        return []
    change = change_of(base, new, total_of)
    worst = change_of(base, _failures_as(min(scores), new), total_of)
    return [
        Guard(
            name="failures",
            base=worst.interval.base,
            new=worst.interval.new,
            limit=f"the gain must stay above {min_gain:g} with each failed answer as bad as the worst",
            broken=change.interval.low > min_gain and not worst.interval.low > min_gain,
            text=f"with the answers that failed taken for as bad as the worst, the gain is "
            f"{worst.interval.difference:+.3g} ({span(worst.interval)})",
        )
    ]


def _failures_as(score: float, answers: Sequence[Answer]) -> list[Answer]:
    return [a if a.error is None else a.model_copy(update={"error": None, "total": score}) for a in answers]


def earlier_guards(earlier: Mapping[str, tuple[Sequence[Answer], Sequence[Answer]]]) -> list[Guard]:
    """Whether something is lost again on the prompts that earlier versions were judged by, version by version.

    With k versions each interval covers 1 - 5 % / k (Bonferroni): else twenty would break one guard in three by noise.
    """
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(earlier))
    return [
        _loss_guard(
            f"earlier {version}", f"the prompts of {version}", change_of(*sides, total_of, confidence=confidence)
        )
        for version, sides in earlier.items()
    ]


def control_guard(base: Sequence[Answer], new: Sequence[Answer]) -> Guard:
    """Whether general prompts, which have nothing to do with the agent's job, are answered worse."""
    return _loss_guard("control", "the general control prompts", change_of(base, new, total_of))


def judged_guards(comparison: Comparison) -> list[Guard]:
    """Whether a reward that was not trained on fell while those that were trained on rose."""
    won = comparison.better
    return [
        Guard(
            name=f"reward {name}, which was not trained on",
            base=seen.base,
            new=seen.new,
            limit="may not fall while the trained rewards rise",
            broken=won and seen.high < 0,
            text=f"reward {name}, which was not trained on, went from {seen.base:.3g} to {seen.new:.3g} "
            f"({span(seen)}), while the trained ones went from {comparison.total.base:.3g} to "
            f"{comparison.total.new:.3g}",
        )
        for name, seen in comparison.judged.items()
    ]


def span(interval: Interval) -> str:
    """An interval in words: ``95 % CI -0.31..-0.12``."""
    return f"95 % CI {interval.low:+.3g}..{interval.high:+.3g}"


def _length_guards(base: Sequence[Answer], new: Sequence[Answer], allowed: Mapping[str, float]) -> list[Guard]:
    change = change_of(base, new, lambda answer: None if answer.error is not None else float(answer.tokens))
    before, after = change.interval.base, change.interval.new
    text = f"answers went from {before:.3g} to {after:.3g} tokens on average{_too_few(change)}"
    sides = [
        ("longer", f"at most {allowed['longer']:g} times as long", change.rose and after > allowed["longer"] * before),
        (
            "shorter",
            f"at least {allowed['shorter']:g} times as long",
            change.fell and after < allowed["shorter"] * before,
        ),
    ]
    return [
        Guard(name=name, base=before, new=after, limit=limit, broken=broken, text=text) for name, limit, broken in sides
    ]


def _share_guard(name: str, what: str, change: Change, limit: float) -> Guard:
    seen = change.interval
    return Guard(
        name=name,
        base=seen.base,
        new=seen.new,
        limit=f"may rise by {100 * limit:g} points" if limit else "may not rise",
        broken=change.rose and seen.difference > limit,
        text=f"{what}: {100 * seen.base:.1f} % to {100 * seen.new:.1f} %{_too_few(change)}",
    )


def _loss_guard(name: str, where: str, change: Change) -> Guard:
    seen = change.interval
    return Guard(
        name=name,
        base=seen.base,
        new=seen.new,
        limit="may not fall",
        broken=change.fell,
        text=f"the score on {where} went from {seen.base:.3g} to {seen.new:.3g} "
        f"({seen.low:+.3g}..{seen.high:+.3g} on {change.prompts} prompts){_too_few(change)}",
    )


def _too_few(change: Change) -> str:
    return "" if change.prompts >= FEWEST_PROMPTS else f"; {change.prompts} prompts are too few to judge by"


def _unless_failed(measure: Callable[[str], float | None]) -> Value:
    return lambda answer: None if answer.error is not None else measure(answer.text)


def _foreign_letters(text: str, used: set[str]) -> float | None:
    found = scripts(text)
    return sum(times for script, times in found.items() if script not in used) / found.total() if found else None


def _nothing() -> Interval:
    nan = float("nan")
    return Interval(base=nan, new=nan, difference=nan, low=nan, high=nan)
