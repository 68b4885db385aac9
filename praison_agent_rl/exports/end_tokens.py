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


def end_tokens(folder: Path) -> EndTokens:
    """The end tokens of the model in ``folder`` by its tokenizer, generation config, config and chat template.

    Raises:
        ModelError: a file cannot be read.
        MissingExtra: transformers is not installed.
    """
    tokenizer = tokenizer_in(folder)
    declared = _ids(_object_in(folder / _GENERATION).get("eos_token_id"))
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = sorted({*declared, *own})
    problems = []
    if not own:
        problems.append("the tokenizer has no end token (eos_token)")
    if other := sorted({*_ids(_object_in(folder / "config.json").get("eos_token_id"))} - {*ids}):
        problems.append(f"config.json ends answers at {_named(tokenizer, other)}, the generation config does not")
    last = _of_template(tokenizer)
    if last is not None and last not in ids:
        where = _named(tokenizer, ids) or "nowhere"
        problems.append(f"the chat template ends answers with {_named(tokenizer, [last])}, but they end at {where}")
    return EndTokens(ids, [str(tokenizer.convert_ids_to_tokens(id_)) for id_ in ids], problems)


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


def tokenizer_in(folder: Path) -> Any:
    """The tokenizer that lies in a model's folder.

    Raises:
        ModelError: it cannot be loaded.
        MissingExtra: transformers is not installed.
    """
    from praison_agent_rl.config import TrainConfig
    from praison_agent_rl.models import load_tokenizer, require_training_stack

    require_training_stack()
    return load_tokenizer(str(folder), TrainConfig.load({}, need_model=False, need_data=False))


def _of_template(tokenizer: Any) -> int | None:
    """The first special token that the chat template puts after an answer; None where there is none."""
    if tokenizer.chat_template is None:
        return None
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
    try:
        text = str(tokenizer.apply_chat_template(said, tokenize=False))
    except Exception as error:  # a template is the model's own code and may raise anything
        raise ModelError(f"the chat template refuses a conversation: {type(error).__name__}: {error}") from error
    tail = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next((id_ for id_ in tail if id_ in special), None)


def _ids(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _named(tokenizer: Any, ids: list[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(id_)!r} ({id_})" for id_ in ids)


def _object_in(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{str(path)!r} cannot be read as JSON: {error}") from error
