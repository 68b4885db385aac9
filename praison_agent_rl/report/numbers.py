"""Everything that the page of a run says, gathered from the run's folder, and the same as JSON."""

import hashlib
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from praison_agent_rl.curriculum import groups_of, recorded_groups, summary
from praison_agent_rl.data import prompt_key
from praison_agent_rl.records import FEWEST_PROMPTS, Comparison, MergeProof, Plan, Record, RewardCard, Verdict
from praison_agent_rl.report.answers import Side, gains_of, lines, pick, read_side
from praison_agent_rl.report.page import count
from praison_agent_rl.report.pairs import Pairs, read_pairs
from praison_agent_rl.report.verdicts import card_verdict, verdict
from praison_agent_rl.runs import RunFolder, read_record

FORMAT = 1
"""Of ``report.json``; keys are added, and not renamed or taken away, under one number."""
KINDS = ("control", "earlier")
_HALF = 0.5

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Data:
    """What was trained on and what was asked; None for what is not in the folder."""

    train: int | None
    held_out: int | None
    asked_besides: dict[str, int]
    """Rows of ``control`` and ``earlier``."""
    shared: int | None
    """Held-out prompts that were trained on too, word for word."""
    manifest: dict[str, Any] | None


@dataclass(frozen=True)
class Facts:
    """What is known of a run."""

    run: RunFolder
    plan: Plan
    comparison: Comparison | None
    decided: Verdict | None
    card: RewardCard | None
    """What a reward model is worth; None for a policy, and where nothing was held out."""
    pairs: Pairs | None
    """What a reward model said of the held-out pairs."""
    merge: MergeProof | None
    version: dict[str, Any]
    """The record of the version that the folder is of; empty for a run's own folder."""
    steps: list[dict[str, Any]]
    times: tuple[str, str] | None
    """Of the first and of the last event."""
    base: Side | None
    new: Side | None
    gains: dict[int, float]
    shown: dict[str, list[int]]
    data: Data
    diagnosis: list[dict[str, Any]]
    """What went wrong, in the order in which it was told: name, step, text, advice, severity."""
    watched: list[dict[str, Any]]
    """Looks at the prompts that were put aside, by step."""
    curriculum: dict[str, Any] | None
    """See `curriculum.summary`."""
    notes: list[str]
    hashes: dict[str, str]

    @property
    def method(self) -> str:
        """What was trained by; grpo where the plan does not say."""
        return str(self.plan.config.get("method", "grpo"))

    @property
    def of_pairs(self) -> bool:
        """Whether it was trained on pairs of a better and a worse answer, and not by rewards."""
        return self.method in ("reward", "cpo")

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        return outcome_of(self.run)

    @property
    def by_pairs(self) -> bool:
        """Whether the total is the share of held-out pairs that the model prefers rightly, for want of a reward."""
        return _is_by_pairs(self.plan)

    @property
    def warnings(self) -> list[str]:
        """What a reader should know before believing the rest."""
        return [*_about_data(self), *_about_training(self)]


def outcome_of(run: RunFolder) -> str:
    """What a run came to in one sentence."""
    plan = run.plan
    if plan.config.get("method") == "reward":
        return card_verdict(_record(run.card, RewardCard))
    comparison, decided = _record(run.comparison_file, Comparison), _record(run.verdict_file, Verdict)
    return verdict(comparison, decided, by_pairs=_is_by_pairs(plan))


def _is_by_pairs(plan: Plan) -> bool:
    return plan.config.get("method") == "cpo" and not plan.rewards


def gather(run: RunFolder) -> Facts:
    """What the folder of a run (or of a version, which keeps its records) holds."""
    plan = run.plan
    longest = plan.config.get("max_completion_length")
    base, new = (
        read_side(run.answers(side), longest) if run.answers(side).exists() else None for side in ("base", "new")
    )
    gains = gains_of(base, new) if base and new else {}
    both = base.prompts & new.prompts if base and new else set()
    events = [event for _, event in run.events()]
    said = [str(event.get("text")) for event in events if event.get("event") == "note"]
    stamps = [str(event["time"]) for event in events if "time" in event]
    version = run.root / "version.json"
    return Facts(
        run=run,
        plan=plan,
        comparison=_record(run.comparison_file, Comparison),
        decided=_record(run.verdict_file, Verdict),
        card=_record(run.card, RewardCard),
        pairs=read_pairs(run.pair_scores, run.held_out_rows),
        merge=_record(run.merge_file, MergeProof),
        version=json.loads(version.read_text(encoding="utf-8")) if version.exists() else {},
        steps=run.steps(),
        times=(stamps[0], stamps[-1]) if stamps else None,
        base=base,
        new=new,
        gains=gains,
        shown=pick(gains, both, seed=int(plan.config.get("seed", 0))),
        data=_data(run),
        diagnosis=[_without_time(event) for event in events if event.get("event") == "diagnosis"],
        watched=_looks(events),
        curriculum=summary(groups_of(run.steps()), recorded_groups(events) or ()),
        notes=list(dict.fromkeys([*plan.notes, *said])),
        hashes=_hashes(run),
    )


def as_json(facts: Facts) -> dict[str, Any]:
    """The numbers of the page; every key is there, null where there is nothing, and so is what is no finite number."""
    plan, comparison = facts.plan, facts.comparison
    whole: dict[str, Any] = {
        "format": FORMAT,
        "run": facts.run.root.name,
        "version": facts.version.get("name"),
        **plan.model_dump(
            include={"created", "agent", "parent", "base", "candidate", "incumbent", "device", "samples"}
        ),
        "method": plan.config.get("method"),
        "verdict": _verdict_json(facts),
        "comparison": {**comparison.model_dump(), "better": comparison.better} if comparison else None,
        "reward_model": _card_json(facts),
        "answers": {
            "base": facts.base.as_json() if facts.base else None,
            "new": facts.new.as_json() if facts.new else None,
            "shown": {
                kind: [{"prompt": prompt, "gain": facts.gains.get(prompt)} for prompt in prompts]
                for kind, prompts in facts.shown.items()
            },
        },
        "training": {**dict(zip(("started", "ended"), facts.times or (None, None), strict=True)), "steps": facts.steps},
        "diagnosis": facts.diagnosis,
        "watched": facts.watched,
        "calls": calls_of(facts.steps),
        "curriculum": facts.curriculum,
        "data": _data_json(facts.data),
        "merge": facts.merge.model_dump() if facts.merge else None,
        "warnings": facts.warnings,
        "notes": facts.notes,
        **plan.model_dump(include={"rewards", "judges", "rules", "config", "libraries"}),
        "hashes": facts.hashes,
        "repeat": repeat_commands(facts),
    }
    finite: dict[str, Any] = _finite(whole)
    return finite


def _without_time(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("time", "event")}


def _looks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each look once, where a run was resumed."""
    by_step = {int(event["step"]): _without_time(event) for event in events if event.get("event") == "watched"}
    return [by_step[step] for step in sorted(by_step)]


def calls_of(steps: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sums over the steps, by reward; ``usage`` is what a judge had used at the last of them."""
    found: dict[str, dict[str, Any]] = {}
    for step in steps:
        for name, call in (step.get("calls") or {}).items():
            sums = found.setdefault(name, {"samples": 0, "none": 0, "failed": 0, "nan": 0, "hits": 0, "seconds": 0.0})
            samples = int(call.get("samples") or 0)
            sums["samples"] += samples
            for key in ("none", "failed"):
                sums[key] += round((call.get(key) or 0) * samples)
            for key in ("nan", "hits", "seconds"):
                sums[key] += call.get(key) or 0
            if call.get("usage"):
                sums["usage"] = call["usage"]
            if call.get("error"):
                sums.setdefault("error", call["error"])
    return found


def _verdict_json(facts: Facts) -> dict[str, Any]:
    names = [name for name in Verdict.model_fields if name != "forced"]
    decided = facts.decided.model_dump() if facts.decided else {**dict.fromkeys(names), "forced": False}
    return {"sentence": facts.sentence, **decided}


def _card_json(facts: Facts) -> dict[str, Any] | None:
    """The card, and what a rule of length would be worth on the same pairs."""
    if facts.card is None:
        return None
    rule = facts.pairs.by_length if facts.pairs else None
    by_length = {"rule": rule[0], "accuracy": rule[1]} if rule else None
    return {
        **facts.card.model_dump(),
        "pairs_scored": len(facts.pairs.chosen) if facts.pairs else 0,
        "by_length": by_length,
    }


def _data_json(data: Data) -> dict[str, Any]:
    besides = {kind: data.asked_besides.get(kind) for kind in KINDS}
    return {
        "train": data.train, "held_out": data.held_out, **besides, "shared": data.shared, "manifest": data.manifest,
    }  # fmt: skip


def repeat_commands(facts: Facts) -> list[str]:
    """What to type to do the whole run again; nothing where that cannot be: see ``why_not_repeatable``."""
    if why_not_repeatable(facts):
        return []
    sources = " ".join(shlex.quote(str(path.resolve())) for path in _inputs(facts.run))
    again = "praison-agent-rl train --resume repeated"
    if facts.plan.candidate:
        again = "python -m praison_agent_rl.stages repeated measure_base measure_new"
    return ["mkdir repeated", f"cp {sources} repeated/", again]


def _inputs(run: RunFolder) -> list[Path]:
    """The files that a run is made from."""
    rows = [run.train_rows, run.watch_rows, run.held_out_rows, *(run.guard_rows(kind) for kind in KINDS)]
    rows += [run.recorded, run.answered]
    return [path for path in (run.plan_file, *rows) if path.exists()]


def why_not_repeatable(facts: Facts) -> str | None:
    """What stands in the way of doing the run again from its folder."""
    nameless = [reward.name for reward in [*facts.plan.rewards, *facts.plan.judges] if reward.spec is None]
    if nameless:
        return (
            f"{', '.join(nameless)} existed only in the process that planned the run (a lambda, a notebook or local "
            "function); as module:function the run could be repeated"
        )
    if not facts.run.train_rows.exists() and not facts.plan.candidate:
        return "the rows that were trained on stayed in the folder of the run"
    return None


def _data(run: RunFolder) -> Data:
    trained = [_key(row) for row in lines(run.train_rows)] if run.train_rows.exists() else None
    held_out = [_key(row) for row in lines(run.held_out_rows)] if run.held_out_rows.exists() else None
    shared = None
    if trained is not None and held_out is not None:
        known = set(trained)
        shared = sum(key in known for key in held_out)
    besides = {kind: run.guard_rows(kind) for kind in KINDS}
    return Data(
        train=None if trained is None else len(trained),
        held_out=None if held_out is None else len(held_out),
        asked_besides={kind: sum(1 for _ in lines(path)) for kind, path in besides.items() if path.exists()},
        shared=shared,
        manifest=json.loads(run.manifest.read_text(encoding="utf-8")) if run.manifest.exists() else None,
    )


def _key(row: dict[str, Any]) -> int:
    """What word for word means: of a pair without a prompt of its own, the pair."""
    return hash(json.dumps(row["prompt"], sort_keys=True) if row.get("prompt") is not None else prompt_key(row))


def _about_data(facts: Facts) -> Iterator[str]:
    comparison, data = facts.comparison, facts.data
    if facts.decided and facts.decided.forced and not facts.decided.passed:
        yield f"this model was promoted by force; the gate's verdict was: {facts.decided.text}"
    if data.shared:
        yield f"{count(data.shared, 'held-out prompt')} of {data.held_out:,} were trained on too, word for word"
    if facts.card is not None:
        yield from _about_card(facts.card, facts.pairs)
    if comparison is None:
        return
    if comparison.prompts < FEWEST_PROMPTS:
        yield f"only {count(comparison.prompts, 'prompt')} could be compared; {FEWEST_PROMPTS} are the least"
    if comparison.unscored:
        yield f"{count(comparison.unscored, 'prompt')} left out of the comparison: one model has no scored answer"
    if comparison.errors_base or comparison.errors_new:
        yield (
            f"answers failed: {comparison.errors_base:,} of the base's, {comparison.errors_new:,} of the new model's; "
            "they are counted here and have no score"
        )


def _about_card(card: RewardCard, pairs: Pairs | None) -> Iterator[str]:
    if card.held_out < FEWEST_PROMPTS:
        yield f"only {count(card.held_out, 'prompt')} could be compared; {FEWEST_PROMPTS} are the least"
    if pairs is not None and pairs.by_length and pairs.by_length[1] >= card.accuracy_low > 0.5:
        rule, share = pairs.by_length
        yield (
            f"{rule} is the chosen one of {share:.0%} of the held-out pairs, which lies in this model's interval or "
            "above it: it may have learned nothing but length, and a policy trained against it would learn that"
        )


def _about_training(facts: Facts) -> Iterator[str]:
    steps, what = facts.steps, "loss" if facts.of_pairs else "reward"
    unscored = sum(_number(step.get(what)) is None for step in steps)
    if unscored:
        yield f"{count(unscored, 'training step')} of {len(steps):,} without a {what} that is a number"
    silent = _mean(steps, "frac_reward_zero_std")
    if silent is not None and silent > _HALF:
        yield f"{silent:.0%} of the groups had the same reward for every answer, and so taught nothing"
    cut = _mean(steps[-math.ceil(len(steps) / 4) :], "clipped")
    if cut is not None and cut > _HALF:
        longest = facts.plan.config.get("max_completion_length")
        yield f"{cut:.0%} of the answers of the last steps were cut off at max_completion_length={longest}"


def _mean(steps: list[dict[str, Any]], name: str) -> float | None:
    values = [value for step in steps if (value := _number(step.get(name))) is not None]
    return sum(values) / len(values) if values else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _record(path: Path, kind: type[AnyRecord]) -> AnyRecord | None:
    return read_record(path, kind) if path.exists() else None


def _hashes(run: RunFolder) -> dict[str, str]:
    """sha256 of the files that decide what the run was; those of whole models take too long to be made here."""
    files = [*_inputs(run), run.answers("base"), run.answers("new"), run.adapter / "adapter_model.safetensors"]
    return {str(path.relative_to(run.root)): _sha256(path) for path in files if path.exists()}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
