"""The trainer of a GRPO run: TRL's, with what a group shares computed once, on what the agent sends or does.

Imported only by the process that trains, since it imports ``trl`` at once.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from praison_agent_rl.agent_rollouts.answers import Answered, answers_of_agent
from praison_agent_rl.agent_rollouts.tool_loop import answers_with_tools
from praison_agent_rl.agent_rollouts.toolboxes import boxes_of
from praison_agent_rl.answering import Engine, Manner, answer_rows, complete
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.models import render_prompts
from praison_agent_rl.rollouts import Draw
from praison_agent_rl.shared_prefix import completion_states, sample_completions
from praison_agent_rl.step_measures import measure, text_of
from praison_agent_rl.training.agent_rollouts import RolloutTrainer
from praison_agent_rl.training.exactness import why_measured_otherwise, why_not_shared
from praison_agent_rl.training.fused_lora import LowWeight, fuse
from praison_agent_rl.training.head_scores import is_frozen, scores_of
from praison_agent_rl.training.skipping import Scores
from praison_agent_rl.training.together import average_gradients, everywhere
from praison_agent_rl.training.trl_names import log_probabilities

_VOCABULARY_CHUNK = 32768  # columns of the head computed at a time, as in trl/trainer/utils.py


class PolicyTrainer(RolloutTrainer):
    """TRL's trainer, with what a group of completions shares computed once, on the prompts that the agent sends."""

    def __init__(
        self,
        *,
        shown_tools: Sequence[dict[str, Any]] = (),
        share: bool = True,
        longest: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.shown_tools = list(shown_tools)
        self._longest = longest
        self._low_head = LowWeight()
        why_not = self._why_not_shared(longest) if share else "it was asked not to"
        self.not_shared_because = next((each for each in everywhere(why_not) if each), None)
        if self.not_shared_because is None and self._policy().device.type == "cpu":
            fuse(self.model)
        self.not_drawn_because = self.not_shared_because or self._why_not_drawn()

    def training_step(self, *given: Any, **options: Any) -> torch.Tensor:
        """As TRL does; a shared step goes around DDP's forward, so DDP leaves the gradients as they are."""
        loss: torch.Tensor = super().training_step(*given, **options)
        around = self.accelerator.num_processes > 1 and self.not_shared_because is None
        if around and self.accelerator.sync_gradients:
            average_gradients(self.model.parameters())
        return loss

    def measured(self) -> dict[str, float | None]:
        """What the answers of the last generation show; TRL keeps them, of all processes, for tables of its own."""
        texts = [text_of(completion) for completion in self._logs["completion"]]
        return measure(texts, self._totals(len(texts)), self.num_generations, tools=self.shown_tools)

    def answers_to(self, rows: Sequence[Row], config: TrainConfig, manner: Manner) -> Answered:
        """Answers of the policy as it is now, by the engine that the gate asks with, or by the agent on it."""
        with self._ready_to_sample() as policy:
            engine = Engine(policy, self._tokenizer, config, list(self.eos_token_ids))
            if self.rollouts is not None:
                return answers_of_agent(self.rollouts.asker, engine, rows, manner.samples)
            if self.tools:
                rounds = self.max_tool_calling_iterations
                return answers_with_tools(engine, rows, boxes_of(config), samples=manner.samples, rounds=rounds)
            return Answered(answer_rows(engine, rows, manner))

    @contextlib.contextmanager
    def opened(self) -> Iterator[Draw]:
        """Draws completions of the policy as it is now, for as long as the block lasts."""
        if self.server is not None:
            yield self._offered(self.server)
            return
        with self._ready_to_sample() as policy:
            yield self._drawer() if not self.not_drawn_because else self._generator(policy)

    def _generator(self, policy: Any) -> Draw:
        """Draws by ``generate``, with each prompt computed once where that can be."""
        config = TrainConfig(max_seq_length=self._longest or policy.config.max_position_embeddings)
        engine = Engine(policy, self._tokenizer, config, list(self.eos_token_ids), by_decoder=False)
        return lambda prompts, sampling: complete(engine, prompts, sampling)

    def _why_not_shared(self, longest: int | None) -> str | None:
        policy = self._policy()
        if known := why_not_shared(self, policy, longest=longest):
            return known
        fewer = torch.bfloat16 if self.args.bf16 or getattr(policy, "is_quantized", False) else policy.dtype
        plain = super()._get_per_token_logps_and_entropies
        return why_measured_otherwise(
            self._score,
            lambda ids, mask, length: plain(self.model, ids, mask, length, compute_entropy=True)[:2],
            vocabulary=policy.get_input_embeddings().weight.size(0),
            dtype=torch.float16 if self.args.fp16 else fewer,
            device=policy.device,
        )

    def _why_not_drawn(self) -> str | None:
        with self._ready_to_sample() as policy:
            return self.why_not_drawn(policy)

    def _policy(self, model: Any = None) -> Any:
        unwrapped = self.accelerator.unwrap_model(model if model is not None else self.model)
        return unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """As TRL does, but with the tool schemas that the agent sends where none runs here."""
        if self.tools:
            rendered: tuple[list[list[int]], None, dict[str, Any]] = super()._tokenize_prompts(prompts)
            return rendered
        return render_prompts(self._tokenizer, prompts, self.shown_tools), None, {}

    def _generate_single_turn(self, *given: Any, **options: Any) -> tuple[list[list[int]], Any]:
        prompt_ids: list[list[int]] = options["prompt_ids"] if "prompt_ids" in options else given[0]
        if self.server is not None:
            return self._as_trl_takes(self._offered(self.server)(prompt_ids, self._sampling()))
        otherwise = self.not_shared_because or self.use_vllm or self.use_transformers_continuous_batching
        if otherwise or self.generation_config.cache_implementation or min(map(len, prompt_ids)) < 2:
            result: tuple[list[list[int]], Any] = super()._generate_single_turn(*given, **options)
            return result
        with self._ready_to_sample() as policy:
            if not self.not_drawn_because:
                return self._as_trl_takes(self._drawer()(prompt_ids, self._sampling()))
            completions = sample_completions(
                policy,
                prompt_ids,
                generation_config=self.generation_config,
                pad=self._tokenizer.pad_token_id,
                eos=self.eos_token_ids,
            )
        return completions, None

    @contextlib.contextmanager
    def _ready_to_sample(self) -> Iterator[Any]:
        """The policy in evaluation mode, its adapter merged if the weights are float32.

        Frozen weights come back as they were, bit for bit: taking the adapter out by subtraction would move them a
        little in each step, and a resumed run, which loads them afresh, would be another one.
        """
        adapted = self.accelerator.unwrap_model(self.model)
        policy = self._policy()
        # In fewer bits the merged weights would be rounded, and sample from another policy than the one that is trained
        mergeable = policy.dtype == torch.float32 and not getattr(policy, "is_quantized", False)
        frozen = [(p, p.data) for p in policy.parameters() if not p.requires_grad] if mergeable else []
        policy.eval()
        try:
            if mergeable:
                adapted.merge_adapter(safe_merge=True)  # "safe": into a copy, so what is kept in frozen stays
            yield policy
        finally:
            if mergeable:
                adapted.unmerge_adapter()
            for parameter, weights in frozen:
                parameter.data = weights
            policy.train()

    def _get_per_token_logps_and_entropies(
        self, *given: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        length = options["logits_to_keep"] if "logits_to_keep" in options else given[3]
        if (known := self._known_from_drawing(length)) is not None:
            return known, None, None
        if self.not_shared_because is None:
            return self._shared_scores(*given, **options)
        result: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = (
            super()._get_per_token_logps_and_entropies(*given, **options)
        )
        return result

    def _shared_scores(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        another = self._policy(model) is not self._policy()
        if another or compute_aux_loss or any(value is not None for value in multimodal.values()):
            result: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = (
                super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss,
                    **multimodal,
                )
            )  # fmt: skip
            return result
        size = batch_size or len(input_ids)
        chunks = zip(input_ids.split(size), attention_mask.split(size), strict=True)
        scored = [self._scored_where_it_counts(ids, mask, logits_to_keep) for ids, mask in chunks]
        log_probs, entropies = (torch.cat(parts) for parts in zip(*scored, strict=True))
        return log_probs, entropies if compute_entropy else None, None

    def _score(self, ids: torch.Tensor, mask: torch.Tensor, length: int) -> Scores:
        """Log-probability and entropy of each completion token, both (batch, length), 0 where there is none."""
        policy = self._policy()
        prompts = [row[kept].tolist() for row, kept in zip(ids[:, :-length], mask[:, :-length].bool(), strict=True)]
        completions, completion_mask = ids[:, -length:], mask[:, -length:]
        kept = completion_mask.bool()
        in_full = bool(self.args.cast_lm_head_to_fp32)
        with self.accelerator.autocast():
            states = completion_states(policy, prompts, completions, completion_mask, pad=self._tokenizer.pad_token_id)
            with torch.autocast(states.device.type, enabled=False) if in_full else contextlib.nullcontext():
                states = states.float() if in_full else states
                log_probs, entropy = self._scores_of(states, policy.get_output_embeddings(), completions[kept])
        empty = log_probs.new_zeros(kept.shape)
        return empty.masked_scatter(kept, log_probs), empty.masked_scatter(kept, entropy)

    def _scores_of(self, states: torch.Tensor, head: Any, targets: torch.Tensor) -> Scores:
        """Log-probability and entropy of each token, both (tokens,)."""
        if states.device.type == "cpu" and is_frozen(head) and not self._entropy_bonus_enabled:
            return scores_of(states, head, targets, temperature=self.temperature, low=self._low_head)
        log_probs, entropy, *_ = log_probabilities().apply(
            states, head.weight, head.bias, targets, self.temperature, _VOCABULARY_CHUNK, None, 1.0,
            ("log_probs", "entropy"),
        )  # fmt: skip
        return log_probs, entropy
