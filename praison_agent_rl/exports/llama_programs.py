"""llama.cpp's own programs: where they are, which levels they know, and how they are run; no format is written here."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from praison_agent_rl.config_keys import did_you_mean
from praison_agent_rl.errors import ConfigError, MissingExtra, ModelError

FOLDER = "PRAISON_AGENT_RL_LLAMA_CPP"
"""Variable of the environment with a checkout of llama.cpp, or the path of its converter."""
CONVERTER = "convert_hf_to_gguf.py"
QUANTISER = "llama-quantize"

BY_CONVERTER = ("f32", "f16", "bf16", "q8_0")
BY_QUANTISER = (
    *("q2_k", "q2_k_s", "q3_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k", "q4_k_s", "q4_k_m"),
    *("q5_0", "q5_1", "q5_k", "q5_k_s", "q5_k_m", "q6_k", "tq1_0", "tq2_0", "mxfp4_moe"),
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m"),
    *("iq4_nl", "iq4_xs"),
)
"""Of llama.cpp's tools/quantize/quantize.cpp, QUANT_OPTIONS; held by ``make test-gguf`` against the program itself."""
_NEED_IMATRIX = ("q2_k_s", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs")
"""Refused without an importance matrix (src/llama-quant.cpp, ``tensor_requires_imatrix``)."""
_OTHER_NAMES = {"not_quantized": "f16", "fast_quantized": "q8_0", "quantized": "q4_k_m"}
"""Unsloth's, which praisonai-train takes too."""
WHOLE = ("f32", "f16", "bf16")
"""Levels at which nothing is quantised."""


def read_levels(given: Sequence[str]) -> list[str]:
    """The levels by llama.cpp's names, each once.

    Raises:
        ConfigError: one is not known, or none is given.
    """
    levels = [_OTHER_NAMES.get(name.strip().lower(), name.strip().lower()) for name in given]
    known = [*BY_CONVERTER, *BY_QUANTISER]
    wrong = [name for name in levels if name not in known]
    if wrong or not levels:
        said = "; ".join(f"{name!r}{did_you_mean(name, known)}" for name in wrong) or "none is given"
        raise ConfigError(f"no level of quantisation of llama.cpp: {said}; it has: {', '.join(known)}")
    return list(dict.fromkeys(levels))


def check_tools(levels: Sequence[str], imatrix: Path | None) -> None:
    """Whether the programs and files for these levels are here.

    Raises:
        MissingExtra: a program is not.
        ConfigError: the importance matrix is not, or a level needs one and there is none.
    """
    find_converter()
    if any(level in BY_QUANTISER for level in levels):
        find_quantiser()
    if imatrix is not None and not imatrix.is_file():
        raise ConfigError(f"there is no importance matrix at {str(imatrix)!r}; llama-imatrix of llama.cpp makes one")
    if imatrix is None and (needy := [level for level in levels if level in _NEED_IMATRIX]):
        raise ConfigError(
            f"{', '.join(needy)} loses too much without an importance matrix, so llama.cpp refuses; give one "
            "(imatrix_file, --imatrix; llama-imatrix makes it), or take q4_k_m"
        )


def find_converter() -> Path:
    """llama.cpp's ``convert_hf_to_gguf.py``; raises MissingExtra with how to get it."""
    given = os.environ.get(FOLDER)
    if given:
        place = Path(given).expanduser()
        script = place if place.name == CONVERTER else place / CONVERTER
        if script.is_file():
            return script.resolve()
        raise MissingExtra(f"{FOLDER} is {given!r}, and there is no {CONVERTER}; give a checkout of llama.cpp")
    if found := shutil.which(CONVERTER):
        return Path(found).resolve()
    raise MissingExtra(
        f"writing GGUF needs llama.cpp's {CONVERTER}, which is not on the path; set {FOLDER} to a checkout of "
        "llama.cpp. The sources of llama-cpp-python have it in vendor/llama.cpp: "
        "pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xf llama_cpp_python-*.tar.gz"
    )


def find_quantiser() -> Path:
    """llama.cpp's ``llama-quantize``; raises MissingExtra with how to get it."""
    places = []
    if given := os.environ.get(FOLDER):
        checkout = Path(given).expanduser()
        checkout = checkout.parent if checkout.name == CONVERTER else checkout
        places = [checkout / "build" / "bin", checkout / "build" / "bin" / "Release", checkout]
    path = os.pathsep.join([*map(str, places), os.environ.get("PATH", "")])
    if found := shutil.which(QUANTISER, path=path):
        return Path(found)
    raise MissingExtra(
        f"levels other than {', '.join(BY_CONVERTER)} need llama.cpp's {QUANTISER}, which is neither on the path nor "
        f"in build/bin of {FOLDER}; in a checkout: cmake -B build && cmake --build build --target {QUANTISER}"
    )


def convert(model: Path, file: Path, level: str, *, name: str) -> None:
    """Write the model as GGUF at a level of the converter's; ``name`` is what the file says of itself.

    Raises:
        ModelError: the converter does not know the model, or failed.
    """
    script = find_converter()
    arguments = [str(model), "--outfile", str(file), "--outtype", level, "--model-name", name]
    # the script finds its parts beside itself
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    code, said = _run([sys.executable, str(script), *arguments], {**environment, "HF_HUB_OFFLINE": "1"})
    if code or not file.is_file():
        raise ModelError(f"llama.cpp's converter failed (code {code}){_why_not_converted(said, script)}")


def quantise(source: Path, file: Path, level: str, *, imatrix: Path | None) -> list[str]:
    """Write ``source`` at another level; returns what is to be known of the result.

    Raises:
        ModelError: llama-quantize failed.
    """
    matrix = ["--imatrix", str(imatrix)] if imatrix else []
    code, said = _run([str(find_quantiser()), *matrix, str(source), str(file), level.upper()], dict(os.environ))
    if code or not file.is_file() or "failed to quantize" in said:
        raise ModelError(f"llama-quantize failed at {level} (code {code}); it said:\n{_end_of(said)}")
    fallback = re.search(r"(\d+) of (\d+) tensor\(s\) required fallback quantization", said)
    if fallback is None:
        return []
    return [f"{fallback[1]} of {fallback[2]} tensors have rows that {level} does not divide, and are kept in more bits"]


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Its exit code, which is below 0 where it was killed, and what it said; a file may be there, and half of one."""
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace")


def _why_not_converted(said: str, script: Path) -> str:
    if "No space left on device" in said:
        return ": the disk is full; make room, or give a folder on another disk (--out)"
    if "pre-tokenizer was not recognized" in said:
        digest = re.search(r"chkhsh:\s+(\w+)", said)
        return (
            ": it does not know how this tokenizer splits text (llama.cpp#8649). It goes by a hash of the tokenizer"
            f"{f' ({digest[1]})' if digest else ''}, so a token added in training, or a newer model, is enough; update "
            f"llama.cpp ({script}), or keep the base's own tokenizer; to=hf serves the model meanwhile"
        )
    if match := re.search(r"Model (\S+) is not supported|Architecture '?(\S+?)'? not supported", said):
        return (
            f": it does not know models of the kind {match[1] or match[2]}; update llama.cpp ({script}), or export hf"
        )
    if match := re.search(r"No module named '([\w.]+)'", said):
        return f": it needs {match[1]}: {sys.executable} -m pip install {match[1]}"
    return f"; it said:\n{_end_of(said)}"


def _end_of(said: str) -> str:
    return "\n".join(said.strip().splitlines()[-12:])
