"""The vLLM server that ``sampler: vllm`` draws completions from, for as long as a run trains."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.vllm_rollouts import ForeignServer, VllmSampler, start_sampling_server
from praison_agent_rl.vllm_serving import VllmServer

API_KEY = "PRAISON_AGENT_RL_VLLM_API_KEY"
"""Variable of the environment that holds the key of a server that runs elsewhere."""

_ON_CPU = ("--enforce-eager", "--dtype", "bfloat16")
"""Compiling takes minutes there, and float32 is three times as slow."""


@contextlib.contextmanager
def policy_server(run: RunFolder, config: TrainConfig, source: str) -> Iterator[VllmSampler | None]:
    """Draws from the server that ``config`` names, or from one that ends with the block; None for other samplers.

    ``source`` are the weights that are trained.

    Raises:
        ConfigError: the server has other weights, or takes shorter texts.
        MissingExtra: there is no vLLM.
        ServerFailed: it does not come up or answer.
    """
    if config.sampler != "vllm":
        yield None
        return
    folder = run.root / "policies"
    shutil.rmtree(folder, ignore_errors=True)  # what a run that was killed had offered

    def tell(why: str) -> None:
        run.report_event("note", text=f"completions are taken as drawn by the policy that is trained: {why}")

    server = _server(run, config, source)
    with VllmSampler(server, folder, base=source, run_id=run.root.name, tell=tell) as sampler:
        for note in sampler.check(config.max_seq_length):
            run.report_event("note", text=note)
        yield sampler


def _server(run: RunFolder, config: TrainConfig, source: str) -> VllmServer | ForeignServer:
    if url := config.vllm_server_base_url:
        run.report_event("note", text=f"completions are drawn by the vLLM server {urlsplit(url).netloc or url}")
        return ForeignServer(url=url, api_key=os.environ.get(API_KEY), seen_as=config.vllm_server_sees)
    run.report_event("note", text="completions are drawn by vLLM, which is started now; that can take minutes")
    return start_sampling_server(
        source,
        rank=config.max_lora_rank or config.lora_r,
        longest=config.max_seq_length,
        options=[*_options(config, run.plan.device), *(config.vllm_server_options or [])],
    )


def _options(config: TrainConfig, device: str) -> list[str]:
    if device == "cpu":
        return list(_ON_CPU)
    return ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
