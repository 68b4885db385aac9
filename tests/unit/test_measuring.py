"""Answers are scored by rewards and judges in one call each; one that failed is shown to none of them."""

import pytest

from praison_agent_rl.answering import RawAnswer
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.evaluation import compare, score_answers
from praison_agent_rl.measuring import _check_some
from praison_agent_rl.rewards import Reward

ROWS = [{"prompt": "a"}, {"prompt": "b"}]
RAW = [RawAnswer(0, 0, "xx", 2, (7, 8)), RawAnswer(0, 1, "", 0, error="it broke"), RawAnswer(1, 0, "yyy", 3)]


def test_a_failed_answer_is_shown_to_no_reward_and_has_no_score() -> None:
    seen = []

    def length(prompts, completions, completion_ids, **_):
        seen.append((prompts, completions, completion_ids))
        return [float(len(text)) for text in completions]

    def judge(completions, **_):
        return [0.5] * len(completions)

    scored = score_answers(RAW, ROWS, [Reward(length, "length", 2.0)], judges=[Reward(judge, "judge")])
    assert seen == [(["a", "b"], ["xx", "yyy"], [[7, 8], [0, 1, 2]])], "one call, with the ids where they are known"
    assert [answer.total for answer in scored] == [4.0, None, 6.0]
    assert [answer.judged for answer in scored] == [{"judge": 0.5}, {}, {"judge": 0.5}]
    assert [answer.error for answer in scored] == [None, "it broke", None]


def test_judges_do_not_count_in_the_total_and_failed_answers_are_counted_apart() -> None:
    def ones(completions, **_):
        return [1.0] * len(completions)

    def zeros(completions, **_):
        return [0.0] * len(completions)

    base = score_answers(RAW, ROWS, [Reward(zeros, "r")], judges=[Reward(ones, "j")])
    new = score_answers(RAW, ROWS, [Reward(ones, "r")], judges=[Reward(zeros, "j")])
    found = compare(base, new)
    assert (found.errors_base, found.errors_new, found.unscored, found.prompts) == (1, 1, 0, 2)
    assert (found.total.base, found.total.new) == (0.0, 1.0) and found.judged["j"].difference == -1.0


def test_where_every_answer_failed_no_reward_is_asked() -> None:
    def never(completions, **_):
        raise AssertionError

    failed = [RawAnswer(0, 0, "", 0, error="no")]
    (scored,) = score_answers(failed, ROWS, [Reward(never, "r")])
    assert (scored.total, scored.rewards, scored.error) == (None, {}, "no")


def test_an_agent_that_never_answers_on_the_base_ends_the_run_before_it_trains() -> None:
    broken = [RawAnswer(place, 0, "", 0, error=f"fault {place}") for place in range(3)]
    with pytest.raises(TrainingFailed, match="none of 3 rollouts on the base came to an answer; the first: fault 0"):
        _check_some(broken)
    assert _check_some([*broken, RAW[0]]) is None and _check_some([]) is None
