"""Merge an adapter into the full-precision weights that it was trained on, and prove the merge before it counts."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError
from praison_agent_rl.models import load_model, load_scorer, load_tokenizer, plain_weights, stored_dtype
from praison_agent_rl.records import MergeProof
from praison_agent_rl.runs import publish_folder

TOLERANCE_FLOAT32 = 1e-3
"""Largest difference of logits that a merge may make in float32: rounding gives 1e-5 to 1e-4 at |logit| up to 50."""
TOLERANCE_16_BIT = 0.5
"""The same for weights stored in 16 bits, whose own rounding moves logits by 0.05 to 0.3 (8 bits of mantissa)."""


class _Merged(NamedTuple):
    """A model with the adapter merged in, and what it was compared by."""

    model: Any
    before: list[Any]
    """Output without the adapter, for each sequence."""
    wanted: list[Any]
    """Output of base + adapter."""
    error: float


def merge_adapter(base: str, adapter: Path, out: Path, *, config: TrainConfig, prompts: list[list[int]]) -> MergeProof:
    """Merge ``adapter`` into the full-precision weights of ``base``, save them to ``out`` and prove the result.

    ``prompts`` are token ids on which logits are compared. ``out`` appears only when everything holds.

    Raises:
        ModelError: the merged model is not base + adapter, or the adapter changes nothing.
    """
    base = plain_weights(base)
    model = load_model(base, config, device="cpu", full_precision=True)
    tokenizer = load_tokenizer(base, config)
    stored = stored_dtype(base, config)
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    merged = _merge(model, adapter, prompts)
    # Without it `transformers serve` ignores the temperature that a request asks for.
    merged.model.generation_config.do_sample = True
    temporary = _fresh(out)
    _save(merged.model, tokenizer, temporary, stored)
    reread = load_model(str(temporary), config, device="cpu", full_precision=True)
    proof = _proof(merged, reread, prompts, stored)
    _check_proof(proof, reread, temporary, tied=tied, chat=tokenizer.chat_template is not None)
    publish_folder(temporary, out)
    return proof


def merge_scorer(base: str, adapter: Path, out: Path, *, config: TrainConfig, sequences: list[list[int]]) -> MergeProof:
    """The same for a reward model: scores of ``sequences`` are compared instead of logits.

    Raises:
        ModelError: the merged model does not score as base + adapter do, or the adapter changes nothing.
    """
    base = plain_weights(base)
    stored = stored_dtype(base, config)
    model = load_scorer(base, config, device="cpu", full_precision=True, new_head=True)
    merged = _merge(model, adapter, sequences)
    temporary = _fresh(out)
    _save(merged.model, load_tokenizer(base, config), temporary, stored)
    reread = load_scorer(str(temporary), config, device="cpu", full_precision=True)
    proof = _proof(merged, reread, sequences, stored)
    if problems := _differences(proof, "scores"):
        raise ModelError("the merge cannot be trusted, so no reward model was made:\n" + "\n".join(problems))
    publish_folder(temporary, out)
    return proof


def _merge(model: Any, adapter: Path, sequences: list[list[int]]) -> _Merged:
    from peft import PeftModel

    before = _logits(model, sequences)
    adapted = PeftModel.from_pretrained(model, str(adapter))
    adapted.eval()
    wanted = _logits(adapted, sequences)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # peft: not every merged weight is a finite number
        raise ModelError(f"the adapter {str(adapter)!r} cannot be merged: {error}") from error
    return _Merged(merged, before, wanted, _largest_difference(wanted, _logits(merged, sequences)))


def _proof(merged: _Merged, reread: Any, sequences: list[list[int]], stored: str) -> MergeProof:
    return MergeProof(
        tokens=sum(map(len, sequences)),
        merge_error=merged.error,
        saved_error=_largest_difference(merged.wanted, _logits(reread, sequences)),
        tolerance=TOLERANCE_FLOAT32 if stored in ("float32", "float64") else TOLERANCE_16_BIT,
        change=_largest_difference(merged.before, merged.wanted),
    )


def _check_proof(proof: MergeProof, merged: Any, folder: Path, *, tied: bool, chat: bool) -> None:
    problems = _differences(proof, "logits")
    if bool(merged.config.get_text_config().tie_word_embeddings) != tied:
        problems.append("the tying of embeddings and output head was lost")
    expected = ["config.json", "generation_config.json", "tokenizer_config.json"]
    problems += [f"{name} was not saved" for name in expected if not (folder / name).exists()]
    if (
        chat
        and not (folder / "chat_template.jinja").exists()
        and "chat_template" not in (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    ):
        problems.append("the chat template was not saved")
    if problems:
        raise ModelError("the merge cannot be trusted, so no version was made:\n" + "\n".join(problems))


def _differences(proof: MergeProof, what: str) -> list[str]:
    problems = []
    # "not (a <= b)" and not "a > b": NaN must fail
    if not proof.merge_error <= TOLERANCE_FLOAT32:
        problems.append(
            f"merged {what} differ from base + adapter by {proof.merge_error:.3g} (allowed: {TOLERANCE_FLOAT32})"
        )
    if not proof.saved_error <= proof.tolerance:
        problems.append(
            f"saved weights differ from base + adapter by {proof.saved_error:.3g} (allowed: {proof.tolerance})"
        )
    if not proof.change > 0:
        problems.append(f"the adapter changes nothing: its {what} are those of the base model")
    return problems


def _fresh(out: Path) -> Path:
    """The name that what is saved has until it is proved."""
    temporary = out.with_name(f".{out.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


def _save(model: Any, tokenizer: Any, folder: Path, dtype: str) -> None:
    import torch

    model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _logits(model: Any, prompts: list[list[int]]) -> list[Any]:
    """The model's output for each sequence by itself: padding would be one more thing that could differ."""
    import torch

    with torch.inference_mode():
        return [model(input_ids=torch.tensor([ids])).logits[0].float() for ids in prompts]


def _largest_difference(left: list[Any], right: list[Any]) -> float:
    import torch

    # torch's max and not Python's: NaN anywhere must come out as NaN
    return float(torch.stack([(one - other).abs().max() for one, other in zip(left, right, strict=True)]).max())
