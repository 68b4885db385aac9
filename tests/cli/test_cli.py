"""The command line: one plain message and the right exit code, before anything heavy is imported."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SEED_REWARDS = '''def length_penalty(prompts, completions, **kwargs) -> list[float]:
    """Reward short answers: 1.0 for <= 20 words, decreasing after."""
    return [max(0.0, 1.0 - len(c.split()) / 20) for c in completions]
'''


def run(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The installed command, as a user calls it; its own process, so that nothing is imported beforehand."""
    import os

    command = [sys.executable, "-c", "from praison_agent_rl.cli import main; main()", *words]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200", **(env or {})}
    )


@pytest.fixture
def project(in_tmp: Path, tiny_model: Path) -> Path:
    """A folder as the seed's Quick Start leaves it: myproject/rewards.py, prompts and config.yaml."""
    (in_tmp / "myproject").mkdir()
    (in_tmp / "myproject" / "rewards.py").write_text(SEED_REWARDS)
    rows = [{"prompt": f"What is {n} + 1?"} for n in range(20)]
    (in_tmp / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (in_tmp / "config.yaml").write_text(
        f'method: grpo\nmodel_name: "{tiny_model}"\nmax_seq_length: 2048\nreward_funcs:\n'
        "  - myproject.rewards:length_penalty\nnum_generations: 8\n"
        'dataset:\n  - name: "prompts.jsonl"\n    split: "train"\n'
    )
    return in_tmp


def test_a_dry_run_of_the_seeds_config_checks_everything_and_writes_nothing(project: Path) -> None:
    before = sorted(project.rglob("*"))
    done = run("train", "config.yaml", "--dry-run", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "16 to train on, 4 held out" in done.stdout
    assert "length_penalty" in done.stdout and "about" in done.stdout
    made = [path for path in sorted(project.rglob("*")) if path not in before and "__pycache__" not in str(path)]
    assert made == []


def test_a_dry_run_lists_three_different_faults_at_once(project: Path) -> None:
    (project / "bad.yaml").write_text(
        "method: grpo\nmodel_name: nowhere/at all\nreward_funcs: [nomodule:f]\nlearnin_rate: 1\n"
        "dataset: [{name: missing.jsonl}]\n"
    )
    done = run("train", "bad.yaml", "--dry-run", cwd=project)
    assert done.returncode == 2
    assert "unknown key 'learnin_rate'; did you mean 'learning_rate'?" in done.stderr
    assert "cannot import 'nomodule' for reward function 'nomodule:f'" in done.stderr
    assert "missing.jsonl does not exist" in done.stderr
    assert "nowhere/at all" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_reward_path_is_told_in_under_a_second(project: Path) -> None:
    times = []
    for _ in range(3):  # the smallest of three: the machine may be busy
        start = time.monotonic()
        done = run("train", "config.yaml", "--set", "reward_funcs=myproject.rewards:nope", cwd=project)
        times.append(time.monotonic() - start)
        assert done.returncode == 2
        assert "'myproject.rewards' has no 'nope'. Callables there: length_penalty" in done.stderr
    assert min(times) < 1.0
    assert not (project / ".praisonai").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "nothere.yaml"], "there is no file 'nothere.yaml'"),
        (["train"], "name a configuration file"),
        (["train", "config.yaml", "--set", "num_generations"], "num_generations"),
        (["train", "config.yaml", "--set", "num_generations=1"], "num_generations"),
        (["train", "config.yaml", "--set", "model_name=./nowhere"], "no such folder or file"),
        (["train", "config.yaml", "--set", "method=cpo"], "chosen, rejected"),
        (["train", "config.yaml", "--set", "reward_funcs="], "needs reward_funcs"),
        (["train", "--resume", "nowhere"], "not the folder of a run"),
        (["improve", "noagents:helper", "--data", "prompts.jsonl"], "cannot import 'noagents'"),
        (["improve", "justaname", "--data", "prompts.jsonl"], "is not a 'module:agent' path"),
        (["improve", "myproject.rewards:length_penalty", "--data", "prompts.jsonl"], "is a function, not an Agent"),
    ],
)
def test_wrong_input_gives_one_plain_message_and_exit_code_2(project: Path, words: list[str], said: str) -> None:
    done = run(*words, cwd=project)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / ".praisonai").exists(), "nothing half-written"


def test_an_unknown_command_or_option_is_a_usage_error(project: Path) -> None:
    assert run("tain", cwd=project).returncode == 2
    assert run("train", "--dryrun", cwd=project).returncode == 2


def test_debug_shows_the_traceback(project: Path) -> None:
    done = run("train", "nothere.yaml", "--debug", cwd=project)
    assert done.returncode == 2 and "Traceback" in done.stderr and "there is no file" in done.stderr


def test_doctor_names_each_part_and_what_it_lacks(project: Path) -> None:
    done = run("doctor", cwd=project)
    assert done.returncode == 0
    for word in ("training (GRPO on CPU or GPU)", "praison-agent-rl[vllm]", "memory", "embedded model", "trl"):
        assert word in done.stdout


def test_every_verb_explains_itself(project: Path) -> None:
    overview = run("--help", cwd=project).stdout
    for verb in ("train", "improve", "demo", "doctor"):
        assert verb in overview
        assert "Usage" in run(verb, "--help", cwd=project).stdout


def test_the_seeds_quick_start_trains_merges_compares_and_reports(project: Path) -> None:
    """The seed's config, but for the names of model and dataset; with fewer and shorter answers to be quick."""
    done = run("train", "config.yaml", "--set", "max_completion_length=16", "--set", "max_steps=3", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    (root,) = (project / ".praisonai" / "rl" / "runs").iterdir()
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors", "report.html", "comparison.json"):
        assert (root / name).exists(), name
    assert "held-out prompts" in done.stdout and root.name in done.stdout
    assert "Traceback" not in done.stderr
    comparison = json.loads((root / "comparison.json").read_text())
    assert comparison["prompts"] == 4 and comparison["samples"] == 2
    again = run("train", "--resume", str(root), cwd=project)
    assert again.returncode == 0, again.stderr  # everything is there already: nothing is trained twice
    assert json.loads((root / "comparison.json").read_text()) == comparison


def test_a_run_without_signal_fails_with_exit_code_1_and_says_why(project: Path) -> None:
    (project / "myproject" / "flat.py").write_text(
        "def same(completions, **kwargs):\n    return [0.5] * len(completions)\n"
    )
    sets = ["--set", "reward_funcs=myproject.flat:same", "--set", "max_completion_length=8", "--set", "max_steps=2"]
    done = run("train", "config.yaml", *sets, cwd=project)
    assert done.returncode == 1
    assert "had a signal" in done.stderr and "equal within every group" in done.stderr
    assert "--resume" in done.stderr
