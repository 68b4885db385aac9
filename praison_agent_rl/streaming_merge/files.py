"""Read and write safetensors shards a piece at a time, so that no tensor and no shard is ever whole in memory.

Pieces are read and not mapped: mapped pages would count as memory of the process for as long as the system likes.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from praison_agent_rl.errors import ModelError
from praison_agent_rl.weight_files import read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Number formats that can be merged into, by their names in safetensors and in torch."""
PIECE = 2**18
"""Elements of a tensor that are worked on at once: 1 MiB in float32; larger ones stay behind in the allocator."""
_COPIED = 2**22
"""Bytes that are copied or compared at once."""

Pieces = Callable[[], Iterator[Any]]
"""Makes the parts of a tensor, in order; each is a torch tensor in the number format that is stored."""


class Stored(NamedTuple):
    """Where a tensor lies on disk."""

    file: Path
    dtype: str
    """As safetensors names it: ``F32``, ``BF16``."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    size: int
    """Bytes."""


class Written(NamedTuple):
    """A tensor that is to be written: copied from where it is stored, or made piece by piece."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    content: Stored | Pieces


def tensors_of(file: Path) -> dict[str, Stored]:
    """The tensors of a shard by name, in the order of their bytes; raises ModelError for a broken file."""
    header = read_header(file)
    with file.open("rb") as opened:
        body = 8 + int(struct.unpack("<Q", opened.read(8))[0])
    places = {
        name: Stored(
            file,
            str(tensor["dtype"]),
            tuple(map(int, tensor["shape"])),
            body + int(tensor["data_offsets"][0]),
            int(tensor["data_offsets"][1]) - int(tensor["data_offsets"][0]),
        )
        for name, tensor in header.items()
    }
    return dict(sorted(places.items(), key=lambda item: item[1].start))


def read_rows(stored: Stored, *, rows: int | None = None) -> Iterator[Any]:
    """The tensor as torch tensors of at most ``rows`` rows (all of them: one tensor), in its own number format."""
    import torch

    kind = getattr(torch, FLOATS[stored.dtype])
    first, rest = (stored.shape or (1,))[0], stored.shape[1:]
    step = max(1, first if rows is None else rows)
    row_bytes = stored.size // max(first, 1)
    with stored.file.open("rb") as file:
        file.seek(stored.start)
        for begin in range(0, first, step):
            count = min(step, first - begin)
            raw = bytearray(count * row_bytes)
            if file.readinto(raw) != len(raw):
                raise ModelError(f"{str(stored.file)!r} ended while it was read; has it been changed meanwhile?")
            yield torch.frombuffer(raw, dtype=kind).reshape(count, *rest)


def rows_at_once(shape: tuple[int, ...]) -> int:
    """Rows of a tensor of ``shape`` that make one piece; at least one."""
    return max(1, PIECE // max(1, math.prod(shape[1:])))


def write_shard(target: Path, tensors: Mapping[str, Written]) -> None:
    """Write a shard in which each tensor is copied or made while it is written.

    The format: 8 bytes of length, a JSON header, then the data without gaps. Wide number formats come first, as the
    safetensors library writes them, so that all are aligned.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].size // max(1, math.prod(tensors[name].shape)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        offsets = [end, end := end + tensor.size]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            _write(file, tensors[name].content)
        if file.tell() != 8 + len(text) + end:  # or the header would speak of bytes that are not there
            raise ModelError(f"{str(target)!r} has {file.tell()} bytes and not {8 + len(text) + end}; merge again")


def _write(file: BinaryIO, content: Stored | Pieces) -> None:
    if isinstance(content, Stored):
        for part in raw_parts(content):
            file.write(part)
        return
    for piece in content():
        file.write(memoryview(bytes_of(piece)))


def bytes_of(tensor: Any) -> Any:
    """The bytes of a torch tensor, as a numpy array that shares its memory."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def raw_parts(stored: Stored) -> Iterator[bytes]:
    """The bytes of a tensor, a few MiB at a time."""
    with stored.file.open("rb") as file:
        file.seek(stored.start)
        left = stored.size
        while left:
            part = file.read(min(left, _COPIED))
            if not part:
                raise ModelError(f"{str(stored.file)!r} ended while it was read; has it been changed meanwhile?")
            left -= len(part)
            yield part


def same_bytes(one: Stored, other: Stored) -> bool:
    """Whether two tensors are the same: number format, shape and every byte."""
    if (one.dtype, one.shape, one.size) != (other.dtype, other.shape, other.size):
        return False
    return all(left == right for left, right in zip(raw_parts(one), raw_parts(other), strict=True))


def write_index(folder: Path, placed: Mapping[str, Iterable[tuple[str, Written]]]) -> None:
    """Write the index of a model in several shards; ``placed`` are the tensors of each file."""
    listed = [(name, file, tensor) for file, tensors in placed.items() for name, tensor in tensors]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for _, _, tensor in listed),
            "total_size": sum(tensor.size for _, _, tensor in listed),
        },
        "weight_map": {name: file for name, file, _ in sorted(listed, key=lambda entry: entry[0])},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
