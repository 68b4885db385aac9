"""What secrets look like: the rules by which they are told from prose, code, hashes and identifiers."""

import base64
import functools
import re
from collections.abc import Callable


class Rule:
    """One kind of value: where it may be, what it looks like, and when a match is believed."""

    def __init__(
        self,
        kind: str,
        hints: tuple[str, ...],
        pattern: str,
        believes: Callable[["re.Match[str]"], bool] = lambda match: True,
        *,
        same: Callable[[str], str] = lambda found: found,
    ) -> None:
        self.kind = kind
        self.hints = hints
        """Lower case; every text that holds such a value holds one of these."""
        self.pattern = re.compile(pattern)
        """Its named group, or all of it, is what is masked."""
        self.believes = believes
        self.same = same
        """Forms of one value (upper and lower case, with and without blanks) become one."""


def starts(inside: str) -> str:
    r"""A pattern for a place at which none of the characters ``inside`` a value stands before.

    In JSON within a text a new line is ``\n``; its letter belongs to no value.
    """
    return rf"(?:(?<![{inside}])(?!(?<=\\)[nrt])|(?<=\\[nrt]))"


# --- what a value must look like ------------------------------------------------------------------------------------

_NO_SECRETS = {
    "string", "str", "text", "bytes", "object", "integer", "number", "none", "null", "undefined", "true", "false",
    "yes", "required", "optional", "hidden", "redacted", "example", "changeme", "password", "passwd", "secret", "token",
    "bearer", "basic", "sha1", "sha256", "sha512", "md5", "base64", "utf-8", "utf8", "oauth2",
}  # fmt: skip
_REFERENCE = re.compile(r"[<${%*]|\[|os\.|env[.\[(]|process\.env|(.)\1*$")
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+$")


def worth_masking(value: str) -> bool:
    """Whether the value of something called a password can be one: no type, placeholder, reference or explanation."""
    if len(value) < 3 or value.lower() in _NO_SECRETS or _REFERENCE.match(value):
        return False
    if " " not in value or any(c.isdigit() for c in value):
        return True
    # "the password of the user" explains; "correct horse battery staple" is one
    return value.count(" ") < 5 and not re.search("password|secret|token|key", value, re.IGNORECASE)


def _is_mixed(value: str) -> bool:
    return any(c.isdigit() for c in value) or (value != value.lower() and value[1:] != value[1:].lower())


def _looks_random(value: str) -> bool:
    """Whether one piece of it is too long, or too mixed, for a word: ``sk-learn-contrib`` is made of words."""
    pieces = re.split(r"[-_./]", value)
    return any(len(piece) >= 20 or (len(piece) >= 12 and _is_mixed(piece)) for piece in pieces)


def _has_letters_and_digits(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _found(match: "re.Match[str]") -> str:
    return match[match.lastgroup or 0]


def _random_match(match: "re.Match[str]") -> bool:
    return _looks_random(_found(match))


def _mixed_match(match: "re.Match[str]") -> bool:
    return _has_letters_and_digits(_found(match)) and worth_masking(_found(match))


def _is_expression(match: "re.Match[str]") -> bool:
    """Whether it is code that gets the value from elsewhere."""
    return match.string[match.end() : match.end() + 1] in ("(", "[") or _ATTRIBUTE.match(_found(match)) is not None


def _assigned(match: "re.Match[str]") -> bool:
    """Whether what follows ``password:`` or ``api_key=`` is a secret and no word, type, variable or call."""
    value, name = _found(match), match["name"].lower()
    if not worth_masking(value):
        return False
    if name in _BEFORE and not _BEFORE[name].search(match.string, max(0, match.start() - 16), match.start()):
        return name == "token" and len(value) >= 16 and _looks_random(value)  # alone, the words mean many things
    if match.lastgroup != "bare":
        return True
    if value[0] in "/.~-" or _is_expression(match):
        return False
    called_password = name.startswith(("pass", "pwd"))
    return len(value) >= 6 and (_has_letters_and_digits(value) or (called_password and value.isdigit()))


def _in_authorization(match: "re.Match[str]") -> bool:
    return bool(match["scheme"]) or _has_letters_and_digits(_found(match))


def _is_basic(match: "re.Match[str]") -> bool:
    """Whether it is user and password in base64, as RFC 7617 has it."""
    text = _found(match)
    try:
        return b":" in base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        return False


def _is_aws_secret(match: "re.Match[str]") -> bool:
    found = match[0]
    return found != found.lower() and found != found.upper() and any(c.isdigit() for c in found)


# --- the rules ------------------------------------------------------------------------------------------------------

# The first letters stand alone, in both cases: by them the search skips what cannot match.
_NAME = r"(?:[pP](?i:ass(?:word|wd|phrase)|wd)|[sS](?i:ecret(?:(?:[_-]?access)?[_-]?key)?)|[kK](?i:ey)|[tT](?i:oken))"
_NAME_HINTS = ("passw", "passp", "pwd", "secret", "token", *(f"{c}key" for c in "_-ietsg"))
_WHOSE_KEY = (
    r"(?i:api|access|account|auth|private|signing|encryption|subscription|licen[cs]e|storage|shared|master|admin)[_-]?$"
)
_WHOSE_TOKEN = r"(?i:access|auth|refresh|bearer|session|id|api|bot|app|security|github|gitlab|slack|hub|hf)[_-]?$"
_BEFORE = {"key": re.compile(_WHOSE_KEY), "token": re.compile(_WHOSE_TOKEN)}
_QUOTE = r"[\"'\\\]]{0,5}"
_VALUE = (
    r"(?:\"(?P<double>(?:[^\"\\\n]|\\.){3,300})\"|'(?P<single>(?:[^'\\\n]|\\.){3,300})'"
    r"|\\+[\"'](?P<escaped>[^\"'\n\\]{3,300})\\+[\"']"
    r"|(?P<bare>[^\s\"'`,;&<>(){}\[\]\\|$]{3,300}(?<![.:!?])))"
)

_KEYS = (
    r"sk-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic, OpenRouter, DeepSeek, Langfuse
    r"sk_(?:live|test|prod)_[A-Za-z0-9]{10,}",  # Stripe, Clerk
    r"rk_(?:live|test)_[A-Za-z0-9]{10,}",
    r"whsec_[A-Za-z0-9+/=]{16,}",
    r"AIza[A-Za-z0-9_-]{30,}",  # Google
    r"ya29\.[A-Za-z0-9_-]{20,}",
    r"GOCSPX-[A-Za-z0-9_-]{20,}",
    r"AKIA[A-Z0-9]{16}",  # AWS
    r"ASIA[A-Z0-9]{16}",
    r"ghp_[A-Za-z0-9]{30,}",  # GitHub
    r"gho_[A-Za-z0-9]{30,}",
    r"ghu_[A-Za-z0-9]{30,}",
    r"ghs_[A-Za-z0-9]{30,}",
    r"ghr_[A-Za-z0-9]{30,}",
    r"github_pat_[A-Za-z0-9_]{30,}",
    r"glpat-[A-Za-z0-9_-]{16,}",
    r"xox[a-z]-[A-Za-z0-9-]{10,}",  # Slack
    r"xapp-[A-Za-z0-9-]{10,}",
    r"hf_[A-Za-z0-9]{30,}",  # Hugging Face
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[A-Za-z0-9_-]{40,}",
    r"gsk_[A-Za-z0-9]{30,}",  # Groq
    r"xai-[A-Za-z0-9]{30,}",
    r"r8_[A-Za-z0-9]{30,}",  # Replicate
    r"pplx-[A-Za-z0-9]{30,}",
    r"tgp_v\d_[A-Za-z0-9_-]{30,}",  # Together
    r"nvapi-[A-Za-z0-9_-]{30,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",  # SendGrid
    r"lsv2_[a-z]{2}_[A-Za-z0-9_]{30,}",  # LangSmith
    r"dapi[a-f0-9]{32}",  # Databricks
    r"shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}",  # Shopify
    r"do[opr]_v1_[a-f0-9]{32,}",  # DigitalOcean
)

_BLOCK = (
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[^-]*(?:-(?!----)[^-]*)*-----END [A-Z0-9 ]{0,40}-----"  # whole
    r"|(?:(?:\s|\\+[nr])*[A-Za-z0-9+/=]{16,})*)"  # cut off
)

_LONG_WORD = re.compile(r"[A-Za-z0-9_+/=.~-]{16}")
_LONG_RULES = (
    Rule("SECRET", ("",), rf"{starts('A-Za-z0-9_')}(?:{'|'.join(_KEYS)})", _random_match),
    Rule("SECRET", ("eyj",), starts(r"\w-") + r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]{0,4000}){1,3}"),
    Rule("SECRET", ("bearer",), r"[bB](?i:earer)\s{1,3}(?P<value>[\w.~+/=-]{16,})", _random_match),
    Rule("SECRET", ("basic ",), r"[bB](?i:asic) {1,3}(?P<value>[A-Za-z0-9+/]{14,}={0,2})", _is_basic),
    Rule("SECRET", ("aws", "akia"), starts("A-Za-z0-9/+=") + r"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])", _is_aws_secret),
)
"""Secrets that are told by themselves; each holds a word longer than those of prose."""

_ASSIGNED_RULES = (
    Rule("SECRET", ("-----begin",), _BLOCK),
    Rule("SECRET", ("://",), r"(?<=://)[^\s/:@\"'<>]{0,100}:(?P<value>[^\s/\"'?<>]{1,200})@"),
    Rule(
        "SECRET",
        ("authorization",),
        rf"[aA](?i:uthorization){_QUOTE}\s{{0,3}}[:=]\s{{0,3}}{_QUOTE}"
        r"(?P<scheme>(?i:bearer|basic|token|apikey|digest|negotiate)\s{1,3})?(?P<value>[\w.~+/=:-]{6,})",
        _in_authorization,
    ),
    Rule("SECRET", ("curl",), r"\s(?:-u|--user)[ =]{1,2}[\"']?[\w.@+-]{1,64}:(?P<value>[^\s\"']{3,200})"),
    Rule(  # an option on a command line
        "SECRET",
        ("--",),
        r"--(?i:password|passwd|token|secret|api[_-]?key|access[_-]?key)[ =]{1,2}(?P<value>[^\s\"'<$]{6,300})",
        _mixed_match,
    ),
    Rule(  # a query
        "SECRET",
        ("key=", "token=", "sig=", "signature=", "password="),
        r"[?&;](?i:[\w.-]{0,40}key|[\w.-]{0,40}token|sig|[\w.-]{0,40}signature|password)="
        r"(?P<value>[^\s&;#\"'<>]{8,1000})",
        _mixed_match,
    ),
    Rule(  # a connection string
        "SECRET", (";",), r";\s{0,3}(?i:password|pwd|accountkey|sharedaccesskey)=(?P<value>[^;\s\"'<]{3,300})"
    ),
    Rule(  # an environment variable
        "SECRET",
        ("password", "passwd", "secret", "token", "_key"),
        starts("A-Za-z0-9_") + r"[A-Z0-9_]{0,40}(?:PASSWORD|PASSWD|SECRET|TOKEN|_KEY)[A-Z0-9_]{0,20}="
        r"(?P<value>[^\s\"'`\\$<>(){}\[\],;/.~][^\s\"'`\\(){}\[\],;]{5,300})",
        lambda match: worth_masking(_found(match)) and not _is_expression(match),
    ),
    Rule(
        "SECRET",
        _NAME_HINTS,
        rf"(?P<name>{_NAME}){_QUOTE}\s{{0,4}}(?::\s?[\w.\[\]| ]{{1,30}}=|=>|:=|==?|:)\s{{0,4}}{_VALUE}",
        _assigned,
    ),
)
"""Secrets that are told by what stands before them: a name and a colon, a URL, an option."""


_CUES = ("key", "pass", "token", "secret", "pwd", "auth", "sig", "curl", "://", "--")
"""In lower case; each hint of a rule that is told by a name holds one of these."""


def secret_rules(text: str, lowered: str) -> tuple[Rule, ...]:
    """The rules that ``text`` may need: prose needs none."""
    rules: tuple[Rule, ...] = ()
    if ":" in text or "=" in text or "--" in text:
        for cue in _CUES:
            if cue in lowered:
                rules = _ASSIGNED_RULES
                break
    return rules + _LONG_RULES if _LONG_WORD.search(text) else rules


_SECRET_NAME = re.compile(
    r"(?i).*(?:pass(?:word|wd|phrase)|pwd|secret(?:[_-]?access)?(?:[_-]?key)?"
    rf"|{_WHOSE_KEY.removesuffix('$')}key|{_WHOSE_TOKEN.removesuffix('$')}token)$"
)


@functools.lru_cache(maxsize=4096)
def names_a_secret(key: str) -> bool:
    """Whether what is kept under this name is secret by its name alone."""
    return len(key) < 80 and _SECRET_NAME.match(key) is not None
