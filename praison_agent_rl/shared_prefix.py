"""Compute what several sequences share once: the system prompt of an agent's prompts, and a prompt's completions.

Agent prompts are long and begin alike, and the completions of one group follow one prompt. The shared beginning of all
prompts is computed for a batch of one, each prompt's own rest for a batch of the distinct prompts, and only what
follows for the whole batch. Keys and values are shared through the cache; to score completions, through one sequence of
everything where a model's attention allows it (``shared_attention.py``). Gradients flow where they are wanted, and
results and gradients are those of the plain computation (``tests/model/test_shared_prefix.py``), of models that
``shareable.py`` knows to be so.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from praison_agent_rl.shareable import cache_name

if TYPE_CHECKING:
    import torch

TokenIds = Sequence[int]

_BLOCK_TOKENS = 8
"""Tokens sampled between two looks at which completions have ended."""
_COUNTED_FROM_START = (
    "min_new_tokens",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
    "forced_eos_token_id",
    "max_time",
)
"""Settings that ``generate`` counts from where it was called; with one of them it is called once."""
_OF_NEIGHBOURS = ("no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "stop_strings", "watermarking_config")
"""Settings that look at tokens one behind another; with one of them no padding may stand within a prompt."""
_ROWS_AT_ONCE = 8
"""Completions of similar length that are run together."""


@dataclass
class Prefilled:
    """Distinct prompts as keys and values, laid out as ``[shared beginning][padding][own rest]``."""

    cache: Any
    """Cache with one row per distinct prompt."""
    ids: "torch.Tensor"
    """Token ids, padding included, of shape (prompts, length)."""
    mask: "torch.Tensor"
    """1 where ``ids`` is a token, of shape (prompts, length)."""
    last_hidden: "torch.Tensor"
    """Last hidden state of each prompt's last cached token, of shape (prompts, 1, width)."""


def prefill(model: Any, prompts: Sequence[TokenIds], *, pad: int, hold_back: int = 0, whole: bool = False) -> Prefilled:
    """Run each distinct prompt through ``model`` once; the last ``hold_back`` tokens are laid out but not computed.

    Each prompt needs at least ``hold_back + 1`` tokens. As a ``whole``, it is computed with what it shares with others,
    and all padding stands before it. Gradients flow if the caller has not switched them off.
    """
    import torch
    from transformers import DynamicCache

    device = model.device
    shared = 0 if whole else _common_length(prompts, hold_back=hold_back)
    width = max(map(len, prompts)) - shared
    rest = [[pad] * (width - len(p) + shared) + list(p[shared:]) for p in prompts]
    gap = [[0] * (width - len(p) + shared) + [1] * (len(p) - shared) for p in prompts]
    beginning = torch.tensor([list(prompts[0][:shared])] * len(prompts), dtype=torch.long, device=device)
    ids = torch.cat([beginning, torch.tensor(rest, device=device)], 1)
    mask = torch.cat([torch.ones_like(beginning), torch.tensor(gap, device=device)], 1)
    cache = DynamicCache(config=model.config)
    if shared:
        _run(model, cache, input_ids=ids[:1, :shared])
        cache.batch_repeat_interleave(len(prompts))
    end = ids.size(1) - hold_back
    states = _run(
        model,
        cache,
        input_ids=ids[:, shared:end],
        attention_mask=mask[:, :end],
        position_ids=_positions(mask)[:, shared:end],
    )
    return Prefilled(cache, ids, mask, states[:, -1:])


def sample_completions(
    model: Any, prompts: Sequence[TokenIds], *, generation_config: Any, pad: int, eos: Sequence[int]
) -> list[list[int]]:
    """One completion for each prompt, in order; equal prompts are computed once. The end token is kept, nothing after.

    Sampling itself is ``generate``'s, so every setting of ``generation_config`` has its usual meaning. It is called for
    a few tokens at a time, and completions that have ended leave the batch in between.
    """
    import torch

    distinct, row_of = group_equal(prompts)
    ends = set(eos)
    completions: list[list[int]] = [[] for _ in prompts]
    open_rows = list(range(len(prompts)))
    settings = generation_config, model.generation_config  # what the first leaves open is taken from the second
    with torch.no_grad():
        start = prefill(model, distinct, pad=pad, hold_back=1, whole=_sets_any(_OF_NEIGHBOURS, settings))
        rows = torch.tensor(row_of, device=start.ids.device)
        cache, ids, mask = start.cache, start.ids[rows], start.mask[rows]
        cache.batch_select_indices(rows)
        left = generation_config.max_new_tokens
        block_tokens = left if _sets_any(_COUNTED_FROM_START, settings) else _BLOCK_TOKENS
        named = cache_name(model.base_model)
        while left > 0 and open_rows:
            block = _with_limit(generation_config, min(left, block_tokens))
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=block, **{named: cache})
            new = output[:, ids.size(1) :]
            left -= new.size(1)
            for row, tokens in zip(open_rows, new.tolist(), strict=True):
                completions[row] += until_end(tokens, ends)
            going_on = [place for place, row in enumerate(open_rows) if completions[row][-1] not in ends]
            open_rows = [open_rows[place] for place in going_on]
            keep = torch.tensor(going_on, dtype=torch.long, device=ids.device)
            ids, mask = output[keep], torch.cat([mask, torch.ones_like(new)], 1)[keep]
            cache.batch_select_indices(keep)
    return completions


def completion_states(
    model: Any, prompts: Sequence[TokenIds], completions: "torch.Tensor", mask: "torch.Tensor", *, pad: int
) -> "torch.Tensor":
    """Hidden states that predict each completion token, of shape (tokens where ``mask`` is 1, width), row by row.

    ``completions`` and ``mask`` have the shape (batch, length) and are padded on the right. Rows are run in batches of
    similar length, since one long completion would have all the others computed to its length.
    """
    import torch

    from praison_agent_rl.shared_attention import lay_out, run_laid_out

    distinct, row_of = group_equal(prompts)
    kept = [row[:length] for row, length in zip(completions.tolist(), mask.sum(1).tolist(), strict=True)]
    layout, places = lay_out(distinct, row_of, kept, common=_common_length(distinct))
    if (states := run_laid_out(model, layout)) is not None:
        return states.index_select(0, torch.tensor(places, dtype=torch.long))
    start = prefill(model, distinct, pad=pad)
    return _states_after(model, start, torch.tensor(row_of, device=completions.device), completions, mask)


def _states_after(
    model: Any, start: Prefilled, owner: "torch.Tensor", completions: "torch.Tensor", mask: "torch.Tensor"
) -> "torch.Tensor":
    """As ``completion_states``, by copies of the keys and values of ``start`` for each row.

    Rows are run in batches of similar length, since one long completion would have all the others computed to its
    length.
    """
    import torch

    lengths = mask.sum(1)
    places = torch.arange(mask.numel(), device=mask.device).view(mask.shape)
    states, found = [], []
    for rows in lengths.argsort().split(_ROWS_AT_ONCE):
        length = max(int(lengths[rows].max()), 1)
        tokens, kept = completions[rows, :length], mask[rows, :length]
        predicting = _run_after(model, start, owner[rows], tokens, kept)
        states.append(predicting[kept.bool()])
        found.append(places[rows, :length][kept.bool()])
    return torch.cat(states)[torch.cat(found).argsort()]


def _run_after(
    model: Any, start: Prefilled, owner: "torch.Tensor", tokens: "torch.Tensor", mask: "torch.Tensor"
) -> "torch.Tensor":
    """Hidden states before each of ``tokens``, (rows, length, width), for rows that follow the prompts ``owner``."""
    import torch

    first = start.last_hidden[owner]
    if tokens.size(1) == 1:
        return first
    cache = copy.copy(start.cache)
    cache.layers = [copy.copy(layer) for layer in start.cache.layers]
    cache.batch_select_indices(owner)
    whole = torch.cat([start.mask[owner], mask[:, :-1].long()], 1)
    following = _run(
        model,
        cache,
        input_ids=tokens[:, :-1],
        attention_mask=whole,
        position_ids=_positions(whole)[:, start.mask.size(1) :],
    )
    return torch.cat([first, following], 1)


def _run(model: Any, cache: Any, **inputs: "torch.Tensor") -> "torch.Tensor":
    """Last hidden states of ``inputs`` behind what ``cache`` holds, to which they are added."""
    body = model.base_model
    states: torch.Tensor = body(**inputs, **{cache_name(body): cache}, use_cache=True).last_hidden_state
    return states


def group_equal(prompts: Sequence[TokenIds]) -> tuple[list[TokenIds], list[int]]:
    """The distinct prompts in order of appearance, and for each prompt its place among them.

    >>> group_equal([[1, 2], [3], [1, 2]])
    ([[1, 2], [3]], [0, 1, 0])
    """
    place: dict[tuple[int, ...], int] = {}
    row_of = [place.setdefault(tuple(prompt), len(place)) for prompt in prompts]
    return [list(prompt) for prompt in place], row_of


def _common_length(prompts: Sequence[TokenIds], *, hold_back: int = 0) -> int:
    """How many tokens distinct prompts begin with in common, so that each goes on for ``hold_back + 1`` at least.

    One prompt has nothing in common with another: it is run in one piece.
    """
    if len(prompts) == 1:
        return 0
    at_most = min(map(len, prompts)) - 1 - hold_back
    length = 0
    for tokens in zip(*prompts, strict=False):
        if length >= at_most or len(set(tokens)) > 1:
            break
        length += 1
    return length


def _sets_any(names: Sequence[str], settings: Sequence[Any]) -> bool:
    return any(getattr(each, name, None) for each in settings for name in names)


def _with_limit(generation_config: Any, tokens: int) -> Any:
    limited = copy.copy(generation_config)
    limited.max_new_tokens = tokens
    return limited


def _positions(mask: "torch.Tensor") -> "torch.Tensor":
    return (mask.cumsum(-1) - 1).clamp(min=0)


def until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """``tokens`` up to the first of ``ends``, which is kept.

    >>> until_end([5, 2, 7], {2})
    [5, 2]
    """
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens
