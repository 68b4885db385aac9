"""The nouns of rollouts that an agent makes: what it is asked, how that ended, and what its model said on the way."""

from typing import Any

from pydantic import Field

from praison_agent_rl.records import Call, Record, Run


class RolloutJob(Record):
    """One rollout that an agent is to make."""

    id: str
    prompt: str
    """What the agent is asked."""
    history: list[dict[str, Any]] = Field(default_factory=list)
    """Messages of the conversation so far, without a system prompt; empty at its beginning."""
    seconds: float
    """Time that the rollout may take."""


class RolloutOutcome(Record):
    """How a rollout ended, as the side says that has the agent."""

    id: str
    output: str | None = None
    """What the agent answered."""
    error: str | None = None
    """Why there is no answer: the agent or a tool raised, gave nothing, or took too long."""
    seconds: float = 0.0
    tool_seconds: float = 0.0
    """Of these, time in tools."""
    tool_errors: list[str] = Field(default_factory=list)
    """Tools that raised, each with its name; the agent was told and may have gone on."""


class TokenCall(Record):
    """One call of a rollout to the policy, with the tokens that were read and drawn."""

    call: Call
    """As it would be recorded: messages, tools, settings, reply, finish, usage."""
    agent: str
    """Name of the agent that asked: the one that was asked first, or one that it handed over to."""
    prompt_ids: list[int]
    completion_ids: list[int] = Field(default_factory=list)
    """With the end token, if one was drawn."""
    log_probs: list[float] | None = None
    """Natural log-probability of each drawn token, by the sampler; None if it is not known."""


class Rollout(Record):
    """A rollout that has ended."""

    job: RolloutJob
    outcome: RolloutOutcome
    calls: list[TokenCall] = Field(default_factory=list)
    """In the order in which they were asked; calls that failed have no completion and an error."""

    def as_run(self, agent: str) -> Run:
        """As a recorded run, for rewards."""
        calls = [asked.call for asked in self.calls]
        began = calls[0].time if calls else 0.0
        return Run(
            id=self.job.id,
            agent=agent,
            style="rollout",
            time=began,
            seconds=self.outcome.seconds,
            prompt=self.job.prompt,
            output=self.outcome.output,
            error=self.outcome.error,
            calls=calls,
        )
