"""The curves of a run's training: rewards of a policy, or how well the batch's pairs are told apart."""

import statistics
from collections.abc import Iterator
from typing import Any

from praison_agent_rl.curriculum import in_words
from praison_agent_rl.report.numbers import Facts
from praison_agent_rl.report.page import clean, count, section, text
from praison_agent_rl.report.plots import MOST_POINTS, curves

_MOST_PLOTS = 12
_MOST_PASSES = 40
_METRICS = (
    ("completion length, tokens", ("mean_length",), False),
    ("entropy, nats a token", ("entropy",), False),
    ("KL to the base model, nats a token", ("kl",), False),
    ("share of groups without signal, of cut-off answers", ("frac_reward_zero_std", "clipped"), True),
    ("share of completions left out of a step, having no advantage", ("skipped",), True),
    ("gradient norm", ("grad_norm",), False),
)
_OF_PAIRS = (
    ("loss", ("loss",), False),
    ("share of the batch's pairs told apart rightly", ("accuracy",), True),
    ("margin of chosen over rejected", ("margin",), False),
    ("gradient norm", ("grad_norm",), False),
    ("learning rate", ("learning_rate",), False),
)
_LABELS = {"frac_reward_zero_std": "without signal", "clipped": "cut off"}
_SAID = {
    "grpo": "These are rewards on prompts that the model was learning from; what counts is the comparison above, on "
    "prompts that it never saw. Bands: one standard deviation in the batch.",
    "cpo": "These are of pairs that the model was learning from; what counts is the comparison above, on prompts that "
    "it never saw. A pair is told apart rightly if the chosen answer is the likelier one; the margin is the difference "
    "of the two log-probabilities times beta.",
    "reward": "These are of pairs that the model was learning from; what counts is the share above, of pairs that it "
    "never saw. A pair is told apart rightly if the chosen answer scores higher; the margin is the difference of the "
    "two scores.",
}


def training_section(facts: Facts) -> str:
    """Curves of the training steps."""
    steps = facts.steps
    if not steps:
        return "" if facts.plan.candidate else section("Training", "<p>No training step is recorded.</p>")
    seconds = [value for step in steps if isinstance(value := step.get("seconds"), int | float)]
    took = f", {statistics.median(seconds):.1f} s each (median)" if seconds else ""
    said = f"{count(len(steps), 'step')}{took}. {_SAID.get(facts.method, _SAID['grpo'])}"
    if len(steps) > MOST_POINTS:
        said += " Neighbouring steps are drawn as their mean."
    names = list(dict.fromkeys(name for step in steps for name in step.get("rewards", {})))
    metrics = _OF_PAIRS if facts.of_pairs else _METRICS
    missing = [title.partition(",")[0] for title, keys, _ in metrics if not any(_line(steps, key) for key in keys)]
    if facts.plan.config.get("beta") == 0:
        missing = [f"{name}, since beta is 0" if name.startswith("KL") else name for name in missing]
    gone = f'<p class="soft">Not measured: {text("; ".join(missing), 300)}.</p>' if missing else ""
    more = len(names) - _MOST_PLOTS
    rest = f'<p class="soft">{count(more, "reward")} more in report.json.</p>' if more > 0 else ""
    drawn = "".join(_curves(steps, names, metrics))
    plots = f'<div class="plots">{drawn}</div>'
    return section("Training", f'<p class="soft">{text(said, 600)}</p>{plots}{gone}{_signals(facts)}', rest)


def _signals(facts: Facts) -> str:
    """How many groups taught nothing, by pass, and which prompts those were of."""
    if not (found := facts.curriculum) or not any(one["silent"] for one in found["passes"]):
        return ""
    shares = ", ".join(f"{one['silent'] / one['groups']:.0%}" for one in found["passes"][:_MOST_PASSES])
    said = f"Groups of answers without a signal, by pass over the prompts: {shares}."
    if words := in_words(found, chosen=bool(facts.plan.config.get("curriculum"))):
        said += f" {words}."
    return f'<p class="soft">{text(said, 1000)}</p>'


def _curves(
    steps: list[dict[str, Any]], names: list[str], metrics: tuple[tuple[str, tuple[str, ...], bool], ...]
) -> Iterator[str]:
    at = [int(step["step"]) for step in steps]
    if len(names) != 1 and (total := _line(steps, "reward")):
        spread = [step.get("reward_std") for step in steps]
        yield curves("reward, weighted total", at, {"total": total}, spread=spread)
    for name in names[:_MOST_PLOTS]:
        mean = [step.get("rewards", {}).get(name) for step in steps]
        spread = [step.get("rewards_std", {}).get(name) for step in steps]
        yield curves(f"reward {clean(name, 80)}", at, {name: mean}, spread=spread)
    for title, keys, share in metrics:
        lines = {_LABELS.get(key, key): line for key in keys if (line := _line(steps, key))}
        if lines:
            yield curves(title, at, lines, share=share)


def _line(steps: list[dict[str, Any]], name: str) -> list[float | None] | None:
    """A metric over the steps; None where no step has it."""
    line = [step.get(name) for step in steps]
    return line if any(value is not None for value in line) else None
