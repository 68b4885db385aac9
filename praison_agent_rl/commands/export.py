"""The verb ``praison-agent-rl export``: a trained version in the form that a deployment wants."""

from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from praison_agent_rl.estimate import in_words
from praison_agent_rl.exports.made import TARGETS, Export, Target
from praison_agent_rl.runs import HOME

console = Console(soft_wrap=True, emoji=False)


def export_command(
    subject: Annotated[
        str, typer.Argument(metavar="AGENT[@v3]|RUN", help="Agent (its current version), version, or folder of a run.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="KIND", help=f"One of {', '.join(TARGETS)}.")],
    out: Annotated[Path | None, typer.Option(help="New folder for it; else one under .praisonai/rl/exports.")] = None,
    quantize: Annotated[
        list[str] | None, typer.Option("--quantize", metavar="LEVEL", help="Of GGUF files, as q4_k_m; repeatable.")
    ] = None,
    imatrix: Annotated[Path | None, typer.Option(help="Importance matrix for llama-quantize.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the model in Ollama, or of the adapter in vLLM.")] = None,
    repo: Annotated[str | None, typer.Option(metavar="USER/NAME", help="Repository on the hub.")] = None,
    form: Annotated[str, typer.Option(help="What the hub gets: merged, lora or gguf.")] = "merged",
    public: Annotated[bool, typer.Option("--public", help="The repository may be public.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit on the hub.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Of the model card; repeatable.")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Load it again and ask held-out prompts.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Also what the gate or the check refused.")] = False,
    home: Annotated[Path, typer.Option("--home", help="Folder that holds versions/.")] = HOME,
) -> None:
    """Export a trained version: merged folder, adapter for vLLM, GGUF, Ollama model, or push to the hub."""
    from praison_agent_rl.exports import export

    made = export(
        subject,
        cast(Target, to),
        out=out,
        home=home,
        say=_say,
        quantization=tuple(quantize) if quantize else None,
        imatrix=imatrix,
        name=name,
        repo=repo,
        form=form,
        private=not public,
        message=message,
        tags=tuple(tag) if tag else None,
        check=check,
        force=force,
    )
    say_export(made)


def say_export(made: Export) -> None:
    """Print what was made, what checking it showed, and how it is used."""
    _say(str(made))
    for file in made.files:
        _say(f"  {file.path}  {in_words(file.size)}")
    for what, check in made.checks.items():
        style = {"passed": "green", "failed": "red", "unchecked": "yellow"}[check.status]
        console.print(f"{what}: {check.text}", markup=False, highlight=False, style=style)
    for note in made.notes:
        _say(f"note: {note}")
    _say("use it with:")
    for command in made.use:
        _say(f"  {command}")


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False)
