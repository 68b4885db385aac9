"""Sampling from any vLLM server, held by a stand-in: new names, groups, ends, log-probabilities and plain refusals."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.errors import ConfigError, ServerFailed
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.vllm_adapters import why_not_servable
from praison_agent_rl.vllm_rollouts import ForeignServer, Patience, VllmSampler

END = 9
PLAIN = Sampling(max_tokens=3, ends=(END,), seed=100)


class StandIn:
    """Answers as vLLM 0.32 does; a completion is [7, 9], of log-probabilities -0.5 and -0.25 at temperature 1."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []
        self.dropped = 0
        """Connections that are closed before one is answered."""
        self.processed = True
        self.max_rank = 8
        self.base = {"id": "base", "root": "owner/base", "parent": None, "max_model_len": 64}
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: None
        """Called with each answer with completions, before it is sent."""

    def answer(self, verb: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append({"verb": verb, **body})
        if verb == "load_lora_adapter":
            file = Path(body["lora_path"], "adapter_config.json")
            if not file.exists():
                return 404, error("Loading lora x failed: No adapter found for <path>")
            if json.loads(file.read_text())["r"] > self.max_rank:
                return 500, error(f"LoRA rank is greater than max_lora_rank {self.max_rank}.")
            self.adapters[body["lora_name"]] = file.read_text()
            return 200, "Success"
        if verb == "unload_lora_adapter":
            return (200, "Success") if self.adapters.pop(body["lora_name"], None) else (404, error("not found"))
        if body["model"] not in self.adapters:
            return 404, error(f"The model `{body['model']}` does not exist.")
        if body["temperature"] == 0 and body["n"] > 1:
            return 400, error("n must be 1 when using greedy sampling")
        answer = {"model": body["model"], "choices": [self.choice(body, n) for n in reversed(range(body["n"]))]}
        self.change(answer)
        return 200, answer

    def choice(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        factor = body["temperature"] if self.processed else 1.0
        given = [-0.5 * factor, -0.25 * factor]
        log_probs = {"token_logprobs": given, "top_logprobs": [{"x": value} for value in given]}
        return {
            "index": number, "token_ids": [7, END], "prompt_token_ids": body["prompt"], "finish_reason": "stop",
            "logprobs": log_probs,
        }  # fmt: skip


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


@pytest.fixture
def vllm() -> Iterator[tuple[StandIn, ForeignServer]]:
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(200, {"data": [stand_in.base, *({"id": name, "parent": "base"} for name in stand_in.adapters)]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if stand_in.dropped > 0:
                stand_in.dropped -= 1
                self.close_connection = True
                return
            assert self.headers["authorization"] == "Bearer key"
            self.reply(*stand_in.answer(self.path.removeprefix("/v1/"), body))

        def reply(self, status: int, body: Any) -> None:
            raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield stand_in, ForeignServer(url=f"http://127.0.0.1:{http.server_port}", api_key="key")
    http.shutdown()
    http.server_close()


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
    with pytest.raises(ServerFailed, match=r"did not answer completions.*resume"):
        sampler.sample([[1]], PLAIN)
    stand_in.dropped = 0
    stand_in.adapters.clear()
    with pytest.raises(ServerFailed, match=r"does not exist.*started again"):
        sampler.sample([[1]], PLAIN)


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
