"""The last completions of a run with their log-probabilities under the policy as it ended, for who serves it to check.

Imported only by the process that trains, since it imports ``torch`` at once.
"""

from typing import Any

import torch

from praison_agent_rl.data import write_rows
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.trl_names import why_not_by_names


def keep_samples(run: RunFolder, trainer: Any) -> None:
    """Write the completions that were trained on last, scored once more by the trainer."""
    seen, config = trainer.seen, run.plan.config
    quantised = config.get("load_in_4bit") or config.get("load_in_8bit")  # what is served has the weights unrounded
    if seen is None or quantised or trainer.accelerator.num_processes > 1 or why_not_by_names(trainer):
        return
    ids = torch.cat([seen["prompt_ids"], seen["completion_ids"]], 1)
    mask = torch.cat([seen["prompt_mask"], seen["completion_mask"]], 1)
    length = seen["completion_ids"].size(1)
    with torch.no_grad():
        scores = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]  # noqa: SLF001
    write_rows(run.sampled, [row for place in range(len(ids)) if (row := _row(seen, scores, place))])


def _row(seen: dict[str, torch.Tensor], scores: torch.Tensor, place: int) -> dict[str, Any] | None:
    kept = seen["completion_mask"][place].bool()
    drawn = seen["tool_mask"][place].bool() & kept if "tool_mask" in seen else kept
    if not bool(drawn.any()):
        return None
    return {
        "prompt_ids": seen["prompt_ids"][place][seen["prompt_mask"][place].bool()].tolist(),
        "completion_ids": seen["completion_ids"][place][kept].tolist(),
        "drawn": drawn[kept].int().tolist(),
        "log_probs": scores[place][kept].float().tolist(),
    }
