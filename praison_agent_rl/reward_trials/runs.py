"""The recorded answers of an agent that rewards are tried on, with what people said of them."""

from collections import deque
from pathlib import Path

from praison_agent_rl.dataset_building.brief_runs import brief
from praison_agent_rl.dataset_building.choosing import feedback_columns
from praison_agent_rl.errors import DataError
from praison_agent_rl.records import Run
from praison_agent_rl.reward_trials.answers import Answers, Group, Limits, choose, group_of
from praison_agent_rl.rewards import Text
from praison_agent_rl.transcripts import read_runs

MOST_RUNS = 2000
"""Recorded runs that are looked at, the newest, and as many with feedback."""


def answers_of_runs(store: str | Path, agent: str | None, limits: Limits) -> Answers:
    """What was recorded in ``store``: the answers of ``agent`` (a name or a pattern), and what was said of them.

    Raises:
        DataError: there is no store, or nothing in it was answered.
    """
    plain: deque[Run] = deque(maxlen=MOST_RUNS)
    rated: deque[Run] = deque(maxlen=MOST_RUNS)
    for run in read_runs(store, agent=agent):
        if run.error is None and run.calls and _completion(run) is not None:
            (rated if run.feedback else plain).append(run)
    whose = f"of agent {agent!r} " if agent else ""
    if not plain and not rated:
        raise DataError(
            f"no answered run {whose}is recorded in {str(store)!r}; give data= (or --data), record the agent first, or "
            "see: praison-agent-rl transcripts stats"
        )
    groups: dict[str, Group] = {}
    for run in [*rated, *plain]:
        columns = {**feedback_columns(brief(run), ("answer", "rating", "tags")), "run": str(run.id), "agent": run.agent}
        group = group_of(groups, {"prompt": run.calls[0].messages, **columns})
        completion = _completion(run)
        assert completion is not None
        group.answers.append((completion, columns.get("rating")))
        group.runs.setdefault(str(completion), run)
        if "answer" in columns and columns["answer"] != completion:
            group.answers.append((columns["answer"], None))
            group.pairs.append((columns["answer"], completion))
    return choose(list(groups.values()), f"recorded answers {whose}in {store}", limits, [])


def _completion(run: Run) -> Text | None:
    """What the agent answered: its text, or all messages if it used tools on the way."""
    answered = [call for call in run.calls if call.reply is not None and call.error is None]
    if not answered:
        return None
    first, last = run.calls[0].messages, answered[-1]
    if len(last.messages) > len(first) and last.messages[: len(first)] == first:
        return [*last.messages[len(first) :], dict(last.reply or {})]
    text = run.output if isinstance(run.output, str) else (last.reply or {}).get("content")
    return text if isinstance(text, str) else None
