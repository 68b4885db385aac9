"""The part of the page that says what a reward model is worth, and how to use it."""

import html
from typing import Any

from praison_agent_rl.data import Row
from praison_agent_rl.records import RewardCard
from praison_agent_rl.report.answers import prompts_of
from praison_agent_rl.report.examples import Room, question_of, words_of
from praison_agent_rl.report.numbers import Facts
from praison_agent_rl.report.page import figure, section, table, text
from praison_agent_rl.report.pairs import text_of
from praison_agent_rl.report.plots import margins, scores, shares

_ROOM = Room(1500, 1)
_TITLES = {"wrong": "What it gets most wrong", "right": "What it tells apart most surely"}


def scorer_section(facts: Facts) -> str:
    """Accuracy, margins and scores, how to use the model, and pairs that it got right and wrong."""
    card = facts.card
    if card is None:
        return ""
    return section("Reward model", _plots(facts, card), _how_measured(facts), _scores_of(card), _use(card)) + section(
        "Pairs side by side", _examples(facts)
    )


def _plots(facts: Facts, card: RewardCard) -> str:
    rows: list[tuple[str, float, tuple[float, float] | None]] = [
        ("this reward model", card.accuracy, (card.accuracy_low, card.accuracy_high))
    ]
    pairs = facts.pairs
    if pairs is not None and pairs.by_length:
        rows.append((*pairs.by_length, None))
    drawn = [shares(rows)]
    if pairs is not None and pairs.chosen:
        drawn += [margins(pairs.margins), scores(pairs.chosen, pairs.rejected)]
    return f'<div class="pair">{"".join(drawn)}</div>'


def _how_measured(facts: Facts) -> str:
    said = [
        "Right means that the chosen answer of a held-out pair scores higher than the rejected one; an equal score is "
        "half right. Pairs of one prompt count as one, with their mean. The interval is Wilson's over prompts."
    ]
    if facts.pairs is not None and facts.pairs.by_length:
        rule, share = facts.pairs.by_length
        said.append(
            f"{rule[0].upper()}{rule[1:]} is the chosen one of {share:.0%} of these pairs: so much is to be had "
            "without reading."
        )
    return "".join(f'<p class="soft">{text(part, 600)}</p>' for part in said)


def _scores_of(card: RewardCard) -> str:
    names = ["mean", "standard deviation", *card.score_quantiles]
    values = [card.score_mean, card.score_std, *card.score_quantiles.values()]
    listed = table(names, [[figure(value) for value in values]], numbers=range(len(names)))
    said = (
        "Only differences mean something: the zero of the scores is arbitrary. scale: zscore takes off this mean and "
        "divides by this spread."
    )
    return f'<h3>Scores of the answers that it was trained on</h3>{listed}<p class="soft">{said}</p>'


def _use(card: RewardCard) -> str:
    if card.version is None:
        return ""
    name = f"rewards/{card.name}/{card.version}"
    lines = f"reward_funcs:\n  - {{reward: {name}, scale: zscore, clip: 3}}\n"
    code = f'from praison_agent_rl.rewards import from_model\n\nscore = from_model("{name}")\n'
    code += f"score({_PROMPT[card.form]}, {_ANSWER[card.form]})"
    reads = "plain text" if card.form == "text" else "messages"
    tools = [str(tool.get("function", {}).get("name")) for tool in card.tools]
    shown = f" The tools {text(', '.join(tools), 300)} are shown with each prompt, as in training." if tools else ""
    unsure = (
        ""
        if card.passed
        else f" rewards/{card.name} alone does not mean this version, which was not shown to be right."
    )
    return (
        f"<h3>How to use it</h3><pre>{text(lines, 500)}</pre><pre>{text(code, 1000)}</pre>"
        f'<p class="soft">It reads {reads}, at most {card.max_length:,} tokens; longer ones lose their beginning.'
        f"{shown}{text(unsure, 300)}</p>"
    )


_PROMPT = {"text": '["How many?"]', "messages": '[[{"role": "user", "content": "How many?"}]]'}
_ANSWER = {"text": '["Four."]', "messages": '[[{"role": "assistant", "content": "Four."}]]'}


def _examples(facts: Facts) -> str:
    if facts.pairs is None or not facts.run.held_out_rows.exists():
        return ""
    shown = facts.pairs.shown()
    rows = prompts_of(facts.run.held_out_rows, {place for places in shown.values() for place in places})
    if not rows:
        return ""
    return "".join(
        f"<h3>{html.escape(_TITLES[kind])}</h3>"
        + ("".join(_case(facts, place, rows[place]) for place in places if place in rows) or "<p>None.</p>")
        for kind, places in shown.items()
    )


def _case(facts: Facts, place: int, row: Row) -> str:
    assert facts.pairs is not None
    margin = facts.pairs.margins[place]
    kind = "good" if margin > 0 else "bad"
    sides = "".join(
        _side(name, row.get(name), score)
        for name, score in (("chosen", facts.pairs.chosen[place]), ("rejected", facts.pairs.rejected[place]))
    )
    return (
        f'<article class="case"><header><span class="tag">pair {place + 1:,} · '
        f'<span class="{kind}">margin {figure(margin, sign=True)}</span></span>{_asked(row)}</header>'
        f'<div class="sides">{sides}</div></article>'
    )


def _asked(row: Row) -> str:
    """The prompt; a pair of whole texts has none."""
    return question_of(row, _ROOM) if row.get("prompt") is not None else ""


def _side(name: str, answer: Any, score: float) -> str:
    return (
        f'<div class="side"><span class="tag">{name} · {figure(score)}</span>{words_of(text_of(answer), _ROOM)}</div>'
    )
