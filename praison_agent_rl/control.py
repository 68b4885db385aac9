"""A small fixed set of general prompts with known answers, asked in every gate: other skills must survive training.

It ships with the package, and is scored here and never by a run's rewards.
"""

from pathlib import Path

from praison_agent_rl.data import Row, as_messages, read_rows
from praison_agent_rl.demo_rewards import correctness
from praison_agent_rl.rewards import Reward, Shape

CONTROL_QUESTIONS = Path(__file__).parent / "control_data" / "questions.jsonl"
"""One question a line, with the answers that are accepted."""
CONTROL_TOKENS = 64
"""Longest answer: none needs more, and what rambles on has said it by then."""


def control_rows() -> list[Row]:
    """The questions as plain user messages, with no system prompt and no tools."""
    return [{**row, "prompt": as_messages(row["prompt"])} for row in read_rows(CONTROL_QUESTIONS)]


def control_rewards() -> list[Reward]:
    """What scores them: 1.0 where an accepted answer occurs as whole words, whatever their case."""
    return [Reward(correctness, "control", shape=Shape("text", "text"))]
