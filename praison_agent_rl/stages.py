"""The heavy stages of a run, each from the run's folder alone: ``python -m praison_agent_rl.stages RUN STAGE ...``.

A stage that has left its result is not done again, so a run that was killed goes on where it was.
"""

import contextlib
import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, read_rows, write_rows
from praison_agent_rl.errors import PraisonRLError, RewardError, TrainingFailed
from praison_agent_rl.evaluation import answer_prompts, compare, score_answers
from praison_agent_rl.merging import merge_adapter
from praison_agent_rl.models import load_tokenizer, plain_weights, render_prompts
from praison_agent_rl.records import Answer
from praison_agent_rl.rewards import Reward, Shape, resolve
from praison_agent_rl.runs import RunFolder, write_record

ALL_STAGES = ("measure_base", "train", "merge", "measure_new")
"""In their order; the two that measure are left out where nothing is held out."""

_PROOF_PROMPTS = 4
_DISK_FULL = ("No space left on device", "PytorchStreamWriter failed writing", "Disk quota exceeded")
"""How the system, safetensors (os error 28) and torch (inline_container.cc) say that a disk is full."""


def run_stages(run: RunFolder, stages: Sequence[str], rewards: Sequence[Reward], *, resume: bool = False) -> None:
    """Do ``stages`` in this process, in order, reporting to the run's events.

    Raises:
        PraisonRLError: whatever went wrong, in the terms of the user.
    """
    for stage in stages:
        run.report_event("stage", stage=stage)
        if not _result_of(run, stage).exists():
            _do(run, stage, rewards, resume)
    if "measure_new" in stages:
        write_record(run.comparison_file, compare(read_answers(run, "base"), read_answers(run, "new")))
    run.report_event("done", stages=list(stages))


def planned_rewards(run: RunFolder) -> list[Reward]:
    """The rewards of a run, found again by their names.

    Raises:
        RewardError: one cannot be found, or lived only in the process that planned the run.
    """
    planned = run.plan.rewards
    if unnamed := [reward.name for reward in planned if reward.spec is None]:
        raise RewardError(
            f"the run in {str(run.root)!r} cannot be gone on with: its rewards {', '.join(unnamed)} lived only in the "
            "process that started it. Move them into a module, name them as 'module:function', and start a new run"
        )
    return [Reward(resolve(p.spec), p.name, p.weight, Shape(p.prompts, p.completions)) for p in planned]


def read_answers(run: RunFolder, side: str) -> list[Answer]:
    """The scored held-out answers of ``base`` or ``new``."""
    return [Answer.model_validate(row) for row in read_rows(run.answers(side))]


def rows_as_asked(run: RunFolder, path: Path) -> list[Row]:
    """The rows of ``path`` with prompts as the model takes them: text as one user message if it is a chat model."""
    from praison_agent_rl.data import normalise

    plan = run.plan
    rows = read_rows(path)
    texts = sum(isinstance(row["prompt"], str) for row in rows)
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    if texts and load_tokenizer(plain_weights(plan.base), config).chat_template is not None:
        run.report_event(
            "note", text=f"{texts} prompts of {path.name} are plain text; each is asked as one user message"
        )
        return normalise(rows)
    return rows


def is_disk_full(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, says that a disk is full."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None) == errno.ENOSPC or any(sign in str(cause) for sign in _DISK_FULL):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _do(run: RunFolder, stage: str, rewards: Sequence[Reward], resume: bool) -> None:
    try:
        _STAGES[stage](run, rewards, resume)
    except RewardError as error:  # it passed its checks, so what failed now is the run
        raise TrainingFailed(str(error)) from error
    except Exception as error:  # torch, safetensors and the system each have their own type for a full disk
        if not is_disk_full(error):
            raise
        raise TrainingFailed(
            f"the disk that {str(run.root)!r} is on is full (stage {stage}); make room there, then go on with the run"
        ) from error


def _result_of(run: RunFolder, stage: str) -> Path:
    return {
        "measure_base": run.answers("base"),
        "train": run.adapter,
        "merge": run.merge_file,
        "measure_new": run.answers("new"),
    }[stage]


def _measure(run: RunFolder, rewards: Sequence[Reward], source: str, side: str) -> None:
    rows = rows_as_asked(run, run.held_out_rows)
    answers = answer_prompts(
        source, rows, run.plan, progress=lambda done, of: run.report_event("answered", side=side, done=done, of=of)
    )
    scored = score_answers(answers, rows, rewards)
    write_rows(run.answers(side), [answer.model_dump() for answer in scored])


def _measure_base(run: RunFolder, rewards: Sequence[Reward], resume: bool) -> None:
    _measure(run, rewards, run.plan.base, "base")


def _measure_new(run: RunFolder, rewards: Sequence[Reward], resume: bool) -> None:
    _measure(run, rewards, str(run.merged), "new")


def _train(run: RunFolder, rewards: Sequence[Reward], resume: bool) -> None:
    from praison_agent_rl.training.grpo import train_grpo

    train_grpo(run, rows_as_asked(run, run.train_rows), rewards, resume=resume)


def _merge(run: RunFolder, rewards: Sequence[Reward], resume: bool) -> None:
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(plan.base)
    rows = rows_as_asked(run, run.train_rows)[:_PROOF_PROMPTS]
    prompts = render_prompts(load_tokenizer(source, config), [row["prompt"] for row in rows], plan.tools)
    write_record(run.merge_file, merge_adapter(source, run.adapter, run.merged, config=config, prompts=prompts))


_STAGES: dict[str, Callable[[RunFolder, Sequence[Reward], bool], None]] = {
    "measure_base": _measure_base,
    "train": _train,
    "merge": _merge,
    "measure_new": _measure_new,
}


def main() -> None:
    """What the child process runs; the outcome is an event: ``done`` or ``failed``."""
    folder, *words = sys.argv[1:]
    run = RunFolder.open(Path(folder))
    try:
        run_stages(run, [w for w in words if w in _STAGES], planned_rewards(run), resume="--resume" in words)
    except PraisonRLError as error:
        _end(run, error, type(error).__name__, str(error))
    except BaseException as error:  # noqa: BLE001 - this process ends here, whatever it was
        with contextlib.suppress(OSError):
            traceback.print_exc()
        _end(run, error, "TrainingFailed", f"{type(error).__name__}: {error}")


def _end(run: RunFolder, error: BaseException, kind: str, message: str) -> NoReturn:
    with contextlib.suppress(OSError):  # on a full disk nothing can be written, and the exit code says it
        run.report_event("failed", kind=kind, message=message)
    sys.exit(errno.ENOSPC if is_disk_full(error) else 1)


if __name__ == "__main__":
    main()
