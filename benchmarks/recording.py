"""What recording costs a call, and how fast a dataset is built.

    python benchmarks/recording.py [CALLS ...]      by default 10000 100000 1000000 recorded calls for the build
    python benchmarks/recording.py --turns          the first table only

The first table: what recording adds to a turn as its agent sees it (median and quartiles of the differences of rounds
of ten turns each, recording on against off in turn), and what of it each part of recording is. A fake server in a
process of its own, as a provider is, answers after 20 ms; a provider takes longer, which leaves more time for what is
done while a reply is awaited. The second: calls a second and peak memory of a build that leaves out exact duplicates,
in a process of its own; by CPU time too, which tells more where others use the machine.
"""

import asyncio
import contextlib
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' fake server

ROUNDS, CALLS_A_ROUND = 40, 10  # many short rounds: what else the machine does meets both sides alike
DELAY = 0.02
"""Seconds after which the server answers."""
FILLER = "The quick brown fox jumps over the lazy dog while the agent thinks about its next answer. " * 2
PARAMETERS = {"city": {"type": "string"}, "day": {"type": "integer"}}
TOOL = {"name": "get_weather", "description": "Weather of a city on a day.",
        "parameters": {"type": "object", "required": ["city"], "properties": PARAMETERS}}  # fmt: skip


PHASES = ("open_turn", "open_call", "answered", "close")


class Added(NamedTuple):
    """What recording adds to a turn, in seconds."""

    off: float
    """Median of a turn without recording."""
    low: float
    wall: float
    high: float
    """Quartiles of what a round's median turn took more than that of the round before it, without recording."""
    cpu: float
    """Median of the same, by the CPU time of the agent's thread."""
    phases: list[float]
    """Median of each of `PHASES`: what the agent waits for, without what else it meets (caches, other threads)."""


def added_time(style: str, history: int, url: str) -> Added:
    """What recording adds to a turn in which ``history`` messages are sent."""
    import praison_agent_rl as rl

    with tempfile.TemporaryDirectory() as store:
        os.environ.update(OPENAI_BASE_URL=url, OPENAI_API_KEY="k", SSL_CERT_FILE=_one_certificate(store))
        ask = _asker(style, history)
        rounds: list[tuple[_Round, _Round]] = []
        _round(ask)
        for _ in range(ROUNDS):
            off = _round(ask)
            with rl.record(store=store):
                rounds.append((off, _round(ask)))
        with rl.record(store=store), _timed_phases() as took:
            for _ in range(4):
                _round(ask)
    low, wall, high = statistics.quantiles([on.wall - off.wall for off, on in rounds], n=4)
    cpu = statistics.median(on.cpu - off.cpu for off, on in rounds)
    phases = [statistics.median(took[name]) for name in PHASES]
    return Added(statistics.median(off.wall for off, _ in rounds), low, wall, high, cpu, phases)


class _Round(NamedTuple):
    wall: float
    cpu: float


def _round(ask: Callable[[], Any]) -> _Round:
    """Median seconds of a turn, and of its thread's CPU time in it."""
    walls, cpus = [], []
    for _ in range(CALLS_A_ROUND):
        cpu, start = time.thread_time(), time.perf_counter()
        ask()
        walls.append(time.perf_counter() - start)
        cpus.append(time.thread_time() - cpu)
    return _Round(statistics.median(walls), statistics.median(cpus))


@contextlib.contextmanager
def _timed_phases() -> Iterator[dict[str, list[float]]]:
    """What each part of recording takes within the block."""
    from praison_agent_rl.capture import calls, recordings, turns

    owners: tuple[Any, ...] = (turns, calls, recordings.PendingCall, recordings.Turn)
    originals = [getattr(owner, name) for owner, name in zip(owners, PHASES, strict=True)]
    took: dict[str, list[float]] = {name: [] for name in PHASES}

    def timed(original: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                times.append(time.perf_counter() - start)

        return measured

    for owner, name, original in zip(owners, PHASES, originals, strict=True):
        setattr(owner, name, timed(original, took[name]))
    try:
        yield took
    finally:
        for owner, name, original in zip(owners, PHASES, originals, strict=True):
            setattr(owner, name, original)


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """The address of a fake server in a process of its own: it shares no interpreter's lock with the agent."""
    words = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()  # at which it ends


def serve() -> None:
    """What that process does."""
    from tests.fakes import FakeServer

    class Slow(FakeServer):
        def reply_to(self, request: dict[str, Any]) -> dict[str, Any]:
            for kept in (self.requests, self.answers, self.bodies, self.keys):
                kept.clear()
            time.sleep(DELAY)
            return super().reply_to(request)

    with Slow("A") as server:
        print(server.url, flush=True)
        sys.stdin.read()


def print_turns() -> None:
    """Measure, and print the first table."""
    titles = (
        "turn",
        "messages sent",
        "without recording, ms",
        "recording adds, us (quartiles)",
        "CPU of it, us",
        *PHASES,
    )
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    with _server() as url:
        for style in ("sync", "async"):
            for history in (4, 20, 100):
                found = added_time(style, history, url)
                spread = f"{found.wall * 1e6:.0f} ({found.low * 1e6:.0f} to {found.high * 1e6:.0f})"
                phases = " | ".join(f"{seconds * 1e6:.0f}" for seconds in found.phases)
                print(f"| {style} | {history} | {found.off * 1e3:.2f} | {spread} | {found.cpu * 1e6:.0f} | {phases} |",
                      flush=True)  # fmt: skip


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
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print_turns()
    if sys.argv[1:] == ["--turns"]:
        return
    print()
    counts = map(int, sys.argv[1:] or ("10000", "100000", "1000000"))
    print_builds([*((count, 4) for count in counts), (100_000, 2), (100_000, 10)])


if __name__ == "__main__":
    main()
