"""Try a new version on a share of an agent's runs: which one, and what the recorded runs say of it.

Which of an agent's turns go to the candidate is decided in `capture.routes`; here is what is there before and after.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ConfigError, DataError, RewardError
from praison_agent_rl.intervals import unpaired_interval
from praison_agent_rl.records import FEWEST_PROMPTS, Interval, Plan, Pointer, Record, Run, Version
from praison_agent_rl.registry import agent_folder, list_versions, read_version
from praison_agent_rl.rewards import Reward, as_entry, prepare, total
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
    unscored: int
    """Runs that answered, and whose answer some reward gave no number."""
    scored_clusters: int
    """Clusters with a run that has a total reward."""
    rated: int
    """Runs with a feedback score."""
    rated_clusters: int
    """Clusters with such a run."""


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
    failed: Interval
    """Share of the runs that failed."""
    unscored: Interval
    """Share of the runs that answered without a number of each reward."""
    total_at_worst: Interval | None = None
    """The total, where a run that failed and a number that is missing count as the worst seen; None where b has no
    larger share of them than a."""
    feedback_at_worst: Interval | None = None
    """The feedback, where a run that failed and was not rated counts as the worst; None where b fails no more."""
    notes: tuple[str, ...] = ()

    @property
    def better(self) -> bool:
        """Whether b is better by what there is: total or feedback lies above zero, and nothing is against it."""
        return any(_rose(*measure[1:]) for measure in self._measures()) and not self.objections

    @property
    def objections(self) -> list[str]:
        """What is against b, one sentence each: a number that fell, more failures, or a gain that rests on them."""
        a, b = self.a, self.b
        found = []
        if _proved(self.failed.low, a.clusters, b.clusters):
            found.append(
                f"{b.version} fails more often: {_of(b.errors, b)}, where {a.version} fails in {_of(a.errors, a)}"
            )
        if _proved(self.unscored.low, a.clusters, b.clusters):
            found.append(
                f"{b.version} has no score more often: in {_of(b.unscored, b)}, where {a.version} has none in "
                f"{_of(a.unscored, a)}"
            )
        for what, interval, clusters, worst in self._measures():
            if interval.high < 0:
                found.append(f"{what} fell")
            elif _proved(interval.low, clusters) and worst is not None and not worst.low > 0:
                found.append(
                    f"the gain in {what} is none once the runs of {b.version} that failed or have no score count as "
                    f"the worst seen ({worst.base:.3g} -> {worst.new:.3g}, 95 % CI {worst.low:+.3g}..{worst.high:+.3g})"
                )
        return found

    def _doubts(self) -> list[str]:
        """Why it is not shown to be better, where it is not."""
        few = [
            f"{what} is known of {clusters} sessions of one side, and {FEWEST_PROMPTS} are needed"
            for what, interval, clusters, _ in self._measures()
            if not interval.high < 0 and clusters < FEWEST_PROMPTS
        ]
        return [] if self.better else [*self.objections, *few]

    def _measures(self) -> list[tuple[str, Interval, int, Interval | None]]:
        """By what is decided: name, interval, the clusters that have it on either side, and the interval at worst."""
        a, b = self.a, self.b
        found = [
            ("total reward", self.total, min(a.scored_clusters, b.scored_clusters), self.total_at_worst),
            ("feedback", self.feedback, min(a.rated_clusters, b.rated_clusters), self.feedback_at_worst),
        ]
        return [(what, interval, clusters, worst) for what, interval, clusters, worst in found if interval is not None]

    def __str__(self) -> str:
        lines = [f"{self.agent}: {self.b.version} against {self.a.version}, by recorded runs"]
        for arm in (self.a, self.b):
            failed = f", {arm.errors} of them failed" if arm.errors else ""
            unscored = f", {arm.unscored} without a score" if arm.unscored else ""
            lines.append(
                f"{arm.version}: {arm.runs} runs in {arm.clusters} sessions{failed}{unscored}, {arm.rated} rated"
            )
        lines += [_line(f"reward {name}", interval) for name, interval in self.rewards.items()]
        lines += [_line("total reward", self.total)] if self.total and len(self.rewards) > 1 else []
        lines += [_line("feedback", self.feedback)] if self.feedback else []
        verdict = f"{self.b.version} is better" if self.better else f"{self.b.version} is not shown to be better"
        doubts = "; ".join(self._doubts())
        return "\n".join([*lines, *self.notes, f"{verdict}: {doubts}" if doubts else verdict])


def _rose(interval: Interval, clusters: int, worst: Interval | None) -> bool:
    return _proved(interval.low, clusters) and (worst is None or worst.low > 0)


def _proved(low: float, *clusters: int) -> bool:
    return low > 0 and min(clusters) >= FEWEST_PROMPTS


def _of(count: int, arm: Arm) -> str:
    return f"{count} of {arm.runs} runs"


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
    rewards, notes = _rewards(reward_funcs, Path(home), agent, b, [run for v in (a, b) for run in _sound(found[v])])
    scores = {version: _scores(rewards, runs) for version, runs in found.items()}
    ratings = {version: [_rating(run) for run in runs] for version, runs in found.items()}
    totals = {version: _totals(rewards, scores[version], len(runs)) for version, runs in found.items()}
    failed = {v: [float(not _answered(run)) for run in found[v]] for v in (a, b)}
    unscored = {v: _unscored(scores[v], found[v]) for v in (a, b)}
    lost = {v: [*map(max, failed[v], unscored[v])] for v in (a, b)}
    intervals = {r.name: _interval(found, {v: scores[v][r.name] for v in (a, b)}, seed) for r in rewards}
    return RecordedComparison(
        agent=agent,
        a=_arm(a, found[a], totals[a], unscored[a]),
        b=_arm(b, found[b], totals[b], unscored[b]),
        rewards={name: interval for name, interval in intervals.items() if interval is not None},
        total=_interval(found, totals, seed),
        feedback=_interval(found, ratings, seed),
        failed=_share(found, failed, seed),
        unscored=_share(found, unscored, seed),
        total_at_worst=_interval(found, _at_worst(rewards, scores, totals), seed) if _more(lost) else None,
        feedback_at_worst=_interval(found, _failed_at_worst(ratings, failed), seed) if _more(failed) else None,
        notes=tuple(notes),
    )


def _runs_by_version(store: str | Path, agent: str, versions: tuple[str, str]) -> dict[str, list[Run]]:
    """The finished runs of each version; their calls are left out, whose texts would fill the memory."""
    found: dict[str, list[Run]] = {version: [] for version in versions}
    for run in read_runs(store, agent=agent):
        if run.version is None and any(call.version for call in run.calls):
            continue  # several versions answered it
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
    """What a canary tries: ``wanted``, or the newest version that passed the gate and was made since the last decision.

    So a version that was rolled back is not tried again by itself, not even by a service that starts anew.
    """
    now = pointer.version if pointer else None
    if wanted is not None:
        return read_version(home, agent, wanted) if wanted != now else None
    newest = next((version for version in reversed(list_versions(home, agent)) if version.passed), None)
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


def _arm(version: str, runs: Sequence[Run], totals: Sequence[float | None], unscored: Sequence[float]) -> Arm:
    ratings = [_rating(run) for run in runs]
    return Arm(
        version=version,
        runs=len(runs),
        clusters=len({_cluster(run) for run in runs}),
        errors=len(runs) - len(_sound(runs)),
        unscored=int(sum(unscored)),
        scored_clusters=_clusters_with(totals, runs),
        rated=sum(rating is not None for rating in ratings),
        rated_clusters=_clusters_with(ratings, runs),
    )


def _clusters_with(values: Sequence[float | None], runs: Sequence[Run]) -> int:
    return len({_cluster(run) for run, value in zip(runs, values, strict=True) if value is not None})


def _sound(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if _answered(run)]


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
            reward = prepare([as_entry(plan)], weights=[plan.weight], prompts=prompts, columns={})[0]
            rewards.append(replace(reward, name=plan.name))
        except (RewardError, IndexError) as error:
            notes.append(f"the reward {plan.name} is left out: {error}")
    return rewards, notes


def _scores(rewards: Sequence[Reward], runs: Sequence[Run]) -> dict[str, list[float | None]]:
    """Each reward's number of each run; a run that failed has none."""
    sound = _sound(runs)
    prompts, outputs = [_prompt(run) for run in sound], [_text(run.output) for run in sound]
    ids = [list(range(len(output.split()))) for output in outputs]
    scored = {}
    for reward in rewards:
        given = iter(reward(prompts, outputs, completion_ids=ids) if sound else ())
        scored[reward.name] = [next(given) if _answered(run) else None for run in runs]
    return scored


def _totals(rewards: Sequence[Reward], scores: dict[str, list[float | None]], runs: int) -> list[float | None]:
    return total(list(scores.values()), [reward.weight for reward in rewards]) if rewards else [None] * runs


def _unscored(scores: dict[str, list[float | None]], runs: Sequence[Run]) -> list[float]:
    """1 for each run that answered and lacks a number of some reward, else 0."""
    return [
        float(_answered(run) and any(values[place] is None for values in scores.values()))
        for place, run in enumerate(runs)
    ]


def _at_worst(
    rewards: Sequence[Reward], scores: dict[str, dict[str, list[float | None]]], totals: dict[str, list[float | None]]
) -> dict[str, list[float | None]]:
    """The totals, with each missing number as bad as the worst of its reward, and each run without any as the worst."""
    seen = [value for values in totals.values() for value in values if value is not None]
    if not seen:
        return totals
    worst: dict[str, float] = {}
    for reward in rewards:
        given = [n * reward.weight for side in scores.values() for n in side[reward.name] if n is not None]
        worst[reward.name] = min(given, default=0.0)
    found: dict[str, list[float | None]] = {}
    for version, side in scores.items():
        filled = []
        for reward in rewards:
            instead, numbers = worst[reward.name], side[reward.name]
            filled.append([instead if number is None else number * reward.weight for number in numbers])
        whole = [sum(parts) for parts in zip(*filled, strict=True)]
        found[version] = [min(seen) if t is None else n for t, n in zip(totals[version], whole, strict=True)]
    return found


def _failed_at_worst(
    ratings: dict[str, list[float | None]], failed: dict[str, list[float]]
) -> dict[str, list[float | None]]:
    worst = min((value for values in ratings.values() for value in values if value is not None), default=None)
    return {
        version: [
            worst if value is None and lost else value for value, lost in zip(values, failed[version], strict=True)
        ]
        for version, values in ratings.items()
    }


def _more(shares: dict[str, list[float]]) -> bool:
    """Whether the second version's mean is the larger one."""
    a, b = (sum(values) / len(values) for values in shares.values())
    return b > a


def _share(runs: dict[str, list[Run]], values: dict[str, list[float]], seed: int) -> Interval:
    found = _interval(runs, {version: [*numbers] for version, numbers in values.items()}, seed)
    assert found is not None  # each side has runs, and each of them has the number
    return found


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
