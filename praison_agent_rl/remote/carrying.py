"""What this package does for a run on the machine where it happens: ``python -m praison_agent_rl.remote.carrying``."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from praison_agent_rl.agent_rollouts.toolboxes import environment_of, tools_of
from praison_agent_rl.checksums import hash_file
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import as_messages, read_rows, sample
from praison_agent_rl.errors import PraisonRLError
from praison_agent_rl.libraries import library_versions
from praison_agent_rl.models import find_weights, require_training_stack
from praison_agent_rl.planned_rewards import as_rewards
from praison_agent_rl.preflight import check_packages
from praison_agent_rl.problems import Problems
from praison_agent_rl.process_settings import best_device
from praison_agent_rl.records import Plan, PlannedReward
from praison_agent_rl.remote.refusals import planned_in
from praison_agent_rl.remote.there import RESULT, SPARE, answer
from praison_agent_rl.rewards import as_entry, prepare
from praison_agent_rl.runs import RunFolder, write_text
from praison_agent_rl.training.checkpoints import newest_whole_checkpoint, settings_of
from praison_agent_rl.training.launch import launch_stages
from praison_agent_rl.vllm_servers.serving import find_vllm

STAYS = ("plan.json", "checkpoints")
"""What of the folder of a run is not brought home: the plan there is of the machine there."""


def describe(config: Mapping[str, Any], hub: Sequence[str]) -> dict[str, Any]:
    """What a run would compute on here and with what, and which packages and which models of the ``hub`` it lacks."""
    problems = Problems()
    loaded = problems.attempt(lambda: TrainConfig.load(config, need_model=False, need_data=False))
    problems.attempt(require_training_stack)
    if loaded is not None:
        problems.attempt(partial(check_packages, loaded))
        if loaded.sampler == "vllm" and not loaded.vllm_server_base_url:
            problems.attempt(find_vllm)
    for name in hub:
        problems.attempt(partial(find_weights, name))
    faults = [str(fault) for fault in problems.found]
    return {"device": best_device(), "libraries": library_versions(), "faults": faults}


def check(request: Mapping[str, Any]) -> list[str]:
    """What of a plan's rewards, tools and environment cannot be found or used here; models come later.

    The user's modules are imported, in the folder of the project, and may print what they like. Rewards are called on
    a few prompts, as where the run was planned: what they read or ask while they score has to be here too.
    """
    os.environ.update(request["env"])
    folder = Path(request["folder"])
    plan, problems = RunFolder(folder / "run").plan, Problems()
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    (folder / "project").mkdir(exist_ok=True)
    os.chdir(folder / "project")
    with contextlib.redirect_stdout(sys.stderr):
        problems.attempt(partial(_try_rewards, RunFolder(folder / "run"), plan))
        for reward in planned_in(plan.model_copy(update={"rewards": [], "judges": []})):
            if ":" in str(reward.spec):
                problems.attempt(partial(as_rewards, [reward]))
        if config.rollout == "tools":
            problems.attempt(partial(tools_of, config))
            problems.attempt(partial(environment_of, config))
    return [str(fault) for fault in problems.found]


def checkpoint(request: Mapping[str, Any]) -> dict[str, str]:
    """The hashes of the newest whole checkpoint of the run here, and of its best adapters; empty without the first."""
    run = RunFolder(Path(request["folder"]) / "run")
    newest = newest_whole_checkpoint(run.checkpoints, settings=settings_of(run.plan.config))
    if newest is None:
        return {}
    whole = [newest, *run.best.glob("step-*")]  # of the best not what is being written
    files = (path for folder in whole for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(run.root).as_posix(): hash_file(path) for path in files}


def carry_out(folder: Path, stages: Sequence[str], *, resume: bool) -> None:
    """Do the stages in the folder's run and write down what became of them; SIGTERM stops as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = RunFolder(folder / "run")
    try:
        launch_stages(run, stages, lambda event: None, resume=resume)
        result: dict[str, Any] = {"outcome": "done", "sums": _sums(run.root)}
    except KeyboardInterrupt:
        result = {"outcome": "stopped"}
    except PraisonRLError as error:
        result = {"outcome": "failed", "kind": type(error).__name__, "message": str(error)}
    (folder / SPARE).unlink(missing_ok=True)
    log = {"log_sum": hash_file(run.log)} if run.log.exists() else {}
    write_text(folder / RESULT, json.dumps({**result, **log}))


def _try_rewards(run: RunFolder, plan: Plan) -> None:
    named: list[PlannedReward] = [one for one in [*plan.rewards, *plan.judges] if ":" in str(one.spec)]
    prompts, columns = sample(read_rows(run.train_rows))
    prompts = [as_messages(prompt) for prompt in prompts if prompt is not None]
    prepare([as_entry(one) for one in named], prompts=prompts, columns=columns)


def _sums(root: Path) -> dict[str, str]:
    """The hash of each file that is brought home."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    names = {path.relative_to(root).as_posix(): path for path in files}
    return {name: hash_file(path) for name, path in names.items() if name.split("/")[0] not in STAYS}


def main() -> None:
    """``check`` or ``checkpoint``, with the folder in a line of JSON, or ``carry_out FOLDER STAGE ... [--resume]``."""
    verb, *words = sys.argv[1:]
    if verb in ("check", "checkpoint"):
        answer(check if verb == "check" else checkpoint, json.loads(sys.stdin.buffer.readline()))
    else:
        stages = [word for word in words[1:] if word != "--resume"]
        carry_out(Path(words[0]), stages, resume="--resume" in words)


if __name__ == "__main__":
    main()
