"""The control set is general, is not what the demo trains on, and is scored as one would by hand."""

import pytest

from praison_agent_rl.control import CONTROL_QUESTIONS, control_rewards, control_rows
from praison_agent_rl.data import prompt_key, read_rows
from praison_agent_rl.demo import QUESTIONS


def score(texts: list[str], answers: list[list[str]]) -> list[float | None]:
    (reward,) = control_rewards()
    return reward(["?"] * len(texts), texts, answer=answers)


def test_it_asks_forty_different_questions_as_plain_user_messages() -> None:
    rows = control_rows()
    assert len({prompt_key(row) for row in rows}) == len(rows) == 40
    for row in rows:
        assert row.keys() == {"prompt", "answer"}
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert row["answer"] and all(isinstance(answer, str) and answer for answer in row["answer"])


def test_no_question_is_one_that_the_demo_trains_or_judges_on() -> None:
    demo = {prompt_key(row) for row in read_rows(QUESTIONS)}
    assert not [row for row in control_rows() if prompt_key(row) in demo]


def test_an_echo_of_the_question_is_no_answer() -> None:
    rows = read_rows(CONTROL_QUESTIONS)
    assert set(score([row["prompt"] for row in rows], [row["answer"] for row in rows])) == {0.0}


@pytest.mark.parametrize("row", read_rows(CONTROL_QUESTIONS), ids=lambda row: row["answer"][0])
def test_each_accepted_answer_counts_alone_and_in_a_sentence(row: dict) -> None:
    texts = [text for answer in row["answer"] for text in (answer, answer.upper(), f"It is **{answer}**, I think.")]
    assert score(texts, [row["answer"]] * len(texts)) == [1.0] * len(texts)


def test_a_part_of_a_word_is_no_answer() -> None:
    assert score(["Japanese", "Japan.", "115", "1.5"], [["Japan"], ["Japan"], ["15"], ["5"]]) == [0.0, 1.0, 0.0, 0.0]
