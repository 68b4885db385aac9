"""What recording costs a call, and how fast a dataset is built.

    python benchmarks/recording.py [CALLS ...]      by default 10000 100000 1000000 recorded calls for the build

The first table: added time per call (median of the differences of medians), recording on against off, against one fake
server on this machine. The second: calls a second and peak memory of a build with exact duplicates, in a process of its
own.
"""

import asyncio
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' fake server

ROUNDS, CALLS_A_ROUND = 9, 60
FILLER = "The quick brown fox jumps over the lazy dog while the agent thinks about its next answer. " * 2


def added_time(style: str, history: int) -> tuple[float, float]:
    """Median seconds of a turn without recording, and how much recording adds, with ``history`` messages sent."""
    import praison_agent_rl as rl
    from tests.fakes import FakeServer

    with FakeServer("A") as server, tempfile.TemporaryDirectory() as store:
        os.environ.update(OPENAI_BASE_URL=server.url, OPENAI_API_KEY="k")
        ask = _asker(style, history)
        off, on = [], []
        for _ in range(ROUNDS):
            off.append(_median(ask))
            with rl.record(store=store):
                on.append(_median(ask))
        differences = [with_ - without for with_, without in zip(on, off, strict=True)]
        return statistics.median(off), statistics.median(differences)


def _asker(style: str, history: int) -> Callable[[], Any]:
    from praisonaiagents import Agent

    agent = Agent(name="Bench", instructions="Answer.", llm="m1", output="silent", rules=False)
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {FILLER}"} for n in range(history - 2)]

    def reset() -> None:
        agent.chat_history[:] = [dict(turn) for turn in turns]

    def sync() -> None:
        reset()
        agent.chat("And now?")

    loop = asyncio.new_event_loop()

    def through_loop() -> None:
        reset()
        loop.run_until_complete(agent.achat("And now?"))

    return sync if style == "sync" else through_loop


def _median(ask: Callable[[], Any]) -> float:
    times = []
    for _ in range(CALLS_A_ROUND):
        start = time.perf_counter()
        ask()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def write_store(store: Path, calls: int) -> None:
    """A store of runs of two calls each, with distinct prompts."""
    from praison_agent_rl.transcripts import TranscriptWriter

    writer = TranscriptWriter(store)
    system = {"role": "system", "content": FILLER}
    for number in range(calls // 2):
        run, asked = f"run{number:08x}", {"role": "user", "content": f"question {number}: {FILLER[:80]}"}
        writer.begin({"run": run, "agent": "Bench", "parent": None, "session": None, "tags": [], "style": "chat",
                      "prompt": asked["content"], "time": 1.0 * number, "version": None})  # fmt: skip
        messages, reply = [system, asked], {"role": "assistant", "content": f"answer {number}"}
        for part in range(2):
            writer.call({"id": f"c{number:08x}{part}", "run": run, "agent": "Bench", "time": 1.0 * number,
                         "seconds": 0.1, "model": "m", "version": None, "api": "chat", "messages": messages,
                         "tools": [], "settings": {}, "reply": reply, "finish": "stop", "usage": None,
                         "logprobs": None, "error": None, "partial": False})  # fmt: skip
            messages = [*messages, reply, {"role": "user", "content": "more"}]
        writer.end(run, output="done", error=None, seconds=0.2)
    writer.close()


def build(store: str, out: str) -> None:
    """What the process that is measured does."""
    from praison_agent_rl.dataset_building import BuildOptions, build_dataset

    start = time.perf_counter()
    built = build_dataset(store, out=out, options=BuildOptions(near_duplicates=None))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{built.manifest.calls} {seconds} {peak}")


def main() -> None:
    """Print both tables in Markdown."""
    if sys.argv[1:2] == ["--build"]:
        build(*sys.argv[2:4])
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| turn | messages sent | without recording, ms | recording adds, microseconds |\n| --- | --- | --- | --- |")
    for style in ("sync", "async"):
        for history in (4, 20, 100):
            off, added = added_time(style, history)
            print(f"| {style} | {history} | {off * 1e3:.2f} | {added * 1e6:.0f} |", flush=True)
    print("\n| recorded calls | built, calls a second | peak memory, MiB |\n| --- | --- | --- |")
    for count in map(int, sys.argv[1:] or ("10000", "100000", "1000000")):
        with tempfile.TemporaryDirectory() as folder:
            write_store(Path(folder) / "store", count)
            words = [sys.executable, __file__, "--build", f"{folder}/store", f"{folder}/out"]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            calls, seconds, peak = done.stdout.split()
            print(f"| {int(calls):,} | {int(calls) / float(seconds):,.0f} | {float(peak):.0f} |", flush=True)


if __name__ == "__main__":
    main()
