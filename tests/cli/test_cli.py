"""The command line: one plain message and the right exit code, before anything heavy is imported."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from praison_agent_rl.records import MergeProof, Version
from praison_agent_rl.runs import write_record
from tests.finished_runs import comparison_of

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


def test_a_wrong_reward_path_is_told_about_as_soon_as_the_help_is(project: Path) -> None:
    """In under a second on an idle machine: nothing heavy is loaded before. The smallest of three in turn."""
    helps, times = [], []
    for _ in range(3):
        start = time.monotonic()
        run("train", "--help", cwd=project)
        helps.append(time.monotonic() - start)
        start = time.monotonic()
        done = run("train", "config.yaml", "--set", "reward_funcs=myproject.rewards:nope", cwd=project)
        times.append(time.monotonic() - start)
        assert done.returncode == 2
        assert "'myproject.rewards' has no 'nope'. Callables there: length_penalty" in done.stderr
    assert min(times) < 3 * min(helps)
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
        (["train", "--resume", "nowhere", "--set", "max_steps=3"], "no other argument than --set rollout_agent="),
        (["train", "--resume", "nowhere", "--set", "rollout_agent=a:b"], "not the folder of a run"),
        (["train", "config.yaml", "--set", "chat_template=/nonexistent.jinja"], "there is no such file"),
        (["train", "config.yaml", "--set", "lora_target_modules=nonsense"], "has no such layer; it has: down_proj"),
        (["train", "config.yaml", "--set", "lora_target_modules=[q_proj, lm_head]"], "lm_head"),
        (["train", "config.yaml", "--set", "layers_to_transform=99"], "has 2 layers, 0 to 1"),
        (["train", "config.yaml", "--set", "fast_inference=true"], "fast_inference needs vLLM"),
        (["train", "config.yaml", "--set", "optim=nonsense"], "no optimiser of transformers"),
        (["train", "config.yaml", "--set", "max_steps=99999999999999999999"], "max_steps is 99999999999999999999"),
        (["improve", "a:b", "--set", "swap=true"], "'swap' is no key that --set can set; leave it out"),
        (["improve", "a:b", "--set", "data=x", "--set", "quiet=1"], "'data' is no key that --set can set; give it as"),
        (["improve", "a:b", "--set", "base_model=x"], "give it as --base-model"),
        (["improve", "a:b", "--set", "need_model=true", "--set", "source=x"], "'need_model' is no key"),
        (["improve", "noagents:helper", "--data", "prompts.jsonl"], "cannot import 'noagents'"),
        (["improve", "justaname", "--data", "prompts.jsonl"], "is not a 'module:agent' path"),
        (["improve", "myproject.rewards:length_penalty", "--data", "prompts.jsonl"], "is a function, not an Agent"),
        (["evaluate", "./nowhere", "--data", "prompts.jsonl"], "no such folder or file"),
        (["evaluate", "noagents:helper"], "cannot import 'noagents'"),
        (["evaluate", "helper/v3"], "agent 'helper' has no versions"),
        (["evaluate", "helper@v3"], "agent 'helper' has no versions"),
        (["evaluate", "x", "--set", "against=y", "--set", "run_tools=1"], "give it as --run-tools"),
        (["evaluate", "x", "--set", "config=y"], "'config' is no key that --set can set; give it as --config"),
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


GROUPS = [
    ("transcripts", "list"),
    ("transcripts", "show"),
    ("dataset", "build"),
    ("versions", "list"),
    ("rewards", "check"),
]


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
def test_help_of_a_verb_in_a_group_is_help(project: Path, words: tuple[str, str]) -> None:
    shown = run(*words, "--help", cwd=project)
    assert shown.returncode == 0 and "Usage" in shown.stdout and "error" not in shown.stderr


STRANGE = [*((*group, "--bogus") for group in GROUPS), *((group, "bogus") for group, _ in GROUPS)]


@pytest.mark.parametrize("words", STRANGE, ids=" ".join)
def test_a_word_that_a_group_does_not_know_is_wrong_usage(project: Path, words: tuple[str, ...]) -> None:
    refused = run(*words, cwd=project)
    assert refused.returncode == 2 and "bogus" in refused.stderr and "fault of" not in refused.stderr


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


def test_paths_are_printed_as_they_are(project: Path) -> None:
    """Square brackets mean styles to rich: a folder named br[proj] was printed as br, and o[/a] was an error."""
    out = "br[proj]/o[/a]"
    sets = ["--set", "max_completion_length=8", "--set", "max_steps=1", "--set", "held_out=0"]
    done = run("train", "config.yaml", *sets, "--set", f"output_dir={out}", "--set", "merged_save_dir=out", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{out} as hf: out (" in done.stdout and "nothing was held out" in done.stdout
    same = [(project / place / "model.safetensors").read_bytes() for place in (f"{out}/model", "out")]
    assert same[0] == same[1] and (project / "out" / "README.md").exists()
    for name in ("", "/adapter", "/model", "/report.html"):
        assert f"{out}{name}\n" in done.stdout
    assert f"transformers serve '{out}/model'" in done.stdout
    (project / out / "model").rename(project / "elsewhere")
    again = run("train", "--resume", out, cwd=project)
    assert again.returncode == 0, again.stderr
    assert f"the run is finished and published already: {project.resolve() / 'out'}\n" in again.stdout
    assert "failed" not in again.stdout
    assert "serve" not in again.stdout and "merged model:" not in again.stdout
    assert "it has become a version of the agent, or was moved" in again.stdout
    version = project / ".praisonai" / "rl" / "versions" / "helper" / "v1"
    version.mkdir(parents=True)
    facts = {"name": "v1", "agent": "helper", "folder": "", "base": "b", "parent": None, "created": "2026-01-01"}
    proof = MergeProof(tokens=9, merge_error=0.0, saved_error=0.0, tolerance=1e-3, change=0.5)
    made = Version(**facts, comparison=comparison_of(0.2), merge=proof, run=str((project / out).resolve()))
    write_record(version / "version.json", made)
    found = run("train", "--resume", out, cwd=project)
    assert f"merged model: {version / 'model'}\n" in found.stdout


@pytest.mark.parametrize("dry", [True, False])
def test_ctrl_c_names_the_run_that_can_be_gone_on_with_or_says_that_nothing_was_written(
    project: Path, dry: bool
) -> None:
    (project / "myproject" / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(60)\n"
    )
    reward = ["--set", "reward_funcs=myproject.slow:f", "--dry-run"] if dry else ["--set", "output_dir=out [1]"]
    sign = project / "started" if dry else project / "out [1]" / "events.jsonl"
    command = [sys.executable, "-c", "from praison_agent_rl.cli import main; main()", "train", "config.yaml", *reward]
    started = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not sign.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130, said
    if dry:
        assert said.strip() == "interrupted; nothing was written"
        assert not (project / ".praisonai").exists()
    else:
        assert "what was written stays in out [1]" in said and "train --resume 'out [1]'" in said


def test_a_reward_that_fails_in_training_is_a_failed_run_that_can_be_gone_on_with(project: Path) -> None:
    (project / "myproject" / "judge.py").write_text(
        "def judge(completions, trainer_state=None, **kwargs):\n"
        "    if trainer_state is not None and trainer_state.global_step > 0:\n"
        "        raise OSError('no answer from the judge')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    sets = ["reward_funcs=myproject.judge:judge", "max_completion_length=8", "max_steps=5", "held_out=0"]
    given = [word for text in sets for word in ("--set", text)]
    done = run("train", "config.yaml", *given, "--set", "output_dir=failing", cwd=project)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no answer from the judge" in done.stderr and "Traceback" not in done.stderr
    assert "log.txt" in done.stderr and "--resume" in done.stderr
    (project / "myproject" / "judge.py").write_text(
        "def judge(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n"
    )
    done = run("train", "--resume", "failing", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_without_signal_fails_with_exit_code_1_and_says_why(project: Path) -> None:
    (project / "myproject" / "flat.py").write_text(
        "def same(completions, **kwargs):\n    return [0.5] * len(completions)\n"
    )
    sets = ["--set", "reward_funcs=myproject.flat:same", "--set", "max_completion_length=8", "--set", "max_steps=2"]
    done = run("train", "config.yaml", *sets, cwd=project)
    assert done.returncode == 1
    assert "had a signal" in done.stderr and "equal within every group" in done.stderr
    assert "--resume" in done.stderr


def record_something(project: Path) -> list[str]:
    """Three runs in the project's store, the last with an error; their ids."""
    from praison_agent_rl.transcripts import TranscriptWriter, feedback

    store = project / ".praisonai" / "rl" / "transcripts"
    writer = TranscriptWriter(store)
    ids = []
    for number, question in enumerate(["What are [tides]?", "Who draws maps?", "Why is glass clear?"]):
        run = f"run{number}"
        begin = {"run": run, "agent": "Helper", "parent": None, "session": None, "tags": ["t"], "style": "chat"}
        writer.begin({**begin, "prompt": question, "time": 1e9 + number, "version": None})
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        call = {"id": f"c{number}", "run": run, "agent": "Helper", "time": 1e9 + number, "model": "m1", "tools": []}
        writer.call({**call, "messages": messages, "reply": {"role": "assistant", "content": f"answer {number}"}})
        writer.end(run, output=f"answer {number}", error="boom" if number == 2 else None, seconds=0.1)
        ids.append(run)
    writer.close()
    feedback("run0", score=1.0, correction="the sea", store=store)
    return ids


def test_recorded_runs_are_listed_shown_counted_and_exported(project: Path) -> None:
    record_something(project)
    listed = run("transcripts", "list", cwd=project)
    assert listed.returncode == 0, listed.stderr
    assert "What are [tides]?" in listed.stdout and "answer 2" in listed.stdout and "error" in listed.stdout
    failed = run("transcripts", "list", "--errors", cwd=project).stdout
    assert "run2" in failed and "run1" not in failed
    shown = run("transcripts", "show", "run0", cwd=project).stdout
    for text in ("system: Be brief.", "user: What are [tides]?", "assistant: answer 0", "correction the sea"):
        assert text in shown
    assert "Helper" in run("transcripts", "stats", cwd=project).stdout
    done = run("transcripts", "export", "out.jsonl", "--format", "openai", cwd=project)
    assert done.returncode == 0 and len((project / "out.jsonl").read_text().splitlines()) >= 2


def test_wrong_words_on_transcripts_are_told_plainly(project: Path) -> None:
    for words, said in (
        (["transcripts", "list"], "no store"),
        (["dataset", "build"], "nothing is recorded"),
        (["transcripts", "import", "nothere.jsonl"], "nothere.jsonl"),
    ):
        done = run(*words, cwd=project)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "error:" in done.stderr and "Traceback" not in done.stderr, said
    record_something(project)
    for words in (["transcripts", "show", "nope"], ["transcripts", "export", "o", "--format", "x"]):
        done = run(*words, cwd=project)
        assert done.returncode == 2 and "Traceback" not in done.stderr
    done = run("dataset", "build", "--turns", "some", cwd=project)
    assert done.returncode == 2 and "turns" in done.stderr


def test_logs_are_imported_and_a_dataset_is_built(project: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": f"Question {n} of {n * 7}?"},
                           {"role": "assistant", "content": "yes"}]} for n in range(12)]  # fmt: skip
    (project / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = run("transcripts", "import", "chats.jsonl", cwd=project)
    assert done.returncode == 0 and "12" in done.stdout, done.stderr
    built = run("dataset", "build", "--out", "data", "--held-out", "0.25", cwd=project)
    assert built.returncode == 0, built.stderr
    assert (project / "data" / "rows.jsonl").exists() and "to train on" in built.stdout


def test_evaluate_compares_two_folders_of_weights_in_one_line(project: Path, tiny_model: Path) -> None:
    words = ["--against", str(tiny_model), "--data", "prompts.jsonl", "--reward", "myproject.rewards:length_penalty"]
    settings = ["--samples", "1", "--set", "max_completion_length=8"]
    done = run("evaluate", str(tiny_model), *words, *settings, cwd=project)
    assert done.returncode == 0, done.stderr
    line, report = done.stdout.splitlines()
    assert line.startswith(f"{tiny_model} against {tiny_model}: ") and "on 20 prompts" in line and "not better" in line
    assert Path(report.removeprefix("report: ")).is_file()


def test_lines_that_cannot_be_read_are_said_by_every_verb_that_reads(project: Path) -> None:
    (project / "bin.dat").write_bytes(bytes(range(256)) * 40)
    for words in (["list"], ["stats"], ["export", "out.jsonl"], ["show", "x"]):
        done = run("transcripts", *words, "--store", "bin.dat", cwd=project)
        assert done.returncode == (2 if words[0] == "show" else 0), done.stderr
        assert "note: 40 lines of the store cannot be read" in done.stderr and "Traceback" not in done.stderr
    record_something(project)
    assert run("transcripts", "list", cwd=project).stderr == ""


def test_a_dataset_that_cannot_be_written_or_would_be_empty_is_one_plain_message(project: Path) -> None:
    (project / "one.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert "1 runs" in run("transcripts", "import", "one.jsonl", "--store", "st", cwd=project).stdout
    assert (
        "1  runs were already there" in run("transcripts", "import", "one.jsonl", "--store", "st", cwd=project).stdout
    )
    for out in ("one.jsonl", "one.jsonl/below", "/proc/none"):
        done = run("dataset", "build", "--store", "st", "--out", out, cwd=project)
        assert done.returncode == 2 and f"the dataset in '{out}' cannot be built" in done.stderr, done.stderr
    done = run("dataset", "build", "--store", "st", "--out", "data", cwd=project)
    assert done.returncode == 0 and "nothing is held out, since there is but one prompt" in done.stdout, done.stderr
    done = run("dataset", "build", "--store", "st", "--agent", "nobody", cwd=project)
    assert done.returncode == 2 and not (project / ".praisonai").exists()
