"""The command ``praison-agent-rl``: each verb calls one function of the package and says what came of it."""

import contextlib
import errno
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from praison_agent_rl import cli_doctor, cli_recorded, cli_rewards, cli_serve, cli_versions
from praison_agent_rl.agents import find_agent
from praison_agent_rl.errors import ConfigError, PraisonRLError
from praison_agent_rl.runs import HOME

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Make a praisonaiagents agent better at its own job: train the model beneath it, prove it, swap it in.",
)
console = Console(soft_wrap=True, emoji=False)
errors = Console(stderr=True, soft_wrap=True, emoji=False)

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's, of the copy of click that typer brings along or of the installed one, by release."""

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
    promote: Annotated[
        bool, typer.Option(help="Make a version that passes the current one; else it is a candidate.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Even against the gate's verdict; recorded for ever.")] = False,
    set_: Overrides = None,
    debug: Debug = False,
) -> None:
    """Improve an agent; what is better becomes its current version, which attached processes follow."""
    options = {"data": data, "base_model": base_model, "config": config, "promote": promote, "force": force}
    _guard(debug, lambda: _improve(agent, reward, options, set_ or []))


@app.command()
def evaluate(
    subject: Annotated[str, typer.Argument(help="Weights (hub name, folder, GGUF), AGENT/v3, or MODULE:AGENT.")],
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
    _guard(debug, lambda: _evaluate(subject, against, {**options, "run_tools": run_tools}, set_ or []))


@app.command()
def serve(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent, or of its folder of versions.")],
    version: Annotated[str | None, typer.Option(help="As v3; the current one by default.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of 127.0.0.1; a free one by default.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    home: Annotated[Path, typer.Option("--home", help="Folder that holds versions/.")] = HOME,
    debug: Debug = False,
) -> None:
    """Serve an agent's current version alone, for agents elsewhere, until Ctrl-C; PRAISON_AGENT_RL_KEY is its key."""
    _guard(debug, lambda: cli_serve.serve_alone(agent, version, port=port, device=device, home=home))


@app.command()
def demo(debug: Debug = False) -> None:
    """Watch an agent on the embedded model get better; about ten minutes on two cores, offline."""
    _guard(debug, _demo)


def _train(config: Path | None, *, dry_run: bool, resume: Path | None, overrides: list[str]) -> None:
    from praison_agent_rl import planning
    from praison_agent_rl.improvement import carry_out, outcome_of, resume_run

    if resume is not None:
        given = _settings(overrides)
        if config is not None or dry_run or given.keys() - {"rollout_agent"}:
            raise ConfigError(
                "--resume goes on with a run as it was planned; give it no other argument than --set "
                "rollout_agent=module:name, which says where the run's agent is"
            )
        with _naming(resume):
            _say_outcome(resume_run(resume, rollout_agent=given.get("rollout_agent")))
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
        _say_outcome(outcome_of(run) if draft.held_out else run)


def _say_outcome(result: Any) -> None:
    from praison_agent_rl.improvement import Improvement
    from praison_agent_rl.report import outcome_in_words, write_report
    from praison_agent_rl.runs import RunFolder
    from praison_agent_rl.trained_rewards import TrainedReward

    if isinstance(result, TrainedReward):
        _say(f"{result}\nreport: {result.report}")
        _say_reward(result)
        return
    if isinstance(result, Improvement):
        run = RunFolder(result.run)
        _say(outcome_in_words(run))
    else:
        run = result
        write_report(run)
        _say(outcome_in_words(run))
    _say(f"adapter: {run.adapter}\nreport: {run.report}")
    if isinstance(result, Improvement) and result.version:
        _say(str(result))
        _say_version(str(run.plan.agent), result)
    elif run.plan.config.get("method") == "reward":
        _say(f"model: {run.merged}\nuse it with: reward_funcs: [{shlex.quote(str(run.merged))}]")
    elif (model := run.merged if run.merged.exists() else _model_made_of(run)) is not None:
        _say(f"merged model: {model}\nserve it with: transformers serve {shlex.quote(str(model))}")
    else:
        _say("the merged model is not in the run's folder any more: it has become a version of the agent, or was moved")


def _model_made_of(run: Any) -> Path | None:
    """The model folder of the version that a run has become by `versions promote RUN`."""
    from praison_agent_rl.registry import list_agents, list_versions

    root = str(run.root.resolve())
    known = (version for agent in list_agents(HOME) for version in list_versions(HOME, agent))
    return next((Path(version.folder) / "model" for version in known if version.run == root), None)


def _say_estimate(draft: Any) -> None:
    from praison_agent_rl.estimate import free_disk, in_words, total_memory
    from praison_agent_rl.planning import best_device, check_room, expected_cost

    root = Path(draft.config.output_dir or Path.cwd())
    check_room(draft, root)
    device, cost = best_device(), expected_cost(draft)
    table = _facts_table()
    table.add_row("model", escape(draft.base))
    method = draft.config.method
    if method == "cpo":
        table.add_row("judged by", escape(", ".join(r.name for r in draft.rewards) or "preference on held-out pairs"))
    elif method == "grpo":
        table.add_row("rewards", escape(", ".join(reward.name for reward in draft.rewards)))
    rows = "prompts" if method == "grpo" else "pairs"
    table.add_row(rows, f"{len(draft.train)} to train on, {len(draft.held_out)} held out")
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


def _improve(agent: str, reward: list[str] | None, options: dict[str, Any], sets: list[str]) -> None:
    from praison_agent_rl.config_files import read_source
    from praison_agent_rl.config_keys import Findings, rename
    from praison_agent_rl.improvement import improve as improve_agent
    from praison_agent_rl.planning import new_run_root
    from praison_agent_rl.trained_rewards import TrainedReward

    settings = _settings(sets)
    if reward:
        settings["reward_funcs"] = reward
    live = find_agent(agent)
    settings.setdefault("rollout_agent", agent)  # so that a run that was interrupted finds it again
    given = rename({**read_source(options["config"]), **settings}, Findings()).get("output_dir")
    root = Path(str(given)) if given else new_run_root(live.name)
    with _naming(root):
        # This process ends now, so nothing is swapped in here: processes that are attached follow.
        result = improve_agent(live, swap=False, **options, **{**settings, "output_dir": given or str(root)})
    _say(f"{result}\nreport: {result.report}")
    if isinstance(result, TrainedReward):
        _say_reward(result)
    elif result.version:
        _say_version(live.name, result)


def _say_reward(result: Any) -> None:
    _say(f"model: {result.folder / 'model'}\nuse it with: reward_funcs: [{result.name}]")


def _say_version(agent: str, result: Any) -> None:
    name = shlex.quote(agent)
    _say(f"model: {result.model}\nserve it with: praison-agent-rl serve {name} --version {result.version}")
    if not result.promoted:
        _say(f"let it answer with: praison-agent-rl versions promote {name} {result.version}")


def _evaluate(subject: str, against: str | None, options: dict[str, Any], sets: list[str]) -> None:
    from praison_agent_rl.evaluating import evaluate as evaluate_sides

    result = evaluate_sides(
        _agent_or_text(subject),
        against=_agent_or_text(against) if against else None,
        **_settings(sets, _OF_EVALUATE),
        **options,
    )
    _say(f"{result}\nreport: {result.report}")


def _agent_or_text(given: str) -> Any:
    return find_agent(given) if re.fullmatch(r"[\w.]+:\w+", given) and not Path(given).exists() else given


def _settings(sets: list[str], arguments: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``--set`` gives; raises ConfigError for what is no key of a configuration."""
    from praison_agent_rl.config_keys import Findings, parse_overrides

    found = Findings()
    settings = parse_overrides(sets, found)
    known = {**_ARGUMENTS, **(arguments or {})}
    found.problems += [_no_key(key, known[key]) for key in settings if key in known]
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    return settings


_ARGUMENTS = {
    "agent": "MODULE:AGENT", "data": "--data", "base_model": "--base-model", "config": "--config", "swap": "",
    "promote": "--no-promote", "force": "--force",
    "quiet": "", "source": "--config", "overrides": "--set", "need_model": "", "need_data": "", "cls": "", "self": "",
}  # fmt: skip
"""Arguments of ``improve`` and ``TrainConfig.load`` that are no keys of a configuration; the option for each."""
_OF_EVALUATE = {"subject": "", "against": "--against", "samples": "--samples", "run_tools": "--run-tools"}
"""Those of ``evaluate`` besides."""


def _no_key(name: str, option: str) -> str:
    return f"{name!r} is no key that --set can set; " + (f"give it as {option}" if option else "leave it out")


def _demo() -> None:
    from praison_agent_rl.demo import run_demo
    from praison_agent_rl.planning import new_run_root

    root = new_run_root("demo")
    with _naming(root):
        run_demo(console, settings={"output_dir": str(root)})


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
    except (typer.Exit, typer.Abort, _USAGE_ERROR):
        raise  # help, and words that are no option: the command line's own affair
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
app.add_typer(cli_doctor.doctor, name="doctor", cls=_Guarded)
app.add_typer(cli_rewards.rewards, name="rewards", cls=_Guarded)
app.add_typer(cli_versions.versions, name="versions", cls=_Guarded)


def _stop_on_closed_pipe(run: Callable[[], Any]) -> None:
    try:
        run()
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
