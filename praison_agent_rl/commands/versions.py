"""The verbs ``praison-agent-rl versions ...``: which an agent has, what is known of them, and which one answers."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from praison_agent_rl.errors import ConfigError, VersionDamaged
from praison_agent_rl.records import Pointer, Version
from praison_agent_rl.runs import HOME

versions = typer.Typer(no_args_is_help=True, help="Look at an agent's versions, and say which of them answers.")
console = Console(soft_wrap=True, emoji=False)

AgentName = Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent, or of its folder of versions.")]
Name = Annotated[str, typer.Argument(metavar="VERSION", help="As v3.")]
Home = Annotated[Path, typer.Option("--home", help="Folder that holds versions/.")]
Force = Annotated[bool, typer.Option("--force", help="Against the gate's verdict; it is shown from then on.")]
_FORCED = "promoted by force"


@versions.command("list")
def list_(agent: Annotated[str | None, typer.Argument(metavar="[AGENT]")] = None, home: Home = HOME) -> None:
    """List the versions of an agent, or of all."""
    from praison_agent_rl import registry

    names = [registry.agent_named(home, agent)] if agent else registry.list_agents(home)
    if not names:
        _say(f"there are no versions in {home / 'versions'}")
        return
    table = _table("agent", "version", "made", "from", "base", "new", "95 % CI", "gate", "")
    for name in names:
        pointer = registry.current(home, name)
        known = {version.name: version for version in registry.list_versions(home, name)}
        for version_name in registry.version_names(home, name):
            if version_name not in known:
                damaged = Text("damaged; see: versions verify", "red")
                table.add_row(Text(name), version_name, *[""] * 6, damaged)
                continue
            table.add_row(Text(name), *_row(known[version_name], pointer))
    _print(table)


def _row(version: Version, pointer: Pointer | None) -> list[Text]:
    total = version.comparison.total
    # "promoted", the verdict, would read as if it answered
    verdict = "passed" if version.passed else version.verdict.status if version.verdict else "not better"
    numbers = [f"{total.base:.3g}", f"{total.new:.3g}", f"{total.low:+.3g}..{total.high:+.3g}"]
    words = [version.name, version.created[:16].replace("T", " "), version.parent or "the base", *numbers, verdict]
    return [*map(Text, words), _marks(version, pointer)]


def _marks(version: Version, pointer: Pointer | None) -> Text:
    marks = []
    if pointer and pointer.version == version.name:
        marks.append(Text("answers", "green"))
    elif pointer and version.name in pointer.previous:
        marks.append(Text("on the way back"))
    if _forced(version):
        marks.append(Text(_FORCED, "bold red"))
    if not (Path(version.folder) / "model").is_dir():
        marks.append(Text("weights pruned"))
    return Text(", ").join(marks)


def _forced(version: Version) -> bool:
    return bool(version.verdict and version.verdict.forced)


@versions.command()
def show(agent: AgentName, version: Name, home: Home = HOME) -> None:
    """Say what is known of a version."""
    from praison_agent_rl import registry

    name = registry.agent_named(home, agent)
    found = registry.read_version(home, name, version)
    table = _table("", "")
    table.show_header = False
    table.add_row("agent", Text(name))
    table.add_row("version", Text(f"{found.name} ") + _marks(found, registry.current(home, name)))
    table.add_row("made", found.created)
    table.add_row("trained on", Text(" ".join(filter(None, [found.parent and f"{found.parent}:", found.base]))))
    for label, value in (("base hash", found.base_hash), ("template hash", found.template_hash), ("run", found.run)):
        table.add_row(label, Text(value or "not known"))
    for label, text in _results(found):
        table.add_row(label, text)
    table.add_row("libraries", Text(", ".join(f"{key} {value}" for key, value in found.libraries.items())))
    table.add_row("folder", Text(found.folder))
    _print(table)
    before = None
    for change in registry.history(home, name):
        if version in (change.version, before):
            to = change.version or "the model that it was built with"
            forced = ", against the verdict" if change.forced else ""
            _say(f"{change.changed[:19]}Z  {change.by}: {to} answers{forced}", style="red" if change.forced else None)
        before = change.version


def _results(version: Version) -> list[tuple[str, Text]]:
    compared, verdict = version.comparison, version.verdict
    rows = [("verdict", Text(verdict.text if verdict else "of before there were verdicts"))]
    if _forced(version):
        rows.append(("", Text(f"{_FORCED}: the gate did not let it through", "bold red")))
    intervals = {"total": compared.total, **compared.rewards}
    intervals |= {f"{name} (not trained on)": interval for name, interval in compared.judged.items()}
    for name, i in intervals.items():
        rows.append((name, Text(f"{i.base:.4g} -> {i.new:.4g} (95 % CI {i.low:+.4g}..{i.high:+.4g})")))
    counts = f"{compared.prompts}; {compared.wins} won, {compared.ties} tied, {compared.losses} lost"
    rows.append(("prompts", Text(f"{counts}; {compared.errors_base} and {compared.errors_new} answers failed")))
    for guard in verdict.guards if verdict else ():
        rows.append((f"guard {guard.name}", Text(guard.text, "red" if guard.broken else "")))
    return rows + [
        (f"finding {found.name}", Text(found.text, "yellow")) for found in (verdict.findings if verdict else ())
    ]


@versions.command("diff")
def diff_(agent: AgentName, a: Name, b: Name, home: Home = HOME) -> None:
    """Show in what two versions differ: configuration, data, results, template, libraries, base."""
    from praison_agent_rl import registry
    from praison_agent_rl.upkeep import diff

    name = registry.agent_named(home, agent)
    found = diff(registry.read_version(home, name, a), registry.read_version(home, name, b))
    table = _table("", a, b)
    for what, (left, right) in found.items():
        table.add_row(Text(what), *(Text("none" if value is None else str(value)) for value in (left, right)))
    if found:
        _print(table)
    else:
        _say(f"{a} and {b} do not differ")


@versions.command("promote")
def promote_(
    agent: Annotated[str, typer.Argument(metavar="AGENT|RUN", help="Name of the agent, or the folder of a run.")],
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]", help="As v3; left out for a run.")] = None,
    of: Annotated[str | None, typer.Option("--agent", help="Whose version a run of `train` becomes.")] = None,
    force: Force = False,
    home: Home = HOME,
) -> None:
    """Let a version answer, or make one of a run that has become none; running services follow where they watch."""
    from praison_agent_rl import registry, upkeep
    from praison_agent_rl.runs import RunFolder

    if version is None:
        if not Path(agent).is_dir():
            raise ConfigError(f"name the version, as: versions promote {shlex.quote(agent)} v1; or the folder of a run")
        run = RunFolder.open(Path(agent))
        _say_pointer(of or run.plan.agent or "", upkeep.promote_run(home, run, agent=of, force=force))
        return
    if of is not None:
        raise ConfigError("--agent says whose version a run becomes; a version has its agent already")
    name = registry.agent_named(home, agent)
    _say_pointer(name, registry.promote(home, name, version, force=force))


@versions.command("rollback")
def rollback_(
    agent: AgentName,
    force: Annotated[bool, typer.Option("--force", help="Also to a version whose files are damaged.")] = False,
    home: Home = HOME,
) -> None:
    """Let what answered before answer again."""
    from praison_agent_rl import registry

    name = registry.agent_named(home, agent)
    _say_pointer(name, registry.rollback(home, name, force=force))


@versions.command("verify")
def verify_(
    agent: AgentName, version: Annotated[str | None, typer.Argument(metavar="[VERSION]")] = None, home: Home = HOME
) -> None:
    """Look whether the files of a version, or of all of an agent's, are what they were; exit code 1 if not."""
    from praison_agent_rl import registry

    name = registry.agent_named(home, agent)
    faulty = []
    for version_name in [version] if version else registry.version_names(home, name):
        try:
            faults = registry.verify(registry.read_version(home, name, version_name))
        except ConfigError as error:  # its record is damaged
            faults = [str(error)]
        for fault in faults:
            _say(f"{version_name}: {fault}", style="red")
        if faults:
            faulty.append(version_name)
        else:
            _say(f"{version_name}: in order")
    if faulty:
        raise VersionDamaged(
            f"{', '.join(faulty)} of agent {name!r} is not what was published; promote another version"
        )


@versions.command("prune")
def prune_(
    agent: AgentName,
    keep: Annotated[int, typer.Option(min=0, help="How many of the newest, and steps back, keep their weights.")] = 2,
    home: Home = HOME,
) -> None:
    """Remove merged weights that can be made again; adapters and records stay."""
    from praison_agent_rl import registry
    from praison_agent_rl.upkeep import prune

    done = prune(home, registry.agent_named(home, agent), keep)
    for name, reason in done.kept.items():
        _say(f"{name} keeps its weights: {reason}")
    for name in done.removed:
        _say(f"{name}: weights removed; versions restore makes them again")
    _say(f"{done.freed / 1e6:,.1f} MB freed")


@versions.command("restore")
def restore_(agent: AgentName, version: Name, home: Home = HOME) -> None:
    """Make a version's merged weights again from its base and its adapter."""
    from praison_agent_rl import registry
    from praison_agent_rl.upkeep import restore

    found = restore(home, registry.agent_named(home, agent), version)
    _say(f"{found.name}: its weights are there and in order: {found.folder}/model")


@versions.command()
def compare(
    agent: AgentName,
    a: Name,
    b: Name,
    from_transcripts: Annotated[bool, typer.Option("--from-transcripts", help="By what was recorded.")] = False,
    store: Annotated[Path | None, typer.Option(help="Folder of the transcripts.")] = None,
    reward: Annotated[list[str] | None, typer.Option("--reward", help="module:function; repeatable.")] = None,
    home: Home = HOME,
) -> None:
    """Compare two versions by the recorded runs that each of them answered, as in a canary."""
    from praison_agent_rl import registry
    from praison_agent_rl.canary import compare_recorded
    from praison_agent_rl.transcripts import DEFAULT_STORE

    if not from_transcripts:
        raise ConfigError(
            "say by what: --from-transcripts for what was recorded; to ask both again: praison-agent-rl evaluate"
        )
    name = registry.agent_named(home, agent)
    _say(str(compare_recorded(store or DEFAULT_STORE, name, a, b, reward_funcs=reward, home=home)))


def _say_pointer(agent: str, pointer: Pointer) -> None:
    _say(f"{agent}: {pointer.version or 'the model that it was built with'} answers from now on")
    if pointer.forced:
        _say(f"{_FORCED}: the gate did not let {pointer.version} through", style="bold red")


def _table(*columns: str) -> Table:
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")  # what is cut off can be neither read nor copied
    return table


def _print(table: Table) -> None:
    wide = Console(width=200, emoji=False)  # whoever reads a pipe wants whole lines
    (console if console.is_terminal else wide).print(table)


def _say(text: str, *, style: Any = None) -> None:
    console.print(text, markup=False, highlight=False, style=style)
