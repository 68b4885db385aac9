"""Corrections of runs: which of them say something, and which one counts; older stores hold some that say nothing."""

import re
from collections.abc import Iterable

from praison_agent_rl.data_checks import without_white_space
from praison_agent_rl.records import Feedback, Run

_MARKS = re.compile(r"<[|｜][^<>]*[|｜]>|</?s>|<(?:bos|eos|pad|unk|(?:start|end)_of_turn)>")
"""Tokens that chat templates put around what is said: ChatML, Llama 2 and 3, Mistral, Gemma, DeepSeek."""


def says_nothing(text: str) -> bool:
    """Whether a text is nothing but white space and marks of chat templates.

    >>> says_nothing(" <|im_end|>"), says_nothing("5")
    (True, False)
    """
    return not without_white_space(_MARKS.sub("", text))


def last_correction(feedback: Iterable[Feedback]) -> str | None:
    """The answer that should have been given, by the last correction that says something."""
    found = [said.correction for said in feedback if said.correction and not says_nothing(said.correction)]
    return found[-1] if found else None


def blank_corrections(runs: Iterable[Run]) -> int:
    """How many corrections of ``runs`` say nothing."""
    given = [said.correction for run in runs for said in run.feedback if said.correction is not None]
    return sum(map(says_nothing, given))
