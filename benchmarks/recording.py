"""What recording costs a call, and how fast a dataset is built.

    python benchmarks/recording.py [CALLS ...]      by default 10000 100000 1000000 recorded calls for the build

The first table: added time per call (difference of the medians of 600 turns each, in alternating rounds), recording on
against off, against one fake server on this machine. The second: calls a second and peak memory of a build that leaves
out exact duplicates, in a process of its own; by CPU time too, which tells more where others use the machine.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' fake server

ROUNDS, CALLS_A_ROUND = 40, 15  # many short rounds: what else the machine does meets both sides alike
FILLER = "The quick brown fox jumps over the lazy dog while the agent thinks about its next answer. " * 2
PARAMETERS = {"city": {"type": "string"}, "day": {"type": "integer"}}
TOOL = {"name": "get_weather", "description": "Weather of a city on a day.",
        "parameters": {"type": "object", "required": ["city"], "properties": PARAMETERS}}  # fmt: skip


def added_time(style: str, history: int) -> tuple[float, float]:
    """Median seconds of a turn without recording, and how much recording adds, with ``history`` messages sent."""
    import praison_agent_rl as rl
    from tests.fakes import FakeServer

    with FakeServer("A") as server, tempfile.TemporaryDirectory() as store:
        os.environ.update(OPENAI_BASE_URL=server.url, OPENAI_API_KEY="k", SSL_CERT_FILE=_one_certificate(store))
        ask = _asker(style, history)
        off, on = [], []
        _times(ask)
        for _ in range(ROUNDS):
            off += _times(ask)
            with rl.record(store=store):
                on += _times(ask)
        return statistics.median(off), statistics.median(on) - statistics.median(off)


def _one_certificate(folder: str) -> str:
    """A file with one certificate: the framework reads all of them at each turn, 35 ms that would drown the rest."""
    import certifi

    every = Path(certifi.where()).read_text(encoding="utf-8")
    start, end = every.index("-----BEGIN"), every.index("-----END CERTIFICATE-----")
    path = Path(folder) / "one.pem"
    path.write_text(every[start:end] + "-----END CERTIFICATE-----\n", encoding="utf-8")
    return str(path)


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


def _times(ask: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(CALLS_A_ROUND):
        start = time.perf_counter()
        ask()
        times.append(time.perf_counter() - start)
    return times


def write_store(store: Path, calls: int, calls_a_run: int = 4) -> None:
    """A store of ``calls`` recorded calls: runs of an agent that uses a tool until it answers, each asked anew."""
    from praison_agent_rl.transcripts import TranscriptWriter

    writer, tools = TranscriptWriter(store), [{"type": "function", "function": TOOL}]
    for number in range(calls // calls_a_run):
        run, start = f"{number:016x}", 1.7e9 + number
        question = f"Question {number}: what is the weather in city {number % 9973} today, and how will it be?"
        writer.begin({"run": run, "agent": "Bench", "parent": None, "session": None, "tags": [], "style": "chat",
                      "prompt": question, "time": start, "version": None})  # fmt: skip
        messages = [{"role": "system", "content": FILLER}, {"role": "user", "content": question}]
        for part in range(calls_a_run):
            asks = part < calls_a_run - 1
            reply = _tool_call(number, part) if asks else {"role": "assistant", "content": f"Answer {number}: sunny."}
            usage = {"prompt_tokens": 90 + 40 * part, "completion_tokens": 20, "total_tokens": 110 + 40 * part}
            writer.call({"id": f"{number:012x}{part:04x}", "run": run, "agent": "Bench", "time": start + 0.6 * part,
                         "seconds": 0.5123, "model": "gpt-4o-mini", "version": None, "api": "chat",
                         "messages": messages, "tools": tools, "settings": {"temperature": 0.2}, "reply": reply,
                         "finish": "tool_calls" if asks else "stop", "usage": usage, "logprobs": None,
                         "error": None, "partial": False})  # fmt: skip
            result = {"role": "tool", "tool_call_id": f"call_{number:x}_{part}", "content": f"day {part}: 21 degrees"}
            messages = [*messages, reply, result]
        writer.end(run, output=reply["content"], error=None, seconds=0.6 * calls_a_run)
    writer.close()


def _tool_call(number: int, part: int) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": f'{{"city": "city {number % 9973}", "day": {part}}}'}
    called = {"id": f"call_{number:x}_{part}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [called]}


def build(store: str, out: str) -> None:
    """What the process that is measured does."""
    from praison_agent_rl.dataset_building import BuildOptions, build_dataset

    start, cpu = time.perf_counter(), time.process_time()
    built = build_dataset(store, out=out, options=BuildOptions(near_duplicates=None))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{built.manifest.calls} {seconds} {cpu} {peak}")


def print_builds(sizes: Iterable[tuple[int, int]]) -> None:
    """Write and build stores of so many calls, and so many of them a run, and print the second table."""
    print("| calls a run | recorded calls | built, calls a second | by CPU time | peak memory, MiB |")
    print("| --- | --- | --- | --- | --- |")
    for count, calls_a_run in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_store(Path(folder) / "store", count, calls_a_run)
            words = [sys.executable, __file__, "--build", f"{folder}/store", f"{folder}/out"]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
        calls, seconds, cpu, peak = map(float, done.stdout.split())
        speeds = f"{calls / seconds:,.0f} | {calls / cpu:,.0f}"
        print(f"| {calls_a_run} | {calls:,.0f} | {speeds} | {peak:.0f} |", flush=True)


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
    print()
    counts = map(int, sys.argv[1:] or ("10000", "100000", "1000000"))
    print_builds([*((count, 4) for count in counts), (100_000, 2), (100_000, 10)])


if __name__ == "__main__":
    main()
