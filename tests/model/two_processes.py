"""What two processes run for the tests of training together, and what one runs with a batch twice as large.

``python -m tests.model.two_processes FOLDER`` trains every run of ``FOLDER``; torchrun starts it once or several times.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.recorded_calls import write_calls
from praison_agent_rl.records import Call, Plan
from praison_agent_rl.runs import RunFolder, now, write_record

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "a much longer one than the others"]
SETTINGS: dict[str, Any] = {
    "lora_r": 4,
    "lora_alpha": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    # plain gradient descent: Adam makes a whole step of a gradient that is nothing but rounding
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_steps": 4,
    "save_strategy": "no",
    "watch": False,
}


def planned(root: Path, base: Path, **changes: Any) -> RunFolder:
    config = TrainConfig.load({**SETTINGS, **changes}, need_model=False, need_data=False)
    run = RunFolder.create(root)
    facts = {"rewards": [], "device": "cpu", "notes": [], "libraries": {}, "created": now()}
    write_record(run.plan_file, Plan(base=str(base), config=config.resolved(), **facts))
    if config.warm_start:
        write_calls(run.calls, [good_call(number) for number in range(48)])
    return run


def good_call(number: int) -> Call:
    """A recorded call whose reply a warm start learns."""
    asked, said = f"{WORDS[number % len(WORDS)]} {number}", "ab" * (1 + number % 5)
    reply = {"role": "assistant", "content": said}
    messages = [{"role": "user", "content": asked}]
    return Call(id=str(number), time=0.0, messages=messages, reply=reply, finish="stop")


def rows() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]


def completion_for(prompt: list[int], number: int, step: int) -> list[int]:
    """The ``number``-th completion of a prompt in a step: the same in whichever process it is asked for."""
    mixed = sum((place + 1) * token for place, token in enumerate(prompt)) + 101 * number + 977 * step
    length = 2 + mixed % 5
    return [3 + (mixed * (7 + 2 * place) + 13 * place * number) % 256 for place in range(length)]


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A score by the first token, and none for some."""
    return [None if ids[0] % 11 == 0 else ids[0] % 5 / 4 for ids in completion_ids]


def train(run: RunFolder, *, share: bool) -> Any:
    """Train ``run`` on completions that are the same in every process; returns the trainer."""
    from praison_agent_rl.ranks import Follower, is_first
    from praison_agent_rl.rewards import Reward
    from praison_agent_rl.training import grpo

    kept: list[Any] = []

    class Told(grpo.SavingPolicyTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            kept.append(self)

        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            step, size = self.state.global_step, self.num_generations
            return [completion_for(ids, row % size, step) for row, ids in enumerate(prompt_ids)], None

    before, grpo.SavingPolicyTrainer = grpo.SavingPolicyTrainer, Told  # type: ignore[misc]
    try:
        grpo.train_grpo(run if is_first() else Follower(run.root), rows(), [Reward(first_token, "first")], share=share)
    finally:
        grpo.SavingPolicyTrainer = before  # type: ignore[misc]
    return kept[0]


def adapter_file(run: RunFolder, number: int) -> Path:
    """Where process ``number`` leaves the adapter that it has in memory."""
    return run.root / f"adapter-of-{number}.safetensors"


def main() -> None:
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        run = RunFolder.open(folder)
        trainer = train(run, share=not folder.name.endswith("by DDP"))
        trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        save_file(trained, str(adapter_file(run, int(os.environ.get("RANK", "0")))))
        torch.distributed.barrier()


def start(folder: Path, processes: int = 2) -> "subprocess.CompletedProcess[str]":
    """Train all runs of ``folder`` in so many processes, over gloo."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *torchrun, "--nproc-per-node", str(processes), "-m", __name__, str(folder)]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=300
    )


if __name__ == "__main__":
    main()
