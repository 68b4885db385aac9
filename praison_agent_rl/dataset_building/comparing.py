"""What answers to one prompt say of each other: the best against the worst, pairs that contradict; no file is read."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from praison_agent_rl.data_checks import without_white_space
from praison_agent_rl.dataset_building.row_texts import digest_of

PAIR_REASONS = {
    "failed": "ended with an error",
    "later turn": "do not open their conversation",
    "filtered": "refused by the filter",
    "empty": "ask nothing: no message, or a last user message that is blank",
    "malformed": "have a prompt or an answer that cannot be trained on",
    "column": "have a column that cannot be trained on",
    "too long": "have a prompt with too many characters",
    "no answer": "have no answer: no call of the model said what came out",
    "tools": "were answered again with results of tools that the first answer did not have",
    "empty side": "have an answer that is blank",
    "equal": "have equal answers, or answers that differ in white space only",
    "no score": "have fewer than two answers with a score",
    "equal scores": "have answers with equal scores",
    "margin": "have scores that differ by less than min_margin",
    "contradicting": "say the opposite of another pair, which is left out too",
    "repeated": "say what an earlier pair says",
    "near-duplicate": "have a prompt that says nearly the same as that of an earlier pair",
    "between sides": "would have to leave the side of the split that an earlier build gave their prompt",
}
"""Why corrections, ratings and retries make no pair, in the order in which it is looked at."""

_TOLD, _OPPOSITE, _GIVEN = 1, 2, 4


class Rated(NamedTuple):
    """One answer to a prompt, with the scores that it was given wherever it was given."""

    text: int
    """Digest of the answer without its white space."""
    total: float
    times: int
    base: int
    """Where the prompt is put aside, with the run that it is of."""
    place: int
    """Where the answer is put aside."""

    @property
    def score(self) -> float:
        """The mean of its scores."""
        return self.total / self.times


class Claim(NamedTuple):
    """One answer is better than another one to the same prompt."""

    prompt: int
    """Digest."""
    chosen: Rated
    rejected: Rated
    source: str
    scored: bool
    """Whether the scores mean anything."""

    @property
    def margin(self) -> float:
        """By how much the chosen one's score is higher; without the last digits, in which 0.9 - 0.8 is not 0.1."""
        return round(self.chosen.score - self.rejected.score, 9)


def digest_of_answer(text: str) -> int:
    """Equal for answers that are equal or differ in white space only; case is a difference."""
    return digest_of("answer", without_white_space(text))


def add(answers: list[Rated], new: Rated) -> None:
    """Put an answer to those of its prompt; one that is there already has the mean of its scores."""
    for at, old in enumerate(answers):
        if old.text == new.text:
            answers[at] = old._replace(total=old.total + new.total, times=old.times + new.times)
            return
    answers.append(new)


def best_and_worst(answers: Sequence[Rated], least: float) -> tuple[Rated, Rated] | str:
    """The best and the worst of the answers to a prompt, or why they make no pair.

    One pair a prompt: a prompt that was rated often weighs no more than others, its margin is the clearest there is,
    and no two pairs of it can contradict each other. Of equals the first counts.
    """
    if len(answers) < 2:
        return "equal"
    best = max(answers, key=lambda answer: answer.score)
    worst = min(answers, key=lambda answer: answer.score)
    if best.score == worst.score:
        return "equal scores"
    return (best, worst) if round(best.score - worst.score, 9) >= least else "margin"


def settled(claims: Sequence[Claim]) -> Iterator[Claim | str]:
    """Each claim, or the reason why it does not count."""
    seen: dict[int, int] = {}
    for claim in claims:
        key, way = _both_ways(claim)
        seen[key] = seen.get(key, 0) | way
    for claim in claims:
        key, way = _both_ways(claim)
        if seen[key] & (_TOLD | _OPPOSITE) == _TOLD | _OPPOSITE:
            yield "contradicting"
        elif seen[key] & _GIVEN:
            yield "repeated"
        else:
            seen[key] |= _GIVEN
            yield claim


def _both_ways(claim: Claim) -> tuple[int, int]:
    """What a claim shares with its opposite, and which of the two it is."""
    chosen, rejected = claim.chosen.text, claim.rejected.text
    way = _TOLD if chosen < rejected else _OPPOSITE
    return hash((claim.prompt, min(chosen, rejected), max(chosen, rejected))), way
