"""GRPO on a run's folder through TRL: rows and rewards in, an adapter out.

Imported only by the process that trains, since it imports ``trl`` at once.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from trl import GRPOConfig

from praison_agent_rl.answering import Engine, Manner, RawAnswer, answer_rows
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, to_dataset
from praison_agent_rl.diagnosis import Symptom
from praison_agent_rl.errors import ModelError, ServerFailed, TrainingFailed
from praison_agent_rl.measuring import rows_as_asked
from praison_agent_rl.models import load_model, load_tokenizer, plain_weights, render_prompts
from praison_agent_rl.preflight import check_adapter_targets
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.shared_prefix import completion_states, sample_completions
from praison_agent_rl.step_measures import measure, text_of
from praison_agent_rl.training.adapters import check_tensors, check_weights, publish_adapter, save_adapter
from praison_agent_rl.training.checkpoints import is_last, newest_whole_checkpoint, step_of
from praison_agent_rl.training.drawing import SAMPLERS, DrawingTrainer
from praison_agent_rl.training.events import EventWriter
from praison_agent_rl.training.exactness import why_measured_otherwise, why_not_shared
from praison_agent_rl.training.fused_lora import LowWeight, fuse
from praison_agent_rl.training.head_scores import is_frozen, scores_of
from praison_agent_rl.training.policy_server import LastStep, policy_server
from praison_agent_rl.training.prompt_lengths import short_enough
from praison_agent_rl.training.sampling import signals_of, tell_signals
from praison_agent_rl.training.scoring import caller_of, tell_rewards
from praison_agent_rl.training.skipping import Scores
from praison_agent_rl.training.trl_names import log_probabilities, told
from praison_agent_rl.training.watching import (
    Scorers,
    Watcher,
    best_instead,
    memory_told,
    outlived_by_best,
    stopped_at,
)

_VOCABULARY_CHUNK = 32768  # columns of the head computed at a time, as in trl/trainer/utils.py


def train_grpo(
    run: RunFolder,
    rows: Sequence[Row],
    rewards: Sequence[Reward],
    *,
    judges: Sequence[Reward] = (),
    resume: bool = False,
    share: bool = True,
) -> None:
    """Train the policy of ``run`` and leave its adapter in the run's folder.

    ``judges`` score the watched prompts too and are not trained on. ``share=False`` computes every completion with its
    whole prompt, as TRL does.

    Raises:
        ConfigError: too few prompts for one generation batch.
        ModelError: the model cannot be loaded, or not be trained as configured.
        TrainingFailed: no step was made, no step had a signal, weights became NaN, the policy collapsed before anything
            was learned, the memory ran out, or a reward failed on too many answers.
    """
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(plan.base)
    tokenizer = load_tokenizer(source, config)
    checkpoint = _checkpoint_of(run) if resume else None
    if checkpoint and (is_last(checkpoint, config.max_steps) or stopped_at(run, step_of(checkpoint))):
        _finish_from(checkpoint, tokenizer, run, config)
        return
    with memory_told(run, rewards), policy_server(run, config, source) as server:
        kept, model = _prepared(run, rows, tokenizer, config)
        signals = signals_of(run, kept, rewards, checkpoint)
        trainer = PolicyTrainer(
            model=model,
            reward_funcs=list(rewards),
            args=_arguments(run, config, [reward.weight for reward in rewards], plan.device),
            train_dataset=to_dataset(kept),
            processing_class=tokenizer,
            peft_config=LoraConfig(**config.lora_arguments()),
            signals=signals,
            caller=caller_of(run, rewards),
            shown_tools=plan.tools,
            share=share,
            longest=config.max_seq_length,
            sampler=config.sampler,
            server=server,
        )
        for name, without in told(PolicyTrainer).items():
            if name == "_tokenize_prompts" and plan.tools:
                raise ModelError(f"{without}; take the release of TRL that this package asks for")
            run.report_event("note", text=without)
        if trainer.not_shared_because and trainer.accelerator.is_main_process:
            run.report_event("note", text=f"prompts are not shared: {trainer.not_shared_because}")
        asked = config.sampler in SAMPLERS and config.sampler != "auto"
        if asked and trainer.not_drawn_because and trainer.accelerator.is_main_process:
            run.report_event(
                "note", text=f"the sampler {config.sampler!r} is not used, but generate: {trainer.not_drawn_because}"
            )
        watcher = _watched(run, trainer, Scorers(rewards, judges), config)
        trainer.add_callback(EventWriter(run, trainer, signals, on_step=watcher.after_step if watcher else None))
        _train(trainer, checkpoint)
    tell_rewards(run, trainer)
    _finish(run, trainer, watcher.stopped if watcher else None)


def _prepared(run: RunFolder, rows: Sequence[Row], tokenizer: Any, config: TrainConfig) -> tuple[list[Row], Any]:
    """The rows that can be trained on, and the model."""
    plan = run.plan
    source = plain_weights(plan.base)
    kept = short_enough(run, rows, tokenizer, config, plan.tools)
    config.check_prompt_count(len(kept))
    model = load_model(source, config, device=plan.device)
    check_adapter_targets(config, tied=bool(model.config.get_text_config().tie_word_embeddings), source=source)
    return kept, model


def _watched(run: RunFolder, trainer: "PolicyTrainer", scorers: Scorers, config: TrainConfig) -> Watcher | None:
    if not config.watch:
        return None
    rows = rows_as_asked(run, run.watch_rows) if run.watch_rows.exists() else []
    watcher = Watcher(run, trainer, rows, scorers, config)
    trainer.add_callback(watcher)
    return watcher


class PolicyTrainer(DrawingTrainer):
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
        self._low_head = LowWeight()
        self.not_shared_because = self._why_not_shared(longest) if share else "it was asked not to"
        if self.not_shared_because is None and self._policy().device.type == "cpu":
            fuse(self.model)
        self.not_drawn_because = self.not_shared_because or self._why_not_drawn()

    def measured(self) -> dict[str, float | None]:
        """What the answers of the last generation show; TRL keeps them, of all processes, for tables of its own."""
        texts = [text_of(completion) for completion in self._logs["completion"]]
        return measure(texts, self._totals(len(texts)), self.num_generations, tools=self.shown_tools)

    def answers_to(self, rows: Sequence[Row], config: TrainConfig, manner: Manner) -> list[RawAnswer]:
        """Answers of the policy as it is now, by the engine that the gate asks with."""
        with self._ready_to_sample() as policy:
            return answer_rows(Engine(policy, self._tokenizer, config, list(self.eos_token_ids)), rows, manner)

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
        """As TRL does, but with the tool schemas that the agent sends, which it does not run here."""
        return render_prompts(self._tokenizer, prompts, self.shown_tools), None, {}

    def _generate_single_turn(self, *given: Any, **options: Any) -> tuple[list[list[int]], Any]:
        prompt_ids: list[list[int]] = options["prompt_ids"] if "prompt_ids" in options else given[0]
        if self.server is not None:
            return self._as_trl_takes(self._served(self.server, prompt_ids))
        otherwise = self.not_shared_because or self.use_vllm or self.use_transformers_continuous_batching
        if otherwise or self.generation_config.cache_implementation or min(map(len, prompt_ids)) < 2:
            result: tuple[list[list[int]], Any] = super()._generate_single_turn(*given, **options)
            return result
        with self._ready_to_sample() as policy:
            if not self.not_drawn_because:
                return self._as_trl_takes(self._drawn(prompt_ids))
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


def _arguments(run: RunFolder, config: TrainConfig, weights: list[float], device: str) -> GRPOConfig:
    arguments = config.grpo_arguments(device=device)
    # Rollouts that are still to be used are not saved, so only a checkpoint between two generations resumes exactly.
    steps = config.steps_per_generation or config.gradient_accumulation_steps
    block = max(1, steps * config.num_iterations // config.gradient_accumulation_steps)
    if isinstance(config.save_steps, int):
        arguments["save_steps"] = math.ceil(config.save_steps / block) * block
    return GRPOConfig(
        output_dir=str(run.checkpoints),
        disable_tqdm=True,
        reward_weights=weights,
        **_without(arguments, "reward_weights"),
    )


def _without(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key not in names}


def _train(trainer: PolicyTrainer, checkpoint: Path | None) -> None:
    last = LastStep(trainer)
    trainer.add_callback(last)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except (RuntimeError, ValueError) as error:
        check_weights(trainer)  # peft, torch or a server met NaN while sampling, and says nothing of the learning rate
        if isinstance(error, ServerFailed):
            raise last.kept(error) from error
        raise


def _checkpoint_of(run: RunFolder) -> Path | None:
    checkpoint = newest_whole_checkpoint(run.checkpoints)
    start = f"going on from {checkpoint.name}" if checkpoint else "no whole checkpoint: from the start"
    run.report_event("note", text=start)
    return checkpoint


def _finish_from(checkpoint: Path, tokenizer: Any, run: RunFolder, config: TrainConfig) -> None:
    """Make the adapter of a run whose last step was saved; the trainer would make one more if it were called again."""
    step = step_of(checkpoint)
    stopped = stopped_at(run, step)
    if not outlived_by_best(run, stopped):
        check_tensors(load_file(checkpoint / "adapter_model.safetensors").items(), config.learning_rate)
    _check_signal(run)
    tell_signals(run)
    best = best_instead(run, step, stopped)
    publish_adapter(best.folder if best else checkpoint, tokenizer, run)


def _finish(run: RunFolder, trainer: PolicyTrainer, stopped: Symptom | None) -> None:
    """Publish the adapter of the last step, or a better one that was kept.

    Raises:
        TrainingFailed: TRL calls the run a success although nothing was learned.
    """
    step = trainer.state.global_step
    if step == 0:
        raise TrainingFailed(
            "training made no step: the data did not fill one generation batch. Give more prompts or smaller batches"
        )
    if not outlived_by_best(run, stopped):
        check_weights(trainer)
    _check_signal(run)
    tell_signals(run)
    if not trainer.accelerator.is_main_process:
        return
    tokenizer = trainer.processing_class
    if best := best_instead(run, step, stopped):
        publish_adapter(best.folder, tokenizer, run)
    else:
        save_adapter(trainer, tokenizer, run)


def _check_signal(run: RunFolder) -> None:
    steps = run.steps()
    if steps and not any(step["grad_norm"] for step in steps):
        seen = "gave no score" if all(step["reward"] is None for step in steps) else "were equal within every group"
        raise TrainingFailed(
            f"no step of {len(steps)} had a signal: the rewards {seen}, so there was nothing to learn. Make a reward "
            "that tells answers apart, raise num_generations, or take prompts that are neither all right nor all wrong"
        )
