"""Whether a trainer's step may compute shared prompts once: what is known against it, and a measurement on the model.

Imported only by the process that trains, since it imports ``torch`` at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedType

from praison_agent_rl.roundings import FAULTS, allowed_difference
from praison_agent_rl.shareable import why_not_shareable, why_not_trainable
from praison_agent_rl.training.trl_names import why_not_by_names

Scores = tuple[torch.Tensor, torch.Tensor]
"""Log-probability and entropy of each completion token, both (rows, length)."""
Scoring = Callable[[torch.Tensor, torch.Tensor, int], Scores]
"""Scores of token ids under a mask, of which the last so many columns are completions."""

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # transformers 6 takes the first only
_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
_PROMPTS, _COMPLETIONS = (3, 9, 6), (1, 6, 4, 2, 5, 3)
_COMMON = 2


def why_not_shared(trainer: Any, policy: Any, *, longest: int | None) -> str | None:
    """What is known of ``trainer`` and its model ``policy`` by which the results would be others; None if nothing is.

    No prompt and its completion exceed ``longest`` tokens.
    """
    if moved := why_not_by_names(trainer):
        return moved
    if trainer.accelerator.distributed_type not in _PLAIN:  # ZeRO-3 and FSDP hold each weight in pieces
        return f"weights are gathered through the model's own forward ({trainer.accelerator.distributed_type.value})"
    if any(vars(trainer.args).get(name) for name in _CHECKPOINTING):
        return "gradient checkpointing keeps no keys and values"
    if trainer.args.neftune_noise_alpha:
        return "neftune_noise_alpha is random, and would differ between the completions of a group"
    if trainer.aux_loss_enabled:
        return "the router's auxiliary loss counts the tokens of every prompt (router_aux_loss_coef)"
    adapters = trainer.model.peft_config.values()
    if any(config.is_prompt_learning for config in adapters):
        return "the adapter puts learned tokens before each prompt"
    if any(getattr(config, "lora_dropout", 0) for config in adapters):
        return "lora_dropout would differ between the completions of a group"
    return why_not_trainable(policy) or why_not_shareable(policy, longest=longest)


def why_measured_otherwise(
    shared: Scoring, plain: Scoring, *, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """How far a few completions score otherwise by ``shared`` than by ``plain``, if by more than rounding.

    Finds what no configuration says, such as code that comes with a model. Draws no random numbers.
    """
    ids, mask = (each.to(device) for each in _probe(vocabulary))
    length = max(_COMPLETIONS)
    try:
        with torch.no_grad():
            got, wanted = shared(ids, mask, length), plain(ids, mask, length)
        differences = [_relative(*pair, mask[:, -length:]) for pair in zip(got, wanted, strict=True)]
    except FAULTS as error:
        return f"a few completions could not be scored so: {type(error).__name__}: {error}"
    allowed = allowed_difference(float(torch.finfo(dtype).eps))
    if all(difference <= allowed for difference in differences):
        return None
    return (
        f"a few completions scored otherwise than by the plain computation (by {max(differences):.1e} of the largest, "
        f"where rounding makes no more than {allowed:.0e})"
    )


def _probe(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts that begin alike, padded on the left, with two completions each, padded on the right."""
    before, after = max(_PROMPTS), max(_COMPLETIONS)
    ids = torch.zeros(len(_COMPLETIONS), before + after, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(_COMPLETIONS):
        prompt = _PROMPTS[row // 2]
        mask[row, before - prompt : before + length] = 1
        for place in range(prompt):  # any tokens do, so long as prompts differ behind what they have in common
            ids[row, before - prompt + place] = (37 + 11 * place + (place >= _COMMON) * 5 * prompt) % vocabulary
        for place in range(length):
            ids[row, before + place] = (53 + 17 * place + 29 * row) % vocabulary
    return ids, mask


def _relative(got: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> float:
    kept = mask.bool().to(wanted.device)
    # a sure policy has entropies of nearly 0, which are rounded as the logits behind them are
    return float((got[kept] - wanted[kept]).abs().max() / wanted[kept].abs().max().clamp(min=1))
