"""Adapters that were trained one on another's merged weights, as one for the weights beneath the first.

So all versions of an agent are served from one copy of its base, however often it was improved. No model is loaded.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from praison_agent_rl.checksums import combined, hash_bytes, hash_file, read_sums
from praison_agent_rl.errors import ServerFailed, VersionError
from praison_agent_rl.models import cache_folder, make_once
from praison_agent_rl.records import Version
from praison_agent_rl.registry import MODEL, read_version

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def lineage(version: Version) -> list[Version]:
    """The versions that ``version`` was trained on one after another, the first on no version, and itself.

    Raises:
        VersionError: one of them was deleted, or has other weights than the next was trained on.
    """
    known = [version]
    while (parent := known[0].parent) is not None:
        folder = Path(known[0].folder)
        before = read_version(folder.parents[2], version.agent, parent)
        if _hash_of_model(before) != known[0].base_hash:
            raise VersionError(
                f"{known[0].name} of agent {version.agent!r} was trained on other weights than those of {parent}"
            )
        known.insert(0, before)
    return known


def one_adapter(versions: Sequence[Version]) -> Path:
    """The folder of an adapter that does what those of ``versions`` do one on another; made once, in the cache folder.

    Raises:
        ServerFailed: one of them is of another kind than a LoRA of linear layers.
    """
    folders = [Path(version.folder) / "adapter" for version in versions]
    if len(folders) == 1:
        return folders[0]
    files = [folder / name for folder in folders for name in (CONFIG, TENSORS)]
    made = cache_folder() / "stacked" / hash_bytes("\n".join(map(hash_file, files)).encode())[:16]
    make_once(made, CONFIG, lambda temporary: stack(folders, temporary))
    return made


def stack(adapters: Sequence[Path], folder: Path) -> None:
    """Write the adapter that does what ``adapters`` do, each trained on the merged weights of those before it.

    W + s1 B1 A1 + s2 B2 A2 = W + [s1 B1, s2 B2] [A1; A2]: ranks add up, and the merged weights' roundings fall away.
    """
    import torch
    from safetensors.torch import load_file, save_file

    configs = [json.loads((adapter / CONFIG).read_text(encoding="utf-8")) for adapter in adapters]
    tensors = [load_file(adapter / TENSORS) for adapter in adapters]
    modules = sorted({name.rpartition(".lora_")[0] for each in tensors for name in each})
    stacked = {}
    for module in modules:
        halves = [_halves(each, module, config) for each, config in zip(tensors, configs, strict=True)]
        down, up = next(pair for pair in halves if pair is not None)
        if down.ndim != 2:
            raise ServerFailed(
                f"{module!r} in {str(adapters[0])!r} is no linear layer, so no adapter can be laid on it"
            )
        nothing = [(torch.zeros(int(c["r"]), down.shape[1]), torch.zeros(up.shape[0], int(c["r"]))) for c in configs]
        pairs = [pair or none for pair, none in zip(halves, nothing, strict=True)]
        stacked[f"{module}.lora_A.weight"] = torch.cat([a for a, _ in pairs], dim=0)
        stacked[f"{module}.lora_B.weight"] = torch.cat([b for _, b in pairs], dim=1)
    save_file(stacked, folder / TENSORS)
    total = sum(int(config["r"]) for config in configs)
    names = sorted({module.rpartition(".")[2] for module in modules})
    plain = {"r": total, "lora_alpha": total, "use_rslora": False, "target_modules": names}
    (folder / CONFIG).write_text(json.dumps({**configs[-1], **plain}), encoding="utf-8")


def _halves(tensors: dict[str, Any], module: str, config: dict[str, Any]) -> tuple[Any, Any] | None:
    """The halves of an adapter at a module, the second with the adapter's scale; None where it has nothing there."""
    down, up = (tensors.get(f"{module}.lora_{side}.weight") for side in "AB")
    return None if down is None or up is None else (down.float(), up.float() * _scale(config))


def _scale(config: dict[str, Any]) -> float:
    rank = int(config["r"])
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _hash_of_model(version: Version) -> str | None:
    """Of the merged weights as they were published; they need not be there any more. None where that is not known."""
    try:
        sums = read_sums(Path(version.folder))
    except (OSError, ValueError):
        return None
    known = {**sums.pruned, **sums.files}
    names = sorted(name for name in known if name.startswith(f"{MODEL}/") and name.endswith(".safetensors"))
    return combined(known[name][0] for name in names) if names else None
