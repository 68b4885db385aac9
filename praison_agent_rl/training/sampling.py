"""Which prompts each pass over the data draws, and what their groups of answers said of them.

Imported only by the process that trains, since it imports ``trl`` at once.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from praison_agent_rl.answering import RawAnswer
from praison_agent_rl.curriculum import (
    BEFORE,
    Group,
    draw,
    group_of,
    groups_of,
    in_words,
    last_groups,
    recorded_groups,
    summary,
)
from praison_agent_rl.data import Row, prompt_key, read_rows
from praison_agent_rl.errors import RewardError
from praison_agent_rl.evaluation import score_answers
from praison_agent_rl.measuring import calling_for
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.together import agreed, everywhere

ROW = "_row"
"""Column with a row's place, which rewards do not see."""


class Signals(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """What the groups of a run said so far, the same in every process; ``groups`` is what an interrupted run saw."""

    def __init__(self, groups: Sequence[Group] = (), *, curriculum: bool = False) -> None:
        self.groups = list(groups)
        self.curriculum = curriculum
        self.turn = 0
        """Number of the pass over the prompts."""
        self._told = len(self.groups)

    def add(self, rows: Sequence[int], scores: Sequence[float | None]) -> None:
        """Keep the groups of one generation: ``rows`` one a group, ``scores`` those of all their answers, in order."""
        size = len(scores) // len(rows)
        parts = (scores[start : start + size] for start in range(0, len(scores), size))
        self.groups += [group_of(row, part, self.turn) for row, part in zip(rows, parts, strict=True)]

    def take(self) -> list[list[Any]]:
        """The groups since the last call, as JSON."""
        start, self._told = self._told, len(self.groups)
        return [list(group) for group in self.groups[start:]]

    def drawn(self, order: Sequence[int], *, batch: int, seed: int | None) -> list[int]:
        """``order`` as this pass draws it."""
        if not self.curriculum:
            return list(order)
        last = last_groups(self.groups, before=self.turn)
        return draw(order, last, turn=self.turn, batch=batch, rng=random.Random(f"{seed} {self.turn}"))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers before it draws; a resumed run begins within a pass."""
        # accelerate's `set_epoch` does not reach the sampler where several processes go on within a pass
        self.turn = int(state.epoch or 0)


def signals_of(run: RunFolder, rows: Sequence[Row], rewards: Sequence[Reward], checkpoint: Path | None) -> Signals:
    """What is known before the first step that ``run`` is to make: by recorded answers, and up to ``checkpoint``."""
    curriculum = bool(run.plan.config.get("curriculum"))
    known = recorded_groups(event for _, event in run.events())
    if known is None and curriculum and run.answered.exists():
        known = _by_recorded_answers(run, rows, rewards)
    seen = groups_of(run.steps(), until=int(checkpoint.name.rpartition("-")[2])) if checkpoint else []
    return Signals([*(known or []), *seen], curriculum=curriculum)


def tell_signals(run: RunFolder) -> None:
    """Say at the end of a run which prompts it learned nothing from."""
    found = summary(groups_of(run.steps()))
    if text := in_words(found, chosen=bool(run.plan.config.get("curriculum"))):
        run.report_event("note", text=text)


def _by_recorded_answers(run: RunFolder, rows: Sequence[Row], rewards: Sequence[Reward]) -> list[Group]:
    """A group for each prompt of ``rows`` to which several answers are recorded; said once in the run's events."""
    said = {prompt_key(row): row["texts"] for row in read_rows(run.answered)}
    answers = [
        RawAnswer(place, number, text, len(text))
        for place, row in enumerate(rows)
        for number, text in enumerate(said.get(prompt_key(row), []))
    ]
    scores: dict[int, list[float | None]] = {}
    note = ""
    try:
        for scored in score_answers(answers, rows, rewards, calling=calling_for(run)):
            scores.setdefault(scored.prompt, []).append(scored.total)
    except RewardError as error:  # what was recorded is no reason to end a run that was asked for
        note = f"recorded answers cannot be scored, so all prompts are drawn alike at first: {error}"
    groups = [group_of(place, totals, BEFORE) for place, totals in scores.items()]
    groups = [group for group in groups if group.spread is not None]  # without two scores it says nothing
    if silent := sum(group.silent for group in groups):
        alike = f"the recorded answers to {silent} of {len(groups)} prompts score the same"
        note = f"{alike}; these prompts are drawn less at first"
    run.report_event("curriculum", recorded=[list(group) for group in groups])
    if note:
        run.report_event("note", text=note)
    return groups


class EpochSampler(RepeatSampler):  # type: ignore[misc]  # trl is not typed
    """TRL's order of prompts, but known from the pass and from ``signals`` alone: TRL's starts again when resumed."""

    signals: Signals

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_samples))
        if self.shuffle:
            self.generator.manual_seed(self.seed + self.signals.turn)
            order = torch.randperm(self.num_samples, generator=self.generator).tolist()
        drawn = self.signals.drawn(order, batch=self.batch_size, seed=self.seed)
        for start in range(0, len(drawn) - self.batch_size + 1, self.batch_size):
            for _ in range(self.repeat_count):
                for row in drawn[start : start + self.batch_size]:
                    yield from [row] * self.mini_repeat_count


class SignalTrainer(GRPOTrainer):  # type: ignore[misc]  # trl is not typed
    """TRL's trainer, which keeps what each group of answers said and draws prompts by it."""

    def __init__(self, *, signals: Signals | None = None, train_dataset: Any, **options: Any) -> None:
        self.signals = signals or Signals()
        numbered = train_dataset.add_column(ROW, list(range(len(train_dataset))))
        super().__init__(train_dataset=numbered, **options)
        self.add_callback(self.signals)
        self.signals.groups = agreed(self.signals.groups)  # a reward may score recorded answers differently in each

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        given = super()._get_train_sampler(dataset)
        sampler = EpochSampler(
            given.data_source,
            given.mini_repeat_count,
            batch_size=given.batch_size,
            repeat_count=given.repeat_count,
            shuffle=given.shuffle,
            seed=given.seed,
        )
        sampler.signals = self.signals
        return sampler

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [given[ROW] for given in inputs if ROW in given]
        plain = [{name: value for name, value in given.items() if name != ROW} for given in inputs]
        scored: dict[str, Any] = super()._generate_and_score_completions(plain)
        if self.model.training and rows:
            everywhere = self.accelerator.gather(torch.tensor(rows, device=self.accelerator.device)).tolist()
            self.signals.add(everywhere[:: self.num_generations], self._totals(len(everywhere)))
        return scored

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL does, of what all processes measured; TRL gathers its own metrics, and knows of no others."""
        mode = "train" if self.model.training else "eval"
        told = everywhere(dict(self._metrics[mode]))
        for name in dict.fromkeys(name for each in told for name in each):
            self._metrics[mode][name] = [value for each in told for value in each.get(name, ())]
        super().log(logs, start_time)

    def _totals(self, count: int) -> list[float | None]:
        """The weighted sum for each of the last ``count`` answers of all processes; None where no reward gave a score.

        TRL logs every score after it has gathered them.
        """
        names, weights = self.reward_func_names, self.reward_weights.tolist()
        by_answer = zip(*(list(self._logs["rewards"][name])[-count:] for name in names), strict=True)
        return [_total(scores, weights) for scores in by_answer]


def _total(scores: Sequence[float], weights: Sequence[float]) -> float | None:
    given = [weight * score for score, weight in zip(scores, weights, strict=True) if score == score]  # NaN is no score
    return sum(given) if given else None
