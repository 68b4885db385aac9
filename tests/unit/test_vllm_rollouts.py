"""Sampling from any vLLM server, held by a stand-in: new names, groups, ends, log-probabilities and plain refusals."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.errors import ConfigError, ServerFailed
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.serving import LOG
from praison_agent_rl.vllm_servers import sources as vllm_sources
from praison_agent_rl.vllm_servers.adapters import why_not_servable
from praison_agent_rl.vllm_servers.calls import Refused
from praison_agent_rl.vllm_servers.rollouts import VllmSampler, start_sampling_server
from praison_agent_rl.vllm_servers.serving import EXECUTABLE
from praison_agent_rl.vllm_servers.sources import ForeignServer, Patience
from tests.vllm_stand_in import END, Command, StandIn, ended, serving

PLAIN = Sampling(max_tokens=3, ends=(END,), seed=100)


@pytest.fixture
def vllm() -> Iterator[tuple[StandIn, ForeignServer]]:
    stand_in = StandIn()
    with serving(stand_in) as server:
        yield stand_in, server


def saved(**settings: Any) -> Callable[[Path], None]:
    config = {"r": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "/secret/place", **settings}
    return lambda folder: (folder / "adapter_config.json").write_text(json.dumps(config)) and None


def sampler_of(server: ForeignServer, folder: Path, **patience: Any) -> VllmSampler:
    return VllmSampler(server, folder, base="owner/base", run_id="a run", patience=Patience(**patience))


def test_a_policy_gets_a_new_name_and_the_former_goes_with_its_folder(vllm, tmp_path):
    stand_in, server = vllm
    with sampler_of(server, tmp_path) as sampler:
        first = sampler.offer(0, saved())
        assert sampler.offer(0, saved()) == first and first.startswith("a-run-0-")
        assert "base_model_name_or_path" not in stand_in.adapters[first]
        second = sampler.offer(1, saved())
        assert list(stand_in.adapters) == [second] and [path.name for path in tmp_path.iterdir()] == [second]
    assert not stand_in.adapters and not list(tmp_path.iterdir())
    sampler.close()


def test_equal_prompts_in_a_row_are_one_request_with_a_seed_for_each_row(vllm, tmp_path):
    stand_in, server = vllm
    sampler = sampler_of(server, tmp_path, at_once=1)
    sampler.offer(0, saved())
    drawn = sampler.sample([[1, 2], [1, 2], [3], [1, 2]], PLAIN)
    assert drawn.ids == [[7, END]] * 4 and drawn.log_probs == [[-0.5, -0.25]] * 4 and sampler.note is None
    sent = [body for body in stand_in.asked if body["verb"] == "completions"]
    asked = [(body["prompt"], body["n"], body["seed"]) for body in sent]
    assert asked == [([1, 2], 2, 100), ([3], 1, 102), ([1, 2], 1, 103)]
    assert sent[0]["stop_token_ids"] == [END] and sent[0]["ignore_eos"] and sent[0]["top_k"] == 0
    greedy = sampler.sample([[1], [1]], replace(PLAIN, temperature=0))
    assert greedy.ids == [[7, END]] * 2 and greedy.log_probs is None


@pytest.mark.parametrize(
    ("processed", "settings", "known"),
    [
        (True, {"temperature": 2.0}, True),
        (True, {"top_p": 0.9}, False),
        (True, {"repetition_penalty": 1.1}, True),
        (False, {"temperature": 2.0}, False),
        (False, {"top_p": 0.9}, True),
        (False, {"repetition_penalty": 1.1}, False),
    ],
)
def test_log_probabilities_that_are_of_another_distribution_are_not_given(vllm, tmp_path, processed, settings, known):
    stand_in, server = vllm
    stand_in.processed = processed
    sampler = sampler_of(server, tmp_path)
    sampler.offer(0, saved())
    drawn = sampler.sample([[1]], replace(PLAIN, **settings))
    assert (drawn.log_probs is not None) is known and (sampler.note is None) is known


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.update(model="old"), "answered as 'old'"),
        (lambda a: a.update(choices=[]), "asked for 1 completions and gave 0"),
        (lambda a: a["choices"][0].update(token_ids=None), "0 token ids with 2"),
        (lambda a: a["choices"][0].update(prompt_token_ids=[5, 6]), "as another of 2"),
        (lambda a: a["choices"][0].update(token_ids=[END, 7]), "ended a completion of 2 tokens with 7"),
        (lambda a: a["choices"][0].update(finish_reason="abort"), "'abort'"),
        (lambda a: a["choices"][0].update(finish_reason="length", token_ids=[7, 7]), "after 3"),
        (lambda a: a["choices"][0]["logprobs"].update(token_logprobs=[None, -1.0]), "gave None as the log-prob"),
        (lambda a: a["choices"][0]["logprobs"].update(token_logprobs=[float("nan"), -1.0]), "gave nan as"),
        (lambda a: a["choices"][0]["logprobs"].update(token_logprobs=[12.5, -1.0]), "gives logits"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(vllm, tmp_path, change, said):
    stand_in, server = vllm
    stand_in.change = change
    sampler = sampler_of(server, tmp_path)
    sampler.offer(0, saved())
    with pytest.raises(ServerFailed, match=said):
        sampler.sample([[1]], PLAIN)


def test_an_adapter_that_is_refused_says_why_and_leaves_the_former_in_place(vllm, tmp_path):
    stand_in, server = vllm
    sampler = sampler_of(server, tmp_path / "adapters")
    first = sampler.offer(0, saved())
    with pytest.raises(ServerFailed, match=r"has rank 64: start the server with --max-lora-rank 64"):
        sampler.offer(1, saved(r=64))
    with pytest.raises(ConfigError, match="use_dora"):
        sampler.offer(1, saved(use_dora=True))
    assert list(stand_in.adapters) == [first] and len(list((tmp_path / "adapters").iterdir())) == 1
    elsewhere = replace(server, seen_as=str(tmp_path / "nowhere"))
    with pytest.raises(ServerFailed, match="seen_as"):
        sampler_of(elsewhere, tmp_path / "more").offer(0, saved())
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    assert sampler_of(replace(server, seen_as=f"{tmp_path / 'link'}/"), tmp_path / "shared").offer(0, saved())


def test_a_broken_connection_is_tried_again_and_a_lost_server_or_policy_is_said(vllm, tmp_path):
    stand_in, server = vllm
    sampler = sampler_of(server, tmp_path, retries=2)
    with pytest.raises(ServerFailed, match="no policy was offered"):
        sampler.sample([[1]], PLAIN)
    sampler.offer(0, saved())
    stand_in.dropped = 2
    assert sampler.sample([[1]], PLAIN).ids == [[7, END]]
    stand_in.dropped = 9
    with pytest.raises(ServerFailed, match=r"did not answer completions.*see that it runs"):
        sampler.sample([[1]], PLAIN)
    stand_in.dropped = 0
    stand_in.adapters.clear()
    with pytest.raises(ServerFailed, match=r"does not exist.*started again"):
        sampler.sample([[1]], PLAIN)


def test_a_refusal_is_raised_while_the_server_still_works_on_another_prompt(vllm, tmp_path):
    stand_in, server = vllm
    begun, released = threading.Event(), threading.Event()

    def slow_or_wrong(answer: dict[str, Any]) -> None:
        prompt = answer["choices"][0]["prompt_token_ids"]
        if prompt == [1]:
            begun.set()
            released.wait(60)
        else:
            assert begun.wait(30)
            answer["model"] = "old"

    stand_in.change = slow_or_wrong
    sampler = sampler_of(server, tmp_path, at_once=2)
    sampler.offer(0, saved())
    with pytest.raises(ServerFailed, match="answered as 'old'"):
        sampler.sample([[1], [2], [3]], PLAIN)
    assert not released.is_set()
    released.set()


def test_a_server_that_is_gone_is_asked_once_more_for_nothing_at_the_end(vllm, tmp_path):
    stand_in, server = vllm
    sampler = sampler_of(server, tmp_path)
    sampler.offer(0, saved())
    stand_in.dropped = 1
    sampler.close()  # the one connection that is lost was to take the adapter out
    assert stand_in.dropped == 0 and len(stand_in.adapters) == 1 and not list(tmp_path.iterdir())


def test_a_server_of_ours_that_dies_in_the_middle_is_told_with_the_end_of_its_log(tmp_path, monkeypatch):
    command = Command(tmp_path, dies_at=1)
    monkeypatch.setenv(EXECUTABLE, str(command.path))
    server = start_sampling_server("base", rank=8, longest=64)
    words = command.told()[0]["words"]
    assert words[:2] == ["serve", "base"] and words[words.index("--max-model-len") + 1] == "64"
    with VllmSampler(server, tmp_path / "policies", base="base", run_id="run") as sampler:
        assert sampler.check(64) == []
        sampler.offer(0, lambda folder: saved()(folder) or (folder / "adapter_model.safetensors").write_bytes(b"w"))
        first = sampler.sample([[1]], PLAIN)
        assert len(first.ids) == 1 and first.log_probs is not None and len(first.log_probs[0]) == len(first.ids[0])
        with pytest.raises(ServerFailed, match=r"(?s)did not answer .*its log:.*EngineCore died") as failed:
            sampler.sample([[1], [2], [3], [4]], PLAIN)
        assert "it has ended" in str(failed.value)
    assert not server.running and not list((tmp_path / "policies").iterdir())
    assert ended(command.told()[0]["pid"])


def test_an_engine_that_died_behind_its_server_is_told_with_the_end_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv(EXECUTABLE, str(Command(tmp_path).path))
    server = start_sampling_server("base", rank=8, longest=64)
    (server.home / LOG).write_text("CUDA error: an illegal memory access was encountered\n")
    with VllmSampler(server, tmp_path / "policies", base="base", run_id="run") as sampler:
        sampler.offer(0, lambda folder: saved()(folder) or (folder / "adapter_model.safetensors").write_bytes(b"w"))
        with monkeypatch.context() as patched:
            patched.setattr(vllm_sources, "ask", refuse)
            with pytest.raises(ServerFailed, match=r"(?s)refused a prompt of 1 tokens: HTTP 500.*illegal memory"):
                sampler.sample([[1]], PLAIN)


def refuse(*_: Any, **__: Any) -> Any:
    raise Refused(500, "EngineCore encountered an issue")


def test_another_base_and_too_little_room_are_said_before_training(vllm, tmp_path):
    stand_in, server = vllm
    assert sampler_of(server, tmp_path).check(64) == []
    with pytest.raises(ConfigError, match=r"takes 64 tokens.*needs 65"):
        sampler_of(server, tmp_path).check(65)
    stand_in.base["root"] = "owner/other"
    stand_in.base["id"] = "other"
    with pytest.raises(ConfigError, match=r"serves 'owner/other'.*trains on 'owner/base'"):
        sampler_of(server, tmp_path).check(64)
    stand_in.base["root"] = "/data/weights"
    assert "cannot be known" in sampler_of(server, tmp_path).check(64)[0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"modules_to_save": ["score"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"target_modules": ["model.lm_head"]}, "lm_head"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    ],
)
def test_what_vllm_cannot_serve_is_named(settings, named):
    assert named in (why_not_servable(settings) or "")
    plain = {"r": 8, "bias": "none", "init_lora_weights": "gaussian", "target_modules": "all-linear"}
    assert why_not_servable(plain) is None
