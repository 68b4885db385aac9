"""A process of its own that compares formulas, since no thread could end what Python calculates in one step.

``9^{9^9}`` in an answer would hold the interpreter for hours, whatever timeout stands around it. Here a watchdog of the
interpreter ends the whole process instead. It reads one JSON request a line and answers each with one line: a score or
null. It is run as a file and imports nothing of the package.
"""

import faulthandler
import json
import logging
import os
import re
import sys
from functools import lru_cache
from typing import Any, TextIO

_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|exp|sqrt|pi|ln)\b)[^\W\d_]{3,}")


def main() -> None:
    """Answer requests until standard input ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    logging.disable(logging.CRITICAL)
    out.write("ready\n")
    out.flush()
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            out.write(json.dumps(_answer(json.loads(line), nowhere)) + "\n")
            out.flush()


def _answer(request: dict[str, Any], nowhere: TextIO) -> Any:
    try:
        score = {"math_equal": _math_equal, "accuracy": _accuracy}[request["what"]]()  # slow the first time only
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything; the parent says it
        return {"failed": f"{type(error).__name__}: {error}"}
    faulthandler.dump_traceback_later(request["seconds"], exit=True, file=nowhere)
    try:
        return score(request["given"], request["right"])
    except Exception:  # noqa: BLE001 - sympy raises anything on odd input
        return 0.0
    finally:
        faulthandler.cancel_dump_traceback_later()


@lru_cache(maxsize=1)
def _math_equal() -> Any:
    from math_verify import parse, verify

    parsed = lru_cache(maxsize=1024)(lambda text: parse(text, parsing_timeout=None))

    def score(given: dict[str, Any], right: list[str]) -> float | None:
        wanted = [one for text in right if (one := parsed(as_math(text)))]
        if not wanted:
            return None
        found = parse(as_math(given["text"]) if given["marked"] else given["text"], parsing_timeout=None)
        return float(any(verify(one, found, timeout_seconds=None) for one in wanted)) if found else 0.0

    score({"text": "$1$", "marked": False}, ["1"])  # the first formula takes a second, which is not an answer's fault
    return score


@lru_cache(maxsize=1)
def _accuracy() -> Any:
    from trl.rewards import accuracy_reward

    def score(given: dict[str, Any], right: list[str]) -> float | None:
        scores = accuracy_reward([[{"content": given["text"]}]] * len(right), right)
        return max((one for one in scores if one is not None), default=None)

    score({"text": "\\boxed{1}"}, ["1"])
    return score


def as_math(text: str) -> str:
    """A short answer as LaTeX, unless it has markup of its own or words in it."""
    text = text.replace("\\$", "")  # of an amount of money
    own = not text or "$" in text or "\\boxed" in text or _WORD.search(text)
    return text if own else f"${text}$"


if __name__ == "__main__":
    main()
