"""Rollouts that the agent itself makes, within TRL's trainer: every sequence of tokens that came of one is trained on.

Imported only by the process that trains, since it imports ``torch`` at once.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from trl.trainer.utils import use_adapter

from praison_agent_rl.agent_rollouts.asking import AgentAsker
from praison_agent_rl.agent_rollouts.jobs import Rollout
from praison_agent_rl.agent_rollouts.step_credit import step_advantages
from praison_agent_rl.agent_rollouts.trajectories import NO_CALL, Credit, TokenSequence, credits_of, join_calls
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.rollouts import Draw
from praison_agent_rl.run_views import run_messages
from praison_agent_rl.training.drawing import SAMPLERS
from praison_agent_rl.training.tool_rollouts import ToolTrainer

LEFT = ("prompt_ids", "prompt_mask")
"""What is padded on the left; all else is of the completion."""


@dataclass(frozen=True)
class Manner:
    """How rollouts become what is trained on."""

    asker: AgentAsker
    credit: Credit = "all"
    discount: float = 1.0


class Split(NamedTuple):
    """A sequence of a rollout besides its last one."""

    rollout: int
    """Place of the rollout in the batch."""
    sequence: TokenSequence
    credit: float


class RolloutTrainer(ToolTrainer):
    """TRL's trainer, whose completions are runs of the agent where it is given one to ask.

    A row of TRL's batch is a rollout: the last sequence of tokens that came of it, with what the policy did not draw
    masked out. Other sequences, which there are where the agent rewrote what was said or handed over to another, are
    added to the batch once advantages are known.
    """

    def __init__(self, *, rollouts: Manner | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.rollouts = rollouts
        self.rolled: list[Rollout] = []
        """The rollouts of the last generation."""
        self._asked: list[dict[str, Any]] = []
        self._last: list[TokenSequence] = []
        self._split: list[Split] = []
        if rollouts is not None:
            self.rollout_func = self._rolled_out

    def opened(self) -> AbstractContextManager[Draw]:
        """Draws completions of the policy as it is now, for as long as the block lasts."""
        raise NotImplementedError

    def _rolled_out(self, prompts: list[Any], _: Any) -> dict[str, Any]:
        """What TRL takes: for each prompt the tokens, and which of them the policy drew (``env_mask``)."""
        assert self.rollouts is not None
        with self.opened() as draw:
            self.rolled = self.rollouts.asker.ask(self._asked, draw, self._sampling())
        self.runs = [rollout.as_run(self.rollouts.asker.agent) for rollout in self.rolled]
        joined = [join_calls(rollout, self.rollouts.asker.trained) for rollout in self.rolled]
        self._check_some(joined)
        last = self._last = [sequences[-1] if sequences else self._empty() for sequences in joined]
        self._split = [split for place, found in enumerate(joined) for split in self._others(place, found)]
        self._cut = [sequence.cut for sequence in last]
        self._tell_joined(joined)
        known = None if any(each.log_probs is None for each in last) else [each.log_probs or [] for each in last]
        self._behaviour = known
        exact = SAMPLERS.get(self.sampler) == "own"
        return {
            "prompt_ids": [sequence.prompt_ids for sequence in last],
            "completion_ids": [sequence.completion_ids for sequence in last],
            "logprobs": None if exact else known,
            "env_mask": [sequence.drawn for sequence in last],
        }

    def _others(self, place: int, sequences: Sequence[TokenSequence]) -> list[Split]:
        assert self.rollouts is not None
        shares = credits_of(sequences, self.rollouts.credit, self.rollouts.discount)
        pairs = zip(sequences[:-1], shares[:-1], strict=True)
        return [Split(place, sequence, share) for sequence, share in pairs if share]

    def _empty(self) -> TokenSequence:
        """Of a rollout in which nothing was drawn; TRL wants a token, which is masked out."""
        end = self._tokenizer.eos_token_id
        return TokenSequence([end], [end], [0], [0.0])

    def _check_some(self, joined: Sequence[Sequence[TokenSequence]]) -> None:
        """Raise TrainingFailed if no rollout came to an answer."""
        failed = [rollout.outcome.error for rollout in self.rolled if rollout.outcome.error]
        if len(failed) == len(self.rolled) or not any(joined):
            said = next(iter(failed), "the agent asked another model than the one that is trained")
            raise TrainingFailed(
                f"none of {len(self.rolled)} rollouts of the agent came to an answer; the first: {said}"
            )

    def _tell_joined(self, joined: Sequence[Sequence[TokenSequence]]) -> None:
        count, metrics = len(joined), self._metrics["train" if self.model.training else "eval"]
        calls = sum(len(rollout.calls) for rollout in self.rolled)
        for name, value in {
            "joined": sum(len(sequences) == 1 for sequences in joined) / count,
            "failed": sum(rollout.outcome.error is not None for rollout in self.rolled) / count,
            "cut": sum(self._cut) / count,
            "calls": calls / count,
            "tool_errors": sum(len(rollout.outcome.tool_errors) for rollout in self.rolled) / count,
            "seconds": sum(rollout.outcome.seconds for rollout in self.rolled) / count,
            "tool_seconds": sum(rollout.outcome.tool_seconds for rollout in self.rolled) / count,
        }.items():
            metrics[f"rollouts/{name}"].append(value)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """As TRL does, but a completion is all that was said in a run, and not what its tokens decode to."""
        found: tuple[Any, ...] = super()._generate(prompts)
        if self.rollouts is None:
            return found
        return (*found[:3], [run_messages(run) for run in self.runs or []], *found[4:])

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        """As TRL does; NaN for rollouts that failed."""
        found = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.rollouts is not None:  # what failed is nobody's doing, or it is not known whose
            failed = [place for place, rollout in enumerate(self.rolled) if rollout.outcome.error is not None]
            found[failed] = torch.nan
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.rollouts is None:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return scored
        self._asked = inputs
        try:
            scored = super()._generate_and_score_completions(inputs)
        finally:
            self.runs = None
        by_call = self._by_call(len(inputs))
        if by_call is not None:
            scored["advantages"] = _of_tokens(list(enumerate(self._last)), by_call, scored["completion_ids"])
        return self._widened(scored, by_call) if self.model.training else scored

    def _by_call(self, count: int) -> list[list[float]] | None:
        """Advantages of each call of each rollout, where a reward scored steps."""
        if self.multi_objective_aggregation != "sum_then_normalize":
            return None
        weights = {reward.name: reward.weight for reward in self.caller.rewards}
        scaled = self.scale_rewards != "none"
        group = self.num_generations if self.model.training else self.num_generations_eval
        return step_advantages(self._totals(count), self.caller.steps(), weights, group=group, scaled=scaled)

    def _advantages_of(
        self, kept: Sequence[Split], advantages: torch.Tensor, by_call: list[list[float]] | None, ids: torch.Tensor
    ) -> torch.Tensor:
        """Of the rows that are added: those of their rollouts, by their credit; 0 for empty ones."""
        share = torch.tensor([split.credit for split in kept], device=advantages.device)
        if by_call is None:
            own = advantages[torch.tensor([split.rollout for split in kept], dtype=torch.long)] * share
            return functional.pad(own, (0, len(ids) - len(kept)))
        own = _of_tokens([(split.rollout, split.sequence) for split in kept], by_call, ids)
        own[: len(kept)] *= share[:, None]
        return own

    def _widened(self, scored: dict[str, Any], by_call: list[list[float]] | None) -> dict[str, Any]:
        """The batch with a row for each further sequence, and with empty ones until its parts are of one size."""
        kept = [split for split in self._split if not (self.mask_truncated_completions and split.sequence.cut)]
        advantages = scored["advantages"]
        empty = -(len(advantages) + len(kept)) % self.args.steps_per_generation
        if not kept and not empty:
            return scored
        sequences = [*(split.sequence for split in kept), *([self._empty()] * empty)]
        rows = _rows_of(sequences, self._tokenizer.pad_token_id, advantages.device)
        rows["advantages"] = self._advantages_of(kept, advantages, by_call, rows["completion_ids"])
        self._score_rows(rows, sequences, wanted=scored)
        whole = {name: _stacked(name, scored[name], rows.get(name)) for name in scored}
        whole["num_items_in_batch"] = scored["num_items_in_batch"] + rows["tool_mask"].sum()
        return whole

    def _score_rows(self, rows: dict[str, torch.Tensor], sequences: Sequence[TokenSequence], wanted: Any) -> None:
        """Add the log-probabilities that ``wanted`` has of its own rows."""
        length = rows["completion_ids"].size(1)
        known = None
        if all(sequence.log_probs is not None for sequence in sequences):
            known = torch.zeros(len(sequences), length, device=rows["completion_ids"].device)
            for row, sequence in enumerate(sequences):
                known[row, : len(sequence.log_probs or [])] = torch.tensor(sequence.log_probs)
        for name in ("old_per_token_logps", "sampling_per_token_logps"):
            if name in wanted:
                rows[name] = known if known is not None else self._scored_now(rows)
        if "ref_per_token_logps" in wanted:
            model = self.accelerator.unwrap_model(self.model)
            with use_adapter(model, "ref" if "ref" in model.peft_config else None):  # as TRL does with its own rows
                rows["ref_per_token_logps"] = self._scored_now(rows)

    def _scored_now(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        length, size = rows["completion_ids"].size(1), self.args.per_device_train_batch_size
        with torch.no_grad():
            scores: torch.Tensor = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, length, batch_size=size
            )[0]
        return scores


def _of_tokens(
    sequences: Sequence[tuple[int, TokenSequence]], by_call: Sequence[Sequence[float]], ids: torch.Tensor
) -> torch.Tensor:
    """Advantages of the tokens of sequences, each with its rollout, of the shape of ``ids``; 0 where none was drawn."""
    found = torch.zeros(ids.shape, device=ids.device)
    for row, (rollout, sequence) in enumerate(sequences):
        own = by_call[rollout]
        for place, call in enumerate(sequence.call_of):
            if call != NO_CALL and own:
                found[row, place] = own[min(call, len(own) - 1)]
    return found


def _rows_of(sequences: Sequence[TokenSequence], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of (sequences, tokens): prompts padded on the left, completions on the right."""
    before = max(len(sequence.prompt_ids) for sequence in sequences)
    after = max(len(sequence.completion_ids) for sequence in sequences)
    left = [(before - len(sequence.prompt_ids), sequence.prompt_ids) for sequence in sequences]
    right = [(after - len(sequence.completion_ids), sequence) for sequence in sequences]
    rows = {
        "prompt_ids": [[pad] * short + ids for short, ids in left],
        "prompt_mask": [[0] * short + [1] * len(ids) for short, ids in left],
        "completion_ids": [sequence.completion_ids + [pad] * short for short, sequence in right],
        "completion_mask": [[1] * len(sequence.completion_ids) + [0] * short for short, sequence in right],
        "tool_mask": [sequence.drawn + [0] * short for short, sequence in right],
    }
    return {name: torch.tensor(values, device=device) for name, values in rows.items()}


def _stacked(name: str, own: Any, more: torch.Tensor | None) -> Any:
    """Rows of a batch with more beneath them, each side padded to the longer."""
    if more is None or not isinstance(own, torch.Tensor) or own.dim() == 0:
        return own
    if own.dim() == 1:
        return torch.cat([own, more.to(own.dtype)])
    width = max(own.size(1), more.size(1))
    sides = [_padded(name, each.to(own.dtype), width) for each in (own, more)]
    return torch.cat(sides)


def _padded(name: str, rows: torch.Tensor, width: int) -> torch.Tensor:
    short = width - rows.size(1)
    return functional.pad(rows, (short, 0) if name in LEFT else (0, short))
