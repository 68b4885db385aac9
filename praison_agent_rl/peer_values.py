"""Values that praisonai-train 0.1.16 takes and this package writes in another way, and what to say of each.

Names of keys alone are in ``config_keys``. Nothing here checks a value: what it does not know it leaves as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

YES = ("true", "1", "yes", "on")
"""What its trainer takes for true (``TrainModel._flag``)."""
NO = ("false", "0", "no", "off")

_QUANTIZATIONS = {"not_quantized": "f16", "fast_quantized": "q8_0", "quantized": "q4_k_m"}
"""Unsloth's own names and llama.cpp's (unsloth 2026.10.9, ``save.py``)."""

_TEMPLATES = """alpaca chatml gemma gemma-3 gemma-3n gemma-4 gemma-4-thinking gemma2 gemma2_chatml gemma3 gemma3n gemma4
    gemma4-thinking gemma_chatml gpt-oss gptoss lfm-2 lfm-2.5 llama llama-3 llama-3.1 llama-31 llama3 mistral phi-3
    phi-3.5 phi-35 phi-4 qwen-2.5 qwen-2.5-coder qwen-25 qwen-25-coder qwen-3 qwen2.5 qwen2.5-coder qwen25
    qwen25-coder qwen3 qwen3-instruct qwen3-thinking starling unsloth vicuna vicuna_old yi-chat zephyr"""
TEMPLATES = frozenset(_TEMPLATES.split())
"""Unsloth's templates by name (unsloth 2026.10.9, ``chat_templates.py``); a file of such a name is ``./name``."""


def translate(given: Mapping[Any, Any], notes: list[str]) -> dict[Any, Any]:
    """The keys with their values as they are written here; what is not the same is said in ``notes``."""
    made = dict(given)
    for change in (_save_method, _quantization, _ollama_tag, _push, _template, _processing, _epochs, _train):
        change(made, notes)
    return made


def is_yes(value: Any, *, otherwise: bool = False) -> bool:
    """Whether a switch of praisonai-train is on; ``otherwise`` where it is not given."""
    written = value.strip().lower() if isinstance(value, str) else value
    return otherwise if value is None else written in (True, *YES)


def _save_method(made: dict[Any, Any], notes: list[str]) -> None:
    named = made.get("save_method")
    if named == "merged_16bit":
        made["save_method"] = "merged"
        notes.append("`save_method: merged_16bit` is called merged here; weights keep the number format of the base.")
    elif named in ("merged_4bit", "merged_4bit_forced"):
        made["save_method"] = "merged"
        notes.append(f"`save_method: {named}` is merged here, in full precision: merged in 4 bits, answers change.")


def _quantization(made: dict[Any, Any], notes: list[str]) -> None:
    named = made.get("quantization_method")
    if isinstance(named, list | tuple) and len(named) == 1:
        named = named[0]
    if isinstance(named, str):
        named = named.lower()
        if named in _QUANTIZATIONS:
            notes.append(f"`quantization_method: {named}` is {_QUANTIZATIONS[named]} here, llama.cpp's name for it.")
        named = _QUANTIZATIONS.get(named, named)
    if named is not None:
        made["quantization_method"] = named


def _ollama_tag(made: dict[Any, Any], notes: list[str]) -> None:
    """Its Ollama model is called ``ollama_model:model_parameters``."""
    tag, name = made.get("model_parameters"), made.get("ollama_model")
    written = (isinstance(tag, str) and len(tag) <= 128) or (isinstance(tag, int) and 0 < tag < 10**6)
    if not written or not isinstance(name, str) or ":" in name:
        return
    del made["model_parameters"]
    made["ollama_model"] = f"{name}:{tag}"
    notes.append(f"`model_parameters` is the tag of `ollama_model` here: {made['ollama_model']}.")


def _push(made: dict[Any, Any], notes: list[str]) -> None:
    """It pushes each checkpoint, which is the adapter; here the adapter is pushed when it has proved to be better."""
    if not is_yes(made.get("push_to_hub")) or is_yes(made.get("huggingface_save")):
        return
    del made["push_to_hub"]
    made |= {"huggingface_save": True, "save_method": "lora"}
    notes.append("`push_to_hub` is `huggingface_save` with `save_method: lora` here: the adapter, once, at the end.")


def _template(made: dict[Any, Any], notes: list[str]) -> None:
    named = made.get("chat_template")
    if not isinstance(named, str) or named.lower() not in TEMPLATES:
        return
    del made["chat_template"]
    notes.append(
        f"`chat_template: {named}` is left out: it names a template of Unsloth's, and the model's own is used; give a "
        "file for a model that has none."
    )


def _processing(made: dict[Any, Any], notes: list[str]) -> None:
    data = made.get("dataset")
    for number, entry in enumerate(data if isinstance(data, list) else []):
        if isinstance(entry, Mapping) and entry.get("processing_func") is not None:
            notes.append(f"`dataset[{number}].processing_func` is left out: the columns say how a row is read.")


def _epochs(made: dict[Any, Any], notes: list[str]) -> None:
    if made.get("num_train_epochs") in (0, "0"):
        del made["num_train_epochs"]
        notes.append("`num_train_epochs: 0` is left out: there it counts as not given.")


def _train(made: dict[Any, Any], notes: list[str]) -> None:
    if not is_yes(made.get("train"), otherwise=True):
        del made["train"]
        notes.append("`train` is false, but this command trains; `praison-agent-rl export` publishes an earlier run.")
