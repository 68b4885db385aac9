"""Calls a reward once, within a deadline, and says what came back as it came; nothing of it is mended here."""

import copy
import inspect
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple

from praison_agent_rl.deadlines import end_copies, within
from praison_agent_rl.records import Run
from praison_agent_rl.rewards import Reward, Score, Text
from praison_agent_rl.scoring.jobs import CallRules
from praison_agent_rl.scoring.names import RUNTIME
from praison_agent_rl.scoring.readings import Fault, Outcome, outcome_of, read_values, told
from praison_agent_rl.scoring.waiting import Waiting

_NOT_PASSED = ("prompt", "prompts", "completion", "completions", "completion_ids")


@dataclass(frozen=True)
class Sample:
    """One answer to one prompt."""

    prompt: Text
    completion: Text
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Of the dataset, the prompt aside."""
    group: int = 0
    """Answers to the same prompt have the same number."""
    rating: float | None = None
    """What a person said of the answer."""
    run: Run | None = None
    """The recorded run that it comes from."""


class Reading(NamedTuple):
    """What one call brought: a fault of the whole call, or for each sample a score, None or a fault."""

    outcomes: Sequence[Outcome]
    fault: Fault | None
    seconds: float
    changed: tuple[str, ...] = ()
    """Arguments that the reward changed."""

    @property
    def scores(self) -> list[Score]:
        """One for each sample, None wherever there is no sound score."""
        return [None if isinstance(outcome, Fault) else outcome for outcome in self.outcomes]

    def same(self, other: "Reading") -> bool:
        """Whether two calls brought the same; a model's scores differ a little with the batch."""
        return len(self.outcomes) == len(other.outcomes) and all(map(_same, self.outcomes, other.outcomes))

    def only(self, place: int) -> "Reading":
        """The same for the sample at ``place``."""
        return self._replace(outcomes=[self.outcomes[place]])


class Probe:
    """Calls one reward; what its calls share, such as a connection, lives as long as this."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._waiting = Waiting(CallRules(retries=0))

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waiting.close()

    def read(self, samples: Sequence[Sample], *, timeout: float) -> Reading:
        """One call with these samples, made as TRL makes it; it is ended after ``timeout`` seconds."""
        prompts, completions = [sample.prompt for sample in samples], [sample.completion for sample in samples]
        runs = [sample.run for sample in samples]
        given = self.reward.arguments(prompts, completions, columns_of_call(samples), runs)
        before = {name: copy.deepcopy(value) for name, value in given.items() if name not in RUNTIME}
        start, own = time.perf_counter(), os.getpid()
        try:
            values = within(timeout, lambda: self._called(given, timeout))
            read = read_values(values, len(samples), self.reward.step_counts(completions, runs))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the reward boundary: user code may raise anything
            return Reading([], told(error, timeout).fault, time.perf_counter() - start)
        finally:
            end_copies(own)
        seconds = time.perf_counter() - start
        changed = sorted(name for name, value in before.items() if _differ(given.get(name), value))
        return Reading([outcome_of(value) for value in read], None, seconds, tuple(changed))

    def _called(self, given: dict[str, Any], timeout: float) -> Any:
        values = self.reward.fn(**given)
        return self._waiting.finish(values, timeout) if inspect.isawaitable(values) else values


@contextmanager
def staying_here() -> Iterator[None]:
    """Come back to the current folder, wherever a reward or its module goes."""
    here = os.getcwd()
    try:
        yield
    finally:
        with suppress(OSError):  # it is gone
            os.chdir(here)


def columns_of_call(samples: Sequence[Sample]) -> dict[str, Any]:
    """What TRL passes beside prompts and completions."""
    names = dict.fromkeys(name for sample in samples for name in sample.columns if name not in _NOT_PASSED)
    columns: dict[str, Any] = {name: [sample.columns.get(name) for sample in samples] for name in names}
    columns["completion_ids"] = [list(range(1, len(str(sample.completion).split()) + 1)) for sample in samples]
    columns["trainer_state"] = SimpleNamespace(global_step=0, max_steps=1, epoch=0.0)
    columns["log_extra"] = columns["log_metric"] = lambda *_: None
    return columns


def _same(one: Outcome, other: Outcome) -> bool:
    if isinstance(one, Fault) or isinstance(other, Fault):
        return isinstance(one, Fault) and isinstance(other, Fault) and one.kind == other.kind
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)


def _differ(now: Any, before: Any) -> bool:
    with suppress(Exception):  # objects of the dataset's own may not be comparable
        return bool(now != before)
    return False
