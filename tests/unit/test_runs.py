"""The folder of a run survives half a line, and a broken file is named."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from praison_agent_rl import runs
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.locks import AVAILABLE
from praison_agent_rl.records import Interval, Plan
from praison_agent_rl.runs import RunFolder, alone_in, publish_folder, read_record, write_record


def test_half_a_line_of_a_killed_process_is_passed_over(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.report_event("step", step=1)
    with run.events_file.open("ab") as file:
        file.write(b'{"event": "step", "ste')
    assert [event["step"] for _, event in run.events()] == [1]
    run.report_event("step", step=2)
    run.report_event("step", step=2, reward=0.5)
    assert [event["step"] for _, event in run.events()] == [1, 2, 2]
    assert [step.get("reward") for step in run.steps()] == [None, 0.5]


def test_events_go_on_from_where_a_reader_stopped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.report_event("note", text="one")
    seen, _ = list(run.events())[-1]
    assert list(run.events(seen)) == []
    run.report_event("note", text="two")
    assert [event["text"] for _, event in run.events(seen)] == ["two"]


def test_a_listener_hears_each_event(tmp_path: Path) -> None:
    heard: list[str] = []
    RunFolder(tmp_path, listener=lambda event: heard.append(event["event"])).report_event("done")
    assert heard == ["done"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"base": 1}'])
def test_a_broken_record_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=r"plan\.json' cannot be read as a Plan"):
        read_record(tmp_path / "plan.json", Plan)


def test_nan_comes_back_as_nan(tmp_path: Path) -> None:
    nan = float("nan")
    write_record(tmp_path / "i.json", Interval(base=nan, new=1.0, difference=nan, low=nan, high=nan))
    assert read_record(tmp_path / "i.json", Interval).low != read_record(tmp_path / "i.json", Interval).low


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already exists and is not empty"):
        RunFolder.create(tmp_path)
    assert (tmp_path / "kept.txt").read_text() == "mine"


def test_a_folder_is_replaced_whole_or_not_at_all_whenever_it_is_killed(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def files(folder):
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else None

    real = {"replace": os.replace, "rmtree": shutil.rmtree}
    for moment in range(5):
        home = tmp_path / str(moment)
        for name, inside in (("out", ("a", "b")), ("out.part", ("c", "d"))):
            (home / name).mkdir(parents=True)
            for file in inside:
                (home / name / file).write_text("x")
        calls = iter(range(10))

        def counted(real_one, calls=calls, moment=moment):
            def call(*given, **options):
                if next(calls) == moment:
                    raise Killed
                return real_one(*given, **options)

            return call

        monkeypatch.setattr(os, "replace", counted(real["replace"]))
        monkeypatch.setattr(shutil, "rmtree", counted(real["rmtree"]))
        with contextlib.suppress(Killed):
            publish_folder(home / "out.part", home / "out")
        monkeypatch.undo()
        assert files(home / "out") in (["a", "b"], ["c", "d"], None)
        if (home / "out.part").exists():  # the next attempt succeeds
            publish_folder(home / "out.part", home / "out")
        assert files(home / "out") == ["c", "d"] and not (home / "out.part").exists()


# --- one at a time ----------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from praison_agent_rl.runs import RunFolder, alone_in
with alone_in(RunFolder(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not AVAILABLE, reason="there are no locks on files on this system")
def test_a_run_that_another_process_works_on_is_left_to_it_until_that_is_gone_however_it_went(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    search = os.pathsep.join(filter(None, sys.path))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search},
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"is under way already, by process {holder.pid}, since .* end that"):
            alone_in(run).__enter__()
    finally:
        holder.kill()
        holder.communicate()
    with alone_in(run):
        pass
    with alone_in(run):  # and not by what is left of the lock itself
        pass


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_in_which_nothing_can_be_written_is_told(tmp_path, monkeypatch, code: int) -> None:
    monkeypatch.setattr(runs, "locked", raising(OSError(code, os.strerror(code))))
    with pytest.raises(ConfigError, match=f"cannot be written: {os.strerror(code)}; make it writable"):
        alone_in(RunFolder(tmp_path)).__enter__()


def test_where_there_are_no_locks_a_run_goes_on_without(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "locked", raising(OSError(errno.ENOSYS, "Function not implemented")))
    with alone_in(RunFolder(tmp_path)):
        reached = True
    assert reached


def raising(error: OSError):
    @contextlib.contextmanager
    def locked(*_: object, **__: object):
        raise error
        yield

    return locked
