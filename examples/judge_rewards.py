"""Let a language model score answers: each by criteria, and all of a prompt by comparison.

Against OpenAI (or any provider that litellm knows), or against a server of your own:

    JUDGE_MODEL=openai/gpt-4o-mini OPENAI_API_KEY=... python examples/judge_rewards.py
    JUDGE_MODEL=my-model JUDGE_BASE_URL=http://127.0.0.1:8000/v1 python examples/judge_rewards.py
"""

import asyncio
import os

from praison_agent_rl.agreement import agreement
from praison_agent_rl.judge import RelativeJudge, RubricJudge

QUESTION = "My order 1234 has not arrived after ten days. What can I do?"
ANSWERS = [
    "I am sorry about that. I have looked at order 1234: it left us on Monday, so a parcel trace will tell where it "
    "is. May I start one for you?",
    "Ten days is too long, sorry. Please wait.",
    "Orders sometimes take time.",
]
RATINGS = [5, 2, 1]
"""What people thought of these answers."""


async def main() -> None:
    """Judge the three answers in both ways, show why, what it cost, and how far it agrees with people."""
    place = {"model": os.environ["JUDGE_MODEL"], "base_url": os.environ.get("JUDGE_BASE_URL"), "max_calls": 20}
    rubric = RubricJudge(
        criteria=[
            {"name": "helps", "text": "offers a concrete next step that solves the problem", "weight": 2},
            {"name": "kind", "text": "takes the trouble of the customer seriously"},
        ],
        instructions="The answers are those of a web shop's support agent.",
        **place,
    )
    relative = RelativeJudge(orders=2, **place)
    for judge in (rubric, relative):
        scores = await judge(prompts=[QUESTION] * len(ANSWERS), completions=ANSWERS)
        print(f"{judge.__name__}: {scores}")
        for judged in judge.last:
            print(f"  {judged.answer[:40]!r}: {judged.score}, {judged.failed or judged.reason}")
        print(f"  {judge.usage}")
        print(f"  {agreement(scores, RATINGS)}")


if __name__ == "__main__":
    asyncio.run(main())
