"""Advantages of the calls of runs that are scored by steps, worked out by hand."""

import pytest

from praison_agent_rl.agent_rollouts.step_credit import step_advantages

WEIGHT = {"steps": 2.0, "whole": 1.0}


def test_rewards_without_steps_leave_advantages_to_trl() -> None:
    assert step_advantages([1.0, 0.0], {"whole": [None, None]}, WEIGHT, group=2) is None
    assert step_advantages([1.0, 0.0], {}, WEIGHT, group=2) is None


def test_what_was_earned_before_a_call_is_not_its_doing() -> None:
    # totals: 2 * (0.5 + 0.25) + 1 = 2.5 and 2 * (0 + 0.5) + 0 = 1
    steps = {"steps": [[0.5, 0.25], [0.0, 0.5]], "whole": [None, None]}
    first, second = step_advantages([2.5, 1.0], steps, WEIGHT, group=2, scaled=False)
    # returns: 2.5, then 2.5 - 2 * 0.5 = 1.5; and 1, then 1 - 0 = 1
    assert first == pytest.approx([2.5 - 1.75, 1.5 - 1.25])
    assert second == pytest.approx([1.0 - 1.75, 1.0 - 1.25])


def test_the_first_call_has_the_advantage_that_trl_gives_the_run() -> None:
    found = step_advantages([2.0, 1.0, 0.0], {"steps": [[1.0], [0.5], [0.0]]}, WEIGHT, group=3)
    assert [run[0] for run in found] == pytest.approx([1 / 1.0001, 0.0, -1 / 1.0001])


def test_a_call_is_compared_with_those_of_its_number_that_there_are() -> None:
    steps = {"steps": [[0.0, 1.0], [0.0, 0.0], [1.0]]}
    found = step_advantages([2.0, 0.0, 2.0], steps, WEIGHT, group=3, scaled=False)
    assert found[0][1] == pytest.approx(2.0 - 1.0) and found[1][1] == pytest.approx(0.0 - 1.0)
    assert len(found[2]) == 1 and found[2][0] == pytest.approx(2.0 - 4 / 3)


def test_groups_are_apart_and_runs_without_a_total_have_none() -> None:
    steps = {"steps": [[1.0], [0.0], None, [0.5]]}
    found = step_advantages([2.0, 0.0, None, 1.0], steps, WEIGHT, group=2, scaled=False)
    assert found == [[1.0], [-1.0], [], [0.0]]


def test_a_step_without_a_score_has_earned_nothing() -> None:
    found = step_advantages([2.0, 0.0], {"steps": [[None, 1.0], [0.0, None]]}, WEIGHT, group=2, scaled=False)
    assert found == [[1.0, 1.0], [-1.0, -1.0]]
