"""Whether a run can leave this machine at all; no other machine is asked."""

import os
from collections.abc import Iterator

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.records import Plan, PlannedReward


def check_possible(plan: Plan) -> None:
    """Raise ConfigError, with all reasons at once, for a run that cannot leave this machine."""
    if reasons := list(_why_not(plan)):
        raise ConfigError("the run cannot happen on another machine:\n" + "\n".join(reasons))


def _why_not(plan: Plan) -> Iterator[str]:
    config = plan.config
    if unnamed := [reward.name for reward in planned_in(plan) if reward.spec is None]:
        yield (
            f"the rewards {', '.join(unnamed)} live only in this process; move them into a module, and name them as "
            "'module:function'"
        )
    if config.get("rollout") == "agent":
        yield (
            "rollout: agent lets the agent of this process answer, which is not there; take rollout: tools with its "
            "tools as 'module:function', or direct, or run the whole command on that machine"
        )
    if ((config.get("launch") or {}).get("nodes") or 1) > 1:
        yield (
            "launch.nodes is above 1, and remote reaches one machine; give the command on each of the machines "
            "instead, or take one with several GPUs (launch.nproc)"
        )
    remote = config.get("remote") or {}
    if missing := [name for name in remote.get("env") or [] if name not in os.environ]:
        yield f"remote.env names {', '.join(missing)}, which this environment has not; set it here, or take it out"


def planned_in(plan: Plan) -> list[PlannedReward]:
    """All rewards of a plan, whatever they are for."""
    return [*plan.rewards, *plan.judges, *(reward for rewards in plan.earlier.values() for reward in rewards)]
