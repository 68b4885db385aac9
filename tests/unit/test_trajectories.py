"""Calls of a rollout become sequences of tokens: one round, several, agents that hand over, and a rewritten past."""

import pytest

from praison_agent_rl.agent_rollouts.jobs import Rollout, RolloutJob, RolloutOutcome, TokenCall
from praison_agent_rl.agent_rollouts.trajectories import NO_CALL, credits_of, join_calls
from praison_agent_rl.records import Call

TOOL_CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": {}}]}
ANSWER = {"role": "assistant", "content": "4"}


def asked(
    prompt: list[int],
    drawn: list[int],
    *,
    reply: dict | None = None,
    agent: str = "solo",
    finish: str = "stop",
    known: bool = True,
) -> TokenCall:
    call = Call(id="c", time=0.0, messages=[], reply=reply or ANSWER, finish=finish)
    log_probs = [-token / 10 for token in drawn] if known else None
    return TokenCall(call=call, agent=agent, prompt_ids=prompt, completion_ids=drawn, log_probs=log_probs)


def rollout(*calls: TokenCall) -> Rollout:
    job = RolloutJob(id="j", prompt="?", seconds=1.0)
    return Rollout(job=job, outcome=RolloutOutcome(id="j", output="4"), calls=list(calls))


def test_one_answer_is_one_sequence() -> None:
    (found,) = join_calls(rollout(asked([1, 2], [7, 9])))
    assert (found.prompt_ids, found.completion_ids, found.drawn) == ([1, 2], [7, 9], [1, 1])
    assert found.log_probs == [-0.7, -0.9] and found.calls == [0] and not found.cut


def test_two_tool_rounds_are_one_sequence_with_results_masked_out() -> None:
    calls = (
        asked([1, 2], [5, 9], reply=TOOL_CALL, finish="tool_calls"),
        asked([1, 2, 5, 9, 30, 31], [6, 9], reply=TOOL_CALL, finish="tool_calls"),
        asked([1, 2, 5, 9, 30, 31, 6, 9, 40], [8, 9]),
    )
    (found,) = join_calls(rollout(*calls))
    assert found.prompt_ids == [1, 2]
    assert found.completion_ids == [5, 9, 30, 31, 6, 9, 40, 8, 9]
    assert found.drawn == [1, 1, 0, 0, 1, 1, 0, 1, 1]
    assert found.log_probs == [-0.5, -0.9, 0.0, 0.0, -0.6, -0.9, 0.0, -0.8, -0.9]
    assert found.call_of == [0, 0, NO_CALL, NO_CALL, 1, 1, NO_CALL, 2, 2]
    assert found.calls == [0, 1, 2] and not found.cut


def test_a_rewritten_history_makes_several_sequences_in_the_order_of_their_ends() -> None:
    first, second = join_calls(rollout(asked([1, 2], [5, 9], reply=TOOL_CALL), asked([1, 3, 5, 9, 30], [8, 9])))
    assert (first.prompt_ids, first.calls, first.cut) == ([1, 2], [0], True)
    assert (second.prompt_ids, second.completion_ids, second.cut) == ([1, 3, 5, 9, 30], [8, 9], False)


def test_an_answer_that_is_rendered_otherwise_than_it_was_drawn_splits() -> None:
    found = join_calls(rollout(asked([1, 2], [5, 9]), asked([1, 2, 5, 6, 9, 30], [8])))
    assert [sequence.calls for sequence in found] == [[0], [1]]


def test_the_same_prompt_asked_again_is_no_extension() -> None:
    found = join_calls(rollout(asked([1, 2], [5]), asked([1, 2], [6])))
    assert [sequence.completion_ids for sequence in found] == [[5], [6]]


def test_a_prompt_that_ends_where_the_answer_ended_is_no_extension() -> None:
    assert len(join_calls(rollout(asked([1], [5]), asked([1, 5], [6])))) == 2


def test_agents_that_hand_over_are_joined_each_by_itself() -> None:
    calls = (
        asked([1, 2], [5, 9], reply=TOOL_CALL),
        asked([70], [71], agent="other"),
        asked([1, 2, 5, 9, 71], [8]),
    )
    found = join_calls(rollout(*calls))
    assert [(sequence.prompt_ids, sequence.calls) for sequence in found] == [([70], [1]), ([1, 2], [0, 2])]
    assert [sequence.prompt_ids for sequence in join_calls(rollout(*calls), trained={"other"})] == [[70]]
    assert [sequence.calls for sequence in join_calls(rollout(*calls), trained=["solo"])] == [[0, 2]]


def test_a_call_that_failed_is_passed_over() -> None:
    assert [s.calls for s in join_calls(rollout(asked([1], []), asked([1, 2], [3])))] == [[1]]
    assert join_calls(rollout()) == []


@pytest.mark.parametrize(("finish", "reply"), [("length", ANSWER), ("tool_calls", TOOL_CALL)])
def test_what_ends_on_a_limit_or_an_unanswered_call_is_cut(finish: str, reply: dict) -> None:
    assert join_calls(rollout(asked([1], [2], finish=finish, reply=reply)))[0].cut


def test_log_probabilities_that_are_not_known_of_one_call_are_not_known_of_the_sequence() -> None:
    (found,) = join_calls(rollout(asked([1], [2]), asked([1, 2, 3], [4], known=False)))
    assert found.log_probs is None and found.drawn == [1, 0, 1]


def test_credit() -> None:
    three = join_calls(rollout(asked([1], [2]), asked([3], [4]), asked([5], [6])))
    assert credits_of(three, "last") == [0.0, 0.0, 1.0]
    assert credits_of(three, "all") == [1.0, 1.0, 1.0]
    assert credits_of(three, "discounted", 0.9) == pytest.approx([0.81, 0.9, 1.0])
    assert credits_of([], "last") == []
