"""Text, figures and tables for a page that is one file; all that comes from data passes through here, and is shown."""

import html
import math
from collections.abc import Sequence
from typing import Any

_CONTROLS = (*(code for code in range(32) if code not in (9, 10)), *range(0x7F, 0xA0))
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_HIDDEN = {code: f"[U+{code:04X}]" for code in (*_CONTROLS, *_DIRECTIONS)}  # a text is not to look like another one
_HIDDEN |= {code: "\ufffd" for code in range(0xD800, 0xE000)}  # halves of emoji: UTF-8 has no form for them

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched and no script runs, whatever an answer holds."""


def clean(value: Any, limit: int = 200) -> str:
    """``value`` as text of at most ``limit`` characters, with what would be invisible made visible."""
    text = str(value).replace("\r\n", "\n")
    cut = text[:limit]
    return cut.translate(_HIDDEN) + ("…" if len(text) > limit else "")


def text(value: Any, limit: int = 200) -> str:
    """``clean``, escaped for HTML."""
    return html.escape(clean(value, limit))


def figure(value: float | None, *, sign: bool = False) -> str:
    """A number for people.

    >>> figure(0.4375), figure(0.25, sign=True), figure(float("nan")), figure(12345.6)
    ('0.438', '+0.250', 'not a number', '12,346')
    """
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "not a number"
    plus = "+" if sign else ""
    if value and (abs(value) < 0.0005 or abs(value) >= 1e9):
        return f"{value:{plus}.2g}"
    return f"{value:{plus},.3f}" if abs(value) < 1000 else f"{value:{plus},.0f}"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun.

    >>> count(1, "prompt"), count(1200, "prompt"), count(2, "reply", "replies")
    ('1 prompt', '1,200 prompts', '2 replies')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), small: bool = False
) -> str:
    """A table of cells that are HTML already; the columns ``numbers`` are aligned to the right.

    A cell that begins with ``<td`` keeps its own attributes.
    """

    def cell(place: int, content: str, tag: str) -> str:
        kind = ' class="n"' if place in numbers else ""
        return content if content.startswith(f"<{tag}") else f"<{tag}{kind}>{content}</{tag}>"

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(cell(place, content, tag) for place, content in enumerate(cells)) + "</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    kind = "wide small" if small else "wide"
    return f'<div class="{kind}"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def moment(time: str) -> str:
    """An ISO time in UTC for people.

    >>> moment("2026-11-29T22:18:04+00:00")
    '2026-11-29 22:18:04 UTC'
    """
    return time.replace("T", " ", 1).removesuffix("+00:00") + " UTC" if time.endswith("+00:00") else time


def section(title: str, *parts: str) -> str:
    """A part of the page under its heading; nothing if it has no content."""
    content = "".join(parts)
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>" if content else ""


def document(title: str, body: str) -> str:
    """The whole page; it loads nothing and runs nothing."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


# Series colours of Okabe and Ito (safe for colour-blind readers), lighter ones of the same hues on dark.
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #fff; --card: #f6f8fa; --line: #d1d9e0;
--good: #1a7f37; --bad: #c62828; --open: #9a6700; --none: #9aa4af; --c1: #0072b2; --c2: #d55e00; --c3: #008a64;
--c4: #a8508a; --c5: #b07d00; --c6: #3a7ca5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --paper: #0f141a; --card: #171d25;
--line: #36404b; --good: #4ac26b; --bad: #ff7b72; --open: #e3b341; --none: #6b7682; --c1: #58a6ff; --c2: #ff9e57;
--c3: #2bc79a; --c4: #e29bc8; --c5: #e6b93d; --c6: #8cc8f0; } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
background: var(--paper); margin: 0; }
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
section { margin-top: 2.75rem; }
h1 { font-size: 1.45rem; line-height: 1.35; margin: .15rem 0 .35rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; } ul { padding-left: 1.2rem; } li { margin: .3rem 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: .88em; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); } .open { color: var(--open); }
.verdict { border: 1px solid var(--line); border-left: .45rem solid var(--tone); border-radius: .5rem;
padding: 1rem 1.25rem; background: var(--card); margin-top: .75rem; }
.tone-good { --tone: var(--good); } .tone-bad { --tone: var(--bad); } .tone-open { --tone: var(--open); }
.badge { display: inline-block; font-size: .78rem; font-weight: 650; letter-spacing: .03em; text-transform: uppercase;
color: var(--tone); }
.forced { border: 2px solid var(--bad); border-radius: .5rem; color: var(--bad); font-weight: 650;
padding: .7rem 1rem; }
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10rem), 1fr));
margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.2rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; line-height: 1.35; display: block; }
.wide { overflow-x: auto; } .small { max-width: 36rem; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; }
td, th { border-bottom: 1px solid var(--line); padding: .4rem .6rem; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: .84rem; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { min-width: 8rem; overflow-wrap: anywhere; } td.said { min-width: 14rem; overflow-wrap: anywhere; }
.plots { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr));
margin: 1rem 0; }
.pair { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
margin: 1rem 0; align-items: start; }
.plot { margin: 0; max-width: 36rem; }
.plot figcaption { font-size: .88rem; font-weight: 600; overflow-wrap: anywhere; }
.plot svg { width: 100%; height: auto; display: block; } .plot svg text { font-family: inherit !important; }
.case { border: 1px solid var(--line); border-radius: .5rem; margin: .75rem 0; overflow: hidden; }
.case > header { background: var(--card); padding: .55rem .9rem; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.side { padding: .6rem .9rem; border-top: 1px solid var(--line); min-width: 0; }
.words { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; margin: .2rem 0; }
.tag { color: var(--soft); font-size: .78rem; font-weight: 650; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .4rem; padding: .7rem .9rem;
overflow: auto; font: .84rem/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; margin: .5rem 0; }
details { margin: .4rem 0; } summary { cursor: pointer; color: var(--soft); font-size: .88rem; }
@media (max-width: 40rem) { main { padding: 1rem .9rem 3rem; } h1 { font-size: 1.2rem; } .tile { padding: .5rem .7rem; }
.tile b { font-size: 1.05rem; } table { font-size: .82rem; } td, th { padding: .35rem .2rem; }
th { white-space: normal; font-size: .76rem; } td.n.free { white-space: normal; } td.name { min-width: 4.8rem; } }
@media print { main { max-width: none; } .case, .tile, .plot { break-inside: avoid; } }
"""
