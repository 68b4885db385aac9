"""Write what a run came to: one HTML page, readable offline, in light and dark, and the same numbers as JSON."""

import json

from praison_agent_rl.report.calls import calls_section
from praison_agent_rl.report.examples import examples
from praison_agent_rl.report.numbers import as_json, gather, outcome_of
from praison_agent_rl.report.page import document
from praison_agent_rl.report.scorers import scorer_section
from praison_agent_rl.report.sections import (
    comparison_section,
    data_section,
    gate_section,
    making_section,
    summary,
    warning_section,
)
from praison_agent_rl.report.showed import showed_section
from praison_agent_rl.report.training import training_section
from praison_agent_rl.report.verdicts import card_verdict, verdict
from praison_agent_rl.runs import RunFolder, write_text

__all__ = ["card_verdict", "outcome_in_words", "verdict", "write_report"]


def write_report(run: RunFolder) -> None:
    """Write ``report.html`` and ``report.json`` into the run's folder from what the stages left there.

    The folder of a version, which keeps the records of its run, serves as well.

    Raises:
        ConfigError: a record in the folder cannot be read.
        MissingExtra: the library that draws is not installed.
    """
    facts = gather(run)
    parts = [
        summary(facts),
        scorer_section(facts),
        comparison_section(facts),
        gate_section(facts),
        showed_section(facts),
        warning_section(facts),
        examples(facts),
        training_section(facts),
        calls_section(facts),
        data_section(facts),
        making_section(facts),
    ]
    write_text(run.report, document(f"Training run {run.root.name}", "".join(parts)))
    write_text(run.numbers, json.dumps(as_json(facts), indent=1, allow_nan=False) + "\n")


def outcome_in_words(run: RunFolder) -> str:
    """The sentence at the top of the page."""
    return outcome_of(run)
