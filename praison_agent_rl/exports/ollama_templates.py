"""Ollama's form of a tokenizer's chat template, for the families that are known; proved by rendering conversations.

Ollama knows Go templates only. No name of a model decides which one is taken: each is rendered for conversations with
and without system message, tools and reasoning, and only one that renders what the tokenizer's own template renders is
given out. Ollama itself writes JSON without spaces and joins messages in a row of one role; no template changes that.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from praison_agent_rl.exports.go_families import (
    CHATML,
    CHATML_THINKING,
    CHATML_TOOLS,
    CHATML_TOOLS_BARE,
    GEMMA,
    LLAMA3,
    LLAMA3_DATED,
)
from praison_agent_rl.exports.go_templates import GoTemplateError, render
from praison_agent_rl.exports.probes import PROBES, SYSTEM, Conversation

Rendered = Sequence[tuple[Conversation, str]]
"""Conversations with what the tokenizer's template makes of them."""


class OllamaTemplate(NamedTuple):
    """A template that renders plain conversations, and those that ``covers`` names, as the tokenizer's does."""

    text: str
    covers: tuple[str, ...]
    """Of the kinds of conversation in ``PROBES``, those that the tokenizer's template knows."""
    lacks: tuple[str, ...]
    """Those that it knows and that are rendered otherwise."""


def ollama_template(rendered: Callable[[Conversation], str], *, bos: str, added: bool) -> OllamaTemplate | None:
    """The Go template that renders as ``rendered``, the tokenizer's own one, does; None where no known one does.

    ``bos`` is the token with which a text begins, and ``added`` whether the engine puts it there by itself.
    """
    wanted = {kind: _rendered(rendered, probes, bos if added else "") for kind, probes in PROBES.items()}
    if not wanted["plain"]:
        return None
    question = wanted["plain"][0][1]
    known = {kind: pairs for kind, pairs in wanted.items() if kind == "plain" or (pairs and pairs[0][1] != question)}
    families = list(_candidates(wanted["plain"]))
    written = families if added else [*families, *(bos + family for family in families)]
    found = [_compared(text, known) for text in written]
    best = max(found, key=lambda template: len(template.covers))
    return best if "plain" in best.covers else None


def _rendered(
    rendered: Callable[[Conversation], str], probes: Sequence[Conversation], bos: str
) -> list[tuple[Conversation, str]]:
    """Without the conversations that the template refuses, such as those with a system message for Gemma."""
    found = []
    for probe in probes:
        try:
            text = rendered(probe)
        except Exception:  # noqa: BLE001  # a template is the model's own code and may raise anything
            continue
        found.append((probe, text.removeprefix(bos)))
    return found


def _candidates(plain: Rendered) -> Iterator[str]:
    """Templates of the known families, with the texts that this model's own puts before the first message."""
    texts = {probe["name"]: text for probe, text in plain}
    made_up = _between(texts.get("question", ""), "<|im_start|>system\n", "<|im_end|>\n<|im_start|>user")
    dated = _between(texts.get("system", ""), "<|start_header_id|>system<|end_header_id|>\n\n", SYSTEM)
    for family in (CHATML, CHATML_TOOLS, CHATML_TOOLS_BARE, CHATML_THINKING):
        yield family.replace("DEFAULT", _go_string(made_up))
    yield from (LLAMA3, LLAMA3_DATED.replace("DEFAULT", _go_string(dated)), GEMMA)


def _between(text: str, before: str, after: str) -> str:
    return text.partition(after)[0].partition(before)[2] if after in text else ""


def _go_string(text: str) -> str:
    """JSON's texts are Go's, too; no three quotes stand in a row in them, which would end the Modelfile's template."""
    return json.dumps(text, ensure_ascii=False)


def _compared(text: str, wanted: Mapping[str, Rendered]) -> OllamaTemplate:
    covers = tuple(kind for kind, pairs in wanted.items() if all(_renders(text, *pair) for pair in pairs))
    return OllamaTemplate(text, covers, tuple(kind for kind in wanted if kind not in covers))


def _renders(text: str, probe: Conversation, wanted: str) -> bool:
    try:
        return _with_plain_json(render(text, go_values(probe))) == _with_plain_json(wanted)
    except GoTemplateError:
        return False


def go_values(conversation: Conversation) -> dict[str, Any]:
    """What Ollama fills a template with (template/template.go, Execute)."""
    messages = [_go_message(message) for message in conversation["messages"]]
    thinking = conversation.get("enable_thinking")
    return {
        "Messages": messages,
        "Tools": [{"Type": tool["type"], "Function": tool["function"]} for tool in conversation.get("tools") or ()],
        "System": "\n\n".join(message["Content"] for message in messages if message["Role"] == "system"),
        "Think": bool(thinking),
        "IsThinkSet": thinking is not None,
    }


def _go_message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "Role": message["role"],
        "Content": message["content"],
        "Thinking": message.get("reasoning_content") or "",
        "ToolCalls": [{"Function": {"Name": call["name"], "Arguments": call["arguments"]}} for call in calls],
    }


def _with_plain_json(text: str) -> str:
    """The text with every line that is a JSON object written in one way: Go writes no spaces and sorts keys."""
    return "\n".join(map(_plain, text.split("\n")))


def _plain(line: str) -> str:
    try:
        return json.dumps(json.loads(line), sort_keys=True) if line.startswith("{") else line
    except ValueError:
        return line
