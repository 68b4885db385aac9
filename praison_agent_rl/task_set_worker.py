"""A process of its own that makes and scores the puzzles of reasoning_gym, so that neither can hurt who asks.

Rows are the same in every process only where text hashes are (``PYTHONHASHSEED``), and where the random numbers that
some tasks draw from Python's own source are seeded. Scorers hand what a model wrote to Python's ``eval`` (n_queens and
others, also by sympy: countdown and others), so here only plain values and formulas get through, and one that takes too
long ends this process. It reads one JSON request a line and answers each with one line. It is run as a file
and imports nothing of the package.
"""

import ast
import builtins
import dataclasses
import faulthandler
import json
import logging
import os
import random
import sys
from functools import lru_cache
from typing import Any, TextIO

_LEFT_OUT = ("composite",)  # made of other tasks: several entries of a dataset say the same
_FUNCTIONS = (
    "Symbol Integer Float Rational Abs sqrt cbrt root exp log ln sin cos tan cot sec csc asin acos atan acot sinh cosh "
    "tanh asinh acosh atanh"
)
"""What a formula may call."""
_NUMBERS = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
_VALUES = (*_NUMBERS, ast.List, ast.Tuple, ast.Dict, ast.Load)
_FORMULAS = (*_NUMBERS, ast.Name, ast.Call, ast.Load)


def main() -> None:
    """Answer requests until standard input ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # what tasks print is no answer
    logging.disable(logging.CRITICAL)
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = _rows(**request["rows"]) if "rows" in request else _score(request["score"], nowhere)
            except Exception as error:  # noqa: BLE001 - a task may raise anything; the parent says it
                answer = {"failed": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(answer) + "\n")
            out.flush()


def _rows(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """The entries of a task, or what is wrong with its name or options."""
    from reasoning_gym.factory import DATASETS, create_dataset

    names = sorted(set(DATASETS) - set(_LEFT_OUT))
    if task not in names:
        return {"names": names}
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    if any(name not in known for name in options):
        return {"options": known}
    random.seed(options["seed"])
    try:
        made = create_dataset(task, **options)
    except (AssertionError, ValueError, TypeError) as error:
        return {"refused": str(error) or type(error).__name__}
    entries = [made[place] for place in range(options["size"])]
    if any(entry["answer"] and not _tells_apart(made, entry) for entry in entries[:1]):
        return {"refused": "its scorer gives nonsense as much as the right answer, so nothing can be learned from it"}
    kept = [[entry["question"], entry["answer"], packed(entry["metadata"])] for entry in entries]
    return {"entries": kept}


def _tells_apart(made: Any, entry: dict[str, Any]) -> bool:
    try:
        nonsense = made.score_answer("nonsense", entry)
    except Exception:  # noqa: BLE001 - scorers raise anything on odd answers
        nonsense = 0.0
    return bool(made.score_answer(entry["answer"], entry) > nonsense)


def _score(request: dict[str, Any], nowhere: TextIO) -> Any:
    scored = _scorer(request["task"], json.dumps(request["options"]))  # slow the first time only
    entry = {"answer": request["right"], "metadata": unpacked(request["metadata"]), "question": request["question"]}
    faulthandler.dump_traceback_later(request["seconds"], exit=True, file=nowhere)
    try:
        return float(scored(request["answer"], entry))
    except Exception:  # noqa: BLE001 - scorers raise anything on odd answers
        scored(entry["answer"], entry)  # a task that cannot score its own answer is broken; else the answer is
        return 0.0
    finally:
        faulthandler.cancel_dump_traceback_later()


@lru_cache(maxsize=64)
def _scorer(task: str, options: str) -> Any:
    from reasoning_gym.factory import create_dataset

    _guard()
    return create_dataset(task, **{**json.loads(options), "size": 1, "seed": 0}).score_answer


@lru_cache(maxsize=1)
def _guard() -> None:
    """Let nothing that a model wrote be run: tasks and sympy get no other Python through ``eval`` than is known."""
    from sympy.parsing import sympy_parser

    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym."):
            vars(module)["eval"] = _guarded(eval, _VALUES)
    sympy_parser.eval_expr = _guarded(sympy_parser.eval_expr, _FORMULAS)


def _guarded(run: Any, allowed: tuple[type, ...]) -> Any:
    """``run``, which is given Python as text, with a look at it first."""

    def looks_first(code: str, *names: dict[str, Any]) -> Any:
        check_parts(code, allowed)
        return run(code, *names)

    return looks_first


def check_parts(code: str, allowed: tuple[type, ...]) -> None:
    """Raise ValueError where ``code`` has a part that is not ``allowed``, calls what is unknown or names a builtin."""
    for part in ast.walk(ast.parse(code.strip(), mode="eval")):
        called = isinstance(part, ast.Call) and not (
            isinstance(part.func, ast.Name) and part.func.id in _FUNCTIONS.split()
        )
        named = isinstance(part, ast.Name) and (part.id.startswith("_") or hasattr(builtins, part.id))
        if called or named or not isinstance(part, allowed):
            raise ValueError(f"this is no plain value or formula: {code[:80]!r}")


def packed(value: Any) -> Any:
    """``value`` in what JSON holds, tuples and keys that are no texts included."""
    if isinstance(value, tuple):
        return {"#tuple": [packed(part) for part in value]}
    if isinstance(value, list):
        return [packed(part) for part in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and key[:1] != "#" for key in value):
            return {key: packed(part) for key, part in value.items()}
        return {"#pairs": [[packed(key), packed(part)] for key, part in value.items()]}
    return value.item() if callable(getattr(value, "item", None)) else value


def unpacked(value: Any) -> Any:
    """What `packed` was given."""
    if isinstance(value, list):
        return [unpacked(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "#tuple" in value:
        return tuple(unpacked(part) for part in value["#tuple"])
    pairs = [[unpacked(key), part] for key, part in value["#pairs"]] if "#pairs" in value else value.items()
    return {key: unpacked(part) for key, part in pairs}


if __name__ == "__main__":
    main()
