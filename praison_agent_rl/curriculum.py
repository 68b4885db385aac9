"""How often each training prompt is drawn: less where its group of answers carried no signal; numbers in, numbers out.

GRPO compares the answers to one prompt with each other, so a prompt whose answers all score the same costs a group of
completions and moves nothing. Such a prompt is not given up: the policy changes, and it is asked again now and then.
"""

import itertools
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SHARE = 4
"""A prompt without a signal is drawn with probability 1/4 in the next pass, then 2/4, 3/4, and in the fourth surely."""
MOST_DRAWS = 4
"""How often a pass draws a prompt at most; were it more, few prompts with a signal would be learned by heart."""
BEFORE = -1
"""The pass of what was known before the first one."""
_DIGITS = 6  # a spread below that divides into advantages of a hundredth: TRL adds 1e-4 to it


class Group(NamedTuple):
    """The scores of the answers to one prompt, compared with each other; ``list(group)`` is its form in JSON."""

    row: int
    """Place of the prompt among the rows that are trained on."""
    spread: float | None
    """Standard deviation of the scores; None where fewer than two answers have one."""
    mean: float | None
    """None where no answer has a score."""
    turn: int
    """Number of the pass over the prompts, from 0; ``BEFORE`` for recorded answers."""

    @property
    def silent(self) -> bool:
        """Whether nothing can be learned from it."""
        return not self.spread


def group_of(row: int, scores: Iterable[float | None], turn: int) -> Group:
    """What the scores of the answers to ``row`` say; None and NaN are no scores.

    >>> group_of(7, [1.0, 0.0, None], turn=0)
    Group(row=7, spread=0.707107, mean=0.5, turn=0)
    """
    given = [score for score in scores if score is not None and math.isfinite(score)]
    spread = round(statistics.stdev(given), _DIGITS) if len(given) > 1 else None
    return Group(row, spread, round(statistics.fmean(given), _DIGITS) if given else None, turn)


def chance(last: Group | None, turn: int) -> float:
    """How likely a prompt is drawn in pass ``turn``, by the last group that it had before."""
    if last is None or not last.silent:
        return 1.0
    return min(1.0, (turn - last.turn) / SHARE)


def last_groups(groups: Iterable[Group], *, before: int) -> dict[int, Group]:
    """The last group of each prompt in the passes before pass ``before``."""
    return {group.row: group for group in groups if group.turn < before}


def draw(order: Sequence[int], last: Mapping[int, Group], *, turn: int, batch: int, rng: random.Random) -> list[int]:
    """The prompts of pass ``turn``: ``order``, with other prompts in the places of those that are not drawn.

    Of the result, which is as long, training takes whole batches of ``batch`` prompts and leaves the rest. A place that
    becomes free is taken by a prompt that this pass would have left out, else once more by one with a signal, or by one
    of which nothing is known; never by one that is in the batch already, or was drawn ``MOST_DRAWS`` times. Where there
    is none, the prompt stays. Without a free place ``order`` is given back as it is.
    """
    skipped = {row for row in order if rng.random() >= chance(last.get(row), turn)}
    end = len(order) // batch * batch
    free = [place for place in range(end) if order[place] in skipped]
    rng.shuffle(free)
    worth = [row for row in order if row in last and not last[row].silent] + [row for row in order if row not in last]
    spare = deque([row for row in order[end:] if row not in skipped] + worth * (MOST_DRAWS - 1))
    drawn = list(order)
    batches = [set(order[start : start + batch]) - skipped for start in range(0, end, batch)]
    for place in free:
        here = batches[place // batch]
        drawn[place] = found = _first_outside(here, spare, drawn[place])
        here.add(found)
    return drawn


def _first_outside(here: set[int], spare: deque[int], otherwise: int) -> int:
    """The first of ``spare`` that is not ``here``, taken away from it."""
    passed_over = []
    found = otherwise
    while spare:
        row = spare.popleft()
        if row not in here:
            found = row
            break
        passed_over.append(row)
    spare.extendleft(reversed(passed_over))
    return found


def groups_of(steps: Iterable[Mapping[str, Any]], *, until: int | None = None) -> list[Group]:
    """The groups that ``step`` events tell of, up to step ``until``, in their order."""
    wanted = (step for step in steps if until is None or step["step"] <= until)
    return [Group(*entry) for step in wanted for entry in step.get("signal") or ()]


def recorded_groups(events: Iterable[Mapping[str, Any]]) -> list[Group] | None:
    """What was known before the first pass, by the ``curriculum`` event; None where there is none yet."""
    said = [event["recorded"] for event in events if event.get("event") == "curriculum"]
    return [Group(*entry) for entry in said[-1]] if said else None


def summary(groups: Sequence[Group], recorded: Sequence[Group] = ()) -> dict[str, Any] | None:
    """What a run's groups say of its prompts, for the report; None without a group.

    ``silent`` prompts are those whose last group carried no signal. They count as right or wrong by the half of the
    run's scores that they lie in, and as alike where the whole run knew one score. ``draws`` are means a pass, over the
    passes that could choose, of the prompts whose last group before had none and of those whose last group had one.
    """
    if not groups:
        return None
    known = [group for group in groups if group.mean is not None]
    low, high = (_ends(known)) if known else (0.0, 0.0)
    last = last_groups(groups, before=groups[-1].turn + 1)
    silent = [group for group in last.values() if group.silent]
    asked = Counter(group.turn for group in groups)
    unheard = Counter(group.turn for group in groups if group.silent)
    return {
        "prompts": len(last),
        "silent": len(silent),
        **_kinds(silent, low, high),
        "recorded_silent": sum(group.silent for group in recorded),
        "passes": [{"groups": asked[turn], "silent": unheard[turn]} for turn in sorted(asked)],
        "draws": _draws([*recorded, *groups]),
    }


def in_words(found: Mapping[str, Any] | None, *, chosen: bool) -> str | None:
    """A `summary` as one sentence; None where every prompt carried a signal. ``chosen``: the curriculum was on."""
    if not found or not found["silent"]:
        return None
    names = {"all right": "right", "all wrong": "wrong", "all alike": "alike", "without a score": "unscored"}
    kinds = ", ".join(f"{found[name]} {words}" for words, name in names.items() if found[name])
    text = f"{found['silent']} of {found['prompts']} prompts carried no signal in their last group: {kinds}"
    less, more = found["draws"]["silent"], found["draws"]["signal"]
    if not chosen:
        return f"{text}; curriculum is off, so they were drawn as often as the others"
    if less is None or more is None:
        return (
            f"{text}; they would be drawn less from the second pass over the prompts on, which this run did not reach"
        )
    return f"{text}. A pass drew a prompt without a signal {less:.2g} times, and one with a signal {more:.2g} times"


def _ends(known: Sequence[Group]) -> tuple[float, float]:
    """The least and the greatest score that groups of these means and spreads speak of."""
    reach = [(group.mean or 0.0, group.spread or 0.0) for group in known]
    return min(mean - spread for mean, spread in reach), max(mean + spread for mean, spread in reach)


def _kinds(silent: Sequence[Group], low: float, high: float) -> dict[str, int]:
    means = [group.mean for group in silent if group.mean is not None]
    middle, one_score = (low + high) / 2, low == high
    return {
        "right": sum(mean >= middle and not one_score for mean in means),
        "wrong": sum(mean < middle and not one_score for mean in means),
        "alike": len(means) if one_score else 0,
        "unscored": len(silent) - len(means),
    }


def _draws(groups: Iterable[Group]) -> dict[str, float | None]:
    """How often a pass drew a prompt that was silent before it, and one that was not; None where no pass met one."""
    last: dict[int, Group] = {}
    met, drawn = Counter[bool](), Counter[bool]()
    for turn, of_turn in itertools.groupby(groups, key=lambda group: group.turn):
        asked = list(of_turn)
        if turn != BEFORE:
            met.update(group.silent for group in last.values())
            drawn.update(last[group.row].silent for group in asked if group.row in last)
        last.update({group.row: group for group in asked})
    return {
        name: drawn[kind] / met[kind] if met[kind] else None for name, kind in (("silent", True), ("signal", False))
    }
