"""Attention of rows that follow shared prompts, without a copy of the prompt for each row.

Each row attends to its prompt's keys, which are stored once for the prompt, and to its own, which are written into room
kept for them; one softmax goes over both (the shared-prefix decomposition of Hydragen, arXiv 2402.05099).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

NAME = "praison_agent_rl_cascade"
"""What this attention is called among those of transformers."""
_UNKNOWN = ("softcap", "sliding_window", "s_aux")
"""What some models ask of an attention and this one does not do."""


class Places(NamedTuple):
    """Where rows stand on a grid of (prompts, width), on which all rows of a prompt are side by side."""

    grid: torch.Tensor | None
    """Row at each place, of shape (prompts, width), any row where there is none; None if rows fill it in order."""
    of_row: torch.Tensor | None
    """Place of each row on the grid laid flat, of shape (rows,)."""
    width: int
    """Rows of the prompt that has most."""


def places_of(owner: Sequence[int], prompts: int, device: Any) -> Places:
    """The places of rows by the prompt that each follows."""
    counts = [0] * prompts
    of_row = []
    for prompt in owner:
        of_row.append((prompt, counts[prompt]))
        counts[prompt] += 1
    width = max(counts)
    flat = [prompt * width + nth for prompt, nth in of_row]
    if flat == list(range(prompts * width)):
        return Places(None, None, width)
    grid = torch.zeros(prompts * width, dtype=torch.long)
    grid[flat] = torch.arange(len(flat))
    return Places(grid.view(prompts, width).to(device), torch.tensor(flat, device=device), width)


class Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer: those of prompts, (prompts, heads, length, size), and those of rows so far."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: int, room: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        _, heads, _, size = keys.shape
        self.own_keys = keys.new_empty(rows, heads, room, size)
        self.own_values = values.new_empty(rows, heads, room, values.size(-1))
        self.filled = 0
        """Tokens of each row so far."""
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each row; the attention finds the rest by the layer."""
        self.own_keys[:, :, self.filled] = key_states[:, :, 0]
        self.own_values[:, :, self.filled] = value_states[:, :, 0]
        self.filled += 1
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens that stand before the next one, padding included."""
        return int(self.keys.size(2)) + self.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask would have, and where they begin."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum that a model should know of."""
        return -1

    def keep(self, rows: torch.Tensor, prompts: torch.Tensor | None) -> None:
        """Go on with these rows, and with these prompts where some have no row left."""
        own = self.own_keys, self.own_values
        self.own_keys, self.own_values = (_kept(states, rows, self.filled) for states in own)
        if prompts is not None:
            self.keys, self.values = self.keys[prompts], self.values[prompts]


def _kept(states: torch.Tensor, rows: torch.Tensor, filled: int) -> torch.Tensor:
    fewer = states.new_empty(len(rows), *states.shape[1:])
    fewer[:, :, :filled] = states[rows, :, :filled]
    return fewer


class CascadeCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of prompts and of the rows that follow them."""

    def __init__(self, prefilled: Any, mask: torch.Tensor, owner: Sequence[int], room: int) -> None:
        """Of a cache with one row per prompt, whose ``mask`` (prompts, length) is 1 where a token is."""
        super().__init__(layers=[Layer(layer.keys, layer.values, len(owner), room) for layer in prefilled.layers])
        self.owner = list(owner)
        self.gaps = None if bool(mask.all()) else (mask == 0)
        """True where a prompt is padded, of shape (prompts, length); None if none is."""
        self.places = places_of(self.owner, len(mask), mask.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        owner = [self.owner[row] for row in rows]
        device = self.layers[0].keys.device
        left = sorted(set(owner))
        fewer = len(left) < self.layers[0].keys.size(0)
        prompts = torch.tensor(left, device=device) if fewer else None
        for layer in self.layers:
            layer.keep(torch.tensor(rows, device=device), prompts)
        if fewer and self.gaps is not None:
            self.gaps = self.gaps[prompts]
        self.owner = [left.index(prompt) for prompt in owner] if fewer else owner
        self.places = places_of(self.owner, len(left), device)


def cascade_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cascade: CascadeCache,
    scaling: float | None = None,
    dropout: float = 0.0,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one token of each row, (rows, heads, 1, size), as (rows, 1, heads, size).

    Raises:
        NotImplementedError: the model asks for what this attention does not do.
    """
    unknown = [name for name in _UNKNOWN if asked.get(name) is not None]
    unknown += ["dropout"] * bool(dropout) + ["more than one token of a row"] * (query.size(2) != 1)
    if unknown:
        raise NotImplementedError(f"attention over shared prompts knows no {', '.join(unknown)}")
    layer, places = cascade.layers[module.layer_idx], cascade.places
    rows, heads, _, size = query.shape
    prompts, kinds, length, _ = layer.keys.shape
    each = heads // kinds
    scale = size**-0.5 if scaling is None else scaling
    query = (query * scale).view(rows, kinds, each, size)
    to_prompt = _on_grid(query, places, prompts).matmul(layer.keys.transpose(2, 3))
    if cascade.gaps is not None:
        to_prompt = to_prompt.masked_fill(cascade.gaps[:, None, None], -torch.inf)
    to_own = query.matmul(layer.own_keys[:, :, : layer.filled].transpose(2, 3))
    scores = torch.cat([_by_row(to_prompt, places, each), to_own], -1)
    shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    from_prompt = _on_grid(shares[..., :length], places, prompts).matmul(layer.values)
    from_own = shares[..., length:].matmul(layer.own_values[:, :, : layer.filled])
    return (_by_row(from_prompt, places, each) + from_own).reshape(rows, 1, heads, -1), None


def _on_grid(by_row: torch.Tensor, places: Places, prompts: int) -> torch.Tensor:
    """(rows, kinds, each, size) as (prompts, kinds, width * each, size)."""
    kinds, each, size = by_row.shape[1:]
    on_grid = by_row.view(prompts, places.width, kinds, each, size) if places.grid is None else by_row[places.grid]
    return on_grid.transpose(1, 2).reshape(prompts, kinds, places.width * each, size)


def _by_row(on_grid: torch.Tensor, places: Places, each: int) -> torch.Tensor:
    """(prompts, kinds, width * each, size) as (rows, kinds, each, size)."""
    prompts, kinds, _, size = on_grid.shape
    flat = on_grid.view(prompts, kinds, places.width, each, size).transpose(1, 2).reshape(-1, kinds, each, size)
    return flat if places.of_row is None else flat[places.of_row]


AttentionInterface.register(NAME, cascade_attention)
