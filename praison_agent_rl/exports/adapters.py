"""``to="vllm"``: the adapter as ``vllm serve`` takes it, with the command that does."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ConfigError, ServerFailed
from praison_agent_rl.exports.cards import hub_name, write_card
from praison_agent_rl.exports.folders import copy_files, writing
from praison_agent_rl.exports.jobs import Job, Written
from praison_agent_rl.exports.subjects import Subject
from praison_agent_rl.models import plain_weights
from praison_agent_rl.runs import write_text
from praison_agent_rl.vllm_servers.adapters import make_servable, why_not_servable
from praison_agent_rl.vllm_servers.serving import fitting_rank, rank_of
from praison_agent_rl.weight_files import check_adapter_files

_CONFIG = "adapter_config.json"
_TEMPLATE = "chat_template.jinja"


def check_servable(subject: Subject) -> None:
    """Raise ConfigError where vLLM refuses the adapter, and ModelError where it is not whole."""
    why: object = why_not_servable(config_of(subject.adapter))
    try:
        fitting_rank(rank_of(subject.adapter))
    except ServerFailed as failure:
        why = why or failure
    if why:
        raise ConfigError(f"{why}; export the merged model, which vLLM serves as any other: --to hf")
    check_adapter_files(subject.adapter)


def write_adapter(job: Job, folder: Path) -> Written:
    """Copy the adapter without what no server needs; say how it is served.

    Raises:
        ModelError: the disk takes no more.
    """
    subject = job.subject
    with writing(job.out):
        copy_files(subject.adapter, folder)
        make_servable(folder)
        write_card(subject, folder, tags=job.options.tags, library="peft")
        own_template = bool(subject.plan.config.get("chat_template")) and (subject.model / _TEMPLATE).is_file()
        if own_template:
            shutil.copy2(subject.model / _TEMPLATE, folder / _TEMPLATE)
    place = job.out.absolute()
    words = [serve_command(job, str(place))]
    words += [f"--chat-template {shlex.quote(str(place / _TEMPLATE))}"] if own_template else []
    return Written([" ".join(words)], [f"requests name the model {name_of(job)!r}; the base's own name asks the base"])


def serve_command(job: Job, place: str) -> str:
    """What serves the adapter at ``place``, a folder or a name on the hub, beside its base."""
    subject = job.subject
    revision = subject.plan.config.get("revision") if hub_name(subject.plan.base) else None
    words = ["vllm", "serve", base_of(subject), *(["--revision", str(revision)] if revision else [])]
    words += ["--trust-remote-code"] if subject.trusted else []
    words += ["--enable-lora", "--max-lora-rank", str(fitting_rank(rank_of(subject.adapter)))]
    module = f"{name_of(job)}={place}"
    if module.count("=") > 1 or "," in module:  # vLLM then wants JSON (entrypoints/openai/cli_args.py)
        module = json.dumps({"name": name_of(job), "path": place}, ensure_ascii=False)
    return shlex.join([*words, "--lora-modules", module])


def name_of(job: Job) -> str:
    """What requests call the adapter."""
    return job.options.name or job.subject.name


def write_peft(job: Job, folder: Path) -> None:
    """Copy the adapter for PEFT, as the hub is to get it: its base named as the hub names it."""
    with writing(job.out):
        copy_files(job.subject.adapter, folder)
        config = config_of(folder)
        config["base_model_name_or_path"] = hub_name(job.subject.plan.base)
        write_text(folder / _CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_card(job.subject, folder, tags=job.options.tags, library="peft")


def base_of(subject: Subject) -> str:
    """The weights beneath the adapter in a form that a server loads; a GGUF file is converted once."""
    return plain_weights(subject.plan.base)


def config_of(adapter: Path) -> dict[str, Any]:
    """An adapter's settings; raises ConfigError where they cannot be read."""
    try:
        return dict(json.loads((adapter / _CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{str(adapter)!r} is no adapter that can be read: {error}") from error
