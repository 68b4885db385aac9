"""A real vLLM samples from the policy: its log-probabilities are our own model's, and names keep policies apart."""

import contextlib
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from praison_agent_rl.errors import ConfigError
from praison_agent_rl.models import EMBEDDED, find_weights, plain_weights
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.vllm_servers.rollouts import VllmSampler, start_sampling_server
from praison_agent_rl.vllm_servers.serving import EXECUTABLE, VllmServer
from praison_agent_rl.vllm_servers.sources import ForeignServer, Patience
from tests.vllm.policies import adapted

if shutil.which(os.environ.get(EXECUTABLE, "")) is None:
    pytest.skip(f"{EXECUTABLE} names no command vllm; make test-vllm installs one", allow_module_level=True)

PROMPTS = [[1, 4093, 198, 504], [1, 4093, 198, 504], [1, 520, 9531, 198, 1195]]
BF16 = 0.15
"""Nats by which the mean log-probability of two engines may differ in bfloat16; 0.03 to 0.07 was seen."""


@pytest.fixture(scope="module")
def base() -> str:
    return plain_weights(find_weights(EMBEDDED))


@pytest.fixture(scope="module")
def server(base: str) -> Iterator[VllmServer]:
    with started(base, gibibytes=2) as server:
        yield server


@contextlib.contextmanager
def started(base: str, *, gibibytes: int) -> Iterator[VllmServer]:
    """A server with so much room for keys and values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", str(gibibytes))
        server = start_sampling_server(base, rank=8, longest=256, options=["--enforce-eager", "--dtype", "bfloat16"])
    try:
        yield server
    finally:
        server.stop()


def log_probs_of(policy: Any, prompt: list[int], ids: list[int], temperature: float) -> Any:
    import torch

    with torch.no_grad():
        logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def test_two_policies_in_a_row_are_sampled_from_as_they_are_and_the_former_is_gone(server, base, tmp_path):
    sampler = VllmSampler(server, tmp_path / "adapters", base=base, run_id="run")
    assert sampler.check(256) == []
    greedy, former = [], None
    for step in (0, 1):
        policy = adapted(base, seed=step)
        name = sampler.offer(step, policy.save_pretrained)
        assert sampler.offer(step, policy.save_pretrained) == name
        own: list[float] = []
        of_base: list[float] = []
        for temperature in (1.0, 0.7):
            drawn = sampler.sample(PROMPTS, Sampling(max_tokens=24, temperature=temperature, ends=(2,), seed=5))
            assert sampler.note is None and drawn.log_probs is not None
            assert drawn.ids[0] != drawn.ids[1]  # a group's completions have seeds of their own
            for prompt, ids, given in zip(PROMPTS, drawn.ids, drawn.log_probs, strict=True):
                ours = log_probs_of(policy, prompt, ids, temperature)
                with policy.disable_adapter():
                    without = log_probs_of(policy, prompt, ids, temperature)
                differing = [abs(a - b) for a, b in zip(ours.tolist(), given, strict=True)]
                own.append(sum(differing) / len(differing))
                of_base.append(sum(abs(a - b) for a, b in zip(without.tolist(), given, strict=True)) / len(given))
                print(step, temperature, len(ids), own[-1], max(differing), of_base[-1])
                assert own[-1] < BF16
        assert sum(own) < sum(of_base) / 2
        greedy.append(sampler.sample(PROMPTS, Sampling(max_tokens=16, temperature=0, ends=(2,))).ids)
        likeliest = [same for pair in zip(PROMPTS, greedy[-1], strict=True) for same in is_likeliest(policy, *pair)]
        print("greedy", sum(likeliest), len(likeliest))
        assert sum(likeliest) > 0.7 * len(likeliest)  # not all: two tokens may be as likely but for rounding
        if former:
            with pytest.raises(urllib.error.HTTPError, match="404"):
                asked(server, former)
            assert not (tmp_path / "adapters" / former).exists()
        former = name
    assert greedy[0] != greedy[1]
    likely = tuple(range(2, 49000))
    ended = sampler.sample(PROMPTS, Sampling(max_tokens=8, ends=likely))
    assert [len(ids) for ids in ended.ids] == [1, 1, 1] and all(ids[0] in likely for ids in ended.ids)  # kept
    cut = sampler.sample(PROMPTS, Sampling(max_tokens=4, top_p=0.9, ends=(2,)))
    assert cut.log_probs is None and "top_p" in (sampler.note or "")


def is_likeliest(policy: Any, prompt: list[int], ids: list[int]) -> list[bool]:
    """Whether each token is the one that the policy thinks likeliest after those before it."""
    import torch

    with torch.no_grad():
        logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return [bool(same) for same in logits.argmax(-1) == torch.tensor(ids)]


def asked(server: VllmServer, name: str) -> None:
    import json

    body = json.dumps({"model": name, "prompt": [1], "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.api_key}"}
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/completions", body, headers)).close()


def test_more_prompts_at_once_than_vllm_computes_in_one_go_are_all_completed(server, base, tmp_path):
    """A prompt with a seed that is computed in parts ends vLLM 0.32 on a CPU."""
    sampler = VllmSampler(server, tmp_path / "adapters", base=base, run_id="many")
    sampler.offer(0, adapted(base, seed=0).save_pretrained)
    prompts = [[1, *range(1000 + 210 * row, 1200 + 210 * row)] for row in range(48)]  # 9,648 tokens, none in common
    drawn = sampler.sample(prompts, Sampling(max_tokens=4, ends=(2,), seed=5))
    assert len(drawn.ids) == 48 and all(drawn.ids)


def test_two_servers_share_a_batch_and_the_one_that_is_left_draws_all_of_it(server, base, tmp_path):
    told: list[str] = []
    sampling = Sampling(max_tokens=12, ends=(2,), seed=5)
    prompts = [[1, 4093, 198, 504 + row // 2] for row in range(8)]
    policy = adapted(base, seed=0)
    with started(base, gibibytes=1) as second:
        two = [ForeignServer(url=each.url, api_key=each.api_key) for each in (server, second)]
        sampler = VllmSampler(
            two, tmp_path / "adapters", base=base, run_id="two", patience=Patience(retries=1), tell=told.append
        )
        assert sampler.check(256, rank=8) == []
        with pytest.raises(ConfigError, match=r"(?s)--max-lora-rank 64.*--max-lora-rank 64"):
            sampler.check(256, rank=64)
        blind = [ForeignServer(url=each.url, api_key=each.api_key, seen_as="/nowhere") for each in two]
        with pytest.raises(ConfigError, match=r"(?s)vllm_server_sees.*vllm_server_sees"):
            VllmSampler(blind, tmp_path / "adapters", base=base, run_id="blind").check(256, rank=8)

        sampler.offer(0, policy.save_pretrained)
        before = [answered_by(server), answered_by(second)]
        drawn = sampler.sample(prompts, sampling)
        shared = [answered_by(server) - before[0], answered_by(second) - before[1]]
        assert shared == [4, 4] and told == []
        differing = differences(policy, prompts, drawn)
        print("two servers", differing)
        assert all(each < BF16 for each in differing)

        for process in psutil.Process(second.process.pid).children(recursive=True):
            process.kill()
        again = sampler.sample(prompts, sampling)
        assert len(told) == 1 and f"{second.url}" in told[0] and "It is left out until it is back" in told[0]
        assert answered_by(server) == before[0] + 4 + 8
        assert all(each < BF16 for each in differences(policy, prompts, again))
        sampler.offer(1, adapted(base, seed=1).save_pretrained)
        assert len(sampler.sample(prompts, sampling).ids) == 8
    sampler.close()
    assert not list((tmp_path / "adapters").iterdir())


def answered_by(server: VllmServer) -> int:
    """How many completions a server has finished, as it counts itself."""
    with urllib.request.urlopen(server.url.removesuffix("/v1") + "/metrics") as reply:
        found = re.findall(r"^vllm:request_success_total\{.*\} ([\d.e+]+)$", reply.read().decode(), re.MULTILINE)
    return round(sum(map(float, found)))


def differences(policy: Any, prompts: list[list[int]], drawn: Any) -> list[float]:
    """By how many nats a token each completion's log-probabilities are others than those of our own model."""
    found = []
    for prompt, ids, given in zip(prompts, drawn.ids, drawn.log_probs, strict=True):
        ours = log_probs_of(policy, prompt, ids, 1.0).tolist()
        found.append(sum(abs(a - b) for a, b in zip(ours, given, strict=True)) / len(ids))
    return found
