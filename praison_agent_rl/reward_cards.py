"""Trained reward models on disk: ``HOME/rewards/<name>/v<n>/``, each whole or not there; no weights are loaded here."""

import os
import re
import secrets
import shlex
import shutil
from pathlib import Path

from praison_agent_rl.errors import ConfigError, RewardError, TrainingFailed
from praison_agent_rl.locks import locked
from praison_agent_rl.records import RewardCard
from praison_agent_rl.runs import HOME, RunFolder, read_record, slug, write_record, write_text

CARD = "card.json"
MODEL = "model"
FOLDER = "rewards"

_VERSION = re.compile(r"v[1-9][0-9]*")
_KEPT = ("plan.json", "events.jsonl", "pair_scores.jsonl", "report.html", "report.json")


def publish_reward_model(home: Path, name: str, run: RunFolder) -> Path:
    """Make the next version of reward model ``name`` from a finished run; returns its folder. The model moves there.

    Raises:
        TrainingFailed: it cannot be written there; the run can be gone on with.
    """
    card = read_record(run.card, RewardCard)
    folder = home / FOLDER / slug(name)
    with locked(folder / ".publishing"):
        # the time too: a run's folder may have been taken away and used again
        of_run = ((path, _card(path)) for path in versions_in(folder))
        if made := [path for path, made_of in of_run if (made_of.run, made_of.created) == (card.run, card.created)]:
            return made[-1]
        number = 1 + max(map(_number, versions_in(folder)), default=0)
        for left in folder.glob(".part-*"):  # by a process that was killed: nobody else is at it now
            shutil.rmtree(left, ignore_errors=True)
        temporary = folder / f".part-{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            for file in _KEPT:
                if (run.root / file).exists():
                    shutil.copy2(run.root / file, temporary / file)
            shutil.copytree(run.adapter, temporary / "adapter")
            shutil.copytree(run.merged, temporary / MODEL)
            published = card.model_copy(update={"name": slug(name), "version": f"v{number}"})
            write_record(temporary / CARD, published)
            write_text(temporary / "README.md", as_page(published))
            os.rename(temporary, folder / f"v{number}")
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError | shutil.Error):
                raise
            raise TrainingFailed(
                f"the reward model was trained, but cannot be kept in {str(folder)!r}: {_why(error)}; make room there, "
                f"then end the run with: praison-agent-rl train --resume {shlex.quote(str(run.root))}"
            ) from error
    shutil.rmtree(run.merged, ignore_errors=True)
    return folder / f"v{number}"


def _why(error: Exception) -> str:
    """What the system said; of many files that could not be copied, of the first."""
    return str(error.args[0][0][2]) if isinstance(error, shutil.Error) else str(error)


def versions_in(folder: Path) -> list[Path]:
    """The versions of a reward model, oldest first."""
    found = [path for path in folder.glob("v*") if _VERSION.fullmatch(path.name) and (path / CARD).is_file()]
    return sorted(found, key=_number)


def find_reward_model(text: str, home: Path = HOME) -> tuple[str, RewardCard | None]:
    """The weights that ``text`` means, a folder or a hub name, and their card if they have one.

    ``rewards/<name>`` is the newest version that passed, ``rewards/<name>/v2`` that one; else ``text`` is a folder of a
    version, a folder of weights, or a hub name.

    Raises:
        RewardError: there is none of ours by that name, or none of them passed.
    """
    named = text.strip().strip("/").split("/")
    if named[0] == FOLDER and not Path(text).exists():
        return _of_ours(named[1:], home)
    path = Path(text).expanduser()
    if not path.exists():
        return text.strip(), None
    version = path.parent if path.name == MODEL and (path.parent / CARD).is_file() else path
    if (version / CARD).is_file():
        return str((version / MODEL).resolve()), _card(version)
    if not (path / "config.json").is_file():
        raise RewardError(f"{str(path)!r} is no reward model: it has neither {CARD} nor config.json")
    return str(path.resolve()), None


def is_model_name(text: str) -> bool:
    """Whether an entry of ``reward_funcs`` names a model and no function."""
    name = text.strip()
    return bool(name) and ":" not in name and not name.endswith(".py") and ("/" in name or Path(name).is_dir())


def _of_ours(named: list[str], home: Path) -> tuple[str, RewardCard | None]:
    there = sorted(path.parent.parent.name for path in (home / FOLDER).glob("*/v*/card.json"))
    known = ", ".join(f"{FOLDER}/{name}" for name in dict.fromkeys(there)) or "none"
    if not named or len(named) > 2:
        raise RewardError(f"a reward model of ours is named {FOLDER}/<name> or {FOLDER}/<name>/v1; there are: {known}")
    folder = home / FOLDER / named[0]
    versions = versions_in(folder)
    if not versions:
        raise RewardError(f"there is no reward model {FOLDER}/{named[0]} in {str(home)!r}; there are: {known}")
    if len(named) == 2:
        if named[1] not in [path.name for path in versions]:
            raise RewardError(
                f"{FOLDER}/{named[0]} has no version {named[1]!r}; it has: {', '.join(path.name for path in versions)}"
            )
        return str((folder / named[1] / MODEL).resolve()), _card(folder / named[1])
    for version in reversed(versions):
        if (card := _card(version)).passed:
            return str((version / MODEL).resolve()), card
    raise RewardError(
        f"no version of {FOLDER}/{named[0]} is known to be right more often than not "
        f"({_card(versions[-1]).accuracy:.0%} on {_card(versions[-1]).held_out} held-out prompts); name one, as "
        f"{FOLDER}/{named[0]}/{versions[-1].name}, to use it all the same"
    )


def _card(version: Path) -> RewardCard:
    try:
        return read_record(version / CARD, RewardCard)
    except ConfigError as error:
        raise RewardError(str(error)) from error


def _number(version: Path) -> int:
    return int(version.name[1:])


def as_page(card: RewardCard) -> str:
    """The card for people, as Markdown."""
    quantiles = ", ".join(f"{name} {value:.3g}" for name, value in card.score_quantiles.items())
    return f"""# Reward model {card.name} {card.version or ""}

Right on {card.accuracy:.1%} of the pairs of {card.held_out} held-out prompts (95 % interval {card.accuracy_low:.1%} to
{card.accuracy_high:.1%}; a coin is right on 50 %). Chosen answers score {card.margin:.3g} more than rejected ones.

| | |
| - | - |
| base | `{card.base}` (hash {card.base_hash or "unknown"}) |
| pairs trained on | {card.train} |
| scores of trained answers | mean {card.score_mean:.3g}, standard deviation {card.score_std:.3g}; {quantiles} |
| reads | {"plain text" if card.form == "text" else "messages"}, at most {card.max_length} tokens |
| tools shown | {", ".join(str(tool.get("function", {}).get("name")) for tool in card.tools) or "none"} |
| made | {card.created}, run `{card.run}` |

Use it as a reward: `reward_funcs: [{FOLDER}/{card.name}/{card.version}]`, or
`praison_agent_rl.rewards.from_model("{FOLDER}/{card.name}/{card.version}")`.
Load it: `AutoModelForSequenceClassification.from_pretrained("model", num_labels=1)`; the adapter alone with
`AutoPeftModelForSequenceClassification.from_pretrained("adapter", num_labels=1)`.
"""
