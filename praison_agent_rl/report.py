"""Write the HTML page of a run: one file, no network, readable in light and dark."""

import html
import io
from collections.abc import Sequence
from typing import Any

import yaml

from praison_agent_rl.data import Row, read_rows
from praison_agent_rl.errors import MissingExtra
from praison_agent_rl.records import Answer, Comparison, Interval, MergeProof, Plan
from praison_agent_rl.runs import RunFolder, read_record, write_text

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #1a7f37; --bad: #c62828; --soft: #8882; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #ff7b72; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; } td, th { border-bottom: 1px solid var(--line); padding: .35rem .6rem;
text-align: left; vertical-align: top; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: var(--good); } .bad { color: var(--bad); } .plots { display: grid; gap: 1rem;
grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); } svg { width: 100%; height: auto; }
pre { background: var(--soft); padding: .8rem; overflow: auto; font-size: .85rem; } details { margin: .5rem 0; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; }
"""

_INK = "#808080"  # readable on white and on black
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito: safe for colour-blind
_EXAMPLES = 5


def write_report(run: RunFolder) -> None:
    """Write ``report.html`` into the run's folder from what the stages left there."""
    comparison = read_record(run.comparison_file, Comparison) if run.comparison_file.exists() else None
    parts = [f"<h1>{html.escape(verdict(comparison))}</h1>", _facts(run, comparison)]
    if comparison:
        parts += ["<h2>Held-out comparison</h2>", _comparison_table(comparison)]
    if steps := run.steps():
        parts += ["<h2>Training</h2>", _plots(steps)]
    if comparison:
        parts += ["<h2>Answers</h2>", _answers(run)]
    parts += ["<h2>How it was made</h2>", _making(run)]
    page = "".join(parts)
    write_text(
        run.report,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Training run {html.escape(run.root.name)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><body>{page}</body></html>\n',
    )


def verdict(comparison: Comparison | None) -> str:
    """The outcome of a run in one sentence."""
    if comparison is None:
        return "The model was trained; nothing was held out, so nothing was proved."
    total = comparison.total
    numbers = (
        f"{total.base:.3f} → {total.new:.3f} on {comparison.prompts} held-out prompts "
        f"(difference {total.difference:+.3f}, 95 % interval {total.low:+.3f} to {total.high:+.3f})"
    )
    if comparison.better:
        return f"The new model is better: mean reward {numbers}."
    if total.high < 0:
        return f"The new model is worse: mean reward {numbers}."
    return f"The new model is not shown to be better: mean reward {numbers}."


def _facts(run: RunFolder, comparison: Comparison | None) -> str:
    plan, steps = run.plan, run.steps()
    facts = [f"base: {plan.base}", f"method: {plan.config['method']}", f"steps: {len(steps)}", f"device: {plan.device}"]
    if comparison:
        facts.append(f"answers per prompt: {comparison.samples} (the first greedy, the others sampled)")
    return f"<p>{html.escape(' · '.join(facts))}</p>"


def _comparison_table(comparison: Comparison) -> str:
    rows = [("weighted total", comparison.total), *comparison.rewards.items()]
    body = "".join(f"<tr><td>{html.escape(name)}</td>{_interval_cells(interval)}</tr>" for name, interval in rows)
    counts = (
        f"<p>Prompt by prompt: {comparison.wins} better, {comparison.ties} equal, {comparison.losses} worse; "
        f"{comparison.unscored} left out because an answer had no score. Intervals: paired bootstrap over prompts.</p>"
    )
    head = "".join(f'<th class="n">{name}</th>' for name in ("base", "new", "difference", "95 % interval"))
    return f"<table><tr><th>reward</th>{head}</tr>{body}</table>{counts}"


def _interval_cells(interval: Interval) -> str:
    kind = "good" if interval.low > 0 else "bad" if interval.high < 0 else ""
    cells = [f"{interval.base:.3f}", f"{interval.new:.3f}", f"{interval.difference:+.3f}"]
    cells.append(f"{interval.low:+.3f} to {interval.high:+.3f}")
    return "".join(f'<td class="n {kind}">{cell}</td>' for cell in cells)


def _plots(steps: list[dict[str, Any]]) -> str:
    at = [step["step"] for step in steps]
    rewards = {name: [step["rewards"].get(name) for step in steps] for name in steps[0]["rewards"]}
    spread = {name: [step["rewards_std"].get(name) for step in steps] for name in rewards}
    plots = [_plot("mean reward (band: spread in the batch)", at, rewards, spread)]
    wanted = {
        "completion length, tokens": ("mean_length",),
        "entropy, nats per token": ("entropy",),
        "KL to the base model": ("kl",),
        "share of groups without signal, of cut-off answers": ("frac_reward_zero_std", "clipped"),
        "gradient norm": ("grad_norm",),
    }
    for title, names in wanted.items():
        lines = {name: [step.get(name) for step in steps] for name in names}
        if any(value is not None for line in lines.values() for value in line):
            plots.append(_plot(title, at, lines))
    return f'<div class="plots">{"".join(plots)}</div>'


def _plot(
    title: str,
    at: Sequence[int],
    lines: dict[str, list[float | None]],
    spread: dict[str, list[float | None]] | None = None,
) -> str:
    """One plot as inline SVG, in colours that show on light and dark."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(f'the report needs {error.name}: pip install "praison-agent-rl[train]"') from error
    nan = float("nan")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}):
        figure = Figure(figsize=(4.6, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for colour, (name, line) in zip(_COLOURS * 9, lines.items(), strict=False):
            values = [nan if value is None else value for value in line]
            axes.plot(at, values, color=colour, label=name, linewidth=1.6)
            if spread:
                widths = [nan if width is None else width for width in spread[name]]
                low = [value - width for value, width in zip(values, widths, strict=True)]
                high = [value + width for value, width in zip(values, widths, strict=True)]
                axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(title, color=_INK, fontsize=9)
        axes.tick_params(colors=_INK)
        axes.set_xlabel("step", color=_INK)
        for side in axes.spines.values():
            side.set_color(_INK)
        if len(lines) > 1:
            axes.legend(frameon=False, labelcolor=_INK)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True)
    text = drawn.getvalue()
    return (
        f'<figure role="img" aria-label="{html.escape(title)}" style="margin:0">{text[text.index("<svg") :]}</figure>'
    )


def _answers(run: RunFolder) -> str:
    rows = read_rows(run.held_out_rows)
    sides = [{answer.prompt: answer for answer in _greedy(run, side)} for side in ("base", "new")]
    base, new = sides
    both = [prompt for prompt in base if prompt in new]
    gain = {p: (new[p].total or 0.0) - (base[p].total or 0.0) for p in both}
    ranked = sorted(both, key=lambda prompt: gain[prompt])
    groups = {
        "What got better": [p for p in reversed(ranked) if gain[p] > 0][:_EXAMPLES],
        "What got worse": [p for p in ranked if gain[p] < 0][:_EXAMPLES],
        "As they come": both[:_EXAMPLES],
    }
    return "".join(
        f"<h3>{title}</h3>" + (_answer_table(picked, rows, base, new) if picked else "<p>none</p>")
        for title, picked in groups.items()
    )


def _greedy(run: RunFolder, side: str) -> list[Answer]:
    answers = [Answer.model_validate(row) for row in read_rows(run.answers(side))]
    return [answer for answer in answers if answer.sample == 0]


def _answer_table(picked: list[int], rows: list[Row], base: dict[int, Answer], new: dict[int, Answer]) -> str:
    body = "".join(
        f'<tr><td class="answer">{html.escape(_question(rows[place]))}</td>'
        f"{_answer_cell(base[place])}{_answer_cell(new[place])}</tr>"
        for place in picked
    )
    return f"<table><tr><th>prompt</th><th>base, greedy</th><th>new, greedy</th></tr>{body}</table>"


def _answer_cell(answer: Answer) -> str:
    scores = ", ".join(f"{name} {'none' if s is None else f'{s:.2f}'}" for name, s in answer.rewards.items())
    return f'<td class="answer">{html.escape(answer.text or "(empty)")}<br><small>{html.escape(scores)}</small></td>'


def _question(row: Row) -> str:
    prompt = row["prompt"]
    return str(prompt if isinstance(prompt, str) else prompt[-1].get("content"))[:400]


def _making(run: RunFolder) -> str:
    plan: Plan = run.plan
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in _all_notes(run, plan))
    config = html.escape(yaml.safe_dump(plan.config, sort_keys=False, allow_unicode=True))
    libraries = html.escape(", ".join(f"{name} {version}" for name, version in plan.libraries.items()))
    proof = ""
    if run.merge_file.exists():
        merge = read_record(run.merge_file, MergeProof)
        proof = (
            f"<p>Merge: on {merge.tokens} tokens the saved model's logits differ from base + adapter by at most "
            f"{merge.saved_error:.2g} (allowed {merge.tolerance:g}); "
            f"training moved them by up to {merge.change:.2g}.</p>"
        )
    return (
        f"{proof}<ul>{notes}</ul><details><summary>configuration</summary><pre>{config}</pre></details>"
        f"<p><small>{libraries}; planned {html.escape(plan.created)}</small></p>"
    )


def _all_notes(run: RunFolder, plan: Plan) -> list[str]:
    said = [event["text"] for _, event in run.events() if event["event"] == "note"]
    return list(dict.fromkeys([*plan.notes, *said]))
