"""What a run showed while it trained: what went wrong and what to change, and how the watched prompts fared."""

from typing import Any

from praison_agent_rl.report.numbers import Facts
from praison_agent_rl.report.page import count, figure, section, table, text
from praison_agent_rl.report.plots import curves

CHOSEN = "the adapter is that of "
"""How the note begins that says which step's adapter was taken (``training/watching.py``)."""
_MOST_LOOKS = 20


def showed_section(facts: Facts) -> str:
    """The diagnosis; nothing for a run that was made before there was one, or by another method."""
    if "watch" not in facts.plan.config or facts.plan.candidate:
        return ""
    if not facts.plan.config["watch"]:
        return section("What the run showed", '<p class="soft">This run was not watched (watch: false).</p>')
    if not facts.steps and not facts.diagnosis:
        return ""
    return section("What the run showed", _told(facts), _looks(facts))


def _told(facts: Facts) -> str:
    if not facts.diagnosis:
        return (
            f"<p>Nothing out of the ordinary was seen in {count(len(facts.steps), 'step')}. Looked for were rewards "
            "that teach nothing or fail, signs of reward hacking, lengths, cut-off, identical and repetitive answers, "
            "entropy, drift, NaN and a learning rate that is too high.</p>"
        )
    rows = [
        [
            _badge(symptom),
            f'<td class="said"><b>{text(symptom.get("name"), 80)}</b>: {text(symptom.get("text"), 900)}'
            f'<div class="soft">What to change: {text(symptom.get("advice"), 900)}</div></td>',
        ]
        for symptom in facts.diagnosis
    ]
    return table(["", "what was seen"], rows)


def _badge(symptom: dict[str, Any]) -> str:
    kind, word = ("bad", "■ ended the run") if symptom.get("severity") == "stop" else ("open", "▲ warning")
    return f'<td class="{kind}">{word}<div class="soft">step {text(symptom.get("step"), 12)}</div></td>'


def _looks(facts: Facts) -> str:
    looks = facts.watched
    if not looks:
        return (
            '<p class="soft">No prompts were put aside to watch with (watch_prompts), so the last checkpoint was '
            "taken.</p>"
        )
    prompts = count(len(looks[0].get("totals") or []), "prompt")
    said = (
        f"{prompts} of the training data were put aside and not trained on; each look asks them twice. They choose the "
        "checkpoint; whether it is better than the base is judged on other prompts, above."
    )
    at = [int(look["step"]) for look in looks]
    drawn = curves("reward on the watched prompts", at, {"total": [look.get("total") for look in looks]})
    chosen = next((note for note in reversed(facts.notes) if note.startswith(CHOSEN)), None)
    taken = f"<p>{text(chosen[:1].upper() + chosen[1:], 400)}.</p>" if chosen else ""
    pair = f'<div class="pair">{drawn}{_table(looks)}</div>'
    return f'<h3>The watched prompts</h3><p class="soft">{text(said, 400)}</p>{taken}{pair}'


def _table(looks: list[dict[str, Any]]) -> str:
    shown = looks[:1] + looks[1:][-_MOST_LOOKS:]
    rows = [
        [
            f"{int(look['step']):,}",
            figure(look.get("total")),
            figure(look.get("gain"), sign=True) if look["step"] else "",
            "±" + figure(look["gain_error"]) if look["step"] and look.get("gain_error") is not None else "",
            "★ best so far" if look.get("best") else "" if look["step"] else "before training",
        ]
        for look in shown
    ]
    head = ["step", "reward", "gain", "std. error", ""]
    more = len(looks) - len(shown)
    rest = f'<p class="soft">{count(more, "look")} more in report.json.</p>' if more > 0 else ""
    return f"<div>{table(head, rows, numbers=(0, 1, 2, 3), small=True)}{rest}</div>"
