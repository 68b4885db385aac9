"""Episodes in an environment: whatever its own code does when one begins or is scored costs that episode alone."""

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

from praison_agent_rl.deadlines import TimedOut, within
from praison_agent_rl.rewards import Score
from praison_agent_rl.scoring.names import cause_of, short
from praison_agent_rl.scoring.readings import Fault, outcome_of, read_values


class EpisodeFault(NamedTuple):
    """Why an episode did not begin, or has no score."""

    kind: str
    """What failed, and how; faults of one kind are said once."""
    text: str


class EpisodeScores(list[Score]):
    """Scores of episodes, with the reason for each None that is a fault."""

    def __init__(self, scores: Sequence[Score], failed: Mapping[int, str]) -> None:
        super().__init__(scores)
        self.failed = dict(failed)
        """By the place of the episode."""


@dataclass
class _Episode:
    """The one that an environment is in."""

    fault: EpisodeFault | None = None
    """Why it did not begin."""
    score: Score | EpisodeFault = None
    scored: bool = False


class Acting:
    """Stands before the class of an environment, and begins its episodes; one that does not begin raises nothing.

    The loop of TRL calls ``reset`` for a whole batch, and would end the run with what it raises.
    """

    _rl_limit: ClassVar[float]
    """Seconds that the environment may take at a time."""
    _rl_name: ClassVar[str]
    _rl_made = False
    _rl_episode: _Episode

    def __init_subclass__(cls, **_: Any) -> None:
        """What an environment does with its subclasses is not meant for the one that stands before it."""

    def __init__(self) -> None:
        self._rl_make()

    def reset(self, /, **row: Any) -> Any:
        """Begin an episode, and return what the environment adds to the prompt; where it fails, `fault_of` tells."""
        fault, said = None if self._rl_made else self._rl_make(), None
        if fault is None:
            reset = cast(Any, super()).reset
            # it may change in place what other episodes are given too
            begin = lambda: reset(**copy.deepcopy(row))  # noqa: E731 - `_tried` is to catch what copying raises
            said, fault = _tried(f"{self._rl_name}.reset", begin, self._rl_limit)
        told, odd = _observation(f"{self._rl_name}.reset", said)
        self._rl_keep(fault or odd)
        return told

    def _rl_make(self) -> EpisodeFault | None:
        _, fault = _tried(f"{self._rl_name}.__init__", super().__init__, self._rl_limit)
        object.__setattr__(self, "_rl_made", fault is None)
        self._rl_keep(fault)
        return fault

    def _rl_score(self) -> Score | EpisodeFault:
        episode = self._rl_episode
        if not episode.scored and episode.fault is None:
            episode.score, episode.scored = _score(self, self._rl_name, self._rl_limit), True
        return episode.score

    def _rl_keep(self, fault: EpisodeFault | None) -> None:
        # not by `self.`: an environment may have a __setattr__ of its own
        object.__setattr__(self, "_rl_episode", _Episode(fault))


def fault_of(environment: Any) -> EpisodeFault | None:
    """Why the episode of an environment did not begin; None of one that did."""
    return environment._rl_episode.fault if isinstance(environment, Acting) else None  # noqa: SLF001 - defined here


def score_of_episode(environment: Any) -> Score | EpisodeFault:
    """What an environment says of its episode, asked once; None of one that scores none, or that did not begin."""
    if isinstance(environment, Acting):
        return environment._rl_score()  # noqa: SLF001 - defined here
    return _score(environment, type(environment).__qualname__, threading.TIMEOUT_MAX)


def as_told(result: Any) -> str:
    """What a model is told of a result: a text as it is, parts of text joined, else what ``str`` makes of it.

    Raises:
        ValueError: no tokenizer takes it, since UTF-8 cannot say it (half of a surrogate pair).
    """
    text = _text_in(result)
    told = str(result) if text is None else text
    told.encode()
    return told


def _text_in(said: Any) -> str | None:
    """A text, or parts of text joined; None of anything else, pictures too."""
    parts = said if isinstance(said, list) else []
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    whole = [text for text in texts if isinstance(text, str)]
    return said if isinstance(said, str) else "".join(whole) if parts and len(whole) == len(parts) else None


def _observation(what: str, said: Any) -> tuple[str | None, EpisodeFault | None]:
    """The text that ``what`` returned to be put behind a prompt, if any, or why it cannot be."""
    if said is None:
        return None, None
    if _text_in(said) is None:
        kind = f"{what} returned a {type(said).__name__}"
        return None, EpisodeFault(kind, f"{kind}, {short(said)}; wanted: a text that is put behind the prompt, or None")
    try:
        return as_told(said), None
    except ValueError as error:
        kind = f"{what} returned a text that no tokenizer takes"
        return None, EpisodeFault(kind, f"{kind}, {short(said)}: {error}")


def settled(found: Any) -> Any:
    """A value, or what an awaitable comes to."""
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


class Telling:
    """Says the first fault of each kind."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._said: set[str] = set()

    def hear(self, faults: Iterable[EpisodeFault | None]) -> None:
        """Take note of what became of some episodes, None where they began."""
        for fault in faults:
            if fault is not None and fault.kind not in self._said:
                self._said.add(fault.kind)
                self._tell(
                    f"{fault.text}. The episode does not begin, and its rollout has no reward; this is said once and "
                    "counted from here on"
                )


def _score(environment: Any, name: str, seconds: float) -> Score | EpisodeFault:
    ask = getattr(environment, "get_reward", None)
    if ask is None:
        return None
    what = f"{name}.get_reward"
    said, fault = _tried(what, lambda: settled(ask()), seconds)
    if fault is not None:
        return fault
    read = outcome_of(read_values([said], 1)[0])
    return EpisodeFault(f"{what} {read.kind}", f"{what} {read.text}") if isinstance(read, Fault) else read


def _tried(what: str, call: Callable[[], Any], seconds: float) -> tuple[Any, EpisodeFault | None]:
    """What ``call`` returns in time, or what it did instead."""
    try:
        return within(seconds, call), None
    except TimedOut:
        how, why = "did not end", f"did not end within {seconds:g} s"
    except SystemExit as end:
        how, why = "ended", f"ended the program (SystemExit: {end.code})"
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is a user's code
        how, why = "raised", f"raised {cause_of(error)}"
    return None, EpisodeFault(f"{what} {how}", f"{what} {why}")


async def _awaited(found: Any) -> Any:
    return await found
