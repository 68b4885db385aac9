"""What goes wrong in a tiny run is named, a healthy one names nothing, and the best adapter is what is published."""

import json
import math
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import write_rows
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.records import Plan
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder, now, write_record
from praison_agent_rl.training.grpo import PolicyTrainer, train_grpo
from tests.model.speaking import make_speaking_model, rows

SETTINGS = {
    "lora_r": 4,
    "lora_alpha": 8,
    "num_generations": 8,
    "per_device_train_batch_size": 32,
    "max_completion_length": 16,
    "learning_rate": 3e-3,
    "max_steps": 12,
    "save_strategy": "no",
}
PAY = {"cat": 1.0, "dog": 0.75, "bird": 0.5, "fish": 0.25}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def speaking_model(tmp_path_factory):
    return make_speaking_model(tmp_path_factory.mktemp("speaking") / "model")


def planned(root, base, *, watch=(), **changes) -> RunFolder:
    config = TrainConfig.load({**SETTINGS, **changes}, need_model=False, need_data=False)
    run = RunFolder.create(root)
    facts = {"rewards": [], "device": "cpu", "notes": [], "libraries": {}, "created": now()}
    write_record(run.plan_file, Plan(base=str(base), config=config.resolved(), **facts))
    if watch:
        write_rows(run.watch_rows, list(watch))
    return run


def events(run, kind):
    return [event for _, event in run.events() if event["event"] == kind]


def told(run):
    return {event["name"]: event for event in events(run, "diagnosis")}


def notes(run):
    return [event["text"] for event in events(run, "note")]


def first_word(completions, **_):
    """What the first word of an answer is worth."""
    return [PAY.get((text.split() or [""])[0], 0.0) for text in completions]


# --- planted pathologies ----------------------------------------------------------------------------------------------


class Calls:
    """Counts the steps in which a reward was asked, whatever became of it."""

    def __init__(self, wrong, start):
        self.wrong, self.start, self.seen = wrong, start, 0
        self.reads = None

    def __call__(self, completions, trainer_state, **_):
        if trainer_state.global_step >= self.start:
            return self.wrong(first_word(completions))
        return first_word(completions)


def constant(completions, **_):
    return [0.5] * len(completions)


def rare(completions, **_):
    return [float(place == 0) for place in range(len(completions))]  # one answer of each step


def words(completions, **_):
    return [len(text.split()) / 16 for text in completions]


def goods(completions, **_):
    return [text.split().count("good") / max(len(text.split()), 1) for text in completions]


def hang(scores):
    time.sleep(30)
    return scores


def nan(completions, trainer_state, **_):
    return Calls(lambda scores: [math.nan] * len(scores), 3)(completions, trainer_state)


def hanging(completions, trainer_state, **_):
    return Calls(hang, 3)(completions, trainer_state)


def wrong_length(completions, trainer_state, **_):
    return Calls(lambda scores: scores[:-1], 3)(completions, trainer_state)


LONG = [{"prompt": [{"role": "user", "content": "the " * 80 + "say cat"}]}] * 20
FAILURES = {"max_steps": 5, "reward_retries": 0, "reward_failures": 1.0}

PLANTED = {
    "constant": (constant, {"max_steps": 7}, {"no signal"}, "all answers got the same score"),
    "sparse": (rare, {"max_steps": 7}, {"sparse reward"}, "6 of the last 192 answers (3.1%)"),
    "hackable by length": (
        words, {"max_completion_length": 24, "learning_rate": 1e-2}, {"hacking"}, "hackable by length",
    ),
    "hackable by repeating a word": (
        goods, {"max_completion_length": 24, "learning_rate": 1e-2}, {"hacking"}, "hackable by repeating a word",
    ),
    "NaN from step k": (nan, FAILURES, {"reward failures"}, "NaN"),
    "hanging": (hanging, {**FAILURES, "reward_timeout": 0.2}, {"reward failures"}, "hanging"),
    "wrong length at step k": (wrong_length, FAILURES, {"reward failures"}, "wrong_length"),
    "entropy collapse by a high learning rate": (
        # by these draws the policy collapses; by others it may do nothing but the wrong thing
        first_word, {"learning_rate": 0.3, "sampler": "generate"}, {"learning rate too high", "entropy collapse"}, "",
    ),
    "over-long prompts": (
        first_word, {"max_seq_length": 64, "max_steps": 1}, {"long prompts"}, "longer than 48 tokens",
    ),
    "all truncated": (
        first_word, {"max_completion_length": 2, "max_steps": 7}, {"truncated"}, "cut off at max_completion_length (2)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_pathology_is_named(speaking_model, in_tmp, planted):
    reward, changes, wanted, said = PLANTED[planted]
    run = planned(in_tmp / "run", speaking_model, **changes)
    given = rows() + (LONG if planted == "over-long prompts" else [])
    failed = None
    try:
        train_grpo(run, given, [Reward(reward, reward.__name__)])
    except TrainingFailed as error:
        failed = str(error)
    found = told(run)
    named = wanted & found.keys()
    assert named, f"told were {found}"
    assert any(said in found[name]["text"] for name in named)
    assert all(event["advice"] and event["step"] <= changes.get("max_steps", 12) for event in found.values())
    assert (failed is not None) == (planted == "constant"), failed


def test_a_healthy_run_names_nothing_and_shows_what_it_gained(speaking_model, in_tmp):
    # 24 watched prompts, as by default
    run = planned(in_tmp / "run", speaking_model, watch=rows()[72:], max_steps=16, watch_steps=8)
    train_grpo(run, rows()[:72], [Reward(first_word, "first_word")])
    assert told(run) == {}
    rewards = [step["reward"] for step in run.steps()]
    assert sum(rewards[-4:]) > sum(rewards[:4])
    looks = events(run, "watched")
    assert [look["best"] for look in looks][:2] == [False, True]  # the start is no adapter
    assert [look["step"] for look in looks] == [0, 8, 16]
    assert all(len(look["totals"]) == 24 for look in looks)
    assert looks[-1]["gain"] == pytest.approx(looks[-1]["total"] - looks[0]["total"]) and looks[-1]["gain"] > 0


# --- the best checkpoint ----------------------------------------------------------------------------------------------


def good_until(step):
    """A reward that turns round: what was good is bad from ``step`` on, for the answers of training alone."""

    def reward(completions, trainer_state=None, **_):
        sign = -1.0 if trainer_state is not None and trainer_state.global_step >= step else 1.0
        return [sign * score for score in first_word(completions)]

    return reward


TURNING = {
    "learning_rate": 1e-2,
    "reward_cache": False,
    "max_steps": 12,
    "watch_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.fixture(scope="module")
def turned(speaking_model, tmp_path_factory):
    """A run that was good at its middle and is bad at its end, of which two checkpoints are kept."""
    torch.set_num_threads(1)
    run = planned(tmp_path_factory.mktemp("turned") / "run", speaking_model, watch=rows()[72:], **TURNING)
    train_grpo(run, rows()[:72], [Reward(good_until(5), "turning")])
    return run


def adapter_of(folder):
    return load_file(folder / "adapter_model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_step_by_the_watched_prompts_is_published_and_not_the_last(turned):
    looks = {look["step"]: look for look in events(turned, "watched")}
    best = max(looks.values(), key=lambda look: (look["gain"], look["step"]))["step"]
    assert 4 <= best <= 8 and looks[12]["gain"] < looks[best]["gain"]
    # long gone from among the checkpoints
    kept = {path.name for path in turned.checkpoints.glob("checkpoint-*")}
    assert kept == {"checkpoint-10", "checkpoint-12"}
    (folder,) = turned.best.iterdir()
    assert folder.name == f"step-{best}" and same(adapter_of(turned.adapter), adapter_of(folder))
    assert not same(adapter_of(turned.adapter), adapter_of(turned.checkpoints / "checkpoint-12"))
    assert any(text.startswith(f"the adapter is that of step {best}, the best one") for text in notes(turned))


def test_the_published_weights_are_those_of_that_step(turned, speaking_model, in_tmp):
    best = json.loads(next(turned.best.iterdir()).joinpath("watched.json").read_text())["step"]
    again = planned(in_tmp / "again", speaking_model, watch=(), **{**TURNING, "max_steps": best})
    train_grpo(again, rows()[:72], [Reward(good_until(5), "turning")])  # not watched: the same random numbers
    assert same(adapter_of(again.adapter), adapter_of(turned.adapter))


@pytest.mark.parametrize("last", [10, 12])
def test_a_resumed_run_still_publishes_the_best(turned, in_tmp, last):
    shutil.copytree(turned.root, in_tmp / "copy")
    run = RunFolder(in_tmp / "copy")
    shutil.rmtree(run.adapter)
    if last == 10:
        shutil.rmtree(run.checkpoints / "checkpoint-12")
        lines = [line for line in run.events_file.read_text().splitlines() if json.loads(line).get("step", 0) <= 10]
        run.events_file.write_text("".join(line + "\n" for line in lines))
    train_grpo(run, rows()[:72], [Reward(good_until(5), "turning")], resume=True)
    assert same(adapter_of(run.adapter), adapter_of(turned.adapter))
    assert {look["step"] for look in events(run, "watched")} == {0, 2, 4, 6, 8, 10, 12}


def test_half_a_kept_adapter_does_not_count(turned, in_tmp):
    from praison_agent_rl.training.best import best_of

    run = RunFolder(in_tmp / "copy")
    shutil.copytree(turned.best, run.best)
    whole = best_of(run)
    (run.best / "step-99").mkdir()
    (run.best / "step-99" / "adapter_model.safetensors").write_bytes(b"half")
    shutil.copytree(whole.folder, run.best / ".part")
    assert best_of(run) == whole


# --- early ends -------------------------------------------------------------------------------------------------------


def test_a_run_whose_weights_become_nan_ends_there_with_the_best_from_before(speaking_model, in_tmp, monkeypatch):
    step = PolicyTrainer.training_step

    def poisoned(self, *given, **options):
        loss = step(self, *given, **options)
        if self.state.global_step == 4:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(PolicyTrainer, "training_step", poisoned)
    changes = {"watch": rows()[72:], "watch_steps": 2, "learning_rate": 1e-2}
    run = planned(in_tmp / "run", speaking_model, **changes)
    train_grpo(run, rows()[:72], [Reward(first_word, "first_word")])
    assert told(run)["nan"]["step"] == 5 and told(run)["nan"]["severity"] == "stop"
    assert [step["step"] for step in run.steps()] == [1, 2, 3, 4, 5]
    assert all(bool(tensor.isfinite().all()) for tensor in adapter_of(run.adapter).values())
    assert any("the adapter is that of step 4" in text for text in notes(run))

    bare = planned(in_tmp / "bare", speaking_model, learning_rate=1e-2)
    with pytest.raises(TrainingFailed, match="trained tensors hold NaN or infinity"):
        train_grpo(bare, rows()[:72], [Reward(first_word, "first_word")])
    assert told(bare)["nan"]["step"] == 5 and not bare.adapter.exists()


def test_a_plateau_is_a_normal_end(speaking_model, in_tmp):
    run = planned(in_tmp / "run", speaking_model, watch=rows()[72:], watch_steps=1, patience=2, learning_rate=1e-9)
    train_grpo(run, rows()[:72], [Reward(first_word, "first_word")])
    assert told(run)["plateau"]["severity"] == "stop"
    assert len(run.steps()) == told(run)["plateau"]["step"] < 12 and run.adapter.exists()


def test_a_long_row_without_signal_ends_a_run_that_has_nothing_to_learn(speaking_model, in_tmp):
    small = {"num_generations": 2, "per_device_train_batch_size": 8, "max_completion_length": 4}  # 4 groups a step
    run = planned(in_tmp / "run", speaking_model, max_steps=40, save_strategy="steps", save_steps=50, **small)
    with pytest.raises(TrainingFailed, match="no step of 20 had a signal"):
        train_grpo(run, rows(), [Reward(constant, "constant")])
    assert [path.name for path in run.checkpoints.glob("checkpoint-*")] == ["checkpoint-20"]
    with pytest.raises(TrainingFailed, match="no step of 20 had a signal"):  # and is not trained on when resumed
        train_grpo(run, rows(), [Reward(constant, "constant")], resume=True)
    assert len(run.steps()) == 20


def test_running_out_of_memory_says_what_to_lower(speaking_model, in_tmp, monkeypatch):
    def full(self, *_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 99 bytes")

    monkeypatch.setattr(PolicyTrainer, "training_step", full)
    run = planned(in_tmp / "run", speaking_model)
    with pytest.raises(TrainingFailed, match=r"1\. per_device_train_batch_size 32 -> 16"):
        train_grpo(run, rows(), [Reward(constant, "constant")])
    assert told(run)["out of memory"]["severity"] == "stop" and not run.adapter.exists()


def test_an_unwatched_run_is_not_diagnosed(speaking_model, in_tmp):
    run = planned(in_tmp / "run", speaking_model, watch=rows()[72:], max_steps=2)
    plan = run.plan
    write_record(run.plan_file, plan.model_copy(update={"config": {**plan.config, "watch": False}}))
    train_grpo(run, rows()[:72], [Reward(first_word, "first_word")])
    assert events(run, "watched") == [] and "silent" not in run.steps()[0] and not run.best.exists()
