"""The model card of an export: what it was trained on and how, and what held-out prompts showed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from praison_agent_rl.data_files import read_rows
from praison_agent_rl.exports.subjects import Subject
from praison_agent_rl.records import Comparison, Plan
from praison_agent_rl.runs import write_text

_METHODS = {"grpo": "GRPO (arXiv 2402.03300), by rewards", "cpo": "CPO (arXiv 2401.08417), by preference pairs"}
CARD = "README.md"


def write_card(subject: Subject, folder: Path, *, tags: tuple[str, ...] = (), library: str = "transformers") -> None:
    """Write the card of ``subject`` into ``folder``; ``library`` is what loads the files there."""
    write_text(folder / CARD, model_card(subject, tags=tags, library=library))


def model_card(subject: Subject, *, tags: tuple[str, ...] = (), library: str = "transformers") -> str:
    """The card as Markdown with the hub's metadata at its top."""
    plan = subject.plan
    metadata: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if base := hub_name(plan.base):
        metadata["base_model"] = base
        metadata["base_model_relation"] = "adapter" if library == "peft" else "finetune"
    if license_ := license_of(plan.base, plan.config.get("revision")):
        metadata["license"] = license_
    metadata["tags"] = list(dict.fromkeys(["praison-agent-rl", str(plan.config.get("method", "grpo")), *tags]))
    sections = [
        f"# {subject.label}",
        "\n".join(_origin(subject, license_)),
        "## Held-out comparison",
        "\n".join(_results(subject)),
    ]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + "\n\n".join(sections) + "\n"


def hub_name(base: str) -> str | None:
    """The base if it is a name on the hub; paths of this machine say nothing elsewhere."""
    is_path = base.startswith(("/", ".", "~")) or "\\" in base or Path(base).exists() or base.endswith(".gguf")
    return None if is_path or base.count("/") != 1 else base


def license_of(base: str, revision: str | None) -> str | None:
    """The licence that the base says it has, where its card or its GGUF file is on this machine."""
    path = Path(base)
    if path.suffix.lower() == ".gguf":
        return _license_in_gguf(path)
    card = path / CARD if path.is_dir() else _cached_card(base, revision)
    try:
        head = card.read_text(encoding="utf-8").split("---\n")[1] if card else ""
        found = yaml.safe_load(head)
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return None
    license_ = found.get("license") if isinstance(found, dict) else None
    return license_ if isinstance(license_, str) else None


def _license_in_gguf(file: Path) -> str | None:
    from gguf import GGUFReader

    try:
        field = GGUFReader(file).fields.get("general.license")
    except (OSError, ValueError):
        return None
    return str(field.contents()) if field is not None else None


def _cached_card(base: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(base, CARD, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _origin(subject: Subject, license_: str | None) -> Iterator[str]:
    plan = subject.plan
    revision = f", revision {plan.config['revision']}" if plan.config.get("revision") else ""
    name = hub_name(plan.base) or Path(plan.base).name
    yield f"- base: {f'version {plan.parent} of the same agent' if plan.parent else name}{revision}"
    yield f"- licence of the base: {license_ or 'unknown: its card is not on the machine that wrote this'}"
    if plan.agent:
        yield f"- trained for the agent {plan.agent!r}"
    yield f"- method: {_METHODS.get(str(plan.config.get('method', 'grpo')), plan.config.get('method'))}; LoRA, merged"
    yield f"- trained: {plan.created[:10]}, with " + ", ".join(f"{k} {v}" for k, v in plan.libraries.items())
    yield "- rewards: " + (", ".join(f"{reward.name} (weight {reward.weight:g})" for reward in plan.rewards) or "none")
    yield f"- data: {', '.join(_counts(subject)) or 'not recorded'}"
    if (merge := subject.merge) is not None:
        yield (
            f"- merge: proved by {merge.by}; saved weights differ from base + adapter by {merge.saved_error:.3g} "
            f"(allowed {merge.tolerance:g})"
        )


def _counts(subject: Subject) -> Iterator[str]:
    """Rows of both sides, of a version from its ``data.json``, of a run from the files themselves."""
    root = subject.records.root
    data = root / "data.json"
    known = json.loads(data.read_text(encoding="utf-8")) if data.is_file() else {}
    files = {"train": subject.records.train_rows, "held_out": subject.records.held_out_rows}
    for side, words in (("train", "rows to train on"), ("held_out", "held out")):
        rows = (known.get(side) or {}).get("rows")
        if rows is None and files[side].is_file():
            rows = len(read_rows(files[side]))
        if rows is not None:
            yield f"{rows} {words}"


def _results(subject: Subject) -> Iterator[str]:
    compared, verdict = subject.comparison, subject.verdict
    if compared is None:
        yield "Nothing was held out, so it is not known whether this is better than its base."
        return
    yield _table(compared, subject.plan)
    if verdict is not None:
        forced = " It was let through by hand, against this verdict." if verdict.forced else ""
        yield f"\nVerdict of the gate: {verdict.text}.{forced}"
        for guard in verdict.guards:
            yield f"- guard {guard.name}{' (broken)' if guard.broken else ''}: {guard.text}"
        for finding in verdict.findings:
            yield f"- sign of cheating, {finding.name}: {finding.text}"
    yield f"\nExported{'' if subject.passed else ' by force, against the verdict'} by praison-agent-rl."


def _table(compared: Comparison, plan: Plan) -> str:
    intervals = {"total": compared.total, **compared.rewards}
    intervals |= {f"{name} (not trained on)": interval for name, interval in compared.judged.items()}
    rows = [
        f"| {name} | {i.base:.4g} | {i.new:.4g} | {i.difference:+.4g} | {i.low:+.4g} to {i.high:+.4g} |"
        for name, i in intervals.items()
    ]
    head = "| score | base | this model | difference | 95 % interval |\n|---|---|---|---|---|"
    return (
        f"{compared.prompts} prompts that were not trained on, {compared.samples} answers to each: {compared.wins} "
        f"better, {compared.ties} equal, {compared.losses} worse.\n\n{head}\n" + "\n".join(rows)
    )
