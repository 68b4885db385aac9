"""Reads numbers as people write them, with their units: 1,234.50 and 1.234,50, 3/4, 75 %, 1.5e3, 5 km; scores nothing.

Values are exact fractions, so that 1234567 and 1234568 differ and 0.1 + 0.2 is 0.3.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from .making import missing_extra

TAIL = 4000
"""Letters at the end of a text that are searched: an answer stands there, and the time stays small for any text."""
_BLANKS = "\u00a0\u202f\u2009'’"
_TOKEN = rf"\d+(?:[.,{_BLANKS}]\d+|[ ]\d{{3}}(?!\d))*|\.\d+"
_TIMES_TEN = r"\s*(?:[x×*·]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*[{(]?\s*(?P<ten>[+−-]?\d{1,3})\s*[)}]?"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}^])(?<!\^[{{(])[+−-])?(?P<money>[$€£¥]|\b(?:USD|EUR|GBP|JPY)\b)?\s?"
    r"(?<![\w^/⁄√])(?<!√[ (])(?<!\^[{(+−-])(?<!\^[{(][+−-])(?<![\w)]\*\*)"  # no name (x2), exponent, root, date
    rf"(?:(?P<whole>\d+)\s+(?P<top>\d+)\s*[/⁄]\s*(?P<under_top>\d+)(?![\d/⁄])"
    rf"|(?P<token>{_TOKEN})(?![.,]?\d)"
    rf"(?:[eE](?P<exp>[+−-]?\d{{1,3}})(?!\w)|{_TIMES_TEN}|\s*(?:\^|\*\*)\s*[{{(]?(?P<power>[+−-]?\d{{1,3}})(?!\d)[)}}]?"
    rf"|\s*[/⁄]\s*(?P<under>\d+(?:\.\d+)?)(?![\d/⁄]))?(?!(?:[eE]|\s*\^|\s*\*\*)[+-]?\d))"
    rf"(?!\s*(?:[√π]|\\pi\b))"  # 2π is not 2
    rf"(?:\s*(?P<scale>(?i:thousand|million|billion|trillion))\b|(?<=\d)(?P<short>k|[KMBT]|[mb]n|m|b|t)\b(?![*^/·]))?"
    rf"(?P<percent>\s*(?:%|percent\b|per cent\b))?"
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SHORT = {"k": 10**3, "m": 10**6, "mn": 10**6, "b": 10**9, "bn": 10**9, "t": 10**12}
_SAID = re.compile(r"\banswer[*_]*\s*(?:is|are|was|:|=)(?P<not>[*_\s]*not\b)?", re.IGNORECASE)
_CITED = re.compile(
    r"(\d[^\s\[]{0,20}(?:\s+(?!(?:is|are|was|equals)\b)[^\s\d\[=:]{1,30})?)\s*\[\d{1,3}(?:\s*[,;–-]\s*\d{1,3})*\]"
)
"""A number, at most one word, and then the mark of a source: 42 km [1]."""
_ROOT = re.compile(r"\\sqrt\s*(?:\[[^\]]*\])?\s*(?:\{[^{}]*\}|(?=\d))")
_MINUS = re.compile(r"(?<![\d)\w])(?<![\d)]\s)(?:minus|negative)\s+(?=[\d.$€£¥])", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d)|\{\s*(-?\d+)\s*\}\s*(\d))")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_UNIT = re.compile(
    r"\s*[-~]?\s*([A-Za-zµμΩ°$€£¥²³][^\s,;:!?()\[\]{}=<>|\"]*(?:\s+[A-Za-zµμΩ°²³^*/·][\w²³^*/·]*){0,2})(\s*\S)?"
)
_MONEY = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}
_NAMES = {
    **{"dollars": "dollar", "usd": "dollar", "euros": "euro", "eur": "euro", "gbp": "pound sterling", "jpy": "yen"},
    **{"yen": "yen", "dollar": "dollar", "euro": "euro"},
}
_NEVER = {"a", "am", "an", "and", "are", "as", "at", "be", "by", "he", "i", "is", "it", "me", "my", "no", "of", "on"}
_NEVER |= {"nd", "or", "pm", "rd", "so", "st", "th", "the", "to", "us", "was", "we"}
"""Words that pint knows as units (attometre, year, inch) and that are mostly none after a number."""


class Amount(NamedTuple):
    """A number and what it counts."""

    value: Fraction
    percent: bool = False
    """The value is as written: 75 for 75 %."""
    unit: str | None = None
    """As pint writes it, or a currency."""
    money: bool = False


def amounts(text: str, *, decimal: str = "auto") -> list[Amount]:
    """Every number in the end of a text, in order; ``decimal: ","`` reads 1.234 as a thousand and more.

    >>> [str(one.value) for one in amounts("-2, 1,234.50 and 1.234,50, 3/4 of 1e3")]
    ['-2', '2469/2', '2469/2', '3/4', '1000']
    """
    text = _tidied(text[-TAIL:])
    found = (_amounts_of(match, text, decimal) for match in _NUMBER.finditer(text))
    return [one for several in found for one in several]


def last_amount(text: str, *, decimal: str = "auto") -> Amount | None:
    """The number that follows the last "the answer is", else the last number."""
    text = text[-TAIL:]
    said = list(_SAID.finditer(text))
    after = amounts(text[said[-1].end() :], decimal=decimal) if said else []
    if said and said[-1]["not"]:  # "the answer is not 42 but 43"
        return after[1] if len(after) > 1 else None
    return after[0] if after else next(iter(amounts(text, decimal=decimal)[::-1]), None)


def same(given: Amount, right: Amount, *, tolerance: float, needs_unit: bool) -> bool:
    """Whether ``given`` is the amount ``right``, up to a share of it.

    A right amount without a unit is met in any, a percentage also as a share: 75 % by 0.75, and 75 by 75 %.
    """
    as_share = given.value / 100
    if right.percent:
        bare = given.unit is None and not given.percent
        values = [as_share] if given.percent else [given.value] if bare else []
        values += [as_share] if bare and not needs_unit else []
        return any(_close(value, right.value / 100, tolerance) for value in values)
    if right.unit is None:
        return any(_close(v, right.value, tolerance) for v in [given.value, *([as_share] if given.percent else [])])
    if given.unit is None or given.unit == right.unit or {given.unit, right.unit} == {"pound", "pound sterling"}:
        sound = given.unit is not None or not (needs_unit or given.percent)
        return sound and _close(given.value, right.value, tolerance)
    if given.money or right.money:
        return False
    converted = _converted(given, right)
    return converted is not None and _close(Fraction(converted), right.value, max(tolerance, 1e-9))


def _close(value: Fraction, right: Fraction, tolerance: float) -> bool:
    return abs(value - right) <= Fraction(tolerance) * (abs(right) or 1)


def _tidied(text: str) -> str:
    """A text with LaTeX and typographic ways to write numbers made plain."""
    text = re.sub(r"\$([^$\n]+)\$(?!\d)", r" \1 ", text.replace("{,}", ",").replace("\\$", " dollar "))
    text = _MINUS.sub("-", _ROOT.sub("√", _CITED.sub(r"\1", text)))
    text = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r" \1", text)
    text = _FRACTION.sub(lambda m: "/".join(group for group in m.groups() if group), text)
    text = re.sub(r"\\[,;:! ]", " ", text).replace("\\%", "%").replace("^{\\circ}", "°").replace("^\\circ", "°")
    text = re.sub(r"[⁺⁻]?[⁰¹²³⁴-⁹]+", lambda m: "^" + m.group().translate(_RAISED), text)
    return re.sub(r"[¼-¾⅐-⅞]", lambda m: " " + unicodedata.normalize("NFKC", m.group()), text)


def _amounts_of(match: re.Match[str], text: str, decimal: str) -> list[Amount]:
    values = _values(match, decimal)
    if match["sign"] and match["sign"][0] in "-−":
        values[:1] = [-value for value in values[:1]]
    times = _SCALES.get((match["scale"] or "").lower()) or _shortened(match)
    values[-1:] = [value * times for value in values[-1:]]
    found = [Amount(value) for value in values]
    if found:
        money = match["money"] or ""
        rest = text[match.start("short") if match["short"] and times == 1 else match.end() :]
        unit = None if match["percent"] else _MONEY.get(money) or _NAMES.get(money.lower()) or _unit_after(rest[:60])
        found[-1] = found[-1]._replace(percent=bool(match["percent"]), unit=unit, money=unit in _MONEY.values())
    return found


def _shortened(match: re.Match[str]) -> int:
    """What $5M and 5k are multiplied with; other letters right after a number are units (5m) unless it is money."""
    short = match["short"] or ""
    return _SHORT[short.lower()] if short == "k" or (short and match["money"]) else 1


def _values(match: re.Match[str], decimal: str) -> list[Fraction]:
    if match["whole"]:
        under = int(match["under_top"][:400])
        return [int(match["whole"][:400]) + Fraction(int(match["top"][:400]), under)] if under else []
    values = _read(match["token"], decimal)
    ten, power, under_text = match["exp"] or match["ten"], match["power"], match["under"]
    if not values:
        return []
    if ten:
        values[-1] *= Fraction(10) ** int(ten.replace("−", "-"))
    elif power:
        exponent = int(power.replace("−", "-"))
        if abs(values[-1]) > 10**6 or (not values[-1] and exponent < 0):
            return []
        values[-1] **= exponent
    elif under_text:
        under_value = Fraction(under_text[:400])
        return [*values[:-1], values[-1] / under_value] if under_value else []
    return values


def _read(token: str, decimal: str) -> list[Fraction]:
    """What digits with marks between them say: one number, a list of whole numbers, or nothing (a date, a version)."""
    if len(token) > 400:
        return []
    if re.fullmatch(rf"\d{{1,3}}([{_BLANKS} ])\d{{3}}(?:\1\d{{3}})*(?:[.,]\d+)?", token):
        return [Fraction(re.sub(rf"[{_BLANKS} ]", "", token).replace(",", "."))]
    if parts := [part for part in re.split(rf"[{_BLANKS} ]", token) if part][1:]:
        first = re.split(rf"[{_BLANKS} ]", token, maxsplit=1)[0]
        return [value for part in (first, *parts) for value in _read(part, decimal)]
    commas, dots = token.count(","), token.count(".")
    last = max(token, key=lambda mark: token.rfind(mark) if mark in ",." else -1)
    if commas and dots:
        other = "." if last == "," else ","
        grouped = rf"\d{{1,3}}(?:\{other}\d{{3}})+\{last}\d+"
        return [Fraction(token.replace(other, "").replace(last, "."))] if re.fullmatch(grouped, token) else []
    if not commas and not dots:
        return [Fraction(token)]
    grouped = rf"[1-9]\d{{0,2}}(?:\{last}\d{{3}})+"
    groups_by = "." if decimal == "," else ","
    if re.fullmatch(grouped, token) and (last == groups_by or commas + dots > 1):
        return [Fraction(token.replace(last, ""))]
    if commas + dots == 1:
        return [Fraction(token.replace(",", "."))]
    return [Fraction(part) for part in token.split(",")] if commas else []


def _unit_after(rest: str) -> str | None:
    match = _UNIT.match(rest)
    if not match:
        return None
    words = match[1].split()
    for count in range(len(words), 0, -1):
        name = " ".join(words[:count]).rstrip(".*'’")
        last = count == len(words) and not (match[2] or "").strip().isalnum()
        doubtful = _NEVER.intersection(word.lower() for word in words[:count])
        if doubtful or (name.lower() == "in" and not last):
            continue
        if unit := _unit(name):
            return unit
    return None


@lru_cache(maxsize=4096)
def _unit(name: str) -> str | None:
    """The unit ``name`` as pint writes it, or a currency; None where it is neither."""
    if money := _MONEY.get(name) or _NAMES.get(name.lower()):
        return money
    # nothing that could make pint calculate for long: no numbers but an exponent of one digit
    if not re.fullmatch(r"(?:[A-Za-zµμΩ°]+(?:\^-?\d|[²³])?[ */·]*)+", name) or len(name) > 40:
        return None
    for spelled in dict.fromkeys([name, name.lower() if len(name) > 1 else name]):
        try:
            return str(_registry().parse_units(spelled.replace("·", "*").replace(" per ", " / ")))
        except ImportError:
            raise
        except Exception:  # noqa: BLE001 - pint raises what its tokenizer happens to meet; then it is no unit
            continue
    return None


@lru_cache(maxsize=1)
def _registry() -> Any:
    try:
        import pint
    except ImportError as error:
        raise missing_extra("a number with a unit", error.name) from error
    return pint.UnitRegistry(autoconvert_offset_to_baseunit=True)


def _converted(given: Amount, right: Amount) -> float | None:
    import pint

    try:
        return float(_registry().Quantity(float(given.value), given.unit).to(right.unit).magnitude)
    except (pint.DimensionalityError, OverflowError):
        return None
