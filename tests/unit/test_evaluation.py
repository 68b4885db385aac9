"""The comparison counts and averages as one would by hand, and its interval holds what it says."""

import itertools
import math

import numpy as np
import pytest

from praison_agent_rl.evaluation import compare, paired_interval, score_answers
from praison_agent_rl.records import Answer
from praison_agent_rl.rewards import Reward


def interval(base, new, seed=0):
    return paired_interval(np.array(base, dtype=float), np.array(new, dtype=float), seed=seed)


def answers(*totals_of_prompts, **rewards):
    """Answers whose totals are given prompt by prompt; further rewards are given in the same form."""
    made = []
    for prompt, totals in enumerate(totals_of_prompts):
        for sample, total in enumerate(totals):
            scores = {"main": total, **{name: values[prompt][sample] for name, values in rewards.items()}}
            made.append(Answer(prompt=prompt, sample=sample, text="", tokens=1, rewards=scores, total=total))
    return made


# --- the interval -----------------------------------------------------------------------------------------------------


def test_two_prompts_have_the_quantiles_that_follow_from_four_resamples():
    # differences 0 and 1: resample means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4
    found = interval([0.5, 0.5], [0.5, 1.5])
    assert (found.base, found.new, found.difference) == (0.5, 1.0, 0.5)
    assert (found.low, found.high) == (0.0, 1.0)


def test_three_prompts_have_the_quantiles_of_all_27_resamples():
    differences = [0.0, 1.0, 5.0]
    means = sorted(sum(drawn) / 3 for drawn in itertools.product(differences, repeat=3))
    # (0, 0, 0) has probability 1/27 = 3.7 % and so holds the 2.5 % quantile; (5, 5, 5) the 97.5 % one
    assert (means[0], means[-1]) == (0.0, 5.0) and 1 / 27 > 0.025
    found = interval([1.0, 1.0, 1.0], [1.0, 2.0, 6.0])
    assert (found.low, found.high) == (0.0, 5.0)


def test_four_prompts_have_the_quantiles_of_all_256_resamples():
    differences = [-1.0, 0.0, 1.0, 4.0]
    means = sorted(sum(drawn) / 4 for drawn in itertools.product(differences, repeat=4))
    low, high = means[math.floor(0.025 * 256)], means[math.floor(0.975 * 256)]  # the 7th and the 250th of 256
    # neither lies at the border of a step, so 10 000 draws meet the same values
    assert means[5] == low == means[7] and means[248] == high == means[250]
    found = interval([0.0] * 4, differences)
    assert (found.low, found.high) == pytest.approx((low, high))


def test_one_prompt_has_an_interval_of_no_width():
    found = interval([0.25], [1.0])
    assert (found.difference, found.low, found.high) == (0.75, 0.75, 0.75)


def test_many_prompts_have_nearly_the_interval_of_the_normal_distribution():
    random = np.random.default_rng(7)
    base = random.normal(0.5, 0.2, size=200)
    new = base + random.normal(0.03, 0.1, size=200)
    differences = new - base
    error = differences.std() / math.sqrt(200)  # the bootstrap's own: divided by n and not n - 1
    found = interval(base, new)
    assert found.difference == pytest.approx(differences.mean())
    # quantiles of 10 000 draws have a standard error of sqrt(0.025 * 0.975 / 10 000) / density = 0.027 errors
    assert found.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.15 * error)


def test_both_sides_of_a_prompt_stay_together():
    # prompts differ widely, but each gains exactly 0.1: a paired interval has no width, an unpaired one would be wide
    base = np.linspace(-5, 5, 40)
    found = interval(base, base + 0.1)
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)


def test_intervals_hold_the_true_difference_in_about_95_of_100_cases():
    random = np.random.default_rng(1)
    held = 0
    for repetition in range(300):
        base = random.normal(0.0, 1.0, size=60)
        new = base + random.normal(0.2, 0.5, size=60)
        found = interval(base, new, seed=repetition)
        held += found.low <= 0.2 <= found.high
    assert 0.91 <= held / 300 <= 0.98


def test_the_same_seed_gives_the_same_interval_and_another_a_slightly_different_one():
    random = np.random.default_rng(3)
    base, new = random.normal(size=30), random.normal(size=30)
    one, again, other = interval(base, new, 5), interval(base, new, 5), interval(base, new, 6)
    assert one == again != other
    assert one.low == pytest.approx(other.low, abs=0.05) and one.high == pytest.approx(other.high, abs=0.05)


def test_without_prompts_everything_is_nan():
    found = interval([], [])
    assert all(math.isnan(value) for value in found.model_dump().values())


# --- the comparison ---------------------------------------------------------------------------------------------------


def test_wins_ties_and_losses_are_counted_by_the_mean_of_a_prompts_answers():
    base = answers([0.0, 1.0], [0.5, 0.5], [1.0, 1.0], [0.2, 0.2])  # means 0.5, 0.5, 1.0, 0.2
    new = answers([1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.3, 0.2])  # means 1.0, 0.5, 0.5, 0.25
    found = compare(base, new)
    assert (found.wins, found.ties, found.losses, found.unscored) == (2, 1, 1, 0)
    assert (found.prompts, found.samples) == (4, 2)
    assert found.total.base == pytest.approx(2.2 / 4) and found.total.new == pytest.approx(2.25 / 4)
    assert found.total.difference == pytest.approx(0.05 / 4)
    assert not found.better


def test_answers_without_a_score_are_left_out_of_their_prompts_mean():
    base = answers([0.4, None], [0.4, 0.6])
    new = answers([None, 0.7], [None, 0.5])
    found = compare(base, new)
    assert (found.total.base, found.total.new) == pytest.approx((0.45, 0.6))
    assert (found.wins, found.ties, found.losses, found.unscored) == (1, 1, 0, 0)


def test_prompts_that_one_side_has_no_score_for_are_left_out_and_counted():
    base = answers([0.0, 0.0], [None, None], [1.0, 0.0], [None, None])
    new = answers([1.0, 1.0], [1.0, 1.0], [None, None], [None, None])
    found = compare(base, new)
    assert (found.prompts, found.unscored) == (1, 3)
    assert (found.wins, found.ties, found.losses) == (1, 0, 0)
    assert (found.total.base, found.total.new) == (0.0, 1.0)


def test_prompts_that_one_side_did_not_answer_are_counted_as_unscored():
    found = compare(answers([0.5], [0.5], [0.5]), answers([1.0]))
    assert (found.prompts, found.unscored, found.wins) == (1, 2, 1)


def test_each_reward_has_an_interval_of_its_own_over_the_prompts_that_it_scored():
    base = answers([1.0], [1.0], [1.0], brief=[[0.5], [None], [0.25]])
    new = answers([1.0], [1.0], [1.0], brief=[[1.0], [1.0], [0.25]])
    found = compare(base, new)
    assert list(found.rewards) == ["main", "brief"]
    assert (found.rewards["brief"].base, found.rewards["brief"].new) == (0.375, 0.625)
    assert found.rewards["main"].difference == 0.0
    assert (found.rewards["brief"].low, found.rewards["brief"].high) == (0.0, 0.5)  # differences 0.5 and 0


def test_without_any_score_nothing_is_better():
    found = compare(answers([None], [None]), answers([None], [None]))
    assert math.isnan(found.total.difference) and math.isnan(found.total.low)
    assert (found.prompts, found.unscored, found.wins) == (0, 2, 0)
    assert not found.better


def test_without_any_answer_nothing_is_better():
    found = compare([], [])
    assert (found.prompts, found.samples, found.unscored, found.rewards) == (0, 0, 0, {})
    assert not found.better


def test_equal_scores_are_not_better():
    found = compare(answers(*[[0.7, 0.7]] * 20), answers(*[[0.7, 0.7]] * 20))
    assert (found.total.low, found.total.high) == (0.0, 0.0) and found.ties == 20
    assert not found.better


def test_a_gain_on_every_prompt_is_better_and_a_loss_is_not():
    low, high = answers(*[[0.2]] * 20), answers(*[[0.4]] * 20)
    assert compare(low, high).better and compare(low, high).wins == 20
    assert not compare(high, low).better and compare(high, low).losses == 20


def test_a_gain_on_4_of_20_prompts_is_proved_and_on_3_is_not():
    # the low quantile is above 0 if less than 2.5 % of resamples miss every gaining prompt:
    # (17/20)**20 = 3.9 % and (16/20)**20 = 1.2 %, so 3 do not suffice and 4 do
    base = answers(*[[0.0]] * 20)
    with_gains = {k: answers(*[[1.0]] * k, *[[0.0]] * (20 - k)) for k in (2, 3, 4, 5)}
    assert {k: compare(base, new).better for k, new in with_gains.items()} == {2: False, 3: False, 4: True, 5: True}


def test_the_order_of_the_answers_does_not_matter():
    base, new = answers([0.1], [0.5], [0.9]), answers([0.4], [0.5], [0.3])
    assert compare(base, new) == compare(base[::-1], [new[1], new[2], new[0]])


# --- scores -----------------------------------------------------------------------------------------------------------


def test_each_answer_is_scored_with_the_columns_of_its_own_row():
    rows = [{"prompt": "a", "wanted": "x"}, {"prompt": "b", "wanted": "y"}]
    given = [(0, 0, "x", 3), (0, 1, "y", 2), (1, 0, "y", 5), (1, 1, "x", 1)]
    seen = {}

    def right(prompts, completions, wanted, completion_ids, **_):
        seen["prompts"], seen["lengths"] = prompts, [len(ids) for ids in completion_ids]
        return [float(text == want) for text, want in zip(completions, wanted, strict=True)]

    def first_only(completions, **_):
        return [0.5 if place == 0 else None for place in range(len(completions))]

    scored = score_answers(given, rows, [Reward(right, "right", 2.0), Reward(first_only, "first", 1.0)])
    assert seen == {"prompts": ["a", "a", "b", "b"], "lengths": [3, 2, 5, 1]}
    assert [answer.rewards for answer in scored] == [
        {"right": 1.0, "first": 0.5},
        {"right": 0.0, "first": None},
        {"right": 1.0, "first": None},
        {"right": 0.0, "first": None},
    ]
    assert [answer.total for answer in scored] == [2.5, 0.0, 2.0, 0.0]
    assert [(a.prompt, a.sample, a.text, a.tokens) for a in scored] == given


def test_an_answer_that_no_reward_scored_has_no_total():
    scored = score_answers([(0, 0, "x", 1)], [{"prompt": "a"}], [Reward(lambda completions, **_: [None], "silent")])
    assert (scored[0].total, scored[0].rewards) == (None, {"silent": None})
