"""Make recipes/pairs.jsonl: two pairs to each of the demo's questions, as a user's corrections would be.

    python recipes/make_pairs.py recipes/pairs.jsonl        # three minutes of CPU; the same file each time

Chosen is always the short right answer. Rejected is what the embedded model answers by itself (greedy, if it comes to
an end and is not as short), and the answer to another question that begins with the same words, which is as short and
wrong: so neither "the shorter one" nor "the one that the model did not write" is right every time. Pairs of an agent's
own recorded runs are made by ``praison-agent-rl dataset build --kind pairs`` instead.
"""

import json
import sys
from pathlib import Path

from praison_agent_rl import planning
from praison_agent_rl.answering import Manner, answer_rows, load_engine
from praison_agent_rl.demo import QUESTIONS
from praison_agent_rl.demo_rewards import correctness, length_penalty

LONGEST = 48
"""Tokens of an answer; one that is longer did not come to an end."""


def main(out: Path) -> None:
    """Ask, pair and write."""
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    asked = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    settings = {"method": "cpo", "model_name": "smollm2-135m-instruct", "max_completion_length": LONGEST}
    pairs = [pair_of(row, short(row), short(other)) for row, other in zip(asked, others(rows), strict=True)]
    draft = planning.draft_from_config({**settings, "dataset": pairs, "held_out": 0})
    engine = load_engine(draft.base, planning.plan_of(draft))
    for answer in answer_rows(engine, asked, Manner(samples=1)):
        row = asked[answer.prompt]
        if answer.tokens < LONGEST and len(answer.text.split()) > 2:
            pairs.append(pair_of(row, short(row), answer.text.strip()))
    out.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{len(pairs)} pairs of {len(rows)} questions in {out}")


def short(row: dict) -> str:
    """The first accepted answer, as a sentence."""
    text = row["answer"][0]
    return f"{text[0].upper()}{text[1:]}."


def others(rows: list[dict]) -> list[dict]:
    """To each question the one that shares most words at its beginning, and no accepted answer."""
    found = []
    for place, row in enumerate(rows):
        own = {answer.casefold() for answer in row["answer"]}
        # from the next question on, so that a group does not all get the same one
        around = [*rows[place + 1 :], *rows[:place]]
        apart = [other for other in around if own.isdisjoint(answer.casefold() for answer in other["answer"])]
        found.append(max(apart, key=lambda other, row=row: shared(row["prompt"], other["prompt"])))
    return found


def shared(one: str, other: str) -> int:
    """How many words two questions begin with alike."""
    words = list(zip(one.split(), other.split(), strict=False))
    return next((n for n, (a, b) in enumerate(words) if a != b), len(words))


def pair_of(row: dict, chosen: str, rejected: str) -> dict:
    """A row, with what the demo's two rewards say of both sides in all."""
    scores = [score(row, text) for text in (chosen, rejected)]
    sides = {side: [{"role": "assistant", "content": t}] for side, t in (("chosen", chosen), ("rejected", rejected))}
    return {
        "prompt": row["prompt"],
        **sides,
        "chosen_score": scores[0],
        "rejected_score": scores[1],
        "answer": row["answer"],
    }


def score(row: dict, text: str) -> float:
    """Up to 2: right, and short."""
    given = {"prompts": [row["prompt"]], "completions": [text]}
    return round(correctness(**given, answer=[row["answer"]])[0] + length_penalty(**given)[0], 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
