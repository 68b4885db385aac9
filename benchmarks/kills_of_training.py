"""What becomes of a run that is killed while it trains, and gone on with.

    python benchmarks/kills_of_training.py [KILLS]      by default 12, for each of five kinds of run

A tiny model is trained on one thread in every way (GRPO with curriculum, watched prompts and shared prompts, with
generations that are used for several updates, with saves that fall within generations; CPO; a reward model). Each run
is killed by SIGKILL at a random moment, every other one while it saves, and some once more; what they come to at last
is compared with a run that nobody disturbed: the adapter byte by byte, and every step and look that was told.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.killed_runs import KINDS  # noqa: E402


def main() -> None:
    """Kill, compare, and print a table in Markdown; the exit code is 1 if anything is another than it would be."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tests.disturbed_saves", folder, *(f"kills:{kind}:{count}" for kind in KINDS)]
        said = subprocess.run(words, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    found = [json.loads(line) for line in said.splitlines()]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes\n")
    print("| run | killed | same result | " + " | ".join(PHASES) + " |\n" + "| --- " * (3 + len(PHASES)) + "|")
    for kind in KINDS:
        runs = [one for one in found if one["kind"] == kind]
        moments = Counter(moment for one in runs for moment in one["killed"])
        same = sum(one["code"] == 0 and not one["different"] for one in runs)
        print(f"| {kind} | {len(runs)} | {same} | " + " | ".join(str(moments[phase]) for phase in PHASES) + " |")
    sys.exit(any(one["code"] or one["different"] for one in found))


PHASES = (
    "training, before the first checkpoint",
    "training, with a checkpoint",
    "saving a checkpoint",
    "keeping the best",
    "publishing the adapter",
    "after its end",
)

if __name__ == "__main__":
    main()
