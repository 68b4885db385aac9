"""Messages become tokens and answers become messages with tool calls, as the server does it that will answer later."""

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizers_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from praison_agent_rl.agent_rollouts.tool_texts import (
    ToolWords,
    keep_response_template,
    response_template,
    why_no_tools,
)
from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import render_messages, render_prompts
from praison_agent_rl.templates import ready_template, ready_templates
from tests.conftest import CHATML
from tests.model.families import (
    QUESTION,
    TOOLS,
    WITH_TOOLS,
    Serve,
    assistant,
    call,
    smollm2_tokenizer,
    tiny_tokenizer,
    tokenizer_of,
    trl_template,
)

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
LOOK_UP = '<tool_call>\n{"name": "look_up", "arguments": {"word": "\\u00e9 \\"q\\""}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 2, "b": 3}}'
ADD = call("add", '{"a": 2, "b": 3}')
LOOKED = call("look_up", '{"word": "\\u00e9 \\"q\\""}')

# what the model writes, without its end, and the message that it means
SPOKEN = {
    "a plain answer": ("It is 5.", assistant(content="It is 5.")),
    "nothing": ("", assistant(content="")),
    "letters of many bytes": ("été 🙂", assistant(content="été 🙂")),
    "braces that are no call": ('A set is {1, 2}; {"a": 1}.', assistant(content='A set is {1, 2}; {"a": 1}.')),
}
IN_HERMES = {
    **SPOKEN,
    "a call": (HERMES, assistant(ADD)),
    "text before a call": (f"Let me see.\n{HERMES}", assistant(ADD, content="Let me see.")),
    "two calls": (f"{HERMES}\n{LOOK_UP}", assistant(ADD, LOOKED)),
    "two calls after text": (f"Both.\n\n{HERMES}\n{LOOK_UP}", assistant(ADD, LOOKED, content="Both.")),
    "the same call twice": (f"{HERMES}{HERMES}", assistant(ADD, ADD)),
    "a call without spaces": (
        '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>',
        assistant(ADD),
    ),
    "keys the other way round": (
        '<tool_call>\n{"arguments": {"b": 3, "a": 2}, "name": "add"}\n</tool_call>',
        assistant(call("add", '{"b": 3, "a": 2}')),
    ),
    "no arguments": ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', assistant(call("now", "{}"))),
    "a tool that there is not": (
        '<tool_call>\n{"name": "fly", "arguments": {"to": [1, {"x": null}]}}\n</tool_call>',
        assistant(call("fly", '{"to": [1, {"x": null}]}')),
    ),
    "text where the schema wants a number": (
        '<tool_call>\n{"name": "add", "arguments": {"a": "2", "b": "3"}}\n</tool_call>',
        assistant(ADD),
    ),
}
IN_LLAMA = {
    **SPOKEN,
    "a call": (LLAMA, assistant(ADD)),
    "text before a call": (f"Let me see.\n{LLAMA}", assistant(ADD, content="Let me see.")),
    "no arguments": ('{"name": "now", "parameters": {}}', assistant(call("now", "{}"))),
    "a call that holds braces": (
        '{"name": "look_up", "parameters": {"word": "{\\"parameters\\": {}}"}}',
        assistant(call("look_up", '{"word": "{\\"parameters\\": {}}"}')),
    ),
}
UNSOUND_IN_HERMES = {
    "no JSON": '<tool_call>\n{"name": "add", "arguments": {a: 2}}\n</tool_call>',
    "nothing in it": "<tool_call></tool_call>",
    "half of it": '<tool_call>\n{"name": "add", "argum',
    "a list": '<tool_call>\n[{"name": "add", "arguments": {}}]\n</tool_call>',
    "no name": '<tool_call>\n{"arguments": {"a": 2}}\n</tool_call>',
    "a name that is a number": '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
    "no arguments key": '<tool_call>\n{"name": "add"}\n</tool_call>',
    "one of two": f'Well.\n{HERMES}\n<tool_call>\n{{"name": "add", "arguments": \n</tool_call>',
    "too deep": f'<tool_call>\n{{"name": "add", "arguments": {"[" * 200_000}}}\n</tool_call>',
}
UNSOUND_IN_LLAMA = {
    "no JSON": '{"name": "add", "parameters": {a: 2}}',
    "half of it": '{"name": "add", "parameters": {"a": 2',
    "two calls": f"{LLAMA}; {LLAMA}",  # its chat template refuses to render two, so they may not be parsed as two
}


def end_of(family: str) -> str:
    return "<|eot_id|>" if family.startswith("llama") else "<|im_end|>"


def cases(hermes: dict, llama: dict) -> list:
    return [
        pytest.param(family, name, id=f"{family}, {name}")
        for family in WITH_TOOLS
        for name in (llama if family.startswith("llama") else hermes)
    ]


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def read(tokenizer, text: str, *, tools=TOOLS, **options) -> dict:
    words = ToolWords(tokenizer, **options)
    return words.parse(words.render(QUESTION, tools), ids_of(tokenizer, text), tools)


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "name"), cases(IN_HERMES, IN_LLAMA))
def test_an_answer_becomes_its_message_here_and_in_transformers_serve(family, name):
    text, wanted = (IN_LLAMA if family.startswith("llama") else IN_HERMES)[name]
    tokenizer = tokenizer_of(family)
    said = text + end_of(family)
    assert read(tokenizer, said) == wanted
    keep_response_template(tokenizer)
    assert Serve(tokenizer).ask(QUESTION, TOOLS, says=ids_of(tokenizer, said)) == wanted


@pytest.mark.parametrize(("family", "name"), cases(UNSOUND_IN_HERMES, UNSOUND_IN_LLAMA))
def test_a_call_that_is_not_sound_stays_content_where_transformers_serve_breaks(family, name):
    text = (UNSOUND_IN_LLAMA if family.startswith("llama") else UNSOUND_IN_HERMES)[name]
    tokenizer = tokenizer_of(family)
    said = text + end_of(family)
    assert read(tokenizer, said) == assistant(content=text)
    keep_response_template(tokenizer)
    with pytest.raises((ValueError, TypeError, KeyError, RecursionError)):
        Serve(tokenizer).ask(QUESTION, TOOLS, says=ids_of(tokenizer, said))


@pytest.mark.parametrize("name", IN_HERMES)
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_the_templates_that_transformers_serve_has_for_qwen_read_alike(family, name):
    text, wanted = IN_HERMES[name]
    tokenizer = tokenizer_of(family)
    served = Serve(tokenizer, model_type=family.replace("_5", ""))
    assert served.ask(QUESTION, TOOLS, says=ids_of(tokenizer, f"{text}<|im_end|>")) == wanted


@pytest.mark.parametrize("family", ["llama3_2", "smollm2 with chatml_tools"])
def test_transformers_serve_finds_no_calls_of_other_models_unless_the_response_template_is_kept(family):
    tokenizer = tokenizer_of(family)
    text = LLAMA if family.startswith("llama") else HERMES
    says = ids_of(tokenizer, text + end_of(family))
    assert Serve(tokenizer).ask(QUESTION, TOOLS, says=says) == assistant(content=text)
    keep_response_template(tokenizer)
    assert Serve(tokenizer).ask(QUESTION, TOOLS, says=says) == assistant(ADD)


def test_an_answer_that_was_cut_is_what_was_said_so_far():
    assert read(tokenizer_of("qwen2_5"), "It is fi") == assistant(content="It is fi")
    assert read(tokenizer_of("qwen2_5"), HERMES) == assistant(ADD)  # the end token alone is missing
    assert read(tokenizer_of("qwen2_5"), "") == assistant(content="")


def test_thoughts_are_kept_apart_where_the_template_knows_of_them():
    thought = f"<think>\nTwo and three.\n</think>\n\nSo.\n{HERMES}<|im_end|>"
    wanted = assistant(ADD, content="So.", reasoning_content="Two and three.")
    tokenizer = tokenizer_of("qwen3")
    assert read(tokenizer, thought) == wanted
    assert Serve(tokenizer, model_type="qwen3").ask(QUESTION, TOOLS, says=ids_of(tokenizer, thought)) == wanted
    plain = read(smollm2_tokenizer(ready_template("chatml_tools")), thought)
    assert plain == assistant(ADD, content="<think>\nTwo and three.\n</think>\n\nSo.")


def test_thoughts_that_the_prompt_begins_are_still_thoughts():
    tokenizer = tiny_tokenizer(trl_template("qwen3") + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}")
    said = "Two and three.\n</think>\n\n" + HERMES + "<|im_end|>"
    assert read(tokenizer, said) == assistant(ADD, reasoning_content="Two and three.")


def test_template_kwargs_reach_the_chat_template_and_what_is_parsed():
    tokenizer = tokenizer_of("qwen3")
    words = ToolWords(tokenizer, template_kwargs={"enable_thinking": False})
    shown = tokenizer.decode(words.render(QUESTION, TOOLS))
    assert shown.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not tokenizer.decode(ToolWords(tokenizer).render(QUESTION, TOOLS)).endswith("</think>\n\n")
    assert read(tokenizer, f"{HERMES}<|im_end|>", template_kwargs={"enable_thinking": False}) == assistant(ADD)


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_special_tokens_are_no_content(family):
    tokenizer, end = tokenizer_of(family), end_of(family)
    other = next(token for token in tokenizer.all_special_tokens if token != end)
    assert read(tokenizer, f"Fine.{other}") == assistant(content="Fine.")
    assert read(tokenizer, f"Fine{other}ly.{end}") == assistant(content="Finely.")
    assert read(tokenizer, f"Fine.{end}\n") == assistant(content="Fine.")


@pytest.mark.parametrize("name", ["a plain answer", "a call", "two calls after text"])
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "chatml_tools"])
def test_an_end_token_after_the_end_of_the_message_takes_nothing_away(template, name):
    tokenizer = tiny_tokenizer(ready_template(template) or trl_template(template))
    tokenizer.eos_token = "<|endoftext|>"  # as with base models of Qwen
    text, wanted = IN_HERMES[name]
    said = f"{text}<|im_end|>\n<|endoftext|>"
    assert read(tokenizer, said) == wanted
    keep_response_template(tokenizer)
    assert Serve(tokenizer).ask(QUESTION, TOOLS, says=ids_of(tokenizer, said)) == wanted


def test_qwen_3_5_answers_with_marks_of_its_own():
    tokenizer = tiny_tokenizer(trl_template("qwen3_5_nothink"))
    tokenizer.eos_token = "<|endoftext|>"
    values = "<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>"
    said = f"So.\n\n<tool_call>\n<function=add>\n{values}\n</function>\n</tool_call><|im_end|>\n<|endoftext|>"
    assert read(tokenizer, said) == assistant(ADD, content="So.")
    assert read(tokenizer, "Fine.<|im_end|>\n<|endoftext|>") == assistant(content="Fine.")
    keep_response_template(tokenizer)
    assert why_no_tools(tokenizer) is None
    served = Serve(tokenizer).ask(QUESTION, TOOLS, says=ids_of(tokenizer, said))
    assert served == assistant(ADD, content="So.")


def test_the_tag_that_llama_writes_before_a_call_is_no_content():
    assert read(tokenizer_of("llama3_2"), f"<|python_tag|>{LLAMA}<|eot_id|>") == assistant(ADD)


def test_without_a_form_that_is_known_an_answer_is_content():
    tokenizer = tiny_tokenizer(CHATML)
    assert response_template(tokenizer) is None
    assert read(tokenizer, f"{HERMES}<|im_end|>", tools=[]) == assistant(content=HERMES)


# --- from messages to tokens and back -------------------------------------------------------------------------------

REPLIES = {
    "a call": assistant(ADD),
    "two calls": assistant(ADD, LOOKED),
    "text and a call": assistant(ADD, content="Let me see."),
    "an answer": assistant(content="It is 5."),
}


@pytest.mark.parametrize(
    ("family", "name"),
    # the chat template of Llama 3.2 has no place for two calls, nor for text beside one
    [
        (f, n)
        for f in WITH_TOOLS
        for n in REPLIES
        if not (f.startswith("llama") and n in ("two calls", "text and a call"))
    ],
)
def test_what_is_rendered_is_parsed_as_what_it_was(family, name):
    tokenizer, reply = tokenizer_of(family), REPLIES[name]
    prompt = ToolWords(tokenizer).render(QUESTION, TOOLS)
    whole = render_messages(tokenizer, [*QUESTION, reply], TOOLS, opened=False)
    assert whole[: len(prompt)] == prompt
    assert ToolWords(tokenizer).parse(prompt, whole[len(prompt) :], TOOLS) == reply


@pytest.mark.parametrize("name", ["a call", "two calls"])
@pytest.mark.parametrize("make", [smollm2_tokenizer, tiny_tokenizer])
def test_with_chatml_tools_what_follows_leaves_the_tokens_before_it_alone(make, name):
    tokenizer, reply = make(ready_template("chatml_tools")), REPLIES[name]
    words = ToolWords(tokenizer)
    prompt = words.render(QUESTION, TOOLS)
    text = "\n".join(
        filter(None, [reply["content"], *[HERMES, LOOK_UP.replace("\\u00e9", "é")][: len(reply["tool_calls"])]])
    )
    drawn = ids_of(tokenizer, f"{text}<|im_end|>")
    assert words.parse(prompt, drawn, TOOLS) == reply
    results = [
        {"role": "tool", "tool_call_id": str(place), "content": "5"} for place in range(len(reply["tool_calls"]))
    ]
    after = words.render([*QUESTION, reply, *results], TOOLS)
    assert after[: len(prompt) + len(drawn)] == prompt + drawn
    response = "\n<tool_response>\n5\n</tool_response>" * len(results)
    wanted = f"\n<|im_start|>user{response}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(after[len(prompt) + len(drawn) :]) == wanted


def test_chatml_tools_writes_what_qwen_writes_but_for_a_system_message_that_nobody_gave():
    ours, qwen = tiny_tokenizer(ready_template("chatml_tools")), tokenizer_of("qwen2_5")
    said = [*QUESTION, assistant(ADD, LOOKED), {"role": "tool", "content": "5"}, {"role": "tool", "content": "an é"}]
    for messages, tools in [(QUESTION, []), (QUESTION, TOOLS), (said, TOOLS), ([*said, REPLIES["an answer"]], TOOLS)]:
        assert ToolWords(ours).render(messages, tools) == ToolWords(qwen).render(messages, tools)
    user = QUESTION[1:]
    assert ours.decode(ToolWords(ours).render(user, [])) == (
        f"<|im_start|>user\n{user[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ours.decode(ToolWords(ours).render(user, TOOLS)).startswith("<|im_start|>system\n# Tools\n\n")


def test_chatml_tools_shows_arguments_that_are_no_json_as_they_were_written():
    tokenizer = tiny_tokenizer(ready_template("chatml_tools"))
    shown = tokenizer.decode(ToolWords(tokenizer).render([*QUESTION, assistant(call("add", "{a: 2"))], TOOLS))
    assert '<tool_call>\n{"name": "add", "arguments": {a: 2}\n</tool_call><|im_end|>' in shown


def test_messages_are_rendered_as_everywhere_else():
    tokenizer = tokenizer_of("qwen2_5")
    said = [*QUESTION, assistant(ADD, content=None), {"role": "tool", "content": [{"type": "text", "text": "5"}]}]
    assert [ToolWords(tokenizer).render(said, TOOLS)] == render_prompts(tokenizer, [said], TOOLS)


def test_what_a_template_refuses_is_a_model_error():
    with pytest.raises(ModelError, match="only supports single tool-calls at once"):
        ToolWords(tokenizer_of("llama3_2")).render([*QUESTION, assistant(ADD, ADD)], TOOLS)
    with pytest.raises(ModelError, match="no chat template"):
        ToolWords(tiny_tokenizer(None)).render(QUESTION, TOOLS)


# --- what a template can do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_an_agent_with_tools_can_be_trained_with_these(family):
    assert why_no_tools(tokenizer_of(family)) is None


OWN_WORDS = {
    "qwen2_5": ("You are a helpful assistant.", "You are terse."),
    "qwen3": ("# Tools", "# Things"),
    "llama3_2": ("Cutting Knowledge Date", "Knowledge Date"),
}


@pytest.mark.parametrize("family", OWN_WORDS)
def test_a_changed_template_that_trl_does_not_know_is_read_by_its_form(family):
    template = trl_template(family).replace(*OWN_WORDS[family])
    assert template != trl_template(family)
    tokenizer = tiny_tokenizer(template, llama=family.startswith("llama"))
    assert why_no_tools(tokenizer) is None
    for text, wanted in (IN_LLAMA if family.startswith("llama") else IN_HERMES).values():
        assert read(tokenizer, text + end_of(family)) == wanted


def test_a_response_template_survives_being_saved(tmp_path):
    tokenizer = smollm2_tokenizer(ready_template("chatml_tools"))
    keep_response_template(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.response_template == response_template(tokenizer)
    assert Serve(again).ask(QUESTION, TOOLS, says=ids_of(again, f"{HERMES}<|im_end|>")) == assistant(ADD)


def test_the_tokenizers_own_response_template_goes_first():
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.response_template = own = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"content": {"close": "<|im_end|>", "content": "text"}},
    }
    assert response_template(tokenizer) == own
    assert read(tokenizer, f"{HERMES}<|im_end|>") == assistant(content=HERMES)
    assert why_no_tools(tokenizer).startswith("the calls that the chat template writes cannot be found again")


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        (None, "the model has no chat template"),
        (CHATML, "leaves out the tools, the assistant's tool calls"),
        (trl_template("llama3"), "leaves out the tools, the assistant's tool calls"),
        (
            trl_template("qwen2_5").replace("<tool_response>\\n' }}\n        {{- message.content }}", "' }}"),
            "results of",
        ),
        (trl_template("gemma"), "the chat template refuses messages with tools"),
    ],
)
def test_a_template_that_has_no_place_for_tools_is_said_to_and_what_to_do(template, missing):
    text = why_no_tools(tiny_tokenizer(template))
    assert missing in text
    assert "set chat_template to one that renders tools" in text and "chatml_tools" in text


def test_smollm2_itself_has_no_place_for_tools():
    text = why_no_tools(smollm2_tokenizer())
    assert text.startswith("the chat template leaves out the tools, the assistant's tool calls; ")


@pytest.mark.parametrize(
    "changed",
    [
        trl_template("qwen2_5").replace("<tool_call>", "<call>").replace("</tool_call>", "</call>"),
        trl_template("llama3_2").replace('"parameters": \'', '"inputs": \''),
    ],
)
def test_a_template_whose_calls_nobody_can_parse_is_said_to_and_what_to_do(changed):
    text = why_no_tools(tiny_tokenizer(changed, llama="eot_id" in changed))
    assert text.startswith("the calls that the chat template writes cannot be found again in the model's answers; ")
    assert "give the tokenizer a response_template" in text


def test_ready_templates_are_found_by_name_alone():
    assert ready_templates() == ["chatml_tools"]
    assert ready_template("chatml_tools").startswith("{#- ChatML with tools")
    for other in ("nothing", "", "chatml_tools.jinja", "./chatml_tools", "../templates/chatml_tools", CHATML):
        assert ready_template(other) is None


def test_text_beside_a_call_is_not_read_again_as_the_server_leaves_it_out_too():
    tokenizer, reply = tiny_tokenizer(ready_template("chatml_tools")), REPLIES["text and a call"]
    words, result = ToolWords(tokenizer), {"role": "tool", "tool_call_id": "0", "content": "5"}
    after = words.render([*QUESTION, reply, result], TOOLS)
    assert after == words.render([*QUESTION, {**reply, "content": ""}, result], TOOLS)
    served = Serve(tokenizer)
    served.ask([*QUESTION, reply, result], TOOLS, says=ids_of(tokenizer, "5<|im_end|>"))
    assert after == served.prompt


def test_calls_are_found_though_decoding_puts_spaces_where_none_were():
    """As with tokenizers of words, and SentencePiece ones after special tokens: ``<|im_start|>assistant`` is gone."""
    call = ["<tool_call>", '{"name":', '"size_of",', '"arguments":', '{"thing":', '"sun"}}', "</tool_call>"]
    special = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
    words = {word: place for place, word in enumerate([*special, *call, "user", "assistant", "system", "hello"])}
    raw = Tokenizer(tokenizers_models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(special[:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = ready_template("chatml_tools")
    function = {"name": "size_of", "description": "Size.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    reader = ToolWords(tokenizer)
    prompt = reader.render([{"role": "user", "content": "hello"}], tools)
    assert tokenizer.decode(prompt).endswith("<|im_start|> assistant")
    drawn = [*(words[word] for word in call), words["<|im_end|>"]]
    said = reader.parse(prompt, drawn, tools)
    (found,) = said["tool_calls"]
    assert found["function"] == {"name": "size_of", "arguments": '{"thing": "sun"}'} and said["content"] == ""
    assert reader.parse(prompt, [words["hello"], words["<|im_end|>"]], tools) == {
        "role": "assistant",
        "content": "hello",
    }
