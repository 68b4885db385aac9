"""What earlier versions were judged on is asked again, each prompt once, and never what is trained on now."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl import past
from praison_agent_rl.data import write_rows
from praison_agent_rl.errors import ModelError
from praison_agent_rl.past import (
    EarlierPrompts,
    choose_earlier,
    earlier_prompts,
    recorded_answers,
    recorded_incumbent,
)
from praison_agent_rl.records import Plan, PlannedReward
from praison_agent_rl.runs import RunFolder, now, write_record


def reward(spec: str = "m:f", weight: float = 1.0) -> PlannedReward:
    return PlannedReward(spec=spec, name=spec[-1], weight=weight, prompts="text", completions="text")


def rows(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "extra": number} for number, text in enumerate(texts)]


def chosen(earlier: list[EarlierPrompts], train=(), held_out=(), rewards=(), seed: int = 0):
    found = choose_earlier(earlier, train, held_out, rewards=rewards, seed=seed)
    return [(row["_version"], row["prompt"]) for row in found.rows], found


def test_each_prompt_counts_for_the_newest_version_that_had_it() -> None:
    asked, found = chosen(
        [EarlierPrompts("v1", rows("a", "b", "c"), [reward()]), EarlierPrompts("v2", rows("B ", "d"), [reward()])]
    )
    assert sorted(asked) == [("v1", "a"), ("v1", "c"), ("v2", "B "), ("v2", "d")]
    assert list(found.rewards) == ["v1", "v2"] and found.notes == []
    assert all("extra" in row for row in found.rows), "rewards may need every column"


def test_the_same_prompt_judged_by_other_rewards_is_another_question() -> None:
    asked, _ = chosen(
        [EarlierPrompts("v1", rows("a"), [reward("m:f")]), EarlierPrompts("v2", rows("a"), [reward("m:g")])]
    )
    assert sorted(asked) == [("v1", "a"), ("v2", "a")]


def test_a_prompt_that_is_trained_on_now_judges_no_more_whatever_the_instructions_were() -> None:
    def with_system(text: str) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "system", "content": text}, {"role": "user", "content": "a"}]}]

    asked, found = chosen([EarlierPrompts("v1", [*with_system("Old."), *rows("b")], [reward()])], with_system("New."))
    assert asked == [("v1", "b")]
    assert found.notes == ["1 held-out prompts of earlier versions are trained on now and judge no more"]


def test_what_is_held_out_now_by_the_same_rewards_is_not_asked_twice() -> None:
    past_ = [EarlierPrompts("v1", rows("a", "b"), [reward()])]
    assert chosen(past_, held_out=rows("a"), rewards=[reward()])[0] == [("v1", "b")]
    assert chosen(past_, held_out=rows("a"), rewards=[reward(weight=2.0)])[0] == [("v1", "a"), ("v1", "b")]


def test_of_many_prompts_200_are_drawn_by_the_seed_and_it_is_said() -> None:
    many = [EarlierPrompts(f"v{n}", rows(*[f"{n} {i}" for i in range(150)]), [reward()]) for n in (1, 2)]
    one, found = chosen(many)
    assert len(one) == 200 and one == chosen(many)[0] != chosen(many, seed=1)[0]
    assert found.notes == ["of 300 prompts of earlier versions 200 are asked, drawn by seed 0"]
    assert 70 < Counter(version for version, _ in one)["v1"] < 130


def test_a_version_that_was_judged_on_nothing_has_no_prompts(tmp_path: Path) -> None:
    assert earlier_prompts("v1", tmp_path) is None
    run = RunFolder(tmp_path)
    plan = Plan(base="b", config={}, rewards=[reward()], device="cpu", notes=[], libraries={}, created=now())
    write_record(run.plan_file, plan)
    write_rows(run.held_out_rows, [])
    assert earlier_prompts("v1", tmp_path) is None
    write_rows(run.held_out_rows, rows("a"))
    assert earlier_prompts("v1", tmp_path) == EarlierPrompts("v1", rows("a"), [reward()])


# --- the incumbent ----------------------------------------------------------------------------------------------------


class Helper:
    name = "helper"
    llm = "openai/big-model"


def recorded(number: int, *, model: str = "big-model", calls: int = 1, **changes: Any) -> dict[str, Any]:
    reply = {"content": f"answer {number}"}
    made = {"id": f"run{number}", "error": None, "calls": [{"reply": reply, "model": model}] * calls}
    return {**made, **changes}


def held_out(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"q{number}", "run": f"run{number}"} for number in range(count)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    monkeypatch.setattr(past, "iter_run_dicts", lambda folder: iter(runs))

    def unknown(agent: Any) -> str:
        raise ModelError("a closed model")

    monkeypatch.setattr(past, "weights_beneath", unknown)
    return runs


def test_recorded_answers_of_another_model_are_to_be_beaten(store: list, tmp_path: Path) -> None:
    store += [recorded(number) for number in range(12)]
    found, notes = recorded_incumbent(Helper(), "owner/base", held_out(10), store=tmp_path)
    assert found is not None and found.model == "openai/big-model"
    assert found.answers == {number: f"answer {number}" for number in range(10)}
    assert "its recorded answers to 10 of 10 held-out prompts are to be beaten too" in notes[0]


def test_only_plain_answers_of_the_model_that_answers_now_count(store: list, tmp_path: Path) -> None:
    store += [recorded(number) for number in range(8)]
    store += [recorded(8, model="other"), recorded(9, calls=2), recorded(10, error="boom"), recorded(11, calls=0)]
    store += [recorded(12, calls=0) | {"calls": [{"reply": {"content": None}, "model": "big-model"}]}]
    found, _ = recorded_incumbent(Helper(), "owner/base", held_out(14), store=tmp_path)
    assert found is not None and sorted(found.answers) == list(range(8))


def test_too_few_recorded_answers_are_said_to_be_too_few(store: list, tmp_path: Path) -> None:
    store += [recorded(number) for number in range(7)]
    found, notes = recorded_incumbent(Helper(), "owner/base", held_out(10), store=tmp_path)
    assert found is None
    assert "7 of its answers to the 10 held-out prompts are recorded, so the new model is compared with the" in notes[0]


def test_an_agent_that_runs_on_the_base_itself_has_no_other_incumbent(
    store: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store += [recorded(number) for number in range(12)]
    monkeypatch.setattr(past, "weights_beneath", lambda agent: "owner/base")
    assert recorded_incumbent(Helper(), "owner/base", held_out(10), store=tmp_path) == (None, [])


# --- several answers to one prompt ------------------------------------------------------------------------------------


def answered(prompt: str, reply: str, **changes: Any) -> dict[str, Any]:
    call = {"reply": {"content": reply}, "model": "big-model", "messages": [{"role": "user", "content": prompt}]}
    return {"id": "r", "error": None, "calls": [call | changes]}


def test_different_answers_of_the_model_that_is_trained_are_kept_by_prompt(
    store: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past, "weights_beneath", lambda agent: "owner/base")
    store += [answered("q0", "a"), answered("Q0 ", "b"), answered("q0", "a"), answered("not trained on", "a")]
    store += [answered("q1", "a"), answered("q1", "a"), answered("q2", "a"), answered("q2", "b", model="other")]
    store += [answered("q2", "c") | {"error": "boom"}, {"id": "r", "error": None, "calls": []}]
    found = recorded_answers(Helper(), "owner/base", held_out(4), store=tmp_path)
    assert found == [{"prompt": "q0", "texts": ["a", "b"]}], "one answer twice is one answer"


def test_answers_of_another_model_say_nothing_of_what_the_trained_one_can_do(store: list, tmp_path: Path) -> None:
    store += [answered("q0", "a"), answered("q0", "b")]
    assert recorded_answers(Helper(), "owner/base", held_out(4), store=tmp_path) == []
