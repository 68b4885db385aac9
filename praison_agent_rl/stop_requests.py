"""How a run is asked to end after the step under way: by a file in its folder, or by a signal to who works on it.

The file reaches every process that trains, on this machine or on another, and nothing else that they have started.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from praison_agent_rl.runs import RunFolder

ENDING = "ending after the step under way, whose checkpoint is saved; again to end at once"
"""What is said to whoever has asked."""
_FILE = "stop"
_USUAL: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is taken as Ctrl-C is."""


def ask_to_end(run: RunFolder) -> None:
    """Let ``run`` end after the step under way; whoever trains looks for this after each step."""
    (run.root / _FILE).touch()


def is_asked_to_end(run: RunFolder) -> bool:
    """Whether somebody has asked."""
    return (run.root / _FILE).exists()


def take_back(run: RunFolder) -> None:
    """Forget that anybody had asked, before a run begins or is gone on with."""
    (run.root / _FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def heeding_signals(ask: Callable[[int], bool]) -> Iterator[None]:
    """While the block lasts SIGTERM and Ctrl-C call ``ask``; where it gives False they raise.

    A signal that the program has a handler of its own for is left to it, and so are all outside the main thread.

    Raises:
        KeyboardInterrupt: Ctrl-C came, and nothing is to be waited for; ``Terminated`` for SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heed(number: int, frame: object) -> None:
        if not ask(number):
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    free = [number for number, usual in _USUAL.items() if signal.getsignal(number) == usual]
    for number in free:
        signal.signal(number, heed)
    try:
        yield
    finally:
        for number in free:
            signal.signal(number, _USUAL[number])
