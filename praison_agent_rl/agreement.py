"""How far scores agree with people's ratings: counting pairs, and nothing else."""

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

from praison_agent_rl.errors import RewardError
from praison_agent_rl.records import Record


class Agreement(Record):
    """What the pairs of rated answers say about the scores."""

    n: int
    """Answers that have both a score and a rating."""
    pairs: int
    """Pairs of them whose ratings differ."""
    accuracy: float | None
    """Share of those pairs in which the better rated answer has the higher score, from 0 to 1; an equal score counts
    half, so 0.5 is what guessing gives. None where there is no pair."""
    tau: float | None
    """Kendall's tau-b, from -1 to 1. None where the ratings or the scores are all alike."""


def agreement(
    scores: Sequence[float | None],
    ratings: Sequence[float | None],
    *,
    groups: Sequence[Hashable] | None = None,
) -> Agreement:
    """How well ``scores`` put answers in the order in which people's ``ratings`` put them.

    An answer without a finite score or rating is left out. With ``groups`` (the prompt of each answer, say) only
    answers of one group are compared. tau-b is that of Kendall, The treatment of ties in ranking problems, Biometrika
    33 (1945): (C - D) / sqrt((N - Ts)(N - Tr)) of the N pairs, with C in the same and D in the opposite order, Ts with
    equal scores and Tr with equal ratings.

    >>> agreement([0.1, 0.4, 0.4, 0.9], [1, 2, 3, 3])
    Agreement(n=4, pairs=5, accuracy=0.9, tau=0.8)

    Raises:
        RewardError: the lists differ in length.
    """
    given = [len(scores), len(ratings), *([] if groups is None else [len(groups)])]
    if len(set(given)) > 1:
        raise RewardError(f"agreement needs lists of one length; these have {', '.join(map(str, given))}")
    rated = [
        (group, float(rating), float(score))
        for score, rating, group in zip(scores, ratings, groups or [None] * len(scores), strict=True)
        if score is not None and rating is not None and math.isfinite(score) and math.isfinite(rating)
    ]
    places = {group: place for place, group in enumerate(dict.fromkeys(group for group, _, _ in rated))}
    rated.sort(key=lambda one: (places[one[0]], one[1]))
    counts = [_count([one[1:] for one in part]) for _, part in groupby(rated, key=lambda one: places[one[0]])]
    same, opposite, tied, pairs, unlike = (sum(column) for column in zip(*counts, strict=True)) if counts else [0] * 5
    return Agreement(
        n=len(rated),
        pairs=pairs,
        accuracy=(same + tied / 2) / pairs if pairs else None,
        tau=(same - opposite) / math.sqrt(pairs * unlike) if pairs and unlike else None,
    )


def _count(rated: list[tuple[float, float]]) -> tuple[int, int, int, int, int]:
    """Of the pairs of one group, sorted by rating.

    Those in the same order, in the opposite one, with different ratings and one score, with different ratings, with
    different scores. Each answer is compared with all that are rated lower at once (a Fenwick tree over the scores),
    so that ten thousand answers take no minute.
    """
    ranks = {score: rank for rank, score in enumerate(sorted({score for _, score in rated}), 1)}
    tree, before = [0] * (len(ranks) + 1), 0
    same = opposite = pairs = 0
    for _, part in groupby(rated, key=lambda one: one[0]):
        held = [ranks[score] for _, score in part]
        for rank in held:
            same += _up_to(tree, rank - 1)
            opposite += before - _up_to(tree, rank)
            pairs += before
        for rank in held:
            for place in _above(rank, len(tree)):
                tree[place] += 1
        before += len(held)
    often = [len(list(part)) for _, part in groupby(sorted(score for _, score in rated))]
    unlike = math.comb(len(rated), 2) - sum(math.comb(times, 2) for times in often)
    return same, opposite, pairs - same - opposite, pairs, unlike


def _up_to(tree: list[int], rank: int) -> int:
    total = 0
    while rank > 0:
        total += tree[rank]
        rank -= rank & -rank
    return total


def _above(rank: int, size: int) -> Iterator[int]:
    while rank < size:
        yield rank
        rank += rank & -rank
