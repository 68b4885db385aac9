"""Completions drawn by this package's own decoder or by a vLLM server, and weighted by how likely they were there.

Imported only by the process that trains, since it imports ``torch`` at once.
"""

from dataclasses import replace
from typing import Any

import torch

from praison_agent_rl.decoding.loop import draw
from praison_agent_rl.decoding.probe import why_not_drawable
from praison_agent_rl.decoding.weights import Precision, SamplingModel
from praison_agent_rl.ranks import is_first
from praison_agent_rl.rollouts import Draw, Sampled, Sampling, declared_settings
from praison_agent_rl.training.skipping import Scores, SkippingTrainer
from praison_agent_rl.training.together import agreed
from praison_agent_rl.vllm_servers.rollouts import VllmSampler

SAMPLERS: dict[str, Precision] = {"auto": "own", "exact": "own", "bfloat16": "bfloat16", "int8": "int8"}
"""What the decoder multiplies in, by the sampler of the configuration; the others have nothing to do with it."""
DIFFERENCE = "sampling/sampling_logp_difference/mean"
"""Metric, by TRL's name: how far log-probabilities of the sampler and of the policy are apart, nats a token."""
_SEEDS = 2**31


class DrawingTrainer(SkippingTrainer):
    """TRL's trainer, which may sample with weights of fewer bits than it trains, or have a server sample.

    Their completions are of another policy, so the loss takes the log-probabilities that they were drawn with as the
    old ones: each token counts by how much likelier it is under the policy that is trained (as PPO's ratio).
    """

    def __init__(self, *, sampler: str = "generate", server: VllmSampler | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.sampler = sampler
        self.server = server
        self.not_drawn_because: str | None = None
        """Why the decoder of this package does not draw; None if it does."""
        self._drawing: SamplingModel | None = None
        self._behaviour: list[list[float]] | None = None
        """Log-probabilities that the completions in work were drawn with, until they are asked for."""

    def why_not_drawn(self, policy: Any) -> str | None:
        """Why the configured sampler cannot be used on ``policy``, whose adapter is merged; None if it can."""
        if self.sampler not in SAMPLERS:
            return f"the sampler is {self.sampler!r}"
        if policy.dtype != torch.float32 or getattr(policy, "is_quantized", False):
            return "it merges the adapter into float32 weights while it samples, and these are none"
        if policy.device.type != "cpu":
            return "it is for CPUs"
        if self.args.repetition_penalty != 1 or self.args.generation_kwargs or self.args.cache_implementation:
            return "it knows temperature, top_p, top_k and min_p, and no other setting of generation"
        if declared := declared_settings(policy.generation_config, self.generation_config):
            return f"it knows nothing of what the model's generation_config sets ({', '.join(declared)})"
        precision = SAMPLERS[self.sampler]
        drawing = SamplingModel(policy, precision)
        if (why_not := why_not_drawable(drawing, policy, precision)) is None:
            self._drawing = drawing  # else its copy of the weights goes at once
        return why_not

    def _drawer(self) -> Draw:
        """Draws completions of the policy, whose adapter is merged, and which can be drawn for."""
        drawing = self._drawing
        assert drawing is not None
        drawing.refresh()
        return lambda prompts, sampling: draw(drawing, prompts, sampling, pad=self._tokenizer.pad_token_id)

    def _as_trl_takes(self, sampled: Sampled) -> tuple[list[list[int]], list[list[float]] | None]:
        """The ids, and the log-probabilities where they are those of another policy than the one that is trained."""
        self._behaviour = None if self.tools else sampled.log_probs  # a turn with tools is drawn in several parts
        exact = SAMPLERS.get(self.sampler) == "own"
        return sampled.ids, None if exact else sampled.log_probs

    def _offered(self, server: VllmSampler) -> Draw:
        """Draws completions of the policy as it is now by a server, which gets it as an adapter first.

        Of several processes the first one gives it, and all draw from it under its name.

        Raises:
            ServerFailed: the server is gone, refused, or answered with something else than was asked for.
        """
        adapted, step = self.accelerator.unwrap_model(self.model), self.state.global_step
        if not server.has(step):  # so once after each update, in all processes
            name = server.offer(step, lambda folder: adapted.save_pretrained(folder)) if is_first() else ""
            name = agreed(name)
            if not is_first():
                server.take(step, name)

        def served(prompts: list[list[int]], sampling: Sampling) -> Sampled:
            seed = int(torch.randint(_SEEDS, ()))  # of torch's random numbers, which a checkpoint keeps
            return server.sample(prompts, replace(sampling, seed=seed))

        return served

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
        try:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._behaviour = None
        if "sampling_per_token_logps" in scored and not self.use_vllm and self.model.training:
            scored["old_per_token_logps"] = scored["sampling_per_token_logps"]
        return scored

    def _scored_where_it_counts(self, ids: torch.Tensor, mask: torch.Tensor, length: int) -> Scores:
        log_probs, entropy = super()._scored_where_it_counts(ids, mask, length)
        drawn_with, kept = self._before, mask[:, -length:].bool()
        kept = kept if self._by_policy is None else kept & self._by_policy.bool()
        fresh = self._step % (self.args.steps_per_generation * self.num_iterations) == 0  # the policy has not moved
        if drawn_with is not None and fresh and SAMPLERS.get(self.sampler) != "own":
            kept = kept if self._silent is None else kept & ~self._silent[:, None]
            if kept.any():
                difference = (log_probs.detach() - drawn_with).abs()[kept].mean()
                self._metrics["train"][DIFFERENCE].append(float(difference))
        return log_probs, entropy

    def _known_from_drawing(self, length: int) -> torch.Tensor | None:
        """Log-probabilities of the completions in work, (rows, length), where TRL would compute them once more.

        TRL does so if completions are used when the policy has moved on, and asks for these before those of a
        reference model.
        """
        known, self._behaviour = self._behaviour, None
        block = self.args.steps_per_generation * self.num_iterations
        if known is None or self.args.gradient_accumulation_steps % block == 0:
            return None
        rows = [theirs + [0.0] * (length - len(theirs)) for theirs in known]
        return torch.tensor(rows, device=self.accelerator.device)
