"""The parts of a run's page, from top to bottom; each is HTML, and nothing where there is nothing to say."""

import html
from collections.abc import Iterator
from typing import Any

import yaml

from praison_agent_rl.dataset_building.comparing import PAIR_REASONS
from praison_agent_rl.dataset_building.rows import REASONS
from praison_agent_rl.records import Comparison, Interval
from praison_agent_rl.report.answers import Side
from praison_agent_rl.report.numbers import Facts, repeat_commands, why_not_repeatable
from praison_agent_rl.report.page import clean, count, figure, moment, section, table, text
from praison_agent_rl.report.plots import forest, histogram
from praison_agent_rl.report.verdicts import badge, card_badge, card_tone, tone, what_is_needed

MOST_ROWS = 40
"""Rewards, guards, findings and notes that the page lists; report.json has all."""


def summary(facts: Facts) -> str:
    """The verdict, and the numbers that it rests on."""
    plan, comparison, decided = facts.plan, facts.comparison, facts.decided
    head = [f"agent {plan.agent}" if plan.agent else None, facts.version.get("name"), f"run {facts.run.root.name}"]
    forced = ""
    if decided and decided.forced and not decided.passed:
        forced = f'<p class="forced">Promoted by force. The gate said: {text(decided.text, 1000)}</p>'
    reason = ""
    if decided and decided.text != decided.status and not forced:
        reason = f"<p>Gate: {text(decided.text, 1000)}</p>"
    needed = what_is_needed(comparison, decided) if comparison else None
    of_card = facts.method == "reward"
    colour = card_tone(facts.card) if of_card else tone(comparison, decided)
    word = card_badge(facts.card) if of_card else badge(comparison, decided)
    return (
        f'<p class="soft">{text(" · ".join(str(part) for part in head if part), 300)}</p>{forced}'
        f'<header class="verdict tone-{colour}"><span class="badge">'
        f"{text(word)}</span><h1>{text(facts.sentence, 600)}</h1>{reason}"
        f"{f'<p>{text(needed, 400)}</p>' if needed else ''}</header>{_tiles(facts)}{_facts_line(facts)}"
    )


def _tiles(facts: Facts) -> str:
    comparison, decided = facts.comparison, facts.decided
    tiles = []
    if card := facts.card:
        kind = "good" if card.passed else ""
        between = f"right on held-out pairs, 95 % interval {card.accuracy_low:.0%} to {card.accuracy_high:.0%}"
        tiles.append((between, f"{card.accuracy:.0%}", kind))
        tiles.append(("chosen less rejected score, mean", figure(card.margin, sign=True), ""))
        tiles.append(("pairs trained on", f"{card.train:,}", ""))
        tiles.append(("held-out prompts", f"{card.held_out:,}", ""))
    if comparison:
        total = comparison.total
        between = f"95 % interval {figure(total.low, sign=True)} to {figure(total.high, sign=True)}"
        what = "right on held-out pairs" if facts.by_pairs else "mean reward"
        tiles.append((f"{what}, base → new", f"{figure(total.base)} → {figure(total.new)}", ""))
        tiles.append((between, figure(total.difference, sign=True), _kind(total)))
        outcome = f"{comparison.wins:,} · {comparison.ties:,} · {comparison.losses:,}"
        tiles.append(("prompts better · equal · worse", outcome, ""))
    if decided:
        broken = sum(guard.broken for guard in decided.guards)
        kept = f"{len(decided.guards) - broken:,} of {len(decided.guards):,}"
        tiles.append(("guards kept", kept, "bad" if broken else ""))
        tiles.append(("signs of reward hacking", f"{len(decided.findings):,}", "open" if decided.findings else ""))
    cells = (
        f'<div class="tile"><b class="{kind}">{text(value)}</b><span>{text(label)}</span></div>'
        for label, value, kind in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>' if tiles else ""


def _facts_line(facts: Facts) -> str:
    plan, card = facts.plan, facts.card
    named = f"reward model {card.name}/{card.version}" if card and card.version else None
    said = [part for part in (named, f"base {plan.base}") if part]
    if plan.candidate:
        said.append(f"new {plan.candidate}")
    else:
        said += [f"trained by {plan.config.get('method')}", count(len(facts.steps), "step")]
    said += [f"on {plan.device}", f"planned {moment(plan.created)}"]
    if plan.parent:
        said.insert(said.index(f"base {plan.base}") + 1, f"trained on from {plan.parent}")
    if facts.times:
        said.append(f"ran {' to '.join(map(moment, facts.times))}")
    return f'<p class="soft">{text(" · ".join(said), 1000)}</p>'


def comparison_section(facts: Facts) -> str:
    """Base against new on the same held-out prompts."""
    comparison = facts.comparison
    if comparison is None:
        return ""
    rows = list(_intervals(facts, comparison))
    shown = rows[:MOST_ROWS]
    body = [
        [
            f'<td class="name">{text(name, 80)}{f" <span class=soft>{text(note, 80)}</span>" if note else ""}</td>',
            *_interval_cells(found),
        ]
        for name, note, found in shown
    ]
    drawn = [forest([(name, found) for name, _, found in shown[:20]])]
    if facts.gains:
        drawn.append(histogram(list(facts.gains.values())))
    head = ["reward", "base", "new", "difference", "95 % interval"]
    return section(
        "Held-out comparison",
        f'<div class="pair">{"".join(drawn)}</div>',
        table(head, body, numbers=range(1, 5)),
        _more(len(rows) - len(shown), "reward"),
        _how_compared(facts, comparison),
        _answer_table(facts.base, facts.new),
    )


def _intervals(facts: Facts, comparison: Comparison) -> Iterator[tuple[str, str, Interval]]:
    # CPO is trained on pairs: no reward is, and what stands for one is the total itself
    if not facts.by_pairs:
        yield "weighted total", "not trained on" if facts.of_pairs else "trained on", comparison.total
    weights = {reward.name: f"weight {reward.weight:g}" for reward in facts.plan.rewards}
    for name, found in comparison.rewards.items():
        yield name, weights.get(name, _OF_PAIR.get(name, "") if facts.by_pairs else ""), found
    for name, found in comparison.judged.items():
        yield name, _OF_PAIR.get(name, "not trained on") if facts.method == "cpo" else "not trained on", found
    if facts.decided and facts.decided.incumbent:
        yield "against what answers now", facts.plan.incumbent or "recorded answers", facts.decided.incumbent


_OF_PAIR = {"preference": "share of held-out pairs", "margin": "of held-out pairs, nats"}


def _kind(found: Interval) -> str:
    return "good" if found.low > 0 else "bad" if found.high < 0 else ""


def _interval_cells(found: Interval) -> list[str]:
    cells = [figure(found.base), figure(found.new), figure(found.difference, sign=True)]
    cells.append(f"{figure(found.low, sign=True)} to {figure(found.high, sign=True)}")
    kind = _kind(found)
    return [*cells[:2], *(f'<td class="n free {kind}">{cell}</td>' for cell in cells[2:])]


def _how_compared(facts: Facts, comparison: Comparison) -> str:
    prompts = f"{comparison.wins:,} better, {comparison.ties:,} equal, {comparison.losses:,} worse"
    failed = comparison.errors_base + comparison.errors_new
    said = [
        f"Prompt by prompt: {prompts}; {comparison.unscored:,} left out because a model has no scored answer; "
        f"{count(failed, 'answer')} failed ({comparison.errors_base:,} of the base, {comparison.errors_new:,} of the "
        "new model).",
        "Both models answered the same prompts with the same seeds by one engine: "
        f"{count(comparison.samples, 'answer')} a prompt, the first greedy{_sampled(facts, comparison)}. Intervals are "
        "95 % intervals of the mean difference over prompts (the further of Student's t and bootstrap-t); the gate "
        "looks at the lower end, not at the mean.",
    ]
    if facts.method == "cpo":
        said.append(
            "preference: the share of held-out pairs whose chosen answer the model finds likelier than the rejected "
            "one; margin: the log-probability of the chosen answer less that of the rejected one, nats. Neither looks "
            "at what the model answers."
        )
    if facts.plan.rules.min_gain:
        said.append(f"The lower end had to lie above {facts.plan.rules.min_gain:g} (min_gain).")
    return "".join(f'<p class="soft">{text(part, 600)}</p>' for part in said)


def _sampled(facts: Facts, comparison: Comparison) -> str:
    if comparison.samples < 2:
        return ""
    return f", the others sampled at temperature {facts.plan.config.get('temperature', 1.0)}"


def _answer_table(base: Side | None, new: Side | None) -> str:
    if base is None or new is None:
        return ""
    sides = [side.as_json() for side in (base, new)]
    labels = {
        "answers": "answers", "errors": "failed", "empty": "empty", "mean_tokens": "mean length, tokens",
        "cut": "as long as allowed", "repeated": "greedy, the same as to an earlier prompt",
    }  # fmt: skip
    cells = [[label, *(_amount(side[name]) for side in sides)] for name, label in labels.items()]
    return "<h3>The answers in numbers</h3>" + table(["", "base", "new"], cells, numbers=(1, 2), small=True)


def _amount(value: float | None) -> str:
    return "none" if value is None else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def gate_section(facts: Facts) -> str:
    """Guards and signs of reward hacking."""
    decided = facts.decided
    if decided is None:
        return ""
    guards = sorted(decided.guards, key=lambda guard: not guard.broken)
    body = [
        [
            '<td class="n bad">✗ broken</td>' if guard.broken else '<td class="n good">✓ kept</td>',
            f'<td class="name">{text(guard.name, 80)}</td>',
            f'<td class="said{" bad" if guard.broken else ""}">{text(guard.text, 400)}</td>',
            figure(guard.base),
            figure(guard.new),
            f'<td class="said">{text(guard.limit, 200)}</td>',
        ]
        for guard in guards[:MOST_ROWS]
    ]
    head = ["", "guard", "seen", "base", "new", "allowed"]
    listed = table(head, body, numbers=(3, 4)) if body else "<p>No guard was set.</p>"
    found = [f"<li>{text(finding.text, 500)}</li>" for finding in decided.findings[:MOST_ROWS]]
    hacking = (
        f'<ul class="open">{"".join(found)}</ul>'
        if found
        else "<p>No sign that the reward was won without the job being done better.</p>"
    )
    return section(
        "Guards",
        '<p class="soft">What may not get worse while the reward gets better.</p>',
        listed,
        _more(len(guards) - len(body), "guard"),
    ) + section("Signs of reward hacking", hacking, _more(len(decided.findings) - len(found), "sign"))


def warning_section(facts: Facts) -> str:
    """What to know before believing the rest, and what was said on the way."""
    warned = [f'<li class="open">{text(warning, 500)}</li>' for warning in facts.warnings]
    noted = [f"<li>{text(note, 500)}</li>" for note in facts.notes[:MOST_ROWS]]
    listed = f"<ul>{''.join(warned + noted)}</ul>" if warned or noted else ""
    return section("Warnings and notes", listed, _more(len(facts.notes) - len(noted), "note"))


def data_section(facts: Facts) -> str:
    """What was trained on, what was asked, and what was left out and why."""
    data, manifest = facts.data, facts.data.manifest
    what = "pairs" if facts.of_pairs else "prompts"
    rows: list[tuple[str, int | None]] = [(f"{what} trained on", data.train), (f"{what} held out", data.held_out)]
    rows += [(f"prompts of the {kind} set", amount) for kind, amount in data.asked_besides.items()]
    parts = [
        table(
            ["", "number"],
            [[label, f"{amount:,}"] for label, amount in rows if amount is not None],
            numbers=(1,),
            small=True,
        )
    ]
    if data.shared == 0 and data.held_out:
        parts.append('<p class="soft">No held-out prompt was trained on (looked for word for word).</p>')
    if manifest:
        parts.append(_manifest(manifest))
    return section("Data", *parts)


def _manifest(manifest: dict[str, Any]) -> str:
    left_out = manifest.get("left_out") or {}
    pairs = manifest.get("kind") == "pairs"
    reasons = PAIR_REASONS if pairs else REASONS
    order = {reason: place for place, reason in enumerate(reasons)}
    listed = sorted(left_out.items(), key=lambda item: order.get(item[0], len(order)))
    body = [
        [f'<td class="said">{text(reasons.get(reason, reason))}</td>', f"{int(amount):,}"] for reason, amount in listed
    ]
    runs, calls = int(manifest.get("runs") or 0), int(manifest.get("calls") or 0)
    said = [f"Built from {count(runs, 'recorded run')} ({count(calls, 'call')})"]
    said.append(
        f"the largest group that had to stay on one side has "
        f"{count(int(manifest.get('largest_group') or 0), 'pair' if pairs else 'prompt')}"
    )
    said += [f"{int(manifest[key]):,} {what}" for key, what in _LOST.items() if manifest.get(key)]
    title, counted = ("What made no pair", "times") if pairs else ("Runs left out", "runs")
    rejected = f"<h3>{title}</h3>{table(['which', counted], body, numbers=(1,), small=True)}" if body else ""
    example = manifest.get("malformed_example")
    malformed = f'<p class="soft">The first malformed prompt: {text(example, 400)}</p>' if example else ""
    return f"<p>{text('; '.join(said), 600)}.</p>{rejected}{malformed}"


_LOST = {"dropped": "lines that the recorder lost", "unreadable": "lines that are torn"}


def making_section(facts: Facts) -> str:
    """How to do it again, and with what it was done."""
    plan = facts.plan
    obstacle = why_not_repeatable(facts)
    commands = text("\n".join(repeat_commands(facts)), 8000)
    repeat = (
        f"<p>It cannot be repeated from its folder: {text(obstacle, 600)}.</p>"
        if obstacle
        else f"<pre>{commands}</pre>"
    )
    config = text(yaml.safe_dump(_plain(plan.config), sort_keys=False, allow_unicode=True), 12_000)
    libraries = "\n".join(f"{name}=={version}" for name, version in plan.libraries.items())
    hashes = {
        **{
            f"{name} (of the version)": facts.version[name]
            for name in ("base_hash", "template_hash")
            if facts.version.get(name)
        },
        **facts.hashes,
    }
    listed = "\n".join(f"{digest}  {name}" for name, digest in hashes.items())
    return section(
        "How it was made, and how to repeat it",
        repeat,
        '<p class="soft">Type this where the rewards can be imported, with the libraries below. Seeds are fixed; on '
        "other hardware sums may differ in the last digits.</p>"
        if not obstacle
        else "",
        _merge_proof(facts),
        _folded("configuration", config),
        _folded("libraries", text(libraries, 8000)),
        _folded("sha256 of the files", text(listed, 8000)),
    )


def _merge_proof(facts: Facts) -> str:
    merge = facts.merge
    if merge is None:
        return ""
    what = "scores" if facts.method == "reward" else "logits"
    said = []
    if merge.by != "tensors":
        said.append(
            f"On {count(merge.tokens, 'token')} the saved model's {what} differ from base + adapter by at most "
            f"{merge.saved_error:.2g} (allowed {merge.tolerance:g}); training moved them by up to {merge.change:.2g}."
        )
    if merge.by != "logits":
        said.append(
            f"As saved, {count(merge.tensors, 'tensor')} {'is' if merge.tensors == 1 else 'are'} what PEFT makes of "
            f"base and adapter, and {count(merge.unchanged, 'other')} the base's to the byte."
        )
    if merge.by == "tensors":
        said.append(
            f"Beyond rounding, weights differ by at most {merge.saved_error:.2g} of the largest near them "
            f"(allowed {merge.tolerance:g}); training moved them by up to {merge.change:.2g}."
        )
    whole = " ".join(said)
    note = f" {text(merge.note[:1].upper() + merge.note[1:])}." if merge.note else ""
    return f"<p>Merge: {whole[:1].lower()}{whole[1:]}{note}</p>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary><pre>{content}</pre></details>"


def _plain(value: Any) -> Any:
    """Texts in which YAML can write them: halves of emoji are replaced."""
    if isinstance(value, dict):
        return {clean(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return clean(value, 4000) if isinstance(value, str) else value


def _more(number: int, what: str) -> str:
    return f'<p class="soft">{count(number, what)} more in report.json.</p>' if number > 0 else ""
