"""What people and machines do to exports: odd places, two at once, broken programs, half a run, names that mislead."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from praison_agent_rl import locks, registry
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, MissingExtra, ModelError, VersionError
from praison_agent_rl.exports import export, kinds, ollama
from praison_agent_rl.exports.adapters import check_servable, serve_command
from praison_agent_rl.exports.asking import _by_scores
from praison_agent_rl.exports.cards import model_card
from praison_agent_rl.exports.checking import QUANTISED, SAME, Question
from praison_agent_rl.exports.end_tokens import EndTokens
from praison_agent_rl.exports.folders import check_free, new_folder, writing
from praison_agent_rl.exports.from_config import check_publishing
from praison_agent_rl.exports.hub import check_hub
from praison_agent_rl.exports.jobs import Job, Written
from praison_agent_rl.exports.llama_programs import CONVERTER, FOLDER, QUANTISER, convert, quantise
from praison_agent_rl.exports.llama_python import PYTHON, ask_llama
from praison_agent_rl.exports.made import read_options
from praison_agent_rl.exports.merged import write_merged
from praison_agent_rl.exports.ollama import check_name
from praison_agent_rl.exports.subjects import check_exportable, check_outside, find_subject
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.records import Answer
from tests.finished_runs import EMPTY_SAFETENSORS, finished_run, snapshot, weights_in

AGENT = "Support Bot"


@pytest.fixture
def home(in_tmp: Path) -> Path:
    """v1 of an agent, which is current, and v2, which was trained on v1."""
    place = in_tmp / ".praisonai" / "rl"
    base = weights_in(in_tmp / "base")
    publish_version(place, AGENT, finished_run(place / "runs" / "one", base, agent=AGENT))
    first = place.resolve() / "versions" / "support-bot" / "v1" / "model"
    publish_version(place, AGENT, finished_run(place / "runs" / "two", first, agent=AGENT, parent="v1"))
    registry.promote(place, AGENT, "v1")
    return place


def job_of(home: Path, out: Path, **options) -> Job:
    return Job(find_subject(AGENT, home), read_options(options), out, EndTokens([2], ["<|im_end|>"], []), print)


# --- places ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_replaced_as_a_whole_is_refused_before_any_work(in_tmp: Path, monkeypatch) -> None:
    (in_tmp / "disk").mkdir()
    os.mkfifo(in_tmp / "pipe")
    (in_tmp / "gone").symlink_to(in_tmp / "nowhere")
    (in_tmp / "empty").mkdir()
    (in_tmp / "linked").symlink_to(in_tmp / "empty")
    for name in ("pipe", "gone", "linked"):
        with pytest.raises(ConfigError, match="holds something already"):
            check_free(in_tmp / name)
    check_free(in_tmp / "empty")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    monkeypatch.chdir(in_tmp / "empty")
    for place in (in_tmp / "disk", Path(), Path("."), in_tmp / "empty", Path("new/..")):
        with pytest.raises(ConfigError, match="give a new folder in it"):
            check_free(place)
    assert (in_tmp / "empty").is_dir()
    with pytest.raises(ConfigError, match="cannot be made: File name too long"), new_folder(in_tmp / ("a" * 300)):
        pytest.fail("nothing can be made there")


@pytest.mark.skipif(not locks.AVAILABLE, reason="this system has no locks on files")
def test_two_exports_to_one_folder_do_not_take_from_each_other(in_tmp: Path) -> None:
    out = in_tmp / "out"
    with new_folder(out) as first:
        (first / "mine").write_text("mine")
        with pytest.raises(ConfigError, match=r"another export to '.*out' is under way"), new_folder(out):
            pytest.fail("two have it")
        assert snapshot(first) == {"mine": b"mine"}
    assert snapshot(in_tmp) == {"out/mine": b"mine"}
    with pytest.raises(ConfigError, match="holds something already"), new_folder(out):
        pytest.fail("it is there")
    with new_folder(in_tmp / "next") as folder:  # nothing is held any more
        (folder / "a").write_text("a")


def test_what_is_in_the_way_of_the_scratch_folder_is_not_followed(in_tmp: Path) -> None:
    (in_tmp / "mine").mkdir()
    (in_tmp / "mine" / "a").write_text("a")
    (in_tmp / ".out.part").symlink_to(in_tmp / "mine")
    with pytest.raises(ConfigError, match="in the way"), new_folder(in_tmp / "out"):
        pytest.fail("it would empty what the link names")
    assert snapshot(in_tmp / "mine") == {"a": b"a"}


@pytest.mark.parametrize("place", ["v1/out", "v1/model/out", "v1/adapter/x/out", "v2/out"])
def test_nothing_is_exported_into_a_version(home: Path, place: str) -> None:
    before = snapshot(home)
    with pytest.raises(ConfigError, match="files must stay as they are"):
        export(AGENT, "hf", out=home / "versions" / "support-bot" / place, home=home)
    assert snapshot(home) == before
    assert registry.verify(registry.read_version(home, AGENT, "v1")) == []


def test_a_runs_own_weights_take_no_export_but_its_folder_may(home: Path, in_tmp: Path) -> None:
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "other"), agent=None)
    weights_in(run.merged)
    for place in (run.merged / "out", run.adapter / "out"):
        with pytest.raises(ConfigError, match="files must stay as they are"):
            export(run.root, "hf", out=place, home=home)
    (in_tmp / "version.json").write_text("{}")  # of a project of the user's
    for place in (run.root / "exported", in_tmp / "exported"):
        check_outside(find_subject(run.root, home), place)


def test_a_folder_that_cannot_be_copied_is_told_by_its_first_reason(in_tmp: Path) -> None:
    import shutil

    weights_in(in_tmp / "model")
    with (
        pytest.raises(ModelError, match=r"'out': \[Errno 28\] No space left on device.*; make room"),
        writing(Path("out")),
    ):
        shutil.copytree(in_tmp / "model", in_tmp / "copy", copy_function=_full)


def _full(source: str, target: str) -> None:
    raise OSError(28, "No space left on device")


# --- what may leave -------------------------------------------------------------------------------------------------


def test_a_run_that_was_not_measured_to_its_end_is_not_taken_for_one_without_held_out_prompts(home, in_tmp) -> None:
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "other"), agent=None)
    weights_in(run.merged)
    run.verdict_file.unlink()
    found = find_subject(run.root, home)
    with pytest.raises(VersionError, match=r"not compared on them yet.*train --resume .*run, or --force"):
        check_exportable(found, force=False)
    check_exportable(found, force=True)
    card = model_card(found)
    assert "exported by force, before it was compared" in card and "Nothing was held out" not in card


@pytest.mark.parametrize("content", [None, b"", b"half", EMPTY_SAFETENSORS + b"more than its header says"])
def test_an_adapter_that_is_not_whole_is_not_exported(home: Path, in_tmp: Path, content: bytes | None) -> None:
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "other"), agent=None)
    (run.adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["q_proj"]}))
    file = run.adapter / "adapter_model.safetensors"
    file.write_bytes(EMPTY_SAFETENSORS)
    found = find_subject(run.root, home)
    fits = [check_servable, kinds._ON_THE_HUB["lora"].fits]
    for fit in fits:
        fit(found)
    file.unlink() if content is None else file.write_bytes(content)
    for fit in fits:
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
            fit(found)


@pytest.mark.parametrize(
    ("to", "options", "named"),
    [
        ("hf", {"quantization": ("q4_k_m",)}, "quantization"),
        ("hf", {"name": "bot"}, "name"),
        ("vllm", {"repo": "me/bot"}, "repo"),
        ("vllm", {"form": "lora"}, "form"),
        ("gguf", {"repo": "me/bot", "private": False, "message": "m"}, "message, private, repo"),
        ("ollama", {"repo": "me/bot"}, "repo"),
        ("hub", {"repo": "me/bot", "quantization": ("q4_k_m",)}, "quantization"),
        ("hub", {"repo": "me/bot", "form": "gguf", "name": "bot"}, "name"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(in_tmp: Path, to: str, options: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} would do nothing for --to {to}"):
        export("nobody", to, **options)


# --- cards ----------------------------------------------------------------------------------------------------------


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_version_of_a_version_names_the_base_of_both(home: Path, in_tmp: Path) -> None:
    (in_tmp / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    card = model_card(find_subject("Support Bot@v2", home))
    assert head_of(card)["license"] == "apache-2.0"
    lines = card.splitlines()
    assert {"- base: base", "- trained on version v1 of the same agent", "- licence of the base: apache-2.0"} <= {
        *lines
    }
    plan = home / "versions" / "support-bot" / "v1" / "plan.json"
    plan.write_text(plan.read_text().replace(str(in_tmp / "base"), "owner/base"))
    assert head_of(model_card(find_subject("Support Bot@v2", home)))["base_model"] == "owner/base"
    plan.unlink()
    assert "- base: version v1 of the same agent" in model_card(find_subject("Support Bot@v2", home))


@pytest.mark.parametrize(
    ("head", "metadata", "said"),
    [
        ("license: mit", {"license": "mit"}, "mit"),
        (
            "license: other\nlicense_name: qwen-research\nlicense_link: https://q.test/LICENSE",
            {"license": "other", "license_name": "qwen-research", "license_link": "https://q.test/LICENSE"},
            "other, qwen-research, https://q.test/LICENSE",
        ),
        ("license: [mit, apache-2.0]", {"license": ["mit", "apache-2.0"]}, "mit, apache-2.0"),
        ("language: en", {}, "unknown: its card is not on the machine that wrote this, or names none"),
        ("license: [", {}, "unknown: its card is not on the machine that wrote this, or names none"),
    ],
)
def test_the_licence_of_the_base_is_said_as_its_card_says_it(home, in_tmp, head, metadata, said) -> None:
    (in_tmp / "base" / "README.md").write_text(f"---\n{head}\n---\n# Base\n")
    card = model_card(find_subject(AGENT, home))
    assert {key: value for key, value in head_of(card).items() if key.startswith("license")} == metadata
    assert f"- licence of the base: {said}" in card.splitlines()
    (in_tmp / "base" / "README.md").write_text(f"# Base\n---\n{head}\n---\n")  # a ruled line, and no head
    assert "licence of the base: unknown" in model_card(find_subject(AGENT, home))


def test_what_others_see_does_not_say_where_it_lies_on_this_machine(home: Path, in_tmp: Path) -> None:
    run = finished_run(in_tmp / "runs" / "my run", weights_in(in_tmp / "other"), agent=None)
    found = find_subject(run.root, home)
    card = model_card(found, library="peft")
    assert str(in_tmp) not in card and "# my run" in card.splitlines()
    assert "a LoRA adapter" in card and "merged" not in card.split("- merge:")[0]
    job = job_of(home, in_tmp / "out")._replace(subject=found)
    assert str(in_tmp) not in ollama._modelfile(job, in_tmp / "a.gguf", None)


# --- names and commands ---------------------------------------------------------------------------------------------


def test_names_that_ollama_refuses_are_refused_before_any_work() -> None:
    for name in ("bot", "me/bot:v1", "registry.test:5000/me/bot.v2:8b", "_a", "a" * 80):
        check_name(name)
    for name in ("-bot", ".bot", "..", "böt", "me.too/bot", "a/b/c/d", "me//bot", "bot:-x", "a" * 81, "bot\n"):
        with pytest.raises(ConfigError, match="no name of a model in Ollama"):
            check_name(name)


def test_a_stop_text_is_quoted_as_a_modelfile_wants_it(home: Path, in_tmp: Path) -> None:
    job = job_of(home, in_tmp / "out")
    job = job._replace(ends=EndTokens([1, 2], ["</s>", '<|"end"|>'], []))
    text = ollama._modelfile(job, in_tmp / "a.gguf", None)
    assert 'PARAMETER stop "</s>"\nPARAMETER stop """<|"end"|>"""\n' in text


@pytest.mark.parametrize(
    ("name", "place"), [("bot", "/out"), ("a=b", "/out"), ("bot", "/x,y/out"), ("bot", "/a=1/ü o")]
)
def test_the_command_for_vllm_is_read_as_it_is_meant(home: Path, in_tmp: Path, name: str, place: str) -> None:
    job = job_of(home, in_tmp, name=name)
    config = {"r": 8, "target_modules": ["q_proj"]}
    (job.subject.adapter / "adapter_config.json").write_text(json.dumps(config))
    module = shlex.split(serve_command(job, place))[-1]
    if "=" in module and "," not in module:  # vLLM's LoRAParserAction
        read = module.split("=")
    else:
        read = [json.loads(module)[key] for key in ("name", "path")]
    assert read == [name, place]


def test_the_commands_trust_code_where_the_training_did_and_name_no_revision_of_a_folder(home, in_tmp) -> None:
    config = {"trust_remote_code": True, "revision": "abc"}
    run = finished_run(in_tmp / "run", weights_in(in_tmp / "other"), agent=None, config=config)
    (run.adapter / "adapter_config.json").write_text(json.dumps({"r": 8}))
    job = job_of(home, in_tmp / "out")._replace(subject=find_subject(run.root, home))
    words = shlex.split(serve_command(job, "/out"))
    assert words[:4] == ["vllm", "serve", str(in_tmp / "other"), "--trust-remote-code"] and "--revision" not in words
    plan = run.plan_file.read_text()
    run.plan_file.write_text(plan.replace(str(in_tmp / "other"), "owner/base"))
    assert shlex.split(serve_command(job, "/out"))[2:6] == ["owner/base", "--revision", "abc", "--trust-remote-code"]
    (in_tmp / "folder").mkdir()
    assert [use.split()[-1] for use in write_merged(job, in_tmp / "folder").use] == ["--trust-remote-code"] * 2


def test_the_command_for_gguf_on_the_hub_names_the_file(home: Path, in_tmp: Path, monkeypatch) -> None:
    """By the repository alone llama.cpp takes the Q4_K_M file, which an earlier version may have left there."""
    monkeypatch.setattr(kinds, "write_gguf", lambda job, folder: Written([], ["n"]))
    (in_tmp / "bot-v2-Q8_0.gguf").write_bytes(b"GGUF")
    written = kinds._write_gguf_for_the_hub(job_of(home, in_tmp, repo="me/bot"), in_tmp)
    assert written == (["llama-server --hf-repo me/bot --hf-file bot-v2-Q8_0.gguf --jinja"], ["n"])


@pytest.mark.parametrize("token", ["hf_a b", "hf_\u00e9", "hf_\x01", "Bearer hf_x"])
def test_a_token_that_cannot_be_sent_is_refused_and_never_shown(monkeypatch, token: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match="spaces or letters that no token has") as caught:
        check_hub(read_options({"repo": "me/bot"}))
    assert token not in str(caught.value) and token not in repr(caught.value.__cause__)


# --- programs -------------------------------------------------------------------------------------------------------

HALF = "import pathlib, sys\npathlib.Path(sys.argv[{place}]).write_bytes(b'GGUF half')\n"
ENDS = {
    "an error": "print('llama broke')\nraise SystemExit(1)",
    "a full disk": "print('OSError: [Errno 28] No space left on device')\nraise SystemExit(1)",
    "killed": "print('llama broke', flush=True)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
def test_half_a_file_of_a_program_that_failed_is_no_file(in_tmp: Path, monkeypatch, end: str) -> None:
    for name, place in ((CONVERTER, 3), (QUANTISER, -2)):
        (in_tmp / name).write_text(f"#!{sys.executable}\n{HALF.format(place=place)}{ENDS[end]}")
        (in_tmp / name).chmod(0o755)
    monkeypatch.setenv(FOLDER, str(in_tmp))
    told = "disk is full|No space left" if end == "a full disk" else "llama broke"
    with pytest.raises(ModelError, match=rf"converter failed \(code -?\d+\)(.|\n)*({told})"):
        convert(in_tmp, in_tmp / "a.gguf", "f16", name="m")
    with pytest.raises(ModelError, match=rf"llama-quantize failed at q4_k_m \(code -?\d+\)(.|\n)*({told})"):
        quantise(in_tmp / "a.gguf", in_tmp / "b.gguf", "q4_k_m", imatrix=None)


@pytest.mark.parametrize("module", [None, "raise OSError('libllama.so: cannot open shared object file')"])
def test_a_python_without_llama_cpp_says_nothing_of_a_file(in_tmp: Path, monkeypatch, module: str | None) -> None:
    (in_tmp / "its").mkdir()
    if module:
        (in_tmp / "its" / "llama_cpp.py").write_text(module)
    code = f"import os, sys\nos.environ['PYTHONPATH'] = {str(in_tmp / 'its')!r}\n"
    (in_tmp / "python").write_text(
        f"#!{sys.executable}\n{code}os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    (in_tmp / "python").chmod(0o755)
    monkeypatch.setenv(PYTHON, str(in_tmp / "python"))
    with pytest.raises(MissingExtra, match=r"cannot import llama_cpp \(\w+Error: .*pip install llama-cpp-python"):
        ask_llama(in_tmp / "a.gguf", [[1]], ["a"], most=4, ends=[5])


# --- checks ---------------------------------------------------------------------------------------------------------


def answers(totals: list[float | None], text: str = "a") -> dict[int, Answer]:
    return {
        place: Answer(prompt=place, sample=0, text=text, tokens=1, rewards={}, total=total)
        for place, total in enumerate(totals)
    }


def question_of(share: float) -> Question:
    return Question(records="", model="", base="", loader="transformers", made="", share=share, ends=[])


def test_the_engine_that_measured_a_version_finds_it_no_better_either() -> None:
    """Scores from 0 to 1, mean 0.5; by the same engine 0.02 may be between, by another more is no fault."""
    measured, base = answers([0.0, 0.5, 1.0]), answers([0.0, 0.0, 0.0])
    for scores, passed in (([0.0, 0.5, 1.0], True), ([0.3, 0.5, 1.0], False), ([0.0, 0.5, 0.7], False)):
        assert (_by_scores(question_of(SAME), answers(scores), measured, base).status == "passed") is passed, scores
    assert _by_scores(question_of(QUANTISED), answers([0.3, 0.5, 1.0]), measured, base).status == "passed"


def test_answers_that_cannot_be_scored_any_more_count_as_the_worst() -> None:
    measured, base = answers([0.5, 1.0, 1.0, None]), answers([0.0, 0.5, 0.5, 0.5])
    check = _by_scores(question_of(QUANTISED), answers([0.5, None, None, None], "?"), measured, base)
    assert check.status == "failed" and check.exported == pytest.approx(0.5 / 3)
    assert "2 cannot be scored any more and count as the worst" in check.text
    # where a reward scores nothing at all now, it is the reward that is broken
    none = _by_scores(question_of(QUANTISED), answers([None] * 4, "?"), measured, base)
    assert none.status == "unchecked" and "no reward scores its answers" in none.text


# --- publishing by a training file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["runs/x", "runs", "runs/x/model", "runs/x/adapter/out", "~/runs/x"])
def test_a_merged_model_does_not_go_where_the_run_itself_lies(in_tmp: Path, monkeypatch, place: str) -> None:
    monkeypatch.setenv("HOME", str(in_tmp))
    keys = {"method": "grpo", "output_dir": str(in_tmp / "runs" / "x")}
    config = TrainConfig.load({**keys, "merged_save_dir": place}, need_model=False, need_data=False)
    with pytest.raises(ConfigError, match="where the run itself keeps its files"):
        check_publishing(config)
    apart = TrainConfig.load({**keys, "merged_save_dir": "runs/x/merged"}, need_model=False, need_data=False)
    check_publishing(apart)
