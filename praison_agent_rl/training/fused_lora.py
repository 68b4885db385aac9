"""LoRA layers that compute base and adapter together; whatever they do not know, PEFT's own forward computes.

PEFT computes ``base(x) + scaling * B(A(x))`` as separate steps, and several of them are as wide as the layer. Here the
adapter is added into the base product in place, forwards and backwards. Imported only by the process that trains,
since it imports ``torch`` at once.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
"""What autocast converts; it leaves float64 as it is."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Parts = tuple[nn.Linear, nn.Linear, nn.Linear, float]
"""A layer's base, A and B, and the scaling."""
Frozen = tuple[torch.Tensor, torch.Tensor | None, float]
"""What gets no gradient: weight (out, in), bias (out) and scaling."""


def fuse(model: nn.Module) -> int:
    """Let the LoRA layers of ``model`` compute base and adapter together where that is known to give PEFT's values.

    Each call is looked at again: merged, disabled or otherwise changed, a layer goes PEFT's way.

    Returns:
        How many layers compute so from now on; the others are left as they are.
    """
    fused = 0
    for layer in model.modules():
        if type(layer) is Linear and _parts(layer) is not None:
            layer.__class__ = FusedLinear
            layer.low_weight = LowWeight()
        fused += type(layer) is FusedLinear
    return fused


class LowWeight:
    """A frozen weight in the format of autocast, converted again only when the weight has changed.

    A plain attribute of its layer: not saved with it, and empty in a copy of it. It takes the memory of the weight in
    that format, where autocast would convert the weight in each forward.
    """

    def __init__(self) -> None:
        self._source: torch.Tensor | None = None
        self._seen: tuple[Any, ...] = ()
        self._low: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "LowWeight":
        return LowWeight()

    def of(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``weight`` in ``dtype``.

        A change made in place through ``weight.data`` is seen by no counter; who makes one calls ``forget``.
        """
        seen = (weight.data_ptr(), weight._version, weight.shape, weight.stride(), dtype)  # noqa: SLF001
        if self._low is None or seen != self._seen:
            with torch.inference_mode(False):  # one made while answers are scored must serve in training too
                self._low = weight.detach().to(dtype)
            # kept so that its memory, and with it its address, is not given to another weight meanwhile
            self._source, self._seen = weight.detach(), seen
        return self._low

    def forget(self) -> None:
        """Free the memory."""
        self._source, self._seen, self._low = None, (), None


class FusedLinear(Linear):  # type: ignore[misc]  # peft is not typed here
    """PEFT's LoRA layer over a linear one, with the adapter added into the base product in place."""

    low_weight: LowWeight

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of (..., in) as (..., out)."""
        parts = None if args or kwargs or torch.compiler.is_compiling() else _parts(self)
        dtype = None if parts is None else _common_format(x, *parts[:3])
        if parts is None or dtype is None:
            result: torch.Tensor = super().forward(x, *args, **kwargs)
            return result
        base, a, b, scaling = parts
        if base.weight.dtype == dtype:
            self.low_weight.forget()
            weight = base.weight
        else:
            weight = self.low_weight.of(base.weight, dtype)
        rows = x.reshape(-1, x.size(-1)).to(dtype)
        bias = None if base.bias is None else base.bias.to(dtype)
        y = _AdaptedProduct.apply(rows, a.weight.to(dtype), b.weight.to(dtype), (weight, bias, scaling))
        return y.view(*x.shape[:-1], y.size(-1))

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """As PEFT does, which changes the weight in place, now and when it is taken out again."""
        super().merge(*args, **kwargs)
        self.low_weight.forget()


class _AdaptedProduct(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """``x W^T + bias + scaling (x A^T) B^T`` of rows (rows, in), all in one format, with W and bias frozen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, frozen: Frozen) -> torch.Tensor:
        weight, bias, scaling = frozen
        narrow = product(x, a).mul_(scaling)
        ctx.save_for_backward(x, narrow, weight, a, b)
        ctx.scaling = scaling
        return product(x, weight, bias).addmm_(narrow, b.t())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not typed here
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, narrow, weight, a, b = ctx.saved_tensors
        of_x, of_a, of_b, _ = ctx.needs_input_grad
        # a backward that somebody runs under autocast would multiply in another format than it adds
        with torch.autocast(grad.device.type, enabled=False):
            grad_narrow = product(grad, b.t()).mul_(ctx.scaling)
            grad_x = product(grad, weight.t()).addmm_(grad_narrow, a) if of_x else None
            grad_a = grad_narrow.t() @ x if of_a else None
            grad_b = grad.t() @ narrow if of_b else None
        return grad_x, grad_a, grad_b, None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x weight^T + bias`` of (rows, in) and (out, in), neither of which need be contiguous.

    In float32 by the operator that torch's own compiler calls: MKL, which ``functional.linear`` takes, needed 5 to 25 %
    more time at 500 and more rows on an AMD EPYC. In fewer bits ``functional.linear`` is oneDNN already.
    """
    multiply = _onednn() if x.dtype == torch.float32 and x.device.type == "cpu" else None
    result: torch.Tensor = multiply(x, weight, bias) if multiply else functional.linear(x, weight, bias)
    return result


@functools.cache
def _onednn() -> Product | None:
    """The product of oneDNN; None where this torch has none or it does not give the right numbers (tried once)."""
    try:
        operator = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - it has no other name
        x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
        tried = operator(x, weight.t(), torch.ones(4), "none", [], "")
        works = torch.equal(tried, x @ weight + 1)  # small integers: every sum is exact
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return (lambda x, weight, bias: operator(x, weight, bias, "none", [], "")) if works else None


def _parts(layer: Any) -> Parts | None:
    """What ``layer`` computes with, if that is exactly ``base(x) + scaling * B(A(x))`` with a frozen base."""
    names = layer.active_adapters
    if layer.merged_adapters or layer.disable_adapters or len(names) != 1 or names[0] not in layer.lora_A:
        return None
    name = names[0]
    base, a, b, dropout = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if name in layer.lora_variant or not (_passes_on(dropout) and all(map(_is_plain, (base, a, b)))):
        return None
    trained = base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad)
    if trained or a.bias is not None or b.bias is not None:
        return None
    return base, a, b, layer.scaling[name]


def _is_plain(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer that computes what its class does, from weights that are plain numbers.

    Quantised and distributed weights are tensors of other classes, and those that are offloaded or gathered come by
    hooks or by a forward of the module's own.
    """
    if type(module) is not nn.Linear or _is_intercepted(module):
        return False
    weight: Any = module.weight
    return type(weight) is nn.Parameter and not weight.is_inference()  # the latter have no version to look at


def _passes_on(dropout: nn.Module) -> bool:
    unchanged = type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and dropout.p == 0)
    return unchanged and not _is_intercepted(dropout)


def _is_intercepted(module: nn.Module) -> bool:
    own = vars(module)
    return "forward" in own or any(own[name] for name in _HOOKS)


def _common_format(x: torch.Tensor, base: nn.Linear, a: nn.Linear, b: nn.Linear) -> torch.dtype | None:
    """What PEFT would multiply and answer in, if that is one format throughout."""
    if x.shape[-1:] != base.weight.shape[1:]:  # the error that PEFT raises names both
        return None
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # "meta", where shapes alone are computed
        return None
    formats = {x.dtype, base.weight.dtype, a.weight.dtype, b.weight.dtype}
    if torch.is_autocast_enabled(device):
        low: torch.dtype = torch.get_autocast_dtype(device)
        return low if formats.issubset(_AUTOCAST) else None
    return x.dtype if len(formats) == 1 else None
