"""What the process of a check runs: load an export, ask it held-out prompts, compare with its version's own answers.

Where the version was measured with tools or through its agent, what it says first to each prompt is compared, with the
merged model asked in the same way; no score belongs to that.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from praison_agent_rl.answering import RawAnswer
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, normalise, read_rows
from praison_agent_rl.errors import PraisonRLError
from praison_agent_rl.evaluation import score_answers
from praison_agent_rl.exports.checking import SAME, Question, unchecked
from praison_agent_rl.exports.loading import CannotLoad, Given, answers_of
from praison_agent_rl.exports.made import Check
from praison_agent_rl.models import load_tokenizer
from praison_agent_rl.planned_rewards import as_rewards
from praison_agent_rl.process_settings import best_device
from praison_agent_rl.records import Answer, Plan
from praison_agent_rl.runs import RunFolder, read_record, write_record
from praison_agent_rl.scoring.calls import caller_for

MOST_PROMPTS = 64
"""Held-out prompts that an export is asked, evenly spaced among all."""
_ALIKE = 0.9
"""Share of greedy answers that must be the same where the engine is the same and there are no scores."""


@dataclass(frozen=True)
class _Asked:
    """What is asked, and how its version was measured."""

    question: Question
    run: RunFolder
    plan: Plan
    config: TrainConfig
    rows: list[Row]
    """All held-out rows, as the version was asked them."""
    places: range
    """Those that are asked now."""

    @property
    def chosen(self) -> list[Row]:
        return [self.rows[place] for place in self.places]


def check(question: Question) -> Check:
    """Ask and compare; what cannot be loaded has failed."""
    asked = _to_ask(question)
    try:
        given = answers_of(question, asked.chosen, asked.plan)
    except CannotLoad as error:
        return unchecked(str(error))
    except PraisonRLError as error:
        return Check(status="failed", text=f"failed by {question.loader}: {error}")
    if asked.config.rollout in ("tools", "agent"):
        again = question.model_copy(update={"loader": "transformers", "made": question.model})
        own = [answer.text for answer in answers_of(again, asked.chosen, asked.plan)]
        return _by_texts(question, given, own, "its version was measured with tools, so first answers are compared")
    measured = _greedy(asked.run.answers("new"))
    try:
        scored = _scored(asked, given, measured)
    except PraisonRLError as error:
        own = [measured[place].text for place in asked.places]
        return _by_texts(question, given, own, f"it is not scored: {error}")
    return _by_scores(question, scored, measured, _greedy(asked.run.answers("base")))


def _to_ask(question: Question) -> _Asked:
    run = RunFolder(question.records)
    plan = run.plan.model_copy(update={"device": best_device()})
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    rows = read_rows(run.held_out_rows)
    if load_tokenizer(question.model, config).chat_template is not None:
        rows = normalise(rows)
    return _Asked(question, run, plan, config, rows, range(0, len(rows), -(-len(rows) // MOST_PROMPTS)))


def _greedy(file: Path) -> dict[int, Answer]:
    """Greedy answers by their prompts."""
    answers = [Answer.model_validate(row) for row in read_rows(file)]
    return {answer.prompt: answer for answer in answers if answer.sample == 0}


def _scored(asked: _Asked, given: Sequence[Given], measured: Mapping[int, Answer]) -> dict[int, Answer]:
    """Answers with their scores by prompt; what the version said itself has the score that it got then.

    Raises:
        RewardError: a reward cannot be found or called.
    """
    rewards = as_rewards(asked.plan.rewards)
    raw = [
        RawAnswer(place, 0, answer.text, len(answer.ids), tuple(answer.ids))
        for place, answer in zip(asked.places, given, strict=True)
    ]
    alone = all(reward.by_sample for reward in rewards)
    known = {place: measured[place] for place, _, text, *_ in raw if alone and measured[place].text == text}
    new = [answer for answer in raw if answer.prompt not in known]
    found = score_answers(new, asked.rows, rewards, calling=partial(caller_for, asked.config)) if new else []
    return {**known, **{answer.prompt: answer for answer in found}}


def _by_scores(
    question: Question, scored: Mapping[int, Answer], measured: Mapping[int, Answer], base: Mapping[int, Answer]
) -> Check:
    """The mean score may be lower by a share of the range of the scores; by one prompt's worth where engines differ.

    By the engine that measured the version it may not be higher by more either: that is another model. What
    cannot be scored any more, as the version's own answer could, counts as the worst score of all.
    """
    totals = [answer.total for answer in [*measured.values(), *base.values()] if answer.total is not None]
    known = {place: total for place in scored if (total := measured[place].total) is not None}
    found = [scored[place].total for place in known]
    lost = found.count(None)
    equal = sum(measured[place].text == answer.text for place, answer in scored.items())
    if lost == len(known):
        own_texts = [measured[place].text for place in scored]
        given = [Given(answer.text, []) for answer in scored.values()]
        return _by_texts(question, given, own_texts, "no reward scores its answers")
    own = statistics.fmean(known.values())
    exported = statistics.fmean(min(totals) if total is None else total for total in found)
    same = question.share == SAME
    share = question.share if same else max(question.share, 1 / len(known))
    allowed = share * (max(totals) - min(totals))
    passed = (abs(own - exported) if same else own - exported) <= allowed + 1e-9
    text = (
        f"{_verdict(passed)} by {question.loader}: {exported:.4g} on {len(known)} held-out prompts, its version has "
        f"{own:.4g} (allowed: {allowed:.2g} {'apart' if same else 'lower'}); {equal} of {len(scored)} greedy answers "
        f"are the same{f'; {lost} cannot be scored any more and count as the worst' if lost else ''}"
    )
    return Check(
        status=_verdict(passed),
        text=text,
        prompts=len(scored),
        equal=equal,
        own=own,
        exported=exported,
        allowed=allowed,
    )


def _by_texts(question: Question, given: Sequence[Given], own: Sequence[str], why: str) -> Check:
    """Where there are no scores; another engine's roundings make other answers soon, so nothing is decided by it."""
    equal = sum(answer.text == text for answer, text in zip(given, own, strict=True))
    counted = f"{equal} of {len(own)} greedy answers are the same; {why}"
    if question.share != SAME:
        text = f"loaded by {question.loader}, not checked: {counted}"
        return Check(status="unchecked", text=text, prompts=len(own), equal=equal)
    passed = equal >= _ALIKE * len(own)
    text = f"{_verdict(passed)} by {question.loader}: {counted} (wanted: {_ALIKE:.0%})"
    return Check(status=_verdict(passed), text=text, prompts=len(own), equal=equal)


def _verdict(passed: bool) -> Literal["passed", "failed"]:
    return "passed" if passed else "failed"


def main() -> None:
    """Read the question, write the check; the arguments are their files."""
    asked, answered = map(Path, sys.argv[1:])
    write_record(answered, check(read_record(asked, Question)))


if __name__ == "__main__":
    main()
