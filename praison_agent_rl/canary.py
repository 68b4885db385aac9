"""Try a new version on a share of an agent's runs: which one, and what the recorded runs say of it.

Which of an agent's turns go to the candidate is decided in `capture.routes`; here is what is there before and after.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ConfigError, DataError, RewardError
from praison_agent_rl.intervals import unpaired_interval
from praison_agent_rl.records import FEWEST_PROMPTS, Interval, Plan, Pointer, Record, Run, Version
from praison_agent_rl.registry import agent_folder, list_versions, read_version
from praison_agent_rl.rewards import Reward, prepare, total
from praison_agent_rl.runs import HOME, read_record
from praison_agent_rl.transcripts import read_runs

BUILT_WITH = "base"
"""Name, in a comparison, of the model that the agent was built with."""


class Arm(Record):
    """The recorded runs that one version answered."""

    version: str
    runs: int
    clusters: int
    """Sessions, and runs that are of none."""
    errors: int
    """Runs that failed; they have no scores and are no zeros."""
    rated: int
    """Runs with a feedback score."""


class RecordedComparison(Record):
    """Two versions by the runs that each of them answered; prints as a few lines."""

    agent: str
    a: Arm
    b: Arm
    rewards: dict[str, Interval]
    """Each reward of the runs' answers, b against a."""
    total: Interval | None = None
    """The weighted sum of the rewards."""
    feedback: Interval | None = None
    """The latest score that was given to each run."""
    notes: tuple[str, ...] = ()

    @property
    def better(self) -> bool:
        """Whether b is better by what there is: total or feedback lies above zero, neither below, with enough runs."""
        found = [interval for interval in (self.total, self.feedback) if interval is not None]
        enough = min(self.a.clusters, self.b.clusters) >= FEWEST_PROMPTS
        return enough and any(i.low > 0 for i in found) and not any(i.high < 0 for i in found)

    def __str__(self) -> str:
        lines = [f"{self.agent}: {self.b.version} against {self.a.version}, by recorded runs"]
        for arm in (self.a, self.b):
            failed = f", {arm.errors} of them failed" if arm.errors else ""
            lines.append(f"{arm.version}: {arm.runs} runs in {arm.clusters} sessions{failed}, {arm.rated} rated")
        lines += [_line(f"reward {name}", interval) for name, interval in self.rewards.items()]
        lines += [_line("total reward", self.total)] if self.total and len(self.rewards) > 1 else []
        lines += [_line("feedback", self.feedback)] if self.feedback else []
        verdict = f"{self.b.version} is better" if self.better else f"{self.b.version} is not shown to be better"
        return "\n".join([*lines, *self.notes, verdict])


def _line(what: str, i: Interval) -> str:
    return f"{what}: {i.base:.3g} -> {i.new:.3g} (difference {i.difference:+.3g}, 95 % CI {i.low:+.3g}..{i.high:+.3g})"


def compare_recorded(
    store: str | Path,
    agent: str,
    a: str,
    b: str,
    *,
    reward_funcs: Any = None,
    home: str | Path = HOME,
    seed: int = 0,
) -> RecordedComparison:
    """Compare versions ``a`` and ``b`` of ``agent`` by the recorded runs that each answered, as of a canary.

    By ``reward_funcs``, applied to each run's prompt and output (by default those that ``b`` was trained by, as far as
    they need no column of a dataset), and by the scores of feedback. ``"base"`` is the model that the agent was built
    with. Runs of one session count as belonging together. The two share no prompts, so the intervals are those of two
    samples.

    Raises:
        DataError: there is no store, or one of the two has no runs in it.
        RewardError: a reward cannot be applied to recorded runs.
    """
    if a == b:
        raise ConfigError(f"{a!r} is to be compared with itself; name two versions")
    found = _runs_by_version(store, agent, (a, b))
    sound = {version: [run for run in runs if _answered(run)] for version, runs in found.items()}
    rewards, notes = _rewards(reward_funcs, Path(home), agent, b, [*sound[a], *sound[b]])
    scores = {version: _scores(rewards, runs) for version, runs in sound.items()}
    ratings = {version: [_rating(run) for run in runs] for version, runs in found.items()}
    totals = {v: total(list(scores[v].values()), [reward.weight for reward in rewards]) for v in (a, b)}
    intervals = {r.name: _interval(sound, {v: scores[v][r.name] for v in (a, b)}, seed) for r in rewards}
    return RecordedComparison(
        agent=agent,
        a=_arm(a, found[a]),
        b=_arm(b, found[b]),
        rewards={name: interval for name, interval in intervals.items() if interval is not None},
        total=_interval(sound, totals, seed) if rewards else None,
        feedback=_interval(found, ratings, seed),
        notes=tuple(notes),
    )


def _runs_by_version(store: str | Path, agent: str, versions: tuple[str, str]) -> dict[str, list[Run]]:
    """The finished runs of each version; their calls are left out, whose texts would fill the memory."""
    found: dict[str, list[Run]] = {version: [] for version in versions}
    for run in read_runs(store, agent=agent):
        version = BUILT_WITH if run.version is None else run.version.rpartition("-")[2]
        if version in found and run.agent == agent and run.finished:
            found[version].append(run.model_copy(update={"calls": []}))
    for version, runs in found.items():
        if not runs:
            raise DataError(
                f"no run in {str(store)!r} of agent {agent!r} was answered by {version!r}; is the agent recorded, and "
                "did the canary begin?"
            )
    return found


def candidate_of(home: Path, agent: str, pointer: Pointer | None, *, wanted: str | None) -> Version | None:
    """What a canary tries: ``wanted``, or the newest version that was made since something was decided.

    So a version that was rolled back is not tried again by itself, not even by a service that starts anew.
    """
    now = pointer.version if pointer else None
    if wanted is not None:
        return read_version(home, agent, wanted) if wanted != now else None
    newest = next(reversed(list_versions(home, agent)), None)
    if newest is None or newest.name == now or (pointer is not None and newest.created <= pointer.changed):
        return None
    return newest


def check_share(canary: float | None, candidate: str | None) -> None:
    """Raise ConfigError for a share of a canary that is none, and for a candidate without one."""
    if canary is None:
        if candidate is not None:
            raise ConfigError(f"candidate={candidate!r} wants a share of the runs too, as canary=0.1")
    elif isinstance(canary, bool) or not isinstance(canary, (int, float)) or not 0 < canary <= 1:
        raise ConfigError(f"canary={canary!r} is no share of an agent's runs; give a number above 0 and up to 1")


def is_recorded(agent: Any) -> bool:
    """Whether some recording takes turns of ``agent``."""
    from praison_agent_rl.capture.recordings import open_recordings

    return any(recording.takes_turn(agent, None, "") for recording in open_recordings())


def _arm(version: str, runs: Sequence[Run]) -> Arm:
    return Arm(
        version=version,
        runs=len(runs),
        clusters=len({_cluster(run) for run in runs}),
        errors=sum(not _answered(run) for run in runs),
        rated=sum(_rating(run) is not None for run in runs),
    )


def _answered(run: Run) -> bool:
    return run.error is None and run.output is not None


def _cluster(run: Run) -> tuple[str, str]:
    return ("run", run.id) if run.session is None else ("session", run.session)


def _rating(run: Run) -> float | None:
    return next((said.score for said in reversed(run.feedback) if said.score is not None), None)


def _rewards(given: Any, home: Path, agent: str, version: str, runs: Sequence[Run]) -> tuple[list[Reward], list[str]]:
    """Rewards that can be applied to recorded runs, tried on some of them, and what is left out."""
    prompts = [_prompt(run) for run in runs[:3]]
    if given:
        return (prepare(given, prompts=prompts, columns={}), []) if prompts else ([], [])
    file = agent_folder(home, agent) / version / "plan.json"
    planned = read_record(file, Plan).rewards if file.exists() else []
    rewards, notes = [], []
    for plan in planned:
        try:
            reward = prepare([plan.spec], weights=[plan.weight], prompts=prompts, columns={})[0]
            rewards.append(Reward(reward.fn, plan.name, plan.weight, reward.shape))
        except (RewardError, IndexError) as error:
            notes.append(f"the reward {plan.name} is left out: {error}")
    return rewards, notes


def _scores(rewards: Sequence[Reward], runs: Sequence[Run]) -> dict[str, list[float | None]]:
    prompts, outputs = [_prompt(run) for run in runs], [_text(run.output) for run in runs]
    ids = [list(range(len(output.split()))) for output in outputs]
    return {reward.name: reward(prompts, outputs, completion_ids=ids) for reward in rewards}


def _interval(runs: dict[str, list[Run]], values: dict[str, list[float | None]], seed: int) -> Interval | None:
    """The second version against the first, over the runs that have the number; None where one side has none."""
    import numpy as np

    sides = [
        [(_cluster(run), value) for run, value in zip(runs[version], found, strict=True) if value is not None]
        for version, found in values.items()
    ]
    if not all(sides):
        return None
    a, b = (np.array([value for _, value in side], dtype=float) for side in sides)
    clusters_a, clusters_b = ([cluster for cluster, _ in side] for side in sides)
    return unpaired_interval(a, b, seed=seed, clusters_a=clusters_a, clusters_b=clusters_b)


def _prompt(run: Run) -> Any:
    """What was asked, as messages where it was recorded as such."""
    if isinstance(run.prompt, list) and all(isinstance(message, dict) for message in run.prompt):
        return run.prompt
    return [{"role": "user", "content": _text(run.prompt)}]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
