"""The demo's questions can be scored by its rewards, and the rewards give the numbers counted by hand."""

import json
from importlib.resources import files

import pytest

from praison_agent_rl.demo_rewards import correctness, length_penalty


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    text = files("praison_agent_rl").joinpath("demo_data/questions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_there_are_enough_questions_and_each_is_asked_once(rows):
    prompts = {" ".join(row["prompt"].casefold().split()) for row in rows}
    assert len(prompts) == len(rows) >= 160


def test_every_row_has_a_prompt_and_a_list_of_accepted_answers(rows):
    for row in rows:
        assert row.keys() == {"prompt", "answer"}
        assert row["prompt"].endswith("?") and isinstance(row["answer"], list) and row["answer"]
        assert all(isinstance(a, str) and a.strip() for a in row["answer"])


def test_no_question_contains_its_answer(rows):
    prompts = [row["prompt"] for row in rows]
    scores = correctness(prompts, prompts, answer=[row["answer"] for row in rows])
    assert [prompt for prompt, score in zip(prompts, scores, strict=True) if score] == []


def test_every_accepted_answer_is_correct_alone_and_in_a_sentence(rows):
    for row in rows:
        texts = [text for a in row["answer"] for text in (a, f"**{a.upper()}**.", f"It's {a}, I think.")]
        scores = correctness([row["prompt"]] * len(texts), texts, answer=[row["answer"]] * len(texts))
        assert scores == [1.0] * len(texts), row


def test_an_answer_counts_only_as_whole_words():
    completions = ["Comparison.", "paris", "The city of _Paris_!", "", "Par is", "Rome"]
    assert correctness(["?"] * 6, completions, answer=[["Paris"]] * 6) == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_answer_of_several_words_counts_only_whole_and_in_order():
    completions = ["New-York City", "york new", "New Yorkers", "new\nyork"]
    assert correctness(["?"] * 4, completions, answer=[["New York"]] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_any_accepted_spelling_counts_each_row_by_its_own_list():
    completions = ["6", "It has six legs.", "16", "Six"]
    answers = [["six", "6"], ["six", "6"], ["six", "6"], ["four", "4"]]
    assert correctness(["?"] * 4, completions, answer=answers) == [1.0, 1.0, 0.0, 0.0]


def test_a_number_is_not_found_within_another():
    completions = ["2.5", "5.", "1,000 metres", "H₂O", "50", "São Paulo, Brasília"]
    answers = [["5"], ["5"], ["1000"], ["H2O"], ["5"], ["Brasilia"]]
    assert correctness(["?"] * 6, completions, answer=answers) == [0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


def test_length_penalty_takes_a_twentieth_a_word_down_to_nothing():
    completions = ["", "Paris", "The capital of France is Paris.", "w " * 10, "w " * 20, "w " * 50]
    assert length_penalty(["?"] * 6, completions) == pytest.approx([1.0, 0.95, 0.7, 0.5, 0.0, 0.0])


def test_a_list_of_guesses_costs_only_its_words():
    listed = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
    completions = ["Tuesday", listed, "Friday"]
    correct = correctness(["?"] * 3, completions, answer=[["Tuesday"]] * 3, trainer_state=None)
    short = length_penalty(["?"] * 3, completions, answer=[["Tuesday"]] * 3, trainer_state=None)
    assert [c + s for c, s in zip(correct, short, strict=True)] == pytest.approx([1.95, 1.65, 0.95])
