"""Messages to tokens and back for agents with tools: rendered by the chat template, parsed as the deployed model's are.

An answer is read by transformers' parser with a *response template*, which says how a model writes calls and thoughts.
``transformers serve`` (5.24) does the same with the response template that the tokenizer carries. Without one it knows
those of Qwen 2 to 3.5 and Gemma 4 by the kind of model, and gives what any other says (Llama, SmolLM2) as plain text,
calls and all: so a model is saved with ``keep_response_template``, after which both sides read alike. Where they differ
all the same:

- A call that is not sound (no JSON, no name, no arguments) is answered by ``transformers serve`` with HTTP 500. Here it
  stays content, as it stood in the answer, with every other call of that answer; vLLM and TRL do so too.
- Special tokens within content are left out here; ``transformers serve`` leaves those in that end nothing.

vLLM (0.32) has parsers of its own. ``hermes`` also takes a last call that is not closed, and keeps white space around
content; ``llama3_json`` takes every object with a name and arguments, so also several, and drops what was said around
them. Neither turns a text into a number where the tool's schema wants one, as transformers does.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import render_prompts

Message = dict[str, Any]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_UNSOUND = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What the parser and this module raise at an answer that does not keep to its form."""


class ToolWords:
    """What the policy reads and says, as tokens and as messages; ``template_kwargs`` are given to the chat template."""

    def __init__(self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = _Template(tokenizer, dict(template_kwargs or {}))
        self._response = response_template(tokenizer)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of the messages up to where the answer begins, as ``models.render_prompts`` makes them.

        Raises:
            ModelError: there is no chat template, or it refuses the messages.
        """
        (ids,) = render_prompts(self._template, [list(messages)], tools)
        return ids

    def parse(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], tools: Sequence[dict[str, Any]]
    ) -> Message:
        """The assistant message that was drawn after the prompt: content, tool_calls and reasoning_content.

        Calls have no ``id``; their arguments are JSON text. What cannot be parsed is content.
        """
        if self._response is not None:
            said, asked = self._tokenizer.decode(completion_ids), self._tokenizer.decode(prompt_ids)
            anchor = self._response.get("start_anchor") or ""
            # Decoding may put spaces where none were; the parser would not find the anchor, and read the prompt too
            asked = asked if anchor in asked else ""
            if message := _read(self._tokenizer, self._response, said, prefix=asked, tools=tools):
                return message
        content = self._tokenizer.decode(completion_ids, skip_special_tokens=True)
        return {"role": "assistant", "content": content}


def response_template(tokenizer: Any) -> dict[str, Any] | None:
    """How answers by the tokenizer's chat template are parsed; None where nothing is known that finds its calls.

    The tokenizer's own, or TRL's for a chat template that it knows, or the form of Hermes or Llama 3 if that reads back
    what the chat template writes.
    """
    if tokenizer.response_template is not None:
        own: dict[str, Any] = tokenizer.response_template
        return own
    if tokenizer.chat_template is None:
        return None
    known = _known_to_trl(tokenizer.chat_template)
    return _fitting(tokenizer) if known is None else _ended_by(tokenizer.eos_token, known)


def keep_response_template(tokenizer: Any) -> None:
    """Set how answers are parsed, so that a model saved with this tokenizer is served with calls and not as text."""
    tokenizer.response_template = response_template(tokenizer)


def why_no_tools(tokenizer: Any) -> str | None:
    """Why an agent with tools cannot be trained with this chat template, and what to do; None if it can be."""
    if tokenizer.chat_template is None:
        return f"the model has no chat template; {_OTHER_TEMPLATE}"
    try:
        shown = _shown(tokenizer, [*_ASKED, _CALLED, _RESULT], opened=True)
        probe = _probed(tokenizer)
    except ModelError as error:
        return f"{error}; {_OTHER_TEMPLATE}"
    if missing := [what for what, sign in _SIGNS.items() if sign not in shown]:
        return f"the chat template leaves out {', '.join(missing)}; {_OTHER_TEMPLATE}"
    template = response_template(tokenizer)
    if template is None or not _reads_back(tokenizer, template, probe):
        return f"the calls that the chat template writes cannot be found again in the model's answers; {_OTHER_FORM}"
    return None


def why_no_loop(tokenizer: Any) -> str | None:
    """Why TRL's own loop would see no call in what this model says, though it can be asked; None if it would.

    It finds where an answer begins by what the prompt decodes to, white space included.
    """
    asked, opened = (_shown(tokenizer, _ASKED, opened=opened) for opened in (False, True))
    head = opened[len(asked) :] if opened.startswith(asked) else opened
    ids = tokenizer(opened, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids).endswith(head):
        return None
    return (
        f"the tokenizer does not give back the head of an answer, {head!r}, as it was read, so TRL's loop would find "
        "no call in any; take rollout: agent, or a tokenizer that keeps white space"
    )


_OTHER_TEMPLATE = (
    "to train an agent with tools, set chat_template to one that renders tools, tool calls and their results: "
    "chatml_tools, which comes with this package, for a model that speaks ChatML (<|im_start|>, <|im_end|>), or the "
    "path of your own"
)
_OTHER_FORM = (
    "set chat_template to one whose calls are <tool_call>{JSON}</tool_call>, such as chatml_tools for a model that "
    "speaks ChatML, or give the tokenizer a response_template (in tokenizer_config.json; transformers documents it "
    "under 'Response parsing')"
)


# --- reading an answer ----------------------------------------------------------------------------------------------


def _read(
    tokenizer: Any, template: dict[str, Any], said: str, *, prefix: str, tools: Sequence[dict[str, Any]]
) -> Message | None:
    """The message in an answer; None for an answer that does not keep to the template."""
    specials = tokenizer.all_special_tokens
    try:
        parsed = tokenizer.parse_response(said, template, prefix=prefix, tools=list(tools) or None)
        message: Message = {"role": "assistant", "content": _without(specials, parsed.get("content") or "")}
        if thoughts := next((parsed[key] for key in _THOUGHTS if parsed.get(key)), None):
            message["reasoning_content"] = _without(specials, thoughts)
        if calls := parsed.get("tool_calls"):
            message["tool_calls"] = [_sound(call) for call in calls]
    except _UNSOUND:
        return None
    return message


def _without(specials: Sequence[str], text: str) -> str:
    found = [special for special in specials if special in text]
    for special in found:
        text = text.replace(special, "")
    return text.strip() if found else text


def _sound(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON text; raises one of ``_UNSOUND`` for what is none."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"a call of {name!r}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function", "function": {"name": name, "arguments": text}}


# --- finding out how a chat template writes --------------------------------------------------------------------------


class _Template:
    """A tokenizer's chat template with further variables, as ``render_prompts`` asks for it."""

    def __init__(self, tokenizer: Any, variables: dict[str, Any]) -> None:
        self.chat_template = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._variables = variables

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, **{**self._variables, **options})


@dataclass(frozen=True)
class _Probe:
    """What a chat template writes around and in an answer."""

    opening: str
    """What stands before each answer, without what begins its thoughts."""
    closing: str
    """What ends it."""
    before: str
    """A conversation up to where an answer with a call begins."""
    called: str
    """That answer."""


_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe_description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
_CALL = {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}}
_ASKED = [{"role": "user", "content": "probe_question"}]
_ANSWERED = {"role": "assistant", "content": "probe_answer"}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "probe1234", "type": "function", "function": _CALL}],
}
_RESULT = {"role": "tool", "name": "probe_tool", "tool_call_id": "probe1234", "content": "probe_result"}
_SIGNS = {
    "the tools": "probe_description",
    "the assistant's tool calls": "probe_value",
    "the results of tools": "probe_result",
}


def _shown(tokenizer: Any, messages: Sequence[Message], *, opened: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=[_TOOL], add_generation_prompt=opened, tokenize=False
        )
    except Exception as error:  # a template is the model's own code and may raise anything
        raise ModelError(f"the chat template refuses messages with tools: {type(error).__name__}: {error}") from error
    return text


def _probed(tokenizer: Any) -> _Probe:
    """Raises ModelError for a template that refuses messages with tools."""
    asked, opened = (_shown(tokenizer, _ASKED, opened=opened) for opened in (False, True))
    answered, called = (_shown(tokenizer, [*_ASKED, answer], opened=False) for answer in (_ANSWERED, _CALLED))
    before = _common(opened, called)  # an answer may lack what opens the next one, such as <think>
    head = _common(opened, called, answered)
    return _Probe(
        opening=head[len(asked) :].partition("<think>")[0] if head.startswith(asked) else "",
        closing=answered.rpartition("probe_answer")[2].strip(),
        before=before,
        called=called[len(before) :],
    )


def _common(*texts: str) -> str:
    """What the texts begin with alike."""
    places = (place for place, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    return texts[0][: next(places, min(map(len, texts)))]


def _known_to_trl(chat_template: Any) -> dict[str, Any] | None:
    from trl.chat_template_utils import add_response_schema

    bearer = SimpleNamespace(chat_template=chat_template, response_template=None)
    try:
        add_response_schema(bearer)
    except ValueError:  # it knows chat templates by their text
        return None
    found: dict[str, Any] | None = bearer.response_template
    return found


def _ended_by(end: str | None, template: dict[str, Any]) -> dict[str, Any]:
    r"""A response template whose content ends at the end token too.

    Where that is another than the chat template's, an answer ends in ``<|im_end|>\n<|endoftext|>``, and TRL's templates
    take what comes after the first for new content, in the place of what was said.
    """
    if end is None:
        return template
    content = dict(template["fields"]["content"])
    literal = content.pop("close", [])
    closes = [re.escape(one) for one in ([literal] if isinstance(literal, str) else literal)]
    closes += [content.pop("close_pattern", ""), rf"\s*{re.escape(end)}\s*"]
    content["close_pattern"] = "|".join(f"(?:{one})" for one in closes if one)
    return {**template, "fields": {**template["fields"], "content": content}}


def _fitting(tokenizer: Any) -> dict[str, Any] | None:
    """The form of Hermes or Llama 3, if it reads back what the chat template writes."""
    try:
        probe = _probed(tokenizer)
    except ModelError:  # ``why_no_tools`` says it
        return None
    if not probe.opening:
        return None
    ends = dict.fromkeys(filter(None, (probe.closing, tokenizer.eos_token)))
    end = "|".join(map(re.escape, ends))
    forms = (_hermes_form(probe.opening, end, tokenizer.chat_template), _llama_form(probe.opening, end))
    return next((form for form in forms if _reads_back(tokenizer, form, probe)), None)


def _reads_back(tokenizer: Any, template: dict[str, Any], probe: _Probe) -> bool:
    """Whether the call in the probe is found by the template as it was given to the chat template."""
    function = {**_CALL, "arguments": json.dumps(_CALL["arguments"])}
    wanted = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return _read(tokenizer, template, probe.called, prefix=probe.before, tools=[_TOOL]) == wanted


def _hermes_form(opening: str, end: str, chat_template: Any) -> dict[str, Any]:
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``; thoughts where the chat template knows of them."""
    calls = {
        "open_pattern": r"\s*<tool_call>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
    thoughts = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
    thinks = "</think>" in str(chat_template)
    return _form(opening, end, {**({"reasoning_content": thoughts} if thinks else {}), "tool_calls": calls})


def _llama_form(opening: str, end: str) -> dict[str, Any]:
    """``{"name": ..., "parameters": ...}`` up to the end of the answer."""
    calls = {
        "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": rf"\}}\s*(?:{end})\s*",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    return _form(opening, end, {"tool_calls": calls})


def _form(opening: str, end: str, fields: dict[str, Any]) -> dict[str, Any]:
    content = {"close_pattern": rf"\s*(?:{end})\s*", "content": "text"}
    return {"defaults": {"role": "assistant"}, "start_anchor": opening, "fields": {**fields, "content": content}}
