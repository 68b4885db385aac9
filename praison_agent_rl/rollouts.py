"""How completions are drawn, and what is known of them once they are: the words that every sampler shares."""

from dataclasses import dataclass
from typing import NamedTuple


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
