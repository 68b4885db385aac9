"""Prompts whose answers all score the same are drawn less and never lost; every number here is worked out by hand."""

import itertools
import math
import random
from collections import Counter

import pytest

from praison_agent_rl.curriculum import (
    BEFORE,
    Group,
    chance,
    draw,
    group_of,
    groups_of,
    in_words,
    last_groups,
    recorded_groups,
    summary,
)


def silent(row: int, turn: int = 0, mean: float | None = 1.0) -> Group:
    return Group(row, 0.0 if mean is not None else None, mean, turn)


def telling(row: int, turn: int = 0, mean: float = 0.5) -> Group:
    return Group(row, 0.5, mean, turn)


class Dice(random.Random):
    """Gives the numbers it is told, and shuffles nothing."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self._numbers = iter(numbers)

    def random(self) -> float:
        return next(self._numbers)

    def shuffle(self, x) -> None:
        """In their order."""


# --- what a group says ------------------------------------------------------------------------------------------------


def test_a_group_says_how_far_its_scores_lie_apart() -> None:
    # mean 2, squared deviations 1 + 1, divided by 2 - 1
    assert group_of(3, [1.0, 3.0], 1) == Group(3, round(math.sqrt(2), 6), 2.0, 1)
    assert not group_of(3, [1.0, 3.0], 1).silent


@pytest.mark.parametrize(
    ("scores", "spread", "mean"),
    [
        ([0.7] * 7, 0.0, 0.7),  # whose sum in binary is no 4.9
        ([0.1 + 0.2, 0.3], 0.0, 0.3),  # a rounding error is no difference
        ([1.0, None, math.nan], None, 1.0),  # one score is compared with nothing
        ([None, None], None, None),
        ([math.inf, 0.0], None, 0.0),
    ],
)
def test_nothing_can_be_learned_where_scores_do_not_differ(scores, spread, mean) -> None:
    assert group_of(0, scores, 0) == Group(0, spread, mean, 0)
    assert group_of(0, scores, 0).silent


def test_missing_scores_do_not_hide_a_difference() -> None:
    assert group_of(0, [None, 0.0, 1.0, math.nan], 0) == Group(0, 0.707107, 0.5, 0)


# --- how likely a prompt is drawn -------------------------------------------------------------------------------------


def test_a_silent_prompt_is_drawn_a_quarter_as_often_and_surely_in_the_fourth_pass() -> None:
    assert [chance(silent(0, turn=2), turn) for turn in (3, 4, 5, 6, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert chance(silent(0, BEFORE), 0) == 0.25, "recorded answers count as the pass before the first"


def test_a_prompt_with_a_signal_or_one_never_asked_is_drawn_always() -> None:
    assert chance(telling(0), 1) == chance(None, 1) == 1.0


def test_the_last_group_of_the_passes_before_counts() -> None:
    groups = [silent(0, 0), telling(1, 0), telling(0, 1), silent(1, 2)]
    assert last_groups(groups, before=1) == {0: groups[0], 1: groups[1]}
    assert last_groups(groups, before=2) == {0: groups[2], 1: groups[1]}
    assert last_groups(groups, before=0) == {}


# --- the order of a pass ----------------------------------------------------------------------------------------------


def test_without_a_silent_prompt_the_order_stays_as_it_was() -> None:
    order = [4, 2, 0, 3, 1]
    assert draw(order, {}, turn=0, batch=2, rng=random.Random(0)) == order
    assert draw(order, {row: telling(row) for row in order}, turn=1, batch=2, rng=random.Random(0)) == order


def test_a_prompt_with_a_signal_stands_in_the_place_of_one_that_is_not_drawn() -> None:
    last = {0: silent(0), 1: silent(1), 2: telling(2), 3: telling(3)}
    # 0 is not drawn (0.25 is not below its chance of 1/4), 1 is (0.24)
    order = draw([0, 2, 1, 3], last, turn=1, batch=2, rng=Dice(0.25, 0.9, 0.24, 0.9))
    assert order == [3, 2, 1, 3]  # 2 comes first among those with a signal, but is in this batch already


def test_a_prompt_that_would_have_been_left_out_comes_before_one_that_is_drawn_again() -> None:
    last = {0: silent(0), **{row: telling(row) for row in (1, 2, 3, 4)}}
    # batches (1, 0) and (2, 3), and 4 is left out
    assert draw([1, 0, 2, 3, 4], last, turn=1, batch=2, rng=Dice(*[0.9] * 5)) == [1, 4, 2, 3, 4]


def test_what_has_a_signal_comes_before_what_is_not_known() -> None:
    last = {0: silent(0, BEFORE), 1: telling(1, BEFORE)}
    assert draw([0, 2, 3, 1], last, turn=0, batch=1, rng=Dice(*[0.9] * 4)) == [1, 2, 3, 1]
    assert draw([0, 2, 3, 1], {0: last[0]}, turn=0, batch=1, rng=Dice(*[0.9] * 4)) == [2, 2, 3, 1]


def test_no_prompt_is_twice_in_a_batch_nor_more_than_four_times_in_a_pass() -> None:
    last = {row: silent(row) for row in range(19)} | {19: telling(19)}
    order = draw(list(range(20)), last, turn=1, batch=2, rng=Dice(*[0.9] * 20))
    assert Counter(order)[19] == 4 and Counter(order).most_common(2)[1][1] == 1
    assert all(len(set(order[start : start + 2])) == 2 for start in range(0, 20, 2))
    # the free places are taken from the front; the other prompts stay where they were
    assert order == [19, 1, 19, 3, 19, *range(5, 20)]


def test_where_every_prompt_is_silent_each_is_drawn_as_before() -> None:
    order = [2, 0, 1, 3]
    assert draw(order, {row: silent(row) for row in order}, turn=1, batch=2, rng=Dice(*[0.9] * 4)) == order


def test_a_batch_that_needs_every_prompt_gets_every_prompt() -> None:
    last = {0: silent(0), 1: silent(1), 2: telling(2), 3: telling(3)}
    assert sorted(draw([3, 0, 2, 1], last, turn=1, batch=4, rng=Dice(*[0.9] * 4))) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_a_pass_is_as_long_as_ever_and_has_different_prompts_in_each_batch(seed: int) -> None:
    rng = random.Random(seed)
    count, batch = rng.randint(1, 60), rng.randint(1, 8)
    last = {row: rng.choice([silent, telling])(row, rng.randint(0, 4)) for row in range(count) if rng.random() < 0.9}
    order = rng.sample(range(count), count)
    drawn = draw(order, last, turn=5, batch=batch, rng=rng)
    assert len(drawn) == count and set(drawn) <= set(order)
    end = count // batch * batch
    assert all(len(set(drawn[start : start + batch])) == batch for start in range(0, end, batch))
    assert max(Counter(drawn[:end]).values(), default=0) <= 4


def test_over_many_passes_a_prompt_that_stays_silent_is_drawn_again_and_again() -> None:
    groups = [silent(row) if row < 10 else telling(row) for row in range(20)]
    passes: list[list[int]] = []
    for turn in range(1, 101):
        order = draw(range(20), last_groups(groups, before=turn), turn=turn, batch=2, rng=random.Random(turn))
        passes.append(order)
        groups += [silent(row, turn) if row < 10 else telling(row, turn) for row in order]
    for row in range(10):
        asked = [turn for turn, order in enumerate(passes) if row in order]
        assert max(later - earlier for earlier, later in itertools.pairwise(asked)) <= 4
        # the mean wait is 1/4 + 2 * 3/8 + 3 * 9/32 + 4 * 3/32 = 2.21875 passes
        assert len(asked) == pytest.approx(100 / 2.21875, abs=15)
    assert all(len(order) == 20 for order in passes)


# --- what is said of a run --------------------------------------------------------------------------------------------


def step(number: int, *groups: Group) -> dict:
    return {"event": "step", "step": number, "signal": [list(group) for group in groups]}


def test_groups_are_read_back_from_the_steps_up_to_one_of_them() -> None:
    steps = [step(1, telling(0), silent(1)), {"event": "step", "step": 2}, step(3), step(4, silent(0, 1))]
    assert groups_of(steps) == [telling(0), silent(1), silent(0, 1)]
    assert groups_of(steps, until=3) == [telling(0), silent(1)]


def test_what_was_known_before_is_read_from_the_last_event_that_says_it() -> None:
    event = {"event": "curriculum", "recorded": [list(silent(4, BEFORE))]}
    assert recorded_groups([{"event": "note"}]) is None
    assert recorded_groups([{"event": "curriculum", "recorded": []}, {"event": "note"}, event]) == [silent(4, BEFORE)]


def test_the_report_counts_prompts_by_their_last_group() -> None:
    groups = [silent(0, 0, 1.0), silent(1, 0, 0.0), telling(2, 0), telling(3, 0), silent(4, 0, None)]
    groups += [silent(2, 1, 1.0), telling(3, 1), telling(3, 1), silent(1, 1, 0.0)]
    found = summary(groups, [silent(0, BEFORE)])
    assert found == {
        "prompts": 5,
        "silent": 4,
        "right": 2,  # 0 and 2
        "wrong": 1,
        "alike": 0,
        "unscored": 1,
        "recorded_silent": 1,
        "passes": [{"groups": 5, "silent": 3}, {"groups": 4, "silent": 2}],
        # pass 0 met 0, and drew it; pass 1 met 0, 1, 4 and drew 1; it met 2 and 3 with a signal and drew 2, 3, 3
        "draws": {"silent": 2 / 4, "signal": 3 / 2},
    }
    assert in_words(found, chosen=True) == (
        "4 of 5 prompts carried no signal in their last group: 2 all right, 1 all wrong, 1 without a score. A pass "
        "drew a prompt without a signal 0.5 times, and one with a signal 1.5 times"
    )
    assert "curriculum is off" in str(in_words(found, chosen=False))


def test_a_run_of_one_pass_says_that_it_could_not_choose() -> None:
    found = summary([silent(0, 0, 0.2), telling(1, 0, 0.9)])
    assert found is not None and found["wrong"] == 1 and found["draws"] == {"silent": None, "signal": None}
    assert "1 of 2 prompts carried no signal in their last group: 1 all wrong; they would be drawn less" in str(
        in_words(found, chosen=True)
    )


def test_one_score_in_the_whole_run_is_neither_right_nor_wrong() -> None:
    found = summary([silent(0, 0, 0.7), silent(1, 0, 0.7)])
    assert found is not None and (found["alike"], found["right"], found["wrong"]) == (2, 0, 0)


def test_nothing_is_said_where_every_prompt_had_a_signal_or_nothing_was_asked() -> None:
    assert in_words(summary([telling(0)]), chosen=True) is None
    assert summary([]) is None and in_words(None, chosen=True) is None
