"""Calls at the same time: in order, no more than asked for, and after a failure nothing is waited for."""

import subprocess
import sys
import threading

import pytest

from praison_agent_rl.at_once import call_at_once


def test_results_come_in_the_order_of_the_calls_whichever_ends_first():
    second_ended = threading.Event()

    def first() -> str:
        assert second_ended.wait(30)
        return "first"

    def second() -> str:
        second_ended.set()
        return "second"

    assert call_at_once([first, second], at_once=2) == ["first", "second"]
    assert call_at_once([], at_once=2) == []


def test_no_more_calls_are_under_way_than_were_asked_for():
    lock, both, under_way, most = threading.Lock(), threading.Barrier(2), [0], [0]

    def call() -> None:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        both.wait(30)  # goes on with two only
        with lock:
            under_way[0] -= 1

    call_at_once([call] * 6, at_once=2)
    assert most == [2]


def test_a_failure_is_raised_while_another_call_hangs_and_the_rest_is_not_begun():
    released, begun = threading.Event(), threading.Event()
    later: list[int] = []

    def hang() -> None:
        begun.set()
        released.wait(60)

    def fail() -> None:
        assert begun.wait(30)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        call_at_once([hang, fail, *[lambda: later.append(1)] * 100], at_once=2)
    assert not released.is_set() and later == []
    released.set()


def test_a_process_ends_though_a_call_hangs():
    program = (
        "import time\nfrom praison_agent_rl.at_once import call_at_once\n"
        "def fail():\n    time.sleep(0.2)\n    raise SystemExit(7)\n"
        "call_at_once([lambda: time.sleep(3600), fail], at_once=2)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 7
