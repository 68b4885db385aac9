"""Write what each training step measured into the run's events, for whoever watches and for the report."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from praison_agent_rl.runs import RunFolder
from praison_agent_rl.scoring.calls import told_of
from praison_agent_rl.training.adapters import trained_parts
from praison_agent_rl.training.sampling import Signals

_SHOWN = ("reward", "reward_std", "kl", "entropy", "grad_norm", "loss", "learning_rate", "frac_reward_zero_std")
_RENAMED = {
    "mean_length": "completions/mean_length",
    "clipped": "completions/clipped_ratio",
    "seconds": "step_time",
    "logp_difference": "sampling/sampling_logp_difference/mean",
    "importance_ratio": "sampling/importance_sampling_ratio/mean",
    "tool_calls": "tools/call_frequency",
    "tool_failures": "tools/failure_frequency",
    "skipped": "skipped",
}
"""Keys of a step event and what TRL 1.16 calls them (``grpo_trainer.py``); the last five in some runs only, the last of
them by ``skipping.py``."""
_ALWAYS = ("mean_length", "clipped", "seconds")
_CLIPPED = ("clip_ratio/region_mean", "cispo_clip_ratio")
_MAY_BREAK = ("loss", "grad_norm", "entropy", "kl")

OnStep = Callable[[dict[str, Any], Any], None]
"""Is given each step's event and the trainer's control, in every process."""


class EventWriter(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes each step's metrics, and hands them to ``on_step``."""

    def __init__(self, run: RunFolder, trainer: Any, signals: Signals, *, on_step: OnStep | None = None) -> None:
        self._run, self._trainer, self._signals, self._on_step = run, trainer, signals, on_step
        self._clipped: list[float] = []
        self._broken: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers before the first step; a resumed run hears again what belongs to its next event."""
        for logs in state.log_history:
            if "loss" in logs:
                self._hear(logs)
                if "reward" in logs:
                    self._clipped, self._broken = [], set()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers after each update; a run that is resumed reads here what its checkpoint has seen."""
        control.should_log = control.should_log or control.should_save

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Called by transformers after each logged step."""
        if "loss" not in logs:
            return
        self._hear(logs)
        if not _are_finite([part for _, part in trained_parts(self._trainer)]):
            self._broken.add("weights")
        if "reward" not in logs and "weights" not in self._broken:
            return
        event = {"step": state.global_step, "of": state.max_steps, **self._metrics(logs)}
        self._clipped, self._broken = [], set()
        if state.is_world_process_zero:
            self._run.report_event("step", **event, signal=self._signals.take())
        if self._on_step:
            self._on_step({"event": "step", **event}, control)

    def _hear(self, logs: dict[str, Any]) -> None:
        """An update with answers of an earlier step has these and no rewards; they belong to the next event."""
        self._clipped += [value for name in _CLIPPED if (value := as_number(logs.get(name))) is not None]
        self._broken |= {name for name in _MAY_BREAK if logs.get(name) is not None and as_number(logs[name]) is None}

    def _metrics(self, logs: dict[str, Any]) -> dict[str, Any]:
        names = self._trainer.reward_func_names
        found: dict[str, Any] = {
            **{name: as_number(logs.get(name)) for name in _SHOWN},
            "rewards": {name: as_number(logs.get(f"rewards/{name}/mean")) for name in names},
            "rewards_std": {name: as_number(logs.get(f"rewards/{name}/std")) for name in names},
            "calls": told_of(self._trainer.caller.take_step(), self._trainer.caller.rewards),
            **{name: as_number(logs.get(own)) for name, own in _RENAMED.items() if name in _ALWAYS or own in logs},
        }
        if self._clipped:
            found["clip_ratio"] = max(self._clipped)
        if self._broken:
            found["nan"] = sorted(self._broken)
        return found | (self._trainer.measured() if self._on_step else {})


def _are_finite(trained: Sequence[torch.Tensor]) -> bool:
    """Whether no trained tensor holds NaN or infinity."""
    checks = [tensor.isfinite().all() for tensor in trained]
    return bool(torch.stack([check.to(checks[0].device) for check in checks]).all()) if checks else True


def as_number(value: Any) -> float | None:
    """A metric as a number; None for one that is missing or no finite number, which JSON cannot hold."""
    return float(value) if value is not None and math.isfinite(float(value)) else None
