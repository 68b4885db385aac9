"""Which training prompts leave room for a completion."""

from collections.abc import Sequence
from typing import Any

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.diagnosis import long_prompts
from praison_agent_rl.models import render_prompts
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.watching import tell


def short_enough(
    run: RunFolder, rows: Sequence[Row], tokenizer: Any, config: TrainConfig, tools: Sequence[dict[str, Any]]
) -> list[Row]:
    """The rows whose prompt leaves room for a completion; TRL would train on longer ones with only a log message."""
    room = config.max_seq_length - config.max_completion_length
    limit = min(room, config.max_prompt_length or room)
    lengths = [len(ids) for ids in render_prompts(tokenizer, [row["prompt"] for row in rows], tools)]
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    if len(kept) < len(rows):
        name = "max_prompt_length" if limit == config.max_prompt_length else "max_seq_length - max_completion_length"
        run.report_event(
            "note",
            text=f"{len(rows) - len(kept)} of {len(rows)} training prompts are longer than {limit} tokens ({name}) "
            f"and are left out; the longest has {max(lengths)}",
        )
        left = len(rows) - len(kept)
        long = long_prompts(left, len(rows), longest=max(lengths), limit=limit, key=name) if config.watch else None
        tell(run, [long] if long else [])
    return kept
