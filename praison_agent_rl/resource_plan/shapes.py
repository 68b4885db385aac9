"""How large the parts of a model are, from its ``config.json`` or from a table of well-known models.

No weights are loaded, and nothing is fetched.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ConfigError, ModelError
from praison_agent_rl.records import Record
from praison_agent_rl.weight_files import check_weight_files, read_config, read_header


class Shape(Record):
    """The sizes of a decoder whose layers are attention (with grouped keys) and a gated MLP."""

    name: str
    hidden: int
    """Width of what goes from layer to layer."""
    layers: int
    queries: int
    """Width of all queries of a layer: heads times the width of one."""
    keys: int
    """Width of all keys of a layer, and of all values."""
    inner: int
    """Width within the MLP."""
    vocabulary: int
    tied: bool = False
    """Whether the head is the embedding."""
    small: int = 0
    """Parameters of a layer that are in no matrix: norms and biases."""
    counted: int | None = None
    """Parameters as counted in the files, or as given; None where they follow from the sizes."""
    stored_bits: int = 16
    """Bits of a weight in the files, where these are quantised."""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer by name, each with its width in and out."""
        hidden, inner = self.hidden, self.inner
        return {
            "q_proj": (hidden, self.queries),
            "k_proj": (hidden, self.keys),
            "v_proj": (hidden, self.keys),
            "o_proj": (self.queries, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head where it is one of its own."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        if self.counted is not None:
            return self.counted
        layer = sum(math.prod(sizes) for sizes in self.matrices.values()) + self.small
        return self.layers * layer + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def in_layers(self) -> int:
        """Parameters of all layers: what is quantised, and shared out layer by layer."""
        return self.parameters - self.embedding * (1 if self.tied else 2)


_EVERYDAY: dict[str, tuple[int, int, int, int, int, int, int, bool, int]] = {
    # hidden, layers, heads, key heads, width of a head, inner, vocabulary, tied, parameters in no matrix of a layer
    "HuggingFaceTB/SmolLM2-135M": (576, 30, 9, 3, 64, 1536, 49152, True, 2 * 576),
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864, 151936, True, 2 * 896 + 1152),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 128, 8960, 151936, True, 2 * 1536 + 2048),
    "Qwen/Qwen2.5-3B": (2048, 36, 16, 2, 128, 11008, 151936, True, 2 * 2048 + 2560),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 128, 18944, 152064, False, 2 * 3584 + 4608),
    "Qwen/Qwen2.5-14B": (5120, 48, 40, 8, 128, 13824, 152064, False, 2 * 5120 + 7168),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 128, 27648, 152064, False, 2 * 5120 + 7168),
    "Qwen/Qwen2.5-72B": (8192, 80, 64, 8, 128, 29568, 152064, False, 2 * 8192 + 10240),
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 8, 128, 3072, 151936, True, 2 * 1024 + 256),
    "Qwen/Qwen3-1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True, 2 * 2048 + 256),
    "Qwen/Qwen3-4B": (2560, 36, 32, 8, 128, 9728, 151936, True, 2 * 2560 + 256),
    "Qwen/Qwen3-8B": (4096, 36, 32, 8, 128, 12288, 151936, False, 2 * 4096 + 256),
    "Qwen/Qwen3-14B": (5120, 40, 40, 8, 128, 17408, 151936, False, 2 * 5120 + 256),
    "Qwen/Qwen3-32B": (5120, 64, 64, 8, 128, 25600, 151936, False, 2 * 5120 + 256),
    "meta-llama/Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192, 128256, True, 2 * 2048),
    "meta-llama/Llama-3.2-3B": (3072, 28, 24, 8, 128, 8192, 128256, True, 2 * 3072),
    "meta-llama/Llama-3.1-8B": (4096, 32, 32, 8, 128, 14336, 128256, False, 2 * 4096),
    "meta-llama/Llama-3.1-70B": (8192, 80, 64, 8, 128, 28672, 128256, False, 2 * 8192),
    "meta-llama/Llama-3.3-70B": (8192, 80, 64, 8, 128, 28672, 128256, False, 2 * 8192),
    "google/gemma-2-2b": (2304, 26, 8, 4, 256, 9216, 256000, True, 4 * 2304),
    "google/gemma-2-9b": (3584, 42, 16, 8, 256, 14336, 256000, True, 4 * 3584),
    "mistralai/Mistral-7B-v0.3": (4096, 32, 32, 8, 128, 14336, 32768, False, 2 * 4096),
}
"""Well-known models: what ``https://huggingface.co/NAME/blob/main/config.json`` says of each."""


def _everyday(name: str) -> Shape:
    hidden, layers, heads, key_heads, width, inner, vocabulary, tied, small = _EVERYDAY[name]
    return Shape(
        name=name,
        hidden=hidden,
        layers=layers,
        queries=heads * width,
        keys=key_heads * width,
        inner=inner,
        vocabulary=vocabulary,
        tied=tied,
        small=small,
    )


KNOWN = {name: _everyday(name) for name in _EVERYDAY}
"""The shapes of well-known models by their names on the hub."""


def find_shape(model: str, parameters: int | None = None) -> Shape:
    """The shape of a folder, of a model in the hub's cache, or of a well-known name; else of the nearest known size.

    ``parameters`` are those of a model of which no more is known.

    Raises:
        ConfigError: nothing is known of the model, and no number was given; or a size in its config.json is none.
        ModelError: its config.json cannot be read.
    """
    if config := read_config(model):
        return _of_config(model, config, parameters or count_parameters(model))
    if (cached := _cached_folder(model)) and (config := read_config(cached)):
        return _of_config(model, config, parameters or _counted_if_whole(cached))
    known = _well_known(model)
    if known and parameters is None:
        return known.model_copy(update={"name": model, "stored_bits": _bits_in_name(model)})
    parameters = parameters or count_parameters(model)
    if parameters is None:
        raise ConfigError(
            f"nothing is known here of the size of {model!r}; give the number of its parameters (--parameters 7B), or "
            "a folder with its config.json"
        )
    nearest = known or min(KNOWN.values(), key=lambda shape: abs(math.log(shape.parameters / parameters)))
    name = f"{model}, as {nearest.name}"
    return nearest.model_copy(update={"name": name, "counted": parameters, "stored_bits": _bits_in_name(model)})


def read_count(text: str) -> int:
    """Parameters as people write them.

    >>> read_count("7B"), read_count("1.5b"), read_count("500M")
    (7000000000, 1500000000, 500000000)

    Raises:
        ConfigError: it is no such number.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([bm]?)", text.strip().lower())
    count = round(float(found[1]) * {"b": 1e9, "m": 1e6, "": 1}[found[2]]) if found else 0
    if count == 0:
        raise ConfigError(f"{text!r} is no number of parameters; write for example 7B, 1.5B or 500M")
    return count


def count_parameters(base: str) -> int | None:
    """Parameters of a folder of safetensors or a GGUF file, from the files' headers; None where there are none."""
    path = Path(base)
    if path.is_dir():
        tensors = [tensor for file in path.glob("*.safetensors") for tensor in read_header(file).values()]
        return sum(math.prod(map(int, tensor["shape"])) for tensor in tensors) if tensors else None
    if path.suffix.lower() == ".gguf" and path.is_file():
        return int(path.stat().st_size * 8 / 4.9)  # 4-bit blocks with their scales take 4.5 to 5 bits a parameter
    return None


def _of_config(model: str, config: dict[str, Any], counted: int | None) -> Shape:
    described: dict[str, Any] = {**config, **(config.get("text_config") or {})}
    hidden, heads = _size(described, "hidden_size", 2048), _size(described, "num_attention_heads", 16)
    width = _size(described, "head_dim", max(1, hidden // heads))
    keys = _size(described, "num_key_value_heads", heads) * width
    biases = heads * width + 2 * keys if described.get("model_type") == "qwen2" else 0
    quantised = config.get("quantization_config") or {}
    bits = 4 if quantised.get("load_in_4bit") else 8 if quantised.get("load_in_8bit") else 16
    return Shape(
        name=model,
        hidden=hidden,
        layers=_size(described, "num_hidden_layers", 24),
        queries=heads * width,
        keys=keys,
        inner=_size(described, "intermediate_size", 4 * hidden),
        vocabulary=_size(described, "vocab_size", 32000),
        tied=bool(described.get("tie_word_embeddings", str(described.get("model_type")).startswith("gemma"))),
        small=2 * hidden + biases,
        # packed weights and their scales are not parameters one by one
        counted=counted if bits == 16 else None,
        stored_bits=bits,
    )


def _size(described: Mapping[str, Any], name: str, usual: int) -> int:
    """A size in a ``config.json``; the largest of all layers where each has its own."""
    found = described.get(name)
    sizes: list[Any] = found if isinstance(found, list) and found else [usual if found is None else found]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"config.json has {name} {found!r}, not a whole number from 1 up; take the original file")
    return int(max(sizes))


def _cached_folder(model: str) -> str | None:
    """Where the hub's cache holds a model; None where it does not."""
    if model.count("/") != 1 or Path(model).exists():
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path, or no name of the hub's
        return None
    return str(Path(found).parent) if isinstance(found, str) else None


def _counted_if_whole(folder: str) -> int | None:
    """The parameters of a folder of the cache, of which some files may not have been fetched."""
    try:
        check_weight_files(Path(folder))
    except ModelError:
        return None
    return count_parameters(folder)


def _well_known(model: str) -> Shape | None:
    """``unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit`` is a Llama-3.1-8B."""
    written = model.rsplit("/", 1)[-1].lower()
    for name, shape in KNOWN.items():
        plain = name.rsplit("/", 1)[-1].lower()
        if re.fullmatch(rf"(meta-)?{re.escape(plain)}(-instruct|-it|-base|-chat)?(-unsloth)?(-bnb-4bit)?", written):
            return shape
    return None


def _bits_in_name(model: str) -> int:
    return 4 if "bnb-4bit" in model.lower() else 16
