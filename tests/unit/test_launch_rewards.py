"""Rewards that several processes call at the same time are counted together, and judged alike in each."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from praison_agent_rl.rewards import Reward
from praison_agent_rl.scoring.calls import Caller, CallRules


class Talk:
    """What so many threads say to each other, as processes do that train one model."""

    def __init__(self, count: int) -> None:
        self._said: list[Any] = [None] * count
        self._barrier = threading.Barrier(count, timeout=30)

    def of(self, place: int) -> Callable[[Any], list[Any]]:
        def everywhere(own: Any) -> list[Any]:
            self._said[place] = own
            self._barrier.wait()
            told = list(self._said)
            self._barrier.wait()
            return told

        return everywhere


def score(completions: list[str], **_: Any) -> list[float | None]:
    if "broken" in completions:
        raise ValueError("no judge")
    return [None if text == "none" else float(len(text)) for text in completions]


def scored(*batches: list[list[str]], **rules: Any) -> tuple[list[Caller], list[list[str]]]:
    """The callers of processes that score one batch of each turn of ``batches``, and what each warned of."""
    count = len(batches[0])
    talk, warned = Talk(count), [[] for _ in range(count)]  # type: ignore[var-annotated]
    callers = [
        Caller([Reward(score, "length")], CallRules(retries=0, **rules), warn=warned[place].append)
        for place in range(count)
    ]

    def run(place: int) -> None:
        callers[place].everywhere = talk.of(place)
        for turn in batches:
            callers[place].score(["p"] * len(turn[place]), turn[place], {})

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return callers, warned


def test_counts_are_those_of_all_answers_in_each_process():
    callers, _ = scored([["a", "none", "ccc"], ["broken", "b", "none"]])
    for caller in callers:
        counts = caller.counts["length"]
        assert (counts.samples, counts.none, counts.failed) == (6, 2, 1)
        assert caller.shares()["length"] == (6, 2, 1, 0)
        assert counts.by_kind.total() == 1 and "no judge" in str(counts.first_error)
        step = caller.take_step()["length"]
        assert (step.samples, step.failed) == (6, 1) and caller.take_step()["length"].samples == 0


def test_a_share_of_failures_is_that_of_all_answers():
    half = [["a", "b"], ["broken", "broken"]]
    callers, _ = scored(half, half, most_failed=0.6)
    assert [caller.too_many_failed() for caller in callers] == [None, None]  # 4 of 8, and all of one process's own
    callers, _ = scored(half, half, most_failed=0.4)
    reasons = {caller.too_many_failed() for caller in callers}
    assert len(reasons) == 1 and "for 4 of the last 8 completions (50%" in str(reasons.pop())


def test_each_process_can_tell_of_a_fault_that_another_met():
    callers, warned = scored([["a", "b"], ["c", "broken"]])
    assert [len(each) for each in warned] == [1, 1] and warned[0] == warned[1]
    assert "1 of 4 completions of this batch count as None" in warned[0][0] and "broken" in warned[0][0]
    assert callers[0].summary() == callers[1].summary() and "for 1 of 4 completions" in callers[0].summary()[0]


@pytest.mark.parametrize("count", [1, 3])
def test_alone_or_three_a_sum_is_a_sum(count):
    callers, _ = scored([["a", "none"]] * count) if count > 1 else ([Caller([Reward(score, "length")])], [])
    if count == 1:
        callers[0].score(["p", "p"], ["a", "none"], {})
    assert callers[0].counts["length"].samples == 2 * count and callers[0].counts["length"].none == count
