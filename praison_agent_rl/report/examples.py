"""Answers of both models side by side; long ones are folded, and very long ones cut."""

import html
from typing import Any, NamedTuple

from praison_agent_rl.data import Row
from praison_agent_rl.report.answers import prompts_of, texts_of
from praison_agent_rl.report.numbers import Facts
from praison_agent_rl.report.page import count, figure, section, text

_OPEN = 500
"""Characters that are read without unfolding."""
_ROOM = 800_000
"""Bytes that all answers together may take on the page."""
_SCORES = 12
_TITLES = {
    "best": "What got better: the largest gains",
    "worst": "What got worse: the largest losses",
    "random": "Drawn at random",
}


class Room(NamedTuple):
    """How much is shown of each prompt."""

    characters: int
    """Of a text, the longest that is there at all."""
    samples: int


_ROOMS = (Room(3000, 4), Room(1000, 2), Room(300, 1))


def examples(facts: Facts) -> str:
    """What got better, what got worse, and some at random; the less of each, the more room they would take."""
    if not facts.shown["random"]:
        return ""
    wanted = {prompt for prompts in facts.shown.values() for prompt in prompts}
    rows = prompts_of(facts.run.held_out_rows, wanted)
    base, new = (texts_of(facts.run.answers(side), wanted) for side in ("base", "new"))
    told = ""
    for room in _ROOMS:
        told = "".join(_group(facts, kind, room, rows, base, new) for kind in _TITLES)
        if len(told.encode()) <= _ROOM:
            break
    of_pair = " What it says of preference and margin is said of the prompt's pair." if facts.method == "cpo" else ""
    intro = (
        '<p class="soft">Greedy answers to held-out prompts; gains are means over all answers to the prompt. '
        f"The random ones were drawn from all prompts by the run's seed.{of_pair}</p>"
    )
    return section("Answers side by side", intro, told)


Answers = dict[int, list[Row]]


def _group(facts: Facts, kind: str, room: Room, rows: dict[int, Row], base: Answers, new: Answers) -> str:
    cases = "".join(
        _case(prompt, facts.gains.get(prompt), room, rows.get(prompt, {}), (base.get(prompt, []), new.get(prompt, [])))
        for prompt in facts.shown[kind]
    )
    return f"<h3>{html.escape(_TITLES[kind])}</h3>{cases or '<p>None.</p>'}"


def _case(prompt: int, gain: float | None, room: Room, row: Row, sides: tuple[list[Row], list[Row]]) -> str:
    base, new = sides
    kind = "good" if gain and gain > 0 else "bad" if gain and gain < 0 else ""
    # what shows the difference is seen without unfolding
    same = bool(base and new) and base[0].get("text") == new[0].get("text")
    gained = "no score of both" if gain is None else figure(gain, sign=True)
    return (
        f'<article class="case"><header><span class="tag">prompt {prompt + 1:,} · '
        f'<span class="{kind}">{gained}</span></span>{question_of(row, room)}</header>'
        f'<div class="sides">{_side("base", base, room, unfold=same)}{_side("new", new, room, unfold=same)}</div>'
        "</article>"
    )


def _side(name: str, answers: list[Row], room: Room, *, unfold: bool) -> str:
    first, others = answers[:1], answers[1 : room.samples]
    shown = "".join(_answer(answer, room) for answer in first) or '<p class="soft">no answer</p>'
    if others:
        folded = "".join(_answer(answer, room) for answer in others)
        label = count(len(others), "sampled answer")
        shown += f"<details{' open' if unfold else ''}><summary>{label}</summary>{folded}</details>"
    return f'<div class="side"><span class="tag">{name}</span>{shown}</div>'


def _answer(answer: Row, room: Room) -> str:
    if answer.get("error") is not None:
        return f'<p class="bad words" dir="auto">failed: {text(answer["error"], 500)}</p>'
    scores = {**answer.get("rewards", {}), **{f"{name} (not trained on)": s for name, s in _judged(answer).items()}}
    listed = " · ".join(f"{text(name, 60)} {figure(score)}" for name, score in list(scores.items())[:_SCORES])
    length = count(answer.get("tokens", 0), "token")
    return f'{words_of(answer.get("text"), room)}<p class="soft">{listed}{" · " if listed else ""}{length}</p>'


def _judged(answer: Row) -> dict[str, Any]:
    return answer.get("judged") or {}


def question_of(row: Row, room: Room) -> str:
    """The last message of the prompt, what stands before it in a word, and the answer that the data expects."""
    prompt, expected = row.get("prompt"), row.get("answer")
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    about = [f"after {count(len(messages) - 1, 'other message')}"] if len(messages) > 1 else []
    if isinstance(expected, str | int | float | list):
        accepted = expected if isinstance(expected, list) else [expected]
        about.append(f"expected: {text(' or '.join(map(str, accepted)), 300)}")
    return words_of(last.get("content"), room) + (f'<p class="soft">{" · ".join(about)}</p>' if about else "")


def words_of(value: Any, room: Room) -> str:
    """A text as it is, folded where it is long and cut where it is very long."""
    words = "" if value is None else str(value)
    if not words.strip():
        return '<p class="soft">(empty)</p>'
    if len(words) <= min(_OPEN, room.characters):
        return f'<p class="words" dir="auto">{text(words, _OPEN)}</p>'
    opened = min(_OPEN, room.characters)
    rest, cut = words[opened : room.characters], len(words) - room.characters
    gone = f'<p class="soft">cut here; {cut:,} characters more are in the run\'s folder</p>' if cut > 0 else ""
    start = f'<p class="words" dir="auto">{text(words[:opened], opened)}…</p>'
    if not rest:
        return start + gone
    return (
        f"{start}<details><summary>the rest: {count(len(words) - opened, 'character')}</summary>"
        f'<p class="words" dir="auto">{text(rest, room.characters)}</p>{gone}</details>'
    )
