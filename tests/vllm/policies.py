"""Policies that the tests with a real vLLM offer it."""

from typing import Any


def adapted(base: str, seed: int) -> Any:
    """The base with a random adapter that changes which tokens are the likeliest."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    policy = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weights in policy.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=0.05)  # enough that the likeliest tokens are others
    return policy.eval()
