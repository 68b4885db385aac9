"""Rewards for the right formula: by math-verify, and by TRL's reward on it, both in a process that can be ended."""

import atexit
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import RewardError
from praison_agent_rl.line_process import LineProcess

from .making import Scores, a_number, library_reward, missing_extra
from .reading import Piece, after_thinking, each_against, final_answer

_TAIL = 4000
"""Letters at the end of a text in which a formula is sought."""


@library_reward("answer")
def math_equal(completions: Sequence[Any], answer: Any, *, seconds: float = 5.0, tag: str = "answer") -> Scores:
    r"""1.0 if the formula or number equals the right one by math-verify, else 0.0; None where the right one is none.

    LaTeX and plain expressions are read, in the marked answer, else where math-verify finds the final one. What cannot
    be compared in ``seconds`` (9^9^9^9) has 0.0.

    >>> math_equal([r"\boxed{\frac12}", "It is $1+x^2$", "<answer>2x</answer>", "?"], ["0.5", "x^2+1", "x+x", "Rome"])
    [1.0, 1.0, 1.0, None]
    """
    a_number(seconds, "seconds", least=0.01)

    def score(text: str, accepted: list[str]) -> float | None:
        right = [final_answer(one).text for one in accepted]
        return _asked("math_equal", final_answer(text, tag), right, seconds)

    return each_against(completions, answer, score)


@library_reward("answer")
def accuracy(completions: Sequence[Any], answer: Any, *, seconds: float = 5.0) -> Scores:
    r"""1.0 if the LaTeX in the text equals the right answer, else 0.0, None where that is none: TRL's accuracy_reward.

    By ``trl.rewards.accuracy_reward``: it must be LaTeX that is said to be the answer (``\boxed{}``, "the answer
    is $...$"); `math_equal` reads plain text too. What cannot be compared in ``seconds`` has 0.0.

    >>> accuracy([r"So it is \boxed{\frac{1}{3}}.", "So it is 1/3."], [r"\frac{1}{3}", r"\frac{1}{3}"])
    [1.0, 0.0]
    """
    a_number(seconds, "seconds", least=0.01)
    if importlib.util.find_spec("trl") is None:
        raise missing_extra("accuracy", "trl", extra="train")

    def score(text: str, accepted: list[str]) -> float | None:
        return _asked("accuracy", Piece(after_thinking(text), False), accepted, seconds)

    return each_against(completions, answer, score)


class MathProcess(LineProcess):
    """The process of `math_worker`."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("math_worker.py"))

    def ask(self, request: dict[str, Any]) -> float | None:
        """The score that the process gives; 0.0 if it ended over the request."""
        line = self.line_for(request)
        return _score(json.loads(line)) if line else 0.0

    def _start(self) -> "subprocess.Popen[str]":
        process = super()._start()
        if process.stdout is None or process.stdout.readline() != "ready\n":
            self.close()
            raise RewardError(f"the process that compares formulas did not start: {sys.executable} math_worker.py")
        return process


def _score(said: Any) -> float | None:
    if isinstance(said, dict):
        raise RewardError(f"the process that compares formulas failed: {said['failed']}")
    return None if said is None else float(said)


@cache
def _process_of(parent: int) -> MathProcess:
    """One for each process: a fork may not read from its parent's."""
    process = MathProcess()
    atexit.register(process.close)
    return process


def _asked(what: str, given: Piece, right: Sequence[str], seconds: float) -> float | None:
    if importlib.util.find_spec("math_verify") is None:
        raise missing_extra(what, "math-verify")
    piece = {"text": given.text[-_TAIL:], "marked": given.marked}
    request = {"what": what, "given": piece, "right": [text[-_TAIL:] for text in right], "seconds": seconds}
    return _process_of(os.getpid()).ask(request)
