"""Measure, and write JSON, Markdown tables and plots.

    python -m benchmarks.speed [--only step,rollouts,reward,growth,floor,threads] [--quick] [--out FILE.json]

Beside ``FILE.json`` lies ``FILE.md``, and small pictures lie in the folder of ``--plots``. Whatever is compared was
measured in one run, in turn, each side in a process of its own; what is given is medians without the first.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import floor, growth, machine, reward, rollouts, step, threads
from .material import MODELS, model_folder
from .step_worker import STANDARD, VARIANTS

SECTIONS = ("step", "rollouts", "reward", "growth", "floor", "threads")
Tables = list[tuple[list[str], list[list[str]]]]


def main() -> None:
    """Measure what is asked for; each section is written as soon as it is there."""
    given = _arguments()
    result: dict[str, Any] = {"machine": machine.describe()}
    text = [f"Measured on: `{json.dumps(result['machine'])}`"]
    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        home = given.home or folder
        for section in given.only:
            print(f"--- {section}", file=sys.stderr, flush=True)
            found, tables = _measure(section, given, home)
            result[section] = found
            text += [f"## {section}", *(machine.table(*table) for table in tables)]
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            given.out.with_suffix(".md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    print("\n\n".join(text))


def _measure(section: str, given: argparse.Namespace, home: str) -> tuple[Any, Tables]:
    new = 8 if given.quick else step.NEW_TOKENS
    of = {name: {"home": home, "new_tokens": new, "folder": model_folder(name, Path(home))} for name in given.models}
    first = given.models[0]
    if section == "step":
        rows: list[dict[str, Any]] = []
        for name, options in of.items():
            limits = {"variants": given.variants, "minutes": given.minutes}
            rows += step.measure(name, _cells(given, name), **limits, options=options)
        return rows, step.tables(rows)
    if section == "rollouts":
        return _rollouts(given, of)
    if section == "reward":
        return _reward(given, home)
    if section == "growth":
        lines = growth.steps(first, variants=given.variants[:2], quick=given.quick, options=of[first])
        others = growth.others(quick=given.quick)
        growth.plot(lines, given.plots)
        growth.plot_others(others, given.plots)
        return {"steps": lines, **others}, growth.tables(lines, others)
    if section == "floor":
        seconds = 3.0 if given.quick else 90.0
        floors = [
            line for name in of for line in floor.measure(name, _cells(given, name), seconds=seconds, options=of[name])
        ]
        return floors, floor.tables(floors)
    settings = threads.measure(seconds=5.0 if given.quick else 90.0, options=of[first])
    return settings, threads.tables(settings)


def _rollouts(given: argparse.Namespace, of: dict[str, dict[str, Any]]) -> tuple[Any, Tables]:
    sizes = {"rows": (1, 4), "seconds": 2.0} if given.quick else {}
    prompts = {"prompt_tokens": 60} if given.quick else {}
    lines = [line for name in of for line in rollouts.measure(name, **sizes, options={**of[name], **prompts})]
    vllm = None if given.quick else rollouts.by_vllm()
    return {"lines": lines, "vllm": vllm}, rollouts.tables(lines, vllm)


def _reward(given: argparse.Namespace, home: str) -> tuple[Any, Tables]:
    name = given.models[0] if given.quick else "smollm2"
    options = {"home": home, "folder": model_folder(name, Path(home)), "held_out": 66, "every": 6, "new_tokens": 32}
    if given.quick:
        few = {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4}
        options |= {"held_out": 4, "every": 1, "new_tokens": 4, "settings": few}
    kinds = [variant for variant in given.variants if variant in ("ours", "ours-bf16", "trl-plain")]
    seeds = range(1 if given.quick else given.seeds)
    curves = reward.measure(variants=kinds, seeds=seeds, minutes=given.reward_minutes, options=options)
    growth.plot_curves(curves, given.plots)
    return curves, reward.tables(curves)


def _cells(given: argparse.Namespace, model: str) -> tuple[step.Cell, ...]:
    if given.cells:
        return tuple(given.cells)
    if given.quick:
        return ((60, 2), (90, 4))
    return step.CROSS if model == "smollm2" else step.ALL


def _words(known: tuple[str, ...]) -> Any:
    def read(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)!r} is none of {', '.join(known)}")
        return words

    return read


def _cell_list(text: str) -> list[step.Cell]:
    try:
        return [(int(length), int(group)) for length, group in (cell.split("x") for cell in text.split(","))]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write prompt tokens x completions, such as 400x8,1600x4"
        ) from error


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--only", type=_words(SECTIONS), default=list(SECTIONS), help=f"sections, of {', '.join(SECTIONS)}")
    add("--quick", action="store_true", help="tiny sizes: shows that it runs, and measures nothing")
    add("--out", type=Path, default=Path("benchmarks/speed.json"))
    add("--plots", type=Path, help="folder of the pictures; by default docs/plots, and beside --out with --quick")
    add("--models", type=_words(MODELS), help=f"of {', '.join(MODELS)}")
    add(
        "--variants",
        type=_words(VARIANTS),
        default=list(STANDARD),
    )
    add("--cells", type=_cell_list, help="prompt tokens x completions, such as 400x8,1600x4")
    add("--minutes", type=float, default=30.0, help="for the steps of one model's table, without loading")
    add("--reward-minutes", type=float, default=20.0, help="of training, for one curve of the section reward")
    add("--seeds", type=int, default=3)
    add("--home", type=str, help="folder for models and logs; by default a temporary one")
    given = parser.parse_args()
    given.models = given.models or (["random-tiny"] if given.quick else ["random-28m", "smollm2"])
    given.plots = given.plots or (given.out.parent / "plots" if given.quick else Path("docs/plots"))
    given.minutes = 0.2 if given.quick else given.minutes
    return given


if __name__ == "__main__":
    main()
