"""What the verbs ``train``, ``improve``, ``evaluate`` and ``demo`` do, and what they say of the outcome."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from praison_agent_rl.agents import find_agent
from praison_agent_rl.commands.errors import naming
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_files import read_source
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.launchers import launch_of, node_of
from praison_agent_rl.runs import HOME, RunFolder
from praison_agent_rl.stop_requests import ask_to_end

console = Console(soft_wrap=True, emoji=False)


def train(
    config: Path | None, *, dry_run: bool, resume: Path | None, overrides: list[str], flags: Mapping[str, Any]
) -> None:
    """Train by a configuration file, or go on with a run; ``flags`` are keys that were given as options of their own.

    Raises:
        PraisonRLError: something given is wrong, or the run failed.
    """
    from praison_agent_rl import planning
    from praison_agent_rl.improvement import carry_out, outcome_of, resume_run

    if resume is not None:
        given = _settings(overrides)
        if config is not None or dry_run or flags.keys() - {"remote"} or given.keys() - {"rollout_agent", "remote"}:
            raise ConfigError(
                "--resume goes on with a run as it was planned; give it no other argument than --set "
                "rollout_agent=module:name, which says where the run's agent is, and --remote-host or --set "
                "remote=null, which say that it goes on on another machine or on this one"
            )
        with naming(resume):
            _move(resume, {**flags, **given})
            planned = RunFolder.open(resume).plan.config
            if _joined(resume, TrainConfig.load(planned, need_model=False, need_data=False)):
                return
            _say_outcome(resume_run(resume, rollout_agent=given.get("rollout_agent")))
            _publish(resume)
        return
    if config is None:
        raise ConfigError("name a configuration file: praison-agent-rl train config.yaml (or --resume RUN)")
    draft = planning.draft_from_config(with_flags(config, flags) if flags else config, overrides)
    for note in draft.notes:
        _say(indent(note, "  "))
    if dry_run:
        _say_estimate(draft)
        return
    from praison_agent_rl.progress import RunProgress

    root = Path(draft.config.output_dir or planning.new_run_root(config.stem))
    with naming(root):
        if _joined(root, draft.config):
            return
        run = planning.write_run(draft, root)
        _say(f"run folder: {run.root}")
        with RunProgress() as progress:
            carry_out(draft, run, progress)
        _say_outcome(outcome_of(run) if draft.held_out else run)
        _publish(root)


def _joined(root: Path, config: TrainConfig) -> bool:
    """Whether this machine trains beside machine 0, which plans, measures and says what came of it."""
    launch = launch_of(config)
    if launch is None or not node_of(launch):
        return False
    from praison_agent_rl.training.joining import join_run

    _say(f"machine {node_of(launch)} of {launch.nodes}: it trains as soon as machine 0 does in {root}")
    join_run(root, launch)
    _say("trained; machine 0 says what came of it")
    return True


def _publish(root: Path) -> None:
    """Publish what the run's configuration asks for, and say what came of it."""
    from praison_agent_rl.commands.export import say_export
    from praison_agent_rl.exports.from_config import publish_as_configured

    run = RunFolder(root)
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    for made in publish_as_configured(run, config, _say):
        say_export(made)


def with_flags(config: Path | None, flags: Mapping[str, Any]) -> dict[Any, Any]:
    """What the file says, with what was given as options; of a mapping in the file they change what they name."""
    found = read_source(config)
    for key, value in flags.items():
        known = found.get(key)
        known = {"host": known} if key == "remote" and isinstance(known, str) else known
        found[key] = {**known, **value} if isinstance(known, Mapping) else value
    return found


def stop(root: Path) -> None:
    """Stop a run, here or on another machine.

    Raises:
        PraisonRLError: there is none, or the machine cannot be reached.
    """
    from praison_agent_rl.remote.running import remote_of, stop_there

    run = RunFolder.open(root)
    if remote_of(run) is None:
        _stop_here(run)
        return
    stopped = stop_there(run, _say)
    _say("it was stopped" if stopped else "it does not go on any more")


def _move(root: Path, given: Mapping[str, Any]) -> None:
    """Let a run go on on another machine, or on this one, if ``given`` says so."""
    if "remote" not in given:
        return
    from praison_agent_rl.remote.running import move_run

    run = RunFolder.open(root)
    known, told = run.plan.config.get("remote"), given["remote"]
    move_run(run, {**known, **told} if isinstance(known, Mapping) and isinstance(told, Mapping) else told, _say)


def _stop_here(run: RunFolder) -> None:
    if run.adapter.exists():
        _say("it has been trained already, and what is left of it can be ended by Ctrl-C alone")
        return
    try:
        ask_to_end(run)
    except OSError as error:
        raise ConfigError(f"the run's folder {str(run.root)!r} cannot be written: {error.strerror or error}") from error
    _say("it ends after the step under way, whose checkpoint is saved; go on with it by --resume")


def _say_outcome(result: Any) -> None:
    from praison_agent_rl.improvement import Improvement
    from praison_agent_rl.report import outcome_in_words, write_report
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
    from praison_agent_rl.exports.subjects import version_made_of

    version = version_made_of(run, HOME)
    return Path(version.folder) / "model" if version else None


def _say_estimate(draft: Any) -> None:
    from praison_agent_rl.estimate import free_disk, in_words, total_memory
    from praison_agent_rl.planning import best_device, check_room, expected_cost
    from praison_agent_rl.remote.visiting import in_words_of

    root = Path(draft.config.output_dir or Path.cwd())
    check_room(draft, root)
    there = _seen_there(draft)
    device, cost = (there.device, there.cost) if there else (best_device(), expected_cost(draft))
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
        has = f" (this machine has {in_words(memory)})" if memory and device == "cpu" and not there else ""
        table.add_row("memory", f"about {in_words(cost.memory_bytes)}{has}")
        table.add_row("disk", f"about {in_words(cost.disk_bytes)} ({in_words(free_disk(root))} free)")
        minutes = max(1, round(cost.seconds / 60))
        table.add_row("time", f"about {minutes} minute{'s' * (minutes > 1)}")
    else:
        table.add_row("memory, disk, time", "not estimated: nothing is known here of the size of this model")
    for what, found in (in_words_of(there, draft.config.remote) if there else {}).items():
        table.add_row(what, escape(found))
    console.print(table)
    sent = ", sent" if there else ""
    console.print(
        f"dry run: all that can be checked without loading the model is sound; nothing was loaded{sent} or written"
    )


def _seen_there(draft: Any) -> Any:
    """What another machine has for the run, if it is to happen on one; raises PraisonRLError where it cannot."""
    if draft.config.remote is None:
        return None
    from praison_agent_rl.pairs.lengths import mean_tokens
    from praison_agent_rl.planning import plan_of
    from praison_agent_rl.remote.checks import Load
    from praison_agent_rl.remote.visiting import visit

    load = Load(plan_of(draft), len(draft.train), len(draft.held_out), mean_tokens(draft.train))
    return visit(draft.config.remote, load)


def improve(agent: str, reward: list[str] | None, options: dict[str, Any], sets: list[str]) -> None:
    """Improve the agent that ``module:name`` names.

    Raises:
        PraisonRLError: something given is wrong, or the run failed.
    """
    from praison_agent_rl.config_keys import Findings, rename
    from praison_agent_rl.improvement import improve as improve_agent
    from praison_agent_rl.planning import new_run_root
    from praison_agent_rl.trained_rewards import TrainedReward

    settings = _settings(sets)
    if reward:
        settings["reward_funcs"] = reward
    live = find_agent(agent)
    wanted = rename({**read_source(options["config"]), **settings}, Findings())
    if wanted.get("rollout", "auto") in ("auto", "agent"):
        settings.setdefault("rollout_agent", agent)  # so that a run that was interrupted finds it again
    given = wanted.get("output_dir")
    root = Path(str(given)) if given else new_run_root(live.name)
    with naming(root):
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


def evaluate(subject: str, against: str | None, options: dict[str, Any], sets: list[str]) -> None:
    """Compare two models, versions or agents.

    Raises:
        PraisonRLError: something given is wrong, or the run failed.
    """
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


def demo() -> None:
    """Improve an agent on the embedded model."""
    from praison_agent_rl.demo import run_demo
    from praison_agent_rl.planning import new_run_root

    root = new_run_root("demo")
    with naming(root):
        run_demo(console, settings={"output_dir": str(root)})


def _facts_table() -> Table:
    table = Table("", show_header=False, box=None)
    table.add_column(overflow="fold")  # paths are to be copied whole
    return table


def _say(text: str) -> None:
    """Print ``text`` as it is: a folder may be called ``runs[1]``."""
    console.print(text, markup=False, highlight=False)
