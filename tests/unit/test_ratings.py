"""Feedback goes where its run was recorded, is masked as that was, and what cannot be said is refused."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import praison_agent_rl as rl
from praison_agent_rl import capture
from praison_agent_rl.errors import ConfigError, DataError
from praison_agent_rl.transcripts import read_runs
from praison_agent_rl.transcripts.run_ids import RunId, find_run
from tests.fakes import FakeServer, build_agent
from tests.unit.test_recorded_calls import BLANK

ANN, BOB, EVE = "ann@mail.example", "bob@mail.example", "eve@mail.example"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, in_tmp: Path, server_a: FakeServer) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_BASE_URL", server_a.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key-a")
    yield
    for recording in capture.open_recordings():
        recording.stop()


@pytest.fixture
def agent(server_a: FakeServer) -> Any:
    return build_agent("environment", server_a.url)


def in_another_process(code: str) -> str:
    """Run where nothing is known of the run but what is on the disk."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def corrections(store: str) -> list[str | None]:
    return [said.correction for run in read_runs(store) for said in run.feedback]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    "form", [lambda run: run, str, lambda run: next(r for r in read_runs(run.store) if r.id == run)]
)
def test_feedback_goes_to_the_store_of_the_run_also_from_another_folder(form, stopped, agent, tmp_path, monkeypatch):
    recording = agent.record(store="kept")
    agent.chat("hello")
    if stopped:
        recording.stop()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    rl.feedback(form(agent.last_run), score=1)
    (run,) = read_runs(recording.store)
    assert [said.score for said in run.feedback] == [1.0] and not (tmp_path / "elsewhere/.praisonai").exists()
    assert len(list(recording.store.iterdir())) == 1


def test_an_id_knows_its_store_and_is_a_text_otherwise(agent):
    assert agent.last_run is None
    with agent.record(store="kept"):
        agent.chat("hello")
    (run,) = read_runs("kept")
    assert agent.last_run == run.id and agent.last_run.store == run.id.store == Path("kept").absolute()
    for other in (copy.deepcopy(agent.last_run), pickle.loads(pickle.dumps(agent.last_run))):
        assert (other, other.store, type(other)) == (run.id, run.id.store, RunId)
    assert f'"{run.id}"' in run.model_dump_json() and {run.id: 1}[str(agent.last_run)] == 1


def test_a_run_that_is_in_no_file_of_the_store_is_refused(agent):
    with agent.record(store="kept"):
        agent.chat("hello")
    for run, more in (("no such run", {}), ("0" * 16, {"store": "kept"}), (agent.last_run, {"store": "other"})):
        with pytest.raises(DataError, match="is in no file of the store"):
            rl.feedback(run, score=1, **more)
    assert not Path("other").exists() and not Path(".praisonai").exists()


@pytest.mark.parametrize(
    "said",
    [
        {"run": None, "score": 1},
        {"run": 5, "score": 1},
        {"run": "", "score": 1},
        {"label": 5},
        {"correction": {"a": 1}},
        *({"correction": blank, "score": 1} for blank in BLANK),
        {"score": "1"},
        {"score": 10**400},
        {"score": 10**5000},
        {"score": float("inf")},
        {"score": 1j},
        {},
    ],
)
def test_what_cannot_be_said_is_refused(said, agent):
    with agent.record(store="kept"):
        agent.chat("hello")
    with pytest.raises(DataError):
        rl.feedback(**{"run": agent.last_run, **said})
    assert [run.feedback for run in read_runs("kept")] == [[]]
    with pytest.raises(ConfigError, match="is no redactor"):
        rl.feedback(agent.last_run, score=1, redact=5)


def test_in_the_process_of_the_recording_a_placeholder_is_that_of_the_run(agent):
    with agent.record(store="kept", redact="personal"):
        agent.chat(f"Write to {ANN} and {BOB}")
        rl.feedback(agent.last_run, correction=f"{BOB}, not {EVE}")
    rl.feedback(agent.last_run, correction=f"{EVE}: {ANN}")
    assert corrections("kept") == ["<EMAIL_2>, not <EMAIL_3>", "<EMAIL_3>: <EMAIL_1>"]


def test_in_another_process_a_placeholder_is_none_of_the_run_and_the_recordings_masks_hold(agent):
    with agent.record(store="kept", redact="personal"):
        agent.chat(f"Write to {ANN} and {BOB}")
    for run in (f"{str(agent.last_run)!r}, store='kept'", "next(rl.read_runs('kept'))"):
        in_another_process(f"import praison_agent_rl as rl; rl.feedback({run}, correction='{BOB}, not {EVE}')")
    assert corrections("kept") == ["<EMAIL_3>, not <EMAIL_4>", "<EMAIL_5>, not <EMAIL_6>"]


def test_a_run_is_sought_in_all_files_of_a_store(agent):
    for prompt in ("one", "two"):
        with agent.record(store="kept"):
            agent.chat(prompt)
    runs = [run.id for run in read_runs("kept")]
    path = next(Path("kept").iterdir())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]))
    path.with_name("2999-01-01-1-00000f.jsonl").write_text("".join([lines[0], *lines[4:]]))
    assert [find_run(Path("kept"), run, briefly=briefly) is None for run in runs for briefly in (True, False)] == [
        False
    ] * 4
    assert find_run(Path("kept"), runs[0][:-1]) is None and find_run(Path("none"), runs[0]) is None
