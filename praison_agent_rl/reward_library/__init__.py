"""Rewards that are ready to use, named as ``praison_agent_rl.reward_library:NAME``; docs/rewards.md has the table.

They read texts, message lists and whole tool rollouts, where the last assistant message counts. Parameters are given
by keyword, in YAML beside ``reward:``. A sample whose row has no ground truth gets None, which is no score. What a
reward needs beyond the standard library is imported when it is called; the extra ``rewards`` installs all of it.
"""

from .answers import contains, exact, fuzzy
from .formats import regex, tags, think_answer, think_format
from .lengths import length_band, length_penalty, soft_overlong
from .mathematics import accuracy, math_equal
from .numeric_answers import numeric
from .structured import json_schema, json_valid
from .style import citations, forbidden, language, repetition, script
from .tool_use import few_calls, no_failed_call, right_arguments, right_tool

__all__ = [
    "accuracy",
    "citations",
    "contains",
    "exact",
    "few_calls",
    "forbidden",
    "fuzzy",
    "json_schema",
    "json_valid",
    "language",
    "length_band",
    "length_penalty",
    "math_equal",
    "no_failed_call",
    "numeric",
    "regex",
    "repetition",
    "right_arguments",
    "right_tool",
    "script",
    "soft_overlong",
    "tags",
    "think_answer",
    "think_format",
]
