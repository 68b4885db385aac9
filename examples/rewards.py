"""The reward functions of the GRPO guides that people start from, each in the form its guide gives.

They work on texts and on message lists. Name one in a configuration as ``rewards:length_penalty`` with this folder as
the current one. `praison_agent_rl.reward_library` has sturdier ones: see docs/rewards.md.
"""

import re

REASONING = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
THINKING = r"<think>.*?</think>\s*<answer>.*?</answer>"


def text_of(completion) -> str:
    """The text of a completion: itself, or the content of the last message of the assistant."""
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    content = (said[-1].get("content") or "") if said else ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def extract_answer(text: str) -> str:
    """What stands in the last ``<answer>``, else after the last ``####``, else the whole text."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (tagged[-1] if tagged else text.rpartition("####")[2]).strip()


# --- praisonai-train's documentation


def length_penalty(prompts, completions, **kwargs) -> list[float]:
    """Reward short answers: 1.0 for <= 20 words, decreasing after."""
    # The guide's words and formula differ: it falls from the first word on and is 0.0 at 20. The formula is kept.
    return [max(0.0, 1.0 - len(text_of(c).split()) / 20) for c in completions]


def contains_answer(prompts, completions, answer, **kwargs) -> list[float]:
    """Reward answers in which the right one stands; the guide names this function and does not show it."""
    return [float(str(gt).lower() in text_of(c).lower()) for c, gt in zip(completions, answer, strict=True)]


# --- the grpo-rl-training skill


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float]:
    """Reward correct answers with high score."""
    extracted = [extract_answer(text_of(c)) for c in completions]
    return [2.0 if ans == gt else 0.0 for ans, gt in zip(extracted, answer, strict=True)]


def format_reward(completions, **kwargs) -> list[float]:
    """Reward XML-like structured format."""
    return [1.0 if re.search(REASONING, text_of(c), re.DOTALL) else 0.0 for c in completions]


def incremental_format_reward(completions, **kwargs) -> list[float]:
    """Award partial credit for format compliance: 0.25 for each of four tags, once however often it stands there."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    return [sum(0.25 for tag in tags if tag in text_of(c)) for c in completions]


def reward_function_name(prompts, completions, answer=None, **kwargs) -> list[float]:
    """Evaluate completions and return rewards: the skill's template, with the share of upper case as its score."""
    responses = [text_of(c) for c in completions]

    def compute_score(response: str) -> float:
        return sum(letter.isupper() for letter in response) / max(1, len(response))

    return [compute_score(response) for response in responses]


# --- the same skill as it was ported


def reward_fn(prompts, completions, **kwargs) -> list[float]:
    """1.0 for an answer that begins with its tag, else -0.5."""
    return [1.0 if text_of(c).strip().startswith("<answer>") else -0.5 for c in completions]


def think_format_reward(prompts, completions, **kwargs) -> list[float]:
    """1.0 for reasoning and then the answer and nothing else, else -1.0; the guide calls it format_reward."""
    return [1.0 if re.fullmatch(THINKING, text_of(c), re.DOTALL) else -1.0 for c in completions]


def accuracy_reward(prompts, completions, ground_truth, **kwargs) -> list[float]:
    """1.0 for the right answer, else 0.0."""
    rewards = []
    for completion, gt in zip(completions, ground_truth, strict=True):
        extracted = extract_answer(text_of(completion))
        rewards.append(1.0 if extracted == gt else 0.0)
    return rewards


def length_penalty_reward(prompts, completions, **kwargs) -> list[float]:
    """1.0 for nothing, falling to 0.0 at 2000 characters."""
    return [max(0, 1.0 - len(text_of(c)) / 2000) for c in completions]


combined_rewards = [think_format_reward, accuracy_reward]
"""Several at once: ``reward_funcs=combined_rewards``. TRL adds them up, each with its weight."""
