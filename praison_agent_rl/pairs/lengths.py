"""Pairs that are too long to be trained on are counted before anything heavy starts; it loads no weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.errors import DataError, ModelError
from praison_agent_rl.models import load_tokenizer
from praison_agent_rl.pairs.texts import SIDES, Rendered, render_pairs

_AROUND = 512
"""Tokens that a template may add by itself: a system prompt, headers, how to call tools."""


def check_lengths(
    config: TrainConfig, base: str, rows: Sequence[Row], *, tools: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """What to say of pairs that do not fit into ``max_length`` tokens; nothing where all do.

    The tokenizer is loaded only if the bytes of a pair leave it open whether it fits, and of a folder only: what is
    not on this machine is counted when the training starts.

    Raises:
        DataError: no pair fits.
        ModelError: the pairs are messages, and the model has no chat template or one that refuses them.
    """
    limit = longest_of(config)
    around = len(json.dumps(list(tools), ensure_ascii=False).encode()) + _AROUND
    if config.method == "grpo" or not rows or not Path(base).is_dir():
        return []
    doubtful = [row for row in rows if _most(row) + around > limit]  # a token is a byte or more
    if not doubtful:
        return []
    pairs = render_pairs(load_tokenizer(base, config), doubtful, tools=tools)
    _, said = fitting(pairs, limit, of=len(rows), what="pairs")
    return [said] if said else []


def mean_tokens(rows: Sequence[Row]) -> float:
    """Roughly the tokens of both sides of a pair with their prompts, at four bytes a token; 0 where there is no pair.

    >>> mean_tokens([{"prompt": "12345678", "chosen": "1234", "rejected": "12345678"}, {"prompt": "no pair"}])
    7.0
    """
    pairs = [row for row in rows if all(side in row for side in SIDES)]
    sizes = [2 * _bytes(row.get("prompt")) + sum(_bytes(row[side]) for side in SIDES) for row in pairs]
    return sum(sizes) / len(sizes) / 4 if sizes else 0.0


def longest_of(config: TrainConfig) -> int:
    """Tokens that prompt and answer may have together."""
    return config.max_length or config.max_seq_length


def fitting(
    pairs: Sequence[tuple[Rendered, Rendered]], limit: int, *, of: int | None = None, what: str = "training pairs"
) -> tuple[list[tuple[Rendered, Rendered]], str | None]:
    """The pairs of which both sides fit, and what to say of the others; TRL filters or cuts those in silence.

    ``of`` is the number of pairs in all, where the others are known to fit.

    Raises:
        DataError: none fits.
        ModelError: the chat template leaves a pair with nothing that the model writes.
    """
    whole = len(pairs) if of is None else of
    if any(not side.answer for pair in pairs for side in pair):
        raise ModelError("the chat template renders an answer of the pairs as nothing; set another chat_template")
    longest = [max(len(one.ids), len(other.ids)) for one, other in pairs]
    kept = [pair for pair, length in zip(pairs, longest, strict=True) if length <= limit]
    if not (gone := len(pairs) - len(kept)):
        return kept, None
    seen = f"{gone} of {whole} {what} are longer than {limit} tokens (max_length)"
    if gone == whole:
        raise DataError(f"{seen}, the longest has {max(longest)}: none is left to train on; raise max_length")
    return kept, f"{seen} and are left out; the longest has {max(longest)}"


def _most(row: Row) -> int:
    """Bytes of the longer side with all that stands before it."""
    before = _bytes(row.get("prompt")) + _bytes(row.get("tools"))
    return before + max(_bytes(row[side]) for side in SIDES)


def _bytes(value: Any) -> int:
    if value is None:
        return 0
    return len((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode())
