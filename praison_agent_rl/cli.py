"""The command ``praison-agent-rl``: each verb calls one function of the package and says what came of it."""

import contextlib
import errno
import importlib
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from praison_agent_rl import cli_recorded
from praison_agent_rl.errors import AgentError, ConfigError, PraisonRLError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Make a praisonaiagents agent better at its own job: train the model beneath it, prove it, swap it in.",
)
console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the configuration; repeatable.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """Entry point: errors become one message and an exit code, 2 for wrong input and 1 for a run that failed."""
    _stop_on_closed_pipe(app)


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file; praison-agent-rl and praison-train keys.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, load no weights, and end.")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with the interrupted run in this folder.")
    ] = None,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train a model from a configuration file and compare it with its base on held-out prompts."""
    _guard(debug, lambda: _train(config, dry_run=dry_run, resume=resume, overrides=set_ or []))


@app.command()
def improve(
    agent: Annotated[
        str, typer.Argument(metavar="MODULE:AGENT", help="Where the agent is, as myproject.agents:helper.")
    ],
    data: Annotated[str | None, typer.Option(help="File or dataset of prompts; else what was recorded.")] = None,
    reward: Annotated[list[str] | None, typer.Option("--reward", help="module:function; repeatable.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Weights beneath the agent: hub name, folder, GGUF.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with further keys.")] = None,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Improve an agent and keep the new version; its own process swaps it in."""
    _guard(debug, lambda: _improve(agent, data, reward, base_model, config, set_ or []))


@app.command()
def demo(debug: Debug = False) -> None:
    """Watch an agent on the embedded model get better; about ten minutes on two cores, offline."""
    _guard(debug, _demo)


@app.command()
def doctor(debug: Debug = False) -> None:
    """Say what can run here and what each part that cannot lacks."""
    _guard(debug, _doctor)


def _train(config: Path | None, *, dry_run: bool, resume: Path | None, overrides: list[str]) -> None:
    from praison_agent_rl import planning
    from praison_agent_rl.improvement import carry_out, finish, resume_run

    if resume is not None:
        if config is not None or overrides or dry_run:
            raise ConfigError("--resume goes on with a run as it was planned; give it no other argument")
        with _naming(resume):
            _say_outcome(resume_run(resume))
        return
    if config is None:
        raise ConfigError("name a configuration file: praison-agent-rl train config.yaml (or --resume RUN)")
    draft = planning.draft_from_config(config, overrides)
    for note in draft.notes:
        _say(f"  {note}")
    if dry_run:
        _say_estimate(draft)
        return
    from praison_agent_rl.progress import RunProgress

    root = Path(draft.config.output_dir or planning.new_run_root(config.stem))
    with _naming(root):
        run = planning.write_run(draft, root)
        _say(f"run folder: {run.root}")
        with RunProgress() as progress:
            carry_out(draft, run, progress)
        _say_outcome(finish(run) if draft.held_out else run)


def _say_outcome(result: Any) -> None:
    from praison_agent_rl.improvement import Improvement
    from praison_agent_rl.report import verdict, write_report
    from praison_agent_rl.runs import RunFolder

    if isinstance(result, Improvement):
        _say(verdict(result.comparison))
        root = result.run
    else:
        write_report(result)
        _say(verdict(None))
        root = result.root
    run = RunFolder(root)
    _say(f"adapter: {run.adapter}\nreport: {run.report}")
    model = run.merged if run.merged.exists() else _version_of(run)
    if model is None:
        _say("the merged model is not in the run's folder any more: it has become a version of the agent, or was moved")
    else:
        _say(f"merged model: {model}\nserve it with: transformers serve {shlex.quote(str(model))}")


def _version_of(run: Any) -> Path | None:
    """The model folder of the version that a run's merged model has become; it keeps a copy of the run's plan."""
    from praison_agent_rl.planning import HOME

    plan = run.plan_file.read_bytes()
    homes = {HOME.resolve(), run.root.resolve().parent.parent}
    plans = [path for home in homes for path in home.glob("versions/*/v*/plan.json")]
    return next((path.parent / "model" for path in plans if path.read_bytes() == plan), None)


def _say_estimate(draft: Any) -> None:
    from praison_agent_rl.estimate import free_disk, in_words, total_memory
    from praison_agent_rl.planning import best_device, check_room, expected_cost

    root = Path(draft.config.output_dir or Path.cwd())
    check_room(draft, root)
    device, cost = best_device(), expected_cost(draft)
    table = _facts_table()
    table.add_row("model", escape(draft.base))
    table.add_row("rewards", escape(", ".join(reward.name for reward in draft.rewards)))
    table.add_row("prompts", f"{len(draft.train)} to train on, {len(draft.held_out)} held out")
    table.add_row("steps", escape(f"{cost.steps} on {device}"))
    if cost.memory_bytes and cost.disk_bytes and cost.seconds:
        memory = total_memory()
        has = f" (this machine has {in_words(memory)})" if memory and device == "cpu" else ""
        table.add_row("memory", f"about {in_words(cost.memory_bytes)}{has}")
        table.add_row("disk", f"about {in_words(cost.disk_bytes)} ({in_words(free_disk(root))} free)")
        table.add_row("time", f"about {max(1, round(cost.seconds / 60))} minutes")
    else:
        table.add_row("memory, disk, time", "not estimated: the weights are not on this machine yet")
    console.print(table)
    console.print("dry run: all that can be checked without loading the model is sound; nothing was loaded or written")


def _improve(
    agent: str, data: str | None, reward: list[str] | None, base_model: str | None, config: Path | None, sets: list[str]
) -> None:
    from praison_agent_rl.config_keys import Findings, parse_overrides, read_source, rename
    from praison_agent_rl.improvement import improve as improve_agent
    from praison_agent_rl.planning import new_run_root

    found = Findings()
    settings = parse_overrides(sets, found)
    found.problems += [_no_key(key) for key in settings if key in _ARGUMENTS]
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    if reward:
        settings["reward_funcs"] = reward
    live = find_agent(agent)
    given = rename({**read_source(config), **settings}, Findings()).get("output_dir")
    root = Path(str(given)) if given else new_run_root(live.name)
    with _naming(root):
        # The command's own process ends now, so nothing is swapped in here: the version is what stays.
        options = {**settings, "output_dir": given or str(root)}
        result = improve_agent(live, data=data, base_model=base_model, config=config, swap=False, **options)
    _say(str(result))
    _say(f"report: {result.report}")
    if result.model:
        _say(f"model: {result.model}\nserve it with: transformers serve {shlex.quote(str(result.model))}")


_ARGUMENTS = {
    "agent": "MODULE:AGENT", "data": "--data", "base_model": "--base-model", "config": "--config", "swap": "",
    "quiet": "", "source": "--config", "overrides": "--set", "need_model": "", "need_data": "", "cls": "", "self": "",
}  # fmt: skip
"""Arguments of ``improve`` and ``TrainConfig.load`` that are no keys of a configuration; the option for each."""


def _no_key(name: str) -> str:
    option = _ARGUMENTS[name]
    return f"{name!r} is no key that --set can set; " + (f"give it as {option}" if option else "leave it out")


def find_agent(spec: str) -> Any:
    """The agent that ``module:name`` names, from the current folder too.

    Raises:
        AgentError: there is none, and why.
    """
    from praisonaiagents import Agent

    from praison_agent_rl.rewards import importing_from

    module, _, name = spec.partition(":")
    if not module or not name:
        raise AgentError(f"{spec!r} is not a 'module:agent' path. Example: myproject.agents:helper")
    with importing_from(None):
        try:
            loaded = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise AgentError(f"cannot import {module!r} for {spec!r}: {type(error).__name__}: {error}") from error
    found = getattr(loaded, name, None)
    if not isinstance(found, Agent):
        agents = sorted(key for key, value in vars(loaded).items() if isinstance(value, Agent))
        what = f"is a {type(found).__name__}, not an Agent" if found is not None else "is not there"
        raise AgentError(f"{spec!r} {what}. Agents in {module!r}: {', '.join(agents) or 'none'}")
    return found


def _demo() -> None:
    from praison_agent_rl.demo import run_demo
    from praison_agent_rl.planning import new_run_root

    root = new_run_root("demo")
    with _naming(root):
        run_demo(console, settings={"output_dir": str(root)})


def _doctor() -> None:
    from praison_agent_rl.doctor import examine

    facts, parts = examine()
    table = _facts_table()
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
    state = Table("part", "", box=None)
    state.add_column("what it lacks", overflow="fold")
    for part in parts:
        state.add_row(part.name, "[green]ready[/green]" if part.ready else "[yellow]no[/yellow]", escape(part.lacks))
    console.print(state)


def _facts_table() -> Table:
    table = Table("", show_header=False, box=None)
    table.add_column(overflow="fold")  # paths are to be copied whole
    return table


def _say(text: str) -> None:
    """Print ``text`` as it is: a folder may be called ``runs[1]``."""
    console.print(text, markup=False, highlight=False)


class _Interrupted(Exception):
    """Ctrl-C, with what there is to say of the run that it ended."""


@contextlib.contextmanager
def _naming(root: Path) -> Iterator[None]:
    """Say where a run is that Ctrl-C ended, if it was begun."""
    try:
        yield
    except KeyboardInterrupt:
        if not (root / "plan.json").exists():
            raise
        words = (
            f"what was written stays in {root} (go on with: praison-agent-rl train --resume {shlex.quote(str(root))})"
        )
        raise _Interrupted(words) from None


def _guard(debug: bool, work: Callable[[], Any]) -> None:
    """Run ``work``; an error of the package becomes one message and an exit code."""
    try:
        work()
    except PraisonRLError as error:
        if debug:
            traceback.print_exc()
        errors.print(f"error: {error}", markup=False, highlight=False, style="red")
        raise typer.Exit(1 if isinstance(error, RuntimeError) else 2) from error
    except _Interrupted as error:
        errors.print(f"interrupted; {error}", markup=False, highlight=False)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        errors.print("interrupted; nothing was written")
        raise typer.Exit(130) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            errors.print(f"error: the disk is full ({error}); make room there", markup=False, highlight=False)
            raise typer.Exit(1) from error
        if debug:
            raise
        errors.print(
            f"error: {type(error).__name__}: {error} (this is a fault of praison-agent-rl; --debug shows where)",
            markup=False,
            highlight=False,
            style="red",
        )
        raise typer.Exit(1) from error


class _Guarded(TyperGroup):
    """A group of verbs whose errors are told as those of the others."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that was named."""
        _guard(False, lambda: super(_Guarded, self).invoke(ctx))


app.add_typer(cli_recorded.transcripts, name="transcripts", cls=_Guarded)
app.add_typer(cli_recorded.dataset, name="dataset", cls=_Guarded)


def _stop_on_closed_pipe(run: Callable[[], Any]) -> None:
    try:
        run()
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
