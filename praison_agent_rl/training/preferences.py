"""Reward models and CPO on a run's folder through TRL: pairs in, an adapter out.

Imported only by the process that trains, since it imports ``trl`` at once. TRL is given token ids, not texts: its own
rendering doubles the end token (CPO), learns tool results, and filters long pairs away without a word.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import RewardConfig, RewardTrainer

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.errors import MissingExtra, TrainingFailed
from praison_agent_rl.launchers import loading_device
from praison_agent_rl.models import load_scorer, load_tokenizer, plain_weights
from praison_agent_rl.pairs.lengths import fitting, longest_of
from praison_agent_rl.pairs.texts import Rendered, render_pairs
from praison_agent_rl.preflight import check_adapter_targets
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.adapters import check_tensors, check_weights, publish_adapter, save_adapter
from praison_agent_rl.training.checkpoints import checkpoint_of, is_last
from praison_agent_rl.training.events import as_number
from praison_agent_rl.training.policies import adapter_of, load_policy
from praison_agent_rl.training.saving import SavingTrainer

_SHOWN = ("loss", "grad_norm", "learning_rate", "accuracy", "margin", "rewards/accuracies", "rewards/margins")
_IGNORED = -100
"""Label of a token that is not learned, as torch's cross entropy takes it."""


class SavingRewardTrainer(SavingTrainer, RewardTrainer):  # type: ignore[misc]  # trl is not typed
    """TRL's, with checkpoints that are whole."""


def train_reward(run: RunFolder, rows: Sequence[Row], *, resume: bool = False) -> None:
    """Train a reward model on the pairs of ``run`` and leave its adapter, score head included, in the run's folder.

    Raises:
        DataError: no pair fits into ``max_length`` tokens.
        ModelError: the model cannot be loaded.
        TrainingFailed: no step was made, weights became NaN, or the run was asked to end.
    """
    start = _start(run, rows, resume=resume)
    if start is None:
        return
    config, source, tokenizer, pairs, checkpoint = start
    columns = {"chosen_ids": [one.ids for one, _ in pairs], "rejected_ids": [other.ids for _, other in pairs]}
    arguments = RewardConfig(**_arguments(run, config))  # before the weights, of which each process may load a part
    model = load_scorer(source, config, device=loading_device(config, run.plan.device), new_head=True)
    trainer = SavingRewardTrainer(
        run=run,
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        peft_config=adapter_of(model, config),
        callbacks=[PairEvents(run)],
    )
    _train(trainer, run, tokenizer, checkpoint)


def train_cpo(run: RunFolder, rows: Sequence[Row], *, resume: bool = False) -> None:
    """Train the policy of ``run`` on its pairs by CPO and leave its adapter in the run's folder.

    Raises: as `train_reward`, and MissingExtra where the installed TRL has no CPO.
    """
    config_kind, trainer_kind = _cpo_of_trl()
    start = _start(run, rows, resume=resume)
    if start is None:
        return
    config, source, tokenizer, pairs, checkpoint = start
    arguments = config_kind(**_arguments(run, config))
    model, adapter = load_policy(source, config, device=loading_device(config, run.plan.device))
    check_adapter_targets(config, tied=bool(model.config.get_text_config().tie_word_embeddings), source=source)

    class TokenTrainer(SavingTrainer, trainer_kind):  # type: ignore[valid-type,misc]  # trl is not typed
        """CPO on the token ids that it is given."""

        def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
            return _cpo_columns(*pairs[feature["place"]])

    places = {
        "place": list(range(len(pairs))),
        **{name: [""] * len(pairs) for name in ("prompt", "chosen", "rejected")},
    }
    trainer = TokenTrainer(
        run=run,
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(places),
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[PairEvents(run)],
    )
    _train(trainer, run, tokenizer, checkpoint)


class _Start(NamedTuple):
    """What both methods begin with."""

    config: TrainConfig
    source: str
    tokenizer: Any
    pairs: list[tuple[Rendered, Rendered]]
    checkpoint: Path | None
    """To go on from."""


def _start(run: RunFolder, rows: Sequence[Row], *, resume: bool) -> _Start | None:
    """The pairs as tokens; None where the last step was saved already, whose adapter is published then."""
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(plan.base)
    tokenizer = load_tokenizer(source, config)
    pairs = _short_enough(run, render_pairs(tokenizer, rows, tools=plan.tools), config)
    checkpoint = checkpoint_of(run) if resume else None
    if checkpoint and is_last(checkpoint, config.max_steps):
        check_tensors(load_file(checkpoint / "adapter_model.safetensors").items(), config.learning_rate)
        publish_adapter(checkpoint, tokenizer, run)
        return None
    return _Start(config, source, tokenizer, pairs, checkpoint)


def _cpo_of_trl() -> tuple[Any, Any]:
    """TRL's CPO, which is experimental: any release may move it or drop it."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from trl.experimental.cpo import CPOConfig, CPOTrainer
    except ImportError as error:
        import trl

        raise MissingExtra(
            f"method 'cpo' needs trl.experimental.cpo, which the installed TRL {trl.__version__} does not have: "
            'pip install "trl>=1.16,<1.17"'
        ) from error
    return CPOConfig, CPOTrainer


def _cpo_columns(chosen: Rendered, rejected: Rendered) -> dict[str, Any]:
    """What TRL's ``tokenize_row`` makes of a row: ids, and labels that leave out what the model does not write."""
    first = chosen.learned.index(True)
    row: dict[str, Any] = {"prompt_input_ids": chosen.ids[:first], "prompt_attention_mask": [1] * first}
    for side, text in (("chosen", chosen), ("rejected", rejected)):
        row[f"{side}_input_ids"] = text.ids
        row[f"{side}_attention_mask"] = [1] * len(text.ids)
        row[f"{side}_labels"] = [token if own else _IGNORED for token, own in zip(text.ids, text.learned, strict=True)]
    return row


def _short_enough(
    run: RunFolder, pairs: list[tuple[Rendered, Rendered]], config: TrainConfig
) -> list[tuple[Rendered, Rendered]]:
    """The pairs of which both sides fit; TRL filters (reward) or cuts (CPO) the others in silence."""
    kept, said = fitting(pairs, longest_of(config))
    if said:
        run.report_event("note", text=said)
    return kept


def _arguments(run: RunFolder, config: TrainConfig) -> dict[str, Any]:
    arguments = config.preference_arguments(device=run.plan.device)
    if config.save_total_limit == 0:
        arguments["save_total_limit"] = None
    return {"output_dir": str(run.checkpoints), "disable_tqdm": True, **arguments}


def _train(trainer: Any, run: RunFolder, tokenizer: Any, checkpoint: Path | None) -> None:
    with warnings.catch_warnings(), trainer.ending.heeded():
        warnings.filterwarnings("ignore", category=FutureWarning)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.state.global_step == 0:
        raise TrainingFailed("training made no step: there were fewer pairs than one batch; make batches smaller")
    check_weights(trainer)
    save_adapter(trainer, tokenizer, run)


class PairEvents(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes each step's metrics into the run's events."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Called by transformers after each logged step."""
        if "loss" not in logs or not state.is_world_process_zero:
            return
        found = {name.removeprefix("rewards/"): as_number(logs[name]) for name in _SHOWN if name in logs}
        if "accuracies" in found:  # CPO's names for the same
            found |= {"accuracy": found.pop("accuracies"), "margin": found.pop("margins", None)}
        self._run.report_event("step", step=state.global_step, of=state.max_steps, **found)
