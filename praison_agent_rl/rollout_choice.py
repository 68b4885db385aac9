"""Which way answers come about in a run, from what was given and from the agent; said aloud, and nothing is run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from praison_agent_rl.agent_rollouts.copies import agents_of
from praison_agent_rl.agent_rollouts.toolboxes import environment_of, tools_of
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.environments import episode_reward
from praison_agent_rl.errors import ConfigError, PraisonRLError, RewardError
from praison_agent_rl.hosting import Hosting, hosting_of, named_agent, recorded_runs
from praison_agent_rl.models import load_tokenizer, plain_weights
from praison_agent_rl.problems import Problems
from praison_agent_rl.records import Run
from praison_agent_rl.scoring.names import find
from praison_agent_rl.scoring.specs import listed_specs, read_spec


@dataclass(frozen=True)
class RolloutChoice:
    """How answers come about."""

    mode: str
    """``direct``, ``tools`` or ``agent``."""
    notes: list[str] = field(default_factory=list)
    hosting: Hosting | None = None
    """In mode ``agent``, the agent with what its tools do."""


def choose_rollout(config: TrainConfig, base: str, agent: Any = None) -> RolloutChoice:
    """The mode that ``config`` names, or the one that fits what is given; ``agent`` is the one that is improved.

    By itself an agent makes its own rollouts if it has tools or hands over, all of which may run in training (none that
    runs has side effects, for all that is known), and if the model's chat template can carry them.

    Raises:
        ConfigError: the mode that was asked for cannot be, with all reasons at once; or a reward scores episodes of an
            environment, and none is acted in.
        AgentError: the agent cannot be copied.
    """
    _check_episodes(config)
    if config.method != "grpo" or config.rollout == "direct":
        return RolloutChoice("direct")
    if config.rollout == "tools" or (config.rollout == "auto" and (config.tools or config.environment)):
        return _by_tools(config, base)
    if config.rollout == "agent":
        return _by_agent(config, base, agent)
    if agent is None:
        return _by_agent(config, base, None) if config.rollout_agent else RolloutChoice("direct")
    if not _acts(agent):
        return RolloutChoice("direct")
    try:
        return _by_agent(config, base, agent)
    except PraisonRLError as why:
        if config.run_tools or config.tools_for_training or config.train_agents:
            raise  # somebody who says what tools may do means them to run
        return RolloutChoice("direct", [f"the agent's tools are shown to the model but not run in training: {why}"])


def recorded_by(choice: RolloutChoice | None, config: TrainConfig) -> tuple[Any, Sequence[Run]] | None:
    """The agent that a file names and its recorded runs, where it makes the rollouts or a warm start begins with them.

    Raises:
        ConfigError: the file wants a warm start and names no agent.
        AgentError: there is no such agent.
    """
    if choice is not None and choice.hosting is not None:
        return choice.hosting.agent, choice.hosting.runs
    if not config.warm_start:
        return None
    if not config.rollout_agent:
        raise ConfigError(
            f"warm_start is {config.warm_start}, but no agent is named whose recorded runs it could start from; name "
            "it by rollout_agent: module:name (with rollout: direct or tools it makes no rollouts), or set warm_start "
            "to 0"
        )
    agent = named_agent(config)
    return agent, recorded_runs(agent)


def _by_tools(config: TrainConfig, base: str) -> RolloutChoice:
    if not config.tools and not config.environment:
        raise ConfigError(
            "rollout: tools needs tools: [module:function, ...] or environment: module:Class; to let an agent run its "
            "own tools take rollout: agent"
        )
    problems = Problems()
    problems.attempt(lambda: tools_of(config))
    problems.attempt(lambda: environment_of(config))
    problems.attempt(lambda: _check_words(config, base, loop=True))
    problems.raise_all()
    named = [f"the environment {config.environment}"] if config.environment else []
    named += [f"the tools {_names(config.tools)}"] if config.tools else []
    return RolloutChoice("tools", [f"rollouts: tools (TRL's own loop), with {' and '.join(named)}, which really run"])


def _by_agent(config: TrainConfig, base: str, agent: Any) -> RolloutChoice:
    found = agent if agent is not None else named_agent(config)
    problems = Problems()
    hosting = problems.attempt(lambda: hosting_of(found, config))
    if _acts(found):
        problems.attempt(lambda: _check_words(config, base))
    problems.raise_all()
    assert hosting is not None
    notes = [f"rollouts: agent, {config.rollouts_at_once} copies at a time", *_asking_guardrails(found)]
    rehearsal = hosting.tools.rehearsal()
    return RolloutChoice("agent", [*notes, *([rehearsal] if rehearsal else [])], hosting)


def _asking_guardrails(agent: Any) -> list[str]:
    """What to say of guardrails that are given in words: a model judges by them, and it is none that is trained."""
    guards = {str(one.name): vars(one).get("_guardrail_fn") for one in agents_of(agent)}
    names = [repr(name) for name, guard in guards.items() if getattr(guard, "_praison_output_only", False)]
    said = "asks the model that the agent was built with, for each answer of each rollout"
    return [f"the guardrail of {', '.join(names)} {said}"] if names else []


def _check_episodes(config: TrainConfig) -> None:
    """Raise ConfigError where `episode_reward` would have no episode to score."""
    if config.environment and config.method == "grpo" and config.rollout in ("auto", "tools"):
        return
    lists = {"reward_funcs": config.reward_funcs, "judge_funcs": config.judge_funcs}
    named = [key for key, given in lists.items() if any(map(_is_episode_reward, listed_specs(given)))]
    if named:
        raise ConfigError(
            f"{' and '.join(named)} name praison_agent_rl.environments:episode_reward, which scores episodes of an "
            f"environment, and none is acted in: environment is {config.environment!r}, rollout {config.rollout!r}, "
            f"method {config.method!r}. Set environment: module:Class with rollout: tools, or take the reward out"
        )


def _is_episode_reward(given: Any) -> bool:
    try:
        return find(read_spec(given).reward, made=True) is episode_reward
    except RewardError:  # said by whoever looks for all rewards
        return False


def _acts(agent: Any) -> bool:
    """Whether an agent does more than answer."""
    return agent is not None and bool(getattr(agent, "tools", None) or getattr(agent, "handoffs", None))


def _check_words(config: TrainConfig, base: str, *, loop: bool = False) -> None:
    """Raise ConfigError for a model whose chat template carries no tools, or, for TRL's own ``loop``, loses calls."""
    from praison_agent_rl.agent_rollouts.tool_texts import why_no_loop, why_no_tools

    tokenizer = load_tokenizer(plain_weights(base), config)
    if why := why_no_tools(tokenizer) or (why_no_loop(tokenizer) if loop else None):
        raise ConfigError(why)


def _names(tools: str | list[str] | None) -> str:
    return ", ".join([tools] if isinstance(tools, str) else list(tools or []))
