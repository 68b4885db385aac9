"""The short trial that `train` and `improve` make on their own: on a few made-up answers, with few calls."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from praison_agent_rl.errors import RewardError
from praison_agent_rl.reward_trials.answers import Limits, invented_answers
from praison_agent_rl.reward_trials.calls import staying_here
from praison_agent_rl.reward_trials.forms import look_again
from praison_agent_rl.reward_trials.trials import RewardTrial, TrialRules, measure
from praison_agent_rl.reward_trials.verdicts import judged
from praison_agent_rl.rewards import Reward, Texts
from praison_agent_rl.scoring.names import importing_from

SHORT = TrialRules(few=4, spare_after=0.5)
_LIMITS = Limits(prompts=3, each=6)
_OF_ACTS = {"run", "tool_calls"}
"""What rewards may ask for that made-up answers have nothing of."""


class ShortTrial(NamedTuple):
    """What a short trial found out of rewards that can be trained with."""

    rewards: list[Reward]
    """The same, knowing of themselves whether they are deterministic and score each answer by itself."""
    notes: list[str]


def short_trial(
    rewards: Sequence[Reward],
    prompts: Texts,
    columns: Mapping[str, Sequence[Any]],
    *,
    rules: TrialRules = SHORT,
    acting: bool = False,
) -> ShortTrial:
    """Try prepared rewards on made-up answers to a few prompts; ``acting`` says that answers of training call tools.

    Raises:
        RewardError: some are broken; with all that is wrong.
    """
    if not rewards or not prompts:
        return ShortTrial(list(rewards), [])
    answers = invented_answers(prompts, columns, _LIMITS)
    known: list[Reward] = []
    notes: list[str] = []
    broken: list[str] = []
    with importing_from(None), staying_here():  # a reward may import a helper beside it when it is called
        for reward in rewards:
            measured = look_again(reward, measure(reward, answers.samples, rules), answers.samples, rules)
            trial = judged(measured, rules)
            said = _said(trial, unlike=acting or bool(_OF_ACTS & set(reward.views)))
            (broken if trial.verdict == "broken" else notes).extend(said)
            known.append(_knowing(reward, trial))
    if broken:
        raise RewardError("\n".join(broken))
    return ShortTrial(known, notes)


def _knowing(reward: Reward, trial: RewardTrial) -> Reward:
    return replace(
        reward,
        deterministic=reward.deterministic and trial.deterministic is not False,
        by_sample=reward.by_sample and trial.by_sample is not False,
    )


def _said(trial: RewardTrial, *, unlike: bool) -> list[str]:
    """What is said of a trial; ``unlike`` where the answers of training may do what made-up ones do not."""
    name, tried = f"the reward {trial.name!r}", f"on {trial.answers} made-up answers"
    if trial.verdict == "broken":
        faults = [f"{fault.text} (first: {fault.first})" if fault.first else fault.text for fault in trial.faults]
        unsound = [] if faults else trial.warnings
        return [f"{name} is broken, tried {tried}: {'; '.join([*faults, *unsound])}. {trial.advice}"]
    if trial.verdict == "no signal" and unlike:
        scores = f"the same score to all of {trial.answers}" if trial.scored else f"no score to any of {trial.answers}"
        text = f"{name} cannot be judged beforehand: it gives {scores} made-up answers, but these call no tool"
        return [f"{text}; try it on recorded runs (praison-agent-rl rewards check ... --agent NAME)"]
    said = [f"WARNING: {name}, tried {tried}: {trial.verdict}. {trial.advice}"] if trial.verdict != "fine" else []
    return said + [f"{name}, tried {tried}: {warning}" for warning in trial.warnings]
