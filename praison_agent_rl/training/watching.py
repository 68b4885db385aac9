"""Watch a run while it trains: say what goes wrong, look at prompts that were put aside, keep the best, end in time."""

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from praison_agent_rl.answering import Manner
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.diagnosis import Symptom, Watch, WatchRules, out_of_memory
from praison_agent_rl.errors import RewardError, ServerFailed, TrainingFailed
from praison_agent_rl.evaluation import score_answers
from praison_agent_rl.ranks import is_first, process_count, rank
from praison_agent_rl.records import Answer
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.best import Best, best_of, keep, paired, surely_better
from praison_agent_rl.training.events import as_number
from praison_agent_rl.training.scoring import calling_here
from praison_agent_rl.training.together import agreed, everywhere

_SAMPLES = 2
"""Answers to each watched prompt: one greedy, one sampled with the run's seed, as the gate asks."""
_COLLAPSES = ("nan", "entropy collapse", "identical completions")
"""After these the last step is no candidate any more."""
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
"""How torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), and CUDA's where it is no OutOfMemoryError, say it."""


class Scorers(NamedTuple):
    """What watched answers are scored by."""

    rewards: Sequence[Reward]
    judges: Sequence[Reward] = ()
    """Not trained on: if they fall while the total rises, the reward is won without the job being done."""


@dataclass(frozen=True)
class Looked:
    """What a look at the watched prompts found, by prompt."""

    totals: list[float | None]
    guarded: dict[str, list[float | None]]
    """Of rewards that are not trained on, or are guarded."""


class Watcher(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Watches one run, in every process alike.

    Of several processes each asks a part of the watched prompts; the first one judges, writes and keeps.
    """

    def __init__(
        self, run: RunFolder, trainer: Any, rows: Sequence[Row], scorers: Scorers, config: TrainConfig
    ) -> None:
        self._run, self._trainer, self._scorers, self._config = run, trainer, scorers, config
        self._rows = list(rows) if _can_look(run, trainer, rows) else []
        self._rules = rules_of(run, scorers.rewards)
        self._watch = Watch(self._rules)
        self._start: Looked | None = None
        self._looked_at = -1
        self.stopped: Symptom | None = None
        """Why the run ended before its time."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers before the first step, of a resumed run too."""
        for event in _until(self._run, state.global_step) if state.global_step else []:
            self._watch.see(event)
            if event["event"] == "watched" and event["step"] == 0:
                self._start = Looked(event["totals"], event["scores"])
        if not state.global_step:
            self._look(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers after each update, before it is logged and saved."""
        every = self._config.watch_steps or max(1, int(state.save_steps or 1))
        if state.global_step % every == 0 or state.global_step >= state.max_steps:
            self._look(state, control)

    def after_step(self, event: dict[str, Any], control: Any) -> None:
        """Diagnose a step; called for each that was logged, in every process."""
        found = agreed(self._watch.see(event))
        self._tell(found, control)
        if self.stopped and self.stopped.name != "nan":
            self._look(self._trainer.state, control)

    def _tell(self, found: Sequence[Symptom], control: Any) -> None:
        if is_first():
            tell(self._run, found)
        ends = next((symptom for symptom in found if symptom.severity == "stop"), None)
        if ends and self.stopped is None:
            self.stopped = ends
            control.should_training_stop = True
            # what is resumed from there ends there again, and NaN is no place to resume from
            control.should_save = self._trainer.args.save_strategy != "no" and ends.name != "nan"

    def _look(self, state: Any, control: Any) -> None:
        """Ask the watched prompts, and keep the adapter if it is the best so far."""
        if not self._rows or self._looked_at == state.global_step:
            return
        self._looked_at = state.global_step
        began = time.monotonic()
        parts = everywhere(self._scored())
        event = agreed(self._event(state, parts, began) if is_first() else None)
        if event:
            self._tell(agreed(self._watch.see(event)), control)

    def _event(self, state: Any, parts: Sequence["list[Answer] | str"], began: float) -> dict[str, Any] | None:
        if faults := [part for part in parts if isinstance(part, str)]:
            self._run.report_event(
                "note", text=f"step {state.global_step}: the watched prompts have no scores: {faults[0]}"
            )
            return None
        found = [answer for part in parts if not isinstance(part, str) for answer in part]
        answers = sorted(found, key=lambda answer: (answer.prompt, answer.sample))
        looked = _by_prompt(answers, len(self._rows), sorted(self._guarded()))
        self._start = self._start or looked
        gain = paired(looked.totals, self._start.totals)
        scored = [total for total in looked.totals if total is not None]
        if gain is None or not scored:
            return None
        event = {
            "event": "watched",
            "step": state.global_step,
            "of": state.max_steps,
            "total": statistics.fmean(scored),
            "gain": gain.difference,
            "gain_error": as_number(gain.error),
            "rewards": _means([answer.rewards for answer in answers]),
            "judged": _means([answer.judged for answer in answers]),
            "guarded": {name: _change(now, self._start.guarded.get(name, now)) for name, now in looked.guarded.items()},
            "totals": looked.totals,
            "scores": looked.guarded,
            "length": statistics.fmean(answer.tokens for answer in answers),
        }
        self._keep_best(event)
        event["seconds"] = time.monotonic() - began
        self._run.report_event("watched", **{name: value for name, value in event.items() if name != "event"})
        return event

    def _keep_best(self, event: dict[str, Any]) -> None:
        best = best_of(self._run)
        event["best"] = event["step"] > 0 and (best is None or event["gain"] >= best.gain)
        if event["best"]:
            keep(self._run, self._trainer, event)

    def _scored(self) -> "list[Answer] | str":
        """Answers to the prompts that are this process's to ask, or why they have no scores."""
        places = range(rank(), len(self._rows), process_count())
        rows = [self._rows[place] for place in places]
        if not rows:
            return []
        try:
            with _same_chance():
                manner = Manner(_SAMPLES, self._trainer.shown_tools, strict=False)
                answers, runs = self._trainer.answers_to(rows, self._config, manner)
                rewards, judges = self._scorers
                calling = calling_here(self._run)
                scored = score_answers(answers, rows, rewards, judges=judges, calling=calling, runs=runs)
        except RewardError as error:
            return str(error)
        return [answer.model_copy(update={"prompt": places[answer.prompt]}) for answer in scored]

    def _guarded(self) -> frozenset[str]:
        names = {reward.name for reward in (*self._scorers.rewards, *self._scorers.judges)}
        return (self._rules.guards & names) | {judge.name for judge in self._scorers.judges}


def rules_of(run: RunFolder, rewards: Sequence[Reward]) -> WatchRules:
    """What the diagnosis of a run needs to know of it."""
    plan = run.plan
    idle = {reward.name for reward in rewards if reward.weight == 0}  # watched, and not trained on
    patience = int(plan.config.get("patience") or 0)
    return WatchRules(plan.config, patience, frozenset({*plan.rules.guards, *idle}))


def tell(run: RunFolder, found: Sequence[Symptom]) -> None:
    """Write symptoms into the run's events, each once, in a resumed run too."""
    if not found:
        return
    said = {(event["name"], event["severity"]) for _, event in run.events() if event["event"] == "diagnosis"}
    for symptom in found:
        if (symptom.name, symptom.severity) not in said:
            run.report_event("diagnosis", **symptom.model_dump())


def stopped_at(run: RunFolder, step: int) -> Symptom | None:
    """Why ``run`` was ended at ``step`` or before it, if it was."""
    fields = Symptom.model_fields
    for _, event in run.events():
        ended = event["event"] == "diagnosis" and event["severity"] == "stop" and event["name"] != "out of memory"
        if ended and event["step"] <= step:
            return Symptom(**{name: event[name] for name in fields})
    return None


@contextlib.contextmanager
def memory_told(run: RunFolder, rewards: Sequence[Reward]) -> Iterator[None]:
    """Turn running out of memory into what to lower.

    Raises:
        TrainingFailed: the memory did not suffice.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if isinstance(error, ServerFailed):  # whose log may say so of its own memory
            raise
        if not known and not any(sign in str(error).lower() for sign in _OUT_OF_MEMORY):
            raise
        step = max((event["step"] for event in run.steps()), default=0)
        symptom = out_of_memory(rules_of(run, rewards), step=step, said=str(error))
        tell(run, [symptom])
        raise TrainingFailed(f"{symptom.text}. To go on, {symptom.advice}") from error


def outlived_by_best(run: RunFolder, stopped: Symptom | None) -> bool:
    """Whether the weights became NaN, and an adapter from before is kept that had learned something."""
    best = best_of(run)
    return stopped is not None and stopped.name == "nan" and best is not None and best.gain > 0


def best_instead(run: RunFolder, step: int, stopped: Symptom | None) -> Best | None:
    """The adapter to publish in place of that of ``step``, the last; None for the last. Says which, and why.

    Raises:
        TrainingFailed: the run was ended by a collapse, and nothing shows that anything had been learned.
    """
    best, last = best_of(run), _last_look(run, step)
    collapsed = stopped is not None and stopped.name in _COLLAPSES
    if collapsed and not (best and best.gain > 0) and (best or not _rose(run, step)):
        assert stopped is not None
        raise TrainingFailed(f"training was ended at step {step}: {stopped.text}. To go on, {stopped.advice}")
    if best is None or best.step == step:
        return None
    if collapsed or last is None or surely_better(best, last):
        run.report_event(
            "note",
            text=f"the adapter is that of step {best.step}, the best one on the watched prompts "
            f"(total {best.gain:+.3g} against before training), and not that of the last step, {step}",
        )
        return best
    run.report_event(
        "note",
        text=f"the adapter is that of the last step, {step}: on the watched prompts step "
        f"{best.step} was not better by more than chance",
    )
    return None


def _rose(run: RunFolder, step: int) -> bool:
    watch = Watch()
    for event in run.steps():
        if event["step"] <= step:
            watch.see(event)
    return watch.seen.reward_rose


def _last_look(run: RunFolder, step: int) -> list[float | None] | None:
    looks = [event for _, event in run.events() if event["event"] == "watched" and event["step"] == step]
    return looks[-1]["totals"] if looks else None


def _until(run: RunFolder, step: int) -> list[dict[str, Any]]:
    """Steps and looks up to ``step``, in order; what was done twice counts once."""
    kept = {
        (event["step"], event["event"] == "step"): event
        for _, event in run.events()
        if event["event"] in ("step", "watched") and event["step"] <= step
    }
    return [kept[key] for key in sorted(kept)]


def _can_look(run: RunFolder, trainer: Any, rows: Sequence[Row]) -> bool:
    if not rows or not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        return bool(rows)
    run.report_event("note", text="DeepSpeed or FSDP holds the weights, so no checkpoint is looked at")
    return False


def _by_prompt(answers: Sequence[Answer], prompts: int, guarded: Sequence[str]) -> Looked:
    totals: list[list[float | None]] = [[] for _ in range(prompts)]
    others: dict[str, list[list[float | None]]] = {name: [[] for _ in range(prompts)] for name in guarded}
    for answer in answers:
        totals[answer.prompt].append(answer.total)
        for name in guarded:
            others[name][answer.prompt].append({**answer.rewards, **answer.judged}.get(name))
    return Looked([_mean(t) for t in totals], {name: [_mean(o) for o in other] for name, other in others.items()})


def _means(scores: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    names = dict.fromkeys(name for score in scores for name in score)
    return {name: _mean([score.get(name) for score in scores]) for name in names}


def _change(now: Sequence[float | None], before: Sequence[float | None]) -> dict[str, float | None]:
    found = paired(now, before)
    difference, error = found or (None, None)
    return {"now": _mean(now), "difference": difference, "error": as_number(error)}


def _mean(values: Sequence[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return statistics.fmean(given) if given else None


@contextlib.contextmanager
def _same_chance() -> Iterator[None]:
    """Leave the random numbers as they were, so that a watched run is the run that it would have been."""
    import numpy as np

    plain, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(plain)
    np.random.set_state(numbers)
