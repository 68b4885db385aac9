"""Reward models and CPO on a run's folder through TRL: pairs in, an adapter out.

Imported only by the process that trains, since it imports ``trl`` at once. TRL is given token ids, not texts: its own
rendering doubles the end token (CPO), learns tool results, and filters long pairs away without a word.
"""

import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import RewardConfig, RewardTrainer

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.errors import MissingExtra, TrainingFailed
from praison_agent_rl.models import load_model, load_scorer, load_tokenizer, plain_weights
from praison_agent_rl.pair_lengths import fitting, longest_of
from praison_agent_rl.pair_texts import Rendered, render_pairs
from praison_agent_rl.preflight import check_adapter_targets
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.adapters import check_tensors, check_weights, publish_adapter, save_adapter
from praison_agent_rl.training.checkpoints import is_last, newest_whole_checkpoint
from praison_agent_rl.training.events import as_number

_SHOWN = ("loss", "grad_norm", "learning_rate", "accuracy", "margin", "rewards/accuracies", "rewards/margins")
_IGNORED = -100
"""Label of a token that is not learned, as torch's cross entropy takes it."""


def train_reward(run: RunFolder, rows: Sequence[Row], *, resume: bool = False) -> None:
    """Train a reward model on the pairs of ``run`` and leave its adapter, score head included, in the run's folder.

    Raises:
        DataError: no pair fits into ``max_length`` tokens.
        ModelError: the model cannot be loaded.
        TrainingFailed: no step was made, or weights became NaN.
    """
    start = _start(run, rows, resume=resume)
    if start is None:
        return
    config, source, tokenizer, pairs = start
    columns = {"chosen_ids": [one.ids for one, _ in pairs], "rejected_ids": [other.ids for _, other in pairs]}
    model = load_scorer(source, config, device=run.plan.device, new_head=True)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**_arguments(run, config)),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        peft_config=LoraConfig(**config.lora_arguments()),
        callbacks=[PairEvents(run)],
    )
    _train(trainer, run, tokenizer, resume=resume)


def train_cpo(run: RunFolder, rows: Sequence[Row], *, resume: bool = False) -> None:
    """Train the policy of ``run`` on its pairs by CPO and leave its adapter in the run's folder.

    Raises: as `train_reward`, and MissingExtra where the installed TRL has no CPO.
    """
    config_kind, trainer_kind = _cpo_of_trl()
    start = _start(run, rows, resume=resume)
    if start is None:
        return
    config, source, tokenizer, pairs = start
    model = load_model(source, config, device=run.plan.device)
    check_adapter_targets(config, tied=bool(model.config.get_text_config().tie_word_embeddings), source=source)

    class TokenTrainer(trainer_kind):  # type: ignore[valid-type,misc]  # trl is not typed
        """CPO on the token ids that it is given."""

        def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
            return _cpo_columns(*pairs[feature["place"]])

    places = {
        "place": list(range(len(pairs))),
        **{name: [""] * len(pairs) for name in ("prompt", "chosen", "rejected")},
    }
    trainer = TokenTrainer(
        model=model,
        args=config_kind(**_arguments(run, config)),
        train_dataset=Dataset.from_dict(places),
        processing_class=tokenizer,
        peft_config=LoraConfig(**config.lora_arguments()),
        callbacks=[PairEvents(run)],
    )
    _train(trainer, run, tokenizer, resume=resume)


class _Start(NamedTuple):
    """What both methods begin with."""

    config: TrainConfig
    source: str
    tokenizer: Any
    pairs: list[tuple[Rendered, Rendered]]


def _start(run: RunFolder, rows: Sequence[Row], *, resume: bool) -> _Start | None:
    """The pairs as tokens; None where the last step was saved already, whose adapter is published then."""
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(plan.base)
    tokenizer = load_tokenizer(source, config)
    pairs = _short_enough(run, render_pairs(tokenizer, rows, tools=plan.tools), config)
    return None if _finished(run, tokenizer, config, resume=resume) else _Start(config, source, tokenizer, pairs)


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


def _finished(run: RunFolder, tokenizer: Any, config: TrainConfig, *, resume: bool) -> bool:
    """Whether the last step was saved before the run was interrupted; its adapter is published then."""
    checkpoint = newest_whole_checkpoint(run.checkpoints) if resume else None
    if checkpoint is None or not is_last(checkpoint, config.max_steps):
        return False
    check_tensors(load_file(checkpoint / "adapter_model.safetensors").items(), config.learning_rate)
    publish_adapter(checkpoint, tokenizer, run)
    return True


def _train(trainer: Any, run: RunFolder, tokenizer: Any, *, resume: bool) -> None:
    checkpoint = newest_whole_checkpoint(run.checkpoints) if resume else None
    if resume:
        start = f"going on from {checkpoint.name}" if checkpoint else "no whole checkpoint: from the start"
        run.report_event("note", text=start)
    with warnings.catch_warnings():
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
