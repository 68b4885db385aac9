"""Check everything that can be checked, then write the folder of a run; nothing heavy is imported here.

Every check is made even if an earlier one failed, so that all that is wrong is said at once.
"""

import contextlib
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from praison_agent_rl import data as datasets
from praison_agent_rl.agent_rollouts.prompts import rows_to_ask
from praison_agent_rl.backends import check_backend
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_files import read_source
from praison_agent_rl.config_keys import Findings, did_you_mean, listed, parse_overrides, rename
from praison_agent_rl.config_values import DatasetSpec, idle_rollout_keys, read_dataset
from praison_agent_rl.control import control_rows
from praison_agent_rl.data import Row
from praison_agent_rl.errors import ConfigError, DataError
from praison_agent_rl.estimate import LEAST_DISK, Estimate, estimate_run, free_disk, in_words
from praison_agent_rl.exports.from_config import check_publishing
from praison_agent_rl.guards import LIMITS
from praison_agent_rl.hosting import Hosting
from praison_agent_rl.launchers import check_launch
from praison_agent_rl.libraries import library_versions
from praison_agent_rl.models import find_weights, require_training_stack
from praison_agent_rl.pairs.lengths import check_lengths, mean_tokens
from praison_agent_rl.pairs.texts import explicit
from praison_agent_rl.past import Past, choose_earlier
from praison_agent_rl.planned_rewards import plan_rewards
from praison_agent_rl.preflight import (
    check_adapter_targets,
    check_chat_template,
    check_layers,
    check_packages,
    check_tokenizer,
)
from praison_agent_rl.problems import Problems as Problems  # told on
from praison_agent_rl.process_settings import best_device as best_device  # told on
from praison_agent_rl.recorded_calls import write_calls
from praison_agent_rl.records import Call, GateRules, Plan, PlannedReward
from praison_agent_rl.remote.refusals import check_possible
from praison_agent_rl.reward_trials.short import SHORT, short_trial
from praison_agent_rl.rewards import Reward, listed_specs, portable, prepare, require, resolve_all
from praison_agent_rl.rollout_choice import RolloutChoice, choose_rollout, recorded_by
from praison_agent_rl.runs import HOME, RunFolder, now, slug, write_record
from praison_agent_rl.vllm_servers.serving import find_vllm
from praison_agent_rl.warm_examples import calls_to_keep, notes_on
from praison_agent_rl.watch_rows import put_aside
from praison_agent_rl.weight_files import read_config

_FEW_HELD_OUT = 30


@dataclass
class Draft:
    """A run that has passed its checks and is not written yet."""

    config: TrainConfig
    base: str
    train: list[Row]
    held_out: list[Row]
    rewards: list[Reward]
    tools: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    judges: list[Reward] = field(default_factory=list)
    """Rewards that judge and are not trained on."""
    watch: list[Row] = field(default_factory=list)
    """Taken out of the rows to train on, to watch with."""
    candidate: str | None = None
    """Weights to compare with the base; nothing is trained then."""
    manifest: Path | None = None
    """Of the dataset, where it was built from recorded runs."""
    since: str | None = None
    """See ``Plan.since``."""
    hosting: Hosting | None = None
    """The agent that makes the rollouts, where one does."""
    calls: list[Call] = field(default_factory=list)
    """Of good recorded runs of the agent."""

    @property
    def nameable(self) -> bool:
        """Whether another process can find every reward again."""
        return all(planned.spec for planned in [*_rewards_of(self), *_judges_of(self)])


def draft_from_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Draft:
    """Check a training configuration, its rewards, model and data.

    Raises:
        PraisonRLError: everything that is wrong, in one.
    """
    problems = Problems()
    unread = Findings()
    raw = rename(read_source(source), unread)  # of a file that cannot be read, nothing else can be said
    raw |= rename(parse_overrides(overrides, unread), unread)
    config = problems.attempt(lambda: TrainConfig.load(source, overrides=overrides))
    specs = config.reward_funcs if config else raw.get("reward_funcs")
    model = config.model_name if config else raw.get("model_name") or raw.get("model")
    # with a faulty key the rest of the file is still looked at, as far as it can be read
    data = config.dataset if config else _readable_data(raw)
    method = config.method if config else str(raw.get("method", "grpo"))
    fns = problems.attempt(lambda: resolve_all(specs))
    if fns is not None:
        problems.attempt(lambda: require(method, fns))
    problems.attempt(lambda: resolve_all(config.judge_funcs if config else raw.get("judge_funcs")))
    rows = problems.attempt(lambda: check_data(data, method)) if data is not None else None
    base = problems.attempt(lambda: find_weights(str(model))) if model else None
    problems.attempt(require_training_stack)
    if config is None or base is None or rows is None or fns is None:
        problems.raise_all()
        raise AssertionError("unreachable: a missing part is a problem")
    choice = problems.attempt(lambda: choose_rollout(config, base))
    recorded = problems.attempt(lambda: recorded_by(choice, config))
    calls = calls_to_keep(*recorded, config, base, problems=problems) if recorded else []
    draft = finish_draft(config, base, rows, problems=problems, choice=choice)
    draft.calls, draft.notes = calls, [*draft.notes, *(notes_on(recorded[1], config) if recorded else [])]
    return draft


def finish_draft(
    config: TrainConfig,
    base: str,
    rows: list[Row],
    *,
    problems: Problems,
    tools: Sequence[dict[str, Any]] = (),
    choice: RolloutChoice | None = None,
) -> Draft:
    """Split the rows, try the rewards on a sample, and check what depends on the two; raises all problems at once."""
    choice = choice or RolloutChoice("agent" if config.rollout == "agent" else "direct")
    config = config.model_copy(update={"rollout": choice.mode})
    idle = [note for name, note in idle_rollout_keys(config).items() if name != "rollout_agent"]  # auto looked at it
    notes = list(dict.fromkeys([*config.notes, *choice.notes, *idle]))
    rows = rows if config.method == "grpo" else [explicit(row) for row in rows]
    if choice.mode == "agent":
        askable = problems.attempt(lambda: _rows_to_ask(rows))
        rows, notes = (askable[0], notes + askable[1]) if askable is not None else (rows, notes)
    problems.attempt(lambda: _check_runnable(config))
    if config.remote is None:  # else the machine there is asked
        problems.attempt(lambda: check_packages(config))
    notes += problems.attempt(lambda: check_backend(config, best_device())) or []
    problems.attempt(lambda: check_publishing(config))
    problems.attempt(lambda: check_chat_template(config))
    problems.attempt(lambda: check_tokenizer(config, base))
    tied = bool(read_config(base).get("tie_word_embeddings"))
    problems.attempt(lambda: check_adapter_targets(config, tied=tied, source=base))
    notes += problems.attempt(lambda: check_layers(config, base)) or []
    notes += problems.attempt(lambda: check_lengths(config, base, rows, tools=tools)) or []
    split = problems.attempt(lambda: datasets.split_rows(rows, config.held_out, seed=config.held_out_seed))
    aside = problems.attempt(partial(put_aside, split[0], config)) if split is not None else None
    prompts, columns = datasets.sample(rows)
    prompts = [datasets.as_messages(prompt) for prompt in prompts if prompt is not None]
    scorers = prepare_rewards(config, prompts, columns, problems=problems)
    entries = [*listed_specs(config.reward_funcs), *listed_specs(config.judge_funcs)]
    named = scorers is None or all(portable(entry)[0] for entry in entries)
    problems.attempt(lambda: check_launch(config, device=best_device(), nameable=named))
    tried = problems.attempt(partial(_try_shortly, config, scorers, prompts, columns)) if scorers is not None else None
    if aside is not None:
        problems.attempt(partial(config.check_prompt_count, len(aside[0])))
    problems.raise_all()
    assert split is not None and aside is not None and tried is not None
    rewards, judges, said = tried
    forms = {"text": "plain text", "messages": "message lists"}
    of_texts = [reward for reward in rewards if not reward.views]  # the others read what they ask of runs
    notes += [f"the reward {reward.name} reads answers as {forms[reward.shape.completions]}" for reward in of_texts]
    notes += [*said, *aside[2]]
    if 0 < len(split[1]) < _FEW_HELD_OUT:
        notes.append(f"only {len(split[1])} prompts are held out; a small gain cannot be proved with so few")
    if tools and not any("not run in training" in note for note in notes):
        names = ", ".join(str(tool.get("function", {}).get("name")) for tool in tools)
        notes.append(f"the agent's tools ({names}) are shown to the model but not run in training")
    watch, hosting = aside[1], choice.hosting
    draft = Draft(config, base, aside[0], split[1], rewards, list(tools), notes, judges, watch, hosting=hosting)
    if config.remote is not None:
        check_possible(plan_of(draft))
    return draft


def _rows_to_ask(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows that an agent can be asked, and what to say of the others; raises DataError if there is none."""
    asked = rows_to_ask(rows)
    if not asked.rows:
        raise DataError(
            f"none of {len(rows)} prompts can be asked of an agent: all end on a tool's result or an answer; give "
            "texts, or messages that end on a user's"
        )
    left = asked.left_out
    return asked.rows, [f"{left} of {len(rows)} prompts end within a turn and are left out"] if left else []


def prepare_rewards(
    config: TrainConfig, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]], *, problems: Problems
) -> tuple[list[Reward], list[Reward]] | None:
    """The rewards and the judges, each tried on sample prompts, and the names that the gate's rules speak of checked.

    What is wrong goes to ``problems``; None then.
    """
    weights = config.reward_weights
    rewards = problems.attempt(lambda: prepare(config.reward_funcs, weights=weights, prompts=prompts, columns=columns))
    judges = problems.attempt(lambda: prepare(config.judge_funcs, prompts=prompts, columns=columns))
    problems.attempt(lambda: _check_limits(config.guard_limits))
    if rewards is None or judges is None:
        return None
    apart = _named_apart(judges, {reward.name for reward in rewards})
    for check in (partial(_check_judges, judges, rewards), partial(_check_guards, config.guards, [*rewards, *apart])):
        problems.attempt(check)
    return rewards, apart


def _try_shortly(
    config: TrainConfig,
    scorers: tuple[list[Reward], list[Reward]],
    prompts: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[list[Reward], list[Reward], list[str]]:
    """Rewards and judges that know what their scores depend on, and what a short trial says; raises RewardError."""
    rules = replace(SHORT, timeout=config.reward_timeout, batch=config.prompts_per_batch * config.num_generations)
    acting, count = config.rollout in ("tools", "agent"), len(scorers[0])
    found = short_trial([*scorers[0], *scorers[1]], prompts, columns, rules=rules, acting=acting)
    return found.rewards[:count], found.rewards[count:], found.notes


def expected_cost(draft: Draft) -> Estimate:
    """What the run is expected to take on this machine."""
    sizes, tokens = {"train": len(draft.train), "held_out": len(draft.held_out)}, mean_tokens(draft.train)
    return estimate_run(draft.config, draft.base, **sizes, device=best_device(), pair_tokens=tokens)


def check_room(draft: Draft, root: Path) -> None:
    """Raise ConfigError if the disk that ``root`` is on has no room for the run."""
    needed, free = expected_cost(draft).disk_bytes or LEAST_DISK, free_disk(root)
    if needed > free:
        raise ConfigError(
            f"the run needs about {in_words(needed)} of disk for its model and checkpoints, and {str(root)!r} is "
            f"on a disk with {in_words(free)} free; make room, or give another output_dir"
        )


def write_run(draft: Draft, root: Path, past: Past | None = None) -> RunFolder:
    """Write the folder of the run: its plan and its rows; raises ConfigError where it cannot be, or has no room."""
    past = past or Past()
    if draft.candidate is None:
        check_room(draft, root)
    run = RunFolder.create(root)
    own, seed = _rewards_of(draft), draft.config.held_out_seed
    chosen = choose_earlier(past.earlier, draft.train, draft.held_out, rewards=own, seed=seed)
    plan = plan_of(draft).model_copy(
        update={
            "notes": [*draft.notes, *past.notes, *chosen.notes],
            "agent": past.agent,
            "parent": past.parent,
            "promote": past.promote,
            "earlier": chosen.rewards,
            "incumbent": past.rival.name if past.rival else past.incumbent.model if past.incumbent else None,
            "incumbent_weights": past.rival.weights if past.rival else None,
            "since": past.since,
        }
    )
    with _whole_or_gone(root):
        datasets.write_rows(run.train_rows, draft.train)
        datasets.write_rows(run.held_out_rows, draft.held_out)
        if draft.watch:
            datasets.write_rows(run.watch_rows, draft.watch)
        if draft.held_out and draft.config.method != "reward":  # which answers nothing
            datasets.write_rows(run.guard_rows("control"), control_rows())
        if draft.held_out and chosen.rows:
            datasets.write_rows(run.guard_rows("earlier"), chosen.rows)
        if past.incumbent:
            said = past.incumbent.answers
            datasets.write_rows(run.recorded, [{"prompt": place, "text": said[place]} for place in sorted(said)])
        if past.answered:
            datasets.write_rows(run.answered, past.answered)
        if draft.calls:
            write_calls(run.calls, draft.calls)
        if draft.manifest:
            shutil.copy2(draft.manifest, run.manifest)
        write_record(run.plan_file, plan)  # last: a folder with a plan is a whole one
    return run


def plan_of(draft: Draft) -> Plan:
    """What a run of ``draft`` is told, as far as the draft says it."""
    config = draft.config
    return Plan(
        base=draft.base,
        config=config.resolved(),
        rewards=_rewards_of(draft),
        judges=_judges_of(draft),
        rules=GateRules(min_gain=config.min_gain, guards=config.guards, limits=config.guard_limits),
        tools=draft.tools,
        samples=config.eval_samples,
        candidate=draft.candidate,
        device=best_device(),
        notes=draft.notes,
        libraries=library_versions(),
        created=now(),
    )


@contextlib.contextmanager
def _whole_or_gone(root: Path) -> Iterator[None]:
    """Take the folder of a run away again if it cannot be written to its end."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(root, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"the run's folder {str(root)!r} cannot be written: {error}") from error
        raise


def new_run_root(name: str | None) -> Path:
    """A folder name under ``.praisonai/rl/runs`` that nothing else has."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return HOME / "runs" / f"{slug(name)}-{stamp}-{secrets.token_hex(2)}"


def _readable_data(raw: Mapping[Any, Any]) -> Any:
    """The dataset of a configuration with faults, or None where its own entry is one of them."""
    try:
        return read_dataset(raw.get("dataset"))
    except ValueError:
        return None


def check_data(data: Any, method: str) -> list[Row]:
    """Rows of ``data``, each checked; raises DataError naming the rows that cannot be trained on."""
    if isinstance(data, list) and all(isinstance(entry, DatasetSpec) for entry in data):
        data = [entry.model_dump(exclude_none=True) for entry in data]
    rows = datasets.load_rows(data)
    source = str(data) if isinstance(data, str | Path) else "the dataset"
    datasets.check_rows(rows, method if method in datasets.REQUIRED_COLUMNS else "grpo", source)
    return rows


def _check_runnable(config: TrainConfig) -> None:
    if config.resume_from_checkpoint:
        raise ConfigError(
            f"resume_from_checkpoint={config.resume_from_checkpoint!r}: a run is continued as it was planned, by "
            "`praison-agent-rl train --resume RUN` with the run's folder; take the key out of the configuration"
        )
    starts_vllm = config.method == "grpo" and config.sampler == "vllm" and not config.vllm_server_base_url
    if starts_vllm and config.remote is None:
        find_vllm()


def _check_limits(limits: Mapping[str, float]) -> None:
    if unknown := [name for name in limits if name not in LIMITS]:
        raise ConfigError(
            f"guard_limits names {listed(unknown)}, but what can be limited is {listed(LIMITS)}"
            f"{did_you_mean(unknown[0], LIMITS)}"
        )


def _check_guards(guards: Mapping[str, float], scorers: Sequence[Reward]) -> None:
    names = [scorer.name for scorer in scorers]
    if unknown := [name for name in guards if name not in names]:
        raise ConfigError(
            f"guards names {listed(unknown)}, which no reward or judge of this run is called; they are {listed(names)}"
            f"{did_you_mean(unknown[0], names)}"
        )


def _check_judges(judges: Sequence[Reward], rewards: Sequence[Reward]) -> None:
    trained = [judge.name for judge in judges if any(judge.fn == reward.fn for reward in rewards)]
    if trained:
        raise ConfigError(
            f"judge_funcs and reward_funcs both name {listed(trained)}; what is trained on cannot judge the result, so "
            "take it out of one of them"
        )


def _named_apart(judges: Sequence[Reward], taken: Collection[str]) -> list[Reward]:
    """The judges under names that no reward has."""
    return [replace(judge, name=f"{judge.name}_judge") if judge.name in taken else judge for judge in judges]


def _rewards_of(draft: Draft) -> list[PlannedReward]:
    return plan_rewards(draft.config.reward_funcs, draft.rewards)


def _judges_of(draft: Draft) -> list[PlannedReward]:
    return plan_rewards(draft.config.judge_funcs, draft.judges)
