"""What an export is told, and what came of it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.estimate import in_words
from praison_agent_rl.records import Record
from praison_agent_rl.shown import shown

Target = Literal["hf", "vllm", "ollama", "gguf", "hub"]
TARGETS: tuple[Target, ...] = ("hf", "vllm", "gguf", "ollama", "hub")


class Options(Record):
    """How something is exported."""

    force: bool = False
    """Also what the gate did not let through, whose end tokens disagree, or whose check failed."""
    check: bool = True
    """Load the export again and ask it the held-out prompts."""
    quantization: tuple[str, ...] = ("q8_0",)
    """Levels of GGUF files, one file each; of an Ollama model, the first."""
    imatrix: Path | None = None
    """Importance matrix for ``llama-quantize``."""
    name: str | None = None
    """Of the model in Ollama, or of the adapter in vLLM."""
    repo: str | None = None
    """Repository on the hub, as ``user/name``."""
    private: bool = True
    """Whether that repository is private when it is made."""
    form: Literal["merged", "lora", "gguf"] = "merged"
    """What the hub gets."""
    message: str | None = None
    """Of the commit on the hub."""
    tags: tuple[str, ...] = ()
    """Tags of the model card."""


class File(Record):
    """A file of an export."""

    path: str
    """In the folder, or in the repository."""
    size: int
    """Bytes."""


class Check(Record):
    """What was found when the export was loaded again and asked held-out prompts."""

    status: Literal["passed", "failed", "unchecked"]
    text: str
    """The same with its numbers, or why it was not checked."""
    prompts: int = 0
    equal: int = 0
    """Greedy answers that are those of the version, letter by letter."""
    own: float | None = None
    """Mean score of the version's own greedy answers to these prompts."""
    exported: float | None = None
    """That of the export's."""
    allowed: float | None = None
    """How much lower that may be."""


class Export(Record):
    """Something that left for a deployment."""

    kind: Target
    subject: str
    """What was exported, as ``helper/v3`` or the folder of a run."""
    place: str
    """Folder, or address of the commit on the hub."""
    files: list[File]
    checks: dict[str, Check]
    """By what was loaded: the folder, or each GGUF file."""
    use: list[str]
    """Commands to use it."""
    notes: list[str]
    """What else is to be known of it."""

    def __str__(self) -> str:
        size = in_words(sum(file.size for file in self.files))
        return f"{self.subject} as {self.kind}: {self.place} ({len(self.files)} files, {size})"


def read_options(given: dict[str, Any]) -> Options:
    """Options as a caller gives them; raises ConfigError that names every wrong one."""
    try:
        return Options(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [_in_words(dict(fault)) for fault in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from error


def _in_words(fault: dict[str, Any]) -> str:
    name = fault["loc"][0]
    if fault["type"] == "extra_forbidden":
        return f"{name!r} is no option of an export; there are: {', '.join(Options.model_fields)}"
    return f"the option {name} is {shown(fault['input'])}: {fault['msg'].lower()}"


def files_of(folder: Path) -> list[File]:
    """The files below a folder with their sizes, in the order of their names."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [File(path=path.relative_to(folder).as_posix(), size=path.stat().st_size) for path in paths]
