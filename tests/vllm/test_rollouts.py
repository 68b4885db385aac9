"""A real vLLM samples from the policy: its log-probabilities are our own model's, and names keep policies apart."""

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from praison_agent_rl.models import EMBEDDED, find_weights, plain_weights
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.vllm_servers.rollouts import VllmSampler, start_sampling_server
from praison_agent_rl.vllm_servers.serving import EXECUTABLE, VllmServer
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
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    server = start_sampling_server(base, rank=8, longest=256, options=["--enforce-eager", "--dtype", "bfloat16"])
    yield server
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
