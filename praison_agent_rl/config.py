"""``TrainConfig``: every key of a training run with its pinned default, checked before anything heavy is imported.

This module may not import torch, transformers, trl or peft; it only writes the keyword arguments for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from . import config_keys as keys
from . import config_values as values
from . import trainer_arguments
from .config_fields.data import DataFields
from .config_fields.launching import Launch
from .config_fields.model import ModelFields
from .config_fields.optimising import OptimisingFields
from .config_fields.remote import Remote
from .config_fields.running import RunningFields
from .config_fields.sampling import SamplingFields
from .config_files import read_source
from .errors import ConfigError

_PROBLEMS_SHOWN = 30
_NESTED = {"launch": Launch.model_fields.keys(), "remote": Remote.model_fields.keys()}
"""The keys within keys."""


# the fields of the last come first
class TrainConfig(RunningFields, OptimisingFields, SamplingFields, DataFields, ModelFields):
    """Everything that one training run is told; make it with ``TrainConfig.load``."""

    model_config = values.SETTINGS

    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the trainer's configuration, under TRL's names."""
    notes: tuple[str, ...] = ()
    """What reading the configuration has to say to a person, one sentence each."""

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any] | None = None,
        *,
        overrides: Iterable[str] | None = None,
        need_model: bool = True,
        need_data: bool = True,
        **keywords: Any,
    ) -> TrainConfig:
        """Read a YAML file or a mapping; keywords win over ``KEY=VALUE`` overrides, and these over the source.

        An empty value stands for the default, and a keyword that is None counts as not given. Raises one
        ``ConfigError`` that lists every problem, one a line.
        """
        found = keys.Findings()
        given = keys.rename(read_source(source), found)
        given |= keys.rename(keys.parse_overrides(overrides or (), found), found)
        given |= keys.rename({key: value for key, value in keywords.items() if value is not None}, found)
        given = {key: value for key, value in given.items() if value is not None}
        method = keys.method_of(given, found)
        fields = cls.model_fields.keys() - {"extra", "notes"}
        declared, extra = keys.sort_keys({**given, "method": method}, fields, method, found)
        if need_model and not declared.get("model_name"):
            found.problems.append("model_name is missing; name the model to train: a hub name, a folder or a GGUF file")
        data = declared.get("dataset")
        if need_data and (data is None or (isinstance(data, (str, list, dict)) and not data)):
            found.problems.append("dataset is missing; list what to train on, each with a 'name' (hub name or file)")
        config = cls._checked(declared, extra, found)
        if found.problems:
            where = f"in {str(source)!r}:\n" if isinstance(source, (str, Path)) else ""
            more = len(found.problems) - _PROBLEMS_SHOWN
            rest = [f"... and {more} more"] if more > 0 else []
            raise ConfigError(where + "\n".join([*found.problems[:_PROBLEMS_SHOWN], *rest]))
        return config

    @classmethod
    def _checked(cls, declared: dict[str, Any], extra: dict[str, Any], found: keys.Findings) -> TrainConfig:
        """The typed configuration; faulty keys are reported and read on with their defaults, to find the rest too."""
        method = declared["method"]
        wrong: dict[str, str] = {}
        passing: dict[str, Any] = {}
        for key, value in extra.items():
            kind: Any = values.PASSING[keys.METHOD_FIELDS[method][key]]
            try:
                passing |= TypeAdapter(dict[str, kind]).validate_python({key: value})
            except ValidationError as error:
                wrong |= keys.plain_errors(error)
        full = {**keys.METHOD_DEFAULTS[method], **declared}
        try:
            config = cls(**full)
        except ValidationError as error:
            wrong |= keys.plain_errors(error, nested=_NESTED)
            config = cls(**{key: value for key, value in full.items() if key not in wrong})
        config = config.model_copy(update={"extra": passing})
        adapted = values.adapt_defaults(config, declared.keys())
        notes = tuple(dict.fromkeys([*found.notes, *adapted.notes]))
        config = config.model_copy(update={**adapted.updates, "notes": notes})
        found.problems += wrong.values()
        found.problems += [line for names, line in values.conflicts(config) if not wrong.keys() & set(names)]
        return config

    @property
    def prompts_per_batch(self) -> int:
        """Distinct prompts in one generation batch of one process."""
        return values.generation_batch(dict(self)) // self.num_generations

    @property
    def prompts_at_once(self) -> int:
        """Distinct prompts in one generation batch of all processes."""
        # TRL counts generation_batch_size over all of them, and the other sizes in each
        processes = 1 if self.generation_batch_size or self.launch is None else self.launch.processes
        return self.prompts_per_batch * processes

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM draws completions, in the process that trains or as a server."""
        return self.fast_inference or self.sampler == "vllm"

    def check_prompt_count(self, count: int) -> None:
        """Raise ``ConfigError`` where ``count`` training prompts do not fill one generation batch."""
        if self.method == "grpo" and count < self.prompts_at_once:
            # TRL 1.16 drops incomplete chunks (trl/trainer/utils.py, RepeatSampler), here all there are
            also = ", without steps_per_generation and generation_batch_size"
            raise ConfigError(
                f"{count} prompts to train on are fewer prompts than one generation batch needs "
                f"({self.prompts_at_once}): TRL would train zero steps and call it success. Add prompts, keep fewer "
                f"back with held_out, or set per_device_train_batch_size to {self.num_generations} and "
                "gradient_accumulation_steps to 1 (one prompt a batch"
                f"{also if self.steps_per_generation or self.generation_batch_size else ''})"
            )

    def grpo_arguments(self, *, device: str) -> dict[str, Any]:
        """Keyword arguments for ``trl.GRPOConfig``, all but ``output_dir``; ``device`` is cpu, cuda, cuda:1 or mps."""
        return trainer_arguments.of_grpo(self, device)

    def preference_arguments(self, *, device: str) -> dict[str, Any]:
        """Keyword arguments for ``trl.RewardConfig`` or ``CPOConfig``, by method; all but ``output_dir``."""
        return trainer_arguments.of_preferences(self, device)

    def lora_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``peft.LoraConfig``."""
        return trainer_arguments.of_lora(self)

    def resolved(self) -> dict[str, Any]:
        """Every setting as plain JSON values; callables by ``repr``, data in memory by a description.

        ``TrainConfig.load`` reads it again, without a note, as long as nothing in it lived in memory.
        """
        idle = {
            *values.idle_rollout_keys(self),
            *(() if self.uses_vllm else ("gpu_memory_utilization", "max_lora_rank")),
        }
        hidden = {"extra", "notes", *keys.NOT_FOR[self.method], *idle}
        shown = {name: value for name, value in self if value is not None and name not in hidden}
        if "dataset" in shown and not isinstance(self.dataset, str) and not values.is_specs(self.dataset):
            rows = f" of {len(self.dataset)} rows" if isinstance(self.dataset, Sized) else ""
            shown["dataset"] = f"<{type(self.dataset).__name__}{rows} in memory>"
        extra = {name: value for name, value in self.extra.items() if name not in idle}
        plain: dict[str, Any] = json.loads(json.dumps({**shown, **extra}, default=values.as_plain))
        return plain

    def to_yaml(self) -> str:
        """``resolved`` as a YAML file, with the notes as comments at its top."""
        notes = "".join(f"# {note}\n" for note in self.notes)
        return notes + yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True)
