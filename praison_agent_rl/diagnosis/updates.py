"""Symptoms of the updates: NaN, entropy, drift from the base model and from the policy that sampled, learning rate."""

import statistics

from praison_agent_rl.diagnosis.seen import WINDOW, Seen, Symptom, number_of, of_each
from praison_agent_rl.diagnosis.signal import SILENT, silent_of

COLLAPSED = 0.1
"""Of the first entropy. It falls in every run; what is below a tenth samples one answer (Cui et al. 2025,
arXiv:2505.22617: there the reward stops rising)."""
HIGH_KL, KL_TIMES = 1.0, 5.0
"""Nats a token to the base, and times the median of the steps before: usual runs end at 0.01 to 0.3."""
CLIPPED_RATIOS = 0.25
"""Share of tokens whose ratio is clipped; PPO runs have 0.01 to 0.1."""
LOGP_APART = 0.2
"""Nats a token between sampler and trainer; rounding in bfloat16 makes 0.01 to 0.05."""
RATIO_LEFT = 0.5
"""Mean weight of what vLLM sampled: below it most is cut away."""
USUAL_RATE = 1e-4
"""Ten times the rate of full finetuning ("LoRA Without Regret", thinkingmachines.ai, 2025), which is 1e-6 to 1e-5 in
RL."""
FIRST_STEPS, MOVED, GRADIENTS, FAR_ABOVE = 12, 2.5, 50.0, 3.0
"""In the first steps: times by which the entropy moves, and gradients grow beyond ``max_grad_norm``, without the
reward's rising; gradients grow tenfold in any LoRA run, whose second matrix starts at zero. And times the usual
rate."""
NANS_OF_FP16 = 10
"""Steps in a row with infinite gradients; float16 skips single ones while it looks for its scale."""
LOOKS_AT_ONCE = 3
"""Watched evaluations whose mean is compared: one of 24 prompts is off by as much as a run may gain in 100 steps."""


def nan(seen: Seen) -> Symptom | None:
    """Weights, gradients or metrics are no numbers any more."""
    named = list(seen.steps[-1].get("nan") or [])
    if seen.rules.settings.get("fp16") and not {"weights"} & set(named):
        row = seen.steps[-NANS_OF_FP16:]
        named = named if len(row) == NANS_OF_FP16 and all(step.get("nan") for step in row) else []
    if not named:
        return None
    return seen.stop(
        "nan",
        f"{' and '.join(named)} became NaN or infinite at step {seen.step}",
        f"lower {seen.rules.key('learning_rate')} or {seen.rules.key('max_grad_norm')}, and compute in bf16 or float32 "
        "rather than fp16",
    )


def entropy_collapse(seen: Seen) -> Symptom | None:
    """The policy has become sure of one answer, which is not a good one."""
    first, now, height = seen.first("entropy", 2), seen.now("entropy", 3), seen.height(3)
    if not first or now is None or now > COLLAPSED * first or (height is not None and height >= SILENT):
        return None
    if len(seen.steps) < WINDOW:
        return None
    silent = [silent_of(step) for step in seen.steps[-WINDOW:]]
    tell = seen.stop if sum(silent) >= SILENT * len(silent) else seen.warning
    return tell(
        "entropy collapse",
        f"the entropy fell from {first:.3g} to {now:.3g} nats a token: the policy hardly tries anything else any more",
        f"lower {seen.rules.key('learning_rate')}, raise {seen.rules.key('temperature')}, or set beta or entropy_coef "
        "above 0",
    )


def kl_spike(seen: Seen) -> Symptom | None:
    """The policy has jumped away from the base model."""
    line, last = seen.line("kl"), number_of(seen.steps[-1], "kl")
    if last is None or last < HIGH_KL or len(line) <= WINDOW:
        return None
    usual = statistics.median(line[-11:-1])
    if last < KL_TIMES * usual:
        return None
    return seen.warning(
        "kl spike",
        f"the KL to the base model jumped to {last:.3g} nats a token at step {seen.step} (before: {usual:.3g})",
        f"lower {seen.rules.key('learning_rate')} or {seen.rules.key('max_grad_norm')}, or raise "
        f"{seen.rules.key('beta')}",
    )


def off_policy(seen: Seen) -> Symptom | None:
    """What is trained on was sampled by another policy than the one that is updated."""
    clipped, apart, left = seen.now("clip_ratio"), seen.now("logp_difference"), seen.now("importance_ratio")
    parts = []
    if clipped is not None and clipped >= CLIPPED_RATIOS:
        parts.append(f"{clipped:.0%} of the tokens were outside the clip range of {seen.rules.key('epsilon')}")
    if apart is not None and apart >= LOGP_APART:
        parts.append(f"sampler and trainer differ by {apart:.2g} nats a token")
    if left is not None and left <= RATIO_LEFT:
        parts.append(f"the mean importance ratio is {left:.2g}, so most of what was sampled does not count")
    if not parts:
        return None
    return seen.warning(
        "off-policy drift",
        f"in the last {WINDOW} steps " + ", and ".join(parts),
        f"lower {seen.rules.key('learning_rate')}, {seen.rules.key('num_iterations')} or steps_per_generation, so that "
        "answers are newer when they are learned from",
    )


def learning_rate(seen: Seen) -> Symptom | None:
    """The first steps throw the policy about, and the rate is above what LoRA runs take."""
    rate = seen.rules.settings.get("learning_rate") or 0
    if rate <= FAR_ABOVE * USUAL_RATE or not WINDOW <= len(seen.steps) <= FIRST_STEPS:
        return None
    signs = [*_moved(seen), *_grew(seen)]
    rewards = of_each(seen.steps, "reward")
    half = len(rewards) // 2
    if not signs or (half and statistics.fmean(rewards[half:]) > statistics.fmean(rewards[:half])):
        return None
    return seen.warning(
        "learning rate too high",
        f"within {len(seen.steps)} steps {' and '.join(signs)}, and the reward did not rise; learning_rate is {rate:g}",
        f'lower learning_rate to {rate / 10:g} and on: for LoRA ten times that of full finetuning is right ("LoRA '
        f'Without Regret", 2025), in RL 1e-5 to {USUAL_RATE:g}, more for very small models only',
    )


def _moved(seen: Seen) -> list[str]:
    line = seen.line("entropy")
    if len(line) < WINDOW:
        return []
    first, now = statistics.fmean(line[:2]), statistics.median(line[-3:])
    moved = now * MOVED < first or now > MOVED * first > 0
    return [f"the entropy went from {first:.3g} to {now:.3g}"] if moved else []


def _grew(seen: Seen) -> list[str]:
    line, limit = seen.line("grad_norm"), seen.rules.settings.get("max_grad_norm") or 1.0
    first, most = line[0] if line else 0.0, max(line, default=0.0)
    grew = first > 0 and most > max(GRADIENTS * first, limit)
    return [f"the gradients grew from {first:.3g} to {most:.3g}"] if grew else []


def plateau(seen: Seen) -> Symptom | None:
    """The watched reward has not become better for as long as ``patience`` allows."""
    patience, looks = seen.rules.patience, [e for e in seen.watched if number_of(e, "gain") is not None]
    if not patience or len(looks) < 2 * LOOKS_AT_ONCE:
        return None
    gains = of_each(looks, "gain")
    ends = range(LOOKS_AT_ONCE, len(looks) + 1)
    means = [statistics.fmean(gains[end - LOOKS_AT_ONCE : end]) for end in ends]
    best = means.index(max(means)) + LOOKS_AT_ONCE - 1  # the first of equal ones
    since = looks[-1]["step"] - looks[best]["step"]
    if since < patience:
        return None
    top = max(looks, key=lambda event: number_of(event, "gain") or 0.0)
    return seen.stop(
        "plateau",
        f"the watched reward has not risen for {since} steps: {looks[-1]['total']:.3g} now, at best {top['total']:.3g} "
        f"at step {top['step']}",
        f"nothing, if that is good enough; else raise patience (now {patience}; 0 never stops), or change rewards, "
        "prompts or learning_rate",
    )
