"""Draw completions token by token: each prompt is computed once, and rows that have ended leave the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from praison_agent_rl.decoding.cascade import NAME, CascadeCache
from praison_agent_rl.decoding.weights import SamplingModel
from praison_agent_rl.rollouts import Sampled, Sampling
from praison_agent_rl.shareable import cache_name
from praison_agent_rl.shared_prefix import TokenIds, group_equal, prefill

_LOOK_EVERY = 8
"""Tokens between two looks at which rows have ended."""
_BLOCK = 256
"""Tokens of the vocabulary whose probabilities are summed up before one of them is drawn."""


def draw(sampler: SamplingModel, prompts: Sequence[TokenIds], sampling: Sampling, *, pad: int) -> Sampled:
    """One completion for each prompt, in order, with torch's own random numbers.

    Prompts have two tokens at least. Equal ones are computed once.
    """
    with torch.inference_mode():
        return _draw(sampler, prompts, sampling, pad)


def _draw(sampler: SamplingModel, prompts: Sequence[TokenIds], sampling: Sampling, pad: int) -> Sampled:
    model, own = sampler.model, sampler.attention
    distinct, owner = group_equal(prompts)
    start = prefill(model, distinct, pad=pad)
    positions = torch.tensor([len(distinct[prompt]) for prompt in owner], device=start.ids.device)
    cache = CascadeCache(start.cache, start.mask, owner, sampling.max_tokens)
    body, head = model.base_model, model.get_output_embeddings()
    states = start.last_hidden[owner]
    drawn = _Drawn(prompts, sampling)
    sampler.attend(NAME)
    try:
        while True:
            tokens = drawn.add(head(states)[:, -1].float())
            if drawn.length == sampling.max_tokens:
                break
            if drawn.length % _LOOK_EVERY == 0 and (rows := drawn.going_on()) is not None:
                if not rows:
                    break
                cache.keep(rows)
                tokens, positions = tokens[rows], positions[rows]
            place = {cache_name(body): cache, "position_ids": positions[:, None], "cascade": cache}
            states = body(input_ids=tokens[:, None], use_cache=True, **place).last_hidden_state
            positions = positions + 1
    finally:
        sampler.attend(own)
    return drawn.completions()


class _Drawn:
    """Completions as they grow."""

    def __init__(self, prompts: Sequence[TokenIds], sampling: Sampling) -> None:
        self.sampling = sampling
        self.length = 0
        self._warpers = _warpers(sampling)
        self._rows = list(range(len(prompts)))
        self._since: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ids: list[list[int]] = [[] for _ in prompts]
        self._log_probs: list[list[float]] = [[] for _ in prompts]

    def add(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw one token for each row that is going on, by ``logits`` (rows, vocabulary)."""
        tokens, log_probs = self._choose(logits)
        self._since.append((tokens, log_probs))
        self.length += 1
        return tokens

    def going_on(self) -> list[int] | None:
        """Places of the rows that have not ended, among those that were going on; None if all go on."""
        self._settle()
        ends = set(self.sampling.ends)
        places = [place for place, row in enumerate(self._rows) if self._ids[row][-1] not in ends]
        if len(places) == len(self._rows):
            return None
        self._rows = [self._rows[place] for place in places]
        return places

    def completions(self) -> Sampled:
        """Everything that was drawn."""
        self._settle()
        return Sampled(self._ids, self._log_probs)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sampling.temperature == 0:
            best, tokens = logits.log_softmax(-1).max(-1)
            return tokens, best
        scaled = logits if self.sampling.temperature == 1 else logits / self.sampling.temperature
        shares = scaled.softmax(-1)
        kept = shares
        for warper in self._warpers:
            scaled = warper(None, scaled)
        if self._warpers:
            kept = scaled.softmax(-1)
        tokens = _place_in_blocks(kept)
        return tokens[:, 0], shares.gather(1, tokens)[:, 0].log()

    def _settle(self) -> None:
        if not self._since:
            return
        ends = set(self.sampling.ends)
        tokens, log_probs = (torch.stack(each, 1).tolist() for each in zip(*self._since, strict=True))
        for row, more, theirs in zip(self._rows, tokens, log_probs, strict=True):
            if self._ids[row] and self._ids[row][-1] in ends:
                continue
            length = next((place + 1 for place, token in enumerate(more) if token in ends), len(more))
            self._ids[row] += more[:length]
            self._log_probs[row] += theirs[:length]
        self._since = []


def _place_in_blocks(weights: torch.Tensor) -> torch.Tensor:
    """As ``_place`` of (rows, many), by the block first and then within it: there is no running sum over all.

    Raises:
        ValueError: a row is not made of numbers, which ``torch.multinomial`` refuses too.
    """
    rows, width = weights.shape
    blocks = functional.pad(weights, (0, -width % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1)
    if not bool(sums.isfinite().all()):
        raise ValueError(
            "no token can be drawn: the model gives NaN for probabilities, so its weights or what it computes with "
            "them are NaN or infinite. Lower learning_rate, or see whether the model's files are whole"
        )
    block = _place(sums)
    within = _place(blocks[torch.arange(rows, device=weights.device), block[:, 0]])
    return block * _BLOCK + within


def _place(weights: torch.Tensor) -> torch.Tensor:
    """A place in each row, (rows, 1), drawn with probabilities in the proportion of ``weights``, (rows, places)."""
    below = weights.cumsum(-1, dtype=torch.float64)
    at = torch.rand(len(below), 1, dtype=torch.float64, device=below.device) * below[:, -1:]
    return torch.searchsorted(below, at, right=True)  # "right": never a place of weight 0


def _warpers(sampling: Sampling) -> list[Any]:
    """What takes improbable tokens out, in the order of ``generate``."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Any] = []
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
