"""Training on what a real vLLM draws: each step's policy is served, and its log-probabilities are our own model's."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from praison_agent_rl.models import EMBEDDED, plain_weights
from praison_agent_rl.planning import draft_from_config, write_run
from praison_agent_rl.rollouts import Sampled, Sampling
from praison_agent_rl.stages import planned_rewards, run_stages
from praison_agent_rl.vllm_servers.rollouts import VllmSampler
from praison_agent_rl.vllm_servers.serving import EXECUTABLE

if shutil.which(os.environ.get(EXECUTABLE, "")) is None:
    pytest.skip(f"{EXECUTABLE} names no command vllm; make test-vllm installs one", allow_module_level=True)

BF16 = 0.15
"""Nats by which the mean log-probability of two engines may differ in bfloat16; 0.03 to 0.07 was seen."""
REWARD = "def brief(completions, **_):\n    return [1 / (1 + len(text)) for text in completions]\n"


class Recording(VllmSampler):
    """Keeps each policy that was offered and what was drawn from it."""

    policies: list[Path]
    drawn: list[tuple[str, list[list[int]], Sampled]]

    def offer(self, step: int, save: Callable[[Path], None]) -> str:
        name = super().offer(step, save)
        kept = self._folder.parent / "kept" / name
        if not kept.exists():
            save(kept)  # as peft writes it, with what a server needs none of
            self.policies.append(kept)
        return name

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Sampled:
        found = super().sample(prompts, sampling)
        self.drawn.append((self.policies[-1].name, [list(prompt) for prompt in prompts], found))
        return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    from praison_agent_rl.training import policy_server

    Recording.policies, Recording.drawn = [], []
    monkeypatch.setattr(policy_server, "VllmSampler", Recording)
    return Recording


def differences(base: str, policy: Path, prompts: list[list[int]], sampled: Sampled) -> list[float]:
    """By how much each token's log-probability is another in float32, by transformers and peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), policy).eval()
    found: list[float] = []
    assert sampled.log_probs is not None
    for prompt, ids, given in zip(prompts, sampled.ids, sampled.log_probs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        ours = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        found += [abs(a - b) for a, b in zip(ours, given, strict=True)]
    return found


def test_two_steps_of_training_on_a_server_of_the_runs_own(in_tmp: Path, monkeypatch: Any, recorded: Any) -> None:
    monkeypatch.delenv("PRAISON_AGENT_RL_CACHE")  # the embedded model was converted before
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.syspath_prepend(str(in_tmp))
    (in_tmp / "brevity.py").write_text(REWARD)
    words = ["Name a colour.", "Name a fruit.", "Name a town.", "Name a river."]
    settings = {
        "model_name": EMBEDDED, "dataset": [{"prompt": word} for word in words], "reward_funcs": ["brevity:brief"],
        "sampler": "vllm", "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "held_out": 0,
        "max_seq_length": 256, "max_completion_length": 24, "learning_rate": 1e-3, "watch": False,
    }  # fmt: skip
    run = write_run(draft_from_config(settings), in_tmp / "run")
    before = set(psutil.Process().children(recursive=True))
    run_stages(run, ["train"], planned_rewards(run))

    assert set(psutil.Process().children(recursive=True)) <= before
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2]
    assert all(0 < step["reward"] <= 1 and step["grad_norm"] > 0 and step["clip_ratio"] < 0.2 for step in steps)
    assert (run.adapter / "adapter_model.safetensors").exists() and not list((run.root / "policies").glob("run-*"))
    assert len(recorded.policies) == len(recorded.drawn) == 2
    for step, (name, prompts, sampled) in zip(steps, recorded.drawn, strict=True):
        found = differences(plain_weights(run.plan.base), run.root / "kept" / name, prompts, sampled)
        print(step["step"], step["reward"], step["clip_ratio"], len(found), sum(found) / len(found), max(found))
        assert sum(found) / len(found) < BF16
