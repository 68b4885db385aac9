"""Which server draws which rows of a batch; nothing is asked here."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Group(NamedTuple):
    """Rows in a row with one prompt, which one request asks for."""

    number: int
    prompt: list[int]
    row: int
    """The first of them."""
    size: int


def groups_of(prompts: Sequence[Sequence[int]]) -> list[Group]:
    """The rows of a batch, equal prompts in a row together.

    >>> [(group.row, group.size) for group in groups_of([[1, 2], [1, 2], [3]])]
    [(0, 2), (2, 1)]
    """
    groups: list[Group] = []
    row = 0
    for prompt, equal in itertools.groupby(map(list, prompts)):
        count = len(list(equal))
        groups.append(Group(len(groups), prompt, row, count))
        row += count
    return groups


def divided(groups: Sequence[Group], servers: Sequence[T]) -> list[T]:
    """Who draws each group: equal prompts by one, which has computed them then, and about as many rows by each.

    >>> divided(groups_of([[1], [2], [1], [3], [4]]), ["a", "b"])
    ['a', 'b', 'a', 'b', 'a']
    """
    wanted: Counter[tuple[int, ...]] = Counter()
    for group in groups:
        wanted[tuple(group.prompt)] += group.size
    chosen: dict[tuple[int, ...], T] = {}
    rows = [0] * len(servers)
    for prompt, count in wanted.items():
        number = rows.index(min(rows))
        rows[number] += count
        chosen[prompt] = servers[number]
    return [chosen[tuple(group.prompt)] for group in groups]
