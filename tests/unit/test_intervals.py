"""Intervals hold what they say, by hand, by an independent computation, and by simulation."""

import itertools
import math

import numpy as np
import pytest

from praison_agent_rl import intervals
from praison_agent_rl.intervals import (
    differences,
    magnitude,
    paired_interval,
    prompts_needed,
    student_t,
    unpaired_interval,
)


def interval(base, new, seed=0):
    return paired_interval(np.array(base, dtype=float), np.array(new, dtype=float), seed=seed)


# --- paired -----------------------------------------------------------------------------------------------------------


def test_three_pairs_have_the_interval_that_follows_from_27_resamples():
    # differences 1, 2, 3: mean 2, variance of the mean 1/3. The greatest pivot is that of (3, 3, 3), which has a spread
    # of 0 and so the variance 0.5 * 1/3 / 3.5 = 1/21: (3 - 2) * sqrt 21; being 1 of 27 it holds the 97.5 % quantile,
    # and is greater than Student's t with 2 degrees of freedom, 4.303
    found = interval([0.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    assert (found.base, found.new, found.difference) == (0.0, 2.0, 2.0)
    assert (found.low, found.high) == pytest.approx((2 - math.sqrt(7), 2 + math.sqrt(7)))


def test_six_skewed_pairs_have_on_one_side_the_limit_of_all_46656_resamples():
    gains = [-4.0, 0.5, 0.6, 0.7, 0.9, 1.0]
    n, mean = 6, sum(gains) / 6
    own = sum((g - mean) ** 2 for g in gains) / 5 / 6
    pivots = []
    for drawn in itertools.product(gains, repeat=6):
        m = sum(drawn) / n
        spread = (6 * sum((g - m) ** 2 for g in drawn) / 5 / 6 + 0.5 * own) / 6.5
        pivots.append((m - mean) / math.sqrt(spread))
    below, above = np.quantile(pivots, [0.025, 0.975])
    assert above > 2.5706 > -below  # t with 5 degrees of freedom, from a table
    found = interval([0.0] * 6, gains)
    assert found.low == pytest.approx(mean - above * math.sqrt(own), abs=0.05)  # of a width of 5
    assert found.high == pytest.approx(mean + 2.5706 * math.sqrt(own), abs=0.001)


def test_many_pairs_have_nearly_the_interval_of_the_normal_distribution():
    random = np.random.default_rng(7)
    base = random.normal(0.5, 0.2, size=200)
    new = base + random.normal(0.03, 0.1, size=200)
    gains = new - base
    error = gains.std(ddof=1) / math.sqrt(200)
    found = interval(base, new)
    assert found.difference == pytest.approx(gains.mean())
    assert found.low == pytest.approx(gains.mean() - 1.97 * error, abs=0.15 * error)
    assert found.high == pytest.approx(gains.mean() + 1.97 * error, abs=0.15 * error)


def test_both_sides_of_a_pair_stay_together():
    # prompts differ widely, but each gains exactly 0.1: a paired interval has no width, an unpaired one would be wide
    base = np.linspace(-5, 5, 40)
    found = interval(base, base + 0.1)
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)


def test_a_gain_on_all_but_one_of_40_is_proved():
    found = interval([0.0] * 40, [1.0] * 39 + [0.0])
    assert found.low > 0.7 and found.high >= 0.975


def test_the_same_seed_gives_the_same_interval_and_another_a_slightly_different_one():
    random = np.random.default_rng(3)
    base, new = random.normal(size=30), random.normal(size=30)
    one, again, other = interval(base, new, 5), interval(base, new, 5), interval(base, new, 6)
    assert one == again != other
    assert one.low == pytest.approx(other.low, abs=0.05) and one.high == pytest.approx(other.high, abs=0.05)


def test_a_higher_confidence_is_a_wider_interval():
    random = np.random.default_rng(3)
    base, new = random.normal(size=50), random.normal(size=50)
    usual, sure = paired_interval(base, new), paired_interval(base, new, confidence=0.995)
    width, wide = usual.high - usual.low, sure.high - sure.low
    assert wide / width == pytest.approx(2.94 / 2.01, rel=0.05)  # t with 49 degrees of freedom at 99.75 and 97.5 %


def test_the_memory_that_is_held_does_not_change_the_interval(monkeypatch):
    random = np.random.default_rng(4)
    base, new = random.normal(size=30), random.normal(size=30)
    whole = interval(base, new)
    monkeypatch.setattr(intervals, "_CELLS", 30 * 77)
    in_parts = interval(base, new)
    assert (in_parts.low, in_parts.high) == pytest.approx((whole.low, whole.high))


@pytest.mark.parametrize("pairs", [0, 1])
def test_fewer_than_two_pairs_have_no_limits(pairs):
    found = interval([0.25] * pairs, [1.0] * pairs)
    assert math.isnan(found.low) and math.isnan(found.high)
    assert found.difference == 0.75 if pairs else math.isnan(found.difference)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("places", [[0], [1], [0, 1]])
def test_what_is_no_number_has_no_limits(odd, places):
    sides = [[0.0] * 20, [1.0] * 20]
    for side in places:
        sides[side][3] = odd
    found = interval(*sides)
    assert math.isnan(found.low) and math.isnan(found.high)


def test_the_order_in_which_scores_were_summed_is_no_difference():
    base, new = np.array([(0.1 + 0.2 + 0.3) / 3] * 9), np.array([(0.3 + 0.2 + 0.1) / 3] * 9)
    assert (base != new).all()
    assert (differences(base, new) == 0).all()
    assert (interval(base, new).low, interval(base, new).high) == (0.0, 0.0)


def test_small_differences_stay():
    assert differences(np.array([0.0, 1.0]), np.array([1e-9, 1.0 + 1e-9])) == pytest.approx([1e-9, 1e-9])


def test_a_gain_on_4_of_20_prompts_is_proved_and_on_3_is_not():
    # 4 of 20: mean 0.2, error sqrt(0.16 / 19) = 0.0918, t with 19 degrees of freedom 2.093: 0.2 - 0.192 = +0.008;
    # 3 of 20: mean 0.15, error sqrt(0.1275 / 19) = 0.0819: 0.15 - 0.171 = -0.021
    lows = {k: interval([0.0] * 20, [0.0] * (20 - k) + [1.0] * k).low for k in (3, 4)}
    assert lows == pytest.approx({3: -0.0215, 4: 0.0079}, abs=5e-4)


CASES = {
    "normal": (lambda random, n: random.normal(0.3, 1.0, n), 0.3),
    "binary": (lambda random, n: (random.random(n) < 0.6) * 1.0 - (random.random(n) < 0.5), 0.1),
    "60 % zero": (lambda random, n: np.where(random.random(n) < 0.4, random.normal(0.5, 1.0, n), 0.0), 0.2),
    "few large gains": (lambda random, n: random.exponential(1.0, n), 1.0),
    "few large losses": (lambda random, n: -random.exponential(1.0, n), -1.0),
}


@pytest.mark.parametrize("n", [15, 60])
@pytest.mark.parametrize("case", CASES)
def test_intervals_hold_the_true_difference_in_about_95_of_100_cases(case, n, monkeypatch):
    # 400 repetitions: a standard error of 1.1 points; the benchmark interval_coverage.py has many more
    monkeypatch.setattr(intervals, "RESAMPLES", 2000)
    draw, truth = CASES[case]
    random = np.random.default_rng(1)
    found = [interval(np.zeros(n), draw(random, n), seed) for seed in range(400)]
    held = sum(i.low <= truth <= i.high for i in found) / 400
    assert 0.915 <= held <= 0.985
    assert sum(i.low > truth for i in found) / 400 <= 0.065


# --- unpaired ---------------------------------------------------------------------------------------------------------


def test_two_samples_have_nearly_welchs_interval():
    random = np.random.default_rng(2)
    a, b = random.normal(0, 1, 80), random.normal(0.5, 3, 40)
    error = math.sqrt(a.var(ddof=1) / 80 + b.var(ddof=1) / 40)
    found = unpaired_interval(a, b)
    assert (found.base, found.new) == pytest.approx((a.mean(), b.mean()))
    assert found.difference == pytest.approx(b.mean() - a.mean())
    # Welch's degrees of freedom: about 43, of which the 97.5 % quantile is 2.017
    assert found.low == pytest.approx(found.difference - 2.017 * error, abs=0.15 * error)
    assert found.high == pytest.approx(found.difference + 2.017 * error, abs=0.15 * error)


def test_runs_of_one_session_count_as_the_session_and_not_each_by_itself():
    random = np.random.default_rng(5)
    a, b = random.normal(0, 1, 30), random.normal(1, 1, 20)
    once = unpaired_interval(a, b, seed=3)
    sessions = [f"s{place}" for place in range(30)]
    copied = unpaired_interval(
        np.repeat(a, 6),
        np.repeat(b, 4),
        seed=3,
        clusters_a=np.repeat(sessions, 6).tolist(),
        clusters_b=[*range(20)] * 4,
    )  # b's labels do not match its copies, a's do
    assert copied.base == pytest.approx(once.base)
    both = unpaired_interval(
        np.repeat(a, 6), np.tile(b, 4), seed=3, clusters_a=np.repeat(sessions, 6).tolist(), clusters_b=[*range(20)] * 4
    )
    assert both.model_dump() == pytest.approx(once.model_dump())
    apart = unpaired_interval(np.repeat(a, 6), np.tile(b, 4), seed=3)
    assert apart.high - apart.low < 0.6 * (both.high - both.low)


def test_intervals_of_skewed_sessions_of_unequal_size_hold_the_truth_in_about_95_of_100_cases(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 2000)
    random, held = np.random.default_rng(0), 0
    for seed in range(300):
        sizes = [random.integers(1, 6, sessions) for sessions in (30, 20)]
        arms = [np.repeat(random.exponential(1, len(s)), s) + random.normal(0, 0.5, s.sum()) for s in sizes]
        labels = [np.repeat(np.arange(len(s)), s).tolist() for s in sizes]
        found = unpaired_interval(arms[0], arms[1] + 0.2, seed=seed, clusters_a=labels[0], clusters_b=labels[1])
        held += found.low <= 0.2 <= found.high
    assert 0.91 <= held / 300 <= 0.99


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 2.0], []), ([1.0, math.nan], [1.0, 2.0])])
def test_samples_that_say_nothing_have_no_limits(a, b):
    found = unpaired_interval(np.array(a), np.array(b))
    assert math.isnan(found.low) and math.isnan(found.high)


def test_a_single_session_has_no_limits_however_many_runs_it_has():
    found = unpaired_interval(np.arange(9.0), np.arange(9.0), clusters_a=["one"] * 9)
    assert math.isnan(found.low) and found.difference == 0


def test_each_value_needs_a_cluster():
    with pytest.raises(ValueError, match="3 values have 2 clusters"):
        unpaired_interval(np.zeros(3), np.zeros(3), clusters_a=["a", "b"])


# --- prompts needed ---------------------------------------------------------------------------------------------------


def test_prompts_needed_are_those_of_the_textbook():
    # differences of mean 0.5 and deviation 1: (1.95996 + 0.84162)**2 = 7.8489, by 0.25 is 31.4
    gains = np.array([0.5 - math.sqrt(0.5), 0.5 + math.sqrt(0.5)])
    assert prompts_needed(gains) == 32
    assert prompts_needed(gains, size=0.1) == 785
    assert prompts_needed(gains, power=0.9) == 43  # (1.95996 + 1.28155)**2 = 10.507, by 0.25 is 42.03
    assert prompts_needed(-gains) == 32


def test_as_many_prompts_as_are_said_to_be_needed_show_the_difference_in_about_80_of_100_cases(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 2000)
    random = np.random.default_rng(6)
    shown = [interval(np.zeros(32), random.normal(0.5, 1.0, 32), seed).low > 0 for seed in range(300)]
    assert 0.7 <= sum(shown) / 300 <= 0.88


@pytest.mark.parametrize("gains", [[], [1.0], [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_where_there_is_nothing_to_show_no_number_is_said(gains):
    assert prompts_needed(np.array(gains)) is None


def test_never_fewer_than_anything_is_decided_on():
    assert prompts_needed(np.full(20, 0.3)) == 8


def test_students_t_is_that_of_the_tables():
    table = {5: 2.5706, 7: 2.3646, 14: 2.1448, 29: 2.0452, 99: 1.9842}
    assert {n: student_t(0.975, n) for n in table} == pytest.approx(table, abs=5e-4)
    assert (student_t(0.975, 2), student_t(0.975, 3)) == pytest.approx((4.3027, 3.1824), abs=0.04)
    assert student_t(0.995, 10) == pytest.approx(3.1693, abs=1e-3)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_magnitude_is_the_power_of_two_at_or_below_the_largest_finite_value():
    assert magnitude(np.array([-5.0, 1.0]), np.array([math.inf, math.nan])) == 4.0
    assert (magnitude(np.array([0.0])), magnitude(np.array([])), magnitude(np.array([1e308]))) == (1.0, 1.0, 2.0**1023)


@pytest.mark.parametrize("power", [-900, -60, 260, 1020])
def test_an_interval_has_the_size_of_its_values_however_large_or_small_they_are(power):
    base, new = [0.0, 0.5, 0.25, 0.5, 1.0], [1.0, 0.5, 0.5, 1.5, 0.5]
    plain, size = interval(base, new), 2.0**power
    found = interval([size * b for b in base], [size * n for n in new])
    assert found.model_dump() == {name: size * value for name, value in plain.model_dump().items()}
    gains = np.array(new) - np.array(base)
    assert prompts_needed(size * gains) == prompts_needed(gains)
    other = unpaired_interval(size * np.array(base), size * np.array(new), clusters_a=[0, 0, 1, 1, 2])
    assert other.low == size * unpaired_interval(np.array(base), np.array(new), clusters_a=[0, 0, 1, 1, 2]).low


def test_a_difference_too_large_for_a_number_is_infinite_and_raises_nothing():
    found = interval([-1e308, -1.1e308], [1e308, 1.2e308])
    assert found.difference == math.inf and (found.base, found.new) == pytest.approx((-1.05e308, 1.1e308))
    assert prompts_needed(np.array([1.0, -1.0]), size=1e-200) is None


def test_values_far_below_one_differ_and_what_a_sum_missed_of_zero_does_not():
    assert differences(np.array([1e-85, 1e-85]), np.array([2e-85, 1e-85])).tolist() == [1e-85, 0.0]
    assert differences(np.array([0.0, 1.0]), np.array([0.1 + 0.2 - 0.3, 1.0])).tolist() == [0.0, 0.0]
