"""Which of the processes that train one model this one is, as its launcher says; nothing is imported for it.

The first process reports, writes and decides; the others follow it.
"""

import os
import sys
from typing import Any

from praison_agent_rl.runs import RunFolder

LOST = 75
"""Exit code of a process that lost its connection to another one, whose end is then what is to be told; EX_TEMPFAIL of
sysexits.h."""
_LOST_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
"""How gloo (transport/tcp) and NCCL's wrapper in torch say it where they raise a plain RuntimeError."""


def process_count() -> int:
    """How many processes train together, on all machines."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def rank() -> int:
    """Number of this process among them."""
    return int(os.environ.get("RANK") or "0")


def machine() -> int:
    """Number of this machine among those that train."""
    return int(os.environ.get("GROUP_RANK") or "0")


def is_first() -> bool:
    """Whether this is the process that reports and writes."""
    return rank() == 0


def use_own_device(device: str) -> None:
    """Let ``cuda`` mean a GPU of its own in each process of a machine."""
    if device.startswith("cuda") and process_count() > 1:
        import torch

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or "0"))


def is_lost_connection(error: BaseException) -> bool:
    """Whether ``error`` says that another process is gone, and nothing of what went wrong there."""
    if process_count() == 1 or not isinstance(error, RuntimeError):
        return False
    distributed = sys.modules.get("torch.distributed")
    kinds = (distributed.DistError,) if distributed else ()
    return isinstance(error, kinds) or any(sign in str(error) for sign in _LOST_SIGNS)


class Follower(RunFolder):
    """The folder of a run as a process sees it that is not the first: it reads all, and reports nothing."""

    def report_event(self, event: str, **facts: Any) -> None:
        """Nothing: the first process reports the same."""
