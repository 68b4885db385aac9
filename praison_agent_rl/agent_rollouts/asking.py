"""Let the agent answer rows of prompts on a model that this process has, and keep what it said and how."""

import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from praison_agent_rl.agent_rollouts.endpoint import RolloutEndpoint
from praison_agent_rl.agent_rollouts.jobs import Rollout, RolloutJob
from praison_agent_rl.agent_rollouts.prompts import HISTORY
from praison_agent_rl.agent_rollouts.structured import is_schema
from praison_agent_rl.agent_rollouts.tool_texts import ToolWords
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.rollouts import Draw, Sampling
from praison_agent_rl.runs import RunFolder

Ended = Callable[[int, int], None]

KEY = "PRAISON_AGENT_RL_ROLLOUT_KEY"
"""Variable of the environment by which the process that has the agent and the one that has the model share a key."""


@dataclass(frozen=True)
class AgentAsker:
    """The way to an agent that is somewhere else, and how long it may take."""

    endpoint: RolloutEndpoint
    agent: str
    """Name of the agent that is asked first."""
    seconds: float
    """For each answer, tools included."""
    trained: Collection[str] | None = None
    """Names of the agents whose answers are trained; None for all that ask here."""
    tell: Callable[[str], None] = lambda _: None
    """Is told, once, what agents ask for that is not done."""
    _told: set[str] = field(default_factory=set, init=False)

    def ask(
        self, rows: Sequence[Mapping[str, Any]], draw: Draw, sampling: Sampling, *, ended: Ended = lambda done, of: None
    ) -> list[Rollout]:
        """A rollout for each row, in order; one that failed says so and has the calls that it had made.

        Raises:
            AgentError: nobody who has the agent asked for anything to do.
        """
        jobs = [
            RolloutJob(
                id=secrets.token_hex(8),
                prompt=row["prompt"],
                history=row.get(HISTORY) or [],
                seconds=self.seconds,
            )
            for row in rows
        ]
        rollouts = self.endpoint.run(jobs, draw, sampling, on_end=ended)
        for wish in {wish for rollout in rollouts for wish in _wishes(rollout)} - self._told:
            self._told.add(wish)
            self.tell(
                f"the agent asks for {wish}: it is not forced upon what the policy says, and neither is it by "
                "transformers serve; a server that forces it (vLLM) answers otherwise than the policy is trained"
            )
        return rollouts


def _wishes(rollout: Rollout) -> Iterator[str]:
    """What calls wanted of the form of an answer, beyond messages and tools."""
    for asked in rollout.calls:
        form, choice = (asked.call.settings.get(name) for name in ("response_format", "tool_choice"))
        if is_schema(form):
            yield f"response_format {form.get('type') if isinstance(form, dict) else form}"
        if choice not in (None, "auto", "none"):
            yield f"tool_choice {choice!r}"


@contextlib.contextmanager
def agent_asker(run: RunFolder, config: TrainConfig, tokenizer: Any) -> Iterator[AgentAsker | None]:
    """The way to the agent of ``run`` for as long as the block lasts; None where no agent makes its rollouts.

    Where it can be reached is told in the run's events; its key comes from the process that has the agent.

    Raises:
        ConfigError: several processes train.
    """
    if config.rollout != "agent":
        yield None
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"rollout: agent needs one process that trains, and {os.environ['WORLD_SIZE']} do (WORLD_SIZE); train in "
            "one, or take rollout: tools"
        )
    room = config.max_seq_length - config.max_completion_length
    words, key = ToolWords(tokenizer), os.environ.get(KEY) or None
    with RolloutEndpoint(words, key=key, room=room, at_most=config.max_completion_length) as endpoint:
        run.report_event("rollouts", address=endpoint.address)
        name, seconds = run.plan.agent or "agent", config.rollout_timeout
        tell = partial(_noted, run)
        yield AgentAsker(endpoint, name, seconds, config.train_agents, tell)


def _noted(run: RunFolder, text: str) -> None:
    run.report_event("note", text=text)
