"""The answers of an agent to rows of prompts, on a model that this process has, as the engine's own answers are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from praison_agent_rl.agent_rollouts.asking import AgentAsker
from praison_agent_rl.agent_rollouts.jobs import Rollout
from praison_agent_rl.answering import Engine, Progress, RawAnswer, complete, sampling_of
from praison_agent_rl.records import Run


class Answered(NamedTuple):
    """Answers, and the runs that they came of where an agent gave them."""

    answers: list[RawAnswer]
    runs: list[Run] | None = None


def answers_of_agent(
    asker: AgentAsker,
    engine: Engine,
    rows: Sequence[Mapping[str, Any]],
    samples: int,
    *,
    progress: Progress = lambda done, of: None,
) -> Answered:
    """``samples`` answers to each row, in the order of rows and samples: the first greedy, the others sampled.

    An answer has the tokens of all calls of its run. Which calls are drawn at once depends on how fast agents and tools
    are, so sampled answers to the same prompts differ from run to run.
    """
    import torch

    found: list[tuple[RawAnswer, Run]] = []
    for sample in range(samples):
        torch.manual_seed(engine.config.seed + sample)
        before = len(rows) * sample

        def ended(done: int, _: int, before: int = before) -> None:
            progress(before + done, len(rows) * samples)

        rollouts = asker.ask(
            rows,
            lambda prompts, sampling: complete(engine, prompts, sampling),
            sampling_of(engine, sample),
            ended=ended,
        )
        found += [(_answer(place, sample, each), each.as_run(asker.agent)) for place, each in enumerate(rollouts)]
    found.sort(key=lambda pair: pair[0][:2])
    return Answered([answer for answer, _ in found], [run for _, run in found])


def _answer(place: int, sample: int, rollout: Rollout) -> RawAnswer:
    outcome = rollout.outcome
    drawn = sum(len(call.completion_ids) for call in rollout.calls)
    return RawAnswer(place, sample, outcome.output or "", drawn, error=outcome.error)
