"""Completions drawn by this package's own decoder or by a vLLM server, and weighted by how likely they were there.

Imported only by the process that trains, since it imports ``torch`` at once.
"""

from dataclasses import replace
from typing import Any

import torch

from praison_agent_rl.decoding.loop import draw
from praison_agent_rl.decoding.weights import Precision, SamplingModel
from praison_agent_rl.rollouts import Sampled, Sampling
from praison_agent_rl.training.skipping import SkippingTrainer
from praison_agent_rl.vllm_rollouts import VllmSampler

SAMPLERS: dict[str, Precision] = {"exact": "own", "bfloat16": "bfloat16", "int8": "int8"}
"""What a sampler of the configuration multiplies in; ``auto`` (``generate`` samples) and ``vllm`` are none of them."""
_SEEDS = 2**31


class DrawingTrainer(SkippingTrainer):
    """TRL's trainer, which may sample with weights of fewer bits than it trains, or have a server sample.

    Their completions are of another policy, so the loss takes the log-probabilities that they were drawn with as the
    old ones: each token counts by how much likelier it is under the policy that is trained (as PPO's ratio).
    """

    def __init__(self, *, sampler: str = "auto", server: VllmSampler | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.sampler = sampler
        self.server = server
        self._drawing: SamplingModel | None = None

    def why_not_drawn(self, policy: Any) -> str | None:
        """Why the configured sampler cannot be used, or None if it can."""
        if policy.dtype != torch.float32 or getattr(policy, "is_quantized", False):
            return "it merges the adapter into float32 weights while it samples, and these are none"
        if policy.device.type != "cpu":
            return "it is for CPUs"
        if self.args.repetition_penalty != 1 or self.args.generation_kwargs:
            return "it knows temperature, top_p, top_k and min_p, and no other setting of generation"
        return None

    def _drawn(self, policy: Any, prompt_ids: list[list[int]]) -> Sampled:
        """Completions of the policy, whose adapter is merged."""
        if self._drawing is None:
            self._drawing = SamplingModel(policy, SAMPLERS[self.sampler])
        else:
            self._drawing.refresh()
        return draw(self._drawing, prompt_ids, self._sampling(), pad=self._tokenizer.pad_token_id)

    def _served(self, server: VllmSampler, prompt_ids: list[list[int]]) -> Sampled:
        """Completions of the policy as it is now, drawn by a server, which gets it as an adapter first.

        Raises:
            ServerFailed: the server is gone, refused, or answered with something else than was asked for.
        """
        adapted = self.accelerator.unwrap_model(self.model)
        server.offer(self.state.global_step, lambda folder: adapted.save_pretrained(folder))
        seed = int(torch.randint(_SEEDS, ()))  # of torch's random numbers, which a checkpoint keeps
        return server.sample(prompt_ids, replace(self._sampling(), seed=seed))

    def _sampling(self) -> Sampling:
        config = self.generation_config
        return Sampling(
            max_tokens=config.max_new_tokens,
            temperature=config.temperature if config.do_sample else 0.0,
            top_p=config.top_p or 1.0,
            top_k=config.top_k or 0,
            min_p=config.min_p or 0.0,
            repetition_penalty=config.repetition_penalty or 1.0,
            ends=tuple(self.eos_token_ids),
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if "sampling_per_token_logps" in scored and not self.use_vllm and self.model.training:
            scored["old_per_token_logps"] = scored["sampling_per_token_logps"]
        return scored
