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


def _recorded_answers(rows: Sequence[Row], model: str, store: Path) -> dict[int, str]:
    places = {row["run"]: place for place, row in enumerate(rows) if isinstance(row.get("run"), str)}
    if not places or not store.is_dir():
        return {}
    found = {}
    for run in iter_run_dicts(store):
        place = places.get(run["id"])
        if place is None or run["error"] is not None or len(run["calls"]) != 1:
            continue
        (call,) = run["calls"]
        text = _text((call.get("reply") or {}).get("content"))
        if text is not None and str(call.get("model")).rpartition("/")[2] == model:
            found[place] = text
    return found


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
