"""Make a praisonaiagents agent better at its own job: record it, train the model beneath it, prove it, and swap it in.

Importing this package adds ``record``, ``improve`` and ``last_run`` to every ``Agent``, those that exist already and
subclasses included. It loads nothing heavy: what a function needs is imported when it is called.
"""

from typing import TYPE_CHECKING, Any

from praisonaiagents import Agent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from praison_agent_rl.attachment import Attachment
    from praison_agent_rl.capture import Recording
    from praison_agent_rl.dataset_building import BuiltDataset
    from praison_agent_rl.evaluating import Evaluation
    from praison_agent_rl.improvement import Improvement
    from praison_agent_rl.records import Feedback, Pointer, Run, Version
    from praison_agent_rl.reward_trials.trying import Trials
    from praison_agent_rl.trained_rewards import TrainedReward

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "attach",
    "build_dataset",
    "evaluate",
    "feedback",
    "improve",
    "promote",
    "pure",
    "read_runs",
    "record",
    "rollback",
    "sample_pairs",
    "try_rewards",
    "versions",
]


def record(*agents: Any, **options: Any) -> "Recording":
    """Record the turns of ``agents`` from now on, or of all agents; see `praison_agent_rl.capture.record`."""
    from praison_agent_rl import capture

    return capture.record(*agents, **options)


def read_runs(*store: Any, **filters: Any) -> "Iterator[Run]":
    """The recorded runs of a store; see `praison_agent_rl.transcripts.read_runs`."""
    from praison_agent_rl import transcripts

    return transcripts.read_runs(*store, **filters)


def feedback(run: Any, **said: Any) -> "Feedback":
    """Say how good a recorded run was, ``feedback(agent.last_run, score=1)``; see `transcripts.feedback`."""
    from praison_agent_rl import transcripts

    return transcripts.feedback(run, **said)


def build_dataset(*store: Any, **options: Any) -> "BuiltDataset":
    """Make a dataset of prompts or pairs from recorded runs; see `praison_agent_rl.dataset_building.build_dataset`."""
    from praison_agent_rl import dataset_building

    return dataset_building.build_dataset(*store, **options)


def improve(agent: Any, **options: Any) -> "Improvement | TrainedReward":
    """Train the model beneath ``agent`` and swap it in if it is better; see `praison_agent_rl.improvement.improve`.

    The usual call is ``improve(agent, reward_funcs=["myproject.rewards:length_penalty"])`` for a recorded agent, with
    ``data="questions.jsonl"`` for one that is not.
    """
    from praison_agent_rl import improvement

    return improvement.improve(agent, **options)


def versions(agent: Any, *, home: "Path | None" = None) -> "list[Version]":
    """The versions of an agent, given itself or by name, oldest first; see `praison_agent_rl.registry`."""
    from praison_agent_rl import registry, runs

    home = home or runs.HOME
    return registry.list_versions(home, registry.name_of(home, agent))


def promote(agent: Any, version: str, *, force: bool = False, home: "Path | None" = None) -> "Pointer":
    """Let a version answer from now on, wherever the agent is attached; see `praison_agent_rl.registry.promote`."""
    from praison_agent_rl import registry, runs

    home = home or runs.HOME
    return registry.promote(home, registry.name_of(home, agent), version, force=force)


def rollback(agent: Any, *, home: "Path | None" = None, force: bool = False) -> "Pointer":
    """Let what answered before answer again; see `praison_agent_rl.registry.rollback`."""
    from praison_agent_rl import registry, runs

    home = home or runs.HOME
    return registry.rollback(home, registry.name_of(home, agent), force=force)


def attach(agent: Any, **options: Any) -> "Attachment":
    """Let ``agent`` be answered by its current version, and follow it; see `praison_agent_rl.attachment.attach`."""
    from praison_agent_rl import attachment

    return attachment.attach(agent, **options)


def evaluate(subject: Any, **options: Any) -> "Evaluation":
    """Compare a model, a version or an agent with another; see `praison_agent_rl.evaluating.evaluate`."""
    from praison_agent_rl import evaluating

    return evaluating.evaluate(subject, **options)


def sample_pairs(model: Any, reward_funcs: Any, **options: Any) -> "BuiltDataset":
    """Preference pairs from answers of an agent's model to its recorded prompts, the best against the worst by rewards.

    ``model`` is the agent, or its weights by name; what else a `pairs.sampling.Sampling` holds, and ``store``, ``out``
    and ``runs`` of `pairs.sampling.sample_pairs`, are keywords.
    """
    from praison_agent_rl.pairs import sampling as pair_sampling

    places = {name: options.pop(name) for name in ("store", "out", "options", "runs") if name in options}
    sampling = pair_sampling.Sampling(model=model, reward_funcs=reward_funcs, **options)
    return pair_sampling.sample_pairs(sampling, **places)


def pure(tool: Any) -> Any:
    """Mark a tool that has no side effects, so that it may run while its agent is trained; ``@pure`` above it."""
    from praison_agent_rl.agent_rollouts.tools import pure as mark

    return mark(tool)


def try_rewards(*rewards: Any, **options: Any) -> "Trials":
    """Try rewards before anything is trained, on recorded answers or others; see `reward_trials.trying`."""
    from praison_agent_rl.reward_trials import trying

    return trying.try_rewards(*rewards, **options)


def _last_run(agent: Any) -> str | None:
    """Id of the agent's last recorded run, to give feedback on; None if there is none."""
    from praison_agent_rl import capture

    return capture.last_run(agent)


for _name, _member in (("record", record), ("improve", improve), ("last_run", property(_last_run))):
    if not hasattr(Agent, _name):  # a later framework may bring one of its own; ours is still there as a function
        setattr(Agent, _name, _member)
del _name, _member
