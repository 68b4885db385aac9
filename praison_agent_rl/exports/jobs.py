"""What each kind of export is handed, and what it hands back."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from praison_agent_rl.exports.end_tokens import EndTokens
from praison_agent_rl.exports.made import Options
from praison_agent_rl.exports.subjects import Subject

Say = Callable[[str], None]


class Job(NamedTuple):
    """One export."""

    subject: Subject
    options: Options
    out: Path
    """Where the folder will be when it is whole; it is written under another name."""
    ends: EndTokens
    say: Say
    """Hears what is done, as converting takes minutes."""


class Written(NamedTuple):
    """What was written into the folder."""

    use: list[str]
    """Commands to use it, once it is at ``Job.out``."""
    notes: list[str]
    """What else is to be known of it."""
