"""A measuring process that multiplies matrices of a model's shapes, and nothing else, each time it is told to."""

import time
from typing import Any

from .channel import Channel, measured

_SECONDS = 0.3  # of repetitions of one shape


def multiply(channel: Channel, job: dict[str, Any]) -> None:
    """Seconds of one product for each (rows, inner, columns) of ``job["shapes"]``, in float32 by ``torch.mm``."""
    import torch

    channel.say(ready=True)
    while True:
        channel.wait()
        found = []
        with torch.inference_mode():
            for rows, inner, columns in job["shapes"]:
                # as the weights of torch.nn.Linear lie; several copies, since a model's do not stay in the cache
                copies = max(2, min(16, int(64e6 / (4 * inner * columns))))
                weights = [torch.randn(columns, inner) for _ in range(copies)]
                given = torch.randn(rows, inner)
                torch.mm(given, weights[0].t())
                count, began = 0, time.perf_counter()
                while time.perf_counter() - began < _SECONDS or count < 2:
                    torch.mm(given, weights[count % copies].t())
                    count += 1
                found.append((time.perf_counter() - began) / count)
        channel.say(seconds=found)


if __name__ == "__main__":
    measured(multiply)
