"""What an export checks before any work, what it leaves behind, and what it says of a version."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from praison_agent_rl import registry
from praison_agent_rl.commands.export import say_export
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, MissingExtra, ModelError, VersionDamaged, VersionError
from praison_agent_rl.exports import export, from_config, llama_programs, ollama
from praison_agent_rl.exports.adapters import check_servable
from praison_agent_rl.exports.cards import model_card, write_card
from praison_agent_rl.exports.checking import unchecked
from praison_agent_rl.exports.end_tokens import EndTokens
from praison_agent_rl.exports.folders import copy_files, new_folder
from praison_agent_rl.exports.from_config import check_publishing, publish_as_configured
from praison_agent_rl.exports.gguf_files import adds_bos
from praison_agent_rl.exports.jobs import Job, Written
from praison_agent_rl.exports.kinds import Kind, checked
from praison_agent_rl.exports.llama_programs import (
    CONVERTER,
    FOLDER,
    QUANTISER,
    check_tools,
    convert,
    quantise,
    read_levels,
)
from praison_agent_rl.exports.llama_python import PYTHON, ask_llama, find_llama_python
from praison_agent_rl.exports.made import Check, Export, File, read_options
from praison_agent_rl.exports.ollama import check_name, create
from praison_agent_rl.exports.ollama_templates import OllamaTemplate
from praison_agent_rl.exports.subjects import check_exportable, find_subject
from praison_agent_rl.publishing import publish_version
from tests.finished_runs import finished_run, flip_a_byte, snapshot, weights_in

AGENT = "Support Bot"


@pytest.fixture
def home(in_tmp: Path) -> Path:
    """v1 of the agent, which is current, and v2, which the gate did not let through."""
    place = in_tmp / ".praisonai" / "rl"
    for name, difference in (("one", 0.2), ("two", 0.0)):
        run = finished_run(place / "runs" / name, weights_in(in_tmp / "base"), difference=difference, agent=AGENT)
        publish_version(place, AGENT, run)
    registry.promote(place, AGENT, "v1")
    return place


# --- which one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [("Support Bot", "v1"), ("support-bot", "v1"), ("Support Bot@v2", "v2"), ("support-bot/v2", "v2")],
)
def test_a_version_is_found_by_agent_and_number(home: Path, text: str, version: str) -> None:
    found = find_subject(text, home)
    assert found.label == f"Support Bot/{version}" and found.name == f"support-bot-{version}"
    assert found.model == home.resolve() / "versions" / "support-bot" / version / "model"
    assert found.passed is (version == "v1") and found.comparison is not None and found.merge is not None


def test_a_folder_of_the_agents_name_does_not_hide_it(home: Path, in_tmp: Path) -> None:
    (in_tmp / "support-bot").mkdir()
    assert find_subject("support-bot", home).label == "Support Bot/v1"


def test_a_run_is_found_before_and_after_it_became_a_version(home: Path, in_tmp: Path) -> None:
    run = finished_run(in_tmp / "my run", weights_in(in_tmp / "base"), agent=None)
    before = find_subject(str(run.root), home)
    assert (before.label, before.name, before.version) == (str(run.root), "my-run", None)
    assert before.model == run.merged and before.passed is True
    made = find_subject(home / "runs" / "two", home)
    assert made.label == "Support Bot/v2" and made.passed is False
    assert find_subject(Path(made.version.folder), home).label == "Support Bot/v2"


def test_a_run_without_a_verdict_is_neither_let_through_nor_refused(home: Path, in_tmp: Path) -> None:
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "base"), agent=None)
    run.verdict_file.unlink()
    run.comparison_file.unlink()
    run.held_out_rows.write_text("")
    weights_in(run.merged)
    found = find_subject(run.root, home)
    assert found.passed is None and found.comparison is None
    check_exportable(found, force=False)
    assert "Nothing was held out" in model_card(found)


def test_what_cannot_be_exported_is_told_why(home: Path, in_tmp: Path) -> None:
    with pytest.raises(VersionError, match="has no version 'v9'; it has: v1, v2"):
        find_subject("Support Bot@v9", home)
    with pytest.raises(VersionError, match="agents with versions: 'Support Bot'"):
        find_subject("nobody", home)
    registry.rollback(home, AGENT)
    with pytest.raises(VersionError, match="name one, as Support Bot@v1"):
        find_subject("Support Bot", home)
    reward = finished_run(in_tmp / "reward", weights_in(in_tmp / "base"), config={"method": "reward"})
    with pytest.raises(ConfigError, match="a reward model"):
        find_subject(reward.root, home)
    unfinished = finished_run(in_tmp / "half", weights_in(in_tmp / "base"), agent=None)
    shutil.rmtree(unfinished.merged)
    with pytest.raises(ConfigError, match="--resume"):
        find_subject(unfinished.root, home)


def test_only_what_the_gate_let_through_and_nobody_changed_may_leave(home: Path) -> None:
    refused = find_subject("Support Bot@v2", home)
    with pytest.raises(VersionError, match=r"not let through by the gate \(not better\).*--force"):
        check_exportable(refused, force=False)
    check_exportable(refused, force=True)
    good = find_subject("Support Bot@v1", home)
    flip_a_byte(good.model / "model.safetensors")
    with pytest.raises(VersionDamaged, match=r"model/model.safetensors was changed.*versions restore 'Support Bot' v1"):
        check_exportable(good, force=True)


def test_an_adapter_that_vllm_refuses_is_not_exported_for_it(home: Path) -> None:
    found = find_subject("Support Bot", home)
    (found.adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "use_dora": True}))
    with pytest.raises(ConfigError, match=r"no adapter with use_dora.*--to hf"):
        check_servable(found)
    (found.adapter / "adapter_config.json").write_text(json.dumps({"r": 1000}))
    with pytest.raises(ConfigError, match=r"rank 1000, and vLLM serves none above 512.*--to hf"):
        check_servable(found)


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_something_is_left_alone(in_tmp: Path) -> None:
    (in_tmp / "out").mkdir()
    (in_tmp / "out" / "mine.txt").write_text("mine")
    (in_tmp / "file").write_text("mine")
    for name in ("out", "file"):
        with pytest.raises(ConfigError, match="holds something already"), new_folder(in_tmp / name):
            pytest.fail("nothing may be written")
    assert snapshot(in_tmp) == {"out/mine.txt": b"mine", "file": b"mine"}


def test_what_fails_leaves_nothing_and_what_was_killed_is_taken_away(in_tmp: Path) -> None:
    left = in_tmp / ".out.part"
    left.mkdir()
    (left / "half").write_text("half")
    with pytest.raises(ModelError), new_folder(in_tmp / "out") as folder:
        (folder / "a").write_text("a")
        raise ModelError("no")
    assert list(in_tmp.iterdir()) == []
    (in_tmp / "out").mkdir()
    with new_folder(in_tmp / "out") as folder:
        assert folder != in_tmp / "out" and list(folder.iterdir()) == []
        (folder / "a").write_text("a")
        assert not (in_tmp / "out" / "a").exists()
    assert snapshot(in_tmp) == {"out/a": b"a"}


def test_a_folder_that_was_filled_meanwhile_is_left_alone(in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match="holds something"), new_folder(in_tmp / "out") as folder:
        (folder / "ours").write_text("ours")
        (in_tmp / "out").mkdir()
        (in_tmp / "out" / "theirs").write_text("theirs")
    assert snapshot(in_tmp) == {"out/theirs": b"theirs"}


def test_a_users_copy_shares_no_bytes_with_the_version(in_tmp: Path) -> None:
    model = weights_in(in_tmp / "model", b"weights")
    for name, linked in (("copy", False), ("staged", True)):
        copy_files(model, in_tmp / name, linked=linked)
        same = os.path.samefile(model / "model.safetensors", in_tmp / name / "model.safetensors")
        assert same is linked and snapshot(in_tmp / name) == snapshot(model)


# --- llama.cpp ------------------------------------------------------------------------------------------------------


def test_levels_are_read_by_their_names_and_those_of_unsloth() -> None:
    assert read_levels(["Q4_K_M", "f16", "q4_k_m"]) == ["q4_k_m", "f16"]
    assert read_levels(["fast_quantized", "not_quantized", "quantized"]) == ["q8_0", "f16", "q4_k_m"]
    with pytest.raises(ConfigError, match=r"'q4_k_x'; did you mean 'q4_k_s'\?; 'best'.*it has: f32, f16"):
        read_levels(["q4_k_x", "best"])
    with pytest.raises(ConfigError, match="none is given"):
        read_levels([])


def program(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)
    return path


def test_programs_are_found_in_a_checkout_or_on_the_path(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(in_tmp / "nothing"))
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(MissingExtra, match=f"{FOLDER} to a checkout.*vendor/llama.cpp.*pip download"):
        check_tools(["q8_0"], None)
    monkeypatch.setenv(FOLDER, str(in_tmp / "llama.cpp"))
    with pytest.raises(MissingExtra, match=f"there is no {CONVERTER}"):
        check_tools(["q8_0"], None)
    script = program(in_tmp / "llama.cpp" / CONVERTER, "")
    check_tools(["q8_0"], None)
    with pytest.raises(MissingExtra, match="cmake --build build --target llama-quantize"):
        check_tools(["q4_k_m"], None)
    quantiser = program(in_tmp / "llama.cpp" / "build" / "bin" / QUANTISER, "")
    check_tools(["q4_k_m"], None)
    monkeypatch.setenv(FOLDER, str(script))
    assert llama_programs.find_converter() == script.resolve() and llama_programs.find_quantiser() == quantiser
    monkeypatch.delenv(FOLDER)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{quantiser.parent}")
    assert llama_programs.find_converter() == script.resolve() and llama_programs.find_quantiser() == quantiser


def test_a_level_that_needs_an_importance_matrix_is_refused_without(in_tmp: Path, monkeypatch) -> None:
    program(in_tmp / CONVERTER, "")
    program(in_tmp / QUANTISER, "")
    monkeypatch.setenv(FOLDER, str(in_tmp))
    with pytest.raises(ConfigError, match="iq2_xs loses too much"):
        check_tools(["q4_k_m", "iq2_xs"], None)
    with pytest.raises(ConfigError, match="no importance matrix at"):
        check_tools(["iq2_xs"], in_tmp / "none.gguf")
    (in_tmp / "matrix.gguf").write_bytes(b"GGUF")
    check_tools(["iq2_xs"], in_tmp / "matrix.gguf")


CHKHSH = (
    "WARNING:hf-to-gguf:** chkhsh:  ab12cd\\nWARNING:hf-to-gguf:** WARNING: The BPE pre-tokenizer was not recognized!"
)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (CHKHSH, r"llama.cpp#8649.*hash of the tokenizer \(ab12cd\)"),
        ("ERROR:hf-to-gguf:Model FooForCausalLM is not supported", "models of the kind FooForCausalLM"),
        ("ModuleNotFoundError: No module named 'sentencepiece'", "-m pip install sentencepiece"),
        ("something else", "it said:\nsomething else"),
    ],
)
def test_a_converter_that_fails_is_told_with_what_to_do(in_tmp: Path, monkeypatch, said: str, told: str) -> None:
    program(in_tmp / CONVERTER, f'print("{said}")\nraise SystemExit(1)')
    monkeypatch.setenv(FOLDER, str(in_tmp))
    with pytest.raises(ModelError, match=told):
        convert(in_tmp, in_tmp / "out.gguf", "f16", name="m")


def test_the_programs_are_run_as_llama_cpp_wants_them(in_tmp: Path, monkeypatch) -> None:
    writes = (
        "import json, sys, pathlib\nplace = pathlib.Path(sys.argv[{0}])\nplace.write_text(json.dumps(sys.argv[1:]))\n"
    )
    program(in_tmp / CONVERTER, writes.format(3))
    program(
        in_tmp / QUANTISER,
        writes.format(-2) + "print('x: WARNING: 30 of 272 tensor(s) required fallback quantization')",
    )
    monkeypatch.setenv(FOLDER, str(in_tmp))
    convert(in_tmp / "model", in_tmp / "a.gguf", "f16", name="bot v1")
    assert json.loads((in_tmp / "a.gguf").read_text()) == [
        *(str(in_tmp / "model"), "--outfile", str(in_tmp / "a.gguf"), "--outtype", "f16", "--model-name", "bot v1")
    ]
    notes = quantise(in_tmp / "a.gguf", in_tmp / "b.gguf", "q4_k_m", imatrix=in_tmp / "m.gguf")
    assert json.loads((in_tmp / "b.gguf").read_text()) == [
        *("--imatrix", str(in_tmp / "m.gguf"), str(in_tmp / "a.gguf"), str(in_tmp / "b.gguf"), "Q4_K_M")
    ]
    assert notes == ["30 of 272 tensors have rows that q4_k_m does not divide, and are kept in more bits"]


def test_whether_an_engine_adds_the_bos_token_is_read_from_the_file() -> None:
    assert adds_bos({"tokenizer.ggml.model": "llama"}) and adds_bos({"tokenizer.ggml.pre": "llama-bpe"})
    assert not adds_bos({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"})
    assert not adds_bos({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False})
    assert adds_bos({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True})


FAKE_LLAMA = """
class Llama:
    def __init__(self, path, **settings):
        print("noise on standard output", flush=True)
        if "broken" in path:
            raise ValueError("no such file")
        assert settings["n_ctx"] >= 8

    def tokenize(self, text, *, add_bos, special):
        assert special and not add_bos
        return list(text)

    def generate(self, tokens, *, temp, top_k, repeat_penalty):
        assert (temp, top_k, repeat_penalty) == (0.0, 1, 1.0)
        yield from (tokens[-1] + step for step in range(1, 9))
"""


def test_llama_cpp_is_asked_in_a_python_of_its_own(in_tmp: Path, monkeypatch) -> None:
    (in_tmp / "its" / "llama_cpp.py").parent.mkdir()
    (in_tmp / "its" / "llama_cpp.py").write_text(FAKE_LLAMA)
    wrapper = f"import os, sys\nos.environ['PYTHONPATH'] = {str(in_tmp / 'its')!r}\n"
    python = program(in_tmp / "python", wrapper + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    monkeypatch.setenv(PYTHON, str(python))
    # the first ends at its end token 5, the second after four tokens
    found = ask_llama(in_tmp / "a.gguf", [[1, 2], [6]], ["ab", "c"], most=4, ends=[5])
    assert found == ([[3, 4, 5], [7, 8, 9, 10]], [[97, 98], [99]])
    with pytest.raises(ModelError, match=r"could not load and ask .*broken.gguf.*\n(.*\n)*ValueError: no such file"):
        ask_llama(in_tmp / "broken.gguf", [[1]], ["a"], most=4, ends=[5])
    monkeypatch.setenv(PYTHON, str(in_tmp / "none"))
    with pytest.raises(ModelError, match=f"{PYTHON} is .*there is no such program"):
        find_llama_python()


# --- Ollama ---------------------------------------------------------------------------------------------------------


def job_of(home: Path, out: Path, said: list[str], **options) -> Job:
    ends = EndTokens([2], ["<|im_end|>"], [])
    return Job(find_subject("Support Bot", home), read_options(options), out, ends, said.append)


def test_ollama_makes_the_model_where_it_is_and_is_told_of_where_not(home: Path, in_tmp: Path, monkeypatch) -> None:
    out = in_tmp / "out"
    out.mkdir()
    said: list[str] = []
    job = job_of(home, out, said, name="bot:v1")
    monkeypatch.setenv("PATH", str(in_tmp / "bin"))
    assert "no command 'ollama'" in create(job)[0] and said == []
    program(in_tmp / "bin" / "ollama", "import pathlib, sys\npathlib.Path('asked').write_text(' '.join(sys.argv[1:]))")
    assert create(job) == ["Ollama has it as 'bot:v1'"]
    assert (out / "asked").read_text() == "create bot:v1 -f Modelfile"
    assert said == [f"ollama create bot:v1 -f {out / 'Modelfile'}"]


def test_the_modelfile_has_template_ends_and_room_and_no_adapter(home: Path, in_tmp: Path) -> None:
    job = job_of(home, in_tmp / "out", [])
    template = OllamaTemplate("{{ .System }}\n", ("plain",), ())
    assert ollama._modelfile(job, in_tmp / "bot-v1-Q8_0.gguf", template).splitlines() == [
        "# Support Bot/v1, exported by praison-agent-rl",
        "FROM ./bot-v1-Q8_0.gguf",
        'TEMPLATE """{{ .System }}',
        '"""',
        'PARAMETER stop "<|im_end|>"',
        "PARAMETER repeat_penalty 1",
    ]
    run = finished_run(in_tmp / "long", weights_in(in_tmp / "base"), config={"max_seq_length": 8192}, agent=None)
    longer = job._replace(subject=find_subject(run.root, home))
    text = ollama._modelfile(longer, in_tmp / "a.gguf", None)
    assert "PARAMETER num_ctx 8192\n" in text and "TEMPLATE" not in text and "ADAPTER" not in text


def test_names_of_ollama_are_checked() -> None:
    for name in ("bot", "me/bot:v1", "bot-2.5_x"):
        check_name(name)
    for name in ("", "my bot", "bot:", "a/b/"):
        with pytest.raises(ConfigError, match="no name of a model in Ollama"):
            check_name(name)


# --- cards ----------------------------------------------------------------------------------------------------------


def test_the_card_says_where_a_version_comes_from_and_what_was_measured(home: Path, in_tmp: Path) -> None:
    (in_tmp / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base")
    card = model_card(find_subject("Support Bot@v1", home), tags=("mine",))
    head, _, text = card.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "license": "apache-2.0",
        "tags": ["praison-agent-rl", "grpo", "mine"],
    }  # fmt: skip
    for line in (
        "# Support Bot/v1",
        "- base: base",
        "- licence of the base: apache-2.0",
        "- trained for the agent 'Support Bot'",
        "- data: 3 rows to train on, 2 held out",
        "| total | 0.5 | 0.7 | +0.2 | +0.1 to +0.3 |",
        "| letters | 0.5 | 0.7 | +0.2 | +0.1 to +0.3 |",
        "Verdict of the gate: promoted.",
    ):
        assert line in text.splitlines() or line in text, line
    assert str(in_tmp) not in card
    assert "by force, against the verdict" in model_card(find_subject("Support Bot@v2", home))


def test_the_card_names_a_base_of_the_hub_and_an_unknown_licence(home: Path, in_tmp: Path) -> None:
    run = finished_run(in_tmp / "run", Path("owner/base"), agent=None)
    card = model_card(find_subject(run.root, home))
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "owner/base"
    assert "licence of the base: unknown" in card and "license:" not in card
    assert "reward" not in yaml.safe_load(card.split("---\n")[1])["tags"]


def test_a_card_is_written_beside_a_linked_one_and_not_through_it(home: Path, in_tmp: Path) -> None:
    model, staged = weights_in(in_tmp / "model"), in_tmp / "staged"
    (model / "README.md").write_text("the base's own")
    copy_files(model, staged, linked=True)
    write_card(find_subject("Support Bot", home), staged)
    assert (model / "README.md").read_text() == "the base's own"
    assert "# Support Bot/v1" in (staged / "README.md").read_text()


# --- options and the verb -------------------------------------------------------------------------------------------


def test_wrong_options_are_named_all_at_once(in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match=r"form is 'whole': .*'gguf'\n'colour' is no option"):
        read_options({"colour": 1, "form": "whole", "name": None})
    with pytest.raises(ConfigError, match="'tar'; there are: hf, vllm, gguf, ollama, hub"):
        export("Support Bot", "tar")


def test_what_is_wrong_is_said_before_a_version_is_looked_for(in_tmp: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(in_tmp))
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(ConfigError, match="no level of quantisation"):
        export("nobody", "gguf", quantization=("q9",))
    with pytest.raises(MissingExtra, match=CONVERTER):
        export("nobody", "gguf")
    with pytest.raises(ConfigError, match="no name of a model in Ollama"):
        export("nobody", "ollama", name="my bot")
    with pytest.raises(ConfigError, match="needs the name of a repository"):
        export("nobody", "hub")
    with pytest.raises(ConfigError, match="has no owner"):
        export("nobody", "hub", repo="model")
    with pytest.raises(ConfigError, match="cannot be the name of a repository"):
        export("nobody", "hub", repo="me/mo del")


def test_a_version_that_did_not_pass_makes_no_folder(home: Path, in_tmp: Path) -> None:
    before = snapshot(in_tmp)
    with pytest.raises(VersionError, match="not let through"):
        export("Support Bot@v2", "hf", out=in_tmp / "out", home=home)
    (in_tmp / "mine").mkdir()
    (in_tmp / "mine" / "a").write_text("a")
    with pytest.raises(ConfigError, match="holds something already"):
        export("Support Bot", "hf", out=in_tmp / "mine", home=home)
    assert snapshot(in_tmp) == {**before, "mine/a": b"a"}


def test_what_fails_its_check_is_not_kept_unless_it_is_forced(home: Path, in_tmp: Path) -> None:
    failed = Check(status="failed", text="failed by transformers: 0.1, its version has 0.9")
    kind = Kind(write=lambda job, folder: Written([], []), check=lambda job, folder: {"model": failed})
    with pytest.raises(
        ModelError, match=r"Support Bot/v1 answers otherwise.*\nmodel: failed by transformers.*\n--force"
    ):
        checked(kind, job_of(home, in_tmp, []), in_tmp)
    assert checked(kind, job_of(home, in_tmp, [], force=True), in_tmp) == {"model": failed}
    assert checked(kind, job_of(home, in_tmp, [], check=False), in_tmp)["export"].status == "unchecked"


def test_the_command_says_what_was_made_and_what_the_check_showed(capsys: pytest.CaptureFixture[str]) -> None:
    check = Check(status="passed", text="passed by transformers: 0.5 on 8 held-out prompts")
    made = Export(
        kind="gguf", subject="bot/v1", place="out", files=[File(path="bot.gguf", size=3 * 2**20)],
        checks={"bot.gguf": check, "other": unchecked("there is none")}, use=["llama-server -m out/bot.gguf"],
        notes=["mind this"],
    )  # fmt: skip
    say_export(made)
    assert capsys.readouterr().out.splitlines() == [
        "bot/v1 as gguf: out (1 files, 3 MiB)",
        "  bot.gguf  3 MiB",
        "bot.gguf: passed by transformers: 0.5 on 8 held-out prompts",
        "other: not checked: there is none",
        "note: mind this",
        "use it with:",
        "  llama-server -m out/bot.gguf",
    ]


# --- publishing by a training file ----------------------------------------------------------------------------------


def config_of(**keys) -> TrainConfig:
    return TrainConfig.load({"method": "grpo", **keys}, need_model=False, need_data=False)


def test_all_that_keeps_a_file_from_being_published_is_said_before_training(in_tmp: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(in_tmp))
    monkeypatch.delenv(FOLDER, raising=False)
    (in_tmp / "there").mkdir()
    (in_tmp / "there" / "a").write_text("a")
    check_publishing(config_of())
    config = config_of(
        merged_save_dir=str(in_tmp / "there"), huggingface_save=True, huggingface_save_gguf=True, ollama_save=True,
        ollama_model="my bot", quantization_method=["q4_k_m", "q9"],
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        check_publishing(config)
    said = str(caught.value)
    for part in ("holds something already", "needs the name of a repository", "'my bot' can be no name"):
        assert part in said, said
    with pytest.raises(ConfigError, match="'q9'"):
        check_publishing(config_of(ollama_save=True, quantization_method="q9"))
    with pytest.raises(ConfigError, match="a reward model answers nothing"):
        check_publishing(config_of(method="reward", merged_save_dir=str(in_tmp / "new")))


def test_what_did_not_pass_is_not_published_and_the_command_is_said(home: Path, in_tmp: Path) -> None:
    run = finished_run(in_tmp / "a run", weights_in(in_tmp / "base"), difference=0.0, agent=None)
    said: list[str] = []
    config = config_of(merged_save_dir="out dir", ollama_save=True, ollama_model="bot", quantization_method="q4_k_m")
    assert publish_as_configured(run, config, said.append) == []
    command = f"praison-agent-rl export '{run.root}' --to"
    assert said[1:] == [
        f"  {command} hf --out 'out dir' --force",
        f"  {command} ollama --name bot --quantize q4_k_m --force",
    ]
    assert not (in_tmp / "out dir").exists()


def failing_for(*kinds: str):
    """An export that makes a folder, or a commit, of all but some kinds."""

    def export_of(subject, to, *, out=None, **given):
        if to in kinds:
            raise ModelError(f"the {to} is away")
        place = "https://hub.test/me/bot/commit/1" if to == "hub" else out or "exported"
        if to != "hub":
            Path(place).mkdir()
        return Export(kind=to, subject="x", place=place, files=[], checks={}, use=[], notes=[])

    return export_of


def test_a_run_that_is_gone_on_with_publishes_nothing_twice(home: Path, in_tmp: Path, monkeypatch) -> None:
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "base"), agent=None)
    keys = {"merged_save_dir": "out", "huggingface_save": True, "hf_model_name": "me/bot", "ollama_save": True}
    said: list[str] = []

    def published(**more) -> list[str]:
        said.clear()
        return [made.kind for made in publish_as_configured(run, config_of(**keys, **more), said.append)]

    monkeypatch.setattr(from_config, "export", failing_for("ollama"))
    assert published() == ["hf", "hub"]
    monkeypatch.setattr(from_config, "export", failing_for())
    out, address, made = str(in_tmp / "out"), "https://hub.test/me/bot/commit/1", str(in_tmp / "exported")
    assert published() == ["ollama"] and said == [f"the run is finished and published already: {out}, {address}"]
    shutil.rmtree(run.merged)  # it may be gone by now
    monkeypatch.chdir(home)
    assert published() == [] and said == [f"the run is finished and published already: {out}, {address}, {made}"]
    (in_tmp / "out").rmdir()
    weights_in(run.merged)
    monkeypatch.chdir(in_tmp)
    assert published(huggingface_save_gguf=True) == ["hf", "hub"] and (in_tmp / "out").is_dir()
    (run.root / "published.json").write_text("{")
    assert published() == [] and len(said) == 1 and said[0].startswith("nothing was published: ")


def test_publishing_that_fails_does_not_fail_the_run(home: Path, in_tmp: Path, monkeypatch) -> None:
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "base"), agent=None)
    said: list[str] = []

    monkeypatch.setattr(from_config, "export", failing_for("hub"))
    config = config_of(
        merged_save_dir="out", huggingface_save=True, huggingface_save_gguf=True, hf_model_name="me/bot",
        hf_private=False, save_method="lora", commit_message="new one", tags=["a"],
    )  # fmt: skip
    assert [made.place for made in publish_as_configured(run, config, said.append)] == ["out"]
    again = f"do it again by: praison-agent-rl export {run.root} --to hub --repo me/bot"
    assert said == [
        f"publishing failed (hub): the hub is away\n  {again} --form lora --message 'new one' --tag a --public",
        f"publishing failed (hub): the hub is away\n  {again}-GGUF --form gguf --message 'new one' --tag a --public",
    ]


def test_a_run_whose_model_is_gone_publishes_nothing(home: Path, in_tmp: Path) -> None:
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "base"), agent=None)
    shutil.rmtree(run.merged)
    said: list[str] = []
    assert publish_as_configured(run, config_of(merged_save_dir="out"), said.append) == []
    assert len(said) == 1 and said[0].startswith("nothing was published: the run in")


def test_a_file_without_keys_of_publishing_publishes_nothing(home: Path, in_tmp: Path) -> None:
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "base"), difference=0.0, agent=None)
    said: list[str] = []
    assert publish_as_configured(run, config_of(), said.append) == [] and said == []


def test_importing_the_exports_loads_nothing_heavy() -> None:
    code = (
        "import sys, praison_agent_rl.commands.export, praison_agent_rl.exports\n"
        "print([n for n in ('torch', 'transformers', 'peft', 'gguf', 'huggingface_hub') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
