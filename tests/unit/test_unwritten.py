"""What is left for later is written in order, before anybody reads it, and once, whatever ends or forks the process."""

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import praison_agent_rl as rl
from praison_agent_rl import capture
from praison_agent_rl.capture.calls import tap_attempts
from praison_agent_rl.capture.turns import tap_turn
from praison_agent_rl.transcripts import TranscriptWriter, read_calls, read_runs, unwritten
from praison_agent_rl.transcripts.files import raw_lines
from praison_agent_rl.transcripts.unwritten import Lane, settle

ROOT = str(Path(__file__).parents[2])
posix = pytest.mark.skipif(os.name != "posix", reason="fork and SIGKILL are missing on this system")


@pytest.fixture(autouse=True)
def in_folder(in_tmp: Path) -> Iterator[None]:
    yield
    for recording in capture.open_recordings():
        recording.stop()


@pytest.fixture
def idle_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written but by those who cannot wait."""
    monkeypatch.setattr(unwritten._Worker, "_look", lambda _: None)


class Model:
    def ask(self, send: Callable[..., Any], **sent: Any) -> Any:
        return send(**sent)

    _ask = tap_attempts(ask, "")


class Talker:
    """An agent without a framework, which does something while its reply is under way."""

    name = "talker"

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.history: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        self.meanwhile = meanwhile

    def ask(self, prompt: str) -> str:
        self.history.append({"role": "user", "content": prompt})
        answer: str = Model()._ask(self.reply, messages=self.history, model="m")["choices"][0]["message"]["content"]
        self.history.append({"role": "assistant", "content": answer})
        return answer

    def reply(self, **_: Any) -> Any:
        self.meanwhile()
        message = {"role": "assistant", "content": f"fine {len(self.history)}"}
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"total_tokens": 3}}

    chat = tap_turn(ask, "chat")


def kinds_on_disk(store: str) -> list[str]:
    """The lines that are there by now; whoever reads a store otherwise has the rest written first."""
    folder = Path(store)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [json.loads(line)["kind"] for path in files for line in raw_lines(path)][1:]


# --- lanes ----------------------------------------------------------------------------------------------------------


def test_what_is_due_now_comes_after_what_was_left_before_it(idle_worker):
    lane, done = Lane(), []
    for number in range(3):
        lane.later(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    lane.now(lambda: done.append(3))
    assert done == [0, 1, 2, 3]


def test_a_job_within_a_job_waits_for_its_end_and_settling_within_one_does_not_wait_for_itself():
    lane, other, done = Lane(), Lane(), []

    def outer() -> None:
        lane.now(lambda: done.append("inner"))
        other.now(lambda: done.append("of another lane"))
        settle()
        done.append("outer")

    lane.now(outer)
    assert done == ["outer", "inner", "of another lane"]


def test_the_worker_does_what_is_left_by_itself():
    lane, done = Lane(), threading.Event()
    lane.later(done.set)
    assert done.wait(20)


def test_the_worker_sees_what_is_left_while_it_looks_and_is_told_once_it_rests(monkeypatch):
    monkeypatch.setattr(unwritten, "_WORKER", worker := unwritten._Worker())
    monkeypatch.setattr(unwritten, "_REST", 0.5)
    told: list[None] = []
    monkeypatch.setattr(worker, "tell", lambda: [told.append(None), unwritten._Worker.tell(worker)])
    lane = Lane()

    def left_and_done() -> bool:
        lane.later((done := threading.Event()).set)
        return done.wait(20)

    assert left_and_done() and len(told) == 1
    assert left_and_done() and left_and_done() and len(told) == 1
    deadline = time.monotonic() + 20
    while not worker.rests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert left_and_done() and len(told) == 2


def test_many_threads_at_once_do_each_job_once_and_those_of_a_thread_in_order():
    lane, done = Lane(), []

    def add(thread: int) -> None:
        for number in range(300):
            (lane.now if number % 7 == 0 else lane.later)(lambda number=number: done.append((thread, number)))  # type: ignore[misc]

    threads = [threading.Thread(target=add, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lane.settle()
    assert len(done) == 8 * 300
    assert all([n for t, n in done if t == thread] == list(range(300)) for thread in range(8))


# --- recordings -----------------------------------------------------------------------------------------------------


def test_a_call_is_in_the_file_when_its_agent_goes_on_and_the_end_of_a_turn_when_somebody_reads(idle_worker):
    talker = Talker(lambda: seen.append(kinds_on_disk("kept")))
    seen: list[list[str]] = []
    with rl.record(store="kept") as recording:
        talker.chat("one")
        assert kinds_on_disk("kept") == ["begin", "call"] and seen == [[]]
        (run,) = read_runs("kept")
        assert run.finished and run.output == "fine 2" and recording.counts == {"runs": 1, "calls": 1, "dropped": 0}
        talker.chat("two")
        assert kinds_on_disk("kept") == ["begin", "call", "end", "begin", "call"]
    assert kinds_on_disk("kept") == ["begin", "call", "end"] * 2


def test_feedback_right_after_a_turn_finds_it(idle_worker):
    talker = Talker()
    with rl.record(store="kept"):
        talker.chat("one")
        rl.feedback(capture.last_run(talker), label="good")
    (run,) = read_runs("kept")
    assert [said.label for said in run.feedback] == ["good"]


def test_the_request_is_made_ready_while_the_reply_is_awaited_and_written_with_it():
    """By the worker, of what was sent: the list that was sent has changed by then."""
    ready, seen = threading.Event(), []

    def meanwhile() -> None:
        talker.history.append({"role": "user", "content": "added since"})
        talker.history[0]["content"] = "changed since"
        assert ready.wait(20)
        seen.append(kinds_on_disk("kept"))

    def redact(text: str) -> str:
        if text == "Be brief.":
            ready.set()
        return text.replace("Ann", "<NAME_1>")

    talker = Talker(meanwhile)
    with rl.record(store="kept", redact=redact):
        talker.chat("I am Ann")
    (call,) = read_calls("kept")
    assert [message["content"] for message in call.messages] == ["Be brief.", "I am <NAME_1>"]


@pytest.mark.parametrize("change", ["file removed", "other masks", "many others"])
def test_what_was_made_ready_is_made_anew_where_it_no_longer_holds(change, tmp_path):
    writer = TranscriptWriter(tmp_path)
    first = {"id": "first", "time": 1.0, "messages": [{"role": "user", "content": "jane@mail.example"}], "tools": []}
    writer.call({**first, "reply": {"role": "assistant", "content": "Yes."}})
    more = {**first, "id": "more", "messages": [*first["messages"], {"role": "user", "content": "more"}]}  # type: ignore[misc]
    writer.expect(more)
    if change == "file removed":
        writer.close()
        next(tmp_path.iterdir()).unlink()
    elif change == "other masks":
        from praison_agent_rl.transcripts.masking import Masks, find_mask

        writer.masks = Masks([find_mask("personal")])
    else:  # than a reader remembers
        for number in range(300):
            writer.call({**first, "id": str(number), "messages": [{"role": "user", "content": str(number)}]})
    writer.call({**more, "reply": {"role": "assistant", "content": "Sure."}})
    call = list(read_calls(tmp_path))[-1]
    mail = "<EMAIL_1>" if change == "other masks" else "jane@mail.example"
    assert [message["content"] for message in call.messages] == [mail, "more"] and writer.dropped == 0


def test_a_run_is_masked_as_was_asked_when_it_began_though_that_recording_has_stopped(idle_worker):
    talker = Talker(lambda: strict.stop())
    with rl.record(store="kept"):
        strict = rl.record(store="kept", redact="personal")
        talker.chat("I am jane@mail.example")
    assert b"jane@" not in b"".join(path.read_bytes() for path in Path("kept").iterdir())
    assert [run.prompt for run in read_runs("kept")] == ["I am <EMAIL_1>"]


@posix
def test_all_ids_are_different_also_those_of_a_forked_child():
    from praison_agent_rl.capture.recordings import new_id

    ids = [new_id() for _ in range(300)]
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writes, " ".join(new_id() for _ in range(300)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    ids += [new_id() for _ in range(300)] + os.read(reads, 100_000).decode().split()
    os.close(reads), os.close(writes)
    assert len(ids) == len(set(ids)) == 900 and {len(each) for each in ids} == {16}


def test_what_an_agent_sent_is_remembered_until_it_is_gone_also_if_it_has_no_hash():
    class Unhashable(Talker):
        __hash__ = None  # type: ignore[assignment]

    talker = Unhashable()
    with rl.record(store="kept") as recording:
        for prompt in "abcdef":
            talker.chat(prompt)
        settle()
        remembered = recording.outlet.latest(talker)
        assert [len(request.messages) for request in remembered] == [6, 8, 10, 12]
        assert remembered[-1].messages[0] is remembered[0].messages[0], "what was sent before is not copied again"
        key = id(talker)
        del talker, remembered
        gc.collect()
        assert key not in recording.outlet._sent
    assert [len(call.messages) for call in read_calls("kept")] == [2, 4, 6, 8, 10, 12]


# --- processes ------------------------------------------------------------------------------------------------------

TURNS = """
    import os, sys, threading, time, multiprocessing
    sys.path.insert(0, sys.argv[1])
    import praison_agent_rl as rl
    from praison_agent_rl.transcripts import read_runs, unwritten
    from tests.unit.test_unwritten import Talker
    unwritten._HEAD_START = 60
    rl.record(store="kept")
"""
ENDINGS: dict[str, tuple[str, list[tuple[str, bool]]]] = {
    "at its end": ("Talker().chat('a')", [("a", True)]),
    "by sys.exit": ("Talker().chat('a'); sys.exit(0)", [("a", True)]),
    "by an exception": ("Talker().chat('a'); 1 / 0", [("a", True)]),
    "killed": ("Talker().chat('a'); os.kill(os.getpid(), 9)", [("a", False)]),
    "as a daemon's parent": ("Talker().chat('a'); os.fork() and os._exit(0)", [("a", True)]),
    "after a child": (
        "Talker().chat('a')\npid = os.fork()\nTalker().chat('child' if pid == 0 else 'parent')\n"
        "pid and os.waitpid(pid, 0)",
        [("a", True), ("child", True), ("parent", True)],
    ),
    "after a child of multiprocessing": (
        "child = multiprocessing.get_context('fork').Process(target=Talker().chat, args=('child',))\n"
        "Talker().chat('a'); child.start(); child.join()",
        [("a", True), ("child", True)],
    ),
    "after a fork within a turn": (
        "Talker(lambda: os.fork() or os._exit(0)).chat('a')",
        [("a", True)],
    ),
}


@posix
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_process_ends_its_calls_are_there_once_and_its_ends_if_it_was_not_killed(ending):
    code, expected = ENDINGS[ending]
    command = [sys.executable, "-c", textwrap.dedent(TURNS) + code, ROOT]
    subprocess.run(command, capture_output=True, timeout=120)
    deadline = time.monotonic() + 20  # the child of a daemon ends after its parent
    while (found := sorted((run.prompt, run.finished) for run in read_runs("kept"))) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert all(len(run.calls) == 1 for run in read_runs("kept"))
