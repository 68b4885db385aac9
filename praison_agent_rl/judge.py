"""Rewards that ask a language model: one answer by criteria (`RubricJudge`), or all answers to a prompt by comparison.

A judge gives a number only where its model clearly gave one. A reply that cannot be read, a score outside the scale, a
call that failed or that the budget does not allow is no score (None), with the reason kept and counted: the framework's
own ``Judge`` gives 1.0 or 0.0 there, and a model would be trained on faults of the line.
"""

import asyncio
import copy
import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import SecretStr

from praison_agent_rl.errors import RewardError
from praison_agent_rl.judging.budget import JudgeUsage
from praison_agent_rl.judging.calls import Asker
from praison_agent_rl.judging.replies import Fault, Reading, read_scores
from praison_agent_rl.judging.settings import Options, read_secret, read_settings
from praison_agent_rl.judging.texts import (
    FORMAT,
    Criterion,
    Question,
    Request,
    Text,
    as_lists,
    orders,
    plain_text,
    read_criteria,
    read_scale,
    relative_request,
    rubric_request,
)
from praison_agent_rl.records import Record
from praison_agent_rl.rewards import Score, Shape
from praison_agent_rl.runs import HOME, append_line, now
from praison_agent_rl.transcripts.redaction import mask_secrets, redact_value

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Judged", "JudgedScores", "RelativeJudge", "RubricJudge"]

_LOG = logging.getLogger(__name__)
_REMEMBERED = 256


class Judged(Record):
    """One judgement, to look at."""

    time: str
    judge: str
    model: str
    score: float | None
    """From 0 to 1; None where there is none."""
    scores: dict[str, float]
    """Of each criterion, on the judge's scale; of a comparison, of each order."""
    reason: str
    failed: str | None
    """Why there is no score."""
    prompt: Any
    reference: str | None
    answer: Any


class JudgedScores(list[Score]):
    """Scores, with the reason for each None among them."""

    def __init__(self, scores: Sequence[Score], failed: Mapping[int, str]) -> None:
        super().__init__(scores)
        self.failed = dict(failed)
        """Why a sample has no score, by its place: faults, unlike the None of a reward that does not apply."""


class _Judge:
    """What the judges share: options, counts, the log and how another process finds them."""

    reads: ClassVar[Shape] = Shape("messages", "messages")
    trusted: ClassVar[bool] = True
    """It is not tried on made-up answers: each costs money."""
    cacheable: ClassVar[bool] = True
    """A model at temperature 0 does not always say the same, but asking it again costs, and is no better."""
    whole_group: ClassVar[bool] = False

    def __init__(self, given: Mapping[str, Any], *, default_name: str, faults: list[str]) -> None:
        given = {key: value for key, value in given.items() if value is not None or key == "temperature"}
        secret = read_secret(given.pop("api_key", None), faults)
        name = given.get("name", default_name)
        if not isinstance(name, str) or not name.strip():
            faults.append(f"name={name!r} is no name for a metric")
        apart = ("name", "criteria", "scale", "orders", "max_group")
        options = {"model": "", **{key: value for key, value in given.items() if key not in apart}}
        settings = read_settings(options, faults)
        if faults or settings is None:
            raise RewardError(f"a {type(self).__name__} cannot be made: " + "; ".join(faults))
        self._given = copy.deepcopy(given)
        self._name = str(name)
        self._keyed = secret is not None
        self._settings = settings
        self._asker = Asker(settings, secret, str(name))
        self._judged: deque[Judged] = deque(maxlen=_REMEMBERED)
        self._keep = HOME / "judged.jsonl" if settings.keep is True else Path(settings.keep) if settings.keep else None
        self._lock = threading.Lock()

    @property
    def __name__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self._settings.model!r}, name={self._name!r})"

    @property
    def usage(self) -> JudgeUsage:
        """Requests, tokens and cost so far, in this process."""
        return self._asker.usage

    @property
    def exhausted(self) -> str | None:
        """Why nothing is judged any more, where the budget is used up."""
        return self._asker.budget.exhausted

    @property
    def last(self) -> list[Judged]:
        """The latest judgements with their reasons, in order; ``keep`` writes all of them to a file."""
        return list(self._judged)

    @property
    def reward_spec(self) -> dict[str, Any] | None:
        """The entry of ``reward_funcs`` by which another process makes the same judge; None for one with a key."""
        kind = type(self)
        if self._keyed:
            _LOG.warning(
                "%r has its key in code, so that no other process can be told how to make it; put the key into the "
                "environment and give api_key_env, or let a module hold the judge and name it: mymodule:judge",
                self,
            )
            return None
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            return None
        try:
            plain = json.loads(json.dumps(self._given, default=os.fspath))
        except (TypeError, ValueError):
            return None
        return {"reward": f"{kind.__module__}:{kind.__qualname__}", **plain}

    @property
    def cache_key(self) -> str:
        """The same for judges that ask the same of the same model."""
        settings = self._settings
        asked = settings.model_dump(include={"model", "base_url", "temperature", "options", "instructions"})
        asked |= {"kind": type(self).__name__, "format": FORMAT, "show_reference": settings.show_reference}
        text = json.dumps({**asked, **self._asked()}, sort_keys=True, default=str)
        return f"{type(self).__name__}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    def _asked(self) -> dict[str, Any]:
        raise NotImplementedError

    def _questions(self, prompts: Any, completions: Any, answer: Any) -> tuple[list[Question], list[Text]]:
        """What was asked and answered, sample by sample; raises RewardError for lists that do not fit."""
        asked, answered = as_lists(prompts, "prompts"), as_lists(completions, "completions")
        known = [None] * len(answered) if answer is None else answer
        if not isinstance(known, list | tuple) or not len(asked) == len(answered) == len(known):
            raise RewardError(
                f"the judge {self._name!r} wants as many prompts and references (answer) as the {len(answered)} "
                "completions, each as a list"
            )
        shown = self._settings.show_reference
        references = [plain_text(one) if shown else None for one in known]
        return [Question(*one) for one in zip(asked, references, strict=True)], answered

    async def _read(
        self, request: Request, wanted: Sequence[str], scale: tuple[float, float], room: asyncio.Semaphore
    ) -> Reading:
        """The scores in the reply to a request; where there is no reply, its fault for all."""
        async with room:
            reply = await self._asker.ask(request)
        if reply.fault is not None:
            return Reading({}, {}, dict.fromkeys(wanted, reply.fault))
        reading = read_scores(reply.text, wanted, scale)
        if reading.faults:
            self._asker.count("unparsed")
        return reading

    def _keep_one(self, question: Question, answer: Text, score: Score, said: dict[str, Any]) -> None:
        """Remember a judgement; a file that cannot be written to is said once and costs nothing else."""
        judged = Judged(
            time=now(),
            judge=self._name,
            model=self._settings.model,
            score=score,
            prompt=question.prompt,
            reference=question.reference,
            answer=answer,
            **said,
        )
        self._judged.append(judged)
        if self._keep is None:
            return
        line = json.dumps(redact_value(judged.model_dump(), mask_secrets, {}))
        try:
            with self._lock:
                self._keep.parent.mkdir(parents=True, exist_ok=True)
                append_line(self._keep, line)
        except OSError as error:
            _LOG.warning("judgements are no longer kept in %r: %s", str(self._keep), error)
            self._keep = None

    def _scores(self, verdicts: Sequence[tuple[Score, Fault | None]]) -> JudgedScores:
        for _, fault in verdicts:
            if fault is not None:
                self._asker.note(fault)
        failed = {place: f"{fault.kind}: {fault.text}" for place, (_, fault) in enumerate(verdicts) if fault}
        return JudgedScores([score for score, _ in verdicts], failed)


class RubricJudge(_Judge):
    """Scores each answer by weighted criteria; a score is their weighted mean, from 0 to 1.

    ``criteria`` is ``{name: text}``, a list of ``{name, text, weight}``, or one text. ``scale`` is the highest score
    that the judge may give (it starts at 0), or both ends. The other options are those of `JudgeSettings`.

    Raises:
        RewardError: an option is wrong; all that are wrong are said at once, and nothing was asked.
        MissingExtra: litellm is not installed.
    """

    def __init__(
        self,
        model: str | None = None,
        criteria: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        scale: float | Sequence[float] = 10,
        name: str | None = None,
        api_key: SecretStr | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        faults: list[str] = []
        self._criteria = _wanted_criteria(criteria, faults)
        self._scale = read_scale(scale, faults)
        given = {"model": model, "criteria": criteria, "name": name, "api_key": api_key, **options}
        if scale != 10:
            given["scale"] = scale
        super().__init__(given, default_name="rubric_judge", faults=faults)

    async def __call__(self, prompts: Any, completions: Any, answer: Any = None) -> JudgedScores:
        """One score per completion; ``answer`` is the column with what a right answer is, where there is one."""
        questions, answers = self._questions(prompts, completions, answer)
        keys = [json.dumps(one, default=str) for one in zip(questions, answers, strict=True)]
        distinct = {key: one for key, one in zip(keys, zip(questions, answers, strict=True), strict=True)}
        self._asker.count("reused", len(keys) - len(distinct))
        room = asyncio.Semaphore(self._settings.at_once)
        found = await asyncio.gather(*(self._judge(*one, room) for one in distinct.values()))
        verdicts = dict(zip(distinct, found, strict=True))
        return self._scores([verdicts[key] for key in keys])

    async def _judge(self, question: Question, answer: Text, room: asyncio.Semaphore) -> tuple[Score, Fault | None]:
        request = rubric_request(question, answer, self._criteria, self._scale, self._settings.instructions)
        reading = await self._read(request, [one.name for one in self._criteria], self._scale, room)
        fault = next(iter(reading.faults.values()), None)
        score = None if fault else self._mean(reading.scores)
        reasons = [reading.reason, *(f"{name}: {why}" for name, why in reading.reasons.items())]
        said = {"scores": reading.scores, "reason": "\n".join(filter(None, reasons))}
        self._keep_one(question, answer, score, {**said, "failed": fault and f"{fault.kind}: {fault.text}"})
        return score, fault

    def _mean(self, scores: Mapping[str, float]) -> float:
        low, high = self._scale
        total = sum(one.weight for one in self._criteria)
        return sum(one.weight / total * (scores[one.name] - low) / (high - low) for one in self._criteria)

    def _asked(self) -> dict[str, Any]:
        return {"criteria": [one.model_dump() for one in self._criteria], "scale": self._scale}


class RelativeJudge(_Judge):
    """Scores all answers to a prompt by comparing them in one request, from 0 to 1.

    That is the way of RULER (OpenPipe's ART, src/art/rewards/ruler.py), but for what follows.

    The answers are shown in an order that depends on their texts alone. ``orders=2`` asks twice, the second time the
    other way round, and takes the mean, so that it does not matter where an answer stands. Answers with the same text
    are shown once. A group of more than ``max_group`` different answers gets no scores: those of several requests
    could not be compared. ``criteria`` says what counts, if anything special does.

    Raises:
        RewardError: an option is wrong; all that are wrong are said at once, and nothing was asked.
        MissingExtra: litellm is not installed.
    """

    whole_group: ClassVar[bool] = True

    def __init__(
        self,
        model: str | None = None,
        criteria: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        orders: int = 1,
        max_group: int = 32,
        name: str | None = None,
        api_key: SecretStr | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        faults: list[str] = []
        self._criteria = read_criteria(criteria, faults) if criteria else ()
        for what, value, most in (("orders", orders, 8), ("max_group", max_group, 1000)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                faults.append(f"{what}={value!r}: a whole number from 1 to {most} is wanted")
        self._orders, self._max_group = orders, max_group
        given = {"model": model, "criteria": criteria or None, "name": name, "api_key": api_key, **options}
        given |= {
            key: value for key, value, usual in (("orders", orders, 1), ("max_group", max_group, 32)) if value != usual
        }
        super().__init__(given, default_name="relative_judge", faults=faults)

    async def __call__(self, prompts: Any, completions: Any, answer: Any = None) -> JudgedScores:
        """One score per completion; those of one prompt are compared with each other."""
        questions, answers = self._questions(prompts, completions, answer)
        groups: dict[str, list[int]] = {}
        for place, question in enumerate(questions):
            groups.setdefault(json.dumps(question, default=str), []).append(place)
        room = asyncio.Semaphore(self._settings.at_once)
        found = await asyncio.gather(
            *(self._judge(questions[places[0]], [answers[i] for i in places], room) for places in groups.values())
        )
        verdicts = {
            place: one
            for places, group in zip(groups.values(), found, strict=True)
            for place, one in zip(places, group, strict=True)
        }
        return self._scores([verdicts[place] for place in range(len(answers))])

    async def _judge(
        self, question: Question, answers: list[Text], room: asyncio.Semaphore
    ) -> list[tuple[Score, Fault | None]]:
        keys = [json.dumps(answer, default=str) for answer in answers]
        distinct = dict(zip(keys, answers, strict=True))
        self._asker.count("reused", len(keys) - len(distinct))
        shown = list(distinct.values())
        if len(shown) > self._max_group:
            text = f"{len(shown)} different answers to one prompt, more than max_group={self._max_group}"
            fault = Fault("group too large", f"{text}; raise it if the judge's model can read that many at once")
            return [(None, fault)] * len(answers)
        turns = orders(question, shown, self._orders)
        readings = await asyncio.gather(*(self._compare(question, shown, order, room) for order in turns))
        verdicts = {}
        for place, (key, one) in enumerate(distinct.items()):
            verdicts[key] = self._verdict(
                question, one, [(r, str(o.index(place) + 1)) for r, o in zip(readings, turns, strict=True)]
            )
        return [verdicts[key] for key in keys]

    async def _compare(
        self, question: Question, shown: Sequence[Text], order: Sequence[int], room: asyncio.Semaphore
    ) -> Reading:
        request = relative_request(
            question, [shown[place] for place in order], self._criteria, self._settings.instructions
        )
        return await self._read(request, [str(number) for number in range(1, len(shown) + 1)], (0.0, 1.0), room)

    def _verdict(
        self, question: Question, answer: Text, readings: Sequence[tuple[Reading, str]]
    ) -> tuple[Score, Fault | None]:
        """The mean over the orders; without one of them it would be the score of a place, not of an answer."""
        scores = {
            f"order {turn}": r.scores[number] for turn, (r, number) in enumerate(readings, 1) if number in r.scores
        }
        fault = next((r.faults[number] for r, number in readings if number in r.faults), None)
        score = None if fault else sum(scores.values()) / len(readings)
        reasons = [reading.reasons.get(number) or reading.reason for reading, number in readings]
        said = {"scores": scores, "reason": "\n".join(filter(None, reasons))}
        self._keep_one(question, answer, score, {**said, "failed": fault and f"{fault.kind}: {fault.text}"})
        return score, fault

    def _asked(self) -> dict[str, Any]:
        criteria = [one.model_dump() for one in self._criteria]
        return {"criteria": criteria, "orders": self._orders, "max_group": self._max_group}


def _wanted_criteria(given: object, faults: list[str]) -> tuple[Criterion, ...]:
    if not given or (isinstance(given, str) and not given.strip()):
        faults.append("it has no criteria; say what a good answer does: criteria={'correct': '...', 'polite': '...'}")
        return ()
    return read_criteria(given, faults)
