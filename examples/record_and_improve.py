"""Record a session of an agent with tools on the embedded model, look at it, and improve the agent on what was asked.

    python examples/record_and_improve.py [STEPS [QUESTIONS]]

Everything runs on this machine. Besides the record, nothing is given to ``improve`` but the reward.
"""

import json
import sys
from pathlib import Path

from praisonaiagents import Agent

import praison_agent_rl as rl
from praison_agent_rl.models import EMBEDDED, find_weights
from praison_agent_rl.serving import start_server

QUESTIONS = Path(rl.__file__).parent / "demo_data" / "questions.jsonl"


def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def main() -> None:
    """Record, look, build, improve."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 80
    server = start_server(Path(find_weights(EMBEDDED)), name="smollm2")
    model = {"model": f"openai/{server.model}", "base_url": server.url, "api_key": server.api_key, "max_tokens": 48}
    agent = Agent(name="Counter", instructions="Answer briefly and correctly.", llm=model, tools=[word_count])
    with agent.record(tags=["example"]) as recording:
        for line in QUESTIONS.read_text(encoding="utf-8").splitlines()[:count]:
            agent.clear_history()
            agent.chat(json.loads(line)["prompt"])
    rl.feedback(agent.last_run, score=1.0, label="fine")
    print(recording.counts)
    run = list(rl.read_runs(agent="Counter"))[-1]
    print("last:", run.prompt, "->", run.output, f"({len(run.calls)} calls, rated {run.feedback[0].score})")
    print(rl.build_dataset())
    result = agent.improve(
        method="grpo",
        reward_funcs=["praison_agent_rl.demo_rewards:length_penalty"],
        base_model=EMBEDDED,
        max_steps=steps,
        max_completion_length=32,
    )
    print(result)


if __name__ == "__main__":
    main()
