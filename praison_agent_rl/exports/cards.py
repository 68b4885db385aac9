"""The model card of an export: what it was trained on and how, and what held-out prompts showed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from praison_agent_rl.data_files import read_rows
from praison_agent_rl.exports.subjects import Subject
from praison_agent_rl.records import Comparison, Plan
from praison_agent_rl.runs import RunFolder, write_text

_METHODS = {"grpo": "GRPO (arXiv 2402.03300), by rewards", "cpo": "CPO (arXiv 2401.08417), by preference pairs"}
_LICENSE = ("license", "license_name", "license_link")
"""How the hub names a licence; one that it has no name for is ``other``, with the rest."""
_IN_GGUF = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
}
CARD = "README.md"


def write_card(subject: Subject, folder: Path, *, tags: tuple[str, ...] = (), library: str = "transformers") -> None:
    """Write the card of ``subject`` into ``folder``; ``library`` is what loads the files there."""
    write_text(folder / CARD, model_card(subject, tags=tags, library=library))


def model_card(subject: Subject, *, tags: tuple[str, ...] = (), library: str = "transformers") -> str:
    """The card as Markdown with the hub's metadata at its top."""
    plan = subject.plan
    first = _first_plan(plan)
    metadata: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if base := hub_name(first.base):
        metadata["base_model"] = base
        metadata["base_model_relation"] = "adapter" if library == "peft" else "finetune"
    metadata |= (license_ := license_of(first.base, first.config.get("revision")))
    metadata["tags"] = list(dict.fromkeys(["praison-agent-rl", str(plan.config.get("method", "grpo")), *tags]))
    sections = [
        f"# {subject.title}",
        "\n".join(
            [*_origin(subject, first), f"- licence of the base: {_in_words(license_)}", *_training(subject, library)]
        ),
        "## Held-out comparison",
        "\n".join(_results(subject)),
    ]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + "\n\n".join(sections) + "\n"


def hub_name(base: str) -> str | None:
    """The base if it is a name on the hub; paths of this machine say nothing elsewhere."""
    is_path = base.startswith(("/", ".", "~")) or "\\" in base or Path(base).exists() or base.endswith(".gguf")
    return None if is_path or base.count("/") != 1 else base


def _first_plan(plan: Plan) -> Plan:
    """The plan of the first training: a version may be trained on an earlier one, and that on one before."""
    while (earlier := RunFolder(Path(plan.base).parent)).merged == Path(plan.base) and earlier.plan_file.is_file():
        plan = earlier.plan
    return plan


def license_of(base: str, revision: str | None) -> dict[str, Any]:
    """What the base says of its licence in the hub's words, where its card or its GGUF file is on this machine."""
    path = Path(base)
    if path.suffix.lower() == ".gguf":
        return _license_in_gguf(path)
    card = path / CARD if path.is_dir() else _cached_card(base, revision)
    try:
        start, head, *_ = card.read_text(encoding="utf-8").split("---\n") if card else ("", "")
        found = yaml.safe_load(head) if not start.strip() else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    said = found if isinstance(found, dict) and found.get("license") else {}
    return {key: said[key] for key in _LICENSE if said.get(key)}


def _license_in_gguf(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
    except (OSError, ValueError):
        return {}
    said = {key: fields[name].contents() for key, name in _IN_GGUF.items() if name in fields}
    return said if said.get("license") else {}


def _in_words(license_: dict[str, Any]) -> str:
    if not license_:
        return "unknown: its card is not on the machine that wrote this, or names none"
    said = license_["license"]
    more = [str(license_[key]) for key in _LICENSE[1:] if key in license_]
    return ", ".join([*(map(str, said) if isinstance(said, list) else [str(said)]), *more])


def _cached_card(base: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(base, CARD, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _origin(subject: Subject, first: Plan) -> Iterator[str]:
    plan = subject.plan
    revision = f", revision {first.config['revision']}" if first.config.get("revision") else ""
    earlier = f"version {first.parent} of the same agent" if first.parent else None  # which is not there any more
    yield f"- base: {earlier or hub_name(first.base) or Path(first.base).name}{revision}"
    if plan != first:
        yield f"- trained on {f'version {plan.parent} of the same agent' if plan.parent else 'an earlier run of it'}"


def _training(subject: Subject, library: str) -> Iterator[str]:
    plan = subject.plan
    if plan.agent:
        yield f"- trained for the agent {plan.agent!r}"
    form = "a LoRA adapter" if library == "peft" else "LoRA, merged"
    yield f"- method: {_METHODS.get(str(plan.config.get('method', 'grpo')), plan.config.get('method'))}; {form}"
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
    if subject.unmeasured:
        yield "It was exported by force, before it was compared with its base on the prompts that were held out."
        return
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
