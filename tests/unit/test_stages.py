"""What ends a run on the way is told in one message: a reward that fails, a full disk, rewards of another process."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from praison_agent_rl import stages
from praison_agent_rl.backends import Choice
from praison_agent_rl.errors import ModelError, RewardError, TrainingFailed
from praison_agent_rl.records import Plan, PlannedReward
from praison_agent_rl.runs import RunFolder, now, write_record
from praison_agent_rl.stages import main, planned_rewards, run_stages
from praison_agent_rl.training import launch


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return planned(tmp_path / "run", spec="json:dumps")


def planned(root: Path, spec: str | None) -> RunFolder:
    made = RunFolder.create(root)
    reward = PlannedReward(spec=spec, name="judge", weight=1.0, prompts="text", completions="text")
    plan = Plan(base="owner/name", config={}, rewards=[reward], device="cpu", notes=[], libraries={}, created=now())
    write_record(made.plan_file, plan)
    return made


def failing_with(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setitem(stages._STAGES, "train", fail)


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
]


def test_a_reward_that_fails_in_training_is_a_failed_run(run, monkeypatch):
    failing_with(monkeypatch, RewardError("reward 'judge' failed: OSError: no answer"))
    with pytest.raises(TrainingFailed, match="reward 'judge' failed: OSError: no answer"):
        run_stages(run, ["train"], [])


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_a_full_disk_is_told_as_such_whoever_met_it(run, monkeypatch, error):
    failing_with(monkeypatch, error)
    with pytest.raises(TrainingFailed, match=r"the disk that '.*run' is on is full \(stage train\); make room"):
        run_stages(run, ["train"], [])


def test_other_errors_stay_what_they_are(run, monkeypatch):
    for error in (ModelError("no weights"), KeyError("x"), OSError(errno.EACCES, "no")):
        failing_with(monkeypatch, error)
        with pytest.raises(type(error)):
            run_stages(run, ["train"], [])


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_a_child_that_cannot_even_report_ends_with_a_code_that_says_so(run, monkeypatch, error):
    failing_with(monkeypatch, error)
    report = RunFolder.report_event

    def full(self, event, **facts):
        if event == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        report(self, event, **facts)

    monkeypatch.setattr(RunFolder, "report_event", full)
    monkeypatch.setattr(sys, "argv", ["stages", str(run.root), "train"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == errno.ENOSPC


def ended(run, monkeypatch, code: int, log: str = "", **outcome) -> Exception:
    """What the parent makes of a child that wrote ``log``, reported ``outcome`` and ended with ``code``."""

    def start(module, words, *, log, env=None):
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], stdin=subprocess.PIPE)

    run.log.write_text(log)
    if outcome:
        run.report_event("failed", **outcome)
    monkeypatch.setattr(launch, "start_child", start)
    run_events = run.events
    monkeypatch.setattr(run, "events", lambda start=0: run_events(0) if start == run.events_file.stat().st_size else ())
    with pytest.raises(Exception) as caught:
        launch.launch_stages(run, ["train"], lambda event: None)
    return caught.value


@pytest.mark.parametrize(("code", "log"), [(errno.ENOSPC, ""), (1, "Traceback\nOSError: No space left on device\n")])
def test_the_parent_tells_a_full_disk_without_a_traceback(tmp_path, monkeypatch, code, log):
    run = planned(tmp_path / "run", "json:dumps")
    run.events_file.write_text("")
    error = ended(run, monkeypatch, code, log)
    assert isinstance(error, TrainingFailed) and "is on is full; make room there" in str(error)
    assert "Traceback" not in str(error) and f"--resume {run.root}" in str(error)


@pytest.mark.parametrize(
    ("kind", "type_", "hint"),
    [
        ("RewardError", TrainingFailed, True),
        ("TrainingFailed", TrainingFailed, True),
        ("ModelError", ModelError, False),
    ],
)
def test_what_the_child_reports_is_raised_with_where_the_log_is_if_a_run_failed(
    tmp_path, monkeypatch, kind, type_, hint
):
    error = ended(planned(tmp_path / "run", "json:dumps"), monkeypatch, 1, kind=kind, message="it said no")
    assert type(error) is type_ and str(error).startswith("it said no")
    assert ("--resume" in str(error) and "log.txt" in str(error)) == hint


@pytest.mark.parametrize("by", ["the child", "this process"])
def test_the_back_end_is_opened_once_and_before_rewards_are_looked_for(run, monkeypatch, by):
    done: list[str] = []
    monkeypatch.setattr(stages, "open_backend", lambda config, device: done.append("open") or Choice("other", "why"))
    monkeypatch.setattr(stages, "planned_rewards", lambda run: done.append("rewards") or [])
    monkeypatch.setitem(stages._STAGES, "train", lambda *_: done.append("train"))
    if by == "the child":
        monkeypatch.setattr(sys, "argv", ["stages", str(run.root), "train"])
        main()
        assert done == ["open", "rewards", "train"]
    else:
        run_stages(run, ["train"], [])
        assert done == ["open", "train"]
    assert [event["text"] for _, event in run.events() if event["event"] == "note"] == ["back end: other (why)"]


def test_rewards_that_lived_in_another_process_are_told_as_such(tmp_path):
    run = planned(tmp_path / "run", spec=None)
    with pytest.raises(RewardError, match="its rewards judge lived only in the process that started it"):
        planned_rewards(run)
