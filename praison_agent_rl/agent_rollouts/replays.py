"""Results of tools as they were recorded: the same call is given the same result, and no tool runs."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from praison_agent_rl.records import Call, Run

NOTHING = "Function returned an empty output"
"""What the framework tells a model of a tool that returned None (praisonaiagents/llm/openai_client.py)."""
_FAILED = re.compile(r"Error: (.*)\. Please inform the user that the operation could not be completed\.", re.DOTALL)
"""What it tells of an error on its litellm path (praisonaiagents/llm/adapters/__init__.py)."""
_FENCE, _FENCE_END = "<external_tool_result>\n", "\n</external_tool_result>"
"""What it puts around results from outside (praisonaiagents/tools/trust.py); it will do so again."""


class _Result(NamedTuple):
    """One result of one call, as a request showed it."""

    tool: str
    key: str
    id: Any
    text: str


@dataclass
class Replays:
    """Recorded results by tool and arguments.

    Arguments are the same if they are equal as JSON: in any order of keys, with 1 and 1.0 the same number, but not 1
    and "1", nor true and 1. A call that was recorded with "3" is also found by 3, since the framework turns what a
    model wrote into the type of the tool's parameter before it calls. Arguments that are no JSON are compared as the
    text that they are. Of a call that was recorded with several results the latest is given.
    """

    results: dict[tuple[str, str], str] = field(default_factory=dict)
    """Text of the tool's message, by name of the tool and arguments as canonical JSON."""
    differing: dict[str, int] = field(default_factory=dict)
    """By tool: calls that were recorded with more than one result."""

    def __post_init__(self) -> None:
        self._by_tool: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for (tool, key), text in self.results.items():
            if (recorded := _parsed(key)) is not None:
                self._by_tool.setdefault(tool, []).append((recorded, text))

    @classmethod
    def of(cls, runs: Iterable[Run]) -> "Replays":
        """Of recorded runs; calls without a result are left out, errors that were a result stay."""
        latest: dict[tuple[str, str], tuple[float, str]] = {}
        texts: dict[tuple[str, str], set[str]] = {}
        for run in runs:
            seen: set[_Result] = set()
            for call in run.calls:
                for result in _shown(call):
                    place = result.tool, result.key
                    if result not in seen and call.time >= latest.get(place, (call.time, ""))[0]:
                        latest[place] = call.time, result.text
                    seen.add(result)  # later requests of the run show it again
                    texts.setdefault(place, set()).add(result.text)
        made = cls({place: text for place, (_, text) in latest.items()})
        for (tool, _), known in texts.items():
            if len(known) > 1:
                made.differing[tool] = made.differing.get(tool, 0) + 1
        return made

    def find(self, tool: str, arguments: Any) -> str | None:
        """The recorded text, or None; ``arguments`` are a mapping or the JSON text that a model wrote."""
        text = self.results.get((tool, call_key(arguments)))
        if text is not None or not isinstance(arguments, Mapping):
            return text
        alike = {known for recorded, known in self._by_tool.get(tool, ()) if _became(recorded, arguments)}
        return alike.pop() if len(alike) == 1 else None

    def calls(self, tool: str) -> int:
        """How many different calls of this tool are known."""
        return sum(1 for name, _ in self.results if name == tool)


def call_key(arguments: Any) -> str:
    """Arguments as canonical JSON, or as they are if they are a text that is none.

    >>> call_key('{"b": 1.0, "a": "x"}') == call_key({"a": "x", "b": 1})
    True
    >>> call_key('{"a": ')
    '{"a":'
    """
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return str(arguments).strip()
    return json.dumps(_canonical(arguments), sort_keys=True, default=str)


def _parsed(key: str) -> dict[str, Any] | None:
    try:
        value = json.loads(key)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _became(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether the framework may have made what is asked of what a model wrote: ``Agent._cast_arguments``."""
    return recorded.keys() == asked.keys() and all(_cast(recorded[name], asked[name]) for name in recorded)


def _cast(written: Any, given: Any) -> bool:
    if isinstance(written, str) and isinstance(given, bool):
        return given == (written.lower() in ("true", "1", "yes", "on"))
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not isinstance(written, str | float):
        return call_key({"": written}) == call_key({"": given})
    try:
        read = float(written)
        return given in (read, int(read))
    except (ValueError, OverflowError):  # no number, or none that is whole
        return False


def _canonical(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    return [_canonical(item) for item in value] if isinstance(value, list | tuple) else value


def _shown(call: Call) -> Iterator[_Result]:
    """The results in the messages of a request: those that follow an assistant's calls, until somebody else speaks."""
    asked: list[dict[str, Any]] = []
    for message in call.messages:
        if message.get("role") != "tool":
            asked = [one for one in message.get("tool_calls") or [] if isinstance(one, dict)]
            continue
        found = _answered(asked, message.get("tool_call_id"))
        text = _text_of(message.get("content"))
        if found is None or text is None:
            continue
        asked.remove(found)
        function = found.get("function") or {}
        yield _Result(str(function.get("name")), call_key(function.get("arguments")), found.get("id"), text)


def _answered(asked: list[dict[str, Any]], call_id: Any) -> dict[str, Any] | None:
    """The call that a result belongs to: the first one left that has its id, or no id as it has none."""
    return next((one for one in asked if one.get("id") == call_id), None)


def _text_of(content: Any) -> str | None:
    """The text of a tool's message; None for pictures and the like, which cannot be given again."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return "".join(parts) if parts and all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]


def value_told_as(text: str) -> Any:
    """The value that the framework tells a model as ``text``: it writes what a tool returns as JSON.

    >>> value_told_as('{"error": "no such city"}')
    {'error': 'no such city'}
    >>> value_told_as('"12 degrees"')
    '12 degrees'

    A text that the framework did not write itself is given as it is, and then told with quotes around it.
    """
    if text == NOTHING:
        return None
    if failed := _FAILED.fullmatch(text):
        return {"error": failed[1]}
    try:
        value = json.loads(text)
        same = json.dumps(value) == text
    except (ValueError, RecursionError):
        return text
    if not same:
        return text
    return _unfenced(value) if isinstance(value, str) else value


def text_told(result: Any) -> str:
    """What the framework tells a model of what a tool returned."""
    if result is None:
        return NOTHING
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return json.dumps({"result": str(result)})


def _unfenced(text: str) -> str:
    if not (text.startswith(_FENCE) and text.endswith(_FENCE_END)):
        return text
    inner = text[len(_FENCE) : -len(_FENCE_END)]
    for mark in ("external_tool_result", "/external_tool_result"):
        inner = inner.replace(f"&lt;{mark}&gt;", f"<{mark}>")
    return inner
