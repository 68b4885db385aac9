"""Make what the recipe trains, in .praisonai/two_tools: a tiny model, and questions; 64 of them are asked and recorded.

python -m recipes.agent.prepare        # a minute of CPU; the same model and questions each time
"""

import json
import random
from pathlib import Path

from examples.two_tools import make_model, questions, record

FOLDER = Path(".praisonai/two_tools")


def main() -> None:
    """Make the model, write the questions, record."""
    make_model(FOLDER / "model")
    asked = questions()
    random.Random(0).shuffle(asked)
    rows = "".join(json.dumps({"prompt": question}) + "\n" for question in asked)
    (FOLDER / "questions.jsonl").write_text(rows, encoding="utf-8")
    record(asked[:64])
    print(f"{FOLDER}: a model and {len(asked)} questions, of which 64 were asked and recorded")


if __name__ == "__main__":
    main()
