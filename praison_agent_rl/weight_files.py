"""What a model's files say of themselves without being loaded: ``config.json``, tensor names, and whether all is there.

Only headers are read, with the standard library alone; nothing is written.
"""

import json
import struct
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ModelError

Header = dict[str, Any]

_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library itself
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenization*.py")
_AGAIN = "it was not copied or downloaded whole; fetch it again"


def read_config(source: str) -> dict[str, Any]:
    """The model's ``config.json`` where it can be read without loading anything; empty where there is none.

    Raises:
        ModelError: it is no JSON object.
    """
    path = Path(source) / "config.json"
    return _read_object(path) if path.is_file() else {}


def check_weight_files(folder: Path) -> None:
    """Raise ModelError if the files of a model's folder are broken, or some of them are missing."""
    config = read_config(str(folder))
    where = f"'{folder / 'config.json'}'"
    if not isinstance(config.get("model_type"), str) and "auto_map" not in config:
        raise ModelError(f"{where} has no model_type, so nobody can say what model this is; take the original file")
    for name in _SIZES:
        size = config.get(name)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ModelError(f"{where} has {name} {size!r}, not a whole number from 1 up; take the original file")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = _read_object(index).get("weight_map")
        if not isinstance(named, dict):
            raise ModelError(f"{str(index)!r} has no weight_map, so nobody can say which file holds what; {_AGAIN}")
        files = sorted({str(name) for name in named.values()})
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise ModelError(f"{str(folder)!r} lacks {', '.join(missing)} of {len(files)} weight files; {_AGAIN}")
    for file in sorted(folder.glob("*.safetensors")):
        read_header(file)


def check_adapter_files(folder: Path) -> None:
    """Raise ModelError if an adapter's config, or its tensors in safetensors, are missing or broken."""
    _read_object(folder / "adapter_config.json")
    read_header(folder / "adapter_model.safetensors")


def check_tokenizer_files(folder: Path) -> None:
    """Raise ModelError if a model's folder has no vocabulary, or its tokenizer's files are no JSON."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _read_object(folder / name)
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise ModelError(f"{str(folder)!r} has no tokenizer (tokenizer.json or another vocabulary); {_AGAIN}")


def check_gguf(file: Path) -> None:
    """Raise ModelError unless ``file`` begins as every GGUF file does."""
    try:
        with file.open("rb") as opened:
            start = opened.read(4)
    except OSError as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error
    if start != b"GGUF":
        what = "is empty" if not start else f"begins with {start!r} and not with b'GGUF'"
        raise ModelError(f"{str(file)!r} {what}, so it is no GGUF file; fetch it again")


def read_header(file: Path) -> Header:
    """The header of a safetensors file, its tensors by name, each with ``dtype`` and ``shape``.

    The format: 8 bytes of length, then JSON, then the data without a gap up to the end of the file.

    Raises:
        ModelError: the file is cut off, or none of its kind.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= _LONGEST_HEADER or 8 + length > size:
                raise ModelError(f"{str(file)!r} has {size} bytes and no whole safetensors header; {_AGAIN}")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
        if not all(isinstance(tensor["shape"], list) for tensor in header.values()):
            raise TypeError("a tensor without a shape")
    except OSError as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{str(file)!r} has a header that is not one of safetensors; {_AGAIN}") from error
    if size != 8 + length + end:
        raise ModelError(f"{str(file)!r} has {size} bytes, but its header speaks of {8 + length + end}; {_AGAIN}")
    return dict(header)


def modules_of(source: str) -> dict[str, int]:
    """Modules with a weight of their own and the number of its dimensions; empty where the files do not say.

    That is so for hub names, GGUF files, and models whose modules transformers names in another way than their files:
    those with several parts (``text_config``) and with experts.
    """
    folder = Path(source)
    if not folder.is_dir() or "text_config" in read_config(source):
        return {}
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in read_header(file).items()}
    if any(".experts." in name for name in tensors):
        return {}
    return {
        name.removesuffix(".weight"): len(tensor["shape"])
        for name, tensor in tensors.items()
        if name.endswith(".weight")
    }


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{str(path)!r} cannot be read as JSON: {error}; take the original file") from error
    if not isinstance(value, dict):
        raise ModelError(f"{str(path)!r} holds a {type(value).__name__}, not an object; take the original file")
    return value
