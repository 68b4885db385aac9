"""Symptoms that the answers themselves show: their length, their end, and how they repeat themselves."""

import statistics
from collections.abc import Iterator

from praison_agent_rl.diagnosis.seen import WINDOW, Seen, Symptom, number_of, of_each
from praison_agent_rl.diagnosis.signal import SILENT, silent_of

LONGER, SHORTER = 2.5, 0.25
"""Times the first length. Answers of reasoning models double while they get better (DeepSeek-R1, arXiv:2501.12948,
fig. 3), so a growth that the reward goes along with is none."""
NOTHING = 2.0
"""Tokens: what is as short says nothing, whatever it is paid."""
CUT = 0.5
"""Share of cut-off answers: beyond it most rewards judge answers without their end."""
REPEATED, MORE_REPEATED = 0.3, 0.2
"""Share of an answer that repeats itself. Of 4-grams it is 0.005 in texts of people and 0.44 in degenerate ones
(Welleck et al. 2020, table 2); the commonest word of English, "the", is 0.06 of a text."""
SAME, SAME_AT_FIRST = 0.9, 0.6
"""Share of answers that another of their group equals; short answers (yes, no) are often equal from the first."""
ALWAYS_SAME = 0.98
"""Share from the first step on: what is sampled hardly differs at all."""
PAID_BY = 0.7
"""Correlation within groups of the reward with a length, or a repetition, that half of it (0.7^2) is explained by."""
GREW = 1.3
"""Times the first length: a growth to speak of, where the reward is paid by length."""


def length_explosion(seen: Seen) -> Symptom | None:
    """Answers become much longer and not better."""
    first, now = seen.first("mean_length"), seen.now("mean_length")
    if not first or now is None or now < LONGER * first or not seen.reward_stays:
        return None
    limit = seen.rules.key("max_completion_length")
    return seen.warning(
        "length explosion",
        f"answers have {now:.0f} tokens on average, {now / first:.1f} times as many as at first ({first:.0f}), and the "
        "reward did not rise with them",
        f"lower {seen.rules.key('learning_rate')}, set {limit} near what a good answer needs, or add a reward that "
        "costs length",
    )


def length_collapse(seen: Seen) -> Symptom | None:
    """Answers become much shorter: without getting better, or down to nothing."""
    first, now = seen.first("mean_length"), seen.now("mean_length")
    if not first or now is None or now > SHORTER * first or not (seen.reward_stays or now <= NOTHING):
        return None
    paid = "though the reward rose" if seen.reward_rose else "and the reward did not rise"
    return seen.warning(
        "length collapse",
        f"answers have {now:.1f} tokens on average, {now / first:.0%} of what they had at first ({first:.0f}), {paid}",
        f"look at what short answers are paid, or lower {seen.rules.key('learning_rate')}",
    )


def truncated(seen: Seen) -> Symptom | None:
    """Most answers are cut off at the longest length."""
    now = seen.now("clipped")
    if now is None or now < CUT:
        return None
    return seen.warning(
        "truncated",
        f"{now:.0%} of the answers of the last {WINDOW} steps were cut off at "
        f"{seen.rules.key('max_completion_length')}, so rewards judged answers without their end",
        f"raise {seen.rules.key('max_completion_length')} (and max_seq_length with it), ask for shorter answers in the "
        "prompt, or set mask_truncated_completions: true",
    )


def identical(seen: Seen) -> Symptom | None:
    """The answers of a group become one and the same (mode collapse)."""
    first, now, height = seen.first("identical"), seen.now("identical"), seen.height()
    if first is None or now is None or now < SAME or (height is not None and height >= SILENT):
        return None  # at the top it is what was asked for
    if first > SAME_AT_FIRST and min(seen.line("identical")) < ALWAYS_SAME:
        return None
    silent = [silent_of(step) for step in seen.steps[-WINDOW:]]
    tell = seen.stop if sum(silent) >= SILENT * len(silent) and first <= SAME_AT_FIRST else seen.warning
    return tell(
        "identical completions",
        f"{now:.0%} of the answers equal another one to the same prompt (at first {first:.0%}): there is nothing left "
        "to compare",
        f"raise {seen.rules.key('temperature')}, lower {seen.rules.key('learning_rate')}, or set beta or entropy_coef "
        "above 0",
    )


def repetition(seen: Seen) -> Symptom | None:
    """Answers repeat themselves more and more, and are not paid for it."""
    first, now = seen.first("repetition"), seen.now("repetition")
    if first is None or now is None or now < max(REPEATED, first + MORE_REPEATED) or not seen.reward_stays:
        return None
    return seen.warning(
        "repetition",
        f"answers repeat {now:.0%} of themselves, the same word or the same sequence of words (at first {first:.0%})",
        f"lower {seen.rules.key('learning_rate')}, or add a reward that costs repetition",
    )


def hacking(seen: Seen) -> Symptom | None:
    """The reward rises by what was not meant."""
    found = [*_others_fall(seen), *_by_repeating(seen), *_by_length(seen)]
    if not found:
        return None
    reward = seen.change("reward")
    rose = f"the reward rose from {reward.before:.3g} to {reward.now:.3g}, " if reward and reward.rose else ""
    texts, advice = zip(*found, strict=True)
    return seen.warning("hacking", rose + "; ".join(texts), "; ".join(dict.fromkeys(advice)))


def _by_length(seen: Seen) -> Iterator[tuple[str, str]]:
    paid, length, now = seen.line("length_pays"), seen.first("mean_length"), seen.now("mean_length")
    if not seen.reward_rose or not paid or not length or now is None or now < GREW * length:
        return
    # where all are as long as they can be there is no correlation left to see
    pays = max(statistics.fmean(paid), statistics.fmean(paid[-WINDOW:]))
    if pays < PAID_BY:
        return
    yield (
        f"and it is hackable by length: longer answers to the same prompt get more (correlation {pays:.2f}), and they "
        f"grew from {length:.0f} to {now:.0f} tokens",
        "take the length out of what is paid, or add a reward that costs it (length_band)",
    )


def _by_repeating(seen: Seen) -> Iterator[tuple[str, str]]:
    pays, first, now = seen.now("repetition_pays"), seen.first("repetition"), seen.now("repetition")
    if not seen.reward_rose or first is None or now is None or now < REPEATED or now < first + MORE_REPEATED:
        return
    # where all repeat themselves alike, there is no correlation left to see
    strongest = max(pays or 0.0, max(of_each(seen.steps, "repetition_pays"), default=0.0))
    yield (
        f"and it is hackable by repeating a word: answers repeat {now:.0%} of themselves (at first {first:.0%}), and "
        f"what repeats itself gets more (correlation up to {strongest:.2f})",
        "count each thing that is paid for once only, or add a reward that costs repetition",
    )


def _others_fall(seen: Seen) -> Iterator[tuple[str, str]]:
    """Rewards that are not trained on, or are guarded, fall while the total rises."""
    advice = "read the answers of the last steps; pay for what those rewards measure too, or lower learning_rate"
    fallen = {}
    for name in sorted(seen.rules.guards):
        change = seen.change(f"rewards.{name}")
        if change and change.fell and seen.reward_rose:
            fallen[name] = (change.before, change.now)
    fallen |= _fallen_when_watched(seen)
    for name, (before, now) in fallen.items():
        yield f"while {name}, which it is not to be won at the cost of, fell from {before:.3g} to {now:.3g}", advice


_FALLS_IN_A_ROW = 2
_ERRORS_OF_A_FALL = 2.5
"""Standard errors, twice in a row, of a paired difference over some 8 to 24 prompts."""


def _fallen_when_watched(seen: Seen) -> dict[str, tuple[float, float]]:
    last = seen.watched[-_FALLS_IN_A_ROW:]
    if len(last) < _FALLS_IN_A_ROW or not all(_surely(event, "gain", "gain_error") for event in last):
        return {}
    names = set.intersection(*(set(event.get("guarded") or {}) for event in last))
    found = {}
    for name in sorted(names):
        parts = [event["guarded"][name] for event in last]
        if all((number_of(p, "error") or 0) * -_ERRORS_OF_A_FALL > (number_of(p, "difference") or 0) for p in parts):
            found[name] = (parts[-1]["now"] - parts[-1]["difference"], parts[-1]["now"])
    return found


def _surely(event: object, value: str, error: str) -> bool:
    assert isinstance(event, dict)
    gain, unsure = number_of(event, value), number_of(event, error)
    return gain is not None and unsure is not None and gain > 2 * unsure
