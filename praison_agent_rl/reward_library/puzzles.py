"""The reward for puzzles of a task set, by the scorer that comes with the task."""

import re
from collections.abc import Sequence
from typing import Any

from praison_agent_rl.task_sets import score_of

from .making import Scores, library_reward, per_sample
from .reading import after_thinking, final_answer, last_text


@library_reward("reasoning_gym")
def reasoning_gym(completions: Sequence[Any], reasoning_gym: Any, *, tag: str = "answer") -> Scores:
    r"""What the task's own ``score_answer`` says of the answer, as a rule from 0.0 to 1.0.

    For rows of a dataset named ``reasoning_gym:<task>``; other rows have no score. The answer is what stands in the
    last ``<tag>``, else in ``\boxed{}``, else after ``####``, else the whole text after the reasoning. One that the
    task cannot read, or needs more than 5 s for, is 0.0.

    >>> from praison_agent_rl.task_sets import rows_of_task_set
    >>> (row,) = rows_of_task_set("reasoning_gym:chain_sum", size=1)
    >>> reasoning_gym([f"It is <answer>{row['answer']}</answer>", "No idea"], [row["reasoning_gym"]] * 2)
    [1.0, 0.0]
    """
    entries = per_sample(reasoning_gym, "reasoning_gym", len(completions))
    pairs = zip(completions, entries, strict=True)
    return [None if entry is None else score_of(entry, _answer(last_text(said), tag)) for said, entry in pairs]


def _answer(text: str, tag: str) -> str:
    """The marked part as it stands, since mazes are drawn with ``####`` too; else what `final_answer` finds."""
    whole = final_answer(text, tag).text
    name = re.escape(tag)
    marked = re.findall(rf"<{name}(?:\s[^<>]*)?>(.*?)</{name}\s*>", after_thinking(text), re.DOTALL | re.IGNORECASE)
    return marked[-1].strip() if marked else whole
