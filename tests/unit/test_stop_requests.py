"""A run is asked to end by a file in its folder or by a first signal; a second one does what signals usually do."""

import signal
import threading
from pathlib import Path

import pytest

from praison_agent_rl.commands import running
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.records import Plan
from praison_agent_rl.runs import RunFolder, write_record
from praison_agent_rl.stop_requests import Terminated, ask_to_end, heeding_signals, is_asked_to_end, take_back


def test_the_wish_is_a_file_that_can_be_taken_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert not is_asked_to_end(run)
    take_back(run)
    ask_to_end(run)
    ask_to_end(run)
    assert is_asked_to_end(RunFolder(tmp_path)) and [path.name for path in tmp_path.iterdir()] == ["stop"]
    take_back(run)
    assert not is_asked_to_end(run)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_first_signal_asks_and_a_second_one_raises(number: int, raised: type[BaseException]) -> None:
    asked: list[int] = []

    def ask(number: int) -> bool:
        asked.append(number)
        return len(asked) == 1

    with heeding_signals(ask):
        signal.raise_signal(number)
        assert asked == [number]
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(number)
        assert caught.type is raised
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_command_asks_a_run_of_this_machine_and_leaves_a_trained_one_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create(tmp_path / "run")
    write_record(run.plan_file, Plan(base="b", config={}, rewards=[], device="cpu", notes=[], libraries={}, created=""))
    running.stop(run.root)
    assert is_asked_to_end(run) and "it ends after the step under way" in capsys.readouterr().out
    take_back(run)
    run.adapter.mkdir()
    running.stop(run.root)
    assert not is_asked_to_end(run) and "it has been trained already" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        running.stop(tmp_path)


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with heeding_signals(lambda number: pytest.fail("it was not to be asked")):
            signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_nothing_is_taken_over() -> None:
    found: list[object] = []

    def work() -> None:
        with heeding_signals(lambda number: True):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
