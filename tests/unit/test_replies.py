"""Requests and replies of either client become the same plain form, whatever shapes they come in."""

from types import SimpleNamespace
from typing import Any

import pytest
from openai import NOT_GIVEN
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from praison_agent_rl.capture import replies
from praison_agent_rl.capture.replies import Fold, Reply, Request, chat_messages, reply_in, reply_of, snapshot, take

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def request_of(params: dict[str, Any]) -> Request | None:
    """As it is taken when it is sent, and read later."""
    taken = take(params)
    return None if taken is None else replies.request_of(taken)


def chunk(delta: Any, **choice: Any) -> Any:
    """A chunk as OpenAI's client gives it."""
    facts = {"id": "x", "created": 1, "model": "m", "object": "chat.completion.chunk"}
    return ChatCompletionChunk.model_validate(
        {**facts, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}
    )


def folded(*chunks: Any) -> Reply:
    fold = Fold()
    for each in chunks:
        fold.add(each)
    return fold.reply()


def whole(message: dict[str, Any], **choice: Any) -> ChatCompletion:
    facts = {"id": "x", "created": 1, "model": "m", "object": "chat.completion"}
    return ChatCompletion.model_validate(
        {**facts, "choices": [{"index": 0, "finish_reason": "stop", "message": message, **choice}]}
    )


# --- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_does_not_change_with_what_it_was_taken_of():
    inner = {"type": "text", "text": "a"}
    value = {"role": "user", "content": [inner], "pair": (1, 2), "tags": {"x"}}
    taken = snapshot(value)
    inner["text"] = "b"
    value["content"].append("c")
    value["tags"].add("y")
    assert taken == {"role": "user", "content": [{"type": "text", "text": "a"}], "pair": [1, 2], "tags": {"x"}}


def test_a_snapshot_of_a_message_object_has_the_fields_that_a_client_would_send():
    message = whole({"role": "assistant", "content": None, "tool_calls": [CALL], "extra": 7}).choices[0].message
    assert snapshot([message]) == [{"role": "assistant", "content": None, "tool_calls": [CALL], "extra": 7}]


@pytest.mark.parametrize("value", [b"\x00", 10**40, "\ud800", 1.5, None, True])
def test_a_snapshot_keeps_what_json_may_not_hold(value):
    assert snapshot({"x": [value]}) == {"x": [value]}


def test_a_snapshot_leaves_an_unknown_object_to_the_writer():
    thing = object()
    assert snapshot([thing])[0] is thing


# --- requests -------------------------------------------------------------------------------------------------------

SECRETS = {
    "api_key": "k",
    "azure_ad_token": "k",
    "aws_secret_access_key": "k",
    "aws_session_token": "k",
    "vertex_credentials": {"private_key": "k"},
    "extra_headers": {"Authorization": "k"},
    "headers": {"x": "k"},
    "default_headers": {"x": "k"},
    "auth": "k",
    "password": "k",
    "client_secret": "k",
}
SETTINGS = {
    "temperature": 0.5,
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "logprobs": True,
    "top_logprobs": 2,
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "parallel_tool_calls": False,
    "seed": 7,
    "stop": ["END"],
    "stream": True,
    "stop_token_ids": [5],
    "return_token_ids": True,
    "reasoning_effort": "low",
}


def test_settings_are_kept_and_keys_headers_and_places_are_not():
    places = {"base_url": "http://x", "api_base": "http://x", "timeout": 5, "max_retries": 2, "drop_params": True}
    request = request_of({"model": "m", "messages": [], **SECRETS, **places, **SETTINGS})
    assert request is not None and request.settings == SETTINGS


def test_what_is_sent_in_extra_body_is_a_setting_as_on_the_wire_but_for_secrets():
    request = request_of({"messages": [], "extra_body": {"top_k": 5, "api_key": "k", "chat_template_kwargs": {"x": 1}}})
    assert request is not None and request.settings == {"top_k": 5, "chat_template_kwargs": {"x": 1}}


def test_what_is_not_given_is_not_sent():
    given = {"temperature": NOT_GIVEN, "top_p": None, "stream": False, "callback": print, "tools": NOT_GIVEN}
    request = request_of({"model": "m", "messages": [], **given})
    assert request is not None and (request.settings, request.tools) == ({}, [])


def test_a_pydantic_class_as_response_format_is_the_schema_that_is_sent():
    class Verdict(BaseModel):
        password: str  # a property of that name is no secret

    request = request_of({"messages": [], "response_format": Verdict})
    assert request is not None
    schema = request.settings["response_format"]["json_schema"]
    assert (schema["name"], schema["strict"], list(schema["schema"]["properties"])) == ("Verdict", True, ["password"])


def test_what_asks_for_no_chat_reply_is_no_request():
    assert request_of({"model": "m", "prompt": "hello"}) is None


def test_the_input_of_a_responses_request_becomes_chat_messages():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": "u"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I add"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "item_reference", "id": "i"},
    ]
    assert chat_messages(items, "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I add"}], "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "assistant", "type": "item_reference", "id": "i"},
    ]
    assert chat_messages("hi") == [{"role": "user", "content": "hi"}]


# --- whole replies --------------------------------------------------------------------------------------------------


def test_a_reply_has_text_calls_and_reasoning_under_one_name():
    message = {"role": "assistant", "content": "x", "tool_calls": [CALL], "reasoning": "hm", "annotations": []}
    reply = reply_of(whole(message))
    assert reply.message == {"role": "assistant", "content": "x", "tool_calls": [CALL], "reasoning_content": "hm"}


def test_a_refusal_is_kept():
    message = reply_of(whole({"role": "assistant", "content": None, "refusal": "no"})).message
    assert message == {"role": "assistant", "content": None, "refusal": "no"}


def test_a_reply_of_the_responses_interface_becomes_a_chat_message():
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
    ]
    reply = reply_of({"output": output, "usage": {"input_tokens": 3, "output_tokens_details": None}})
    assert reply == Reply(
        {"role": "assistant", "content": "ab", "reasoning_content": "hm", "tool_calls": [CALL]},
        "tool_calls",
        {"input_tokens": 3},
    )
    cut = {"output": [], "incomplete_details": {"reason": "max_output_tokens"}}
    assert reply_of(cut).finish == "max_output_tokens"


def test_a_streamed_responses_answer_is_read_from_what_the_framework_made_of_it():
    last = SimpleNamespace(output=[{"type": "message", "content": [{"text": "all"}]}], usage=None)
    assert reply_of(("part", None, last)).message == {"role": "assistant", "content": "all"}
    assert reply_of(("part", [CALL], None)).message == {"role": "assistant", "content": "part", "tool_calls": [CALL]}


def test_a_reply_that_was_refused_by_its_reader_is_found_in_the_error():
    def parse(chat_completion: Any) -> None:
        raise ValueError("no JSON")

    with pytest.raises(ValueError, match="no JSON") as caught:
        parse(whole({"role": "assistant", "content": "not JSON"}))
    assert reply_in(caught.value).message == {"role": "assistant", "content": "not JSON"}
    assert reply_in(ValueError("another")) == Reply()


# --- streams --------------------------------------------------------------------------------------------------------


def test_parallel_tool_calls_are_put_together_by_their_index():
    second = {"id": "c2", "type": "function", "function": {"name": "mul", "arguments": '{"b": 2}'}}
    reply = folded(
        chunk({"role": "assistant", "content": None}),
        chunk({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "add"}}]}),
        chunk({"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "mul", "arguments": '{"b"'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
        chunk({"tool_calls": [{"index": 1, "function": {"arguments": ": 2}"}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}),
        chunk({}, finish_reason="tool_calls"),
    )
    assert reply.message == {"role": "assistant", "content": None, "tool_calls": [CALL, second]}
    assert reply.finish == "tool_calls"


def test_tool_calls_without_an_index_are_told_apart_by_their_ids():
    def part(**facts: Any) -> Any:
        return {"choices": [{"delta": {"tool_calls": [facts]}}]}

    reply = folded(
        part(id="c1", function={"name": "add", "arguments": '{"a"'}),
        part(function={"arguments": ": 1}"}),
        part(id="c2", function={"name": "add", "arguments": '{"a": 1}'}),
    )
    assert reply.message is not None and reply.message["tool_calls"] == [CALL, {**CALL, "id": "c2"}]


def test_text_reasoning_usage_and_logprobs_of_a_stream_are_put_together():
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    usage = ChatCompletionChunk.model_validate(
        {
            **{"id": "x", "created": 1, "model": "m", "object": "chat.completion.chunk", "choices": []},
            "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        }
    )
    reply = folded(
        chunk({"role": "assistant", "reasoning": "h"}),
        chunk({"reasoning": "m"}),
        chunk({"content": "a"}, logprobs={"content": [token]}),
        chunk({"content": "b"}, logprobs={"content": [token], "refusal": None}),
        chunk({"content": "other"}, index=1),
        chunk({}, finish_reason="length"),
        usage,
    )
    assert reply == Reply(
        {"role": "assistant", "content": "ab", "reasoning_content": "hm"},
        "length",
        {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        {"content": [token, token]},
    )


def test_events_of_a_responses_stream_end_with_the_whole_response():
    part = {"type": "response.output_text.delta", "delta": "half"}
    assert folded({"type": "response.created"}, part).message == {"role": "assistant", "content": "half"}
    response = {"output": [{"type": "message", "content": [{"text": "half of it"}]}]}
    ended = folded(part, {"type": "response.completed", "response": response})
    assert ended == Reply({"role": "assistant", "content": "half of it"}, "stop")
