"""Let a trained version go where it is deployed: a merged folder, an adapter for vLLM, GGUF, Ollama, the hub.

Every export is checked: it is loaded again and asked the held-out prompts that its version was measured by. It appears
whole or not at all.
"""

from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.exports.end_tokens import check_agreement, end_tokens
from praison_agent_rl.exports.folders import check_free, new_folder, scratch_folder
from praison_agent_rl.exports.hub import push
from praison_agent_rl.exports.jobs import Job, Say
from praison_agent_rl.exports.kinds import Kind, check_meant, checked, kind_of
from praison_agent_rl.exports.made import TARGETS, Check, Export, File, Options, Target, files_of, read_options
from praison_agent_rl.exports.ollama import create as create_in_ollama
from praison_agent_rl.exports.subjects import Subject, check_exportable, check_outside, find_subject
from praison_agent_rl.runs import HOME

__all__ = ["TARGETS", "Check", "Export", "File", "Options", "Target", "export"]


def export(
    subject: str | Path,
    to: Target,
    *,
    out: str | Path | None = None,
    home: Path = HOME,
    say: Say = lambda text: None,
    **options: Any,
) -> Export:
    """Export ``subject``: an agent's name (its current version), ``agent@v3``, or the folder of a finished run.

    ``to`` is ``hf`` (a merged folder), ``vllm`` (an adapter), ``gguf``, ``ollama`` or ``hub``. It goes into the new
    folder ``out``, by default one under ``.praisonai/rl/exports``. ``options`` are the fields of `Options`: ``force``,
    ``check``, ``quantization``, ``imatrix``, ``name``, ``repo``, ``private``, ``form``, ``message``, ``tags``. ``say``
    hears what is being done.

    Raises:
        ConfigError: an option is wrong, or ``out`` holds something already.
        VersionError: there is no such version, or the gate did not let it through and ``force`` was not given.
        VersionDamaged: its files are not what they were.
        ModelError: it could not be written, or the check failed and ``force`` was not given.
        MissingExtra: a program or package is not here; the message says how to get it.
        ServerFailed: the hub or Ollama refused.
    """
    chosen = read_options(options)
    if to not in TARGETS:
        raise ConfigError(f"nothing can be exported to {to!r}; there are: {', '.join(TARGETS)}")
    check_meant(to, chosen)
    kind = kind_of(to, chosen)
    kind.prepare(chosen)
    found = find_subject(subject, home)
    place = Path(out).expanduser() if out is not None else home / "exports" / f"{found.name}-{to}"
    check_outside(found, place)
    if to != "hub":
        check_free(place)
    check_exportable(found, force=chosen.force)
    kind.fits(found)
    ends = end_tokens(found.model, trusted=found.trusted)
    notes = [*_doubts(found), *check_agreement(ends, label=found.label, force=chosen.force)]
    job = Job(found, chosen, place, ends, say)
    made = _pushed(job, kind) if to == "hub" else _written(job, kind, to)
    return made.model_copy(update={"notes": [*notes, *made.notes]})


def _written(job: Job, kind: Kind, to: Target) -> Export:
    with new_folder(job.out) as folder:
        written = kind.write(job, folder)
        checks = checked(kind, job, folder)
        files = files_of(folder)
    after = create_in_ollama(job) if to == "ollama" else []
    return Export(
        kind=to,
        subject=job.subject.label,
        place=str(job.out),
        files=files,
        checks=checks,
        use=written.use,
        notes=[*written.notes, *after],
    )


def _pushed(job: Job, kind: Kind) -> Export:
    """What is pushed is gone from here afterwards; the version stays."""
    with scratch_folder(job.out) as folder:
        written = kind.write(job, folder)
        checks = checked(kind, job, folder)
        files, address = files_of(folder), push(job, folder)
    return Export(
        kind="hub",
        subject=job.subject.label,
        place=address,
        files=files,
        checks=checks,
        use=written.use,
        notes=written.notes,
    )


def _doubts(subject: Subject) -> list[str]:
    if subject.unmeasured:
        return ["exported by force, before it was compared on its held-out prompts; its card says so"]
    if subject.passed is None:
        return ["nothing was held out, so it is not known whether it is better than its base"]
    return [] if subject.passed else ["exported by force, against the verdict of the gate; its card says so"]
