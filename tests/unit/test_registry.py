"""Versions on disk: which there are, which one answers, and that none is ever half there."""

import errno
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import praison_agent_rl as rl
from praison_agent_rl import locks, registry
from praison_agent_rl.checksums import SUMS, hash_weights
from praison_agent_rl.errors import ConfigError, ModelError, VersionDamaged, VersionError
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.records import Pointer, Version
from praison_agent_rl.registry import current, history, improvement_lock, promote, rollback, verify
from praison_agent_rl.runs import RunFolder, write_record
from tests.finished_runs import comparison_of, finished_run, flip_a_byte, snapshot, weights_in


@pytest.fixture
def home(in_tmp: Path) -> Path:
    return in_tmp / ".praisonai" / "rl"


@pytest.fixture
def base(in_tmp: Path) -> Path:
    return weights_in(in_tmp / "base", b"the base")


def published(home: Path, base: Path, name: str, *, agent: str = "Helper", **options: object) -> Version:
    run = finished_run(home / "runs" / name, base, agent=agent, **options)  # type: ignore[arg-type]
    return publish_version(home, agent, run)


# --- publishing -----------------------------------------------------------------------------------------------------


def test_a_version_holds_all_that_is_known_of_it_and_the_run_keeps_its_records(home: Path, base: Path) -> None:
    run = finished_run(home / "runs" / "one", base, parent="v7")
    model = snapshot(run.merged)
    version = publish_version(home, "Helper", run)
    folder = Path(version.folder)
    assert (version.name, version.agent, folder) == ("v1", "Helper", (home / "versions" / "helper" / "v1").resolve())
    assert (version.parent, version.verdict and version.verdict.status) == ("v7", "promoted")
    assert version.base_hash == hash_weights(str(base)) and len(version.base_hash) == 64
    assert version.template_hash and version.libraries == {"python": "3.x"}
    assert snapshot(folder / "model") == model and not run.merged.exists()
    assert snapshot(folder / "adapter") == snapshot(run.adapter)
    kept = {path.name for path in folder.iterdir()}
    assert kept == {
        "version.json", "checksums.json", "plan.json", "comparison.json", "verdict.json", "merge.json", "data.json",
        "answers_base.jsonl", "answers_new.jsonl", "held_out.jsonl", "events.jsonl", "adapter", "model",
    }  # fmt: skip
    assert json.loads((folder / "data.json").read_text())["train"]["rows"] == 3
    assert verify(version) == [] and registry.read_version(home, "Helper", "v1") == version
    assert rl.versions("helper", home=home) == rl.versions("Helper", home=home) == [version]


def test_weights_are_linked_and_not_copied_on_one_disk(home: Path, base: Path) -> None:
    run = finished_run(home / "runs" / "one", base)
    inode = (run.merged / "model.safetensors").stat().st_ino
    version = publish_version(home, "Helper", run)
    assert (Path(version.folder) / "model" / "model.safetensors").stat().st_ino == inode


def test_weights_are_copied_from_another_disk(home: Path, base: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == base.stat().st_dev:
        pytest.skip("/dev/shm is no other disk here")
    root = other / f"praison-run-{os.getpid()}"
    try:
        run = finished_run(root, base)
        model = snapshot(run.merged)
        version = publish_version(home, "Helper", run)
        assert snapshot(Path(version.folder) / "model") == model and verify(version) == []
        assert not run.merged.exists()
    finally:
        subprocess.run(["rm", "-r", str(root)], check=True)


def test_a_run_becomes_one_version_however_often_it_is_published(home: Path, base: Path) -> None:
    run = finished_run(home / "runs" / "one", base)
    first = publish_version(home, "Helper", run)
    assert publish_version(home, "Helper", run) == first
    weights_in(run.merged, b"left by a kill between the renaming and the removal")
    assert publish_version(home, "Helper", run) == first
    assert not run.merged.exists() and registry.version_names(home, "Helper") == ["v1"]


def test_another_run_in_a_folder_of_the_same_name_is_another_version(home: Path, base: Path) -> None:
    published(home, base, "one")
    subprocess.run(["rm", "-r", str(home / "runs" / "one")], check=True)
    assert published(home, base, "one", created="2026-01-02T00:00:00+00:00").name == "v2"


@pytest.mark.parametrize("gone", ["comparison.json", "merge.json", "model/config.json"])
def test_a_run_that_is_not_finished_is_refused_and_nothing_is_left(home: Path, base: Path, gone: str) -> None:
    run = finished_run(home / "runs" / "one", base)
    (run.root / gone).unlink()
    with pytest.raises(VersionError, match=rf"has no {gone}; .*--resume"):
        publish_version(home, "Helper", run)
    assert registry.version_names(home, "Helper") == [] and registry.list_agents(home) == []
    assert not list((home / "versions" / "helper").glob(".part-*"))


def test_a_base_that_is_not_there_any_more_leaves_its_hash_unknown(home: Path, base: Path) -> None:
    run = finished_run(home / "runs" / "one", base.with_name("gone"))
    assert publish_version(home, "Helper", run).base_hash is None


def test_a_full_disk_leaves_no_version_and_a_run_that_can_be_published_later(home: Path, base: Path) -> None:
    """A limit on the size of files stands for the full disk; it holds for the child process alone."""
    run = finished_run(home / "runs" / "one", base)
    before = snapshot(run.root)
    code = f"""
        import resource, signal
        from pathlib import Path
        from praison_agent_rl.publishing import publish_version
        from praison_agent_rl.runs import RunFolder
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        try:
            publish_version(Path({str(home)!r}), "Helper", RunFolder({str(run.root)!r}))
        except OSError as error:
            raise SystemExit(error.errno)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert done.returncode == errno.EFBIG
    assert registry.version_names(home, "Helper") == [] and snapshot(run.root) == before
    assert not list((home / "versions" / "helper").glob(".part-*"))
    assert verify(publish_version(home, "Helper", run)) == []


def test_publications_at_once_get_different_numbers_and_do_not_remove_each_other(home: Path, base: Path) -> None:
    runs = [finished_run(home / "runs" / f"run{n}", base) for n in range(6)]
    code = """
        import sys
        from pathlib import Path
        from praison_agent_rl.publishing import publish_version
        from praison_agent_rl.runs import RunFolder
        for folder in sys.argv[2:]:
            publish_version(Path(sys.argv[1]), "Helper", RunFolder(folder))
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(home)]
    children = [subprocess.Popen([*words, *(str(run.root) for run in runs[n::2])]) for n in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    versions = registry.list_versions(home, "Helper")
    assert [version.name for version in versions] == [f"v{n}" for n in range(1, 7)]
    assert {version.run for version in versions} == {str(run.root.resolve()) for run in runs}
    assert all(verify(version) == [] for version in versions)


def test_threads_of_one_process_get_different_numbers_too(home: Path, base: Path) -> None:
    runs = [finished_run(home / "runs" / f"run{n}", base) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(lambda run: publish_version(home, "Helper", run).name, runs))
    assert sorted(names) == ["v1", "v2", "v3", "v4"]


def test_what_a_killed_publication_left_is_removed_by_the_next_and_never_listed(home: Path, base: Path) -> None:
    published(home, base, "one")
    left = home / "versions" / "helper" / ".part-dead"
    (left / "model").mkdir(parents=True)
    (home / "versions" / "helper" / "v9").mkdir()  # somebody's own folder is no version, and stays
    assert registry.version_names(home, "Helper") == ["v1"]
    assert published(home, base, "two").name == "v10"
    assert not left.exists() and (home / "versions" / "helper" / "v9").exists()


def test_the_name_of_a_deleted_version_is_not_given_again(home: Path, base: Path) -> None:
    published(home, base, "one")
    published(home, base, "two")
    promote(home, "Helper", "v2")
    rollback(home, "Helper")
    subprocess.run(["rm", "-r", str(home / "versions" / "helper" / "v2")], check=True)
    assert published(home, base, "three").name == "v3"


# --- whose ----------------------------------------------------------------------------------------------------------


def test_agents_whose_names_make_one_file_name_do_not_share_versions(home: Path, base: Path) -> None:
    names = ["Support Bot", "support-bot", "Support (Bot)", "日本", "中国", "x" * 60, "x" * 50]
    for number, name in enumerate(names):
        version = published(home, base, f"run{number}", agent=name)
        assert (version.name, version.agent) == ("v1", name)
        promote(home, name, "v1")
    assert sorted(registry.list_agents(home)) == sorted(names)
    assert len({registry.agent_folder(home, name) for name in names}) == len(names)
    assert len({registry.served_name(registry.read_version(home, name, "v1")) for name in names}) == len(names)
    assert [registry.list_versions(home, name)[0].agent for name in names] == names
    assert current(home, "SUPPORT BOT") is None


def test_two_agents_of_one_file_name_that_begin_at_once_get_folders_of_their_own(home: Path) -> None:
    names = [f"A{mark}B" for mark in "!?#+*~"]
    start = threading.Barrier(len(names))

    def claim(name: str) -> Path:
        start.wait()
        return registry.claimed_folder(home, name)

    with ThreadPoolExecutor(len(names)) as pool:
        folders = list(pool.map(claim, names))
    assert len(set(folders)) == len(names)
    assert [registry.claimed_folder(home, name) for name in names] == folders


@pytest.mark.parametrize("name", ["v9", "v0", "v01", "..", "v1/../v1", "", "model"])
def test_a_name_that_is_none_lists_those_that_there_are(home: Path, base: Path, name: str) -> None:
    published(home, base, "one")
    with pytest.raises(VersionError, match=r"has no version .*it has: v1"):
        registry.read_version(home, "Helper", name)


def test_a_version_is_found_by_a_text(home: Path, base: Path) -> None:
    version = published(home, base, "one", agent="team/Helper")
    assert registry.find_version(home, "team/Helper/v1") == registry.find_version(home, "team-helper/v1") == version
    with pytest.raises(VersionError, match=r"write AGENT/v3"):
        registry.find_version(home, "team-helper")
    with pytest.raises(VersionError, match=r"'nobody' has no versions .* 'team/Helper'"):
        registry.find_version(home, "nobody/v1")


def test_versions_of_before_hashes_and_names_stay_readable_and_their_folder_is_where_they_are(home: Path) -> None:
    old = home / "versions" / "helper" / "v1"
    old.mkdir(parents=True)
    record = {
        "name": "v1", "agent": "helper", "folder": "/somewhere/else", "base": "owner/model", "parent": None,
        "created": "2026-01-01T00:00:00+00:00", "comparison": json.loads(comparison_of(0.2).model_dump_json()),
        "merge": {"tokens": 1, "merge_error": 0, "saved_error": 0, "tolerance": 1, "change": 1},
    }  # fmt: skip
    (old / "version.json").write_text(json.dumps(record))
    (version,) = registry.list_versions(home, "Helper")
    assert (version.base_hash, version.verdict, version.passed) == (None, None, True)
    assert version.folder == str(old.resolve())
    assert verify(version) == ["checksums.json is missing, so nothing can be verified"]


def test_versions_that_were_moved_are_found_where_they_are(home: Path, base: Path, in_tmp: Path) -> None:
    published(home, base, "one")
    home.rename(in_tmp / "moved")
    version = registry.read_version(in_tmp / "moved", "Helper", "v1")
    assert version.folder == str(in_tmp.resolve() / "moved" / "versions" / "helper" / "v1") and verify(version) == []


def test_a_damaged_record_hides_its_version_alone(home: Path, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    published(home, base, "one")
    broken = published(home, base, "two")
    (Path(broken.folder) / "version.json").write_text("{")
    for _ in range(3):  # a canary looks every second
        assert [version.name for version in registry.list_versions(home, "Helper")] == ["v1"]
    assert caplog.text.count("v2 is left out") == 1
    with pytest.raises(ConfigError, match="cannot be read as a Version"):
        registry.read_version(home, "Helper", "v2")
    assert verify(broken) == ["version.json was changed"]
    assert published(home, base, "three").name == "v3"


def test_an_agent_whose_name_cannot_be_read_hides_no_other(
    home: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published(home, base, "one")
    published(home, base, "two", agent="Other")
    (home / "versions" / "helper" / "agent.json").write_bytes(b"")
    assert registry.list_agents(home) == ["Other"] and "helper are passed over" in caplog.text


def test_a_name_that_no_file_can_hold_is_told_plainly(home: Path, base: Path) -> None:
    run = finished_run(home / "runs" / "one", base)
    with pytest.raises(VersionError, match=r"name '\\ud800x' cannot be written to a file; give it another"):
        publish_version(home, "\ud800x", run)
    with pytest.raises(ConfigError, match=r"plan\.json' cannot be written"):
        finished_run(home / "runs" / "two", base, agent="\ud800x")


def test_a_strange_name_in_the_history_keeps_no_version_from_being_published(home: Path, base: Path) -> None:
    published(home, base, "one")
    line = Pointer(version="weird", previous=["v5", "vv"], changed="x", by="promote").model_dump_json()
    (home / "versions" / "helper" / "history.jsonl").write_text(line + "\n")
    assert published(home, base, "two").name == "v6"


# --- verify ---------------------------------------------------------------------------------------------------------


def test_each_changed_byte_is_found_and_named(home: Path, base: Path) -> None:
    version = published(home, base, "one")
    folder = Path(version.folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    assert len(files) == 10 + 2 + 3
    for file in files:
        for place in {0, file.stat().st_size // 2, -1}:
            flip_a_byte(file, place)
            assert verify(version) == [f"{file.relative_to(folder).as_posix()} was changed"]
            flip_a_byte(file, place)
    assert verify(version) == []


def test_each_changed_byte_of_the_checksums_themselves_is_found(home: Path, base: Path) -> None:
    version = published(home, base, "one")
    sums = Path(version.folder) / SUMS
    for place in range(0, sums.stat().st_size, 7):
        flip_a_byte(sums, place)
        assert verify(version), place
        flip_a_byte(sums, place)
    assert verify(version) == []


def test_missing_and_additional_files_are_named(home: Path, base: Path) -> None:
    version = published(home, base, "one")
    folder = Path(version.folder)
    (folder / "model" / "extra.py").write_text("evil")
    (folder / "adapter" / "adapter_config.json").unlink()
    (folder / "model" / "config.json").rename(folder / "model" / "other.json")
    assert verify(version) == [
        "adapter/adapter_config.json is missing",
        "model/config.json is missing",
        "model/extra.py is additional",
        "model/other.json is additional",
    ]


# --- which one answers ----------------------------------------------------------------------------------------------


def test_the_way_back_leads_through_what_answered_to_the_model_that_the_agent_was_built_with(
    home: Path, base: Path
) -> None:
    for name in ("one", "two", "three"):
        published(home, base, name)
    assert current(home, "Helper") is None
    assert promote(home, "Helper", "v1").previous == [None]
    promote(home, "Helper", "v3", by="improve")
    pointer = promote(home, "Helper", "v2")
    assert (pointer.version, pointer.previous, pointer.by) == ("v2", [None, "v1", "v3"], "promote")
    again = promote(home, "Helper", "v2")
    assert again.previous == pointer.previous, "what answers already is decided anew, and the way back is the same"
    assert [rollback(home, "Helper").version for _ in range(3)] == ["v3", "v1", None]
    assert current(home, "Helper") == history(home, "Helper")[-1]
    with pytest.raises(VersionError, match="cannot be rolled back: it is back at the model that it was built with"):
        rollback(home, "Helper")
    told = [(change.by, change.version) for change in history(home, "Helper")]
    assert told == [
        ("promote", "v1"), ("improve", "v3"), ("promote", "v2"), ("promote", "v2"), ("rollback", "v3"),
        ("rollback", "v1"), ("rollback", None),
    ]  # fmt: skip


def test_a_rollback_of_what_was_never_promoted_is_an_error_and_makes_nothing(home: Path) -> None:
    with pytest.raises(VersionError, match="nothing was ever promoted"):
        rollback(home, "Helper")
    assert not home.exists()


def test_deleted_versions_on_the_way_back_are_passed_over(home: Path, base: Path) -> None:
    for name in ("one", "two", "three"):
        published(home, base, name)
        promote(home, "Helper", f"v{len(registry.version_names(home, 'Helper'))}")
    promote(home, "Helper", "v2")
    subprocess.run(["rm", "-r", str(home / "versions" / "helper" / "v3")], check=True)
    assert rollback(home, "Helper").version == "v1", "from v2 over v3, which is gone, and v2 itself"


def test_what_the_gate_refused_is_promoted_by_force_alone_and_that_is_shown_for_ever(home: Path, base: Path) -> None:
    version = published(home, base, "one", difference=0.0)
    with pytest.raises(VersionError, match=r"v1 was not let through by the gate \(not better\).*--force"):
        promote(home, "Helper", "v1")
    assert current(home, "Helper") is None
    assert promote(home, "Helper", "v1", force=True).forced
    published(home, base, "two")
    assert not promote(home, "Helper", "v2", force=True).forced, "there was nothing to force"
    assert rollback(home, "Helper").forced
    found = registry.read_version(home, "Helper", "v1")
    assert found.verdict and found.verdict.forced and found.verdict.status == "not better"
    assert json.loads((Path(found.folder) / "verdict.json").read_text())["forced"] is True
    assert verify(found) == []
    assert [change.forced for change in history(home, "Helper")] == [True, False, True]
    before = snapshot(Path(version.folder))
    promote(home, "Helper", "v2")
    promote(home, "Helper", "v1", force=True)
    assert snapshot(Path(version.folder)) == before, "it is written down once"


def test_a_damaged_version_is_not_promoted_even_by_force(home: Path, base: Path) -> None:
    version = published(home, base, "one")
    flip_a_byte(Path(version.folder) / "model" / "model.safetensors")
    with pytest.raises(VersionDamaged, match=r"v1 of agent 'Helper' is damaged .* model/model.safetensors was changed"):
        promote(home, "Helper", "v1", force=True)
    assert current(home, "Helper") is None


def test_an_improvement_is_not_promoted_over_what_was_made_to_answer_meanwhile(home: Path, base: Path) -> None:
    """It was compared with what answered when its run was planned."""
    published(home, base, "one")
    promote(home, "Helper", "v1", by="improve")
    published(home, base, "late", created="2020-01-01T00:00:00+00:00")
    with pytest.raises(VersionError, match=r"v2 is kept but does not answer: v1 was made to answer at"):
        promote(home, "Helper", "v2", by="improve")
    published(home, base, "child", created="2020-01-01T00:00:00+00:00", parent="v1")
    assert promote(home, "Helper", "v3", by="improve").version == "v3", "it was trained on what answers"
    assert promote(home, "Helper", "v2").version == "v2", "by hand it may"


def test_what_answers_already_may_be_promoted_again_by_its_own_run(home: Path, base: Path) -> None:
    """As `train --resume` of a finished run does."""
    published(home, base, "one", created="2020-01-01T00:00:00+00:00")
    promote(home, "Helper", "v1")
    assert promote(home, "Helper", "v1", by="improve").previous == [None]
    assert promote(home, "Helper", "v1", by="improve", since="long ago").previous == [None]


def test_an_improvement_is_compared_with_what_answered_when_its_base_was_chosen(home: Path, base: Path) -> None:
    """Whatever happened before its plan was written, and also within one second."""
    for name in ("one", "two", "three"):
        published(home, base, name)
    with pytest.raises(
        VersionError, match=r"v1 is kept but does not answer: the model that .* was made to answer, and"
    ):
        promote(home, "Helper", "v1", by="improve", since="2020-01-01T00:00:00+00:00")
    assert promote(home, "Helper", "v1", by="improve", since="").version == "v1"
    chosen = current(home, "Helper")
    assert chosen
    promote(home, "Helper", "v2")
    with pytest.raises(VersionError, match="v3 is kept but does not answer: v2 was made to answer at 20"):
        promote(home, "Helper", "v3", by="improve", since=chosen.changed)
    rollback(home, "Helper")
    with pytest.raises(VersionError, match="v3 is kept but does not answer: v1 was made to answer at 20"):
        promote(home, "Helper", "v3", by="improve", since=chosen.changed)
    assert len({change.changed for change in history(home, "Helper")}) == 3
    again = current(home, "Helper")
    assert again and promote(home, "Helper", "v3", by="improve", since=again.changed).version == "v3"


def test_a_plan_of_the_second_in_which_something_was_made_to_answer_is_of_after_it(home: Path, base: Path) -> None:
    published(home, base, "one")
    changed = promote(home, "Helper", "v1").changed
    published(home, base, "two", created=changed[:19] + "+00:00")
    assert promote(home, "Helper", "v2", by="improve").version == "v2"


def test_damaged_weights_are_not_rolled_back_to_but_by_force(home: Path, base: Path) -> None:
    first = published(home, base, "one")
    published(home, base, "two")
    promote(home, "Helper", "v1")
    promote(home, "Helper", "v2")
    flip_a_byte(Path(first.folder) / "model" / "model.safetensors")
    told = r"v1 .* is damaged .* model/model.safetensors was changed; .* versions restore Helper v1, .*--force"
    with pytest.raises(VersionDamaged, match=told):
        rollback(home, "Helper")
    assert (current(home, "Helper") or pytest.fail()).version == "v2"
    assert rollback(home, "Helper", force=True).version == "v1"
    promote(home, "Helper", "v2")
    (Path(first.folder) / "version.json").write_text("")
    with pytest.raises(VersionDamaged, match=r"(?s)v1 .* is damaged: .*version\.json.*promote another version"):
        rollback(home, "Helper", force=True)


@pytest.mark.parametrize("content", [b"", b'{"version": "v', b"\xff", None])
def test_where_the_pointer_is_damaged_or_gone_the_last_change_of_the_history_counts(
    home: Path, base: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        published(home, base, name)
        promote(home, "Helper", registry.version_names(home, "Helper")[-1])
    pointer, file = current(home, "Helper"), registry.pointer_file(home, "Helper")
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with (file.parent / "history.jsonl").open("a") as lines:
        lines.write('{"version": "v7')
    assert current(home, "Helper") == pointer and "the last change in the history is" in caplog.text
    assert rollback(home, "Helper").version == "v1"
    assert [change.version for change in history(home, "Helper")] == ["v1", "v2", "v1"]
    caplog.clear()
    assert (current(home, "Helper") or pytest.fail()).version == "v1" and not caplog.text


def test_where_neither_pointer_nor_history_can_be_read_a_promotion_by_hand_mends_it(home: Path, base: Path) -> None:
    published(home, base, "one")
    promote(home, "Helper", "v1")
    registry.pointer_file(home, "Helper").write_bytes(b"")
    (home / "versions" / "helper" / "history.jsonl").write_bytes(b"\x00\n")
    told = r"it is not known which version of agent 'Helper' answers: .*versions promote Helper VERSION"
    for work in (current, history, rollback):
        with pytest.raises(VersionError, match=f"(?s){told}"):
            work(home, "Helper")
    with pytest.raises(VersionError, match=f"(?s){told}"):
        promote(home, "Helper", "v1", by="improve")
    pointer = promote(home, "Helper", "v1")
    assert current(home, "Helper") == pointer and history(home, "Helper") == [pointer]


def test_a_change_that_a_kill_left_in_the_history_alone_did_not_take_place(home: Path, base: Path) -> None:
    for name in ("one", "two"):
        published(home, base, name)
    pointer = promote(home, "Helper", "v1")
    file = registry.pointer_file(home, "Helper")
    before = file.read_bytes()
    promote(home, "Helper", "v2")
    file.write_bytes(before)
    assert current(home, "Helper") == pointer and history(home, "Helper") == [pointer]
    promote(home, "Helper", "v2")
    assert [change.version for change in history(home, "Helper")] == ["v1", "v2"]


def test_a_full_disk_in_a_promotion_leaves_all_as_it_was_or_all_done(
    home: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its waits for the disk fails, in turn; the version is one that the gate refused."""
    published(home, base, "one")
    promote(home, "Helper", "v1")
    version, real, waits = published(home, base, "two", difference=0.0), os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal waits
        waits += 1
        if waits == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    before = snapshot(home / "versions")
    monkeypatch.setattr(os, "fsync", full)
    for failing in range(1, 30):  # noqa: B007 - full reads it
        waits = 0
        try:
            assert promote(home, "Helper", "v2", force=True).version == "v2"
            break
        except OSError:
            assert snapshot(home / "versions") == before
            assert verify(version) == [] and (current(home, "Helper") or pytest.fail()).version == "v1"
    assert failing == 11, "two waits for each of four files, the history, and the pointer's name comes after its bytes"
    found = registry.read_version(home, "Helper", "v2")
    assert found.verdict and found.verdict.forced and verify(found) == []
    assert [change.version for change in history(home, "Helper")] == ["v1", "v2"]


def test_a_place_where_nothing_can_be_written_is_told_plainly(in_tmp: Path, base: Path) -> None:
    run = finished_run(in_tmp / "run", base)
    (in_tmp / ".praisonai").write_text("a file")
    for home in (in_tmp / ".praisonai" / "rl", Path("/proc/rl")):
        told = rf"nothing can be written in '{home}.*make that place writable, or"
        with pytest.raises(VersionError, match=told):
            publish_version(home, "Helper", run)
        with pytest.raises(VersionError, match=told), improvement_lock(home, "Helper"):
            pass
        assert registry.list_agents(home) == [] and current(home, "Helper") is None


def test_a_change_whose_history_a_kill_cut_off_is_in_the_history(home: Path, base: Path) -> None:
    published(home, base, "one")
    published(home, base, "two", difference=0.0)
    promote(home, "Helper", "v1")
    lines = (home / "versions" / "helper" / "history.jsonl").read_text()
    promote(home, "Helper", "v2", force=True)
    (home / "versions" / "helper" / "history.jsonl").write_text(lines + '{"version": "v')
    assert [change.version for change in history(home, "Helper")] == ["v1", "v2"]
    rollback(home, "Helper")
    told = [(change.version, change.forced) for change in history(home, "Helper")]
    assert told == [("v1", False), ("v2", True), ("v1", False)]


def test_many_promote_and_roll_back_at_once_and_the_pointer_stays_whole(home: Path, base: Path) -> None:
    for name in ("one", "two"):
        published(home, base, name)
    promote(home, "Helper", "v1")
    done = threading.Event()
    seen: list[Pointer | None] = []

    def watch() -> None:
        while not done.is_set():
            seen.append(current(home, "Helper"))

    def change(number: int) -> None:
        for turn in range(10):
            promote(home, "Helper", f"v{1 + (number + turn) % 2}")

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(change, range(4)))
    done.set()
    watcher.join()
    assert seen and all(pointer and pointer.version in ("v1", "v2") for pointer in seen)
    changes = history(home, "Helper")
    assert len(changes) == 1 + 4 * 10, "no decision was lost"
    moves = sum(a.version != b.version for a, b in itertools.pairwise(changes))
    assert len(changes[-1].previous) == 1 + moves, "the way back leads through what answered, each time once"


# --- locks ----------------------------------------------------------------------------------------------------------


def test_a_second_improvement_is_told_who_is_at_work_and_a_killed_one_holds_nothing(home: Path) -> None:
    code = f"""
        import time
        from pathlib import Path
        from praison_agent_rl.registry import improvement_lock
        with improvement_lock(Path({str(home)!r}), "Helper"):
            print("held", flush=True)
            time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "held\n"
    told = rf"agent 'Helper' is being improved already, by process {child.pid}, since 20.*; wait for its end"
    with pytest.raises(VersionError, match=told), improvement_lock(home, "Helper"):
        pass
    with improvement_lock(home, "helper"):
        pass  # another agent
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    with (
        improvement_lock(home, "Helper"),
        pytest.raises(VersionError, match=f"by process {os.getpid()}, since"),
        improvement_lock(home, "Helper"),
    ):
        pass
    assert not (home / "versions").exists(), "an improvement that comes to nothing leaves no folder of versions"


def test_a_lock_outlives_no_holder_that_raised(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), locks.locked(tmp_path / "a.lock", refused=RuntimeError):
            raise KeyError("inside")


def test_a_child_of_the_holder_does_not_hold_the_lock(tmp_path: Path) -> None:
    with locks.locked(tmp_path / "a.lock"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        with locks.locked(tmp_path / "a.lock", refused=RuntimeError):
            pass
    finally:
        child.kill()
        child.wait()


# --- hashes of weights ----------------------------------------------------------------------------------------------


def test_the_hash_of_weights_is_of_their_bytes_and_not_of_their_place(in_tmp: Path) -> None:
    one, two = weights_in(in_tmp / "a", b"same"), weights_in(in_tmp / "b", b"same")
    (two / "config.json").write_text('{"model_type": "other"}')
    assert hash_weights(str(one)) == hash_weights(str(two)) != hash_weights(str(weights_in(in_tmp / "c", b"else")))
    single = in_tmp / "w.gguf"
    single.write_bytes((one / "model.safetensors").read_bytes())
    assert hash_weights(str(single)) == hash_weights(str(one))


def test_weights_are_read_once_and_again_when_they_were_changed(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = weights_in(in_tmp / "a", b"one")
    file = model / "model.safetensors"
    first, stamp = hash_weights(str(model)), file.stat()
    reads: list[Path] = []
    from praison_agent_rl import checksums

    monkeypatch.setattr(checksums, "hash_file", lambda path, real=checksums.hash_file: reads.append(path) or real(path))
    assert hash_weights(str(model)) == first and reads == []
    flip_a_byte(file)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # with its old time and size
    assert hash_weights(str(model)) != first and reads == [file]


@pytest.mark.parametrize("source", ["/no/such/folder", "owner/not-in-the-cache", "empty"])
def test_weights_that_are_not_here_are_named(in_tmp: Path, source: str) -> None:
    (in_tmp / "empty").mkdir()
    with pytest.raises(ModelError, match=source):
        hash_weights(source)


# --- killed ---------------------------------------------------------------------------------------------------------

KILLED = """
    import sys
    from pathlib import Path
    from praison_agent_rl.publishing import publish_version
    from praison_agent_rl.registry import promote
    from praison_agent_rl.runs import RunFolder
    home = Path(sys.argv[1])
    print("ready", flush=True)
    for folder in sys.argv[2:]:
        run = RunFolder(folder)
        version = publish_version(home, run.plan.agent, run)
        promote(home, run.plan.agent, version.name, by="improve", force=True)
    print("done", flush=True)
"""


def test_killed_at_any_moment_there_is_the_old_version_or_the_new_one_whole(home: Path, base: Path) -> None:
    """kill -9 at 20 random moments of publishing and promoting; every third version is promoted by force."""
    moments, killed, seconds, rounds = random.Random(4), 0, 2.0, 0
    while killed < 20:
        rounds += 1
        root = home / "runs" / f"{rounds}"
        runs = [finished_run(root / f"{n}", base, difference=0.0 if n == 2 else 0.2) for n in range(3)]
        before = registry.version_names(home, "Helper")
        words = [sys.executable, "-c", textwrap.dedent(KILLED), str(home), *(str(run.root) for run in runs)]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert child.stdout and child.stdout.readline() == "ready\n"
        started = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            child.wait(moments.uniform(0, seconds))
        child.kill()  # SIGKILL; nothing where it has ended by itself
        ended = child.wait(60)
        assert ended in (0, -signal.SIGKILL)
        killed += ended != 0
        if ended == 0:  # that is how long it takes on this machine
            seconds = min(seconds, time.monotonic() - started)
        check_all_is_whole(home, before, runs)
        # and what was interrupted can be done again, as `train --resume` does
        for run in runs:
            version = publish_version(home, "Helper", run)
            assert verify(version) == [] and not run.merged.exists()
    assert len(registry.version_names(home, "Helper")) == rounds * 3, "each run became one version"


def check_all_is_whole(home: Path, before: list[str], runs: list[RunFolder]) -> None:
    versions = registry.list_versions(home, "Helper")
    assert [version.name for version in versions][: len(before)] == before
    for version in versions:
        assert verify(version) == [], version.name
    pointer = current(home, "Helper")
    if pointer and pointer.version:
        answering = registry.read_version(home, "Helper", pointer.version)
        assert registry.model_of(answering).is_dir()
        assert pointer.forced == bool(answering.verdict and answering.verdict.forced)
        assert history(home, "Helper")[-1] == pointer
    published_runs = {version.run for version in versions}
    for run in runs:
        if str(run.root.resolve()) not in published_runs:
            assert (run.merged / "config.json").exists() and (run.merged / "model.safetensors").exists()


def test_amending_is_in_order_wherever_it_is_killed(home: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the writings of a forced promotion is the last one that happens, in turn."""
    from praison_agent_rl import checksums, runs

    version = published(home, base, "one", difference=0.0)
    real, writings = runs.write_bytes, 0

    def counted(path: Path, content: bytes, *, sync: bool = False) -> None:
        nonlocal writings
        if "helper/v1" in str(path):
            writings += 1
            if writings > allowed:
                raise KeyboardInterrupt
        real(path, content, sync=sync)

    monkeypatch.setattr(runs, "write_bytes", counted)
    monkeypatch.setattr(checksums, "write_bytes", counted)
    for allowed in range(10):  # noqa: B007 - counted reads it
        writings = 0
        try:
            promote(home, "Helper", "v1", force=True)
            break
        except KeyboardInterrupt:
            assert verify(version) == []
    assert allowed == 4, "the sums, the verdict, the record, the sums"
    assert registry.read_version(home, "Helper", "v1").verdict.forced and verify(version) == []  # type: ignore[union-attr]


def test_a_record_is_whole_or_not_there_on_a_full_disk(tmp_path: Path) -> None:
    pointer = Pointer(version=None, changed="now", by="rollback")
    write_record(tmp_path / "current.json", pointer, sync=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_record(tmp_path / "current.json", pointer.model_copy(update={"version": "v1"}), sync=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["current.json"]
    assert Pointer.model_validate_json((tmp_path / "current.json").read_text()) == pointer
