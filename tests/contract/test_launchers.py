"""What starts several processes takes the words that it is given, and says which of them ended badly."""

import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args

from praison_agent_rl.config_fields.launching import Launch
from praison_agent_rl.launchers import launch_command
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training import processes
from tests.unit.test_launch import HOST, WORKER
from tests.unit.test_launch_children import planned


def test_torchrun_takes_these_words():
    found = parse_args(launch_command(Launch(nproc=3), WORKER).arguments)
    assert (found.standalone, found.nproc_per_node, found.module) == (True, "3", True)
    assert [found.training_script, *found.training_script_args] == ["praison_agent_rl.child", *WORKER]
    found = parse_args(launch_command(Launch(nproc=4, nodes=2, node_rank=1, rendezvous=HOST), WORKER).arguments)
    assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == ("2", 1, "10.0.0.5", 29500)


def test_accelerate_takes_these_words():
    given = Launch(
        nproc=4, nodes=2, node_rank=1, rendezvous=HOST, sharding="zero3", options=["--mixed_precision", "no"]
    )
    found = launch_command_parser().parse_args(launch_command(given, WORKER).arguments)
    assert (found.num_processes, found.num_machines, found.machine_rank, found.mixed_precision) == (8, 2, 1, "no")
    assert (found.main_process_ip, found.main_process_port, found.module) == ("10.0.0.5", 29500, True)
    assert [found.training_script, *found.training_script_args] == ["praison_agent_rl.child", *WORKER]


@pytest.mark.parametrize(
    ("sharding", "kind"), [("zero1", "DEEPSPEED"), ("zero2", "DEEPSPEED"), ("zero3", "DEEPSPEED"), ("fsdp2", "FSDP")]
)
def test_trl_brings_a_file_for_each_kind_of_sharding(sharding, kind):
    file = Path(launch_command(Launch(nproc=2, sharding=sharding), WORKER).arguments[1])
    assert yaml.safe_load(file.read_text())["distributed_type"] == kind


def started(run: RunFolder, monkeypatch: pytest.MonkeyPatch, codes: dict[int, int], *events: dict[str, Any]) -> int:
    """The exit code of what starts the processes, where those end with ``codes`` after they have told ``events``."""

    def start(launcher: str, arguments: list[str]) -> None:
        for event in events:
            run.report_event(**event)
        if codes:
            failures = {place: ProcessFailure(place, 1, code, "") for place, code in codes.items()}
            raise ChildFailedError("train", failures)

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(sys, "argv", ["processes", str(run.root), "torchrun"])
    try:
        processes.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_what_a_process_said_itself_is_left_as_it_is(tmp_path, monkeypatch):
    run = planned(tmp_path / "run", launch=2)
    run.report_event("failed", kind="TrainingFailed", message="of an earlier attempt")
    assert started(run, monkeypatch, {}) == 0
    assert started(run, monkeypatch, {0: 1}, {"event": "failed", "kind": "DataError", "message": "no pair fits"}) == 1
    assert started(run, monkeypatch, {0: errno.ENOSPC}) == errno.ENOSPC
    failed = [event["message"] for _, event in run.events() if event["event"] == "failed"]
    assert failed == ["of an earlier attempt", "no pair fits"]
