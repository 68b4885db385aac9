"""Time and peak memory of a merge, shard by shard against PEFT's own in memory, over the size of the model.

    python benchmarks/merging.py [GB ...]

The bases are random numbers in bfloat16 in shards of 64 MB, with an adapter of rank 16 on every projection. Each merge
runs in a process of its own. Memory is what the kernel counts as resident at its peak, less what was resident once
everything was imported; PEFT's is the way that most scripts take: load, merge, save. Prints JSON and a Markdown table.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = (0.05, 0.1, 0.2, 0.5)
"""Gigabytes (10**9 bytes) of the bases."""
SHARD = 64 * 10**6
WAYS = ("streamed", "streamed and proved", "PEFT float32", "PEFT bfloat16")
_SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "vocab_size": 8192}


def write_base(folder: Path, size: float) -> None:
    """A random Llama of about ``size`` GB, written shard by shard without a model."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    layer = 2 * (4 * 1024**2 + 3 * 1024 * 3072)  # bytes: four projections of attention, three of the MLP
    layers = max(1, round(size * 1e9 / layer))
    config = LlamaConfig(**_SHAPE, num_hidden_layers=layers, tie_word_embeddings=True, dtype="bfloat16")
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    torch.manual_seed(0)
    shards: list[dict[str, Any]] = [{}]
    places: dict[str, str] = {}
    for name, shape in shapes.items():
        if sum(2 * tensor.numel() for tensor in shards[-1].values()) + 2 * shape.numel() > SHARD:
            _save_shard(save_file, folder, len(shards), shards[-1])
            shards[-1] = {}
            shards.append({})
        shards[-1][name] = torch.randn(shape).mul_(0.02).bfloat16()
        places[name] = f"model-{len(shards):05d}.safetensors"
    _save_shard(save_file, folder, len(shards), shards[-1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _save_shard(save: Any, folder: Path, number: int, tensors: dict[str, Any]) -> None:
    save(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})


def write_adapter(base: Path, folder: Path) -> None:
    """Random numbers of rank 16 for each projection."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    from praison_agent_rl.weight_files import read_header

    LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM").save_pretrained(str(folder))
    tensors = {}
    for file in base.glob("*.safetensors"):
        for name, tensor in read_header(file).items():
            if name.endswith("_proj.weight"):
                outputs, inputs = tensor["shape"]
                start = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                tensors[f"{start}A.weight"] = torch.randn(16, inputs) * 0.02
                tensors[f"{start}B.weight"] = torch.randn(outputs, 16) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def merge(way: str, base: Path, adapter: Path, out: Path) -> dict[str, float]:
    """Seconds and peak memory in MB of one merge, in this process."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama  # noqa: F401 - so that it is not counted

    from praison_agent_rl.config import TrainConfig
    from praison_agent_rl.streaming_merge.merge import write_companions, write_merge
    from praison_agent_rl.streaming_merge.plan import plan_merge
    from praison_agent_rl.streaming_merge.proof import prove_tensors

    config = TrainConfig.load(need_model=False, need_data=False)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _kib("VmRSS"), time.perf_counter()
    if way.startswith("PEFT"):
        dtype = getattr(torch, way.removeprefix("PEFT "))
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
        merged.to(torch.bfloat16).save_pretrained(out, max_shard_size=SHARD)
    else:
        plan = plan_merge(str(base), adapter, config=config)
        write_merge(plan, out)
        write_companions(plan, out, _NoTokenizer())
        if way.endswith("proved"):
            proof = prove_tensors(plan, out)
            if proof.problems:
                raise SystemExit("\n".join(proof.problems))
    return {"seconds": time.perf_counter() - start, "peak_mb": (_kib("VmHWM") - before) * 1024 / 1e6}


class _NoTokenizer:
    """Stands for the tokenizer, which such a base does not have."""

    pad_token_id = None

    def save_pretrained(self, folder: Path) -> None:
        """Writes nothing."""


def _kib(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0


def main() -> None:
    """Print JSON and a table in Markdown; with four arguments that name a way, make that merge."""
    if sys.argv[1:] and sys.argv[1] in WAYS:
        way, *paths = sys.argv[1:]
        print(json.dumps(merge(way, *map(Path, paths))))
        return
    rows = []
    for size in [float(given) for given in sys.argv[1:]] or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            base, adapter = Path(folder) / "base", Path(folder) / "adapter"
            write_base(base, size)
            write_adapter(base, adapter)
            files = sorted(base.glob("*.safetensors"), key=lambda file: file.stat().st_size)
            row: dict[str, Any] = {
                "gb": sum(file.stat().st_size for file in files) / 1e9,
                "shards": len(files),
                "largest_shard_mb": files[-1].stat().st_size / 1e6,
                "adapter_mb": (adapter / "adapter_model.safetensors").stat().st_size / 1e6,
            }
            for way in WAYS:
                command = [sys.executable, __file__, way, str(base), str(adapter), str(Path(folder) / way)]
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
                row[way] = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
    print(json.dumps({"machine": f"{platform.machine()}, {os.cpu_count()} cores", "rows": rows}, indent=1))
    head = ["base, GB", "shards", "largest shard, MB", "adapter, MB", *(f"{way}: s / peak MB" for way in WAYS)]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in rows:
        cells = [f"{row['gb']:.2f}", str(row["shards"]), f"{row['largest_shard_mb']:.0f}", f"{row['adapter_mb']:.0f}"]
        cells += [f"{row[way]['seconds']:.1f} / {row[way]['peak_mb']:.0f}" for way in WAYS]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
