"""The commands of each recipe run as they stand, on a tiny model in place of SmolLM2 and for two steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import check_rows, load_rows
from praison_agent_rl.records import RewardCard
from praison_agent_rl.runs import read_record

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
# a token of the tiny model is a byte
SHORT = {"max_steps": 2, "held_out": 8, "per_device_train_batch_size": 8}
BY_METHOD = {
    "grpo": {"max_completion_length": 8, "watch_prompts": 0},
    "reward": {"max_length": 1024},
    "cpo": {"max_completion_length": 8, "max_length": 1024},
}


def commands(recipe: str) -> list[str]:
    """The training commands of a recipe's README."""
    text = (RECIPES / recipe / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("praison-agent-rl train")]


@pytest.fixture
def root(in_tmp: Path) -> Path:
    """A folder that looks like the repository's root, and keeps what the runs leave."""
    for name in ("recipes", "praison_agent_rl"):
        (in_tmp / name).symlink_to(ROOT / name)
    return in_tmp


def run(command: str, model: Path, root: Path) -> subprocess.CompletedProcess[str]:
    config = yaml.safe_load((root / command.split()[2]).read_text(encoding="utf-8"))
    changes = {"model_name": model, **SHORT, **BY_METHOD[config["method"]]}
    words = [*command.split()[1:], *(word for key, value in changes.items() for word in ("--set", f"{key}={value}"))]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "praison_agent_rl.cli", *words],
        cwd=root, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("recipe", ["grpo", "cpo"])
def test_a_recipe_of_a_policy_runs(recipe: str, root: Path, tiny_model: Path) -> None:
    (command,) = commands(recipe)
    done = run(command, tiny_model, root)
    assert done.returncode == 0, done.stderr
    assert "mean reward" in done.stdout and "merged model:" in done.stdout


def test_the_recipe_of_a_reward_model_runs_and_grpo_is_scored_by_it(root: Path, tiny_model: Path) -> None:
    train, then = commands("reward")
    done = run(train, tiny_model, root)
    assert done.returncode == 0, done.stderr
    assert "use it with: reward_funcs: [rewards/short-answers/v1]" in done.stdout
    made = root / ".praisonai" / "rl" / "rewards" / "short-answers" / "v1"
    card = read_record(made / "card.json", RewardCard)
    assert (made / "report.html").is_file() and card.held_out == 8
    if not card.passed:  # two steps teach a tiny model little: as if it had been right
        (made / "card.json").write_text(card.model_copy(update={"passed": True}).model_dump_json())
    done = run(then, tiny_model, root)
    assert done.returncode == 0, done.stderr
    assert "mean reward" in done.stdout


def test_every_folder_of_recipes_has_its_command_its_minutes_and_its_number() -> None:
    folders = sorted(path.name for path in RECIPES.iterdir() if path.is_dir() and not path.name.startswith("_"))
    assert folders == ["agent", "cpo", "grpo", "reward"]
    for name in folders:
        text = (RECIPES / name / "README.md").read_text(encoding="utf-8")
        assert commands(name) and "minutes" in text and "held-out" in text
        for path in (RECIPES / name).glob("*.yaml"):
            assert f"recipes/{name}/{path.name}" in text
            model = TrainConfig.load(path).model_name  # the agent's is made by its first command
            assert model == (".praisonai/two_tools/model" if name == "agent" else "smollm2-135m-instruct")


def test_the_pairs_of_the_recipes_are_sound_and_two_hundred() -> None:
    rows = load_rows(str(RECIPES / "pairs.jsonl"))
    check_rows(rows, "cpo")
    assert len(rows) >= 200
    for row in rows:
        assert row["chosen_score"] > row["rejected_score"]


def test_the_configurations_of_the_docs_load(in_tmp: Path) -> None:
    page = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    methods = [TrainConfig.load(yaml.safe_load(block)).method for block in blocks]
    assert methods == ["reward", "grpo", "cpo"]
