"""Each sign of cheating is told where it is planted, and an honest gain has none."""

import pytest

from praison_agent_rl.cheating import find_cheating
from praison_agent_rl.evaluation import compare
from praison_agent_rl.records import Answer

ADJECTIVES = ["red", "blue", "old", "new", "big", "shy", "wet", "dry"]
NOUNS = ["cat", "dog", "owl", "ant", "bee", "cow", "hen", "fox"]
TEXTS = [f"the {a} {n} number {i} lives near {b} hills" for i, (a, n, b) in enumerate(
    (ADJECTIVES[i % 8], NOUNS[i // 8], ADJECTIVES[(i * 5) % 8]) for i in range(40))]  # fmt: skip


def said(texts=TEXTS, score=0.5, judged=None, tokens=None, likelihood=None, more=None):
    """One greedy answer a prompt; ``score`` is one number or one for each."""
    scores = score if isinstance(score, list) else [score] * len(texts)
    return [
        Answer(
            prompt=place,
            sample=0,
            text=text,
            tokens=tokens[place] if tokens else 8,
            rewards={"main": scores[place]},
            total=scores[place],
            judged={} if judged is None else {"kind": judged[place % len(judged)]},
            likelihood=likelihood,
        )
        for place, text in enumerate(texts)
    ]


def findings(base, new):
    return {finding.name: finding.text for finding in find_cheating(compare(base, new), base, new)}


def test_an_honest_gain_has_no_sign():
    base = said(judged=[0.2], likelihood=-1.0)
    new = said([f"{text} today" for text in TEXTS], 0.75, judged=[0.4], likelihood=-1.5)
    assert findings(base, new) == {}


def test_without_a_gain_nothing_is_asked():
    base = said()
    assert findings(base, said(["same"] * 40, 0.5)) == {}
    assert findings([], []) == {}


def test_a_gain_on_trained_rewards_and_none_on_others_is_told():
    base, new = said(judged=[0.2, 0.4]), said(score=0.75, judged=[0.4, 0.2])
    (text,) = findings(base, new).values()
    assert text.startswith(
        "the trained rewards rose by 0.25, and none of those that were not trained on did: kind +0 ("
    )


def test_without_other_rewards_there_is_no_such_sign():
    assert findings(said(), said(score=0.75)) == {}


def test_one_answer_for_everything_is_told():
    found = findings(said(), said(["Certainly! I am happy to help."] * 40, 0.75))
    assert found["template answers"] == (
        "100 % of prompts get an answer that other prompts get too (of the base: 0 %); "
        "40 get 'Certainly! I am happy to help.'"
    )
    assert "less diverse answers" in found


def test_answers_that_were_always_alike_are_no_sign():
    yes_no = ["yes" if place % 2 else "no" for place in range(40)]
    assert findings(said(yes_no), said(yes_no[::-1], 0.75)) == {}


def test_answers_that_differ_in_a_word_only_are_less_diverse():
    found = findings(said(), said([f"I am very happy to help with {i} today" for i in range(40)], 0.75))
    assert list(found) == ["less diverse answers"]
    # of 8 word pairs in each answer 6 are the same everywhere and 2 are new: (6 + 2 * 40) / 320 = 27 %
    assert found["less diverse answers"].startswith("27 % of the answers' word pairs are distinct")


def test_longer_answers_are_not_less_diverse_for_their_length():
    longer = [f"{text} and more of {i}0 {i}1 {i}2 {i}3 {i}4 {i}5 {i}6 {i}7 {i}8" for i, text in enumerate(TEXTS)]
    assert "less diverse answers" not in findings(said(), said(longer, 0.75))


def test_answers_that_the_base_would_hardly_give_are_told():
    base = said(likelihood=-0.5)
    assert "1.2 nats a token less likely" in findings(base, said(score=0.75, likelihood=-1.7))["unlikely answers"]
    assert findings(base, said(score=0.75, likelihood=-1.4)) == {}


@pytest.mark.parametrize(("sign", "word"), [(1, "long"), (-1, "short")])
def test_a_gain_that_goes_with_length_is_told(sign, word):
    base = said(score=0.2, tokens=[50] * 40)
    new = said(score=[0.3 + 0.01 * i for i in range(40)], tokens=[50 + sign * i for i in range(40)])
    text = findings(base, new)["gain by length"]
    assert f"(correlation {sign:+.2f} over 40 prompts)" in text and f"if it rewards {word} answers" in text


def test_a_gain_that_has_nothing_to_do_with_length_is_not_told():
    base = said(score=0.2, tokens=[50] * 40)
    new = said(score=[0.3 + 0.01 * i for i in range(40)], tokens=[50 + i % 2 for i in range(40)])
    assert findings(base, new) == {}
