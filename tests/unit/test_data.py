"""What rows may look like, where they may come from, and that nothing changes them on the way to training."""

import datetime
import decimal
import json
import logging
import math
import subprocess
import sys
import types

import pytest

from praison_agent_rl import data
from praison_agent_rl.data import (
    as_messages,
    check_columns,
    check_rows,
    columns_of,
    fingerprint,
    load_rows,
    normalise,
    read_rows,
    sample,
    split_rows,
    to_dataset,
    write_rows,
)
from praison_agent_rl.errors import DataError, MissingExtra

USER = {"role": "user", "content": "2+3?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}


def put(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def fault(rows, method="grpo"):
    with pytest.raises(DataError) as caught:
        check_rows(rows, method, "d.jsonl")
    return str(caught.value)


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '[{"prompt": "p", "n": "1"}, {"prompt": "q", "n": "2"}]'),
        ("a.json", '{"version": 1, "data": [{"prompt": "p", "n": "1"}, {"prompt": "q", "n": "2"}]}'),
        ("a.json", '{"prompt": "p", "n": "1"}\n{"prompt": "q", "n": "2"}\n'),
        ("a.jsonl", '{"prompt": "p", "n": "1"}\n\n{"prompt": "q", "n": "2"}'),
        ("a.NDJSON", '{"prompt": "p", "n": "1"}\r\n{"prompt": "q", "n": "2"}\r\n'),
        ("a.csv", "prompt,n\np,1\n\nq,2\n"),
        ("a.tsv", "prompt\tn\np\t1\nq\t2\n"),
        ("a.csv", b"\xef\xbb\xbfprompt,n\r\np,1\r\nq,2\r\n"),
    ],
)
def test_each_kind_of_text_file_gives_the_same_rows(tmp_path, name, content):
    path = put(tmp_path / name, content)
    assert load_rows(path) == load_rows(str(path)) == [{"prompt": "p", "n": "1"}, {"prompt": "q", "n": "2"}]


def test_a_csv_cell_stays_text_whatever_it_holds(tmp_path):
    path = put(tmp_path / "a.csv", 'prompt,gold,note\n"[{""role"": ""user""}]",5,\n"two\nlines",1e3,"a,b"\n')
    assert load_rows(path) == [
        {"prompt": '[{"role": "user"}]', "gold": "5", "note": ""},
        {"prompt": "two\nlines", "gold": "1e3", "note": "a,b"},
    ]


def test_a_csv_cell_may_be_longer_than_the_csv_module_likes(tmp_path):
    path = put(tmp_path / "a.csv", "prompt\n" + "x" * 200_000 + "\n")
    assert len(load_rows(path)[0]["prompt"]) == 200_000


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path):
    assert load_rows(put(tmp_path / "a.jsonl", '{"prompt": "a\u2028b"}\n')) == [{"prompt": "a\u2028b"}]


def test_json_nan_and_infinity_are_read(tmp_path):
    row = load_rows(put(tmp_path / "a.jsonl", '{"prompt": "p", "x": NaN, "y": -Infinity}'))[0]
    assert math.isnan(row["x"]) and row["y"] == -math.inf


def test_a_parquet_file_keeps_json_columns_and_loses_arrows_padding(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"prompt": [USER, CALL, RESULT], "gold": 5}, {"prompt": [USER], "gold": None}]
    to_dataset(rows).to_parquet(tmp_path / "json.parquet")
    assert load_rows(tmp_path / "json.parquet") == rows
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "plain.parquet")
    assert load_rows(tmp_path / "plain.parquet") == rows


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.json", " \n ", "is empty"),
        ("a.csv", "", "is empty"),
        ("a.txt", "hi", "unknown ending '.txt'"),
        ("a.jsonl", '{"prompt": "p"}\n{"prompt": \n', "line 2 column"),
        ("a.jsonl", '{"prompt": "p"}\n"hi"\n', "line 2: expected an object, got str 'hi'"),
        ("a.jsonl", '[{"prompt": "p"}]', "line 1: expected an object, got list"),
        ("a.json", '[{"prompt": "p"},\n {"prompt": }]', "line 2 column"),
        ("a.json", '[{"prompt": "p"},\n\n 7]', "line 3 (item 2): expected an object, got int 7"),
        ("a.json", '{"data": [{"prompt": "p"}, null]}', "item 2 of 'data': expected an object, got NoneType None"),
        ("a.json", '{"prompt": "p"}', "got an object with the keys prompt"),
        ("a.json", '"p"', "expected an array of objects"),
        ("a.json", "[" * 100_000, "JSON that cannot be read"),
        ("a.jsonl", '{"n": ' + "9" * 5000 + "}", "line 1: JSON that cannot be read"),
        ("a.jsonl", b'{"prompt": "p"}\n{"prompt": "\xff"}', "byte 0xff at position 28 (line 2)"),
        ("a.jsonl", b'\xef\xbb\xbf{"prompt": "\xff"}', "byte 0xff at position 15 (line 1)"),
        ("a.csv", "prompt,n\np,1\nq\n", "line 3: 1 cells where the header has 2 (prompt, n)"),
        ("a.csv", 'prompt,n\n"p\np",1\nq,2,3\n', "line 4: 3 cells where the header has 2"),
        ("a.csv", 'prompt\n"never closed\n', "not well-formed"),
        ("a.csv", "prompt,prompt\np,q\n", "line 1: the column 'prompt' occurs more than once"),
        ("a.parquet", "not parquet", "is not a Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(tmp_path, name, content, says):
    path = put(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        load_rows(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_file_is_an_error_with_near_names(tmp_path):
    put(tmp_path / "prompts.jsonl", "{}")
    with pytest.raises(DataError, match=r"promts\.jsonl does not exist\. Did you mean 'prompts\.jsonl'\?"):
        load_rows(tmp_path / "promts.jsonl")
    with pytest.raises(DataError, match="nor does its folder"):
        load_rows(tmp_path / "nowhere" / "a.jsonl")


def test_a_folder_is_an_error_that_lists_the_files_in_it(tmp_path):
    put(tmp_path / "a.jsonl", "{}")
    with pytest.raises(DataError, match=r"is a folder, not a file.*: a\.jsonl"):
        load_rows(str(tmp_path))


def test_a_long_text_given_as_a_file_name_is_a_plain_error():
    with pytest.raises(DataError, match="does not exist"):
        load_rows("What is the capital of France? " * 200)


# --- other sources -----------------------------------------------------------------------------------------------


def test_texts_message_lists_and_dicts_become_rows():
    assert load_rows(["a", "b"]) == [{"prompt": "a"}, {"prompt": "b"}]
    assert load_rows(iter([[USER], "b"])) == [{"prompt": [USER]}, {"prompt": "b"}]
    assert load_rows([{"prompt": "a", "name": "x"}]) == [{"prompt": "a", "name": "x"}]
    assert load_rows([]) == []


def test_a_datasets_object_and_a_dict_of_splits_are_read():
    rows = [{"prompt": "a", "gold": 1}]
    assert load_rows(to_dataset(rows)) == rows
    assert load_rows({"train": to_dataset(rows), "test": rows}, split="test") == rows
    with pytest.raises(DataError, match="no split 'dev'; it has: train"):
        load_rows({"train": to_dataset(rows)}, split="dev")


def test_a_data_frame_gives_rows_and_not_its_column_names():
    class Frame:  # what load_rows asks of a pandas.DataFrame
        def to_dict(self, orient):
            return [{"prompt": orient}]

        def __iter__(self):
            return iter(["prompt"])

    assert load_rows(Frame()) == [{"prompt": "records"}]


@pytest.mark.parametrize("source", [None, 7, b"bytes", [1, 2], [("a", "b")], {"prompt": "one row"}, ["a.jsonl"]])
def test_a_source_of_an_unknown_kind_is_an_error(source):
    with pytest.raises(DataError):
        load_rows(source)


def test_a_name_without_a_file_is_asked_of_the_hub(monkeypatch, tmp_path):
    import datasets

    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return to_dataset([{"prompt": "p"}])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("your-org/your-prompts", split="test") == [{"prompt": "p"}]
    assert load_rows([{"name": "your-org/your-prompts", "split_type": "train[:1]"}]) == [{"prompt": "p"}]
    assert asked == [("your-org/your-prompts", "test"), ("your-org/your-prompts", "train[:1]")]


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_what_was_tried(monkeypatch, tmp_path):
    import datasets

    def load_dataset(name, split):
        raise ConnectionError("Couldn't reach it")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as caught:
        load_rows("your-org/your-prompts")
    text = str(caught.value)
    assert "datasets.load_dataset('your-org/your-prompts', split='train')" in text
    assert "ConnectionError: Couldn't reach it" in text and "local .jsonl" in text


# --- dataset entries ---------------------------------------------------------------------------------------------


def test_an_entry_of_files_needs_no_name(tmp_path):
    put(tmp_path / "a.jsonl", '{"prompt": "p"}')
    for files in (str(tmp_path / "a.jsonl"), [str(tmp_path / "a.jsonl")], {"train": str(tmp_path / "a.jsonl")}):
        assert (
            load_rows([{"data_files": files}])
            == load_rows({"data_files": files, "split": "train"})
            == [{"prompt": "p"}]
        )
    with pytest.raises(DataError, match=r"dataset entry 1 \('no\.jsonl'\)"):
        load_rows([{"data_files": "no.jsonl"}])


def test_an_entry_without_name_and_files_is_not_looked_up_anywhere(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for entry in ({"name": None}, {"name": ""}, {"name": None, "split": "train"}, {"data_files": None}):
        with pytest.raises(DataError, match="it needs a name"):
            load_rows([entry])


@pytest.fixture
def numbered(tmp_path):
    """Ten rows: question q0..q9, level easy for the even ones."""
    path = tmp_path / "n.jsonl"
    write_rows(path, [{"question": f"q{n}", "level": "hard" if n % 2 else "easy"} for n in range(10)])
    return str(path)


def questions(rows):
    return [int(row["question"][1:]) for row in rows]


def test_the_rows_of_all_entries_follow_each_other(numbered, tmp_path):
    write_rows(tmp_path / "m.jsonl", [{"question": "q10", "level": "easy"}])
    entries = [{"name": numbered, "num_samples": 2}, {"name": "x", "data_files": [str(tmp_path / "m.jsonl"), numbered]}]
    assert questions(load_rows(entries)) == [0, 1, 10, *range(10)]
    assert questions(load_rows({"name": "x", "data_files": {"test": str(tmp_path / "*.jsonl")}, "split": "test"})) == [
        10,
        *range(10),
    ]


def test_an_entry_renames_filters_and_takes_the_first(numbered):
    entry = {"name": numbered, "rename": {"question": "prompt"}, "filter_data": "true", "num_samples": "2"}
    entry |= {"filter_column_value": "level", "filter_value": "hard"}
    assert load_rows([entry]) == [{"prompt": "q1", "level": "hard"}, {"prompt": "q3", "level": "hard"}]


def test_an_entry_may_exchange_two_columns(numbered):
    entry = {"name": numbered, "rename": {"question": "level", "level": "question"}, "num_samples": 1}
    assert load_rows([entry]) == [{"level": "q0", "question": "easy"}]


def test_an_entry_shuffles_by_its_seed_before_it_takes_the_first(numbered):
    def taken(seed):
        return questions(load_rows([{"name": numbered, "shuffle": True, "seed": seed, "num_samples": 4}]))

    assert taken(1) == taken(1) != taken(2)
    assert len(set(taken(1))) == 4 and taken(1) != [0, 1, 2, 3]


def test_an_entry_may_say_the_format_of_its_file(tmp_path):
    put(tmp_path / "rows.txt", '{"prompt": "p"}\n{"prompt": "q"}\n')
    put(tmp_path / "one.jsonl", '{"prompt": "r"}\n')
    assert load_rows([{"name": str(tmp_path / "rows.txt"), "format": "json"}]) == [{"prompt": "p"}, {"prompt": "q"}]
    assert load_rows([{"name": str(tmp_path / "one.jsonl"), "format": "json"}]) == [{"prompt": "r"}]


def test_an_entry_runs_a_named_processing_function_on_each_row(numbered, tmp_path, monkeypatch):
    put(tmp_path / "my_rows_for_test.py", "def shout(row):\n    return {'prompt': row['question'].upper()}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = {"name": numbered, "num_samples": 1, "processing_func": "my_rows_for_test:shout"}
    assert load_rows([entry]) == [{"prompt": "Q0"}]
    with pytest.raises(DataError, match=r"returned None for row 1; it must return the row"):
        load_rows([entry | {"processing_func": lambda row: None}])


def test_a_processing_function_without_a_module_is_left_out_aloud(numbered, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(load_rows([{"name": numbered, "processing_func": "format_prompts"}])) == 10
    assert "'format_prompts' is not a 'module:function' path and is not run" in caplog.text


def test_a_filter_that_is_off_is_said_aloud(numbered, caplog):
    entry = {"name": numbered, "filter_data": False, "filter_column_value": "level", "filter_value": "hard"}
    assert len(load_rows([entry])) == 10 and "its filter is off" in caplog.text


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rename": {"query": "prompt"}}, "no column is called query; it has: question, level"),
        ({"rename": {"question": "level"}}, "two columns of row 1 one name"),
        ({"rename": ["question"]}, "rename must map old names to new ones"),
        ({"filter_data": True}, "filter_column_value must name a column, got None; it has: question, level"),
        (
            {"filter_data": True, "filter_column_value": "level", "filter_value": 5},
            "no row has level equal to filter_value 5; values there: 'easy', 'hard'",
        ),
        ({"filter_data": "yes"}, "filter_data must be true or false, got 'yes'"),
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"num_samples": True}, "num_samples must be an integer"),
        ({"shuffle": True, "seed": "x"}, "seed must be an integer"),
        ({"format": "text"}, "format 'text' is unknown; known: json, jsonl, csv, tsv, parquet"),
        ({"split": "test"}, "a file has no splits, so 'test' cannot be taken"),
        ({"split": "train", "split_type": "test"}, "contradict"),
        ({"data_files": 7}, "data_files must be a path or a list of paths, got 7"),
        ({"data_files": {"test": "x.jsonl"}}, "data_files has no split 'train'; it has: test"),
        ({"data_files": "nothing-*.jsonl"}, "does not exist"),
    ],
)
def test_a_fault_in_an_entry_names_the_entry(numbered, keys, says):
    with pytest.raises(DataError) as caught:
        load_rows([{"name": numbered}, {"name": numbered} | keys])
    assert says in str(caught.value) and str(caught.value).startswith("dataset entry 2 (")


# --- columns -----------------------------------------------------------------------------------------------------


def test_the_column_error_names_the_missing_and_the_present_columns():
    with pytest.raises(DataError) as caught:
        check_columns([{"prompt": "p", "answer": "a"}], "cpo", "data.jsonl")
    assert str(caught.value) == (
        "method 'cpo' needs the columns prompt, chosen, rejected; missing in data.jsonl: chosen, rejected. "
        "It has: prompt, answer"
    )


@pytest.mark.parametrize("other", ["question", "instruction", "messages"])
def test_a_column_that_may_be_the_prompt_is_suggested_and_not_renamed(other):
    with pytest.raises(DataError, match=rf"needs the column prompt; .*say rename: {{{other}: prompt}}"):
        check_columns([{other: "p"}], "grpo")


def test_one_conversation_given_as_the_rows_is_recognised():
    with pytest.raises(DataError, match="the messages of one conversation"):
        check_columns(load_rows([USER]), "grpo")


def test_columns_are_those_of_all_rows():
    check_columns([{"x": 1}, {"prompt": "p"}], "grpo")
    assert "row 1: prompt is missing" in fault([{"x": 1}, {"prompt": "p"}])


def test_an_unknown_method_is_an_error_that_lists_the_known_ones():
    with pytest.raises(DataError, match="method 'ppo' is unknown; known: grpo, reward, cpo"):
        check_rows([{"prompt": "p"}], "ppo")


def test_zero_rows_are_an_error():
    assert "d.jsonl has no rows" in fault([])


@pytest.mark.parametrize(
    "name",
    [
        "completions",
        "prompts",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
        "completion",
        "completion_ids",
    ],
)
def test_a_column_with_a_name_of_trls_own_must_be_renamed_for_grpo_only(name):
    text = fault([{"prompt": "p"}, {"prompt": "q", name: "x"}])
    assert repr(name) in text and "Rename" in text
    check_rows([{"chosen": "a", "rejected": "b", name: "x"}], "reward")


# --- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        [USER],
        [{"role": "system", "content": ""}, USER],
        [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}],
        [USER, CALL, RESULT],
        [USER, CALL | {"content": ""}, {"role": "tool", "content": "no id"}],
        [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}, RESULT],
        [USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "Grüße 🎉"}]}],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": "?"}, {"role": "user", "content": "b"}],
    ],
)
def test_a_prompt_that_trains_passes(prompt):
    check_rows([{"prompt": prompt}, {"prompt": "text and messages may be mixed"}], "grpo")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "prompt is blank"),
        (" \n\t", "prompt is blank"),
        ([], "prompt is an empty list"),
        (None, "prompt is None, not text or a list of messages"),
        (5, "prompt is 5, not text"),
        ({"role": "user"}, "not text or a list of messages"),
        (["hi"], "prompt message 1 is 'hi', not a dict"),
        ([{"content": "x"}], "prompt message 1 has no role"),
        ([USER, {"role": "robot", "content": "x"}], "prompt message 2 has the unknown role 'robot'"),
        ([{"role": "user", "content": None}], "prompt message 1 has no content"),
        ([{"role": "user"}], "prompt message 1 has no content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}, USER], "prompt message 1 has no content"),
        ([USER, CALL, {"role": "tool", "tool_call_id": "c1"}], "prompt message 3 has no content"),
        ([{"role": "user", "content": 5}], "has the content 5"),
        ([{"role": "user", "content": ["a"]}], "each must be a dict with a type"),
        ([{"role": "user", "content": [{"text": "a"}]}], "each must be a dict with a type"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "text only"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}], "'input_audio'"),
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "a part of type 'image'; this version"),
        ([{"role": "user", "content": [{"type": "text"}]}], "each must have a text"),
        ("half \ud83d", "'prompt' holds half an emoji (U+D83D alone)"),
        ([USER | {"content": "half \ude00"}], "'prompt' holds half an emoji (U+DE00 alone)"),
        ([USER | {"content": [{"type": "text", "text": "\ud83d"}]}], "holds half an emoji"),
        ([USER, {"role": "user", "content": "  "}], "has a last user message that is blank"),
        ([{"role": "user", "content": []}], "has a last user message that is blank"),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], "has a last user message that is blank"),
        ([USER, {"role": "assistant", "content": "5"}], "ends with an assistant turn"),
        ([USER, CALL], "cut it after the last user or tool turn"),
        ([USER | {"tool_calls": None}], "has tool_calls: None"),
        ([CALL | {"tool_calls": "f()"}, RESULT], "not a list"),
        ([CALL | {"tool_calls": [{}]}, RESULT], "empty or malformed tool call {}"),
        ([CALL | {"tool_calls": ["f"]}, RESULT], "empty or malformed tool call 'f'"),
        ([CALL | {"tool_calls": [{"id": "c1", "function": {"arguments": {}}}]}, RESULT], "without a function name"),
        ([CALL | {"tool_calls": [{"id": "c1", "function": {"name": "", "arguments": {}}}]}, RESULT], "function name"),
        ([CALL | {"tool_calls": [{"id": "c1", "function": None}]}, RESULT], "without a function name"),
        ([CALL | {"tool_calls": [{"id": "c1", "function": {"name": "f"}}]}, RESULT], "call 1 (f) without arguments"),
        ([CALL | {"tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": [1]}}]}, RESULT], "neither"),
        ([USER, RESULT], "has an orphan tool result for 'c1'"),
        ([USER, {"role": "tool", "content": "5"}], "has an orphan tool result: no assistant"),
        ([USER, RESULT, CALL, RESULT], "has an orphan tool result"),
        ([USER, CALL, RESULT | {"tool_call_id": "c2"}], "has an orphan tool result for 'c2'"),
    ],
)
def test_a_prompt_fault_is_named_with_its_row(prompt, says):
    text = fault([{"prompt": "fine"}, {"prompt": prompt}])
    assert "row 2: " in text and says in text and "1 of 2 rows have faults" in text and "row 1" not in text


A = [{"role": "assistant", "content": "a"}]
B = [{"role": "assistant", "content": "b"}]
ECHO = "What is the  capital of Peru?"


def answer(text):
    return {"role": "assistant", "content": text}


def spaced(messages):
    return [{**message, "content": f" {message['content']}\u00a0"} for message in messages]


@pytest.mark.parametrize(
    ("method", "row", "says"),
    [
        ("reward", {"chosen": None, "rejected": "b"}, "chosen is None, not text"),
        ("reward", {"chosen": "a", "rejected": None}, "rejected is None, not text"),
        ("reward", {"chosen": "a"}, "rejected is missing"),
        ("reward", {"chosen": " ", "rejected": "b"}, "chosen is blank"),
        ("cpo", {"prompt": "p", "chosen": "a", "rejected": ""}, "rejected is blank"),
        ("reward", {"chosen": [], "rejected": "b"}, "chosen is an empty list"),
        ("reward", {"chosen": "a", "rejected": "a "}, "chosen and rejected are equal"),
        ("cpo", {"prompt": [USER], "chosen": A, "rejected": A}, "chosen and rejected are equal"),
        ("reward", {"chosen": "a", "rejected": B}, "rejected is messages, but the dataset begins with text"),
        ("cpo", {"prompt": "p", "chosen": A, "rejected": B}, "chosen is messages, but the dataset begins with text"),
        ("cpo", {"prompt": "", "chosen": "a", "rejected": "b"}, "prompt is blank"),
        ("cpo", {"prompt": [USER, *A], "chosen": A, "rejected": B}, "prompt ends with an assistant turn"),
        ("reward", {"chosen": [{"role": "assistant"}], "rejected": B}, "chosen message 1 has no content"),
        ("reward", {"chosen": [USER, RESULT, *A], "rejected": [USER, *B]}, "chosen has an orphan tool result"),
        ("reward", {"chosen": "a b", "rejected": "ab\u00a0"}, "chosen and rejected are equal but for white space"),
        ("cpo", {"prompt": [USER], "chosen": A, "rejected": spaced(A)}, "chosen and rejected are equal but for white"),
        ("reward", {"chosen": "\u200b", "rejected": "b"}, "chosen is blank"),
        ("cpo", {"prompt": [USER], "chosen": [answer(" \u3000")], "rejected": B}, "chosen is blank: its last message"),
        ("reward", {"chosen": [USER, *A], "rejected": [USER, answer("")]}, "rejected is blank: its last message"),
        ("reward", {"chosen": [USER, *A], "rejected": [*B, USER]}, "rejected ends with a turn of role 'user'"),
        ("cpo", {"prompt": [USER], "chosen": [USER, *A], "rejected": B}, "chosen begins with the prompt, which has a"),
        ("reward", {"prompt": [USER], "chosen": A, "rejected": [USER, *B]}, "rejected begins with the prompt, which"),
        (
            "cpo",
            {"prompt": "What is the capital of Peru?", "chosen": ECHO + " Lima", "rejected": ECHO + "\nCusco"},
            "chosen and rejected both begin with the prompt, which has a column of its own",
        ),
        ("cpo", {"prompt": [USER], "chosen": [CALL, RESULT, *A], "rejected": B}, "chosen holds a tool result, which"),
        ("reward", {"prompt": "", "chosen": "a", "rejected": "b"}, "prompt is blank"),
        ("reward", {"prompt": [USER, *A], "chosen": A, "rejected": B}, "prompt ends with an assistant turn"),
    ],
)
def test_a_preference_fault_is_named_with_its_column(method, row, says):
    text = fault([row, {"prompt": "p", "chosen": "yes", "rejected": "no"}], method)
    assert "row 1: " in text and says in text


def test_one_form_holds_for_all_rows_of_a_preference_dataset():
    text = fault([{"chosen": A, "rejected": B}, {"chosen": "a", "rejected": "b"}], "reward")
    assert "row 2: chosen is text, but the dataset begins with messages" in text and "row 1" not in text


def test_strings_and_messages_are_not_mixed_within_a_row_either_and_all_rows_are_told_at_once():
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": [USER], "chosen": A, "rejected": B}]
    rows += [{"prompt": "p", "chosen": A, "rejected": "b"}, {"chosen": "a", "rejected": "a "}]
    text = fault(rows, "reward")
    assert "row 2: prompt is messages, but the dataset begins with text; use one form in all rows; chosen is" in text
    assert "row 3: chosen is messages, but the dataset begins with text" in text
    assert "row 4: prompt is missing; chosen and rejected are equal but for white space" in text
    assert "3 of 4 rows have faults" in text and "row 1" not in text


def test_sound_preference_rows_pass():
    check_rows([{"chosen": "Paris", "rejected": "paris"}], "reward")
    check_rows([{"chosen": [USER, CALL, RESULT, *A], "rejected": [USER, CALL, RESULT, *B]}], "reward")
    check_rows([{"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi!"}], "cpo")
    check_rows([{"prompt": [USER], "chosen": [CALL], "rejected": B}], "cpo")
    check_rows([{"chosen": "a", "rejected": "b"}], "reward")
    check_rows([{"chosen": [USER, *A], "rejected": [USER, *B]}], "reward")
    check_rows([{"prompt": [USER, CALL, RESULT], "chosen": A, "rejected": B}], "cpo")


def test_a_tool_result_in_an_answer_may_answer_a_call_of_the_prompt():
    text = fault([{"prompt": [USER, CALL], "chosen": [RESULT, *A], "rejected": B}], "cpo")
    assert "ends with an assistant turn" in text and "orphan" not in text


def test_a_row_that_is_no_dict_is_a_fault():
    assert "row 2: it is 'x', not a dict" in fault([{"prompt": "p"}, "x"])


NESTED: list = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (datetime.datetime(2026, 1, 2), "holds a datetime"),
        (datetime.date(2026, 1, 2), "holds a date"),
        (b"raw", "holds a bytes (b'raw')"),
        (decimal.Decimal("1.5"), "holds a Decimal"),
        ({1, 2}, "holds a set"),
        (object(), "holds a object"),
        ({"a": [{"b": b"raw"}]}, "holds a bytes"),
        ({b"raw": 1}, "holds a bytes"),
        ("half \ud83d", "holds half an emoji"),
        ({"half \ud83d": 1}, "holds half an emoji"),
        ([1.0, float("nan")], "holds nan within"),
        ({"a": float("-inf")}, "holds -inf within"),
        (2**63, "holds 9223372036854775808, a number beyond 64 bits"),
        ([-(2**63) - 1], "a number beyond 64 bits"),
        (NESTED, "is nested more than 100 levels deep"),
    ],
)
def test_a_value_that_training_could_not_be_given_is_named_with_its_row_and_column(value, says):
    text = fault([{"prompt": "fine", "extra": 1}, {"prompt": "too", "extra": value}])
    assert "row 2: 'extra'" in text and says in text and len(text) < 400
    assert "row 1" not in text


def test_values_that_json_has_a_form_for_pass_and_come_through_training_s_dataset():
    rows = [
        {"prompt": "a", "x": {"n": [1, 2.5, None, True, {"k": "Grüße 🎉"}]}, "y": float("nan"), "z": 2**63 - 1},
        {"prompt": "b", "x": [], "y": 1.0, "z": -(2**63)},
    ]
    check_rows(rows, "grpo")
    to_dataset(rows)


def test_a_value_of_endless_repetition_is_looked_at_once():
    again = ["x"] * 9
    for _ in range(12):  # 9 ** 13 items where each is counted
        again = [again] * 9
    check_rows([{"prompt": "a", "x": again}], "grpo")
    assert len(fault([{"prompt": again}])) < 2000


def test_all_faults_of_a_row_are_named():
    assert "row 1: prompt message 1 has no role; prompt message 1 has no content" in fault([{"prompt": [{}]}])


def test_ten_rows_are_named_and_the_rest_counted():
    rows = [{"prompt": "" if n < 27 else "fine"} for n in range(300)]
    lines = fault(rows).splitlines()
    assert lines[0] == "d.jsonl cannot be trained on with method 'grpo':"
    assert lines[1] == "  row 1: prompt is blank" and lines[10] == "  row 10: prompt is blank"
    assert lines[11] == "  ... and 17 more; 27 of 300 rows have faults"


# --- splitting ---------------------------------------------------------------------------------------------------


def rows_of(*prompts):
    return [{"prompt": prompt, "at": at} for at, prompt in enumerate(prompts)]


def test_a_share_of_the_prompts_is_held_out_and_order_is_kept():
    rows = rows_of(*(f"p{n}" for n in range(30)))
    train, held_out = split_rows(rows, 0.1)
    assert (len(train), len(held_out)) == (27, 3)  # 0.1 * 30 is 3.0000000000000004
    assert [row["at"] for row in train] == sorted(row["at"] for row in train)
    assert sorted(train + held_out, key=lambda row: row["at"]) == rows
    assert len(split_rows(rows, 0.11)[1]) == 4 and len(split_rows(rows, 5)[1]) == 5
    assert split_rows(rows, 0) == split_rows(rows, 0.0) == (rows, [])


def test_the_side_of_a_prompt_depends_on_the_seed_and_not_on_the_order_of_rows():
    rows = rows_of(*(f"p{n}" for n in range(20)))

    def held_out(rows, seed):
        return {row["prompt"] for row in split_rows(rows, 5, seed=seed)[1]}

    assert held_out(rows, 0) == held_out(rows[::-1], 0) != held_out(rows, 1)
    assert held_out(rows, 0) == held_out(rows + rows, 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_prompt_in_other_clothes_is_on_the_same_side(seed):
    rows = rows_of("Hi  there", "hi there\n", [{"role": "user", "content": "HI there"}], "other", "third")
    train, held_out = split_rows(rows, 1, seed=seed)
    sides = [{row["at"] for row in side} & {0, 1, 2} for side in (train, held_out)]
    assert {0, 1, 2} in sides


def test_reward_pairs_are_split_by_what_comes_before_the_answer():
    rows = [{"chosen": [USER, *A], "rejected": [USER, *B]}, {"chosen": [USER, *B], "rejected": [USER, *A]}]
    rows += [{"chosen": [{"role": "user", "content": "x"}, *A], "rejected": [USER, *B]}]
    assert sorted(len(side) for side in split_rows(rows, 1)) == [1, 2]
    assert len(split_rows([{"chosen": "a", "rejected": "b"}, {"chosen": "c", "rejected": "d"}], 1)[1]) == 1


def test_a_split_column_decides_and_is_taken_away():
    rows = [{"prompt": "a", "split": "train"}, {"prompt": "b", "split": "test"}, {"prompt": "c", "split": "held_out"}]
    rows.append({"prompt": "d", "split": "validation"})
    assert split_rows(rows, 0.9) == ([{"prompt": "a"}], [{"prompt": "b"}, {"prompt": "c"}, {"prompt": "d"}])


def test_a_split_column_that_says_only_train_leaves_the_share_to_decide():
    train, held_out = split_rows([{"prompt": p, "split": "train"} for p in "abcd"], 0.5)
    assert (len(train), len(held_out)) == (2, 2) and "split" not in train[0]


def test_a_split_column_with_other_words_is_a_column_like_any():
    rows = [{"prompt": "a", "split": "train"}, {"prompt": "b", "split": "wood"}]
    assert split_rows(rows, 0) == (rows, [])


def test_a_prompt_on_both_sides_of_a_split_column_is_held_out_and_counted(caplog):
    rows = [{"prompt": p, "split": s} for p, s in (("a", "train"), ("b", "train"), ("A", "test"), (" a", "train"))]
    assert split_rows(rows, 0) == ([{"prompt": "b"}], [{"prompt": "A"}])
    assert "2 rows that the column 'split' marks as 'train' are left out of training" in caplog.text
    with pytest.raises(DataError, match="holds out every prompt and leaves none to train on"):
        split_rows([rows[0], rows[2]], 0)


@pytest.mark.parametrize("held_out", [2, 3, 0.9])
def test_a_split_without_a_training_prompt_is_an_error(held_out):
    with pytest.raises(DataError, match="leave none to train on"):
        split_rows(rows_of("a", "b"), held_out)


def test_a_split_column_without_a_training_row_is_an_error():
    with pytest.raises(DataError, match="leaves none to train on"):
        split_rows([{"prompt": "a", "split": "test"}], 0)


@pytest.mark.parametrize("held_out", [-1, -0.1, 1.0, 2.5, math.nan, True, "0.2", None])
def test_a_held_out_that_is_no_share_and_no_number_is_an_error(held_out):
    with pytest.raises(DataError, match="held_out must be a share"):
        split_rows(rows_of("a", "b"), held_out)


# --- forms -------------------------------------------------------------------------------------------------------


def test_a_text_prompt_becomes_one_user_message_and_messages_are_copied():
    messages = [USER | {"content": "x"}]
    copied = as_messages(messages)
    copied[0]["content"] = "changed"
    assert messages[0]["content"] == "x" and as_messages("Hi") == [{"role": "user", "content": "Hi"}]
    with pytest.raises(DataError, match="got None"):
        as_messages(None)


def test_normalised_rows_all_have_message_prompts():
    rows = [{"prompt": "a", "n": 1}, {"prompt": [USER]}, {"chosen": "c"}]
    assert normalise(rows) == [
        {"prompt": [{"role": "user", "content": "a"}], "n": 1},
        {"prompt": [USER]},
        {"chosen": "c"},
    ]
    assert rows[0]["prompt"] == "a"


def test_columns_are_aligned_with_none_where_a_row_lacks_one():
    assert columns_of([{"prompt": "a", "x": 1}, {"y": 2, "prompt": "b"}]) == {"x": [1, None], "y": [None, 2]}


def test_a_sample_is_the_first_the_middle_and_the_last():
    rows = [*rows_of("a", "b", "c", "d", "e"), {"prompt": "f", "late": 1}]
    assert sample(rows) == (["a", "c", "f"], {"at": [0, 2, None], "late": [None, None, 1]})
    assert sample(rows, 1)[0] == ["a"] and sample(rows, 99)[0] == list("abcdef")
    assert sample([]) == ([], {})
    with pytest.raises(DataError, match="n=0"):
        sample(rows, 0)


def test_the_fingerprint_knows_the_order_of_rows_and_not_of_keys():
    one, other = [{"a": 1, "b": {"c": 2, "d": 3}}, {"a": 2}], [{"b": {"d": 3, "c": 2}, "a": 1}, {"a": 2}]
    assert fingerprint(one) == fingerprint(other) != fingerprint(one[::-1])
    assert fingerprint([]) == "e3b0c44298fc1c14"  # the SHA-256 of nothing
    assert fingerprint([{"a": "\ud83d"}]) != fingerprint([{"a": "?"}])


# --- writing -----------------------------------------------------------------------------------------------------

MIXED = [
    {"prompt": [USER, CALL, RESULT], "t": {"t": 5}, "text": "é \u2028 日本", "n": 1, "any": 1, "some": None},
    {
        "prompt": [USER, CALL | {"tool_calls": [{"function": {"name": "f", "arguments": {"b": "x"}}}]}],
        "t": {"t": "2025"},
    }
    | {"text": "5", "n": -2, "any": "1", "some": {"k": [1, "a", None]}},
    {"prompt": [USER, CALL | {"tool_calls": [{"function": {"name": "f", "arguments": '{"b": 1}'}}]}], "t": {"t": None}}
    | {"text": "null", "n": 3, "any": [1, 2.5, {"x": {}}], "some": "null"},
    {"prompt": [USER], "t": {}, "text": "", "n": 0, "any": True, "some": None},
]


def test_written_rows_are_read_back_as_they_were(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    write_rows(path, MIXED)
    assert read_rows(path) == load_rows(path) == MIXED
    assert "日本" in path.read_text(encoding="utf-8")
    write_rows(path, [])
    assert read_rows(path) == []


def test_half_an_emoji_is_written_and_read_back(tmp_path):
    rows = [{"prompt": "cut \ud83d"}, {"prompt": "é"}]
    write_rows(tmp_path / "a.jsonl", rows)
    assert read_rows(tmp_path / "a.jsonl") == rows
    assert (tmp_path / "a.jsonl").read_bytes() == b'{"prompt": "cut \\ud83d"}\n{"prompt": "\xc3\xa9"}\n'


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.jsonl"
    write_rows(path, [{"prompt": "old"}])
    with pytest.raises(DataError, match=r"row 2 cannot be written as JSON.*prompt \(str\), when \(set\)"):
        write_rows(path, [{"prompt": "new"}, {"prompt": "p", "when": {1}}])
    assert read_rows(path) == [{"prompt": "old"}] and list(tmp_path.iterdir()) == [path]


# --- datasets ----------------------------------------------------------------------------------------------------


def exact(value):
    return json.dumps(value, sort_keys=True)  # tells 1 from 1.0 and from True, which == does not


def test_a_dataset_gives_back_every_value_as_it_was():
    dataset = to_dataset(MIXED)
    assert exact(dataset.to_list()) == exact(MIXED)
    assert exact([dataset[at] for at in range(len(MIXED))]) == exact(MIXED)
    assert "tool_calls" not in dataset[0]["prompt"][0]


@pytest.mark.parametrize(
    "values",
    [
        [[{"a": 1}], [{"b": "x"}]],
        ["text", [USER]],
        [1, 2.5],
        [True, 1],
        [True, False, None],
        [0.1, -0.0, None],
        [None, None],
        ["5", 5],
        ["null", None, {"a": None}],
        [[], [USER]],
        [[1], ["a"]],
        [2**63, -(2**63)],
        [{"deep": {"x": [0.1 + 0.2, 1e-7]}}],
    ],
)
def test_a_column_of_any_mixture_comes_back_exactly(values):
    rows = [{"prompt": "p", "x": value} for value in values]
    assert exact(to_dataset(rows).to_list()) == exact(rows)


def test_a_row_that_lacks_a_column_has_none_there():
    assert to_dataset([{"prompt": "a", "x": 1}, {"prompt": "b"}]).to_list()[1] == {"prompt": "b", "x": None}


def test_no_rows_are_an_empty_dataset():
    assert to_dataset([]).to_list() == []


@pytest.mark.parametrize(
    "value", ["half \ud83d", {"x": "half \ud83d"}, {"x": math.nan}, {"x": 2**64}, 2**70, {1: "a"}, {"x": {1, 2}}]
)
def test_a_value_that_datasets_would_change_is_an_error(value):
    with pytest.raises(DataError):
        to_dataset([{"prompt": "a", "x": None}, {"prompt": "b", "x": value}])


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "a.parquet", "x")
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    for use in (lambda: to_dataset([]), lambda: load_rows("org/name"), lambda: load_rows("a.parquet")):
        with pytest.raises(MissingExtra, match=r'pip install "praison-agent-rl\[train\]"'):
            use()


def test_a_datasets_without_json_columns_is_an_error_that_says_which_to_install(monkeypatch):
    old = types.ModuleType("datasets")
    old.__version__ = "4.0.0"
    monkeypatch.setitem(sys.modules, "datasets", old)
    with pytest.raises(DataError, match=r'datasets 4\.0\.0 has no Json columns.*pip install -U "datasets>=5"'):
        to_dataset([])


def test_reading_and_checking_load_no_heavy_package():
    code = "import sys, praison_agent_rl.data; print([m for m in ('torch', 'datasets', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_all_names_that_the_module_offers_exist():
    assert all(getattr(data, name) is not None for name in data.__all__)
