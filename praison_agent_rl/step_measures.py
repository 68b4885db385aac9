"""What the answers of one training step show in numbers: how their scores lie, how alike and how repetitive they are.

Pure: texts and scores in, numbers out.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from praison_agent_rl.text_measures import faulty_tool_call, repetition, units

_EQUAL = 1e-6  # scores are sums of floats


def measure(
    texts: Sequence[str], totals: Sequence[float | None], size: int, *, tools: Sequence[Mapping[str, Any]] = ()
) -> dict[str, float | None]:
    """Numbers of the answers ``texts``, whose weighted scores are ``totals``, in groups of ``size`` to one prompt."""
    starts = range(0, len(texts), size)
    groups = [list(zip(texts[start : start + size], totals[start : start + size], strict=True)) for start in starts]
    scored = [total for total in totals if total is not None]
    low, high = (min(scored), max(scored)) if scored else (None, None)
    repeated = [repeats(text) for text in texts]
    found: dict[str, float | None] = {
        "groups": len(groups),
        "answers": len(scored),
        "silent": _share(_is_silent([total for _, total in group]) for group in groups),
        "low": low,
        "at_low": _share(math.isclose(total, low, abs_tol=_EQUAL) for total in scored) if low is not None else None,
        "high": high,
        "at_high": _share(math.isclose(total, high, abs_tol=_EQUAL) for total in scored) if high is not None else None,
        "identical": _share(alike for group in groups for alike in _alike([text for text, _ in group])),
        "repetition": statistics.fmean(repeated) if repeated else None,
        "length_pays": _pays(groups, len),
        "repetition_pays": _pays(groups, repeats),
    }
    if tools:
        found["faulty_calls"] = _share(faulty_tool_call(text, tools) for text in texts)
    return found


def repeats(text: str) -> float:
    """Share of an answer that repeats itself: of its 4-grams, or of its words one and the same.

    >>> repeats("good and good and good"), repeats("a cat sat here"), repeats("no")
    (0.5, 0.0, 0.0)
    """
    words = units(text)
    most = Counter(words).most_common(1)[0][1] if words else 0
    return max(repetition(text), (most - 1) / (len(words) - 1) if len(words) > 1 else 0.0)


def text_of(completion: Any) -> str:
    """The text of a completion as TRL keeps it: text, or messages whose contents follow each other."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content") or "") for message in completion)


def _is_silent(totals: Sequence[float | None]) -> bool:
    """Whether a group has no two scores that differ, and so no gradient."""
    scored = [total for total in totals if total is not None]
    return len(scored) < 2 or math.isclose(min(scored), max(scored), abs_tol=_EQUAL)


def _alike(texts: Sequence[str]) -> list[bool]:
    counted = Counter(texts)
    return [counted[text] > 1 for text in texts]


def _share(flags: Any) -> float | None:
    values = [bool(flag) for flag in flags]
    return sum(values) / len(values) if values else None


def _pays(groups: Sequence[Sequence[tuple[str, float | None]]], of: Callable[[str], float]) -> float | None:
    """Correlation of what ``of`` measures with the score, both less the mean of their group."""
    pairs: list[tuple[float, float]] = []
    for group in groups:
        scored = [(float(of(text)), total) for text, total in group if total is not None]
        if len(scored) < 2:
            continue
        middle, mean = (statistics.fmean(side) for side in zip(*scored, strict=True))
        pairs += [(value - middle, total - mean) for value, total in scored]
    spread = [math.sqrt(sum(pair[side] ** 2 for pair in pairs)) for side in (0, 1)]
    if not pairs or min(spread) < _EQUAL:
        return None
    return sum(value * total for value, total in pairs) / (spread[0] * spread[1])
