"""What can be counted in an answer's text: repetition, scripts, tool calls; nothing here knows of models or rewards."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, Japanese and Chinese put no spaces between words."""
_UNITS = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")
_MARKED_CALLS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)|\[TOOL_CALLS\]\s*(.*)", re.DOTALL)
_BARE_CALL = re.compile(r'^\s*(?:```(?:json)?\s*)?(\{\s*"(?:name|function|parameters|arguments)"\s*:.*)', re.DOTALL)


def units(text: str) -> list[str]:
    """Words and marks of a text; single letters where a script has no spaces between words."""
    return _UNITS.findall(text.casefold())


def n_grams(text: str, n: int) -> list[tuple[str, ...]]:
    """All runs of ``n`` units of a text, in order."""
    found = units(text)
    return list(zip(*(found[start:] for start in range(n)), strict=False))


def repetition(text: str, n: int = 4) -> float:
    """Share of n-grams that stood in the text before: seq-rep-n of Welleck et al. 2020 (arXiv:1908.04319), eq. 11."""
    grams = n_grams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def scripts(text: str) -> Counter[str]:
    """How many letters of each script a text has: ``LATIN``, ``CYRILLIC``, ``CJK``, ..."""
    found: Counter[str] = Counter()
    for letter, times in Counter(text).items():
        if script := _script(letter):
            found[script] += times
    return found


@lru_cache(maxsize=65536)
def _script(letter: str) -> str | None:
    """The script of a letter by the first word of its Unicode name; None for what is no letter."""
    if not letter.isalpha():
        return None
    words = [*unicodedata.name(letter, "").split(), "", ""]
    return (words[1] if words[0] in ("FULLWIDTH", "HALFWIDTH") else words[0]) or None


def faulty_tool_call(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text has a tool call that cannot be parsed, names no tool of ``tools`` or lacks a required argument.

    Calls are looked for as open models write them: ``<tool_call>{...}</tool_call>`` (Hermes, Qwen), ``[TOOL_CALLS]``
    (Mistral), and a JSON object alone (Llama).
    """
    known = {_function(tool).get("name"): _function(tool).get("parameters") or {} for tool in tools}
    return any(not _is_sound(call, known) for call in written_calls(text))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def written_calls(text: str) -> Iterator[Any]:
    """Each tool call that stands in a text, as parsed JSON; None for one that is not JSON."""
    written = [first or second for first, second in _MARKED_CALLS.findall(text)]
    if not written and (bare := _BARE_CALL.match(text)):
        written = [bare.group(1)]
    for part in written:
        try:
            parsed, _ = json.JSONDecoder().raw_decode(part.strip())
        except (ValueError, RecursionError):
            parsed = None
        yield from parsed if isinstance(parsed, list) and parsed else [parsed]


def _is_sound(call: Any, known: Mapping[Any, Any]) -> bool:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in known:
        return False
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    required = known[call["name"]].get("required") or []
    return isinstance(arguments, dict) and all(name in arguments for name in required)
