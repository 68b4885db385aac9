"""A child process ends with its parent, however that ends, and takes with it what it started."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from praison_agent_rl.child import last_lines, start_child, stop_child

posix = pytest.mark.skipif(os.name != "posix", reason="process groups and SIGKILL are missing on this system")

SLEEPER = """
    import os, signal, subprocess, sys, time
    words = sys.argv[1:]
    grandchild = "import signal, time; "
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "deaf" in words or "deaf grandchild" in words:
        grandchild += "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    grandchild += "print('up', flush=True); time.sleep(120)"
    started = subprocess.Popen([sys.executable, "-c", grandchild], stdout=subprocess.PIPE)
    started.stdout.readline()
    with open(words[0] + ".new", "w") as file:
        file.write(f"{os.getpid()} {started.pid}")
    os.rename(words[0] + ".new", words[0])
    if "ends" not in words:
        time.sleep(120)
"""

PARENT = """
    import os, sys, time
    from pathlib import Path
    modules, pids, log, ending = sys.argv[1:]
    sys.path.insert(0, modules)
    from praison_agent_rl.child import start_child
    child = start_child("sleeper", [pids], log=Path(log))
    while not Path(pids).exists():
        time.sleep(0.02)
    if ending == "killed":
        time.sleep(120)
    if ending == "sys.exit":
        sys.exit(3)
    if ending == "exception":
        raise RuntimeError("the parent failed")
    if ending == "os._exit":
        os._exit(4)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that only this process's ``sys.path`` knows."""
    folder = tmp_path / "only here"
    folder.mkdir()
    (folder / "sleeper.py").write_text(textwrap.dedent(SLEEPER))
    (tmp_path / "parent.py").write_text(textwrap.dedent(PARENT))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def write_module(modules: Path, name: str, code: str) -> None:
    (modules / f"{name}.py").write_text(textwrap.dedent(code))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a zombie has ended and only waits to be counted
    except psutil.NoSuchProcess:
        return False


def wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def pids_in(file: Path) -> list[int]:
    assert wait_for(file.exists, 30), "the child never came up"
    return [int(word) for word in file.read_text().split()]


def start_sleeper(tmp_path: Path, *words: str) -> "tuple[subprocess.Popen[bytes], list[int]]":
    child = start_child("sleeper", [str(tmp_path / "pids"), *words], log=tmp_path / "log")
    return child, pids_in(tmp_path / "pids")


def outcome(tmp_path: Path, module: str, *arguments: str, **options) -> "tuple[int, str]":
    """Exit code and log of a child that ends by itself."""
    child = start_child(module, arguments, log=tmp_path / "log", **options)
    code = child.wait(30)
    stop_child(child)
    return code, (tmp_path / "log").read_text()


# --- the parent ends ------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize(
    ("ending", "code"),
    [("killed", -signal.SIGKILL), ("returns", 0), ("sys.exit", 3), ("exception", 1), ("os._exit", 4)],
)
def test_child_and_grandchild_are_gone_within_three_seconds_of_their_parents_end(ending, code, modules, tmp_path):
    arguments = [str(modules), str(tmp_path / "pids"), str(tmp_path / "log"), ending]
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), *arguments], stderr=subprocess.DEVNULL)
    child, grandchild = pids_in(tmp_path / "pids")
    if ending == "killed":
        assert alive(child) and alive(grandchild)
        parent.kill()
    assert parent.wait(30) == code
    assert wait_for(lambda: not alive(child) and not alive(grandchild), 3), (tmp_path / "log").read_text()


@posix
def test_a_child_whose_parent_is_gone_before_it_could_look_does_not_stay(modules, tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
    code += "from praison_agent_rl.child import start_child\n"
    code += "print(start_child('sleeper', [sys.argv[2]], log=Path(sys.argv[3])).pid)"
    words = [str(modules), str(tmp_path / "pids"), str(tmp_path / "log")]
    printed = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
    assert wait_for(lambda: not alive(int(printed)), 10)
    time.sleep(0.2)
    assert [pid for pid in (pids_in(tmp_path / "pids") if (tmp_path / "pids").exists() else []) if alive(pid)] == []


@posix
def test_the_child_lives_while_its_parent_does(modules, tmp_path):
    child, pids = start_sleeper(tmp_path)
    try:
        time.sleep(1.2)  # its watch looks each half second
        assert child.poll() is None and all(alive(pid) for pid in pids)
        assert pids[0] == child.pid and os.getsid(child.pid) == child.pid  # so Ctrl-C does not reach it
    finally:
        stop_child(child)


# --- it is stopped --------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("words", [(), ("deaf grandchild",)])
def test_stop_child_ends_the_child_and_what_it_started_without_waiting(words, modules, tmp_path):
    child, pids = start_sleeper(tmp_path, *words)
    began = time.monotonic()
    stop_child(child, patience=20)
    assert time.monotonic() - began < 10
    assert child.returncode == -signal.SIGTERM and child.stdin.closed
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 20)


@posix
def test_stop_child_ends_one_that_ignores_the_request_after_its_patience(modules, tmp_path):
    child, pids = start_sleeper(tmp_path, "deaf")
    began = time.monotonic()
    stop_child(child, patience=0.5)
    assert 0.5 <= time.monotonic() - began < 10
    assert child.returncode == -signal.SIGKILL
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 20)


@posix
def test_stop_child_ends_what_an_ended_child_has_left_behind(modules, tmp_path):
    child, (pid, grandchild) = start_sleeper(tmp_path, "ends")
    assert wait_for(lambda: not alive(pid), 10) and alive(grandchild)
    stop_child(child)
    assert child.returncode == 0
    assert wait_for(lambda: not alive(grandchild), 3)


def test_stop_child_may_be_called_twice_and_for_a_child_that_has_ended(modules, tmp_path):
    write_module(modules, "brief", "raise SystemExit(7)")
    child = start_child("brief", log=tmp_path / "log")
    assert child.wait(30) == 7
    stop_child(child)
    stop_child(child)
    assert child.returncode == 7 and child.stdin.closed


# --- what the child is given ----------------------------------------------------------------------------------------


def test_the_module_runs_as_a_program_with_its_arguments_and_its_exit_code(modules, tmp_path):
    write_module(modules, "program", "import sys; print(__name__, sys.argv[1:]); sys.exit(7)")
    code, log = outcome(tmp_path, "program", "a b", "--flag=ü")
    assert (code, log) == (7, "__main__ ['a b', '--flag=ü']\n")


def test_output_and_errors_go_to_the_log_in_order_and_are_added_to_it(modules, tmp_path):
    write_module(modules, "noisy", "import sys; print('out'); print('err', file=sys.stderr); print('out again')")
    (tmp_path / "log").write_text("from before\n")
    code, log = outcome(tmp_path, "noisy")
    assert (code, log) == (0, "from before\nout\nerr\nout again\n")


def test_a_failing_module_leaves_its_traceback_in_the_log(modules, tmp_path):
    write_module(modules, "failing", "raise RuntimeError('no luck')")
    code, log = outcome(tmp_path, "failing")
    assert code == 1 and log.endswith("RuntimeError: no luck\n")
    assert last_lines(tmp_path / "log", 1) == "RuntimeError: no luck"


def test_a_module_that_is_not_there_is_named_in_the_log(modules, tmp_path):
    code, log = outcome(tmp_path, "nowhere_to_be_found")
    assert code == 1 and "nowhere_to_be_found" in log


def test_the_folder_of_the_log_is_made(modules, tmp_path):
    write_module(modules, "hello", "print('hello')")
    child = start_child("hello", log=tmp_path / "a" / "b" / "log")
    assert child.wait(30) == 0
    stop_child(child)
    assert (tmp_path / "a" / "b" / "log").read_text() == "hello\n"


def test_the_child_finds_the_modules_that_its_parent_finds(modules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as in an interactive session: the current folder
    (tmp_path / "in_the_current_folder.py").write_text("PLACE = 'here'")
    write_module(modules, "only_by_sys_path", "PLACE = 'there'")
    write_module(
        modules,
        "finder",
        "import in_the_current_folder, only_by_sys_path; print(in_the_current_folder.PLACE, only_by_sys_path.PLACE)",
    )
    assert outcome(tmp_path, "finder") == (0, "here there\n")


SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
QUIET = ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_TELEMETRY", "PYTHONUNBUFFERED")


def test_waiting_threads_of_the_child_sleep_and_nothing_reports_home(modules, tmp_path, monkeypatch):
    write_module(modules, "show", SHOW_ENVIRONMENT)
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRAISON_AGENT_RL_DEVICE", "cpu")
    seen = json.loads(outcome(tmp_path, "show")[1])
    assert [seen[name] for name in QUIET] == ["PASSIVE", "false", "1", "1"]


def test_a_child_that_computes_on_a_gpu_keeps_its_threads_as_they_are(modules, tmp_path, monkeypatch):
    write_module(modules, "show", SHOW_ENVIRONMENT)
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    seen = json.loads(outcome(tmp_path, "show", device="cuda")[1])
    assert not any(name.startswith(("OMP_", "GOMP_", "MKL_")) for name in seen)
    assert seen["TOKENIZERS_PARALLELISM"] == "false"
    assert "OMP_NUM_THREADS" in json.loads((outcome(tmp_path, "show", device="cpu")[1]).splitlines()[-1])


def test_values_that_the_user_has_set_win(modules, tmp_path, monkeypatch):
    write_module(modules, "show", SHOW_ENVIRONMENT)
    mine = {"OMP_WAIT_POLICY": "ACTIVE", "TOKENIZERS_PARALLELISM": "true", "HF_HUB_DISABLE_TELEMETRY": "0"}
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    seen = json.loads(outcome(tmp_path, "show")[1])
    assert {name: seen[name] for name in mine} == mine


def test_variables_for_the_child_alone_are_added_and_our_own_environment_stays(modules, tmp_path, monkeypatch):
    write_module(modules, "show", SHOW_ENVIRONMENT)
    monkeypatch.setenv("FROM_THE_USER", "kept")
    before = dict(os.environ)
    seen = json.loads(outcome(tmp_path, "show", env={"A_SECRET_KEY": "s3cret"})[1])
    assert (seen["A_SECRET_KEY"], seen["FROM_THE_USER"]) == ("s3cret", "kept")
    assert dict(os.environ) == before


# --- the end of the log ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (b"one\ntwo\nthree\n\n", 2, "two\nthree"),
        (b"one", 12, "one"),
        (b"", 12, "(it wrote nothing)"),
        (b" \n\n", 12, "(it wrote nothing)"),
        (b"caf\xe9\n", 12, "caf\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_the_last_lines_of_a_log_are_given_without_the_blank_ones_at_its_end(text, count, expected, tmp_path):
    (tmp_path / "log").write_bytes(text)
    assert last_lines(tmp_path / "log", count) == expected


def test_a_log_that_is_not_there_reads_as_nothing_written(tmp_path):
    assert last_lines(tmp_path / "log") == "(it wrote nothing)"
