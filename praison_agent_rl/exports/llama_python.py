"""Ask a GGUF file by llama.cpp through llama-cpp-python, which may live in an environment of its own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from praison_agent_rl.errors import MissingExtra, ModelError

PYTHON = "PRAISON_AGENT_RL_LLAMA_PYTHON"
"""Variable of the environment that names a Python with llama-cpp-python, if this one has none."""
_WORKER = Path(__file__).with_name("llama_worker.py")


class LlamaAnswers(NamedTuple):
    """What llama.cpp made of prompts."""

    ids: list[list[int]]
    """The likeliest completion of each, the end token included."""
    read: list[list[int]]
    """Each prompt's text as the file's own tokenizer splits it."""


def find_llama_python() -> str | None:
    """The Python that has llama-cpp-python: the one that the environment names, or this one; None where there is none.

    Raises:
        ModelError: the environment names one that is not there.
    """
    if given := os.environ.get(PYTHON):
        found = shutil.which(given)
        if found is None:
            raise ModelError(f"{PYTHON} is {given!r}, and there is no such program; name a Python, or unset it")
        return found
    return sys.executable if importlib.util.find_spec("llama_cpp") else None


def ask_llama(
    file: Path, prompts: Sequence[Sequence[int]], texts: Sequence[str], *, most: int, ends: Sequence[int]
) -> LlamaAnswers:
    """The likeliest completion of each prompt, at most ``most`` tokens; ``texts`` are the prompts as texts.

    Raises:
        ModelError: llama.cpp could not load the file, or failed.
        MissingExtra: that Python has no llama-cpp-python, or a broken one.
    """
    python = find_llama_python()
    assert python is not None
    question = {"file": str(file), "prompts": prompts, "texts": texts, "most": most, "ends": ends}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept["PYTHONSAFEPATH"] = "1"  # the modules beside the worker are none of that Python's
    done = subprocess.run(
        [python, str(_WORKER)], input=json.dumps(question).encode(), env=kept, capture_output=True, check=False
    )
    if done.returncode:
        said = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-12:])
        raise ModelError(f"llama.cpp could not load and ask {str(file)!r}; it said:\n{said}")
    answer = json.loads(done.stdout)
    if why := answer.get("absent"):
        raise MissingExtra(f"{python} cannot import llama_cpp ({why}); {python} -m pip install llama-cpp-python")
    return LlamaAnswers(answer["ids"], answer["read"])
