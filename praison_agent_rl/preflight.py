"""What a configuration asks of this installation and of the model's files, checked before anything is loaded.

Nothing heavy is imported: a package is looked up and not imported, and of weights only the headers are read.
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from praison_agent_rl import config_keys as keys
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, MissingExtra, ModelError
from praison_agent_rl.shown import shown
from praison_agent_rl.templates import ready_template, ready_templates
from praison_agent_rl.weight_files import check_tokenizer_files, modules_of, read_config

NO_UNSLOTH = (
    "backend 'unsloth' needs unsloth: pip install \"praison-agent-rl[unsloth]\" in an environment of its own, since it "
    "asks for older releases of trl, transformers and datasets than the extra train does (or leave backend out)"
)
"""What to do where it is not installed."""

_HEADS = ("lm_head", "embed_out", "output_layer")
_OWNERS = ("", "model.", "transformer.", "gpt_neox.", "model.language_model.")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")


def check_packages(config: TrainConfig) -> None:
    """Raise MissingExtra, once, for every package that a key of ``config`` needs and that is not installed."""
    missing = [text for package, text in _needed(config) if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingExtra("\n".join(missing))


def check_chat_template(config: TrainConfig) -> None:
    """Raise ConfigError for a chat template that names a file which is not there, or is no template."""
    text = template = config.chat_template
    if not template or text is None or ready_template(template):
        return
    if is_template_file(template):
        path = Path(template).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            what = "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error}"
            raise ConfigError(
                f"chat_template is {shown(template)}, but {what}; give the path of a Jinja file, or the "
                f"template itself, or one of this package: {keys.listed(ready_templates())}"
            ) from error
    if fault := _template_fault(text):
        raise ConfigError(f"chat_template {shown(template)} is not sound Jinja: {fault}")


def check_tokenizer(config: TrainConfig, source: str) -> None:
    """Raise ModelError for a folder whose tokenizer or chat template cannot be read."""
    folder = Path(source)
    if not folder.is_dir():
        return
    check_tokenizer_files(folder)
    own = folder / "chat_template.jinja"
    if own.is_file() and not config.chat_template:
        fault = _template_fault(own.read_text(encoding="utf-8", errors="replace"))
        if fault:
            raise ModelError(f"{str(own)!r} is not sound Jinja: {fault}; put it right, or set chat_template")


def is_template_file(template: str) -> bool:
    """Whether the value of ``chat_template`` names a file: what is one line without a brace renders nothing else."""
    return template.endswith((".jinja", ".j2", ".jinja2")) or ("\n" not in template and "{" not in template)


def check_adapter_targets(config: TrainConfig, *, tied: bool, source: str) -> None:
    """Refuse a LoRA on the output head, and one on the embeddings of a model that ties the two.

    Raises:
        ModelError: it could not be trained, or merging it would give another model (logits off by 4 to 10).
    """
    targets = config.lora_target_modules
    if isinstance(targets, list):
        adapted = {name.rpartition(".")[2] for name in targets} & {*_HEADS, *_EMBEDDINGS}
    else:
        paths = [f"{owner}{name}" for owner in _OWNERS for name in (*_HEADS, *_EMBEDDINGS)]
        adapted = {name.rpartition(".")[2] for name in _matching(targets, paths)}
    saved = {name.rpartition(".")[2] for name in config.modules_to_save or []} & {*_HEADS, *_EMBEDDINGS}
    if tied and (touched := adapted | saved):
        raise ModelError(
            f"lora_target_modules or modules_to_save name {', '.join(sorted(touched))}, but {source!r} ties its input "
            "embeddings to its output head: merging would write the change into both and give another model than the "
            "one that was trained. Leave it out (all-linear does)"
        )
    if heads := sorted(adapted & set(_HEADS)):
        raise ModelError(
            f"lora_target_modules names {', '.join(heads)}, the output head: {_why_no_head(config)}. Leave it out "
            "(all-linear does)"
        )


def _why_no_head(config: TrainConfig) -> str:
    if config.method == "reward":
        return "a reward model has none, but a score head, which is always trained"
    return (
        "GRPO computes log-probabilities from its weights directly (TRL refuses this too), so an adapter there would "
        "never be trained"
    )


def check_layers(config: TrainConfig, source: str) -> list[str]:
    """Raise ModelError if the model has none of the layers that are to get an adapter; what to say of single names."""
    notes = _checked_numbers(config, source)
    modules = modules_of(source)
    targets = config.lora_target_modules
    if not modules or targets == "all-linear" or config.target_parameters:
        return notes
    found = _matching(targets, list(modules))
    there = ", ".join(sorted({name.rpartition(".")[2] for name, sides in modules.items() if sides > 1}))
    if not found:
        raise ModelError(f"lora_target_modules is {shown(targets)}, but {source!r} has no such layer; it has: {there}")
    if odd := sorted({name.rpartition(".")[2] for name in found if modules[name] < 2}):
        raise ModelError(f"lora_target_modules names {', '.join(odd)}, which are no linear layers; there are: {there}")
    single = targets if isinstance(targets, list) else []
    if unknown := [name for name in single if not _matching([name], list(modules))]:
        notes.append(f"lora_target_modules: the model has no {', '.join(unknown)}; it has: {there}")
    return notes


def _checked_numbers(config: TrainConfig, source: str) -> list[str]:
    """What to say of the numbers of layers; raises ModelError where one is beyond the last layer."""
    asked, last = config.layers_to_transform, config.finetune_last_n_layers
    count = read_config(source).get("num_hidden_layers")
    if not count:
        return []
    layers = [asked] if isinstance(asked, int) else asked or []
    if beyond := [layer for layer in layers if layer >= count]:
        raise ModelError(
            f"layers_to_transform names {', '.join(map(str, beyond[:5]))}, but {source!r} has {count} layers, "
            f"0 to {count - 1}"
        )
    if last is None:
        return []
    if last >= count:
        return [f"`finetune_last_n_layers` is {last}, and the model has {count} layers: all of them get an adapter"]
    return [f"`finetune_last_n_layers`: layers {count - last} to {count - 1} of 0 to {count - 1} get an adapter"]


def _matching(targets: str | list[str], modules: list[str]) -> list[str]:
    """The modules that ``targets`` means, as peft reads it: a regular expression, or a list of names or endings."""
    if isinstance(targets, list):
        return [name for name in modules if any(name == t or name.endswith(f".{t}") for t in targets)]
    if targets == "all-linear":
        return []
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ModelError(
            f"lora_target_modules is {shown(targets)}, which is no regular expression: {error}; give a list of names"
        ) from error
    return [name for name in modules if pattern.fullmatch(name)]


def _needed(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Packages that keys need, each with what to say where it is missing."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, key):
            yield "bitsandbytes", f"{key} needs bitsandbytes: pip install bitsandbytes (or leave {key} out)"
    if config.backend == "unsloth":
        yield "unsloth", NO_UNSLOTH
    if config.fast_inference:
        yield "vllm", 'fast_inference needs vLLM: pip install "praison-agent-rl[vllm]" (or leave fast_inference out)'
    services = [config.report_to] if isinstance(config.report_to, str) else config.report_to
    for service in services:
        if package := keys.TRACKERS.get(service):
            yield (
                package,
                f"report_to {service!r} needs {package}: pip install {package} (or leave it out of report_to)",
            )
    for sign, package in keys.OPTIMIZER_PACKAGES.items():
        if sign in config.optim:
            yield package, f"optim {config.optim!r} needs the package {package}; install it, or take adamw_torch"
            break


def _template_fault(text: str) -> str | None:
    if "{% generation" in text or importlib.util.find_spec("jinja2") is None:
        return None  # a tag that transformers adds to Jinja
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None
