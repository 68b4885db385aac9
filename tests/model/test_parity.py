"""The trainer renders what the server renders of a recorded request, or the first place is said at which they part."""

import copy
import math

import pytest

from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import render_prompts
from praison_agent_rl.parity import (
    MOST_CALLS,
    check_gap,
    check_parity,
    likelihood_gap,
    recorded_against_rendered,
    rendered_by_transformers_serve,
)
from praison_agent_rl.records import Call
from tests.model.families import (
    QUESTION,
    TOOLS,
    WITH_TOOLS,
    Serve,
    assistant,
    call,
    smollm2_tokenizer,
    tokenizer_of,
)

ADD = call("add", '{"a": 2, "b": 3}')
LOOKED = call("look_up", '{"word": "é \\"q\\"", "deep": {"z": 1, "a": [null, 1.0, true]}}')


def result(content, **more) -> dict:
    return {"role": "tool", "content": content, **more}


def of(*messages: dict, id: str = "c", tools=TOOLS, **more) -> Call:
    return Call(id=id, time=0.0, messages=[*QUESTION, *messages], tools=list(tools), **more)


CONVERSATIONS = {
    "a question": of(),
    "a question without tools": of(tools=[]),
    "a call and its result": of(assistant(ADD), result("5", tool_call_id="1", name="add")),
    "no content beside a call": of(assistant(ADD, content=None), result("5")),
    "ids of calls": of(assistant({"id": "call_1", **ADD}), result("5", tool_call_id="call_1")),
    "calls one after another": of(assistant(ADD), result("5"), assistant(LOOKED), result('{"meaning": "a letter"}')),
    "an answer and another question": of(assistant(content="It is 5."), {"role": "user", "content": "Sure?"}),
    "content as a list": of(
        assistant(content=[{"type": "text", "text": "It is 5."}]), {"role": "user", "content": "?"}
    ),
    "a result of many lines": of(assistant(ADD), result("1\n\n 2 <|x|> {'a': \"b\"}\t")),
    "no arguments": of(assistant(call("now", "{}")), result("noon")),
    "arguments as a mapping": of(assistant(call("add", {"b": 3, "a": 2})), result("5")),
    "parallel calls": of(assistant(ADD, LOOKED), result("5"), result("a letter")),
}


def cases() -> list:
    return [
        pytest.param(family, name, id=f"{family}, {name}")
        for family in WITH_TOOLS
        for name in CONVERSATIONS
        if not (family.startswith("llama") and name == "parallel calls")  # its chat template refuses them
    ]


@pytest.mark.parametrize(("family", "name"), cases())
def test_a_recorded_call_is_rendered_as_transformers_serve_renders_it(family, name):
    tokenizer, recorded = tokenizer_of(family), CONVERSATIONS[name]
    assert recorded_against_rendered(tokenizer, [recorded]) == []
    served = Serve(tokenizer)
    served.ask(recorded.messages, recorded.tools)
    assert rendered_by_transformers_serve(tokenizer, recorded) == served.prompt  # the whole of its handler


def test_smollm2_without_tools_is_rendered_as_transformers_serve_renders_it():
    tokenizer = smollm2_tokenizer()
    recorded = of({"role": "assistant", "content": "5."}, {"role": "user", "content": "Sure?"}, tools=[])
    assert check_parity(tokenizer, [recorded]) == []
    served = Serve(tokenizer)
    served.ask(recorded.messages)
    assert rendered_by_transformers_serve(tokenizer, recorded) == served.prompt


# --- planted differences --------------------------------------------------------------------------------------------


def place_of(tokenizer, shown: str, after: str) -> int:
    """How many tokens the beginning of a shown prompt has, up to the end of ``after``."""
    start = shown.index(after) + len(after)
    return len(tokenizer(shown[:start], add_special_tokens=False)["input_ids"])


def with_return(recorded: Call) -> Call:
    tools = copy.deepcopy(recorded.tools)
    tools[0]["function"]["return"] = {"type": "integer"}
    return recorded.model_copy(update={"tools": tools})


def shown_by(tokenizer, recorded: Call) -> str:
    return tokenizer.decode(rendered_by_transformers_serve(tokenizer, recorded))


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "smollm2 with chatml_tools"])
def test_a_return_that_the_server_drops_from_a_schema_is_found_and_shown(family):
    tokenizer, recorded = tokenizer_of(family), with_return(of())
    dropped = of()
    (found,) = recorded_against_rendered(
        tokenizer, [recorded], lambda _: rendered_by_transformers_serve(tokenizer, dropped)
    )
    known = '"required": ["a", "b"]}'
    assert f'{known}, "return": {{"type": "integer"}}}}}}\n{{"type": "function"' in found.before + found.trainer
    assert f'{known}}}}}\n{{"type": "function"' in found.before + found.server
    assert "return" not in found.before
    both = zip(*(rendered_by_transformers_serve(tokenizer, one) for one in (recorded, dropped)), strict=False)
    assert found.place == next(place for place, (one, other) in enumerate(both) if one != other)
    if not family.startswith("smollm2"):  # where each letter is a token
        assert found.place == place_of(tokenizer, shown_by(tokenizer, recorded), known)
    lines = found.shown().splitlines()
    assert lines[:3] == ["--- trainer", "+++ server", f"@@ call c, token {found.place} @@"]
    assert [line[0] for line in lines[3:]] == [" ", "-", "+"] and '"return"' in lines[4] and '"return"' not in lines[5]
    assert len(found.shown()) < 600


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2"])
def test_another_order_of_keys_is_found_at_its_token(family):
    tokenizer = tokenizer_of(family)
    recorded, sorted_keys = of(assistant(call("add", {"b": 3, "a": 2}))), of(assistant(call("add", {"a": 2, "b": 3})))
    (found,) = recorded_against_rendered(
        tokenizer, [recorded], lambda _: rendered_by_transformers_serve(tokenizer, sorted_keys)
    )
    shown = shown_by(tokenizer, recorded)
    assert found.place == place_of(tokenizer, shown, shown[: shown.rindex('"b": 3') + 1])
    assert found.before.endswith(': {"') and found.trainer.startswith('b": 3, "a"') and found.server.startswith('a": 2')


def test_arguments_that_the_server_leaves_as_text_are_found_at_their_token():
    tokenizer, recorded = tokenizer_of("qwen2_5"), of(assistant(ADD), result("5"))

    def as_text(asked: Call) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            asked.messages, tools=asked.tools, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    (found,) = recorded_against_rendered(tokenizer, [recorded], as_text)
    known = '<tool_call>\n{"name": "add", "arguments": '
    assert found.place == place_of(tokenizer, shown_by(tokenizer, recorded), known)
    assert found.before.endswith(known)
    assert found.trainer.startswith('{"a": 2, "b": 3}}') and found.server.startswith('"{\\"a\\": 2')


def test_one_prompt_that_goes_on_where_the_other_ends_is_different_there():
    tokenizer, recorded = tokenizer_of("qwen2_5"), of()
    whole = rendered_by_transformers_serve(tokenizer, recorded)
    (found,) = recorded_against_rendered(tokenizer, [recorded], lambda _: whole[:-10])
    assert (found.place, found.trainer, found.server) == (len(whole) - 10, "assistant\n", "")


# --- differences that transformers serve makes ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_2"])
def test_what_was_said_beside_a_call_is_left_out_as_transformers_serve_does(family):
    recorded = of(assistant(ADD, content="Let me see."), result("5"))
    served = Serve(tokenizer_of(family))
    served.ask(recorded.messages, recorded.tools)
    (rendered,) = render_prompts(tokenizer_of(family), [recorded.messages], recorded.tools)
    assert rendered == served.prompt and "Let me see" not in tokenizer_of(family).decode(rendered)
    assert recorded_against_rendered(tokenizer_of(family), [recorded]) == []


def test_parts_of_content_are_joined_with_a_space_as_transformers_serve_does():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    recorded = of({"role": "user", "content": parts})
    (rendered,) = render_prompts(tokenizer_of("qwen2_5"), [recorded.messages], recorded.tools)
    assert "one two<|im_end|>" in tokenizer_of("qwen2_5").decode(rendered)
    assert recorded_against_rendered(tokenizer_of("qwen2_5"), [recorded]) == []


def test_what_a_request_gave_the_chat_template_counts():
    recorded = of(settings={"chat_template_kwargs": {"enable_thinking": False}})
    (found,) = recorded_against_rendered(tokenizer_of("qwen3"), [recorded])
    assert (found.trainer, found.server) == ("", "<think>\n\n</think>\n\n")
    served = Serve(tokenizer_of("qwen3"))
    served.ask(recorded.messages, recorded.tools, chat_template_kwargs={"enable_thinking": False})
    assert rendered_by_transformers_serve(tokenizer_of("qwen3"), recorded) == served.prompt


# --- what is said -----------------------------------------------------------------------------------------------------

DIFFERENT = of(id="odd", settings={"chat_template_kwargs": {"enable_thinking": False}})
MALFORMED = of(assistant(call("add", "{a: 2")), result("no such thing"), id="broken")


def test_a_run_stops_at_a_difference_and_is_told_what_to_do():
    calls = [of(id="fine"), DIFFERENT, of(id="fine too")]
    with pytest.raises(ModelError) as caught:
        check_parity(tokenizer_of("qwen3"), calls)
    text = str(caught.value)
    assert text.startswith("the trainer renders 1 of 3 recorded calls otherwise than transformers serve does, so the ")
    assert "\n@@ call odd, token " in text and "\n-\n+<think>\\n\\n</think>" in text
    assert text.endswith("train all the same with parity: allow")


def test_a_difference_that_is_allowed_is_a_note():
    (note,) = check_parity(tokenizer_of("qwen3"), [DIFFERENT], allowed=True)
    assert note.startswith("the trainer renders 1 of 1 recorded calls otherwise") and "+<think>" in note


def test_where_all_is_alike_nothing_is_said():
    assert check_parity(tokenizer_of("qwen2_5"), list(CONVERSATIONS.values())) == []
    assert check_parity(tokenizer_of("qwen2_5"), []) == []


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_recorded_call_that_the_server_refuses_is_not_compared_and_said(family):
    tokenizer = tokenizer_of(family)
    assert recorded_against_rendered(tokenizer, [MALFORMED, of()]) == []
    (note,) = check_parity(tokenizer, [of(), MALFORMED])
    assert note.startswith("1 of 2 recorded calls were not compared with what a server would render: call broken: ")
    assert "transformers serve refuses it: JSONDecodeError" in note


def test_of_many_calls_some_are_compared_and_they_are_taken_from_all():
    calls = [of(id=str(number)) for number in range(3 * MOST_CALLS)]
    calls[-3] = DIFFERENT
    with pytest.raises(ModelError, match=f"the trainer renders 1 of {MOST_CALLS} recorded calls"):
        check_parity(tokenizer_of("qwen3"), calls)


# --- after training --------------------------------------------------------------------------------------------------


def test_the_gap_is_the_mean_distance_of_log_probabilities():
    assert likelihood_gap([-1.0, -2.0, -3.0], [-1.5, -2.0, -2.0]) == pytest.approx((0.5 + 0 + 1) / 3)
    assert likelihood_gap([-math.inf, -1.0], [-math.inf, -1.0]) == 0.0
    assert likelihood_gap([-math.inf], [-1.0]) == math.inf
    assert math.isnan(likelihood_gap([math.nan], [-1.0]))


@pytest.mark.parametrize(("theirs", "ours"), [([], []), ([-1.0], [-1.0, -2.0])])
def test_log_probabilities_that_do_not_belong_together_are_refused(theirs, ours):
    with pytest.raises(ModelError, match=f"gave {len(theirs)} log-probabilities and the trainer {len(ours)}"):
        likelihood_gap(theirs, ours)


def test_a_gap_above_the_tolerance_is_said_and_so_is_one_that_is_no_number():
    assert check_gap(0.02, 0.02) is None
    text = check_gap(0.0312, 0.02)
    assert "0.0312 nats a token apart" in text and "more than the 0.02 that is allowed" in text
    assert "nan nats" in check_gap(math.nan, 0.02)
