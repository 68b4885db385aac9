"""The README's code runs as it stands; only the server's address and the length of the training are put in."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import FakeServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def project(in_tmp: Path, tiny_model: Path) -> Path:
    """What the README tells its reader to have: rewards, questions, a configuration and a model."""
    (in_tmp / "myproject").mkdir()
    (in_tmp / "myproject" / "rewards.py").write_text(blocks("python")[0])
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    (in_tmp / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (in_tmp / "config.yaml").write_text(next(block for block in blocks("yaml") if block.startswith("method: grpo")))
    (in_tmp / "models").mkdir()
    (in_tmp / "models" / "my-model").symlink_to(tiny_model)
    return in_tmp


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = command.replace("praison-agent-rl", f"{sys.executable} -m praison_agent_rl.cli", 1)
    return subprocess.run(
        words.split(), cwd=cwd, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False
    )


def test_the_readme_is_short_and_begins_with_the_two_commands() -> None:
    assert len(README.splitlines()) <= 150
    first = blocks("bash")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_the_agent_of_the_readme_is_improved(project: Path, server_a: FakeServer) -> None:
    script = blocks("python")[1].replace("http://127.0.0.1:8000/v1", server_a.url)
    script = script.replace('method="grpo",', 'method="grpo", max_steps=2, max_completion_length=16,')
    (project / "use.py").write_text(script)
    done = subprocess.run([sys.executable, "use.py"], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "held-out prompts (95 % CI" in done.stdout
    assert len(list((project / ".praisonai" / "rl" / "runs").iterdir())) == 1


def test_the_recording_of_the_readme_works(
    project: Path, server_a: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "what the reader has")
    (project / "rec.py").write_text(blocks("python")[2].replace("http://127.0.0.1:8000/v1", server_a.url))
    done = subprocess.run([sys.executable, "rec.py"], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "What do bees collect? -> [A|my-model] reply to: What do bees collect?" in done.stdout
    assert "agent 'Helper': the model that it was built with answers" in done.stdout
    (line,) = [x for x in shell("praison-agent-rl transcripts list", project).stdout.splitlines() if "bees" in x]
    assert "Helper" in line


def test_the_commands_of_the_readme_work(project: Path) -> None:
    commands = [line for block in blocks("bash")[1:] for line in block.splitlines() if line.startswith("praison")]
    assert len(commands) == 3
    for command in commands:
        short = command.replace("max_steps=100", "max_steps=2 --set max_completion_length=16")
        done = shell(short, project)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_the_example_runs(project: Path, server_a: FakeServer) -> None:
    words = [sys.executable, str(ROOT / "examples" / "improve_agent.py"), server_a.url, "m1", "models/my-model", "1"]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "before: [A|m1]" in done.stdout and "back: [A|m1]" in done.stdout


def test_what_the_readme_promises_of_the_makefile_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("setup", "demo", "test", "lint", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
