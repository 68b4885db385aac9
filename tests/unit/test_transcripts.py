"""What is written to a store comes back as it was, can be chosen and rated, and takes room once."""

import doctest
import gc
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.errors import DataError
from praison_agent_rl.records import Call, Run
from praison_agent_rl.transcripts import (
    DEFAULT_STORE,
    Losses,
    TranscriptWriter,
    export_runs,
    feedback,
    iter_run_dicts,
    masking,
    plain_values,
    read_calls,
    read_runs,
)
from praison_agent_rl.transcripts.files import GrowingFile
from praison_agent_rl.transcripts.masking import Mask, Masks, find_mask
from praison_agent_rl.transcripts.plain_values import Kept, equal_prefix, plain, revive
from praison_agent_rl.transcripts.redaction import find_redactor
from praison_agent_rl.transcripts.shared_writers import shared_writer
from tests.unit.test_redaction import PLANTED

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(text: Any) -> dict[str, Any]:
    return says("user", text)


def answer(text: str) -> dict[str, Any]:
    return says("assistant", text)


def asks_for(tool: str) -> dict[str, Any]:
    return says("assistant", None, tool_calls=[{"id": "t1", "function": {"name": tool, "arguments": "{}"}}])


def a_call(call_id: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    return Call(**{"id": call_id, "time": 1.0, "messages": messages, "reply": answer("Yes."), **more}).model_dump()


def a_run(run_id: str, **more: Any) -> dict[str, Any]:
    known = {"agent": "helper", "parent": None, "session": None, "tags": [], "style": "chat", "prompt": "Hello?"}
    return {"run": run_id, **known, "time": 1.0, "version": None, **more}


def write_run(writer: TranscriptWriter, run_id: str, *calls: Mapping[str, Any], **more: Any) -> None:
    ended = {key: more.pop(key, None) for key in ("output", "error")}
    begun = a_run(run_id, **more)
    writer.begin(begun)
    for call in calls:
        writer.call({**call, "run": run_id, "agent": begun["agent"]})
    writer.end(run_id, **ended, seconds=0.5)


def lines_in(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(store.iterdir()) for line in path.read_text("ascii").splitlines()]


def calls_in(store: Path) -> list[dict[str, Any]]:
    return [line for line in lines_in(store) if line["kind"] == "call"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "transcripts"


@pytest.fixture
def writer(store: Path) -> Iterator[TranscriptWriter]:
    writer = TranscriptWriter(store)
    yield writer
    writer.close()
    assert writer.dropped == 0


# --- there and back -------------------------------------------------------------------------------------------------


def test_a_run_comes_back_with_everything_that_was_said_of_it(writer: TranscriptWriter, store: Path) -> None:
    question = [says("system", "Be brief."), user("2+3?")]
    first = Call(
        id="c1",
        run="r1",
        agent="helper",
        time=10.0,
        seconds=0.25,
        model="m",
        version="v3",
        api="responses",
        messages=question,
        tools=TOOLS,
        settings={"temperature": 0.5, "tool_choice": "auto"},
        reply=asks_for("add"),
        finish="tool_calls",
        usage={"total_tokens": 7},
        logprobs={"content": [{"token": "5", "logprob": -0.1}]},
    )
    further = [*question, asks_for("add"), says("tool", "5", tool_call_id="t1")]
    second = first.model_copy(
        update={"id": "c2", "time": 11.0, "messages": further, "reply": None, "error": "stopped", "partial": True}
    )
    begun = a_run("r1", parent="r0", session="s", tags=["a", "b"], style="achat", time=9.5, version="v3")
    writer.begin(begun)
    writer.call(first.model_dump())
    writer.call(second.model_dump())
    writer.end("r1", output={"sum": 5}, error="late", seconds=2.0)
    about = {key: begun[key] for key in ("agent", "parent", "session", "tags", "style", "prompt", "time", "version")}
    expected = Run(id="r1", **about, seconds=2.0, output={"sum": 5}, error="late", calls=[first, second])
    assert list(read_runs(store)) == [expected]
    assert list(read_calls(store)) == [first, second]


def test_records_that_are_read_are_as_pydantic_would_make_them(writer: TranscriptWriter, store: Path) -> None:
    write_run(writer, "r1", a_call("c1", [user("Hi")]))
    feedback("r1", score=1, store=store)
    (run,) = read_runs(store)
    assert run == Run.model_validate(run.model_dump()) and run.calls[0].model_fields_set == set(Call.model_fields)
    assert run.model_copy(update={"tags": ["x"]}).tags == ["x"] and "id='r1'" in repr(run)
    with pytest.raises(ValueError, match="frozen"):
        run.calls[0].id = "other"


STRANGE = [
    *(b"\x00\xff", "lone \ud800 surrogate", 10**5000, -(10**30), float("inf"), {1: "one", None: 2, ("a", 1): 3}),
    *({"$bytes": "no bytes"}, {"$dict": []}, {"$other": {"$repr": 1}}, "\u2028 \x00 é", [[], {}, ""], True, 1.5, None),
]


@pytest.mark.parametrize("value", STRANGE, ids=range(len(STRANGE)))
def test_what_json_cannot_hold_comes_back(value: Any, writer: TranscriptWriter, store: Path) -> None:
    message = user([value, {"deep": value}])
    writer.call({"id": "c", "time": 1.0, "messages": [message], "reply": {"content": value}, "settings": {"x": value}})
    (call,) = read_calls(store)
    assert (call.messages, call.reply, call.settings) == ([message], {"content": value}, {"x": value})


def test_other_values_come_back_as_the_nearest_that_there_is() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    given = {"nan": float("nan"), "set": {2, 1}, "tuple": (1,), "odd": Odd(), "type": dict, "run": Call(**CALL)}
    back = revive(json.loads(json.dumps(plain(given))))
    assert back["nan"] != back["nan"] and back["set"] == [1, 2] and back["tuple"] == [1]
    assert back["odd"] == {"$repr": "<Odd without a description>"} and back["type"] == {"$repr": "<class 'dict'>"}
    assert Call(**back["run"]) == Call(**CALL)


CALL = {"id": "c", "time": 1.0, "messages": [{"role": "user", "content": "Hi"}]}


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(plain_values).failed == doctest.testmod(masking).failed == 0


def test_a_call_outside_of_any_run_is_found_among_the_calls(writer: TranscriptWriter, store: Path) -> None:
    writer.call(a_call("c1", [user("Hi")]))
    assert [call.id for call in read_calls(store)] == ["c1"] and list(read_runs(store)) == []


def test_calls_of_a_run_are_in_the_order_in_which_they_were_sent(writer: TranscriptWriter, store: Path) -> None:
    write_run(writer, "r1", a_call("late", [user("b")], time=2.0), a_call("early", [user("a")], time=1.0))
    assert [call.id for call in next(read_runs(store)).calls] == ["early", "late"]


def test_runs_come_in_the_order_in_which_they_end_and_unfinished_ones_last(
    writer: TranscriptWriter, store: Path
) -> None:
    for run_id in ("r1", "r2", "r3"):
        writer.begin(a_run(run_id))
    writer.end("r3", output="3", error=None, seconds=1.0)
    writer.end("r1", output="1", error=None, seconds=1.0)
    assert [(run.id, run.finished) for run in read_runs(store)] == [("r3", True), ("r1", True), ("r2", False)]


def test_a_call_that_ends_after_its_run_still_belongs_to_it(writer: TranscriptWriter, store: Path) -> None:
    write_run(writer, "r1", a_call("c1", [user("a")]))
    writer.call(a_call("c2", [user("b")], run="r1", time=2.0))
    assert [[call.id for call in run.calls] for run in read_runs(store)] == [["c1", "c2"]]


def test_a_run_whose_beginning_is_gone_is_known_by_its_calls(writer: TranscriptWriter, store: Path) -> None:
    writer.call(a_call("c1", [user("a")], run="r1", agent="helper", time=5.0))
    (run,) = read_runs(store)
    assert (run.id, run.agent, run.time, run.finished, len(run.calls)) == ("r1", "helper", 5.0, False, 1)


# --- room -----------------------------------------------------------------------------------------------------------


def test_a_call_that_extends_another_stores_what_is_new(writer: TranscriptWriter, store: Path) -> None:
    begun = [says("system", "Be brief."), user("2+3?")]
    more = [*begun, answer("5"), user("And 2+4?")]
    writer.call(a_call("c1", begun, reply=answer("5"), tools=TOOLS))
    writer.call(a_call("c2", more, reply=answer("6"), tools=[dict(tool) for tool in TOOLS]))
    first, second = calls_in(store)
    assert (first["after"], first["keep"], first["messages"], first["tools"]) == (None, 0, begun, TOOLS)
    assert (second["after"], second["keep"], second["messages"]) == ("c1", 3, [user("And 2+4?")])
    assert (second["tools"], second["tools_of"]) == (None, "c1")
    assert [call.messages for call in read_calls(store)] == [begun, more]
    assert [call.tools for call in read_calls(store)] == [TOOLS, TOOLS]


def test_a_reply_that_the_agent_sends_back_in_another_form_is_stored_as_sent(
    writer: TranscriptWriter, store: Path
) -> None:
    echo = says("assistant", "5", name="helper")
    writer.call(a_call("c1", [user("2+3?")], reply=answer("5")))
    writer.call(a_call("c2", [user("2+3?"), echo, user("Sure?")]))
    assert [call.messages for call in read_calls(store)][1] == [user("2+3?"), echo, user("Sure?")]
    assert calls_in(store)[1]["keep"] == 1


def test_an_edited_conversation_is_stored_as_sent(writer: TranscriptWriter, store: Path) -> None:
    sent = [
        [says("system", "S"), user("a"), answer("Yes."), user("b")],
        [says("system", "S"), user("a, b in short"), user("c")],
        [says("system", "S"), user("a")],
        [user("a")],
        [],
        [says("system", "S"), user("a"), answer("Yes."), user("b")],
    ]
    for number, messages in enumerate(sent):
        writer.call(a_call(f"c{number}", messages))
    assert [call.messages for call in read_calls(store)] == sent


def test_messages_that_the_framework_changes_in_place_are_stored_as_they_were_sent(
    writer: TranscriptWriter, store: Path
) -> None:
    history = [user("a"), user(["b", {"deep": 1}])]
    writer.call({"id": "c1", "time": 1.0, "messages": history, "tools": TOOLS})
    history[1]["content"][1]["deep"] = 2
    writer.call({"id": "c2", "time": 2.0, "messages": history, "tools": TOOLS})
    assert [call.messages[1]["content"][1]["deep"] for call in read_calls(store)] == [1, 2]


def test_strange_messages_are_recognised_when_they_are_sent_again(writer: TranscriptWriter, store: Path) -> None:
    class Array:
        """Compares as numpy's do: without a truth value."""

        def __eq__(self, other: object) -> Any:
            class NoTruth:
                def __bool__(self) -> bool:
                    raise ValueError("ambiguous")

            return NoTruth()

        def __hash__(self) -> int:
            return 1

        def __repr__(self) -> str:
            return "array([1])"

    image = user([b"\x00" * 999, (1, 2), float("nan"), Array()])
    writer.call({"id": "c1", "time": 1.0, "messages": [image]})
    writer.call({"id": "c2", "time": 2.0, "messages": [image, user("What is that?")]})
    assert [(line["keep"], len(line["messages"])) for line in calls_in(store)] == [(0, 1), (1, 1)]


def test_a_long_conversation_grows_with_its_length_and_not_with_its_square(
    writer: TranscriptWriter, store: Path
) -> None:
    messages, sizes = [says("system", "S")], []
    for turn in range(300):
        messages = [*messages, user(f"{turn:>200}")]
        writer.call(a_call(f"c{turn}", messages, reply=answer(f"Yes, {turn:>50}.")))
        messages.append(answer(f"Yes, {turn:>50}."))
        sizes.append(sum(path.stat().st_size for path in store.iterdir()))
    assert sizes[299] - sizes[199] < 1.1 * (sizes[199] - sizes[99]) and sizes[299] < 300 * 1000
    last = list(read_calls(store))[-1]
    assert last.messages == messages[:-1]


def test_many_conversations_at_once_each_go_on_from_their_own(writer: TranscriptWriter, store: Path) -> None:
    conversations = [[says("system", "S" * 1000), user(f"I am {number}.")] for number in range(100)]
    for turn in range(3):
        for number, messages in enumerate(conversations):
            writer.call(a_call(f"{turn}-{number}", messages, reply=answer("Go on.")))
            conversations[number] = [*messages, answer("Go on."), user(f"{turn}, says {number}")]
    assert all(
        line["after"] == f"{turn - 1}-{number}" for line in calls_in(store) for turn, number in ids(line) if turn
    )
    assert sum("S" * 1000 in json.dumps(line) for line in lines_in(store)) == 1
    for call in read_calls(store):
        turn, number = map(int, call.id.split("-"))
        assert call.messages == conversations[number][: 2 + 2 * turn]


def ids(line: Mapping[str, Any]) -> list[tuple[int, int]]:
    turn, number = map(int, line["id"].split("-"))
    return [(turn, number)]


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_says_what_it_is_and_nothing_is_written_before_there_is_something_to_say(
    writer: TranscriptWriter, store: Path
) -> None:
    assert not store.exists()
    writer.begin(a_run("r1"))
    (path,) = store.iterdir()
    date, pid, number = path.stem[:10], path.stem[11:-7], path.stem[-6:]
    assert (date, pid) == (time.strftime("%Y-%m-%d", time.gmtime()), str(os.getpid())) and int(number, 16) >= 0
    header = lines_in(store)[0]
    assert (header["kind"], header["format"], header["pid"], header["package"]) == ("header", 1, os.getpid(), "0.1.0")
    assert path.stat().st_mode & 0o077 == 0, "conversations are for their owner"


def test_a_full_file_is_followed_by_another_and_runs_go_on(store: Path) -> None:
    writer = TranscriptWriter(store, max_file_bytes=2000)
    messages: list[Any] = []
    writer.begin(a_run("r1"))
    for number in range(20):
        messages = [*messages, user(f"{number:>200}")]
        writer.call(a_call(f"c{number}", messages, run="r1", time=number))
    writer.end("r1", output="done", error=None, seconds=1.0)
    writer.close()
    files = sorted(store.iterdir())
    assert len(files) > 3 and [path.name for path in files] == sorted(path.name for path in files)
    (run,) = read_runs(store)
    assert [call.messages for call in run.calls] == [messages[: n + 1] for n in range(20)] and run.output == "done"


def test_each_file_can_be_read_when_the_others_are_gone(store: Path) -> None:
    writer = TranscriptWriter(store, max_file_bytes=2000)
    messages: list[Any] = []
    for number in range(20):
        messages = [*messages, user(f"{number:>200}")]
        writer.call(a_call(f"c{number}", messages, tools=TOOLS))
    writer.close()
    for path in store.iterdir():
        losses = Losses()
        assert all(call.messages == messages[: int(call.id[1:]) + 1] for call in read_calls(path, losses=losses))
        assert losses == Losses()


def test_a_new_day_begins_a_new_file(tmp_path: Path) -> None:
    now = [1_700_000_000.0]  # 2023-11-14
    file = GrowingFile(tmp_path, clock=lambda: now[0])
    assert file.renew() and not file.renew()
    now[0] += 86_400
    assert file.renew() and not file.renew()
    file.close()
    assert [path.name[:10] for path in sorted(tmp_path.iterdir())] == ["2023-11-14", "2023-11-15"]


def test_the_store_keeps_to_its_size_by_removing_the_oldest_files(store: Path) -> None:
    other = TranscriptWriter(store)  # of a process that lives
    other.call(a_call("other", [user("kept")]))
    writer = TranscriptWriter(store, max_bytes=40_000)
    for number in range(200):
        writer.call(a_call(f"c{number}", [user(f"{number:>700}")]))
        assert sum(path.stat().st_size for path in store.iterdir()) < 40_000 + 2000
    kept = {call.id for call in read_calls(store)}
    assert {"other", "c199", "c198", "c180"} <= kept and not kept & {"c0", "c1", "c100"} and len(kept) > 25
    writer.close()
    other.close()


def test_runs_whose_files_were_removed_or_written_by_a_clock_put_back_are_still_read(store: Path) -> None:
    write_run(TranscriptWriter(store), "r1", a_call("c1", [user("a")]))
    (path,) = store.iterdir()
    earlier = path.with_name(f"2000-01-01-{os.getpid()}-000000.jsonl")
    earlier.write_text(json.dumps({"kind": "header", "format": 1, "continues": path.name}) + "\n")
    later = path.with_name("2000-01-02-7-000000.jsonl")
    header = {"kind": "header", "format": 1, "continues": "2000-01-01-7-000000.jsonl"}
    later.write_text(json.dumps(header) + "\n" + json.dumps({"kind": "end", "run": "r2", "output": 1}) + "\n")
    assert {run.id for run in read_runs(store)} == {"r1", "r2"}


def test_other_files_in_the_folder_are_left_alone(writer: TranscriptWriter, store: Path) -> None:
    write_run(writer, "r1")
    (store / "runs.jsonl").write_text('{"kind": "begin"}\n')
    (store / "notes.txt").write_text("notes")
    assert [run.id for run in read_runs(store)] == ["r1"]


def test_a_later_format_is_refused_by_name_before_anything_is_read(writer: TranscriptWriter, store: Path) -> None:
    write_run(writer, "r1")
    (store / "2999-01-01-1-000000.jsonl").write_text('{"kind":"header","format":2}\n{"kind":"begin"}\n')
    for read in (read_runs, read_calls, iter_run_dicts):
        with pytest.raises(DataError, match=r"2999-01-01-1-000000\.jsonl' is of format 2, .* reads up to 1"):
            read(store)


def test_lines_of_kinds_and_with_keys_that_are_not_known_do_no_harm(writer: TranscriptWriter, store: Path) -> None:
    write_run(writer, "r1", a_call("c1", [user("a")]))
    (path,) = store.iterdir()
    text = path.read_text().replace('"kind":"call"', '"kind":"call","mood":"good"')
    text = text.replace('"kind":"begin"', '"kind":"begin","mood":"good"')
    path.write_text(text + '{"kind":"mood","mood":"good"}\n')
    (run,) = read_runs(store)
    assert (run.id, run.calls[0].id) == ("r1", "c1")


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        read_runs(tmp_path / "nowhere")


def test_reading_remembers_little(store: Path) -> None:
    """Ten times as many runs leave no more objects behind while they are read."""

    def most_objects(runs: int) -> int:
        writer = TranscriptWriter(store / str(runs))
        for number in range(runs):
            write_run(writer, f"r{number}", a_call(f"c{number}", [user(f"{number}")]))
        most = 0
        for number, _ in enumerate(read_runs(store / str(runs))):
            if number % 500 == 499:
                gc.collect()
                most = max(most, len(gc.get_objects()))
        return most

    few, many = most_objects(1000), most_objects(10_000)
    assert many - few < 1000


# --- what is masked -------------------------------------------------------------------------------------------------


def test_no_planted_secret_reaches_the_disk(writer: TranscriptWriter, store: Path) -> None:
    for number, (_, text, _) in enumerate(PLANTED):
        tool_call = {"id": "t", "function": {"name": "f", "arguments": json.dumps({"text": text})}}
        messages = [says("system", text), user([{"type": "text", "text": text}]), says("tool", text)]
        reply = says("assistant", text, tool_calls=[tool_call], reasoning_content=text)
        tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": {"default": text}}}]
        more = {"reply": reply, "tools": tools, "error": text, "settings": {"extra_headers": {"X": text}}}
        logprobs = {"content": [{"token": text}]}
        call = a_call(f"c{number}", messages, **more, logprobs=logprobs)
        write_run(writer, f"r{number}", call, prompt=text, output={"answer": text}, error=f"failed: {text}")
        feedback(f"r{number}", label=text, correction=text, store=store)
    written = b"".join(path.read_bytes() for path in store.iterdir())
    assert len(written) > 50_000
    for kind, _, secret in PLANTED:
        assert json.dumps(secret)[1:-1].encode() not in written, kind


def test_secrets_that_only_their_names_tell_are_masked(writer: TranscriptWriter, store: Path) -> None:
    arguments = {"password": "correct horse", "user": "ann"}
    writer.call(a_call("c1", [user("Log in")], reply=says("assistant", None, arguments=arguments)))
    (call,) = read_calls(store)
    assert call.reply is not None and call.reply["arguments"] == {"password": "<SECRET_1>", "user": "ann"}


def test_an_address_has_one_placeholder_in_prompt_calls_and_output(store: Path) -> None:
    writer = TranscriptWriter(store, redact=find_redactor("personal"))
    ann, bob = "ann@mail.example", "bob@mail.example"
    first = [says("system", f"You work for {bob}."), user(f"I am {ann}.")]
    write_run(writer, "r1", a_call("c1", first), prompt=f"I am {ann}.", output=f"{ann}, {bob}")
    second = [*first, answer("Yes."), user(f"Write to {bob} and ann2@mail.example")]
    write_run(writer, "r2", a_call("c2", second, time=2.0), prompt=second[-1]["content"], output=f"To {bob}")
    writer.close()
    one, two = read_runs(store)
    assert (one.prompt, one.output) == ("I am <EMAIL_1>.", "<EMAIL_1>, <EMAIL_2>")
    assert one.calls[0].messages == [says("system", "You work for <EMAIL_2>."), user("I am <EMAIL_1>.")]
    assert two.calls[0].messages[:2] == one.calls[0].messages
    assert two.prompt == two.calls[0].messages[3]["content"] == "Write to <EMAIL_2> and <EMAIL_3>"
    assert two.output == "To <EMAIL_2>"


def test_conversations_of_different_people_do_not_share_placeholders(store: Path) -> None:
    writer = TranscriptWriter(store, redact=find_redactor("personal"))
    for number in (1, 2):
        messages = [says("system", "Be brief."), user(f"I am u{number}@mail.example.")]
        write_run(writer, f"r{number}", a_call(f"c{number}", messages))
    writer.close()
    assert [call.messages[1]["content"] for call in read_calls(store)] == ["I am <EMAIL_1>."] * 2


def test_what_a_run_hands_to_another_has_the_same_placeholders(store: Path) -> None:
    writer = TranscriptWriter(store, redact=find_redactor("personal"))
    writer.begin(a_run("r1"))
    writer.call(a_call("c1", [user("I am a@x.example, not b@x.example.")], run="r1"))
    write_run(writer, "r2", a_call("c2", [user("b@x.example asks")]), parent="r1", agent="other", prompt="b@x.example")
    writer.end("r1", output="b@x.example", error=None, seconds=1.0)
    writer.close()
    two, one = read_runs(store)
    assert (two.prompt, two.calls[0].messages[0]["content"], one.output) == ("<EMAIL_2>", "<EMAIL_2> asks", "<EMAIL_2>")


def test_a_run_is_on_the_disk_as_soon_as_it_begins_unless_something_in_it_is_masked(store: Path) -> None:
    writer = TranscriptWriter(store)
    writer.begin(a_run("r1"))
    writer.begin(a_run("r2", prompt="password: hunter22"))
    assert [line["run"] for line in lines_in(store)[1:]] == ["r1"]
    writer.end("r2", output=None, error=None, seconds=1.0)
    assert [line["prompt"] for line in lines_in(store)[1:3]] == ["Hello?", "password: <SECRET_1>"]


def test_tokens_are_left_out_where_they_would_spell_a_secret(writer: TranscriptWriter, store: Path) -> None:
    logprobs = {"content": [{"token": "x", "logprob": -1.0}]}
    writer.call(a_call("c1", [user("a")], logprobs=logprobs))
    writer.call(a_call("c2", [user("a")], logprobs=logprobs, reply=answer("password: hunter22")))
    assert [call.logprobs for call in read_calls(store)] == [logprobs, None]


def test_identifiers_are_not_masked(store: Path) -> None:
    writer = TranscriptWriter(store, redact=find_redactor(str.upper))
    write_run(writer, "r1", a_call("c1", [user("a")], model="m", tools=TOOLS), agent="helper", output="b")
    writer.close()
    (run,) = read_runs(store)
    assert (run.id, run.agent, run.calls[0].id, run.calls[0].model, run.output) == ("r1", "HELPER", "c1", "m", "B")
    assert run.calls[0].messages == [user("A")]


def test_names_of_agents_sessions_and_tags_are_masked_alike_in_every_run(store: Path) -> None:
    key, mail = "sk-proj-Q7xR2mN9vK4jL8pT3wZ6yB1c", "ann@mail.example"
    writer = TranscriptWriter(store, redact=find_redactor("personal"))
    names = {"agent": f"bot of {mail}", "session": f"{mail}:{key}", "tags": [f"for {mail}", key, "plain"]}
    for number in (1, 2):
        call = a_call(f"c{number}", [user("a")], agent=names["agent"])
        write_run(writer, f"r{number}", call, **names, prompt=f"I am bob{number}@mail.example")
    writer.close()
    assert mail.encode() not in b"".join(path.read_bytes() for path in store.iterdir())
    one, two = read_runs(store)
    assert (one.agent, one.session, one.tags) == (two.agent, two.session, two.tags)
    assert one.agent == "bot of <EMAIL_e15350>" == one.calls[0].agent and one.tags[::2] == [
        "for <EMAIL_e15350>",
        "plain",
    ]
    assert one.session is not None and one.session.startswith("<EMAIL_e15350>:<SECRET_") and key not in str(one.tags)


def test_secrets_in_names_are_masked_without_being_asked(writer: TranscriptWriter, store: Path) -> None:
    key = "sk-proj-Q7xR2mN9vK4jL8pT3wZ6yB1c"
    write_run(
        writer, "r1", a_call("c1", [user("a")], agent=key), agent=key, session=key, tags=[key, "ann@mail.example"]
    )
    (run,) = read_runs(store)
    names = [run.agent, run.session, run.tags[0], run.calls[0].agent]
    assert len(set(names)) == 1 and str(names[0]).startswith("<SECRET_") and run.tags[1] == "ann@mail.example"


def test_a_name_that_cannot_be_masked_is_not_written_later_either(store: Path) -> None:
    def redact(text: str, names: dict[str, str]) -> str:
        if "ann" in text:
            raise ZeroDivisionError
        return text

    writer = TranscriptWriter(store, redact=redact)
    write_run(writer, "r1", a_call("c1", [user("a")], agent="x"), agent="ann@mail.example")
    assert writer.dropped == 2 and b"ann@" not in b"".join(path.read_bytes() for path in store.iterdir())


def test_a_text_is_masked_once_in_a_run_wherever_it_comes(store: Path) -> None:
    masked: list[str] = []

    def redact(text: str, names: dict[str, str]) -> str:
        masked.append(text)
        return text

    writer = TranscriptWriter(store, redact=redact)
    asked, said = "A question, and not a short one.", "An answer, as long as that."
    write_run(writer, "r1", a_call("c1", [user(asked)], reply=answer(said)), prompt=asked, output=said)
    assert (masked.count(asked), masked.count(said)) == (1, 1)


def test_a_run_goes_on_with_what_was_masked_when_it_began_and_refers_to_nothing_that_was_masked_less(
    store: Path,
) -> None:
    writer, mail = TranscriptWriter(store), "ann@mail.example"
    write_run(writer, "r1", a_call("c1", [user(f"I am {mail}.")]))
    writer.masks = Masks([find_mask("personal")])
    writer.begin(a_run("r2"))
    writer.masks = Masks()
    writer.call(a_call("c2", [user(f"I am {mail}."), answer("Yes."), user("And now?")], run="r2"))
    writer.end("r2", output=mail, error=None, seconds=1.0)
    loose, strict = read_runs(store)
    assert mail in str(loose.calls) and mail not in str(strict)
    assert strict.calls[0].messages[0] == user("I am <EMAIL_1>.") and strict.output == "<EMAIL_1>"


@pytest.mark.parametrize("length", [0, 1, 5, 24, 25, 26, 100, 1000])
def test_the_equal_beginning_of_two_lists_is_found_wherever_it_ends(length: int) -> None:
    values = [{"n": number} for number in range(length)]
    for same in {0, 1, length // 2, length - 1, length} & set(range(length + 1)):
        other = [{"n": number if number < same else -1} for number in range(length + 3)]
        assert equal_prefix(values, other) == equal_prefix(other, values) == same


def test_messages_that_were_kept_before_are_recognised_and_written_once(writer: TranscriptWriter, store: Path) -> None:
    sent = [says("system", "S"), *(user(f"{number}") for number in range(60))]
    writer.call(a_call("c1", Kept(sent)) | {"messages": Kept(sent)})
    edited = [*sent[:30], user("other"), *sent[31:]]
    writer.call(a_call("c2", []) | {"messages": Kept([*sent, answer("Yes."), user("more")])})
    writer.call(a_call("c3", []) | {"messages": Kept(edited)})
    assert [(line["after"], line["keep"]) for line in lines_in(store)[1:]] == [(None, 0), ("c1", 62), ("c2", 30)]
    assert [call.messages for call in read_calls(store)] == [sent, [*sent, answer("Yes."), user("more")], edited]


# --- choosing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_runs(writer: TranscriptWriter, store: Path) -> Path:
    billing = a_call("c1", [says("system", "On bills"), user("A Refund, please")], reply=asks_for("pay"))
    failed = a_call("c2", [user("b")], reply=None, error="500")
    write_run(writer, "r1", billing, agent="support-billing", time=1000.0, tags=["prod", "eu"], output="Paid.")
    write_run(writer, "r2", failed, agent="support-tech", time=2000.0, tags=["prod"], prompt="It is broken")
    write_run(writer, "r3", agent="poet", time=3000.0, error="refused")
    feedback("r1", score=0.2, store=store)
    feedback("r1", score=0.9, store=store)
    feedback("r2", label="bad", store=store)
    return store


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ["r1", "r2", "r3"]),
        ({"agent": "poet"}, ["r3"]),
        ({"agent": "support-*"}, ["r1", "r2"]),
        ({"agent": "Poet"}, []),
        ({"since": 2000}, ["r2", "r3"]),
        ({"until": 2000}, ["r1"]),
        ({"since": "1970-01-01T00:33:20Z", "until": "1970-01-01T00:50:00+00:00"}, ["r2"]),
        ({"tags": ["prod"]}, ["r1", "r2"]),
        ({"tags": "eu"}, ["r1"]),
        ({"tags": ("prod", "eu")}, ["r1"]),
        ({"has_error": True}, ["r2", "r3"]),
        ({"has_error": False}, ["r1"]),
        ({"used_tool": "pay"}, ["r1"]),
        ({"used_tool": "other"}, []),
        ({"used_tool": True}, ["r1"]),
        ({"used_tool": False}, ["r2", "r3"]),
        ({"rated": True}, ["r1", "r2"]),
        ({"rated": False}, ["r3"]),
        ({"rated": 0.9}, ["r1"]),
        ({"rated": 0.95}, []),
        ({"text": "refund"}, ["r1"]),
        ({"text": "BROKEN"}, ["r2"]),
        ({"text": "paid"}, ["r1"]),
        ({"text": "support"}, []),
        ({"agent": "support-*", "has_error": False}, ["r1"]),
    ],
)
def test_runs_are_chosen(asked: dict[str, Any], expected: list[str], three_runs: Path) -> None:
    assert [run.id for run in read_runs(three_runs, **asked)] == expected


def test_a_name_with_brackets_is_a_name(writer: TranscriptWriter, store: Path) -> None:
    write_run(writer, "r1", agent="helper [2]")
    assert [run.id for run in read_runs(store, agent="helper [2]")] == ["r1"]


def test_what_is_no_time_is_named(three_runs: Path) -> None:
    with pytest.raises(DataError, match="'yesterday' is no time"):
        read_runs(three_runs, since="yesterday")


# --- ratings --------------------------------------------------------------------------------------------------------


def test_feedback_is_joined_to_its_run_and_changes_nothing_that_was_written(three_runs: Path) -> None:
    before = {path: path.read_bytes() for path in three_runs.iterdir()}
    given = feedback(next(read_runs(three_runs)), correction="No.", store=three_runs)
    one, two, _ = read_runs(three_runs)
    assert [said.score for said in one.feedback] == [0.2, 0.9, None] and one.feedback[2] == given
    assert [said.label for said in two.feedback] == ["bad"]
    assert all(path.read_bytes().startswith(content) for path, content in before.items())


def test_all_feedback_of_a_process_is_in_one_file_of_the_default_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(TranscriptWriter(DEFAULT_STORE), "r1")
    for score in range(5):
        feedback("r1", score=score)
    files = sorted(DEFAULT_STORE.iterdir(), key=lambda path: path.read_text().count("feedback"))
    assert len(files) == 2 and len(files[1].read_text().splitlines()) == 6


def test_feedback_that_says_nothing_is_refused(store: Path) -> None:
    for said in ({}, {"score": float("nan")}, {"score": "good"}):
        with pytest.raises(DataError):
            feedback("r1", **said, store=store)
    assert not store.exists()


def test_feedback_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_run(TranscriptWriter(store), "r1")
    shared_writer(store).masks = Masks([Mask("full", lambda *_: os.write(-1, b""))])  # OSError, as of a full disk
    with pytest.raises(DataError, match="cannot be written"):
        feedback("r1", label="good", store=store)


def test_personal_data_in_a_correction_can_be_masked(store: Path) -> None:
    write_run(TranscriptWriter(store), "r1")
    assert feedback("r1", correction="Ask a@b.example", store=store, redact="personal").correction
    (run,) = read_runs(store)
    assert run.feedback[0].correction == "Ask <EMAIL_1>"


# --- exports --------------------------------------------------------------------------------------------------------


def test_whole_runs_are_exported_and_can_be_read_again(three_runs: Path, tmp_path: Path) -> None:
    runs = list(read_runs(three_runs))
    assert export_runs(runs, tmp_path / "new" / "runs.jsonl") == 3
    lines = (tmp_path / "new" / "runs.jsonl").read_text().splitlines()
    assert [Run.model_validate_json(line) for line in lines] == runs


def test_conversations_are_exported_in_the_form_of_fine_tuning_files(
    writer: TranscriptWriter, store: Path, tmp_path: Path
) -> None:
    begun = [user("2+3?")]
    further = [*begun, asks_for("add"), says("tool", "5")]
    answered = a_call("c2", further, reply=answer("5"), time=2.0, tools=TOOLS)
    failed = a_call("c3", further, reply=None, error="500", time=3.0)
    write_run(writer, "r1", a_call("c1", begun, reply=asks_for("add")), answered, failed)
    write_run(writer, "r2", a_call("c4", begun, reply=answer("\ud800")))
    write_run(writer, "r3")
    assert export_runs(read_runs(store), tmp_path / "out.jsonl", "openai") == 2
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first == {"messages": [*further, answer("5")], "tools": TOOLS}
    assert second == {"messages": [*begun, answer("\ud800")]}


def test_an_export_that_fails_leaves_nothing_behind(three_runs: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'parquet' .* one of jsonl, openai"):
        export_runs([], tmp_path / "out", "parquet")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be exported"):
        export_runs(read_runs(three_runs), tmp_path / "file" / "out")

    def failing() -> Iterator[Run]:
        yield next(read_runs(three_runs))
        raise RuntimeError("no more runs")

    with pytest.raises(RuntimeError):
        export_runs(failing(), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "transcripts"]
