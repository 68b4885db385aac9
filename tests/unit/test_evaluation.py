"""The comparison counts and averages as one would by hand, and its interval holds what it says."""

import math

import pytest

from praison_agent_rl.evaluation import by_distinct_prompt, compare, score_answers
from praison_agent_rl.records import Answer, Comparison
from praison_agent_rl.rewards import Reward


def answers(*totals_of_prompts, **rewards):
    """Answers whose totals are given prompt by prompt; further rewards are given in the same form."""
    made = []
    for prompt, totals in enumerate(totals_of_prompts):
        for sample, total in enumerate(totals):
            scores = {"main": total, **{name: values[prompt][sample] for name, values in rewards.items()}}
            made.append(Answer(prompt=prompt, sample=sample, text="", tokens=1, rewards=scores, total=total))
    return made


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


def test_a_gain_on_4_of_20_prompts_is_better_and_on_3_is_not():
    # worked out in test_intervals
    base = answers(*[[0.0]] * 20)
    with_gains = {k: answers(*[[1.0]] * k, *[[0.0]] * (20 - k)) for k in (2, 3, 4, 5)}
    assert {k: compare(base, new).better for k, new in with_gains.items()} == {2: False, 3: False, 4: True, 5: True}


def failed(prompt, sample=0):
    return Answer(prompt=prompt, sample=sample, text="", tokens=0, rewards={}, total=None, error="it broke")


def test_an_answer_that_failed_is_neither_a_zero_nor_passed_over_in_silence():
    base = [*answers([0.5, 0.5], [0.5, 0.5]), failed(2), failed(2, 1)]
    new = [*answers([1.0], [0.5, 0.5]), failed(0, 1), *answers([], [], [0.9, 0.9])]
    found = compare(base, new)
    assert (found.errors_base, found.errors_new) == (2, 1)
    # prompt 0 counts by the answer that it has, prompt 2 has no scored answer of the base
    assert (found.prompts, found.unscored, found.wins, found.ties) == (2, 1, 1, 1)
    assert (found.total.base, found.total.new) == (0.5, 0.75)
    assert found.rewards["main"].new == 0.75


def test_a_score_beside_an_error_does_not_count():
    base = answers([0.5], [0.5])
    new = [answers([1.0])[0].model_copy(update={"error": "cut off"}), answers([], [1.0])[0]]
    found = compare(base, new)
    assert (found.prompts, found.errors_new, found.total.new) == (1, 1, 1.0)


def test_all_answers_failed_is_no_number_and_not_better():
    found = compare([failed(p) for p in range(9)], answers(*[[1.0]] * 9))
    assert (found.prompts, found.unscored, found.errors_base) == (0, 9, 9)
    assert math.isnan(found.total.low) and not found.better


def test_rewards_that_judge_have_intervals_of_their_own():
    base = [a.model_copy(update={"judged": {"kind": 0.25}}) for a in answers(*[[0.5]] * 9)]
    new = [a.model_copy(update={"judged": {"kind": 0.75}}) for a in answers(*[[0.5]] * 9)]
    found = compare(base, new)
    assert list(found.judged) == ["kind"] and list(found.rewards) == ["main"]
    assert (found.judged["kind"].difference, found.judged["kind"].low) == (0.5, 0.5)
    assert found.total.difference == 0


def test_how_many_prompts_would_show_the_difference_is_said():
    # gains 1, 0, 0, ... of 10 prompts: mean 0.1, variance 0.1, so 7.8489 * 0.1 / 0.01 = 78.5
    assert compare(answers(*[[0.0]] * 10), answers([1.0], *[[0.0]] * 9)).needed == 79
    assert compare(answers(*[[0.0]] * 10), answers(*[[0.0]] * 10)).needed is None


def test_a_score_that_is_no_number_is_never_better():
    new = answers(*[[1.0]] * 19, [math.nan])
    found = compare(answers(*[[0.0]] * 20), new)
    assert math.isnan(found.total.low) and not found.better and found.needed is None


def test_the_order_in_which_samples_were_summed_is_a_tie():
    found = compare(answers(*[[0.1, 0.2, 0.3]] * 9), answers(*[[0.3, 0.2, 0.1]] * 9))
    assert (found.ties, found.wins, found.better) == (9, 0, False)


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


# --- missing scores and the same prompt twice -------------------------------------------------------------------------


def test_missing_scores_are_counted_by_reward_and_those_of_failed_answers_are_not():
    base = answers([1.0, None], [None, None], brief=[[0.5, 0.5], [None, 0.5]])
    failed = Answer(prompt=0, sample=0, text="", tokens=0, rewards={}, total=None, error="it broke")
    new = [failed, *answers([1.0, math.nan], [1.0, 1.0], brief=[[0.5, 0.5], [0.5, 0.5]])[1:]]
    found = compare(base, new)
    assert (found.missing_base, found.missing_new) == ({"main": 3, "brief": 1}, {"main": 1, "brief": 0})
    assert (found.unscored_base, found.unscored_new, found.errors_new) == (3, 1, 1)


def test_a_comparison_of_before_missing_scores_were_counted_is_read():
    old = compare(answers([1.0]), answers([1.0])).model_dump()
    for name in ("missing_base", "missing_new", "unscored_base", "unscored_new"):
        del old[name]
    assert Comparison.model_validate(old).missing_new == {}


def test_answers_to_rows_with_the_same_prompt_are_answers_to_one_prompt():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": [{"role": "user", "content": " A"}], "answer": 2}]
    base = by_distinct_prompt(answers([0.0], [0.0], [0.5]), rows)
    new = by_distinct_prompt(answers([1.0], [0.0], [0.5]), rows)
    assert [answer.prompt for answer in new] == [0, 1, 0]
    found = compare(base, new)
    assert (found.prompts, found.wins, found.ties, found.samples) == (2, 1, 1, 1)
    assert found.total.base == 0.125 and found.total.new == 0.375  # of 0.25 and 0, and of 0.75 and 0


def test_twenty_rows_of_two_prompts_decide_nothing():
    rows = [{"prompt": "ab"[place % 2]} for place in range(20)]
    base, new = (by_distinct_prompt(answers(*[[score]] * 20), rows) for score in (0.0, 1.0))
    assert compare(base, new).prompts == 2 and not compare(base, new).better


def test_rewards_near_the_largest_number_are_compared():
    base = answers(*[[1e308, 1.2e308]] * 8)
    new = answers(*[[1.5e308, 1.6e308]] * 8)
    found = compare(base, new)
    assert found.total.base == pytest.approx(1.1e308) and found.total.new == pytest.approx(1.55e308)
    assert found.better and found.wins == 8
