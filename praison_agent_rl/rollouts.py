"""How completions are drawn, and what is known of them once they are: the words that every sampler shares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

_SHAPING = (
    "min_length",
    "min_new_tokens",
    "stop_strings",
    "max_time",
    "num_beams",
    "typical_p",
    "top_h",
    "min_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_k",
    "top_p",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "guidance_scale",
    "watermarking_config",
    "token_healing",
    "penalty_alpha",
    "dola_layers",
    "diversity_penalty",
    "num_beam_groups",
    "constraints",
    "force_words_ids",
)
"""Settings of transformers' ``generate`` by which other tokens come (generation/configuration_utils.py)."""
_NEUTRAL_AT_1 = (
    "num_beams",
    "typical_p",
    "top_p",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "guidance_scale",
    "num_beam_groups",
)
"""Those of them that change nothing at 1; all change nothing at 0, or where they are empty."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    max_tokens: int
    """Tokens of a completion at most."""
    temperature: float = 1.0
    """What logits are divided by; at 0 the likeliest token is taken."""
    top_p: float = 1.0
    """Share of the probability that the likeliest tokens must make up; 1 keeps all."""
    top_k: int = 0
    """Number of the likeliest tokens that are kept; 0 keeps all."""
    min_p: float = 0.0
    """Probability, relative to the likeliest token's, below which a token is dropped."""
    repetition_penalty: float = 1.0
    """What the logits of tokens that stood before are divided by (or multiplied, below 0); 1 changes nothing."""
    ends: tuple[int, ...] = ()
    """Every token that ends a completion."""
    seed: int | None = None
    """Seed of the sampler's own random numbers, where it has its own."""


class Sampled(NamedTuple):
    """Completions with what their sampler knows of them."""

    ids: list[list[int]]
    """One completion for each prompt, in order; the end token is kept, nothing after it."""
    log_probs: list[list[float]] | None
    """Natural log-probability of each token before any truncation, temperature applied; None if it is not known."""


Draw = Callable[[list[list[int]], Sampling], Sampled]
"""A completion for each prompt, given as token ids."""


def declared_settings(declared: Any, asked: Any) -> list[str]:
    """Names of what changes which tokens come and is set by a model alone.

    ``generate`` takes from a model's own ``generation_config``, ``declared``, whatever is None in the one that it is
    called with, ``asked``; a sampler that is handed a ``Sampling`` sees nothing of it.
    """
    alone = {name: getattr(declared, name, None) for name in _SHAPING if getattr(asked, name, None) is None}
    return [name for name, value in alone.items() if value and not (value == 1 and name in _NEUTRAL_AT_1)]
