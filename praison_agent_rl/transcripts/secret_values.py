"""Judges what a value looks like: whether it can be a secret, or is a word, a placeholder, a path, code or a hash."""

import base64
import re
from itertools import pairwise

_NO_SECRETS = {
    "string", "str", "text", "bytes", "object", "integer", "number", "none", "null", "undefined", "true", "false",
    "yes", "required", "optional", "hidden", "redacted", "example", "changeme", "password", "passwd", "secret", "token",
    "bearer", "basic", "sha1", "sha256", "sha512", "md5", "base64", "utf-8", "utf8", "oauth2",
}  # fmt: skip
_REFERENCE = re.compile(
    r"\$(?:[A-Z_][A-Z0-9_]*|[A-Za-z_]+|\(.*\)|env:\w+)"  # $NAME, $(command), $env:NAME
    r"|\$?\{.*\}"  # ${NAME}, {name}, {{ name }}
    r"|<(?:[^<>\d]*|[^<>]*\s[^<>]*|[A-Z][A-Z_]*_\d+)>|\[(?:[^\[\]\d]*|[A-Z][A-Z_]*_\d+)\]"  # <your-key>, [hidden]
    r"|%\w+%|%\(\w+\)s|%[a-z]"
    r"|(?:(?:os|process|Deno|import\.meta)\.)?env(?:iron)?(?:\.\w+|[\[(].*[\])])+|os\.\w+\(.*\)"
    r"|(.)\1*",  # ***
    re.DOTALL,
)
_PLACEHOLDER = re.compile(
    r"(?i)(?:^|[-_ ])your[-_ ]|[-_ ]here$|^.{0,12}(?:\.\.\.|\u2026)$|^.{0,12}x{6,}$|change[-_ ]?me|placeholder"
)
_ATTRIBUTE = re.compile(r"([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)+$")
_ROOTS = frozenset(("self", "this", "cls", "os", "env", "process", "settings", "config", "args", "request", "app"))
_HEX = re.compile(r"[0-9A-Fa-f]+")
_DIGIT, _LETTER = re.compile(r"\d"), re.compile(r"[^\W\d_]")


def worth_masking(value: str) -> bool:
    """Whether the value of something called a password can be one: no type, placeholder, reference or explanation.

    >>> [worth_masking(value) for value in ("pa$$w0rd", "$PASSWORD", "%S3cretPw", "%NAME%", "your-key-here", "***")]
    [True, False, True, False, False, False]
    """
    if len(value) < 3 or value.lower() in _NO_SECRETS or is_reference(value) or is_placeholder(value):
        return False
    if " " not in value or _DIGIT.search(value):
        return True
    # "the password of the user" explains; "correct horse battery staple" is one
    return value.count(" ") < 5 and not re.search("password|secret|token|key", value, re.IGNORECASE)


def is_reference(value: str) -> bool:
    """Whether the whole of it says where the value is to be found, and no part of it is the value."""
    return _REFERENCE.fullmatch(value) is not None


def is_placeholder(value: str) -> bool:
    """Whether it asks for a value to be put here, as ``your-api-key-here`` does."""
    return len(value) < 100 and _PLACEHOLDER.search(value) is not None and not looks_random(value)


def looks_random(value: str) -> bool:
    """Whether one piece of it is too long, or too mixed, for a word: ``sk-learn-contrib`` is made of words."""
    pieces = re.split(r"[-_./:~]", value)
    return any(len(piece) >= 20 or (len(piece) >= 12 and _is_mixed(piece)) for piece in pieces)


def has_letters_and_digits(value: str) -> bool:
    """Whether it is neither a word nor a number."""
    return _DIGIT.search(value) is not None and _LETTER.search(value) is not None


def is_strong(value: str) -> bool:
    """Whether it has capitals, small letters and digits, as what people call strong passwords have."""
    return len(value) >= 8 and bool(re.search("[a-z]", value) and re.search("[A-Z]", value) and _DIGIT.search(value))


def is_expression(value: str, after: str) -> bool:
    """Whether it is code that gets the value from elsewhere: a call, an index, an attribute; ``after`` follows it."""
    if after in ("(", "["):
        return True
    match = _ATTRIBUTE.match(value)
    return match is not None and (match[1] in _ROOTS or not looks_random(value))


def is_path(value: str) -> bool:
    """Whether it begins as paths and options do; one in many keys does too, and has no further part."""
    return value[0] in "/.~-" and not (value.count("/") < 2 and looks_random(value))


def is_basic(value: str) -> bool:
    """Whether it is user and password in base64, as RFC 7617 has it."""
    try:
        return b":" in base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except ValueError:
        return False


def is_aws_secret(value: str) -> bool:
    """Whether 40 characters of base64 are 30 random bytes and no hash and no path.

    Of random neighbours 65 in 100 differ in kind (capital, small letter, digit, sign): 25 of 39, with a standard
    deviation of 3. Words joined by slashes or capitals have half as many.
    """
    kinds = [0 if c.islower() else 1 if c.isupper() else 2 if c.isdigit() else 3 for c in value]
    changes = sum(one != other for one, other in pairwise(kinds))
    return not _HEX.fullmatch(value) and {0, 1, 2} <= set(kinds) and changes >= 14


def _is_mixed(value: str) -> bool:
    return _DIGIT.search(value) is not None or (value != value.lower() and value[1:] != value[1:].lower())
