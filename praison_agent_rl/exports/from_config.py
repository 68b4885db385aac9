"""What a training file says of publishing: checked before the training, carried out after it."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, PraisonRLError
from praison_agent_rl.exports import export
from praison_agent_rl.exports.folders import check_free
from praison_agent_rl.exports.jobs import Say
from praison_agent_rl.exports.kinds import kind_of
from praison_agent_rl.exports.made import Export, Options, Target, read_options
from praison_agent_rl.exports.subjects import find_subject
from praison_agent_rl.problems import Problems
from praison_agent_rl.records import Record
from praison_agent_rl.runs import HOME, RunFolder, read_record, write_record

_PUBLISHED = "published.json"
_FLAGS = {"repo": "--repo", "form": "--form", "name": "--name", "message": "--message", "imatrix": "--imatrix"}


class Wanted(NamedTuple):
    """One export that a training file asks for."""

    to: Target
    options: dict[str, Any]
    out: str | None = None

    @property
    def words(self) -> str:
        """How it is asked for on a command line, and told apart from others."""
        words = ["--to", self.to, *(["--out", self.out] if self.out else [])]
        for name, flag in _FLAGS.items():
            words += [flag, str(self.options[name])] if self.options.get(name) is not None else []
        for name, flag in (("quantization", "--quantize"), ("tags", "--tag")):
            words += [word for value in self.options.get(name) or () for word in (flag, value)]
        return shlex.join([*words, "--public"] if self.options.get("private") is False else words)

    def command(self, run: Path, *, force: bool = False) -> str:
        """What does it by hand."""
        return f"{shlex.join(['praison-agent-rl', 'export', str(run)])} {self.words}{' --force' if force else ''}"


class Published(Record):
    """What was published of a run, beside it, so that a run that is gone on with publishes nothing twice."""

    places: dict[str, str]
    """Folder, or address on the hub, of each export by its ``Wanted.words``."""

    def place_of(self, wanted: Wanted) -> str | None:
        """Where an export is; None where it was not made, or is there no more."""
        place = self.places.get(wanted.words)
        return place if place is not None and (wanted.to == "hub" or Path(place).is_dir()) else None


def check_publishing(config: TrainConfig) -> None:
    """Raise, as one error, all that would keep what a training file publishes from being published.

    Raises:
        ConfigError: a level, a name, a folder or a token is wrong or missing; or several things are wrong.
        MissingExtra: a program is not here.
    """
    problems = Problems()
    wanted = list(wanted_exports(config))
    if wanted and config.method == "reward":
        problems.found.append(
            ConfigError("a reward model answers nothing, so it is not published; remove the keys of publishing")
        )
    for one in wanted:
        problems.attempt(_check_of(one))
    problems.attempt(lambda: _check_apart(config))
    problems.raise_all()


def publish_as_configured(run: RunFolder, config: TrainConfig, say: Say) -> list[Export]:
    """Publish what a finished run has trained, if the gate let it through or nothing was held out.

    What was published before is said and left alone. A failure is said with the command that does it again; the run has
    succeeded all the same.
    """
    try:
        wanted = _not_published(run, config, say)
        if not wanted:
            return []
        passed = find_subject(run.root, HOME).passed
    except (PraisonRLError, OSError) as error:
        say(f"nothing was published: {error}")
        return []
    if passed is False:
        say("it was not let through by the gate, so it is not published; all the same, by hand:")
        for one in wanted:
            say(f"  {one.command(run.root, force=True)}")
        return []
    made = []
    for one in wanted:
        try:
            made.append(export(run.root, one.to, out=one.out, say=say, **one.options))
            _note(run, one, made[-1])
        except (PraisonRLError, OSError) as error:
            say(f"publishing failed ({one.to}): {error}\n  do it again by: {one.command(run.root)}")
    return made


def _not_published(run: RunFolder, config: TrainConfig, say: Say) -> list[Wanted]:
    """The exports that are still to be made; where the others are is said."""
    published, wanted = _published(run), list(wanted_exports(config))
    if places := [place for one in wanted if (place := published.place_of(one)) is not None]:
        say(f"the run is finished and published already: {', '.join(places)}")
    return [one for one in wanted if published.place_of(one) is None]


def _published(run: RunFolder) -> Published:
    file = run.root / _PUBLISHED
    return read_record(file, Published) if file.exists() else Published(places={})


def _note(run: RunFolder, wanted: Wanted, made: Export) -> None:
    """Write beside the run where an export is."""
    place = made.place if wanted.to == "hub" else str(Path(made.place).resolve())
    places = {**_published(run).places, wanted.words: place}
    write_record(run.root / _PUBLISHED, Published(places=places))


def wanted_exports(config: TrainConfig) -> Iterator[Wanted]:
    """The exports that a training file asks for, in the order in which they are made."""
    levels = config.quantization_method
    chosen = (levels,) if isinstance(levels, str) else tuple(levels or ()) or None
    gguf: dict[str, Any] = {"quantization": chosen, "imatrix": config.imatrix_file}
    hub: dict[str, Any] = {"repo": config.hf_model_name, "private": config.hf_private, "tags": config.tags}
    hub |= {"message": config.commit_message}
    if config.merged_save_dir:
        yield Wanted("hf", {}, config.merged_save_dir)
    if config.huggingface_save:
        yield Wanted("hub", {**hub, "form": config.save_method})
    if config.huggingface_save_gguf:  # in a repository of its own beside another, as each has one card
        beside = f"{config.hf_model_name}-GGUF" if config.huggingface_save and config.hf_model_name else None
        yield Wanted("hub", {**hub, **gguf, "form": "gguf", "repo": beside or config.hf_model_name})
    if config.ollama_save:
        yield Wanted("ollama", {**gguf, "name": config.ollama_model})


def _check_apart(config: TrainConfig) -> None:
    """Raise ConfigError where the merged model would go where the run itself will lie: found at its end, it is late."""
    if not config.merged_save_dir or not config.output_dir:
        return
    out, run = Path(config.merged_save_dir).expanduser().resolve(), Path(config.output_dir).resolve()
    own = RunFolder(run)
    if out in (run, *run.parents) or {own.merged, own.adapter} & {out, *out.parents}:
        raise ConfigError(
            f"merged_save_dir {config.merged_save_dir!r} is where the run itself keeps its files (output_dir "
            f"{config.output_dir!r}); give another folder"
        )


def _check_of(wanted: Wanted) -> Callable[[], None]:
    def check() -> None:
        options: Options = read_options(wanted.options)
        kind_of(wanted.to, options).prepare(options)
        if wanted.out:
            check_free(Path(wanted.out).expanduser())

    return check
