"""How often an interval holds the true mean difference, by simulation with a known truth; prints Markdown.

Run: ``python benchmarks/interval_coverage.py [--repetitions 1000]``; about ten minutes on one core. Five intervals
are compared on the same samples.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

import numpy as np

from praison_agent_rl.intervals import paired_interval, student_t, unpaired_interval

KINDS = ("percentile", "expanded percentile", "Student's t", "bootstrap-t", "ours")
SIZES = (8, 15, 30, 100)
Draw = Callable[[np.random.Generator, int], np.ndarray]


def _binary(chance: float, before: float) -> Draw:
    return lambda random, n: (random.random(n) < chance).astype(float) - (random.random(n) < before)


def _mostly_zero(share: float, draw: Draw) -> Draw:
    return lambda random, n: np.where(random.random(n) < share, draw(random, n), 0.0)


CASES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda random, n: random.normal(0.3, 1, n), 0.3),
    "binary, 0.5 to 0.6": (_binary(0.6, 0.5), 0.1),
    "binary, no change at 0.5": (_binary(0.5, 0.5), 0.0),
    "binary, no change at 0.9": (_binary(0.9, 0.9), 0.0),
    "60 % zero, no change": (_mostly_zero(0.4, lambda random, n: random.normal(0, 1, n)), 0.0),
    "60 % zero, else normal": (_mostly_zero(0.4, lambda random, n: random.normal(0.5, 1, n)), 0.2),
    "few large gains (exponential)": (lambda random, n: random.exponential(1, n), 1.0),
    "few large losses (exponential)": (lambda random, n: -random.exponential(1, n), -1.0),
    "few large losses (lognormal)": (lambda random, n: -random.lognormal(0, 1, n), -math.exp(0.5)),
    "70 % zero, else gains (exp.)": (_mostly_zero(0.3, lambda random, n: random.exponential(1, n)), 0.3),
    "70 % zero, else losses (exp.)": (_mostly_zero(0.3, lambda random, n: -random.exponential(1, n)), -0.3),
}


def intervals(gains: np.ndarray, random: np.random.Generator, seed: int) -> Iterator[tuple[float, float]]:
    """In the order of `KINDS`."""
    n, mean, error = len(gains), gains.mean(), gains.std(ddof=1) / math.sqrt(len(gains))
    resamples = gains[random.integers(0, n, (2000, n))]
    means, errors = resamples.mean(1), resamples.std(1, ddof=1) / math.sqrt(n)
    yield tuple(np.quantile(means, [0.025, 0.975]))
    margin = student_t(0.975, n - 1)
    tail = NormalDist().cdf(-margin * math.sqrt(n / (n - 1)))
    yield tuple(np.quantile(means, [tail, 1 - tail]))
    yield mean - margin * error, mean + margin * error
    with np.errstate(divide="ignore", invalid="ignore"):
        pivots = np.nan_to_num((means - mean) / errors, nan=0.0, posinf=1e9, neginf=-1e9)
    below, above = np.quantile(pivots, [0.025, 0.975])
    yield mean - above * error, mean - below * error
    ours = paired_interval(np.zeros(n), gains, seed=seed)
    yield ours.low, ours.high


def measure(draw: Draw, truth: float, n: int, repetitions: int) -> list[tuple[float, float]]:
    """Of each interval: share that held the truth, and share that lay above it (what promotes wrongly)."""
    random = np.random.default_rng(n)
    held, above = np.zeros(len(KINDS)), np.zeros(len(KINDS))
    for seed in range(repetitions):
        for place, (low, high) in enumerate(intervals(draw(random, n), random, seed)):
            held[place] += low <= truth + 1e-9 and high >= truth - 1e-9
            above[place] += low > truth + 1e-9
    return list(zip(held / repetitions, above / repetitions, strict=True))


def measure_unpaired(repetitions: int) -> float:
    """Share that held the truth: 30 against 20 sessions of 1 to 5 runs, the runs of a session being alike."""
    random, held = np.random.default_rng(0), 0
    for seed in range(repetitions):
        arms, labels = [], []
        for sessions in (30, 20):
            sizes = random.integers(1, 6, sessions)
            labels.append(np.repeat(np.arange(sessions), sizes).tolist())
            arms.append(np.repeat(random.exponential(1, sessions), sizes) + random.normal(0, 0.5, sizes.sum()))
        found = unpaired_interval(arms[0], arms[1] + 0.2, seed=seed, clusters_a=labels[0], clusters_b=labels[1])
        held += found.low <= 0.2 <= found.high
    return held / repetitions


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=1000)
    repetitions = parser.parse_args().repetitions
    print("Share of 95 % intervals that hold the truth; in brackets the share that lies above it (should be 2.5 %).\n")
    print(f"| differences | n | {' | '.join(KINDS)} |\n|{'---|' * (2 + len(KINDS))}")
    for name, (draw, truth) in CASES.items():
        for n in SIZES:
            cells = [f"{100 * h:.1f} ({100 * a:.1f})" for h, a in measure(draw, truth, n, repetitions)]
            print(f"| {name} | {n} | {' | '.join(cells)} |", flush=True)
    print(f"\nUnpaired, by sessions, skewed: {100 * measure_unpaired(repetitions):.1f} % hold the truth.")


if __name__ == "__main__":
    main()
