"""Exports of a model that really answers: loaded again it answers as its version did, and where not, that is seen."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from praison_agent_rl.errors import ModelError
from praison_agent_rl.exports import asking, export, gguf_files
from praison_agent_rl.exports.checking import QUANTISED, ROUNDED, SAME, Question
from praison_agent_rl.exports.end_tokens import end_tokens
from praison_agent_rl.exports.gguf_files import problems_of
from praison_agent_rl.exports.jobs import Job
from praison_agent_rl.exports.llama_python import PYTHON
from praison_agent_rl.exports.made import read_options
from praison_agent_rl.exports.subjects import find_subject
from praison_agent_rl.runs import HOME
from tests.exported_runs import MODULE, REWARDS, measured_run
from tests.finished_runs import snapshot
from tests.hub_stand_in import TOKEN, HubStandIn, hub

PROMPTS = [f"Say something about the number {n}." for n in range(8)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of a run of the tiny model; read only."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / f"{MODULE}.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    try:
        measured_run(folder / "bot", str(tiny_model), PROMPTS, std=0.2, max_completion_length=12, max_seq_length=400)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(MODULE, None)
    return folder / "bot"


@pytest.fixture
def run(in_tmp: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, with the module of its reward."""
    monkeypatch.syspath_prepend(trained.parent)
    shutil.copytree(trained, in_tmp / "bot")
    return in_tmp / "bot"


def question(run: Path, made: Path, share: float = SAME, loader: str = "transformers") -> Question:
    return Question(
        records=str(run), model=str(run / "model"), base="", loader=loader, made=str(made), share=share, ends=[1]
    )


def test_a_merged_folder_is_whole_and_answers_as_its_version(run: Path, in_tmp: Path) -> None:
    before = snapshot(run)
    said: list[str] = []
    made = export(run, "hf", out=in_tmp / "out", say=said.append)
    assert (made.kind, made.place, made.notes) == ("hf", str(in_tmp / "out"), [])
    assert {file.path for file in made.files} == {*os.listdir(run / "model"), "README.md"}
    assert {file.path: file.size for file in made.files} == {
        name: (in_tmp / "out" / name).stat().st_size for name in os.listdir(in_tmp / "out")
    }
    for name in set(os.listdir(run / "model")) - {"generation_config.json"}:
        assert (in_tmp / "out" / name).read_bytes() == (run / "model" / name).read_bytes()
    check = made.checks["model"]
    assert check.status == "passed", check.text
    assert (check.prompts, check.equal) == (8, 8) and check.own == check.exported
    assert made.use == [f"transformers serve {in_tmp / 'out'}", f"vllm serve {in_tmp / 'out'}"]
    assert said == ["asking out the held-out prompts, by transformers"]
    assert snapshot(run) == before and not list(in_tmp.glob(".*.part"))


def test_answers_that_score_otherwise_fail_the_check(run: Path) -> None:
    answers = [json.loads(line) for line in (run / "answers_new.jsonl").read_text().splitlines()]
    best = [{**answer, "rewards": {"letters": 9.0}, "total": 9.0, "text": "?"} for answer in answers]
    (run / "answers_new.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in best))
    check = asking.check(question(run, run / "model"))
    assert (check.status, check.equal, check.own) == ("failed", 0, 9.0) and check.exported < 1


def test_without_a_check_it_is_said(run: Path, in_tmp: Path) -> None:
    made = export(run, "hf", out=in_tmp / "out", check=False)
    assert [check.text for check in made.checks.values()] == ["not checked: --no-check (check=False) was given"]


def test_what_no_reward_can_score_is_compared_by_its_answers(run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    plan["rewards"][0]["spec"] = "nowhere:gone"
    (run / "plan.json").write_text(json.dumps(plan))
    same = asking.check(question(run, run / "model"))
    # every answer is the version's own, so its score is known without the reward: but the reward is not found first
    assert same.status == "passed" and same.equal == 8 and "it is not scored" in same.text and same.own is None
    rounded = asking.check(question(run, run / "model", ROUNDED))
    assert rounded.status == "unchecked" and rounded.equal == 8


def test_where_tools_were_used_first_answers_are_compared(run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    plan["config"] |= {"rollout": "agent", "rollout_agent": "somewhere:agent"}
    (run / "plan.json").write_text(json.dumps(plan))
    check = asking.check(question(run, run / "model"))
    assert check.status == "passed" and check.equal == 8 and "measured with tools" in check.text


def test_what_cannot_be_loaded_has_failed(run: Path, in_tmp: Path) -> None:
    shutil.copytree(run / "model", in_tmp / "broken")
    (in_tmp / "broken" / "model.safetensors").write_bytes(b"no weights")
    check = asking.check(question(run, in_tmp / "broken"))
    assert check.status == "failed" and "cannot be loaded" in check.text


def test_a_loss_within_tolerance_passes_and_one_beyond_does_not(run: Path) -> None:
    """Scores of the version are raised by hand; the range is that of all scores, 0 to 1."""
    lines = [json.loads(line) for line in (run / "answers_base.jsonl").read_text().splitlines()]
    lines[0]["total"], lines[1]["total"] = 0.0, 1.0
    (run / "answers_base.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = [json.loads(line) for line in (run / "answers_new.jsonl").read_text().splitlines()]

    def raised_by(amount: float, share: float):
        # other texts, so that the export's answers are scored anew
        rows = [{**line, "text": "?", "total": line["total"] + amount} for line in own]
        (run / "answers_new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return asking.check(question(run, run / "model", share))

    assert raised_by(0.01, SAME).status == "passed" and raised_by(0.03, SAME).status == "failed"
    # with eight prompts an eighth is one prompt's worth, which is allowed where engines differ
    assert raised_by(0.12, QUANTISED).status == "passed" and raised_by(0.14, QUANTISED).status == "failed"
    check = raised_by(0.12, ROUNDED)
    assert check.allowed == pytest.approx(1 / 8) and check.own - check.exported == pytest.approx(0.12)


def test_end_tokens_that_disagree_stop_an_export(run: Path, in_tmp: Path) -> None:
    model = run / "model"
    assert end_tokens(model) == ([1], ["<|im_end|>"], [])
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 0}))
    # the tokenizer's own still ends answers, as it did when the version was measured; now every file says so
    assert end_tokens(model).ids == [0, 1] and end_tokens(model).problems == []
    export(run, "hf", out=in_tmp / "both", check=False)
    assert json.loads((in_tmp / "both" / "generation_config.json").read_text())["eos_token_id"] == [0, 1]
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("<|im_end|>", "<pad>"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    with pytest.raises(ModelError) as caught:
        export(run, "hf", out=in_tmp / "out", check=False)
    assert "the chat template ends answers with '<pad>' (2)" in str(caught.value)
    assert "config.json ends answers at" in str(caught.value)
    assert len(export(run, "hf", out=in_tmp / "out", check=False, force=True).notes) == 2


def test_end_tokens_that_there_are_not_are_no_end_tokens(run: Path, in_tmp: Path) -> None:
    for name, ids in (("generation_config.json", [1, 99999, -1]), ("config.json", 99999)):
        settings = json.loads((run / "model" / name).read_text())
        (run / "model" / name).write_text(json.dumps({**settings, "eos_token_id": ids}))
    assert end_tokens(run / "model") == ([1], ["<|im_end|>"], [])
    export(run, "hf", out=in_tmp / "out", check=False)
    assert json.loads((in_tmp / "out" / "generation_config.json").read_text())["eos_token_id"] == 1


REFUSES = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message, please') }}{% endif %}"


def test_a_template_that_refuses_conversations_is_asked_by_another_or_told(run: Path, in_tmp: Path) -> None:
    template = run / "model" / "chat_template.jinja"
    own = template.read_text()
    template.write_text(REFUSES + own)
    assert end_tokens(run / "model") == ([1], ["<|im_end|>"], [])
    template.write_text(REFUSES + own.replace("<|im_end|>", "<pad>"))
    assert "ends answers with '<pad>'" in end_tokens(run / "model").problems[0]
    template.write_text("{{ raise_exception('never') }}")
    with pytest.raises(ModelError, match=r"refuses a conversation: TemplateError: never(.|\n)*--force"):
        export(run, "hf", out=in_tmp / "out", check=False)
    assert "refuses a conversation" in export(run, "hf", out=in_tmp / "out", check=False, force=True).notes[0]
    template.write_text("{{ bos_token }}")  # what shows no answer says nothing of its end
    assert end_tokens(run / "model").problems == []


def test_what_is_exported_gives_the_logits_of_base_and_adapter(run: Path, in_tmp: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(run, "hf", out=in_tmp / "an export, ü", check=False)
    base = AutoModelForCausalLM.from_pretrained(json.loads((run / "plan.json").read_text())["base"])
    trained = PeftModel.from_pretrained(base, run / "adapter").eval()
    plain = AutoModelForCausalLM.from_pretrained(in_tmp / "an export, ü").eval()
    tokenizer = AutoTokenizer.from_pretrained(in_tmp / "an export, ü")
    said = [{"role": "user", "content": "Hello"}]
    tokens = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert torch.allclose(plain(**tokens).logits, trained(**tokens).logits, atol=1e-4)
        with trained.disable_adapter():
            assert not torch.allclose(plain(**tokens).logits, trained(**tokens).logits, atol=1e-2)
    assert plain.generation_config.eos_token_id == tokenizer.eos_token_id == 1


def _weights_of_the_base(made: Path, base: Path) -> None:
    shutil.copy2(base / "model.safetensors", made)


def _a_layer_of_zeros(made: Path, base: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(made / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight"))
    save_file({**tensors, name: tensors[name] * 0}, made / "model.safetensors", metadata={"format": "pt"})


def _another_template(made: Path, base: Path) -> None:
    (made / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}!{% endfor %}")


def _other_tokens(made: Path, base: Path) -> None:
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    words = [word for word in vocabulary if not word.startswith("<")]
    vocabulary |= dict(zip(words, [vocabulary[word] for word in reversed(words)], strict=True))
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("spoil", [_weights_of_the_base, _a_layer_of_zeros, _another_template, _other_tokens])
def test_a_spoiled_export_fails_the_check(run: Path, in_tmp: Path, spoil) -> None:
    plan = json.loads((run / "plan.json").read_text())
    # also where the run names a template itself: a server knows only the one that was exported
    plan["config"]["chat_template"] = (run / "model" / "chat_template.jinja").read_text()
    (run / "plan.json").write_text(json.dumps(plan))
    shutil.copytree(run / "model", in_tmp / "made")
    assert asking.check(question(run, in_tmp / "made")).status == "passed"
    spoil(in_tmp / "made", Path(plan["base"]))
    check = asking.check(question(run, in_tmp / "made"))
    assert check.status == "failed", check.text


def test_a_loader_that_is_not_here_leaves_a_file_unchecked(run: Path, in_tmp: Path, monkeypatch) -> None:
    monkeypatch.setenv(PYTHON, sys.executable)  # which has no llama_cpp
    (in_tmp / "bot-Q8_0.gguf").write_bytes(b"GGUF")
    check = asking.check(question(run, in_tmp / "bot-Q8_0.gguf", QUANTISED, "llama.cpp"))
    assert check.status == "unchecked" and "cannot import llama_cpp" in check.text


def test_of_several_chat_templates_a_gguf_file_has_the_one_without_a_name(run: Path, monkeypatch) -> None:
    template = (run / "model" / "chat_template.jinja").read_text()
    (run / "model" / "additional_chat_templates").mkdir()
    (run / "model" / "additional_chat_templates" / "tool_use.jinja").write_text(template + " ")
    job = Job(find_subject(run, HOME), read_options({}), run, end_tokens(run / "model"), print)
    said = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.tokens": ["a"] * 300}
    for written, problems in ((template, []), (template + " ", ["a.gguf: its chat template is another one"])):
        monkeypatch.setattr(gguf_files, "metadata_of", lambda file, w=written: {**said, "tokenizer.chat_template": w})
        assert problems_of(Path("a.gguf"), job) == problems


def test_an_adapter_is_made_ready_for_vllm_with_its_command(run: Path, in_tmp: Path, monkeypatch) -> None:
    monkeypatch.setenv("PRAISON_AGENT_RL_VLLM", str(in_tmp / "no-vllm"))
    made = export(run, "vllm", out=in_tmp / "out", name="bot")
    config = json.loads((in_tmp / "out" / "adapter_config.json").read_text())
    assert config["r"] == 4 and "base_model_name_or_path" not in config
    base = json.loads((run / "plan.json").read_text())["base"]
    assert made.use == [f"vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules bot={in_tmp / 'out'}"]
    assert made.checks["adapter"].status == "unchecked" and "no-vllm" in made.checks["adapter"].text
    assert "library_name: peft" in (in_tmp / "out" / "README.md").read_text()


def test_killed_at_any_moment_it_leaves_no_half_export(run: Path, in_tmp: Path) -> None:
    code = "import sys; from praison_agent_rl.exports import export; export('bot', 'hf', out='out')"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=in_tmp)
    deadline = time.monotonic() + 120
    while not (in_tmp / ".out.part").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.kill()  # it has copied, and is about to ask
    process.wait()
    assert (in_tmp / ".out.part").exists() and not (in_tmp / "out").exists()
    made = export("bot", "hf", out="out", check=False)
    assert made.files and not (in_tmp / ".out.part").exists()


def test_a_full_disk_leaves_nothing(run: Path, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(ModelError, match=r"No space left on device.*make room"):
        export(run, "hf", out=in_tmp / "out", check=False)
    assert not (in_tmp / "out").exists() and not (in_tmp / ".out.part").exists()


# --- the hub --------------------------------------------------------------------------------------------------------


PUSHES = """
import json, os, sys
from praison_agent_rl.errors import PraisonRLError
from praison_agent_rl.exports import export

for options in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token := options.pop("token", "hf_stand_in"):
        os.environ["HF_TOKEN"] = token
    try:
        print(export("bot", "hub", check=False, **options).model_dump_json())
    except PraisonRLError as error:
        print(" ".join(f"{type(error).__name__}: {error}".split()))
"""


def push(stand_in: HubStandIn, in_tmp: Path, *pushes: dict) -> list[str]:
    """What each push said, in a process of its own, as the hub's library reads its settings when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": stand_in.url, "HF_HOME": str(in_tmp / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", PUSHES, json.dumps(pushes)]
    done = subprocess.run(command, cwd=in_tmp, env=environment, capture_output=True, text=True, check=True)
    assert TOKEN not in done.stdout + done.stderr
    return done.stdout.splitlines()


def test_models_are_pushed_to_private_repositories_with_their_cards(run: Path, in_tmp: Path) -> None:
    old = {"model-00001-of-00002.safetensors": b"", "x.gguf": b""}
    with hub() as stand_in:
        stand_in.repositories["me/old"] = {"private": True, "files": dict(old)}
        merged, again, lora = push(
            stand_in,
            in_tmp,
            {"repo": "me/bot", "message": "first", "tags": ["mine"]},
            {"repo": "me/old"},
            {"repo": "me/lora", "form": "lora", "private": False},
        )
    made, pushed = json.loads(merged), stand_in.repositories["me/bot"]
    assert made["place"] == f"{stand_in.url}/me/bot/commit/{1:040x}"
    assert pushed["private"] is True and stand_in.commits[0]["summary"] == "first"
    names = {*os.listdir(run / "model"), "README.md"}
    assert {file["path"] for file in made["files"]} == pushed["files"].keys() == names
    assert pushed["files"]["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    card = pushed["files"]["README.md"].decode()
    assert "- mine" in card and "# bot" in card and "letters" in card
    # what a loader would mix with the new files is gone, and other things are not
    assert json.loads(again)["place"].startswith(f"{stand_in.url}/me/old/commit/")
    assert stand_in.repositories["me/old"]["files"].keys() == {*names, "x.gguf"}
    assert json.loads(lora)["use"][0].endswith("--lora-modules bot=me/lora")
    adapter = stand_in.repositories["me/lora"]
    assert adapter["private"] is False and "adapter_model.safetensors" in adapter["files"]
    # the path of a base on this machine says nothing elsewhere
    assert json.loads(adapter["files"]["adapter_config.json"])["base_model_name_or_path"] is None
    left = [path for path in in_tmp.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert left == [] and not list((in_tmp / HOME / "exports").iterdir())


def test_what_the_hub_refuses_is_told_plainly(run: Path, in_tmp: Path) -> None:
    with hub() as stand_in:
        stand_in.repositories["me/public"] = {"private": False, "files": {}}
        stand_in.refuse = [("repos/create", 403), ("/put/", 400), ("commit/main", 400)]
        said = push(
            stand_in,
            in_tmp,
            {"repo": "me/bot"},
            {"repo": "me/bot"},
            {"repo": "me/bot"},
            {"repo": "me/bot", "token": "hf_other"},
            {"repo": "me/bot", "token": ""},
            {"repo": "me/public"},
            {"repo": "me/public", "private": False},
        )
    told = [
        "the token may not write to repositories of 'me'",
        "failed on the way",
        "nothing was committed",
        "the token is not valid any more",
        "there is no token for the hub; set HF_TOKEN",
        "is public already",
        '"kind":"hub"',
    ]
    for line, part in zip(said, told, strict=True):
        assert part in line, line
    assert [commit["repo"] for commit in stand_in.commits] == ["me/public"]


def test_the_folder_of_a_run_is_found_by_its_name(run: Path) -> None:
    assert find_subject("bot", HOME).label == "bot"
