"""Have an export loaded again, in a process of its own, and asked the held-out prompts of its version."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from praison_agent_rl.child import last_lines, start_child, stop_child
from praison_agent_rl.errors import MissingExtra
from praison_agent_rl.exports.jobs import Job
from praison_agent_rl.exports.llama_programs import WHOLE
from praison_agent_rl.exports.llama_python import find_llama_python
from praison_agent_rl.exports.made import Check
from praison_agent_rl.process_settings import best_device
from praison_agent_rl.records import Record
from praison_agent_rl.runs import read_record, write_record
from praison_agent_rl.vllm_servers.serving import find_vllm

Loader = Literal["transformers", "transformers' GGUF reader", "llama.cpp", "vLLM"]
SAME, ROUNDED, QUANTISED = 0.02, 0.05, 0.1
"""How much of the range of the held-out scores the mean may be lower: asked by the engine that the version was
measured by, on such a device; by another one, or in other 16 bits; and quantised."""


class Question(Record):
    """What the process that asks is told."""

    records: str
    """Folder of the version's or the run's records."""
    model: str
    """Folder of its merged weights, with the tokenizer."""
    base: str
    """Weights beneath its adapter."""
    loader: Loader
    made: str
    """What is loaded: a folder, a GGUF file, or an adapter."""
    share: float
    """``SAME``, ``ROUNDED`` or ``QUANTISED``."""
    ends: list[int]
    """Tokens that end an answer."""


def unchecked(why: str) -> Check:
    """A check that did not take place."""
    return Check(status="unchecked", text=f"not checked: {why}")


def check_folder(job: Job, folder: Path) -> Check:
    """Load a merged model by transformers and ask it."""
    same = job.subject.plan.device.partition(":")[0] == best_device().partition(":")[0]
    return _ask(job, "transformers", folder, SAME if same else ROUNDED)


def check_files(job: Job, files: Sequence[Path]) -> dict[str, Check]:
    """Load each GGUF file by llama.cpp where llama-cpp-python is found, else by transformers."""
    loader: Loader = "llama.cpp" if find_llama_python() else "transformers' GGUF reader"
    return {file.name: _ask(job, loader, file, ROUNDED if _level_of(file) in WHOLE else QUANTISED) for file in files}


def check_adapter(job: Job, folder: Path, base: str) -> Check:
    """Let vLLM serve the adapter, where there is one, and ask it."""
    try:
        find_vllm()
    except MissingExtra as missing:
        return unchecked(str(missing))
    return _ask(job, "vLLM", folder, ROUNDED, base=base)


def _level_of(file: Path) -> str:
    return file.stem.rpartition("-")[2].lower()


def _ask(job: Job, loader: Loader, made: Path, share: float, *, base: str | None = None) -> Check:
    subject = job.subject
    if not subject.records.held_out_rows.is_file() or not subject.records.held_out_rows.stat().st_size:
        return unchecked("nothing was held out that it could be asked")
    if not subject.records.answers("new").is_file():
        return unchecked("its version was not measured on the held-out prompts")
    job.say(f"asking {made.name if made.is_file() else job.out.name} the held-out prompts, by {loader}")
    question = Question(
        records=str(subject.records.root.resolve()),
        model=str(subject.model.resolve()),
        base=base or subject.plan.base,
        loader=loader,
        made=str(made.resolve()),
        share=share,
        ends=job.ends.ids,
    )
    with tempfile.TemporaryDirectory(prefix="praison-agent-rl-check-") as scratch:
        return _answer(question, Path(scratch))


def _answer(question: Question, scratch: Path) -> Check:
    asked, answered, log = (scratch / name for name in ("question.json", "check.json", "log.txt"))
    write_record(asked, question)
    process: subprocess.Popen[bytes] = start_child(
        "praison_agent_rl.exports.asking", [str(asked), str(answered)], log=log, device=best_device()
    )
    try:
        process.wait()
    finally:
        stop_child(process)
    if answered.exists():
        return read_record(answered, Check)
    return Check(status="failed", text=f"{question.loader} could not load and ask it; it said:\n{last_lines(log)}")
