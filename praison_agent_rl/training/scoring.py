"""Rewards within TRL's trainer: called so that none of them can end a run, counted, and the run ended if too many fail.

Imported only by the process that trains, since it imports ``trl`` at once.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather
from transformers import TrainerCallback

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.evaluation import Calling
from praison_agent_rl.measuring import calling_for
from praison_agent_rl.ranks import machine
from praison_agent_rl.records import Run
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.scoring.calls import Caller, caller_for
from praison_agent_rl.training.sampling import SignalTrainer
from praison_agent_rl.training.together import everywhere

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # as in trl/trainer/grpo_trainer.py, _calculate_rewards


class ScoringTrainer(SignalTrainer):
    """TRL's trainer, whose rewards are called by a ``Caller``; reward models are left to TRL."""

    runs: Sequence[Run] | None = None
    """What was recorded of each completion of the batch in work; None where a completion is an answer given at once."""

    def __init__(self, *, caller: Caller | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.caller = caller or Caller([reward for reward in self.reward_funcs if isinstance(reward, Reward)])
        self.caller.everywhere = everywhere  # each process calls the rewards on its own answers, and counts them all
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

    def is_between_generations(self) -> bool:
        """Whether no rollout is still to be used: these are not saved, so only then a run is gone on with exactly."""
        used: int = self._step % (self.args.steps_per_generation * self.num_iterations)
        return used == 0

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
        if self.reason is None and self._trainer.is_between_generations():
            self.reason = self._trainer.caller.too_many_failed()  # the same in all processes, so all end together
            if self.reason:
                control.should_log = control.should_save = control.should_training_stop = True


def caller_of(run: RunFolder, rewards: Sequence[Reward]) -> Caller:
    """Calls ``rewards`` as the configuration of ``run`` says; what they do wrong is told in its events."""
    return calling_here(run)(rewards)


def calling_here(run: RunFolder) -> Calling:
    """How rewards are called in this process: scores are kept on machine 0, whose file the others may see by NFS."""
    if machine() == 0:
        return calling_for(run)
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    without = config.model_copy(update={"reward_cache": False})
    return partial(caller_for, without, warn=lambda text: run.report_event("note", text=text))


def tell_rewards(run: RunFolder, trainer: ScoringTrainer) -> None:
    """Say what rewards did not score.

    Raises:
        TrainingFailed: the run was ended because of them.
    """
    trainer.caller.close()
    for line in trainer.caller.summary():
        run.report_event("note", text=line)
    if trainer.reward_stop.reason:
        step = trainer.state.global_step
        raise TrainingFailed(
            f"training was stopped at step {step}: {trainer.reward_stop.reason}\n"
            f"The checkpoint is kept in {str(run.checkpoints / f'checkpoint-{step}')!r}; mend the reward and go on "
            f"with `praison-agent-rl train --resume {run.root}`"
        )
