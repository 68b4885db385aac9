"""The vLLM servers that ``sampler: vllm`` draws completions from while a run trains, and what is left if they go away.

Imported only by the process that trains, since it imports ``torch`` at once.
"""

import contextlib
import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import TrainerCallback

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, ServerFailed
from praison_agent_rl.ranks import is_first, process_count, rank
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.checkpoints import newest_whole_checkpoint, step_of
from praison_agent_rl.vllm_servers.rollouts import VllmSampler, start_sampling_server
from praison_agent_rl.vllm_servers.serving import VllmServer
from praison_agent_rl.vllm_servers.sources import ForeignServer

logger = logging.getLogger(__name__)

API_KEY = "PRAISON_AGENT_RL_VLLM_API_KEY"
"""Variable of the environment that holds the key of the servers that run elsewhere."""

_ON_CPU = ("--enforce-eager", "--dtype", "bfloat16")
"""Compiling takes minutes there, and float32 is three times as slow."""


@contextlib.contextmanager
def policy_server(run: RunFolder, config: TrainConfig, source: str) -> Iterator[VllmSampler | None]:
    """Draws from the servers that ``config`` names, or from one that ends with the block; None for other samplers.

    ``source`` are the weights that are trained.

    Raises:
        ConfigError: a server has other weights or takes shorter texts, or several processes would each start one.
        MissingExtra: there is no vLLM.
        ServerFailed: it does not come up or answer.
    """
    if config.sampler != "vllm":
        yield None
        return
    if is_first():
        shutil.rmtree(_policies(run), ignore_errors=True)  # what a run that was killed had offered

    def tell(note: str) -> None:
        run.report_event("note", text=note)
        if not is_first():  # whose events nobody sees
            logger.warning("%s", note)

    with _sampler(run, _servers(run, config, source), source, tell) as sampler:
        for note in _checked(sampler, run, config):
            run.report_event("note", text=note)
        yield sampler


def check_servers(run: RunFolder, config: TrainConfig, source: str) -> None:
    """Ask the servers that ``config`` names for what its run will need; raises as `policy_server` does."""
    if config.sampler == "vllm" and config.vllm_servers:
        _checked(_sampler(run, _named(config), source), run, config)


def _checked(sampler: VllmSampler, run: RunFolder, config: TrainConfig) -> list[str]:
    begun = newest_whole_checkpoint(run.checkpoints) is not None  # then it can go on with fewer servers
    rank_tried = config.lora_r if is_first() else None
    return sampler.check(config.max_seq_length, rank=rank_tried, all_needed=not begun)


def _sampler(
    run: RunFolder,
    servers: VllmServer | list[ForeignServer],
    source: str,
    tell: Callable[[str], None] = lambda note: None,
) -> VllmSampler:
    return VllmSampler(servers, _policies(run), base=source, run_id=run.root.resolve().name, tell=tell)


def _policies(run: RunFolder) -> Path:
    return run.root / "policies"


def _named(config: TrainConfig) -> list[ForeignServer]:
    """The servers that run already; each process begins with another one, or all would ask the first for most."""
    key, urls = os.environ.get(API_KEY, "").strip() or None, config.vllm_servers
    first = rank() % len(urls)
    return [ForeignServer(url=url, api_key=key, seen_as=config.vllm_server_sees) for url in urls[first:] + urls[:first]]


def _servers(run: RunFolder, config: TrainConfig, source: str) -> VllmServer | list[ForeignServer]:
    if urls := config.vllm_servers:
        names = ", ".join(urlsplit(url).netloc for url in urls)
        run.report_event("note", text=f"completions are drawn by the vLLM server{'s' if len(urls) > 1 else ''} {names}")
        return _named(config)
    if process_count() > 1:
        raise ConfigError(
            f"{process_count()} processes train (WORLD_SIZE), and each would start a vLLM server of its own; "
            "start one elsewhere and give its vllm_server_base_url"
        )
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


class LastStep(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Saves the last finished step of a run whose server goes away in the middle, so that nothing is learned twice."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._random: torch.Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers after each update."""
        self._random = torch.get_rng_state()

    def kept(self, failure: ServerFailed) -> ServerFailed:
        """``failure``, with the checkpoint that the run can be gone on from; one is saved now where it can be."""
        folder, step = Path(self._trainer.args.output_dir), self._trainer.state.global_step
        kept = newest_whole_checkpoint(folder)
        if self._random is not None and step > (step_of(kept) if kept else 0) and self._is_between_steps():
            self._save(self._random)
            kept = newest_whole_checkpoint(folder)
        what = f"The checkpoint of step {step_of(kept)} is kept in {str(kept)!r}" if kept else "No step was saved"
        go_on = f"`praison-agent-rl train --resume {shlex.quote(str(folder.parent))}`"
        return ServerFailed(f"{failure}\n{what}; when the server can be had again, go on with {go_on}")

    def _is_between_steps(self) -> bool:
        """Whether no part of a step is done, in the only process: another may be elsewhere, and would be waited for."""
        begun = any(parameter.grad is not None for parameter in self._trainer.model.parameters())
        return self._trainer.accelerator.num_processes == 1 and not begun

    def _save(self, random_numbers: torch.Tensor) -> None:
        """As transformers does after a step that is due, of which what was not logged yet is logged too."""
        trainer = self._trainer
        torch.set_rng_state(random_numbers)  # else the seed of the step that failed would be passed over
        trainer.control.should_log = trainer.control.should_save = True
        trainer._maybe_log_save_evaluate(  # noqa: SLF001 - transformers has no other way to save a checkpoint
            trainer._tr_loss,  # noqa: SLF001
            None,
            trainer.model,
            None,
            epoch=trainer.state.epoch,
            ignore_keys_for_eval=None,
            start_time=None,
        )
