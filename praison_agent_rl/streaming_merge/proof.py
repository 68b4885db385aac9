"""Prove a streamed merge tensor by tensor, where logits cannot be compared or would not show a small difference.

Each changed tensor is read back and compared with what PEFT's own layer makes of the base's tensor; each other one must
be the base's, byte for byte. Here too a few MiB are in memory: PEFT's layer is given some rows of the weight at a time,
and what belongs to them of A or B.
"""

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.errors import ModelError
from praison_agent_rl.streaming_merge.files import Stored, read_rows, rows_at_once, same_bytes, tensors_of
from praison_agent_rl.streaming_merge.plan import Change, MergePlan

ALLOWED = 1e-6
"""Largest difference in float32, before weights are rounded to what is stored, as a share of the largest weight."""


Pairs = Iterable[tuple[Any, Any]]
"""Parts of a tensor in float32, in order: what the base has, and what is wanted."""


class TensorProof(NamedTuple):
    """What was found."""

    changed: int
    """Tensors that were compared with what PEFT's own layers make."""
    unchanged: int
    """Tensors that are the base's, byte for byte."""
    error: float
    """Largest difference that rounding does not explain, as a share of the largest weight near it."""
    change: float
    """Largest change of a weight."""
    problems: list[str]


def prove_tensors(plan: MergePlan, folder: Path) -> TensorProof:
    """Compare every tensor in ``folder`` with the base and the adapter."""
    try:
        found = {name: place for file in folder.glob("*.safetensors") for name, place in tensors_of(file).items()}
    except ModelError as error:
        return TensorProof(0, 0, 0.0, 0.0, [str(error)])
    wanted = plan.kept.keys() | plan.added.keys()
    problems = [f"the tensor {name} was not saved" for name in sorted(wanted - found.keys())]
    problems += [f"the tensor {name} was saved and is none of the model's" for name in sorted(found.keys() - wanted)]
    same = [name for name in plan.kept if name not in plan.changes and name in found]
    problems += [
        f"the tensor {name} changed, and the adapter does not speak of it"
        for name in same
        if not same_bytes(plan.kept[name], found[name])
    ]
    errors, changes = [], []
    for name, off, change in _compared(plan, found):
        if not off <= ALLOWED:  # not "off > ALLOWED": NaN must fail
            problems.append(f"saved weights differ from base + adapter: {name} by {off:.3g} of its largest weight")
        errors.append(off)
        changes.append(change)
    return TensorProof(len(errors), len(same), _largest(errors), _largest(changes), problems)


def _compared(plan: MergePlan, found: dict[str, Stored]) -> Iterator[tuple[str, float, float]]:
    """Each changed tensor's name, error and change."""
    for name, change in plan.changes.items():
        if name in found:
            before = plan.kept[name]
            yield name, *_differences(_made_by_peft(plan, change, before), found[name], before[1:3])
    for name, tensor in plan.added.items():
        if name in found:
            parts = tensor.float().split(rows_at_once(tuple(tensor.shape)))
            pairs = ((part * 0, part) for part in parts)
            yield name, *_differences(pairs, found[name], (plan.dtype, tuple(tensor.shape)))


def _differences(pairs: Pairs, place: Stored, form: tuple[str, tuple[int, ...]]) -> tuple[float, float]:
    """Largest error and largest change of a tensor, of which ``pairs`` say what it was and what it should be."""
    if place[1:3] != form:
        return float("inf"), 0.0
    errors, changes = [], []
    for (before, wanted), saved in zip(pairs, read_rows(place, rows=rows_at_once(place.shape)), strict=True):
        errors.append(_error(wanted, saved))
        changes.append(float((wanted - before).abs().max()))
    return _largest(errors), _largest(changes)


def _made_by_peft(plan: MergePlan, change: Change, place: Stored) -> Pairs:
    """Rows of the base's tensor, and what PEFT's layer makes of them, in float32."""
    layer = None
    if change.layer is not None:  # without numbers, so that a copy costs nothing
        layer = copy.deepcopy(plan.model.get_base_model().get_submodule(change.layer))
    lora, begin = change.in_float32(), 0
    for piece in read_rows(place, rows=rows_at_once(place.shape)):
        rows = slice(begin, begin := begin + len(piece))
        start = piece.float() if change.replaced is None else change.replaced[rows].float()
        if layer is None:
            yield piece.float(), start
        else:
            yield piece.float(), (_biased if lora.b is None else _weighed)(layer, lora, start, rows)
    if layer is not None:
        # it refers to itself, so it would hold its numbers until Python looks for such circles
        layer.get_base_layer().weight = layer.get_base_layer().bias = None


def _weighed(layer: Any, lora: Change, start: Any, rows: slice) -> Any:
    """The rows of a weight that PEFT makes of ``start``."""
    from torch.nn import Parameter

    (adapter,) = layer.scaling
    a, b = (lora.a[:, rows], lora.b) if lora.turned else (lora.a, lora.b[rows])
    base = layer.get_base_layer()
    base.weight = Parameter(start)
    if adapter in layer.lora_embedding_A:
        layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter] = Parameter(a), Parameter(b)
    else:
        layer.lora_A[adapter].weight, layer.lora_B[adapter].weight = Parameter(a), Parameter(b)
        layer.lora_bias[adapter] = False  # it is proved by itself
    layer.merged_adapters.clear()
    layer.merge(safe_merge=True)
    return base.weight.data


def _biased(layer: Any, lora: Change, start: Any, rows: slice) -> Any:
    """The part of a bias that PEFT makes of ``start``; it merges weight and bias at once, so the weight is zeros."""
    import torch

    (adapter,) = layer.scaling
    base, nothing = layer.get_base_layer(), torch.nn.Parameter(torch.zeros(1, 1))
    base.weight, base.bias = nothing, torch.nn.Parameter(start)
    layer.lora_A[adapter].weight, layer.lora_B[adapter].weight = nothing, nothing
    layer.lora_B[adapter].bias = torch.nn.Parameter(lora.bias[rows])
    layer.merged_adapters.clear()
    layer.merge(safe_merge=True)
    return base.bias.data


def _error(wanted: Any, saved: Any) -> float:
    """How far ``saved`` is from what ``wanted``, a hair more or less, is rounded to; over the largest weight."""
    import torch

    largest = max(float(wanted.abs().max()), float(torch.finfo(torch.float32).tiny))
    hair = ALLOWED / 2 * largest
    low, high = ((wanted + sign * hair).to(saved.dtype).float() for sign in (-1, 1))
    saved = saved.float()
    outside = float((torch.maximum(torch.minimum(saved, high), low) - saved).abs().max())
    return outside / largest


def _largest(numbers: list[float]) -> float:
    import torch

    # torch's max and not Python's: NaN anywhere must come out as NaN
    return float(torch.tensor(numbers, dtype=torch.float64).max()) if numbers else 0.0
