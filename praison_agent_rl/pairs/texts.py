"""A preference pair as token ids: one rendering for training, for measuring and for scoring; it loads no weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from praison_agent_rl.data_files import Row
from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import render_messages

SIDES = ("chosen", "rejected")

Text = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Rendered:
    """A prompt and an answer to it as one sequence of tokens."""

    ids: list[int]
    learned: list[bool]
    """Whether the model itself writes that token: false for the prompt, tool results and headers."""

    @property
    def answer(self) -> list[int]:
        """The tokens that the model writes."""
        return [token for token, own in zip(self.ids, self.learned, strict=True) if own]


def explicit(row: Row) -> Row:
    """The row with a prompt of its own, where it stands at the head of both answers.

    >>> turn, a, b = ({"role": r, "content": c} for r, c in (("user", "Hi"), ("assistant", "A"), ("assistant", "B")))
    >>> explicit({"chosen": [turn, a], "rejected": [turn, b]})["prompt"]
    [{'role': 'user', 'content': 'Hi'}]
    """
    chosen, rejected = row["chosen"], row["rejected"]
    if row.get("prompt") is not None or isinstance(chosen, str) or isinstance(rejected, str):
        return row  # of text without a prompt nothing says where the answer begins: it is scored as a whole
    # the answers begin where the two part, or with the last message if one merely goes on
    most = min(len(chosen), len(rejected)) - 1
    shared = next((place for place in range(most) if chosen[place] != rejected[place]), most)
    while shared and chosen[shared - 1].get("role") in ("assistant", "tool"):
        shared -= 1
    return {**row, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def render_answer(tokenizer: Any, prompt: Text, answer: Text, *, tools: Sequence[dict[str, Any]] = ()) -> Rendered:
    """The sequence that a model is trained on, or scores, for ``answer`` to ``prompt``.

    It ends with one end token. Of messages each assistant turn is what the model learns, up to its end token; what
    stands between two of them, tool results among it, is only read.

    Raises:
        ModelError: messages for a model without a chat template, or a template that refuses them.
    """
    if isinstance(prompt, str) and isinstance(answer, str):
        return _plain(tokenizer, prompt, answer)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else list(answer)
    ids = _templated(tokenizer, [*before, *after], tools, opened=False)
    learned = [False] * len(ids)
    for place, message in enumerate(after):
        if message.get("role") != "assistant":
            continue
        start = _shared(ids, _templated(tokenizer, [*before, *after[:place]], tools, opened=True))
        stop = _shared(ids, _templated(tokenizer, [*before, *after[: place + 1]], tools, opened=False))
        stop = _after_end(ids, start, stop, tokenizer.eos_token_id)
        learned[start:stop] = [True] * (stop - start)
    last = max((place for place, own in enumerate(learned) if own), default=len(ids) - 1)
    ids, learned = ids[: last + 1], learned[: last + 1]
    if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids, learned = [*ids, tokenizer.eos_token_id], [*learned, True]
    return Rendered(ids, learned)


def render_pairs(
    tokenizer: Any, rows: Iterable[Row], *, tools: Sequence[dict[str, Any]] = ()
) -> list[tuple[Rendered, Rendered]]:
    """The chosen and the rejected side of each row; a row's own ``tools`` go before those given for all."""
    rendered = []
    for row in map(explicit, rows):
        shown = row.get("tools") or tools
        chosen, rejected = (render_answer(tokenizer, row.get("prompt") or "", row[side], tools=shown) for side in SIDES)
        rendered.append((chosen, rejected))
    return rendered


def _plain(tokenizer: Any, prompt: str, answer: str) -> Rendered:
    before = list(tokenizer(prompt)["input_ids"]) if prompt else []
    after = list(tokenizer(answer, add_special_tokens=not prompt)["input_ids"])
    if not after or after[-1] != tokenizer.eos_token_id:
        after = [*after, tokenizer.eos_token_id]
    return Rendered(before + after, [False] * len(before) + [True] * len(after))


def _templated(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], *, opened: bool
) -> list[int]:
    if tokenizer.chat_template is None:
        raise ModelError("the pairs are messages, but the model has no chat template; set chat_template")
    try:
        return render_messages(tokenizer, messages, tools, opened=opened)
    except Exception as error:  # a template is the model's own code and may raise anything
        raise ModelError(f"the chat template refuses a pair: {type(error).__name__}: {error}") from error


def _shared(left: list[int], right: list[int]) -> int:
    """Length of the beginning that two sequences share: some templates render what came before in another way."""
    return next(
        (n for n, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
        min(map(len, (left, right))),
    )


def _after_end(ids: list[int], start: int, stop: int, eos: int | None) -> int:
    """The place after the last end token of a turn: ChatML writes a line break after it, which no model writes."""
    return next((place + 1 for place in reversed(range(start, stop)) if ids[place] == eos), stop)
