"""Which prompts belong together and on which side of the split; it keeps digests, no text, and touches no file."""

import functools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from praison_agent_rl.dataset_building.brief_runs import BriefRun
from praison_agent_rl.dataset_building.row_texts import PRIME, MessageText, digest_of, digest_of_text

SIDES = ("train", "held_out")

# Digests are chained as polynomials modulo a prime: a chain takes one multiplication a message, where hashing each
# beginning of a prompt anew would take the square of its length.
_STEP = 0x1E3779B97F4A7C15
_NEVER = 2**32 - 1


class Place(NamedTuple):
    """Where a prompt stands: what it equals, continues and is continued by, as digests."""

    key: int
    """Equal prompts have equal keys; case and white space do not count."""
    continues: tuple[int, ...]
    """The state of the conversation after each answer in its history."""
    ends: tuple[int, ...]
    """The states in which the run may have left the conversation; a prompt that continues it has passed one of them."""


def place_of(run: BriefRun, prompt: Sequence[MessageText]) -> Place:
    """Digests of a run's prompt, and of the conversation before and after the run.

    What makes up a conversation is what was said: tool turns do not count, since some histories keep them and others
    do not, and system prompts do not, since they change on the way (dates, memories); the agent's name stands for them.
    """
    key, passed = 0, []
    state = before = _digest_of_agent(run.agent or "")
    for message in prompt:
        key = (key * _STEP + message.digest) % PRIME
        # the framework sends some user turns twice and keeps them once
        if message.spoken and message.digest != before:
            state, before = (state * _STEP + message.digest) % PRIME, message.digest
            if message.role == "assistant":
                passed.append(state)
    ends = {(state * _STEP + digest_of_text("assistant", answer)) % PRIME: None for answer in run.answers}
    return Place(key, tuple(passed), tuple(ends))


@functools.lru_cache(maxsize=64)
def _digest_of_agent(name: str) -> int:
    return digest_of("agent", name)


class Conversations:
    """Groups of prompts that must stay on one side, joined as runs come in, and the sides that earlier builds gave.

    A group is a number; joined groups share the ``root`` of the oldest. Links are digests by which groups are found:
    sessions, runs, and states of a conversation.
    """

    def __init__(self) -> None:
        self._older = array("L")
        self._first_given = array("L")  # of a root: the earliest of its given sides
        self._begun = bytearray()  # of a root: whether one of its runs was admitted
        self._found: dict[int, int] = {}  # link to group
        self._given: dict[int, int] = {}  # key to the number of its given side
        self._sides = bytearray()  # by number
        self._remembered = array("L")  # group by number
        self._keys = array("Q")
        self._kept = array("L")

    def remember(self, key: int, side: str, *, links: Sequence[int]) -> int:
        """Take up a side that an earlier build gave, the oldest first; returns its number."""
        number = len(self._sides)
        self._sides.append(SIDES.index(side))
        self._given[key] = number
        group = self._joined([self._found[link] for link in links if link in self._found])
        self._remembered.append(group)
        self._first_given[group] = min(self._first_given[group], number)
        self._register(links, group)
        return number

    def given(self, key: int) -> int | None:
        """The number of the side that an earlier build gave to this prompt."""
        return self._given.get(key)

    def admit(self, run: BriefRun, place: Place) -> tuple[int, bool]:
        """The group of a run, joined with what it belongs to; and whether it opens its conversation."""
        ties = self._ties(run)
        found = [self._found[tie] for tie in ties if tie in self._found]
        # Only where nothing else tells: two sessions that begin with the same words are two conversations
        states = place.continues if not found else ()
        found += [self._found[state] for state in states if state in self._found]
        ahead = [self._found[end + PRIME] for end in place.ends if end + PRIME in self._found]
        group = self._joined(found + ahead)
        self._register([*ties, *place.ends], group)
        # what it continues may be read later
        self._register([state + PRIME for state in states if state not in self._found], group)
        opens, self._begun[group] = not self._begun[group], True
        return group, opens

    def join(self, groups: Sequence[int]) -> int | None:
        """Hold these groups together from now on; returns what they have become, None where their sides differ."""
        firsts = {self._first_given[self.root(group)] for group in groups} - {_NEVER}
        return None if len({self._sides[first] for first in firsts}) > 1 else self._joined(groups)

    def links_of(self, run: BriefRun, place: Place) -> list[int]:
        """What a later build needs to find the conversation of a run again."""
        session = [digest_of("session", run.session)] if run.session else []
        return [*session, *place.ends]

    def follow(self, group: int, number: int) -> bool:
        """Join a group with the remembered prompt of this number; False where their sides differ."""
        remembered = self._remembered[number]
        firsts = {self._first_given[self.root(member)] for member in (group, remembered)} - {_NEVER}
        if any(self._sides[first] != self._sides[number] for first in firsts):
            return False
        self._joined([group, remembered])
        return True

    def keep(self, key: int, group: int) -> None:
        """Count a prompt in: it becomes a row and will be given a side."""
        self._keys.append(key)
        self._kept.append(group)

    def sides(self, share: float, *, seed: int) -> Iterator[str | None]:
        """The side of each kept prompt in order, about ``share`` of them held out.

        None where conversations of both sides have become one: the older side has it, and a prompt that would have to
        change sides is left out, since one that was trained on cannot judge.
        """
        drawn = self._drawn(share, seed)
        for key, group in zip(self._keys, self._kept, strict=True):
            root = self.root(group)
            first, number = self._first_given[root], self._given.get(key)
            side = (root in drawn) if first == _NEVER else self._sides[first]
            yield None if number is not None and self._sides[number] != side else SIDES[side]

    def largest(self) -> int:
        """Kept prompts in the largest group."""
        return max(self._sizes(), default=0)

    def root(self, group: int) -> int:
        """The number that all groups joined with this one have in common."""
        older = self._older
        while older[group] != group:
            older[group] = group = older[older[group]]
        return group

    def _ties(self, run: BriefRun) -> list[int]:
        # runs are known within this process only, where Python's own hash will do
        named = [hash(("run", name)) for name in (run.id, run.parent) if name]
        return [*named, digest_of("session", run.session)] if run.session else named

    def _register(self, links: Iterable[int], group: int) -> None:
        for link in links:
            self._found.setdefault(link, group)

    def _joined(self, groups: Sequence[int]) -> int:
        if not groups:
            self._older.append(len(self._older))
            self._first_given.append(_NEVER)
            self._begun.append(False)
            return len(self._older) - 1
        first, *others = sorted({self.root(group) for group in groups})
        for other in others:
            self._older[other] = first
            self._first_given[first] = min(self._first_given[first], self._first_given[other])
            self._begun[first] |= self._begun[other]
        return first

    def _sizes(self) -> "array[int]":
        sizes = array("L", bytes(len(self._older) * array("L").itemsize))
        for group in self._kept:
            sizes[self.root(group)] += 1
        return sizes

    def _drawn(self, share: float, seed: int) -> set[int]:
        """The new groups that are held out, drawn by the seed and their keys; the order of the runs does not matter.

        A group larger than what is still wanted stays in training. Only where nothing would be held out at all is the
        smallest taken, if another remains. At least one prompt is left to train on.
        """
        sizes, lowest = self._sizes(), array("Q", bytes(len(self._older) * 8))
        for key, group in zip(self._keys, self._kept, strict=True):
            root = self.root(group)
            lowest[root] = min(lowest[root] or key, key)
        given = [root for root, first in enumerate(self._first_given) if sizes[root] and first != _NEVER]
        held_out = sum(sizes[root] for root in given if SIDES[self._sides[self._first_given[root]]] == "held_out")
        new = [root for root, first in enumerate(self._first_given) if sizes[root] and first == _NEVER]
        new.sort(key=lambda root: digest_of(str(seed), str(lowest[root])))
        # rounded first: 0.1 * 30 is a little more than 3 in binary, and ceil would make 4 of it
        wanted = min(math.ceil(round(share * len(self._keys), 9)), len(self._keys) - 1) - held_out
        drawn = set()
        for root in new:
            if sizes[root] <= wanted:
                wanted -= sizes[root]
                drawn.add(root)
        if share and not held_out and not drawn and len(new) + len(given) > 1 and new:
            drawn.add(min(new, key=lambda root: sizes[root]))
        return drawn
