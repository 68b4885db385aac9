"""Agreement with ratings counts pairs, and says nothing where there is nothing to compare."""

import itertools
import math
import random

import pytest

from praison_agent_rl.agreement import agreement
from praison_agent_rl.errors import RewardError


def test_a_perfect_order_and_its_opposite_are_1_and_minus_1() -> None:
    up, down = agreement([0.1, 0.2, 0.9], [1, 2, 3]), agreement([0.9, 0.2, 0.1], [1, 2, 3])
    assert (up.tau, up.accuracy, up.pairs, up.n) == (1.0, 1.0, 3, 3)
    assert (down.tau, down.accuracy) == (-1.0, 0.0)


def test_ties_count_as_kendall_has_them() -> None:
    # pairs: (1,2) up, (1,3) up, (1,4) up, (2,3) scores tie, (2,4) up, (3,4) ratings tie
    found = agreement([0.1, 0.4, 0.4, 0.9], [1, 2, 3, 3])
    assert found.pairs == 5 and found.accuracy == pytest.approx(4.5 / 5)
    assert found.tau == pytest.approx(4 / math.sqrt(5 * 5))


def test_equal_scores_are_no_better_than_guessing() -> None:
    found = agreement([0.5, 0.5, 0.5], [1, 2, 3])
    assert found.accuracy == 0.5 and found.tau is None


def test_where_nothing_can_be_compared_there_is_no_number() -> None:
    for scores, ratings in (([], []), ([0.5], [1]), ([0.1, 0.9], [3, 3])):
        found = agreement(scores, ratings)
        assert (found.pairs, found.accuracy, found.tau) == (0, None, None)


def test_an_answer_without_a_score_or_a_rating_is_left_out() -> None:
    found = agreement([0.1, None, 0.2, float("nan"), 0.3], [1, 2, None, 4, 5])
    assert found.n == 2 and found.accuracy == 1.0


def test_only_answers_of_one_group_are_compared() -> None:
    scores, ratings, groups = [0.1, 0.2, 0.8, 0.9], [1, 5, 1, 5], ["p", "p", "q", "q"]
    found = agreement(scores, ratings, groups=groups)
    assert (found.pairs, found.accuracy, found.tau) == (2, 1.0, 1.0)
    assert agreement(scores, ratings).accuracy == pytest.approx(3 / 4)


def test_it_counts_as_looking_at_every_pair_does() -> None:
    chance = random.Random(3)
    for _ in range(100):
        rated = [(chance.randint(0, 5), chance.randint(0, 3)) for _ in range(chance.randint(2, 25))]
        pairs = [((a[0] - b[0]), (a[1] - b[1])) for a, b in itertools.combinations(rated, 2)]
        told = [(s > 0) == (r > 0) and s != 0 for s, r in pairs if r]
        halves = sum(s == 0 for s, r in pairs if r)
        found = agreement([s for s, _ in rated], [r for _, r in rated])
        assert found.pairs == len(told)
        if told:
            assert found.accuracy == pytest.approx((sum(told) + halves / 2) / len(told))
        unlike = sum(s != 0 for s, _ in pairs)
        if told and unlike:
            net = sum((s > 0) - (s < 0) if r > 0 else (s < 0) - (s > 0) for s, r in pairs if r)
            assert found.tau == pytest.approx(net / math.sqrt(len(told) * unlike))


def test_lists_of_different_lengths_are_an_error() -> None:
    with pytest.raises(RewardError, match="one length; these have 2, 3"):
        agreement([1.0, 2.0], [1, 2, 3])
