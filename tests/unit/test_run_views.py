"""What a reward may ask of a run by name is the same whether it is read from a recorded run or from messages."""

import json

import pytest

from praison_agent_rl.records import Call, Run
from praison_agent_rl.reward_library.tool_use import no_failed_call
from praison_agent_rl.run_views import call_counts, reports_failure, run_columns, run_content, run_messages

SYSTEM = {"role": "system", "content": "Add."}
QUESTION = {"role": "user", "content": "2+3+4?"}


def asks(*calls, content=None):
    """A message of the assistant that calls tools: (id, name, arguments as written)."""
    made = [{"id": id, "type": "function", "function": {"name": n, "arguments": a}} for id, n, a in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def gives(id, content):
    return {"role": "tool", "tool_call_id": id, "content": content}


def says(text):
    return {"role": "assistant", "content": text}


FIRST = asks(("a", "add", '{"x": 2, "y": 3}'))
SECOND = asks(("b", "add", '{"x": 5'), ("c", "look", {"at": "4"}))
ROUNDS = [FIRST, gives("a", "5"), SECOND, gives("c", '{"error": "no sight"}'), gives("b", "Error: no JSON")]
WHOLE = [*ROUNDS, says("It is 9.")]
TOLD = [
    {"name": "add", "arguments": {"x": 2, "y": 3}, "result": "5", "error": False},
    {"name": "add", "arguments": '{"x": 5', "result": "Error: no JSON", "error": True},
    {"name": "look", "arguments": {"at": "4"}, "result": '{"error": "no sight"}', "error": True},
]


def call(number, messages, reply, **more):
    return Call(id=f"c{number}", run="r", time=100.0 + number, messages=messages, reply=reply, **more)


def recorded(*, id="r", time=100.0, agents=(None, None, None), **more):
    """The run of ``WHOLE``, as its three requests."""
    before = [SYSTEM, QUESTION]
    calls = [
        call(0, before, FIRST, agent=agents[0]),
        call(1, [*before, *WHOLE[:2]], SECOND, agent=agents[1]),
        call(2, [*before, *WHOLE[:5]], WHOLE[5], agent=agents[2]),
    ]
    return Run(id=id, time=time, prompt="2+3+4?", output="It is 9.", calls=calls, **more)


def views(completion, run=None, prompt="2+3+4?"):
    """The three of one completion."""
    found = run_columns([prompt], [completion], None if run is None else [run])
    assert list(found) == ["run", "final_answer", "tool_calls"]
    return tuple(values[0] for values in found.values())


# --- answers and message lists ----------------------------------------------------------------------------------------


def test_an_answer_given_at_once_is_a_run_with_one_call():
    run, answer, tools = views("Nine.")
    assert (answer, tools) == ("Nine.", [])
    (only,) = run.calls
    assert only.messages == [{"role": "user", "content": "2+3+4?"}] and only.reply == says("Nine.")
    assert (run.prompt, run.output, run.error, run.seconds, run.time) == ("2+3+4?", "Nine.", None, 0.0, 0.0)


def test_a_message_list_is_a_run_with_a_call_for_each_message_of_the_assistant():
    run, answer, tools = views(WHOLE, prompt=[SYSTEM, QUESTION])
    assert answer == "It is 9." and tools == TOLD
    assert [asked.messages for asked in run.calls] == [asked.messages for asked in recorded().calls]
    assert [asked.reply for asked in run.calls] == [FIRST, SECOND, WHOLE[5]]
    assert (run.prompt, run.output) == ("2+3+4?", "It is 9.")


def test_the_made_runs_of_equal_answers_are_equal_and_those_of_others_are_not():
    run, other, again = (views(text)[0] for text in ("Nine.", "Ten.", "Nine."))
    assert run == again and run.id == "3b561a214a675dd6" != other.id  # in every process


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ([], ""),
        ("", ""),
        (ROUNDS, ""),  # ended on results that nobody spoke of
        ([says("Let me see."), FIRST, gives("a", "5")], "Let me see."),
        ([FIRST, gives("a", "5"), says(None)], ""),
        ([says([{"type": "text", "text": "Ni"}, {"type": "text", "text": "ne."}])], "Nine."),
        ([{"content": "no role"}], "no role"),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', ""),
        ("<tool_call>oh</tool_call>", ""),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
    ],
)
def test_the_final_answer_is_the_last_message_that_calls_no_tool(completion, answer):
    run, found, _ = views(completion)
    assert found == answer and run.output == (answer or None)


def test_calls_that_a_model_writes_into_its_text_are_calls_without_a_result():
    text = 'First. <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call><tool_call>{"na</tool_call>'
    assert views(text)[2] == [
        {"name": "add", "arguments": {"x": 1}, "result": None, "error": False},
        {"name": "", "arguments": {}, "result": None, "error": True},
    ]
    assert views('{"name": "add", "parameters": {"x": 1}}')[2][0]["arguments"] == {"x": 1}
    assert views('{"name": "Bob", "age": 3}')[2] == []


def test_results_without_ids_belong_to_calls_in_their_order():
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("one", "two", "three")]
    results = [{"role": "tool", "name": name, "content": name} for name in ("one", "two")]
    found = views([{"role": "assistant", "tool_calls": calls}, *results])[2]
    assert [(made["name"], made["result"]) for made in found] == [("one", "one"), ("two", "two"), ("three", None)]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [("", {}), ("null", "null"), ("[1]", "[1]"), ("{", "{"), (None, "null"), ([1], "[1]"), ({"x": 1}, {"x": 1})],
)
def test_arguments_that_are_no_json_object_stay_as_they_are_written_and_are_an_error(written, arguments):
    (made,) = views([asks(("a", "add", written)), gives("a", "5")])[2]
    assert made["arguments"] == arguments and made["error"] is not isinstance(arguments, dict)


def test_odd_messages_and_calls_are_no_reason_to_fail():
    odd = {"role": "assistant", "tool_calls": [None, "add", {"function": None}, {"function": {"name": 3}}]}
    run, answer, tools = views(["no message", odd, gives("a", None)])
    assert answer == "" and [made["name"] for made in tools] == [""] * 4 and all(made["error"] for made in tools)
    assert len(run.calls) == 1


def test_what_a_failed_call_is_agrees_with_the_library():
    for result in (
        '{"error": "x"}',
        '{"error": null}',
        '{"success": false}',
        "Error: x",
        "erroneous",
        "failed",
        '"Failed"',
        "5",
    ):
        completion = [FIRST, gives("a", result)]
        (made,) = views(completion)[2]
        assert made["error"] is reports_failure(result) is (no_failed_call([completion]) == [0.0])


# --- recorded runs ----------------------------------------------------------------------------------------------------


def test_a_recorded_run_counts_and_the_completion_does_not():
    run = recorded()
    found, answer, tools = views("something else", run)
    assert found is run and answer == "It is 9." and tools == TOLD


def test_calls_of_several_agents_are_told_in_the_order_in_which_they_were_made():
    over = asks(("t", "transfer_to_other", "{}"))
    calls = [
        call(0, [QUESTION], over, agent="first"),
        call(1, [SYSTEM, QUESTION], FIRST, agent="other"),
        call(2, [SYSTEM, QUESTION, FIRST, gives("a", "5")], says("Five."), agent="other"),
        call(3, [QUESTION, over, gives("t", "Five.")], says("It is five."), agent="first"),
    ]
    run = Run(id="r", time=1.0, calls=calls)
    _, answer, tools = views("", run)
    assert answer == "It is five."
    assert [(made["name"], made["result"]) for made in tools] == [("transfer_to_other", "Five."), ("add", "5")]
    assert run_messages(run) == [over, gives("t", "Five."), says("It is five.")]


def test_ids_that_each_round_numbers_anew_are_not_mixed_up():
    again = asks(("call_0", "add", '{"x": 9}'))
    rounds = [asks(("call_0", "add", '{"x": 1}')), gives("call_0", "one"), again, gives("call_0", "nine")]
    calls = [
        call(0, [QUESTION], rounds[0]),
        call(1, [QUESTION, *rounds[:2]], None, error="the server was gone"),
        call(2, [QUESTION, *rounds[:2]], again),
        call(3, [QUESTION, *rounds], says("Ten.")),
    ]
    tools = views("", Run(id="r", time=1.0, calls=calls))[2]
    assert [made["result"] for made in tools] == ["one", "nine"] == [made["result"] for made in views(rounds)[2]]


def test_a_rewritten_history_has_no_result():
    calls = [call(0, [QUESTION], FIRST), call(1, [{"role": "user", "content": "The tool gave 5."}], says("Five."))]
    (made,) = views("", Run(id="r", time=1.0, calls=calls))[2]
    assert made["result"] is None and made["error"] is False


def test_a_run_in_which_nothing_was_answered_has_nothing():
    run = Run(id="r", time=1.0, error="gone", calls=[call(0, [QUESTION], None, error="gone")])
    assert views("", run)[1:] == ("", []) and run_messages(run) == []
    assert call_counts(["", "", WHOLE, [], "x"], [run, Run(id="s", time=1.0), None, None, None]) == [1, 0, 3, 0, 1]


def test_the_messages_of_a_run_are_what_was_said_after_the_prompt():
    assert run_messages(recorded()) == WHOLE
    first = recorded().calls[0]
    assert run_messages(Run(id="r", time=1.0, calls=[first])) == [FIRST]
    assert run_messages(Run(id="r", time=1.0)) == []


def test_what_the_agent_answered_counts_where_a_guardrail_made_something_else_of_what_the_model_said():
    run = recorded().model_copy(update={"output": "I may not say that."})
    assert views("", run)[1:] == ("I may not say that.", TOLD)
    assert run_messages(run) == [*ROUNDS, says("I may not say that.")] and run.calls[-1].reply == says("It is 9.")
    unanswered = run.model_copy(update={"calls": run.calls[:1]})
    assert run_messages(unanswered) == [FIRST] and views("", unanswered)[1] == "I may not say that."


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_only_what_is_wanted_is_made_and_some_completions_may_have_no_run():
    found = run_columns(["p", "q"], ["one", WHOLE], [recorded(), None], wanted=("final_answer",))
    assert found == {"final_answer": ["It is 9.", "It is 9."]}
    assert run_columns(["p"], ["one"], wanted=()) == {}
    assert run_columns([], [], []) == {"run": [], "final_answer": [], "tool_calls": []}


def test_as_many_runs_as_completions_are_wanted():
    with pytest.raises(ValueError, match="zip"):
        run_columns(["p", "q"], ["one", "two"], [recorded()])


def test_tool_calls_and_answers_are_plain_data():
    _, answer, tools = views(WHOLE)
    assert json.loads(json.dumps([answer, tools])) == [answer, tools]


def test_runs_of_the_same_content_are_alike_but_for_ids_and_times():
    def renamed(message):
        text = json.dumps(message)
        for id in "abc":
            text = text.replace(f'id": "{id}"', f'id": "{id}{id}{id}"')
        return json.loads(text)

    run = recorded()
    calls = [
        asked.model_copy(
            update={
                "id": "other",
                "run": "s",
                "time": 7.0,
                "messages": [renamed(m) for m in asked.messages],
                "reply": renamed(asked.reply),
            }
        )
        for asked in run.calls
    ]
    other = run.model_copy(update={"id": "s", "time": 1.0, "session": "t", "parent": "u", "calls": calls})
    assert run_content(run) == run_content(other)
    assert run_content(run) != run_content(run.model_copy(update={"seconds": 2.0}))
    assert run_content(run) != run_content(run.model_copy(update={"calls": calls[:2]}))
    both = asks(("a", "add", "{}"), ("b", "add", "{}"))  # whose result is whose still counts
    one, two = ([both, gives(x, "1"), gives(y, "2"), says("3")] for x, y in ("ab", "ba"))
    assert run_content(views(one)[0]) != run_content(views(two)[0])
    assert json.dumps(run_content(run)).count("tool_call_id") == 4
    assert run.calls[0].reply == FIRST  # and the run is what it was
