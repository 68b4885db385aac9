"""What a warm start and the check of parity take of recorded runs: calls of good ones, and answers as corrected."""

from typing import Any

import pytest

from praison_agent_rl.recorded_calls import MOST_CALLS, good_calls
from praison_agent_rl.records import Call, Feedback, Run
from praison_agent_rl.transcripts.corrections import blank_corrections

QUESTION = {"role": "user", "content": "2+3?"}
ASKS = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "add"}}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "5"}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(id: str, messages: Any, reply: Any, **facts: Any) -> Call:
    return Call(id=id, time=0.0, messages=messages, reply=reply, **{"finish": "stop", **facts})


def run(id: str, *said: Feedback, calls: Any = None, **facts: Any) -> Run:
    """A run that calls a tool and answers."""
    made = [
        call(f"{id}-0", [QUESTION], ASKS, finish="tool_calls"),
        call(f"{id}-1", [QUESTION, ASKS, RESULT], says("Five."), logprobs=[{}]),
    ]
    return Run(**{"id": id, "time": 0.0, "output": "Five.", "calls": calls or made, "feedback": list(said), **facts})


def rated(score: float | None = None, correction: str | None = None) -> Feedback:
    return Feedback(run="r", time=0.0, score=score, correction=correction)


def ids(*runs: Run) -> list[str]:
    return [one.id for one in good_calls(runs)]


def test_runs_that_ended_without_a_fault_are_good() -> None:
    faulty = [run("b", error="gone"), run("c", finished=False), run("d", output=None)]
    assert ids(run("a"), *faulty) == ["a-0", "a-1"]


def test_where_runs_are_scored_those_above_zero_are_good_by_their_last_score() -> None:
    runs = [run("a"), run("b", rated(1.0)), run("c", rated(0.0)), run("d", rated(1.0), rated(-1.0))]
    assert ids(*runs) == ["b-0", "b-1"]


def test_of_a_corrected_run_the_last_call_is_good_with_the_correction_as_its_answer() -> None:
    (made,) = good_calls([run("a", rated(correction="5"), rated(correction="It is 5."))])
    assert (made.id, made.reply, made.finish, made.logprobs) == ("a-1", says("It is 5."), "stop", None)
    assert made.messages == [QUESTION, ASKS, RESULT]


def test_a_correction_counts_beside_scores_and_more_than_the_score_of_its_run() -> None:
    assert ids(run("a"), run("b", rated(1.0)), run("c", rated(correction="5"))) == ["b-0", "b-1", "c-1"]
    assert ids(run("a", rated(1.0)), run("b", rated(0.0, correction="5"))) == ["a-0", "a-1", "b-1"]
    assert ids(run("a"), run("b", rated(correction="5"))) == ["a-0", "a-1", "b-1"]  # nothing is scored


BLANK = ["", "   ", "\u200b\n", "<|im_end|>", " <|eot_id|>\n", "</s></s>", "<end_of_turn>", "<｜end▁of▁sentence｜>"]
"""What says nothing, however many characters it has."""


@pytest.mark.parametrize("blank", BLANK, ids=ascii)
def test_a_correction_that_says_nothing_corrects_nothing(blank: str) -> None:
    """Stores of before hold some: `feedback` refuses them now."""
    said = rated(correction=blank)
    runs = [run("a", said), run("b", rated(correction="It is 5."), said), run("c", rated(0.0), said)]
    assert [one.reply for one in good_calls(runs[:1])] == [ASKS, says("Five.")]
    assert [(one.id, one.reply) for one in good_calls(runs)] == [("b-1", says("It is 5."))]  # c was rated, a was not
    assert blank_corrections(runs) == 3


def test_a_correction_of_a_run_that_ended_on_a_call_of_a_tool_is_left_out() -> None:
    assert ids(run("a", rated(correction="5"), calls=[call("x", [QUESTION], ASKS)])) == []
    assert ids(run("a", rated(correction="5"), calls=[call("x", [QUESTION], None, error="gone")])) == []


def test_calls_that_are_no_whole_chat_are_left_out_and_the_latest_are_kept() -> None:
    odd = [
        call("partial", [QUESTION], says("Fi"), partial=True),
        call("failed", [QUESTION], None, error="gone"),
        call("other", [QUESTION], says("Five."), api="responses"),
        call("sound", [QUESTION], says("Five.")),
    ]
    assert ids(run("a", calls=odd)) == ["sound"]
    many = [call(str(number), [QUESTION], says("Five.")) for number in range(MOST_CALLS + 2)]
    assert ids(run("a", calls=many)) == [str(number) for number in range(2, MOST_CALLS + 2)]
