"""Whether the trainer and the server that answers later read and say the same; nothing is drawn or trained here."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from praison_agent_rl.errors import MissingExtra, ModelError
from praison_agent_rl.models import render_prompts
from praison_agent_rl.records import Call, Record

MOST_CALLS = 64
"""Recorded calls that are rendered both ways before a run; they are taken evenly from all."""

Rendering = Callable[[Call], list[int]]
"""The tokens that a server makes of a recorded request; raises ModelError for one that it refuses."""

_BEFORE, _AFTER = 60, 120
"""Letters of both renderings that are shown before the place at which they part, and after it."""


class Difference(Record):
    """A recorded call that the trainer renders otherwise than the server."""

    call: str
    """Its id."""
    place: int
    """The first token that differs, from 0."""
    before: str
    """The end of what both have."""
    trainer: str
    """What the trainer has next."""
    server: str

    def shown(self) -> str:
        """As a short unified diff; line breaks and the like are written as in Python."""
        return "\n".join(
            [
                "--- trainer",
                "+++ server",
                f"@@ call {self.call}, token {self.place} @@",
                f" {_escaped(self.before)}",
                f"-{_escaped(self.trainer)}",
                f"+{_escaped(self.server)}",
            ]
        )


def check_parity(tokenizer: Any, calls: Sequence[Call], *, allowed: bool = False) -> list[str]:
    """Compare how recorded calls are rendered here and by ``transformers serve``; returns notes.

    Raises:
        MissingExtra: there is no ``transformers serve``.
        ModelError: some are rendered otherwise, and that is not ``allowed``.
    """
    sample = calls[:: max(1, math.ceil(len(calls) / MOST_CALLS))]
    differences, refusals = _compared(tokenizer, sample, partial(rendered_by_transformers_serve, tokenizer))
    notes = []
    if refusals:
        notes.append(
            f"{len(refusals)} of {len(sample)} recorded calls were not compared with what a server would render: "
            f"{refusals[0]}"
        )
    if not differences:
        return notes
    text = (
        f"the trainer renders {len(differences)} of {len(sample)} recorded calls otherwise than transformers serve "
        "does, so the model would be trained on prompts that the deployed agent never sends; the first of them:\n"
        f"{differences[0].shown()}"
    )
    if not allowed:
        raise ModelError(f"{text}\nPut right what differs, or train all the same with parity: allow")
    return [*notes, text]


def recorded_against_rendered(
    tokenizer: Any, calls: Sequence[Call], rendered_by_server: Rendering | None = None
) -> list[Difference]:
    """The calls whose prompts the trainer renders otherwise than the server does, token by token.

    Without ``rendered_by_server`` the server is ``transformers serve``. A call that either of the two refuses is not
    compared.
    """
    return _compared(tokenizer, calls, rendered_by_server or partial(rendered_by_transformers_serve, tokenizer))[0]


def rendered_by_transformers_serve(tokenizer: Any, call: Call) -> list[int]:
    """The tokens that ``transformers serve`` makes of the request, by its own function and its call of the template.

    Raises:
        MissingExtra: there is no ``transformers serve``.
        ModelError: it refuses the request.
    """
    try:
        from transformers.cli.serving.utils import BaseHandler, Modality
    except ImportError as error:
        raise MissingExtra(f'transformers serve needs {error.name}: pip install "praison-agent-rl[train]"') from error
    try:
        encoded = tokenizer.apply_chat_template(
            BaseHandler.get_processor_inputs_from_messages(call.messages, Modality.LLM),
            add_generation_prompt=True,
            tools=call.tools or None,
            return_dict=True,
            tokenize=True,
            load_audio_from_video=False,
            **(call.settings.get("chat_template_kwargs") or {}),
        )
    except Exception as error:  # a template is the model's own code and may raise anything
        raise ModelError(f"transformers serve refuses it: {type(error).__name__}: {error}") from error
    return list(encoded["input_ids"])


def likelihood_gap(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How far two sides lie apart in what they say of the same drawn tokens: mean absolute difference, nats a token.

    ``theirs`` are natural log-probabilities by the served model, ``ours`` those by the trainer.

    Raises:
        ModelError: there are no tokens, or not as many on both sides.
    """
    if not theirs or len(theirs) != len(ours):
        raise ModelError(
            f"the served model gave {len(theirs)} log-probabilities and the trainer {len(ours)}; they must be as "
            "many, and at least one"
        )
    return math.fsum(abs(a - b) for a, b in zip(theirs, ours, strict=True) if a != b) / len(ours)


def check_gap(gap: float, tolerance: float) -> str | None:
    """What to say of a gap above the tolerance, both in nats a token; None for one within it."""
    if gap <= tolerance:  # never true of NaN
        return None
    return (
        f"the served model and the trainer lie {gap:.3g} nats a token apart on sampled rollouts, more than the "
        f"{tolerance:g} that is allowed: what answers is not what was trained"
    )


def _compared(tokenizer: Any, calls: Sequence[Call], rendered: Rendering) -> tuple[list[Difference], list[str]]:
    """What differs, and why calls could not be compared."""
    differences, refusals = [], []
    for call in calls:
        try:
            served = rendered(call)
            (trained,) = render_prompts(tokenizer, [call.messages], call.tools)
        except ModelError as error:
            refusals.append(f"call {call.id}: {error}")
            continue
        if served != trained:
            differences.append(_difference(tokenizer, call.id, trained, served))
    return differences, refusals


def _difference(tokenizer: Any, call: str, trained: list[int], served: list[int]) -> Difference:
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(trained, served, strict=False)))
    return Difference(
        call=call,
        place=place,
        before=tokenizer.decode(trained[:place])[-_BEFORE:],
        trainer=tokenizer.decode(trained[place:])[:_AFTER],
        server=tokenizer.decode(served[place:])[:_AFTER],
    )


def _escaped(text: str) -> str:
    return repr(text)[1:-1]
