"""Answers with tools on a model that this process has, as TRL's own loop makes them in training: rounds of calls.

Held-out prompts are asked so in ``rollout: tools``; while it trains, TRL runs the tools.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from praison_agent_rl.agent_rollouts.answers import Answered
from praison_agent_rl.agent_rollouts.tool_answers import meant, telling, told_absent
from praison_agent_rl.agent_rollouts.tool_texts import ToolWords
from praison_agent_rl.answering import Engine, Progress, RawAnswer, complete, sampling_of
from praison_agent_rl.data import as_messages
from praison_agent_rl.environments import noted
from praison_agent_rl.episodes import score_of_episode, settled
from praison_agent_rl.errors import ModelError
from praison_agent_rl.records import Call, Run
from praison_agent_rl.rollouts import Sampling

_BATCH = 32


class Toolbox(NamedTuple):
    """What a model may call while it answers one prompt."""

    functions: Mapping[str, Callable[..., Any]]
    schemas: Sequence[dict[str, Any]]
    observation: str | None = None
    """What an environment adds to the prompt."""
    environment: Any = None
    fault: str | None = None
    """Why there is nothing to act in."""


Boxes = Callable[[Mapping[str, Any]], Toolbox]
"""The tools for a row."""


@dataclass
class _Talk:
    """A conversation on its way."""

    messages: list[dict[str, Any]]
    box: Toolbox
    ids: list[int] = field(default_factory=list)
    """Tokens of what is asked next."""
    start: int = 0
    """How many the prompt had."""
    calls: list[Call] = field(default_factory=list)
    drawn: int = 0
    over: bool = False
    error: str | None = None

    def left(self, most: int) -> int:
        """Tokens that may still come, of ``most`` after the prompt, results of tools included."""
        return most - (len(self.ids) - self.start)


def answers_with_tools(
    engine: Engine,
    rows: Sequence[Mapping[str, Any]],
    boxes: Boxes,
    *,
    samples: int,
    rounds: int,
    progress: Progress = lambda done, of: None,
) -> Answered:
    """``samples`` answers to each row, in the order of rows and samples; tools run at most ``rounds`` times in each."""
    import torch

    found: list[tuple[RawAnswer, Run]] = []
    for sample in range(samples):
        torch.manual_seed(engine.config.seed + sample)
        talks = _talks(engine, rows, boxes, sampling_of(engine, sample), rounds)
        found += [(_answer(place, sample, talk), _run(place, sample, talk)) for place, talk in enumerate(talks)]
        progress(len(found), len(rows) * samples)
    found.sort(key=lambda pair: pair[0][:2])
    return Answered([answer for answer, _ in found], [run for _, run in found])


def _talks(
    engine: Engine, rows: Sequence[Mapping[str, Any]], boxes: Boxes, sampling: Sampling, rounds: int
) -> list[_Talk]:
    words = ToolWords(engine.tokenizer)
    talks = [_begun(row, boxes(row)) for row in rows]
    for place in range(rounds + 1):
        waiting = [talk for talk in talks if _can_ask(talk, words, engine)]
        waiting.sort(key=lambda talk: len(talk.ids))
        for start in range(0, len(waiting), _BATCH):
            part = waiting[start : start + _BATCH]
            sampled = complete(engine, [talk.ids for talk in part], sampling)
            for talk, ids in zip(part, sampled.ids, strict=True):
                _hear(talk, ids[: talk.left(sampling.max_tokens)], words, last=place == rounds)
    return talks


def _begun(row: Mapping[str, Any], box: Toolbox) -> _Talk:
    messages = [dict(message) for message in as_messages(row["prompt"])]
    if box.observation is not None:
        messages[-1]["content"] = _joined(messages[-1].get("content") or "", box.observation)
    return _Talk(messages, box, over=box.fault is not None, error=box.fault)


def _joined(content: Any, observation: str) -> Any:
    """A message's content, text or parts, and what an environment adds, as TRL joins them (``reset``'s caller)."""
    return content + observation if isinstance(content, str) else [*content, {"type": "text", "text": observation}]


def _can_ask(talk: _Talk, words: ToolWords, engine: Engine) -> bool:
    """Whether a conversation goes on; its next tokens are rendered then."""
    if talk.over:
        return False
    try:
        talk.ids = words.render(talk.messages, talk.box.schemas)
    except ModelError as error:
        talk.error, talk.over = str(error), True
        return False
    talk.start = talk.start or len(talk.ids)
    if talk.start > engine.room:
        talk.error = f"the prompt is longer than {engine.room} tokens"
    talk.over = talk.error is not None or talk.left(engine.config.max_completion_length) <= 0
    return not talk.over


def _hear(talk: _Talk, ids: list[int], words: ToolWords, *, last: bool) -> None:
    """Keep an answer, and run what it calls."""
    reply = words.parse(talk.ids, ids, talk.box.schemas)
    finish = "tool_calls" if reply.get("tool_calls") else "stop"
    number = len(talk.calls)
    talk.calls.append(Call(id=str(number), time=time.time(), messages=list(talk.messages), reply=reply, finish=finish))
    talk.drawn += len(ids)
    talk.messages.append(reply)
    calls = reply.get("tool_calls") or []
    talk.over = last or not calls
    if not talk.over:
        talk.messages += [_result(call, talk.box.functions) for call in calls]


def _result(call: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """What a tool gives; a failure is told the model too, as TRL tells it."""
    function = call.get("function") or {}
    name = str(function.get("name"))
    known = meant(name, functions.keys())
    if known is None:
        return {"role": "tool", "name": name, "content": told_absent(name, functions)}
    try:
        arguments = function.get("arguments") or {}
        named = json.loads(arguments) if isinstance(arguments, str) else arguments
        result: Any = settled(telling(functions[known])(**named))
    except Exception as error:  # noqa: BLE001 - a tool is a user's code, and the model may call it wrongly
        result = {"error": str(error)}
    return {"role": "tool", "name": name, "content": str(result)}


def _answer(place: int, sample: int, talk: _Talk) -> RawAnswer:
    reply = talk.calls[-1].reply if talk.calls else None
    return RawAnswer(place, sample, str((reply or {}).get("content") or ""), talk.drawn, error=talk.error)


def _run(place: int, sample: int, talk: _Talk) -> Run:
    output = _answer(place, sample, talk).text or None
    began = talk.calls[0].time if talk.calls else 0.0
    run = Run(id=f"{place}-{sample}", style="tools", time=began, output=output, error=talk.error, calls=talk.calls)
    return noted(score_of_episode(talk.box.environment), run)
