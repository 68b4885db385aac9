"""From recorded runs to a dataset of prompts or pairs: rows, a split that stays, a manifest; recordings are only read.

A dataset is a folder: ``rows.jsonl`` (or ``rows.parquet``), whose column ``split`` says ``train`` or ``held_out``;
``split.jsonl``, the side of every prompt that was ever given one; ``manifest.json``; and ``README.md``, with the report
and what ``datasets.load_dataset(folder)`` must know.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from praison_agent_rl.dataset_building.brief_runs import BriefRun, brief, recorded
from praison_agent_rl.dataset_building.choosing import BuildOptions, selected
from praison_agent_rl.dataset_building.conversations import Conversations
from praison_agent_rl.dataset_building.files import DatasetFolder, Draft, drafting
from praison_agent_rl.dataset_building.near_duplicates import NearDuplicates, Signature
from praison_agent_rl.dataset_building.pairs import PairSieve, Sampler
from praison_agent_rl.dataset_building.report import Manifest, Source, card_of, kinds_of, report_of
from praison_agent_rl.dataset_building.rows import Sieve, remembered_label
from praison_agent_rl.dataset_building.spool import spooling
from praison_agent_rl.errors import DataError, MissingExtra
from praison_agent_rl.records import Run
from praison_agent_rl.runs import now, write_record, write_text
from praison_agent_rl.transcripts import DEFAULT_STORE, Losses, iter_run_dicts
from praison_agent_rl.transcripts.files import store_files

__all__ = ["BuildOptions", "BuiltDataset", "Manifest", "build_dataset"]

DATASETS = Path(".praisonai/rl/datasets")
_LONGEST_NAME = 240  # bytes, of the 255 that file systems allow; 15 for what is added


@dataclass(frozen=True)
class BuiltDataset:
    """A dataset that was built; ``load_rows(built.rows)`` reads it, ``print(built)`` tells what is in it."""

    rows: Path
    manifest: Manifest

    def __str__(self) -> str:
        return f"{report_of(self.manifest)}\n{self.rows}"


def build_dataset(
    store: str | Path | None = None,
    *,
    kind: Literal["prompts", "pairs"] | None = None,
    out: str | Path | None = None,
    options: BuildOptions | None = None,
    runs: Iterable[Run] | None = None,
) -> BuiltDataset:
    """Make a dataset of prompts, or of pairs, from the runs in ``store``, or from ``runs``.

    ``kind`` may also be said by the options. A pair is a prompt with a better answer (``chosen``) and a worse one
    (``rejected``): from corrections, from ratings of answers to the same prompt, and from answers that the agent's own
    guardrail or reflection took back. ``pairs.sampling.sample_pairs`` samples answers besides.

    ``out`` is the folder to write, by default ``.praisonai/rl/datasets/<agent>`` (``<agent>-pairs``), with something
    added to the name where that folder is another agent's (``a b`` and ``a/b`` are both ``a_b``). Where it holds a
    dataset already, every prompt keeps its side, and what belongs to it follows. That dataset stays whole until the
    new one is. A prompt of pairs is also on the side that the agent's own dataset of prompts gave it.

    Raises:
        DataError: nothing is recorded, no row remains, a function that an option names is missing or fails, another
            build is writing to ``out``, it holds a dataset of the other kind, or nobody can.
    """
    options = options or BuildOptions()
    if kind is not None and kind != options.kind:
        options = BuildOptions.model_validate({**options.model_dump(), "kind": kind})
    return build_from(source_of(store, runs), options, out=out)


def build_from(
    source: "RunSource", options: BuildOptions, *, out: str | Path | None = None, sampler: Sampler | None = None
) -> BuiltDataset:
    """As `build_dataset`, with pairs from what ``sampler`` answers besides."""
    with _drafted(source, options, out, sampler) as (draft, manifest):
        if not manifest.train:
            raise DataError(f"no {options.kind[:-1]} is left to train on:\n{report_of(manifest)}")
        return _published(draft, manifest)


def survey(source: "RunSource", options: BuildOptions) -> Manifest:
    """What a build would say; nothing is kept."""
    with TemporaryDirectory() as folder, _drafted(source, options, folder, None) as (_, manifest):
        return manifest


@contextmanager
def _drafted(
    source: "RunSource", options: BuildOptions, out: str | Path | None, sampler: Sampler | None
) -> Iterator[tuple[Draft, Manifest]]:
    """The rows with their sides, and what is to be said of them; nothing of it has its name yet."""
    folder = DatasetFolder(Path(out) if out is not None else _own_folder(options.agent, options.kind))
    _check_kind(folder, options.kind)
    with drafting(folder) as draft, spooling(draft.spool) as spool:
        conversations, near = Conversations(), _near_duplicates(options)
        own = _remember(folder, conversations, near=near)
        sieve: Sieve | PairSieve
        if options.kind == "pairs":
            if source.store is not None or out is None:
                _remember(DatasetFolder(_own_folder(options.agent, "prompts")), conversations, near=near)
            sieve = PairSieve(options, conversations, near=near, spool=spool, remembered=own)
            draft.gather(sieve.rows(selected(source.runs, options), sampler))
        else:
            sieve = Sieve(options, conversations, near=near)
            draft.gather(sieve.rows(selected(source.runs, options)))
        sides = draft.divide(conversations.sides(options.held_out, seed=options.seed), sieve.lent)
        sieve.left_out["between sides"] += sides[None]
        yield draft, _manifest(source, sieve, draft=draft, sides=sides, largest=conversations.largest())


@dataclass(frozen=True)
class RunSource:
    """Runs, and what is known of where they lie."""

    runs: Iterable[BriefRun]
    store: Path | None = None
    files: tuple[Source, ...] = ()
    losses: Losses = field(default_factory=Losses)
    """Filled while the runs are read."""


def source_of(store: str | Path | None = None, runs: Iterable[Run] | None = None) -> RunSource:
    """``runs``, or the runs in a store.

    Raises:
        DataError: nothing is there.
    """
    if runs is not None:
        return RunSource(map(brief, runs))
    folder, losses = Path(store) if store is not None else DEFAULT_STORE, Losses()
    files = tuple(Source(name=path.name, bytes=path.stat().st_size) for path in store_files(folder))
    if not files:
        raise DataError(
            f"nothing is recorded in {str(folder)!r}; record an agent with agent.record(), or name its store"
        )
    return RunSource(map(recorded, iter_run_dicts(folder, losses=losses)), folder, files, losses)


def _near_duplicates(options: BuildOptions) -> NearDuplicates | None:
    if options.near_duplicates is None:
        return None
    try:
        return NearDuplicates(options.near_duplicates)
    except MissingExtra:
        return None  # the report says so


def _remember(folder: DatasetFolder, conversations: Conversations, *, near: NearDuplicates | None) -> int:
    """Take up the sides that earlier builds gave, where none is known yet; returns how many."""
    count = 0
    for given in folder.given_sides():
        if conversations.given(given.key) is not None:
            continue
        number = conversations.remember(given.key, given.side, links=given.links)
        count += 1
        if near is not None and given.near is not None:
            near.add(Signature.parse(given.near), remembered_label(number))
    return count


def _manifest(
    source: RunSource, sieve: Sieve | PairSieve, *, draft: Draft, sides: dict[str | None, int], largest: int
) -> Manifest:
    used = ("praison-agent-rl", *(["datasketch"] if sieve.seeks_near_duplicates else []))
    return Manifest(
        kind=sieve.options.kind,
        sources=dict(sieve.sources) if isinstance(sieve, PairSieve) else {},
        prompts=sieve.prompts if isinstance(sieve, PairSieve) else None,
        store=str(source.store) if source.store else None,
        files=list(source.files),
        dropped=source.losses.dropped,
        unreadable=source.losses.torn + source.losses.unresolved,
        runs=sieve.runs,
        calls=sieve.calls,
        train=sides["train"],
        held_out=sides["held_out"],
        largest_group=largest,
        left_out={reason: count for reason, count in sieve.left_out.items() if count},
        malformed_example=sieve.example,
        columns=kinds_of(sieve.kinds, sieve.options.kind),
        near_duplicates=sieve.seeks_near_duplicates,
        fingerprint=draft.fingerprint,
        options=sieve.options,
        libraries={name: metadata.version(name) for name in used},
        created=now(),
    )


def _published(draft: Draft, manifest: Manifest) -> BuiltDataset:
    built = BuiltDataset(draft.publish(manifest.options.format), manifest)
    write_record(draft.folder.manifest_file, manifest)
    write_text(draft.folder.card_file, card_of(manifest, built.rows.name))
    return built


def _own_folder(agent: str | None, kind: str) -> Path:
    """The folder of an agent, or a pattern: the one that it has already, or one that nobody else has."""
    name = re.sub(r"[^\w.-]+", "_", agent or "").strip("._").encode()[:_LONGEST_NAME].decode(errors="ignore") or "all"
    name += "-pairs" if kind == "pairs" else ""
    plain = DATASETS / name
    apart = DATASETS / f"{name}-{hashlib.sha256((agent or '').encode('utf-8', 'replace')).hexdigest()[:8]}"
    mine = {"agent": agent, "kind": kind}
    if _owner(apart) == mine:
        return apart
    return plain if _owner(plain) in (None, mine) else apart


def _owner(folder: Path) -> dict[str, str | None] | None:
    """Whose dataset is in a folder; None where there is none, or one whose manifest cannot be read."""
    try:
        options = json.loads(DatasetFolder(folder).manifest_file.read_text(encoding="utf-8"))["options"]
        return {"agent": options["agent"], "kind": options.get("kind", "prompts")}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _check_kind(folder: DatasetFolder, kind: str) -> None:
    """Raise DataError where a dataset of the other kind would be written over."""
    owner = _owner(folder.root)
    if owner is not None and owner["kind"] != kind:
        raise DataError(f"{str(folder.root)!r} holds a dataset of {owner['kind']}, not of {kind}; give another out")
