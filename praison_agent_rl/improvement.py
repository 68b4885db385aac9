"""The story of ``improve``: check, measure, train, merge, measure again, and swap in what is better."""

import glob
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from praison_agent_rl import planning
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.dataset_building import BuildOptions, build_dataset
from praison_agent_rl.errors import AgentError, DataError, PraisonRLError, ServerFailed, TrainingFailed
from praison_agent_rl.models import require_training_stack, weights_beneath
from praison_agent_rl.planning import Draft, Problems
from praison_agent_rl.progress import RunProgress
from praison_agent_rl.records import FEWEST_PROMPTS, Comparison, MergeProof, Version
from praison_agent_rl.registry import publish_version
from praison_agent_rl.report import write_report
from praison_agent_rl.rewards import require, resolve_all
from praison_agent_rl.runs import RunFolder, read_record
from praison_agent_rl.sent import sent_requests
from praison_agent_rl.serving import Server, start_server
from praison_agent_rl.stages import ALL_STAGES, planned_rewards, run_stages
from praison_agent_rl.swap import check_swappable, server_of, swap_model
from praison_agent_rl.training.launch import launch_stages
from praison_agent_rl.transcripts import DEFAULT_STORE

OnEvent = Callable[[dict[str, Any]], None]


@dataclass
class Improvement:
    """What ``improve`` came to; prints as one line."""

    comparison: Comparison
    run: Path
    """Folder of the run: its data, log, metrics and report."""
    report: Path
    """HTML page of the run."""
    version: str | None = None
    """Name of the new version, or None if the new model was not better."""
    model: Path | None = None
    """Folder of the new version's merged weights."""
    server: Server | None = field(default=None, repr=False)
    """Server that the agent is answered from now."""
    agent: Any = field(default=None, repr=False)
    """The agent that was improved."""
    undo: Callable[[], None] | None = field(default=None, repr=False)
    """What points the agent back at its old model; None once it has."""

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
        """Let the old model answer the agent again; a second call does nothing.

        The new model's server ends when the turns that are under way have had their answers: once it was idle for
        five seconds.

        Raises:
            AgentError: a later improvement is in place, which has to be rolled back first.
        """
        if self.undo is None or self.server is None:
            return
        if server_of(self.agent) is not self.server:
            raise AgentError(
                f"{self.version} cannot be rolled back: a later version was swapped in after it; roll that back first"
            )
        self.undo()
        self.undo = None
        self.server.retire()

    def __str__(self) -> str:
        total = self.comparison.total
        scores = f"{total.base:.2f} -> {total.new:.2f} on {self.comparison.prompts} held-out prompts"
        interval = f"95 % CI {total.low:+.2f}..{total.high:+.2f}"
        if self.version is None:
            return f"not better: {scores} ({interval}), the agent keeps its model"
        fate = "swapped in" if self.swapped_in else "not swapped in"
        return f"{self.version}: {scores} ({interval}), {fate}"


def improve(
    agent: Any,
    *,
    method: str = "grpo",
    data: Any = None,
    reward_funcs: Any = None,
    base_model: str | None = None,
    config: Any = None,
    swap: bool = True,
    quiet: bool = False,
    **settings: Any,
) -> Improvement:
    """Train the open-weights model beneath ``agent`` on ``data`` by ``reward_funcs`` and swap it in if it is better.

    Without ``data`` the prompts are those of the agent's recorded runs (``agent.record()``). ``data`` is a file, a
    dataset or a list of prompts; a prompt that is text is asked as the agent asks it, with its system prompt and tools,
    and one that is a list of messages is taken as it is. ``config`` is a YAML file or a mapping, and any key of it can
    be given as a keyword (``max_steps=30``). Training runs in a child process. Better means that the 95 % interval of
    the mean difference on held-out prompts lies above zero; otherwise the agent stays as it was.

    Raises:
        PraisonRLError: something given is wrong (before any model is loaded), or the run failed; either way the agent
            answers as before.
    """
    with RunProgress() as progress:
        on_event: OnEvent = (lambda event: None) if quiet else progress
        given = {"method": method, "reward_funcs": reward_funcs, **settings}
        draft = draft_improvement(agent, data, base_model, config, given, on_event)
        for note in draft.notes:
            on_event({"event": "note", "text": note})
        root = Path(draft.config.output_dir or planning.new_run_root(agent.name)).resolve()
        run = planning.write_run(draft, root)
        carry_out(draft, run, on_event)
        result = finish(run)
        if result.comparison.better:
            _publish(result, run, agent, swap=swap)
        return result


def draft_improvement(
    agent: Any, data: Any, base_model: str | None, config: Any, settings: dict[str, Any], on_event: OnEvent
) -> Draft:
    """Check all that ``improve`` was given and ask the agent how it asks; no model is loaded."""
    problems = Problems()
    loaded = problems.attempt(lambda: TrainConfig.load(config, need_model=False, need_data=False, **settings))
    specs = loaded.reward_funcs if loaded is not None else settings.get("reward_funcs")
    fns = problems.attempt(lambda: resolve_all(specs))
    if fns is not None and loaded is not None:
        problems.attempt(lambda: require(loaded.method, fns))
    problems.attempt(lambda: check_swappable(agent))
    problems.raise_all()  # the agent itself is asked only if it is one
    assert loaded is not None
    problems.attempt(require_training_stack)
    base = problems.attempt(lambda: weights_beneath(agent, base_model or loaded.model_name))
    given = data if data is not None else loaded.dataset
    rows = problems.attempt(lambda: _rows_of(agent, given, loaded, on_event))
    problems.raise_all()
    assert base is not None and rows is not None
    rows, tools = as_the_agent_asks(agent, rows, on_event)
    draft = planning.finish_draft(loaded, base, rows, problems=problems, tools=tools)
    if len(draft.held_out) < FEWEST_PROMPTS:
        raise DataError(
            f"{len(draft.held_out)} prompts are held out, and with fewer than {FEWEST_PROMPTS} nothing can be shown to "
            "be better; raise held_out or give more prompts"
        )
    return draft


def as_the_agent_asks(agent: Any, rows: list[Row], on_event: OnEvent) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows with each text prompt replaced by the messages that the agent sends for it, and the tools it sends.

    A recorded row says which tools were sent with it.
    """
    texts = [row["prompt"] for row in rows if isinstance(row["prompt"], str)]
    on_event({"event": "stage", "stage": "ask"})
    progress = partial(_report_asked, on_event, len(texts))
    requests = iter(sent_requests(agent, texts, progress=progress)) if texts else iter(())
    tools: list[dict[str, Any]] = []
    asked = []
    for row in rows:
        if isinstance(row["prompt"], str):
            request = next(requests)
            tools = tools or request.tools
            row = {**row, "prompt": request.messages}
        tools = tools or row.get("tools") or []
        asked.append({name: value for name, value in row.items() if name != "tools"})
    return asked, tools


def _report_asked(on_event: OnEvent, of: int, done: int) -> None:
    on_event({"event": "answered", "side": "agent", "done": done, "of": of})


def carry_out(draft: Draft, run: RunFolder, on_event: OnEvent, *, resume: bool = False) -> None:
    """Do the run's stages: in a child process, or here if a reward lives only in this process."""
    stages = [stage for stage in ALL_STAGES if draft.held_out or not stage.startswith("measure")]
    if draft.nameable:
        launch_stages(run, stages, on_event, resume=resume)
        return
    text = (
        "a reward is a lambda, a notebook function or a local one, which no other process can find: "
        "the run happens in this process and takes its memory"
    )
    on_event({"event": "note", "text": text})
    run.listener = on_event
    try:
        run_stages(run, stages, draft.rewards, resume=resume)
    except PraisonRLError:
        raise
    except Exception as error:  # the boundary that the child process has in stages.main
        raise TrainingFailed(f"the run in {run.root} failed: {type(error).__name__}: {error}") from error


def resume_run(root: Path, *, quiet: bool = False) -> Improvement | RunFolder:
    """Go on with a run that was interrupted, from its newest whole checkpoint; finished stages are not done again."""
    run = RunFolder.open(root)
    measured = bool(run.held_out_rows.stat().st_size)
    planned_rewards(run)  # said now, and not by the child
    with RunProgress() as progress:
        stages = [stage for stage in ALL_STAGES if measured or not stage.startswith("measure")]
        launch_stages(run, stages, (lambda event: None) if quiet else progress, resume=True)
    return finish(run) if measured else run


def finish(run: RunFolder) -> Improvement:
    """The outcome of a run whose stages are done, with its report written."""
    comparison = read_record(run.comparison_file, Comparison)
    write_report(run)
    return Improvement(comparison=comparison, run=run.root, report=run.report)


def _publish(result: Improvement, run: RunFolder, agent: Any, *, swap: bool) -> None:
    """Make a version of a better model and, if wanted, serve it and point the agent at it."""
    name = planning.slug(agent.name)
    before = server_of(agent)
    version = publish_version(
        planning.HOME,
        name,
        run,
        comparison=result.comparison,
        merge=read_record(run.merge_file, MergeProof),
        parent=before.model.rpartition("-")[2] if before else None,
    )
    result.version, result.model = version.name, Path(version.folder) / "model"
    if swap:
        result.server = server = _serve(version, run.plan.device)
        result.agent = agent
        result.undo = swap_model(agent, server.model, base_url=server.address, api_key=server.api_key, server=server)


def _serve(version: Version, device: str) -> Server:
    folder = Path(version.folder) / "model"
    try:
        return start_server(folder, name=f"rl-{version.agent}-{version.name}", device=device)
    except ServerFailed as failure:
        raise ServerFailed(
            f"{version.name} is better and was kept in {str(folder)!r}, but could not be served, so the agent keeps "
            f"its model: {failure}"
        ) from failure


def _rows_of(agent: Any, data: Any, config: TrainConfig, on_event: OnEvent) -> list[Row]:
    """Checked rows of ``data``, or of what was recorded of the agent."""
    if data is not None:
        return planning.check_data(data, config.method)
    if not agent.name:
        raise DataError(
            "improve got no data=, and the agent has no name by which its recorded runs could be told from those of "
            "others; name the agent, or pass data="
        )
    if not DEFAULT_STORE.is_dir():
        raise DataError(
            f"improve got no data=, and nothing is recorded in {str(DEFAULT_STORE)!r}; record the agent with "
            "agent.record(), or pass data=: a file, a dataset or a list of prompts"
        )
    built = build_dataset(out=None, options=BuildOptions(agent=glob.escape(agent.name)))
    on_event({"event": "note", "text": f"recorded: {built}"})
    found, needed = built.manifest.train + built.manifest.held_out, config.prompts_per_batch + FEWEST_PROMPTS
    if found < needed or built.manifest.held_out < FEWEST_PROMPTS:
        raise DataError(
            f"{found} prompts of agent {agent.name!r} are recorded ({built.manifest.held_out} of them held out), which "
            f"is too few to train and to judge: at least {max(needed, 5 * FEWEST_PROMPTS)} are needed. "
            "Go on recording, or pass data="
        )
    return planning.check_data(built.rows, config.method)
