"""``to="gguf"``: GGUF files of the merged model, by llama.cpp's own converter and quantiser."""

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import MissingExtra, ModelError
from praison_agent_rl.exports.cards import write_card
from praison_agent_rl.exports.folders import need_room, writing
from praison_agent_rl.exports.jobs import Job, Written
from praison_agent_rl.exports.llama_programs import BY_CONVERTER, BY_QUANTISER, convert, quantise, read_levels
from praison_agent_rl.exports.merged import stage
from praison_agent_rl.weight_files import read_config

_STORED = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""The level that keeps every weight as it is, by the number format of the model."""
_BOS_BY_PRE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "chameleon")
"""Pre-tokenizers of which a text begins with the bos token unless the file says otherwise (src/llama-vocab.cpp)."""


def write_gguf(job: Job, folder: Path) -> Written:
    """Write a file for each level.

    Raises:
        ModelError: llama.cpp failed, a file does not say what the tokenizer says, or the disk takes no more.
    """
    levels = read_levels(job.options.quantization)
    files, notes = _write_levels(job, folder, levels)
    problems = [problem for file in files for problem in problems_of(file, job)]
    if problems:
        raise ModelError("the GGUF file does not say what the model's own files say:\n" + "\n".join(problems))
    with writing(job.out):
        write_card(job.subject, folder, tags=(*job.options.tags, "gguf"), library="gguf")
    use = [f"llama-server -m {shlex.quote(str(job.out / file.name))} --jinja" for file in files]
    return Written(use, notes)


def _write_levels(job: Job, folder: Path, levels: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files, in the order of ``levels``, and what is to be known of them."""
    stored = _STORED.get(str(read_config(str(job.subject.model)).get("dtype")), "f16")
    files = {level: folder / f"{job.subject.name}-{level.upper()}.gguf" for level in levels}
    notes: list[str] = []
    size = sum(path.stat().st_size for path in job.subject.model.glob("*.safetensors"))
    need_room(size * (len(levels) + any(level in BY_QUANTISER for level in levels)), job.out)
    with tempfile.TemporaryDirectory(prefix=".stage-", dir=folder) as scratch:
        staged = Path(scratch) / "model"
        staged.mkdir()
        stage(job, staged, linked=True)
        whole = files.get(stored, Path(scratch) / "whole.gguf")
        for level in sorted(levels, key=lambda level: level in BY_QUANTISER):
            if level in BY_CONVERTER:
                job.say(f"writing {files[level].name}")
                convert(staged, files[level], level, name=job.subject.name)
                continue
            if not whole.exists():
                job.say(f"writing the model as {stored}, to be quantised")
                convert(staged, whole, stored, name=job.subject.name)
            job.say(f"writing {files[level].name}")
            found = quantise(whole, files[level], level, imatrix=job.options.imatrix)
            notes += [f"{files[level].name}: {note}" for note in found]
    return list(files.values()), notes


def problems_of(file: Path, job: Job) -> list[str]:
    """In what a GGUF file differs from the tokenizer that it was made of: chat template, end token, vocabulary."""
    from praison_agent_rl.exports.end_tokens import tokenizer_in

    said, tokenizer = metadata_of(file), tokenizer_in(job.subject.model, trusted=job.subject.trusted)
    problems = []
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template  # the others are not converted
    if said.get("tokenizer.chat_template") != template:
        problems.append(f"{file.name}: its chat template is another one")
    end = said.get("tokenizer.ggml.eos_token_id")
    if end not in job.ends.ids:
        problems.append(f"{file.name}: answers end at token {end}, and should at {job.ends.ids}")
    if (tokens := len(said.get("tokenizer.ggml.tokens") or ())) < len(tokenizer):
        problems.append(f"{file.name}: it has {tokens} tokens, and the tokenizer {len(tokenizer)}")
    return problems


def metadata_of(file: Path) -> dict[str, Any]:
    """What a GGUF file says of itself.

    Raises:
        ModelError: it cannot be read.
        MissingExtra: gguf is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtra('reading GGUF files needs gguf: pip install "praison-agent-rl[train]"') from error
    wanted = ("tokenizer.chat_template", "tokenizer.ggml.")
    try:
        fields = GGUFReader(file).fields
        return {name: field.contents() for name, field in fields.items() if name.startswith(wanted)}
    except (OSError, ValueError) as error:
        raise ModelError(f"the GGUF file {str(file)!r} cannot be read: {error}") from error


def adds_bos(said: dict[str, Any]) -> bool:
    """Whether llama.cpp begins every text of this file's model with the bos token by itself."""
    default = said.get("tokenizer.ggml.model") == "llama" or said.get("tokenizer.ggml.pre") in _BOS_BY_PRE
    return bool(said.get("tokenizer.ggml.add_bos_token", default))
