"""Join the calls of a rollout into sequences of tokens: what the policy drew, and what was put between.

A call extends another if its prompt begins with all tokens of the other, prompt and completion alike; what follows
there (results of tools, the template's marks) was read and not drawn. Where an agent rewrote what was said, or its
template renders an answer otherwise than it was drawn, a call begins a sequence of its own: that is what the deployed
model is given too, so it is what is trained on.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from praison_agent_rl.agent_rollouts.jobs import Rollout, TokenCall

Credit = Literal["last", "all", "discounted"]
NO_CALL = -1


@dataclass
class TokenSequence:
    """A prompt and what follows it in one or more calls of a rollout."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    """Everything after the first prompt, drawn or put there."""
    drawn: list[int] = field(default_factory=list)
    """1 for each token of it that the policy drew, 0 for the others."""
    log_probs: list[float] | None = field(default_factory=list)
    """Of the drawn tokens by the sampler, 0 for the others; None if they are not known."""
    calls: list[int] = field(default_factory=list)
    """Places of its calls among those of the rollout."""
    call_of: list[int] = field(default_factory=list)
    """For each token of the completion the place of the call that drew it, or ``NO_CALL``."""
    cut: bool = False
    """Whether it ends on an answer that reached its limit, or on a call of a tool that nothing answered."""

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return self.prompt_ids + self.completion_ids

    def add(self, place: int, call: TokenCall) -> None:
        """Append a call whose prompt begins with all tokens so far."""
        known = len(self.prompt_ids) + len(self.completion_ids)
        between, drawn = call.prompt_ids[known:], call.completion_ids
        self.completion_ids += between + drawn
        self.drawn += [0] * len(between) + [1] * len(drawn)
        if call.log_probs is None or self.log_probs is None:
            self.log_probs = None
        else:
            self.log_probs += [0.0] * len(between) + call.log_probs
        self.call_of += [NO_CALL] * len(between) + [place] * len(drawn)
        self.calls.append(place)
        self.cut = _is_cut(call)

    def is_extended_by(self, call: TokenCall) -> bool:
        """Whether the prompt of ``call`` begins with all tokens of this sequence, and has more."""
        known = len(self.prompt_ids) + len(self.completion_ids)
        if len(call.prompt_ids) <= known:
            return False
        first = len(self.prompt_ids)
        return call.prompt_ids[:first] == self.prompt_ids and call.prompt_ids[first:known] == self.completion_ids


def join_calls(rollout: Rollout, trained: Collection[str] | None = None) -> list[TokenSequence]:
    """The sequences of a rollout, in the order of their last calls; only of agents in ``trained``, if that is given.

    A call that failed has drawn nothing and is passed over. The answer of an agent that is not trained is none of the
    policy's doing, so its calls are left out.
    """
    sequences: list[TokenSequence] = []
    for place, call in enumerate(rollout.calls):
        if not call.completion_ids or (trained is not None and call.agent not in trained):
            continue
        longer = next((known for known in reversed(sequences) if known.is_extended_by(call)), None)
        if longer is None:
            longer = TokenSequence(list(call.prompt_ids))
        else:
            sequences.remove(longer)
        longer.add(place, call)
        sequences.append(longer)
    return sequences


def credits_of(sequences: Sequence[TokenSequence], rule: Credit, discount: float = 1.0) -> list[float]:
    """Which share of a run's advantage each of its sequences gets.

    ``last``: the one that ends the run, all of it, and the others nothing. ``all``: each all of it. ``discounted``: the
    last all of it, the one before ``discount`` of that, and so on.

    >>> credits_of([TokenSequence([1]), TokenSequence([2]), TokenSequence([3])], "discounted", 0.5)
    [0.25, 0.5, 1.0]
    """
    count = len(sequences)
    if rule == "last":
        return [0.0] * (count - 1) + [1.0] * min(count, 1)
    return [1.0 if rule == "all" else discount ** (count - 1 - place) for place in range(count)]


def _is_cut(call: TokenCall) -> bool:
    """Whether an answer reached its limit or calls a tool; a later call, if there is one, shows it was answered."""
    reply = call.call.reply or {}
    return call.call.finish == "length" or bool(reply.get("tool_calls"))
