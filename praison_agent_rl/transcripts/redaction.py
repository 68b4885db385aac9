"""Masks what must not reach the disk, before it gets there: secrets always, personal data where it is asked for.

A value is replaced by a placeholder such as ``<SECRET_1>``, the same value by the same one throughout a conversation,
so that the text stays trainable. Each rule names hints, one of which is in every text that the rule can change, so that
most texts cost a few substring searches. Patterns are bounded or begin at a boundary: no text, however made, takes more
than linear time.
"""

import base64
import functools
import importlib
import inspect
import ipaddress
import re
from collections.abc import Callable
from typing import Any

from praison_agent_rl.errors import ConfigError, MissingExtra
from praison_agent_rl.transcripts.secret_patterns import Rule, names_a_secret, secret_rules, starts, worth_masking

Redactor = Callable[[str, dict[str, str]], str]
"""``(text, names) -> text``; ``names`` holds what was masked in this conversation before, and is added to."""

_SHORTEST_SECRET = 8
_ROLES = ("system", "developer", "user", "assistant", "tool")
_USUAL_KEYS = frozenset(("role", "content", "text", "type", "name", "id", "function", "arguments", "tool_call_id"))
"""Of chat messages: no secrets by their names, and most of what is written."""
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
    if len(text) < _SHORTEST_SECRET:
        return text
    lowered = text.lower()
    return _apply(secret_rules(text, lowered), text, lowered, names)


def mask_personal(text: str, names: dict[str, str]) -> str:
    """``text`` without e-mail addresses, phone and card numbers, IBANs and IP addresses."""
    return _apply(_PERSONAL_RULES, text, text.lower(), names)


def redact_value(value: Any, redact: Redactor, names: dict[str, str]) -> Any:
    """A plain JSON value in which each text has gone through ``redact``."""
    kind = type(value)
    if kind is str:
        return redact(value, names)
    if kind is list:
        return [redact_value(item, redact, names) for item in value]
    if kind is not dict:
        return value
    if "$bytes" in value:
        return _redact_bytes(value, redact, names)
    masked = {}
    for key, item in value.items():
        if key in _USUAL_KEYS:
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


def _redact_item(key: str, value: Any, redact: Redactor, names: dict[str, str]) -> Any:
    """The value of ``key``: under a name such as ``password``, a text is a secret whatever it looks like."""
    if type(value) is str and names_a_secret(key) and worth_masking(value):
        return placeholder(value, "SECRET", names)
    return redact_value(value, redact, names)


def _redact_key(key: str, redact: Redactor, names: dict[str, str]) -> str:
    """Keys can be data too (an address in a tool's result); the words of an API cannot be secrets."""
    return key if len(key) < 16 and key.isidentifier() else redact(key, names)


def _redact_bytes(value: dict[str, Any], redact: Redactor, names: dict[str, str]) -> Any:
    """Bytes that are text are masked as such; others (images, sound) are kept as they are."""
    try:
        text = base64.b64decode(value["$bytes"]).decode("utf-8")
    except ValueError:
        return value
    return {"$bytes": base64.b64encode(redact(text, names).encode("utf-8")).decode("ascii")}


def _apply(rules: tuple[Rule, ...], text: str, lowered: str, names: dict[str, str]) -> str:
    for rule in rules:
        for hint in rule.hints:
            if hint in lowered:
                text = rule.pattern.sub(functools.partial(_masked, rule=rule, names=names), text)
                break
    return text


def _masked(match: "re.Match[str]", rule: Rule, names: dict[str, str]) -> str:
    """The whole match with its named group replaced, or as it is where the rule does not believe it."""
    if not rule.believes(match):
        return match[0]
    group = match.lastgroup or 0
    start, end = match.start(group) - match.start(), match.end(group) - match.start()
    return match[0][:start] + placeholder(rule.same(match[group]), rule.kind, names) + match[0][end:]


# --- personal data --------------------------------------------------------------------------------------------------


def _only_digits(text: str) -> str:
    return re.sub(r"\D", "", text)


def _is_card(match: "re.Match[str]") -> bool:
    """Luhn's checksum (ISO/IEC 7812-1, annex B): every second digit from the right doubled, its digits added."""
    digits = [int(digit) for digit in reversed(_only_digits(match[0]))]
    total = sum(digits[::2]) + sum(sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return total % 10 == 0 and digits[-1] in (2, 3, 4, 5, 6) and len(set(digits)) > 1


def _is_iban(match: "re.Match[str]") -> bool:
    """ISO 13616: country and checksum moved to the end, letters as 10 to 35, the remainder by 97 is 1."""
    text = match[0].replace(" ", "")
    return 15 <= len(text) <= 34 and int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def _is_foreign_address(match: "re.Match[str]") -> bool:
    """An address that can lead to a person: no loopback, and a real one."""
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


_DIGITS = tuple("0123456789")
_PERSONAL_RULES = (
    Rule(
        "EMAIL",
        ("@",),
        starts(r"\w.+%-") + r"[\w+%-][\w.+%-]{0,63}@[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}\.){1,8}[A-Za-z]{2,24}(?![\w-])",
        same=str.lower,
    ),
    Rule("IBAN", _DIGITS, starts(r"\w") + r"[A-Z]{2}\d\d(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)", _is_iban),
    Rule("CARD", _DIGITS, starts(r"\w.-") + r"\d(?:[ -]?\d){12,18}(?![\w-])", _is_card, same=_only_digits),
    Rule(
        "PHONE",
        _DIGITS,
        starts(r"\w+.-") + r"(?:\+\d(?:[ ()./-]{0,2}\d){7,14}"  # international
        r"|(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}"  # North America
        r"|0\d{2,4}[ /-]\d{3,4}[ -]?\d{2,5})(?![\w-])",  # trunk prefix, as in Europe
        same=_only_digits,
    ),
    Rule("IP", (".",), starts(r"\w.") + r"(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", _is_foreign_address),
    Rule("IP", (":",), starts(r"\w:.") + r"(?=[A-Fa-f:]{0,39}\d)[0-9A-Fa-f:]{6,39}(?![\w:])", _is_foreign_address),
)


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
