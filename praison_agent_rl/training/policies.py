"""The policy that is trained: a model by the back end that was opened for it, and its adapter.

Imported only by the process that trains, since it imports ``peft`` at once.
"""

from typing import Any, NamedTuple

from peft import LoraConfig

from praison_agent_rl import trainer_arguments
from praison_agent_rl.backends import open_backend
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.loading import load_model
from praison_agent_rl.training.unsloth import load_by_unsloth


class Policy(NamedTuple):
    """A model to train, and what a trainer still has to put on it."""

    model: Any
    adapter: LoraConfig | None
    """None where the model has its adapter already: Unsloth's trainers put none on, and do not say so."""


def load_policy(source: str, config: TrainConfig, *, device: str) -> Policy:
    """The language model of ``source`` on ``device`` and its adapter, by the back end of ``config``.

    Raises:
        ConfigError: Unsloth is asked for and was not opened in time.
        ModelError: the model cannot be loaded, or takes no such adapter.
    """
    if open_backend(config, device).name == "unsloth":
        return Policy(load_by_unsloth(source, config, device=device), None)
    model = load_model(source, config, device=device)
    return Policy(model, adapter_of(model, config))


def adapter_of(model: Any, config: TrainConfig) -> LoraConfig:
    """The adapter of ``config`` for ``model``, whose layers it may count from the last."""
    layers = model.config.get_text_config().num_hidden_layers
    return LoraConfig(**trainer_arguments.of_lora(config, layers=layers))
