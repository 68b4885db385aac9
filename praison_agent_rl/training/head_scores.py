"""Log-probability and entropy of tokens from hidden states, with the gradient found while the logits are there.

The loss moves each token's log-probability by one number, so the gradient of a token's state is that number times a
direction that depends on nothing else. TRL's function computes the logits once more in the backward to find it.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from praison_agent_rl.training.fused_lora import LowWeight, product

_LOGITS_AT_ONCE = 2**24
"""Logits that are held at a time; 64 MiB in float32."""


def is_frozen(head: nn.Module) -> bool:
    """Whether ``head`` is a linear layer that is not trained, which is what ``scores_of`` knows."""
    return type(head) is nn.Linear and not any(parameter.requires_grad for parameter in head.parameters())


def scores_of(
    states: torch.Tensor, head: nn.Linear, targets: torch.Tensor, *, temperature: float, low: LowWeight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each of ``targets`` (tokens,) and entropy, in nats, from ``states`` (tokens, width).

    Logits are divided by ``temperature``. The log-probabilities have a gradient and the entropies have none. Under
    autocast the products are in its format, with ``low`` to keep the converted weight.
    """
    device = states.device.type
    fewer = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if fewer else head.weight.dtype
    weight = low.of(head.weight, dtype) if fewer else head.weight
    result: tuple[torch.Tensor, torch.Tensor] = _Scores.apply(
        states.to(dtype), weight.detach(), head.bias, (targets, temperature)
    )
    return result


class _Scores(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        asked: tuple[torch.Tensor, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets, temperature = asked
        rows = max(1, _LOGITS_AT_ONCE // len(weight))
        wanted = ctx.needs_input_grad[0]
        bias = None if bias is None else bias.detach().to(states.dtype)
        with torch.autocast(states.device.type, enabled=False):
            found = [
                _scored(some, weight, bias, theirs, temperature=temperature, wanted=wanted)
                for some, theirs in zip(states.split(rows), targets.split(rows), strict=True)
            ]
        log_probs, entropy, directions = zip(*found, strict=True)
        if wanted:
            ctx.save_for_backward(torch.cat(directions))
        joined = torch.cat(log_probs), torch.cat(entropy)
        ctx.mark_non_differentiable(joined[1])
        return joined

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not typed here
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        (directions,) = ctx.saved_tensors
        return (grad[:, None] * directions).to(directions.dtype), None, None, None


def _scored(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probabilities and entropies (rows,), and by ``wanted`` the gradient of each log-probability by its state.

    With logits z = s W^T / T and shares p = softmax(z): d log p[y] / ds = (W[y] - p W) / T.
    """
    logits = product(states, weight, bias).float()
    if temperature != 1:
        logits = logits.div_(temperature)
    below = logits.sub_(logits.amax(-1, keepdim=True))
    exponents = below.exp()
    total = exponents.sum(-1, keepdim=True)
    log_probs = below.gather(1, targets[:, None]) - total.log()
    mean = torch.bmm(exponents[:, None], below[:, :, None])[:, 0] / total
    entropy = total.log() - mean
    direction = None
    if wanted:
        average = product(exponents.div_(total).to(weight.dtype), weight.t())
        direction = weight[targets].sub_(average).div_(temperature)
    return log_probs[:, 0], entropy[:, 0], direction
