"""Recorded runs become rows, every run is accounted for, and no prompt ever changes its side."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from pydantic import ValidationError

from praison_agent_rl.data import check_rows, fingerprint, load_rows, split_rows
from praison_agent_rl.dataset_building import BuildOptions, build_dataset
from praison_agent_rl.dataset_building.near_duplicates import NearDuplicates
from praison_agent_rl.dataset_building.report import Manifest
from praison_agent_rl.errors import DataError
from praison_agent_rl.records import Call, Feedback, Run
from praison_agent_rl.runs import read_record
from praison_agent_rl.transcripts import TranscriptWriter

SYSTEM = {"role": "system", "content": "Answer briefly."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"b": {}}}}}]
TOPICS = ("harbour", "violin", "glacier", "pepper", "lantern", "meadow", "turbine", "walnut", "copper", "ribbon")
EXACT = BuildOptions(near_duplicates=None)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def run(id, *messages, answer="Yes.", **facts):
    """A run of one call; a text stands for a user message after the usual system prompt."""
    prompt = [SYSTEM, *(user(message) if isinstance(message, str) else message for message in messages)]
    first = {"id": f"c-{id}", "run": id, "time": 1.0, "messages": prompt, "reply": said(answer)}
    defaults = {"agent": "calc", "time": 1.0, "calls": [Call(**first)]}
    return Run(**{"id": id, **defaults, **facts})


def question(number):
    """Texts that share hardly a word."""
    words = random.Random(number).choices([f"{topic}{number}" for topic in TOPICS], k=20)
    return " ".join(words)


def rated(id, **said):
    return [Feedback(run=id, time=2.0, **said)]


def built(tmp_path, runs, options=EXACT, name="dataset"):
    return build_dataset(out=tmp_path / name, options=options, runs=runs)


def rows_of(dataset):
    return load_rows(dataset.rows)


def sides_of(dataset):
    return {row["run"]: row["split"] for row in rows_of(dataset)}


# --- rows --------------------------------------------------------------------------------------------------------


def test_a_row_is_the_prompt_of_the_first_call_as_it_was_sent(tmp_path):
    first = Call(id="c1", time=1.0, messages=[SYSTEM, user("2+3?")], tools=TOOLS, reply={"role": "assistant"})
    second = Call(id="c2", time=2.0, messages=[SYSTEM, user("2+3?"), said("thinking")], reply=said("5"))
    dataset = built(tmp_path, [run("r1", calls=[first, second]), run("r2", "another")])
    row = next(row for row in rows_of(dataset) if row["run"] == "r1")
    assert row == {
        "prompt": [SYSTEM, user("2+3?")],
        "tools": TOOLS,
        "run": "r1",
        "agent": "calc",
        "split": row["split"],
    }
    assert list(row["prompt"][0]) == ["role", "content"]


def test_rows_without_tools_have_no_column_for_them(tmp_path):
    assert all("tools" not in row for row in rows_of(built(tmp_path, [run("r1", "a"), run("r2", "b")])))


def test_every_run_is_accounted_for(tmp_path):
    blank = run("blank", "  ")
    orphan = run("orphan", user("q"), {"role": "tool", "tool_call_id": "x", "content": "5"})
    ends = run("ends", user("q"), said("a"))
    half = run("half", "\ud83d")
    given = [
        run("ok1", "one"),
        run("ok2", "two"),
        run("same", "  ONE "),
        run("error", "three", error="TimeoutError: slow"),
        run("team", "four", calls=[]),
        run("long", "x" * 200),
        blank,
        orphan,
        ends,
        half,
    ]
    manifest = built(tmp_path, given, BuildOptions(near_duplicates=None, max_prompt_chars=100)).manifest
    assert manifest.left_out == {
        "duplicate": 1,
        "failed": 1,
        "no call": 1,
        "too long": 1,
        "empty": 1,
        "malformed": 3,
    }
    assert (manifest.runs, manifest.train + manifest.held_out) == (10, 2)
    assert manifest.malformed_example is not None and "orphan" in manifest.malformed_example


def test_the_report_tells_each_reason_and_is_stored(tmp_path):
    dataset = built(tmp_path, [run("r1", "one"), run("r2", "two"), run("r3", "one")])
    assert str(dataset).splitlines()[:5] == [
        "2 prompts from 3 runs (3 calls)",
        "          1  to train on",
        "          1  held out",
        "1 runs were left out, which",
        "          1  have the prompt of an earlier run, case and white space aside",
    ]
    assert str(dataset).rpartition("\n")[0] in (dataset.rows.parent / "README.md").read_text()
    assert read_record(dataset.rows.parent / "manifest.json", Manifest) == dataset.manifest


def test_tools_count_towards_the_length(tmp_path):
    call = Call(id="c", time=1.0, messages=[user("q")], tools=TOOLS, reply=said("a"))
    options = BuildOptions(near_duplicates=None, max_prompt_chars=50)
    dataset = built(tmp_path, [run("r1", "q1"), run("r2", "q2"), run("r3", calls=[call])], options)
    assert dataset.manifest.left_out == {"too long": 1}


def test_the_fingerprint_is_that_of_the_rows_as_they_are_read(tmp_path):
    odd = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call_of("c1", '{"b": [1, {"z": null, "a": "\\u00e9"}]}')],
    }
    given = [
        run("r1", user("Grüße 🙂 今日は"), odd, {"role": "tool", "tool_call_id": "c1", "content": "5"}),
        run("r2", {"content": "content first", "role": "user"}),
        run("r3", "three", feedback=rated("r3", correction="3", score=0.1), tags=["b", "a"]),
        run("r4", "Three", feedback=rated("r4", correction="4")),
        run("r5", "two", calls=[Call(id="c", time=1.0, messages=[user("x")], tools=TOOLS, reply=said("y"))]),
    ]
    options = BuildOptions(near_duplicates=None, columns=("answer", "rating", "tags", f"{__name__}:nested"))
    dataset = built(tmp_path, given, options)
    assert dataset.manifest.fingerprint == fingerprint(rows_of(dataset))
    assert len(rows_of(dataset)) == 4


def test_a_correction_that_says_nothing_is_no_answer_to_learn_and_takes_no_real_one_away(tmp_path):
    given = [
        run("r1", "one", feedback=[*rated("r1", correction="uno"), *rated("r1", correction=" <|im_end|>")]),
        run("r2", "two", feedback=rated("r2", correction="   ", score=0.5)),
    ]
    dataset = built(tmp_path, given, BuildOptions(near_duplicates=None, columns=("answer", "rating")))
    assert {row["prompt"][-1]["content"]: (row.get("answer"), row.get("rating")) for row in rows_of(dataset)} == {
        "one": ("uno", None),
        "two": (None, 0.5),
    }


def call_of(id, arguments):
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def nested(run):
    return {"size": {"z": len(run.calls), "a": [1.5, True, None]}, "zeta": "end", "Alpha": 1}


SHAPES = [{"a": 1}, {"b": "x"}, {"t": 5}, {"t": "2025-08-01"}, '{"as": "text"}', {}, {"deep": {"n": [1, "1", None]}}]


def with_shapes():
    for number, arguments in enumerate(SHAPES):
        ask = {"role": "assistant", "content": None, "tool_calls": [call_of(f"c{number}", arguments)]}
        result = {"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"}
        yield run(f"r{number}", user(question(number)), ask, result)
    yield run("parts", user([{"type": "text", "text": "look"}, {"type": "text", "text": "here"}]))


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_tool_calls_of_any_shape_come_back_unchanged(tmp_path, format):
    datasets = pytest.importorskip("datasets")
    dataset = built(tmp_path, with_shapes(), BuildOptions(near_duplicates=None, format=format))
    sent = {run.id: run.calls[0].messages for run in with_shapes()}
    assert {row["run"]: row["prompt"] for row in rows_of(dataset)} == sent
    kind = {"jsonl": "json"}.get(format, format)
    loaded = datasets.load_dataset(kind, data_files=str(dataset.rows), split="train", cache_dir=str(tmp_path / "cache"))
    assert {row["run"]: row["prompt"] for row in loaded.to_list()} == sent


def test_what_is_built_can_be_trained_on(tmp_path):
    dataset = built(tmp_path, [run(f"r{n}", question(n)) for n in range(20)])
    train, held_out = split_rows(rows_of(dataset), 0.2)
    assert (len(train), len(held_out)) == (16, 4)
    check_rows(train, "grpo")


def test_another_format_takes_the_place_of_the_old_rows(tmp_path):
    given = [run("r1", "one"), run("r2", "two")]
    old = built(tmp_path, given)
    new = built(tmp_path, given, BuildOptions(near_duplicates=None, format="parquet"))
    assert new.rows.exists() and not old.rows.exists()


def test_no_row_to_train_on_is_an_error_with_the_reasons(tmp_path):
    with pytest.raises(DataError) as caught:
        built(tmp_path, [run("r1", "one", error="E: no")])
    assert "no prompt is left to train on" in str(caught.value) and "ended with an error" in str(caught.value)
    assert not (tmp_path / "dataset" / "rows.jsonl").exists()


# --- choosing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"agent": "calc"}, {"a", "b"}),
        ({"agent": "c*"}, {"a", "b", "c"}),
        ({"since": 2.0}, {"b", "c"}),
        ({"until": 2.0}, {"a"}),
        ({"tags": ("live", "eu")}, {"b"}),
        ({"min_rating": 0.5}, {"c"}),
        ({"filter": f"{__name__}:is_late"}, {"b", "c"}),
    ],
)
def test_runs_are_chosen_by_the_options(tmp_path, options, kept):
    given = [
        run("a", "one", time=1.0, feedback=rated("a", score=0.1)),
        run("b", "two", time=2.0, tags=["live", "eu"]),
        run("c", "three", time=3.0, agent="cook", tags=["live"], feedback=rated("c", score=0.5)),
    ]
    dataset = built(tmp_path, given, BuildOptions(near_duplicates=None, held_out=0, **options))
    assert set(sides_of(dataset)) == kept


def is_late(run):
    return run.time >= 2.0


def fails(run):
    raise KeyError("gold")


def completion(run):
    return {"completion": "x"}


def own(run):
    return {"run": "x"}


def no_name(run):
    return {1: "x"}


def no_dict(run):
    return ["x"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"filter": f"{__name__}:fails"}, "failed on run 'r1': KeyError: 'gold'"),
        ({"columns": (f"{__name__}:completion",)}, "TRL drops it before rewards see it. Give it another name"),
        ({"columns": (f"{__name__}:own",)}, "'run' for run 'r1': every row has a column of this name"),
        ({"columns": (f"{__name__}:no_name",)}, "returned the column 1 for run 'r1': a column's name must be a text"),
        ({"columns": (f"{__name__}:no_dict",)}, "returned ['x'] for run 'r1'; it must return a dict"),
        ({"columns": ("nowhere:f",)}, "option columns: cannot import 'nowhere' for function"),
        ({"filter": f"{__name__}:missing"}, "option filter:"),
    ],
)
def test_a_function_that_is_wrong_ends_the_build_with_its_name(tmp_path, options, says):
    with pytest.raises(DataError) as caught:
        built(tmp_path, [run("r1", "one"), run("r2", "two")], BuildOptions(near_duplicates=None, **options))
    assert says in str(caught.value)


def test_an_unknown_column_is_named_at_once():
    with pytest.raises(ValidationError, match="column 'anser' is unknown; give answer, rating, tags"):
        BuildOptions(columns=("anser",))


def test_the_last_feedback_counts_and_a_duplicate_lends_its_answer(tmp_path):
    twice = [Feedback(run="a", time=2.0, score=1.0), Feedback(run="a", time=3.0, score=0.0, label="bad")]
    given = [
        run("a", "one", feedback=twice),
        run("b", "ONE", feedback=rated("b", correction="uno", score=0.9)),
        run("c", "two"),
    ]
    rows = {row["run"]: row for row in rows_of(built(tmp_path, given))}
    assert (rows["a"]["answer"], rows["a"]["rating"]) == ("uno", 0.0)
    assert "answer" not in rows["c"]


def test_a_column_that_json_cannot_hold_leaves_the_run_out(tmp_path):
    options = BuildOptions(near_duplicates=None, columns=(f"{__name__}:bytes_for_r1",))
    dataset = built(tmp_path, [run("r1", "one"), run("r2", "two"), run("r3", "three")], options)
    assert dataset.manifest.left_out == {"column": 1} and "r1" not in sides_of(dataset)
    assert "1  have a column that cannot be trained on" in str(dataset) and "run r1: 'raw' holds" in str(dataset)


def bytes_for_r1(run):
    return {"raw": b"x"} if run.id == "r1" else {}


ODD_VALUES = [float("nan"), [float("inf")], 10**30, "\ud800", {1: {2}}, object(), [[]]]
ODD_VALUES[-1].append(ODD_VALUES[-1])  # within itself


def odd_value(run):
    return {"size": 1, "odd one": ODD_VALUES[int(run.id)]} if run.id.isdigit() else {}


@pytest.mark.parametrize("number", range(len(ODD_VALUES)))
def test_a_value_that_cannot_be_kept_is_told_with_the_name_of_its_column(tmp_path, number):
    options = BuildOptions(near_duplicates=None, columns=(f"{__name__}:odd_value",))
    manifest = built(tmp_path, [run(str(number), "one"), run("a", "two"), run("b", "three")], options).manifest
    assert manifest.left_out == {"column": 1}
    assert manifest.malformed_example is not None and f"run {number}: 'odd one' " in manifest.malformed_example


def test_where_the_prompt_is_at_fault_no_column_is_blamed(tmp_path):
    options = BuildOptions(near_duplicates=None, columns=(f"{__name__}:odd_value",))
    given = [run("0", user("q"), said("ends so")), run("a", "two"), run("b", "three")]
    manifest = built(tmp_path, given, options).manifest
    assert manifest.left_out == {"malformed": 1} and "assistant turn" in str(manifest.malformed_example)


@pytest.mark.parametrize("said_of_it", [{"score": float("nan")}, {"correction": "\ud800"}])
def test_feedback_that_cannot_be_kept_is_not_lent(tmp_path, said_of_it):
    given = [run("a", "one"), run("b", "ONE", feedback=rated("b", **said_of_it)), run("c", "two")]
    dataset = built(tmp_path, given)
    assert dataset.manifest.left_out == {"duplicate": 1} and dataset.manifest.columns.keys().isdisjoint(said_of_it)


def test_only_the_first_turn_of_each_conversation_is_taken_where_asked(tmp_path):
    given = [
        run("a1", "one", session="a"),
        run("a2", "two", session="a"),
        run("b1", "three", answer="3"),
        run("b2", user("three"), said("3"), user("four")),
        run("team", "plan", calls=[]),
        run("c1", "five", parent="a1"),
    ]
    dataset = built(tmp_path, given, BuildOptions(near_duplicates=None, turns="first"))
    assert set(sides_of(dataset)) == {"a1", "b1"}
    assert dataset.manifest.left_out == {"later turn": 3, "no call": 1}


# --- near-duplicates ---------------------------------------------------------------------------------------------

LONG = " ".join(f"{topic} number {n}" for n in range(8) for topic in TOPICS)


def near(**options):
    pytest.importorskip("datasketch")
    return BuildOptions(**options)


def test_prompts_that_say_nearly_the_same_are_left_out(tmp_path):
    given = [run("a", LONG), run("b", f"{LONG} please"), run("c", question(1)), run("d", question(2))]
    dataset = built(tmp_path, given, near())
    assert dataset.manifest.left_out == {"near-duplicate": 1} and set(sides_of(dataset)) == {"a", "c", "d"}


def test_a_long_system_prompt_makes_no_near_duplicates(tmp_path):
    system = {"role": "system", "content": LONG}
    given = [run(f"r{n}", system, user(question(n))) for n in range(5)]
    assert built(tmp_path, given, near()).manifest.left_out == {}


def test_the_next_turn_of_a_conversation_is_no_near_duplicate(tmp_path):
    history = [user(LONG), said(LONG)]
    given = [run("a1", LONG), run("a2", *history, user("And then?")), run("b", question(1))]
    assert built(tmp_path, given, near()).manifest.left_out == {}


def test_another_question_after_the_same_history_is_no_near_duplicate(tmp_path):
    history = [user(LONG), said(LONG)]
    given = [run(f"r{n}", *history, user(question(n))) for n in range(5)]
    assert built(tmp_path, given, near()).manifest.left_out == {}


def test_the_same_question_after_another_history_is_no_near_duplicate(tmp_path):
    given = [run(f"r{n}", user(question(n)), said(question(n + 50)), user("Yes, go on.")) for n in range(5)]
    assert built(tmp_path, given, near()).manifest.left_out == {}


def test_pairs_are_found_above_the_threshold_and_not_far_below(tmp_path):
    pytest.importorskip("datasketch")
    rng, found = random.Random(0), {0.95: 0, 0.85: 0, 0.65: 0}
    for share in found:
        for _ in range(100):
            words = [f"w{rng.randrange(10**9)}" for _ in range(402)]
            shared = round(400 * 2 * share / (1 + share))  # of 400 shingles each, so that Jaccard is the share
            index = NearDuplicates(0.85)
            index.add(index.sign([user(" ".join(words))]), 7)
            changed = words[: shared + 2] + [f"v{rng.randrange(10**9)}" for _ in range(400 - shared)]
            found[share] += index.find(index.sign([user(" ".join(changed))])) == [7]
    assert found[0.95] >= 98 and found[0.85] >= 95 and found[0.65] == 0


@pytest.mark.parametrize("with_history", [False, True])
def test_pairs_just_above_the_threshold_are_found(tmp_path, with_history):
    """One word of 60 is another one: 55 of 61 shingles are equal, 0.9016."""
    rng, given = random.Random(5), []
    vocabulary = [f"{topic}{n}" for topic in TOPICS for n in range(80)]
    for n in range(100):
        words = rng.choices(vocabulary, k=60)
        other = [*words[:30], "another", *words[31:]]
        past = [[user(" ".join(text)), said("Go on.")] if with_history else [] for text in (words, other)]
        given += [run(f"{n}-{k}", *past[k], user(" ".join(text))) for k, text in enumerate((words, other))]
    found = built(tmp_path, given, near()).manifest.left_out.get("near-duplicate", 0)
    assert found >= 94


def test_without_datasketch_only_equal_prompts_are_left_out_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    dataset = built(tmp_path, [run("a", LONG), run("b", f"{LONG} please"), run("c", LONG)], BuildOptions())
    assert dataset.manifest.left_out == {"duplicate": 1}
    assert "near-duplicates were not looked for: that needs datasketch" in str(dataset)


# --- the split ---------------------------------------------------------------------------------------------------


def test_the_share_is_held_out_whatever_the_order_of_the_runs(tmp_path):
    given = [run(f"r{n}", question(n)) for n in range(30)]
    first = built(tmp_path, given, BuildOptions(near_duplicates=None, held_out=0.1), name="a")
    second = built(tmp_path, reversed(given), BuildOptions(near_duplicates=None, held_out=0.1), name="b")
    assert first.manifest.held_out == 3 and sides_of(first) == sides_of(second)
    other = built(tmp_path, given, BuildOptions(near_duplicates=None, held_out=0.1, seed=1), name="c")
    assert sides_of(other) != sides_of(first)


def test_all_turns_of_a_session_are_on_one_side(tmp_path):
    given = [run(f"{session}-{turn}", question(100 * session + turn), session=f"s{session}")
             for turn in range(5) for session in range(10)]  # fmt: skip
    dataset = built(tmp_path, given)
    assert dataset.manifest.held_out == 10
    assert one_side_each(sides_of(dataset), lambda id: id.partition("-")[0])


def one_side_each(sides, conversation):
    by_conversation = {}
    for id, side in sides.items():
        by_conversation.setdefault(conversation(id), set()).add(side)
    return all(len(found) == 1 for found in by_conversation.values())


def conversation(name, turns, start=0, *, keeps_tools=False):
    """Runs without a session, each of which continues the one before, with a tool call in each."""
    history = []
    for turn in range(turns):
        ask = {"role": "assistant", "content": "", "tool_calls": [call_of(f"{name}{turn}", {"n": turn})]}
        tool_turn = [ask, {"role": "tool", "tool_call_id": f"{name}{turn}", "content": "ok"}]
        text, answer = question(start + turn), f"answer {start + turn}"
        # the system prompt has the date, and some agents send the user's turn twice
        prompt = [{"role": "system", "content": f"It is {start + turn}."}, *history, user(text), user(text)]
        calls = [
            Call(id=f"c1-{name}{turn}", time=1.0, messages=prompt, reply=ask),
            Call(id=f"c2-{name}{turn}", time=1.0, messages=[*prompt, *tool_turn], reply=said(answer)),
        ]
        yield run(f"{name}-{turn}", calls=calls)
        history += [user(text), *(tool_turn if keeps_tools else []), said(answer)]


@pytest.mark.parametrize("keeps_tools", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_continues_another_is_on_its_side_in_any_order(tmp_path, keeps_tools, seed):
    given = [run for n in range(8) for run in conversation(f"k{n}", 4, 10 * n, keeps_tools=keeps_tools)]
    random.Random(seed).shuffle(given)
    dataset = built(tmp_path, given)
    assert dataset.manifest.train + dataset.manifest.held_out == 32 and dataset.manifest.held_out == 4
    assert one_side_each(sides_of(dataset), lambda id: id.partition("-")[0])


def checked(name, turns, start, kept):
    """Runs that call the model again once it has answered; ``kept`` says what of it their history holds."""
    history = []
    for turn in range(turns):
        text, n = question(start + turn), start + turn
        prompt = [SYSTEM, *history, user(text)]
        retry = [*prompt, user(f"Reflect on your previous response: 'draft {n}'")]
        aside = [user(f"What is worth remembering of {text}?")]
        replies = [said(f"draft {n}"), said(f"verdict {n}"), said(f"better {n}"), said(f"remembered {n}")]
        asked = [prompt, retry, [*retry, said("Self reflection failed.")], aside]
        calls = [Call(id=f"c{n}-{k}", time=float(k), messages=sent, reply=reply)
                 for k, (sent, reply) in enumerate(zip(asked, replies, strict=True))]  # fmt: skip
        output = f"Edited {n}" if kept == "edited" else f"better {n}"
        yield run(f"{name}-{turn}", calls=calls, output=output)
        history += [user(text), {"draft": replies[0], "better": replies[2], "edited": said(output)}[kept]]


@pytest.mark.parametrize("kept", ["draft", "better", "edited"])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_went_on_after_its_answer_is_with_what_continues_it(tmp_path, kept, seed):
    given = [run for n in range(8) for run in checked(f"k{n}", 3, 10 * n, kept)]
    random.Random(seed).shuffle(given)
    dataset = built(tmp_path, given, BuildOptions(near_duplicates=None, held_out=0.5))
    assert (dataset.manifest.train, dataset.manifest.held_out) == (12, 12)
    assert one_side_each(sides_of(dataset), lambda id: id.partition("-")[0])
    before = sides_of(built(tmp_path, [run for run in given if run.id.endswith("0")], name="grown"))
    grown = sides_of(built(tmp_path, [run for run in given if not run.id.endswith("0")], name="grown"))
    assert one_side_each(before | grown, lambda id: id.partition("-")[0])


def test_runs_within_a_run_are_on_its_side(tmp_path):
    given = [run(f"{n}-{part}", question(10 * n + part), parent=f"team{n}") for n in range(10) for part in range(3)]
    given += [run(f"team{n}", "plan", calls=[]) for n in range(10)]
    assert one_side_each(sides_of(built(tmp_path, given)), lambda id: id.partition("-")[0])


def test_sides_stay_as_the_data_grows(tmp_path):
    given = [run(f"{n % 20}-{n}", question(n), session=f"s{n % 20}") for n in range(60)]
    before = {}
    for size in (10, 25, 40, 60):
        dataset = built(tmp_path, given[:size])
        sides = sides_of(dataset)
        assert before.items() <= sides.items()
        assert one_side_each(sides, lambda id: id.partition("-")[0])
        before = sides
    assert 9 <= dataset.manifest.held_out <= 15  # 12 of 60 asked; sessions of three go together


def test_a_prompt_keeps_its_side_when_its_first_run_is_gone(tmp_path):
    before = sides_of(built(tmp_path, [run(f"{n}", question(n)) for n in range(20)]))
    after = sides_of(built(tmp_path, [run(f"again-{n}", question(n)) for n in reversed(range(20))]))
    assert {id.removeprefix("again-"): side for id, side in after.items()} == before


def test_a_new_near_duplicate_follows_a_prompt_that_is_gone(tmp_path):
    texts = [" ".join(question(10 * n + part) for part in range(4)) for n in range(20)]
    before = sides_of(built(tmp_path, [run(f"{n}", texts[n]) for n in range(20)], near()))
    after = sides_of(built(tmp_path, [run(f"{n}", f"{texts[n]} please") for n in reversed(range(20))], near()))
    assert before == after


def test_a_session_keeps_its_side_when_its_first_turns_are_gone(tmp_path):
    before = sides_of(built(tmp_path, [run(f"{n}", question(n), session=f"s{n}") for n in range(20)]))
    after = sides_of(built(tmp_path, [run(f"{n}", question(100 + n), session=f"s{n}") for n in range(20)]))
    assert before == after


def test_where_two_conversations_become_one_the_older_side_wins_and_no_row_changes_sides(tmp_path):
    given = [run(f"r{n}", question(n), session=f"s{n}") for n in range(20)]
    before = sides_of(built(tmp_path, given))
    older = next(id for id, side in before.items() if side == "held_out")
    younger = next(id for id, side in before.items() if side == "train" and int(id[1:]) > int(older[1:]))
    bridge = run("bridge", question(99), session=f"s{older[1:]}", parent=younger)
    dataset = built(tmp_path, [*given, bridge])
    after = sides_of(dataset)
    assert dataset.manifest.left_out == {"between sides": 1}
    assert after == {**{id: side for id, side in before.items() if id != younger}, "bridge": "held_out"}


def test_a_prompt_met_in_a_conversation_of_the_other_side_waits_for_its_own(tmp_path):
    given = [run(f"r{n}", question(n), session=f"s{n}") for n in range(20)]
    before = sides_of(built(tmp_path, given))
    train = next(id for id, side in before.items() if side == "train")
    held_out = next(id for id, side in before.items() if side == "held_out")
    stray = run("stray", question(int(train[1:])), session=f"s{held_out[1:]}")
    dataset = built(tmp_path, [stray, *given])
    assert sides_of(dataset) == before and dataset.manifest.left_out == {"between sides": 1}


def test_a_group_that_is_too_large_to_be_held_out_stays_in_training(tmp_path):
    given = [run(f"big-{n}", question(n), session="big") for n in range(30)]
    given += [run(f"small{n}-", question(100 + n)) for n in range(10)]
    for seed in range(5):
        options = BuildOptions(near_duplicates=None, seed=seed)
        dataset = built(tmp_path, given, options, name=f"d{seed}")
        assert dataset.manifest.held_out == 8 and sides_of(dataset)["big-0"] == "train"
        assert "30 of the 40 prompts belong together" in str(dataset)


def test_one_conversation_alone_cannot_be_split_and_it_is_said(tmp_path):
    dataset = built(tmp_path, [run(f"r{n}", question(n), session="s") for n in range(10)])
    assert (dataset.manifest.train, dataset.manifest.held_out) == (10, 0)
    assert "nothing is held out, since all prompts belong to one conversation" in str(dataset)


@pytest.mark.parametrize(("count", "share"), [(1, 0.2), (1, 0.9), (2, 0.9), (3, 0.99)])
def test_one_prompt_at_least_is_left_to_train_on(tmp_path, count, share):
    options = BuildOptions(near_duplicates=None, held_out=share)
    dataset = built(tmp_path, [run(f"r{n}", question(n)) for n in range(count)], options)
    assert (dataset.manifest.train, dataset.manifest.held_out) == (1, count - 1)
    assert ("nothing is held out, since there is but one prompt" in str(dataset)) == (count == 1)


def test_two_sessions_that_begin_alike_are_two_conversations(tmp_path):
    given = []
    for n in range(10):
        given.append(run(f"{n}-0", "Hi", answer="Hello!", session=f"s{n}"))
        given.append(run(f"{n}-1", user("Hi"), said("Hello!"), user(question(n)), session=f"s{n}"))
    assert built(tmp_path, given).manifest.largest_group == 2


def test_nothing_is_held_out_where_nothing_is_asked(tmp_path):
    dataset = built(tmp_path, [run("a", "one"), run("b", "two")], BuildOptions(near_duplicates=None, held_out=0))
    assert set(sides_of(dataset).values()) == {"train"} and "Note" not in str(dataset)


@pytest.mark.parametrize("seed", range(20))
def test_no_growth_of_any_kind_moves_a_row_or_parts_a_conversation(tmp_path, seed):
    """Sessions, continued histories, repeats and lost files in any order, built again and again."""
    rng = random.Random(seed)
    pool = [run for n in range(6) for run in conversation(f"k{n}", 3, 10 * n)]
    pool += [run(f"s{n}-{t}", question(200 + 10 * n + t), session=f"s{n}") for n in range(6) for t in range(3)]
    pool += [run(f"t{n}-{t}", question(200 + rng.randrange(60)), session=f"t{n}") for n in range(6) for t in range(3)]
    ever: dict[str, str] = {}
    for _ in range(5):
        seen = rng.sample(pool, rng.randrange(8, len(pool)))
        try:
            dataset = built(tmp_path, seen)
        except DataError:  # nothing to train on is left
            continue
        for row in rows_of(dataset):
            assert ever.setdefault(json.dumps(row["prompt"][1:]), row["split"]) == row["split"]
        assert one_side_each(sides_of(dataset), lambda id: id.partition("-")[0])


# --- from a store ------------------------------------------------------------------------------------------------


def recorded(store, runs):
    writer = TranscriptWriter(store)
    for run in runs:
        begun = {"run": run.id, **run.model_dump(include={"agent", "parent", "session", "tags", "style", "time"})}
        writer.begin({**begun, "prompt": None, "version": None})
        for call in run.calls:
            writer.call({**call.model_dump(), "run": run.id})
        writer.end(run.id, output=None, error=run.error, seconds=0.1)
    writer.close()
    return next(iter(store.iterdir()))


def test_a_store_is_read_and_named_with_its_files(tmp_path):
    given = [run for n in range(5) for run in conversation(f"k{n}", 3, 10 * n)]
    file = recorded(tmp_path / "store", given)
    manifest = build_dataset(tmp_path / "store", out=tmp_path / "a", options=EXACT).manifest
    assert (manifest.store, manifest.runs, manifest.calls) == (str(tmp_path / "store"), 15, 30)
    assert [(source.name, source.bytes) for source in manifest.files] == [(file.name, file.stat().st_size)]
    assert manifest.fingerprint == built(tmp_path, given, name="b").manifest.fingerprint


def test_what_the_recorder_lost_is_said_by_the_build(tmp_path):
    file = recorded(tmp_path / "store", [run("r1", "one"), run("r2", "two")])
    with file.open("a") as lines:
        lines.write('{"kind":"dropped","count":3,"reason":"disk full","time":1.0}\n{"kind":"ca\n')
    dataset = build_dataset(tmp_path / "store", out=tmp_path / "d", options=EXACT)
    assert (dataset.manifest.dropped, dataset.manifest.unreadable) == (3, 1)
    assert "Note: the recorder lost 3 lines" in str(dataset) and "1 recorded lines are torn" in str(dataset)


def test_a_folder_in_which_nothing_is_recorded_is_an_error(tmp_path):
    (tmp_path / "store").mkdir()
    with pytest.raises(DataError, match=r"nothing is recorded in .*; record an agent with agent.record\(\)"):
        build_dataset(tmp_path / "store", out=tmp_path / "d")
    with pytest.raises(DataError, match="is no store of transcripts"):
        build_dataset(tmp_path / "none", out=tmp_path / "d")


# --- files -------------------------------------------------------------------------------------------------------

ENDLESS = """
import sys
from tests.unit.test_dataset_building import EXACT, build_dataset, question, run

def runs():
    for number in range(10**9):
        yield run(f"new{number}", question(number))
        print("on", flush=True)

build_dataset(out=sys.argv[1], options=EXACT, runs=runs())
"""


def test_a_killed_build_leaves_the_old_dataset_whole_and_the_next_one_cleans_up(tmp_path):
    given = [run(f"r{n}", question(n)) for n in range(10)]
    old = built(tmp_path, given)
    kept = {path.name: path.read_bytes() for path in old.rows.parent.iterdir() if path.name != ".lock"}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(old.rows.parent)], stdout=subprocess.PIPE, cwd=os.getcwd()
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"on\n"
        with pytest.raises(DataError, match="another build is writing to"):
            built(tmp_path, given)
        time.sleep(random.random() / 10)
        child.send_signal(signal.SIGKILL)
    assert {name: (old.rows.parent / name).read_bytes() for name in kept} == kept
    assert built(tmp_path, given).manifest.fingerprint == old.manifest.fingerprint
    assert sorted(path.name for path in old.rows.parent.iterdir()) == sorted([*kept, ".lock"])


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    old = built(tmp_path, [run("r1", "one"), run("r2", "two")])
    kept = {path.name: path.read_bytes() for path in old.rows.parent.iterdir()}
    with pytest.raises(DataError):
        built(tmp_path, [run("r3", "three")], BuildOptions(near_duplicates=None, filter=f"{__name__}:fails"))
    assert {path.name: path.read_bytes() for path in old.rows.parent.iterdir()} == kept


def test_a_build_that_finds_nothing_leaves_no_folder_behind(tmp_path):
    (tmp_path / "kept").mkdir()
    for out in ("new", "deep/er/new", "kept/new"):
        with pytest.raises(DataError, match="no prompt is left to train on"):
            build_dataset(out=tmp_path / out, options=EXACT, runs=[])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept"]


def test_what_is_in_a_folder_already_stays_when_a_build_finds_nothing(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    with pytest.raises(DataError):
        built(tmp_path, [], name="d")
    assert (tmp_path / "d" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/none", "x" * 300])
def test_a_folder_that_cannot_be_made_is_told_with_its_name(tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the dataset in '.*' cannot be built: .*; give another out"):
        build_dataset(out=tmp_path / out, options=EXACT, runs=[run("a", "one"), run("b", "two")])


def test_agents_whose_names_make_one_folder_name_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["a b", "a/b", "a_b", "a?b", None, "all", "/", "n" * 300, "n" * 299 + "m"]
    folders = {}
    for _ in range(2):  # each finds its own again
        for place, name in enumerate(names):
            # for None these are the runs of all agents
            given = [run(f"r{n}", f"{question(n)} {place}", agent=name or "z") for n in range(2)]
            options = BuildOptions(near_duplicates=None, agent=name)
            dataset = build_dataset(options=options, runs=given)
            assert folders.setdefault(name, dataset.rows.parent) == dataset.rows.parent
    assert len(set(folders.values())) == len(names) and folders["a b"].name == "a_b"
    assert all(
        read_record(folder / "manifest.json", Manifest).options.agent == name for name, folder in folders.items()
    )


def test_the_folder_of_an_agent_stays_its_own_when_the_others_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {name: [run("r1", "one", agent=name), run("r2", "two", agent=name)] for name in ("a b", "a/b")}

    def of(name):
        return build_dataset(options=BuildOptions(near_duplicates=None, agent=name), runs=given[name]).rows.parent

    first, second = of("a b"), of("a/b")
    shutil.rmtree(first)
    assert of("a/b") == second and of("a b") == first


def test_a_memory_of_sides_that_cannot_be_read_is_named_with_its_line(tmp_path):
    old = built(tmp_path, [run("r1", "one"), run("r2", "two")])
    with (old.rows.parent / "split.jsonl").open("a") as file:
        file.write('{"key": 1, "side"')
    with pytest.raises(DataError, match=r"split.jsonl line 4 cannot be read: .* put back a copy of it"):
        built(tmp_path, [run("r1", "one"), run("r2", "two")])
