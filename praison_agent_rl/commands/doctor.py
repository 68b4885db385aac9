"""The verbs ``praison-agent-rl doctor``, ``doctor data`` and ``doctor plan``: what can run here, and what it takes."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from praison_agent_rl.data_advice import Supply

doctor = typer.Typer(help="Say what can run here, and what the recorded runs are good for.")
console = Console(soft_wrap=True, emoji=False)


@doctor.callback(invoke_without_command=True)
def machine(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Say what can run here and what each part that cannot lacks."""
    if context.invoked_subcommand is None:
        _show_machine()


@doctor.command()
def data(
    agent: Annotated[str | None, typer.Option(help="Name of a recorded agent, or a pattern; each by default.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the transcripts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON.")] = False,
) -> None:
    """Say which method an agent's recorded runs support, and what is missing for the others."""
    from praison_agent_rl.data_advice import examine_data

    supplies = examine_data(agent, store=store)
    if as_json:
        import json

        typer.echo(json.dumps([supply.model_dump() for supply in supplies], indent=2))
        return
    for supply in supplies:
        _show_supply(supply)


@doctor.command()
def plan(
    file: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")],
    gpu: Annotated[
        str | None,
        typer.Option(help="4090, L4, L40S, A100-40, A100, H100 or H200; by default the one here, or an H100 without."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of a machine; by default as launch says.")] = None,
    machines: Annotated[int | None, typer.Option(min=1, help="Machines; by default as launch says.")] = None,
    network: Annotated[float, typer.Option(min=0.1, help="Gigabits a second between two machines.")] = 100.0,
    server_gpus: Annotated[int, typer.Option(min=1, help="GPUs of a vLLM server elsewhere.")] = 1,
    parameters: Annotated[str | None, typer.Option(help="Size of a model that is not known here, such as 7B.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt; by default max_prompt_length, or 512.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts to train on, to say how long all takes.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the configuration; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON, in bytes and seconds.")] = False,
) -> None:
    """Say by arithmetic what a run takes of GPUs, network, disk and time, and what would make it fit."""
    from praison_agent_rl.config import TrainConfig
    from praison_agent_rl.errors import ConfigError
    from praison_agent_rl.resource_plan.hardware import find_gpu
    from praison_agent_rl.resource_plan.planned import check_prompt, machines_of, plan_run, usual_prompt
    from praison_agent_rl.resource_plan.shapes import find_shape, read_count
    from praison_agent_rl.resource_plan.telling import lines_of

    config = TrainConfig.load(file, overrides=sets, need_model=parameters is None, need_data=False)
    shape = find_shape(config.model_name or "a model", read_count(parameters) if parameters else None)
    if math.isinf(network):
        raise ConfigError(f"--network is {network}, which is no number of gigabits a second")
    check_prompt(config, tokens := prompt_tokens or usual_prompt(config))
    found = machines_of(config, find_gpu(gpu), gpus=gpus, machines=machines)
    found = found.model_copy(update={"network": network * 1e9 / 8, "servers": server_gpus})
    planned = plan_run(config, shape, found, prompt_tokens=tokens, prompts=prompts)
    typer.echo(planned.model_dump_json(indent=2) if as_json else "\n".join(lines_of(planned, config)))


def _show_machine() -> None:
    from praison_agent_rl.doctor import examine, examine_processes

    facts, parts = examine()
    table = _plain_table()
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
    state = Table("part", "", box=None)
    state.add_column("what it lacks", overflow="fold")
    for part in parts:
        state.add_row(part.name, "[green]ready[/green]" if part.ready else "[yellow]no[/yellow]", escape(part.lacks))
    console.print(state)
    settings, warning = examine_processes()
    given = Table("processes that compute", "", box=None)
    given.add_column("why", overflow="fold")
    for setting in settings:
        given.add_row(setting.name, setting.value or "unset", escape(setting.why))
    if not settings:
        given.add_row("nothing is set", "", "they compute on a GPU")
    console.print(given)
    if warning:
        _say(f"warning: {warning}", style="yellow")


def _show_supply(supply: "Supply") -> None:
    from praison_agent_rl.dataset_building.comparing import PAIR_REASONS

    _say(f"{supply.agent}: {supply.runs:,} recorded runs", style="bold")
    table = _plain_table()
    pairs = {source: f"{supply.pairs.get(source, 0):,} pairs" for source in ("correction", "rating", "retry")}
    table.add_row("  prompts", f"{supply.prompts:,} different ones")
    table.add_row("  corrections", f"{supply.corrected:,} runs: {pairs['correction']}")
    table.add_row("  ratings", f"{supply.rated:,} runs with a score: {pairs['rating']} of answers to the same prompt")
    table.add_row("  retries", f"{pairs['retry']} of answers that the agent took back")
    for reason, count in supply.left_out.items():
        table.add_row("  no pair", f"{count:,} {escape(PAIR_REASONS.get(reason, reason))}")
    console.print(table)
    for note in supply.notes:
        _say(f"  note: {note}")
    told = ""
    for advice in supply.advice:
        _say(f'\n"{advice.signal}": method {advice.method}, {"ready" if advice.ready else "not yet"}', style="bold")
        missing = "the same" if advice.missing == told else advice.missing
        _say(f"  {advice.has}" + (f"; missing: {missing}" if missing else ""))
        told = advice.missing
        _say(f"  next: {advice.command}")
    _say("")


def _plain_table() -> Table:
    table = Table("", show_header=False, box=None)
    table.add_column(overflow="fold")  # paths are to be copied whole
    return table


def _say(text: str, *, style: str | None = None) -> None:
    console.print(text, markup=False, highlight=False, style=style)
