"""What differs between versions, what is thinned out, and what is kept because somebody needs it."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl import registry, upkeep
from praison_agent_rl.checksums import SUMS
from praison_agent_rl.errors import ConfigError, VersionDamaged, VersionError
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.records import Plan, Version
from praison_agent_rl.registry import current, improvement_lock, promote, rollback, verify
from praison_agent_rl.report import write_report
from praison_agent_rl.runs import RunFolder, read_record, write_record
from praison_agent_rl.upkeep import diff, promote_run, prune, restore
from tests.finished_runs import finished_run, flip_a_byte, snapshot, weights_in


@pytest.fixture
def home(in_tmp: Path) -> Path:
    return in_tmp / ".praisonai" / "rl"


@pytest.fixture
def base(in_tmp: Path) -> Path:
    return weights_in(in_tmp / "base", b"the base")


def chain(home: Path, base: Path, length: int) -> list[Version]:
    """Versions that were each trained on the one before and made to answer."""
    made: list[Version] = []
    for number in range(1, length + 1):
        on = Path(made[-1].folder) / "model" if made else base
        parent = made[-1].name if made else None
        run = finished_run(home / "runs" / f"r{number}", on, parent=parent)
        made.append(publish_version(home, "Helper", run))
        promote(home, "Helper", made[-1].name)
    return made


def with_weights(home: Path) -> list[str]:
    return [v.name for v in registry.list_versions(home, "Helper") if (Path(v.folder) / "model").is_dir()]


# --- differences ----------------------------------------------------------------------------------------------------


def test_two_versions_differ_in_what_was_changed_and_in_nothing_else(home: Path, base: Path) -> None:
    config = {"learning_rate": 1e-5, "lora": {"r": 8, "alpha": 16}}
    one = publish_version(home, "Helper", finished_run(home / "runs" / "one", base, config=config))
    same = publish_version(home, "Helper", finished_run(home / "runs" / "same", base, config=config))
    assert diff(one, same) == {}
    changed = {"learning_rate": 1e-4, "lora": {"r": 8, "alpha": 32}, "beta": 0.1}
    run = finished_run(
        home / "runs" / "two", weights_in(base.with_name("other"), b"x"), config=changed, difference=0.3, parent="v1",
        libraries={"python": "3.y"},
    )  # fmt: skip
    (run.root / "train.jsonl").write_text('{"prompt": "one"}\n')
    (run.merged / "chat_template.jinja").write_text("another")
    two = publish_version(home, "Helper", run)
    found = diff(one, two)
    assert found["config.learning_rate"] == (1e-5, 1e-4) and found["config.lora.alpha"] == (16, 32)
    assert found["config.beta"] == (None, 0.1) and found["parent"] == (None, "v1")
    assert found["data.train.rows"] == (3, 1) and found["library python"] == ("3.x", "3.y")
    assert found["result total"] == ("0.5 -> 0.7 (+0.1..+0.3)", "0.5 -> 0.8 (+0.2..+0.4)")
    assert found["base hash"] == (one.base_hash, two.base_hash)
    assert found["template"] == (one.template_hash, two.template_hash)
    assert found.keys() == {
        "base", "base hash", "parent", "template", "config.learning_rate", "config.lora.alpha", "config.beta",
        "data.train.rows", "data.train.sha256", "result total", "result letters", "library python",
    }  # fmt: skip


# --- thinning out ---------------------------------------------------------------------------------------------------


def test_what_answers_the_steps_back_and_the_base_of_the_oldest_keep_their_weights(home: Path, base: Path) -> None:
    chain(home, base, 7)
    done = prune(home, "Helper", 2)
    assert done.removed == ["v1", "v2", "v3"]
    assert done.kept == {
        "v4": "v5 was trained on it", "v5": "on the way back", "v6": "on the way back", "v7": "it answers",
    }  # fmt: skip
    assert with_weights(home) == ["v4", "v5", "v6", "v7"] and done.freed > 3 * 2000
    assert [verify(version) for version in registry.list_versions(home, "Helper")] == [[]] * 7
    assert prune(home, "Helper", 2).removed == []
    assert not [path for path in (home / "versions" / "helper").iterdir() if path.name.startswith(".pruned-")]
    old = registry.read_version(home, "Helper", "v1")
    assert (Path(old.folder) / "adapter" / "adapter_model.safetensors").exists()


def test_one_step_back_is_kept_whatever_is_asked(home: Path, base: Path) -> None:
    for number in range(3):
        publish_version(home, "Helper", finished_run(home / "runs" / f"{number}", base))
        promote(home, "Helper", f"v{number + 1}")
    assert prune(home, "Helper", 0).removed == ["v1"]
    assert rollback(home, "Helper").version == "v2"
    with pytest.raises(VersionError, match=r"weights of v1 .* not there any more; .* versions restore 'Helper' v1"):
        rollback(home, "Helper")
    assert (current(home, "Helper") or pytest.fail()).version == "v2"
    with pytest.raises(VersionError, match="not there any more"):
        promote(home, "Helper", "v1")


def test_what_could_not_be_made_again_is_kept(home: Path, base: Path) -> None:
    other = weights_in(base.with_name("other"), b"another base")
    for number, on in enumerate([base, other, base, base, base]):
        publish_version(home, "Helper", finished_run(home / "runs" / f"{number}", on))
    first = registry.read_version(home, "Helper", "v1")
    flip_a_byte(Path(first.folder) / "adapter" / "adapter_model.safetensors")
    flip_a_byte(other / "model.safetensors")
    done = prune(home, "Helper", 1)
    assert done.removed == ["v3", "v4"]
    assert done.kept["v1"] == "it is damaged: adapter/adapter_model.safetensors was changed"
    assert "is not what v2 was trained on" in done.kept["v2"] and done.kept["v5"] == "one of the newest 1"
    shutil.rmtree(base)
    publish_version(home, "Helper", finished_run(home / "runs" / "late", base.with_name("gone")))
    done = prune(home, "Helper", 0)
    assert done.removed == [] and "there are no weights" in done.kept["v5"]
    assert done.kept["v6"] == "the hash of its base is not known"


def test_the_base_of_a_run_that_is_not_finished_is_kept(home: Path, base: Path) -> None:
    first, *_ = chain(home, base, 1)
    for number in range(2):
        publish_version(home, "Helper", finished_run(home / "runs" / f"{number}", base))
        promote(home, "Helper", f"v{number + 2}")
    (home / "runs" / "odd").mkdir()
    (home / "runs" / "odd" / "plan.json").write_text("of another time")
    run = finished_run(home / "runs" / "going-on", Path(first.folder) / "model", parent="v1")
    run.comparison_file.unlink()
    assert prune(home, "Helper", 1).kept["v1"] == "a run that is not finished trains on it"
    shutil.rmtree(run.root)
    assert prune(home, "Helper", 1).removed == ["v1"]


def test_nothing_is_thinned_out_while_the_agent_is_improved(home: Path, base: Path) -> None:
    chain(home, base, 3)
    with improvement_lock(home, "Helper"), pytest.raises(VersionError, match="is being improved already"):
        prune(home, "Helper", 0)
    with pytest.raises(ConfigError, match="keep is -1"):
        prune(home, "Helper", -1)
    assert prune(home, "Nobody", 0).removed == [] and not (home / "versions" / "nobody").exists()


@pytest.mark.parametrize("moment", ["before the renaming", "after the renaming"])
def test_a_pruning_that_is_killed_leaves_the_version_in_order(
    home: Path, base: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        publish_version(home, "Helper", finished_run(home / "runs" / f"{number}", base))

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    name = "rename" if moment == "before the renaming" else "rmtree"
    with monkeypatch.context() as patch:
        patch.setattr(upkeep.os if name == "rename" else upkeep.shutil, name, killed)
        with pytest.raises(KeyboardInterrupt):
            prune(home, "Helper", 2)
    version = registry.read_version(home, "Helper", "v1")
    assert verify(version) == []
    assert (Path(version.folder) / "model").is_dir() == (moment == "before the renaming")
    prune(home, "Helper", 2)
    assert with_weights(home) == ["v2", "v3"] and verify(version) == []
    assert json.loads((Path(version.folder) / SUMS).read_text())["pruned"].keys() == {
        "model/config.json", "model/model.safetensors", "model/chat_template.jinja",
    }  # fmt: skip
    assert not list((home / "versions" / "helper").glob(".pruned-*"))


def test_weights_that_are_there_and_in_order_are_not_made_again(home: Path, base: Path) -> None:
    version, *_ = chain(home, base, 1)
    folder = Path(version.folder)
    stamp = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    assert restore(home, "Helper", "v1") == registry.read_version(home, "Helper", "v1")
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == stamp


def test_another_base_is_refused_with_both_hashes_before_anything_is_loaded(home: Path, base: Path) -> None:
    version, *_ = chain(home, base, 1)
    shutil.rmtree(Path(version.folder) / "model")
    flip_a_byte(base / "model.safetensors")
    from praison_agent_rl.checksums import hash_weights

    found = hash_weights(str(base))
    with pytest.raises(VersionError, match=rf"is not what v1 was trained on: .*{found}.*{version.base_hash}"):
        restore(home, "Helper", "v1")
    with pytest.raises(VersionError, match=str(version.base_hash)):
        upkeep.check_base(version, str(base))
    flip_a_byte(base / "model.safetensors")
    upkeep.check_base(version, str(base))


def test_a_damaged_adapter_is_not_merged(home: Path, base: Path) -> None:
    version, *_ = chain(home, base, 1)
    flip_a_byte(Path(version.folder) / "adapter" / "adapter_model.safetensors")
    shutil.rmtree(Path(version.folder) / "model")
    with pytest.raises(VersionDamaged, match=r"adapter_model\.safetensors was changed"):
        restore(home, "Helper", "v1")


@pytest.mark.parametrize("keep", [3, 4, 5, 99])
def test_what_is_to_be_kept_is_kept_however_many_are_asked_for(home: Path, base: Path, keep: int) -> None:
    for number in range(3):
        publish_version(home, "Helper", finished_run(home / "runs" / f"{number}", base))
    assert prune(home, "Helper", keep).removed == [] and with_weights(home) == ["v1", "v2", "v3"]


def test_what_is_made_to_answer_while_it_is_looked_at_keeps_its_weights(
    home: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        publish_version(home, "Helper", finished_run(home / "runs" / f"{number}", base))
    real = upkeep._cannot_be_made

    def slow(where: Path, agent: str, version: Version) -> str | None:
        if version.name == "v1":
            promote(where, agent, "v1")
        return real(where, agent, version)

    monkeypatch.setattr(upkeep, "_cannot_be_made", slow)
    done = prune(home, "Helper", 0)
    assert done.removed == ["v2", "v3"] and done.kept == {"v1": "it answers"}


def test_pruning_and_promoting_at_once_never_leave_an_answering_version_without_weights(home: Path, base: Path) -> None:
    for turn in range(8):
        agent = f"A{turn}"
        for number in range(4):
            run = finished_run(home / "runs" / f"{agent}-{number}", base, agent=agent)
            publish_version(home, agent, run)
        promote(home, agent, "v4")

        def by_hand(agent: str = agent) -> None:
            with suppress(VersionError, VersionDamaged):  # where its weights went first
                promote(home, agent, "v1")

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(prune, home, agent, 0), pool.submit(by_hand)]:
                done.result()
        pointer = current(home, agent)
        assert pointer and pointer.version and registry.model_of(registry.read_version(home, agent, pointer.version))


def test_what_cannot_be_read_of_a_version_is_told_where_versions_are_compared(home: Path, base: Path) -> None:
    one, two = chain(home, base, 2)
    (Path(two.folder) / "data.json").write_text("{")
    with pytest.raises(VersionDamaged, match=r"v2/data\.json' cannot be read.*versions verify"):
        diff(one, two)


# --- by hand --------------------------------------------------------------------------------------------------------


def test_a_run_that_was_not_better_becomes_a_version_by_force_alone(home: Path, base: Path) -> None:
    run = finished_run(home / "runs" / "one", base, difference=0.0)
    with pytest.raises(VersionError, match=r"was not let through by the gate \(not better\); --force"):
        promote_run(home, run)
    assert registry.version_names(home, "Helper") == [] and run.merged.exists()
    pointer = promote_run(home, run, force=True)
    assert (pointer.version, pointer.forced) == ("v1", True)
    version = registry.read_version(home, "Helper", "v1")
    assert version.verdict and version.verdict.forced and verify(version) == []
    again = promote_run(home, run, force=True)
    assert again.model_copy(update={"changed": pointer.changed}) == pointer, "a second time changes nothing"
    assert again.changed > pointer.changed, "two decisions in one second are told apart"


def test_a_run_of_no_agent_and_one_that_was_not_judged_are_refused(home: Path, base: Path) -> None:
    run = finished_run(home / "runs" / "one", base)
    write_record(run.plan_file, read_record(run.plan_file, Plan).model_copy(update={"agent": None}))
    with pytest.raises(VersionError, match="was of a model and of no agent"):
        promote_run(home, run)
    assert promote_run(home, run, agent="Other").version == "v1" and registry.list_agents(home) == ["Other"]
    late = finished_run(home / "runs" / "two", base)
    late.comparison_file.unlink()
    with pytest.raises(VersionError, match=r"was not judged; go on with it: .*--resume"):
        promote_run(home, late, force=True)


def test_the_folder_of_a_version_is_no_run_and_nothing_of_it_is_touched(home: Path, base: Path) -> None:
    version, *_ = chain(home, base, 1)
    before = snapshot(home)
    told = r"is version v1 of agent 'Helper'; to let it answer, name it: praison-agent-rl versions promote Helper v1"
    with pytest.raises(ConfigError, match=told):
        RunFolder.open(Path(version.folder))
    with pytest.raises(ConfigError, match=told):
        promote_run(home, RunFolder(version.folder))
    (Path(version.folder) / "version.json").write_text("{")
    with pytest.raises(ConfigError, match="is version v1 of agent 'helper'"):
        RunFolder.open(Path(version.folder))
    (Path(version.folder) / "version.json").write_bytes(before["versions/helper/v1/version.json"])
    assert snapshot(home) == before


def test_the_report_of_what_was_promoted_by_force_says_so(home: Path, base: Path) -> None:
    run = finished_run(home / "runs" / "one", base, difference=0.0)
    for side in ("base", "new"):
        run.answers(side).unlink()
    write_report(run)
    version = publish_version(home, "Helper", run)
    report = RunFolder(version.folder).report
    before = report.read_text()
    promote(home, "Helper", "v1", force=True)
    after = report.read_text()
    assert "force" not in before.split("<body")[1].lower() and "force" in after.split("<body")[1].lower()
    assert verify(version) == []
