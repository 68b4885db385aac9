"""Rewards as a plan writes them down, and back again in another process."""

from collections.abc import Sequence
from typing import Any

from praison_agent_rl.records import PlannedReward
from praison_agent_rl.rewards import Reward, Shape, as_entry, listed_specs, portable, resolve


def plan_rewards(given: Any, rewards: Sequence[Reward]) -> list[PlannedReward]:
    """What a plan says of ``rewards``, which were made of the entries ``given``."""
    planned = []
    for entry, reward in zip(listed_specs(given), rewards, strict=True):
        spec, parameters = portable(entry)
        planned.append(
            PlannedReward(
                spec=spec,
                name=reward.name,
                weight=reward.weight,
                prompts=reward.shape.prompts,
                completions=reward.shape.completions,
                parameters=parameters if spec else {},
                columns=dict(reward.renamed),
                deterministic=reward.deterministic,
                by_sample=reward.by_sample,
            )
        )
    return planned


def as_rewards(planned: Sequence[PlannedReward]) -> list[Reward]:
    """Planned rewards, found again by their names; raises RewardError."""
    return [
        Reward(
            resolve(as_entry(plan)),
            plan.name,
            plan.weight,
            Shape(plan.prompts, plan.completions),
            renamed=plan.columns,
            deterministic=plan.deterministic,
            by_sample=plan.by_sample,
        )
        for plan in planned
    ]
