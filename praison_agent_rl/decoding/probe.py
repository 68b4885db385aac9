"""Whether the decoder computes what a model computes, found out on a few tokens."""

from typing import Any

import torch

from praison_agent_rl.decoding.loop import draw
from praison_agent_rl.decoding.weights import Precision, SamplingModel, is_adapted
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.roundings import FAULTS, allowed_difference

_INT8 = 1 / 127
_LENGTHS = (9, 6, 9)
"""Tokens of the prompts; the last is the first again."""
_NEW = 4


def why_not_drawable(sampler: SamplingModel, policy: Any, precision: Precision = "own") -> str | None:
    """Why ``sampler`` cannot draw for ``policy``, over whose parameters it is; None if it can.

    Finds what no configuration says, such as an attention of a model's own. Draws no random numbers.
    """
    if not all(layer.merged for layer in policy.modules() if is_adapted(layer)):
        return "the adapter is not merged into the weights"
    vocabulary = policy.get_input_embeddings().weight.size(0)
    prompts = [[(37 + 11 * place * length) % vocabulary for place in range(length)] for length in _LENGTHS]
    try:
        drawn = draw(sampler, prompts, Sampling(_NEW, temperature=0.0), pad=0)
        wanted = [_log_probs(policy, prompt, ids) for prompt, ids in zip(prompts, drawn.ids, strict=True)]
    except FAULTS as error:
        return f"a few tokens could not be drawn so: {type(error).__name__}: {error}"
    assert drawn.log_probs is not None
    got, plain = torch.tensor(drawn.log_probs), torch.stack(wanted).cpu()
    difference = float((got - plain).abs().max() / plain.abs().max().clamp(min=1))
    allowed = allowed_difference(_rounding(policy, precision))
    if difference <= allowed:
        return None
    return (
        f"a few tokens were drawn otherwise than the model computes (by {difference:.1e} of the largest "
        f"log-probability, where rounding makes no more than {allowed:.0e})"
    )


def _log_probs(policy: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    whole = torch.tensor([prompt + ids], device=policy.device)
    with torch.no_grad():
        logits = policy(input_ids=whole).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0]


def _rounding(policy: Any, precision: Precision) -> float:
    stored = float(torch.finfo(policy.dtype).eps)
    fewer = {"own": stored, "bfloat16": float(torch.finfo(torch.bfloat16).eps), "int8": max(_INT8, stored)}
    return fewer[precision]
