"""A guard is broken by what is larger than its limit and proved, and by nothing else."""

import math

import pytest

from praison_agent_rl.guards import (
    LIMITS,
    control_guard,
    drift_guards,
    earlier_guards,
    failure_guards,
    judged_guards,
    reward_guards,
    score_guards,
)
from praison_agent_rl.records import Answer, Comparison, Interval

WORDS = "the cat sat on a mat and saw some birds fly over it"


def said(*texts, tokens=None, totals=None, errors=()):
    """One answer a prompt; those at the places of ``errors`` failed."""
    made = []
    for place, text in enumerate(texts):
        failed = place in errors
        made.append(
            Answer(
                prompt=place,
                sample=0,
                text="" if failed else text,
                tokens=0 if failed else (tokens[place] if tokens else len(text.split())),
                rewards={},
                total=None if failed or totals is None else totals[place],
                error="it broke" if failed else None,
            )
        )
    return made


def guard(guards, name):
    return next(g for g in guards if g.name == name)


def drift(base, new, name, **given):
    return guard(drift_guards(base, new, **given), name)


def test_equal_answers_break_nothing_and_every_limit_has_a_guard():
    base = said(*[WORDS] * 10)
    guards = drift_guards(base, base, tools=[{"function": {"name": "add"}}])
    assert {g.name for g in guards} == set(LIMITS)
    assert not any(g.broken for g in guards)


# --- length -----------------------------------------------------------------------------------------------------------


def test_answers_more_than_twice_as_long_break_the_guard_and_those_just_twice_as_long_do_not():
    base = said(*["x"] * 10, tokens=[10, 12] * 5)
    longer = drift(base, said(*["x"] * 10, tokens=[22, 24] * 5), "longer")  # 23 by 11
    assert longer.broken and (longer.base, longer.new) == (11, 23)
    assert longer.limit == "at most 2 times as long"
    assert longer.text == "answers went from 11 to 23 tokens on average"
    assert not drift(base, said(*["x"] * 10, tokens=[20, 24] * 5), "longer").broken


def test_answers_less_than_a_tenth_as_long_break_the_guard():
    base = said(*["x"] * 10, tokens=[100] * 10)
    assert drift(base, said(*["x"] * 10, tokens=[9] * 10), "shorter").broken
    assert not drift(base, said(*["x"] * 10, tokens=[11] * 10), "shorter").broken
    assert drift(base, said(*["x"] * 10, tokens=[49] * 10), "shorter", limits={"shorter": 0.5}).broken


def test_one_very_long_answer_of_ten_is_noise():
    base = said(*["x"] * 10, tokens=[10] * 10)
    found = drift(base, said(*["x"] * 10, tokens=[10] * 9 + [500]), "longer")
    assert found.new == 59 and not found.broken


def test_the_length_of_an_answer_that_failed_is_no_length():
    base = said(*["x"] * 10, tokens=[10] * 10)
    found = drift(base, said(*["x"] * 10, tokens=[10] * 10, errors={0, 1, 2}), "shorter")
    assert found.new == 10


def test_seven_prompts_break_nothing_and_say_so():
    base, new = said(*["x"] * 7, tokens=[10] * 7), said(*["x"] * 7, tokens=[90] * 7)
    found = drift(base, new, "longer")
    assert not found.broken and found.text.endswith("7 prompts are too few to judge by")


# --- shares -----------------------------------------------------------------------------------------------------------


def test_empty_answers_break_the_guard_when_they_are_many_and_not_when_it_may_be_chance():
    base = said(*[WORDS] * 40)
    assert drift(base, said(*[WORDS] * 34, *[" \n"] * 6), "empty").broken  # 6 of 40: 0.15 - 2.02 * 0.057 > 0
    assert not drift(base, said(*[WORDS] * 38, *[""] * 2), "empty").broken  # 5 %, but 2 of 40 may be chance


def test_a_share_that_was_there_before_breaks_nothing():
    both = said(*[WORDS] * 20, *[""] * 20)
    found = drift(both, both, "empty")
    assert (found.base, found.new, found.broken) == (0.5, 0.5, False)


def test_a_proved_rise_within_the_limit_breaks_nothing():
    base, new = said(*[WORDS] * 40), said(*[WORDS] * 30, *[""] * 10)
    assert drift(base, new, "empty").broken
    assert not drift(base, new, "empty", limits={"empty": 0.3}).broken


def test_repetition_breaks_the_guard():
    base = said(*[WORDS] * 10)
    found = drift(base, said(*["again and again " * 10] * 10), "repetition")
    assert found.broken and found.base == 0 and found.new == pytest.approx(1 - 3 / 27)
    assert found.text == "4-grams repeated within an answer: 0.0 % to 88.9 %"
    assert found.limit == "may rise by 10 points"


def test_answers_that_fail_more_often_break_the_guard():
    base = said(*[WORDS] * 30)
    found = drift(base, said(*[WORDS] * 30, errors=set(range(6))), "errors")
    assert found.broken and (found.base, found.new, found.limit) == (0.0, 0.2, "may not rise")
    assert not drift(base, said(*[WORDS] * 30, errors={3}), "errors").broken


def test_tool_calls_are_guarded_where_tools_are_shown():
    tools = [{"function": {"name": "add", "parameters": {"required": ["a"]}}}]
    right = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    base, new = said(*[right] * 10), said(*[right.replace("add", "subtract")] * 10)
    assert drift(base, new, "tool_calls", tools=tools).broken
    assert "tool_calls" not in {g.name for g in drift_guards(base, new)}


def test_answers_in_another_script_break_the_guard():
    base = said(*[WORDS] * 10)
    found = drift(base, said(*["кошка сидела на коврике"] * 10), "language")
    assert found.broken and found.new == 1 and "letters that are not Latin" in found.text
    assert not drift(base, said(*[WORDS.upper()] * 10), "language").broken


def test_a_script_that_the_base_uses_too_is_its_own():
    base = said(*[f"{WORDS} мир"] * 10)
    assert not drift(base, said(*["мир и труд"] * 10), "language").broken


def test_answers_without_letters_have_no_language_to_lose():
    base = said(*["3.14"] * 10)
    assert "language" not in {g.name for g in drift_guards(base, said(*["π is 3"] * 10))}
    found = drift(said(*[WORDS] * 10), said(*["42"] * 10), "language")
    assert not found.broken


def test_no_answers_at_all_break_nothing():
    assert not any(g.broken for g in drift_guards([], []))


# --- guarded rewards --------------------------------------------------------------------------------------------------


def comparison(**rewards):
    made = {
        name: Interval(base=b, new=n, difference=n - b, low=n - b - 0.01, high=n - b + 0.01)
        for name, (b, n) in rewards.items()
    }
    judged = {name.removesuffix("_judged"): seen for name, seen in made.items() if name.endswith("_judged")}
    trained = {name: seen for name, seen in made.items() if not name.endswith("_judged")}
    total = trained.get("total") or Interval(base=0, new=1, difference=1, low=0.9, high=1.1)
    return Comparison(
        total=total, rewards=trained, judged=judged, prompts=40, samples=1, wins=1, ties=0, losses=0, unscored=0
    )


def test_a_guarded_reward_may_fall_by_its_tolerance_and_no_further():
    seen = comparison(correct=(0.75, 0.5))
    (broken,) = reward_guards(seen, {"correct": 0.125})
    assert broken.broken and broken.name == "reward correct" and broken.limit == "may fall by 0.125"
    assert broken.text == "reward correct went from 0.75 to 0.5"
    assert not reward_guards(seen, {"correct": 0.25})[0].broken
    assert reward_guards(seen, {"correct": 0.0})[0].limit == "may not fall"
    assert not reward_guards(comparison(correct=(0.5, 0.75)), {"correct": 0.0})[0].broken


@pytest.mark.parametrize("seen", [comparison(), comparison(correct=(0.5, math.nan))])
def test_a_guarded_reward_that_could_not_be_measured_is_broken(seen):
    (found,) = reward_guards(seen, {"correct": 0.5})
    assert found.broken and found.text == "reward correct is guarded and could not be measured"


def test_a_reward_that_judges_can_be_guarded():
    assert reward_guards(comparison(kind_judged=(0.9, 0.1)), {"kind": 0.1})[0].broken


def test_a_loss_where_it_was_not_trained_breaks_a_guard_if_there_was_a_gain_where_it_was():
    (found,) = judged_guards(comparison(kind_judged=(0.9, 0.5)))
    assert found.broken and found.name == "reward kind, which was not trained on"
    assert "from 0.9 to 0.5" in found.text and "from 0 to 1" in found.text
    assert not judged_guards(comparison(kind_judged=(0.9, 0.5), total=(0.5, 0.5)))[0].broken
    assert not judged_guards(comparison(kind_judged=(0.5, 0.505)))[0].broken


# --- earlier gains ----------------------------------------------------------------------------------------------------


def test_a_proved_loss_on_the_control_prompts_breaks_the_guard():
    base = said(*["x"] * 40, totals=[1.0] * 40)
    found = control_guard(base, said(*["x"] * 40, totals=[1.0] * 30 + [0.0] * 10))
    assert found.broken and found.name == "control" and found.new == 0.75
    assert not control_guard(base, said(*["x"] * 40, totals=[1.0] * 38 + [0.0] * 2)).broken
    assert not control_guard(base, base).broken


def test_a_loss_on_the_prompts_of_one_earlier_version_breaks_its_guard_and_no_others():
    kept = said(*["x"] * 20, totals=[0.5] * 20)
    lost = said(*["x"] * 20, totals=[0.1] * 20)
    found = earlier_guards({"v1": (kept, kept), "v2": (kept, lost)})
    assert [(g.name, g.broken) for g in found] == [("earlier v1", False), ("earlier v2", True)]
    assert "the prompts of v2 went from 0.5 to 0.1" in found[1].text


def test_the_more_earlier_versions_there_are_the_surer_a_loss_must_be():
    # 5 of 20 fall by 1: mean -0.25, error 0.0993; t with 19 degrees of freedom is 2.093 at 95 % and 3.17 at 99.5 %
    base = said(*["x"] * 20, totals=[1.0] * 20)
    new = said(*["x"] * 20, totals=[1.0] * 15 + [0.0] * 5)
    assert earlier_guards({"v1": (base, new)})[0].broken
    ten = earlier_guards({f"v{k}": (base, new) for k in range(10)})
    assert not any(g.broken for g in ten)


def test_fewer_than_eight_earlier_prompts_break_nothing():
    base, new = said(*["x"] * 7, totals=[1.0] * 7), said(*["x"] * 7, totals=[0.0] * 7)
    assert not control_guard(base, new).broken


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_gain_that_rests_on_leaving_out_failed_prompts_breaks_the_guard():
    # gains of 0.1 and 0.2 on 17 prompts, and three failures where the base had 0.5 and the worst of all is 0:
    # (8 * 0.1 + 8 * 0.2 + 0.2 - 3 * 0.5) / 20 = +0.055, with a deviation of 0.24 and so an error of 0.055
    base = said(*["x"] * 20, totals=[0.5] * 3 + [0.1] * 16 + [0.0])
    new = said(*["x"] * 20, totals=[0.0] * 3 + [0.2, 0.3] * 8 + [0.2], errors={0, 1, 2})
    (found,) = failure_guards(base, new, 0.0)
    assert found.broken and found.name == "failures"
    assert "taken for as bad as the worst, the gain is +0.055" in found.text
    # where the base had nothing to lose, the gain stands
    (kept,) = failure_guards(said(*["x"] * 20, totals=[0.0] * 3 + [0.1] * 16 + [0.0]), new, 0.0)
    assert not kept.broken


def test_without_failures_there_is_nothing_to_ask():
    base = said(*["x"] * 20, totals=[0.5] * 20)
    assert failure_guards(base, base, 0.0) == []
    assert failure_guards([], [], 0.0) == []


# --- missing scores ---------------------------------------------------------------------------------------------------


def scored(**rewards):
    """One answer a prompt with the rewards given prompt by prompt; the total is the sum of those that are there."""
    rows = [dict(zip(rewards, values, strict=True)) for values in zip(*rewards.values(), strict=True)]
    made = []
    for place, row in enumerate(rows):
        there = [score for score in row.values() if score is not None]
        total = sum(there) if there else None
        made.append(Answer(prompt=place, sample=0, text=WORDS, tokens=9, rewards=row, total=total))
    return made


def test_a_candidate_with_all_scores_has_no_guard_of_scores():
    assert score_guards(scored(r=[None] * 10), scored(r=[1.0] * 10)) == []


def test_a_prompt_without_a_score_does_not_leave_the_mean_in_silence():
    base = scored(r=[0.3, 0.5] * 20)
    found = score_guards(base, scored(r=[0.9, 1.0] * 5 + [None] * 30))
    assert [g.name for g in found] == ["scores", "scores of r"]
    assert found[1].broken and found[1].text == "answers to which reward r gave no score: 0.0 % to 75.0 %"
    # 10 gain 0.6 or 0.5 and 30, taken for 0.3, lose 0 or 0.2: 5.5 - 3 by 40
    assert found[0].new - found[0].base == pytest.approx(2.5 / 40)
    few = score_guards(scored(r=[0.3, 0.5] * 20), scored(r=[0.7, 0.7] * 19 + [None] * 2))
    assert [g.broken for g in few] == [False, False], "2 of 40 are not proved, and the gain survives them"


def test_a_gain_that_rests_on_few_missing_scores_is_broken():
    base = scored(r=[0.0, *[0.5, 0.7] * 10])
    found = score_guards(base, scored(r=[0.1, *[0.55, 0.75] * 9, None, None]))
    assert [(g.name, g.broken) for g in found] == [("scores", True), ("scores of r", False)]


@pytest.mark.parametrize("weights", [{}, {"penalty": 2.0}])
def test_a_penalty_that_is_missing_does_not_raise_the_total(weights):
    base = scored(good=[0.5] * 10, penalty=[-1.0] * 10)
    found = score_guards(base, scored(good=[0.5] * 10, penalty=[None] * 10), weights=weights)
    assert all(g.broken for g in found) and found[0].new == 0.5 - weights.get("penalty", 1.0)


def test_with_a_negative_weight_the_largest_score_is_the_worst():
    base = scored(good=[0.5] * 10, length=[3.0, 4.0] * 5)
    (gain, _) = score_guards(base, scored(good=[0.5] * 10, length=[None] * 10), weights={"length": -1.0})
    assert gain.new == -3.5


def test_a_reward_that_applies_to_some_prompts_only_breaks_nothing():
    base = scored(good=[0.2, 0.3] * 10, code=[None, 0.5] * 10)
    new = scored(good=[0.6, 0.8] * 10, code=[None, 0.5] * 10)
    found = score_guards(base, new)
    assert [(g.name, g.broken) for g in found] == [("scores of code", False)]


def test_failures_and_missing_scores_are_tested_together_and_name_whom_the_gain_is_over():
    base = scored(r=[0.5] * 20)
    new = [
        answer.model_copy(update={"error": "it broke", "rewards": {}, "total": None}) if answer.prompt < 2 else answer
        for answer in scored(r=[*[0.6] * 18, None, 0.0])
    ]
    lost = score_guards(base, new, against="the model that answers now")[0]
    assert lost.name == "scores over the model that answers now"
    assert lost.new == pytest.approx(16 * 0.6 / 20)
    (failed,) = failure_guards(base, new, 0.0, against="the model that answers now")
    assert failed.name == "failures over the model that answers now"
