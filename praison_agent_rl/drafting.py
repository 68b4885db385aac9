"""Draft an improvement of an agent: check all that was given, and ask the agent how it asks; no model is loaded."""

import glob
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from praison_agent_rl import planning
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, prompt_key
from praison_agent_rl.dataset_building import BuildOptions, build_dataset
from praison_agent_rl.errors import ConfigError, DataError
from praison_agent_rl.hosting import recorded_runs
from praison_agent_rl.models import find_weights, require_training_stack, weights_beneath
from praison_agent_rl.pairs.texts import explicit
from praison_agent_rl.past import Past, Rival, earlier_prompts, recorded_answers, recorded_incumbent
from praison_agent_rl.planning import Draft, Problems
from praison_agent_rl.records import FEWEST_PROMPTS, Pointer, Version
from praison_agent_rl.registry import current, list_versions, model_of, read_version
from praison_agent_rl.rewards import require, resolve_all
from praison_agent_rl.rollout_choice import choose_rollout
from praison_agent_rl.runs import HOME
from praison_agent_rl.sent import sent_requests
from praison_agent_rl.swap import check_swappable
from praison_agent_rl.transcripts import DEFAULT_STORE
from praison_agent_rl.warm_examples import calls_to_keep, notes_on

OnEvent = Callable[[dict[str, Any]], None]


def agent_name(agent: Any) -> str:
    """The name under which the agent's versions are kept; one without a name is known by what it was told to be."""
    if name := getattr(agent, "name", None):
        return str(name)
    told = [str(getattr(agent, part, None)) for part in ("role", "goal", "backstory", "instructions")]
    return f"agent-{hashlib.sha256(chr(0).join(told).encode(errors='surrogatepass')).hexdigest()[:8]}"


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
        problems.attempt(lambda: resolve_all(loaded.judge_funcs))
    problems.attempt(lambda: check_swappable(agent))
    if loaded is None:  # what else was given is looked at all the same
        problems.attempt(lambda: planning.check_data(data, "grpo") if data is not None else None)
        problems.attempt(lambda: find_weights(base_model) if base_model else None)
    problems.raise_all()  # the agent itself is asked only if it is one
    assert loaded is not None
    problems.attempt(require_training_stack)
    pointer = current(HOME, agent_name(agent))
    base = problems.attempt(lambda: weights_to_train(agent, base_model or loaded.model_name, pointer))
    given = data if data is not None else loaded.dataset
    found = problems.attempt(lambda: _rows_of(agent, given, loaded, on_event))
    problems.raise_all()
    assert base is not None and found is not None
    rows = found[0] if loaded.method == "grpo" else [explicit(row) for row in found[0]]
    choice = problems.attempt(lambda: choose_rollout(loaded, base, agent))
    hosting = choice.hosting if choice else None
    runs = hosting.runs if hosting else recorded_runs(agent)
    calls = calls_to_keep(agent, runs, loaded, base, problems=problems)
    asked = choice is None or choice.mode == "agent"  # with a problem nothing is asked any more
    rows, tools = (rows, []) if asked else as_the_agent_asks(agent, rows, on_event)
    draft = planning.finish_draft(loaded, base, rows, problems=problems, tools=tools, choice=choice)
    draft.manifest, draft.calls = found[1], calls
    draft.notes += notes_on(runs, loaded)
    draft.since = pointer.changed if pointer else ""
    distinct = len({prompt_key(row) for row in draft.held_out})
    if distinct < FEWEST_PROMPTS:
        raise DataError(
            f"{distinct} prompts are held out, and with fewer than {FEWEST_PROMPTS} nothing can be shown to "
            "be better; raise held_out or give more prompts"
        )
    return draft


def weights_to_train(agent: Any, given: str | None, pointer: Pointer | None) -> str:
    """What the agent's next version is trained on: its current version, unless other weights than its own are given.

    Raises:
        ModelError: the weights beneath the agent cannot be known.
        VersionError: those of its current version are not there any more.
    """
    if pointer is None or pointer.version is None:
        return weights_beneath(agent, given)
    version = read_version(HOME, agent_name(agent), pointer.version)
    if given is not None and find_weights(given) not in (str(Path(version.folder) / "model"), _root_of(version)):
        return weights_beneath(agent, given)
    return str(model_of(version))


def _root_of(version: Version) -> str:
    """The weights that a version's first ancestor was trained on."""
    ancestors = {known.name: known for known in list_versions(HOME, version.agent)}
    while version.parent in ancestors:
        version = ancestors.pop(str(version.parent))
    return version.base


def past_of(agent: Any, draft: Draft, *, promote: bool) -> Past:
    """What came before this improvement of ``agent``: its versions, and what answers it now."""
    name, notes = agent_name(agent), []
    if draft.config.method == "reward":  # it takes nobody's place
        return Past(name)
    pointer = current(HOME, name)
    parent, earlier, rival, incumbent = None, [], None, None
    for version in list_versions(HOME, name):
        model = str(Path(version.folder) / "model")
        if draft.base == model:
            parent = version.name
        elif pointer is not None and pointer.version == version.name:
            rival = Rival(version.name, str(model_of(version)))
        try:
            judged_on = earlier_prompts(version.name, Path(version.folder))
        except (ConfigError, DataError) as error:
            notes.append(f"{version.name} judges no more: {error}")
            continue
        earlier += [judged_on] if judged_on else []
    if parent is not None:
        notes.append(f"training goes on from {parent}")
    elif rival is not None:
        notes.append(f"{rival.name} answers now and is not what is trained: the new model has to beat it too")
    elif draft.rewards:  # else nothing scores a recorded answer
        incumbent, said = recorded_incumbent(agent, draft.base, draft.held_out)
        notes += said
    answered = recorded_answers(agent, draft.base, draft.train) if draft.manifest and draft.config.curriculum else []
    rival = rival if parent is None else None
    return Past(name, parent, earlier, incumbent, notes, promote, rival, draft.since, answered)


def as_the_agent_asks(agent: Any, rows: list[Row], on_event: OnEvent) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows with each text prompt replaced by the messages that the agent sends for it, and the tools it sends.

    A recorded row says which tools were sent with it.
    """
    texts = [row["prompt"] for row in rows if isinstance(row.get("prompt"), str)]
    on_event({"event": "stage", "stage": "ask"})
    progress = partial(_report_asked, on_event, len(texts))
    requests = iter(sent_requests(agent, texts, progress=progress)) if texts else iter(())
    tools: list[dict[str, Any]] = []
    asked = []
    for row in rows:
        if isinstance(row.get("prompt"), str):
            request = next(requests)
            tools = tools or request.tools
            row = {**row, "prompt": request.messages}
        tools = tools or row.get("tools") or []
        asked.append({name: value for name, value in row.items() if name != "tools"})
    return asked, tools


def _report_asked(on_event: OnEvent, of: int, done: int) -> None:
    on_event({"event": "answered", "side": "agent", "done": done, "of": of})


def _rows_of(agent: Any, data: Any, config: TrainConfig, on_event: OnEvent) -> tuple[list[Row], Path | None]:
    """Checked rows of ``data``, or of what was recorded of the agent, with the manifest of what was built of that."""
    if data is not None:
        return planning.check_data(data, config.method), None
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
    needed = (config.prompts_at_once if config.method == "grpo" else 1) + FEWEST_PROMPTS
    wanted = f"at least {max(needed, 5 * FEWEST_PROMPTS)} are needed. Go on recording, or pass data="
    kind: Literal["prompts", "pairs"] = "prompts" if config.method == "grpo" else "pairs"
    try:
        built = build_dataset(out=None, options=BuildOptions(agent=glob.escape(agent.name), kind=kind))
    except DataError as error:
        raise DataError(
            f"no {kind} of agent {agent.name!r} are recorded that can be used; {wanted}\n{error}"
        ) from error
    on_event({"event": "note", "text": f"recorded: {built}"})
    found, held_out = built.manifest.train + built.manifest.held_out, built.manifest.held_out
    if found < needed or held_out < FEWEST_PROMPTS:
        raise DataError(
            f"{found} {kind} of agent {agent.name!r} are recorded ({held_out} of them held out), which is too few to "
            f"train and to judge: {wanted}{_one_conversation(built.manifest.largest_group, found)}"
        )
    return planning.check_data(built.rows, config.method), built.rows.with_name("manifest.json")


def _one_conversation(largest: int, found: int) -> str:
    """What to do where turns, which must stay on one side, leave too little to divide."""
    if largest < max(2, found / 2):
        return ""
    return (
        f". {largest} of them are turns of one conversation, which stay on one side of the split: what is needed are "
        "more conversations (agent.clear_history() begins a new one)"
    )
