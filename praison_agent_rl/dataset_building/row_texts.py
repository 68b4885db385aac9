"""Rows as text, written once as they were sent and once in canonical form; messages met before are not encoded again.

Agents send the same system prompt, history and tools again and again. Encoding every row twice from its start, for the
file and for the fingerprint, takes most of the time of a build; putting it together from known parts takes little.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

# digests are residues modulo a Mersenne prime, so that they can be chained (see conversations)
PRIME = (1 << 61) - 1

_SPEAKERS = ("user", "assistant")
_ROLES = (*_SPEAKERS, "system", "developer")
_HALF = re.compile("[\ud800-\udfff]")  # of an emoji
_LONGEST_REMEMBERED = 20_000
_MOST_REMEMBERED = 2048
_sent = json.JSONEncoder(allow_nan=False).encode
_canonical = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":")).encode


class MessageText(NamedTuple):
    """A message in the forms that a build needs."""

    role: str
    digest: int
    """Equal for equal messages; of plain ones, case and white space do not count."""
    spoken: bool
    """Whether it is a text of a user or the model and has nothing else."""
    sound: bool
    """Whether it is a whole text of a role that needs nothing else, in which no check finds a fault."""
    sent: str
    """JSON with the keys in their order."""
    canonical: str
    """JSON as ``praison_agent_rl.data.fingerprint`` reads it."""


class RowText(NamedTuple):
    """A row but for its column ``split``, which is not known yet; in ASCII, in which half an emoji survives."""

    sent: bytes
    """JSON with everything in its order."""
    before: bytes
    """The canonical form up to the column ``split``."""
    after: bytes
    """The canonical form from there on."""

    def on(self, side: str, lent: dict[str, Any] | None) -> tuple[bytes, bytes]:
        """The whole row in both forms, with what it lacks from ``lent``."""
        if lent:
            row = {**lent, **json.loads(self.sent), "split": side}
            return _sent(row).encode(), _canonical(row).encode()
        name = side.encode()
        return b'%s, "split": "%s"}' % (self.sent[:-1], name), b'%s"split":"%s"%s' % (self.before, name, self.after)


def message_text(message: Mapping[str, Any]) -> MessageText:
    """A message as text; raises TypeError or ValueError if JSON has no form for it."""
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and isinstance(role, str) and isinstance(content, str):
        # what a user says is mostly new
        remembered = role != "user" and len(content) <= _LONGEST_REMEMBERED
        return (_plain_again if remembered else _plain)(role, content, next(iter(message)) == "role")
    canonical = _canonical(message)
    return MessageText(str(role), digest_of("", canonical.casefold()), False, False, _sent(message), canonical)


def _plain(role: str, content: str, role_first: bool) -> MessageText:
    named, said = quoted(role), quoted(content)
    sent = f'{{"role": {named}, "content": {said}}}' if role_first else f'{{"content": {said}, "role": {named}}}'
    sound = role in _ROLES and (content.isascii() or not _HALF.search(content))
    canonical = f'{{"content":{said},"role":{named}}}'
    return MessageText(role, digest_of_text(role, content), role in _SPEAKERS, sound, sent, canonical)


_plain_again = functools.lru_cache(maxsize=512)(_plain)


def digest_of_text(role: str, content: str) -> int:
    """The digest of a message that is a text and has nothing else."""
    return digest_of(role, " ".join(content.split()).casefold())


def digest_of(kind: str, text: str) -> int:
    """The digest of any text, apart from those of other kinds."""
    content = f"{kind}\0{text}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") % PRIME


class RowWriter:
    """Makes texts of messages and puts rows together from them; it remembers the last messages and tools."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[Mapping[str, Any], MessageText]] = {}
        self._tools: list[Any] = []
        self._tool_texts = ("[]", "[]")

    def texts(self, messages: Sequence[Mapping[str, Any]]) -> list[MessageText]:
        """Messages as text; raises TypeError or ValueError if JSON has no form for one."""
        if len(self._messages) > _MOST_REMEMBERED:
            self._messages.clear()
        known = self._messages
        texts = []
        for message in messages[:-1]:
            # the calls of a store share their messages; what is kept here cannot lose its id to another
            met = known.get(id(message))
            if met is None:
                met = known[id(message)] = (message, message_text(message))
            texts.append(met[1])
        # the last one is mostly new; it is remembered when it comes again, as history
        return [*texts, *map(message_text, messages[-1:])]

    def row(self, prompt: Sequence[MessageText], *, tools: list[Any], others: Mapping[str, Any]) -> RowText:
        """A row of ``prompt``, ``tools`` if there are any, and the other columns.

        Raises:
            TypeError, ValueError: JSON has no form for a value.
        """
        sent = [f"[{', '.join([message.sent for message in prompt])}]"]
        canonical = [f"[{','.join([message.canonical for message in prompt])}]"]
        if tools:
            if tools != self._tools:
                self._tools, self._tool_texts = tools, (_sent(tools), _canonical(tools))
            sent.append(self._tool_texts[0])
            canonical.append(self._tool_texts[1])
        for value in others.values():
            text = quoted(value) if isinstance(value, str) else _sent(value)
            sent.append(text)
            # read again, since JSON makes texts of keys that are numbers
            canonical.append(text if isinstance(value, str) else _canonical(json.loads(text)))
        line, before, after = _blanks(("prompt", "tools", *others) if tools else ("prompt", *others))
        texts = (line.format(*sent), before.format(*canonical), after.format(*canonical))
        return RowText(*map(str.encode, texts))


@functools.lru_cache(maxsize=64)
def _blanks(names: tuple[str, ...]) -> tuple[str, str, str]:
    """A ``RowText`` with these columns, into which ``str.format`` fills their values, given in the same order."""
    columns = [(name, quoted(name).replace("{", "{{").replace("}", "}}"), place) for place, name in enumerate(names)]
    line = ", ".join(f"{title}: {{{place}}}" for _, title, place in columns)
    before = "".join(f"{title}:{{{place}}}," for name, title, place in sorted(columns) if name < "split")
    after = "".join(f",{title}:{{{place}}}" for name, title, place in sorted(columns) if name > "split")
    return "{{" + line + "}}", "{{" + before, after + "}}"
