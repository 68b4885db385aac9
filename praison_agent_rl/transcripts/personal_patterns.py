"""What personal data look like: the rules by which addresses and numbers of persons are told from other numbers."""

import ipaddress
import re
from collections.abc import Callable

from praison_agent_rl.transcripts.secret_patterns import Match, Rule, Spans, starts

_LOCAL_PART = re.compile(r"(?<![\w.+%-])[\w+%-][\w.+%-]{0,63}$")
_AFTER_AT = re.compile(r"@[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}\.){1,8}[A-Za-z]{2,24}(?![\w-])")
_GROUPINGS = ((4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 4, 4, 3))
_VERSION = re.compile(r"(?i)(?:\bv|version|release|revision|build|section|chapter|[=<>~^]=|[-@])[\s:=]{0,3}$")
_UNIT = re.compile(
    r"\s?(?:%|[nmµu]?s|secs?|seconds?|min(?:utes)?|h|hours?|[kmc]?m|k?g|[kmg]i?b|bytes?|px|items?|rows?|tokens?|usd|eur|€)\b",
    re.IGNORECASE,
)


def only_digits(text: str) -> str:
    """The number without what groups it."""
    return re.sub(r"\D", "", text)


def _emails(text: str, lowered: str) -> Spans:
    place, done = text.find("@"), 0
    while place >= 0:
        domain = _AFTER_AT.match(text, place)
        local = domain and _LOCAL_PART.search(text[max(done, place - 65) : place])
        if domain and local:
            start = place - len(local[0])
            if text[max(0, start - 1) : start + 1] in ("\\n", "\\r", "\\t"):
                start += 1
            if start < place:
                yield start, domain.end()
                done = domain.end()
        place = text.find("@", place + 1)


def _is_card(match: Match) -> bool:
    """Whether an issuer gives such numbers (ISO/IEC 7812-1), grouped so, and with Luhn's checksum (its annex B).

    Every second digit from the right is doubled, and its digits are added.
    """
    groups = tuple(len(group) for group in re.split("[ -]", match[0]))
    number = only_digits(match[0])
    digits = [int(digit) for digit in reversed(number)]
    total = sum(digits[::2]) + sum(sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return (len(groups) == 1 or groups in _GROUPINGS) and total % 10 == 0 and _ISSUERS.fullmatch(number) is not None


_ISSUERS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"  # Visa
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"  # Mastercard
    r"|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|35(?:2[89]|[3-8]\d)\d{12}"  # American Express, Diners Club, JCB
    r"|(?:6011|64[4-9]\d|65\d\d|62\d\d)\d{12,15}"  # Discover, UnionPay
    r"|(?:5018|5020|5038|5893|6304|6759|676[1-3])\d{8,15}"  # Maestro
)


def _is_iban(match: Match) -> bool:
    """ISO 13616: country and checksum moved to the end, letters as 10 to 35, the remainder by 97 is 1."""
    text = match[0].replace(" ", "")
    return 15 <= len(text) <= 34 and int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def _is_phone(match: Match) -> bool:
    return match[0][0] == "+" or not _UNIT.match(match.string, match.end())


def _is_foreign_address(match: Match) -> bool:
    """An address that can lead to a person: no loopback, no version of a program, and a real one."""
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return False
    before = match.string[max(0, match.start() - 12) : match.start()]
    return not (address.is_loopback or address.is_unspecified or (address.version == 4 and _VERSION.search(before)))


def _after(first: str, inside: str) -> str:
    """``first`` at a place as of `starts`: put first, a set of characters lets the search skip all others."""
    return rf"{first}(?:(?<![{inside}]{first})|(?<=\\[nrt]{first}))"


def _everywhere(pattern: str, believes: Callable[[Match], bool]) -> Callable[[str, str], Spans]:
    compiled = re.compile(pattern)
    return lambda text, lowered: (match.span() for match in compiled.finditer(text) if believes(match))


_TWO_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
_IPV6 = _everywhere(
    starts(r"\w:.") + r"(?=[A-Fa-f:]{0,39}\d)[0-9A-Fa-f:]{6,39}(?![\w:])",
    _is_foreign_address,
)


def _ipv6(text: str, lowered: str) -> Spans:
    return _IPV6(text, lowered) if _TWO_COLONS.search(text) else iter(())


PERSONAL_RULES = (
    Rule("EMAIL", _emails, same=str.lower),
    Rule(
        "IBAN",
        _everywhere(_after("[A-Z]", r"\w") + r"[A-Z]\d\d(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)", _is_iban),
    ),
    Rule("CARD", _everywhere(_after("[0-9]", r"\w.-") + r"(?:[ -]?\d){12,18}(?![\w-])", _is_card), same=only_digits),
    Rule(
        "PHONE",
        _everywhere(
            _after("[+(0-9]", r"\w+.-") + r"(?:(?<=\+)\d(?:[ ()./-]{0,2}\d){7,14}"  # international
            r"|(?:(?<=\()\d{3}\) ?|(?<=\d)\d\d[ .-])\d{3}[ .-]\d{4}"  # North America
            r"|(?<=0)\d{2,4}[ /-]\d{3,4}[ -]?\d{2,5})(?![\w-])",  # trunk prefix, as in Europe
            _is_phone,
        ),
        same=only_digits,
    ),
    Rule(
        "IP",
        _everywhere(_after("[0-9]", r"\w.") + r"\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?![\w]|\.\d)", _is_foreign_address),
    ),
    Rule("IP", _ipv6),
)
