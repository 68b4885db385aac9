"""Rewards on form, length and style give the numbers worked out by hand."""

import time

import pytest

from praison_agent_rl.errors import RewardError
from praison_agent_rl.reward_library import (
    citations,
    forbidden,
    json_schema,
    json_valid,
    language,
    length_band,
    length_penalty,
    regex,
    repetition,
    script,
    soft_overlong,
    tags,
    think_answer,
    think_format,
)


def test_regex_searches_matches_or_fits_the_whole_text():
    assert regex(["a1b", "1b", "1"], pattern=r"\d") == [1.0, 1.0, 1.0]
    assert regex(["a1b", "1b", "1"], pattern=r"\d", mode="match") == [0.0, 1.0, 1.0]
    assert regex(["a1b", "1b", "1"], pattern=r"\d", mode="fullmatch") == [0.0, 0.0, 1.0]
    assert regex(["A\nb"], pattern="a.b") == [0.0]
    assert regex(["A\nb", "x"], pattern="a.b", ignore_case=True, right=2.0, wrong=-1.0) == [2.0, -1.0]


def test_a_pattern_that_backtracks_without_end_has_no_score_there(caplog):
    started = time.monotonic()
    assert regex(["a" * 5000, "ab"], pattern="^(a|aa)+$b|^ab", seconds=0.2) == [None, 1.0]
    assert time.monotonic() - started < 60
    assert "took longer than 0.2 s" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<reasoning>a</reasoning>\n<answer>b</answer>", 1.0),
        ("Well: <reasoning>a</reasoning> so <answer>b</answer> ok", 1.0),
        ("<REASONING>a</reasoning ><answer id='1'>b</answer>", 1.0),
        ("<reasoning>a</reasoning>", 0.5),
        ("<reasoning>a", 0.25),
        ("a</answer>", 0.25),
        ("<reasoning>a</reasoning><answer>b", 0.75),
        ("<reasoning>" * 100, 0.0),  # a tag is not paid twice, not even once if it is repeated
        ("<reasoning>a</reasoning><answer>b</answer><answer>c</answer>", 0.5),
        ("<answer>b</answer><reasoning>a</reasoning>", 0.5),  # in order: one pair of the two
        ("<reasoning>a<answer>b</answer></reasoning>", 0.75),  # nested: <reasoning> <answer> </answer>
        ("</answer>b<answer></reasoning>a<reasoning>", 0.25),  # all backwards: one of them
        ("<reasoning></reasoning><answer> </answer>", 0.5),  # nothing in them
        ("<reasoning>a</reasoning><answer></answer>", 0.75),
        ("", 0.0),
        ("reasoning answer", 0.0),
        ("<reasonings>a</reasonings>", 0.0),
    ],
)
def test_tags_are_paid_once_each_and_in_order(text, expected):
    assert tags([text]) == [expected]


def test_tags_of_other_names_share_the_score():
    assert tags(["<plan>a</plan><act>b"], names=["plan", "act", "check"]) == [0.5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1.0),
        ("Well <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> ok", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>b", 0.0),
        ("<think>a", 0.0),
        ("", 0.0),
    ],
)
def test_reasoning_comes_before_the_answer_and_nothing_else_is_there(text, expected):
    assert think_answer([text]) == [expected]


def test_the_answer_may_be_all_that_follows_the_reasoning():
    given = ["<think>a</think>b", "<think>a</think> ", "b", "b<think>a</think>c"]
    assert think_answer(given, answering="", right=2.0, wrong=-1.0) == [2.0, -1.0, -1.0, -1.0]
    assert think_answer(["<plan>a</plan><do>b</do>"], thinking="plan", answering="do") == [1.0]


def test_think_format_is_trls_reward():
    given = ["<think>a</think>b", "<think>a</think>", " <think>a</think>b", "<think><think>a</think>b"]
    assert think_format(given) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', 1.0),
        (' \n{"a": [1, {"b": null}]}\n', 1.0),
        ('```json\n{"a": 1}\n```', 1.0),
        ('```\n{"a": 1}\n```\n', 1.0),
        ('<think>{</think>{"a": 1}', 1.0),
        ('Here: {"a": 1}', 0.0),
        ('{"a": 1} {"b": 2}', 0.0),
        ("{'a': 1}", 0.0),
        ('{"a": NaN}', 0.0),
        ('{"a": Infinity}', 0.0),
        ('{"a": 1,}', 0.0),
        ("[1]", 0.0),
        ('"a"', 0.0),
        ("[" * 100_000, 0.0),
        ('{"a": ' + "1" * 5000 + "}", 0.0),  # longer than Python reads
        ("", 0.0),
    ],
)
def test_json_is_an_object_and_nothing_else(text, expected):
    assert json_valid([text]) == [expected]


def test_json_may_be_of_another_kind_or_without_a_fence():
    given = ["[1]", '{"a": 1}', "42", "null"]
    assert json_valid(given, kind="array") == [1.0, 0.0, 0.0, 0.0]
    assert json_valid(given, kind="any") == [1.0, 1.0, 1.0, 1.0]
    assert json_valid(["```json\n{}\n```", "{}"], fenced=False) == [0.0, 1.0]


CITY = {
    "type": "object",
    "required": ["city"],
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "minLength": 1}},
}


def test_json_fits_a_schema_or_is_near_it():
    given = ['{"city": "Paris"}', '{"city": ""}', '{"city": "Paris", "x": 1}', "{}", "Paris", ""]
    assert json_schema(given, schema=CITY) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert json_schema(given, schema=CITY, near=0.25) == [1.0, 0.25, 0.25, 0.25, 0.0, 0.0]


def test_a_schema_elsewhere_is_not_fetched():
    with pytest.raises(RewardError, match=r"schema points at 'http://127.0.0.1:1/s', which is not in it"):
        json_schema(["{}"], schema={"$ref": "http://127.0.0.1:1/s"})


def test_the_length_falls_in_a_straight_line_outside_the_band():
    texts = ["", "a", "a a", "a a a", "a a a a", "a a a a a", "a a a a a a", "a " * 9]
    assert length_band(texts, min=2, max=4) == [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.0]
    assert length_band(texts, min=2, max=4, fall=1) == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert length_band(texts, min=2, max=4, fall=0) == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert length_band(texts, min=4, fall=8) == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0, 1.0, 1.0]
    assert length_band(texts[:2], max=0) == [1.0, 0.0]
    assert length_band(texts) == [1.0] * 8


def test_length_is_in_words_characters_or_tokens():
    assert length_band(["a bc"], max=2) == [1.0]
    assert length_band(["a bc"], max=2, unit="characters") == [0.0]
    assert length_band(["a bc"], [[7, 7, 7]], max=2, unit="tokens") == [0.5]
    assert length_penalty(["a bc", ""], [[7, 7, 7], []], limit=4, unit="tokens") == [0.25, 1.0]
    assert length_penalty(["x" * 500], limit=2000, unit="characters") == [0.75]


def test_length_penalty_is_the_seeds_formula():
    texts = ["", "a", "a " * 19, "a " * 20, "a " * 21]
    assert length_penalty(texts) == [max(0.0, 1.0 - len(text.split()) / 20) for text in texts]
    assert length_penalty(texts) == pytest.approx([1.0, 0.95, 0.05, 0.0, 0.0])


def test_soft_overlong_is_the_equation_of_dapo():
    ids = [[1] * n for n in (0, 80, 81, 90, 100, 101)]
    assert soft_overlong([""] * 6, ids, limit=100, margin=20) == pytest.approx([0, 0, -0.05, -0.5, -1.0, -1.0])
    assert soft_overlong([""] * 2, [[1] * 5, [1] * 6], limit=5) == [0.0, -1.0]


def test_repetition_is_one_less_the_share_of_runs_that_stood_there_before():
    assert repetition(["a b c d a b c d"]) == [0.8]  # abcd bcda cdab dabc abcd: 4 of 5
    assert repetition(["a a a"], n=1) == [pytest.approx(1 / 3)]
    assert repetition(["好好好好好好好好"]) == [pytest.approx(0.2)]
    assert repetition(["", "one", "all words differ here now"]) == [1.0, 1.0, 1.0]


GERMAN = "Die Hauptstadt von Frankreich ist Paris, und sie liegt an der Seine."
FRENCH = "La capitale de la France est Paris, et elle se trouve sur la Seine."
ENGLISH = "The capital of France is Paris, and it lies on the river Seine."


def test_the_language_is_told_and_a_short_text_is_not():
    assert language([ENGLISH, GERMAN, FRENCH]) == [1.0, 0.0, 0.0]
    assert language([ENGLISH, GERMAN, FRENCH], language=["de", "fr"]) == [0.0, 1.0, 1.0]
    assert language(["Paris", "", "42 " * 50, "🙂" * 50]) == [None] * 4
    assert language(["東京は日本の首都です"], language="ja") == [1.0]
    assert language([GERMAN], language="de", among=["en", "fr"]) == [1.0]
    assert language([f"<think>{GERMAN}</think>{ENGLISH}"]) == [1.0]
    assert language([f"```\n{GERMAN * 5}\n```\n{ENGLISH}"]) == [1.0]


def test_the_script_is_a_share_of_letters():
    assert script(["abc мир", "12!"], script="cyrillic") == [0.5, None]
    assert script(["abc мир"], script=["LATIN", "CYRILLIC"]) == [1.0]


def test_forbidden_phrases_cost_once_each():
    given = ["As an AI, I cannot. I cannot!", "I cannot", "AIs can", ""]
    assert forbidden(given, phrases=["as an ai", "I cannot"]) == [0.0, 0.0, 1.0, 1.0]
    assert forbidden(given, phrases=["as an ai", "I cannot"], each_costs=0.25) == [0.5, 0.75, 1.0, 1.0]
    assert forbidden(["AI ai"], phrases="Ai", case=True) == [1.0]
    assert forbidden(["it’s “so”"], phrases='it\'s "so"') == [0.0]  # other quotes
    assert forbidden(["x 123", "x"], phrases=r"\d{3}", patterns=True) == [0.0, 1.0]


def test_a_forbidden_pattern_that_backtracks_without_end_has_no_score():
    assert forbidden(["a" * 5000], phrases="^(a|aa)+$b", patterns=True) == [None]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So it is [1].", 1),
        ("So [1][1] and [1].", 1),
        ("So [1, 2] and [3-4].", 4),
        ("See https://a.org/x. And (https://a.org/x) again.", 1),
        ("See [the page](https://a.org).", 1),
        ("As (Smith, 2020) and (Smith & Jones 2019; Lee, 2021) say.", 2),
        ("So【3†source】it is.", 1),
        ("x[1] is code", 0),
        ("`[1]` in\n```\n[2]\n```", 1),
        ("(see Smith, 2020) and (Öztürk 2019a)", 2),
        ("(in 2020) and (12, 2020)", 0),
        ("(May 2020)", 1),  # taken for an author: it knows no names
        ("[a] (2020) [2020]", 0),
        ("<think>[1]</think>So.", 0),
        ("", 0),
    ],
)
def test_different_citations_are_counted(text, found):
    assert citations([text], least=4) == [found / 4]


def test_citations_beyond_the_sources_do_not_count():
    text = "So [1] [3], https://a.org/ and https://b.org (Lee, 2020)."
    assert citations([text], [["https://a.org", "c"]], least=4) == [0.75]  # [1], https://a.org and Lee
    assert citations([text], [[]], least=4) == [0.25]
    assert citations([text], [None], least=5) == [1.0]
    assert citations([text] * 3, least=2, style="links") == [1.0] * 3
    assert citations([text], least=1, style="brackets") == [1.0]


@pytest.mark.parametrize(
    "piece", ["<answer>", "<answer ", "```", "[1, ", "(a 2020; ", "http://a", "{", "[", "好", "<think>"]
)
def test_a_huge_text_takes_no_time_that_grows_out_of_bounds(piece):
    text = [piece * (100_000 // len(piece))]
    started = time.process_time()
    for reward in (tags, think_answer, think_format, json_valid, length_band, repetition, script, citations):
        assert len(reward(text)) == 1
    assert len(forbidden(text, phrases="a b")) == 1
    assert time.process_time() - started < 20


def test_tags_that_are_hidden_in_the_reasoning_are_not_paid():
    form = "<reasoning>2+2</reasoning><answer>4</answer>"
    assert tags([f"<think>{form}</think>4", f"<think>2</think>{form}", f"<think>{form}"]) == [0.0, 1.0, 0.0]
    assert tags(["<think>2+2</think><answer>4</answer>"], names=["think", "answer"]) == [1.0]
