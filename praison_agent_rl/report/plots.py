"""Plots of a run as SVG inside the page, in the page's own colours."""

import html
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from praison_agent_rl.errors import MissingExtra
from praison_agent_rl.records import Interval
from praison_agent_rl.report.page import clean, text

# Colours that nothing else has stand for the page's, so that one drawing is right on light and on dark.
_INK, _LINE, _GOOD, _BAD, _SOFT = (f"#0a0b0{place}" for place in range(1, 6))
_SERIES = tuple(f"#0a0b1{place}" for place in range(1, 7))
_IN_PAGE = {_INK: "var(--soft)", _LINE: "var(--line)", _GOOD: "var(--good)", _BAD: "var(--bad)", _SOFT: "var(--none)"}
_IN_PAGE |= {colour: f"var(--c{place})" for place, colour in enumerate(_SERIES, 1)}

MOST_POINTS = 200
"""Points of a curve; of more steps, means of neighbours are drawn."""
_SCALE = 20  # intervals further apart than this factor are not readable on one axis
_NAME = 26
_BARS = 24


def curves(
    title: str,
    at: Sequence[int],
    lines: dict[str, list[float | None]],
    *,
    spread: list[float | None] | None = None,
    share: bool = False,
) -> str:
    """Metrics over steps; ``spread`` is drawn as a band around the only line, ``share`` fixes the axis at 0 to 1."""
    size = math.ceil(len(at) / MOST_POINTS)
    places = [float(sum(part) / len(part)) for part in _parts(list(at), size)]
    with _figure((3.4, 2.0)) as (figure, axes):
        for colour, (name, line) in zip(_SERIES, lines.items(), strict=False):
            values = _thinned(line, size)
            marker = "o" if len(values) == 1 else None
            axes.plot(places, values, color=colour, label=clean(name, _NAME), linewidth=1.6, marker=marker)
            if spread is not None:
                widths = _thinned(spread, size)
                low, high = ([v + s * w for v, w in zip(values, widths, strict=True)] for s in (-1, 1))
                axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if share:
            axes.set_ylim(-0.04, 1.04)
        if len(lines) > 1:
            axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
        return _framed(title, figure)


def forest(rows: Sequence[tuple[str, Interval]]) -> str:
    """Differences with their intervals, one below the other; those of another size get an axis of their own."""
    shown = [(name, found) for name, found in rows if all(map(math.isfinite, (found.low, found.high)))]
    groups: list[list[tuple[str, Interval]]] = []
    for name, found in shown:
        near = (group for group in groups if _comparable(found, group[0][1]))
        group = next(near, None)
        if group is None:
            groups.append(group := [])
        group.append((name, found))
    return "".join(_forest(group, own=place > 0) for place, group in enumerate(groups))


def histogram(gains: Sequence[float]) -> str:
    """How many prompts got how much better or worse."""
    return _signed(gains, "difference of the total, new less base", "prompts", "Prompt by prompt", ("better", "worse"))


def margins(values: Sequence[float]) -> str:
    """How many pairs a reward model told apart by how much, rightly or not."""
    axis = "margin: score of the chosen answer less that of the rejected one"
    kept = [value for value in values if math.isfinite(value)]
    return _signed(kept, axis, "pairs", "Pair by pair", ("right", "wrong")) if kept else ""


def scores(chosen: Sequence[float], rejected: Sequence[float]) -> str:
    """How the scores of chosen and of rejected answers lie."""
    sides = [[value for value in side if math.isfinite(value)] for side in (chosen, rejected)]
    if not all(sides):
        return ""
    with _figure((4.4, 2.2)) as (figure, axes):
        first, last = min(map(min, sides)), max(map(max, sides))
        for name, side, colour in zip(("chosen", "rejected"), sides, (_GOOD, _BAD), strict=True):
            axes.hist(side, bins=_BARS, range=(first, last), color=colour, alpha=0.3)
            axes.hist(side, bins=_BARS, range=(first, last), color=colour, histtype="step", linewidth=1.5, label=name)
        axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
        axes.set_xlabel("score")
        axes.set_ylabel("answers")
        axes.yaxis.get_major_locator().set_params(integer=True)
        return _framed("Scores of the held-out answers", figure)


def shares(rows: Sequence[tuple[str, float, tuple[float, float] | None]]) -> str:
    """How often each is right, from 0 to 1, with its interval if it has one, beside the line of a coin."""
    with _figure((4.4, 0.75 + 0.32 * len(rows))) as (figure, axes):
        for place, (_, share, interval) in enumerate(rows):
            low, high = interval or (share, share)
            colour = _SOFT if interval is None else _GOOD if low > 0.5 else _BAD if high < 0.5 else _SERIES[0]
            axes.plot([low, high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
            for end in (low, high) if interval else ():
                axes.plot([end], [place], marker="|", color=colour, markersize=8, markeredgewidth=2)
            axes.plot([share], [place], marker="o", color=colour, markersize=7)
        axes.axvline(0.5, color=_INK, linewidth=1)
        axes.set_xlim(0, 1.02)
        axes.set_yticks(range(len(rows)), [clean(name, _NAME) for name, _, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel("share of held-out pairs told apart rightly (line: a coin)")
        return _framed("How often it is right, with its 95 % interval", figure)


def _signed(gains: Sequence[float], axis: str, what: str, title: str, words: tuple[str, str]) -> str:
    """A histogram of what is above, at and below zero."""
    width = (max(gains) - min(gains)) / _BARS or 1.0
    if not math.isfinite(width):
        return ""
    # bins that begin at zero, so that no bar mixes what got better with what got worse
    first, last = math.floor(min(gains) / width), math.floor(max(gains) / width) + 1
    worse, equal = [gain for gain in gains if gain < 0], [gain for gain in gains if gain == 0]
    better = [gain for gain in gains if gain > 0]
    with _figure((4.4, 2.2)) as (figure, axes):
        edges = [place * width for place in range(first, last + 1)]
        axes.hist([worse, equal, better], bins=edges, stacked=True, color=[_BAD, _SOFT, _GOOD], alpha=0.85)
        axes.axvline(0, color=_INK, linewidth=1)
        axes.set_xlabel(axis)
        axes.set_ylabel(what)
        axes.yaxis.get_major_locator().set_params(integer=True)
        counted = f"{title}: {len(better):,} {words[0]}, {len(equal):,} equal, {len(worse):,} {words[1]}"
        return _framed(counted, figure)


def _forest(rows: Sequence[tuple[str, Interval]], *, own: bool) -> str:
    with _figure((4.4, 0.75 + 0.32 * len(rows))) as (figure, axes):
        for place, (_, found) in enumerate(rows):
            sure = found.low > 0 or found.high < 0
            colour = _GOOD if found.low > 0 else _BAD if found.high < 0 else _SERIES[0]
            axes.plot([found.low, found.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
            for end in (found.low, found.high):
                axes.plot([end], [place], marker="|", color=colour, markersize=8, markeredgewidth=2)
            face = colour if sure else "none"
            axes.plot([found.difference], [place], marker="o", color=colour, markerfacecolor=face, markersize=7)
        axes.axvline(0, color=_INK, linewidth=1)
        axes.set_yticks(range(len(rows)), [clean(name, _NAME) for name, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel("difference, new less base")
        title = (
            "The same on a scale of its own" if own else "Difference with its 95 % interval (filled: zero is outside)"
        )
        return _framed(title, figure)


def _comparable(a: Interval, b: Interval) -> bool:
    sizes = [max(abs(found.low), abs(found.high)) for found in (a, b)]
    return 0 in sizes or 1 / _SCALE < sizes[0] / sizes[1] < _SCALE


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _thinned(line: list[float | None], size: int) -> list[float]:
    """Means of ``size`` neighbours, without those that are no number; NaN where none is left."""
    kept = ([v for v in part if v is not None and math.isfinite(v)] for part in _parts(line, size))
    return [sum(part) / len(part) if part else math.nan for part in kept]


@contextmanager
def _figure(size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """An empty figure with axes in the page's colours."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(f'the report needs {error.name}: pip install "praison-agent-rl[train]"') from error
    style = {
        "svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 8.5, "text.parse_math": False,
        "axes.edgecolor": _LINE, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _LINE,
        "ytick.color": _LINE, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "grid.color": _LINE, "grid.linewidth": 0.5,
        "axes.axisbelow": True,
    }  # fmt: skip
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in a script that the measuring font lacks; the browser has it
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.add_subplot()


def _framed(title: str, figure: Any) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' d="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)  # a hundredth of a point
    for stand_in, colour in _IN_PAGE.items():
        svg = svg.replace(stand_in, colour)
    label = html.escape(clean(title), quote=True)
    return f'<figure class="plot" role="img" aria-label="{label}"><figcaption>{text(title)}</figcaption>{svg}</figure>'
