"""Merge an adapter into the full-precision weights that it was trained on, and prove the merge before it counts.

Shard by shard where that is exact (``streaming_merge.merge``), else by PEFT in memory. Both are proved.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.agent_rollouts.tool_texts import keep_response_template
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ModelError
from praison_agent_rl.estimate import total_memory
from praison_agent_rl.models import load_model, load_scorer, load_tokenizer, plain_weights, stored_dtype
from praison_agent_rl.records import MergeProof
from praison_agent_rl.runs import publish_folder
from praison_agent_rl.streaming_merge.merge import need_disk, write_companions, write_merge
from praison_agent_rl.streaming_merge.plan import CannotStream, MergePlan, plan_merge
from praison_agent_rl.streaming_merge.proof import ALLOWED, TensorProof, prove_tensors
from praison_agent_rl.weight_files import check_adapter_files, check_weight_files

TOLERANCE_FLOAT32 = 1e-3
"""Largest difference of logits that a merge may make in float32: rounding gives 1e-5 to 1e-4 at |logit| up to 50."""
TOLERANCE_16_BIT = 0.5
"""The same for weights stored in 16 bits, whose own rounding moves logits by 0.05 to 0.3 (8 bits of mantissa)."""
_BYTES_AROUND = 2 * 2**30
"""Memory of torch, transformers and PEFT, and of what a forward pass of a few prompts takes."""


class _Job(NamedTuple):
    """What is to be merged into what."""

    base: str
    adapter: Path
    out: Path
    config: TrainConfig
    sequences: list[list[int]]
    """Token ids on which the output is compared."""
    scorer: bool

    @property
    def load(self) -> Callable[..., Any]:
        """Loads the base, or what was saved, in float32."""
        return load_scorer if self.scorer else load_model


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
        ModelError: the merged model is not base + adapter, the adapter changes nothing, or the disk is full.
    """
    return _merge_and_prove(_Job(plain_weights(base), adapter, out, config, prompts, scorer=False))


def merge_scorer(base: str, adapter: Path, out: Path, *, config: TrainConfig, sequences: list[list[int]]) -> MergeProof:
    """The same for a reward model: scores of ``sequences`` are compared instead of logits.

    Raises:
        ModelError: the merged model does not score as base + adapter do, the adapter changes nothing, or the disk is
            full.
    """
    return _merge_and_prove(_Job(plain_weights(base), adapter, out, config, sequences, scorer=True))


def _merge_and_prove(job: _Job) -> MergeProof:
    if Path(job.base).is_dir():
        check_weight_files(Path(job.base))
    check_adapter_files(job.adapter)
    with _unfinished(job.out) as folder:
        try:
            plan = plan_merge(job.base, job.adapter, config=job.config, scorer=job.scorer)
        except CannotStream as reason:
            proof, problems = _by_peft(job, folder, f"merged in memory by PEFT: {reason}")
        else:
            proof, problems = _streamed(job, plan, folder)
        if not job.scorer:
            problems += _what_is_lost(job, folder)
        if problems:
            what = "reward model" if job.scorer else "version"
            raise ModelError(f"the merge cannot be trusted, so no {what} was made:\n" + "\n".join(problems))
        with _writing(job.out):
            publish_folder(folder, job.out)
    return proof


def _tokenizer(job: _Job) -> Any:
    """The tokenizer that the model is served with, which says how calls of tools are read where some were trained."""
    tokenizer = load_tokenizer(job.base, job.config)
    if job.config.rollout in ("agent", "tools"):
        keep_response_template(tokenizer)
    return tokenizer


def _streamed(job: _Job, plan: MergePlan, folder: Path) -> tuple[MergeProof, list[str]]:
    tokenizer = _tokenizer(job)
    with _writing(job.out):
        _save_streamed(plan, tokenizer, folder)
    tensors = prove_tensors(plan, folder)
    if not _fits_in_memory(plan):
        note = "no logits were compared: in float32 the model is too large for the memory of this machine"
        return _proof_by_tensors(tensors, note)
    merged = _merge(job.load(job.base, job.config, device="cpu", full_precision=True, **_new_head(job)), job)
    merged = merged._replace(model=None)  # its memory is that of the model that is read back
    proof = _proof(merged, job, folder, "float32" if plan.dtype in ("F32", "F64") else plan.dtype)
    proof = proof.model_copy(update={"by": "both", "tensors": tensors.changed, "unchanged": tensors.unchanged})
    return proof, [*tensors.problems, *_differences(proof, "scores" if job.scorer else "logits")]


def _by_peft(job: _Job, folder: Path, note: str) -> tuple[MergeProof, list[str]]:
    stored = stored_dtype(job.base, job.config)
    need_disk(sum(file.stat().st_size for file in Path(job.base).glob("*.safetensors")), job.out)
    model = job.load(job.base, job.config, device="cpu", full_precision=True, **_new_head(job))
    merged = _merge(model, job)
    if not job.scorer:
        # Without it `transformers serve` ignores the temperature that a request asks for.
        merged.model.generation_config.do_sample = True
    tokenizer = _tokenizer(job)
    with _writing(job.out):
        _save(merged.model, tokenizer, folder, stored)
    del model
    merged = merged._replace(model=None)  # its memory is that of the model that is read back
    proof = _proof(merged, job, folder, stored).model_copy(update={"note": note})
    return proof, _differences(proof, "scores" if job.scorer else "logits")


def _new_head(job: _Job) -> dict[str, bool]:
    return {"new_head": True} if job.scorer else {}


def _fits_in_memory(plan: MergePlan) -> bool:
    """Whether the model can be loaded in float32, with the copy of a weight that PEFT merges into."""
    there = total_memory()
    return there is None or 4 * plan.parameters * 1.25 + _BYTES_AROUND <= there


def _merge(model: Any, job: _Job) -> _Merged:
    before = _logits(model, job.sequences)
    adapted = _with_adapter(model, job.adapter)
    adapted.eval()
    wanted = _logits(adapted, job.sequences)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # peft: not every merged weight is a finite number
        raise ModelError(f"the adapter {str(job.adapter)!r} cannot be merged: {error}") from error
    return _Merged(merged, before, wanted, _largest_difference(wanted, _logits(merged, job.sequences)))


def _with_adapter(model: Any, adapter: Path) -> Any:
    """PEFT's model with all of the adapter in it, and nothing else: PEFT itself passes over what does not fit."""
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    try:
        adapted = PeftModel.from_pretrained(model, str(adapter))
        found = set_peft_model_state_dict(adapted, load_peft_weights(str(adapter), device="cpu"))
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"the adapter {str(adapter)!r} does not fit the base model: {error}") from error
    lacking = [f"it has no {name}" for name in found.missing_keys if ".lora_" in name]
    if odd := [*(f"the base has no place for its {name}" for name in found.unexpected_keys), *lacking]:
        raise ModelError(
            f"the adapter {str(adapter)!r} does not fit the base model: {odd[0]} ({len(odd)} such tensors in all); "
            "take the base that it was trained on, or the whole adapter"
        )
    return adapted


def _proof(merged: _Merged, job: _Job, folder: Path, stored: str) -> MergeProof:
    reread = job.load(str(folder), job.config, device="cpu", full_precision=True)
    return MergeProof(
        tokens=sum(map(len, job.sequences)),
        merge_error=merged.error,
        saved_error=_largest_difference(merged.wanted, _logits(reread, job.sequences)),
        tolerance=TOLERANCE_FLOAT32 if stored in ("float32", "float64") else TOLERANCE_16_BIT,
        change=_largest_difference(merged.before, merged.wanted),
    )


def _proof_by_tensors(tensors: TensorProof, note: str) -> tuple[MergeProof, list[str]]:
    proof = MergeProof(
        tokens=0,
        merge_error=tensors.error,
        saved_error=tensors.error,
        tolerance=ALLOWED,
        change=tensors.change,
        by="tensors",
        tensors=tensors.changed,
        unchanged=tensors.unchanged,
        note=note,
    )
    problems = list(tensors.problems)
    if not proof.change > 0:
        problems.append("the adapter changes nothing: its weights are those of the base model")
    return proof, problems


def _what_is_lost(job: _Job, folder: Path) -> list[str]:
    """Files that a language model's folder needs, and the tying of its embeddings."""
    problems = []
    if _ties(str(folder), job.config) != _ties(job.base, job.config):
        problems.append("the tying of embeddings and output head was lost")
    expected = ["config.json", "generation_config.json", "tokenizer_config.json"]
    problems += [f"{name} was not saved" for name in expected if not (folder / name).exists()]
    if (
        load_tokenizer(job.base, job.config).chat_template is not None
        and not (folder / "chat_template.jinja").exists()
        and "chat_template" not in (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    ):
        problems.append("the chat template was not saved")
    return problems


def _ties(source: str, config: TrainConfig) -> bool:
    from transformers import AutoConfig

    revision = config.revision if not Path(source).is_dir() else None
    described = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=config.trust_remote_code)
    return bool(described.get_text_config().tie_word_embeddings)


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


@contextlib.contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """The folder in which the result lies until it is proved; of a merge that fails nothing is left."""
    temporary = out.with_name(f".{out.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Raise ModelError where the disk takes no more."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the merged model cannot be written to {str(out.parent)!r}: {getattr(error, 'strerror', None) or error}; "
            "make room on that disk, or put the run's folder (output_dir) on another"
        ) from error


def _save_streamed(plan: MergePlan, tokenizer: Any, folder: Path) -> None:
    write_merge(plan, folder)
    write_companions(plan, folder, tokenizer)


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
