"""GRPO on a run's folder through TRL: rows and rewards in, an adapter out.

Imported only by the process that trains, since it imports ``trl`` at once.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from trl import GRPOConfig

from praison_agent_rl.agent_rollouts.asking import agent_asker
from praison_agent_rl.agent_rollouts.tool_texts import keep_response_template
from praison_agent_rl.agent_rollouts.toolboxes import environment_of, tools_of
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, to_dataset
from praison_agent_rl.diagnosis import Symptom
from praison_agent_rl.errors import ModelError, ServerFailed, TrainingFailed
from praison_agent_rl.launchers import loading_device
from praison_agent_rl.measuring import rows_as_asked
from praison_agent_rl.models import load_tokenizer, plain_weights
from praison_agent_rl.preflight import check_adapter_targets
from praison_agent_rl.ranks import is_first
from praison_agent_rl.recorded_calls import read_calls
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.adapters import check_tensors, check_weights, publish_adapter, save_adapter
from praison_agent_rl.training.agent_rollouts import Manner
from praison_agent_rl.training.checkpoints import checkpoint_of, is_last, step_of
from praison_agent_rl.training.drawing import SAMPLERS
from praison_agent_rl.training.events import EventWriter
from praison_agent_rl.training.last_samples import keep_samples
from praison_agent_rl.training.policies import Policy, load_policy
from praison_agent_rl.training.policy_server import LastStep, policy_server
from praison_agent_rl.training.policy_trainer import PolicyTrainer as PolicyTrainer
from praison_agent_rl.training.prompt_lengths import short_enough
from praison_agent_rl.training.sampling import signals_of, tell_signals
from praison_agent_rl.training.saving import SavingTrainer
from praison_agent_rl.training.scoring import caller_of, tell_rewards
from praison_agent_rl.training.together import agreed
from praison_agent_rl.training.trl_names import told
from praison_agent_rl.training.warm_start import examples_of, warm_start, with_adapter
from praison_agent_rl.training.watching import (
    Scorers,
    Watcher,
    best_instead,
    memory_told,
    outlived_by_best,
    stopped_at,
)


class SavingPolicyTrainer(SavingTrainer, PolicyTrainer):
    """The trainer of a run, whose checkpoints lie between two generations."""

    def is_exact_here(self) -> bool:
        """Whether no rollout is still to be used, since these are not saved; a pass over the prompts ends so, too."""
        return self.is_between_generations()


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
            was learned, the memory ran out, a reward failed on too many answers, or the run was asked to end.
    """
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(plan.base)
    tokenizer = load_tokenizer(source, config)
    if config.rollout == "tools":
        keep_response_template(tokenizer)  # else TRL takes the chat templates that it knows, and no other
    checkpoint = checkpoint_of(run) if resume else None
    if checkpoint and (is_last(checkpoint, config.max_steps) or stopped_at(run, step_of(checkpoint))):
        _finish_from(checkpoint, tokenizer, run, config)
        return
    with (
        memory_told(run, rewards),
        policy_server(run, config, source) as server,
        agent_asker(run, config, tokenizer) as asker,
    ):
        arguments = _arguments(run, config, [reward.weight for reward in rewards], plan.device)
        kept, policy = _prepared(run, rows, tokenizer, config)
        model, adapter = _started(run, policy, tokenizer, config, fresh=checkpoint is None)
        signals = signals_of(run, kept, rewards, checkpoint)
        trainer = SavingPolicyTrainer(
            run=run,
            tell=lambda text: run.report_event("note", text=text),
            model=model,
            reward_funcs=list(rewards),
            args=arguments,
            train_dataset=to_dataset(kept),
            processing_class=tokenizer,
            peft_config=adapter,
            signals=signals,
            caller=caller_of(run, rewards),
            shown_tools=plan.tools,
            share=share,
            longest=config.max_seq_length,
            sampler=config.sampler,
            server=server,
            rollouts=Manner(asker, config.credit, config.credit_discount) if asker else None,
            tools=tools_of(config) if config.rollout == "tools" else (),
            environment_factory=environment_of(config) if config.rollout == "tools" else None,
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


def _prepared(run: RunFolder, rows: Sequence[Row], tokenizer: Any, config: TrainConfig) -> tuple[list[Row], Policy]:
    """The rows that can be trained on, and the policy."""
    plan = run.plan
    source = plain_weights(plan.base)
    by_agent = config.rollout == "agent"  # what it sends is not known before it does
    kept = list(rows) if by_agent else short_enough(run, rows, tokenizer, config, plan.tools)
    config.check_prompt_count(len(kept))
    policy = load_policy(source, config, device=loading_device(config, plan.device))
    tied = bool(policy.model.config.get_text_config().tie_word_embeddings)
    check_adapter_targets(config, tied=tied, source=source)
    return kept, policy


def _started(run: RunFolder, policy: Policy, tokenizer: Any, config: TrainConfig, *, fresh: bool) -> Policy:
    """The policy as training begins: after a warm start, which a resumed run has behind it, it has its adapter."""
    if not config.warm_start:
        return policy
    model = policy.model if policy.adapter is None else with_adapter(policy.model, config)
    if fresh:
        ends = model.generation_config.eos_token_id
        ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
        examples = examples_of(read_calls(run.calls), tokenizer, ends=ends, report=run.report_event)
        warm_start(model, tokenizer, examples, steps=config.warm_start, config=config, report=run.report_event)
    return Policy(model, None)


def _watched(run: RunFolder, trainer: "PolicyTrainer", scorers: Scorers, config: TrainConfig) -> Watcher | None:
    if not config.watch:
        return None
    rows = rows_as_asked(run, run.watch_rows) if run.watch_rows.exists() else []
    watcher = Watcher(run, trainer, rows, scorers, config)
    trainer.add_callback(watcher)
    return watcher


def _arguments(run: RunFolder, config: TrainConfig, weights: list[float], device: str) -> GRPOConfig:
    arguments = GRPOConfig(
        output_dir=str(run.checkpoints),
        disable_tqdm=True,
        reward_weights=weights,
        **_without(config.grpo_arguments(device=device), "reward_weights"),
    )
    if arguments.save_steps >= 1:  # a share of all steps is put off step by step, as what is asked for out of turn
        between = _updates_between_generations(arguments)
        arguments.save_steps = math.ceil(arguments.save_steps / between) * between
    return arguments


def _updates_between_generations(arguments: GRPOConfig) -> int:
    """After how many updates all rollouts are used and no update is begun, counted from the start of a pass."""
    batches, update = arguments.steps_per_generation * arguments.num_iterations, arguments.gradient_accumulation_steps
    used_up: int = math.lcm(batches, update) // update
    return used_up


def _without(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key not in names}


def _train(trainer: SavingPolicyTrainer, checkpoint: Path | None) -> None:
    last = LastStep(trainer)
    trainer.add_callback(last)
    try:
        with trainer.ending.heeded():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except (RuntimeError, ValueError) as error:
        check_weights(trainer)  # peft, torch or a server met NaN while sampling, and says nothing of the learning rate
        if isinstance(error, ServerFailed):
            raise last.kept(error) from error
        raise


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
    if is_first():  # the others read what it is still writing
        _check_signal(run, _failures(trainer))
        tell_signals(run)
    tokenizer = trainer.processing_class
    if best := agreed(best_instead(run, step, stopped) if is_first() else None):
        run.sampled.unlink(missing_ok=True)  # of a last step that the run had come to before it was interrupted
        publish_adapter(best.folder, tokenizer, run)
    else:
        keep_samples(run, trainer)
        save_adapter(trainer, tokenizer, run)


def _failures(trainer: PolicyTrainer) -> str:
    """What is to be said of rollouts of the agent that failed; nothing if none did."""
    failed = [logged["rollouts/failed"] for logged in trainer.state.log_history if "rollouts/failed" in logged]
    if not any(failed):
        return ""
    last = next((rollout.outcome.error for rollout in reversed(trainer.rolled) if rollout.outcome.error), None)
    share = f"; {sum(failed) / len(failed):.0%} of the rollouts failed and have no score"
    return share + (f", the last with: {last}" if last else "")


def _check_signal(run: RunFolder, failures: str = "") -> None:
    steps = run.steps()
    if steps and not any(step["grad_norm"] for step in steps):
        seen = "gave no score" if all(step["reward"] is None for step in steps) else "were equal within every group"
        raise TrainingFailed(
            f"no step of {len(steps)} had a signal: the rewards {seen}{failures}, so there was nothing to learn. "
            "Make a reward that tells answers apart, raise num_generations, or take prompts that are neither all right "
            "nor all wrong"
        )
