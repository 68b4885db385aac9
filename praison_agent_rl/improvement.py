"""The story of ``improve``: check, measure, train, merge, measure again, and swap in what is better."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from praison_agent_rl import planning
from praison_agent_rl.attachment import attachment_of
from praison_agent_rl.capture import install_taps
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.drafting import OnEvent, agent_name, draft_improvement, past_of
from praison_agent_rl.errors import (
    AgentError,
    ConfigError,
    PraisonRLError,
    ServerFailed,
    TrainingFailed,
    VersionError,
)
from praison_agent_rl.exports.from_config import publish_as_configured
from praison_agent_rl.forcing import mark_forced
from praison_agent_rl.hosting import Hosting, hosting_of, in_environment, named_agent
from praison_agent_rl.planning import Draft
from praison_agent_rl.progress import RunProgress
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.records import Comparison, Verdict, Version
from praison_agent_rl.registry import current, improvement_lock
from praison_agent_rl.registry import promote as promote_version
from praison_agent_rl.registry import rollback as roll_back_pointer
from praison_agent_rl.remote.running import remote_of, run_there
from praison_agent_rl.report import write_report
from praison_agent_rl.runs import HOME, RunFolder, read_record, write_record
from praison_agent_rl.server_pool import serve_version
from praison_agent_rl.serving import Served, ServerAddress
from praison_agent_rl.stages import ALL_STAGES, planned_rewards, run_stages, stages_of
from praison_agent_rl.swap import server_of, swap_model
from praison_agent_rl.trained_rewards import TrainedReward, finish_reward
from praison_agent_rl.training.launch import launch_stages


@dataclass
class Improvement:
    """What ``improve`` came to; prints as one line."""

    comparison: Comparison
    verdict: Verdict
    """Of the gate: whether the new model may answer, and why."""
    run: Path
    """Folder of the run: its data, log, metrics and report."""
    report: Path
    """HTML page of the run."""
    version: str | None = None
    """Name of the new version, or None if the gate did not let the new model through."""
    model: Path | None = None
    """Folder of the new version's merged weights."""
    server: Served | None = field(default=None, repr=False)
    """Server that the agent is answered from now."""
    agent: Any = field(default=None, repr=False)
    """The agent that was improved."""
    undo: Callable[[], None] | None = field(default=None, repr=False)
    """What points the agent back at its old model; None once it has."""
    promoted: bool = False
    """Whether the new version became the agent's current one."""
    kept_back: str | None = None
    """Why a version that was to be promoted was not: something else was promoted while it was trained."""

    @property
    def base_score(self) -> float:
        """Mean reward of the old model on the held-out prompts."""
        return self.comparison.total.base

    @property
    def new_score(self) -> float:
        """Mean reward of the new model on the same prompts."""
        return self.comparison.total.new

    @property
    def swapped_in(self) -> bool:
        """Whether the agent is answered by the new model now."""
        return self.undo is not None

    def rollback(self) -> None:
        """Let the old model answer the agent again, here and wherever the agent is attached; once is enough.

        Turns that are under way end on the new model, whose server ends after them.

        Raises:
            AgentError: a later version is in place, which has to be rolled back first.
        """
        if self.undo is None or self.server is None:
            return
        name, attachment = agent_name(self.agent), attachment_of(self.agent)
        pointer, served = current(HOME, name), server_of(self.agent)
        later = pointer is not None and pointer.version != self.version and self.version in pointer.previous
        if served is not self.server and (later or (served is not None and not self.promoted)):
            raise AgentError(
                f"{self.version} cannot be rolled back: a later version was swapped in after it; roll that back first"
            )
        if pointer is not None and pointer.version == self.version:
            roll_back_pointer(HOME, name)
        if served is self.server:
            self.undo()
        if attachment is not None:
            attachment.refresh()
        self.undo = self.server = None

    def __str__(self) -> str:
        total, verdict = self.comparison.total, self.verdict
        scores = f"{total.base:.2f} -> {total.new:.2f} on {self.comparison.prompts} held-out prompts"
        interval = f"95 % CI {total.low:+.2f}..{total.high:+.2f}"
        if self.version is None:
            if not self.comparison.prompts:
                return f"{verdict.text}, the agent keeps its model"
            outcome = verdict.status if verdict.status in ("not better", "worse") else verdict.text
            return f"{outcome}: {scores} ({interval}), the agent keeps its model"
        fate = "swapped in" if self.swapped_in else "promoted" if self.promoted else "kept as a candidate"
        fate += f" ({self.kept_back})" if self.kept_back else ""
        against = "" if verdict.passed else f" BY FORCE, against the verdict {verdict.text!r}"
        signs = ", ".join(dict.fromkeys(finding.name for finding in verdict.findings))
        doubt = f"; signs of cheating: {signs} (see the report)" if signs else ""
        return f"{self.version}: {scores} ({interval}), {fate}{against}{doubt}"


def improve(
    agent: Any,
    *,
    method: str = "grpo",
    data: Any = None,
    reward_funcs: Any = None,
    base_model: str | None = None,
    config: Any = None,
    swap: bool = True,
    promote: bool | None = None,
    force: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Improvement | TrainedReward:
    """Train the open-weights model beneath ``agent`` on ``data`` by ``reward_funcs`` and swap it in if it is better.

    Without ``data`` the prompts are those of the agent's recorded runs (``agent.record()``). ``data`` is a file, a
    dataset or a list of prompts; a prompt that is text is asked as the agent asks it, with its system prompt and tools,
    and one that is a list of messages is taken as it is. ``config`` is a YAML file or a mapping, and any key of it can
    be given as a keyword (``max_steps=30``). An agent that has a current version is trained further from that version.
    Training runs in a child process.

    Better means that the 95 % interval of the mean difference on held-out prompts lies above ``min_gain`` (0) and that
    no guard is broken; otherwise the agent stays as it was. What is better becomes the agent's current version
    (``promote``; by default as ``swap``) and answers this agent (``swap``). ``force=True`` does so against the verdict,
    which is recorded for ever.

    ``method="cpo"`` learns from preference pairs (prompt, chosen, rejected) instead, by default those that the
    recordings hold; without ``reward_funcs`` better means that held-out chosen answers are the likelier ones.
    ``method="reward"`` trains a reward model on such pairs and leaves the agent as it is.

    Returns:
        An `Improvement`; of ``method="reward"`` a `TrainedReward`.

    Raises:
        PraisonRLError: something given is wrong (before any model is loaded), or the run failed; either way the agent
            answers as before.
    """
    with RunProgress() as progress:
        on_event: OnEvent = (lambda event: None) if quiet else progress
        given = {"method": method, "reward_funcs": reward_funcs, **settings}
        draft = draft_improvement(agent, data, base_model, config, given, on_event)
        with improvement_lock(HOME, agent_name(agent)):
            past = past_of(agent, draft, promote=swap if promote is None else promote)
            for note in [*draft.notes, *past.notes]:
                on_event({"event": "note", "text": note})
            root = Path(draft.config.output_dir or planning.new_run_root(agent.name)).resolve()
            run = planning.write_run(draft, root, past)
            carry_out(draft, run, on_event)
            result = outcome_of(run)
            if isinstance(result, Improvement) and (result.verdict.passed or force):
                settle(result, run, force=force, agent=agent if swap else None)
            publish_as_configured(run, draft.config, lambda text: on_event({"event": "note", "text": text}))
            return result


def carry_out(
    draft: Draft, run: RunFolder, on_event: OnEvent, *, stages: Sequence[str] = ALL_STAGES, resume: bool = False
) -> None:
    """Do the run's stages: in a child process, or here if a reward lives only in this process."""
    stages = [stage for stage in stages_of(run) if stage in stages]
    if draft.hosting is None:
        _carry_out(draft, run, on_event, stages, resume)
        return
    with draft.hosting.following(on_event) as following:
        _carry_out(draft, run, following, stages, resume)


def _carry_out(draft: Draft, run: RunFolder, on_event: OnEvent, stages: Sequence[str], resume: bool) -> None:
    env = draft.hosting.environment if draft.hosting else {}
    if draft.config.remote is not None:
        run_there(run, draft.config.remote, stages, on_event, resume=resume)
        return
    if draft.nameable:
        launch_stages(run, stages, on_event, resume=resume, env=env)
        return
    text = (
        "a reward is a lambda, a notebook function or a local one, which no other process can find: "
        "the run happens in this process and takes its memory"
    )
    on_event({"event": "note", "text": text})
    run.listener = on_event
    try:
        with in_environment(env):
            run_stages(run, stages, draft.rewards, judges=draft.judges, resume=resume)
    except PraisonRLError:
        raise
    except Exception as error:  # the boundary that the child process has in stages.main
        raise TrainingFailed(f"the run in {run.root} failed: {type(error).__name__}: {error}") from error


def resume_run(
    root: Path, *, quiet: bool = False, rollout_agent: str | None = None
) -> Improvement | TrainedReward | RunFolder:
    """Go on with a run that was interrupted, from its newest whole checkpoint; finished stages are not done again.

    A run that was to improve an agent ends as it would have ended, but for the agent itself, which is not here; where
    it makes the rollouts, ``rollout_agent`` (``module:name``) says where it is, unless the run itself does.
    """
    run = RunFolder.open(root)
    measured, agent = bool(run.held_out_rows.stat().st_size), run.plan.agent
    planned_rewards(run)  # said now, and not by the child
    hosting = _hosting_of(run, rollout_agent)
    with improvement_lock(HOME, agent) if agent else contextlib.nullcontext(), RunProgress() as progress:
        on_event: OnEvent = (lambda event: None) if quiet else progress
        if not (run.card.exists() or (run.comparison_file.exists() and run.verdict_file.exists())):
            with hosting.following(on_event) if hosting else contextlib.nullcontext(on_event) as following:
                _go_on(run, following, hosting)
        if not measured:
            return run
        result = outcome_of(run)
        if isinstance(result, Improvement) and agent and result.verdict.passed:
            settle(result, run)
        return result


def _go_on(run: RunFolder, on_event: OnEvent, hosting: Hosting | None) -> None:
    """Do the stages that are left, where the run happens."""
    if (remote := remote_of(run)) is not None:
        run_there(run, remote, stages_of(run), on_event, resume=True)
        return
    env = hosting.environment if hosting else {}
    launch_stages(run, stages_of(run), on_event, resume=True, env=env)


def _hosting_of(run: RunFolder, rollout_agent: str | None) -> Hosting | None:
    """The agent that makes the rollouts of a run, found again; None where none does."""
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    if config.rollout != "agent":
        return None
    found = named_agent(config.model_copy(update={"rollout_agent": rollout_agent or config.rollout_agent}))
    if run.plan.agent not in (None, agent_name(found)):
        raise ConfigError(f"the run is of the agent {run.plan.agent!r}, and rollout_agent names {agent_name(found)!r}")
    return hosting_of(found, config)


def outcome_of(run: RunFolder) -> Improvement | TrainedReward:
    """The outcome of a run whose stages are done, with its report written; a reward model is published."""
    return finish_reward(run) if run.plan.config.get("method") == "reward" else finish(run)


def finish(run: RunFolder) -> Improvement:
    """The outcome of a run whose stages are done, with its report written."""
    comparison, verdict = read_record(run.comparison_file, Comparison), read_record(run.verdict_file, Verdict)
    write_report(run)
    return Improvement(comparison=comparison, verdict=verdict, run=run.root, report=run.report)


def settle(result: Improvement, run: RunFolder, *, force: bool = False, agent: Any = None) -> None:
    """Make a version of what a run has trained, let it be the current one if so planned, and let it answer ``agent``.

    The server comes up first: what cannot be served becomes no current version.
    """
    plan = run.plan
    name = plan.agent or "agent"
    version = publish_version(HOME, name, run)
    result.version, result.model = version.name, Path(version.folder) / "model"
    address = _serve(version, plan.device) if agent is not None else None
    if plan.promote:
        try:
            promote_version(HOME, name, version.name, by="improve", force=force, since=plan.since)
        except VersionError as error:
            result.kept_back = str(error)
            return
        result.promoted = True
    if not version.passed and (plan.promote or address is not None):
        _say_forced(result, run, version)
    if address is not None:
        install_taps()  # turns under way end on the model that they began with
        server = address.server
        result.server, result.agent = server, agent
        result.undo = swap_model(agent, server.model, base_url=address, api_key=server.api_key, server=server)


def _say_forced(result: Improvement, run: RunFolder, version: Version) -> None:
    """Write it into the version and into the run, whose report is the one that is handed back."""
    mark_forced(version)
    result.verdict = result.verdict.model_copy(update={"forced": True})
    write_record(run.verdict_file, result.verdict)
    write_report(run)


def _serve(version: Version, device: str) -> ServerAddress:
    try:
        return serve_version(version, device=device)
    except ServerFailed as failure:
        raise ServerFailed(
            f"{version.name} passed and was kept in {version.folder!r}, but could not be served, so the agent keeps "
            f"its model: {failure}"
        ) from failure
