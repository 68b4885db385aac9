"""GPUs and what connects them, as their makers' data sheets give them."""

import re
import shutil
import subprocess

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.records import Record


class Gpu(Record):
    """One GPU, by its data sheet."""

    name: str
    memory: float
    """Bytes, at 10^9 a GB: a little less than the driver shows."""
    operations: float
    """Of bfloat16 with sums in float32 a second, dense: half of what is given "with sparsity"."""
    bandwidth: float
    """Bytes of its memory a second."""
    link: float
    """Bytes a second to its neighbours, one way: NVLink (half of the sum of both ways), or PCIe."""
    linked_by: str
    source: str


GPUS = {
    "4090": Gpu(
        name="GeForce RTX 4090",
        memory=24e9,
        operations=165.2e12,
        bandwidth=1008e9,
        link=32e9,
        linked_by="PCIe 4.0 x16",
        source="NVIDIA Ada GPU Architecture whitepaper, appendix A",
    ),
    "L4": Gpu(
        name="L4",
        memory=24e9,
        operations=121e12,
        bandwidth=300e9,
        link=32e9,
        linked_by="PCIe 4.0 x16",
        source="NVIDIA L4 data sheet (242 TFLOPS with sparsity)",
    ),
    "L40S": Gpu(
        name="L40S",
        memory=48e9,
        operations=362e12,
        bandwidth=864e9,
        link=32e9,
        linked_by="PCIe 4.0 x16",
        source="NVIDIA L40S data sheet",
    ),
    "A100-40": Gpu(
        name="A100 40 GB SXM",
        memory=40e9,
        operations=312e12,
        bandwidth=1555e9,
        link=300e9,
        linked_by="NVLink",
        source="NVIDIA A100 data sheet",
    ),
    "A100": Gpu(
        name="A100 80 GB SXM",
        memory=80e9,
        operations=312e12,
        bandwidth=2039e9,
        link=300e9,
        linked_by="NVLink",
        source="NVIDIA A100 data sheet",
    ),
    "H100": Gpu(
        name="H100 80 GB SXM",
        memory=80e9,
        operations=989.5e12,
        bandwidth=3350e9,
        link=450e9,
        linked_by="NVLink",
        source="NVIDIA H100 data sheet (1,979 TFLOPS with sparsity)",
    ),
    "H200": Gpu(
        name="H200 141 GB SXM",
        memory=141e9,
        operations=989.5e12,
        bandwidth=4800e9,
        link=450e9,
        linked_by="NVLink",
        source="NVIDIA H200 data sheet (1,979 TFLOPS with sparsity)",
    ),
}
"""By the name that ``--gpu`` takes."""

_OTHERS = ("PCI", "NVL", "Laptop")
"""In the names of GPUs that are slower than those of the table, though they are called as these."""


def find_gpu(name: str | None) -> Gpu:
    """The GPU of that name; by default the first one of this machine, or an H100 where there is none.

    Raises:
        ConfigError: there is no such name in the table.
    """
    if name is None:
        return _gpu_here() or GPUS["H100"]
    found = next((gpu for known, gpu in GPUS.items() if known.lower() == name.strip().lower()), None)
    if found is None:
        raise ConfigError(f"there is no GPU {name!r} in the table; take one of {', '.join(GPUS)}")
    return found


def _gpu_here() -> Gpu | None:
    """The first GPU that ``nvidia-smi`` shows, with the memory that it really has; None where it shows none.

    Raises:
        ConfigError: it is not in the table.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, mebibytes = (shown.splitlines() or [""])[0].rpartition(",")
    if not name or not mebibytes.strip().isdecimal():
        return None
    name, memory = name.strip(), float(mebibytes) * 2**20
    known = [gpu for key, gpu in GPUS.items() if re.search(rf"\b{key.partition('-')[0]}\b", name)]
    if not known or any(sign in name for sign in _OTHERS):
        raise ConfigError(f"the GPU of this machine, {name!r}, is not in the table; name one of it: {', '.join(GPUS)}")
    nearest = min(known, key=lambda gpu: abs(gpu.memory - memory))
    return nearest.model_copy(update={"name": name, "memory": memory})
