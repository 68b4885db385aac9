"""What is left of an agent's versions when ``improve`` is killed in its second half.

    python benchmarks/kills_of_improve.py [KILLS]      by default 20

A tiny agent is improved once (v1), then a second time up to the end of training. What follows (merge, measuring the new
model, gate, publication, promotion) is then begun again and again from there, each time in a process of its own that is
killed with its children by SIGKILL at a random moment. After each kill the current version must be the old one or the
new one, whole, and nothing half-made may be listed. At last the run is gone on with to its end.
"""

import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

IMPROVE = """
    import sys
    sys.path.insert(0, {root!r})
    from praisonaiagents import Agent
    import praison_agent_rl
    model = {{"model": "openai/m1", "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}}
    agent = Agent(name="Helper", instructions="Be brief.", llm=model, output="silent", rules=False)
    prompts = [f"Say something about the number {{n}}." for n in range(40)]
    agent.improve(data=prompts, reward_funcs="tinyrewards:letters", base_model={model!r}, max_steps={steps},
                  per_device_train_batch_size=32, num_generations=8, max_completion_length=16, learning_rate=1e-2,
                  held_out=12, quiet=True, swap=False, promote=True, output_dir={out!r})
"""
RESUME = """
    import sys
    sys.path.insert(0, {root!r})
    from pathlib import Path
    from praison_agent_rl.improvement import resume_run
    print(resume_run(Path({out!r}), quiet=True))
"""
REWARD = '''
def letters(completions, **kwargs):
    """Share of characters that are lower-case letters."""
    return [sum(c.islower() for c in text) / max(len(text), 1) for text in completions]
'''


def main() -> None:
    """Kill, look, and print a row in Markdown; the exit code is 1 if anything was spoilt."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ.update(HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE", PRAISON_AGENT_RL_CACHE=f"{folder}/cache")
        from tests.conftest import make_tiny_model

        model = make_tiny_model(Path("tiny"), tied=True)
        Path("tinyrewards.py").write_text(REWARD)
        run(IMPROVE, model=str(model), steps=15, out="first")
        trained_until_merge(str(model))
        shutil.copytree(".praisonai", "before")
        shutil.copytree("second", "trained")
        seconds = whole_second_half()
        seen = [killed_at(random.Random(number).uniform(0.3, 1.0) * seconds) for number in range(kills)]
        restore_state()
        outcome = run(RESUME, out="second").strip()
    faults = [fault for _, found in seen for fault in found]
    versions = [version for version, _ in seen]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| kills | old version stands | new version stands | spoilt | gone on with at last |")
    print("| --- " * 5 + "|")
    print(f"| {kills} | {versions.count('v1')} | {versions.count('v2')} | {len(faults)} | {outcome} |")
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


def run(program: str, **words: object) -> str:
    """Run a program of this file to its end; returns what it printed."""
    text = textwrap.dedent(program).format(root=str(ROOT), **words)
    return subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout


def start(program: str, **words: object) -> "subprocess.Popen[bytes]":
    """Start a program of this file in a process group of its own."""
    text = textwrap.dedent(program).format(root=str(ROOT), **words)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", text], start_new_session=True, **quiet)  # type: ignore[call-overload,no-any-return]


def trained_until_merge(model: str) -> None:
    """A second improvement, killed as soon as its adapter is there."""
    process = start(IMPROVE, model=model, steps=30, out="second")
    while not Path("second/adapter/adapter_config.json").exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)  # the training process sees that its parent is gone


def whole_second_half() -> float:
    """Seconds that the rest of the run takes when nobody kills it."""
    begun = time.monotonic()
    run(RESUME, out="second")
    return time.monotonic() - begun


def restore_state() -> None:
    """Everything as it was when training had ended."""
    for name, kept in ((".praisonai", "before"), ("second", "trained")):
        shutil.rmtree(name, ignore_errors=True)
        shutil.copytree(kept, name)


def killed_at(moment: float) -> tuple[str | None, list[str]]:
    """Kill the second half after ``moment`` seconds; returns the current version, and what is spoilt."""
    from praison_agent_rl.registry import current, list_versions, verify
    from praison_agent_rl.runs import HOME

    restore_state()
    process = start(RESUME, out="second")
    time.sleep(moment)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)
    versions = list_versions(HOME, "Helper")
    faults = [f"{moment:.2f} s: {version.name}: {fault}" for version in versions for fault in verify(version)]
    pointer = current(HOME, "Helper")
    now = pointer.version if pointer else None
    if now not in ("v1", "v2") or now not in [version.name for version in versions]:
        faults.append(f"{moment:.2f} s: {now} is current, of {[version.name for version in versions]}")
    return now, faults


if __name__ == "__main__":
    main()
