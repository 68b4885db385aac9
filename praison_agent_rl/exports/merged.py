"""``to="hf"``: the merged model as a folder that transformers, vLLM and TGI read."""

import shlex
from pathlib import Path

from praison_agent_rl.exports.cards import write_card
from praison_agent_rl.exports.end_tokens import write_end_tokens
from praison_agent_rl.exports.folders import copy_files, need_room, writing
from praison_agent_rl.exports.jobs import Job, Written


def write_merged(job: Job, folder: Path) -> Written:
    """Copy the merged weights with tokenizer, chat template and generation config, and write the card.

    Raises:
        ModelError: the disk takes no more.
    """
    stage(job, folder, linked=False)
    place = shlex.quote(str(job.out)) + (" --trust-remote-code" if job.subject.trusted else "")
    use = [f"transformers serve {place}", f"vllm serve {place}"]
    return Written(use, [])


def stage(job: Job, folder: Path, *, linked: bool) -> None:
    """The whole model in ``folder``, for a user, or ``linked`` to be made into something else."""
    model = job.subject.model
    if not linked:
        need_room(sum(path.stat().st_size for path in model.rglob("*") if path.is_file()), job.out)
    with writing(job.out):
        copy_files(model, folder, linked=linked)
        write_end_tokens(folder, job.ends.ids)
        write_card(job.subject, folder, tags=job.options.tags)
