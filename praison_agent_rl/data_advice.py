"""Which method an agent's recorded runs support, what is missing for the others, and the next command."""

import glob
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from praison_agent_rl.dataset_building import BuildOptions, source_of, survey
from praison_agent_rl.dataset_building.report import Manifest
from praison_agent_rl.records import FEWEST_PROMPTS, Record
from praison_agent_rl.transcripts import DEFAULT_STORE, iter_run_dicts
from praison_agent_rl.transcripts.corrections import last_correction

WANTED = 5 * FEWEST_PROMPTS
"""Prompts from which a fifth that is held out can show that something is better."""
MOST_AGENTS = 10
"""Agents that are looked at where none is named; each takes two passes over the store."""

SIGNALS = {
    "grpo": "I can score them programmatically",
    "reward": "I have chosen/rejected and want a scorer",
    "cpo": "I have chosen/rejected and want it lighter",
}
"""What a user has to judge answers by, in the words of praisonai-train's chooser."""


class Advice(Record):
    """What one method finds in the recorded runs."""

    method: Literal["grpo", "reward", "cpo"]
    signal: str
    ready: bool
    """Whether there is enough; a reward function is not looked for."""
    has: str
    """What there is, with the count that is wanted."""
    missing: str
    """What to do about it; empty where nothing is missing."""
    command: str
    """The next one; words in capitals are to be filled in."""


class Supply(Record):
    """What is recorded of one agent."""

    agent: str
    runs: int
    rated: int
    """Runs with a score."""
    corrected: int
    """Runs with a better answer."""
    prompts: int
    """Different ones, near-duplicates aside."""
    pairs: dict[str, int]
    """By where they are from: correction, rating, retry."""
    pair_prompts: int
    """Different prompts that have pairs."""
    left_out: dict[str, int]
    """What was said of answers and made no pair, by reason."""
    notes: list[str]
    advice: list[Advice]


def examine_data(agent: str | None = None, *, store: str | Path | None = None) -> list[Supply]:
    """What is recorded of an agent (a name or a pattern), or of each, and what can be made of it; nothing is kept.

    Raises:
        DataError: nothing is recorded.
    """
    folder = Path(store) if store is not None else DEFAULT_STORE
    if agent is not None:
        return [_supply(agent, agent, folder)]
    source_of(folder)
    names = Counter(run["agent"] for run in iter_run_dicts(folder) if run["agent"] and run["calls"])
    return [_supply(name, glob.escape(name), folder) for name, _ in names.most_common(MOST_AGENTS)]


def _supply(name: str, pattern: str, folder: Path) -> Supply:
    prompts = survey(source_of(folder), BuildOptions(agent=pattern))
    pairs = survey(source_of(folder), BuildOptions(agent=pattern, kind="pairs"))
    said = _feedback_on(pattern, folder)
    return Supply(
        agent=name,
        runs=prompts.runs,
        rated=said["rated"],
        corrected=said["corrected"],
        prompts=prompts.train + prompts.held_out,
        pairs=pairs.sources,
        pair_prompts=pairs.prompts or 0,
        left_out=pairs.left_out,
        notes=list(_notes(prompts, pairs)),
        advice=[_grpo(name, prompts, said), *_of_pairs(name, prompts, pairs)],
    )


def _feedback_on(pattern: str, folder: Path) -> Counter[str]:
    counted: Counter[str] = Counter()
    for run in source_of(folder).runs:
        if run.feedback and BuildOptions(agent=pattern).speaks_of(run):
            counted["rated"] += any(said.score is not None for said in run.feedback)
            counted["corrected"] += last_correction(run.feedback) is not None
    return counted


def _grpo(agent: str, manifest: Manifest, said: Counter[str]) -> Advice:
    count, ready = manifest.train + manifest.held_out, _enough(manifest, manifest.train + manifest.held_out)
    hint = ": corrections are there, so one that compares with the column answer will do" if said["corrected"] else ""
    reward = f"a reward function that scores answers, which recorded runs cannot show{hint}"
    return Advice(
        method="grpo",
        signal=SIGNALS["grpo"],
        ready=ready,
        has=f"{count:,} prompts, {WANTED} wanted",
        missing=reward if ready else f"{_more(manifest, count, 'prompts')}, and {reward}",
        command=_improve("grpo --reward MODULE:FUNCTION") if ready else _again(agent),
    )


def _of_pairs(agent: str, prompts: Manifest, manifest: Manifest) -> Iterator[Advice]:
    count, pairs = manifest.prompts or 0, manifest.train + manifest.held_out
    ready = _enough(manifest, count)
    missing = "" if ready else (
        f"{_more(manifest, count, 'prompts with a pair')}: correct answers with rl.feedback(run, correction=...), rate "
        "several answers to one prompt with score=, or sample answers and score them"
    )  # fmt: skip
    sampled = (
        f"praison-agent-rl dataset build --kind pairs --agent {shlex.quote(agent)} --sample 4 --reward MODULE:FUNCTION "
        "--base-model WEIGHTS"
    )
    short = sampled if prompts.train + prompts.held_out >= WANTED else _again(agent)
    methods: tuple[Literal["reward", "cpo"], ...] = ("reward", "cpo")
    for method in methods:
        yield Advice(
            method=method,
            signal=SIGNALS[method],
            ready=ready,
            has=f"{pairs:,} pairs of {count:,} prompts, {WANTED} prompts wanted",
            missing=missing,
            command=_improve(method) if ready else short,
        )


def _enough(manifest: Manifest, prompts: int) -> bool:
    return prompts >= WANTED and manifest.held_out >= FEWEST_PROMPTS


def _more(manifest: Manifest, count: int, what: str) -> str:
    if count < WANTED:
        return f"{WANTED - count} more {what}"
    return (
        f"more conversations: of these {what} {manifest.held_out} can be held out, {FEWEST_PROMPTS} are wanted, since "
        f"{manifest.largest_group:,} belong together"
    )


def _improve(method: str) -> str:
    name, _, options = method.partition(" ")
    return " ".join(filter(None, ["praison-agent-rl improve MODULE:AGENT", f"--set method={name}", options]))


def _again(agent: str) -> str:
    return f"praison-agent-rl doctor data --agent {shlex.quote(agent)}   (after more runs, recorded by agent.record())"


def _notes(prompts: Manifest, pairs: Manifest) -> Iterator[str]:
    if prompts.dropped:
        yield f"the recorder lost {prompts.dropped:,} lines (disk full, folder gone), so runs are missing here"
    if prompts.unreadable:
        yield f"{prompts.unreadable:,} recorded lines are torn or go on from lines that are gone"
    if pairs.malformed_example:
        yield f"the first of those that cannot be trained on is {pairs.malformed_example}"
