"""The command ``praison-agent-rl``: each verb calls one function of the package and says what came of it."""

from pathlib import Path
from typing import Annotated

import typer

from praison_agent_rl.commands import doctor, export, recorded, rewards, running, versions
from praison_agent_rl.commands.errors import Guarded, guard, guarded, stop_on_closed_pipe
from praison_agent_rl.commands.serve import ServeOptions, named, serve_agents
from praison_agent_rl.remote.flags import remote_of_flags
from praison_agent_rl.runs import HOME

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the configuration; repeatable.")
]
RemoteHost = Annotated[
    str | None, typer.Option("--remote-host", metavar="HOST", help="Run there, over SSH (`remote`).")
]
RemotePython = Annotated[str | None, typer.Option("--remote-python", help="Python there.")]
RemoteWorkdir = Annotated[str | None, typer.Option("--remote-workdir", help="Folder there.")]
RemoteGpus = Annotated[int | None, typer.Option("--remote-gpus", min=0, help="GPUs that must be there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"praison-agent-rl {version('praison-agent-rl')}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Say the version and end.")
    ] = False,
) -> None:
    """Make a praisonaiagents agent better at its own job: train the model beneath it, prove it, swap it in."""


def main() -> None:
    """Entry point: errors become one message and an exit code, 2 for wrong input and 1 for a run that failed."""
    stop_on_closed_pipe(app)


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file; praison-agent-rl and praison-train keys.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, load no weights, and end.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Go on with the interrupted run in this folder; with --remote-host or --set remote=null elsewhere.",
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Processes that train: one for each GPU (`launch`).")
    ] = None,
    remote_host: RemoteHost = None,
    remote_python: RemotePython = None,
    remote_workdir: RemoteWorkdir = None,
    remote_gpus: RemoteGpus = None,
    stop: Annotated[
        Path | None,
        typer.Option(
            "--stop",
            metavar="RUN",
            help="Stop the run in this folder; of one on another machine the newest checkpoint comes home.",
        ),
    ] = None,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train a model from a configuration file and compare it with its base on held-out prompts."""
    if stop is not None:
        guard(debug, lambda: running.stop(stop))
        return
    there = remote_of_flags(host=remote_host, python=remote_python, workdir=remote_workdir, gpus=remote_gpus)
    flags = {"launch": {"nproc": nproc} if nproc else None, "remote": there}
    given = {key: value for key, value in flags.items() if value}
    sets = set_ or []
    guard(debug, lambda: running.train(config, dry_run=dry_run, resume=resume, overrides=sets, flags=given))


@app.command()
def improve(
    agent: Annotated[
        str, typer.Argument(metavar="MODULE:AGENT", help="Where the agent is, as myproject.agents:helper.")
    ],
    data: Annotated[str | None, typer.Option(help="File or dataset of prompts; else what was recorded.")] = None,
    reward: Annotated[list[str] | None, typer.Option("--reward", help="module:function; repeatable.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Weights beneath the agent: hub name, folder, GGUF.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with further keys.")] = None,
    promote: Annotated[
        bool, typer.Option(help="Make a version that passes the current one; else it is a candidate.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Even against the gate's verdict; recorded for ever.")] = False,
    remote_host: RemoteHost = None,
    remote_python: RemotePython = None,
    remote_workdir: RemoteWorkdir = None,
    remote_gpus: RemoteGpus = None,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Improve an agent; what is better becomes its current version, which attached processes follow."""
    options = {"data": data, "base_model": base_model, "promote": promote, "force": force}
    there = remote_of_flags(host=remote_host, python=remote_python, workdir=remote_workdir, gpus=remote_gpus)
    source = running.with_flags(config, {"remote": there}) if there else config
    guard(debug, lambda: running.improve(agent, reward, {**options, "config": source}, set_ or []))


@app.command()
def evaluate(
    subject: Annotated[str, typer.Argument(help="Weights (hub name, folder, GGUF), AGENT@v3, or MODULE:AGENT.")],
    against: Annotated[str | None, typer.Option(help="The same; else what a version was trained on.")] = None,
    data: Annotated[
        str | None, typer.Option(help="File or dataset of prompts; else a version's held-out ones.")
    ] = None,
    reward: Annotated[list[str] | None, typer.Option("--reward", help="module:function; repeatable.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Weights beneath an agent: hub name, folder, GGUF.")] = None,
    samples: Annotated[int | None, typer.Option(help="Answers to each prompt: one greedy, the others sampled.")] = None,
    run_tools: Annotated[
        bool, typer.Option("--run-tools", help="Let the agent itself answer, with its tools.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file with further keys.")] = None,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Compare two models, versions or agents on the same prompts; nothing is trained or changed."""
    options = {"data": data, "reward_funcs": reward, "base_model": base_model, "samples": samples, "config": config}
    guard(debug, lambda: running.evaluate(subject, against, {**options, "run_tools": run_tools}, set_ or []))


@app.command()
def serve(
    agents: Annotated[
        list[str], typer.Argument(metavar="AGENT[@v3]...", help="Agents, by whatever is current, or one version.")
    ],
    version: Annotated[str | None, typer.Option(help="As v3, of a single agent; the current one by default.")] = None,
    backend: Annotated[
        str, typer.Option(help="transformers, or vllm: one server for all of one base.")
    ] = "transformers",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="A free one by default.")] = None,
    host: Annotated[str, typer.Option(help="Other than 127.0.0.1 only with a key of yours.")] = "127.0.0.1",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    vllm_options: Annotated[str, typer.Option(help="Further arguments of vllm serve, as in a shell.")] = "",
    drain: Annotated[float, typer.Option(min=0, help="Seconds for requests under way at the end.")] = 60.0,
    home: Annotated[Path, typer.Option("--home", help="Folder that holds versions/.")] = HOME,
    debug: Debug = False,
) -> None:
    """Serve agents' current versions, for agents elsewhere, until Ctrl-C; PRAISON_AGENT_RL_KEY is the key."""
    given = ServeOptions(
        home=home, host=host, port=port, backend=backend, device=device, vllm_options=vllm_options, drain=drain
    )
    guard(debug, lambda: serve_agents(named(agents, version), given))


@app.command()
def demo(debug: Debug = False) -> None:
    """Watch an agent on the embedded model get better; about five minutes on two cores, offline."""
    guard(debug, running.demo)


app.command("export")(guarded(export.export_command))
app.add_typer(recorded.transcripts, name="transcripts", cls=Guarded)
app.add_typer(recorded.dataset, name="dataset", cls=Guarded)
app.add_typer(doctor.doctor, name="doctor", cls=Guarded)
app.add_typer(rewards.rewards, name="rewards", cls=Guarded)
app.add_typer(versions.versions, name="versions", cls=Guarded)


if __name__ == "__main__":
    main()
