"""The sizes of a batch: what they make together, which of them move to fit the others, and which cannot stand together.

Nothing here reads files or trains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import TrainConfig

KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "steps_per_generation",
    "generation_batch_size",
)


def generation_batch(sizes: Mapping[str, int | None]) -> int:
    """Completions sampled at once by one process, as TRL 1.16 counts them (``GRPOConfig.__post_init__``)."""
    steps = sizes["steps_per_generation"] or sizes["gradient_accumulation_steps"] or 1
    return sizes["generation_batch_size"] or (sizes["per_device_train_batch_size"] or 1) * steps


def fit_batch(sizes: Mapping[str, int | None], given: Collection[str]) -> dict[str, int]:
    """New values for sizes that were not given, so that ``num_generations`` divides the generation batch.

    Tried in this order, as few changes as possible: more accumulation, another micro-batch, other group size. Where
    nothing may move, or nothing helps, the result is empty and ``conflicts`` reports the clash.
    """
    micro, group = sizes["per_device_train_batch_size"] or 1, sizes["num_generations"] or 2
    whole, steps = sizes["generation_batch_size"], sizes["steps_per_generation"]
    changed: dict[str, int] = {}
    if whole and whole % micro and "per_device_train_batch_size" not in given:
        changed["per_device_train_batch_size"] = max(d for d in range(1, micro + 1) if whole % d == 0)
    total = generation_batch(sizes)
    if total % group == 0:
        return changed
    if not whole and not steps and "gradient_accumulation_steps" not in given:
        return {"gradient_accumulation_steps": group // math.gcd(micro, group)}
    if not whole and "per_device_train_batch_size" not in given:
        step = group // math.gcd(total // micro, group)  # the micro-batch has to be a multiple of this
        return {"per_device_train_batch_size": max(step, micro // step * step)}
    nearest = _nearest_divisor(total, group)
    return {**changed, "num_generations": nearest} if "num_generations" not in given and nearest else changed


def conflicts(c: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Sizes that cannot stand together: the keys that take part, and a line that says what to do."""
    micro, group, whole = c.per_device_train_batch_size, c.num_generations, c.generation_batch_size
    if whole and c.steps_per_generation:
        text = f"generation_batch_size {whole} and steps_per_generation {c.steps_per_generation} say the same thing"
        yield KEYS, f"{text}; keep one of them"
        return
    if whole and whole % micro:
        yield (
            KEYS,
            f"generation_batch_size {whole} is not divisible by per_device_train_batch_size {micro}; set "
            f"generation_batch_size to {-(-whole // micro) * micro}, or per_device_train_batch_size to "
            f"{math.gcd(whole, micro)}",
        )
    total = generation_batch({key: getattr(c, key) for key in KEYS})
    if total % group == 0:
        return
    by = "steps_per_generation" if c.steps_per_generation else "gradient_accumulation_steps"
    made = f"{total}" if whole else f"{total} (per_device_train_batch_size {micro} x {by} {getattr(c, by)})"
    larger = math.lcm(micro, group)  # the smallest generation batch that holds whole micro-batches and whole groups
    while larger < total:
        larger += math.lcm(micro, group)
    fix = f"generation_batch_size to {larger}" if whole else f"{by} to {larger // micro}"
    nearest = _nearest_divisor(total, group)
    other = f"num_generations to {nearest}" if nearest else f"per_device_train_batch_size to {group}"
    text = f"the generation batch of {made} completions is not divisible by num_generations {group}"
    yield KEYS, f"{text}; set {fix}, or {other}"


def _nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of ``total`` from 2 up that is nearest to ``wanted``, the larger of two; 0 where there is none."""
    divisors = (d for d in range(2, total + 1) if total % d == 0)
    return min(divisors, key=lambda d: (abs(d - wanted), -d), default=0)
