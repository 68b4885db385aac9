"""What is lost of a recording when its process is killed.

    python benchmarks/kills.py [KILLS]      by default 1000

A process that records in four threads is killed with SIGKILL at a random moment, KILLS times over one store. Counted is
every call whose reply had reached the agent (the agent says so through a pipe) and that is not in the store.
"""

import os
import platform
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the program that the tests kill, too

from praison_agent_rl.transcripts import Losses, read_calls
from tests.unit.test_transcripts_hurt import NURSERY


def main() -> None:
    """Kill, read, and print a row in Markdown; the exit code is 1 if anything is lost."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", textwrap.dedent(NURSERY), folder, str(kills)]
        reported = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        losses = Losses()
        recorded = [call.id for call in read_calls(folder, losses=losses)]
    lost, twice = set(reported) - set(recorded), len(recorded) - len(set(recorded))
    unreadable = losses.torn + losses.unresolved + losses.dropped
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(
        "| kills | calls that had their reply | lost | recorded twice | lines that do not read |\n" + "| --- " * 5 + "|"
    )
    print(f"| {kills:,} | {len(reported):,} | {len(lost)} | {twice} | {unreadable} |")
    sys.exit(1 if lost or twice or unreadable else 0)


if __name__ == "__main__":
    main()
