"""What was said of recorded runs becomes pairs, all that makes none is counted, and no prompt is on two sides."""

import json
import random

import pytest
from pydantic import ValidationError

from praison_agent_rl.data import check_rows, fingerprint, load_rows, split_rows
from praison_agent_rl.dataset_building import BuildOptions, build_dataset
from praison_agent_rl.dataset_building.judged import GUARDRAIL, REFLECT, REGENERATE
from praison_agent_rl.dataset_building.report import Manifest
from praison_agent_rl.errors import DataError
from praison_agent_rl.records import Call, Feedback
from praison_agent_rl.runs import read_record
from praison_agent_rl.transcripts import TranscriptWriter
from tests.unit.test_dataset_building import (
    SYSTEM,
    TOOLS,
    call_of,
    one_side_each,
    question,
    rated,
    recorded,
    run,
    said,
    user,
)

PAIRS = BuildOptions(kind="pairs", near_duplicates=None)


def answered(id, *messages, answer="Yes.", **facts):
    """A run of one call from which its answer came out."""
    return run(id, *messages, answer=answer, **{"output": answer, **facts})


def corrected(id, prompt, answer, correction, **facts):
    return answered(id, prompt, answer=answer, feedback=rated(id, correction=correction), **facts)


def scored(id, prompt, answer, score, **facts):
    return answered(id, prompt, answer=answer, feedback=rated(id, score=score), **facts)


def built(tmp_path, runs, options=PAIRS, name="pairs"):
    return build_dataset(out=tmp_path / name, options=options, runs=runs)


def sides_of(dataset):
    """Chosen and rejected text of each row, with its source."""
    return [
        (row["source"], row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in load_rows(dataset.rows)
    ]


def calls(*asked):
    """Calls of a run, from pairs of what was sent and the reply."""
    replies = [reply if isinstance(reply, dict) else said(reply) for _, reply in asked]
    return [
        Call(id=f"c{n}", time=float(n), messages=sent, reply=reply, tools=TOOLS)
        for n, ((sent, _), reply) in enumerate(zip(asked, replies, strict=True))
    ]


def round_of(id, result):
    """A tool call and its result."""
    asked = {"role": "assistant", "content": None, "tool_calls": [call_of(id, '{"b": 3}')]}
    return [asked, {"role": "tool", "tool_call_id": id, "content": result}]


# --- what pairs are made of ------------------------------------------------------------------------------------------


def test_a_correction_is_better_than_the_answer_that_was_recorded(tmp_path):
    dataset = built(tmp_path, [corrected("a", "2+3?", "6", "5"), answered("b", "4+4?", answer="8")])
    (row,) = load_rows(dataset.rows)
    assert row == {
        "prompt": [SYSTEM, user("2+3?")],
        "chosen": [said("5")],
        "rejected": [said("6")],
        "source": "correction",
        "answer": "5",
        "run": "a",
        "agent": "calc",
        "split": "train",
    }
    assert (dataset.manifest.kind, dataset.manifest.options.kind) == ("pairs", "pairs")
    assert (dataset.manifest.sources, dataset.manifest.prompts, dataset.manifest.runs) == ({"correction": 1}, 1, 2)


def test_of_ratings_the_best_answer_is_set_against_the_worst_once_a_prompt(tmp_path):
    scores = {"a": 0.5, "b": 0.9, "c": 0.2, "d": 0.4}
    dataset = built(tmp_path, [scored(id, "2+3?", f"answer {id}", score) for id, score in scores.items()])
    (row,) = load_rows(dataset.rows)
    assert (row["chosen"], row["rejected"], row["source"]) == ([said("answer b")], [said("answer c")], "rating")
    assert (row["chosen_score"], row["rejected_score"], row["margin"], row["run"]) == (0.9, 0.2, 0.7, "b")


def test_an_answer_that_was_given_twice_has_the_mean_of_its_ratings(tmp_path):
    given = [scored("a", "q", "five", 1.0), scored("b", "q", " five", 0.0), scored("c", "q", "six", 0.2)]
    (row,) = load_rows(built(tmp_path, given).rows)
    assert (row["chosen_score"], row["rejected_score"], row["margin"]) == (0.5, 0.2, 0.3)
    assert row["chosen"] == [said("five")] and row["rejected"] == [said("six")]


def test_the_last_rating_of_a_run_counts_and_labels_are_no_ratings(tmp_path):
    twice = [Feedback(run="a", time=2.0, score=1.0), Feedback(run="a", time=3.0, score=0.0, label="bad")]
    given = [answered("a", "q", answer="x", feedback=twice), scored("b", "q", "y", 0.5)]
    assert sides_of(built(tmp_path, given)) == [("rating", "y", "x")]


def test_an_answer_that_a_guardrail_refused_is_worse_than_what_took_its_place(tmp_path):
    asked = [SYSTEM, user("Name a fish.")]
    again = [*asked, said("A cow."), user(f"{GUARDRAIL} no fish. Please provide an improved response.")]
    third = [*again, said("A cat."), user(f"{GUARDRAIL} no fish. Please provide an improved response.")]
    made = calls((asked, "A cow."), (again, "A cat."), (third, "A trout."))
    dataset = built(tmp_path, [run("a", calls=made, output="A trout.")])
    (row,) = load_rows(dataset.rows)
    assert sides_of(dataset) == [("retry", "A trout.", "A cow.")]
    assert row["prompt"] == asked and row["tools"] == TOOLS and "margin" not in row


def reflected(asked, draft, better, *, twice=False):
    """Calls as the framework makes them with reflection."""
    judged = [*asked, user(f"\n{REFLECT}{draft}'.\nIdentify any flaws.")]
    verdict = '{"reflection": "short", "satisfactory": "no"}'
    regenerate = [*judged, said("Self Reflection: short Satisfactory?: no"), user(REGENERATE)]
    last = [*regenerate, user(f"\n{REFLECT}{better}'.\nIdentify any flaws.")]
    made = [(asked, draft), (judged, verdict), (regenerate, better), *([(regenerate, better)] if twice else [])]
    return calls(*made, (last, '{"reflection": "fine", "satisfactory": "yes"}'))


@pytest.mark.parametrize("twice", [False, True])
def test_a_draft_that_a_reflection_took_back_is_worse_and_its_verdicts_are_no_answers(tmp_path, twice):
    made = reflected([SYSTEM, user("Name a fish.")], "Cod", "A cod is a fish.", twice=twice)
    dataset = built(tmp_path, [run("a", calls=made, output="A cod is a fish.")])
    assert sides_of(dataset) == [("retry", "A cod is a fish.", "Cod")]
    assert load_rows(dataset.rows)[0]["prompt"] == [SYSTEM, user("Name a fish.")]


def test_a_refusal_that_came_out_instead_makes_no_pair(tmp_path):
    asked = [SYSTEM, user("Name a fish.")]
    again = [*asked, said("A cow."), user(f"{GUARDRAIL} no fish. Please provide an improved response.")]
    given = [
        run("a", calls=calls((asked, "A cow."), (again, "A cat.")), output="I can't share that response."),
        corrected("b", "x", "1", "2"),
    ]
    dataset = built(tmp_path, given)
    assert dataset.manifest.left_out == {"no answer": 1} and sides_of(dataset) == [("correction", "2", "1")]


def test_a_better_answer_that_rests_on_tools_called_after_the_refusal_makes_no_pair(tmp_path):
    asked = [SYSTEM, user("2+3?")]
    again = [*asked, said("6"), user(f"{GUARDRAIL} wrong. Please provide an improved response.")]
    tools = round_of("t", "5")
    made = calls((asked, "6"), (again, tools[0]), ([*again, *tools], "5"))
    dataset = built(tmp_path, [run("a", calls=made, output="5"), corrected("b", "x", "1", "2")])
    assert dataset.manifest.left_out == {"tools": 1} and dataset.manifest.sources == {"correction": 1}


def test_the_prompt_is_the_request_that_was_answered_with_the_tool_turns_before_it(tmp_path):
    asked, tools = [SYSTEM, user("2+3?")], round_of("t1", "5")
    made = calls((asked, tools[0]), ([*asked, *tools], "It is six."))
    dataset = built(tmp_path, [run("a", calls=made, output="It is six.", feedback=rated("a", correction="Five."))])
    (row,) = load_rows(dataset.rows)
    assert row["prompt"] == [*asked, *tools] and row["tools"] == TOOLS and row["rejected"] == [said("It is six.")]


def test_answers_after_the_same_tool_results_are_compared_whatever_ids_the_calls_had(tmp_path):
    asked = [SYSTEM, user("2+3?")]

    def with_tools(id, result, answer, score):
        tools = round_of(id, result)
        made = calls((asked, tools[0]), ([*asked, *tools], answer))
        return run(id, calls=made, output=answer, feedback=rated(id, score=score))

    given = [with_tools("t1", "5", "Five.", 1.0), with_tools("t2", "5", "Six.", 0.0), with_tools("t3", "?", "No.", 0.1)]
    assert sides_of(built(tmp_path, given)) == [("rating", "Five.", "Six.")]


def test_only_the_sources_that_are_asked_for_are_used(tmp_path):
    given = [corrected("a", "2+3?", "6", "5"), scored("b", "q", "x", 1.0), scored("c", "q", "y", 0.0)]
    options = BuildOptions(kind="pairs", near_duplicates=None, sources=("rating",))
    assert sides_of(built(tmp_path, given, options)) == [("rating", "x", "y")]


# --- what makes no pair ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["Yes.", " Yes. ", "Yes.\u00a0", "Y es.", "\u3000Yes.\u2028", "Yes\u200b.\ufeff"])
def test_a_difference_in_white_space_only_is_none_in_any_script(tmp_path, other):
    dataset = built(tmp_path, [corrected("a", "2+3?", "Yes.", other), corrected("b", "4+4?", "9", "8")])
    assert dataset.manifest.left_out == {"equal": 1} and sides_of(dataset) == [("correction", "8", "9")]


def test_upper_and_lower_case_are_a_difference(tmp_path):
    assert sides_of(built(tmp_path, [corrected("a", "Capital?", "paris", "Paris")])) == [
        ("correction", "Paris", "paris")
    ]


@pytest.mark.parametrize("blank", ["", "  ", "\u00a0\n", "\u200b"])
def test_an_empty_side_makes_no_pair(tmp_path, blank):
    given = [
        corrected("a", "1?", blank, "5"),
        corrected("b", "2?", "5", blank),
        scored("c", "3?", blank, 0.0),
        corrected("d", "4?", "4", "5"),
    ]
    assert built(tmp_path, given).manifest.left_out == {"empty side": 3}


def test_equal_scores_and_small_margins_make_no_pair(tmp_path):
    given = [scored("a", "1?", "x", 0.5), scored("b", "1?", "y", 0.5)]
    given += [scored("c", "2?", "x", 0.8), scored("d", "2?", "y", 0.9)]
    given += [scored("e", "3?", "x", 0.5), scored("f", "3?", "y", 0.7)]
    given += [scored("g", "4?", "x", 1.0), scored("h", "4?", "X ", 0.0), scored("i", "5?", "same", 1.0)]
    given += [scored("j", "6?", "same", 0.0), scored("k", "6?", "same ", 1.0)]
    options = BuildOptions(kind="pairs", near_duplicates=None, min_margin=0.1)
    dataset = built(tmp_path, given, options)
    assert dataset.manifest.left_out == {"equal scores": 1, "equal": 1}
    assert sorted(sides_of(dataset)) == [("rating", "x", "X "), ("rating", "y", "x"), ("rating", "y", "x")]
    options = BuildOptions(kind="pairs", near_duplicates=None, min_margin=0.2)
    assert built(tmp_path, given, options, "other").manifest.left_out == {"equal scores": 1, "equal": 1, "margin": 1}


def test_pairs_that_contradict_each_other_are_both_left_out_and_repeats_count_once(tmp_path):
    given = [
        corrected("a", "1?", "A", "B"),
        corrected("b", "1?", "B", "A"),
        corrected("c", " 1? ", "A ", "B"),
        corrected("d", "2?", "A", "B"),
        corrected("e", "2?", "A", " B"),
        corrected("f", "3?", "B", "A"),
    ]
    dataset = built(tmp_path, given)
    assert dataset.manifest.left_out == {"contradicting": 3, "repeated": 1}
    assert sides_of(dataset) == [("correction", "B", "A"), ("correction", "A", "B")]


def test_a_rating_that_contradicts_a_correction_leaves_both_out(tmp_path):
    given = [corrected("a", "1?", "A", "B"), scored("b", "1?", "A", 1.0), scored("c", "1?", "B", 0.0)]
    given.append(corrected("d", "2?", "A", "B"))
    assert built(tmp_path, given).manifest.left_out == {"contradicting": 2}


def test_runs_that_cannot_be_used_are_counted_only_where_something_was_said_of_them(tmp_path):
    half = corrected("half", "\ud83d", "1", "2")
    unsaid = [answered(f"u{n}", "x", error="E: no") for n in range(5)]
    given = [
        corrected("ok", "1?", "1", "2"),
        corrected("error", "2?", "1", "2", error="TimeoutError: slow"),
        corrected("team", "3?", "1", "2", calls=[]),
        corrected("blank", "  ", "1", "2"),
        corrected("long", "x" * 200, "1", "2"),
        corrected("edited", "4?", "1", "2", output="something else"),
        half,
        *unsaid,
    ]
    options = BuildOptions(kind="pairs", near_duplicates=None, max_prompt_chars=100)
    manifest = built(tmp_path, given, options).manifest
    assert manifest.left_out == {"failed": 1, "no answer": 2, "empty": 1, "too long": 1, "malformed": 1}
    assert (manifest.runs, manifest.train) == (12, 1) and "run half" in str(manifest.malformed_example)


def test_the_report_tells_sources_and_reasons_and_is_stored(tmp_path):
    given = [corrected("a", "1?", "1", "2"), corrected("b", "2?", "1", "1 "), corrected("c", "3?", "x", "y")]
    dataset = built(tmp_path, given)
    assert str(dataset).splitlines()[:6] == [
        "2 pairs of 2 prompts from 3 runs (3 calls)",
        "          1  to train on",
        "          1  held out",
        "          2  from corrections",
        "1 corrections, ratings, retries or groups of answers made no pair, since they",
        "          1  have equal answers, or answers that differ in white space only",
    ]
    assert str(dataset).rpartition("\n")[0] in (dataset.rows.parent / "README.md").read_text()
    assert read_record(dataset.rows.parent / "manifest.json", Manifest) == dataset.manifest


def test_nothing_said_is_an_error_that_says_so(tmp_path):
    with pytest.raises(DataError, match="no pair is left to train on:\n0 pairs of 0 prompts from 1 runs"):
        built(tmp_path, [answered("a", "1?")])
    assert list(tmp_path.iterdir()) == []


def test_a_least_rating_is_refused_since_it_would_leave_out_the_worse_answers():
    with pytest.raises(ValidationError, match=r"min_rating=0\.5 would leave out the worse of two answers"):
        BuildOptions(kind="pairs", min_rating=0.5)


# --- what is written ------------------------------------------------------------------------------------------------


def mixed():
    """Pairs of every source, with tools, tags, odd characters and tool-call arguments of several shapes."""
    given = [corrected(f"c{n}", f"Grüße {question(n)} 🙂", f"no {n}", f"yes {n}", tags=["b", "a"]) for n in range(6)]
    given += [scored(f"r{n}{k}", question(20 + n), f"answer {k}", float(k)) for n in range(6) for k in range(2)]
    for n, result in enumerate(("5", "2025-08-01", '{"a": [1, null]}')):
        asked, tools = [SYSTEM, user(question(40 + n))], round_of(f"t{n}", result)
        made = calls((asked, tools[0]), ([*asked, *tools], "6"))
        given.append(run(f"t{n}", calls=made, output="6", feedback=rated(f"t{n}", correction=result)))
    made = reflected([SYSTEM, user(question(50))], "Cod", "A cod.")
    return [*given, run("v", calls=made, output="A cod.")]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_rows_can_be_trained_on_and_come_back_unchanged(tmp_path, format):
    datasets = pytest.importorskip("datasets")
    options = BuildOptions(kind="pairs", near_duplicates=None, format=format, columns=("answer", "rating", "tags"))
    dataset = built(tmp_path, mixed(), options)
    rows = load_rows(dataset.rows)
    assert dataset.manifest.sources == {"correction": 9, "retry": 1, "rating": 6}
    for method in ("reward", "cpo"):
        check_rows(rows, method)
    train, held_out = split_rows(rows, 0.2)
    assert (len(train), len(held_out)) == (12, 4)
    if format == "jsonl":
        assert dataset.manifest.fingerprint == fingerprint(rows)
        loaded = datasets.load_dataset(str(dataset.rows.parent), split="train", cache_dir=str(tmp_path / "cache"))
        assert [row["prompt"] for row in loaded.to_list()] == [row["prompt"] for row in rows]
        assert set(loaded.column_names) == set(dataset.manifest.columns)


def gold(run):
    return {"gold": f"gold of {run.id}"}


def chosen(run):
    return {"chosen": "x"}


def test_functions_may_add_columns_but_none_that_pairs_have(tmp_path):
    options = BuildOptions(kind="pairs", near_duplicates=None, columns=(f"{__name__}:gold",))
    (row,) = load_rows(built(tmp_path, [corrected("a", "1?", "1", "2")], options).rows)
    assert row["gold"] == "gold of a" and "answer" not in row
    options = BuildOptions(kind="pairs", near_duplicates=None, columns=(f"{__name__}:chosen",))
    with pytest.raises(DataError, match="returned the column 'chosen' for run 'a': every row has a column of this"):
        built(tmp_path, [corrected("a", "1?", "1", "2")], options)


def test_a_dataset_of_the_other_kind_is_not_written_over(tmp_path):
    given = [corrected("a", "1?", "1", "2"), corrected("b", "2?", "1", "2")]
    prompts = build_dataset(out=tmp_path / "d", options=BuildOptions(near_duplicates=None), runs=given)
    kept = prompts.rows.read_bytes()
    with pytest.raises(DataError, match="holds a dataset of prompts, not of pairs; give another out"):
        built(tmp_path, given, name="d")
    assert prompts.rows.read_bytes() == kept


def test_prompts_stay_the_default(tmp_path):
    dataset = build_dataset(out=tmp_path / "d", options=BuildOptions(near_duplicates=None), runs=mixed())
    assert dataset.manifest.kind == "prompts" and "chosen" not in load_rows(dataset.rows)[0]


def test_pairs_have_a_folder_of_their_own_beside_the_agents_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = BuildOptions(agent="calc", near_duplicates=None)
    folders = [build_dataset(kind=kind, options=options, runs=mixed()).rows.parent.name for kind in (None, "pairs")]
    assert folders == ["calc", "calc-pairs"]
    named = [corrected("a", "1?", "1", "2", agent="calc-pairs"), corrected("b", "2?", "1", "2", agent="calc-pairs")]
    other = build_dataset(options=BuildOptions(agent="calc-pairs", near_duplicates=None), runs=named)
    assert other.rows.parent.name.startswith("calc-pairs-")


# --- near-duplicates and the split ----------------------------------------------------------------------------------

LONG = " ".join(f"word{n}" for n in range(60))


def test_pairs_whose_prompts_say_nearly_the_same_are_left_out_but_not_those_of_the_same_prompt(tmp_path):
    pytest.importorskip("datasketch")
    given = [corrected("a", LONG, "1", "2"), corrected("b", f"{LONG} please", "1", "2")]
    given += [corrected("c", LONG, "3", "4"), corrected("d", question(1), "1", "2")]
    dataset = built(tmp_path, given, BuildOptions(kind="pairs"))
    assert dataset.manifest.left_out == {"near-duplicate": 1} and dataset.manifest.prompts == 2
    assert [row["run"] for row in load_rows(dataset.rows)] == ["a", "c", "d"]


def sided(dataset):
    return {(row["run"], row["chosen"][0]["content"]): row["split"] for row in load_rows(dataset.rows)}


def test_all_pairs_of_a_prompt_and_of_a_session_are_on_one_side(tmp_path):
    given = [
        corrected(f"{s}-{n}", question(100 * s + n), "no", f"yes {n}", session=f"s{s}")
        for s in range(10)
        for n in range(3)
    ]
    given += [corrected(f"{s}-again", question(100 * s), "never", "ever") for s in range(10)]
    dataset = built(tmp_path, given)
    assert (dataset.manifest.train, dataset.manifest.held_out) == (32, 8)
    assert one_side_each({run: side for (run, _), side in sided(dataset).items()}, lambda id: id.partition("-")[0])


def test_the_two_conversations_that_a_pair_compares_are_on_one_side(tmp_path):
    given = []
    for n in range(10):
        for k in range(2):
            given.append(scored(f"{n}-{k}", question(n), f"answer {k}", float(k), session=f"s{n}{k}"))
            given.append(corrected(f"{n}-{k}-more", question(100 + 2 * n + k), "no", "yes", session=f"s{n}{k}"))
    dataset = built(tmp_path, given)
    assert dataset.manifest.largest_group == 3 and dataset.manifest.held_out == 6
    assert one_side_each({run: side for (run, _), side in sided(dataset).items()}, lambda id: id.partition("-")[0])


@pytest.mark.parametrize("seed", range(5))
def test_no_growth_moves_a_prompt_or_parts_a_conversation(tmp_path, seed):
    rng = random.Random(seed)
    pool = [
        corrected(f"s{s}-{n}", question(10 * s + n), "no", f"yes {rng.random()}", session=f"s{s}")
        for s in range(12)
        for n in range(3)
    ]
    pool += [corrected(f"s{s}-{n}x", question(10 * s + n), "not", "yes") for s in range(12) for n in range(3)]
    ever: dict[str, str] = {}
    for _ in range(5):
        dataset = built(tmp_path, rng.sample(pool, rng.randrange(20, len(pool))))
        for row in load_rows(dataset.rows):
            assert ever.setdefault(json.dumps(row["prompt"]), row["split"]) == row["split"]


def test_the_order_of_the_runs_does_not_matter_to_the_sides(tmp_path):
    given = [corrected(f"r{n}", question(n), "no", "yes") for n in range(30)]
    assert sided(built(tmp_path, given)) == sided(built(tmp_path, reversed(given), name="b"))


def test_a_prompt_is_on_the_side_that_the_agents_own_prompt_dataset_gave_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [corrected(f"r{n}", question(n), "no", "yes") for n in range(30)]
    options = BuildOptions(agent="calc", near_duplicates=None, seed=3)
    prompts = build_dataset(options=options, runs=given)
    sides = {row["run"]: row["split"] for row in load_rows(prompts.rows)}
    options = BuildOptions(agent="calc", near_duplicates=None, kind="pairs")
    pairs = build_dataset(options=options, runs=given[::2])
    found = {row["run"]: row["split"] for row in load_rows(pairs.rows)}
    assert len(found) == 15 and found.items() <= sides.items()
    for path in prompts.rows.parent.iterdir():
        path.unlink()
    again = build_dataset(options=options, runs=given[::2])  # remembered by the pairs themselves now
    assert {row["run"]: row["split"] for row in load_rows(again.rows)} == found


def test_a_pair_between_a_trained_and_a_held_out_conversation_is_left_out(tmp_path):
    given = [corrected(f"r{n}", question(n), "no", "yes", session=f"s{n}") for n in range(10)]
    sides = {row["run"]: row["split"] for row in load_rows(built(tmp_path, given).rows)}
    one, other = (next(id for id, side in sides.items() if side == which)[1:] for which in ("train", "held_out"))
    shared = [scored(f"x{n}", question(99), f"answer {n}", float(n == one), session=f"s{n}") for n in (one, other)]
    dataset = built(tmp_path, [*given, *shared])
    assert dataset.manifest.left_out == {"between sides": 1}
    assert {row["run"]: row["split"] for row in load_rows(dataset.rows)} == sides


# --- from a store ---------------------------------------------------------------------------------------------------


def test_a_store_is_read_with_its_feedback_and_what_the_recorder_lost_is_said(tmp_path):
    store = tmp_path / "store"
    file = recorded(store, [run("r1", "one", answer="1"), run("r2", "two", answer="2"), run("r3", "two", answer="3")])
    writer = TranscriptWriter(store)
    for id, facts in {"r1": {"correction": "uno"}, "r2": {"score": 1.0}, "r3": {"score": 0.0}}.items():
        writer.feedback(Feedback(run=id, time=5.0, **facts).model_dump())
    writer.close()
    with file.open("a") as lines:
        lines.write('{"kind":"dropped","count":3,"reason":"disk full","time":1.0}\n{"kind":"ca\n')
    dataset = build_dataset(store, kind="pairs", out=tmp_path / "d", options=BuildOptions(near_duplicates=None))
    assert sorted(sides_of(dataset)) == [("correction", "uno", "1"), ("rating", "2", "3")]
    assert (dataset.manifest.dropped, dataset.manifest.unreadable) == (3, 1)
    assert "Note: the recorder lost 3 lines" in str(dataset)
    assert not list((tmp_path / "d").glob(".building-*"))
