"""Runs of a tiny model, small enough to happen a few times on another machine, and what is said of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praison_agent_rl.planning import draft_from_config, write_run
from praison_agent_rl.runs import RunFolder

ENVIRONMENT = ["OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_TOKEN"]
SECRET = "hf_a_secret_of_the_tests"
REWARDS = """
    import os, time
    from pathlib import Path

    import letters

    def lower(completions, **_):
        with open(os.path.join(os.environ.get("HOME", "."), "seen.txt"), "a") as file:
            file.write(f"{os.getcwd()} {__file__} {letters.__file__}\\n")
        if Path("broken").exists():
            raise ValueError("it is broken")
        if Path("slow").exists():
            time.sleep(3)
        return [letters.share(text) for text in completions]
"""
LETTERS = """
    def share(text):
        return sum(c.islower() for c in text) / max(len(text), 1)
"""


def planned(project: Path, model: Path, name: str, **settings: Any) -> RunFolder:
    config = {
        "model_name": str(model), "dataset": [{"prompt": f"Say something about {n}."} for n in range(28)],
        "reward_funcs": ["scoring:lower"], "max_steps": 4, "per_device_train_batch_size": 16, "num_generations": 8,
        "max_completion_length": 8, "learning_rate": 1e-2, "held_out": 8, "save_steps": 1, "reward_cache": False,
        **settings,
    }  # fmt: skip
    return write_run(draft_from_config(config), project / name)


def results(run: RunFolder) -> dict[str, Any]:
    """Weights and answers of a run, as they are."""
    names = ["adapter/adapter_model.safetensors", "model/model.safetensors", "answers_base.jsonl", "answers_new.jsonl"]
    found: dict[str, Any] = {name: (run.root / name).read_bytes() for name in names}
    return {**found, "comparison": json.loads(run.comparison_file.read_text()), "verdict": run.verdict_file.read_text()}


def steps(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events if event["event"] == "step"]


def notes(events: list[dict[str, Any]]) -> str:
    return "\n".join(event["text"] for event in events if event["event"] == "note")


def once(do: Callable[[], Any], *, at: int) -> Callable[[dict[str, Any]], None]:
    """Does something at a step, the first time that it is told."""
    done: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == at and not done:
            done.append(at)
            do()

    return on_event
