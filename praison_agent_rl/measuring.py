"""Ask one side of a comparison all that it is to be asked, score it, and judge both sides, all in the run's folder.

Held-out prompts are asked by the run's own manner; the control set and the held-out prompts of earlier versions
greedily. A side's model is loaded once, and what lies there already is not asked again.
"""

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from praison_agent_rl.agent_rollouts.answers import Answered, answers_of_agent
from praison_agent_rl.agent_rollouts.asking import agent_asker
from praison_agent_rl.agent_rollouts.tool_loop import answers_with_tools
from praison_agent_rl.agent_rollouts.toolboxes import boxes_of
from praison_agent_rl.answering import (
    Engine,
    Manner,
    Progress,
    RawAnswer,
    answer_rows,
    likelihoods,
    load_engine,
    same_vocabulary,
    token_log_probs,
)
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.control import CONTROL_TOKENS, control_rewards
from praison_agent_rl.data import Row, as_messages, normalise, read_rows, write_rows
from praison_agent_rl.errors import ModelError, RewardError, TrainingFailed
from praison_agent_rl.evaluation import Calling, by_distinct_prompt, compare, score_answers
from praison_agent_rl.gate import Evidence, judge
from praison_agent_rl.models import load_tokenizer, plain_weights
from praison_agent_rl.pairs.measuring import with_preferences
from praison_agent_rl.parity import check_gap, likelihood_gap
from praison_agent_rl.past import VERSION_COLUMN
from praison_agent_rl.planned_rewards import as_rewards
from praison_agent_rl.records import Answer, Plan
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder, write_record
from praison_agent_rl.scoring.calls import caller_for

GUARD_KINDS = ("control", "earlier")
MOST_LIKELIHOODS = 64
"""Prompts whose answers are asked for their likelihood; their mean is all that is used."""
_GAP_32_BIT, _GAP = 0.01, 0.2
"""Mean difference of log-probabilities, nats a token, that is rounding: in float32, and where 16 bits are in it."""


def results_of(run: RunFolder, side: str) -> list[Path]:
    """What measuring ``side`` (``base`` or ``new``) leaves."""
    kinds = [kind for kind in GUARD_KINDS if run.guard_rows(kind).exists()]
    asked = run.plan.incumbent_weights is not None
    recorded = [run.answers("incumbent")] if side == "new" and (asked or run.recorded.exists()) else []
    return [*(run.guard_answers(kind, side) for kind in kinds), *recorded, run.answers(side)]


def measure(run: RunFolder, side: str, rewards: Sequence[Reward], judges: Sequence[Reward] = ()) -> None:
    """Let ``side`` answer all that it has not answered yet, and score it."""
    plan = run.plan
    new = plan.candidate or str(run.merged)
    if side == "new" and not run.answers("incumbent").exists():
        _measure_incumbent(run, rewards, judges)
    engine = load_engine(plan.base if side == "base" else new, plan)
    if side == "new" and run.sampled.exists():
        _check_samples(run, engine)
    asked = {kind: _guard_rows_as_asked(run, kind, engine) for kind in GUARD_KINDS if _missing(run, kind, side)}
    held_out = rows_as_asked(run, run.held_out_rows)
    progress = _Progress(run, side, sum(map(len, asked.values())) + len(held_out) * plan.samples)
    for kind, rows in asked.items():
        manner = Manner(tools=plan.tools, strict=False) if kind == "earlier" else _CONTROL
        raw = answer_rows(engine, rows, manner, progress=progress.next(len(rows)))
        scored = _score_earlier(run, raw, rows, rewards) if kind == "earlier" else _score_control(raw, rows)
        _write(run.guard_answers(kind, side), scored)
    raw, runs = _answers(run, engine, held_out, progress=progress.next(len(held_out) * plan.samples))
    if side == "base" and runs is not None:
        _check_some(raw)
    scored = score_answers(raw, held_out, rewards, judges=judges, calling=calling_for(run), runs=runs)
    scored = _with_preferences(engine, held_out, scored, plan)
    vocabulary = engine.tokenizer
    if runs is not None:  # what an agent said stands after other texts than its prompt
        _write(run.answers(side), scored)
        return
    if side == "new":
        del engine
        gc.collect()  # two models need not be in memory at once
        engine = load_engine(plan.base, plan)
    if not same_vocabulary(vocabulary, engine.tokenizer):
        raw = [answer._replace(ids=()) for answer in raw]
    _write(run.answers(side), _with_likelihood(engine, held_out, scored, raw, plan.tools))


def _check_samples(run: RunFolder, engine: Engine) -> None:
    """Compare what the merged model says of the last completions with what the trainer said of them.

    Raises:
        ModelError: they differ by more than rounding.
    """
    import torch

    rows, config = read_rows(run.sampled), engine.config
    if not rows:
        return
    prompts, completions = ([row[name] for row in rows] for name in ("prompt_ids", "completion_ids"))
    with torch.no_grad():
        theirs = token_log_probs(engine, prompts, completions, temperature=config.temperature)
    pairs = [
        (served, trained)
        for row, scores in zip(rows, theirs, strict=True)
        for served, trained, drawn in zip(scores.tolist(), row["log_probs"], row["drawn"], strict=True)
        if drawn
    ]
    gap = likelihood_gap([served for served, _ in pairs], [trained for _, trained in pairs])
    if problem := check_gap(
        gap, _GAP_32_BIT if str(engine.model.dtype) == "torch.float32" and not config.bf16 else _GAP
    ):
        raise ModelError(problem)
    run.report_event(
        "note",
        text=f"the merged model agrees with the trainer on the last {len(rows)} completions ({gap:.2g} nats a token)",
    )


def _answers(
    run: RunFolder, engine: Engine, rows: Sequence[Row], *, progress: Progress = lambda done, of: None
) -> Answered:
    """Answers as training has them made: of the model itself, or of the agent that runs on it."""
    plan = run.plan
    with agent_asker(run, engine.config, engine.tokenizer) as asker:
        if asker is not None:
            return answers_of_agent(asker, engine, rows, plan.samples, progress=progress)
    if engine.config.rollout == "tools":
        rounds = int(engine.config.grpo_arguments(device=plan.device)["max_tool_calling_iterations"])
        boxes = boxes_of(engine.config, tell=lambda text: run.report_event("note", text=text))
        return answers_with_tools(engine, rows, boxes, samples=plan.samples, rounds=rounds, progress=progress)
    return Answered(answer_rows(engine, rows, Manner(plan.samples, plan.tools), progress=progress))


def _check_some(answers: Sequence[RawAnswer]) -> None:
    """Raise TrainingFailed if no answer came about: where the agent fails on the base, it would in training."""
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed and len(failed) == len(answers):
        raise TrainingFailed(f"none of {len(answers)} rollouts on the base came to an answer; the first: {failed[0]}")


def _measure_incumbent(run: RunFolder, rewards: Sequence[Reward], judges: Sequence[Reward]) -> None:
    """Score what runs now, where that is not the base: a version of ours answers, of others what was recorded."""
    plan = run.plan
    if plan.incumbent_weights is not None:
        rows = rows_as_asked(run, run.held_out_rows)
        engine = load_engine(plan.incumbent_weights, plan)
        raw, runs = _answers(run, engine, rows)
        scored = score_answers(raw, rows, rewards, judges=judges, calling=calling_for(run), runs=runs)
        _write(run.answers("incumbent"), _with_preferences(engine, rows, scored, plan))
        del engine
        gc.collect()  # two models need not be in memory at once
    elif run.recorded.exists():
        rows = rows_as_asked(run, run.held_out_rows)
        _write(run.answers("incumbent"), _score_recorded(run, rows, rewards, judges))


def _with_preferences(engine: Engine, rows: Sequence[Row], scored: list[Answer], plan: Plan) -> list[Answer]:
    """The answers with what the model holds of the pairs that they belong to, where it was trained on pairs."""
    return with_preferences(engine, rows, scored, plan.tools) if plan.config.get("method") == "cpo" else scored


def judge_run(run: RunFolder) -> None:
    """Compare both sides of a measured run and write the comparison and the gate's verdict."""
    plan = run.plan
    rows = read_rows(run.held_out_rows)
    base, new = (by_distinct_prompt(read_answers(run, side), rows) for side in ("base", "new"))
    recorded = by_distinct_prompt(read_answers(run, "incumbent"), rows) if run.answers("incumbent").exists() else None
    comparison = compare(base, new)
    evidence = Evidence(
        comparison=comparison,
        base=base,
        new=new,
        control=_both_sides(run, "control"),
        earlier=_earlier_sides(run),
        incumbent=recorded,
        tools=plan.tools,
        weights={reward.name: reward.weight for reward in plan.rewards},
    )
    write_record(run.verdict_file, judge(evidence, plan.rules))
    write_record(run.comparison_file, comparison)


def read_answers(run: RunFolder, side: str) -> list[Answer]:
    """The scored held-out answers of ``base``, ``new`` or ``incumbent``."""
    return _read(run.answers(side))


def rows_as_asked(run: RunFolder, path: Path) -> list[Row]:
    """The rows of ``path`` with prompts as the model takes them: text as one user message if it is a chat model."""
    plan = run.plan
    rows = read_rows(path)
    texts = sum(isinstance(row["prompt"], str) for row in rows)
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    if config.rollout == "agent":  # which takes text
        return rows
    if texts and load_tokenizer(plain_weights(plan.base), config).chat_template is not None:
        run.report_event(
            "note", text=f"{texts} prompts of {path.name} are plain text; each is asked as one user message"
        )
        return normalise(rows)
    return rows


def calling_for(run: RunFolder) -> Calling:
    """Rewards are called as the run's configuration says, and what they do wrong is told in its events."""
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    return partial(caller_for, config, warn=lambda text: run.report_event("note", text=text))


_CONTROL = Manner(at_most=CONTROL_TOKENS, strict=False)


class _Progress:
    """Reports answers to several sets of prompts as one count."""

    def __init__(self, run: RunFolder, side: str, of: int) -> None:
        self._run, self._side, self._of = run, side, of
        self._begun = 0

    def next(self, answers: int) -> Progress:
        """For the next set of prompts."""
        before, self._begun = self._begun, self._begun + answers

        def report(done: int, _: int) -> None:
            self._run.report_event("answered", side=self._side, done=before + done, of=self._of)

        return report


def _missing(run: RunFolder, kind: str, side: str) -> bool:
    return run.guard_rows(kind).exists() and not run.guard_answers(kind, side).exists()


def _guard_rows_as_asked(run: RunFolder, kind: str, engine: Engine) -> list[Row]:
    """Chat messages for a chat model, plain text for one that has no template."""
    rows = read_rows(run.guard_rows(kind))
    if engine.tokenizer.chat_template is not None:
        return normalise(rows)
    return [{**row, "prompt": "\n".join(str(m.get("content")) for m in as_messages(row["prompt"]))} for row in rows]


def _score_control(raw: Sequence[RawAnswer], rows: Sequence[Row]) -> list[Answer]:
    return score_answers(raw, rows, control_rewards())


def _score_earlier(
    run: RunFolder, raw: Sequence[RawAnswer], rows: Sequence[Row], own: Sequence[Reward]
) -> list[Answer]:
    """Each version's prompts scored by its own rewards, or by those of the run where they cannot be found any more."""
    found: list[Answer] = []
    plain = [{name: value for name, value in row.items() if name != VERSION_COLUMN} for row in rows]
    for version in dict.fromkeys(row[VERSION_COLUMN] for row in rows):
        answers = [answer for answer in raw if rows[answer.prompt][VERSION_COLUMN] == version]
        try:
            found += score_answers(answers, plain, _earlier_rewards(run, version, own), calling=calling_for(run))
        except RewardError as error:
            text = f"the held-out prompts of {version} cannot be scored and do not judge: {error}"
            run.report_event("note", text=text)
            found += score_answers(answers, plain, [])
    return sorted(found, key=lambda answer: (answer.prompt, answer.sample))


def _earlier_rewards(run: RunFolder, version: str, own: Sequence[Reward]) -> Sequence[Reward]:
    planned = run.plan.earlier.get(version, [])
    try:
        if planned and all(reward.spec for reward in planned):
            return as_rewards(planned)
        why = "lived only in the process that made it"
    except RewardError as error:
        why = f"cannot be found any more ({error})"
    text = f"the rewards of {version} {why}; its held-out prompts are scored by the rewards of this run"
    run.report_event("note", text=text)
    return own


def _score_recorded(
    run: RunFolder, rows: Sequence[Row], rewards: Sequence[Reward], judges: Sequence[Reward]
) -> list[Answer]:
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    tokenizer = load_tokenizer(plain_weights(plan.base), config)
    raw = []
    for row in read_rows(run.recorded):
        ids = tuple(tokenizer(row["text"], add_special_tokens=False)["input_ids"])
        raw.append(RawAnswer(row["prompt"], 0, row["text"], len(ids), ids))
    return score_answers(raw, rows, rewards, judges=judges, calling=calling_for(run))


def _with_likelihood(
    engine: Engine, rows: Sequence[Row], scored: Sequence[Answer], raw: Sequence[RawAnswer], tools: Sequence[Any]
) -> list[Answer]:
    """The answers with the likelihood of the greedy ones, on prompts evenly spaced among all."""
    greedy = [place for place, answer in enumerate(raw) if answer.sample == 0 and answer.error is None]
    step = max(1, -(-len(greedy) // MOST_LIKELIHOODS))
    places = greedy[::step]
    prompts = [rows[raw[place].prompt]["prompt"] for place in places]
    found = dict(zip(places, likelihoods(engine, prompts, [raw[p] for p in places], tools=tools), strict=True))
    return [answer.model_copy(update={"likelihood": found.get(place)}) for place, answer in enumerate(scored)]


def _both_sides(run: RunFolder, kind: str) -> tuple[list[Answer], list[Answer]] | None:
    paths = [run.guard_answers(kind, side) for side in ("base", "new")]
    return (_read(paths[0]), _read(paths[1])) if all(path.exists() for path in paths) else None


def _earlier_sides(run: RunFolder) -> dict[str, tuple[list[Answer], list[Answer]]]:
    both = _both_sides(run, "earlier")
    if both is None:
        return {}
    rows = read_rows(run.guard_rows("earlier"))
    versions = [row[VERSION_COLUMN] for row in rows]

    def of(version: str, answers: Sequence[Answer]) -> list[Answer]:
        return by_distinct_prompt([answer for answer in answers if versions[answer.prompt] == version], rows)

    base, new = both
    return {version: (of(version, base), of(version, new)) for version in dict.fromkeys(versions)}


def _write(path: Path, answers: Sequence[Answer]) -> None:
    write_rows(path, [answer.model_dump() for answer in answers])


def _read(path: Path) -> list[Answer]:
    return [Answer.model_validate(row) for row in read_rows(path)]
