"""``to="ollama"``: a merged GGUF file and a Modelfile; an adapter is never named, as Ollama from 0.34.1 refuses it.

No Ollama was here to try it: the template is proved against the tokenizer's, the GGUF file is asked by llama.cpp.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ConfigError, ServerFailed
from praison_agent_rl.exports.end_tokens import tokenizer_in
from praison_agent_rl.exports.folders import writing
from praison_agent_rl.exports.gguf_files import adds_bos, metadata_of, write_gguf
from praison_agent_rl.exports.jobs import Job, Written
from praison_agent_rl.exports.ollama_templates import OllamaTemplate, ollama_template
from praison_agent_rl.exports.probes import Conversation
from praison_agent_rl.runs import write_text

_PART, _OWNER = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"
_NAME = re.compile(rf"(([A-Za-z0-9_][A-Za-z0-9_.:-]{{0,349}}/)?{_OWNER}/)?{_PART}(:{_PART})?")
"""``host/owner/model:tag`` (Ollama's types/model/name.go)."""
_CONTEXT = 4096
"""Tokens that Ollama remembers unless it is told otherwise."""
MODELFILE = "Modelfile"


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of a model in Ollama."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} can be no name of a model in Ollama; write owner/model:tag, or model alone, of the letters a to "
            "z, digits, '_', '-' and, but for the owner, '.'"
        )


def write_ollama(job: Job, folder: Path) -> Written:
    """Write the GGUF file and the Modelfile.

    Raises:
        ModelError: llama.cpp failed, or the disk takes no more.
    """
    first = job.options.model_copy(update={"quantization": job.options.quantization[:1]})
    notes = write_gguf(job._replace(options=first), folder).notes
    file = next(folder.glob("*.gguf"))
    tokenizer, said = tokenizer_in(job.subject.model, trusted=job.subject.trusted), metadata_of(file)
    template, words = _template(tokenizer, added=adds_bos(said))
    text = _modelfile(job, file, template)
    with writing(job.out):
        write_text(folder / MODELFILE, text)
    if len(job.options.quantization) > 1:
        words.append(f"a model in Ollama has one level, so of {', '.join(job.options.quantization)} it has the first")
    return Written([create_command(job), f"ollama run {name_of(job)}"], [*notes, *words])


def name_of(job: Job) -> str:
    """What the model is called in Ollama."""
    return job.options.name or job.subject.name


def create_command(job: Job) -> str:
    """What makes the model in Ollama."""
    return shlex.join(["ollama", "create", name_of(job), "-f", str(job.out / MODELFILE)])


def create(job: Job) -> list[str]:
    """Make the model in the Ollama that is here; says so, or that there is none.

    Raises:
        ServerFailed: Ollama refused it; the folder is whole.
    """
    command = shutil.which("ollama")
    if command is None:
        return ["no command 'ollama' is here, so the model was not made in Ollama; no Modelfile was tried by one"]
    job.say(create_command(job))
    arguments = [command, "create", name_of(job), "-f", MODELFILE]
    done = subprocess.run(arguments, cwd=job.out, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-1000:]
        raise ServerFailed(
            f"'ollama create' ended with code {done.returncode}: {said}\nthe files are whole in {str(job.out)!r}; see "
            f"that Ollama runs, and: {create_command(job)}"
        )
    return [f"Ollama has it as {name_of(job)!r}"]


def _template(tokenizer: Any, *, added: bool) -> tuple[OllamaTemplate | None, list[str]]:
    """The template, and what is to be said of it."""
    if tokenizer.chat_template is None:
        return None, ["the model has no chat template; Ollama hands it prompts as they are"]
    found = ollama_template(_rendered_by(tokenizer), bos=tokenizer.bos_token or "", added=added)
    if found is None:
        return None, [
            "the chat template is of no family that is known here, so the Modelfile has none: Ollama then guesses "
            "by the file's own, or hands prompts on as they are; write one, or serve the file by llama-server"
        ]
    notes = [f"conversations with {kind} are rendered otherwise than in training" for kind in found.lacks]
    if "tools" in found.covers:
        notes.append(
            "Ollama writes the JSON of tools and calls without the spaces that it had in training, and <, > and & as "
            "\\u003c, \\u003e and \\u0026"
        )
    return found, notes


def _rendered_by(tokenizer: Any) -> Callable[[Conversation], str]:
    def rendered(conversation: Conversation) -> str:
        given = {name: value for name, value in conversation.items() if name not in ("name", "messages")}
        return str(
            tokenizer.apply_chat_template(conversation["messages"], add_generation_prompt=True, tokenize=False, **given)
        )

    return rendered


def _modelfile(job: Job, file: Path, template: OllamaTemplate | None) -> str:
    lines = [f"# {job.subject.title}, exported by praison-agent-rl", f"FROM ./{file.name}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template.text}"""')
    lines += [f"PARAMETER stop {_quoted(text)}" for text in job.ends.texts]
    lines.append("PARAMETER repeat_penalty 1")  # Ollama's own 1.1 was not there when the model was measured
    longest = int(job.subject.plan.config.get("max_seq_length") or 0)
    if longest > _CONTEXT:
        lines.append(f"PARAMETER num_ctx {longest}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'
