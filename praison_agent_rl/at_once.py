"""Make several calls at the same time; after a failure nobody waits for those that are still under way."""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

T = TypeVar("T")


def call_at_once(calls: Sequence[Callable[[], T]], *, at_once: int) -> list[T]:
    """What ``calls`` return, in their order, of which up to ``at_once`` are under way at a time, each in a thread.

    A failure is raised as soon as it is there: what has not begun is left out, and what is under way ends by itself, in
    threads that this process may end without (those of ``ThreadPoolExecutor`` it would wait for).

    >>> call_at_once([lambda: 1, lambda: 2], at_once=8)
    [1, 2]
    """
    outcomes: list[Future[T]] = [Future() for _ in calls]
    waiting: queue.SimpleQueue[tuple[Future[T], Callable[[], T]]] = queue.SimpleQueue()
    for pair in zip(outcomes, calls, strict=True):
        waiting.put(pair)
    for _ in range(min(len(calls), at_once)):
        threading.Thread(target=_work, args=(waiting,), name="praison-agent-rl-calls", daemon=True).start()
    try:
        ended = wait(outcomes, return_when=FIRST_EXCEPTION).done
        return [outcome.result() for outcome in outcomes if outcome in ended]
    finally:
        for outcome in outcomes:
            outcome.cancel()


def _work(waiting: "queue.SimpleQueue[tuple[Future[T], Callable[[], T]]]") -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            outcome, call = waiting.get_nowait()
            if outcome.set_running_or_notify_cancel():
                _settle(outcome, call)
                while outcome.exception():  # the rest is not begun
                    waiting.get_nowait()


def _settle(outcome: "Future[T]", call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
        outcome.set_exception(error)
