"""The names of TRL's GRPO trainer that this package overrides, calls or reads, and what a run does without them.

A release of TRL may move a name that is not documented. Then TRL's own path is taken, and said to be; nothing is
guessed. ``tests/contract/test_trl.py`` holds the same names for the release that is pinned.
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import trl
from trl import GRPOTrainer

STEP: Mapping[str, tuple[str, ...]] = {
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_compute_loss": ("model", "inputs"),
}
"""Methods in whose place a step computes shared prompts once, and their first parameters."""
READ = (
    "_metrics",
    "_step",
    "_tokenizer",
    "_entropy_bonus_enabled",
    "aux_loss_enabled",
    "beta",
    "eos_token_ids",
    "generation_config",
    "temperature",
    "top_entropy_quantile",
    "use_transformers_continuous_batching",
    "use_vllm",
)
"""What the trainer holds and such a step reads."""
AROUND: Mapping[str, tuple[tuple[str, ...], str]] = {
    "_tokenize_prompts": (("prompts",), "prompts are rendered by TRL, without the tools that the agent is shown"),
    "_calculate_rewards": (
        ("inputs", "prompts", "completions", "completion_ids_list"),
        "rewards are called by TRL: one that fails ends the run, and none is cached or counted",
    ),
    "_generate_and_score_completions": (("inputs",), "what groups of answers said is not kept"),
    "_get_train_sampler": (("dataset",), "prompts come in TRL's order, which begins again when a run is resumed"),
}
"""Methods around a step, their first parameters, and what happens where TRL no longer calls them."""
_LOG_PROBABILITIES = ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
_ARGUMENTS = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)


def why_not_by_names(trainer: Any) -> str | None:
    """Which name of TRL that a step relies on is not where it was, or None; ``trainer`` is a complete one."""
    owner = base_of(type(trainer))
    if owner.__name__.startswith("Unsloth"):
        return "Unsloth has put a trainer of its own in place of TRL's"
    moved = [f"GRPOTrainer.{name}({', '.join(wanted)})" for name, wanted in STEP.items() if _moved(owner, name, wanted)]
    moved += [f"attribute {name!r} of its trainer" for name in READ if name not in vars(trainer)]
    if log_probabilities() is None:
        moved.append(".".join(_LOG_PROBABILITIES))
    return f"TRL {trl.__version__} has no {' and no '.join(moved)}" if moved else None


def told(trainer_class: type) -> dict[str, str]:
    """What becomes of a run by each method around a step that TRL no longer has."""
    owner = base_of(trainer_class)
    return {
        name: f"TRL {trl.__version__} has no GRPOTrainer.{name}({', '.join(wanted)}): {without}"
        for name, (wanted, without) in AROUND.items()
        if _moved(owner, name, wanted)
    }


def base_of(trainer_class: type) -> type:
    """TRL's own class behind one of this package."""
    return next(each for each in trainer_class.__mro__ if each.__name__ == GRPOTrainer.__name__)


def log_probabilities() -> Any:
    """TRL's function for log-probabilities in chunks of the vocabulary; None if it is gone or takes other arguments."""
    try:
        found = getattr(importlib.import_module(_LOG_PROBABILITIES[0]), _LOG_PROBABILITIES[1])
    except (ImportError, AttributeError):
        return None
    taken = tuple(inspect.signature(found.forward).parameters)
    return found if taken == ("ctx", *_ARGUMENTS) else None


def _moved(owner: type, name: str, wanted: tuple[str, ...]) -> bool:
    found = getattr(owner, name, None)
    if found is None:
        return True
    taken = tuple(inspect.signature(found).parameters)
    if taken == ("self", "args", "kwargs"):  # one that Unsloth has wrapped is given what it takes
        return False
    return taken[: len(wanted) + 1] != ("self", *wanted)
