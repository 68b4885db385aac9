"""GRPO on a run's folder through TRL: rows and rewards in, an adapter out.

Imported only by the process that trains, since it imports ``trl`` at once.
"""

import contextlib
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import RepeatSampler

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, to_dataset
from praison_agent_rl.errors import ModelError, TrainingFailed
from praison_agent_rl.models import load_model, load_tokenizer, plain_weights, render_prompts
from praison_agent_rl.preflight import check_adapter_targets
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder, publish_folder
from praison_agent_rl.shared_prefix import completion_states, sample_completions, why_not_shareable
from praison_agent_rl.training.checkpoints import is_last, newest_whole_checkpoint

_VOCABULARY_CHUNK = 32768  # columns of the head computed at a time, as in trl/trainer/utils.py
_SHOWN = ("reward", "reward_std", "kl", "entropy", "grad_norm", "loss", "learning_rate", "frac_reward_zero_std")


def train_grpo(
    run: RunFolder, rows: Sequence[Row], rewards: Sequence[Reward], *, resume: bool = False, share: bool = True
) -> None:
    """Train the policy of ``run`` and leave its adapter in the run's folder.

    ``share=False`` computes every completion with its whole prompt, as TRL does.

    Raises:
        ConfigError: too few prompts for one generation batch.
        ModelError: the model cannot be loaded, or not be trained as configured.
        TrainingFailed: no step was made, no step had a signal, or weights became NaN.
    """
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(plan.base)
    tokenizer = load_tokenizer(source, config)
    checkpoint = _checkpoint_of(run) if resume else None
    if checkpoint and is_last(checkpoint, config.max_steps):
        _finish_from(checkpoint, tokenizer, run, config)
        return
    kept = _short_enough(run, rows, tokenizer, config, plan.tools)
    config.check_prompt_count(len(kept))
    model = load_model(source, config, device=plan.device)
    check_adapter_targets(config, tied=bool(model.config.get_text_config().tie_word_embeddings), source=source)
    trainer = PolicyTrainer(
        model=model,
        reward_funcs=list(rewards),
        args=_arguments(run, config, [reward.weight for reward in rewards], plan.device),
        train_dataset=to_dataset(kept),
        processing_class=tokenizer,
        peft_config=LoraConfig(**config.lora_arguments()),
        callbacks=[EventWriter(run, [reward.name for reward in rewards])],
        shown_tools=plan.tools,
        share=share,
    )
    if trainer.not_shared_because:
        run.report_event("note", text=f"prompts are not shared: {trainer.not_shared_because}")
    _train(trainer, checkpoint)
    _check_outcome(run, trainer)
    _save_adapter(trainer, tokenizer, run)


class EpochSampler(RepeatSampler):  # type: ignore[misc]  # trl is not typed
    """TRL's order of prompts, but known from the epoch alone: TRL's starts again from the first when it is resumed."""

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate before each epoch."""
        if self.shuffle:
            self.generator.manual_seed(self.seed + epoch)


class PolicyTrainer(GRPOTrainer):  # type: ignore[misc]  # trl is not typed
    """TRL's trainer, with what a group of completions shares computed once, on the prompts that the agent sends."""

    def __init__(self, *, shown_tools: Sequence[dict[str, Any]] = (), share: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.shown_tools = list(shown_tools)
        self.not_shared_because = self._why_not_shared() if share else "it was asked not to"

    def _why_not_shared(self) -> str | None:
        if self.accelerator.num_processes > 1:
            return "gradients of several processes are gathered through the model's own forward"
        if self.args.gradient_checkpointing:
            return "gradient checkpointing keeps no keys and values"
        if any(config.lora_dropout for config in self.model.peft_config.values()):
            return "lora_dropout would differ between the completions of a group"
        return why_not_shareable(self._policy())

    def _policy(self, model: Any = None) -> Any:
        unwrapped = self.accelerator.unwrap_model(model if model is not None else self.model)
        return unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        given = super()._get_train_sampler(dataset)
        return EpochSampler(
            given.data_source,
            given.mini_repeat_count,
            batch_size=given.batch_size,
            repeat_count=given.repeat_count,
            shuffle=given.shuffle,
            seed=given.seed,
        )

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """As TRL does, but with the tool schemas that the agent sends, which it does not run here."""
        return render_prompts(self._tokenizer, prompts, self.shown_tools), None, {}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, **options: Any
    ) -> tuple[list[list[int]], Any]:
        too_short = min(map(len, prompt_ids)) < 2
        if self.not_shared_because or self.use_vllm or self.use_transformers_continuous_batching or too_short:
            result: tuple[list[list[int]], Any] = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, **options
            )
            return result
        with self._ready_to_sample() as policy:
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
        if self.not_shared_because or compute_aux_loss or any(value is not None for value in multimodal.values()):
            result: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = (
                super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss,
                    **multimodal,
                )
            )  # fmt: skip
            return result
        size = batch_size or len(input_ids)
        chunks = zip(input_ids.split(size), attention_mask.split(size), strict=True)
        scored = [self._score(self._policy(model), ids, mask, logits_to_keep) for ids, mask in chunks]
        log_probs, entropies = (torch.cat(parts) for parts in zip(*scored, strict=True))
        return log_probs, entropies if compute_entropy else None, None

    def _score(
        self, policy: Any, ids: torch.Tensor, mask: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each completion token, both (batch, length), 0 where there is none."""
        prompts = [row[kept].tolist() for row, kept in zip(ids[:, :-length], mask[:, :-length].bool(), strict=True)]
        completions, completion_mask = ids[:, -length:], mask[:, -length:]
        kept = completion_mask.bool()
        with self.accelerator.autocast():
            states = completion_states(policy, prompts, completions, completion_mask, pad=self._tokenizer.pad_token_id)
        head = policy.get_output_embeddings()
        log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
            states, head.weight, head.bias, completions[kept], self.temperature, _VOCABULARY_CHUNK, None, 1.0,
            ("log_probs", "entropy"),
        )  # fmt: skip
        empty = log_probs.new_zeros(kept.shape)
        return empty.masked_scatter(kept, log_probs), empty.masked_scatter(kept, entropy)


class EventWriter(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes each step's metrics into the run's events, for whoever watches and for the report."""

    def __init__(self, run: RunFolder, reward_names: Sequence[str]) -> None:
        self._run = run
        self._reward_names = reward_names

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Called by transformers after each logged step."""
        if "reward" not in logs or not state.is_world_process_zero:
            return
        rewards = {name: _number(logs.get(f"rewards/{name}/mean")) for name in self._reward_names}
        spread = {name: _number(logs.get(f"rewards/{name}/std")) for name in self._reward_names}
        self._run.report_event(
            "step",
            step=state.global_step,
            of=state.max_steps,
            **{name: _number(logs.get(name)) for name in _SHOWN},
            rewards=rewards,
            rewards_std=spread,
            mean_length=_number(logs.get("completions/mean_length")),
            clipped=_number(logs.get("completions/clipped_ratio")),
            seconds=_number(logs.get("step_time")),
        )


def _number(value: Any) -> float | None:
    """A metric as a number; None for one that is missing or no finite number, which JSON cannot hold."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


def _short_enough(
    run: RunFolder, rows: Sequence[Row], tokenizer: Any, config: TrainConfig, tools: Sequence[dict[str, Any]]
) -> list[Row]:
    """The rows whose prompt leaves room for a completion; TRL would train on longer ones with only a log message."""
    room = config.max_seq_length - config.max_completion_length
    limit = min(room, config.max_prompt_length or room)
    lengths = [len(ids) for ids in render_prompts(tokenizer, [row["prompt"] for row in rows], tools)]
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    if len(kept) < len(rows):
        name = "max_prompt_length" if limit == config.max_prompt_length else "max_seq_length - max_completion_length"
        run.report_event(
            "note",
            text=f"{len(rows) - len(kept)} of {len(rows)} training prompts are longer than {limit} tokens ({name}) "
            f"and are left out; the longest has {max(lengths)}",
        )
    return kept


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
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except (RuntimeError, ValueError):  # peft or torch met NaN while sampling, and says nothing of the learning rate
        _check_weights(trainer)
        raise


def _checkpoint_of(run: RunFolder) -> Path | None:
    checkpoint = newest_whole_checkpoint(run.checkpoints)
    start = f"going on from {checkpoint.name}" if checkpoint else "no whole checkpoint: from the start"
    run.report_event("note", text=start)
    return checkpoint


def _finish_from(checkpoint: Path, tokenizer: Any, run: RunFolder, config: TrainConfig) -> None:
    """Make the adapter of a run whose last step was saved; the trainer would make one more if it were called again."""
    _check_tensors(load_file(checkpoint / "adapter_model.safetensors").items(), config.learning_rate)
    _check_signal(run)
    temporary = Path(f"{run.adapter}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy2(checkpoint / name, temporary / name)
    _publish_adapter(temporary, tokenizer, run)


def _check_outcome(run: RunFolder, trainer: PolicyTrainer) -> None:
    """Raise TrainingFailed for a run that TRL calls a success although nothing was learned."""
    if trainer.state.global_step == 0:
        raise TrainingFailed(
            "training made no step: the data did not fill one generation batch. Give more prompts or smaller batches"
        )
    _check_weights(trainer)
    _check_signal(run)


def _check_signal(run: RunFolder) -> None:
    steps = run.steps()
    if steps and not any(step["grad_norm"] for step in steps):
        seen = "gave no score" if all(step["reward"] is None for step in steps) else "were equal within every group"
        raise TrainingFailed(
            f"no step of {len(steps)} had a signal: the rewards {seen}, so there was nothing to learn. Make a reward "
            "that tells answers apart, raise num_generations, or take prompts that are neither all right nor all wrong"
        )


def _check_weights(trainer: PolicyTrainer) -> None:
    trained = ((name, p) for name, p in trainer.model.named_parameters() if p.requires_grad)
    _check_tensors(trained, trainer.args.learning_rate)


def _check_tensors(trained: Iterable[tuple[str, torch.Tensor]], learning_rate: float) -> None:
    broken = [name for name, tensor in trained if not tensor.isfinite().all()]
    if broken:
        raise TrainingFailed(
            f"{len(broken)} trained tensors hold NaN or infinity (first: {broken[0]}); lower learning_rate "
            f"({learning_rate:g}) and start again"
        )


def _save_adapter(trainer: PolicyTrainer, tokenizer: Any, run: RunFolder) -> None:
    if not trainer.accelerator.is_main_process:
        return
    temporary = Path(f"{run.adapter}.part")
    trainer.save_model(str(temporary))
    if not (temporary / "adapter_model.safetensors").exists():
        raise ModelError(f"training ended but left no adapter in {str(temporary)!r}")
    _publish_adapter(temporary, tokenizer, run)


def _publish_adapter(temporary: Path, tokenizer: Any, run: RunFolder) -> None:
    tokenizer.save_pretrained(temporary)
    publish_folder(temporary, run.adapter)
