"""The weights that completions are sampled with: a policy's own, or the same in fewer bits.

What samples is a second tree of modules over the same parameters, in which adapters are taken as merged into them
(``PolicyTrainer`` merges them while it samples) and linear layers may multiply in bfloat16 or int8.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

Precision = Literal["own", "bfloat16", "int8"]
"""What linear layers multiply in: the weights' own format, or fewer bits."""

_PACKED_AT_MOST = 4 * 2**30
"""Bytes of weights beyond which the policy's own format is not packed: the copy would cost more memory than time."""


class RepackedLinear(nn.Module, ABC):  # type: ignore[misc]  # torch is not typed here
    """A linear layer over the weights of another, laid out anew."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.source = source
        self.refresh()

    @abstractmethod
    def refresh(self) -> None:
        """Take the weights that the source has now."""


class PackedLinear(RepackedLinear):
    """A linear layer whose weights lie as oneDNN multiplies them, with sums in float32.

    MKL, which torch takes for float32, brings weights into an order of its own in each product, and a decoding step has
    few rows to make up for it: 8 rows of 448 x 16384 took 5 to 8 ms by it and 1.9 so, on an AMD EPYC. The operators are
    those that torch's own compiler calls for frozen weights (torch/_inductor/fx_passes/mkldnn_fusion.py).
    """

    dtype = torch.float32

    def refresh(self) -> None:
        """Take the weights that the source has now."""
        weight = self.source.weight.detach().to(self.dtype)
        self.bias = None if self.source.bias is None else self.source.bias.detach().to(self.dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001 - it has no other name

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Of (..., in) as (..., out)."""
        rows = states.to(self.dtype)
        multiplied: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")  # noqa: SLF001
        return multiplied.to(states.dtype)


class PackedBfloat16Linear(PackedLinear):
    """The same in bfloat16, between activations as they were."""

    dtype = torch.bfloat16


class Bfloat16Linear(RepackedLinear):
    """A linear layer that multiplies in bfloat16, where oneDNN cannot lay weights out beforehand."""

    def refresh(self) -> None:
        """Take the weights that the source has now."""
        self.low = self.source.weight.detach().to(torch.bfloat16)
        self.bias = None if self.source.bias is None else self.source.bias.detach().to(torch.bfloat16)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Of (..., in) as (..., out)."""
        return functional.linear(states.to(torch.bfloat16), self.low, self.bias).to(states.dtype)


class Int8Linear(RepackedLinear):
    """A linear layer whose weights are 8-bit integers with a scale for each output, and whose inputs become so too.

    FBGEMM's dynamic quantisation, which PyTorch has for CPUs: sums are of 32-bit integers.
    """

    def refresh(self) -> None:
        """Take the weights that the source has now."""
        weight = self.source.weight.detach().float()
        scales = weight.abs().amax(1).clamp(min=1e-12) / 127  # symmetric: the largest weight becomes 127
        zero = torch.zeros(len(scales), dtype=torch.long)
        rounded = torch.quantize_per_channel(weight, scales.double(), zero, 0, torch.qint8)
        bias = None if self.source.bias is None else self.source.bias.detach().float()
        self.packed = torch.ops.quantized.linear_prepack(rounded, bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Of (..., in) as (..., out)."""
        multiplied: torch.Tensor = torch.ops.quantized.linear_dynamic(states.float(), self.packed)
        return multiplied.to(states.dtype)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's products of packed weights for ``dtype``, and they do what they did."""
    rows, weight = torch.eye(2, dtype=dtype), torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001
        found = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")  # noqa: SLF001
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return bool(torch.equal(found, weight.t()))


def _linear_for(precision: Precision, policy: Any) -> type[RepackedLinear] | None:
    """What linear layers of ``policy`` become; None where they stay."""
    if precision == "int8":
        return Int8Linear
    if precision == "bfloat16":
        return PackedBfloat16Linear if can_pack(torch.bfloat16) else Bfloat16Linear
    small = sum(each.nbytes for each in policy.parameters()) <= _PACKED_AT_MOST
    own = next((kind for kind in (PackedLinear, PackedBfloat16Linear) if kind.dtype == policy.dtype), None)
    return own if own and small and policy.device.type == "cpu" and can_pack(own.dtype) else None


class SamplingModel:
    """A causal language model to sample with, over the parameters of a policy.

    It samples as the policy did at the last ``refresh``, which must be called while the adapter is merged.
    """

    def __init__(self, policy: Any, precision: Precision = "own") -> None:
        shared: dict[int, Any] = {id(each): each for each in (*policy.parameters(), *policy.buffers())}
        self.model = copy.deepcopy(policy, memo=shared)
        self._moving: list[RepackedLinear] = []
        adapted = {id(layer.get_base_layer()) for layer in self.model.modules() if is_adapted(layer)}
        _replace(self.model, is_adapted, lambda layer: layer.get_base_layer())
        if kind := _linear_for(precision, policy):
            _replace(self.model, lambda layer: type(layer) is nn.Linear, self._in(kind, adapted))
        self.model.eval()
        self.attention: str = getattr(self.model.config.get_text_config(), "_attn_implementation", "sdpa")
        """The attention that prompts are computed with."""

    def refresh(self) -> None:
        """Take the weights as they are now: those of another step."""
        for layer in self._moving:
            layer.refresh()

    def attend(self, name: str) -> None:
        """Use the attention called ``name`` from now on."""
        self.model.set_attn_implementation(name)

    def _in(self, kind: type[RepackedLinear], adapted: set[int]) -> Callable[[nn.Linear], nn.Module]:
        def replaced(layer: nn.Linear) -> nn.Module:
            repacked = kind(layer)
            if id(layer) in adapted or layer.weight.requires_grad:  # what is frozen needs no other look
                self._moving.append(repacked)
            return repacked

        return replaced


def is_adapted(layer: nn.Module) -> bool:
    """Whether an adapter of PEFT's is on ``layer``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(layer, BaseTunerLayer)


def _replace(model: nn.Module, wanted: Callable[[nn.Module], bool], by: Callable[[Any], nn.Module]) -> None:
    """Put another module in the place of each that is ``wanted``; what stands twice stays one."""
    new: dict[int, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if wanted(child):
                if id(child) not in new:
                    new[id(child)] = by(child)
                setattr(parent, name, new[id(child)])
