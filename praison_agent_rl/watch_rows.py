"""Choose the training prompts that are put aside to watch a run with; nothing here reads files or trains.

They are not the gate's held-out prompts: those would not judge a checkpoint fairly that was chosen by them.
"""

from collections.abc import Sequence

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, prompt_key, split_rows
from praison_agent_rl.errors import DataError

FEWEST_PROMPTS, SHARE, LEAST, MOST = 80, 0.1, 8, 24
"""Of fewer prompts each is needed for training; 24, asked twice, tell checkpoints apart that differ by a fifth of the
rewards' spread, and cost a quarter more sampling where 25 steps of 8 answers lie between two looks."""


def put_aside(train: list[Row], config: TrainConfig) -> tuple[list[Row], list[Row], list[str]]:
    """Rows to train on, rows to watch with, and what to say of it; by the prompts and ``held_out_seed`` alone.

    Raises:
        DataError: no training prompt would remain.
    """
    wanted = _wanted(train, config)
    if not wanted:
        return train, [], []
    prompts = _distinct(train)
    if wanted >= prompts:
        raise DataError(
            f"watch_prompts={wanted!r} would put aside all of {prompts} training prompts and leave none to train on; "
            "ask for less or give more prompts"
        )
    rest, aside = split_rows(train, wanted, seed=config.held_out_seed)
    if config.watch_prompts is None and len(rest) < config.prompts_at_once:
        return train, [], []
    text = f"{_distinct(aside)} of {prompts} training prompts are put aside to watch with (watch_prompts)"
    return rest, aside, [f"{text}; they choose the checkpoint that is kept, and are not trained on"] if aside else []


def _wanted(train: Sequence[Row], config: TrainConfig) -> float | int:
    if not config.watch or config.method != "grpo":
        return 0
    if config.watch_prompts is not None:
        return config.watch_prompts
    prompts = _distinct(train)
    return min(max(round(prompts * SHARE), LEAST), MOST) if prompts >= FEWEST_PROMPTS else 0


def _distinct(rows: Sequence[Row]) -> int:
    return len({prompt_key(row) for row in rows})
