"""What is written down about a prompt dataset, and how it is told; nothing is read or computed from rows here."""

import json
from typing import Literal

from pydantic import Field

from praison_agent_rl.dataset_building.choosing import BuildOptions
from praison_agent_rl.dataset_building.comparing import PAIR_REASONS
from praison_agent_rl.dataset_building.rows import REASONS
from praison_agent_rl.records import Record


class Source(Record):
    """A file that runs were read from."""

    name: str
    bytes: int


class Manifest(Record):
    """Where a dataset came from, and what became of every run."""

    format: int = 1
    kind: Literal["prompts", "pairs"] = "prompts"
    """What a row is."""
    store: str | None
    """Folder of the transcripts; None for runs that were handed over."""
    files: list[Source]
    dropped: int
    """Lines that the recorder could not write."""
    unreadable: int
    """Lines that were torn, or go on from one that is gone."""
    runs: int
    """Runs that the options speak of."""
    calls: int
    """Calls of these runs."""
    train: int
    """Rows to train on."""
    held_out: int
    """Rows to judge by."""
    largest_group: int
    """Rows of the largest group that must stay on one side."""
    left_out: dict[str, int]
    """Runs that did not become rows, by reason; of pairs, what was said of answers and made none."""
    sources: dict[str, int] = Field(default_factory=dict)
    """Of pairs: how many came from corrections, ratings, retries, and from sampled answers."""
    prompts: int | None = None
    """Of pairs: how many different prompts they have."""
    malformed_example: str | None
    """The first malformed prompt or column: which run, and what is wrong with it."""
    columns: dict[str, str]
    """Names and kinds: ``messages``, ``texts``, ``json``, or a type of ``datasets``."""
    near_duplicates: bool
    """Whether they were looked for."""
    fingerprint: str
    """``praison_agent_rl.data.fingerprint`` of the rows."""
    options: BuildOptions
    libraries: dict[str, str]
    """Versions of what took part."""
    created: str
    """ISO time, UTC."""


_OF_SOURCE = {
    "correction": "from corrections",
    "rating": "from ratings of answers to the same prompt",
    "retry": "from answers that the agent took back",
    "sampled": "from sampled answers",
}
_TITLES = {"prompts": "# Prompts of an agent", "pairs": "# Pairs of a better and a worse answer of an agent"}
_LEFT_OUT = {
    "prompts": ("runs were left out, which", REASONS),
    "pairs": ("corrections, ratings, retries or groups of answers made no pair, since they", PAIR_REASONS),
}
_KINDS = {"str": "string", "bool": "bool", "int": "int64", "float": "float64"}


def kinds_of(met: dict[str, set[str]], kind: str = "prompts") -> dict[str, str]:
    """The columns of a dataset with their kinds, from the types that were met in those that not all rows have."""
    kinds = {"prompt": "messages"}
    if kind == "pairs":
        kinds |= {"chosen": "messages", "rejected": "messages", "source": "string"}
    for name, types in met.items():
        if name in ("tools", "tags"):
            kinds[name] = "messages" if name == "tools" else "texts"
        elif types == {"int", "float"}:
            kinds[name] = "float64"
        else:
            kinds[name] = _KINDS.get(next(iter(types)), "json") if len(types) == 1 else "json"
    return {**kinds, "run": "string", "agent": "string", "split": "string"}


def card_of(manifest: Manifest, rows: str) -> str:
    """A dataset card, by which ``datasets.load_dataset(folder)`` reads the file ``rows`` and changes nothing.

    Without it datasets guesses the kinds from the first 10 MB, and fails on a tool call that comes later.
    """
    named = {"messages": "list: json", "texts": "list: string"}
    features = [
        line
        for name, kind in manifest.columns.items()
        for line in (f"  - name: {json.dumps(name)}", f"    {named.get(kind) or f'dtype: {kind}'}")
    ]
    return "\n".join(
        [
            *("---", "configs:", "- config_name: default", "  data_files:", "  - split: train", f"    path: {rows}"),
            *("dataset_info:", "- config_name: default", "  features:", *features, "---", ""),
            *(_TITLES[manifest.kind], "", "The column `split` says `train` or `held_out`.", ""),
            *("```text", report_of(manifest), "```", ""),
        ]
    )


def report_of(manifest: Manifest) -> str:
    """What was built, in lines for people."""
    total, options = manifest.train + manifest.held_out, manifest.options
    whose = f" of agent {options.agent!r}" if options.agent else ""
    prompts = f" of {manifest.prompts:,} prompts" if manifest.prompts is not None else ""
    place = f" in {manifest.store}" if manifest.store else ""
    lines = [
        f"{total:,} {manifest.kind}{prompts} from {manifest.runs:,} runs ({manifest.calls:,} calls){whose}{place}",
        f"{manifest.train:>11,}  to train on",
        f"{manifest.held_out:>11,}  held out",
    ]
    if manifest.sources:
        lines += [f"{count:>11,}  {_OF_SOURCE.get(source, source)}" for source, count in manifest.sources.items()]
    if manifest.left_out:
        what_was, reasons = _LEFT_OUT[manifest.kind]
        lines.append(f"{sum(manifest.left_out.values()):,} {what_was}")
        counted = [(manifest.left_out.get(reason, 0), what) for reason, what in reasons.items()]
        lines += [f"{count:>11,}  {what}" for count, what in counted if count]
    return "\n".join(lines + [f"Note: {note}" for note in _notes(manifest)])


def _notes(manifest: Manifest) -> list[str]:
    total, options = manifest.train + manifest.held_out, manifest.options
    notes = []
    if manifest.dropped:
        notes.append(f"the recorder lost {manifest.dropped:,} lines (disk full, folder gone), so runs are missing here")
    if manifest.unreadable:
        notes.append(f"{manifest.unreadable:,} recorded lines are torn or go on from lines that are gone")
    if options.near_duplicates is not None and not manifest.near_duplicates:
        notes.append(
            "only equal prompts were left out, near-duplicates were not looked for: that needs datasketch, "
            'pip install "praison-agent-rl[dedupe]"'
        )
    if manifest.malformed_example:
        notes.append(f"the first of those that cannot be trained on is {manifest.malformed_example}")
    if options.held_out and total and not manifest.held_out:
        alone = (
            f"there is but one {manifest.kind[:-1]}"
            if total == 1
            else f"all {manifest.kind} belong to one conversation and must stay together"
        )
        notes.append(f"nothing is held out, since {alone}")
    elif total and manifest.largest_group > total / 2:
        notes.append(
            f"{manifest.largest_group:,} of the {total:,} {manifest.kind} belong together (one session, or each "
            "continues another) and stay on one side"
        )
    return notes
