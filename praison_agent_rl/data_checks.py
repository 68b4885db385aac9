"""Whether rows can be trained on: columns first, then every row; it reads nothing and changes nothing.

TRL trains on many of these faults without a word (zero rows, chosen equal to rejected, a prompt that ends with an
assistant turn) and fails on the others without naming the row, so all are found here, before a model loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .data_files import Row
from .errors import DataError
from .shown import shown

REQUIRED_COLUMNS = {
    "grpo": ("prompt",),
    "reward": ("chosen", "rejected"),
    "cpo": ("prompt", "chosen", "rejected"),
}

# What other datasets call these columns. Only suggested: a guess that is wrong would train on the wrong text.
OFTEN_CALLED = {
    "prompt": ("question", "instruction", "messages", "conversations", "conversation", "query", "input", "problem"),
    "chosen": ("accepted", "preferred", "chosen_response", "response_chosen"),
    "rejected": ("dispreferred", "rejected_response", "response_rejected"),
}

# TRL passes these names to reward functions itself (or drops the column): trl/trainer/grpo_trainer.py, TRL 1.16
RESERVED_COLUMNS = {
    "prompts": "TRL passes the prompts to rewards under this name",
    "completions": "TRL passes the completions to rewards under this name",
    "completion": "TRL drops it before rewards see it",
    "completion_ids": "TRL drops it before rewards see it",
    "trainer_state": "TRL overwrites it",
    "log_extra": "TRL overwrites it",
    "log_metric": "TRL overwrites it",
    "environments": "TRL passes environments to rewards under this name",
}

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROWS_SHOWN = 10
DEEPEST = 100
"""Levels of lists and dicts within a value; Python's copying and JSON fail from about 300 on."""

_ECHO = 20
"""Characters from which an answer that begins with its prompt is taken for one that holds it."""
_NO_WIDTH = dict.fromkeys(map(ord, "\u200b\u2060\ufeff"))
"""Zero-width space, word joiner, byte order mark: not white space to Python, and yet nothing to see."""

_HALF = re.compile("[\ud800-\udfff]")


def check_columns(rows: Sequence[Row], method: str, source: str = "the dataset") -> None:
    """Raise ``DataError`` unless the columns that ``method`` needs are there and no name collides with one of TRL's."""
    needed = _needed(method)
    if not rows:
        raise DataError(f"{source} has no rows; method {method!r} needs at least one")
    present = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    missing = [name for name in needed if name not in present]
    if missing:
        raise DataError(
            f"method {method!r} needs the column{'s' * (len(needed) > 1)} {', '.join(needed)}; "
            f"missing in {source}: {', '.join(missing)}. It has: {', '.join(map(str, present)) or 'no columns'}"
            + _suggestion(missing, present)
        )
    taken = [f"{name!r} ({RESERVED_COLUMNS[name]})" for name in present if name in RESERVED_COLUMNS]
    if method == "grpo" and taken:
        raise DataError(
            f"{source} has columns that reward functions would not see: {', '.join(taken)}. "
            "Rename them, e.g. rename: {completion: reference}"
        )


def check_rows(rows: Sequence[Row], method: str, source: str = "the dataset") -> None:
    """Check every row, and raise one ``DataError`` that names the first ten with faults, their reasons and the count.

    Rows count from 1. For ``grpo`` text and message prompts may be mixed (``normalise`` makes them one form); of pairs
    all columns of all rows must have one form. The prompt of ``reward`` may be left out, in all rows.
    """
    check_columns(rows, method, source)
    names = _columns_read(rows, method)
    form = None if method == "grpo" else _first_form(rows, names)
    faults = [(number, list(_row_faults(row, method, names, form))) for number, row in enumerate(rows, 1)]
    faults = [(number, reasons) for number, reasons in faults if reasons]
    if not faults:
        return
    shown = [f"  row {number}: {'; '.join(reasons)}" for number, reasons in faults[:ROWS_SHOWN]]
    more = len(faults) - len(shown)
    total = f"{len(faults)} of {len(rows)} rows have faults"
    raise DataError(
        "\n".join(
            [
                f"{source} cannot be trained on with method {method!r}:",
                *shown,
                f"  ... and {more} more; {total}" if more else f"  {total}",
                "Mend these rows or leave them out",
            ]
        )
    )


def _needed(method: str) -> tuple[str, ...]:
    if method not in REQUIRED_COLUMNS:
        raise DataError(f"method {method!r} is unknown; known: {', '.join(REQUIRED_COLUMNS)}")
    return REQUIRED_COLUMNS[method]


def _suggestion(missing: list[str], present: list[str]) -> str:
    if {"role", "content"} <= set(present):
        return ". This looks like the messages of one conversation: put them in a list, [messages]"
    pairs = {
        next(name for name in OFTEN_CALLED[wanted] if name in present): wanted
        for wanted in missing
        if set(OFTEN_CALLED[wanted]) & set(present)
    }
    if not pairs:
        return ""
    return ". To use another column, say rename: {" + ", ".join(f"{old}: {new}" for old, new in pairs.items()) + "}"


def _form(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "messages" if isinstance(value, list) else None


def _columns_read(rows: Sequence[Row], method: str) -> tuple[str, ...]:
    """The columns that training reads: a reward model is given the prompts where there are any."""
    needed = REQUIRED_COLUMNS[method]
    prompted = any(isinstance(row, dict) and row.get("prompt") is not None for row in rows)
    return ("prompt", *needed) if prompted and "prompt" not in needed else needed


def _first_form(rows: Sequence[Row], names: Sequence[str]) -> str | None:
    """The one form that all texts of a preference dataset must have: that of the first row that has one."""
    found = (_form(row.get(name)) for row in rows if isinstance(row, dict) for name in names)
    return next((form for form in found if form), None)


def _row_faults(row: Any, method: str, names: Sequence[str], form: str | None) -> Iterator[str]:
    if not isinstance(row, dict):
        yield f"it is {shown(row)}, not a dict of columns"
        return
    for name in names:
        if name not in row:
            yield f"{name} is missing"
            continue
        value = row[name]
        yield from _text_faults(name, value, before=() if name == "prompt" else _messages(row.get("prompt")))
        if form and _form(value) not in (None, form):
            yield f"{name} is {_form(value)}, but the dataset begins with {form}; use one form in all rows"
    for name, value in row.items():
        yield from (f"{shown(name)} {reason}" for reason in _lost_values(value))
        yield from (f"the column name {shown(name)} {reason}" for reason in _lost_values(name))
    if method != "grpo":
        yield from _pair_faults(row, method)


def _pair_faults(row: Row, method: str) -> Iterator[str]:
    """What is wrong with a better and a worse answer, each of which may be sound by itself."""
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    if chosen is not None and chosen == rejected:
        yield "chosen and rejected are equal, which teaches nothing"
    elif chosen is not None and _form(chosen) == _form(rejected) and _bare(chosen) == _bare(rejected):
        yield "chosen and rejected are equal but for white space, which teaches nothing"
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        yield from (f"{name} {reason}" for reason in _answer_faults(_messages(side), _messages(prompt), method))
    if _both_repeat(prompt, chosen, rejected):
        yield "chosen and rejected both begin with the prompt, which has a column of its own; take it out of them"


def _answer_faults(side: Sequence[Row], prompt: Sequence[Row], method: str) -> Iterator[str]:
    if not side:
        return
    last = side[-1]
    if last.get("role") in ROLES and last.get("role") != "assistant":
        yield f"ends with a turn of role {last['role']!r}; its last message must be the assistant's answer"
    elif not (last.get("tool_calls") or last.get("function_call")) and _is_blank(last.get("content")):
        yield "is blank: its last message has no text"
    if len(side) > len(prompt) > 0 and _bare(list(side[: len(prompt)])) == _bare(list(prompt)):
        yield "begins with the prompt, which has a column of its own; take it out"
    if method == "cpo" and any(message.get("role") in ("tool", "function") for message in side):
        # CPOTrainer trains on every token after the prompt (trl/experimental/cpo/cpo_trainer.py, TRL 1.16)
        yield "holds a tool result, which CPO would train the model to write; put what comes before it into prompt"


def _both_repeat(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """Whether both answers begin with the text of the prompt; a short one may be said again by chance."""
    texts = [_bare(text) for text in (prompt, chosen, rejected) if isinstance(text, str)]
    return len(texts) == 3 and len(texts[0]) >= _ECHO and all(text.startswith(texts[0]) for text in texts[1:])


def _lost_values(value: Any) -> Iterator[str]:
    """What of a column's value would not survive the way to training, which is JSON in UTF-8; each kind once."""
    found: dict[str, None] = {}
    seen: set[int] = set()
    waiting = [(value, 0)]
    while waiting:  # not a recursion: a value may be nested more deeply than Python calls may
        item, depth = waiting.pop()
        if isinstance(item, dict | list | tuple):
            if id(item) in seen:
                continue
            seen.add(id(item))
            if depth > DEEPEST:
                found[f"is nested more than {DEEPEST} levels deep"] = None
                break
            inner = [*item, *item.values()] if isinstance(item, dict) else item
            waiting += [(one, depth + 1) for one in inner]
        elif reason := _loss_of(item, nested=depth > 0):
            found[reason] = None
    yield from found


def _loss_of(item: Any, *, nested: bool) -> str | None:
    if isinstance(item, str):
        if half := None if item.isascii() else _HALF.search(item):
            return f"holds half an emoji (U+{ord(half[0]):04X} alone), which is no text that a tokenizer takes"
    elif isinstance(item, int):  # true and false are integers too
        if not -(2**63) <= item < 2**63:
            return f"holds {shown(item)}, a number beyond 64 bits; write it as text"
    elif isinstance(item, float):
        if nested and not math.isfinite(item):
            return f"holds {item} within, for which JSON has no form"
    elif item is not None:
        return f"holds a {type(item).__name__} ({shown(item)}), for which JSON has no form; turn it into text"
    return None


def without_white_space(text: str) -> str:
    r"""The text without what cannot be seen: blanks and line breaks of all scripts, of no width too.

    >>> without_white_space(" a\u00a0B\u200b\n")
    'aB'
    """
    return "".join(text.translate(_NO_WIDTH).split())


def _bare(value: Any) -> Any:
    """A value without the white space within its texts."""
    if isinstance(value, str):
        return without_white_space(value)
    if isinstance(value, list):
        return [_bare(item) for item in value]
    return {name: _bare(item) for name, item in value.items()} if isinstance(value, dict) else value


def _messages(value: Any) -> list[Row]:
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []


def _text_faults(name: str, value: Any, *, before: Sequence[Row]) -> Iterator[str]:
    if isinstance(value, str):
        if not without_white_space(value):
            yield f"{name} is blank"
    elif not isinstance(value, list):
        yield f"{name} is {shown(value)}, not text or a list of messages"
    elif not value:
        yield f"{name} is an empty list"
    else:
        for number, message in enumerate(value, 1):
            for reason in _message_faults(message):
                yield f"{name} message {number} {reason}"
        yield from (f"{name} {reason}" for reason in _orphans(_messages(value), _call_ids(before)))
        if name == "prompt":
            yield from (f"{name} {reason}" for reason in _ending_faults(_messages(value)))


def _message_faults(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield f"is {shown(message)}, not a dict"
        return
    role = message.get("role")
    if role is None:
        yield "has no role"
    elif role not in ROLES:
        yield f"has the unknown role {role!r}; known: {', '.join(ROLES)}"
    yield from _content_faults(message)
    if "tool_calls" in message:
        yield from _tool_call_faults(message["tool_calls"])


def _content_faults(message: Row) -> Iterator[str]:
    content = message.get("content")
    if content is None:
        calls = message.get("tool_calls") or message.get("function_call")
        if not (message.get("role") == "assistant" and calls):
            yield "has no content"
    elif isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content):
            yield f"has content parts {shown(content)}; each must be a dict with a type"
        elif others := sorted({part["type"] for part in content} - {"text"}):
            yield f"has a part of type {', '.join(map(shown, others))}; this version trains on text only"
        elif not all(isinstance(part.get("text"), str) for part in content):
            yield f"has content parts {shown(content)}; each must have a text"
    elif not isinstance(content, str):
        yield f"has the content {shown(content)}, not text or a list of parts"


def _tool_call_faults(calls: Any) -> Iterator[str]:
    if calls is None:
        yield "has tool_calls: None, on which chat templates fail; leave the key out"
        return
    if not isinstance(calls, list):
        yield f"has tool_calls {shown(calls)}, not a list"
        return
    for number, call in enumerate(calls, 1):
        if not isinstance(call, dict) or not call:
            yield f"has the empty or malformed tool call {shown(call)}"
            continue
        function = call.get("function", call)
        if not isinstance(function, dict) or not function.get("name"):
            yield f"has tool call {number} without a function name"
        elif function.get("arguments") is None:
            yield f"has tool call {number} ({function['name']}) without arguments; give {{}} for none"
        elif not isinstance(function["arguments"], dict | str):
            yield f"has tool call {number} ({function['name']}) with arguments that are neither a dict nor JSON text"


def _call_ids(messages: Sequence[Row]) -> list[Any]:
    """One item for each tool call that was made: its id, or ``None``."""
    made = [message.get("tool_calls") for message in messages if message.get("role") == "assistant"]
    return [call.get("id") for calls in made if isinstance(calls, list) for call in calls if isinstance(call, dict)]


def _orphans(messages: Sequence[Row], called: list[Any]) -> Iterator[str]:
    """Tool results that answer no call before them; ids are compared where both sides have one."""
    for message in messages:
        called = called + _call_ids([message])
        if message.get("role") != "tool":
            continue
        own = message.get("tool_call_id")
        if not called or (own is not None and None not in called and own not in called):
            answers = "" if own is None else f" for {own!r}"
            yield f"has an orphan tool result{answers}: no assistant message before it made that call"


def _ending_faults(messages: list[Row]) -> Iterator[str]:
    if not messages:
        return
    if messages[-1].get("role") == "assistant":
        yield (
            "ends with an assistant turn, after which TRL would begin a second one; "
            "cut it after the last user or tool turn"
        )
    last_user = next((message for message in reversed(messages) if message.get("role") == "user"), None)
    if last_user is not None and _is_blank(last_user.get("content")):
        yield "has a last user message that is blank"


def _is_blank(content: Any) -> bool:
    if isinstance(content, str):
        return not without_white_space(content)
    if not isinstance(content, list):
        return False  # None and other kinds are faults of their own
    return not any(
        part.get("type") != "text" or str(part.get("text") or "").strip() for part in content if isinstance(part, dict)
    )
