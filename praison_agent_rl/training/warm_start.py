"""A short supervised start on good recorded calls, through TRL, before a policy is trained by rewards.

Imported only by the process that trains, since it imports ``trl`` at once. TRL is given token ids and labels, not
texts: of its own rendering nothing says that the prompt is left out and that the end token stands there once.
"""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.ranks import process_count
from praison_agent_rl.training.adapters import check_tensors
from praison_agent_rl.training.policies import adapter_of
from praison_agent_rl.warm_examples import Example as Example  # told on
from praison_agent_rl.warm_examples import Report, fitting
from praison_agent_rl.warm_examples import examples_of as examples_of  # told on

_IGNORED = -100
"""Label of a token that is not learned, as torch's cross entropy takes it."""
_SETTINGS = (
    "learning_rate per_device_train_batch_size optim weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon "
    "seed data_seed use_cpu bf16 fp16 gradient_checkpointing"
)
"""What the warm start takes over from the arguments of the training that follows."""


def with_adapter(model: Any, config: TrainConfig) -> Any:
    """``model`` with the new adapter of ``config``, the one that a trainer would make of it with the same seed."""
    set_seed(config.seed)
    return get_peft_model(model, adapter_of(model, config))


def warm_start(
    model: Any, tokenizer: Any, examples: Sequence[Example], *, steps: int, config: TrainConfig, report: Report
) -> None:
    """Train the adapter of ``model`` for ``steps`` updates on ``examples``, in place.

    ``model`` is a ``PeftModel`` (`with_adapter`). Given to TRL's GRPO as it is, without ``peft_config``, it is trained
    on; with ``beta`` above 0 TRL keeps a frozen copy ``ref`` of the adapter, so the KL penalty then holds the policy to
    where the warm start left it, not to the base model. A run that is resumed has that copy in its checkpoint: it takes
    `with_adapter` and no warm start. Fewer examples than ``steps`` batches are gone through again, which is said.

    Raises:
        DataError: there is no example, or none that fits into ``max_seq_length`` tokens.
        TrainingFailed: the loss or a weight became NaN.
    """
    kept = fitting(examples, config.max_seq_length, report)
    size = config.per_device_train_batch_size * process_count()
    if len(kept) < steps * size:
        report("note", text=f"the warm start repeats its examples: there are {len(kept)} for {steps} steps of {size}")
    with tempfile.TemporaryDirectory() as folder, _forwards_kept(model):
        trainer = SFTTrainer(
            model=model,
            args=_arguments(config, str(model.device), steps=steps, folder=folder),
            train_dataset=_as_dataset(kept),
            processing_class=tokenizer,
            callbacks=[_WarmSteps(report, config.learning_rate)],
        )
        _without_dropout(model)
        trainer.train()
    check_tensors(((name, p) for name, p in model.named_parameters() if p.requires_grad), config.learning_rate)


def _as_dataset(examples: Sequence[Example]) -> Dataset:
    """Rows that TRL takes as they are: labels leave out the prompt."""
    return Dataset.from_dict(
        {
            "input_ids": [[*one.prompt_ids, *one.completion_ids] for one in examples],
            "labels": [[_IGNORED] * len(one.prompt_ids) + one.completion_ids for one in examples],
        }
    )


def _arguments(config: TrainConfig, device: str, *, steps: int, folder: str) -> SFTConfig:
    following = config.grpo_arguments(device=device)
    return SFTConfig(
        **{name: following[name] for name in _SETTINGS.split() if name in following},
        output_dir=folder,
        max_steps=steps,
        lr_scheduler_type="constant",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _without_dropout(model: Any) -> None:
    """As in the training that follows, where it would make the policy that samples another one than is scored."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@contextlib.contextmanager
def _forwards_kept(model: Any) -> Iterator[None]:
    """Take back the forwards that TRL and accelerate put into a model: the next trainer would put its own around."""
    owners = [model, model.get_base_model()]
    before = [vars(owner).get("forward") for owner in owners]
    try:
        yield
    finally:
        for owner, forward in zip(owners, before, strict=True):
            vars(owner).pop("forward", None)
            if forward is not None:
                owner.forward = forward


class _WarmSteps(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Tells of each step, and ends a warm start whose loss is no number."""

    def __init__(self, report: Report, learning_rate: float) -> None:
        self._report, self._learning_rate = report, learning_rate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Called by transformers after each step."""
        if "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"the loss of the warm start is {loss} at step {state.global_step}; lower learning_rate "
                f"({self._learning_rate:g}), or set warm_start to 0"
            )
        if state.is_world_process_zero:
            self._report("warm_step", step=state.global_step, of=state.max_steps, loss=loss)
