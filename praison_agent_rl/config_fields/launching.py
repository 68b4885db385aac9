"""The key ``launch`` of a training file: how many processes train one model, and on which machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator

from praison_agent_rl.config_values import SETTINGS, Count, Place, Whole


def _as_mapping(value: Any) -> Any:
    """A number alone says how many processes."""
    return value if isinstance(value, Mapping | Launch | None) else {"nproc": value}


class Launch(BaseModel):
    """Several processes that train one model; torchrun or ``accelerate launch`` starts them."""

    model_config = SETTINGS

    nproc: Count = 1
    """Processes on each machine: one for each GPU."""
    nodes: Count = 1
    """Machines; the same command is given on each."""
    node_rank: Whole | None = None
    """Number of this machine, from 0; by default as Slurm or Kubernetes says (``launchers.NODE_VARIABLES``)."""
    rendezvous: str | None = None
    """``host:port`` of machine 0, which the others reach it by; by default MASTER_ADDR and MASTER_PORT."""
    sharding: Literal["zero1", "zero2", "zero3", "fsdp2"] | None = None
    """What is shared out between the processes, by DeepSpeed (ZeRO: the optimiser's moments, gradients too, weights
    too) or by PyTorch (FSDP2: all three); by default each process holds all of it."""
    accelerate_config: Place | None = None
    """File of ``accelerate config``, which says so instead."""
    options: list[str] = []
    """Further arguments of torchrun, or of ``accelerate launch`` where there is sharding."""

    @property
    def processes(self) -> int:
        """Of all machines together."""
        return self.nproc * self.nodes


LaunchField = Annotated[Launch | None, BeforeValidator(_as_mapping)]
