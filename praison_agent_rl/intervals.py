"""Intervals of mean differences, and how much data a difference needs: arithmetic on arrays, and nothing else."""

import math
from collections.abc import Hashable, Iterator, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

from praison_agent_rl.errors import MissingExtra
from praison_agent_rl.records import FEWEST_PROMPTS, Interval

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
_WEIGHT = 0.5
"""Of the sample's variance, in clusters, in that of each resample; see `_resampled`."""
_NORMAL = NormalDist()
_CELLS = 2_000_000
"""Draws that are held at once: 16 MB."""


def paired_interval(
    base: "np.ndarray[Any, Any]", new: "np.ndarray[Any, Any]", *, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """Means of two paired samples and the interval of their difference, by bootstrap over pairs.

    On either side the further limit of two intervals counts. The one is the bootstrap-t interval of 10,000 resamples
    (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 12.5), which makes up for skewness: where few
    prompts get much worse and the others a little better, every interval that takes the mean for normal, and the
    percentile bootstrap too, lies above the truth up to four times as often as it says. But where few prompts change at
    all, the spread of a resample says little, and bootstrap-t errs twice as often as it says; there Student's t holds.
    The percentile interval, expanded for small samples or not (Hesterberg, What Teachers Should Know About the
    Bootstrap, The American Statistician 69(4), 2015), adds nothing to these two (``benchmarks/interval_coverage.py``).
    What no sample can show is a loss so rare that none of its prompts has it.

    The limits are NaN for fewer than 2 pairs and where a value is not finite.
    """
    np = numpy()
    size = magnitude(base, new)
    base, new = np.asarray(base, dtype=float) / size, np.asarray(new, dtype=float) / size
    gains = differences(base, new)
    means = [float(side.mean()) if len(side) else float("nan") for side in (base, new, gains)]
    low, high = _limits([_Sample(gains, np.ones(len(gains)), 1)], seed, (1 - confidence) / 2)
    return _interval(size, *means, low, high)


def unpaired_interval(
    a: "np.ndarray[Any, Any]",
    b: "np.ndarray[Any, Any]",
    *,
    seed: int = 0,
    clusters_a: Sequence[Hashable] | None = None,
    clusters_b: Sequence[Hashable] | None = None,
) -> Interval:
    """Means of two independent samples and the 95 % interval of b - a, by the same bootstrap as `paired_interval`.

    What belongs together (the runs of one session) is drawn together: whole clusters are resampled in each sample
    (Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8). The limits are NaN where a sample
    has fewer than 2 clusters, and where a value is not finite.
    """
    np = numpy()
    size = magnitude(a, b)
    a, b = np.asarray(a, dtype=float) / size, np.asarray(b, dtype=float) / size
    samples = [_clustered(a, clusters_a, -1), _clustered(b, clusters_b, 1)]
    low, high = _limits(samples, seed, (1 - CONFIDENCE) / 2)
    base, new = (sample.mean for sample in samples)
    return _interval(size, base, new, new - base, low, high)


def magnitude(*samples: "np.ndarray[Any, Any]") -> float:
    """The power of 2 at or below the largest value; divided by it, numbers lose no digit and their squares have a size.

    >>> magnitude([-5.0, 1.0], [float("inf")])
    4.0
    """
    np = numpy()
    values = np.concatenate([np.asarray(sample, dtype=float).ravel() for sample in samples])
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest else 1.0


def differences(base: "np.ndarray[Any, Any]", new: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """``new - base``, exactly 0 where they differ by no more than the order of a sum may.

    A sum may miss 0 by 1e-15 of what it is made of, which is no smaller than the largest value where that is below 1.
    """
    np = numpy()
    base, new = np.asarray(base, dtype=float), np.asarray(new, dtype=float)
    missed = 1e-15 * magnitude(base, new)
    with np.errstate(invalid="ignore", over="ignore"):
        same = np.isclose(base, new, rtol=1e-12, atol=missed) & np.isfinite(base)  # inf less inf is no number
        return np.asarray(np.where(same, 0.0, new - base))  # type: ignore[no-any-return]


def prompts_needed(gains: "np.ndarray[Any, Any]", *, size: float | None = None, power: float = 0.8) -> int | None:
    """Prompts that would show a mean difference of ``size`` (default: the one seen) with probability ``power``.

    n = ((z_.975 + z_power) * sd / size)^2, the sample size of a paired comparison (Miller, Adding Error Bars to Evals,
    2024, arXiv:2411.00640, section 5), with the deviation measured on the pairs. None where there is nothing to compute
    it from: fewer than 2 pairs, a size of 0, or a value that is not finite.
    """
    np = numpy()
    gains = np.asarray(gains, dtype=float)
    if len(gains) < 2 or not np.isfinite(gains).all():
        return None
    scale = magnitude(gains)
    gains = gains / scale
    size = float(gains.mean()) if size is None else size / scale
    if not math.isfinite(size) or size == 0:
        return None
    z = _NORMAL.inv_cdf((1 + CONFIDENCE) / 2) + _NORMAL.inv_cdf(power)
    ratio = z * float(gains.std(ddof=1)) / size
    needed = ratio * ratio  # which is infinite where ** would raise
    return max(FEWEST_PROMPTS, math.ceil(needed)) if math.isfinite(needed) else None


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share seen in ``n`` draws: Wilson 1927, eq. 5; (0, 1) of none.

    >>> tuple(round(limit, 3) for limit in wilson(0.9, 40))
    (0.769, 0.96)
    """
    if n == 0:
        return 0.0, 1.0
    z = 1.959963984540054  # of the normal distribution, two-sided 5 %
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def student_t(share: float, freedom: float) -> float:
    """A quantile of Student's t by Abramowitz and Stegun 26.7.5: at 97.5 % to 0.004 from 3 degrees of freedom on."""
    z = _NORMAL.inv_cdf(share)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * freedom**4)
    )


def numpy() -> Any:
    """The module, or which extra brings it."""
    try:
        import numpy as np
    except ImportError as error:
        raise MissingExtra('comparing needs numpy: pip install "praison-agent-rl[train]"') from error
    return np


def _interval(size: float, base: float, new: float, *rest: float) -> Interval:
    """Base, new, difference, low and high in units of ``size``."""
    difference, low, high = (size * value for value in rest)
    return Interval(base=size * base, new=size * new, difference=difference, low=low, high=high)


class _Sample(NamedTuple):
    """Sums and sizes of the clusters of a sample; its mean is sum of sums by sum of sizes."""

    sums: Any
    sizes: Any
    sign: int
    """Of its mean in the difference."""

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.sizes.sum()) if len(self.sums) else float("nan")

    @property
    def variance(self) -> float:
        """Of the mean, unbiased."""
        n = len(self.sums)
        return float((n / (n - 1)) * ((self.sums - self.mean * self.sizes) ** 2).sum() / self.sizes.sum() ** 2)


def _clustered(values: "np.ndarray[Any, Any]", clusters: Sequence[Hashable] | None, sign: int) -> _Sample:
    np = numpy()
    values = np.asarray(values, dtype=float)
    if clusters is None:
        return _Sample(values, np.ones(len(values)), sign)
    if len(clusters) != len(values):
        raise ValueError(f"{len(values)} values have {len(clusters)} clusters; each value needs one")
    places: dict[Hashable, int] = {}
    where = [places.setdefault(cluster, len(places)) for cluster in clusters]
    return _Sample(np.bincount(where, values), np.bincount(where).astype(float), sign)


def _limits(samples: Sequence[_Sample], seed: int, tail: float) -> tuple[float, float]:
    """Both ends of the interval of the signed sum of the samples' means, with ``tail`` outside of either."""
    np = numpy()
    if any(len(sample.sums) < 2 or not np.isfinite(sample.sums).all() for sample in samples):
        return float("nan"), float("nan")
    center = sum(sample.sign * sample.mean for sample in samples)
    variances = [sample.variance for sample in samples]
    variance = sum(variances)
    scale = max(float(np.abs(sample.sums / sample.sizes).max()) for sample in samples)
    if variance <= (1e-12 * scale) ** 2:
        return center, center
    error = math.sqrt(variance)
    freedom = variance**2 / sum(v**2 / (len(s.sums) - 1) for v, s in zip(variances, samples, strict=True))  # Welch's
    margin = student_t(1 - tail, freedom)
    means, spreads = _resampled(samples, seed)
    below, above = np.quantile((means - center) / np.sqrt(spreads), [tail, 1 - tail])
    return center - error * max(margin, float(above)), center + error * max(margin, -float(below))


def _resampled(samples: Sequence[_Sample], seed: int) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Of each resample the signed sum of means, and its variance.

    To a resample's variance the sample's own is added with the weight of half a cluster: a resample that happens to
    hold equal values only would otherwise claim to know the mean exactly, and bootstrap-t would have infinite limits.
    """
    np = numpy()
    random = np.random.default_rng(seed)
    means, spreads = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for sample in samples:
        n, s, k = len(sample.sums), sample.sums - sample.mean * sample.sizes, sample.sizes
        moments = np.stack([sample.sums, k, s * s, s * k, k * k], axis=1)
        for place, draws in _draws(n, random):
            total, size, ss, sk, kk = (draws @ moments).T
            off = total / size - sample.mean
            spread = (n / (n - 1)) * (ss - 2 * off * sk + off**2 * kk) / size**2
            means[place] += sample.sign * total / size
            spreads[place] += (n * np.maximum(spread, 0) + _WEIGHT * sample.variance) / (n + _WEIGHT)
    return means, spreads


def _draws(n: int, random: Any) -> "Iterator[tuple[slice, np.ndarray[Any, Any]]]":
    """How often each of ``n`` is drawn in each resample, as many resamples at once as memory allows."""
    np = numpy()
    rows = max(1, _CELLS // n)
    for start in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - start)
        drawn = random.integers(0, n, size=(count, n)) + n * np.arange(count)[:, None]
        yield slice(start, start + count), np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n)
