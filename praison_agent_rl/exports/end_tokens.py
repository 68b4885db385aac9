"""Whether every file of a model says that answers end at the same tokens; where they do not, a server talks on.

LlamaFactory#10834 is what happens: a chat template whose end token nobody stops at.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.errors import ModelError
from praison_agent_rl.runs import write_text

_GENERATION = "generation_config.json"
_MARK = "praison"
"""An answer that no template changes."""


class EndTokens(NamedTuple):
    """The tokens that end an answer, and what is wrong with what the files say of them."""

    ids: list[int]
    """Those at which the version's own answers ended when it was measured."""
    texts: list[str]
    problems: list[str]


def end_tokens(folder: Path, *, trusted: bool = False) -> EndTokens:
    """The end tokens of the model in ``folder`` by its tokenizer, generation config, config and chat template.

    Raises:
        ModelError: a file cannot be read.
        MissingExtra: transformers is not installed.
    """
    tokenizer = tokenizer_in(folder, trusted=trusted)
    declared, of_config = (_declared_in(folder / name, tokenizer) for name in (_GENERATION, "config.json"))
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = sorted({*declared, *own})
    problems = []
    if not own:
        problems.append("the tokenizer has no end token (eos_token)")
    if other := sorted({*of_config} - {*ids}):
        problems.append(f"config.json ends answers at {_named(tokenizer, other)}, the generation config does not")
    last, refused = _of_template(tokenizer)
    problems += refused
    if last is not None and last not in ids:
        where = _named(tokenizer, ids) or "nowhere"
        problems.append(f"the chat template ends answers with {_named(tokenizer, [last])}, but they end at {where}")
    return EndTokens(ids, [str(tokenizer.decode([id_])) for id_ in ids], problems)


def check_agreement(found: EndTokens, *, label: str, force: bool) -> list[str]:
    """What is wrong as notes if ``force``; else raises ModelError."""
    if found.problems and not force:
        raise ModelError(
            f"where answers of {label} end is not said alike, so a server would talk on:\n"
            + "\n".join(found.problems)
            + f"\nsay it in eos_token_id of the base's {_GENERATION} and train again, or export it as it is by --force "
            "(force=True)"
        )
    return found.problems


def write_end_tokens(folder: Path, ids: list[int]) -> None:
    """Let the generation config name all end tokens: servers differ in whether they ask the tokenizer too."""
    settings = _object_in(folder / _GENERATION)
    if ids and sorted(_ids(settings.get("eos_token_id"))) != ids:
        said = {**settings, "eos_token_id": ids if len(ids) > 1 else ids[0]}
        write_text(folder / _GENERATION, json.dumps(said, indent=2, sort_keys=True) + "\n")


def tokenizer_in(folder: Path, *, trusted: bool = False) -> Any:
    """The tokenizer that lies in a model's folder; where it is ``trusted``, code that comes with it may run.

    Raises:
        ModelError: it cannot be loaded.
        MissingExtra: transformers is not installed.
    """
    from praison_agent_rl.config import TrainConfig
    from praison_agent_rl.models import load_tokenizer, require_training_stack

    require_training_stack()
    return load_tokenizer(
        str(folder), TrainConfig.load({"trust_remote_code": trusted}, need_model=False, need_data=False)
    )


def _of_template(tokenizer: Any) -> tuple[int | None, list[str]]:
    """The first special token that the chat template puts after an answer, if any; and why that cannot be seen."""
    if tokenizer.chat_template is None:
        return None, []
    why = []
    for before in ([], [{"role": "system", "content": "Hello"}]):
        said = [*before, {"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
        try:
            text = str(tokenizer.apply_chat_template(said, tokenize=False))
        except Exception as error:  # noqa: BLE001  # a template is the model's own code and may raise anything
            why.append(f"the chat template refuses a conversation: {type(error).__name__}: {error}")
            continue
        tail = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False)["input_ids"] if _MARK in text else []
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        return next((id_ for id_ in tail if id_ in special), None), []
    return None, why[:1]


def _declared_in(file: Path, tokenizer: Any) -> list[int]:
    """Without tokens that there are not, which some bases name and no answer can have."""
    ids = _ids(_object_in(file).get("eos_token_id"))
    return [id_ for id_ in ids if id_ >= 0 and tokenizer.convert_ids_to_tokens(id_) is not None]


def _ids(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _named(tokenizer: Any, ids: list[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(id_)!r} ({id_})" for id_ in ids)


def _object_in(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{str(path)!r} cannot be read as JSON: {error}") from error
