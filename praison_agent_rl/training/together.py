"""What the processes that train one model say to each other; where one trains, it hears itself.

Imported only by the process that trains, since it imports ``torch`` at once. All processes must call these at the same
points of a run: one that does not is waited for.
"""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from praison_agent_rl.ranks import process_count


def everywhere(own: Any) -> list[Any]:
    """What each process says, by rank."""
    if process_count() == 1:
        return [own]
    found: list[Any] = gather_object([own])
    return found


def agreed(own: Any) -> Any:
    """What the first process says, in all of them."""
    if process_count() == 1:
        return own
    box = [own]
    broadcast_object_list(box)
    return box[0]


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make the gradients of all processes their mean, as DDP does with a forward of its own.

    A parameter without a gradient counts as one whose gradient is 0.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    for gradients in by_kind.values():
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(whole)
        whole /= process_count()
        for gradient, part in zip(gradients, whole.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
