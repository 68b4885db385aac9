"""Saves that are disturbed: by a death at each of their operations on files, by signals, and by a full disk.

    python -m tests.disturbed_saves FOLDER WHAT ...

prints a line of JSON for each thing that was done. ``WHAT`` is ``operations``, ``signals``, ``full``, ``tmpfs``, which
needs root, or ``kills:KIND:COUNT``, which tests/killed_runs.py does.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.killed_runs import different, finished, forked, kills, nursery, planned, result_of, said_by, train

# --- every operation of a save ----------------------------------------------------------------------------------------

_WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


class Dying:
    """Kills this process at its operation number ``at`` on files; ``emptied`` as a loss of power does, unsynced."""

    def __init__(self, folder: Path, at: int, *, emptied: bool) -> None:
        self._folder, self._at, self._emptied = folder, at, emptied
        self._count = 0
        self._before = {path: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
        self._synced: set[int] = set()
        self._dying = False
        sync = os.fsync

        def synced(descriptor: int) -> None:
            self._operation()
            sync(descriptor)
            self._synced.add(os.fstat(descriptor).st_ino)

        os.fsync = synced  # type: ignore[assignment]
        sys.addaudithook(self._hear)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        written = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if not self._dying and (written or event in _WRITES):
            self._operation()

    def _operation(self) -> None:
        self._count += 1
        if self._count == self._at:
            self._dying = True
            if self._emptied:
                self._lose_power()
            os.kill(os.getpid(), signal.SIGKILL)

    def _lose_power(self) -> None:
        inodes = set(self._before.values())
        for path in list(self._folder.rglob("*")):
            if path.is_file() and path.stat().st_ino not in self._synced | inodes:
                os.truncate(path, 0)


def at_every_operation(
    folder: Path, work: Callable[[], None], sound: Callable[[], str | None], *, stride: int
) -> dict[str, Any]:
    """Do ``work`` in forks that die at its operations on files, at each killed and with the power lost, or at some.

    ``sound`` says after each what is wrong with ``folder``, which is then as it was before.
    """
    aside = folder.with_name(f"{folder.name}.aside")
    shutil.copytree(folder, aside)
    faults, deaths, at, code = [], -1, 1 - stride, -signal.SIGKILL
    while code == -signal.SIGKILL:
        deaths, at = deaths + 1, at + stride
        if not (pid := os.fork()):
            _die_at(folder, (at + 1) // 2, at % 2 == 0, work)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if fault := sound() if code <= 0 else "it failed":
            faults.append(f"operation {(at + 1) // 2}{', the power lost' if at % 2 == 0 else ''}: {fault}")
        shutil.rmtree(folder)
        shutil.copytree(aside, folder)
    shutil.rmtree(aside)
    return {"deaths": deaths, "faults": faults}


def _die_at(folder: Path, at: int, emptied: bool, work: Callable[[], None]) -> None:
    try:
        Dying(folder, at, emptied=emptied)
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - this process ends here
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def operations(folder: Path, base: Path, stride: str = "1") -> Iterator[dict[str, Any]]:
    """Die at every operation of a save of a checkpoint, of the best adapter, and of the result, or at some of them."""
    run = planned(folder / "operations", base, "grpo", max_steps=6, save_total_limit=1)
    found: list[dict[str, Any]] = []

    def work() -> None:
        _dying_at(run, found, int(stride))
        train(run)
        (run.root / "found.json").write_text(json.dumps(found))

    assert finished(run, work) == 0, said_by(run)
    yield from json.loads((run.root / "found.json").read_text())


def _dying_at(run: Any, found: list[dict[str, Any]], stride: int) -> None:
    from praison_agent_rl.training import best, grpo, watching
    from praison_agent_rl.training.checkpoints import newest_whole_checkpoint

    saves, keeps, publishes = grpo.SavingPolicyTrainer._save_checkpoint, watching.keep, grpo.save_adapter

    def save(self: Any, model: Any, trial: Any) -> None:
        if self.state.global_step == 6:
            names = ("checkpoint-3", "checkpoint-6")

            def sound() -> str | None:
                newest = newest_whole_checkpoint(run.checkpoints)
                return None if newest and newest.name in names else f"the newest is {newest}"

            done = at_every_operation(run.checkpoints, lambda: saves(self, model, trial), sound, stride=stride)
            found.append({"of": "a checkpoint", **done})
        saves(self, model, trial)

    def keep(run: Any, trainer: Any, event: dict[str, Any]) -> None:
        if best.best_of(run) and not found:
            steps = [best.best_of(run).step, event["step"]]

            def sound() -> str | None:
                kept = best.best_of(run)
                whole = kept and (kept.folder / "adapter_model.safetensors").stat().st_size > 0
                return None if whole and kept.step in steps else f"the best is {kept}"

            done = at_every_operation(run.best, lambda: keeps(run, trainer, event), sound, stride=stride)
            found.append({"of": "the best", **done})
        keeps(run, trainer, event)

    def publish(trainer: Any, tokenizer: Any, run: Any) -> None:
        def sound() -> str | None:
            if not run.adapter.exists():
                return None
            files = [path for path in run.adapter.rglob("*") if path.is_file()]
            return None if len(files) > 4 and all(path.stat().st_size for path in files) else f"half: {files}"

        work = lambda: publishes(trainer, tokenizer, run)  # noqa: E731
        found.append({"of": "the adapter", **at_every_operation(run.root, work, sound, stride=stride)})
        publishes(trainer, tokenizer, run)

    grpo.SavingPolicyTrainer._save_checkpoint, watching.keep, grpo.save_adapter = save, keep, publish


# --- signals ----------------------------------------------------------------------------------------------------------


def signals(folder: Path, base: Path, *names: str) -> Iterator[dict[str, Any]]:
    """Ask a run to end in each way, or in some, and go on with it; then ask twice while a step takes long."""
    from praison_agent_rl.stop_requests import ask_to_end

    reference = planned(folder / "asked-whole", base, "blocks")
    assert finished(reference, lambda: train(reference)) == 0
    whole = result_of(reference)
    ways: dict[str, Callable[[Any, int], None]] = {
        "SIGTERM": lambda run, pid: os.kill(pid, signal.SIGTERM),
        "SIGINT": lambda run, pid: os.kill(pid, signal.SIGINT),
        "file": lambda run, pid: ask_to_end(run),
    }
    for name, ask in ((name, ways[name]) for name in names or ways):
        run = planned(folder / f"asked-{name}", base, "blocks", save_steps=1000)
        pid = forked(run, lambda run=run: train(run))  # type: ignore[misc]
        _wait_for_step(run, 5)
        ask(run, pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        there = sorted(int(path.name.split("-")[1]) for path in run.checkpoints.glob("checkpoint-*"))
        said = said_by(run).splitlines()[-1]
        finished(run, lambda run=run: train(run, resume=True))  # type: ignore[misc]
        # one log line more than there would have been stands at the step that was saved out of turn
        apart = [thing for thing in different(run, whole) if thing != "steps"]
        yield {"way": name, "code": code, "checkpoints": there, "said": said, "different": apart}
    yield from _twice(folder, base)


def _wait_for_step(run: Any, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(seen["step"] >= step for seen in run.steps()):
        time.sleep(0.005)


def _twice(folder: Path, base: Path) -> Iterator[dict[str, Any]]:
    run = planned(folder / "twice", base, "grpo")
    (run.root / "slow").touch()

    def slow() -> None:
        from praison_agent_rl.training import grpo

        step = grpo.SavingPolicyTrainer.training_step

        def slowly(self: Any, *given: Any) -> Any:
            if self.state.global_step == 4:
                (run.root / "slow").unlink()
                time.sleep(60)
            return step(self, *given)

        grpo.SavingPolicyTrainer.training_step = slowly
        train(run)

    pid = forked(run, slow)
    while (run.root / "slow").exists():
        time.sleep(0.005)
    os.kill(pid, signal.SIGTERM)
    while not any("again to end at once" in event.get("text", "") for _, event in run.events()):
        time.sleep(0.005)
    still = os.waitpid(pid, os.WNOHANG)[0] == 0
    os.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    yield {"way": "twice", "code": code, "still": still, "said": said_by(run).splitlines()[-1]}


# --- a full disk ------------------------------------------------------------------------------------------------------


def full(folder: Path, base: Path) -> Iterator[dict[str, Any]]:
    """The second save meets a full disk after half of its largest file; then there is room again."""
    import torch

    run, whole = _with_reference(folder, base, "full")
    save = torch.save

    def half(value: Any, path: Any, *given: Any, **options: Any) -> None:
        if "checkpoint-6" not in str(path):
            return save(value, path, *given, **options)
        save(value, path, *given, **options)
        os.truncate(path, os.path.getsize(path) // 2)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def work() -> None:
        torch.save = half
        train(run)

    yield from _full(run, whole, work, lambda: None)


def tmpfs(folder: Path, base: Path) -> Iterator[dict[str, Any]]:
    """The same on a file system that holds one checkpoint and not two."""
    run, whole = _with_reference(folder, base, "tmpfs")
    one = sum(path.stat().st_size + 4096 for path in (folder / "tmpfs-whole/checkpoints/checkpoint-3").iterdir())
    run.checkpoints.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * one)}", "tmpfs", str(run.checkpoints)]
    subprocess.run(mount, check=True)
    try:
        more = ["mount", "-o", f"remount,size={8 * one}", str(run.checkpoints)]
        yield from _full(run, whole, lambda: train(run), lambda: subprocess.run(more, check=True))
    finally:
        subprocess.run(["umount", str(run.checkpoints)], check=True)


def _with_reference(folder: Path, base: Path, name: str) -> tuple[Any, dict[str, Any]]:
    reference = planned(folder / f"{name}-whole", base, "grpo", max_steps=8, save_total_limit=0)
    assert finished(reference, lambda: train(reference)) == 0, said_by(reference)
    return planned(folder / name, base, "grpo", max_steps=8), result_of(reference)


def _full(
    run: Any, whole: dict[str, Any], work: Callable[[], None], make_room: Callable[[], Any]
) -> Iterator[dict[str, Any]]:
    code = finished(run, work)
    said = said_by(run).splitlines()[-1]
    there = sorted(path.name for path in run.checkpoints.iterdir() if path.is_dir())
    make_room()
    finished(run, lambda: train(run, resume=True))
    yield {"code": code, "said": said, "checkpoints": there, "different": different(run, whole)}


# --- all of it --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Disturb as the arguments say."""
    folder = Path(sys.argv[1]).resolve()
    base = nursery(folder)
    ways: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
        "operations": operations, "signals": signals, "full": full, "tmpfs": tmpfs,
        "kills": lambda folder, base, kind, count: kills(folder, base, kind, int(count)),
    }  # fmt: skip
    for what, *given in (word.split(":") for word in sys.argv[2:]):
        for done in ways[what](folder, base, *given):
            print(json.dumps({"what": what, **done}), flush=True)


if __name__ == "__main__":
    main()
