"""What a reward model said of the held-out pairs, and what a rule that only looks at length would have said."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from praison_agent_rl.data import Row, prompt_key
from praison_agent_rl.report.answers import lines

SHOWN = 4
"""Pairs shown of each kind."""


@dataclass(frozen=True)
class Pairs:
    """The held-out pairs in numbers; their texts are not kept."""

    chosen: list[float]
    """Score of the chosen answer, by place of the row."""
    rejected: list[float]
    longer: float | None
    """Share of prompts whose chosen answer is the longer one, in characters; None where the rows are not there."""

    @property
    def margins(self) -> list[float]:
        """Chosen less rejected score of each pair."""
        return [one - other for one, other in zip(self.chosen, self.rejected, strict=True)]

    @property
    def by_length(self) -> tuple[str, float] | None:
        """The better of the two rules that look at length alone, in words, with how often it is right."""
        if self.longer is None:
            return None
        longer = self.longer >= 0.5
        return f"the {'longer' if longer else 'shorter'} answer", self.longer if longer else 1 - self.longer

    def shown(self) -> dict[str, list[int]]:
        """The places of the pairs that are told apart worst, and best."""
        margins = {place: margin for place, margin in enumerate(self.margins) if math.isfinite(margin)}
        order = sorted(margins, key=lambda place: margins[place])
        wrong = [place for place in order if margins[place] < 0]
        right = [place for place in reversed(order) if margins[place] > 0]
        return {"wrong": wrong[:SHOWN], "right": right[:SHOWN]}


def read_pairs(scores: Path, rows: Path) -> Pairs | None:
    """The scores of the held-out pairs; None for a run that scored none."""
    if not scores.exists():
        return None
    told = list(lines(scores))
    return Pairs([row["chosen"] for row in told], [row["rejected"] for row in told], _longer(rows))


def _longer(rows: Path) -> float | None:
    """Over prompts, as the accuracy is: an equal length is half."""
    by_prompt: dict[str, list[float]] = {}
    for row in lines(rows):
        one, other = length_of(row["chosen"]), length_of(row["rejected"])
        by_prompt.setdefault(prompt_key(row), []).append((one > other) + 0.5 * (one == other))
    return statistics.fmean(map(statistics.fmean, by_prompt.values())) if by_prompt else None


def length_of(answer: Any) -> int:
    """Characters of an answer.

    >>> length_of("four"), length_of([{"role": "assistant", "content": "four"}, {"role": "assistant", "content": None}])
    (4, 4)
    """
    return len(text_of(answer))


def text_of(answer: Any) -> str:
    """An answer as it is read: text, or the texts and tool calls of its messages."""
    if not isinstance(answer, list):
        return "" if answer is None else str(answer)
    return "\n".join(said for message in answer if isinstance(message, dict) and (said := _said(message)))


def _said(message: Row) -> str:
    content = message.get("content")
    parts = [part.get("text", "") for part in content] if isinstance(content, list) else [content or ""]
    calls = message.get("tool_calls") or []
    return " ".join([*filter(None, map(str, parts)), *(str(call) for call in calls)])
