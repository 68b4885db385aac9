"""Another machine for tests: a command ``ssh`` that runs what it is told in a home of its own, and a package there.

The package has the true ``remote/there.py``; what would train is a few lines that write the events they are told to.
"""

import json
import os
import shutil
import stat
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil

from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.remote import there
from praison_agent_rl.remote.checks import own_version

SSH = """\
#!/bin/sh
# a stand-in: the last word is the command, as of ssh
printf '%s\\n' "$*" >> '{home}/calls.txt'
if [ -e '{home}/unreachable' ]; then cat '{home}/unreachable' >&2; exit 255; fi
if [ -e '{home}/hangs' ]; then exec sleep 60; fi
if [ -e '{home}/greeting' ]; then cat '{home}/greeting'; fi
for word; do command=$word; done
cd '{home}' || exit 1
if [ ! -e '{home}/farewell' ]; then exec env -i HOME='{home}' PATH=/usr/bin:/bin /bin/sh -c "$command"; fi
env -i HOME='{home}' PATH=/usr/bin:/bin /bin/sh -c "$command"
code=$?
cat '{home}/farewell'
exit $code
"""
PYTHON = """\
#!/bin/sh
export PYTHONPATH='{home}/packages'
exec '{python}' "$@"
"""
CARRYING = '''
    """What stands in for the package there: it says what it is told to say, and trains nothing."""
    import json, os, shlex, shutil, signal, sys, time
    from pathlib import Path
    from praison_agent_rl.remote.there import answer, hash_file

    HOME = Path(os.environ["HOME"])

    def told(name, usual):
        file = HOME / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else usual

    def describe(config, hub):
        (HOME / "config.json").write_text(json.dumps({"hub": hub, **config}))
        return {"device": "cuda", "libraries": {"torch": "9.9"}, "faults": told("lacks", [])}

    def check(request):
        (Path(request["folder"]) / "project").mkdir(exist_ok=True)
        return told("faults", [])

    def checkpoint(request):
        run = Path(request["folder"]) / "run"
        files = [p for name in ("checkpoints", "best") for p in sorted((run / name).rglob("*")) if p.is_file()]
        return {**{p.relative_to(run).as_posix(): hash_file(p) for p in files}, **told("untrue", {})}

    def carry_out(folder, *words):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        run = folder / "run"
        with (HOME / "begun.txt").open("a") as file:
            file.write(f"{folder}\\n")
        (HOME / "seen.json").write_text(json.dumps({
            "words": words, "project": sorted(p.name for p in Path.cwd().iterdir()), "folder": str(folder),
            "plan": json.loads((run / "plan.json").read_text()), "environment": dict(os.environ),
        }))
        (run / "log.txt").write_text("training\\n")
        result = {"outcome": "done"}
        try:
            for event in told("events", []):
                if "wait" in event:
                    while not (HOME / event["wait"]).exists():
                        time.sleep(0.02)
                elif "save" in event:
                    shutil.copytree(HOME / event["save"], run / event["save"])
                elif "die" in event:
                    os._exit(9)
                elif "fail" in event:
                    root = shlex.quote(str(run))
                    message = f"bad\\nthe whole log is {run}/log.txt; to go on from it: --resume {root}"
                    result = {"outcome": "failed", "kind": event["fail"], "message": message}
                else:
                    with (run / "events.jsonl").open("a") as file:
                        file.write(json.dumps(event) + "\\n")
        except KeyboardInterrupt:
            result = {"outcome": "stopped"}
        if result["outcome"] == "done":
            for name, text in told("makes", {}).items():
                (run / name).parent.mkdir(parents=True, exist_ok=True)
                (run / name).write_text(text)
            files = {p.relative_to(run).as_posix(): p for p in sorted(run.rglob("*")) if p.is_file()}
            result["sums"] = {n: hash_file(p) for n, p in files.items() if n.split("/")[0] not in ("plan.json", "checkpoints")}
        if (HOME / "tampering.json").exists():
            for name, text in told("tampering", {}).items():
                (run / name).write_text(text)
        (folder / "result.json").write_text(json.dumps({**result, "log_sum": hash_file(run / "log.txt")}))

    if __name__ == "__main__":
        verb, *words = sys.argv[1:]
        if verb in ("check", "checkpoint"):
            answer(globals()[verb], json.loads(sys.stdin.buffer.readline()))
        else:
            carry_out(Path(words[0]), *words[1:])
'''  # noqa: E501


class Machine:
    """The other machine: its files lie in ``home``, and what it is told to do in files there."""

    def __init__(self, home: Path, commands: Path) -> None:
        self.home = home
        self.workdir = home / ".praison-agent-rl"
        home.mkdir()
        commands.mkdir()
        _executable(commands / "ssh", SSH.format(home=home))
        self.python = home / "python"
        _executable(self.python, PYTHON.format(home=home, python=sys.executable))
        self.install(own_version())

    def install(self, version: str) -> None:
        """Put the package there, in this version."""
        packages = self.home / "packages"
        shutil.rmtree(packages, ignore_errors=True)
        inside = packages / "praison_agent_rl" / "remote"
        inside.mkdir(parents=True)
        for folder in (inside.parent, inside):
            (folder / "__init__.py").write_text("")
        shutil.copy(str(there.__file__), inside / "there.py")
        (inside / "carrying.py").write_text(textwrap.dedent(CARRYING))
        described = packages / f"praison_agent_rl-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: praison-agent-rl\nVersion: {version}\n")

    def remote(self, **given: Any) -> Remote:
        return Remote(**{"host": "gpubox", "python": str(self.python), **given})

    def tell(self, **what: Any) -> None:
        """Values of the files that the package there reads: events, makes, lacks, faults, tampering, untrue."""
        for name, value in what.items():
            (self.home / f"{name}.json").write_text(json.dumps(value))

    @property
    def seen(self) -> dict[str, Any]:
        """What the run saw there."""
        found: dict[str, Any] = json.loads((self.home / "seen.json").read_text())
        return found

    @property
    def begun(self) -> list[str]:
        """The folders of runs that were begun, each as often as it was."""
        return (self.home / "begun.txt").read_text().splitlines()

    @property
    def calls(self) -> list[str]:
        """The words of each ssh, a line each."""
        return (self.home / "calls.txt").read_text().splitlines()

    def runs(self) -> list[Path]:
        """Folders of runs there."""
        return sorted((self.workdir / "runs").iterdir()) if (self.workdir / "runs").is_dir() else []

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes there that have ``word`` among their words."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if word in words and any(str(self.home) in each for each in words):
                found.append(process)
        return found

    def holds(self, text: str) -> list[str]:
        """The files there in which the text stands, but for what the run said that it had seen."""
        files = [path for path in self.home.rglob("*") if path.is_file() and path.name != "seen.json"]
        return [str(path) for path in files if text.encode() in path.read_bytes()]


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def on_path(commands: Path) -> str:
    return f"{commands}{os.pathsep}{os.environ['PATH']}"
