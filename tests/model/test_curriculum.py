"""A tiny policy learns from some prompts and not from others: these are drawn less, and a resumed run agrees."""

import json
import shutil
from collections import Counter

import pytest
import torch

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.curriculum import BEFORE, Group, groups_of
from praison_agent_rl.data import write_rows
from praison_agent_rl.report.numbers import as_json, gather
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.grpo import train_grpo
from tests.model.test_grpo import SETTINGS, adapter_of, lower_case, notes, plan, planned

KINDS = ["right", "wrong", "telling"] * 4  # 12 prompts, 2 in a batch: a pass is 6 steps
ROWS = [{"prompt": [{"role": "user", "content": f"{kind} {n}"}], "kind": kind} for n, kind in enumerate(KINDS)]
THREE_PASSES = {"max_steps": 18, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 0}


pytestmark = pytest.mark.usefixtures("one_thread")


def by_kind(completions, kind, **_):
    """All right, all wrong, or as the answer is."""
    return [
        {"right": 1.0, "wrong": 0.0}.get(one, score) for one, score in zip(kind, lower_case(completions), strict=True)
    ]


def trained(root, base, *, reward=by_kind, listener=None, **changes) -> RunFolder:
    run = planned(root, base, **{**THREE_PASSES, **changes})
    run.listener = listener
    train_grpo(run, ROWS, [Reward(reward, "by_kind")])
    return run


def drawn(run) -> dict[int, list[int]]:
    """The rows of each pass, in their order."""
    passes: dict[int, list[int]] = {}
    for group in groups_of(run.steps()):
        passes.setdefault(group.turn, []).append(group.row)
    return passes


def kinds(rows) -> Counter:
    return Counter(KINDS[row] for row in rows)


def shuffled(turn, count=12) -> list[int]:
    """TRL's order of the first pass, with the next seed for each further one."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(42 + turn)).tolist()


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = trained(tmp_path_factory.mktemp("whole") / "run", tiny_model)
    torch.set_num_threads(threads)
    return run


def test_prompts_that_teach_something_are_drawn_more_from_the_second_pass_on(whole):
    passes = drawn(whole)
    assert passes[0] == shuffled(0)
    assert all(len(rows) == 12 for rows in passes.values()) and sorted(passes) == [0, 1, 2]
    for turn in (1, 2):
        assert kinds(passes[turn])["telling"] > 4
        assert set(passes[turn]) >= {row for row, kind in enumerate(KINDS) if kind == "telling"}
        assert all(len({*passes[turn][at : at + 2]}) == 2 for at in range(0, 12, 2)), "two groups of one prompt"
    silent = [sum(group.silent for group in groups_of(whole.steps()) if group.turn == turn) for turn in range(3)]
    assert silent[0] >= 8 > max(silent[1:])


def test_what_a_step_reports_of_its_groups_is_what_its_reward_says(whole):
    for step in whole.steps():
        groups = [Group(*entry) for entry in step["signal"]]
        assert len(groups) == 2
        assert sum(group.mean for group in groups) / 2 == pytest.approx(step["reward"], abs=1e-5)
        assert step["frac_reward_zero_std"] == sum(group.silent for group in groups) / 2
        assert all(group.silent for group in groups if KINDS[group.row] != "telling")


def test_the_end_of_a_run_and_its_report_say_which_prompts_taught_nothing(whole):
    (said,) = [note for note in notes(whole) if "no signal" in note]
    assert said.startswith(
        "8 of 12 prompts carried no signal in their last group: 4 all right, 4 all wrong. A pass drew"
    )
    found = as_json(gather(whole))["curriculum"]
    assert (found["prompts"], found["silent"], found["right"], found["wrong"]) == (12, 8, 4, 4)
    assert found["draws"]["silent"] < 1 < found["draws"]["signal"]
    assert [one["groups"] for one in found["passes"]] == [12, 12, 12]


def test_without_a_curriculum_each_pass_is_in_the_order_of_trl(tiny_model, in_tmp):
    seen = set()

    def reward(completions, **columns):
        seen.update(columns)
        return by_kind(completions, **columns)

    run = trained(in_tmp / "run", tiny_model, reward=reward, curriculum=False, max_steps=12)
    assert drawn(run) == {0: shuffled(0), 1: shuffled(1)}
    assert "kind" in seen and "_row" not in seen
    assert [
        note for note in notes(run) if note.endswith("curriculum is off, so they were drawn as often as the others")
    ]


class Killed(BaseException):
    """What ends a run in the middle of a step."""


@pytest.mark.parametrize(
    ("changes", "at", "start"),
    [({}, 11, 8), ({"logging_steps": 3}, 9, 8)],  # within the second pass, which was drawn by what the first one saw
)
def test_a_run_that_was_killed_draws_what_it_would_have_drawn(tiny_model, in_tmp, whole, changes, at, start):
    def kill(event):
        if event["event"] == "step" and event["step"] >= at:
            raise Killed

    with pytest.raises(Killed):
        trained(in_tmp / "run", tiny_model, listener=kill, **changes)
    run = RunFolder(in_tmp / "run")
    events = [event for _, event in run.events()]
    assert events[-1]["step"] >= at > start
    # what came after the checkpoint is done again, and does not count
    events[-1]["signal"] = [[row, 0.0, 1.0, 0] for row in range(12)]
    run.events_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    train_grpo(run, ROWS, [Reward(by_kind, "by_kind")], resume=True)
    assert f"going on from checkpoint-{start}" in notes(run)
    assert drawn(run) == drawn(whole)
    got, wanted = adapter_of(run), adapter_of(whole)
    assert len(got) == 28 and [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"num_iterations": 2, "max_steps": 4}, {1: 2, 3: 2}),
        ({"gradient_accumulation_steps": 2, "max_steps": 2}, {1: 4, 2: 4}),  # 4 prompts are sampled for one update
        ({"steps_per_generation": 2, "max_steps": 4}, {1: 4, 3: 4}),
        # a pass is one batch of 8 prompts, and the other 4 are left out
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}, {1: 8, 3: 8}),
    ],
)
def test_a_group_counts_once_however_its_answers_are_used(tiny_model, in_tmp, changes, groups):
    run = trained(in_tmp / "run", tiny_model, **{"save_strategy": "no", **changes})
    assert {step["step"]: len(step["signal"]) for step in run.steps() if step["signal"]} == groups


def test_prompts_whose_recorded_answers_score_the_same_are_drawn_less_in_the_first_pass(tiny_model, in_tmp):
    run = planned(in_tmp / "run", tiny_model, max_steps=6, save_strategy="no")
    write_rows(run.answered, [{"prompt": row["prompt"], "texts": ["abc", "ABC"]} for row in ROWS])
    train_grpo(run, ROWS, [Reward(by_kind, "by_kind")])
    assert kinds(drawn(run)[0])["telling"] > 4
    (event,) = [event for _, event in run.events() if event["event"] == "curriculum"]
    known = [Group(*entry) for entry in event["recorded"]]
    assert known[:3] == [Group(0, 0.0, 1.0, BEFORE), Group(1, 0.0, 0.0, BEFORE), Group(2, 0.707107, 0.5, BEFORE)]
    assert "the recorded answers to 8 of 12 prompts score the same; these prompts are drawn less at first" in notes(run)


def test_recorded_answers_that_cannot_be_scored_end_no_run_and_say_nothing_of_their_prompts(tiny_model, in_tmp):
    def fails_on_recorded(completions, **_):
        if {"abc", "ABC"} & set(completions):
            raise KeyError("answer")
        return lower_case(completions)

    run = planned(in_tmp / "run", tiny_model, max_steps=1, save_strategy="no", reward_retries=0)
    write_rows(run.answered, [{"prompt": row["prompt"], "texts": ["abc", "ABC"]} for row in ROWS])
    train_grpo(run, ROWS, [Reward(fails_on_recorded, "by_kind")])
    assert [note for note in notes(run) if note.startswith("recorded answers cannot be scored")]
    assert drawn(run)[0] == shuffled(0)[:2]


def test_a_resumed_run_is_finished_with_what_it_knew_before(tiny_model, in_tmp, whole):
    shutil.copytree(whole.root, in_tmp / "again")
    run = RunFolder(in_tmp / "again")
    plan(run, tiny_model, TrainConfig.load({**SETTINGS, **THREE_PASSES}, need_model=False, need_data=False))
    shutil.rmtree(run.adapter)
    shutil.rmtree(run.checkpoints / "checkpoint-18", ignore_errors=True)
    train_grpo(run, ROWS, [Reward(by_kind, "by_kind")], resume=True)
    assert drawn(run) == drawn(whole)
