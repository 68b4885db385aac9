"""Learns which form of text a reward function reads, and calls it; it never lets one end the process."""

import asyncio
import copy
import functools
import inspect
import logging
import numbers
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from praison_agent_rl.scoring.names import OWN as OWN
from praison_agent_rl.scoring.names import (
    RUNTIME,
    Function,
    asked_views,
    cause_of,
    collect,
    declared,
    needed_columns,
    parameters_of,
    plain_value,
    short,
    taken_view,
    takes_column,
    unique_names,
)
from praison_agent_rl.scoring.names import check_signature as check_signature
from praison_agent_rl.scoring.names import importing_from as importing_from
from praison_agent_rl.scoring.names import name_of as name_of
from praison_agent_rl.scoring.names import spec_of as spec_of
from praison_agent_rl.scoring.specs import RewardSpec, read_spec, weights_of
from praison_agent_rl.scoring.specs import as_entry as as_entry
from praison_agent_rl.scoring.specs import listed_specs as listed_specs
from praison_agent_rl.scoring.specs import portable as portable
from praison_agent_rl.scoring.specs import require as require
from praison_agent_rl.scoring.specs import resolve as resolve
from praison_agent_rl.scoring.specs import resolve_all as resolve_all

from .deadlines import TimedOut, within
from .errors import RewardError as RewardError  # "as": praisonai_train.rewards offers it, so this module does
from .records import Run
from .run_views import call_counts, run_columns

Text = str | list[dict[str, Any]]
Texts = Sequence[Text]
Score = float | None
Columns = Mapping[str, Sequence[Any]]
Form = Literal["text", "messages"]


class Shape(NamedTuple):
    """The form in which a reward function reads prompts and completions."""

    prompts: Form
    completions: Form


logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)  # cached by its text: said once and not at every step

_RENAMED = {"prompt": "prompts", "completion": "completions"}  # columns that TRL holds back and passes in the plural
_WANTED = "wanted: a list with one number or None per completion"
_PLAIN = Shape("text", "text")
LONGEST_SEARCH = 300.0
"""Seconds for finding the form that one reward reads, which takes up to four calls with a dozen answers."""


def _in_form(form: Form, value: Text, role: str) -> Text:
    """``value`` as messages of ``role``, or as the content of its last one; always a copy."""
    if isinstance(value, str):
        return value if form == "text" else [{"role": role, "content": value}]
    if form == "messages":
        return copy.deepcopy(value)
    content = next((m.get("content") for m in reversed(value) if m.get("role") == role), None) or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _wait(result: Awaitable[Any]) -> Any:
    async def outcome() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with _interruptible():
            return asyncio.run(outcome())
    # where a loop runs (a notebook, a service) a second one cannot; a daemon, so that Ctrl-C need not wait for it
    done: Future[Any] = Future()
    threading.Thread(target=_settle, args=(done, outcome), daemon=True).start()
    return done.result()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end a coroutine that does not await: asyncio would make it a cancellation, which none there sees."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: signal.default_int_handler(number, frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _settle(done: "Future[Any]", outcome: Callable[[], Any]) -> None:
    try:
        done.set_result(asyncio.run(outcome()))
    except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
        done.set_exception(error)


def as_scores(values: object, name: str, n: int, counts: Sequence[int] | None = None) -> list[Score]:
    """What reward ``name`` returned for ``n`` completions, as plain numbers; NaN and infinity become None.

    With ``counts``, how often the model was called for each, it may also be a list with one for each call.
    """
    given = plain_value(values)
    if not isinstance(given, list | tuple):
        raise RewardError(f"reward {name!r} returned a {type(values).__name__}, {short(values)}; {_WANTED}")
    scores = [plain_value(value) for value in given]
    if counts is not None and len(scores) == n:
        scores = [_of_steps(score, name, count) for score, count in zip(scores, counts, strict=True)]
    if odd := [score for score in scores if score is not None and not isinstance(score, numbers.Real)]:
        raise RewardError(f"reward {name!r} returned {short(odd[0])} among its scores; {_WANTED}")
    if len(scores) != n:
        raise RewardError(f"reward {name!r} returned {len(scores)} for {n} completions, {short(values)}; {_WANTED}")
    largest = sys.float_info.max  # also stops an integer too large for a float; no comparison holds for NaN
    if any(score is not None and abs(score) > largest for score in scores):
        # TRL would turn the gradient of the whole group into 0 without a word
        _warn_once(f"reward {name!r} returned an infinite value; it counts as None (no score)")
    return [float(score) if score is not None and abs(score) <= largest else None for score in scores]


def _of_steps(score: Any, name: str, count: int) -> Any:
    """The sum of a run's steps, or what is no list as it is."""
    if not isinstance(score, list | tuple):
        return score
    steps = [plain_value(step) for step in score]
    if odd := [step for step in steps if step is not None and not isinstance(step, numbers.Real)]:
        raise RewardError(f"reward {name!r} returned {short(odd[0])} among the scores of a run's steps; {_WANTED}")
    if len(steps) != count:
        raise RewardError(f"reward {name!r} {wrong_steps(len(steps), count)}")
    return sum_of_steps(steps)


def wrong_steps(got: int, count: int) -> str:
    """What is said of a list with ``got`` scores for a run in which the model was called ``count`` times."""
    return f"returned {got} scores for the steps of a run with {count} calls of the model; wanted: one for each call"


def sum_of_steps(steps: Sequence[Any]) -> Any:
    """The score of a run from those of its steps; None where no step has one."""
    known = [step for step in steps if step is not None]
    return sum(known) if known else None


@dataclass(frozen=True)
class Reward:
    """A reward function that is called in the form it reads, with only what it takes, and believed only if sound."""

    fn: Function
    name: str
    """Unique among the rewards of a run; TRL logs ``rewards/<name>/mean``."""
    weight: float = 1.0
    shape: Shape = _PLAIN
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Which column fills which parameter, where the two are called differently."""
    deterministic: bool = True
    """Whether two calls with the same gave the same, when it was tried."""
    by_sample: bool = True
    """Whether the score of an answer does not depend on the others of the call."""

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def views(self) -> list[str]:
        """What it asks of the whole run, and no column fills."""
        return [name for name in asked_views(self.fn) if name not in self.renamed]

    def step_counts(self, completions: Texts, runs: Sequence[Run | None] | None = None) -> list[int] | None:
        """How many scores it may return for each completion's steps; None for one that asks nothing of runs."""
        return call_counts(completions, runs) if self.views else None

    def arguments(
        self,
        prompts: Texts,
        completions: Texts,
        columns: Mapping[str, Any],
        runs: Sequence[Run | None] | None = None,
    ) -> dict[str, Any]:
        """What the function is called with: copies of its own, so that it can change nothing of ours."""
        views = self.views
        feeds = {**{name: name for name in columns}, **self.renamed}
        given = {
            name: columns[column] if name in RUNTIME else copy.deepcopy(columns[column])
            for name, column in feeds.items()
            if column in columns and name not in views and (name in self.renamed or takes_column(self.fn, name))
        }
        if views:
            given |= copy.deepcopy(run_columns(prompts, completions, runs, wanted=views))
        if takes_column(self.fn, "prompts"):
            given["prompts"] = [_in_form(self.shape.prompts, p, "user") for p in prompts]
        if takes_column(self.fn, "completions"):
            given["completions"] = [_in_form(self.shape.completions, c, "assistant") for c in completions]
        return given

    def __call__(self, /, prompts: Texts, completions: Texts, **columns: Any) -> list[Score]:
        """One score per completion; raises RewardError if the function fails or returns something else."""
        own = os.getpid()
        try:
            values = self.fn(**self.arguments(prompts, completions, columns))
            if inspect.isawaitable(values):
                values = _wait(values)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the reward boundary: user code may raise anything
            first = f" (first completion: {short(completions[0])})" if completions else ""
            raise RewardError(f"reward {self.name!r} failed: {cause_of(error)}{first}") from error
        finally:
            if os.getpid() != own:  # a reward that forks would leave a second process that goes on as the first
                os._exit(0)
        return as_scores(values, self.name, len(completions), self.step_counts(completions))


def from_model(model: str, **options: Any) -> Function:
    """A trained reward model as a reward: ``rewards/<name>``, a folder or a hub name; see `reward_models.ModelReward`.

    Raises:
        RewardError: there is none of that name, or an option is wrong.
    """
    return resolve({"reward": model, **options})


def total(scores_by_reward: Sequence[Sequence[Score]], weights: Sequence[float]) -> list[Score]:
    """The weighted sum per sample; a None is left out, and a sample with nothing else is None (as in TRL)."""
    sums: list[Score] = []
    for scores in zip(*scores_by_reward, strict=True):
        parts = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
        sums.append(sum(parts) if parts else None)
    return sums


def made_up_answers(hints: Sequence[str]) -> list[str]:
    """Answers that differ in length and markup and hold what the row knows, so that most rewards tell them apart."""
    known = ", ".join(hints) or "42"
    steps = "First I read the question twice. Then I look at each part of it in turn and compare. "
    marked = f"<think>\n{steps * 3}\n</think>\n<answer>{known}</answer>\n**\\boxed{{{known}}}**"
    fenced = f'```json\n{{"answer": "{known}"}}\n```\n#### {known}'
    return ["Yes.", f"I would say that the answer is {known}.", f"{marked}\n{fenced}", *hints]


def _sample(fn: Function, prompts: Texts, columns: Columns, renamed: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of one trial call, as TRL would make it."""
    passed = [name for name in columns if name not in (*OWN, *_RENAMED)]
    asked = {renamed.get(p.name, p.name) for p in parameters_of(fn) or []}
    telling = sorted(passed, key=lambda name: name not in asked)[:3]  # those it names first; a judge's calls cost money
    sample: dict[str, Any] = {name: [] for name in ("prompts", "completions", *passed)}
    for i, prompt in enumerate(prompts):
        row = {name: columns[name][i] for name in passed}
        for answer in made_up_answers([str(row[name]) for name in telling if isinstance(row[name], str | int | float)]):
            for name, value in {"prompts": prompt, "completions": answer, **row}.items():
                sample[name].append(value)
    sample["completion_ids"] = [list(range(1, len(answer.split()) + 1)) for answer in sample["completions"]]
    sample["trainer_state"] = SimpleNamespace(global_step=0, max_steps=1, epoch=0.0)
    sample["log_extra"] = sample["log_metric"] = lambda *_: None
    return sample


def find_shape(
    fn: Function, prompts: Texts, columns: Columns, *, name: str = "", renamed: Mapping[str, str] | None = None
) -> Shape:
    """The form that ``fn`` reads, found by trying unless it says so itself; raises RewardError if none works."""
    name = name or name_of(fn)
    if declared(fn, "trusted") and declared(fn, "reads"):
        return Shape(*declared(fn, "reads"))
    if not prompts:
        raise RewardError(f"reward {name!r} cannot be tried: there is no sample prompt")
    sample = _sample(fn, prompts, columns, renamed or {})
    works: list[Shape] = []
    failures: list[tuple[Shape, str]] = []
    for shape in _shapes_to_try(fn, prompts):
        try:
            scores = Reward(fn, name, shape=shape, renamed=renamed or {})(**sample)
        except RewardError as error:
            failures.append((shape, str(error).removeprefix(f"reward {name!r} failed: ")))
            continue
        # len(c) works on both forms but is 1 on every message list: the form that tells answers apart is the one meant
        if len(set(scores)) > 1:
            return shape
        works.append(shape)
    if not works:
        raise RewardError(_in_no_form(name, failures))
    # On a tie text: `"sorry" in c` works on both forms but means text, and what means messages fails on text.
    return _PLAIN if _PLAIN in works else works[0]


def _shapes_to_try(fn: Function, prompts: Texts) -> list[Shape]:
    if reads := declared(fn, "reads"):
        return [Shape(*reads)]
    forms: tuple[Form, Form] = ("text", "messages") if isinstance(prompts[0], str) else ("messages", "text")
    return [*(Shape(form, form) for form in forms), Shape(*forms), Shape(*reversed(forms))]


def _in_no_form(name: str, failures: Sequence[tuple[Shape, str]]) -> str:
    """Every attempt with its cause; a cause that is the same for all, but for the values shown, is said once."""
    head = f"reward {name!r} fails on sample answers in every form:"
    if len({re.sub(r"[\d.,\s()\[\]-]+", "#", cause) for _, cause in failures}) == 1:
        return f"{head} {failures[0][1]}"
    attempts = (f"  {shape.prompts} prompts, {shape.completions} completions: {cause}" for shape, cause in failures)
    return "\n".join([head, *attempts])


def _fit(entry: tuple[RewardSpec, Function, str], prompts: Texts, columns: Columns) -> Reward:
    spec, fn, name = entry
    check_signature(fn)
    needed = [spec.columns.get(parameter, parameter) for parameter in needed_columns(fn)]
    needed += [column for column in spec.columns.values() if column not in needed]
    if held := [column for column in needed if column in _RENAMED]:
        raise RewardError(f"reward {name!r} takes {held[0]!r}; TRL passes it as {_RENAMED[held[0]]!r} (a list)")
    if taken := taken_view(fn, spec.columns, columns):
        raise RewardError(f"reward {name!r} {taken}")
    if missing := [column for column in needed if column not in columns]:
        what = f"the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
        there = ", ".join(dict.fromkeys(["prompt", *columns]))
        raise RewardError(f"reward {name!r} needs {what}; the dataset has: {there}")
    seek = functools.partial(find_shape, fn, prompts, columns, name=name, renamed=spec.columns)
    shape = _in_time(seek, name)
    by_sample = not declared(fn, "whole_group")
    return Reward(fn, name, shape=shape, renamed=spec.columns, by_sample=by_sample)


def _in_time(seek: Callable[[], Shape], name: str) -> Shape:
    begun = time.monotonic()
    try:
        return within(LONGEST_SEARCH, seek)
    except (TimedOut, RewardError) as error:  # the reward may have caught what was to end it
        if time.monotonic() - begun < LONGEST_SEARCH:
            raise
        waits = f"did not end within {LONGEST_SEARCH:g} s when it was tried on sample answers"
        raise RewardError(f"reward {name!r} {waits}. Give what it waits for a time limit") from error


def prepare(specs: object, *, weights: Sequence[float] | None = None, prompts: Texts, columns: Columns) -> list[Reward]:
    """Resolve and try every reward on a few sample ``prompts``; raises RewardError once, with every failure."""
    given = listed_specs(specs)
    read, failures = collect(read_spec, given)
    found, lost = collect(lambda entry: (read_spec(entry), resolve(entry)), given)
    failures = list(dict.fromkeys([*failures, *lost]))
    if len(read) == len(given):
        failures += collect(lambda chosen: weights_of(read, chosen), [weights])[1]
    names = unique_names([fn for _, fn in found], [spec.name for spec, _ in found])
    with importing_from(None):  # a reward may import a helper beside it when it is called
        entries = [(spec, fn, name) for (spec, fn), name in zip(found, names, strict=True)]
        rewards, unfit = collect(lambda entry: _fit(entry, prompts, columns), entries)
    if failures or unfit:
        raise RewardError("\n".join([*failures, *unfit]))
    return [replace(r, weight=w) for r, w in zip(rewards, weights_of(read, weights), strict=True)]
