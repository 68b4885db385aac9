"""Repetition, scripts and tool calls are counted as by hand."""

import pytest

from praison_agent_rl.text_measures import faulty_tool_call, n_grams, repetition, scripts, units


def test_words_and_marks_are_units_whatever_their_case():
    assert units("No, no: 3.5!") == ["no", ",", "no", ":", "3", ".", "5", "!"]


def test_scripts_without_spaces_are_counted_by_letter():
    assert units("AI 漢字です") == ["ai", "漢", "字", "で", "す"]


def test_n_grams_are_runs_of_units():
    assert n_grams("a b c", 2) == [("a", "b"), ("b", "c")]
    assert n_grams("a", 2) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("one two three", 0.0),
        ("one two three four", 0.0),
        ("a b c d a b c d", 0.2),  # abcd bcda cdab dabc abcd: 4 of 5 distinct
        ("a a a a a a a a", 0.8),  # 5 equal 4-grams, 1 distinct
        ("!!!!!!!!", 0.8),
        ("好好好好好好好好", 0.8),
    ],
)
def test_repetition_is_the_share_of_4_grams_that_stood_there_before(text, expected):
    assert repetition(text) == pytest.approx(expected)


def test_letters_are_counted_by_script_and_nothing_else_is():
    assert scripts("Paß, 12 €! мир 漢字") == {"LATIN": 3, "CYRILLIC": 3, "CJK": 2}
    assert scripts("\uff21\uff22") == {"LATIN": 2}  # full width
    assert scripts("123 \ud800 \x00 😀") == {}


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}},
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize(
    "text",
    [
        "No call at all, with a brace {",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        'Let me see.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": {}}]',
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '```json\n{"name": "now", "arguments": {}}\n```',
        '{"function": {"name": "now", "arguments": {}}}',
        '{"answer": 3}',
    ],
)
def test_sound_calls_and_texts_without_a_call_have_no_fault(text):
    assert not faulty_tool_call(text, TOOLS)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, ',
        "<tool_call>add(1, 2)</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "add", "arguments": "no json"}</tool_call>',
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "later", "arguments": {}}]',
        '{"name": "add", "parameters": {"a": 1, "b"',
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_calls_that_cannot_be_carried_out_are_faults(text):
    assert faulty_tool_call(text, TOOLS)
