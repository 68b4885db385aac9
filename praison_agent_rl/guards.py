"""What may not get worse while the reward gets better: drift of the answers, guarded rewards, and earlier gains.

A guard is broken by what is proved and not by noise: a change must be larger than its limit, and the interval of it
must lie on the bad side of zero, on at least as many prompts as anything is decided on. The guarded rewards alone go by
the mean that was seen, since their tolerance was set by a person.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from praison_agent_rl.intervals import CONFIDENCE
from praison_agent_rl.pairing import Change, Value, change_of, missing_of, names_of, reward_of, total_of, values_of
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


def failure_guards(
    base: Sequence[Answer], new: Sequence[Answer], min_gain: float, *, against: str | None = None
) -> list[Guard]:
    """Whether the gain rests on prompts that the candidate failed at being left out; none where it never failed.

    Each answer of it that failed is taken for as bad as the worst that either side gave. That is no score, only a test
    of the gain: a candidate that fails at hard prompts would otherwise be measured on the easy ones. ``against`` names
    whose answers ``base`` are, where they are not those of the base.
    """
    if all(total_of(answer) is None for answer in [*base, *new]) or all(answer.error is None for answer in new):
        return []
    worst = change_of(base, _failures_as_worst(base, new), total_of).interval
    return [
        Guard(
            name="failures" + _over(against),
            base=worst.base,
            new=worst.new,
            limit=f"the gain must stay above {min_gain:g} with each failed answer as bad as the worst",
            broken=change_of(base, new, total_of).interval.low > min_gain and not worst.low > min_gain,
            text=f"with the answers that failed taken for as bad as the worst, the gain{_over(against)} is "
            f"{worst.difference:+.3g} ({span(worst)})",
        )
    ]


def score_guards(
    base: Sequence[Answer],
    new: Sequence[Answer],
    *,
    min_gain: float = 0.0,
    weights: Mapping[str, float] | None = None,
    against: str | None = None,
) -> list[Guard]:
    """Whether the candidate lost scores, or the gain rests on those that it did not get; none where it got all.

    A score that is missing (None, NaN) takes a penalty away with it, or a prompt out of the mean. The gain is tested
    with each one that the candidate lacks as bad as the worst that either side got from that reward, and failed answers
    as in `failure_guards`. ``weights`` are those of the rewards in the total, 1 where it is not said.
    """
    guards = []
    filled = _missing_as_worst(base, new, weights or {})
    if filled != list(new):
        before = change_of(base, _failures_as_worst(base, new), total_of).interval
        worst = change_of(base, _failures_as_worst(base, filled), total_of).interval
        guards.append(
            Guard(
                name="scores" + _over(against),
                base=worst.base,
                new=worst.new,
                limit=f"the gain must stay above {min_gain:g} with each missing score as bad as the worst",
                broken=before.low > min_gain and not worst.low > min_gain,
                text=f"with the scores that the new answers did not get taken for as bad as the worst, the "
                f"gain{_over(against)} is {worst.difference:+.3g} ({span(worst)})",
            )
        )
    for name, value in values_of([*base, *new]).items():
        if any(missing_of(value)(answer) for answer in new):
            what = f"answers to which reward {name} gave no score"
            change = change_of(base, new, missing_of(value))
            guards.append(_share_guard(f"scores of {name}{_over(against)}", what, change, 0.0))
    return guards


def _over(against: str | None) -> str:
    return f" over {against}" if against else ""


def _failures_as_worst(base: Sequence[Answer], new: Sequence[Answer]) -> list[Answer]:
    totals = [score for answer in [*base, *new] if (score := total_of(answer)) is not None]
    worst = min(totals, default=None)
    return [a if a.error is None else a.model_copy(update={"error": None, "total": worst}) for a in new]


def _missing_as_worst(base: Sequence[Answer], new: Sequence[Answer], weights: Mapping[str, float]) -> list[Answer]:
    """The candidate's answers with a total that holds the worst of each reward that is missing.

    Where the base has no score from a reward for any answer to a prompt, that reward may not apply to the prompt.
    """
    lost: dict[int, float] = {}
    for name in names_of([*base, *new], "rewards"):
        value, missing, weight = reward_of(name), missing_of(reward_of(name)), weights.get(name, 1.0)
        scored = [answer for answer in [*base, *new] if missing(answer) == 0]
        worst = min((weight * (value(answer) or 0.0) for answer in scored), default=0.0)
        applies = {answer.prompt for answer in base if missing(answer) == 0}
        for place, answer in enumerate(new):
            if missing(answer) and answer.prompt in applies:
                lost[place] = lost.get(place, 0.0) + worst
    return [
        answer.model_copy(update={"total": (answer.total or 0.0) + lost[place]}) if place in lost else answer
        for place, answer in enumerate(new)
    ]


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
