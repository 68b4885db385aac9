"""Let an agent that lives in this process make the rollouts of a run, wherever that trains."""

import contextlib
import glob
import heapq
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from praison_agent_rl.agent_rollouts.asking import KEY
from praison_agent_rl.agent_rollouts.copies import agents_of, check_copyable, policy_agents
from praison_agent_rl.agent_rollouts.host import RolloutHost
from praison_agent_rl.agent_rollouts.structured import check_structured
from praison_agent_rl.agent_rollouts.tools import ToolPlan, plan_tools
from praison_agent_rl.agents import find_agent
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import AgentError, ConfigError
from praison_agent_rl.problems import Problems
from praison_agent_rl.records import Run
from praison_agent_rl.transcripts import DEFAULT_STORE, read_runs

OnEvent = Callable[[dict[str, Any]], None]

_RUNS_READ = 2000
"""Of the agent's recorded runs, the latest of which results of tools are taken."""


class Hosting:
    """An agent, and how its copies are run; what is done with it lasts as long as ``following``."""

    def __init__(self, agent: Any, config: TrainConfig, tools: ToolPlan, runs: Sequence[Run]) -> None:
        self.agent = agent
        self.tools = tools
        self.runs = runs
        """Recorded runs of the agent, the latest ones."""
        self._key = secrets.token_urlsafe(24)
        self._options: dict[str, Any] = {
            "at_once": config.rollouts_at_once,
            "tools": tools.in_place,
            "trained": config.train_agents,
        }

    @property
    def environment(self) -> Mapping[str, str]:
        """What the process that trains is told by its environment."""
        return {KEY: self._key}

    @contextlib.contextmanager
    def following(self, on_event: OnEvent) -> Iterator[OnEvent]:
        """Passes events on, and runs rollouts for whoever says in them that some are wanted."""
        host: RolloutHost | None = None

        def follow(event: dict[str, Any]) -> None:
            nonlocal host
            if event["event"] == "rollouts":
                if host is not None:
                    host.close()
                host = RolloutHost(self.agent, **self._options)
                host.follow(event["address"], self._key)
            on_event(event)

        try:
            yield follow
        finally:
            if host is not None:
                host.close()


def hosting_of(agent: Any, config: TrainConfig) -> Hosting:
    """The agent with what its tools do in training.

    Raises:
        AgentError: it cannot be copied, or agents that are to be trained are none that its model answers.
        ConfigError: a tool has side effects for all that is known, or what was given for one does not fit; the agent
            was asked for structured output that its copies would not be; or several things are wrong, which are said
            at once.
    """
    problems = Problems()
    problems.attempt(lambda: _check_agent(agent, config.train_agents))
    runs = problems.attempt(lambda: recorded_runs(agent)) or []
    tools = problems.attempt(lambda: _allowed_tools(agent, config, runs))
    problems.attempt(lambda: check_structured(agent, runs, allowed=config.parity == "allow"))
    problems.raise_all()
    assert tools is not None
    return Hosting(agent, config, tools, runs)


def named_agent(config: TrainConfig) -> Any:
    """The agent that a configuration names.

    Raises:
        ConfigError: none is named.
        AgentError: there is no such agent.
    """
    if not config.rollout_agent:
        raise ConfigError(
            "rollout: agent needs the agent itself, and this process has none; name it by rollout_agent: module:name "
            "(to go on with a run: --resume RUN --set rollout_agent=module:name)"
        )
    return find_agent(config.rollout_agent)


def recorded_runs(agent: Any) -> list[Run]:
    """The recorded runs of the agent and of those that it hands over to, the latest ones."""
    names = [str(each.name) for each in agents_of(agent) if getattr(each, "name", None)]
    if not names or not DEFAULT_STORE.is_dir():
        return []
    runs = (run for name in dict.fromkeys(names) for run in read_runs(agent=glob.escape(name)))
    return heapq.nlargest(_RUNS_READ, runs, key=lambda run: run.time)[::-1]


def _check_agent(agent: Any, trained: Sequence[str] | None) -> None:
    check_copyable(agent)
    names = [str(each.name) for each in policy_agents(agent)]
    if unknown := [name for name in trained or [] if name not in names]:
        raise AgentError(
            f"train_agents names {_quoted(unknown)}, but the agents that the trained model answers are {_quoted(names)}"
        )


def _allowed_tools(agent: Any, config: TrainConfig, runs: Sequence[Run]) -> ToolPlan:
    tools = plan_tools(agent, tools_for_training=config.tools_for_training, run_tools=config.run_tools, runs=runs)
    if tools.refused:
        raise ConfigError(
            f"the tools {_quoted(tools.refused)} would really run in training, and nothing says that they may: mark "
            "them with @praison_agent_rl.pure or name them in run_tools if they have no side effects, give stand-ins "
            "by tools_for_training, or record runs of the agent, whose results are then replayed"
        )
    return tools


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


@contextlib.contextmanager
def in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a run that happens in it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
