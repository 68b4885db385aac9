"""Several processes that train: what ``launch`` may say, what is checked before, and how they are started."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import praison_agent_rl
from praison_agent_rl import launchers
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_fields.launching import Launch
from praison_agent_rl.errors import ConfigError, MissingExtra
from praison_agent_rl.estimate import count_steps
from praison_agent_rl.launchers import NODE_VARIABLES, check_launch, launch_command, launch_of, node_of

HOST = "10.0.0.5:29500"


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster, and eight GPUs."""
    for name in (*NODE_VARIABLES, "SLURM_NNODES", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


def loaded(**keys: Any) -> TrainConfig:
    return TrainConfig.load(keys, need_model=False, need_data=False)


def problems(config: TrainConfig, device: str = "cpu", **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_launch(config, device=device, **options)
    return str(caught.value).splitlines()


# --- the key ----------------------------------------------------------------------------------------------------------


def test_a_number_alone_says_how_many_processes():
    assert loaded(launch=4).launch == loaded(launch={"nproc": "4"}).launch == Launch(nproc=4)
    assert loaded(launch={"nproc": 4, "nodes": 2}).launch.processes == 8


def test_what_is_said_comes_back_from_the_plan_of_a_run():
    given = {"nproc": 2, "nodes": 2, "node_rank": 1, "rendezvous": HOST, "options": ["--shutdown-timeout", "300"]}
    config = loaded(launch=given, output_dir="runs/one")
    assert TrainConfig.load(config.resolved(), need_model=False, need_data=False).launch == config.launch
    assert "launch" not in loaded().resolved()


@pytest.mark.parametrize("given", [{"nproc": 0}, {"nprocs": 2}, {"sharding": "zero9"}, "many", 0, -1, 2.5, [2], True])
def test_what_it_cannot_be_is_told_by_its_name(given):
    with pytest.raises(ConfigError, match="launch"):
        loaded(launch=given)


def test_one_process_without_sharding_is_an_ordinary_run():
    assert launch_of(loaded()) is None and launch_of(loaded(launch=1)) is None
    assert launch_of(loaded(launch={"sharding": "zero2"})) is not None  # one process that offloads, say


@pytest.mark.parametrize("name", NODE_VARIABLES)
def test_slurm_and_kubernetes_say_which_machine_this_is_and_the_file_goes_first(name, monkeypatch):
    several = Launch(nproc=1, nodes=4)
    assert node_of(several) == 0
    monkeypatch.setenv(name, "3")
    assert node_of(several) == 3
    assert node_of(several.model_copy(update={"node_rank": 1})) == 1
    assert node_of(Launch(nproc=4)) == 0  # of one machine, which Slurm may call its third


# --- what is checked --------------------------------------------------------------------------------------------------


def accelerate_file(folder: Path, **values: Any) -> str:
    facts = {"distributed_type": "MULTI_GPU", "num_processes": 2, **values}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(facts))
    return str(folder / "accelerate.yaml")


def test_what_is_sound_passes(in_tmp):
    check_launch(loaded(), device="cpu")
    check_launch(loaded(launch=2), device="cpu")
    several = {"nproc": 2, "nodes": 2, "node_rank": 0, "rendezvous": HOST}
    check_launch(loaded(launch=several, output_dir="runs/one"), device="cuda")
    check_launch(loaded(launch={"nproc": 2, "sharding": "fsdp2"}), device="cuda")
    given = {"nproc": 2, "accelerate_config": accelerate_file(in_tmp)}
    check_launch(loaded(launch=given), device="cuda")


@pytest.mark.parametrize(
    ("keys", "device", "said"),
    [
        (
            {"launch": {"nproc": 2, "sharding": "zero2"}},
            "cpu",
            "`accelerate launch` starts one process and says nothing",
        ),
        ({"launch": {"nproc": 2}, "rollout": "agent"}, "cpu", "rollout: agent needs one process"),
        ({"launch": 2, "sampler": "vllm"}, "cuda", "needs a server that runs already"),
        ({"launch": 2}, "cuda:1", "PRAISON_AGENT_RL_DEVICE is 'cuda:1', but several processes take a GPU each"),
        (
            {"launch": 3, "generation_batch_size": 16, "per_device_train_batch_size": 8},
            "cpu",
            "generation_batch_size 16 is what 3 processes sample together, and gives each no whole groups of 8 in "
            "micro-batches of 8; set it to 24",
        ),
        (
            {"launch": {"nproc": 2, "sharding": "fsdp2"}, "load_in_4bit": True},
            "cuda",
            "load_in_4bit cannot be split over processes",
        ),
        (
            {
                "launch": {"nproc": 2, "sharding": "fsdp2"},
                "sampler": "vllm",
                "vllm_server_base_url": "http://h:1",
            },
            "cuda",
            "ZeRO-3 and FSDP leave none that does",
        ),
        ({"launch": {"nproc": 2, "sharding": "fsdp2"}, "warm_start": 3}, "cuda", "warm_start needs whole weights"),
        (
            {"launch": {"nproc": 2, "sharding": "fsdp2"}, "rollout": "tools", "tools": ["math:sqrt"]},
            "cuda",
            "all processes must sample at the same time",
        ),
    ],
)
def test_what_cannot_be_is_one_line(keys, device, said):
    (line,) = problems(loaded(**keys), device)
    assert said in line


def test_all_that_is_wrong_of_several_machines_is_said_at_once(monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "4")
    lines = problems(loaded(launch={"nproc": 2, "nodes": 2, "rendezvous": "here"}))
    assert len(lines) == 4
    assert "nothing says which of them this machine is; give node_rank, 0 to 1" in lines[0]
    assert "launch.nodes is 2, but Slurm gave 4 machines (SLURM_NNODES)" in lines[1]
    assert "launch.rendezvous is 'here'; give host:port of machine 0" in lines[2]
    assert "output_dir must be given: a folder that all machines see" in lines[3]
    (line,) = problems(loaded(launch={"nodes": 4, "node_rank": 4, "rendezvous": HOST}, output_dir="runs/x"))
    assert line == "launch.node_rank is 4, but must be 0 to 3 (nodes is 4)"


@pytest.mark.parametrize(
    "where", ["10.0.0.5", ":29500", "10.0.0.5:0", "10.0.0.5:65536", "10.0.0.5:-1", "tcp://10.0.0.5:29500"]
)
def test_machines_meet_at_a_host_and_a_port_that_there_are(where):
    several = {"nproc": 2, "nodes": 2, "node_rank": 0, "rendezvous": where}
    (line,) = problems(loaded(launch=several, output_dir="runs/one"))
    assert line == f"launch.rendezvous is {where!r}; give host:port of machine 0, such as 10.0.0.5:29500"


def test_so_they_do_where_the_environment_says_it(monkeypatch):
    several = {"nproc": 2, "nodes": 2, "node_rank": 0}
    (line,) = problems(loaded(launch=several, output_dir="runs/one"))
    assert "launch.rendezvous is missing, and MASTER_ADDR is not set" in line
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.5")
    check_launch(loaded(launch=several, output_dir="runs/one"), device="cpu")
    monkeypatch.setenv("MASTER_PORT", "99999")
    (line,) = problems(loaded(launch=several, output_dir="runs/one"))
    assert "launch.rendezvous is '10.0.0.5:99999'" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nproc-per-node", "4"], "has '--nproc-per-node', which nproc says; give launch.nproc instead"),
        (["--nproc_per_node=4"], "which nproc says"),
        (["--nnodes", "1:4"], "which nodes says"),
        (["--node-rank=1"], "which node_rank says"),
        (["--master_port", "1"], "which rendezvous says"),
        (["--num_processes", "4"], "which nproc says"),
        (["--config_file", "x"], "which accelerate_config says"),
        (["--nproc", "4"], "which nproc says"),  # argparse takes beginnings of names
        (["--max-restarts", "3"], "processes that are started again would begin anew"),
    ],
)
def test_options_do_not_go_before_the_keys_in_silence(options, said):
    (line,) = problems(loaded(launch={"nproc": 2, "options": options}))
    assert said in line
    sound = ["--shutdown-timeout", "600", "--mixed_precision", "no", "--log-dir", "max-restarts", "--role", "x"]
    check_launch(loaded(launch={"nproc": 2, "options": sound}), device="cpu")


def test_rewards_without_a_name_cannot_be_found_by_other_processes():
    (line,) = problems(loaded(launch=2), nameable=False)
    assert "cannot find a reward that is a lambda" in line


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (line,) = problems(loaded(launch=4), "cuda")
    assert line == "launch.nproc is 4, but this machine shows 2 GPUs; lower it to 2"
    check_launch(loaded(launch=2), device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,-1,1")  # CUDA reads no further
    (line,) = problems(loaded(launch=2), "cuda")
    assert "shows 1 GPUs" in line


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_processes": 8}, "num_processes is 8, but launch starts 2 (nproc 2 x nodes 1); make them equal"),
        ({"distributed_type": "NO"}, "distributed_type is 'NO', by which one process would start"),
        ({"distributed_type": "MULTI_CPU"}, "distributed_type is 'MULTI_CPU', by which one process would start"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "fsdp_version is 1, but must be 2"),
    ],
)
def test_a_file_of_accelerate_that_would_start_something_else_is_refused(in_tmp, values, said):
    given = {"nproc": 2, "accelerate_config": accelerate_file(in_tmp, **values)}
    (line,) = problems(loaded(launch=given), "cuda")
    assert said in line and "accelerate.yaml" in line


def test_a_file_of_accelerate_that_cannot_be_read_is_told(in_tmp):
    (line,) = problems(loaded(launch={"nproc": 2, "accelerate_config": "nowhere.yaml"}), "cuda")
    assert "there is no such file" in line
    (in_tmp / "list.yaml").write_text("- one\n")
    (line,) = problems(loaded(launch={"nproc": 2, "accelerate_config": "list.yaml"}), "cuda")
    assert "is no file of `accelerate config`" in line
    both = {"nproc": 2, "sharding": "fsdp2", "accelerate_config": accelerate_file(in_tmp)}
    (line,) = problems(loaded(launch=both), "cuda")
    assert "both say what is shared out; keep one of them" in line


def test_deepspeed_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install deepspeed"):
        check_launch(loaded(launch={"nproc": 2, "sharding": "zero3"}), device="cuda")


@pytest.mark.parametrize(
    ("given", "split", "device"),
    [
        ({"sharding": "zero2"}, False, "cuda"),
        ({"sharding": "zero3"}, True, "cuda"),
        ({"sharding": "fsdp2"}, True, "cpu"),
        ({}, False, "cuda"),
    ],
)
def test_where_weights_are_loaded_and_whether_they_are_split(given, split, device):
    config = loaded(launch={"nproc": 2, **given})
    assert launchers.splits_weights(config.launch) == split
    assert launchers.loading_device(config, "cuda") == device


@pytest.mark.parametrize(
    ("values", "sharding"),
    [
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, "zero3"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": "2"}}, "zero2"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "zero3"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "gone.json"}}, None),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": "ds.json"}, None),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": "2"}}, "fsdp2"),
        ({"distributed_type": "FSDP", "fsdp_config": ["2"]}, "fsdp2"),
        ({"distributed_type": ["FSDP"]}, None),
        ({}, None),
    ],
)
def test_a_file_says_what_is_shared_out_as_the_key_does(in_tmp, values, sharding):
    (in_tmp / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    config = loaded(launch={"nproc": 2, "accelerate_config": accelerate_file(in_tmp, **values)})
    assert launchers.sharding_of(config.launch) == sharding
    assert launchers.splits_weights(config.launch) == (sharding in ("zero3", "fsdp2"))
    assert launchers.loading_device(config, "cuda") == ("cpu" if sharding == "fsdp2" else "cuda")
    assert not launchers.splits_weights(None) and launchers.loading_device(loaded(), "cuda") == "cuda"


# --- the command line -------------------------------------------------------------------------------------------------

WORKER = ["launcher", "praison_agent_rl.stages", "/run", "train"]


def test_on_one_machine_torchrun_takes_a_free_port_of_its_own():
    command = launch_command(Launch(nproc=3, options=["--monitor-interval", "1"]), WORKER)
    assert command.launcher == "torchrun"
    assert command.arguments == [
        "--standalone", "--nnodes", "1", "--local-addr", "127.0.0.1", "--nproc-per-node", "3", "--max-restarts", "0",
        "--monitor-interval", "1", "-m", "praison_agent_rl.child", *WORKER,
    ]  # fmt: skip


def test_several_machines_meet_at_machine_0(monkeypatch):
    machines = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.5", "--master-port", "29500"]
    told = launch_command(Launch(nproc=4, nodes=2, node_rank=1, rendezvous=HOST), WORKER)
    assert told.arguments[: len(machines)] == machines
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.5")
    assert launch_command(Launch(nproc=4, nodes=2), WORKER) == told


def test_sharding_is_what_the_file_that_trl_brings_says():
    command = launch_command(Launch(nproc=4, nodes=2, node_rank=1, rendezvous=HOST, sharding="zero3"), WORKER)
    assert command.launcher == "accelerate" and command.arguments[0] == "--config_file"
    file = Path(command.arguments[1])
    assert file.name == "zero3.yaml" and yaml.safe_load(file.read_text())["deepspeed_config"]["zero_stage"] == 3
    assert command.arguments[2:] == [
        "--num_processes", "8", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.5",
        "--main_process_port", "29500", "--module", "praison_agent_rl.child", *WORKER,
    ]  # fmt: skip


def test_the_examples_can_be_loaded():
    folder = Path(praison_agent_rl.__file__).parents[1] / "examples" / "launch"
    found = sorted(folder.glob("*.yaml"))
    configs = [yaml.safe_load(file.read_text()) for file in found if "launch:" in file.read_text()]
    assert len(configs) >= 3
    for config in configs:
        read = TrainConfig.load(json.loads(json.dumps(config)))
        assert launch_of(read) is not None


def test_pairs_are_shared_out_between_the_processes_so_an_epoch_has_fewer_steps() -> None:
    keys = {"method": "cpo", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    for launch, steps in ((None, 18), ({"nproc": 3}, 6)):  # 24 rows by 4, and by 12, three times
        config = TrainConfig.load({**keys, "launch": launch}, need_model=False, need_data=False)
        assert count_steps(config, 24) == steps
