"""Rewards on tools read a whole rollout, in every form in which calls are written."""

import json

import pytest

from praison_agent_rl.reward_library import few_calls, no_failed_call, right_arguments, right_tool
from praison_agent_rl.reward_library.tool_use import Call, calls_of


def call(name, arguments=None, place=None):
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments or {})}
    return {"type": "function", "function": function, **({"id": place} if place else {})}


def said(*calls, content=None):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def tool(content, place=None):
    return {"role": "tool", "content": content, **({"tool_call_id": place} if place else {})}


DONE = {"role": "assistant", "content": "It is 3."}


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("No call.", []),
        (None, []),
        ([said(call("add", {"a": 1}, "c1"))], [Call("add", {"a": 1}, "c1")]),
        ([{"tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}], [Call("add", {"a": 1})]),
        ([{"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}], [Call("add", {"a": 1})]),
        ([said(call("add", "")), DONE], [Call("add", {})]),
        ([said(call("add", "{oops"))], [Call("add", None)]),
        ([said(call("add", "[1]"))], [Call("add", None)]),
        ([said({"function": {"arguments": "{}"}}, {}, None)], [Call("", {}), Call("", {}), Call("", None)]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [Call("add", {"a": 1})]),
        ('[TOOL_CALLS] [{"name": "add"}, {"name": "now"}]', [Call("add", {}), Call("now", {})]),
        ('{"name": "add", "parameters": {"a": 1}}', [Call("add", {"a": 1})]),
        ("<tool_call>add(1)</tool_call>", [Call("", None)]),
        ([tool('{"name": "add", "arguments": {}}')], []),  # a result is no call
        ([{**DONE, "tool_calls": None}], []),
        (
            [said(call("a")), tool("1"), said(call("b"), call("a")), tool("2"), tool("3"), DONE],
            [Call("a", {}), Call("b", {}), Call("a", {})],
        ),
    ],
)
def test_calls_are_read_in_every_form(completion, found):
    assert calls_of(completion) == found


def test_the_right_tool_is_called_and_no_other():
    search, both = [said(call("search")), tool("x"), DONE], [said(call("search"), call("read"))]
    given = [search, both, [DONE], both, search]
    assert right_tool(given, ["search", "search", "search", ["search", "read"], "read"]) == [1.0, 0.5, 0.0, 1.0, 0.0]
    assert right_tool([search, [DONE]], [[], []]) == [0.0, 1.0]  # none is wanted
    assert right_tool([search, search, search], [None, "", float("nan")]) == [None, None, None]
    assert right_tool([[said(call("search"), call("search"))]], ["search"]) == [1.0]  # few_calls counts them


@pytest.mark.parametrize(
    ("made", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, 1.0),
        ({"a": 1, "b": 3}, {"a": 1, "b": 2}, 0.5),
        ({"a": 1}, {"a": 1, "b": 2}, 0.5),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}, 2 / 3),
        ({}, {}, 1.0),
        ({"a": 1.0}, {"a": 1}, 1.0),
        ({"a": True}, {"a": 1}, 0.0),
        ({"a": "1"}, {"a": 1}, 0.0),
        ({"q": " Paris. "}, {"q": "paris"}, 1.0),
        ({"a": 1, "b": None}, {"a": 1}, 1.0),
        ({"a": 1}, {"a": 1, "b": None}, 1.0),  # Arrow fills up with None
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}, 1.0),
        ("{oops", {"a": 1}, 0.0),
    ],
)
def test_arguments_are_right_by_the_share_that_is_equal(made, wanted, expected):
    given = [[said(call("add", made)), tool("3"), DONE]]
    assert right_arguments(given, [{"name": "add", "arguments": wanted}]) == [pytest.approx(expected)]
    assert right_arguments(given, [{"name": "add", "arguments": wanted}], whole=True) == [float(expected == 1.0)]


def test_each_wanted_call_takes_the_one_that_fits_best_and_takes_it_alone():
    given = [[said(call("add", {"a": 1, "b": 2}), call("add", {"a": 1, "b": 9})), said(call("now"))]]
    one, two = {"name": "add", "arguments": {"a": 1, "b": 9}}, {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert right_arguments(given, [[one, two]]) == [1.0]
    assert right_arguments(given, [[one, one]]) == [0.75]
    assert right_arguments(given, [[one, {"name": "later", "arguments": {}}]]) == [0.5]
    assert right_arguments(given, [json.dumps(one)]) == [1.0]
    assert right_arguments(given, [call("add", {"a": 1, "b": 9})]) == [1.0]  # OpenAI's form
    assert right_arguments(given * 2, one) == [1.0, 1.0]  # the same for every row
    assert right_arguments([[DONE]], [one]) == [0.0]
    assert right_arguments(given * 3, [None, [], ""]) == [None, None, None]


def test_arguments_can_be_left_out_of_the_comparison():
    given = [[said(call("add", {"a": 1, "id": "x"}))]]
    assert right_arguments(given, [{"name": "add", "arguments": {"a": 1, "id": "y"}}], ignore=["id"]) == [1.0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("3", 1.0),
        ("", 1.0),
        (None, 1.0),
        ('{"sum": 3, "error": null}', 1.0),
        ("No error was found", 1.0),
        ("[]", 1.0),
        ('{"error": "no such city"}', 0.0),
        ('{"success": false}', 0.0),
        ("Error: no such city", 0.0),
        ("error executing tool", 0.0),
        ("Traceback (most recent call last):\n...", 0.0),
        ("Failed to fetch", 0.0),
        ("Tool 'add' not found", 0.0),
        ('"Error: no such city"', 0.0),
        ([{"type": "text", "text": "Error: no"}], 0.0),
    ],
)
def test_a_tool_that_reports_an_error_is_a_failed_call(content, expected):
    assert no_failed_call([[said(call("add", place="c1")), tool(content, "c1"), DONE]]) == [expected]
    assert no_failed_call([[said(call("add")), tool(content), DONE]]) == [expected]


def test_each_answer_belongs_to_its_call():
    both = said(call("add", place="c1"), call("now", place="c2"))
    assert no_failed_call([[both, tool("Error", "c2"), tool("3", "c1")]]) == [0.5]
    assert no_failed_call([[both, tool("Error"), tool("3")]]) == [0.5]
    assert no_failed_call([[both]]) == [1.0]  # not answered yet
    assert no_failed_call([[said(call("add", "{oops"), call("now"))], "No call.", None]) == [0.5, 1.0, 1.0]
    assert no_failed_call([[said(call("a")), tool("Error"), said(call("a")), tool("3"), DONE]]) == [0.5]


def test_calls_must_fit_the_definitions_where_there_are_some():
    add = {"type": "function", "function": {"name": "add", "parameters": {"required": ["a"]}}}
    given = [[said(call("add", {"a": 1}))], [said(call("add", {}))], [said(call("sub", {"a": 1}))]]
    assert no_failed_call(given, [[add]] * 3) == [1.0, 0.0, 0.0]
    assert no_failed_call(given, [None, [], [add]]) == [1.0, 1.0, 0.0]


def test_few_calls_fall_in_a_straight_line():
    given = [[said(*[call("a")] * n)] for n in (1, 2, 3, 5, 6, 9)]
    assert few_calls(["", *given], free=2, most=6) == [1.0, 1.0, 1.0, 0.75, 0.25, 0.0, 0.0]
    assert few_calls(["", given[0]], free=0, most=1) == [1.0, 0.0]
