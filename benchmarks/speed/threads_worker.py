"""A measuring process that decodes with layers of random numbers, with the threads that its environment says."""

import time
from typing import Any

from .channel import Channel, measured


def decode(channel: Channel, job: dict[str, Any]) -> None:
    """Milliseconds a step of 30 layers of width 576 (as SmolLM2-135M has them), for 1, 8, 32 and 256 rows."""
    import torch

    shapes = [(576, 576), (576, 1536), (1536, 576)]
    layers = [[torch.nn.Linear(*shape, bias=False) for shape in shapes] for _ in range(30)]
    norm = torch.nn.RMSNorm(576)
    channel.say(ready=True, threads=torch.get_num_threads())
    while True:
        channel.wait()
        found = {}
        with torch.inference_mode():
            for rows, times in ((1, 20), (8, 12), (32, 8), (256, 2)):
                began = time.perf_counter()
                for _ in range(times):
                    states = torch.randn(rows, 576)
                    for mixing, up, down in layers:
                        states = norm(states + mixing(states))
                        states = norm(states + down(torch.nn.functional.silu(up(states))))
                found[str(rows)] = (time.perf_counter() - began) / times * 1e3
        channel.say(milliseconds=found)


if __name__ == "__main__":
    measured(decode)
