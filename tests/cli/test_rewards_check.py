"""``praison-agent-rl rewards check``: what it shows, and its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from praison_agent_rl.cli import app
from praison_agent_rl.records import Call
from praison_agent_rl.transcripts import TranscriptWriter, feedback

REWARDS = """
def short(prompts, completions, **kwargs):
    return [max(0.0, 1.0 - len(c.split()) / 20) for c in completions]

def correct(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]

def constant(completions):
    return [1.0] * len(completions)

def broken(completions):
    return [1 / (len(c) - 4) for c in completions]

def needy(completions, gold):
    return [1.0] * len(completions)

def at_most(completions, most):
    return [float(len(c) <= most) for c in completions]

def hangs(completions):
    while True:
        pass
"""


@pytest.fixture
def project(in_tmp: Path) -> Iterator[Path]:
    """A folder with rewards, and questions without answers and with them."""
    (in_tmp / "myproject").mkdir()
    (in_tmp / "myproject" / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{n} + {n}?", "answer": str(2 * n)} for n in range(10, 20)]
    (in_tmp / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for row, n in zip(rows, range(10, 20), strict=True):
        row |= {"completions": [f"It is {2 * n}.", f"{n}"]}
    (in_tmp / "answered.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield in_tmp
    for name in [name for name in sys.modules if name.partition(".")[0] == "myproject"]:
        del sys.modules[name]  # another test's is another


def said(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["rewards", "check", *words])
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert result.exit_code == code, text
    assert "Traceback" not in text and "fault of praison-agent-rl" not in text
    return text


def line_of(name: str, text: str) -> list[str]:
    """The row of a reward in the table."""
    return next(line for line in text.splitlines() if line.strip().startswith(f"{name} ")).split()


def test_a_new_user_sees_a_table_and_a_verdict_for_each_reward(project: Path) -> None:
    text = said("myproject.rewards:short", "myproject.rewards:correct", "--data", "questions.jsonl")
    assert "made-up answers to prompts of questions.jsonl (10 prompts)" in text
    assert line_of("reward", text)[:7] == ["reward", "verdict", "reads", "low", "high", "mean", "spread"]
    assert line_of("short", text)[:3] == ["short", "fine", "text"]
    assert line_of("correct", text)[:5] == ["correct", "fine", "text", "0", "1"]
    assert "10 of 10" in text, "the right answer of each row is preferred to that of another"
    assert "note: questions.jsonl has no answers, so these were made up" in text
    assert "same order (tau)" in text


def test_given_answers_are_scored(project: Path) -> None:
    text = said("myproject.rewards:correct", "--data", "answered.jsonl")
    assert text.startswith("tried on 20 answers of answered.jsonl (10 prompts)")
    # the first answer of each prompt is right, the second is half of it: 10 of 20, and a spread of 0.5 in each
    assert line_of("correct", text)[:7] == ["correct", "fine", "text", "0", "1", "0.5", "0.5"]
    assert "tried on 6 answers" in said("myproject.rewards:short", "--data", "answered.jsonl", "--prompts", "3")
    one = said("myproject.rewards:short", "--data", "answered.jsonl", "--answers-each", "1")
    assert "each prompt has one answer" in one


def test_a_warning_ends_well_and_a_broken_reward_does_not(project: Path) -> None:
    text = said("myproject.rewards:constant", "--data", "answered.jsonl")
    assert "no signal" in text and "constant: It gives 1 to every answer: nothing is learned from it" in text
    text = said("myproject.rewards:short", "myproject.rewards:broken", "--data", "questions.jsonl", code=1)
    assert "broken: failed: ZeroDivisionError: " in text and text.count("ZeroDivisionError") == 1
    assert "(first: 'Yes.')" in text and line_of("short", text)[1] == "fine"


def test_each_way_not_to_be_usable_is_told_at_once_with_what_to_do(project: Path) -> None:
    specs = ["nomodule:f", "myproject.rewards:nope", "myproject/rewards.py:short", "myproject.rewards:needy"]
    text = said(*specs, "--data", "questions.jsonl", code=1)
    assert "Is it on PYTHONPATH?" in text and "has no 'nope'. Callables there: " in text
    assert "write the module instead: myproject.rewards:short" in text
    assert "needy: needs the column 'gold'; the data has: prompt, answer" in text


def test_a_reward_that_never_ends_does_not_keep_the_check(project: Path) -> None:
    text = said("myproject.rewards:hangs", "--data", "questions.jsonl", "--timeout", "0.4", code=1)
    assert re.search(r"hangs: did not end within 0.4 s for \d+ answers, and one alone did not end within 0.1 s", text)
    assert "(first: 'Yes.')" in text


def test_a_configuration_says_which_rewards_judges_and_data(project: Path) -> None:
    (project / "config.yaml").write_text(
        "reward_funcs:\n  - myproject.rewards:short\n"
        "  - {reward: myproject.rewards:at_most, most: 4, name: brief}\n"
        "judge_funcs: [myproject.rewards:correct]\ndataset: [{name: answered.jsonl}]\n"
    )
    text = said("--config", "config.yaml")
    assert "correct (judge)" in text and line_of("brief", text)[1] == "fine"
    only = said("myproject.rewards:correct", "--config", "config.yaml")
    assert "brief" not in only and "20 answers of the dataset (10 prompts)" in only


def test_all_of_it_is_given_as_json(project: Path) -> None:
    known = json.loads(said("myproject.rewards:correct", "--data", "answered.jsonl", "--json"))
    (reward,) = known["rewards"]
    assert (reward["name"], reward["verdict"], reward["mean"], reward["within"]) == ("correct", "fine", 0.5, 0.5)
    assert known["made_up"] is False and known["answers"] == 20
    broken = json.loads(said("myproject.rewards:broken", "--data", "questions.jsonl", "--json", code=1))
    assert broken["rewards"][0]["faults"][0]["kind"] == "raised"


def test_recorded_answers_of_an_agent_are_tried(project: Path) -> None:
    store = project / ".praisonai" / "rl" / "transcripts"
    writer = TranscriptWriter(store)
    for n, answer in enumerate(["It is 4.", "That makes 4, since two and two are four", "no idea"]):
        asked = [{"role": "user", "content": "2 + 2?"}]
        reply = {"role": "assistant", "content": answer}
        begun = {"run": f"r{n}", "agent": "calc", "parent": None, "session": None, "tags": [], "style": "chat"}
        writer.begin({**begun, "time": 1.0, "prompt": "2 + 2?", "version": None})
        writer.call(Call(id=f"c{n}", run=f"r{n}", agent="calc", time=1.0, messages=asked, reply=reply).model_dump())
        writer.end(f"r{n}", output=answer, error=None, seconds=0.1)
    writer.close()
    for n, score in enumerate([1.0, 0.5, 0.0]):
        feedback(f"r{n}", score=score, store=store)
    text = said("myproject.rewards:short", "--agent", "calc")
    assert "tried on 3 recorded answers of agent 'calc'" in text
    # 3, 9 and 2 words, rated 1, 0.5 and 0: one pair of three in the order of the ratings
    assert "1 of 3" in text and "-0.33" in text
    assert "no answered run of agent 'nobody' is recorded" in said(
        "myproject.rewards:short", "--agent", "nobody", code=2
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no reward is named"),
        (["myproject.rewards:short"], "is no store of transcripts"),
        (["myproject.rewards:short", "--data", "nothere.jsonl"], "nothere.jsonl does not exist"),
        (["myproject.rewards:short", "--config", "nothere.yaml"], "there is no file 'nothere.yaml'"),
        (["myproject.rewards:short", "--data", "questions.jsonl", "--agent", "x"], "give either it or data="),
        (["myproject.rewards:short", "--data", "questions.jsonl", "--timeout", "0"], "timeout is 0"),
        (["myproject.rewards:short", "--prompts", "0"], "--prompts"),
        (["--bogus"], "bogus"),
    ],
)
def test_wrong_input_is_told_with_exit_code_2(project: Path, words: list[str], text: str) -> None:
    assert text in said(*words, code=2)


def test_training_warns_of_a_constant_reward_and_refuses_a_broken_one_before_it_begins(
    project: Path, tiny_model: Path
) -> None:
    lines = f"model_name: '{tiny_model}'\ndataset: [{{name: questions.jsonl}}]\nheld_out: 2\nreward_funcs:\n"
    (project / "config.yaml").write_text(f"{lines}  - myproject.rewards:short\n  - myproject.rewards:constant\n")
    done = CliRunner().invoke(app, ["train", "config.yaml", "--dry-run"])
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "WARNING: the reward 'constant', tried on " in text and "It gives 1 to every answer" in text
    assert "WARNING: the reward 'short'" not in text
    (project / "config.yaml").write_text(f"{lines}  - myproject.rewards:broken\n  - myproject.rewards:needy\n")
    done = CliRunner().invoke(app, ["train", "config.yaml", "--dry-run"])
    assert done.exit_code == 2, done.output
    assert "needs the column 'gold'" in done.output and "Traceback" not in done.output


# --- rewards that take what is not theirs -----------------------------------------------------------------------------

PROGRAM = [sys.executable, "-c", "from praison_agent_rl.cli import main; main()"]
NOISY = """
import os, sys, time
os.write(1, b"imported: {\\n")
def letters(completions): return [float(len(str(c))) for c in completions]
def prints(completions):
    print("{ no json"); os.write(1, b"raw {\\n"); os.system("echo from a program"); sys.__stdout__.write("own {\\n")
    return letters(completions)
def takes_stdout(completions):
    sys.stdout = open(os.devnull, "w")
    return letters(completions)
def forks(completions):
    if os.fork() == 0:
        return [0.5] * len(completions)
    return letters(completions)
def forks_and_exits(completions):
    if os.fork() == 0:
        sys.exit(0)
    return letters(completions)
def moves(completions):
    os.chdir("/")
    return letters(completions)
async def holds_the_loop(completions):
    print("begun", file=sys.stderr, flush=True)
    time.sleep(60)
"""


def program(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "noisy.py").write_text(NOISY)
    command = [*PROGRAM, "rewards", "check", *words, "--data", "answered.jsonl"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_standard_output_is_the_command_s_own_whatever_a_reward_does_with_it(project: Path) -> None:
    names = ("prints", "takes_stdout", "forks", "forks_and_exits", "moves")
    done = program(project, *(f"noisy:{name}" for name in names), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["rewards"]
    assert [(trial["name"], trial["verdict"]) for trial in found] == [(name, "fine") for name in names]
    assert all(trial["deterministic"] and not trial["warnings"] for trial in found)
    assert "{ no json" in done.stderr and "from a program" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_ctrl_c_ends_a_reward_that_keeps_the_event_loop(project: Path) -> None:
    (project / "noisy.py").write_text(NOISY)
    command = [*PROGRAM, "rewards", "check", "noisy:holds_the_loop"]
    begun = time.monotonic()
    with subprocess.Popen([*command, "--data", "answered.jsonl"], cwd=project, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"begun" not in process.stderr.readline():
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        process.stderr.read()
    assert process.returncode == 130 and time.monotonic() - begun < 30


def test_a_name_is_shown_as_it_is_and_not_as_a_picture(project: Path) -> None:
    text = said("nowhere:x", "--data", "answered.jsonl", code=1)
    assert "nowhere:x: cannot import" in text


def test_a_typo_is_told_once_with_what_was_meant_and_without_a_key(project: Path) -> None:
    key = "sk-abcdefghijklmnopqrstuvwxyz"
    lines = [
        "{reward: praison_agent_rl.reward_library:length_band, mim: 5}",
        "{rewards: praison_agent_rl.reward_library:exact}",
        f"{{reward: praison_agent_rl.judge:RubricJudge, api_key: {key}, model: m, criteria: x}}",
        "{reward: praison_agent_rl.reward_library:exact, weigth: 2}",
    ]
    (project / "config.yaml").write_text("reward_funcs:\n" + "".join(f"  - {line}\n" for line in lines))
    text = said("--config", "config.yaml", "--data", "answered.jsonl", code=1)
    assert "takes no 'mim' (did you mean 'min'?)" in text and "takes no 'weigth' (did you mean 'weight'?)" in text
    assert text.count("mim") == 1 and "needs the key 'reward'" in text and key not in text
    assert said("{reward: x:y", "--data", "answered.jsonl", code=1).count("unicode string") == 0
