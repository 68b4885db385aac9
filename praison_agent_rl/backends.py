"""Which back end loads a policy and its adapter, and what the back ends cannot do.

Nothing heavy is imported but in ``open_backend``: Unsloth has to be imported before trl, transformers and peft.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_keys import listed
from praison_agent_rl.errors import ConfigError, MissingExtra
from praison_agent_rl.launchers import launch_of
from praison_agent_rl.models import cache_folder
from praison_agent_rl.preflight import NO_UNSLOTH
from praison_agent_rl.trainer_arguments import needs_bfloat16

_FIRST = ("trl", "transformers", "peft")
"""What Unsloth rewrites when it is imported, if that is not in use yet (unsloth/_gpu_init.py, ``critical_modules``)."""
_TRAINED_IN_FULL = ("lm_head", "embed_tokens")
"""What Unsloth takes in ``modules_to_save``, besides norms (unsloth/models/llama.py, ``get_peft_model``)."""
_MOVING_STARTS = ("pissa", "olora")
"""``init_lora_weights`` by which PEFT changes the base weights."""


class Choice(NamedTuple):
    """A back end, and why it is taken."""

    name: str
    """``transformers`` or ``unsloth``."""
    why: str


def choose_backend(config: TrainConfig, device: str) -> Choice:
    """The back end that trains on ``device``: the one that ``config`` names, or Unsloth on a GPU that can do it all."""
    if config.backend != "auto":
        return Choice(config.backend, "it is asked for")
    if not device.startswith("cuda"):
        return Choice("transformers", "there is no GPU here")
    if importlib.util.find_spec("unsloth") is None:
        return Choice("transformers", "unsloth is not installed")
    if reason := next(_why_not_unsloth(config, device), None):
        return Choice("transformers", f"with unsloth, {reason}")
    return Choice("unsloth", "it is installed and there is a GPU")


def check_backend(config: TrainConfig, device: str) -> list[str]:
    """What to say of the back end; raises ConfigError, once, for all that the one that is taken cannot do."""
    choice = choose_backend(config, device)
    problems = [*_quantised_conflicts(config), *_parameter_conflicts(config)]
    if choice.name == "unsloth":
        instead = "change that, or set backend: transformers"
        problems += [
            f"backend is 'unsloth', but with it {reason}; {instead}" for reason in _why_not_unsloth(config, device)
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    return list(_notes(config, choice, device))


def open_backend(config: TrainConfig, device: str) -> Choice:
    """The back end that trains in this process, imported; call it before anything heavy is imported.

    Raises:
        ConfigError: Unsloth is asked for, and this process has imported already what it has to come before.
        MissingExtra: it cannot be imported.
    """
    choice = choose_backend(config, device)
    if choice.name != "unsloth" or "unsloth" in sys.modules:
        return choice
    if early := [name for name in _FIRST if name in sys.modules]:
        why = f"this process has imported {', '.join(early)}, before which unsloth has to be imported"
        if config.backend == "auto":
            return Choice("transformers", why)
        raise ConfigError(
            f"backend is 'unsloth', but {why}; name rewards as 'module:function', so that training gets a process of "
            "its own, or set backend: transformers"
        )
    _import_unsloth(device)
    return choice


def _import_unsloth(device: str) -> None:
    if importlib.util.find_spec("unsloth") is None:
        raise MissingExtra(NO_UNSLOTH)
    # code that it writes is kept out of the current folder, and nobody is told of the run
    written = cache_folder() / f"unsloth-{importlib.metadata.version('unsloth')}"
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(written))
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    if device == "cpu":
        os.environ.setdefault("UNSLOTH_FORCE_CPU", "1")
    try:
        import unsloth  # noqa: F401
    except Exception as error:  # it looks at the machine and changes other packages, and may raise anything
        raise MissingExtra(
            f"unsloth is installed but cannot be imported: {type(error).__name__}: {error}; put it right, or set "
            "backend: transformers"
        ) from error


def _why_not_unsloth(config: TrainConfig, device: str) -> Iterator[str]:
    """What ``config`` asks for that Unsloth (2026.10) does not do, or does otherwise in silence."""
    if config.method == "reward":
        yield "no reward model is trained: its loader starts no score head"
    if odd := [name for name in config.modules_to_save or [] if not _trained_in_full(name)]:
        yield f"modules_to_save takes {listed(_TRAINED_IN_FULL)} and norms only, and not {', '.join(odd)}"
    if launch_of(config) is not None:
        yield "one process trains, and nothing is shared out (launch)"
    if config.fast_inference and (config.modules_to_save or config.lora_bias != "none"):
        yield "fast_inference takes neither modules_to_save nor lora_bias"
    if device.startswith("cuda"):
        return
    if config.fast_inference:
        yield "fast_inference needs a GPU"
    if config.load_in_8bit:
        yield "load_in_8bit needs a GPU, and weights in 16 bits would be loaded instead"
    if config.dtype == "float16":
        yield "dtype float16 needs a GPU, and another format would be taken instead"


def _trained_in_full(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return leaf in _TRAINED_IN_FULL or "norm" in leaf


def _quantised_conflicts(config: TrainConfig) -> Iterator[str]:
    if not (config.load_in_4bit or config.load_in_8bit):
        return
    key = "load_in_4bit" if config.load_in_4bit else "load_in_8bit"
    start = config.init_lora_weights
    if isinstance(start, str) and start.startswith(_MOVING_STARTS):
        yield (
            f"init_lora_weights {start!r} takes the adapter's start out of the base weights; those are quantised with "
            f"{key}, and what the adapter is merged into is not, so the result would be another model; leave one of "
            "the two out"
        )
    if odd := [name for name in config.modules_to_save or [] if not _trained_in_full(name)]:
        yield (
            f"modules_to_save names {', '.join(odd)}, whose weights {key} would quantise: they cannot be trained in "
            "full; leave one of the two out"
        )
    if needs_bfloat16(config) and config.bf16 is False:
        yield f"a reward model on weights that {key} rounds computes in bfloat16; leave bf16 out, or {key}"
    if config.load_in_8bit and config.fast_inference:
        yield "fast_inference cannot have load_in_8bit: vLLM rounds no weights to 8 bits itself; take load_in_4bit"
    if odd := [name for name in config.target_parameters or [] if name.endswith(".weight")]:
        yield (
            f"target_parameters names {', '.join(odd)}, which {key} would quantise; name such layers in "
            "lora_target_modules"
        )


def _parameter_conflicts(config: TrainConfig) -> Iterator[str]:
    """What PEFT 0.21 does not do for parameters (peft/tuners/lora/layer.py, ``ParamWrapper``)."""
    if not config.target_parameters:
        return
    if by := config.layers_chosen_by:
        yield (
            f"{by} chooses among lora_target_modules only, so target_parameters would be adapted in every layer; name "
            "them with their layer, as in 'layers.3.mlp.experts.down_proj', or leave one of the two out"
        )
    for key, off in (("lora_dropout", 0.0), ("use_dora", False)):
        if (value := getattr(config, key)) != off:
            yield f"{key} is {value!r}, which target_parameters cannot have; leave one of the two out"


def _notes(config: TrainConfig, choice: Choice, device: str) -> Iterator[str]:
    if choice.name == "unsloth" and device == "cpu":
        yield (
            "back end: unsloth; without a GPU that is transformers and peft with Unsloth's settings, and no kernels of "
            "its own (it vouches for supervised training alone there)"
        )
    elif device.startswith("cuda"):
        yield f"back end: {choice.name} ({choice.why})"
    if choice.name == "transformers" and config.gradient_checkpointing == "unsloth":
        yield "`gradient_checkpointing: unsloth` is plain gradient checkpointing with the back end transformers"
    if config.load_in_4bit or config.load_in_8bit:
        yield (
            f"training sees the weights in {4 if config.load_in_4bit else 8} bits; the adapter is merged into the "
            "weights as they are stored, and base and result are measured as these are served"
        )
