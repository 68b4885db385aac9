"""The recipe of an agent finds all that it names, and what it prepares passes the checks of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.planning import draft_from_config
from praison_agent_rl.transcripts import read_runs

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/agent/config.yaml"
UNTAUGHT = "from examples import two_tools; two_tools._teach = lambda *_: None; from recipes.agent import prepare; "


@pytest.fixture
def root(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the repository's root, and keeps what is made; modules are found in it."""
    for name in ("recipes", "examples"):
        (in_tmp / name).symlink_to(ROOT / name)
    monkeypatch.syspath_prepend(str(in_tmp))
    return in_tmp


def test_the_recipe_of_an_agent_prepares_what_its_configuration_trains(root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{root}:{ROOT}"}
    command = [sys.executable, "-c", f"{UNTAUGHT}prepare.main()"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(read_runs(agent="Two tools"))) == 64
    draft = draft_from_config(RECIPE)
    assert draft.config.rollout == "agent" and draft.hosting is not None
    assert [tool.how for tool in draft.hosting.tools.tools] == ["runs", "runs"]
    rows = [*draft.train, *draft.held_out, *draft.watch]
    assert len(rows) == 256 and len(draft.held_out) == 48 and len(draft.calls) == 128
    assert {json.dumps(row["prompt"]) for row in rows} >= {'"at place0 of sun size"', '"at place15 of fish colour"'}


def test_its_page_says_the_commands_the_number_and_the_minutes() -> None:
    text = (ROOT / "recipes/agent/README.md").read_text(encoding="utf-8")
    assert f"praison-agent-rl train {RECIPE}" in text and "python -m recipes.agent.prepare" in text
    number = "0.46 -> 0.98"
    assert number in text and number in (ROOT / "examples/two_tools.py").read_text(encoding="utf-8")
    assert "minutes" in text and "48 held-out" in text
    assert TrainConfig.load(ROOT / RECIPE).held_out == 48
