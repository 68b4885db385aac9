"""The number that a sequence-classification model gives sequences of tokens, in batches; it loads no model."""

from collections.abc import Sequence
from typing import Any


def score_sequences(model: Any, sequences: Sequence[Sequence[int]], *, limit: int, batch: int = 16) -> list[float]:
    """The number that a sequence-classification model gives each sequence of tokens, alike ones computed once.

    What is longer than ``limit`` loses its beginning: the answer is at the end.
    """
    import torch

    pad = model.config.get_text_config().pad_token_id
    cut = [tuple(ids[-limit:]) for ids in sequences]
    distinct = sorted(set(cut), key=lambda ids: (len(ids), ids))  # a batch of like lengths has little padding
    found: dict[tuple[int, ...], float] = {}
    for start in range(0, len(distinct), batch):
        some = distinct[start : start + batch]
        ids, mask = padded(some, pad, model.device)
        with torch.inference_mode():
            values = model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
        found.update(zip(some, values, strict=True))
    return [found[ids] for ids in cut]


def padded(rows: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Any, Any]:
    """Rows of tokens as one tensor, filled up on the right with ``pad``, and the mask of what is not filling."""
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[*map(int, row)] + [pad] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask
