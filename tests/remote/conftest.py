"""The other machine, the user's project, and what a run makes where it happens here."""

import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.stages import stages_of
from praison_agent_rl.training.launch import launch_stages
from tests.remote.machine import SSHD, Machine
from tests.remote.tiny_runs import LETTERS, REWARDS, SECRET, planned, results


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The other machine."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd or no ssh; apt-get install openssh-server openssh-client")
    with Machine(tmp_path_factory.mktemp("gpubox")).serving() as serving:
        yield serving


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a reward module that imports another one; one thread, so that equal runs are equal."""
    for name, text in (("scoring.py", REWARDS), ("letters.py", LETTERS)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    yield tmp_path
    for name in ("scoring", "letters"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def at_home(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the same run makes in a child process of this one."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("at_home")
        for name, text in (("scoring.py", REWARDS), ("letters.py", LETTERS)):
            (folder / name).write_text(textwrap.dedent(text))
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        run = planned(folder, tiny_model, "run")
        launch_stages(run, stages_of(run), lambda event: None)
    for name in ("scoring", "letters"):
        sys.modules.pop(name, None)
    return results(run)
