"""The least time that a GRPO step's arithmetic takes on this machine, and the share of a step that lies above it."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.weight_files import read_config

from .step import Cell
from .workers import in_turn, started

Shape = tuple[int, int, int]
"""Rows, inner width and columns of a product of matrices."""


class Sizes(NamedTuple):
    """The shapes of a model's layers."""

    layers: int
    width: int
    inner: int
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together; the values' is the same."""
    vocabulary: int
    rank: int
    """Rank of the adapter on each linear layer."""

    @property
    def linear(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of one block."""
        attention = [(self.width, self.queries), *[(self.width, self.keys)] * 2, (self.queries, self.width)]
        return [*attention, *[(self.width, self.inner)] * 2, (self.inner, self.width)]


def sizes_of(folder: str, rank: int = 16) -> Sizes:
    """The sizes in a model's ``config.json``."""
    known = read_config(folder)
    heads = int(known["num_attention_heads"])
    width = int(known["hidden_size"])
    head = int(known.get("head_dim") or width // heads)
    keys = int(known.get("num_key_value_heads") or heads) * head
    layers, inner = int(known["num_hidden_layers"]), int(known["intermediate_size"])
    return Sizes(layers, width, inner, heads * head, keys, int(known["vocab_size"]), rank)


def products(sizes: Sizes, *, prompt: int, group: int, new: int) -> list[tuple[Shape, float]]:
    """Every product of a step in which the prompt is computed once, and how often it is made.

    A linear layer of a token is inputs x outputs multiply-adds, forward; backward as many for the gradient by its input
    and as many for that by its weights (Kaplan et al. 2020, arXiv 2001.08361, sec. 2.1 and table 1; here the weights
    are frozen, so the latter is the adapter's alone). The embedding is a look-up and costs nothing. The head is
    multiplied for the tokens that are sampled or scored, and for no token of the prompt.

    - sampling, the adapter merged: the prompt in one product, then ``new - 1`` products of ``group`` rows, and ``new``
      of the head;
    - scoring, forward and backward: the prompt and ``group x (new - 1)`` tokens in one product each, with the adapter's
      two thin ones beside each layer (forward 1, backward 2), and the head twice for ``group x new`` tokens.
    """
    scored = group * (new - 1)
    found: list[tuple[Shape, float]] = []
    for inputs, outputs in sizes.linear:
        found.append(((prompt, inputs, outputs), sizes.layers))
        found.append(((group, inputs, outputs), sizes.layers * (new - 1)))
        for rows in (prompt, scored):
            if rows:
                found += [((rows, inputs, outputs), sizes.layers), ((rows, outputs, inputs), sizes.layers)]
                thin = [
                    ((rows, inputs, sizes.rank), 3.0 * sizes.layers),
                    ((rows, sizes.rank, outputs), 3.0 * sizes.layers),
                ]
                found += thin
    found.append(((group, sizes.width, sizes.vocabulary), new))
    found.append(((group * new, sizes.width, sizes.vocabulary), 1))
    found.append(((group * new, sizes.vocabulary, sizes.width), 1))
    return found


def attention_products(sizes: Sizes, *, prompt: int, group: int, new: int) -> float:
    """Multiply-adds of attention in a step: scores and weighted sum, 2 x width of the queries for each pair of tokens.

    Pairs: a prompt's ``prompt^2 / 2`` and, of each completion's token, all before it; once in sampling, and three times
    in scoring, of which two are backward (Kaplan et al., table 1; halved, since no token sees what follows it).

    >>> tiny = Sizes(layers=1, width=1, inner=1, queries=1, keys=1, vocabulary=1, rank=1)
    >>> attention_products(tiny, prompt=2, group=1, new=1)
    16.0
    """
    pairs = prompt**2 / 2 + group * sum(prompt + place for place in range(1, new))
    return 4 * 2.0 * sizes.layers * sizes.queries * pairs


def multiply_adds(found: Iterable[tuple[Shape, float]]) -> float:
    """Multiply-adds of products that are made so often.

    >>> multiply_adds([((2, 3, 4), 10)])
    240
    """
    return sum(rows * inner * columns * times for (rows, inner, columns), times in found)


def measure(model: str, cells: Sequence[Cell], *, seconds: float, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each cell: the floor, measured in turn with steps of this package in float32."""
    sizes, new = sizes_of(options["folder"]), int(options["new_tokens"])
    lines = []
    for prompt, group in cells:
        needed = products(sizes, prompt=prompt, group=group, new=new)
        shapes = sorted({shape for shape, _ in needed})
        job = {"model": options["folder"], "home": options["home"], "prompt_tokens": prompt, "group": group}
        jobs: dict[str, tuple[str, Mapping[str, Any]]] = {
            "products": ("floor_worker", {"shapes": shapes}),
            "step": ("step_worker", {**job, "variant": "ours", "new_tokens": new}),
        }
        with started(jobs, Path(options["home"]) / "log") as workers:
            found = in_turn(workers, seconds=seconds, most=4)
            failed = workers["step"].failed or workers["products"].failed
        if failed or len(found["step"]) < 2:
            lines.append({"model": model, "prompt_tokens": prompt, "group": group, "failed": failed or "too few steps"})
            continue
        by_shape = [
            statistics.median(times) for times in zip(*(m["seconds"] for m in found["products"][1:]), strict=True)
        ]
        took = dict(zip(shapes, by_shape, strict=True))
        attention = attention_products(sizes, prompt=prompt, group=group, new=new)
        best = max(rows * inner * columns / took[(rows, inner, columns)] for rows, inner, columns in shapes)
        floor = sum(took[shape] * times for shape, times in needed) + attention / best
        step = statistics.median(m["seconds"] for m in found["step"][1:])
        lines.append({"model": model, "prompt_tokens": prompt, "group": group, "new_tokens": new, "step": step,
                      "floor": floor, "above": 1 - floor / step, "multiply_adds": multiply_adds(needed) + attention,
                      "best_rate": best, "failed": None})  # fmt: skip
    return lines


def tables(lines: list[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """The floor beside the step."""
    head = ["model", "prompt", "G", "multiply-adds, 1e9", "best rate, 1e9/s", "floor, s", "step, s", "above the floor"]
    body = []
    for line in lines:
        place = [line["model"], str(line["prompt_tokens"]), str(line["group"])]
        if line["failed"]:
            body.append([*place, line["failed"], "", "", "", ""])
            continue
        counts = [f"{line['multiply_adds'] / 1e9:.0f}", f"{line['best_rate'] / 1e9:.0f}"]
        body.append([*place, *counts, f"{line['floor']:.2f}", f"{line['step']:.2f}", f"{line['above']:.0%}"])
    return [(head, body)]
