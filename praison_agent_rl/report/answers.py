"""Read what both models answered, however much it is: once for the numbers, once for the few texts that are shown."""

import heapq
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from praison_agent_rl.data import Row

SHOWN = 5
"""Prompts shown of each kind."""


@dataclass
class Side:
    """The answers of one model in numbers; their texts are not kept."""

    answers: int = 0
    errors: int = 0
    empty: int = 0
    cut: int = 0
    """Answers as long as they may be."""
    tokens: int = 0
    repeated: int = 0
    """Greedy answers that an earlier prompt was given too, word for word."""
    totals: dict[int, list[float]] = field(default_factory=dict)
    """Totals of the scored answers, by prompt."""
    prompts: set[int] = field(default_factory=set)
    texts: set[int] = field(default_factory=set, repr=False)

    def means(self) -> dict[int, float]:
        """Each prompt's mean total over its scored answers."""
        return {prompt: sum(totals) / len(totals) for prompt, totals in self.totals.items()}

    def as_json(self) -> dict[str, Any]:
        """The counts, and the mean length in tokens of the answers that did not fail."""
        there = self.answers - self.errors
        return {
            "answers": self.answers,
            "errors": self.errors,
            "empty": self.empty,
            "cut": self.cut,
            "repeated": self.repeated,
            "mean_tokens": self.tokens / there if there else None,
        }


def lines(path: Path) -> Iterator[Row]:
    """The rows of a file, one at a time; none if it is not there."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="\n") as file:  # only \n ends a row, not the \r inside of one
        for line in file:
            if line.strip():
                yield json.loads(line)


def read_side(path: Path, longest: int | None) -> Side:
    """One model's answers in numbers; ``longest`` is the number of tokens at which an answer is cut off."""
    side = Side()
    for row in lines(path):
        side.answers += 1
        side.prompts.add(row["prompt"])
        if row.get("error") is not None:
            side.errors += 1
            continue
        words, total = str(row["text"]).strip(), row["total"]
        side.empty += not words
        side.tokens += row["tokens"]
        side.cut += longest is not None and row["tokens"] >= longest
        if row["sample"] == 0 and words:
            side.repeated += hash(words) in side.texts
            side.texts.add(hash(words))
        if total is not None and math.isfinite(total):
            side.totals.setdefault(row["prompt"], []).append(total)
    return side


def gains_of(base: Side, new: Side) -> dict[int, float]:
    """By how much each prompt's mean total rose, where both models have a score."""
    before, after = base.means(), new.means()
    return {prompt: after[prompt] - before[prompt] for prompt in sorted(before.keys() & after.keys())}


def pick(gains: dict[int, float], prompts: Iterable[int], *, seed: int) -> dict[str, list[int]]:
    """The prompts to show: what rose most, what fell most, and some drawn from all."""
    rose, fell = [p for p in gains if gains[p] > 0], [p for p in gains if gains[p] < 0]
    drawn = sorted(prompts)
    return {
        "best": heapq.nlargest(SHOWN, rose, key=lambda p: gains[p]),
        "worst": heapq.nsmallest(SHOWN, fell, key=lambda p: gains[p]),
        "random": random.Random(seed).sample(drawn, min(SHOWN, len(drawn))),
    }


def texts_of(path: Path, wanted: set[int]) -> dict[int, list[Row]]:
    """Whole answers to the ``wanted`` prompts, the greedy one first."""
    found: dict[int, list[Row]] = {}
    for row in lines(path):
        if row["prompt"] in wanted:
            found.setdefault(row["prompt"], []).append(row)
    return {prompt: sorted(rows, key=lambda row: row["sample"]) for prompt, rows in found.items()}


def prompts_of(path: Path, wanted: set[int]) -> dict[int, Row]:
    """The ``wanted`` rows of a file, by their place."""
    return {place: row for place, row in enumerate(lines(path)) if place in wanted}
