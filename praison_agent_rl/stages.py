"""The heavy stages of a run, each from the run's folder alone: ``python -m praison_agent_rl.stages RUN STAGE ...``.

A stage that has left its result is not done again, so a run that was killed goes on where it was.
"""

import contextlib
import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from praison_agent_rl.backends import choose_backend, open_backend
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import read_rows
from praison_agent_rl.errors import PraisonRLError, RewardError, TrainingFailed
from praison_agent_rl.measuring import judge_run, measure, results_of, rows_as_asked
from praison_agent_rl.merging import merge_adapter, merge_scorer
from praison_agent_rl.models import load_tokenizer, plain_weights, render_prompts
from praison_agent_rl.pairs.measuring import measure_reward_model
from praison_agent_rl.pairs.texts import render_pairs
from praison_agent_rl.parity import check_parity
from praison_agent_rl.planned_rewards import as_rewards
from praison_agent_rl.ranks import LOST, Follower, is_first, is_lost_connection, use_own_device
from praison_agent_rl.recorded_calls import read_calls
from praison_agent_rl.records import PlannedReward
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder, write_record

ALL_STAGES = ("measure_base", "train", "merge", "measure_new")
"""In their order; the two that measure are left out where nothing is held out."""

_PROOF_PROMPTS = 4
_DISK_FULL = (
    "No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed writing", "unexpected pos ",
    "iostream error",
)  # fmt: skip
"""How the system, safetensors (os error 28) and torch (inline_container.cc, the last three) say that a disk is full."""


class Scorers(NamedTuple):
    """What the answers of a run are scored by."""

    rewards: Sequence[Reward]
    judges: Sequence[Reward] = ()
    """Not trained on."""


def run_stages(
    run: RunFolder,
    stages: Sequence[str],
    rewards: Sequence[Reward],
    *,
    judges: Sequence[Reward] = (),
    resume: bool = False,
) -> None:
    """Do ``stages`` in this process, in order, reporting to the run's events.

    Raises:
        PraisonRLError: whatever went wrong, in the terms of the user.
    """
    _run_stages(run, stages, lambda: Scorers(rewards, judges), resume)


def _run_stages(run: RunFolder, stages: Sequence[str], find: Callable[[], Scorers], resume: bool) -> None:
    """The same with scorers that are found once the back end is open, since to find them may import anything."""
    method = _method(run)
    _open_backend(run, stages)
    scorers = find()
    if {"measure_base", "train"} & set(stages) and not run.adapter.exists():
        _check_parity(run)
        _check_servers(run)
    for stage in stages:
        run.report_event("stage", stage=stage, method=method)
        if not all(path.exists() for path in _results_of(run, stage)):
            _do(run, stage, scorers, resume)
    if "measure_new" in stages and method != "reward":
        judge_run(run)
    run.report_event("done", stages=list(stages))


def _open_backend(run: RunFolder, stages: Sequence[str]) -> None:
    """Import what has to come before trl, transformers and peft."""
    if "train" not in stages or run.adapter.exists():
        return
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    planned, choice = choose_backend(config, run.plan.device), open_backend(config, run.plan.device)
    if choice != planned:
        run.report_event("note", text=f"back end: {choice.name} ({choice.why})")


def stages_of(run: RunFolder) -> list[str]:
    """The stages of a run: nothing is measured where nothing is held out, and of a reward model only the result is."""
    left_out = {"measure_base"} if _method(run) == "reward" else set()
    if not run.held_out_rows.stat().st_size:
        left_out = {stage for stage in ALL_STAGES if stage.startswith("measure")}
    return [stage for stage in ALL_STAGES if stage not in left_out]


def _method(run: RunFolder) -> str:
    return str(run.plan.config.get("method", "grpo"))


def planned_rewards(run: RunFolder) -> list[Reward]:
    """The rewards of a run, found again by their names.

    Raises:
        RewardError: one cannot be found, or lived only in the process that planned the run.
    """
    return _found_again(run, run.plan.rewards)


def planned_judges(run: RunFolder) -> list[Reward]:
    """The judges of a run, found again by their names; raises RewardError as `planned_rewards` does."""
    return _found_again(run, run.plan.judges)


def _found_again(run: RunFolder, planned: Sequence[PlannedReward]) -> list[Reward]:
    if unnamed := [reward.name for reward in planned if reward.spec is None]:
        raise RewardError(
            f"the run in {str(run.root)!r} cannot be gone on with: its rewards {', '.join(unnamed)} lived only in the "
            "process that started it. Move them into a module, name them as 'module:function', and start a new run"
        )
    return as_rewards(planned)


def is_disk_full(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, says that a disk is full."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None) == errno.ENOSPC or any(sign in str(cause) for sign in _DISK_FULL):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _do(run: RunFolder, stage: str, scorers: Scorers, resume: bool) -> None:
    try:
        _STAGES[stage](run, scorers, resume)
    except RewardError as error:  # it passed its checks, so what failed now is the run
        raise TrainingFailed(str(error)) from error
    except Exception as error:  # torch, safetensors and the system each have their own type for a full disk
        if not is_disk_full(error):
            raise
        raise TrainingFailed(
            f"the disk that {str(run.root)!r} is on is full (stage {stage}); make room there, then go on with the run"
        ) from error


def _results_of(run: RunFolder, stage: str) -> list[Path]:
    if stage.startswith("measure_") and _method(run) == "reward":
        return [run.card]
    if stage.startswith("measure_"):
        return results_of(run, stage.removeprefix("measure_"))
    return [{"train": run.adapter, "merge": run.merge_file}[stage]]


def _check_parity(run: RunFolder) -> None:
    """Compare how recorded calls are rendered here and where the result is served, before anything is loaded.

    Raises:
        ModelError: they differ, and ``parity`` does not allow it.
    """
    calls = read_calls(run.calls)
    if not calls:
        return
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    tokenizer = load_tokenizer(plain_weights(run.plan.base), config)
    for note in check_parity(tokenizer, calls, allowed=config.parity == "allow"):
        run.report_event("note", text=note)


def _check_servers(run: RunFolder) -> None:
    """Raise where a vLLM server that the run names cannot draw for it, before the base is measured for minutes."""
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    if config.vllm_servers and is_first():
        from praison_agent_rl.training.policy_server import check_servers

        check_servers(run, config, plain_weights(run.plan.base))


def _measure_base(run: RunFolder, scorers: Scorers, resume: bool) -> None:
    measure(run, "base", *scorers)


def _measure_new(run: RunFolder, scorers: Scorers, resume: bool) -> None:
    if _method(run) == "reward":
        measure_reward_model(run)
    else:
        measure(run, "new", *scorers)


def _train(run: RunFolder, scorers: Scorers, resume: bool) -> None:
    use_own_device(run.plan.device)
    method = _method(run)
    if method == "grpo":
        from praison_agent_rl.training.grpo import train_grpo

        rows = rows_as_asked(run, run.train_rows)
        train_grpo(run, rows, scorers.rewards, judges=scorers.judges, resume=resume)
    elif method == "cpo":
        from praison_agent_rl.training.preferences import train_cpo

        train_cpo(run, rows_as_asked(run, run.train_rows), resume=resume)
    else:
        from praison_agent_rl.training.preferences import train_reward

        train_reward(run, read_rows(run.train_rows), resume=resume)


def _merge(run: RunFolder, scorers: Scorers, resume: bool) -> None:
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(plan.base)
    if config.method == "reward":
        pairs = render_pairs(
            load_tokenizer(source, config), read_rows(run.train_rows)[:_PROOF_PROMPTS], tools=plan.tools
        )
        sequences = [side.ids for pair in pairs for side in pair]
        proof = merge_scorer(source, run.adapter, run.merged, config=config, sequences=sequences)
        write_record(run.merge_file, proof)
        return
    rows = rows_as_asked(run, run.train_rows)[:_PROOF_PROMPTS]
    prompts = render_prompts(load_tokenizer(source, config), [row["prompt"] for row in rows], plan.tools)
    write_record(run.merge_file, merge_adapter(source, run.adapter, run.merged, config=config, prompts=prompts))


_STAGES: dict[str, Callable[[RunFolder, Scorers, bool], None]] = {
    "measure_base": _measure_base,
    "train": _train,
    "merge": _merge,
    "measure_new": _measure_new,
}


def main() -> None:
    """What the child process runs; the outcome is an event: ``done`` or ``failed``.

    Of several processes that train the first reports; each reports its own failure.
    """
    folder, *words = sys.argv[1:]
    told = RunFolder.open(Path(folder))
    run = told if is_first() else Follower(told.root)
    try:
        stages, resume = [word for word in words if word in _STAGES], "--resume" in words
        _run_stages(run, stages, lambda: Scorers(planned_rewards(run), planned_judges(run)), resume)
    except PraisonRLError as error:
        _end(told, error, type(error).__name__, str(error))
    except BaseException as error:  # noqa: BLE001 - this process ends here, whatever it was
        with contextlib.suppress(OSError):
            traceback.print_exc()
        if is_lost_connection(error):  # to a process that says itself why it ended, or of which its launcher does
            sys.exit(LOST)
        _end(told, error, "TrainingFailed", f"{type(error).__name__}: {error}")


def _end(run: RunFolder, error: BaseException, kind: str, message: str) -> NoReturn:
    with contextlib.suppress(OSError):  # on a full disk nothing can be written, and the exit code says it
        run.report_event("failed", kind=kind, message=message)
    sys.exit(errno.ENOSPC if is_disk_full(error) else 1)


if __name__ == "__main__":
    main()
