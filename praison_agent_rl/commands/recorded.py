"""The verbs of ``praison-agent-rl`` on recorded runs: ``transcripts ...`` and ``dataset build``."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from praison_agent_rl.errors import ConfigError, DataError
from praison_agent_rl.records import Call, Run

if TYPE_CHECKING:
    from praison_agent_rl.transcripts import Losses

transcripts = typer.Typer(no_args_is_help=True, help="Look at what was recorded, hand it on, or bring logs in.")
dataset = typer.Typer(no_args_is_help=True, help="Make datasets of prompts or pairs from recorded runs.")
console = Console(soft_wrap=True, emoji=False)

Store = Annotated[Path | None, typer.Option(help="Folder of the transcripts; .praisonai/rl/transcripts by default.")]
AgentName = Annotated[str | None, typer.Option("--agent", help="Name of an agent, or a pattern such as 'support-*'.")]
_WIDTH = 60


_SHOWN = 12
"""Characters of a run's id that a table shows; `show` takes the beginning of an id."""


@transcripts.command("list")
def list_runs(
    store: Store = None,
    agent: AgentName = None,
    since: Annotated[str | None, typer.Option(help="ISO time: only runs that began then or later.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only runs with this tag; repeatable.")] = None,
    text: Annotated[str | None, typer.Option(help="Only runs whose prompt, answer or messages hold this.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Only runs that failed.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many to show, the last ones.")] = 50,
) -> None:
    """List recorded runs, the newest last."""
    wanted = {"agent": agent, "since": since, "tags": tag or (), "text": text, "has_error": errors or None}
    found, losses = _runs(store, **wanted)
    table = Table("id", "when", "agent", "asked", "answered", "calls", "", box=None)
    for run in _last(found, limit):
        mark = "error" if run.error else "" if run.finished else "unfinished"
        cells = [run.id[:_SHOWN], _when(run.time), run.agent or "", _line(run.prompt), _line(run.output)]
        table.add_row(*map(Text, cells), str(len(run.calls)), Text(mark))
    console.print(table)
    _say_lost(losses)


@transcripts.command()
def show(
    run_id: Annotated[str, typer.Argument(metavar="ID", help="Id of a run, or how it begins.")], store: Store = None
) -> None:
    """Print one run, call by call, readably."""
    runs, losses = _runs(store)
    found = [run for run in runs if run.id.startswith(run_id)]
    _say_lost(losses)
    if len(found) != 1:
        what = "no run" if not found else f"{len(found)} runs"
        raise DataError(f"{what} whose id begins with {run_id!r}; see: praison-agent-rl transcripts list")
    run = found[0]
    facts = [run.style, f"{run.seconds:.1f} s", *([f"model version {run.version}"] if run.version else []), *run.tags]
    _say(f"{run.agent or 'unnamed agent'}  {_when(run.time)}  {', '.join(facts)}", style="bold")
    for number, call in enumerate(run.calls, 1):
        _show_call(number, call, earlier=run.calls[number - 2] if number > 1 else None)
    if run.error:
        _say(f"error: {run.error}", style="red")
    for said in run.feedback:
        parts = {"score": said.score, "label": said.label, "correction": said.correction}
        _say("feedback: " + ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None))


@transcripts.command()
def stats(store: Store = None, agent: AgentName = None) -> None:
    """Count runs, calls, errors and ratings by agent."""
    counts: dict[str, Counter[str]] = {}
    runs, losses = _runs(store, agent=agent)
    for run in runs:
        counted = counts.setdefault(run.agent or "", Counter())
        counted["runs"] += 1
        counted["calls"] += len(run.calls)
        counted["errors"] += bool(run.error)
        counted["rated"] += bool(run.feedback)
        counted["tokens"] += sum(int((call.usage or {}).get("total_tokens") or 0) for call in run.calls)
    table = Table("agent", "runs", "calls", "errors", "rated", "tokens", box=None)
    for name, counted in sorted(counts.items()):
        numbers = (f"{counted[key]:,}" for key in ("runs", "calls", "errors", "rated", "tokens"))
        table.add_row(Text(name or "(unnamed)"), *numbers)
    console.print(table)
    _say_lost(losses)


@transcripts.command()
def export(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    store: Store = None,
    agent: AgentName = None,
    form: Annotated[str, typer.Option("--format", help="jsonl (whole runs) or openai (fine-tuning lines).")] = "jsonl",
) -> None:
    """Write recorded runs to a file."""
    from praison_agent_rl.transcripts import export_runs

    if form not in ("jsonl", "openai"):
        raise ConfigError(f"--format {form!r} is none; give jsonl or openai")
    runs, losses = _runs(store, agent=agent)
    count = export_runs(runs, out, "openai" if form == "openai" else "jsonl")
    _say(f"{count:,} runs written to {out}")
    _say_lost(losses)


@transcripts.command("import")
def import_logs(
    path: Annotated[
        Path, typer.Argument(help="OpenAI chat JSONL, ShareGPT, a session file, spans, Langfuse's export.")
    ],
    store: Store = None,
    kind: Annotated[str | None, typer.Option(help="Format, where it should not be found out.")] = None,
) -> None:
    """Bring in logs from elsewhere as runs with the tag `imported`."""
    from praison_agent_rl.foreign_logs import import_log

    _say(str(import_log(path, store or _default_store(), kind=kind)))


@dataset.command()
def build(
    kind: Annotated[str, typer.Option(help="prompts, or pairs of a better and a worse answer.")] = "prompts",
    store: Store = None,
    agent: AgentName = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the dataset.")] = None,
    turns: Annotated[str, typer.Option(help="all turns of a conversation, or only the first.")] = "all",
    column: Annotated[
        list[str] | None, typer.Option(help="answer, rating, tags or module:function; repeatable.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option("--filter", help="module:function that says whether a run is used.")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the rows that are held out.")] = 0.2,
    form: Annotated[str, typer.Option("--format", help="jsonl or parquet.")] = "jsonl",
    source: Annotated[
        list[str] | None, typer.Option(help="Pairs: correction, rating, retry or none; repeatable; all by default.")
    ] = None,
    min_margin: Annotated[float, typer.Option(help="Pairs: least difference of two scores.")] = 0.0,
    sample: Annotated[
        int | None, typer.Option(help="Pairs: sample so many answers to each prompt, best against worst.")
    ] = None,
    reward: Annotated[
        list[str] | None, typer.Option("--reward", help="What scores sampled answers: module:function; repeatable.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="What samples them, the weights beneath the agent: hub name, folder, GGUF.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts, at most, that answers are sampled to.")] = 200,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of sampling; repeatable.")
    ] = None,
) -> None:
    """Make a dataset of prompts or pairs; what was held out once stays so when it is built again."""
    chosen: dict[str, Any] = {"kind": kind, "agent": agent, "turns": turns, "filter": keep, "held_out": held_out}
    chosen |= {"format": form, "min_margin": min_margin, **({"columns": tuple(column)} if column else {})}
    if source:
        chosen["sources"] = tuple(name for name in source if name != "none")
    sampling = {"samples": sample, "reward_funcs": reward, "model": base_model, "prompts": prompts}
    _say(str(_built(chosen, sampling, set_ or [], store=store, out=out)))


def _built(
    chosen: dict[str, Any], sampling: dict[str, Any], sets: list[str], *, store: Path | None, out: Path | None
) -> Any:
    from praison_agent_rl.dataset_building import BuildOptions, build_dataset

    options = _checked(BuildOptions, chosen)
    lacking = [name for name, key in _OF_SAMPLING.items() if not sampling[key]]
    if len(lacking) == len(_OF_SAMPLING) and not sets:
        return build_dataset(store, out=out, options=options)
    if options.kind != "pairs" or lacking:
        what = f"{', '.join(lacking)} too" if lacking else "--kind pairs"
        raise ConfigError(f"answers are sampled for pairs, with {', '.join(_OF_SAMPLING)}; give {what}")
    from praison_agent_rl.config_keys import Findings, parse_overrides
    from praison_agent_rl.pairs.sampling import Sampling, sample_pairs

    found = Findings()
    config = parse_overrides(sets, found)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    with Console(stderr=True).status(f"sampling {sampling['samples']} answers to each prompt"):
        return sample_pairs(_checked(Sampling, {**sampling, "config": config}), store, out=out, options=options)


_OF_SAMPLING = {"--sample": "samples", "--reward": "reward_funcs", "--base-model": "model"}


def _checked(kind: Any, given: dict[str, Any]) -> Any:
    """A record of ``kind``; raises ConfigError with what is wrong, in words."""
    from pydantic import ValidationError

    from praison_agent_rl.config_keys import plain_errors

    try:
        return kind(**given)
    except ValidationError as error:
        raise ConfigError("\n".join(plain_errors(error).values())) from error


def _runs(store: Path | None, **wanted: Any) -> "tuple[Iterator[Run], Losses]":
    """The runs, and what of the store cannot be read, once they are."""
    from praison_agent_rl.transcripts import Losses, read_runs

    losses = Losses()
    return read_runs(store or _default_store(), losses=losses, **wanted), losses


def _say_lost(losses: "Losses") -> None:
    """Say what of a store could not be read, apart from what is asked for."""
    notes = Console(soft_wrap=True, stderr=True, highlight=False, markup=False)
    if losses.torn:
        notes.print(f"note: {losses.torn:,} lines of the store cannot be read (torn, or not written by a recorder)")
    if losses.unresolved:
        notes.print(f"note: {losses.unresolved:,} calls go on from calls that are gone, and are left out")
    if losses.dropped:
        reasons = ", ".join(f"{count:,} for {reason!r}" for reason, count in losses.reasons.most_common(3))
        notes.print(f"note: the recorder lost {losses.dropped:,} lines ({reasons})")


def _default_store() -> Path:
    from praison_agent_rl.transcripts import DEFAULT_STORE

    return DEFAULT_STORE


def _last(runs: Iterator[Run], count: int) -> list[Run]:
    """The newest ``count`` runs without holding all of them."""
    kept: list[Run] = []
    while batch := list(islice(runs, 1000)):
        kept = sorted([*kept, *batch], key=lambda run: run.time)[-count:]
    return kept


def _show_call(number: int, call: Call, *, earlier: Call | None) -> None:
    """What this call sent beyond what the one before it did, and the reply."""
    known = earlier.messages if earlier and call.messages[: len(earlier.messages)] == earlier.messages else []
    tokens = (call.usage or {}).get("total_tokens")
    _say(f"\ncall {number}: {call.model}, {call.seconds:.2f} s{f', {tokens} tokens' if tokens else ''}", style="dim")
    if known:
        _say(f"  ({len(known)} messages as before)", style="dim")
    for message in [*call.messages[len(known) :], *([call.reply] if call.reply else [])]:
        _say(f"  {message.get('role', '?')}: {_content(message)}")
    if call.partial:
        _say("  (the stream was not read to its end)", style="dim")
    if call.error:
        _say(f"  error: {call.error}", style="red")


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    calls = [call.get("function") or {} for call in message.get("tool_calls") or []]
    return " ".join([text, *(f"-> {call.get('name')}({call.get('arguments')})" for call in calls)]).strip()


def _say(text: str, *, style: str | None = None) -> None:
    console.print(text, markup=False, highlight=False, style=style)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _line(value: Any) -> str:
    text = " ".join(("" if value is None else str(value)).split())
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
