"""Run prompts and the completions that follow them as one sequence in which every token stands once, with gradients.

Tokens are laid out so that those of whatever is shared are followed by all that share it. What a token attends to is
then a few slices of that sequence: its own piece, causally, and the pieces before it, in full. Each slice goes through
PyTorch's flash attention for CPUs, and the parts are merged by the logarithms of their sums (the shared-prefix
decomposition of Hydragen, arXiv 2402.05099). Nothing is copied for each row, padded or masked.
"""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from transformers import AttentionInterface

NAME = "praison_agent_rl_shared"
"""What this attention is called among those of transformers."""
_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models ask of an attention and this one does not do."""
_UNFIT: WeakSet[Any] = WeakSet()
"""Models that were found not to go through this attention, so that none is tried at every step."""

log = logging.getLogger(__name__)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  the public one tells no sums
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


class Part(NamedTuple):
    """Tokens that attend to other tokens of the sequence, or to themselves."""

    queries: slice
    keys: slice
    causal: bool
    """Whether both are the same tokens, each of which attends to itself and those before it."""


class Layout:
    """Prompts and completions one behind another, whatever is shared directly before all that follows it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Token ids."""
        self.positions: list[int] = []
        """Place of each token in its own sequence, from 0."""
        self.calls = 0
        """Layers that attended by this layout."""
        self._own: list[Part] = []
        self._before: list[Part] = []

    @property
    def parts(self) -> list[Part]:
        """All attention; those of tokens to themselves come first and cover every token once."""
        return self._own + self._before

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.positions) + 1

    @contextmanager
    def shared(self, tokens: Sequence[int], position: int) -> Iterator[None]:
        """Lay out ``tokens`` from ``position`` on, followed by all that is laid out inside."""
        piece = slice(len(self.ids), len(self.ids) + len(tokens))
        self.ids += tokens
        self.positions += range(position, position + len(tokens))
        if tokens:
            self._own.append(Part(piece, piece, causal=True))
        yield
        if tokens and len(self.ids) > piece.stop:
            self._before.append(Part(slice(piece.stop, len(self.ids)), piece, causal=False))


def lay_out(
    prompts: Sequence[Sequence[int]], owner: Sequence[int], completions: Sequence[Sequence[int]], *, common: int
) -> tuple[Layout, list[int]]:
    """The layout of ``completions``, each behind the prompt of its ``owner``, and the places that predict their tokens.

    All prompts begin with the same ``common`` tokens, and none ends with them. Places are those of the first
    completion's tokens, of the second's, and so on; the last token of a completion predicts nothing and is left out.
    """
    layout = Layout()
    places: list[list[int]] = [[] for _ in completions]
    with layout.shared(prompts[0][:common], 0):
        for nth, prompt in enumerate(prompts):
            with layout.shared(prompt[common:], common):
                last = len(layout.ids) - 1
                for row in (row for row, its in enumerate(owner) if its == nth):
                    own = range(len(layout.ids), len(layout.ids) + len(completions[row]) - 1)
                    places[row] = [last, *own][: len(completions[row])]
                    with layout.shared(completions[row][:-1], len(prompt)):
                        pass
    return layout, [place for its in places for place in its]


def run_laid_out(model: Any, layout: Layout) -> torch.Tensor | None:
    """Last hidden states of the tokens of ``layout``, (tokens, width), or None if this attention is not the model's.

    The model is one whose prompts can be shared (``shareable.py``). Gradients flow if the caller has not switched them
    off.
    """
    if model in _UNFIT or model.device.type != "cpu" or _attention(model) != "sdpa":
        return None
    body = model.base_model
    inputs = {"input_ids": torch.tensor([layout.ids]), "position_ids": torch.tensor([layout.positions])}
    layers = getattr(model.config, "num_hidden_layers", None)
    taken = inspect.signature(body.forward).parameters.values()
    try:
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in taken):
            raise NotImplementedError("its decoder hands nothing on to its attention")
        with _attending(model):
            states: torch.Tensor = body(**inputs, use_cache=False, layout=layout).last_hidden_state
        if layout.calls != layers:
            raise NotImplementedError(f"{layout.calls} of its {layers} layers attend through transformers' interface")
    except NotImplementedError as error:
        log.info("prompts are shared by copies of their keys and values, since of this model %s", error)
        _UNFIT.add(model)
        return None
    return states[0]


@contextmanager
def _attending(model: Any) -> Iterator[None]:
    """The model with this attention.

    Raises:
        NotImplementedError: the model keeps its own.
    """
    own = _attention(model)
    model.set_attn_implementation(NAME)
    try:
        if _attention(model) != NAME:
            raise NotImplementedError("the attention cannot be set")
        yield
    finally:
        model.set_attn_implementation(own)


def _attention(model: Any) -> str | None:
    return getattr(model.config, "_attn_implementation", None)


def shared_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (1, heads, tokens, size) as (1, tokens, heads, size).

    Raises:
        NotImplementedError: the model asks for what this attention does not do.
    """
    if layout is None:
        raise NotImplementedError("its decoder hands nothing on to its attention")
    unknown = [name for name in _UNKNOWN if asked.get(name) is not None]
    unknown += ["a mask"] * (attention_mask is not None) + ["dropout"] * bool(asked.get("dropout"))
    unknown += ["values of another size than keys"] * (query.size(-1) != value.size(-1))
    unknown += ["a window"] * (asked.get("sliding_window") is not None and asked["sliding_window"] < layout.longest)
    causal = asked.get("is_causal")
    unknown += ["to look ahead"] * (not (getattr(module, "is_causal", True) if causal is None else causal))
    if unknown:
        raise NotImplementedError(f"the attention needs {', '.join(unknown)}")
    if torch.is_autocast_enabled("cpu"):  # as it does for PyTorch's own attention
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    layout.calls += 1
    scale = query.size(-1) ** -0.5 if asked.get("scaling") is None else asked["scaling"]
    return _InParts.apply(query[0], key[0], value[0], layout.parts, scale)[None], None


class _InParts(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Attention of queries (heads, tokens, size) to keys and values (kinds, tokens, size) in parts.

    Parts are computed and summed in float32: in bfloat16 the kernel rounds each, and was no faster where it was
    measured (AVX-512 with bfloat16, but without AMX; its backward pass over short rows took three times as long).
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: list[Part], scale: float
    ) -> torch.Tensor:
        """As (tokens, heads, size)."""
        q, k, v = _by_kind(query, key, value)
        kinds, each, tokens, size = q.shape
        merged = q.new_empty(tokens, kinds, each, size).permute(1, 2, 0, 3)
        sums = q.new_empty(kinds, each, tokens)  # logarithms, of the exponentials of the scores
        for at, keys, causal in parts:
            found, their = _flash(q[:, :, at], k[:, :, keys], v[:, :, keys], 0.0, causal, scale=scale)
            if causal:
                merged[:, :, at], sums[:, :, at] = found, their
            else:
                so_far = sums[:, :, at]
                merged[:, :, at].lerp_(found, (their - so_far).sigmoid_()[..., None])
                so_far.copy_(torch.logaddexp(so_far, their))
        out = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.parts, ctx.scale = parts, scale
        return out.permute(2, 0, 1, 3).reshape(tokens, -1, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of each part by the merged output and sums, since with those its shares are those of the whole."""
        query, key, value, out, sums = ctx.saved_tensors
        q, k, v = _by_kind(query, key, value)
        out, grad = out.to(q.dtype), grad.to(q.dtype).transpose(0, 1).unflatten(0, q.shape[:2])
        of_query, of_key, of_value = (_room_like(each, q.dtype) for each in (query, key, value))
        to_query = of_query.unflatten(0, q.shape[:2])
        for at, keys, causal in ctx.parts:
            kept = (q[:, :, at], k[:, :, keys], v[:, :, keys], out[:, :, at], sums[:, :, at])
            new, *others = _flash_backward(grad[:, :, at], *kept, 0.0, causal, scale=ctx.scale)
            new_key, new_value = (each.sum(1) for each in others)
            if causal:
                to_query[:, :, at], of_key[:, keys], of_value[:, keys] = new, new_key, new_value
            else:
                to_query[:, :, at] += new
                of_key[:, keys] += new_key
                of_value[:, keys] += new_value
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _by_kind(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """All as (kinds, heads of a kind, tokens, size) in float32 or more; none is repeated for its heads."""
    full = torch.promote_types(query.dtype, torch.float32)
    q = query.to(full).unflatten(0, (key.size(0), -1))
    return [q, *(states.to(full)[:, None].expand(-1, q.size(1), -1, -1) for states in (key, value))]


def _room_like(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for (heads, tokens, size), with the heads of a token side by side, as the layers before want them."""
    heads, tokens, size = states.shape
    return states.new_empty(tokens, heads, size, dtype=dtype).transpose(0, 1)


AttentionInterface.register(NAME, shared_attention)
