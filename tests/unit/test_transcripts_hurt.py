"""What was recorded survives killed processes, full disks, removed folders and many writers at once."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.errors import DataError
from praison_agent_rl.foreign_logs import import_log
from praison_agent_rl.transcripts import Losses, TranscriptWriter, feedback, read_calls, read_runs

posix = pytest.mark.skipif(os.name != "posix", reason="fork and SIGKILL are missing on this system")

ROUNDS = 100
"""How often a process is killed; the benchmark does it a thousand times."""


def a_call(call_id: str, *texts: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"id": call_id, "time": 1.0, "messages": messages, "reply": {"role": "assistant", "content": "Yes."}, **more}


def ids_in(store: Path, losses: Losses | None = None) -> list[str]:
    return [call.id for call in read_calls(store, losses=losses)]


# --- processes that are killed --------------------------------------------------------------------------------------

# One process imports once and forks what is to be killed: a start takes a few milliseconds so.
NURSERY = """
    import os, random, signal, sys, threading, time
    from pathlib import Path
    from praison_agent_rl.transcripts import TranscriptWriter

    store, rounds = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(11)

    def agent(writer, pipe, name):
        messages, turn = [], 0
        while True:
            run = f"{name}-{turn}"
            writer.begin({"run": run, "agent": name, "parent": None, "session": None, "tags": [], "style": "chat",
                          "prompt": run, "time": time.time(), "version": None})
            for step in range(3):
                call, reply = f"{run}-{step}", {"role": "assistant", "content": f"{name} answers"}
                messages = [*messages[-20:], {"role": "user", "content": call * 20}]
                writer.call({"id": call, "run": run, "agent": name, "time": time.time(), "messages": messages,
                             "reply": reply})
                os.write(pipe, f"{call}\\n".encode())
                messages.append(reply)
            writer.end(run, output="done", error=None, seconds=1.0)
            turn += 1

    def record(pipe, number):
        writer = TranscriptWriter(store)
        threads = [threading.Thread(target=agent, args=(writer, pipe, f"{number}.{i}")) for i in range(4)]
        for thread in threads:
            thread.start()

    for number in range(rounds):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reads)
            record(writes, number)
            time.sleep(60)
            os._exit(0)
        os.close(writes)
        if number % 2:  # however slow the machine is, half of them are killed in the midst of it
            sys.stdout.buffer.write(os.read(reads, 1))
        # read all along: a full pipe would stop the child between two calls, where killing it is easy
        reader = threading.Thread(target=lambda: sys.stdout.buffer.writelines(os.fdopen(reads, "rb")))
        reader.start()
        time.sleep(chance.uniform(0.0, 0.12))
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        reader.join()
"""


@posix
def test_every_call_that_had_returned_is_there_after_the_process_was_killed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-c", textwrap.dedent(NURSERY), str(store), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    reported, losses = done.stdout.split(), Losses()
    recorded = Counter(ids_in(store, losses))
    assert len(reported) > ROUNDS
    assert set(reported) <= set(recorded) and set(recorded.values()) == {1}
    assert len(recorded) - len(reported) <= 4 * ROUNDS, "a thread can be killed between recording and reporting"
    assert losses == Losses()
    runs = list(read_runs(store))
    assert {call.id for run in runs for call in run.calls} == set(recorded)
    assert all(call.id.rpartition("-")[0] == run.id and call.agent == run.agent for run in runs for call in run.calls)
    assert len({run.id.partition(".")[0] for run in runs if not run.finished}) > ROUNDS // 2


# --- many at once ---------------------------------------------------------------------------------------------------

CROWD = """
    import os, sys, threading, time
    from pathlib import Path
    from praison_agent_rl.transcripts import TranscriptWriter

    writer = TranscriptWriter(Path(sys.argv[1]), max_file_bytes=200_000)

    def agent(name):
        messages = [{"role": "system", "content": f"You are {name}. " * 20}]
        for turn in range(25):
            run = f"{name}-{turn}"
            writer.begin({"run": run, "agent": name, "parent": None, "session": name, "tags": [], "style": "chat",
                          "prompt": run, "time": float(turn), "version": None})
            for step in range(2):
                messages = [*messages, {"role": "user", "content": f"{name} asks {turn}.{step}"}]
                reply = {"role": "assistant", "content": f"{name} is told {turn}.{step}"}
                writer.call({"id": f"{run}-{step}", "run": run, "agent": name, "time": turn + step / 2,
                             "messages": messages, "reply": reply})
                messages = [*messages, reply]
            writer.end(run, output=f"{name} ends {turn}", error=None, seconds=1.0)

    def process(number):
        threads = [threading.Thread(target=agent, args=(f"agent-{number}-{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.close()
        os._exit(writer.dropped)

    pids = []
    for number in range(8):
        pids.append(os.fork())
        if pids[-1] == 0:
            process(number)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * 8, codes
"""


@posix
def test_eight_processes_of_eight_threads_lose_nothing_and_mix_nothing_up(tmp_path: Path) -> None:
    code = textwrap.dedent(CROWD)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    losses = Losses()
    runs = list(read_runs(tmp_path, losses=losses))
    assert losses == Losses()
    names = [f"agent-{process}-{thread}" for process in range(8) for thread in range(8)]
    assert Counter(run.agent for run in runs) == dict.fromkeys(names, 25)
    for run in runs:
        name, turn = run.agent or "", int(run.id.rpartition("-")[2])
        assert (run.prompt, run.output, run.session) == (run.id, f"{name} ends {turn}", name)
        assert [call.id for call in run.calls] == [f"{run.id}-0", f"{run.id}-1"]
        for step, call in enumerate(run.calls):
            assert call.agent == name and len(call.messages) == 2 + 2 * (2 * turn + step)
            assert all(name in message["content"] for message in call.messages)
            assert call.messages[-1]["content"] == f"{name} asks {turn}.{step}"


@posix
def test_a_forked_process_writes_to_a_file_of_its_own_even_if_the_lock_was_held(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path)
    writer.call(a_call("parent", "a"))
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with writer._writer().lock:
            taken.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        writer.call(a_call("child", "a", "b"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    done.set()
    holder.join()
    writer.call(a_call("parent again", "a", "b"))
    assert len(list(tmp_path.iterdir())) == 2 and sorted(ids_in(tmp_path)) == ["child", "parent", "parent again"]


def test_a_store_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    writer, stop = TranscriptWriter(tmp_path), threading.Event()
    writer.call(a_call("0", "0"))

    def write() -> None:
        number = 1
        while not stop.is_set():
            writer.call(a_call(str(number), "x" * 5000, str(number)))
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen, losses = 0, Losses()
        deadline = time.monotonic() + 20
        while seen < 300 and time.monotonic() < deadline:
            ids = ids_in(tmp_path, losses)
            assert ids == [str(number) for number in range(len(ids))] and len(ids) >= seen and losses == Losses()
            seen = len(ids)
    finally:
        stop.set()
        thread.join()
    assert seen >= 300


def test_recording_from_within_recording_is_no_deadlock(tmp_path: Path) -> None:
    """A finaliser may run at any moment, and a redactor may ask an agent that is recorded too."""

    def redact(text: str, names: dict[str, str]) -> str:
        if text == "outer":
            writer.call(a_call("inner", "inner"))
        return text

    writer = TranscriptWriter(tmp_path, redact=redact)
    writer.call(a_call("outer", "outer"))
    writer.call(a_call("next", "outer", "next"))
    assert ids_in(tmp_path) == ["outer", "inner", "next"]


# --- disks and folders ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_counted_and_recording_goes_on_when_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 40_000)
    writer = TranscriptWriter(small_disk / "store")
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            writer.call(a_call(f"full {number}", f"{number:>1000}", agent=f"agent {number}"))
    assert 0 < writer.dropped < 50
    assert len(caplog.records) == 1 and "the agent goes on" in caplog.text
    ballast.unlink()
    for number in range(5):
        writer.call(a_call(f"room {number}", f"{number:>1000}"))
    writer.close()
    losses = Losses()
    ids = ids_in(small_disk / "store", losses)
    kept = 50 - writer.dropped
    assert ids == [*(f"full {number}" for number in range(kept)), *(f"room {number}" for number in range(5))]
    assert losses.dropped == writer.dropped == sum(losses.reasons.values()) and losses.torn <= 1


LIMITED = """
    import json, resource, signal, sys
    from pathlib import Path
    from praison_agent_rl.transcripts import TranscriptWriter

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    writer = TranscriptWriter(Path(sys.argv[1]))

    def record(name, count):
        for number in range(count):
            writer.call({"id": f"{name}{number}", "time": 1.0, "agent": str(number),
                         "messages": [{"role": "user", "content": f"{number:>1000}"}]})

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_500, hard))
    record("a", 40)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    record("b", 5)
    dropped = writer.dropped
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    record("c", 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    writer.close()
    print(dropped, writer.dropped)
"""


@posix
def test_a_line_that_was_torn_by_a_limit_costs_no_other_line(tmp_path: Path) -> None:
    """As on a full disk, with a limit on the size of files; what is lost last is told at close."""
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    first, dropped = map(int, done.stdout.split())
    losses = Losses()
    ids = ids_in(tmp_path, losses)
    assert ids == [*(f"a{number}" for number in range(40 - first)), *(f"b{number}" for number in range(5))]
    assert (losses.dropped, losses.torn, losses.unresolved) == (dropped, 1, 0) and dropped == first + 3 > 10
    assert done.stderr.count("could not be recorded") == 1


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path / "store")
    writer.call(a_call("c1", "a"))
    shutil.rmtree(tmp_path / "store")
    writer.call(a_call("c2", "a", "b"))
    (call,) = read_calls(tmp_path / "store")
    assert (call.id, [message["content"] for message in call.messages]) == ("c2", ["a", "b"]) and writer.dropped == 0


def test_a_folder_that_cannot_be_made_or_written_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    writer = TranscriptWriter(tmp_path / "file" / "store")
    writer.begin({"run": "r", "prompt": "a"})
    writer.call(a_call("c1", "a"))
    writer.end("r", output=None, error=None, seconds=1.0)
    writer.close()
    assert writer.dropped == 3 and len(caplog.records) == 1
    (tmp_path / "file").unlink()
    writer.call(a_call("c2", "a"))
    losses = Losses()
    assert ids_in(tmp_path / "file" / "store", losses) == ["c2"] and losses.dropped == 3


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_counted(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    writer = TranscriptWriter(tmp_path / "store")
    writer.call(a_call("c1", "a"))
    tmp_path.chmod(0o700)
    assert writer.dropped == 1


def test_what_cannot_be_written_is_counted_and_costs_nothing_else(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    writer = TranscriptWriter(tmp_path)
    writer.call(a_call("c1", "a"))
    writer.call(a_call("c2", "a", endless))
    writer.call({"id": "c3"})
    writer.call(a_call("c4", "a", "b"))
    assert writer.dropped == 2
    losses = Losses()
    assert ids_in(tmp_path, losses) == ["c1", "c4"]
    assert losses.dropped == 2 and set(losses.reasons) == {"KeyError"}


def test_a_text_that_could_not_be_masked_is_not_written_and_neither_is_why(tmp_path: Path) -> None:
    def failing(text: str, names: dict[str, str]) -> str:
        if "Ann" in text:
            raise ValueError(f"cannot mask {text}")
        return text

    writer = TranscriptWriter(tmp_path, redact=failing)
    writer.begin({"run": "r1", "prompt": "I am Ann"})
    writer.call(a_call("c1", "I am Ann", run="r1"))
    writer.call(a_call("c2", "I am Bob", run="r1"))
    writer.end("r1", output="Hello Ann", error=None, seconds=1.0)
    writer.close()
    assert writer.dropped == 3 and ids_in(tmp_path) == ["c2"]
    assert b"Ann" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_logging_handler_that_fails_does_not_reach_the_agent(tmp_path: Path) -> None:
    class Failing(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError

    logger, handler = logging.getLogger("praison_agent_rl"), Failing()
    logger.addHandler(handler)
    try:
        writer = TranscriptWriter(tmp_path)
        writer.call({})
    finally:
        logger.removeHandler(handler)
    assert writer.dropped == 1


# --- hurt files -----------------------------------------------------------------------------------------------------


def recorded(store: Path, calls: int) -> Path:
    writer = TranscriptWriter(store)
    for number in range(calls):
        writer.call(a_call(f"c{number}", *(str(n) for n in range(number + 1))))
    writer.close()
    (path,) = store.iterdir()
    return path


def test_a_file_reads_wherever_it_was_cut_off(tmp_path: Path) -> None:
    path = recorded(tmp_path, 5)
    whole = path.read_bytes()
    chance = random.Random(3)
    for size in [0, 1, *sorted(chance.sample(range(len(whole)), 40))]:
        path.write_bytes(whole[:size])
        losses = Losses()
        assert len(ids_in(tmp_path, losses)) == max(0, whole[:size].count(b"\n") - 1) and losses == Losses()


def test_torn_lines_are_skipped_and_counted_and_what_goes_on_from_them_too(tmp_path: Path) -> None:
    path = recorded(tmp_path, 5)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    for number in range(4):
        hurt = [*lines[:number], lines[number][:50] + b"\n", *lines[number + 1 :]]
        path.write_bytes(b"".join([header, *hurt]))
        losses = Losses()
        assert ids_in(tmp_path, losses) == [f"c{n}" for n in range(number)]
        assert (losses.torn, losses.unresolved) == (1, 4 - number)


@pytest.mark.parametrize(
    "junk", [b"\n", b"\xff\xfe\n", b"null\n", b"[1]\n", b"{}\n", b"[" * 100_000 + b"\n", b"\0\0\n"]
)
def test_junk_is_skipped(junk: bytes, tmp_path: Path) -> None:
    path = recorded(tmp_path, 2)
    header, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(junk + header + first + junk + second)
    losses = Losses()
    assert ids_in(tmp_path, losses) == ["c0", "c1"] and losses.torn == (0 if junk == b"\n" else 2)
    said = {"run": "r1", "time": 1.0, "score": 1.0, "label": None, "correction": None}
    TranscriptWriter(tmp_path).feedback(said)
    assert list(read_runs(tmp_path)) == []


def test_a_file_removed_while_the_store_is_read_is_passed_over(tmp_path: Path) -> None:
    for name in ("a", "b"):
        writer = TranscriptWriter(tmp_path)
        writer.call(a_call(name, name))
        writer.close()
    _, second = sorted(tmp_path.iterdir())
    reading = read_calls(tmp_path)
    next(reading)
    second.unlink()
    assert list(reading) == []


def test_a_torn_rating_costs_that_rating_only(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path)
    writer.begin({"run": "r", "agent": "A", "prompt": "p", "time": 1.0})
    writer.call(a_call("c", "p", run="r", agent="A"))
    writer.end("r", output="Yes.", error=None, seconds=1.0)
    feedback("r", score=1.0, store=tmp_path)
    writer.close()
    (path,) = [path for path in tmp_path.glob("*.jsonl") if b'"feedback"' in path.read_bytes()]
    rating = next(line for line in path.read_bytes().splitlines() if b'"feedback"' in line)
    with path.open("ab") as file:
        file.write(rating[: len(rating) // 2] + b"\n")
    losses = Losses()
    (run,) = read_runs(tmp_path, losses=losses)
    assert [said.score for said in run.feedback] == [1.0] and losses.torn == 1


def test_a_dropped_line_without_its_count_or_a_torn_header_is_no_reason_to_stop(tmp_path: Path) -> None:
    path = recorded(tmp_path, 1)
    text = path.read_text().replace('"format":1', '"format":"one"', 1)
    path.write_text(text)
    with pytest.raises(DataError, match="is of format 'one'"):
        ids_in(tmp_path)
    path.write_text(text[20:] + json.dumps({"kind": "dropped"}) + "\n" + json.dumps({"kind": "end"}) + "\n")
    assert ids_in(tmp_path) == ["c0"] and list(read_runs(tmp_path)) == []


def test_an_import_of_which_nothing_can_be_written_is_an_error(tmp_path: Path) -> None:
    log, place = tmp_path / "log.jsonl", tmp_path / "file"
    turns = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    log.write_text(json.dumps({"messages": turns}) + "\n")
    place.write_text("")
    with pytest.raises(DataError, match=r"nothing of .*log\.jsonl could be written to the store"):
        import_log(log, place / "store")
    assert import_log(log, tmp_path / "store").dropped == 0


# --- speed ----------------------------------------------------------------------------------------------------------


def test_a_call_that_extends_another_takes_a_few_times_what_its_conversation_takes_as_json(tmp_path: Path) -> None:
    """Five to six times; ten are too many, and late in a session it is no more. Both are measured in turn."""
    writer = TranscriptWriter(tmp_path)
    messages: list[Any] = [{"role": "system", "content": "S" * 200}]
    messages += [{"role": "user", "content": f"{number:>10} " + "of words " * 21} for number in range(18)]
    writing, as_json = [], []
    for first in range(0, 2000, 20):
        calls = []
        for number in range(first, first + 20):
            sent = [*map(dict, messages), {"role": "user", "content": f"{number:>10}" + " a word" * 27}]
            reply = {"role": "assistant", "content": "Yes." * 50}
            calls.append({"id": str(number), "time": 1.0, "messages": sent, "reply": reply})
        began = time.thread_time()
        for call in calls:
            writer.call(call)
        written = time.thread_time()
        for call in calls:
            json.dumps(call["messages"])
        writing.append(written - began)
        as_json.append(time.thread_time() - written)
    # the least of many: what else the machine does only adds to it
    early, late, once = min(writing[:50]), min(writing[50:]), min(as_json)
    assert early < 10 * once and late < 1.5 * early, (early / once, late / early)
