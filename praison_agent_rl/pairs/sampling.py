"""Pairs from answers that are sampled: the model beneath an agent answers recorded prompts, and rewards score it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from praison_agent_rl.answering import Engine, Manner, RawAnswer, answer_rows, load_engine
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, sample
from praison_agent_rl.dataset_building import BuildOptions, BuiltDataset, build_from, source_of
from praison_agent_rl.dataset_building.pairs import Asked, Scored
from praison_agent_rl.errors import ModelError, RewardError
from praison_agent_rl.evaluation import score_answers
from praison_agent_rl.libraries import library_versions
from praison_agent_rl.models import find_weights, require_training_stack, weights_beneath
from praison_agent_rl.planning import best_device
from praison_agent_rl.records import Answer, Plan, Record, Run
from praison_agent_rl.rewards import Reward, listed_specs, prepare, resolve_all
from praison_agent_rl.runs import now

_AT_ONCE = 64
"""Prompts whose answers are held at once."""


class Sampling(Record):
    """Who answers, how often, and what scores the answers."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: Any
    """The agent itself, or the weights beneath it: hub name, folder, GGUF."""
    reward_funcs: Any
    """As in a configuration: ``module:function`` texts, callables, mappings; judges too."""
    samples: int = Field(default=4, ge=2, le=64)
    """Answers to each prompt: the first greedy, the others sampled at ``temperature``."""
    prompts: int = Field(default=200, ge=1)
    """Prompts at most, the first that were recorded; on a CPU an answer may take seconds."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of a configuration: ``temperature``, ``max_completion_length``, ``chat_template``, ..."""


def sample_pairs(
    sampling: Sampling,
    store: str | Path | None = None,
    *,
    out: str | Path | None = None,
    options: BuildOptions | None = None,
    runs: Iterable[Run] | None = None,
) -> BuiltDataset:
    """As ``build_dataset(kind="pairs")``, with the best against the worst of sampled answers to each recorded prompt.

    Give ``BuildOptions(sources=())`` for sampled pairs alone, and ``min_margin`` for the least difference of scores.

    Raises:
        DataError: as `build_dataset`.
        RewardError: a reward cannot be found, or fails on too many answers.
        ModelError: the weights are not there, or have no chat template.
    """
    if not listed_specs(sampling.reward_funcs):
        raise RewardError(f"reward_funcs={sampling.reward_funcs!r}: sampled answers need at least one reward or judge")
    resolve_all(sampling.reward_funcs)
    config = TrainConfig.load(sampling.config, need_model=False, need_data=False)
    model = sampling.model
    source = find_weights(model) if isinstance(model, str) else weights_beneath(model)
    require_training_stack()
    options = options or BuildOptions(kind="pairs")
    if options.kind != "pairs":
        options = BuildOptions.model_validate({**options.model_dump(), "kind": "pairs"})
    plan = _plan(source, config)

    def sampler(asked: Iterator[Asked]) -> Iterator[list[Scored]]:
        return _answered(islice(asked, sampling.prompts), sampling, plan)

    return build_from(source_of(store, runs), options, out=out, sampler=sampler)


def _plan(source: str, config: TrainConfig) -> Plan:
    """What the engine that answers is told."""
    facts: dict[str, Any] = {"rewards": [], "notes": [], "libraries": library_versions(), "created": now()}
    return Plan(base=source, config=config.resolved(), device=best_device(), **facts)


def _answered(asked: Iterator[Asked], sampling: Sampling, plan: Plan) -> Iterator[list[Scored]]:
    """The answers to each prompt with their scores; rewards are tried before the model loads."""
    chunk = list(islice(asked, _AT_ONCE))
    if not chunk:
        return
    prompts, columns = sample(_rows(chunk))
    rewards = prepare(sampling.reward_funcs, prompts=prompts, columns=columns)
    engine = load_engine(plan.base, plan)
    if engine.tokenizer.chat_template is None:
        raise ModelError(
            f"{plan.base!r} has no chat template, and recorded prompts are messages; set chat_template in config"
        )
    while chunk:
        rows = _rows(chunk)
        yield from _scored(_raw_answers(engine, chunk, sampling.samples), rows, rewards)
        chunk = list(islice(asked, _AT_ONCE))


def _rows(chunk: Sequence[Asked]) -> list[Row]:
    return [{"prompt": asked.prompt, **asked.columns} for asked in chunk]


def _raw_answers(engine: Engine, chunk: Sequence[Asked], samples: int) -> list[RawAnswer]:
    """Answers to all prompts in their order; those with the same tools are asked together."""
    places: dict[str, list[int]] = {}
    for place, asked in enumerate(chunk):
        places.setdefault(json.dumps(asked.tools, sort_keys=True), []).append(place)
    found: list[RawAnswer] = []
    for group in places.values():
        manner = Manner(samples, chunk[group[0]].tools, strict=False)
        rows = [{"prompt": chunk[place].prompt} for place in group]
        found += [answer._replace(prompt=group[answer.prompt]) for answer in answer_rows(engine, rows, manner)]
    return sorted(found)


def _scored(raw: Sequence[RawAnswer], rows: Sequence[Row], rewards: Sequence[Reward]) -> Iterator[list[Scored]]:
    answers: list[list[Answer]] = [[] for _ in rows]
    for answer in score_answers(raw, rows, rewards):
        answers[answer.prompt].append(answer)
    return map(_comparable, answers)


def _comparable(answers: Sequence[Answer]) -> list[Scored]:
    """An answer that lacks a score that others to the same prompt have cannot be compared with them by its total."""
    judging = {name for answer in answers for name, score in answer.rewards.items() if score is not None}
    return [
        (answer.text, answer.total if all(answer.rewards.get(name) is not None for name in judging) else None)
        for answer in answers
    ]
