"""What docs/from_praisonai_train.md says of each key is what the code does; run as a module, this writes it in."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from praison_agent_rl import cli
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.config_keys import GRPO_FIELDS, RENAMED, WITHOUT_MEANING
from tests.praisonai_train import KEYS_BY_SUBJECT, SHIPPED, value_of

PAGE = Path(__file__).parents[2] / "docs" / "from_praisonai_train.md"

# its own defaults: praisonai_train 0.1.16, train/llm/trainer.py, prepare_model and train_model
DEFAULTS = {
    "load_in_4bit": "true",
    "lora_target_modules": "seven projections",
    "seed": "3407",
    "learning_rate": "2e-4",
    "lr_scheduler_type": "linear",
    "warmup_steps": "50",
    "weight_decay": "0.01",
    "optim": "adamw_8bit",
    "per_device_train_batch_size": "2",
    "gradient_accumulation_steps": "2",
    "max_steps": "2800",
    "save_strategy": "no",
    "logging_steps": "15",
    "max_prompt_length": "half of max_seq_length",
}
VALUES = """
save_method: merged_16bit
save_method: merged_4bit
quantization_method: [q4_k_m]
quantization_method: not_quantized
quantization_method: fast_quantized
quantization_method: quantized
{ollama_model: me/model, model_parameters: 8b}
{push_to_hub: true, hf_model_name: me/model}
chat_template: llama-3.1
train: false
num_train_epochs: 0
dataset: [{name: me/prompts, processing_func: format_prompts}]
"""
MODEL = "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"
ELSEWHERE = {"model_parameters": "ollama_model", "push_to_hub": "huggingface_save"}
"""Keys that go into another one by their values."""


def load(**given: Any) -> TrainConfig:
    return TrainConfig.load(given, need_model=False, need_data=False)


def cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def about(name: str) -> str:
    """What a key of ours is, by the first sentence beneath it."""
    if name in TrainConfig.model_fields:
        return cell(TrainConfig.model_fields[name].description or "")
    assert name in GRPO_FIELDS
    return "TRL's own; passed on"


def row(key: str) -> str:
    """A key, what it is called here, and what it means or why it does not."""
    if key == "training_arguments":
        return f"| `{key}` | `{key}` | its entries count as keys of the file, and win over those beside them |"
    if key in ELSEWHERE:
        return f"| `{key}` | `{ELSEWHERE[key]}` | see [values](#values-that-are-said-otherwise) |"
    if key in WITHOUT_MEANING:
        return f"| `{key}` | left out | {WITHOUT_MEANING[key].format(method='GRPO')} |"
    name = RENAMED.get(key, key)
    return f"| `{key}` | `{name}` | {about(name)} |"


def plain(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else "none"
        if value is None
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def tables() -> dict[str, str]:
    head = "| key | here | what it is |\n| --- | --- | --- |\n"
    keys = [f"### {subject}\n\n{head}" + "\n".join(map(row, keys.split())) for subject, keys in KEYS_BY_SUBJECT.items()]
    values = ["| there | here |\n| --- | --- |"]
    for written in VALUES.strip().splitlines():
        config = load(**yaml.safe_load(written))
        (name,) = yaml.safe_load(written).keys() if not config.notes else ("",)
        values.append(f"| `{written.strip('{}')}` | {config.notes[0] if config.notes else getattr(config, name)} |")
    ours = load()
    defaults = ["| key | there | here |\n| --- | --- | --- |"]
    defaults += [f"| `{key}` | {theirs} | {plain(getattr(ours, key))} |" for key, theirs in DEFAULTS.items()]
    return {"keys": "\n\n".join(keys), "values": "\n".join(values), "defaults": "\n".join(defaults)}


def filled(page: str) -> str:
    for name, table in tables().items():
        start, end = page.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n"), page.index(f"<!-- {name} -->")
        page = page[:start] + table + "\n" + page[page.index("<!-- end -->", end) :]
    return page


def test_the_tables_of_the_page_are_what_the_code_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


@pytest.mark.parametrize("key", sorted(key for keys in KEYS_BY_SUBJECT.values() for key in keys.split()))
def test_what_the_table_says_of_a_key_is_what_loading_it_does(key: str) -> None:
    if key in ("training_arguments", "layers_pattern", "num_generations", *ELSEWHERE):
        pytest.skip("needs another key beside it: tests/unit/test_config.py loads all of them")
    named = {"hf_model_name": "me/model", "ollama_model": "me/model"}
    config = load(**{**named, "max_completion_length": 64, key: value_of(key)})
    here = row(key).split(" | ")[1].strip("`")
    notes = " ".join(config.notes)
    if here == "left out":
        assert f"`{key}` is left out: " in notes or f"`{key}` has no meaning for GRPO; left out." in notes
    elif here != key:
        assert f"`{key}` is called `{here}` here." in notes or f"because `{here}` is given too" in notes
    else:
        # what vLLM takes is told to be idle without it, and the template is one of Unsloth's
        assert key in config.resolved() or f"`{key}` and" in notes or f"and `{key}`" in notes or f"`{key}:" in notes


def test_each_command_and_option_that_the_page_names_is_there() -> None:
    commands = typer.main.get_command(cli.app).commands
    named = re.findall(r"`praison-agent-rl ([a-z]+)([^`]*)`", PAGE.read_text(encoding="utf-8"))
    assert {verb for verb, _ in named} == {"train", "export", "improve"}
    for verb, rest in named:
        options = {option for parameter in commands[verb].params for option in parameter.opts}
        assert {word for word in shlex.split(rest) if word.startswith("--")} <= options, verb


def test_the_file_that_it_ships_is_taken_by_train_as_it_is(in_tmp: Path, tiny_model: Path) -> None:
    """But for what is not on this machine: its model and data on the hub, bitsandbytes, and places to publish to."""
    rows = [{"prompt": f"{n}?", "instruction": "a", "input": "b", "output": "c"} for n in range(40)]
    (in_tmp / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (in_tmp / "myrewards.py").write_text("def short(completions):\n    return [-float(len(c)) for c in completions]\n")
    shipped = SHIPPED.replace("yahma/alpaca-cleaned", "rows.jsonl").replace(MODEL, str(tiny_model))
    (in_tmp / "config.yaml").write_text(shipped + "method: grpo\nreward_funcs: myrewards:short\n")
    away = "load_in_4bit=false optim=adamw_torch huggingface_save=false ollama_save=false"
    words = [word for change in away.split() for word in ("--set", change)]
    command = [sys.executable, "-m", "praison_agent_rl.cli", "train", "config.yaml", "--dry-run", *words]
    done = subprocess.run(command, cwd=in_tmp, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "`dataset[0].processing_func` is left out" in said and "`packing` has no meaning for GRPO" in said


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
