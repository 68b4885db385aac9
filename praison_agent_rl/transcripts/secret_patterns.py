"""Where secrets stand: the rules that find them in a text; none of them changes a text.

A rule looks only where a cue stands that it cannot do without, found by substring search, so that a text without cues
costs a few such searches. From a cue on, a pattern is bounded or stops at what the next cue needs: no text, however
made, takes more than linear time. Values have no bound.
"""

import functools
import re
from collections.abc import Callable, Iterator

from praison_agent_rl.transcripts.secret_keys import LONG_WORD, provider_keys
from praison_agent_rl.transcripts.secret_values import (
    has_letters_and_digits,
    is_aws_secret,
    is_basic,
    is_expression,
    is_path,
    is_reference,
    is_strong,
    looks_random,
    worth_masking,
)

Spans = Iterator[tuple[int, int]]
Match = re.Match[str]


class Rule:
    """One kind of value: where it is found, and which of its forms are one value."""

    def __init__(
        self,
        kind: str,
        find: Callable[[str, str], Spans],
        *,
        cues: tuple[str, ...] = (),
        same: Callable[[str], str] = lambda found: found,
    ) -> None:
        self.kind = kind
        self.find = find
        """``(text, the same in lower case) -> (start, end)`` of each value, in order and apart from each other."""
        self.cues = cues
        """It finds nothing in a text without any of these; without cues, it may find something in each."""
        self.same = same
        """Forms of one value (upper and lower case, with and without blanks) become one."""


def places(cues: tuple[str, ...], lowered: str) -> Iterator[int]:
    """Where any of the cues stands, in order."""
    found = []
    for cue in cues:
        place = lowered.find(cue)
        while place >= 0:
            found.append(place)
            place = lowered.find(cue, place + 1)
    return iter(sorted(found))


def _cued(cues: tuple[str, ...], pattern: str, believes: Callable[[Match], bool] = lambda match: True) -> Rule:
    """A rule that tries ``pattern`` where a cue stands; its named group, or all of it, is the value."""
    compiled = re.compile(pattern)

    def find(text: str, lowered: str) -> Spans:
        done = 0
        for place in places(cues, lowered):
            match = compiled.match(text, place) if place >= done else None
            if match and believes(match):
                done = match.end()
                yield match.span(match.lastgroup or 0)

    return Rule("SECRET", find, cues=cues)


def starts(inside: str) -> str:
    r"""A pattern for a place at which none of the characters ``inside`` a value stands before.

    In JSON within a text a new line is ``\n``; its letter belongs to no value.
    """
    return rf"(?:(?<![{inside}])(?!(?<=\\)[nrt])|(?<=\\[nrt]))"


def found(match: Match) -> str:
    """The value that a pattern with a named group has found."""
    return match[match.lastgroup or 0]


# --- secrets that are told by a name before them --------------------------------------------------------------------

_PASSWORDS = ("password", "passwort", "passwd", "passphrase", "passcode", "pass", "pwd")
_STEMS = ("pass", "pwd", "secret", "token", "key", "sig=", "signature=")
_WHOSE_KEY = (
    r"(?:api|access|account|auth|private|signing|encryption|subscription|licen[cs]e|storage|shared|master|admin"
    r"|consumer|client|service|secret|ssh|deploy|webhook|jwt|hmac)"
)
_WHOSE_TOKEN = (
    r"(?:access|auth|refresh|bearer|session|id|api|bot|app|security|github|gitlab|slack|hub|hf|personal|deploy"
    r"|discord|telegram|npm|service|user|client|secret|csrf|jwt|private)"
)
_OWNERS = {
    "key": re.compile(_WHOSE_KEY + r"(?P<blank>[ _-]?)$"),
    "token": re.compile(_WHOSE_TOKEN + r"(?P<blank>[ _-]?)$"),
}
_PUBLIC = re.compile(r"(?:public|publishable|primary|foreign|sort|partition|cache|hot|shortcut|index)[ _-]?$")
_SUFFIX = re.compile(r"_*s?(?:_?(?:prod(?:uction)?|dev|test|staging|live|old|new|base|v?\d{1,2}))?_*")
_NOT_ITSELF = re.compile(
    r"(?![_s\d]|$)|.*_(?:id|name|url|uri|file|path|type|ttl|count|limit|size|per|len|length|alg)(?:_|s?$)"
)
"""What follows the name of a secret in the name of what only belongs to it, as in ``API_KEY_ID``."""
_NAMED = re.compile(
    r"(?P<name>pass(?:word|wort|wd|phrase|code)?|pwd|secret(?:[ _-]?access)?(?:[ _-]?key)?|token|key|sig(?:nature)?)"
    r"(?P<suffix>[a-z0-9_]{0,24})[\"'\\\]*`]{0,34}(?P<gap>\s{0,4})"
    r"(?P<sign>:\s?(?:optional\[)?(?:\w{1,20}\.)?(?:str|string|bytes|secretstr|text|any)\]?(?:\s?\|\s?none)?\s?=(?!=)"
    r"|=>|:=|={1,2}|[:\uff1a\uff1d]|>|is:?\s|(?:,\s{0,3})?\\{0,15}[\"']?value\\{0,15}[\"']?\s{0,2}[:=]|)"
    r"\*{0,2}\s{0,4}(?:[bfru]{1,2}(?=\\{0,15}[\"']))?(?P<slashes>\\{0,15})(?P<quote>\"\"\"|[\"'`]|)"
)
"""A name, what stands between, and the quotation mark: of a text in lower case."""
_BARE = re.compile(
    r"(?:[^\s\"'`,;&<>(){}\[\]\\|]"
    r"|[,;&](?![\s,;&\\\"'`\])}|]|$|[\w.-]{1,40}[\"']?[:=]|\w{1,20} \w{1,20}=)"  # no list goes on with another name
    r"|'(?=\w)|\\(?![nrtu\"'\\/]|$))*"
)
_NETRC = re.compile(r"(?:login|user)\s+\S{1,60}\s+$")
_LONG = 256
"""Characters; of what is so long and no secret, no part is one: or each name in it would read it anew."""
_WORD = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"


def _assigned(text: str, lowered: str) -> Spans:
    """The values of ``password: x``, ``api_key="x"``, ``--token x1``, ``<password>x</password>`` and their like."""
    done = 0
    for place in places(_STEMS, lowered):
        match = _NAMED.match(lowered, place) if place >= done else None
        demand = _demand(match, text) if match else None
        if match is None or demand is None:
            continue
        start = match.end()
        end = _closing(match, text) if match["quote"] else None
        if end is not None:
            believed = _believes_quoted(text[start:end], demand)
        else:
            value = _BARE.match(text, start)[0].rstrip(".,:;?*")  # type: ignore[index]  # it matches nothing too
            end = start + len(value)
            believed = _believes_bare(value, demand, text[end : end + 1], match["name"])
        if believed:
            yield start, end
        if believed or end - start > _LONG:
            done = end


def _closing(match: Match, text: str) -> int | None:
    r"""Where the quotation ends that the match opens: at the mark with as many backslashes, as JSON in JSON has it.

    Of a mark in a quotation at depth d (within d others) the 2^d - 1 backslashes before it are its own, and what is
    escaped has an odd number of times 2^d more. A mark with fewer closes what this quotation stands in.
    """
    mark, own, start = match["quote"], len(match["slashes"]), match.end()
    doubled = -1
    for closing in _MARKS[mark].finditer(text, start):
        slashes = len(closing["slashes"])
        if closing.end() == doubled:
            continue
        if mark == "'" and not slashes and start < closing.start() and text.startswith("''", closing.start()):
            doubled = closing.end() + 1  # as SQL and YAML have it
            continue
        if closing["line"]:
            return None
        if slashes < own:
            return closing.start()
        if slashes % (2 * own + 2) == own:
            return closing.end() - own - len(mark)
    return None


_MARKS = {
    '"""': re.compile(r'(?P<slashes>)(?:"""|(?P<line>(?!)))'),
    **{mark: re.compile(rf"(?<!\\)(?P<slashes>\\*)(?:{mark}|(?P<line>\n))") for mark in ('"', "'", "`")},
}


def _demand(match: Match, text: str) -> str | None:
    """What is asked of a bare value under this name; None where the name is that of no secret."""
    place, name, sign = match.start(), match["name"], match["sign"]
    before = text[max(0, place - 80) : place]
    head = before.rstrip(_WORD)
    owner = before[len(head) :]
    if head.endswith("\\") and owner[:1] in ("n", "r", "t"):
        owner = owner[1:]
    is_tag = head.endswith("<") and sign == ">" and not re.fullmatch(r"[A-Z]+_\d+", text[place : match.end("suffix")])
    is_query = head.endswith(("?", "&", ";", "; ")) and sign == "="
    option = head[len(head.rstrip(_WORD + "-")) :].startswith("--")
    if name not in _PASSWORDS and sign.startswith("is"):
        return None
    if (sign == ">" and not is_tag) or (not sign and not (match["gap"] and (option or _NETRC.search(head.lower())))):
        return None
    whole = owner + text[place : match.end("suffix")]
    is_variable = sign == "=" and whole.isupper()
    if not _SUFFIX.fullmatch(match["suffix"]) and (not is_variable or _NOT_ITSELF.match(match["suffix"])):
        return None
    return _by_name(
        whole, name, (head + owner)[-24:].lower(), is_query=is_query, certain=is_variable or is_tag, sign=sign
    )


def _by_name(whole: str, name: str, before: str, *, is_query: bool, certain: bool, sign: str) -> str | None:
    """The demand of `_demand` by the words of the name alone; ``certain`` says that the form leaves no doubt."""
    if name in ("pass", "pwd"):
        owner = whole[: whole.lower().rindex(name)]
        if whole in ("PWD", "OLDPWD") and not before.rstrip("OLD ").endswith(";"):
            return None
        if owner and not owner.endswith("_") and not (owner[-1].islower() and whole[len(owner)].isupper()):
            return None
    if name in _PASSWORDS:
        return "strong" if sign.startswith("is") else "any" if certain or is_query else "mixed"
    if name.startswith("sig"):
        return "mixed" if is_query else None
    if _PUBLIC.search(before):
        return None
    if name in _OWNERS:
        owned = _OWNERS[name].search(before)
        if owned:
            return "spaced" if owned["blank"] == " " else "any" if certain else "mixed"
        if certain and (name == "token" or before.endswith("_")):
            return "any"
        return "random" if name == "token" or is_query else None
    return "any" if certain else "mixed"


def _believes_quoted(value: str, demand: str) -> bool:
    return worth_masking(value) and (demand != "random" or (len(value) >= 16 and looks_random(value)))


def _believes_bare(value: str, demand: str, after: str, name: str) -> bool:
    """Whether what stands without quotation marks is a secret and no word, type, path, variable or call."""
    least = {"any": 4 if name in _PASSWORDS else 6, "strong": 8, "mixed": 6, "spaced": 12, "random": 16}[demand]
    if len(value) < least:
        return False
    if value.isdigit():
        return name in _PASSWORDS and name != "pass" and len(value) >= 6 and worth_masking(value)
    if demand != "any" and not has_letters_and_digits(value):
        return False
    if not worth_masking(value) or is_path(value) or is_expression(value, after):
        return False
    if demand == "strong":
        return (is_strong(value) or looks_random(value)) and "-" not in value
    return demand != "random" or looks_random(value)


# --- secrets that are told by what stands around them ---------------------------------------------------------------

_BLOCK_CUES = ("-----begin",)
_KEY_BLOCK = re.compile(r"-----(?i:BEGIN) [A-Za-z0-9 ]{0,40}(?i:PRIVATE KEY)(?i: BLOCK)?-----")
_KEY_END = re.compile(r"-----(?i:END) [A-Za-z0-9 ]{0,40}-----")
_BETWEEN = r"(?:[\s>|#\"'+,]|\\+[nrt])*"
_KEY_LINES = re.compile(
    rf"(?:{_BETWEEN}(?:[A-Za-z-]{{3,20}}: [^\n\\]{{1,200}}|[A-Za-z0-9+/=]{{16,}}))*"
    rf"(?:(?<=[A-Za-z0-9+/=]{{16}}){_BETWEEN}[A-Za-z0-9+/]{{1,15}}={{0,2}}(?![\w+/=]))?"
)
"""Of a key that is cut off: headers as of RFC 1421, then base64, in lines that may be quoted or escaped."""


def _key_blocks(text: str, lowered: str) -> Spans:
    for place in places(_BLOCK_CUES, lowered):
        match = _KEY_BLOCK.match(text, place)
        if match is None:
            continue
        dashes = text.find("-----", match.end())
        whole = _KEY_END.match(text, dashes) if dashes >= 0 else None
        lines = whole or _KEY_LINES.match(text, match.end())
        yield place, lines.end() if lines else match.end()


_HEADER_END = r"[\"'\\\]*`]{0,34}\s{0,3}[:=]\s{0,3}[\"'\\`]{0,17}"
_CURL_USER = r"curl[^\n]{0,200}?\s(?:-u|--user)[ =]{0,2}[\"']?[\w.@+-]{1,64}:(?P<value>[^\s\"'\\]{3,})"


def _not_reference(match: Match) -> bool:
    return not is_reference(found(match))


def _is_worth(match: Match) -> bool:
    return worth_masking(found(match))


def _is_random(match: Match) -> bool:
    return looks_random(found(match))


def _is_user_and_password(match: Match) -> bool:
    return is_basic(found(match))


def _is_url_password(match: Match) -> bool:
    value = found(match)
    if match.lastgroup == "plain":
        return not is_reference(value)
    return has_letters_and_digits(value) and (match.lastgroup != "alone" or looks_random(value))


def _is_credential(match: Match) -> bool:
    """Whether what an ``Authorization`` holds is one: words are not."""
    value = found(match)
    if match["scheme"]:
        return len(value) >= 6 or is_basic(value)
    return has_letters_and_digits(value)


def _holds_a_session(match: Match) -> bool:
    return re.search("=[^;]{6}", found(match)) is not None


def _is_auth(match: Match) -> bool:
    return is_basic(found(match)) or (looks_random(found(match)) and has_letters_and_digits(found(match)))


_AWS_CUES = ("aws", "akia", "asia", "secret")
_AWS_CUE = re.compile(r"(?<![a-z])aws|akia|asia[a-z2-7]{16}|secret[ _-]?access[ _-]?key")
_AWS_SECRET = re.compile(starts("A-Za-z0-9/+=") + r"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])")


def _aws_secrets(text: str, lowered: str) -> Spans:
    """Secret keys of AWS, which have no form of their own: where the text speaks of AWS."""
    if not any(_AWS_CUE.match(lowered, place) for place in places(_AWS_CUES, lowered)):
        return
    for match in _AWS_SECRET.finditer(text):
        before = text[max(0, match.start() - 3) : match.start()]
        if not before.endswith((":/", "./", "~/", ".", "-", "_", "%", "sha1-")) and is_aws_secret(match[0]):
            yield match.span()


_URL_PASSWORD = (
    r"://(?:[^\s/:@\"'<>]{0,100}:(?:(?P<plain>[^\s/?#\"'<>]+)@"
    r"|(?!\d{1,5}[/?#])(?P<slashed>(?:[^\s\"'<>:]|:(?!//))+)@(?=[\w.-]+(?::\d{1,5})?(?:[/?,;)\s\"'<>\\]|$)))"
    r"|(?P<alone>[A-Za-z0-9_-]{20,})@)"
)
_COOKIE = (
    r"(?i:cookie)" + _HEADER_END + r"(?P<value>[\w.-]+=[^\s;,\"'\\<>]+"
    r"(?:;\s?(?!(?i:path|domain|expires|max-age|samesite)=)[\w.-]+=[^\s;,\"'\\<>]*)*)"
)
SECRET_RULES = (
    Rule("SECRET", _key_blocks, cues=_BLOCK_CUES),
    _cued(("private-lines:",), r"(?i:private-lines): \d+(?P<value>(?:(?:\s|\\+[nr])+[\w+/=]{16,})+)"),
    _cued(("://",), _URL_PASSWORD, _is_url_password),
    _cued(
        ("authorization",),
        rf"(?i:authorization){_HEADER_END}"
        r"(?P<scheme>(?i:bearer|basic|token|apikey|digest|negotiate)\s{1,3})?(?P<value>[\w.~+/=:-]{4,})",
        _is_credential,
    ),
    _cued(("cookie",), _COOKIE, _holds_a_session),
    _cued(("curl",), _CURL_USER, _not_reference),
    _cued(("sshpass",), r"(?i:sshpass)\s+-p\s{0,3}[\"']?(?P<value>[^\s\"'\\]{3,})", _is_worth),
    _cued(
        ("mysql", "mariadb"),
        r"(?i:mysql\w{0,8}|mariadb\w{0,8})\s[^\n|]{0,80}?(?<=\s)-p[\"']?(?P<value>[^\s\"'\\]{3,})",
        _is_worth,
    ),
    _cued((" login ",), r" login [^\n|]{0,80}?-p\s{1,3}[\"']?(?P<value>[^\s\"'\\]{3,})", _is_worth),
    _cued(
        ("auth",),
        r"(?i:auth)(?:(?<=_auth)\s?=|\\{0,15}[\"']\s?:)\s?\\{0,15}[\"']?(?P<value>[\w+/=-]{8,})",
        _is_auth,
    ),
    Rule("SECRET", _assigned, cues=_STEMS),
    _cued(("hooks.slack.com/",), r"(?i:hooks.slack.com)/\w+/(?P<value>\w+/\w+/\w{16,})"),
    _cued(("/webhooks/",), r"(?i:/webhooks/)\d{10,25}/(?P<value>[\w-]{40,})"),
    _cued(("whsec_", "flyv1 "), r"(?:whsec_|FlyV1 )[\w+/=,-]{16,}"),
    Rule("SECRET", _aws_secrets, cues=_AWS_CUES),  # before their identifiers are masked, which are cues
    Rule("SECRET", provider_keys),
    _cued(("eyj",), starts(r"\w-") + r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){1,3}"),
    _cued(("bearer",), r"(?i:bearer)\s{1,3}(?P<value>[\w.~+/=-]{16,})", _is_random),
    _cued(("basic ",), r"(?i:basic) {1,3}(?P<value>[A-Za-z0-9+/]{14,}={0,2})", _is_user_and_password),
)

_CUES = tuple(dict.fromkeys(cue for rule in SECRET_RULES for cue in rule.cues))


def may_hold_secrets(text: str) -> bool:
    """Whether any of the rules could find something; in most texts none can."""
    lowered = text.lower()
    return any(map(lowered.__contains__, _CUES)) or LONG_WORD.search(text) is not None or len(lowered) != len(text)


# --- names of values in JSON ----------------------------------------------------------------------------------------

_SECRET_NAME = re.compile(
    rf"(?i:.*(?:pass(?:word|wort|wd|phrase|code)|(?:^|[_. -])pass|pwd|secret(?:[ _-]?access)?(?:[ _-]?key)?"
    rf"|{_WHOSE_KEY}[ _-]?key|{_WHOSE_TOKEN}[ _-]?token){_SUFFIX.pattern})|.*[a-z]Pass|[A-Z0-9_]*_(?:KEY|TOKEN)"
)


@functools.lru_cache(maxsize=4096)
def names_a_secret(key: str) -> bool:
    """Whether what is kept under this name is secret by its name alone."""
    if len(key) >= 80 or key in ("PWD", "OLDPWD") or _PUBLIC.search(re.sub("(?i)keys?$", "", key).lower()):
        return False
    return _SECRET_NAME.fullmatch(key) is not None
