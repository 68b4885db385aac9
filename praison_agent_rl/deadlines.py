"""Calls of other people's code that come back in time, whatever that code does; it knows nothing of rewards."""

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN = 0.25  # seconds after which code that caught the stop, or has not come to it, is told again
_UNMOVED = 10.0  # seconds of that after which it is said aloud
_LONGEST = threading.TIMEOUT_MAX  # no thread can wait for longer


class TimedOut(Exception):
    """The call did not end in time."""


class _Stop(BaseException):
    """What a call is ended with; no Exception, so that `except Exception` in it lets it pass."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """What ``call`` returns, or raises, if it ends within ``seconds``.

    In the main thread it runs there and is stopped by a signal: that alone ends a regular expression that never
    finishes, which keeps every other thread waiting, and code that is bound to the main thread (math-verify's own
    time limit, a database connection) works as it always did. Elsewhere, and where the system has no such signal
    (Windows), it runs in a thread of its own, which is told to stop and then left alone; code that does not let go of
    the interpreter, such as that regular expression, cannot be ended there.

    Raises:
        TimedOut: it did not end.
    """
    if hasattr(signal, "pthread_kill") and threading.current_thread() is threading.main_thread():
        return _here(min(seconds, _LONGEST), call)
    return in_a_thread(seconds, call)


def _here(seconds: float, call: Callable[[], T]) -> T:
    ends, own, running = time.monotonic() + seconds, inspect.currentframe(), False

    def stop(_number: int, frame: FrameType | None) -> None:
        if running and frame is not own and time.monotonic() >= ends:  # in `own` it would miss the clearing up
            raise _Stop

    over = threading.Event()
    watch = threading.Thread(target=_watch_main, args=(over, seconds), daemon=True)
    before = signal.signal(signal.SIGVTALRM, stop)
    watch.start()  # on a busy machine it may take longer than the call has: nothing is stopped before the call began
    # Code that holds the interpreter keeps `watch` waiting too, but it uses the processor. The timer counts that of all
    # threads, so it may ring early; `stop` looks at the clock.
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds / 4, 0.01), max(seconds / 4, 0.01))
    try:
        running = True
        return _call(call)
    except _Stop:
        raise TimedOut from None
    finally:
        running = False
        over.set()
        watch.join()
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        # a signal may still be on its way, and the system's own answer to it is to end the process
        signal.signal(signal.SIGVTALRM, before if callable(before) else _let_pass)


def _call(call: Callable[[], T]) -> T:
    """A frame of its own, also for what is not written in Python."""
    return call()


def _let_pass(_number: int, _frame: FrameType | None) -> None:
    """Instead of the system's own answer; and not SIG_IGN, which child processes would inherit."""


def _watch_main(over: threading.Event, seconds: float) -> None:
    main, told = threading.main_thread().ident, 0
    wait = seconds
    while main is not None and not over.wait(wait):
        signal.pthread_kill(main, signal.SIGVTALRM)
        wait, told = _AGAIN, told + 1
        if told == _UNMOVED / _AGAIN:
            logger.warning("a call that should have ended %.0f s ago does not react: it is in foreign code", _UNMOVED)


def in_a_thread(seconds: float, call: Callable[[], T]) -> T:
    """As `within`, always in a thread of its own."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            failure.append(error)

    with_context = contextvars.copy_context().run
    thread = threading.Thread(target=with_context, args=(run,), daemon=True)
    thread.start()
    thread.join(min(seconds, _LONGEST))
    if failure:
        raise failure[0]
    if outcome:
        return outcome[0]
    end_thread(thread)
    raise TimedOut


def end_thread(thread: threading.Thread) -> None:
    """Let ``thread`` meet an exception as soon as it runs Python code; one that sits in foreign code is left alone."""
    for _ in range(3):  # it may catch the first
        if thread.ident is None or not thread.is_alive():
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
        thread.join(0.05)


def end_copies(own: int) -> None:
    """End the process if it is not ``own``: a reward that forks would leave a second one that goes on as the first."""
    if os.getpid() != own:
        os._exit(0)


class LoopThread:
    """An event loop in a thread of its own, which lives as long as what its coroutines share, such as a connection."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        with contextlib.suppress(_Stop):
            try:
                self.loop.run_forever()
            finally:
                self._end_tasks()

    def _end_tasks(self) -> None:
        rest = asyncio.all_tasks(self.loop)
        for task in rest:
            task.cancel()
        if rest:
            self.loop.run_until_complete(asyncio.wait(rest, timeout=1))  # one may not heed it
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def start(self, work: Coroutine[Any, Any, None]) -> Callable[[], Any]:
        """Begin ``work``, which hands over itself what comes of it; what is returned cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).cancel

    def reacts(self, seconds: float) -> bool:
        """Whether the loop comes round within ``seconds``: a coroutine that does not await keeps it."""
        came = threading.Event()
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(came.set)
        return came.wait(min(seconds, _LONGEST))

    def busy_with(self) -> str | None:
        """Name of the task that runs at this moment."""
        task = asyncio.current_task(self.loop)
        return task.get_name() if task else None

    def abandon(self) -> None:
        """Stop it as far as it can be stopped; whatever still runs in it is nobody's any more."""
        self._stop()
        end_thread(self._thread)

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        self._stop()
        self._thread.join(3)
        end_thread(self._thread)

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed already
            self.loop.call_soon_threadsafe(self.loop.stop)
