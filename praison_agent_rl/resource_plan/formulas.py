"""Bytes and operations of a model in training, each by one formula with its source; nothing is measured here.

Where a formula needs a number that no paper gives, the number stands here by name, with where it comes from.
"""

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.resource_plan.shapes import Shape

BITS = {4: 4 + 8 / 64 + 32 / (64 * 256), 8: 8.0, 16: 16.0, 32: 32.0}
"""Bits of a weight. In 4 bits, blocks of 64 share a constant, itself quantised (QLoRA: Dettmers et al. 2023, arXiv
2305.14314, section 3)."""

EAGER = 1.8
"""What transformers' layers keep over the count of ``layer_bytes``: 1.77 measured, from 544 KB a token against 307 KB
(docs/speed.md, trl-plain, 800 tokens of prompt, 8 to 16 completions, float32 on a CPU)."""

_TILE_TOKENS, _TILE_WORDS = 4096, 32768  # trl 1.16: kernels/chunked_logprob.py, trainer/utils.py


def weight_bytes(shape: Shape, bits: int) -> int:
    """The frozen weights: layers in ``bits`` a weight; embedding and head are never quantised (bitsandbytes)."""
    other = max(bits, 16)
    return int(shape.in_layers * BITS[bits] / 8 + (shape.parameters - shape.in_layers) * other / 8)


def adapter_parameters(shape: Shape, config: TrainConfig) -> int:
    """Trained parameters: r (in + out) for each adapted matrix (LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1).

    Targets by a regular expression count as all, and so do names of which none is known; modules that are trained in
    full count whole.
    """
    targets = config.lora_target_modules if isinstance(config.lora_target_modules, list) else []
    named = {name.rpartition(".")[2] for name in targets} & shape.matrices.keys() or shape.matrices.keys()
    ranks = config.rank_pattern or {}
    in_layer = sum(
        ranks.get(name, config.lora_r) * (before + after)
        for name, (before, after) in shape.matrices.items()
        if name in named
    )
    whole = sum(shape.embedding for name in config.modules_to_save or () if name in ("embed_tokens", "lm_head"))
    return _adapted_layers(shape, config) * in_layer + whole


def number_bytes(config: TrainConfig, bits: int) -> int:
    """Of a number of the adapter: float32, but bfloat16 on a quantised base (as QLoRA; trl 1.16, all but CPO)."""
    return 2 if bits < 16 and config.method != "cpo" else 4


def trained_bytes(
    shape: Shape, config: TrainConfig, *, number: int = 4, gradients_by: int = 1, moments_by: int = 1
) -> int:
    """The adapter in numbers of so many bytes, its gradient, and Adam's two moments, or two bytes for both in 8 bits.

    So many processes share gradients and moments (ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
    """
    moments = 2 if "8bit" in config.optim else 2 * number
    return int(adapter_parameters(shape, config) * (number + number / gradients_by + moments / moments_by))


def layer_bytes(shape: Shape, width: int = 2) -> int:
    """What the backward pass of one layer needs of a token, in numbers of ``width`` bytes.

    Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) count a plain MLP, and dropout. Counted their way with a
    gated MLP, grouped keys, no dropout, and attention that keeps no matrix of scores (Dao et al. 2022, arXiv
    2205.14135): inputs of both norms and of what follows them 4 h; queries, keys, values and the heads' output
    2 q + 2 k; gate, its activation, what it multiplies, and the product 4 i.
    """
    return width * (4 * shape.hidden + 2 * shape.queries + 2 * shape.keys + 4 * shape.inner)


def activation_bytes(shape: Shape, tokens: float, *, checkpointing: bool, width: int = 2) -> int:
    """Kept for the backward pass of ``tokens`` at once.

    With checkpointing the input of each layer, and one layer at a time in full (Korthikanti et al., section 5 and
    table 2).
    """
    layer = EAGER * layer_bytes(shape, width)
    of_token = width * shape.hidden * shape.layers + layer if checkpointing else shape.layers * layer
    return int(tokens * of_token)


def logit_bytes(shape: Shape, config: TrainConfig, tokens: float) -> int:
    """Logits of ``tokens`` scored at once, with their gradient.

    GRPO: a tile in float32 (trl 1.16, ``kernels/chunked_logprob.py``). CPO: all of them, their log-softmax and the
    gradients of both, in 16 bits (``CPOTrainer.concatenated_forward``). A reward model has none.
    """
    if config.method == "reward":
        return 0
    if config.method == "cpo":
        return int(tokens * shape.vocabulary * 4 * 2)
    return int(min(tokens, _TILE_TOKENS) * min(shape.vocabulary, _TILE_WORDS) * 2 * 4)


def cache_bytes(shape: Shape, tokens: float) -> int:
    """Keys and values of ``tokens`` in 16 bits (PagedAttention: Kwon et al. 2023, arXiv 2309.06180, section 3)."""
    return int(2 * shape.layers * shape.keys * 2 * tokens)


def forward_operations(shape: Shape, tokens: float, context: float) -> float:
    """Operations of a forward pass: 2 a weight and token, and attention over half of ``context`` on the average.

    Kaplan et al. 2020 (arXiv 2001.08361, table 1). The embedding is looked up and not multiplied; the head is.
    """
    multiplied = shape.in_layers + shape.embedding
    return tokens * (2 * multiplied + 2 * shape.layers * context * shape.queries)


def passes(*, checkpointing: bool, scored_before: bool = False) -> int:
    """Forward passes that a token of training is worth.

    The forward itself; a backward of one, since frozen weights get no gradient (the other half of Kaplan's 4); the
    forward once more with checkpointing; and once more where log-probabilities are wanted from before the update.
    """
    return 2 + checkpointing + scored_before


def all_reduce_bytes(size: float, processes: int) -> float:
    """What each of them sends to sum ``size`` bytes: twice, less its own share (Patarasuk and Yuan 2009, ring)."""
    return 2 * size * (processes - 1) / processes


def all_gather_bytes(size: float, processes: int) -> float:
    """What each of them receives to hold ``size`` bytes of which it had its share."""
    return size * (processes - 1) / processes


def _adapted_layers(shape: Shape, config: TrainConfig) -> int:
    chosen = config.layers_to_transform
    if chosen is None:
        return min(shape.layers, config.finetune_last_n_layers or shape.layers)
    return len(set(chosen)) if isinstance(chosen, list) else 1
