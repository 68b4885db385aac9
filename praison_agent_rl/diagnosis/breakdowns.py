"""What breaks in a run: rewards and tools that fail, prompts that do not fit, memory that runs out."""

from collections.abc import Iterator, Mapping
from typing import Any

from praison_agent_rl.diagnosis.seen import WINDOW, Seen, Symptom, WatchRules, number_of
from praison_agent_rl.diagnosis.signal import calls_of

FAILED_AT_ONCE, FAILED = 0.2, 0.05
"""Share of a step's answers that a reward failed for, and the mean share of a window."""
TOOLS_FAILED = 0.3
"""Share of tool calls that failed."""
CALLS_FAULTY = 0.5
"""Share of answers whose tool call has no sound form, where tools are shown and not run."""
LEFT_OUT = 0.05
"""Share of the prompts."""
_FEWEST_GENERATIONS = 4


def reward_failures(seen: Seen) -> Symptom | None:
    """A reward raises, hangs, or returns something else than scores."""
    calls = calls_of(seen.steps[-1])
    for name, part in calls.items():
        failed = number_of(part, "failed") or 0.0
        recent = [number_of(calls_of(step).get(name, {}), "failed") or 0.0 for step in seen.steps[-WINDOW:]]
        mean = sum(recent) / WINDOW
        if failed < FAILED_AT_ONCE and mean < FAILED:
            continue
        bad = "".join(
            f", {number:.0f} of them {kind}"
            for key, kind in (("nan", "NaN"), ("infinite", "infinite"))
            if (number := number_of(part, key))
        )
        said = f": {part['error']}" if part.get("error") else ""
        return seen.warning(
            "reward failures",
            f"the reward {name} gave no sound score to {failed:.0%} of the answers of step {seen.step}{bad}{said}",
            f"mend {name}; try it with `praison-agent-rl rewards check`; reward_timeout, reward_retries and "
            "reward_failures say how long it is waited for, and when the run ends",
        )
    return None


def tool_failures(seen: Seen) -> Symptom | None:
    """Tools fail, or are called in a form that cannot be read."""
    failed, faulty = seen.now("tool_failures"), seen.now("faulty_calls")
    called = any(number_of(step, "tool_calls") for step in seen.steps[-WINDOW:])
    if failed is not None and called and failed >= TOOLS_FAILED:
        text = f"{failed:.0%} of the tool calls of the last {WINDOW} steps failed"
    elif faulty is not None and faulty >= CALLS_FAULTY:
        text = f"{faulty:.0%} of the answers of the last {WINDOW} steps have a tool call that cannot be read or run"
    else:
        return None
    advice = "look at what the tools answer; say in the prompt how they are called, or reward calls that are sound"
    return seen.warning("tool failures", text, advice)


def long_prompts(left_out: int, of: int, *, longest: int, limit: int, key: str) -> Symptom | None:
    """Prompts that were left out because they are longer than ``limit`` tokens, which ``key`` says."""
    if not of or left_out < LEFT_OUT * of:
        return None
    return Symptom(
        name="long prompts",
        step=0,
        text=f"{left_out} of {of} training prompts ({left_out / of:.0%}) are longer than {limit} tokens ({key}) and "
        f"are not trained on; the longest has {longest}",
        advice=f"raise max_seq_length or lower max_completion_length so that {longest} tokens fit"
        + (", and raise max_prompt_length" if key == "max_prompt_length" else ""),
        severity="warning",
    )


def out_of_memory(rules: WatchRules, *, step: int, said: str) -> Symptom:
    """What to lower, in order: first what changes nothing but the time that a step takes, then what learns less."""
    first = next(iter(said.strip().splitlines()), "no more is known")[:200]
    ways = [f"{place}. {way}" for place, way in enumerate(what_to_lower(rules.settings), 1)]
    return Symptom(
        name="out of memory",
        step=step,
        text=f"the memory ran out after step {step}: {first}",
        advice="change one after the other until it fits: " + "; ".join(ways),
        severity="stop",
    )


def what_to_lower(settings: Mapping[str, Any]) -> list[str]:
    """Keys to change when memory runs out, each with its value before and after, in the order to try them."""
    return [*_without_loss(settings), *_at_a_loss(settings)]


def _without_loss(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("fast_inference"):
        share = settings.get("gpu_memory_utilization", 0.3)
        yield f"gpu_memory_utilization {share:g} -> {share / 2:g} (the share of the GPU that vLLM takes)"
    micro, steps = (
        int(settings.get("per_device_train_batch_size", 8)),
        int(settings.get("gradient_accumulation_steps", 1)),
    )
    if micro > 1:
        less = max(d for d in range(1, micro // 2 + 1) if micro % d == 0)
        yield (
            f"per_device_train_batch_size {micro} -> {less} with gradient_accumulation_steps {steps} -> "
            f"{steps * micro // less} (the same updates)"
        )
    if settings.get("gradient_checkpointing") is not True:
        yield "gradient_checkpointing -> true (slower)"


def _at_a_loss(settings: Mapping[str, Any]) -> Iterator[str]:
    longest, group = int(settings.get("max_completion_length", 256)), int(settings.get("num_generations", 8))
    if longest > 1:
        yield f"max_completion_length {longest} -> {max(1, longest // 2)}"
    if group > _FEWEST_GENERATIONS:
        yield f"num_generations {group} -> {max(_FEWEST_GENERATIONS, group // 2)}"
    if not settings.get("load_in_4bit"):
        yield "load_in_4bit -> true"
