"""The model beneath an agent answers recorded prompts several times, and the best answer is set against the worst."""

from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.data import check_rows, load_rows
from praison_agent_rl.dataset_building import BuildOptions, build_dataset
from praison_agent_rl.errors import DataError, ModelError, RewardError
from praison_agent_rl.pairs.sampling import Sampling, sample_pairs
from tests.unit.test_dataset_building import TOOLS, question, run, user
from tests.unit.test_pairs import calls, corrected, round_of

SETTINGS = {"max_completion_length": 8, "max_seq_length": 1500, "temperature": 1.5}


def letters(completions: list[str], **columns: Any) -> list[float]:
    """The share of small letters."""
    return [sum(c.islower() for c in text) / max(len(text), 1) for text in completions]


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def of_run(completions: list[str], run: list[str], answer: list[str | None], **columns: Any) -> list[float | None]:
    """No score for any prompt but the first run's, whose correction it is told."""
    return [
        float(sum(map(ord, text))) if id == "r0" and gold == "yes" else None
        for text, id, gold in zip(completions, run, answer, strict=True)
    ]


@pytest.fixture
def sampling(in_tmp: Path, tiny_model: Path) -> dict[str, Any]:
    return {"model": str(tiny_model), "reward_funcs": letters, "samples": 4, "config": SETTINGS}


def recorded_runs() -> list[Any]:
    asked, tools = [user("2+3?")], round_of("t1", "5")
    with_tools = run("tools", calls=calls((asked, tools[0]), ([*asked, *tools], "Five.")), output="Five.")
    return [*(run(f"r{n}", question(n), answer="x", output="x") for n in range(4)), with_tools]


def test_the_best_of_the_sampled_answers_is_set_against_the_worst(sampling: dict[str, Any]) -> None:
    options = BuildOptions(kind="pairs", near_duplicates=None, min_margin=0.01)
    built = sample_pairs(Sampling(**sampling), out="d", options=options, runs=recorded_runs())
    rows = load_rows(built.rows)
    assert built.manifest.sources["sampled"] == len(rows) >= 3
    assert len(rows) + sum(built.manifest.left_out.values()) == 5
    for row in rows:
        texts = [row[side][0]["content"] for side in ("chosen", "rejected")]
        assert letters(texts) == pytest.approx([row["chosen_score"], row["rejected_score"]])
        assert row["margin"] == pytest.approx(row["chosen_score"] - row["rejected_score"]) and row["margin"] >= 0.01
    check_rows(rows, "cpo")
    by_run = {row["run"]: row for row in rows}
    assert by_run.keys() <= {"r0", "r1", "r2", "r3", "tools"}
    if "tools" in by_run:
        assert [message["role"] for message in by_run["tools"]["prompt"]] == ["user", "assistant", "tool"]
        assert by_run["tools"]["tools"] == TOOLS
    again = sample_pairs(Sampling(**sampling), out="e", options=options, runs=recorded_runs())
    assert again.manifest.fingerprint == built.manifest.fingerprint


def test_what_was_said_of_runs_makes_pairs_besides_and_equal_scores_make_none(sampling: dict[str, Any]) -> None:
    runs = [*recorded_runs(), corrected("c", question(9), "no", "yes")]
    built = sample_pairs(Sampling(**{**sampling, "reward_funcs": constant, "prompts": 3}), out="d", runs=runs)
    assert built.manifest.sources == {"correction": 1}
    left_out = built.manifest.left_out
    assert left_out["equal scores"] + left_out.get("equal", 0) == 3  # not of all six prompts


def test_rewards_are_given_the_columns_of_the_run_and_answers_without_a_score_are_no_side(sampling) -> None:
    runs = [corrected("r0", question(0), "no", "yes"), *recorded_runs()[1:]]
    options = BuildOptions(kind="pairs", near_duplicates=None, sources=())
    by_run = {"reward": of_run, "columns": {"run": "run"}}  # the column, and not the recorded run itself
    built = sample_pairs(Sampling(**{**sampling, "reward_funcs": by_run}), out="d", options=options, runs=runs)
    assert [row["run"] for row in load_rows(built.rows)] == ["r0"]
    assert built.manifest.left_out == {"no score": 4}


def test_what_cannot_be_is_said_before_a_model_loads(sampling: dict[str, Any]) -> None:
    runs = recorded_runs()
    with pytest.raises(RewardError, match="sampled answers need at least one reward or judge"):
        sample_pairs(Sampling(**{**sampling, "reward_funcs": []}), out="d", runs=runs)
    with pytest.raises(RewardError, match="cannot import 'nowhere'"):
        sample_pairs(Sampling(**{**sampling, "reward_funcs": ["nowhere:f"]}), out="d", runs=runs)
    with pytest.raises(ModelError, match="there are no weights at"):
        sample_pairs(Sampling(**{**sampling, "model": "./nowhere"}), out="d", runs=runs)
    with pytest.raises(RewardError, match="needs the column 'gold'"):
        sample_pairs(Sampling(**{**sampling, "reward_funcs": needs_gold}), out="d", runs=runs)
    with pytest.raises(DataError, match="no pair is left to train on"):
        sample_pairs(Sampling(**sampling), out="d", runs=[])
    assert not Path("d").exists()


def needs_gold(completions: list[str], gold: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def test_sampled_pairs_take_the_sides_that_the_prompts_of_other_pairs_have(sampling: dict[str, Any]) -> None:
    runs = [corrected(f"r{n}", question(n), "no", "yes") for n in range(8)]
    options = BuildOptions(kind="pairs", near_duplicates=None)
    before = build_dataset(out="d", options=options, runs=runs)
    sides = {row["run"]: row["split"] for row in load_rows(before.rows)}
    built = sample_pairs(Sampling(**sampling), out="d", options=options, runs=runs)
    assert built.manifest.sources["correction"] == 8 and built.manifest.sources["sampled"] >= 5
    assert all(row["split"] == sides[row["run"]] for row in load_rows(built.rows))
