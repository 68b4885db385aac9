"""Tells which messages of a request were written already, as part of an earlier call; writes nothing."""

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from praison_agent_rl.transcripts.masking import Masks
from praison_agent_rl.transcripts.plain_values import equal_prefix, plain


class Names(dict[str, str]):
    """What was masked in a conversation: placeholders by what they stand for."""

    def __init__(self, known: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(known)
        self.masked: dict[tuple[str, Masks], str] = {}
        """Texts of the run under way, as they were masked: the same text comes as prompt, message and output."""


class Written(NamedTuple):
    """A call that later ones may refer to."""

    id: str
    agent: str | None
    conversation: list[Any]
    """Its messages and the reply, plain and not redacted: what later requests are compared with."""
    sent: int
    """Length of the messages alone."""
    tools: list[Any]
    names: Names
    masks: Masks
    """A call on which other masks lie does not refer to it: what it would take over may be masked less."""


class Recent:
    """The latest calls, found by the last message that they sent and its place."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        self._calls: deque[Written] = deque()
        self._by_end: dict[Any, deque[Written]] = {}
        self._lengths: dict[str | None, Counter[int]] = {}
        self.ids: set[str] = set()
        """Of those that are remembered."""

    def add(self, call: Written) -> None:
        """Remember a call, and forget the oldest."""
        if len(self._calls) == self._most:
            self._forget(self._calls.popleft())
        self._calls.append(call)
        self.ids.add(call.id)
        if call.sent:
            self._by_end.setdefault(_end(call.agent, call.conversation, call.sent), deque()).append(call)
            self._lengths.setdefault(call.agent, Counter())[call.sent] += 1

    def latest(self, agent: str | None, masks: Masks) -> Iterator[Written]:
        """Those of an agent, the latest first."""
        return (call for call in reversed(self._calls) if call.agent == agent and call.masks is masks)

    def extended_by(self, messages: list[Any], agent: str | None, masks: Masks) -> tuple[Written, int] | None:
        """The longest call whose messages are all in ``messages``, and how much of it is."""
        for call in itertools.chain(itertools.islice(self.latest(agent, masks), 1), self._ending(messages, agent)):
            if 0 < call.sent <= len(messages) and call.masks is masks:
                most = shared(messages, call.conversation)
                if most >= call.sent:
                    return call, most
        return None

    def _ending(self, messages: list[Any], agent: str | None) -> Iterator[Written]:
        for length in sorted(self._lengths.get(agent, ()), reverse=True):
            if length <= len(messages):
                yield from reversed(self._by_end.get(_end(agent, messages, length), ()))

    def _forget(self, call: Written) -> None:
        self.ids.discard(call.id)
        if call.sent:
            end = _end(call.agent, call.conversation, call.sent)
            self._by_end[end].popleft()
            if not self._by_end[end]:
                del self._by_end[end]
            lengths = self._lengths[call.agent]
            lengths[call.sent] -= 1
            if not lengths[call.sent]:
                del lengths[call.sent]


def _end(agent: str | None, messages: list[Any], length: int) -> tuple[str | None, int, str | None]:
    """What tells most conversations apart: where its last message is, and its text."""
    last = messages[length - 1]
    content = last.get("content") if type(last) is dict else None
    return agent, length, content if type(content) is str else None


def shared(messages: list[Any], conversation: list[Any]) -> int:
    """Number of messages, from the first on, that are the same in both."""
    place = equal_prefix(messages, conversation)
    while place < min(len(messages), len(conversation)) and same(messages[place], conversation[place]):
        place += 1
        place += equal_prefix(messages[place:], conversation[place:])
    return place


def same(value: Any, known: Any) -> bool:
    """Whether ``value`` would be written as ``known``, which is plain, was."""
    return equal(value, known) or bool(plain(value) == known)


def equal(value: Any, known: Any) -> bool:
    """Whether they say that they are equal; what cannot be compared is not."""
    try:
        return bool(value == known)
    except Exception:  # noqa: BLE001 - another's code: comparing arrays, for one, gives no truth value
        return False


def instructions(messages: list[Any]) -> int:
    """Number of messages at the beginning that are the agent's instructions."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages[:8]]
    return next((place for place, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
