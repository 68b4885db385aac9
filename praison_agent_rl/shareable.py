"""Say of a model whether computing shared prompts once gives its own results; what is not known to be exact is not.

Read from the model and its configuration; ``training/grpo.py`` measures it as well before it relies on it.
"""

import inspect
import math
from collections.abc import Iterator
from typing import Any

_MASKABLE_ATTENTION = ("sdpa", "eager")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_RESCALED = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
"""Settings by which logits are more than the head's output, as in ``add_fused_lm_head`` (trl/trainer/utils.py)."""
_TAKEN = ("input_ids", "attention_mask", "position_ids", "use_cache")
_CACHES = ("cache", "past_key_values")
"""What transformers calls a decoder's cache: the new name, and the one that 5.40 no longer takes."""
_MOVING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings with frequencies by the longest sequence of a call (transformers/modeling_rope_utils.py)."""
_RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")


def why_not_shareable(model: Any, *, longest: int | None = None) -> str | None:
    """Why this causal language model's prompts cannot be shared exactly, or None if they can.

    ``longest`` is the number of tokens that no prompt with its completion exceeds; without it, any length may come.
    """
    if by := vars(model).get("forward_by"):
        return f"its forward is {by}'s, which takes no mask with a gap"
    config = model.config.get_text_config()
    if config is not model.config:
        return "it takes more than text"
    attention = getattr(config, "_attn_implementation", "sdpa")
    if attention not in _MASKABLE_ATTENTION:
        return f"its attention is {attention!r}, which takes no mask with a gap"
    return (
        _why_not_by_layers(config, math.inf if longest is None else longest)
        or _why_not_by_logits(config)
        or _why_not_by_modules(model)
    )


def why_not_trainable(model: Any) -> str | None:
    """Why gradients of shared prompts would differ from those of the plain computation, or None if they do not."""
    if any(vars(module).get("gradient_checkpointing") for module in model.modules()):
        return "gradient checkpointing keeps no keys and values"
    if name := next(_random_parts(model), None):
        return f"{name} is random in training, and would differ between the completions of a group"
    return None


def cache_name(body: Any) -> str:
    """The argument by which the decoder ``body`` takes keys and values."""
    taken = inspect.signature(body.forward).parameters
    return next((name for name in _CACHES if name in taken), _CACHES[0])


def _why_not_by_layers(config: Any, longest: float) -> str | None:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or [_SLIDING if window else _FULL])
    if not kinds <= {_FULL, _SLIDING}:
        return f"some of its layers do not attend to everything before them ({', '.join(sorted(kinds))})"
    # a window as long as the longest sequence leaves nothing out
    if _SLIDING in kinds and longest > (window or 0):
        return f"its attention slides over a window of {window} tokens ({_SLIDING})"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks ahead"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        reach = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None) or 0
        if rope.get("rope_type") in _MOVING_ROPE and longest > reach:
            return f"its rotary embedding ({rope['rope_type']}) changes with the length of a call beyond {reach} tokens"
    return None


def _why_not_by_logits(config: Any) -> str | None:
    scaled = next((name for name in _RESCALED if getattr(config, name, None)), None)
    return f"it rescales its logits ({scaled})" if scaled else None


def _why_not_by_modules(model: Any) -> str | None:
    body = model.base_model
    if body is model or model.get_output_embeddings() is None:
        return "it is not a decoder with a language-model head"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "its layers are on several devices"
    taken = inspect.signature(body.forward).parameters
    if missing := [name for name in _TAKEN if name not in taken] or [_CACHES[0]] * taken.keys().isdisjoint(_CACHES):
        return f"its decoder takes no {', '.join(missing)}"
    if getattr(model, "is_quantized", False) and not getattr(model, "is_loaded_in_4bit", False):
        return "its weights are quantised, and what is rounded with them may depend on the batch"
    # TRL counts the padding before a prompt as positions, which only relative positions forgive
    if others := [name for name in _embeddings(body) if name not in _embeddings_of_tokens(model)]:
        return f"it embeds more than its tokens ({', '.join(sorted(others))}), such as learned positions"
    return None


def _embeddings(body: Any) -> list[str]:
    from torch import nn

    return [name for name, module in body.named_modules() if isinstance(module, nn.Embedding)]


def _embeddings_of_tokens(model: Any) -> list[str]:
    tokens = model.get_input_embeddings()
    inside = {id(module) for module in tokens.modules()}  # peft may have wrapped it
    return [name for name, module in model.base_model.named_modules() if id(module) in inside]


def _random_parts(model: Any) -> Iterator[str]:
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            yield f"the dropout {name!r} ({module.p})"
        for key, value in vars(module).items():
            if any(word in key for word in _RANDOM) and isinstance(value, float) and value > 0:
                yield f"{key} ({value}) of {name!r}"
