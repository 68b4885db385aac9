"""The verb ``praison-agent-rl rewards check``: tries rewards before anything is trained, and says what came of it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from praison_agent_rl.reward_trials.trials import RewardTrial
    from praison_agent_rl.reward_trials.trying import Trials

rewards = typer.Typer(no_args_is_help=True, help="Try reward functions before anything is trained.")
console = Console(soft_wrap=True, emoji=False)
_COLUMNS = ("reward", "verdict", "reads", "low", "high", "mean", "spread", "none", "nan", "ms each", "pairs", "rated")
_COLOURS = {"fine": "green", "broken": "bold red"}


@rewards.callback()
def _group() -> None:
    """Try reward functions before anything is trained."""


@rewards.command()
def check(
    spec: Annotated[
        list[str] | None, typer.Argument(metavar="SPEC...", help="module:function; else those of --config.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="File or dataset of prompts, with answers (column completion) or without.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Name of a recorded agent, or a pattern.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file: rewards, judges, dataset, size of a step.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the transcripts.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts at most.")] = 16,
    answers_each: Annotated[int, typer.Option(min=1, help="Answers to each prompt at most.")] = 4,
    timeout: Annotated[float | None, typer.Option(help="Seconds that one call may take; 60 by default.")] = None,
    judges_twice: Annotated[bool, typer.Option("--judges-twice", help="Call judges again too, which costs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON.")] = False,
) -> None:
    """Try each reward alone on recorded, given or made-up answers; exit code 1 if one is broken."""
    from praison_agent_rl.reward_trials.trying import try_rewards

    options: dict[str, Any] = {"prompts": prompts, "answers_each": answers_each, "timeout": timeout, "config": config}
    if store is not None:
        options["store"] = store
    with _rewards_print_to_stderr():
        trials = try_rewards(spec or None, data, agent=agent, judges_twice=judges_twice, **options)
    if as_json:
        typer.echo(trials.as_json())
    else:
        _show(trials)
    if not trials.ok:
        raise typer.Exit(1)


@contextmanager
def _rewards_print_to_stderr() -> Iterator[None]:
    """Standard output is this command's own: what a reward, its module or a program that it starts prints is not."""
    sys.stdout.flush()
    own, elsewhere = None, sys.stdout
    with suppress(OSError, ValueError):  # one of them is closed
        own = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):  # also puts back what a reward made of it
            yield
    finally:
        for stream in (elsewhere, sys.__stdout__):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()  # type: ignore[union-attr]
        if own is not None:
            os.dup2(own, 1)
            os.close(own)


def _show(trials: "Trials") -> None:
    from praison_agent_rl.reward_trials.trying import lines_on

    _say(f"tried on {trials.answers} {trials.source} ({trials.prompts} prompts)")
    _print_table(list(_COLUMNS), [_row(trial) for trial in trials.rewards])
    for trial in trials.rewards:
        for line in lines_on(trial):
            _say(f"{trial.name}: {line}")
    for note in trials.notes:
        _say(f"note: {note}")
    _show_agreement(trials)


def _row(trial: "RewardTrial") -> list[Text]:
    pairs = trial.better + trial.worse + trial.tied
    cells = [
        f"{trial.name} (judge)" if trial.judge else trial.name,
        trial.verdict,
        trial.completions or "",
        _number(trial.low),
        _number(trial.high),
        _number(trial.mean),
        _number(trial.within),
        _share(trial.none, trial),
        _share(trial.nan + trial.infinite, trial),
        "" if trial.seconds_each is None else f"{1000 * trial.seconds_each:.3g}",
        f"{trial.better} of {pairs}" if pairs else "",
        "" if trial.agreement is None else f"{trial.agreement:+.2f}",
    ]
    colour = _COLOURS.get(trial.verdict, "yellow")
    return [Text(cell, colour if place == 1 else "") for place, cell in enumerate(cells)]


def _show_agreement(trials: "Trials") -> None:
    """How far each two rewards put the answers in the same order."""
    told = [place for place, values in enumerate(trials.correlations) if any(value is not None for value in values)]
    names = [trials.rewards[place].name for place in told]
    rows = []
    for row in told:
        values = [trials.correlations[row][place] for place in told]
        rows.append([Text(trials.rewards[row].name), *(Text("" if v is None else f"{v:+.2f}") for v in values)])
    if len(rows) > 1:
        _print_table(["same order (tau)", *names], rows)


def _print_table(columns: list[str], rows: list[list[Text]]) -> None:
    """Without the columns that say nothing."""
    kept = [place for place in range(len(columns)) if any(row[place].plain for row in rows)]
    table = Table(box=None)
    for place in kept:
        table.add_column(Text(columns[place]), overflow="fold", no_wrap=place == 1)
    for row in rows:
        table.add_row(*(row[place] for place in kept))
    wide = Console(width=200, emoji=False)  # whoever reads a pipe wants whole lines
    (console if console.is_terminal else wide).print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _share(count: int, trial: "RewardTrial") -> str:
    return f"{count / trial.answers:.0%}" if count else ""


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False)
