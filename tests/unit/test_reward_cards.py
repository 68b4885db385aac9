"""Reward models on disk: each version whole or not there, one after another, and found by name."""

import errno
import multiprocessing
import shutil
from pathlib import Path

import pytest

from praison_agent_rl import reward_cards
from praison_agent_rl.errors import RewardError, TrainingFailed
from praison_agent_rl.records import RewardCard
from praison_agent_rl.reward_cards import find_reward_model, publish_reward_model, versions_in
from praison_agent_rl.runs import RunFolder, read_record, write_record
from praison_agent_rl.trained_rewards import finish_reward, name_of
from tests.unit.test_report_pairs import a_card, a_reward_run


def a_finished_run(root: Path, **card) -> RunFolder:
    """The folder of a reward model's run, with a few bytes in place of weights."""
    run = a_reward_run(root, card=a_card(name="reward", version=None, run=str(root.resolve()), **card))
    run.adapter.mkdir()
    (run.adapter / "adapter_model.safetensors").write_bytes(b"adapter")
    run.merged.mkdir()
    (run.merged / "config.json").write_text("{}")
    (run.merged / "model.safetensors").write_bytes(b"model of " + root.name.encode())
    return run


def publish(home: Path, root: Path) -> None:
    publish_reward_model(home, "My RM", RunFolder(root))


def test_a_version_holds_model_adapter_card_and_report_and_the_run_its_name(tmp_path):
    run = a_finished_run(tmp_path / "my-rm-20261130-021500-ab12")
    made = finish_reward(run, home=tmp_path / "home")
    assert made.folder == tmp_path / "home" / "rewards" / "my-rm" / "v1" and made.name == "rewards/my-rm/v1"
    kept = {path.name for path in made.folder.iterdir()}
    assert kept >= {"model", "adapter", "card.json", "README.md", "report.html", "report.json", "plan.json"}
    assert (made.folder / "model" / "model.safetensors").read_bytes().startswith(b"model of my-rm")
    assert not run.merged.exists()
    assert read_record(run.card, RewardCard) == made.card and made.card.version == "v1"
    page = (made.folder / "report.html").read_text()
    assert page == run.report.read_text() and "reward: rewards/my-rm/v1" in page
    again = finish_reward(run, home=tmp_path / "home")
    assert again.folder == made.folder and len(versions_in(made.folder.parent)) == 1


@pytest.mark.parametrize(
    ("root", "config", "agent", "name"),
    [
        ("my-rm-20261130-021500-ab12", {}, None, "my-rm"),
        ("out", {}, None, "out"),
        ("out", {}, "Support Bot", "Support Bot"),
        ("out", {"run_name": "short answers"}, "Support Bot", "short answers"),
    ],
)
def test_a_reward_model_is_called_as_run_name_says_or_the_agent_or_the_file(tmp_path, root, config, agent, name):
    run = a_finished_run(tmp_path / root)
    plan = run.plan.model_copy(update={"agent": agent, "config": {"method": "reward", **config}})
    write_record(run.plan_file, plan)
    assert name_of(run) == name


def test_a_folder_that_is_used_again_makes_another_version(tmp_path):
    home, root = tmp_path / "home", tmp_path / "out"
    a_finished_run(root)
    publish(home, root)
    shutil.rmtree(root)
    a_finished_run(root, created="2026-11-30T09:00:00+00:00")
    publish(home, root)
    assert [path.name for path in versions_in(home / "rewards" / "my-rm")] == ["v1", "v2"]


def test_two_that_end_at_once_become_two_versions(tmp_path):
    home, roots = tmp_path / "home", [tmp_path / f"run{n}" for n in range(4)]
    for root in roots:
        a_finished_run(root)
    start = multiprocessing.get_context("fork")
    workers = [start.Process(target=publish, args=(home, root)) for root in roots]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    versions = versions_in(home / "rewards" / "my-rm")
    assert [path.name for path in versions] == ["v1", "v2", "v3", "v4"]
    weights = {(path / "model" / "model.safetensors").read_text() for path in versions}
    assert weights == {f"model of run{n}" for n in range(4)}


def test_a_full_disk_leaves_no_half_version_and_the_run_can_be_ended_later(tmp_path, monkeypatch):
    home, run = tmp_path / "home", a_finished_run(tmp_path / "out")

    def full(*paths, **options):
        raise shutil.Error([("a", "b", f"[Errno {errno.ENOSPC}] No space left on device: 'b'"), ("c", "d", "more")])

    with monkeypatch.context() as patch:
        patch.setattr(reward_cards.shutil, "copytree", full)
        with pytest.raises(
            TrainingFailed, match=r"No space left on device: 'b'; make room there, then .* --resume"
        ) as e:
            publish(home, run.root)
    assert "more" not in str(e.value) and run.merged.is_dir()
    folder = home / "rewards" / "my-rm"
    assert [path for path in folder.iterdir() if path.name != ".publishing"] == []
    publish(home, run.root)
    assert [path.name for path in versions_in(folder)] == ["v1"]


def test_what_a_killed_process_left_is_taken_away(tmp_path):
    home = tmp_path / "home"
    left = home / "rewards" / "my-rm" / ".part-0123abcd" / "model"
    left.mkdir(parents=True)
    publish(home, a_finished_run(tmp_path / "out").root)
    assert not left.parent.exists()


def test_a_name_means_the_newest_version_that_passed(tmp_path):
    home = tmp_path / "home"
    for name, passed in (("a", True), ("b", False)):
        publish(home, a_finished_run(tmp_path / name, passed=passed).root)
    found, card = find_reward_model("rewards/my-rm", home)
    assert card is not None and card.version == "v1" and found.endswith("/my-rm/v1/model")
    assert find_reward_model("rewards/my-rm/v2", home)[0].endswith("/my-rm/v2/model")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rewards/my-rn", "there is no reward model rewards/my-rn in .*; there are: rewards/my-rm"),
        ("rewards/my-rm/v9", "rewards/my-rm has no version 'v9'; it has: v1"),
        ("rewards/my-rm/v1/model", "a reward model of ours is named rewards/<name> or rewards/<name>/v1"),
        ("rewards/", "a reward model of ours is named"),
    ],
)
def test_a_misspelt_name_is_told_with_those_that_are_there(tmp_path, text, said):
    publish(tmp_path / "home", a_finished_run(tmp_path / "out").root)
    with pytest.raises(RewardError, match=said):
        find_reward_model(text, tmp_path / "home")


def test_a_damaged_card_is_told_by_its_file(tmp_path):
    publish(tmp_path / "home", a_finished_run(tmp_path / "out").root)
    (tmp_path / "home" / "rewards" / "my-rm" / "v1" / "card.json").write_text("{")
    with pytest.raises(RewardError, match=r"card\.json' cannot be read as a RewardCard"):
        find_reward_model("rewards/my-rm", tmp_path / "home")
