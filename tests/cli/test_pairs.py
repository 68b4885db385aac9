"""``dataset build --kind pairs`` and ``doctor data``: counts, what is missing, and the next command."""

import json
import shutil
from pathlib import Path

import pytest

from praison_agent_rl.data import load_rows
from praison_agent_rl.data_advice import WANTED, examine_data
from praison_agent_rl.errors import DataError
from praison_agent_rl.records import Feedback
from praison_agent_rl.transcripts import TranscriptWriter
from tests.cli.test_cli import run as command
from tests.unit.test_dataset_building import question, recorded, run

STORE = Path(".praisonai/rl/transcripts")


def fill(*, prompts: int, corrections: int = 0, rated: int = 0, agent: str = "calc") -> None:
    """Record prompts of an agent; the first are corrected, the next have two answers with different ratings."""
    runs = [run(f"{agent}{n}", question(n), answer="no", agent=agent) for n in range(prompts)]
    places = range(corrections, corrections + rated)
    runs += [run(f"{agent}{n}b", question(n), answer="yes", agent=agent) for n in places]
    recorded(STORE, runs)
    said = [{"run": f"{agent}{n}", "correction": "yes"} for n in range(corrections)]
    said += [{"run": f"{agent}{n}{b}", "score": float(bool(b))} for n in places for b in ("", "b")]
    writer = TranscriptWriter(STORE)
    for facts in said:
        writer.feedback(Feedback(time=5.0, **facts).model_dump())
    writer.close()


def test_pairs_are_built_by_the_command_and_it_tells_what_came_of_what(in_tmp: Path) -> None:
    fill(prompts=12, corrections=6, rated=4)
    done = command("dataset", "build", "--kind", "pairs", "--agent", "calc", cwd=in_tmp)
    assert done.returncode == 0, done.stderr
    assert "10 pairs of 10 prompts from 16 runs" in done.stdout
    assert "6  from corrections" in done.stdout and "4  from ratings of answers" in done.stdout
    rows = load_rows(in_tmp / ".praisonai/rl/datasets/calc-pairs/rows.jsonl")
    assert len(rows) == 10 and {"chosen", "rejected", "split"} <= rows[0].keys()
    done = command("dataset", "build", "--kind", "pairs", "--source", "rating", "--out", "r", cwd=in_tmp)
    assert [row["source"] for row in load_rows(in_tmp / "r/rows.jsonl")] == ["rating"] * 4
    done = command("dataset", "build", "--agent", "calc", cwd=in_tmp)
    assert "12 prompts from 16 runs" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "pears"], "kind is 'pears', but must be one of 'prompts' or 'pairs'"),
        (["--kind", "pairs", "--source", "guess"], "sources"),
        (["--kind", "pairs", "--min-margin", "-1"], "min_margin is -1.0, but must be"),
        (["--kind", "pairs", "--min-margin", "2", "--source", "rating"], "no pair is left to train on"),
        (["--kind", "pairs", "--sample", "4"], "give --reward, --base-model too"),
        (["--kind", "pairs", "--set", "temperature=1"], "give --sample, --reward, --base-model too"),
        (["--sample", "4", "--reward", "a:b", "--base-model", "m"], "give --kind pairs"),
        (["--kind", "pairs", "--sample", "1", "--reward", "a:b", "--base-model", "m"], "samples is 1, but must be"),
        (["--kind", "pairs", "--sample", "4", "--reward", "no:b", "--base-model", "m"], "cannot import 'no'"),
        (["--kind", "pairs", "--sample", "4", "--reward", "json:dumps", "--base-model", "./m"], "no such folder"),
    ],
)
def test_wrong_options_give_one_plain_message_and_exit_code_2(in_tmp: Path, words: list[str], said: str) -> None:
    fill(prompts=4, rated=2)
    done = command("dataset", "build", *words, cwd=in_tmp)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (in_tmp / ".praisonai/rl/datasets").exists()


def test_answers_are_sampled_and_scored_by_the_command(in_tmp: Path, tiny_model: Path) -> None:
    fill(prompts=6)
    (in_tmp / "scores.py").write_text(
        "def letters(completions, **columns):\n    return [sum(c.islower() for c in text) for text in completions]\n"
    )
    words = ["--kind", "pairs", "--sample", "3", "--reward", "scores:letters", "--base-model", str(tiny_model)]
    words += ["--prompts", "4", "--set", "max_completion_length=8", "--set", "temperature=1.5"]
    done = command("dataset", "build", *words, cwd=in_tmp)
    assert done.returncode == 0, done.stderr
    rows = load_rows(in_tmp / ".praisonai/rl/datasets/all-pairs/rows.jsonl")
    assert 2 <= len(rows) <= 4 and {row["source"] for row in rows} == {"sampled"}
    assert all(row["chosen_score"] > row["rejected_score"] for row in rows)


def test_doctor_still_tells_of_the_machine(in_tmp: Path) -> None:
    done = command("doctor", cwd=in_tmp)
    assert done.returncode == 0 and "free disk here" in done.stdout and "recording and configuration" in done.stdout


def test_doctor_data_says_what_an_agents_runs_support_in_the_words_of_the_chooser(in_tmp: Path) -> None:
    fill(prompts=60, corrections=3, rated=2)
    done = command("doctor", "data", "--agent", "calc", cwd=in_tmp)
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert "calc: 62 recorded runs" in told
    assert '"I can score them programmatically": method grpo, ready' in told and "60 prompts, 40 wanted" in told
    assert "next: praison-agent-rl improve MODULE:AGENT --set method=grpo --reward MODULE:FUNCTION" in told
    assert '"I have chosen/rejected and want a scorer": method reward, not yet' in told
    assert '"I have chosen/rejected and want it lighter": method cpo, not yet' in told
    assert "5 pairs of 5 prompts, 40 prompts wanted; missing: 35 more prompts with a pair" in told
    assert "next: praison-agent-rl dataset build --kind pairs --agent calc --sample 4 --reward MODULE:FUNCTION" in told
    assert "3 runs: 3 pairs" in told and "4 runs with a score: 2 pairs" in told
    assert not (in_tmp / ".praisonai/rl/datasets").exists(), "nothing is kept"


def test_doctor_data_looks_at_each_agent_where_none_is_named(in_tmp: Path) -> None:
    fill(prompts=3)
    fill(prompts=WANTED + 5, corrections=WANTED, agent="co[ok]")
    done = command("doctor", "data", "--json", cwd=in_tmp)
    supplies = {supply["agent"]: supply for supply in json.loads(done.stdout)}
    assert list(supplies) == ["co[ok]", "calc"]
    assert [advice["ready"] for advice in supplies["co[ok]"]["advice"]] == [True, True, True]
    assert supplies["co[ok]"]["advice"][2]["command"] == "praison-agent-rl improve MODULE:AGENT --set method=cpo"
    assert (supplies["calc"]["prompts"], supplies["calc"]["pairs"]) == (3, {})
    assert "37 more prompts" in supplies["calc"]["advice"][0]["missing"]
    assert supplies["calc"]["advice"][0]["command"].startswith("praison-agent-rl doctor data --agent calc")


def test_one_long_conversation_is_not_enough_however_many_prompts_it_has(in_tmp: Path) -> None:
    recorded(STORE, [run(f"r{n}", question(n), answer="no", session="s") for n in range(50)])
    (supply,) = examine_data("calc")
    assert not supply.advice[0].ready
    assert "more conversations: of these prompts 0 can be held out, 8 are wanted" in supply.advice[0].missing


def test_where_nothing_is_recorded_it_is_said(in_tmp: Path) -> None:
    done = command("doctor", "data", cwd=in_tmp)
    assert done.returncode == 2 and "record an agent with agent.record()" in done.stderr
    fill(prompts=1)
    shutil.rmtree(STORE)
    with pytest.raises(DataError):
        examine_data("calc")
