"""Rewards within TRL's trainer: called so that none of them can end a run, counted, and the run ended if too many fail.

Imported only by the process that trains, since it imports ``trl`` at once.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from transformers import TrainerCallback

from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.measuring import calling_for
from praison_agent_rl.records import Run
from praison_agent_rl.reward_calls import Caller
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.sampling import SignalTrainer

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # as in trl/trainer/grpo_trainer.py, _calculate_rewards


class ScoringTrainer(SignalTrainer):
    """TRL's trainer, whose rewards are called by a ``Caller``; reward models are left to TRL."""

    runs: Sequence[Run] | None = None
    """What was recorded of each completion of the batch in work; None where a completion is an answer given at once."""

    def __init__(self, *, caller: Caller | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.caller = caller or Caller([reward for reward in self.reward_funcs if isinstance(reward, Reward)])
        self.reward_stop = RewardStop(self)
        self.add_callback(self.reward_stop)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        """As TRL does: (completions of all processes, rewards), NaN where there is no score."""
        names = [name for name in inputs[0] if name not in _NOT_COLUMNS]
        columns = {
            **{name: [given[name] for given in inputs] for name in names},
            "completion_ids": completion_ids_list,
            "trainer_state": self.state,
            "log_extra": self._log_completion_extra,
            "log_metric": self._log_metric,
            **({} if self.environments is None else {"environments": self.environments}),
        }
        own = [place for place, reward in enumerate(self.reward_funcs) if isinstance(reward, Reward)]
        scores = self.caller.score(prompts, completions, columns, runs=self.runs)
        self._tell_trackers()
        by_reward = [[math.nan if score is None else score for score in scores[self.reward_funcs[i].name]] for i in own]
        device = self.accelerator.device
        found: torch.Tensor = gather(torch.tensor(by_reward, dtype=torch.float32, device=device).T.contiguous())
        if len(own) == len(self.reward_funcs):
            return found
        models = [place for place in range(len(self.reward_funcs)) if place not in own]
        with self._only(models):
            theirs = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        whole = theirs.new_empty(len(theirs), len(self.reward_funcs))
        whole[:, models] = theirs
        if own:
            whole[:, own] = found
        return whole

    def _tell_trackers(self) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, (samples, none, failed, hits) in self.caller.shares().items():
            for what, count in {"none": none, "failed": failed, "cached": hits}.items():
                metrics[f"rewards/{name}/{what}"].append(count / max(samples, 1))

    @contextlib.contextmanager
    def _only(self, places: Sequence[int]) -> Iterator[None]:
        """Let TRL see some of the rewards."""
        lists = ("reward_funcs", "reward_processing_classes", "reward_func_names")
        before = {name: getattr(self, name) for name in lists}
        for name, values in before.items():
            setattr(self, name, [values[place] for place in places])
        try:
            yield
        finally:
            for name, values in before.items():
                setattr(self, name, values)


class RewardStop(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Ends a run, with a checkpoint, in which a reward fails on too many samples."""

    def __init__(self, trainer: ScoringTrainer) -> None:
        self._trainer = trainer
        self.reason: str | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers after each update."""
        # rollouts that are still to be used are not saved, so only between two generations a run resumes exactly
        block = max(1, args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)
        if self.reason is None and state.global_step % block == 0:
            reasons = [self._trainer.caller.too_many_failed()]
            if self._trainer.accelerator.num_processes > 1:  # all end, or one would wait for the others for ever
                reasons = gather_object(reasons)
            self.reason = next((reason for reason in reasons if reason), None)
            if self.reason:
                control.should_log = control.should_save = control.should_training_stop = True


def caller_of(run: RunFolder, rewards: Sequence[Reward]) -> Caller:
    """Calls ``rewards`` as the configuration of ``run`` says; what they do wrong is told in its events."""
    return calling_for(run)(rewards)


def tell_rewards(run: RunFolder, trainer: ScoringTrainer) -> None:
    """Say what rewards did not score.

    Raises:
        TrainingFailed: the run was ended because of them.
    """
    trainer.caller.close()
    if trainer.accelerator.is_main_process:
        for line in trainer.caller.summary():
            run.report_event("note", text=line)
    if trainer.reward_stop.reason:
        step = trainer.state.global_step
        raise TrainingFailed(
            f"training was stopped at step {step}: {trainer.reward_stop.reason}\n"
            f"The checkpoint is kept in {str(run.checkpoints / f'checkpoint-{step}')!r}; mend the reward and go on "
            f"with `praison-agent-rl train --resume {run.root}`"
        )
