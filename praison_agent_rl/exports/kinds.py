"""What each kind of export looks at first, writes, and has checked."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from praison_agent_rl.errors import ConfigError, ModelError
from praison_agent_rl.exports.adapters import (
    base_of,
    check_servable,
    config_of,
    serve_command,
    write_adapter,
    write_peft,
)
from praison_agent_rl.exports.cards import hub_name
from praison_agent_rl.exports.checking import check_adapter, check_files, check_folder, unchecked
from praison_agent_rl.exports.gguf_files import write_gguf
from praison_agent_rl.exports.hub import check_hub
from praison_agent_rl.exports.jobs import Job, Written
from praison_agent_rl.exports.llama_programs import check_tools, read_levels
from praison_agent_rl.exports.llama_python import find_llama_python
from praison_agent_rl.exports.made import Check, Options, Target
from praison_agent_rl.exports.merged import stage, write_merged
from praison_agent_rl.exports.ollama import check_name, write_ollama
from praison_agent_rl.exports.subjects import Subject
from praison_agent_rl.vllm_servers.adapters import why_not_servable
from praison_agent_rl.weight_files import check_adapter_files


class Kind(NamedTuple):
    """One kind of export."""

    write: Callable[[Job, Path], Written]
    """Writes the files into a folder."""
    check: Callable[[Job, Path], Mapping[str, Check]]
    """Loads what lies there, by the name of what is loaded."""
    prepare: Callable[[Options], None] = lambda options: None
    """Raises what is wrong before any work starts."""
    fits: Callable[[Subject], None] = lambda subject: None
    """Raises where this subject cannot be exported so."""


def kind_of(to: Target, options: Options) -> Kind:
    """The kind; what goes to the hub is written as another kind is."""
    if to != "hub":
        return KINDS[to]
    kind = _ON_THE_HUB[options.form]

    def prepare(given: Options) -> None:
        check_hub(given)
        kind.prepare(given)

    return kind._replace(prepare=prepare)


def check_meant(to: Target, options: Options) -> None:
    """Raise ConfigError for options that were given and do nothing for this kind: they were meant for another."""
    takes = _TAKES.get(f"{to} {options.form}", _TAKES.get(to, ()))
    given = options.model_dump(exclude_defaults=True).keys() - {"force", "check", "tags", *takes}
    if given:
        what = f"{to} --form {options.form}" if to == "hub" else to
        raise ConfigError(f"{', '.join(sorted(given))} would do nothing for --to {what}; leave it out, or take another")


def checked(kind: Kind, job: Job, folder: Path) -> dict[str, Check]:
    """What asking showed; raises ModelError where it failed and that was not to be ignored."""
    if not job.options.check:
        return {"export": unchecked("--no-check (check=False) was given")}
    checks = dict(kind.check(job, folder))
    failed = [f"{name}: {check.text}" for name, check in checks.items() if check.status == "failed"]
    if failed and not job.options.force:
        raise ModelError(
            f"{job.subject.label} answers otherwise once it is exported, so nothing was kept:\n"
            + "\n".join(failed)
            + "\n--force (force=True) keeps it all the same"
        )
    return checks


def _check_gguf_options(options: Options) -> None:
    check_tools(read_levels(options.quantization), options.imatrix)
    if options.check:
        find_llama_python()


def _check_ollama_options(options: Options) -> None:
    if options.name:
        check_name(options.name)
    read_levels(options.quantization)
    _check_gguf_options(options.model_copy(update={"quantization": options.quantization[:1]}))


def _write_staged(job: Job, folder: Path) -> Written:
    stage(job, folder, linked=True)
    return Written([f"vllm serve {job.options.repo}"], [])


def _write_peft(job: Job, folder: Path) -> Written:
    write_peft(job, folder)
    base = job.subject.plan.base
    notes = [] if hub_name(base) else [f"its base is not on the hub, so it is of use only where {base!r} is"]
    if why_not_servable(config_of(folder)) is None:
        return Written([serve_command(job, str(job.options.repo))], notes)
    load = f"from peft import AutoPeftModelForCausalLM as M; M.from_pretrained({job.options.repo!r})"
    return Written([f'python -c "{load}"'], notes)


def _write_gguf_for_the_hub(job: Job, folder: Path) -> Written:
    notes, files = write_gguf(job, folder).notes, sorted(folder.glob("*.gguf"))
    # by its name, as files of earlier versions may lie beside it
    use = [f"llama-server --hf-repo {job.options.repo} --hf-file {file.name} --jinja" for file in files]
    return Written(use, notes)


def _check_model(job: Job, folder: Path) -> Mapping[str, Check]:
    return {"model": check_folder(job, folder)}


def _check_adapter(job: Job, folder: Path) -> Mapping[str, Check]:
    if why := why_not_servable(config_of(folder)):
        return {"adapter": unchecked(why)}
    return {"adapter": check_adapter(job, folder, base_of(job.subject))}


def _check_gguf(job: Job, folder: Path) -> Mapping[str, Check]:
    return check_files(job, sorted(folder.glob("*.gguf")))


KINDS: dict[str, Kind] = {
    "hf": Kind(write_merged, _check_model),
    "vllm": Kind(write_adapter, _check_adapter, fits=check_servable),
    "gguf": Kind(write_gguf, _check_gguf, _check_gguf_options),
    "ollama": Kind(write_ollama, _check_gguf, _check_ollama_options),
}
_ON_THE_HUB = {
    "merged": Kind(_write_staged, _check_model),
    "lora": Kind(_write_peft, _check_adapter, fits=lambda subject: check_adapter_files(subject.adapter)),
    "gguf": Kind(_write_gguf_for_the_hub, _check_gguf, _check_gguf_options),
}
_HUB, _GGUF = ("repo", "private", "form", "message"), ("quantization", "imatrix")
_TAKES: dict[str, tuple[str, ...]] = {
    "vllm": ("name",),
    "gguf": _GGUF,
    "ollama": ("name", *_GGUF),
    "hub merged": _HUB,
    "hub lora": ("name", *_HUB),
    "hub gguf": (*_HUB, *_GGUF),
}
"""Options that a kind looks at, besides those that all do."""
