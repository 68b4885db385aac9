"""Runs that are killed while they train: each in a fork of one process that has imported everything, on one thread."""

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "lora_r": 4, "lora_alpha": 8, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 6,
    "learning_rate": 1e-2, "max_steps": 14, "save_steps": 3, "reward_cache": False, "watch_steps": 2,
}  # fmt: skip
PAIRS = {"max_length": 64, "learning_rate": 3e-3, "max_steps": 14, "save_steps": 3, "lora_r": 4}
KINDS: dict[str, dict[str, Any]] = {
    # 12 prompts, 2 at a time: a pass is 6 steps, and from the second on the curriculum draws
    "grpo": SETTINGS,
    # 16 completions at once in 4 parts, each used twice, 2 parts for an update: a generation is used up in 4 updates
    "blocks": {
        **SETTINGS, "per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 2,
        "num_iterations": 2, "max_steps": 16, "logging_steps": 3, "watch_steps": 4,
    },
    # saved at shares of the run that lie within generations, and with a last update of a pass that is a short one
    "shares": {
        **SETTINGS, "steps_per_generation": 3, "gradient_accumulation_steps": 4, "save_steps": 0.1, "beta": 0.05,
        "sampler": "generate", "max_steps": 10,
    },
    "cpo": {"method": "cpo", **PAIRS, "gradient_accumulation_steps": 3},
    "reward": {"method": "reward", **PAIRS, "num_train_epochs": 2.0, "max_steps": -1, "save_strategy": "epoch"},
}  # fmt: skip
"""Configurations by name, each with something of its own that has to come back."""
WORTH = {"right": 1.0, "wrong": 0.0}


def rows_of(method: str) -> list[dict[str, Any]]:
    """12 prompts of three kinds, or 40 pairs."""
    if method == "grpo":
        kinds = ["right", "wrong", "telling"] * 4
        return [{"prompt": _asks(f"{kind} {n}"), "kind": kind} for n, kind in enumerate(kinds)]
    draw = random.Random(0)

    def says(letters: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": "".join(draw.choice(letters) for _ in range(8))}]

    return [{"prompt": _asks(f"Say {n}."), "chosen": says("aaxyz"), "rejected": says("bcdefg")} for n in range(40)]


def _asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def noisy(completions: list[str], kind: list[str], **_: Any) -> list[float]:
    """All right, all wrong, or the share of small letters, and a little chance of Python's own."""
    return [WORTH.get(one, _letters(text)) + random.random() / 100 for one, text in zip(kind, completions, strict=True)]


def watched(completions: list[str], **_: Any) -> list[float]:
    """The share of small letters, for the prompts that are watched and have no kind."""
    return [_letters(text) for text in completions]


def _letters(text: str) -> float:
    return sum(char.isascii() and char.islower() for char in text) / max(len(text), 1)


def planned(root: Path, base: Path, kind: str, **changes: Any) -> Any:
    """The folder of a run of ``kind``."""
    from praison_agent_rl.config import TrainConfig
    from praison_agent_rl.data import write_rows
    from praison_agent_rl.records import Plan
    from praison_agent_rl.runs import RunFolder, now, write_record

    config = TrainConfig.load({**KINDS[kind], **changes}, need_model=False, need_data=False)
    run = RunFolder.create(root)
    facts = {"rewards": [], "device": "cpu", "notes": [], "libraries": {}, "created": now()}
    write_rows(run.train_rows, rows_of(config.method))
    if config.method == "grpo":
        watch = [{"prompt": _asks(f"telling {n}"), "kind": "telling"} for n in range(100, 108)]
        write_rows(run.watch_rows, watch)
    write_record(run.plan_file, Plan(base=str(base), config=config.resolved(), **facts))
    return run


def train(run: Any, *, resume: bool = False) -> None:
    """The stage that trains, as the child process of a run does it."""
    from praison_agent_rl.rewards import Reward
    from praison_agent_rl.stages import run_stages

    run_stages(run, ["train"], [Reward(noisy, "noisy"), Reward(watched, "watched", weight=0.5)], resume=resume)


def forked(run: Any, work: Callable[[], None]) -> int:
    """Do ``work`` in a process of its own, which says in a file what went wrong; returns its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with run.root.with_suffix(".txt").open("a") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - this process ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finished(run: Any, work: Callable[[], None]) -> int:
    """Do ``work`` in a fork to its end; returns the exit code, below 0 for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(run, work), 0)[1])


def said_by(run: Any) -> str:
    """What the forks of a run have printed."""
    return str(run.root.with_suffix(".txt").read_text().strip())


# --- what is compared -------------------------------------------------------------------------------------------------


def result_of(run: Any) -> dict[str, Any]:
    """All that a run came to, but for times: the adapter's bytes, each step, the looks at watched prompts, the best."""
    looks = {event["step"]: event for _, event in run.events() if event["event"] == "watched"}
    best = sorted(run.best.glob("step-*/watched.json"))
    return {
        "adapter": (run.adapter / "adapter_model.safetensors").read_bytes().hex(),
        "steps": [_timeless(step) for step in run.steps()],
        "looks": [_timeless(looks[step]) for step in sorted(looks)],
        "best": [path.read_text() for path in best],
        "told": sorted({event["name"] for _, event in run.events() if event["event"] == "diagnosis"}),
    }


def _timeless(event: dict[str, Any]) -> dict[str, Any]:
    calls = {name: {**call, "seconds": 0} for name, call in event.get("calls", {}).items()}
    return {**event, "time": 0, "seconds": 0, "calls": calls, "best": None}  # what came later was the best already


def different(run: Any, whole: dict[str, Any]) -> list[str]:
    """In what a run differs from the one that nobody disturbed."""
    if not run.adapter.exists():
        return ["no adapter"]
    found = result_of(run)
    return [name for name, value in whole.items() if found[name] != value]


# --- kills ------------------------------------------------------------------------------------------------------------


def kills(folder: Path, base: Path, kind: str, count: int) -> Iterator[dict[str, Any]]:
    """Kill ``count`` runs of ``kind`` at random moments, every other one in a save, and go on with them to the end."""
    reference = planned(folder / f"{kind}-whole", base, kind)
    began = time.monotonic()
    assert finished(reference, lambda: train(reference)) == 0, said_by(reference)
    seconds, whole = time.monotonic() - began, result_of(reference)
    for number in range(count):
        run, chance = planned(folder / f"{kind}-{number}", base, kind), random.Random(f"{kind} {number}")
        killed = [_killed(run, chance, seconds, in_a_save=number % 2 == 1)]
        if chance.random() < 0.3:  # some are killed once more when they are gone on with
            killed.append(_killed(run, chance, seconds, in_a_save=chance.random() < 0.5))
        code = finished(run, lambda run=run: train(run, resume=True))  # type: ignore[misc]
        said = [event["text"] for _, event in run.events() if event["event"] == "note"]
        starts = [text for text in said if text.startswith(("going on from", "no whole checkpoint"))]
        yield {"kind": kind, "killed": killed, "starts": starts, "code": code, "different": different(run, whole)}
        shutil.rmtree(run.root)


def _killed(run: Any, chance: random.Random, seconds: float, *, in_a_save: bool) -> str:
    """What a run was doing when it was killed."""
    began = run.events_file.exists()
    pid = forked(run, lambda: train(run, resume=began))
    if in_a_save:
        _wait_in_a_save(run, pid, chance)
    else:
        time.sleep(chance.uniform(0.1, 0.9) * seconds)
    if os.waitpid(pid, os.WNOHANG)[0]:
        return "after its end"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return _phase(run)


def _wait_in_a_save(run: Any, pid: int, chance: random.Random) -> None:
    """Until a save of one kind is under way for the first, second or third time, and some thousandths of a second."""
    saves = [run.checkpoints / ".part"] * 3 + [run.best / ".part", Path(f"{run.adapter}.part")]
    part = chance.choice(saves)
    for _ in range(1 if part == saves[-1] else chance.randint(1, 3)):
        while not part.exists():
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.03))


def _phase(run: Any) -> str:
    """What a killed run was doing, by what it left."""
    if Path(f"{run.adapter}.part").exists():
        return "publishing the adapter"
    if (run.checkpoints / ".part").exists():
        return "saving a checkpoint"
    if (run.best / ".part").exists():
        return "keeping the best"
    if any(run.checkpoints.glob("checkpoint-*")):
        return "training, with a checkpoint"
    return "training, before the first checkpoint"


# --- all of it --------------------------------------------------------------------------------------------------------


def nursery(folder: Path) -> Path:
    """Import all that training needs, in one thread, and make the model; returns its folder."""
    import torch

    from praison_agent_rl import stages  # noqa: F401
    from praison_agent_rl.training import grpo, preferences  # noqa: F401
    from tests.conftest import make_tiny_model

    torch.set_num_threads(1)
    return make_tiny_model(folder / "model", tied=True)
