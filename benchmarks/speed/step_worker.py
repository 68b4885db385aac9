"""A measuring process that makes GRPO steps, by this package or by TRL's own trainer; a step each time it is told to.

Both are held at the same place, by a callback that transformers gives to every trainer, so that a step is the same in
both: from the beginning of one to that of the next, sampling, rewards, update and logging included.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from .channel import Channel, measured

STEPS = 200
PER_TURN = 2
"""Steps in a turn. The last is timed: while the others had their turns, the memory of this process grew cold."""
OURS: dict[str, dict[str, Any]] = {
    "ours": {"sampler": "exact"},
    "ours-int8": {"sampler": "int8", "bf16": True},
    "ours-bf16": {"sampler": "bfloat16", "bf16": True},
    "ours-generate": {"sampler": "generate"},  # as TRL samples, so that the first step can be compared
    "ours-unshared": {"sampler": "generate"},
}
TRL: dict[str, dict[str, Any]] = {
    "trl": {},  # its own defaults: gradient checkpointing, and bfloat16 autocast on a CPU too
    "trl-fp32": {"bf16": False},
    "trl-plain": {"bf16": False, "gradient_checkpointing": False},
}
VARIANTS = (*OURS, *TRL)
STANDARD = ("ours", "ours-bf16", "ours-int8", "ours-generate", "trl", "trl-plain")


def share_of_e(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward that differs between any two answers, however long."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [text.count("e") / max(len(text), 1) for text in texts]


def settings_of(job: dict[str, Any]) -> dict[str, Any]:
    """What both sides are told, in this package's names; one group is a batch."""
    own = OURS.get(job["variant"], {})
    common = {
        "per_device_train_batch_size": job["group"],
        "num_generations": job["group"],
        "max_completion_length": job["new_tokens"],
        "max_seq_length": 8192,
        "max_steps": STEPS,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "watch": False,
        "reward_timeout": 1e6,
    }
    return {**common, **job.get("settings", {}), **own}


def load_config(job: dict[str, Any]) -> Any:
    """The configuration of a job.

    Raises:
        LookupError: it asks for a setting that this version does not have.
    """
    from praison_agent_rl.config import TrainConfig

    settings = settings_of(job)
    if missing := sorted(set(settings) - set(TrainConfig.model_fields)):
        raise LookupError(f"this version has no setting {', '.join(missing)}")
    return TrainConfig.load(need_model=False, need_data=False, **settings)


def train(job: dict[str, Any], rows: list[dict[str, Any]], rewards: dict[str, Any], callback: type) -> None:
    """Train as ``job`` says, with ``callback`` among the trainer's callbacks."""
    from transformers import trainer

    trainer.DEFAULT_CALLBACKS.append(callback)
    config = load_config(job)
    (_train_ours if job["variant"] in OURS else _train_by_trl)(job, config, rows, rewards)


def _train_ours(job: dict[str, Any], config: Any, rows: list[dict[str, Any]], rewards: dict[str, Any]) -> None:
    from praison_agent_rl.records import Plan
    from praison_agent_rl.rewards import Reward, Shape
    from praison_agent_rl.runs import RunFolder, now, write_record
    from praison_agent_rl.training.grpo import train_grpo

    with tempfile.TemporaryDirectory(dir=job["home"]) as folder:
        run = RunFolder.create(Path(folder) / "run")
        facts = {"notes": [], "libraries": {}, "created": now()}
        plan = Plan(base=job["model"], config=config.resolved(), rewards=[], device="cpu", **facts)
        write_record(run.plan_file, plan)
        weights = job.get("weights") or [1.0] * len(rewards)
        asked = [
            Reward(function, name, weight, Shape("text", "text"))
            for (name, function), weight in zip(rewards.items(), weights, strict=True)
        ]
        train_grpo(run, rows, asked, share=job["variant"] != "ours-unshared")


def _train_by_trl(job: dict[str, Any], config: Any, rows: list[dict[str, Any]], rewards: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    arguments = config.grpo_arguments(device="cpu")
    for name in ("bf16", "gradient_checkpointing", "reward_weights"):
        arguments.pop(name, None)
    arguments |= TRL[job["variant"]] | {"reward_weights": job.get("weights")}
    with tempfile.TemporaryDirectory(dir=job["home"]) as folder:
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
            reward_funcs=list(rewards.values()),
            args=GRPOConfig(output_dir=folder, disable_tqdm=True, **arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
            peft_config=LoraConfig(**config.lora_arguments()),
        ).train()


def step(channel: Channel, job: dict[str, Any]) -> None:
    """Make steps, ``PER_TURN`` each time; tell seconds of the last, peak memory and what the trainer logged of each."""
    from transformers import AutoTokenizer, TrainerCallback

    from .material import exact_prompts

    class Pace(TrainerCallback):  # type: ignore[misc]
        began: float | None = None
        done = -1
        logged: ClassVar[dict[str, float]] = {}

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if Pace.began is None:
                channel.say(ready=True)
                channel.wait()
            elif Pace.done % PER_TURN == 0:
                names = ("reward", "grad_norm", "entropy", "completions/mean_length")
                found = {name: Pace.logged.get(name) for name in names}
                channel.say(seconds=time.perf_counter() - Pace.began, **found)
                channel.wait()
            Pace.done += 1  # the first turn is the first step alone
            Pace.began = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            Pace.logged = dict(logs or {})

    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    rows = [{"prompt": prompt} for prompt in exact_prompts(tokenizer, tokens=job["prompt_tokens"], count=16)]
    train(job, rows, {"share_of_e": share_of_e}, Pace)


if __name__ == "__main__":
    measured(step)
