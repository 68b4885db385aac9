"""Logs of other tools become runs: what was said comes over unchanged, and every record is accounted for."""

import json

import pytest

from praison_agent_rl.dataset_building import BuildOptions, build_dataset
from praison_agent_rl.errors import DataError
from praison_agent_rl.foreign_logs import import_log
from praison_agent_rl.transcripts import read_runs

SYSTEM = {"role": "system", "content": "Answer briefly."}
ASK = {"role": "user", "content": "2+3?"}
ADD = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
CALL = {"role": "assistant", "content": None, "tool_calls": [ADD]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
ANSWER = {"role": "assistant", "content": "It is 5."}
AGAIN = {"role": "user", "content": "And 4+4?"}
EIGHT = {"role": "assistant", "content": "8"}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def put(tmp_path, content, name="log.jsonl"):
    path = tmp_path / name
    if not isinstance(content, str):
        content = "\n".join(json.dumps(item) for item in content)
    path.write_text(content, encoding="utf-8")
    return path


def imported(tmp_path, content, name="log.jsonl", **options):
    report = import_log(put(tmp_path, content, name), tmp_path / "store", **options)
    return report, list(read_runs(tmp_path / "store"))


def said(run):
    return [(call.messages, call.reply) for call in run.calls]


# --- chats -------------------------------------------------------------------------------------------------------


def test_a_line_of_a_fine_tuning_file_becomes_a_run_for_each_turn(tmp_path):
    messages = [SYSTEM, ASK, CALL, RESULT, {**ANSWER, "weight": 0}, AGAIN, EIGHT]
    report, (first, second) = imported(tmp_path, [{"messages": messages, "tools": [SCHEMA]}])
    assert said(first) == [([SYSTEM, ASK], CALL), ([SYSTEM, ASK, CALL, RESULT], ANSWER)]
    assert said(second) == [([SYSTEM, ASK, CALL, RESULT, ANSWER, AGAIN], EIGHT)]
    assert (first.prompt, first.output, first.tags, first.calls[0].tools) == (
        "2+3?",
        "It is 5.",
        ["imported"],
        [SCHEMA],
    )
    assert first.session == second.session is not None
    assert (report.kind, report.records, report.taken, report.runs, report.calls) == ("openai", 1, 1, 2, 3)


def test_a_question_without_an_answer_is_a_prompt_nevertheless(tmp_path):
    _, (run,) = imported(tmp_path, [{"messages": [SYSTEM, ASK]}])
    assert said(run) == [([SYSTEM, ASK], None)]


@pytest.mark.parametrize(
    "record",
    [
        {"request": {"model": "m", "messages": [ASK], "temperature": 0.5}, "response": {"RESPONSE": 1}},
        {
            "custom_id": "1",
            "body": {"model": "m", "messages": [ASK], "temperature": 0.5},
            "response": {"body": {"RESPONSE": 1}},
        },
        {"model": "m", "messages": [ASK], "temperature": 0.5, "response": {"RESPONSE": 1}},
    ],
)
def test_a_request_with_its_response_is_one_call(tmp_path, record):
    response = {
        "model": "m-1",
        "created": 1700000000,
        "choices": [{"message": ANSWER, "finish_reason": "stop"}],
        "usage": {"total_tokens": 7},
    }
    record = json.loads(json.dumps(record).replace('{"RESPONSE": 1}', json.dumps(response)))
    _, (run,) = imported(tmp_path, [record])
    call = run.calls[0]
    assert said(run) == [([ASK], ANSWER)]
    assert (call.model, call.time, call.finish, call.usage) == ("m-1", 1700000000, "stop", {"total_tokens": 7})
    assert call.settings["temperature"] == 0.5 and "messages" not in call.settings


@pytest.mark.parametrize("error", ["boom", {"message": "boom", "code": 429}])
@pytest.mark.parametrize(
    "record",
    [
        {"request": {"messages": [SYSTEM, ASK, ANSWER, AGAIN]}, "response": None, "error": "ERROR"},
        {"body": {"messages": [SYSTEM, ASK, ANSWER, AGAIN]}, "error": "ERROR"},
        {"messages": [SYSTEM, ASK, ANSWER, AGAIN], "response": None, "error": "ERROR"},
        {
            "request": {"messages": [SYSTEM, ASK, ANSWER, AGAIN]},
            "response": {"status": 429, "body": {"error": "ERROR"}},
        },
    ],
)
def test_a_request_that_failed_is_a_run_with_the_error(tmp_path, record, error):
    record = json.loads(json.dumps(record).replace('"ERROR"', json.dumps(error)))
    report, (run,) = imported(tmp_path, [record])
    assert said(run) == [([SYSTEM, ASK, ANSWER, AGAIN], None)] and report.left_out == {}
    assert (run.error, run.calls[0].error) == ("boom", "boom") and "error" not in run.calls[0].settings


def test_an_error_beside_a_conversation_is_that_of_its_last_turn(tmp_path):
    _, runs = imported(tmp_path, [{"messages": [ASK, ANSWER, AGAIN], "error": "boom"}])
    assert [run.error for run in runs] == [None, "boom"]


def test_a_sharegpt_conversation_is_read_with_its_tools(tmp_path):
    turns = [
        {"from": "human", "value": "2+3?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 3}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "It is 5."},
        {"from": "human", "value": "And 4+4?"},
        {"from": "gpt", "value": "8"},
    ]
    record = {"id": "s1", "conversations": turns, "system": "Answer briefly.", "tools": json.dumps([SCHEMA])}
    report, (first, second) = imported(tmp_path, json.dumps([record], indent=1), "log.json")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    assert report.kind == "sharegpt" and first.session == "s1"
    assert said(first)[0] == ([SYSTEM, ASK], {"role": "assistant", "content": None, "tool_calls": [call]})
    assert said(second)[0][0][-2:] == [ANSWER, AGAIN] and first.calls[0].tools == [SCHEMA]


def session_file(tmp_path):
    """As praisonaiagents itself writes it."""
    from praisonaiagents.session.store import DefaultSessionStore

    store = DefaultSessionStore(session_dir=str(tmp_path / "sessions"))
    store.set_agent_info("s1", agent_name="Helper")
    store.add_user_message("s1", "2+3?")
    store.add_message("s1", "assistant", "", tool_calls=[ADD])
    store.add_message("s1", "tool", "5", tool_call_id="c1")
    store.add_assistant_message("s1", "It is 5.")
    store.add_user_message("s1", "And 4+4?")
    store.add_assistant_message("s1", "8")
    return store, tmp_path / "sessions" / "s1.json"


def test_a_session_of_the_framework_is_read_as_it_was_written(tmp_path):
    _, path = session_file(tmp_path)
    report = import_log(path, tmp_path / "store")
    first, second = read_runs(tmp_path / "store")
    call = {"role": "assistant", "content": "", "tool_calls": [ADD]}
    assert (report.kind, report.left_out) == ("praisonai-session", {})
    assert said(first) == [([ASK], call), ([ASK, call, RESULT], ANSWER)]
    assert said(second) == [([ASK, call, RESULT, ANSWER, AGAIN], EIGHT)]
    assert (first.agent, first.session, first.time > 1.7e9) == ("Helper", "s1", True)


def test_all_sessions_of_an_export_are_read(tmp_path):
    store, _ = session_file(tmp_path)
    report, runs = imported(tmp_path, json.dumps(store.export_all(), indent=2), "export.json")
    assert (report.kind, len(runs)) == ("praisonai-session", 2)


# --- spans -------------------------------------------------------------------------------------------------------

OPENINFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.invocation_parameters": '{"model": "m", "temperature": 0.5}',
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Answer briefly.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.content": "2+3?",
    "llm.input_messages.2.message.role": "assistant",
    "llm.input_messages.2.message.tool_calls.0.tool_call.id": "c1",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "add",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"a": 2, "b": 3}',
    "llm.input_messages.3.message.role": "tool",
    "llm.input_messages.3.message.tool_call_id": "c1",
    "llm.input_messages.3.message.content": "5",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "It is 5.",
    "llm.tools.0.tool.json_schema": json.dumps(SCHEMA),
    "llm.token_count.prompt": 11,
    "session.id": "s1",
}

GEN_AI = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Answer briefly."}]),
    "gen_ai.input.messages": json.dumps(
        [
            {"role": "user", "parts": [{"type": "text", "content": "2+3?"}]},
            {
                "role": "assistant",
                "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 2, "b": 3}}],
            },
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "5"}]},
        ]
    ),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "It is 5."}]}]),
    "gen_ai.tool.definitions": json.dumps([SCHEMA]),
    "gen_ai.conversation.id": "s1",
}  # fmt: skip

NUMBERED = {
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Answer briefly.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "2+3?",
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.id": "c1",
    "gen_ai.prompt.2.tool_calls.0.name": "add",
    "gen_ai.prompt.2.tool_calls.0.arguments": '{"a": 2, "b": 3}',
    "gen_ai.prompt.3.role": "tool",
    "gen_ai.prompt.3.tool_call_id": "c1",
    "gen_ai.prompt.3.content": "5",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "It is 5.",
    "llm.request.functions.0.name": "add",
    "llm.request.functions.0.parameters": '{"type": "object"}',
    "session.id": "s1",
}


def otlp(attributes, span="b", parent="a", **facts):
    pairs = [
        {"key": name, "value": {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}
         if isinstance(value, float) else {"stringValue": value}}
        for name, value in attributes.items()
    ]  # fmt: skip
    times = {"startTimeUnixNano": "1700000000500000000", "endTimeUnixNano": "1700000002000000000"}
    return {"traceId": "t1", "spanId": span, "parentSpanId": parent, "name": "x", "attributes": pairs, **times, **facts}


def in_otlp(*spans):
    return [{"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]}]


@pytest.mark.parametrize("attributes", [OPENINFERENCE, GEN_AI, NUMBERED], ids=["openinference", "gen_ai", "numbered"])
def test_spans_of_each_convention_tell_the_same_call(tmp_path, attributes):
    agent = otlp({"openinference.span.kind": "AGENT", "agent.name": "Helper"}, span="a", parent="")
    tool = otlp({"openinference.span.kind": "TOOL"}, span="c")
    report, (run,) = imported(tmp_path, in_otlp(tool, otlp(attributes), agent))
    call = run.calls[0]
    assert said(run) == [([SYSTEM, ASK, CALL | {"content": call.messages[2]["content"]}, RESULT], ANSWER)]
    assert (run.agent, run.session, call.model, call.time, call.seconds) == ("Helper", "s1", "m", 1700000000.5, 1.5)
    assert (call.settings, call.tools) == ({"temperature": 0.5}, [SCHEMA])
    assert (report.kind, report.taken, report.left_out) == (
        "otel",
        1,
        {"is no model call (a tool, a chain, an agent)": 2},
    )


def test_spans_of_the_python_sdk_and_of_phoenix_are_read_too(tmp_path):
    sdk = {
        "name": "ChatCompletion",
        "context": {"trace_id": "0x1", "span_id": "0x2", "trace_state": "[]"},
        "parent_id": None,
        "start_time": "2023-11-14T22:13:20.500000Z",
        "end_time": "2023-11-14T22:13:22.000000Z",
        "attributes": OPENINFERENCE,
        "status": {"status_code": "ERROR", "description": "TimeoutError: slow"},
    }
    phoenix = {
        "name": "ChatCompletion",
        "span_kind": "LLM",
        "context.trace_id": "2",
        "context.span_id": "3",
        "parent_id": None,
        "start_time": "2023-11-14T22:13:20.500000+00:00",
        "attributes.llm.input_messages": [
            {
                "message.role": "user",
                "message.contents": [{"message_content.type": "text", "message_content.text": "2+3?"}],
            }
        ],
        "attributes.llm.output_messages": [
            {"message.role": "assistant", "message.tool_calls": [
                {"tool_call.function.name": "add", "tool_call.function.arguments": '{"a.b": 1}'}]}
        ],
    }  # fmt: skip
    _, runs = imported(tmp_path, [sdk, phoenix])
    by_error = {run.error: run for run in runs}
    assert by_error["TimeoutError: slow"].calls[0].time == 1700000000.5
    messages, reply = said(by_error[None])[0]
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    assert reply["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a.b": 1}'}


def test_calls_of_one_trace_are_one_run_in_the_order_of_time_and_agents_have_their_own(tmp_path):
    spans = [
        otlp(GEN_AI, span="late", parent="root", startTimeUnixNano="1700000009000000000"),
        otlp(GEN_AI, span="early", parent="root"),
        otlp(GEN_AI, span="inner", parent="helper"),
        otlp({"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "Helper"}, span="helper", parent="root"),
    ]
    _, runs = imported(tmp_path, in_otlp(*spans))
    assert {run.agent: [call.time for call in run.calls] for run in runs} == {
        None: [1700000000.5, 1700000009.0],
        "Helper": [1700000000.5],
    }


ASIDE = (
    "llm.invocation_parameters",
    "llm.model_name",
    "llm.token_count",
    "gen_ai.response.finish_reasons",
    "session.id",
)


@pytest.mark.parametrize("value", ["None", "[1]", "5", "", "{", None, 7, [1], [], {}, {"a": 1}, True])
@pytest.mark.parametrize("name", ASIDE)
def test_a_span_is_taken_whatever_stands_beside_its_messages(tmp_path, name, value):
    span = {"context": {"trace_id": "1", "span_id": "2"}, "attributes": {**OPENINFERENCE, name: value}}
    report, (run,) = imported(tmp_path, [span])
    assert report.left_out == {} and run.calls[0].messages[1] == ASK and run.calls[0].reply == ANSWER
    if name == "llm.invocation_parameters" and value != {"a": 1}:
        assert run.calls[0].settings == {}


@pytest.mark.parametrize("value", ["x", 10**40, -1, float("nan"), {"a": 1}, [1], "²", "9" * 400, True])
@pytest.mark.parametrize("name", ["start_time", "end_time", "parent_id", "status"])
def test_a_span_is_taken_whatever_its_times_and_parent_are(tmp_path, name, value):
    span = {"context": {"trace_id": "1", "span_id": "2"}, "attributes": OPENINFERENCE, name: value}
    report, (run,) = imported(tmp_path, [span])
    assert report.left_out == {} and said(run)[0][1] == ANSWER


def test_spans_of_one_id_in_two_traces_are_two_calls(tmp_path):
    other = otlp(GEN_AI, traceId="t2")
    report, runs = imported(tmp_path, in_otlp(otlp(GEN_AI), other))
    assert (len(runs), report.left_out) == (2, {})


def test_spans_that_name_no_trace_are_runs_of_their_own(tmp_path):
    spans = [{"span_id": str(n), "attributes": {**OPENINFERENCE, "session.id": f"s{n}"}} for n in range(3)]
    _, runs = imported(tmp_path, spans)
    assert [run.session for run in runs] == ["s0", "s1", "s2"]


def test_a_model_call_without_its_messages_is_counted_as_such(tmp_path):
    spans = [otlp({"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}), otlp(GEN_AI, span="d")]
    report, _ = imported(tmp_path, in_otlp(*spans))
    assert report.left_out == {"is a model call whose messages were not recorded": 1}


# --- Langfuse ----------------------------------------------------------------------------------------------------


def observation(**facts):
    return {
        "id": "o1",
        "traceId": "t1",
        "type": "GENERATION",
        "startTime": "2023-11-14T22:13:20.500Z",
        "endTime": "2023-11-14T22:13:22.000Z",
        "model": "m",
        "modelParameters": {"temperature": 0.5},
        "input": {"messages": [SYSTEM, ASK], "tools": [SCHEMA]},
        "output": CALL,
        "usage": {"total": 7},
        **facts,
    }


LATER = {"id": "o2", "startTime": "2023-11-14T22:13:23Z", "input": [SYSTEM, ASK, CALL, RESULT], "output": "It is 5."}


@pytest.mark.parametrize("form", ["table", "api", "trace", "storage"])
def test_exports_of_langfuse_tell_the_same_run(tmp_path, form):
    tool = observation(id="o3", type="TOOL", input={"a": 2}, output="5")
    made = [observation(**LATER), tool, observation()]
    if form == "table":
        content = made
    elif form == "api":
        content = json.dumps({"data": made, "meta": {}}, indent=1)
    elif form == "trace":
        content = json.dumps({"id": "t1", "sessionId": "s1", "observations": made}, indent=1)
    else:  # rows of the blob storage: snake case, and values as JSON text
        names = {"traceId": "trace_id", "startTime": "start_time", "endTime": "end_time", "usage": "usage_details"}
        names |= {"model": "provided_model_name", "modelParameters": "model_parameters"}
        texts = ("input", "output", "modelParameters", "usage")
        content = [
            {names.get(key, key): json.dumps(value) if key in texts and not isinstance(value, str) else value
             for key, value in item.items()}
            for item in made
        ]  # fmt: skip
    report, (run,) = imported(tmp_path, content)
    assert said(run) == [([SYSTEM, ASK], CALL), ([SYSTEM, ASK, CALL, RESULT], ANSWER)]
    call = run.calls[0]
    assert (call.model, call.settings, call.usage, call.tools) == ("m", {"temperature": 0.5}, {"total": 7}, [SCHEMA])
    assert (call.time, call.seconds) == (1700000000.5, 1.5)
    assert run.session == ("s1" if form == "trace" else "t1")
    assert (report.kind, report.left_out) == ("langfuse", {"is no model call (a tool, a chain, an agent)": 1})


def test_a_generation_that_failed_is_a_run_with_the_error(tmp_path):
    failed = observation(level="ERROR", statusMessage="429: slow down", output=None)
    _, (run,) = imported(tmp_path, [failed, observation(type="SPAN", id="o9")])
    assert (run.error, run.calls[0].reply) == ("429: slow down", None)


TWICE = "is there twice (the same id in the same trace)"


def test_what_is_told_twice_is_taken_once_and_counted(tmp_path):
    agent = otlp({"openinference.span.kind": "AGENT", "agent.name": "Helper"}, span="a", parent="")
    report, (run,) = imported(tmp_path, [*in_otlp(agent, otlp(GEN_AI)), *in_otlp(agent, otlp(GEN_AI))])
    assert (report.records, report.taken, report.left_out[TWICE], len(run.calls)) == (4, 1, 2, 1)
    report = import_log(put(tmp_path, [observation(), observation()]), tmp_path / "other")
    assert (report.records, report.taken, report.runs, report.left_out) == (2, 1, 1, {TWICE: 1})


# --- the same log again ------------------------------------------------------------------------------------------

FLAT = {"messages": [SYSTEM, ASK, CALL, RESULT, ANSWER, AGAIN, EIGHT]}
SHARED = {"conversations": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]}
SPAN = {"context": {"trace_id": "1", "span_id": "2"}, "attributes": OPENINFERENCE}
LOGS = {
    "openai": [FLAT, FLAT, {"request": {"messages": [ASK]}, "response": {"choices": [{"message": ANSWER}]}}],
    "sharegpt": [SHARED, {**SHARED, "id": "s1"}, {**SHARED, "id": "s2"}],
    "session": [{"session_id": "s", "agent_name": "A", "messages": [{**ASK, "timestamp": 1.7e9}, ANSWER]}],
    "otel": [SPAN, {"attributes": OPENINFERENCE}],
    "langfuse": [observation(), observation(**LATER), observation(id=None, traceId=None)],
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_brought_in_again_doubles_nothing_and_it_is_said(tmp_path, name):
    first, before = imported(tmp_path, LOGS[name])
    again, after = imported(tmp_path, LOGS[name], "renamed.jsonl")
    assert first.runs == len(before) > 0 and (first.already_there, after) == (0, before)
    assert (again.runs, again.calls, again.already_there) == (0, 0, first.runs)
    assert (again.records, again.taken) == (first.records, first.taken)
    assert f"{first.runs}  runs were already there" in str(again)


def test_what_a_log_has_grown_by_is_taken_and_only_that(tmp_path):
    imported(tmp_path, [FLAT])
    report, runs = imported(tmp_path, [{"messages": [*FLAT["messages"], ASK, ANSWER]}, FLAT, FLAT])
    assert (report.already_there, report.runs, len(runs)) == (2, 5, 7)
    assert len({run.id for run in runs}) == 7


def test_runs_that_were_recorded_are_no_reason_to_leave_out_others(tmp_path):
    assert imported(tmp_path, [FLAT])[0].runs == 2
    assert import_log(put(tmp_path, [FLAT]), tmp_path / "elsewhere").runs == 2


def test_what_is_masked_does_not_tell_on_itself_by_the_ids_of_runs(tmp_path):
    ids = set()
    for n, address in enumerate(["ann@mail.example", "bob@mail.example"]):
        path = put(tmp_path, [{"messages": [{"role": "user", "content": f"Write to {address}"}, ANSWER]}])
        import_log(path, tmp_path / str(n), redact="personal")
        ids |= {run.id for run in read_runs(tmp_path / str(n))}
    assert len(ids) == 1


# --- files -------------------------------------------------------------------------------------------------------


def pretty(*values, between="\n"):
    return between.join(json.dumps(value, indent=4) for value in values)


SPANS = [{**SPAN, "context": {"trace_id": str(n), "span_id": "2"}} for n in range(3)]
LINE = json.dumps({"messages": [ASK, ANSWER]})


@pytest.mark.parametrize(
    ("content", "runs", "torn"),
    [
        (pretty(*SPANS), 3, 0),
        (pretty(*SPANS, between=""), 3, 0),
        (pretty(*SPANS, between=",\r\n\r\n") + "\n", 3, 0),
        ("INFO the program begins\nINFO and goes on\n" + pretty(*SPANS), 3, 2),
        (pretty(*SPANS)[:-60], 2, 1),
        (pretty(SPANS[0])[:300] + "\n" + pretty(*SPANS[1:]), 2, 1),
        (pretty(*SPANS[:2]) + "\nINFO between\n" + pretty(SPANS[2]), 3, 1),
        (pretty(SPANS[:2]) + "\n" + pretty({"spans": SPANS[2:]}), 3, 0),
        (f"{LINE[:20]}\n{LINE}\n{LINE}\n", 2, 1),
        (f"{LINE[20:]}\n{LINE}\n{LINE}\n", 2, 1),
        (f"{LINE[:20]}\n{LINE}\n{LINE[:30]}\n{LINE}\n{LINE[:10]}", 2, 3),
        (f"\ufeff\n\n{LINE[:20]}\n{LINE}", 1, 1),
    ],
    ids=["lines", "no space", "commas", "log", "end", "first", "amid", "lists", "torn", "tail", "more", "mark"],
)
def test_values_over_several_lines_are_read_and_torn_ones_are_counted(tmp_path, content, runs, torn):
    report, found = imported(tmp_path, content)
    assert (len(found), report.left_out) == (runs, {"is no JSON": torn} if torn else {})


def test_a_file_that_is_nested_without_end_is_an_error(tmp_path):
    with pytest.raises(DataError, match="is neither JSON nor JSON lines"):
        imported(tmp_path, "[\n" * 50_000)


def test_every_record_is_accounted_for_and_the_report_tells(tmp_path):
    good = json.dumps({"messages": [ASK, ANSWER]})
    bad = [
        "{not json",
        json.dumps({"messages": []}),
        json.dumps({"messages": [{"role": "wizard", "content": "x"}]}),
        json.dumps({"messages": [SYSTEM, ANSWER]}),
        json.dumps(["no object"]),
        json.dumps({"messages": [ASK], "tools": {"x": 1}, "response": {"choices": [7]}}),
    ]
    report, runs = imported(tmp_path, "\n".join([good, *bad, good]))
    assert (report.records, report.taken, len(runs)) == (8, 2, 2)
    assert report.left_out == {
        "is no JSON": 1,
        "has no messages": 1,
        "has a message without a known role": 1,
        "has no message of a user": 1,
        "is no object": 1,
        "has a response without a message": 1,
    }
    assert str(report).splitlines()[1].strip() == "1  not taken: is no JSON"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"question": "2+3?", "answer": "5"}\n{"question": "x"}', "its first record has: question, answer"),
        ("hello\nworld", "is neither JSON nor JSON lines"),
        ("[]", "is no log of a known kind"),
    ],
)
def test_a_file_of_no_known_kind_is_an_error(tmp_path, content, says):
    with pytest.raises(DataError) as caught:
        imported(tmp_path, content)
    assert says in str(caught.value)


def test_the_kind_can_be_said_and_an_unknown_one_is_named(tmp_path):
    with pytest.raises(DataError, match="kind='sharegtp' is unknown; known: openai, sharegpt"):
        imported(tmp_path, [{"messages": [ASK]}], kind="sharegtp")
    report = import_log(put(tmp_path, [{"messages": [ASK]}]), tmp_path / "store", kind="sharegpt")
    assert report.left_out == {"has no conversation": 1}


def test_a_file_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"none.jsonl cannot be read"):
        import_log(tmp_path / "none.jsonl", tmp_path / "store")


def test_secrets_in_a_log_do_not_reach_the_store(tmp_path):
    key = "sk-proj-" + "a1B2c3D4e5F6g7H8" * 3
    imported(tmp_path, [{"messages": [{"role": "user", "content": f"my key is {key}"}, ANSWER]}])
    assert all(key not in path.read_text() for path in (tmp_path / "store").iterdir())


def test_what_is_imported_can_be_built_from_and_stays_together(tmp_path):
    chats = [{"messages": [SYSTEM, {"role": "user", "content": f"{n}+1?"}, ANSWER, AGAIN, EIGHT]} for n in range(10)]
    imported(tmp_path, chats)
    dataset = build_dataset(tmp_path / "store", out=tmp_path / "d", options=BuildOptions(near_duplicates=None))
    assert (dataset.manifest.runs, dataset.manifest.train, dataset.manifest.held_out) == (20, 16, 4)
    assert dataset.manifest.largest_group == 2
