"""The server of ``sampler: vllm``: what its keys may say, how it is started or named, and when it is found wanting."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, MissingExtra, ServerFailed
from praison_agent_rl.planning import draft_from_config
from praison_agent_rl.ranks import Follower
from praison_agent_rl.records import Plan
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.runs import RunFolder, now, write_record
from praison_agent_rl.training.policy_server import API_KEY, check_servers, policy_server
from praison_agent_rl.vllm_servers.rollouts import VllmSampler
from praison_agent_rl.vllm_servers.serving import EXECUTABLE
from tests.vllm_stand_in import KEY, Command, StandIn, ended, serving

LOCAL = "http://127.0.0.1:8000"


def loaded(**keys: Any) -> TrainConfig:
    return TrainConfig.load(keys, need_model=False, need_data=False)


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fast_inference": True}, "fast_inference samples with vLLM in the process that trains, and sampler 'vllm'"),
        ({"use_vllm": True}, "fast_inference samples with vLLM in the process that trains"),
        (
            {"vllm_server_base_url": LOCAL, "vllm_server_options": ["--dtype", "half"]},
            "vllm_server_options are for a server that is started here, and vllm_server_base_url names what runs",
        ),
        ({"vllm_server_base_url": "127.0.0.1:8000"}, "is '127.0.0.1:8000', which is no address; give it as http://"),
        ({"vllm_server_base_url": "http://[::1"}, "is 'http://[::1', which is no address"),
        ({"vllm_server_base_url": "http://host:port"}, "is 'http://host:port', which is no address"),
        ({"vllm_server_base_url": "http:///v1"}, "is 'http:///v1', which is no address"),
        ({"vllm_server_base_url": "http://ho st:1"}, "is 'http://ho st:1', which is no address"),
        ({"vllm_server_base_url": [LOCAL, "h:1"]}, "vllm_server_base_url[1] is 'h:1', which is no address"),
        ({"vllm_server_base_url": f"{LOCAL},{LOCAL}/v1"}, "names the same server as vllm_server_base_url[0]"),
        ({"vllm_server_base_url": []}, "vllm_server_base_url is an empty list; name a server"),
        ({"vllm_server_base_url": [LOCAL, "http://h:1"], "vllm_mode": "server"}, "vllm_mode: server) takes one"),
        ({"vllm_server_sees": "/mnt/run"}, "give its vllm_server_base_url too, or remove it"),
        ({"generation_kwargs": {"typical_p": 0.9}}, "a vLLM server is not told them"),
        ({"max_lora_rank": 8, "lora_r": 16}, "max_lora_rank 8 is below lora_r 16"),
        ({"use_dora": True}, "vLLM serves no adapter with use_dora (it is True); change the adapter, or remove"),
        ({"lora_bias": "all"}, "vLLM serves no adapter that trains biases (bias is 'all')"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the base weights"),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "target_modules names lm_head"),
        ({"vllm_server_options": "--dtype half"}, "vllm_server_options is '--dtype half', but must be a list"),
    ],
)
def test_what_cannot_be_asked_of_a_server_is_one_line(keys, said):
    with pytest.raises(ConfigError) as caught:
        loaded(sampler="vllm", **keys)
    _, *lines = str(caught.value).splitlines() if "\n" in str(caught.value) else ["", str(caught.value)]
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize(
    "keys",
    [
        {"vllm_server_base_url": LOCAL, "vllm_server_sees": "/mnt/run/policies"},
        {"vllm_server_base_url": [LOCAL, "http://10.0.0.2:8000/v1"]},
        {"vllm_server_options": ["--dtype", "half"]},
        {"use_rslora": True, "top_p": 0.9, "repetition_penalty": 1.1},
    ],
)
def test_what_a_server_can_do_is_kept_without_a_note(keys):
    config = loaded(sampler="vllm", **keys)
    assert config.notes == () and config.uses_vllm
    assert {**config.resolved(), **keys, "sampler": "vllm"} == config.resolved()


def test_the_keys_of_a_server_are_said_to_be_idle_without_one():
    (note,) = loaded(vllm_server_sees="/mnt").notes
    assert note == "`vllm_server_sees` does nothing without `sampler: vllm`."
    both = loaded(sampler="int8", vllm_server_options=["--x"], vllm_server_base_url=LOCAL)
    idle = ("vllm_server_base_url", "vllm_server_options")
    assert both.notes == tuple(f"`{name}` does nothing without `sampler: vllm`." for name in idle)
    trl = loaded(use_vllm=True, vllm_mode="server", vllm_server_base_url=LOCAL)
    assert not [note for note in trl.notes if "does nothing" in note]


def test_trl_is_told_of_its_own_server_only_and_of_one():
    ours = loaded(sampler="vllm", vllm_server_base_url=[LOCAL, "http://h:1"])
    assert "vllm_server_base_url" not in ours.grpo_arguments(device="cpu")
    trls = {"use_vllm": True, "vllm_mode": "server"}
    assert loaded(**trls, vllm_server_base_url=[LOCAL]).grpo_arguments(device="cuda")["vllm_server_base_url"] == LOCAL
    with pytest.raises(ConfigError, match="names 2 servers, and TRL's own way to a vLLM server"):
        loaded(**trls, vllm_server_base_url=f"{LOCAL}, http://h:1")
    with pytest.raises(ConfigError, match="give host and port alone") as caught:
        loaded(**trls, vllm_server_base_url="http://me:s3cret@h:1", vllm_server_options=["--x"])
    assert "s3cret" not in str(caught.value)


def test_room_for_adapters_and_memory_are_of_use_to_a_server_and_idle_without():
    keys = {"max_lora_rank": 32, "gpu_memory_utilization": 0.5}
    served = loaded(sampler="vllm", **keys)
    assert served.notes == () and {**served.resolved(), **keys} == served.resolved()
    idle = loaded(**keys)
    assert len(idle.notes) == 1 and not set(keys) & set(idle.resolved())


# --- a plan -----------------------------------------------------------------------------------------------------------

REWARD = "def length(completions, **_):\n    return [float(len(text)) for text in completions]\n"


@pytest.fixture
def project(in_tmp: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A configuration that can be run but for the command of vLLM, which is nowhere."""
    monkeypatch.setenv(EXECUTABLE, str(in_tmp / "nowhere" / "vllm"))
    monkeypatch.syspath_prepend(str(in_tmp))
    (in_tmp / "served_rewards.py").write_text(REWARD)
    (in_tmp / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"What is {n}?"}) for n in range(20)))
    return {
        "model_name": str(tiny_model), "reward_funcs": ["served_rewards:length"], "dataset": "prompts.jsonl",
        "max_seq_length": 512, "max_completion_length": 8, "num_generations": 4, "sampler": "vllm",
    }  # fmt: skip


def test_vllm_that_is_missing_is_said_when_a_run_is_planned_unless_a_server_is_named(project):
    with pytest.raises(MissingExtra, match=rf"there is no command '.*nowhere/vllm'; install vLLM.*{EXECUTABLE}"):
        draft_from_config(project)
    assert draft_from_config({**project, "vllm_server_base_url": LOCAL}).config.vllm_server_base_url == LOCAL


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "there is no command"),
        ({"fast_inference": "true"}, "fast_inference samples with vLLM in the process that trains, and sampler 'vllm'"),
        ({"use_dora": "true"}, "vLLM serves no adapter with use_dora"),
    ],
)
def test_on_the_command_line_it_is_one_plain_message_and_exit_code_2(project, in_tmp, keys, said):
    (in_tmp / "config.yaml").write_text(json.dumps(project))
    command = [sys.executable, "-c", "from praison_agent_rl.cli import main; main()", "train", "config.yaml"]
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run([*command, *sets], cwd=in_tmp, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and done.stderr.count("error:") == 1
    assert not (in_tmp / ".praisonai").exists()


# --- the server of a run ----------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StandIn, str]]:
    served = StandIn()
    monkeypatch.setenv(API_KEY, KEY)
    with serving(served) as server:
        yield served, server.url


def planned(root: Path, device: str = "cpu", **keys: Any) -> tuple[RunFolder, TrainConfig]:
    config = loaded(sampler="vllm", max_seq_length=64, max_completion_length=8, **keys)
    run = RunFolder.create(root)
    plan = Plan(
        base="owner/base", config=config.resolved(), rewards=[], tools=[], device=device, notes=[], libraries={},
        created=now(),
    )  # fmt: skip
    write_record(run.plan_file, plan)
    return run, config


def save(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 8, "target_modules": ["q_proj"]}')
    (folder / "adapter_model.safetensors").write_bytes(b"weights")


def notes(run: RunFolder) -> list[str]:
    return [event["text"] for _, event in run.events() if event["event"] == "note"]


def test_other_samplers_have_no_server(in_tmp):
    run, config = planned(in_tmp / "run")
    with policy_server(run, config.model_copy(update={"sampler": "int8"}), "owner/base") as server:
        assert server is None
    assert notes(run) == [] and not (run.root / "policies").exists()


def test_a_named_server_is_checked_said_and_left_as_it_was(in_tmp, stand_in):
    served, url = stand_in
    run, config = planned(in_tmp / "run", vllm_server_base_url=url)
    (run.root / "policies" / "left by a run that was killed").mkdir(parents=True)
    with policy_server(run, config, "owner/base") as server:
        assert isinstance(server, VllmSampler) and notes(run) == [
            f"completions are drawn by the vLLM server {url.removeprefix('http://')}"
        ]
        name = server.offer(0, save)
        assert [path.name for path in (run.root / "policies").iterdir()] == [name]
    assert served.adapters == {} and list((run.root / "policies").iterdir()) == []


def test_weights_that_cannot_be_compared_are_a_note(in_tmp, stand_in):
    served, url = stand_in
    served.base["root"] = served.base["id"] = "/data/weights"
    run, config = planned(in_tmp / "run", vllm_server_base_url=url)
    with policy_server(run, config, "owner/base"):
        assert "serves '/data/weights'" in notes(run)[-1] and "cannot be known from here" in notes(run)[-1]


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({"root": "owner/other", "id": "other"}, "serves 'owner/other', and the run trains on 'owner/base'"),
        ({"max_model_len": 63}, "takes 63 tokens of prompt and completion .* the run needs 64"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_training(in_tmp, stand_in, base, said):
    served, url = stand_in
    served.base.update(base)
    run, config = planned(in_tmp / "run", vllm_server_base_url=url)
    with pytest.raises(ConfigError, match=said), policy_server(run, config, "owner/base"):
        raise AssertionError("it began")


def test_an_address_where_no_server_is_is_said(in_tmp):
    run, config = planned(in_tmp / "run", vllm_server_base_url="http://127.0.0.1:9")
    said = r"the vLLM server at http://127\.0\.0\.1:9/v1 does not say which models it has: .*refused"
    with pytest.raises(ServerFailed, match=said), policy_server(run, config, "owner/base"):
        raise AssertionError("it began")


def test_all_servers_are_asked_before_anything_is_measured_and_all_that_is_wanting_is_said(in_tmp, stand_in):
    served, url = stand_in
    run, config = planned(in_tmp / "run", vllm_server_base_url=[url, "http://127.0.0.1:9"])
    served.lora = False
    with pytest.raises(ConfigError) as caught:
        check_servers(run, config, "owner/base")
    first, second = str(caught.value).splitlines()
    assert url in first and "--enable-lora" in first and "http://127.0.0.1:9/v1" in second and "refused" in second
    served.lora, served.max_rank = True, 8
    run, config = planned(in_tmp / "other", vllm_server_base_url=url, lora_r=16)
    with pytest.raises(ServerFailed, match="has rank 16: start the server with --max-lora-rank 16"):
        check_servers(run, config, "owner/base")
    served.max_rank = 16
    check_servers(run, config, "owner/base")
    assert served.asked == [] and served.adapters == {} and notes(run) == []


@pytest.mark.parametrize("url", ["http://me:s3cret@h:1", "http://h:1/v1?key=s3cret", "http://s3cret@[::1]:8000"])
def test_a_secret_in_an_address_is_refused_before_it_is_kept_and_is_not_shown(url):
    with pytest.raises(ConfigError, match="give host and port alone") as caught:
        loaded(sampler="vllm", vllm_server_base_url=url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://[::1]:8000", "https://h/v1/", "HTTP://h", "http://10.0.0.2:8000/prefix/v1"])
def test_every_form_of_an_address_is_taken(url):
    assert loaded(sampler="vllm", vllm_server_base_url=url).vllm_server_base_url == url


def test_a_key_that_came_with_a_line_break_is_taken_without_it(in_tmp, stand_in, monkeypatch):
    _, url = stand_in
    monkeypatch.setenv(API_KEY, f"{KEY}\n")
    run, config = planned(in_tmp / "run", vllm_server_base_url=url)
    with policy_server(run, config, "owner/base") as server:
        assert server is not None and server.offer(0, save)


def test_the_folder_is_named_to_a_server_by_the_path_that_it_sees(in_tmp, stand_in):
    served, url = stand_in
    (in_tmp / "mounted").symlink_to(in_tmp / "run" / "policies")
    seen = str(in_tmp / "mounted")
    run, config = planned(in_tmp / "run", vllm_server_base_url=url, vllm_server_sees=f"{seen}/")
    with policy_server(run, config, "owner/base") as server:
        assert server is not None
        name = server.offer(0, save)
        assert served.asked[-1]["lora_path"] == f"{seen}/{name}"


def test_of_several_processes_the_first_offers_the_others_draw_from_that_and_none_starts_a_server(
    in_tmp, stand_in, monkeypatch
):
    served, url = stand_in
    run, config = planned(in_tmp / "run", vllm_server_base_url=url)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with policy_server(run, config, "owner/base") as first:
        assert first is not None and not first.has(0)
        name = first.offer(0, save)
        monkeypatch.setenv("RANK", "1")
        with policy_server(run, config, "owner/base") as second:
            assert second is not None and not second.has(0)
            second.take(0, name)
            assert first.has(0) and second.has(0) and not second.has(1)
            assert second.sample([[5, 6]], Sampling(max_tokens=4, ends=(9,))).ids == [[7, 9]]
            assert served.asked[-1]["model"] == name
        assert name in served.adapters and (run.root / "policies" / name).is_dir()  # the second takes nothing away
    assert not served.adapters
    command = Command(in_tmp)
    monkeypatch.setenv(EXECUTABLE, str(command.path))
    own, config = planned(in_tmp / "own")
    with pytest.raises(ConfigError, match=r"2 processes train .*vllm_server_base_url"), policy_server(own, config, "b"):
        raise AssertionError("it began")
    assert command.told() == []


@pytest.mark.parametrize(
    ("device", "keys", "words"),
    [
        ("cpu", {}, ["--enforce-eager", "--dtype", "bfloat16"]),
        ("cuda", {"gpu_memory_utilization": 0.4}, ["--gpu-memory-utilization", "0.4"]),
        (
            "cuda:1",
            {"vllm_server_options": ["--dtype", "half", "--seed=1"]},
            ["--gpu-memory-utilization", "0.3", "--dtype", "half", "--seed=1"],
        ),
    ],
)
def test_a_server_is_started_with_room_for_the_adapter_and_what_was_asked_for_last(
    in_tmp, monkeypatch, device, keys, words
):
    command = Command(in_tmp)
    monkeypatch.setenv(EXECUTABLE, str(command.path))
    run, config = planned(in_tmp / "run", device, lora_r=24, **keys)
    with policy_server(run, config, "base") as server:
        (started,) = command.told()
        said = started["words"]
        assert said[:2] == ["serve", "base"] and said[-len(words) :] == words  # of equal ones vLLM takes the last
        assert said[said.index("--max-lora-rank") + 1] == "32" and said[said.index("--max-model-len") + 1] == "64"
        assert said[said.index("--logprobs-mode") + 1] == "processed_logprobs"
        assert server is not None and server.offer(0, save).startswith("run-0-")
        assert psutil.pid_exists(started["pid"]) and "is started now" in notes(run)[0]
    assert ended(started["pid"]) and list((run.root / "policies").iterdir()) == []


def test_a_server_that_was_started_ends_with_any_error(in_tmp, monkeypatch):
    command = Command(in_tmp)
    monkeypatch.setenv(EXECUTABLE, str(command.path))
    run, config = planned(in_tmp / "run")
    with pytest.raises(KeyboardInterrupt), policy_server(run, config, "base"):
        raise KeyboardInterrupt
    assert ended(command.told()[0]["pid"])


def test_two_processes_begin_with_different_servers_of_which_the_first_tells(in_tmp, stand_in, monkeypatch, caplog):
    served, url = stand_in
    other = StandIn()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with serving(other) as server:
        run, config = planned(in_tmp / "run", vllm_server_base_url=[url, server.url])
        with policy_server(run, config, "owner/base") as first:
            assert first is not None
            assert notes(run) == [f"completions are drawn by the vLLM servers {url[7:]}, {server.url[7:]}"]
            name = first.offer(0, save)
            monkeypatch.setenv("RANK", "1")
            with policy_server(Follower(run.root), config, "owner/base") as second:
                assert second is not None
                second.take(0, name)
                plain = Sampling(max_tokens=4, ends=(9,))
                for sampler in (first, second):
                    assert sampler.sample([[5, 6]], plain).ids == [[7, 9]]
                assert len(served.completions()) == len(other.completions()) == 1
                other.adapters.clear()
                assert second.sample([[5, 6]], plain).ids == [[7, 9]] and len(served.completions()) == 2
                assert "It is left out until it is back" in caplog.text and len(notes(run)) == 1
    assert not served.adapters and len(served.checked) == len(other.checked) == 1  # by the first process


def test_a_relative_folder_gives_its_own_name_to_the_policies(in_tmp, stand_in, monkeypatch):
    run, config = planned(in_tmp / "run", vllm_server_base_url=stand_in[1])
    monkeypatch.chdir(run.root)
    with policy_server(RunFolder(os.curdir), config, "owner/base") as server:
        assert server is not None and server.offer(3, save).startswith("run-3-")
