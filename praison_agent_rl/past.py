"""What an agent's past brings to a run: prompts that earlier versions were judged on, and answers of what runs now."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from praison_agent_rl.data import Row, prompt_key, read_rows
from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import weights_beneath
from praison_agent_rl.records import FEWEST_PROMPTS, Plan, PlannedReward
from praison_agent_rl.runs import RunFolder, read_record
from praison_agent_rl.transcripts import DEFAULT_STORE, iter_run_dicts

VERSION_COLUMN = "_version"
"""Which version's held-out prompt a row of ``earlier.jsonl`` is; rewards do not see this column."""
MOST_ANSWERS = 16
"""Recorded answers to one prompt that are looked at."""
MOST_EARLIER = 200
"""Prompts of earlier versions that are asked; more would take longer than the held-out ones themselves."""


@dataclass(frozen=True)
class EarlierPrompts:
    """The held-out prompts of one earlier version, with the rewards that it was made by."""

    version: str
    rows: list[Row]
    rewards: list[PlannedReward]


@dataclass(frozen=True)
class Incumbent:
    """The model that an agent runs on, and its recorded answers by place among the held-out rows."""

    model: str
    answers: dict[int, str]


@dataclass(frozen=True)
class Rival:
    """The version that answers now, where other weights than its own are trained."""

    name: str
    weights: str


@dataclass(frozen=True)
class Past:
    """Which agent a run is to improve, and what came before."""

    agent: str | None = None
    parent: str | None = None
    """Version whose weights are trained on, if any."""
    earlier: Sequence[EarlierPrompts] = ()
    """Oldest first."""
    incumbent: Incumbent | None = None
    notes: Sequence[str] = ()
    promote: bool = True
    """Whether the new version is to become the current one if it passes."""
    rival: Rival | None = None
    since: str | None = None
    """When what answers now was decided; see ``Plan.since``."""
    answered: Sequence[Row] = ()
    """See `recorded_answers`."""


@dataclass
class Chosen:
    """Earlier versions' prompts that a run asks."""

    rows: list[Row] = field(default_factory=list)
    rewards: dict[str, list[PlannedReward]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def earlier_prompts(version: str, folder: Path) -> EarlierPrompts | None:
    """What the version in ``folder`` was judged on; None where it was judged on nothing.

    Raises:
        ConfigError: its plan cannot be read.
    """
    run = RunFolder(folder)
    if not run.held_out_rows.is_file() or not run.plan_file.is_file():
        return None
    rows = read_rows(run.held_out_rows)
    return EarlierPrompts(version, rows, read_record(run.plan_file, Plan).rewards) if rows else None


def choose_earlier(
    earlier: Sequence[EarlierPrompts],
    train: Sequence[Row],
    held_out: Sequence[Row],
    *,
    rewards: Sequence[PlannedReward],
    seed: int,
) -> Chosen:
    """The prompts of earlier versions that can still judge, each once, at most ``MOST_EARLIER`` drawn by ``seed``.

    What is trained on now can judge no more. What is held out now, by the same rewards, is asked anyway. A prompt of
    several versions with the same rewards counts for the newest of them.
    """
    if not earlier:
        return Chosen()
    trained = {_asked(row) for row in train}
    seen = {(_asked(row), _alike(rewards)) for row in held_out}
    found: list[Row] = []
    away: set[str] = set()
    for past in reversed(earlier):
        for row in past.rows:
            key = (_asked(row), _alike(past.rewards))
            if key[0] in trained:
                away.add(key[0])
            elif key not in seen:
                seen.add(key)
                found.append({**row, VERSION_COLUMN: past.version})
    drawn = sorted(random.Random(seed).sample(range(len(found)), min(MOST_EARLIER, len(found))))
    chosen = Chosen([found[place] for place in drawn])
    asked = {row[VERSION_COLUMN] for row in chosen.rows}
    chosen.rewards = {past.version: past.rewards for past in earlier if past.version in asked}
    if away:
        chosen.notes.append(f"{len(away)} held-out prompts of earlier versions are trained on now and judge no more")
    if len(found) > MOST_EARLIER:
        drawn_of = f"of {len(found)} prompts of earlier versions {MOST_EARLIER} are asked"
        chosen.notes.append(f"{drawn_of}, drawn by seed {seed}")
    return chosen


def recorded_incumbent(
    agent: Any, base: str, held_out: Sequence[Row], *, store: Path = DEFAULT_STORE
) -> tuple[Incumbent | None, list[str]]:
    """What ``agent`` runs on, unless that is known to be ``base``, with its recorded answers; and what to say of it.

    A row that was made of a recorded run names it in its column ``run``. An answer counts if it came from the model
    that the agent runs on now, by one call: what followed a tool call answers another prompt.
    """
    if _runs_on(agent, base):
        return None, []
    model = str(agent.llm)
    answers = _recorded_answers(held_out, model.rpartition("/")[2], store)
    unknown = f"the agent runs on {model!r}, which is not known to be the model that is trained"
    if len(answers) < FEWEST_PROMPTS:
        have = f"{len(answers)} of its answers to the {len(held_out)} held-out prompts are recorded"
        return None, [f"{unknown}; {have}, so the new model is compared with the untrained one only"]
    return Incumbent(model, answers), [
        f"{unknown}: its recorded answers to {len(answers)} of {len(held_out)} held-out prompts are to be beaten too"
    ]


def recorded_answers(agent: Any, base: str, train: Sequence[Row], *, store: Path = DEFAULT_STORE) -> list[Row]:
    """The different answers that ``base`` gave to the same prompt while ``agent`` ran on it, as ``{prompt, texts}``.

    Answers of another model say nothing of what the trained one can do, and equal ones may come from an agent that does
    not sample, so a prompt counts from its second answer on. Runs count as they do in `recorded_incumbent`.
    """
    if not store.is_dir() or not _runs_on(agent, base):
        return []
    model = str(agent.llm).rpartition("/")[2]
    texts: dict[str, dict[str, None]] = {prompt_key(row): {} for row in train}
    for run in iter_run_dicts(store):
        text = _only_answer(run, model)
        said = texts.get(prompt_key({"prompt": run["calls"][0]["messages"]})) if text is not None else None
        if said is not None and text is not None and len(said) < MOST_ANSWERS:
            said[text] = None
    asked = {prompt_key(row): row["prompt"] for row in train}
    return [{"prompt": asked[key], "texts": list(said)} for key, said in texts.items() if len(said) > 1]


def _recorded_answers(rows: Sequence[Row], model: str, store: Path) -> dict[int, str]:
    places = {row["run"]: place for place, row in enumerate(rows) if isinstance(row.get("run"), str)}
    if not places or not store.is_dir():
        return {}
    found = {}
    for run in iter_run_dicts(store):
        place = places.get(run["id"])
        if place is not None and (text := _only_answer(run, model)) is not None:
            found[place] = text
    return found


def _only_answer(run: Mapping[str, Any], model: str) -> str | None:
    """The answer of a run that ``model`` gave by one call."""
    if run["error"] is not None or len(run["calls"]) != 1:
        return None
    (call,) = run["calls"]
    return (
        _text((call.get("reply") or {}).get("content")) if str(call.get("model")).rpartition("/")[2] == model else None
    )


def _runs_on(agent: Any, base: str) -> bool:
    try:
        return weights_beneath(agent) == base
    except ModelError:
        return False


def _text(content: Any) -> str | None:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else None


def _asked(row: Row) -> str:
    """What two rows share in which the same is asked; an agent's instructions may have changed between them."""
    prompt = row["prompt"]
    if isinstance(prompt, list):
        prompt = [message for message in prompt if message.get("role") not in ("system", "developer")]
    return prompt_key({"prompt": prompt})


def _alike(rewards: Sequence[PlannedReward]) -> tuple[tuple[str, str, float], ...]:
    """What tells the rewards of two versions apart."""
    found = ((r.spec or r.name, json.dumps([r.parameters, r.columns], sort_keys=True), r.weight) for r in rewards)
    return tuple(sorted(found))
