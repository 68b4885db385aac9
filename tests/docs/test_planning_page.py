"""Each number of docs/planning.md is what the command and the code say; ``python -m`` of this module writes them in."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from praison_agent_rl.commands.doctor import doctor
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.estimate import in_words
from praison_agent_rl.resource_plan import demands, formulas
from praison_agent_rl.resource_plan.hardware import GPUS
from praison_agent_rl.resource_plan.shapes import KNOWN
from praison_agent_rl.resource_plan.telling import in_time

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
COMMAND = "$ praison-agent-rl doctor "


def written(folder: Path) -> None:
    """The YAML files of the page, each under the name in its first line."""
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")


def ran(command: str, folder: Path) -> str:
    """A console block as it is to be: the command and what it prints."""
    verb, file, *options = shlex.split(command.removeprefix(COMMAND))
    done = CliRunner().invoke(doctor, [verb, str(folder / file), *options])
    assert done.exit_code == 0, done.output
    return f"```console\n{command}\n{done.output}```"


def tables() -> dict[str, str]:
    """The tables of the page by name, from the code."""
    gpus = [
        f"| `{key}` | {gpu.name} | {gpu.memory / 1e9:.0f} | {gpu.operations / 1e12:g} | {gpu.bandwidth / 1e9:,.0f} | "
        f"{gpu.link / 1e9:.0f} ({gpu.linked_by}) | {gpu.source} |"
        for key, gpu in GPUS.items()
    ]
    models = [
        f"| {name} | {shape.parameters:,} | {shape.layers} | {shape.hidden:,} | "
        f"{formulas.cache_bytes(shape, 1) / 1024:.0f} |"
        for name, shape in KNOWN.items()
    ]
    host = f"{1000 * demands.HOST_SECONDS:g} ms"
    constants = {
        str(demands.UTILISATION): "of the GPU's operations are reached in training and on prompts (PEFT's benchmark: "
        "0.24, `demands.py`)",
        str(demands.OF_BANDWIDTH): "of its memory's bandwidth is reached in sampling",
        host: "a layer and token of `generate` costs the host (1.2 ms of Llama-7B: pytorch.org/blog/accelerating-"
        "generative-ai-2; 1.1 ms of gemma-2b: transformers' own benchmark)",
        str(formulas.EAGER): "times the activations counted are kept by transformers' layers (1.77 was measured on a "
        "CPU: `formulas.py`)",
        in_words(demands.AROUND): "of CUDA, libraries and fragments on each GPU; in 4 bits one unpacked matrix besides",
        in_words(demands.AROUND_VLLM): "of vLLM's beside its cache and its own copy of the weights, in 16 bits",
        str(demands.SPARE): "of a GPU's memory is to stay free",
        str(demands.SERVER_SHARE): "of it is vLLM's where it is alone",
    }
    assumed = [f"| {value} | {text} |" for value, text in constants.items()]
    network = [exchanged(name) for name in ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B", "meta-llama/Llama-3.3-70B")]
    heads = {
        "gpus": "| `--gpu` | | memory, GB | TFLOPS | GB/s of memory | GB/s to the next | data sheet |",
        "models": "| model | parameters | layers | width | KiB of keys and values a token |",
        "assumed": "| | |",
        "network": "| model | gradients | NVLink | PCIe | 100 Gb/s | weights | NVLink | PCIe | 100 Gb/s |",
    }
    rows = {"gpus": gpus, "models": models, "assumed": assumed, "network": network}
    return {
        name: "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *rows[name]]) for name, head in heads.items()
    }


def exchanged(name: str) -> str:
    """What a model's gradients and weights take of each link: of an H100, of an L40S, and between two machines."""
    shape, config = KNOWN[name], TrainConfig.load(need_model=False, need_data=False)
    gradients = 4 * formulas.adapter_parameters(shape, config)
    weights = 2 * formulas.weight_bytes(shape, 16)
    links = [(8, GPUS["H100"].link), (8, GPUS["L40S"].link), (2, 100e9 / 8)]
    cells = [in_words(gradients), *(in_time(formulas.all_reduce_bytes(gradients, n) / link) for n, link in links)]
    cells += [in_words(weights), *(in_time(formulas.all_gather_bytes(weights, n) / link) for n, link in links)]
    return f"| {name} | {' | '.join(cells)} |"


def filled(page: str, folder: Path) -> str:
    """The page with every output and every table as they are to be."""
    page = re.sub(
        r"```console\n(\$ .*)\n(?:.*\n)*?```", lambda found: ran(found[1], folder).replace("\\", "\\\\"), page
    )
    for name, table in tables().items():
        page = re.sub(rf"<!-- {name} -->\n.*?<!-- end -->", f"<!-- {name} -->\n{table}\n<!-- end -->", page, flags=re.S)
    return page


def test_every_output_and_table_of_the_page_is_what_the_code_says(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    written(tmp_path)
    assert page.count(COMMAND) == 5
    assert filled(page, tmp_path) == page


@pytest.mark.parametrize("command", re.findall(r"^praison-agent-rl doctor (plan .*)$", PAGE.read_text("utf-8"), re.M))
def test_the_commands_at_the_top_of_the_page_work(command: str, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "7b.yaml").rename(tmp_path / "config.yaml")
    verb, file, *options = shlex.split(command, comments=True)
    done = CliRunner().invoke(doctor, [verb, str(tmp_path / file), *options])
    assert done.exit_code == 0, done.output
    assert "at most" in done.output


def test_what_the_page_says_of_70b_on_one_gpu_is_so(tmp_path: Path) -> None:
    written(tmp_path)
    weights = formulas.weight_bytes(KNOWN["meta-llama/Llama-3.3-70B"], 16)
    assert all(weights > (1 - demands.SPARE) * gpu.memory for gpu in GPUS.values())
    one = "--gpus 1 --machines 1 --server-gpus 4 --set load_in_4bit=true --gpu H100 --json"
    done = CliRunner().invoke(doctor, ["plan", str(tmp_path / "70b.yaml"), *one.split()])
    memory = json.loads(done.output)["own"]["memory"]
    assert sum(memory.values()) < (1 - demands.SPARE) * 80e9


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        written(Path(place))
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), Path(place)), encoding="utf-8")
