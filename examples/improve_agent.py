"""Improve an agent that runs on a local OpenAI-compatible server.

    python examples/improve_agent.py URL MODEL WEIGHTS [STEPS]

URL is the server's, as http://127.0.0.1:8000/v1, whose key is OPENAI_API_KEY if it wants one; MODEL its name for the
model; WEIGHTS the folder, hub name or GGUF file of what it serves.
"""

import os
import sys
from pathlib import Path

from praisonaiagents import Agent

import praison_agent_rl

QUESTIONS = Path(praison_agent_rl.__file__).parent / "demo_data" / "questions.jsonl"


def main() -> None:
    """Ask, improve, ask again, and go back."""
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    url, model, weights = sys.argv[1:4]
    place = {"model": f"openai/{model}", "base_url": url, "api_key": os.environ.get("OPENAI_API_KEY", "none")}
    agent = Agent(name="Example", instructions="Answer briefly and correctly.", llm=place)
    print("before:", agent.chat("What is the capital of Spain?"))
    result = agent.improve(
        method="grpo",
        data=QUESTIONS,
        reward_funcs=["praison_agent_rl.demo_rewards:length_penalty", "praison_agent_rl.demo_rewards:correctness"],
        base_model=weights,
        max_steps=int(sys.argv[4]) if len(sys.argv) > 4 else 24,
        max_completion_length=32,
    )
    print(result)
    agent.clear_history()  # else the new model reads, and repeats, what the old one said
    print("after:", agent.chat("What is the capital of Spain?"))
    result.rollback()
    print("back:", agent.chat("What is the capital of Spain?"))


if __name__ == "__main__":
    main()
