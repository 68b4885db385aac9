"""Merge a LoRA adapter into the safetensors shards of its base, a piece of a tensor at a time.

Beside the adapter a few MiB are in memory, however large the model. Each shard of the base becomes one of the same
name; tensors that the adapter does not touch are copied byte for byte. Numbers are merged in float32 and rounded once.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError
from praison_agent_rl.estimate import free_disk, in_words
from praison_agent_rl.models import load_tokenizer
from praison_agent_rl.streaming_merge.files import (
    FLOATS,
    SINGLE,
    Stored,
    Written,
    read_rows,
    rows_at_once,
    write_index,
    write_shard,
)
from praison_agent_rl.streaming_merge.plan import Change, MergePlan, plan_merge

_BESIDE_WEIGHTS = 32 * 2**20
"""Bytes of tokenizer, configs and index: up to 12 MB with a vocabulary of 150 000 (Qwen2.5), and room."""


def merge_shards(base: Path, adapter: Path, out: Path, *, config: TrainConfig, scorer: bool = False) -> MergePlan:
    """Merge ``adapter`` into ``base``, a folder of safetensors, and write shards, config and tokenizer to ``out``.

    What it returns is what `prove_tensors` proves ``out`` by.

    Raises:
        CannotStream: the merge is not one that can be streamed exactly; nothing was written.
        ModelError: the disk is full, or a merged weight is no finite number.
    """
    plan = plan_merge(str(base), adapter, config=config, scorer=scorer)
    write_merge(plan, out)
    write_companions(plan, out, load_tokenizer(str(base), config))
    return plan


def write_merge(plan: MergePlan, out: Path) -> None:
    """Write the merged shards, and their index where there are several.

    Raises:
        ModelError: the disk is full, or a merged weight is no finite number.
    """
    need_disk(plan.size, out)
    out.mkdir(parents=True, exist_ok=True)
    placed: dict[str, dict[str, Written]] = {shard.name: {} for shard in plan.shards}
    for name, stored in plan.kept.items():
        content = merged_pieces(name, stored, plan.changes[name]) if name in plan.changes else stored
        placed[stored.file.name][name] = Written(stored.dtype, stored.shape, stored.size, content)
    last = next(name for name in reversed(placed) if placed[name])
    for name, tensor in plan.added.items():
        placed[last][name] = _whole(name, tensor, plan.dtype)
    written = {name: tensors for name, tensors in placed.items() if tensors}
    for name, tensors in written.items():
        write_shard(out / name, tensors)
    if list(written) != [SINGLE]:
        write_index(out, {name: tensors.items() for name, tensors in written.items()})


def write_companions(plan: MergePlan, out: Path, tokenizer: Any) -> None:
    """Write config, generation config and tokenizer as ``save_pretrained`` of the merged model would."""
    model = plan.model.get_base_model()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = FLOATS[plan.dtype]
    if not model.can_generate():
        # by it a scorer finds the last token of each text in a batch
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    elif model.generation_config is not None:
        # Without it `transformers serve` ignores the temperature that a request asks for.
        model.generation_config.do_sample = True
        model.generation_config.save_pretrained(out)
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def need_disk(size: int, out: Path) -> None:
    """Raise ModelError unless ``size`` bytes of weights, and what lies beside them, have room where ``out`` will be."""
    needed, free = size + _BESIDE_WEIGHTS, free_disk(out.parent)
    if needed > free:
        raise ModelError(
            f"the merged model takes {in_words(needed)}, and the disk of {str(out.parent)!r} has {in_words(free)} "
            "free; free some, or put the run's folder (output_dir) on another disk"
        )


def merged_pieces(name: str, stored: Stored, change: Change) -> Callable[[], Iterator[Any]]:
    """What makes the merged tensor, rows by rows, in the number format that it is stored in."""
    import torch

    def pieces() -> Iterator[Any]:
        step, begin, lora = rows_at_once(stored.shape), 0, change.in_float32()
        for piece in read_rows(stored, rows=step):
            rows = slice(begin, begin := begin + len(piece))
            start = piece if change.replaced is None else change.replaced[rows]
            merged = start.to(torch.float32, copy=True)
            if lora.b is not None:
                merged += _delta(lora, rows)
            if lora.bias is not None:
                merged += lora.bias[rows] * lora.scaling
            yield _finite(merged.to(piece.dtype), name)

    return pieces


def _delta(change: Change, rows: slice) -> Any:
    """Rows of ``scaling * B A`` (Hu et al. 2021, arXiv 2106.09685, sec. 4.1), turned as the weight is stored."""
    product = (change.b @ change.a[:, rows]).T if change.turned else change.b[rows] @ change.a
    return product * change.scaling


def _whole(name: str, tensor: Any, dtype: str) -> Written:
    import torch

    stored = tensor.float().to(getattr(torch, FLOATS[dtype]))
    return Written(
        dtype, tuple(stored.shape), stored.numel() * stored.element_size(), lambda: iter([_finite(stored, name)])
    )


def _finite(tensor: Any, name: str) -> Any:
    if not bool(tensor.isfinite().all()):
        raise ModelError(
            f"the adapter cannot be merged: not every merged weight of {name} is a finite number in {tensor.dtype}"
        )
    return tensor
