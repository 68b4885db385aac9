"""Run by a Python that has llama-cpp-python: a question on standard input, an answer on standard output, both JSON.

It imports nothing of this package, as that Python need not have it.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # llama.cpp writes to standard output as it likes
    try:
        import llama_cpp  # noqa: F401
    except Exception as error:  # noqa: BLE001  # its library may be of another machine, or missing
        json.dump({"absent": f"{type(error).__name__}: {error}"}, out)
    else:
        json.dump(_answer(question), out)
    out.close()


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    from llama_cpp import Llama

    longest = max(map(len, question["prompts"])) + question["most"]
    llama = Llama(question["file"], n_ctx=longest + 8, n_threads=os.cpu_count(), verbose=False, seed=0)
    read = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in question["texts"]]
    return {"ids": [_complete(llama, prompt, question) for prompt in question["prompts"]], "read": read}


def _complete(llama: Any, prompt: list[int], question: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        found.append(int(token))
        if token in question["ends"] or len(found) == question["most"]:
            break
    return found


if __name__ == "__main__":
    main()
