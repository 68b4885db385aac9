"""``praison-agent-rl versions``: what it shows, what it does, and its exit codes."""

import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from praison_agent_rl.cli import app
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.runs import HOME
from tests.finished_runs import finished_run, flip_a_byte, snapshot, weights_in


@pytest.fixture
def home(in_tmp: Path) -> Path:
    """Of agent "Help Desk": v1, v2 trained on it, v3 which is not better, and a run that is no version."""
    base = weights_in(in_tmp / "base", b"the base")
    home = in_tmp / HOME
    facts: dict[str, Any] = {"agent": "Help Desk"}
    publish_version(home, "Help Desk", finished_run(home / "runs" / "one", base, **facts))
    second = finished_run(home / "runs" / "two", base, parent="v1", config={"learning_rate": 1e-4}, **facts)
    publish_version(home, "Help Desk", second)
    publish_version(home, "Help Desk", finished_run(home / "runs" / "three", base, difference=0.0, **facts))
    finished_run(home / "runs" / "four", base, difference=-0.3, **facts)
    return home


def said(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["versions", *words])
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert result.exit_code == code, text
    assert "Traceback" not in text and "fault of praison-agent-rl" not in text
    return text


def test_versions_are_listed_with_what_was_found_and_which_one_answers(home: Path) -> None:
    assert "there are no versions in" in said("list", "--home", str(home / "nowhere"))
    said("promote", "Help Desk", "v1")
    assert "Help Desk: v2 answers from now on" in said("promote", "help-desk", "v2")
    lines = said("list").splitlines()
    assert len(lines) == 4 and said("list", "help-desk").splitlines() == lines
    one, two, three = (" ".join(line.split()) for line in lines[1:])
    assert one.startswith("Help Desk v1 2") and one.endswith("the base 0.5 0.7 +0.1..+0.3 passed on the way back")
    assert two.endswith("v1 0.5 0.7 +0.1..+0.3 passed answers")
    assert three.endswith("the base 0.5 0.5 -0.1..+0.1 not better")


def test_agent_is_asked_for_a_run_only(home: Path) -> None:
    assert "a version has its agent already" in said("promote", "Help Desk", "v1", "--agent", "X", code=2)


def test_a_forced_promotion_is_shown_for_ever(home: Path) -> None:
    assert "was not let through by the gate (not better)" in said("promote", "Help Desk", "v3", code=2)
    assert "promoted by force: the gate did not let v3 through" in said("promote", "Help Desk", "v3", "--force")
    said("rollback", "Help Desk")
    assert "promoted by force" in said("list")
    shown = said("show", "Help Desk", "v3")
    assert "promoted by force: the gate did not let it through" in shown and "against the verdict" in shown
    assert "promoted by force" not in said("show", "Help Desk", "v1")


def test_a_version_is_shown_with_its_hashes_results_and_history(home: Path) -> None:
    said("promote", "Help Desk", "v2")
    said("rollback", "Help Desk")
    shown = " ".join(said("show", "help-desk", "v2").split())
    for part in (
        "agent Help Desk", "trained on v1: /", "total 0.5 -> 0.7 (95 % CI +0.1..+0.3)", "8; 8 won, 0 tied, 0 lost",
        "libraries python 3.x", "promote: v2 answers", "rollback: the model that it was built with answers",
    ):  # fmt: skip
        assert part in shown
    assert re.search(r"base hash [0-9a-f]{64} template hash [0-9a-f]{64}", shown)


def test_differences_are_shown_side_by_side(home: Path) -> None:
    assert "config.learning_rate 1e-05 0.0001" in " ".join(said("diff", "Help Desk", "v1", "v2").split())
    assert "do not differ" in said("diff", "Help Desk", "v1", "v1")


def test_a_run_is_promoted_by_its_folder(home: Path) -> None:
    run = str(home / "runs" / "four")
    assert "was not let through by the gate" in said("promote", run, code=2)
    assert "Help Desk: v4 answers from now on" in said("promote", run, "--force")
    assert "name the version, as: versions promote 'Help Desk' v1" in said("promote", "Help Desk", code=2)


def test_a_changed_byte_is_told_with_exit_code_1(home: Path) -> None:
    assert said("verify", "Help Desk").splitlines() == ["v1: in order", "v2: in order", "v3: in order"]
    flip_a_byte(home / "versions" / "help-desk" / "v2" / "model" / "model.safetensors")
    (home / "versions" / "help-desk" / "v3" / "version.json").write_text("{")
    text = said("verify", "Help Desk", code=1)
    assert "v1: in order" in text and "v2: model/model.safetensors was changed" in text
    assert "cannot be read as a Version" in text and "v2, v3 of agent 'Help Desk' is not what was published" in text
    assert "v1: in order" in said("verify", "Help Desk", "v1")
    assert "damaged; see: versions verify" in said("list")
    assert "is damaged and was not promoted" in said("promote", "Help Desk", "v2", code=1)


def test_weights_are_pruned_and_the_rest_says_why_it_stays(home: Path) -> None:
    said("promote", "Help Desk", "v2")
    text = said("prune", "Help Desk", "--keep", "1")
    assert "v2 keeps its weights: it answers" in text and "v3 keeps its weights: one of the newest 1" in text
    assert "v1: weights removed; versions restore makes them again" in text and "MB freed" in text
    assert "weights pruned" in said("list") and "v1: in order" in said("verify", "Help Desk", "v1")
    assert "its weights are there and in order" in said("restore", "Help Desk", "v2")
    shutil.rmtree(home.parents[1] / "base")
    assert "there are no weights in" in said("restore", "Help Desk", "v1", code=2)


def test_the_folder_of_a_version_is_not_taken_for_a_run(home: Path) -> None:
    folder = home / "versions" / "help-desk" / "v1"
    before = snapshot(home)
    told = "that is version v1 of agent 'Help Desk'; to let it answer, name it: praison-agent-rl versions promote 'Help"
    assert told in said("promote", str(folder), code=2)
    resumed = CliRunner().invoke(app, ["train", "--resume", str(folder)])
    assert resumed.exit_code == 2 and told in resumed.output
    assert snapshot(home) == before


def test_a_rollback_to_damaged_weights_wants_force(home: Path) -> None:
    said("promote", "Help Desk", "v1")
    said("promote", "Help Desk", "v2")
    flip_a_byte(home / "versions" / "help-desk" / "v1" / "model" / "model.safetensors")
    assert "versions restore 'Help Desk' v1, or promote another" in said("rollback", "Help Desk", code=1)
    assert "v1 answers from now on" in said("rollback", "Help Desk", "--force")


def test_a_port_that_is_taken_is_told_in_one_sentence(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "Help Desk", "--version", "v1", "--port", str(port)])
    assert done.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be had (Address already in use); give another with --port" in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["list", "nobody"], "'nobody' has no versions"),
        (["show", "Help Desk", "v9"], "has no version 'v9'; it has: v1, v2, v3"),
        (["promote", "Help Desk", "../v1"], "has no version '../v1'"),
        (["rollback", "Help Desk"], "cannot be rolled back: nothing was ever promoted"),
        (["compare", "Help Desk", "v1", "v2"], "--from-transcripts"),
    ],
)
def test_wrong_words_are_told_plainly(home: Path, words: list[str], told: str) -> None:
    assert told in said(*words, code=2)


def test_versions_are_compared_by_what_was_recorded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(store: Path, agent: str, a: str, b: str, *, reward_funcs: list[str] | None, home: Path) -> str:
        return f"{store}: {a} and {b} of {agent} by {reward_funcs} in {home}"

    monkeypatch.setattr("praison_agent_rl.canary.compare_recorded", compare)
    words = ["compare", "help-desk", "v1", "v2", "--from-transcripts", "--store", "kept", "--reward", "a:b"]
    assert f"kept: v1 and v2 of Help Desk by ['a:b'] in {HOME}" in said(*words)
