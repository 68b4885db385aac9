"""Masks what must not reach the disk, before it gets there: secrets always, personal data where it is asked for.

A value is replaced by a placeholder such as ``<SECRET_1>``, the same value by the same one throughout a conversation,
so that the text stays trainable. Long runs of base64 (images, sound) are not searched; no text, however made, takes
more than linear time.
"""

import base64
import codecs
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

from praison_agent_rl.errors import ConfigError, MissingExtra
from praison_agent_rl.transcripts.personal_patterns import PERSONAL_RULES
from praison_agent_rl.transcripts.secret_patterns import SECRET_RULES, Rule, may_hold_secrets, names_a_secret
from praison_agent_rl.transcripts.secret_values import is_basic, looks_random, worth_masking

Redactor = Callable[[str, dict[str, str]], str]
"""``(text, names) -> text``; ``names`` holds what was masked in this conversation before, and is added to."""

_SHORTEST_SECRET = 8
_ROLES = ("system", "developer", "user", "assistant", "tool")
_USUAL_KEYS = frozenset(("role", "content", "text", "type", "name", "id", "function", "arguments", "tool_call_id"))
"""Of chat messages: no secrets by their names, and most of what is written."""
_KEYS_OF_TEXTS = _USUAL_KEYS - {"name"}
"""None of which says what another one holds."""
_NAMES_OF_NAMES = ("name", "Name", "key", "Key", "variable")
_INNER_NAMES = frozenset(("value", "values", "secret", "secretvalue", "plaintext", "raw", "current", "default"))
_HEADERS = frozenset(("authorization", "proxy-authorization", "cookie", "set-cookie"))
_SCHEME = re.compile(r"(?i:bearer|basic|token|apikey|digest|negotiate)\s+")
_BEGINNING = 4096
"""Characters of base64, a multiple of 4."""
_RUN = re.compile(r"[A-Za-z0-9+/_-]*")
_STEP = 1024
_KEPT = 64
_PRESIDIO_MODEL = "en_core_web_lg"  # that of presidio_analyzer/conf/default.yaml
_EXTRA = 'redact="presidio" needs presidio: pip install "praison-agent-rl[presidio]"'


def find_redactor(spec: Any = None) -> Redactor:
    """The redactor that a user names; secrets are masked by each of them, before anything else.

    ``None`` masks secrets, ``"personal"`` e-mail addresses, phone and card numbers, IBANs and IP addresses too,
    ``"presidio"`` whatever presidio finds; a callable or its ``module:function`` is the user's own ``(text) -> text``
    or ``(text, names) -> text``.

    Raises:
        ConfigError: there is no such redactor.
        MissingExtra: presidio is not installed.
    """
    if spec is None:
        return mask_secrets
    if spec == "personal":
        return _one_after_the_other(mask_secrets, mask_personal)
    if spec == "presidio":
        return _one_after_the_other(mask_secrets, _presidio())
    if callable(spec):
        return _one_after_the_other(mask_secrets, _with_names(spec))
    return _one_after_the_other(mask_secrets, _with_names(_imported(spec)))


def mask_secrets(text: str, names: dict[str, str]) -> str:
    """``text`` without keys of the usual providers, tokens, passwords and private keys."""
    if len(text) < _STEP and not may_hold_secrets(text):
        return text
    return text if len(text) < _SHORTEST_SECRET else _mask(SECRET_RULES, text, names)


def mask_personal(text: str, names: dict[str, str]) -> str:
    """``text`` without e-mail addresses, phone and card numbers, IBANs and IP addresses."""
    return _mask(PERSONAL_RULES, text, names)


def redact_value(value: Any, redact: Redactor, names: dict[str, str]) -> Any:
    """A plain JSON value in which each text has gone through ``redact``."""
    kind = type(value)
    if kind is str:
        return redact(value, names)
    if isinstance(value, list):
        return [redact_value(item, redact, names) for item in value]
    if kind is not dict:
        return value
    if value.keys() <= _KEYS_OF_TEXTS:
        return {
            key: item
            if key == "role" and item in _ROLES
            else redact(item, names)
            if type(item) is str
            else redact_value(item, redact, names)
            for key, item in value.items()
        }
    if "$bytes" in value:
        return _redact_bytes(value, redact, names)
    if type(pairs := value.get("$dict")) is list:
        return {"$dict": [[redact_value(k, redact, names), _redact_item(k, v, redact, names)] for k, v in pairs]}
    named = any(names_a_secret(value[key]) for key in _NAMES_OF_NAMES if type(value.get(key)) is str)
    masked = {}
    for key, item in value.items():
        if named and key.lower() in _INNER_NAMES:
            masked[key] = _redact_secret(item, redact, names)
        elif key in _USUAL_KEYS:
            masked[key] = item if key == "role" and item in _ROLES else redact_value(item, redact, names)
        else:
            masked[_redact_key(key, redact, names)] = _redact_item(key, item, redact, names)
    return masked


def placeholder(found: str, kind: str, names: dict[str, str]) -> str:
    """What stands for ``found`` in this conversation: ``<EMAIL_1>`` for the first address, ``<EMAIL_2>`` for the next.

    >>> names = {}
    >>> [placeholder(found, "EMAIL", names) for found in ("a@b.co", "c@d.co", "a@b.co")]
    ['<EMAIL_1>', '<EMAIL_2>', '<EMAIL_1>']
    """
    known = names.get(found)
    if known is None:
        last = next((name for name in reversed(names.values()) if name.startswith(f"<{kind}_")), f"<{kind}_0>")
        known = names[found] = f"<{kind}_{int(last[len(kind) + 2 : -1]) + 1}>"
    return known


def _redact_item(key: Any, value: Any, redact: Redactor, names: dict[str, str]) -> Any:
    """The value of ``key``: under a name such as ``password``, it is a secret whatever it looks like."""
    if type(key) is str:
        if names_a_secret(key):
            return _redact_secret(value, redact, names, several=key[-1:] in "sS")
        if key.lower() in _HEADERS:
            return _redact_header(value, redact, names)
        if key.lower() == "auth":
            return _redact_auth(value, redact, names)
    return redact_value(value, redact, names)


def _redact_secret(value: Any, redact: Redactor, names: dict[str, str], *, several: bool = False) -> Any:
    """A secret in any form: a text, a number that is no count of ``several``, bytes, and those in lists and dicts."""
    kind = type(value)
    if kind is str:
        return placeholder(value, "SECRET", names) if worth_masking(value) else redact(value, names)
    if kind is int or kind is float:
        return value if several or len(str(value)) < 4 else placeholder(str(value), "SECRET", names)
    if kind is list:
        return [_redact_secret(item, redact, names, several=several) for item in value]
    if kind is not dict:
        return value
    if "$bytes" in value:
        held = str(value["$bytes"])
        return {"$bytes": base64.b64encode(placeholder(held, "SECRET", names).encode()).decode()} if held else value
    for mark in ("$int", "$float"):
        if mark in value:
            return placeholder(str(value[mark]), "SECRET", names)
    masked = {}
    for key, item in value.items():
        if key.lower() in _INNER_NAMES:
            masked[key] = _redact_secret(item, redact, names)
        else:
            masked[key] = redact_value({key: item}, redact, names).popitem()[1]
    return masked


def _redact_header(value: Any, redact: Redactor, names: dict[str, str]) -> Any:
    """What ``Authorization`` or ``Cookie`` holds, less the scheme."""
    if type(value) is list:
        return [_redact_header(item, redact, names) for item in value]
    if type(value) is not str:
        return redact_value(value, redact, names)
    scheme = _SCHEME.match(value)
    rest = value[scheme.end() :] if scheme else value
    return value[: len(value) - len(rest)] + _redact_secret(rest, redact, names)


def _redact_auth(value: Any, redact: Redactor, names: dict[str, str]) -> Any:
    """User and password, as a pair or in base64."""
    if type(value) is list and len(value) == 2 and all(type(item) is str for item in value):
        return [redact(value[0], names), _redact_secret(value[1], redact, names)]
    if type(value) is str and len(value) >= 8 and (is_basic(value) or looks_random(value)):
        return _redact_secret(value, redact, names)
    return redact_value(value, redact, names)


def _redact_key(key: str, redact: Redactor, names: dict[str, str]) -> str:
    """Keys can be data too (an address in a tool's result); the words of an API cannot be secrets."""
    return key if len(key) < 16 and key.isidentifier() else redact(key, names)


def _redact_bytes(value: dict[str, Any], redact: Redactor, names: dict[str, str]) -> Any:
    """Bytes that are text are masked as such; others (images, sound) are kept as they are."""
    held = value["$bytes"]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(base64.b64decode(held[:_BEGINNING]))  # most images end here
        text = base64.b64decode(held).decode("utf-8")
    except ValueError:
        return value
    return {"$bytes": base64.b64encode(redact(text, names).encode("utf-8")).decode("ascii")}


# --- texts ----------------------------------------------------------------------------------------------------------


def _mask(rules: tuple[Rule, ...], text: str, names: dict[str, str]) -> str:
    text, aside = _put_aside(text)
    lowered = _lower(text)
    for rule in rules:
        if rule.cues and not any(map(lowered.__contains__, rule.cues)):
            continue
        spans = list(rule.find(text, lowered))
        if spans:
            text = _replaced(text, spans, rule, aside, names)
            lowered = _lower(text)
    return _put_back(text, aside)


def _replaced(text: str, spans: list[tuple[int, int]], rule: Rule, aside: dict[str, str], names: dict[str, str]) -> str:
    pieces, done = [], 0
    for start, end in spans:
        found = rule.same(_put_back(text[start:end], aside))
        pieces += [text[done:start], placeholder(found, rule.kind, names)]
        done = end
    return "".join([*pieces, text[done:]])


def _lower(text: str) -> str:
    """In lower case and of the same length: one letter alone becomes two."""
    lowered = text.lower()
    return lowered if len(lowered) == len(text) else text.replace("\u0130", "i").lower()


def _put_aside(text: str) -> tuple[str, dict[str, str]]:
    """``text`` with a stand-in for the middle of each long run of base64: images and sound are not searched.

    Beginning and end of a run stay, and the stand-in is of its kind, so that rules see a value of another length. A
    run is looked for at each step alone; it spans one if it is twice as long.
    """
    aside: dict[str, str] = {}
    if len(text) < 2 * _STEP:
        return text, aside
    pieces, place, done, mark = [], 0, 0, ""
    while place < len(text):
        end = _RUN.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing too
        if end - place >= 2 * _STEP:
            mark = mark or _unused(text)
            start = place + _KEPT
            stop = end - _KEPT - (end - _KEPT - start) % 4  # base64 is read by fours
            stand_in = f"{mark}{len(aside):08d}"
            aside[stand_in] = text[start:stop]
            pieces += [text[done:start], stand_in]
            done = stop
        place = max(end, place + _STEP)
    return "".join([*pieces, text[done:]]), aside


def _unused(text: str) -> str:
    marks = (f"Aside{number}x".ljust(12, "x") for number in itertools.count())
    return next(mark for mark in marks if mark not in text)


def _put_back(text: str, aside: dict[str, str]) -> str:
    if not aside:
        return text
    mark = next(iter(aside))[:-8]
    return re.sub(mark + r"\d{8}", lambda match: aside[match[0]], text) if mark in text else text


# --- redactors of others --------------------------------------------------------------------------------------------


def _one_after_the_other(first: Redactor, second: Redactor) -> Redactor:
    return lambda text, names: second(first(text, names), names)


def _with_names(function: Callable[..., Any]) -> Redactor:
    """``function`` as a redactor, whether or not it asks for the names."""
    try:
        inspect.signature(function).bind("text", {})
        takes_names = True
    except TypeError:
        takes_names = False
    except ValueError:  # a builtin, whose signature cannot be read
        takes_names = False

    def redact(text: str, names: dict[str, str]) -> str:
        masked = function(text, names) if takes_names else function(text)
        if not isinstance(masked, str):
            raise TypeError(f"the redactor {function!r} gave {type(masked).__name__} for a text; it has to give a text")
        return masked

    return redact


def _imported(spec: Any) -> Callable[..., Any]:
    module, _, path = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if not module or not path:
        raise ConfigError(
            f"redact={spec!r} is no redactor; give 'personal', 'presidio', a function or its 'module:function'"
        )
    try:
        found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"redact={spec!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"redact={spec!r} names a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _presidio() -> Redactor:
    try:
        analyzer, spacy = importlib.import_module("presidio_analyzer"), importlib.import_module("spacy.util")
    except ImportError as error:
        raise MissingExtra(_EXTRA) from error
    if not spacy.is_package(_PRESIDIO_MODEL):  # presidio would download it, in the middle of the user's program
        raise MissingExtra(
            f'redact="presidio" needs the language model {_PRESIDIO_MODEL!r} beside it: '
            f"python -m spacy download {_PRESIDIO_MODEL}"
        )
    engine = analyzer.AnalyzerEngine()

    def redact(text: str, names: dict[str, str]) -> str:
        chosen: list[Any] = []
        # of findings that overlap (an address, and the host within it) the surest and longest masks most
        for found in sorted(engine.analyze(text=text, language="en"), key=lambda f: (-f.score, f.start - f.end)):
            if all(found.end <= other.start or other.end <= found.start for other in chosen):
                chosen.append(found)
        for found in sorted(chosen, key=lambda f: -f.start):  # from the end, so that places stay right
            name = placeholder(text[found.start : found.end], found.entity_type, names)
            text = text[: found.start] + name + text[found.end :]
        return text

    return redact
