"""A run that really has weights, an adapter and measured answers, made on the spot without any training."""

from pathlib import Path
from typing import Any

from praison_agent_rl.data import write_rows
from praison_agent_rl.records import Plan, PlannedReward
from praison_agent_rl.runs import RunFolder, now, write_record

REWARDS = """
def letters(completions, **kwargs):
    return [sum(c.islower() for c in text) / max(len(text), 1) for text in completions]
"""
MODULE = "exportrewards"


def measured_run(
    root: Path, base: str, prompts: list[str], *, std: float, passed: bool = True, **config: Any
) -> RunFolder:
    """A run of ``base`` whose adapter is random with ``std``, merged and measured on ``prompts`` by ``letters``."""
    from praison_agent_rl.config import TrainConfig
    from praison_agent_rl.measuring import judge_run, measure
    from praison_agent_rl.merging import merge_adapter
    from praison_agent_rl.planned_rewards import as_rewards

    root.mkdir(parents=True)
    run = RunFolder(root)
    write_rows(run.held_out_rows, [{"prompt": prompt} for prompt in prompts])
    write_rows(run.train_rows, [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}])
    reward = PlannedReward(spec=f"{MODULE}:letters", name="letters", weight=1.0, prompts="text", completions="text")
    settings = TrainConfig.load({"model_name": base, "bf16": False, **config}, need_data=False)
    plan = Plan(
        base=base, config=settings.resolved(), rewards=[reward], device="cpu", notes=[], libraries={"python": "3.x"},
        created=now(), samples=1,
    )  # fmt: skip
    write_record(run.plan_file, plan)
    _save_adapter(base, run.adapter, std)
    proof = merge_adapter(base, run.adapter, run.merged, config=settings, prompts=[[1, 5, 7], [9, 4]])
    write_record(run.merge_file, proof)
    rewards = as_rewards(plan.rewards)
    for side in ("base", "new"):
        measure(run, side, rewards)
    judge_run(run)
    if passed:
        _let_through(run)
    return run


def _save_adapter(base: str, folder: Path, std: float) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from praison_agent_rl.models import plain_weights

    model = AutoModelForCausalLM.from_pretrained(plain_weights(base), dtype=torch.float32)
    torch.manual_seed(3)
    policy = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weights in policy.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=std)
    policy.save_pretrained(folder)


def _let_through(run: RunFolder) -> None:
    """As if the gate had let it through: a random adapter makes nothing better."""
    from praison_agent_rl.records import Verdict
    from praison_agent_rl.runs import read_record

    verdict = read_record(run.verdict_file, Verdict)
    write_record(run.verdict_file, verdict.model_copy(update={"status": "promoted", "text": "promoted"}))
