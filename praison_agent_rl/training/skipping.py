"""Completions that cannot move the policy are left out of a step: those whose advantage is nothing.

Imported only by the process that trains, since it imports ``torch`` at once.
"""

from typing import Any

import torch

from praison_agent_rl.training.scoring import ScoringTrainer

Scores = tuple[torch.Tensor, torch.Tensor]
"""Log-probability and entropy of each completion token, both (rows, length)."""
_SEEN = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
_KEPT = 8
"""Completions that are kept of a step."""
SKIPPED = "skipped"
"""Metric: the share of a step's completions that were left out."""


class SkippingTrainer(ScoringTrainer):
    """TRL's trainer, in which completions without an advantage are neither run forward nor backward.

    The loss and its gradients stay as they are: each of these completions adds nothing to a sum, and what the sum is
    divided by counts them all (arXiv 2503.14476 drops such groups too, but samples others for them). The entropy that
    is logged is then that of the others.
    """

    not_shared_because: str | None = "it was not looked at yet"
    _silent: torch.Tensor | None = None
    """Which rows of the batch in work are left out, of shape (rows,)."""
    _before: torch.Tensor | None = None
    """Log-probabilities of the batch in work when it was sampled, of shape (rows, length)."""
    _by_policy: torch.Tensor | None = None
    """Which tokens of the batch in work the policy drew, (rows, length); None if all."""

    seen: dict[str, torch.Tensor] | None = None
    """Ids and masks of the last completions that were trained on."""

    def _compute_loss(self, *given: Any, **options: Any) -> torch.Tensor:
        inputs = options["inputs"] if "inputs" in options else given[1]
        if self.model.training:
            self.seen = {name: inputs[name][:_KEPT] for name in _SEEN if name in inputs}
        if self.not_shared_because is None and self.model.training:
            silent = inputs["advantages"] == 0
            self._silent = silent if silent.dim() == 1 and self._only_advantages_count() else None
            self._before = inputs.get("old_per_token_logps")
            self._by_policy = inputs.get("tool_mask")
            self._metrics["train"][SKIPPED].append(0.0 if self._silent is None else float(silent.float().mean()))
        try:
            loss: torch.Tensor = super()._compute_loss(*given, **options)
            return loss
        finally:
            self._silent = self._before = self._by_policy = None

    def _only_advantages_count(self) -> bool:
        """Whether a completion moves the policy by its advantage alone, and not by its distance or its entropy."""
        return self.beta == 0 and self.top_entropy_quantile == 1 and not self._entropy_bonus_enabled

    def _scored_where_it_counts(self, ids: torch.Tensor, mask: torch.Tensor, length: int) -> Scores:
        """As ``_score``, but only of the rows that are not left out.

        A row that is left out has the log-probabilities that it was sampled with, so that it is as likely as it was,
        and the mean entropy of the others, so that the mean of all is theirs.
        """
        silent = self._silent
        if silent is None or not silent.any():
            return self._score(ids, mask, length)
        if silent.all():
            with torch.no_grad():  # for the entropy, which is looked at in every step
                log_probs, entropy = self._score(ids, mask, length)
            return log_probs + self._nothing(), entropy
        loud = ~silent
        some, theirs = self._score(ids[loud], mask[loud], length)
        kept = mask[:, -length:].bool()
        log_probs = some.new_zeros(kept.shape) if self._before is None else self._before.to(some.dtype).clone()
        entropy = theirs.new_zeros(kept.shape)
        entropy[kept] = theirs[kept[loud]].mean() if kept[loud].any() else 0.0
        log_probs[loud], entropy[loud] = some, theirs
        return log_probs, entropy

    def _nothing(self) -> torch.Tensor:
        """0, with a gradient of 0 for all that is trained: optimisers go on by momentum where there is no signal."""
        trained = [(parameter * 0).sum() for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.stack([each.float() for each in trained]).sum()

    def _score(self, ids: torch.Tensor, mask: torch.Tensor, length: int) -> Scores:
        raise NotImplementedError
