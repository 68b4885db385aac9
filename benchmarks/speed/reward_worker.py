"""A measuring process that trains as the demo does and asks the held-out questions every few steps, off the clock."""

import json
import random
import time
from typing import Any

from praison_agent_rl.demo import QUESTIONS, SETTINGS

from .channel import Channel, measured
from .step_worker import train

INSTRUCTIONS = "Answer briefly and correctly."
_FOR_TRAINING = (
    "max_steps",
    "per_device_train_batch_size",
    "num_generations",
    "max_completion_length",
    "learning_rate",
)


def rows_of(seed: int, held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, in the order of ``seed``, and held-out rows, which are the same for every seed."""
    lines = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(lines)
    system = {"role": "system", "content": INSTRUCTIONS}
    rows = [{**line, "prompt": [system, {"role": "user", "content": line["prompt"]}]} for line in lines]
    kept, rest = rows[:held_out], rows[held_out:]
    random.Random(seed).shuffle(rest)
    return rest, kept


def _plain(function: Any) -> Any:
    """A reward that takes texts, as TRL hands it messages and this package texts."""

    def scored(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        found: list[float] = function(prompts, texts, **columns)
        return found

    scored.__name__ = function.__name__
    return scored


def curve(channel: Channel, job: dict[str, Any]) -> None:
    """Train; tell seconds of training, steps and mean held-out reward at each look."""
    from transformers import AutoTokenizer, TrainerCallback

    from praison_agent_rl.demo_rewards import correctness, length_penalty

    rewards = {"length_penalty": _plain(length_penalty), "correctness": _plain(correctness)}
    rows, held_out = rows_of(job["seed"], job["held_out"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")

    class Looks(TrainerCallback):  # type: ignore[misc]
        spent = 0.0
        began = 0.0

        def look(self, step: int, model: Any) -> None:
            answers = _answers(model, tokenizer, held_out, job["new_tokens"])
            accepted = [row["answer"] for row in held_out]
            means = {name: sum(f([""] * len(answers), answers, answer=accepted)) / len(answers)
                     for name, f in rewards.items()}  # fmt: skip
            channel.say(step=step, seconds=Looks.spent, reward=sum(means.values()), **means)

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            channel.say(ready=True)
            channel.wait()
            self.look(0, model)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            Looks.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            Looks.spent += time.perf_counter() - Looks.began
            late = Looks.spent > 60 * job["minutes"]
            if state.global_step % job["every"] == 0 or late or state.global_step == state.max_steps:
                self.look(state.global_step, model)
            control.should_training_stop = control.should_training_stop or late

    settings = {name: SETTINGS[name] for name in _FOR_TRAINING} | job.get("settings", {})
    both: dict[str, Any] = {"group": settings["num_generations"], "new_tokens": settings["max_completion_length"]}
    both["weights"] = SETTINGS["reward_weights"]
    train({**job, **both, "settings": {**settings, "seed": job["seed"]}}, rows, rewards, Looks)
    channel.say(done=True)


def _answers(model: Any, tokenizer: Any, rows: list[dict[str, Any]], new_tokens: int) -> list[str]:
    """Greedy answers, by the same code for every trainer; random numbers of the training are left as they were."""
    import torch
    from transformers import GenerationConfig

    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    training, state = model.training, torch.get_rng_state()
    model.eval()
    with torch.no_grad():
        output = model.generate(**batch, generation_config=settings)
    model.train(training)
    torch.set_rng_state(state)
    found: list[str] = tokenizer.batch_decode(output[:, batch["input_ids"].size(1) :], skip_special_tokens=True)
    return found


if __name__ == "__main__":
    measured(curve)
