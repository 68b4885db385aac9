"""What a warm start learns from recorded calls, as tokens; only a tokenizer is needed, and nothing is trained here."""

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import DataError, ModelError
from praison_agent_rl.models import load_tokenizer, plain_weights, render_messages, render_prompts
from praison_agent_rl.problems import Problems
from praison_agent_rl.recorded_calls import good_calls
from praison_agent_rl.records import Call, Run
from praison_agent_rl.run_views import text_in
from praison_agent_rl.transcripts.corrections import blank_corrections, says_nothing

_CUT = ("length", "max_tokens", "content_filter", "incomplete")
"""What a call ends with whose reply does not end by itself: an end token after it would be wrong."""

log = logging.getLogger(__name__)


class Report(Protocol):
    """Tells whoever watches; ``RunFolder.report_event`` is one."""

    def __call__(self, event: str, **facts: Any) -> None:
        """Tell of an ``event`` by its kind."""


@dataclass(frozen=True)
class Example:
    """One answer to learn, as tokens."""

    prompt_ids: list[int]
    """What the model reads, the head of its answer included."""
    completion_ids: list[int]
    """What it is to write, with one end token, the last."""

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)


def _logged(event: str, **facts: Any) -> None:
    log.warning("%s", facts.get("text", event))


def examples_of(
    calls: Iterable[Call], tokenizer: Any, *, ends: Collection[int] | None = None, report: Report = _logged
) -> list[Example]:
    """One example for each call whose reply can be learned as it is; the others are counted in a ``note``.

    Args:
        calls: Recorded calls, as a rule those of good runs.
        tokenizer: Of the model that is to learn them, with its chat template.
        ends: Tokens that end an answer; by default the tokenizer's own. Some models end turns by another, which their
            generation config names.
        report: Is told how many calls were left out, and why.

    Raises:
        ModelError: the model has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ModelError("the recorded calls are messages, but the model has no chat template; set chat_template")
    known = frozenset(ends if ends is not None else [tokenizer.eos_token_id])
    found: list[Example] = []
    left_out: Counter[str] = Counter()
    for call in calls:
        made = _example_of(call, tokenizer, known)
        if isinstance(made, Example):
            found.append(made)
        else:
            left_out[made] += 1
    if left_out:
        why = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common())
        every = len(found) + left_out.total()
        report("note", text=f"{left_out.total()} of {every} calls are left out of the warm start: {why}")
    return found


def _example_of(call: Call, tokenizer: Any, ends: frozenset[int]) -> Example | str:
    """The example, or why there is none."""
    if why := _nothing_whole(call, tokenizer):
        return why
    try:
        (prompt,) = render_prompts(tokenizer, [call.messages], call.tools)
        whole = _answered(call, tokenizer)
    except Exception:  # noqa: BLE001 - a template is the model's own code and may raise anything
        return "that the chat template refuses"
    if whole[: len(prompt)] != prompt:
        return "whose prompt the chat template renders otherwise once it is answered"
    if lost := _not_rendered(call, tokenizer, whole):
        return f"whose {lost} the chat template leaves out"
    answer = whole[len(prompt) :]
    end = next((place for place, token in enumerate(answer) if token in ends), None)
    if end is None:
        if tokenizer.eos_token_id is None:
            return "that nothing ends: the tokenizer has no end token"
        return Example(prompt, [*answer, tokenizer.eos_token_id])
    # ChatML writes a line break after the end token, other templates a second end token; no model writes either
    if tokenizer.decode(answer[end + 1 :], skip_special_tokens=True).strip():
        return "whose reply holds an end token"
    return Example(prompt, answer[: end + 1])


def _nothing_whole(call: Call, tokenizer: Any) -> str | None:
    """Why there is no whole reply to learn, whatever the chat template; None if there is one."""
    reply = call.reply
    if reply is None or call.error is not None or not (reply.get("content") or reply.get("tool_calls")):
        return "without a reply"
    if call.partial or call.finish in _CUT:
        return "whose reply was cut"
    if not all(map(_has_arguments, reply.get("tool_calls") or [])):
        return "whose arguments for a tool are no JSON object"
    return None if reply.get("tool_calls") or _is_seen(reply.get("content"), tokenizer) else "whose reply says nothing"


def _has_arguments(called: Any) -> bool:
    """Whether a call of a tool can be read: an agent may have been told of its fault, and have asked again."""
    function = called.get("function") if isinstance(called, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
    return False


def _is_seen(content: Any, tokenizer: Any) -> bool:
    """Whether a message's content is more than white space and special tokens."""
    ids = tokenizer(text_in(content), add_special_tokens=False)["input_ids"]
    return not says_nothing(tokenizer.decode(ids, skip_special_tokens=True))


def _answered(call: Call, tokenizer: Any, **changes: Any) -> list[int]:
    """The conversation with its reply, or with one that differs by ``changes``."""
    reply = {"role": "assistant", **(call.reply or {}), **changes}
    return render_messages(tokenizer, [*call.messages, reply], call.tools, opened=False)


def _not_rendered(call: Call, tokenizer: Any, whole: list[int]) -> str | None:
    """The part of a reply without which the ``whole`` conversation is rendered alike; None if each shows."""
    content, calls = (call.reply or {}).get("content"), (call.reply or {}).get("tool_calls") or []
    parts: list[tuple[str, dict[str, Any]]] = [("text", {"content": ""})] if _is_seen(content, tokenizer) else []
    parts += [("calls of tools", {"tool_calls": calls[:n] + calls[n + 1 :]}) for n in range(len(calls))]
    for name, without in parts:
        with contextlib.suppress(Exception):  # a template that refuses the rest has not left the part out
            if _answered(call, tokenizer, **without) == whole:
                return name
    return None


def fitting(examples: Sequence[Example], longest: int, report: Report) -> list[Example]:
    """The examples of at most ``longest`` tokens; those left out are counted in a ``note``.

    Raises:
        DataError: there is none.
    """
    if not examples:
        raise DataError(
            "the warm start has no examples: no recorded call can be learned from. Record or rate some runs, or set "
            "warm_start to 0"
        )
    kept = [one for one in examples if one.length <= longest]
    if not kept:
        raise DataError(
            f"none of the {len(examples)} examples of the warm start fits into max_seq_length {longest} tokens; "
            "raise it, or set warm_start to 0"
        )
    if len(kept) < len(examples):
        text = f"{len(examples) - len(kept)} of {len(examples)} examples of the warm start have more than {longest} "
        report("note", text=text + "tokens (max_seq_length) and are left out")
    return kept


def calls_to_keep(agent: Any, runs: Sequence[Run], config: TrainConfig, base: str, *, problems: Problems) -> list[Call]:
    """The calls of good ``runs`` of ``agent``; what a warm start of ``base`` lacks goes to ``problems``."""
    calls = good_calls(runs)
    if config.warm_start and not calls:
        problems.found.append(
            DataError(
                f"warm_start is {config.warm_start}, but no good runs of agent {getattr(agent, 'name', None)!r} are "
                "recorded to start from; record some (agent.record()), or set warm_start to 0"
            )
        )
    elif config.warm_start:
        problems.attempt(lambda: check_examples(calls, base, config))
    return calls


def notes_on(runs: Sequence[Run], config: TrainConfig) -> list[str]:
    """What is to be said of recorded runs before a warm start begins with them."""
    blank = blank_corrections(runs) if config.warm_start else 0
    return [f"{blank} corrections of recorded runs say nothing, and the warm start passes them over"] if blank else []


def check_examples(calls: Sequence[Call], base: str, config: TrainConfig) -> None:
    """Say beforehand that a warm start would have nothing to learn; no model is loaded.

    Raises:
        DataError: none of ``calls`` can be learned from, and why; or none that can fits into ``max_seq_length``.
        ModelError: the model has no chat template.
    """
    tokenizer, notes = load_tokenizer(plain_weights(base), config), list[str]()
    made = (_example_of(call, tokenizer, frozenset([tokenizer.eos_token_id])) for call in calls)
    if any(isinstance(one, Example) and one.length <= config.max_seq_length for one in made):
        return

    def note(event: str, **facts: Any) -> None:
        notes.append(str(facts.get("text", event)))

    try:
        fitting(examples_of(calls, tokenizer, report=note), config.max_seq_length, note)
    except DataError as error:
        raise DataError("; ".join([str(error), *notes])) from error
