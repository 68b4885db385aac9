"""The verdict follows from the numbers, and nothing that is not proved passes."""

import math
from pathlib import Path

import pytest

from praison_agent_rl.evaluation import compare
from praison_agent_rl.gate import Evidence, judge
from praison_agent_rl.improvement import Improvement
from praison_agent_rl.records import Answer, GateRules

TEXT = "an answer of some words, number {}"


def said(scores, text=TEXT, judged=None, errors=()):
    return [
        Answer(
            prompt=place,
            sample=0,
            text="" if place in errors else text.format(place),
            tokens=8,
            rewards={} if place in errors else {"main": score},
            total=None if place in errors else score,
            judged={} if judged is None else {"kind": judged[place]},
            error="it broke" if place in errors else None,
        )
        for place, score in enumerate(scores)
    ]


def verdict(base, new, rules=None, **given):
    return judge(Evidence(comparison=compare(base, new), base=base, new=new, **given), rules or GateRules())


LOW, HIGH = said([0.2, 0.3] * 10), said([0.6, 0.7] * 10)
SLIGHT = said([0.2, 0.3] * 9 + [0.3, 0.5])  # 0.1 and 0.2 more on 2 of 20: not proved


# --- by the numbers ---------------------------------------------------------------------------------------------------


def test_a_proved_gain_is_promoted():
    found = verdict(LOW, HIGH)
    assert found.status == "promoted" and found.passed and found.incumbent is None and not found.findings
    assert found.text == "promoted: 0.25 (the base) to 0.65 on 20 held-out prompts (95 % CI +0.4..+0.4)"
    assert {g.name for g in found.guards} >= {"longer", "shorter", "empty", "repetition", "errors"}


def test_a_proved_loss_is_worse():
    found = verdict(HIGH, LOW)
    assert found.status == "worse" and not found.passed and found.text.startswith("worse: 0.65 (the base) to 0.25 on")


def test_equal_answers_are_not_better():
    found = verdict(LOW, LOW)
    assert found.status == "not better" and found.text.startswith("not better: 0.25 (the base) to 0.25")


def test_a_gain_that_is_not_proved_is_undecided_and_says_how_many_more_prompts_it_takes():
    # gains 0.1, 0.2 and 18 times 0: mean 0.015, variance (0.05 - 20 * 0.015**2) / 19 = 0.0023947;
    # 7.8489 * 0.0023947 / 0.000225 = 83.5, so 84 in all
    found = verdict(LOW, SLIGHT)
    assert (found.status, found.text) == ("undecided", "undecided (64 more prompts needed)")


def test_a_loss_that_is_not_proved_is_not_better():
    assert verdict(SLIGHT, LOW).status == "not better"


def test_fewer_than_eight_prompts_decide_nothing_whatever_they_show():
    for base, new in ((LOW[:7], HIGH[:7]), (HIGH[:7], LOW[:7])):
        found = verdict(base, new)
        assert (found.status, found.text) == ("undecided", "undecided (1 more prompts needed)")
    assert verdict(LOW[:8], HIGH[:8]).status == "promoted"


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
def test_what_is_no_number_never_passes(score):
    odd = said([score] * 20)
    assert verdict(LOW, odd).status == "not better"
    assert verdict(odd, HIGH).status == "not better"
    assert "no number was given" in verdict(LOW, odd).text


def test_where_answers_failed_and_nothing_is_left_to_compare_their_number_is_told():
    found = verdict(said([1.0] * 8, errors=range(8)), said([1.0] * 8, errors=range(3)))
    assert found.text.endswith("by which to compare with the base: 8 answers of the base and 3 of the new model failed")
    kept = Improvement(comparison=compare([], []), verdict=found, run=Path("run"), report=Path("report.html"))
    assert str(kept) == f"{found.text}, the agent keeps its model"


def test_one_score_that_is_no_number_spoils_the_proof():
    assert not verdict(LOW, [*HIGH[:-1], said([math.nan] * 20)[-1]]).passed


def test_nothing_at_all_never_passes():
    assert verdict([], []).status == "not better"


def test_the_gain_must_exceed_what_is_asked_for():
    assert verdict(LOW, HIGH, GateRules(min_gain=0.39)).status == "promoted"
    found = verdict(LOW, HIGH, GateRules(min_gain=0.41))
    assert found.status == "not better" and found.text.endswith("where more than +0.41 is asked for")
    assert not verdict(LOW, HIGH, GateRules(min_gain=math.nan)).passed


def test_a_gain_that_may_exceed_what_is_asked_for_is_undecided():
    new = said([0.6, 0.7, 0.3, 0.6] * 5)  # gains 0.4, 0.4, 0.1, 0.3: mean 0.3
    assert verdict(LOW, new, GateRules(min_gain=0.28)).status == "undecided"
    assert verdict(LOW, new, GateRules(min_gain=0.1)).status == "promoted"


# --- guards -----------------------------------------------------------------------------------------------------------


def test_a_broken_guard_stops_what_would_have_been_promoted_and_names_itself():
    found = verdict(LOW, said([0.6, 0.7] * 10, text=""))
    assert found.status == "guard broken" and not found.passed
    assert found.text.startswith("guard broken: empty answers: 0.0 % to 100.0 % (may rise by 2 points)")


def test_all_broken_guards_are_named():
    lost = (said([1.0] * 20), said([0.0] * 20))
    found = verdict(LOW, HIGH, control=lost, earlier={"v1": lost, "v2": lost})
    for where in ("the general control prompts", "the prompts of v1", "the prompts of v2"):
        assert f"the score on {where} went from 1 to 0" in found.text


def test_a_broken_guard_does_not_hide_that_there_was_no_gain():
    found = verdict(HIGH, said([0.2, 0.3] * 10, text=""))
    assert found.status == "worse" and any(g.broken for g in found.guards)


def test_a_guarded_reward_and_limits_come_from_the_rules():
    assert verdict(LOW, HIGH, GateRules(guards={"main": 0.0})).passed
    assert verdict(LOW, HIGH, GateRules(guards={"absent": 0.0})).status == "guard broken"
    empty = said([0.6, 0.7] * 10, text="")
    limits = {"empty": 1.0}
    assert verdict(LOW, empty, GateRules(limits=limits)).status == "promoted"


def test_a_gain_with_a_loss_where_it_was_not_trained_is_not_promoted():
    base, new = said([0.2, 0.3] * 10, judged=[0.9] * 20), said([0.6, 0.7] * 10, judged=[0.3] * 20)
    found = verdict(base, new)
    assert found.status == "guard broken" and "reward kind, which was not trained on" in found.text
    # with a tolerance of one's own for it, that one counts
    assert verdict(base, new, GateRules(guards={"kind": 0.7})).passed
    assert [g.name for g in verdict(base, new, GateRules(guards={"kind": 0.7})).guards].count("reward kind") == 1


def test_a_gain_by_failing_at_what_is_hard_is_not_promoted():
    # gains of 0.1 and 0.2 where it answered; where it failed the base had 0.5, and the worst of all is 0
    base = said([0.5] * 3 + [0.1] * 16 + [0.0])
    new = said([0.0] * 3 + [0.2, 0.3] * 8 + [0.2], errors={0, 1, 2})
    found = verdict(base, new)
    assert found.status == "guard broken" and "taken for as bad as the worst" in found.text


def test_faulty_tool_calls_are_seen_where_tools_were_shown():
    new = said([0.6, 0.7] * 10, text="<tool_call>{{oops</tool_call> {}")
    assert verdict(LOW, new).passed
    assert verdict(LOW, new, tools=[{"function": {"name": "add"}}]).status == "guard broken"


def test_a_sign_of_cheating_is_part_of_the_verdict_and_stops_nothing():
    found = verdict(LOW, said([0.6, 0.7] * 10, text="Certainly, I can help with that!"))
    assert found.passed and found.text.endswith("; signs of cheating: template answers, less diverse answers")
    assert found.findings[0].text.startswith("100 % of prompts")


# --- what runs now ----------------------------------------------------------------------------------------------------


def test_a_candidate_that_beats_the_base_and_what_runs_now_is_promoted():
    found = verdict(LOW, HIGH, incumbent=said([0.4, 0.5] * 10))
    assert found.passed and found.incumbent is not None and found.incumbent.difference == pytest.approx(0.2)
    assert "0.25 (the base) to 0.65" in found.text and "0.45 (the model that answers now) to 0.65" in found.text


@pytest.mark.parametrize("now", [[0.8, 0.9], [0.6, 0.7]])
def test_a_candidate_that_beats_only_the_base_is_not_better(now):
    found = verdict(LOW, HIGH, incumbent=said(now * 10))
    assert found.status == "not better" and "(the model that answers now) to 0.65" in found.text
    assert found.incumbent is not None


def test_a_gain_over_what_runs_now_that_is_not_proved_is_undecided():
    now = said([0.6, 0.7] * 9 + [0.5, 0.5])
    found = verdict(LOW, HIGH, incumbent=now)
    assert found.status == "undecided"
    assert found.text.endswith("more prompts needed to compare with the model that answers now)")


def test_too_few_recorded_answers_prove_nothing():
    found = verdict(LOW, HIGH, incumbent=said([0.1] * 5))
    assert (found.status, found.text) == (
        "undecided",
        "undecided (3 more prompts needed to compare with the model that answers now)",
    )
    assert verdict(LOW, HIGH, incumbent=[]).status == "not better"


def test_a_verdict_survives_being_written_down():
    found = verdict(LOW, said([math.nan] * 20))
    assert type(found).model_validate_json(found.model_dump_json()).status == "not better"


# --- missing scores ---------------------------------------------------------------------------------------------------


def without(answers, places):
    return [
        answer.model_copy(update={"rewards": {"main": None}, "total": None}) if answer.prompt in places else answer
        for answer in answers
    ]


def test_a_gain_on_the_prompts_that_still_have_a_score_is_not_promoted():
    found = verdict(LOW, without(HIGH, range(10, 20)))
    assert found.status == "guard broken"
    assert "answers to which reward main gave no score: 0.0 % to 50.0 % (may not rise)" in found.text


def test_prompts_that_neither_side_has_a_score_for_do_not_judge():
    found = verdict(without(LOW, range(5)), without(HIGH, range(5)))
    assert found.status == "promoted" and "on 15 held-out prompts" in found.text


def test_the_gain_over_what_answers_now_must_not_rest_on_failed_answers_either():
    now = said([0.1, *[0.6, 0.7] * 10])
    base, new = said([0.0, *[0.0, 0.5] * 10]), said([0.2, *[0.65, 0.75] * 10], errors={1})
    found = verdict(base, new, incumbent=now)
    assert found.status == "guard broken"
    assert [g.name for g in found.guards if g.broken] == ["failures over the model that answers now"]
