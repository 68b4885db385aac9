"""The environment of a child that computes: from the machine's cores, its limits, and what the user has set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from praison_agent_rl import doctor
from praison_agent_rl.process_settings import (
    Cores,
    child_environment,
    choose_settings,
    describe_cores,
    find_cores,
    too_many_threads,
)

TWO = Cores(logical=2, allowed=2, quota=None, physical=2)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def found(root: Path, allowed: int = 8) -> Cores:
    return find_cores(allowed=frozenset(range(allowed)), sys_root=root / "sys", proc_root=root / "proc")


def values(**options) -> dict[str, str | None]:
    given = {"device": "cpu", "cores": TWO, "given": {}, "system": "Linux", **options}
    return {setting.name: setting.value for setting in choose_settings(**given)}


# --- counting the cores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000"}, 1.5),  # the period is 100000 where none is written
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3.0),  # a limit above binds too
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/only/on/the/host", {"cpu.max": "400000 100000"}, 4.0),  # a container sees its own group as the root
        ("3:cpu,cpuacct:/x\n0::/", {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000",
                                    "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}, 2.5),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("1:cpu:/host/path", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2.0),
        ("", {}, None),
    ],
)  # fmt: skip
def test_the_tightest_quota_of_the_control_groups_is_found(cgroups, files, quota, tmp_path):
    write(tmp_path / "proc/self", {"cgroup": cgroups})
    write(tmp_path / "sys/fs/cgroup", files)
    assert found(tmp_path).quota == quota


def test_two_threads_of_a_core_are_one_physical_core(tmp_path):
    pairs = {f"cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)}
    write(tmp_path / "sys/devices/system/cpu", pairs)
    assert found(tmp_path).physical == 4 and found(tmp_path).usable == 4
    assert found(tmp_path, allowed=2).physical == 2  # numbers 0 and 1 are two cores, of which each has one thread here


def test_a_system_that_says_nothing_is_taken_at_its_affinity(tmp_path):
    cores = found(tmp_path, allowed=6)
    assert (cores.allowed, cores.quota, cores.physical, cores.usable) == (6, None, None, 6)


@pytest.mark.parametrize(
    ("cores", "usable"),
    [
        (Cores(logical=64, allowed=64, quota=2.0, physical=32), 2),
        (Cores(logical=64, allowed=64, quota=2.9, physical=32), 2),
        (Cores(logical=64, allowed=64, quota=0.5, physical=32), 1),
        (Cores(logical=64, allowed=64, quota=None, physical=32), 32),
        (Cores(logical=64, allowed=3, quota=16.0, physical=3), 3),
    ],
)
def test_the_smallest_limit_decides_but_one_core_is_always_there(cores, usable):
    assert cores.usable == usable


def test_the_cores_are_described_with_what_limits_them():
    assert describe_cores(TWO) == "2 usable: 2 logical, 2 physical"
    cores = Cores(logical=64, allowed=8, quota=2.5, physical=8)
    assert describe_cores(cores) == "2 usable: 64 logical, 8 allowed to this process, 8 physical, a quota of 2.5"


# --- what a child gets ----------------------------------------------------------------------------------------------


def test_a_child_on_the_cpu_gets_a_thread_a_core_and_threads_that_soon_sleep():
    assert values() == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def test_nothing_is_set_for_a_gpu():
    assert choose_settings(device="cuda", cores=TWO, given={}) == []


@pytest.mark.parametrize(("processes", "threads"), [(1, "8"), (2, "4"), (3, "2"), (8, "1"), (100, "1")])
def test_processes_of_one_machine_share_its_cores(processes, threads):
    cores = Cores(logical=16, allowed=16, quota=None, physical=8)
    assert values(cores=cores, processes=processes)["OMP_NUM_THREADS"] == threads


def test_what_the_user_has_set_stands():
    mine = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "5"}
    assert values(given=mine) == mine


def test_threads_of_mkl_that_the_user_has_set_leave_those_of_openmp_alone():
    chosen = values(given={"MKL_NUM_THREADS": "3"})
    assert chosen["MKL_NUM_THREADS"] == "3" and "OMP_NUM_THREADS" not in chosen


def test_a_wait_policy_of_the_user_is_not_undone_by_a_spin_count():
    chosen = choose_settings(device="cpu", cores=TWO, given={"OMP_WAIT_POLICY": "ACTIVE"}, system="Linux")
    assert [(setting.name, setting.value) for setting in chosen][-1] == ("GOMP_SPINCOUNT", None)


def test_the_spin_count_of_gnu_openmp_is_for_linux_only():
    assert "GOMP_SPINCOUNT" not in values(system="Darwin")


def test_only_what_is_not_set_yet_is_added_for_a_child(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert set(child_environment(device="cpu")) == {"OMP_NUM_THREADS"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert child_environment(device="cpu") == {}
    assert child_environment(device="cuda") == {}


def test_the_variable_of_mkl_goes_before_that_of_openmp_in_torch():
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DYNAMIC")
    bare = {name: value for name, value in os.environ.items() if name not in names}
    code = "import torch; print(torch.get_num_threads(), torch.backends.mkl.is_available())"
    given = {**bare, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "5", "MKL_DYNAMIC": "FALSE"}
    threads, mkl = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, check=True
    ).stdout.split()
    assert threads == (b"5" if mkl == b"True" else b"3")


# --- doctor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "given", "said"),
    [
        (TWO, {}, None),
        (TWO, {"OMP_NUM_THREADS": "2"}, None),
        (TWO, {"OMP_NUM_THREADS": "8"}, None),  # MKL takes no more than there are physical cores
        (
            TWO,
            {"OMP_NUM_THREADS": "8", "MKL_DYNAMIC": "FALSE"},
            "8 threads on 2 usable cores; set OMP_NUM_THREADS to 2",
        ),
        (Cores(64, 64, 2.0, 32), {"OMP_NUM_THREADS": "48"}, "32 threads on 2 usable cores; set OMP_NUM_THREADS to 2"),
        (
            Cores(64, 64, 2.0, 32),
            {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "6"},
            "6 threads on 2 usable cores; set MKL",
        ),
        (Cores(64, 64, 2.0, 32), {"OMP_NUM_THREADS": "4,2"}, "4 threads on 2 usable cores"),
        (TWO, {"OMP_NUM_THREADS": "many"}, None),  # torch starts what it would without the variable
        (Cores(64, 64, 1.0, 32), {}, "32 threads on 1 usable core; the processes that we start are given 1"),
        (Cores(64, 64, 2.0, None), {}, "64 threads on 2 usable cores"),
    ],
)
def test_more_threads_than_cores_are_warned_of(cores, given, said):
    warning = too_many_threads(cores, given, machine="x86_64")
    assert warning is None if said is None else said in (warning or "")


def test_without_mkl_nothing_caps_the_threads_that_are_asked_for():
    assert "8 threads on 2" in (too_many_threads(TWO, {"OMP_NUM_THREADS": "8"}, machine="aarch64") or "")


def test_doctor_shows_the_settings_and_the_warning(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRAISON_AGENT_RL_DEVICE", "cpu")
    monkeypatch.setattr(doctor, "find_cores", lambda: Cores(logical=64, allowed=64, quota=2.0, physical=32))
    settings, warning = doctor.examine_processes()
    assert settings[0].value == "2" and "quota of 2" in settings[0].why
    assert warning is not None and warning.startswith("torch would start 32 threads on 2 usable cores")
    monkeypatch.setenv("PRAISON_AGENT_RL_DEVICE", "cuda")
    assert doctor.examine_processes() == ([], None)
