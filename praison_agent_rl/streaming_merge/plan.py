"""What a streamed merge does to each tensor on disk, or why a merge cannot be streamed exactly; nothing is written.

The model is built without memory (torch's meta device), so PEFT itself says which layers an adapter has and how it is
scaled, and transformers itself says which tensor on disk becomes which of the model.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import only_errors_of
from praison_agent_rl.streaming_merge.files import FLOATS, INDEX, SINGLE, Stored, tensors_of
from praison_agent_rl.weight_files import read_config

ADAPTER = "adapter_model.safetensors"
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""``init_lora_weights`` that leave the base as it is; the others (PiSSA, OLoRA, ...) change the base weights too."""
_WITH_MORE = (
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "megatron_config",
    "use_qalora",
    "use_dora",
)
"""Settings of PEFT that do more than add a product to a weight."""
_PREFIX = "base_model.model."


class CannotStream(ModelError):
    """This merge cannot be streamed exactly; the message says why, and PEFT's own merge in memory does it."""


class Change(NamedTuple):
    """What becomes of one tensor: at first it is ``replaced``, where that is given, and then something is added."""

    layer: str | None = None
    """Name of the PEFT layer that adds to it, in the model; None if it is only replaced."""
    replaced: Any = None
    a: Any = None
    """Rank x inputs."""
    b: Any = None
    """Outputs x rank."""
    bias: Any = None
    """Outputs: added to a bias."""
    scaling: float = 1.0
    turned: bool = False
    """The weight is stored inputs x outputs: embeddings and ``Conv1D``."""

    def in_float32(self) -> "Change":
        """The same with A, B and the bias in float32, as PEFT loads them; the adapter rests as it is stored."""
        a, b, bias = (None if given is None else given.float() for given in (self.a, self.b, self.bias))
        return self._replace(a=a, b=b, bias=bias)


class MergePlan(NamedTuple):
    """Everything that is to be known before the first byte is written."""

    model: Any
    """PEFT's model on the meta device: it has no numbers."""
    shards: list[Path]
    kept: dict[str, Stored]
    """Tensors of the base by their names on disk; those that the model does not have are left out."""
    changes: dict[str, Change]
    """By names on disk."""
    added: dict[str, Any]
    """Tensors that the base lacks, such as the head of a reward model."""
    dtype: str
    """Number format of most weights, as safetensors names it."""

    @property
    def size(self) -> int:
        """Bytes of the merged weights."""
        added = sum(int(tensor.numel()) for tensor in self.added.values()) * 4
        return sum(stored.size for stored in self.kept.values()) + added

    @property
    def parameters(self) -> int:
        """Numbers in the base's files."""
        return sum(int(parameter.numel()) for parameter in self.model.get_base_model().parameters())


def plan_merge(base: str, adapter: Path, *, config: TrainConfig, scorer: bool = False) -> MergePlan:
    """Find out what a merge of ``adapter`` into ``base`` does to each tensor on disk.

    Raises:
        CannotStream: not all of it is known to be exact.
        ModelError: the base lacks weights, which transformers would make up.
    """
    shards = _shards(base, config)
    model, missing = _empty_model(base, config, scorer=scorer)
    stored, names = _names_on_disk(model, shards)
    lora, replaced = _adapter_tensors(adapter)
    adapted = _adapted(model, adapter)
    changes = _lora_changes(adapted, lora)
    for name, tensor in replaced.items():
        changes[name] = changes.get(name, Change())._replace(replaced=tensor)
    added = {name: changes.pop(name).replaced for name in sorted(missing) if name in changes}
    if left := sorted(missing - added.keys()):
        _refuse_made_up(base, left, head_may_be_new=scorer, trunk=f"{model.base_model_prefix}.")
        raise CannotStream(f"the base has no tensor for {left[0]}, and neither has the adapter")
    _refuse_tied(model, changes.keys() | added.keys())
    by_disk = {}
    for name, change in changes.items():
        if name not in names:
            raise CannotStream(f"{name} is not stored by itself on disk")
        if (place := stored[names[name]]).dtype not in FLOATS:
            raise CannotStream(f"{name} is stored as {place.dtype}, which holds no plain numbers")
        _check_shape(name, change, place.shape)
        by_disk[names[name]] = change
    return MergePlan(adapted, shards, stored, by_disk, added, _usual_dtype(stored))


def _shards(base: str, config: TrainConfig) -> list[Path]:
    if not (folder := Path(base)).is_dir():
        folder = _cached_folder(base, config)
    described = read_config(str(folder))
    if "quantization_config" in described:
        raise CannotStream("the base is stored quantised")
    if "auto_map" in described:
        raise CannotStream("the base brings model code of its own")
    if (folder / SINGLE).is_file():  # transformers too looks for this one first
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise CannotStream(f"the base has neither {SINGLE} nor {INDEX}")
    named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    shards = [folder / name for name in sorted(set(named))]
    if lost := [path.name for path in shards if not path.is_file()]:
        raise CannotStream(f"the base lacks {lost[0]}")
    return shards


def _cached_folder(name: str, config: TrainConfig) -> Path:
    from huggingface_hub import try_to_load_from_cache

    for file in (SINGLE, INDEX):
        if isinstance(found := try_to_load_from_cache(name, file, revision=config.revision), str):
            return Path(found).parent
    raise CannotStream(f"{name!r} has no safetensors in the local cache of hub models")


def _empty_model(base: str, config: TrainConfig, *, scorer: bool) -> tuple[Any, set[str]]:
    """The model without numbers, and names of its tensors that its files lack."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    options: dict[str, Any] = {"num_labels": 1} if scorer else {}
    try:
        with only_errors_of("transformers"):  # of a model without numbers
            model, found = kind.from_pretrained(
                base, revision=config.revision, dtype="auto", device_map="meta", output_loading_info=True, **options
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, NotImplementedError) as error:
        raise CannotStream(f"the model cannot be built without memory ({error})") from error
    if found["mismatched_keys"]:
        raise CannotStream("tensors of the base have other shapes than its config says")
    return model, set(found["missing_keys"])


def _names_on_disk(model: Any, shards: list[Path]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors by names on disk, and names on disk by the model's names; those that transformers fuses are left out.

    It follows ``convert_and_load_state_dict_in_model`` of transformers 5.24 (core_model_loading).
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError as error:  # transformers 4 names them as they are on disk, by rules of each model's own
        raise CannotStream(f"this release of transformers does not say how it renames tensors ({error})") from error
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    wanted, prefix = model.state_dict(), model.base_model_prefix
    stored: dict[str, Stored] = {}
    names: dict[str, str] = {}
    found = [entry for shard in shards for entry in tensors_of(shard).items()]
    for name, place in sorted(found, key=lambda entry: dot_natural_key(entry[0])):  # some rules go by this order
        own, fused = rename_source_key(name, renamings, converters, prefix, wanted)
        if own not in wanted and name in wanted:
            own, fused = rename_source_key(name, [], [], prefix, wanted)
        if own not in wanted:
            continue  # transformers does not read it, nor would it save it
        if name in stored or (fused is None and own in names):
            raise CannotStream(f"{own} is stored twice")
        stored[name] = place
        if fused is None:
            names[own] = name
    return stored, names


def _adapter_tensors(adapter: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The adapter's tensors: those that add to a weight, and those that take the place of one."""
    from safetensors.torch import load_file

    if not (adapter / ADAPTER).is_file():
        raise CannotStream(f"the adapter has no {ADAPTER}")
    lora: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    for name, tensor in load_file(adapter / ADAPTER).items():
        own = name.removeprefix(_PREFIX)
        if own == name:
            raise CannotStream(f"the adapter's tensor {name} does not begin with {_PREFIX}")
        kind = lora if ".lora_" in own else replaced
        kind[own if kind is lora else own.replace(".base_layer.", ".")] = tensor
    return lora, replaced


def _adapted(model: Any, adapter: Path) -> Any:
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(str(adapter))
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise CannotStream(f"the adapter is of type {config.peft_type} and no LoRA")
    if given := [name for name in _WITH_MORE if getattr(config, name, None)]:
        raise CannotStream(f"the adapter has {', '.join(given)}")
    start = config.to_dict().get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CannotStream(f"the adapter began with init_lora_weights={start!r}, which changes the base weights")
    try:
        return get_peft_model(model, config)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, KeyError, AttributeError) as error:
        raise CannotStream(f"PEFT cannot put the adapter onto a model without memory ({error})") from error


def _lora_changes(adapted: Any, lora: dict[str, Any]) -> dict[str, Change]:
    """What is added to each tensor of the model; every LoRA tensor must be used, and every layer must have its own."""
    from peft.tuners.lora import LoraLayer

    changes: dict[str, Change] = {}
    left = dict(lora)
    for name, layer in adapted.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            changes |= _changes_of_layer(name, layer, left)
    if left:
        raise CannotStream(f"the adapter's tensor {min(left)} belongs to no plain LoRA layer of the model")
    return changes


def _changes_of_layer(name: str, layer: Any, left: dict[str, Any]) -> dict[str, Change]:
    """Takes the layer's tensors out of ``left``."""
    from peft.tuners.lora import Embedding, Linear

    (adapter,) = layer.scaling
    scaling = float(layer.scaling[adapter])
    if type(layer) not in (Linear, Embedding) or layer.lora_variant:
        variants = ", ".join(type(variant).__name__ for variant in layer.lora_variant.values())
        raise CannotStream(f"{name} has a layer of PEFT's kind {type(layer).__name__} {variants}".rstrip())
    embedding = type(layer) is Embedding
    wanted = [f"{name}.lora_embedding_{side}" if embedding else f"{name}.lora_{side}.weight" for side in "AB"]
    if lost := [key for key in wanted if key not in left]:
        raise CannotStream(f"the adapter lacks {lost[0]}")
    a, b = (left.pop(key) for key in wanted)
    if len(found := {len(a), b.shape[-1], layer.r[adapter]}) > 1:  # the config's is what alpha is divided by
        raise CannotStream(f"{name} has several ranks in the adapter's tensors and config: {sorted(found)}")
    turned = embedding or bool(layer.fan_in_fan_out)
    changes = {f"{name}.weight": Change(name, a=a, b=b, scaling=scaling, turned=turned)}
    if (bias := left.pop(f"{name}.lora_B.bias", None)) is not None:
        if not layer.lora_bias[adapter]:
            raise CannotStream(f"{name} has a LoRA bias that the adapter's config does not speak of")
        changes[f"{name}.bias"] = Change(name, bias=bias, scaling=scaling)
    return changes


def _refuse_made_up(base: str, lacking: list[str], *, head_may_be_new: bool, trunk: str) -> None:
    """Raise ModelError for weights that would be random numbers; only the head of a reward model may be, at first."""
    if lost := [name for name in lacking if name.startswith(trunk) or not head_may_be_new]:
        raise ModelError(
            f"{base!r} has no weights for {', '.join(lost[:3])} ({len(lost)} in all), so random ones would be merged; "
            "it was not copied or downloaded whole, or its index does not name all: fetch it again"
        )


def _refuse_tied(model: Any, changed: set[str]) -> None:
    for one, other in model.all_tied_weights_keys.items():
        if touched := sorted({one, other} & changed):
            raise CannotStream(f"{touched[0]} is tied: {one} and {other} are one tensor")


def _check_shape(name: str, change: Change, shape: tuple[int, ...]) -> None:
    shapes = [tuple(change.replaced.shape)] if change.replaced is not None else []
    if change.b is not None:
        shapes.append((change.b.shape[0], change.a.shape[1])[:: -1 if change.turned else 1])
    if change.bias is not None:
        shapes.append(tuple(change.bias.shape))
    if wrong := [other for other in shapes if other != shape]:
        raise CannotStream(f"{name} is {shape} on disk and {wrong[0]} in the adapter")


def _usual_dtype(stored: dict[str, Stored]) -> str:
    sizes: dict[str, int] = {}
    for place in stored.values():
        if place.dtype in FLOATS:
            sizes[place.dtype] = sizes.get(place.dtype, 0) + place.size
    if not sizes:
        raise CannotStream("the base holds no plain numbers")
    return max(sizes, key=lambda dtype: sizes[dtype])
