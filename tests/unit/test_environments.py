"""Environments are found by name, and all that is wrong with one is said before anything loads."""

import abc
import asyncio
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from praison_agent_rl.agent_rollouts.tool_answers import acting_in_time
from praison_agent_rl.agent_rollouts.toolboxes import environment_of
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.environments import (
    check_environment,
    episode_reward,
    methods_that_act,
    noted,
    resolve_environment,
    tool_problems,
)
from praison_agent_rl.episodes import EpisodeFault, Telling, fault_of, score_of_episode
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.records import Run
from praison_agent_rl.rewards import Reward
from praison_agent_rl.scoring.calls import Caller, CallRules

GAME = '''
LEVELS = 3

class Guessing:
    """A number to guess."""

    def reset(self, **row):
        self.secret = row["secret"]
'''


class Guessing:
    """A number to guess."""

    def __init__(self, tries: int = 3, **more: Any) -> None:
        self.tries = tries

    def reset(self, **row: Any) -> str:
        self.secret, self.found = row["secret"], False
        return f"You have {self.tries} tries."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.found = number == self.secret
        return "right" if self.found else "wrong"

    async def hint(self) -> str:
        """Ask for a hint."""
        return "It is small."

    def get_reward(self) -> float:
        return float(self.found)

    def _aside(self, anything):
        """Private methods are no tools."""


class Wrong:
    def __init__(self, size, /, *, depth, colour="red"):
        """Takes what nobody gives."""

    async def reset(self, **row):
        """Is not awaited."""

    get_reward = 5.0

    def move(self, left, right: int):
        return left

    def look(self, *places: str) -> str:
        """Look around."""
        return ""

    def turn(self, angle: float) -> None:
        """Turn around."""

    def take(self, thing: "Nothing") -> None:  # noqa: F821 - the point of the test
        """Take it.

        Args:
            thing: What to take.
        """


def test_a_sound_environment_has_no_problems() -> None:
    assert check_environment(Guessing) == []


def test_all_problems_of_an_environment_are_found_at_once() -> None:
    assert check_environment(Wrong) == [
        "Wrong.__init__ needs size, depth, but it is made without arguments; give them defaults",
        "Wrong.reset is async, but it is called without await; write def reset(self, **row)",
        "Wrong.get_reward is a float, not a method; write def get_reward(self) -> float",
        "Wrong.look takes *places, but a model gives each argument by name",
        "Wrong.move has no type hint for left; the model is told the types",
        "Wrong.move has no docstring; the model is told what it does, and each argument under Args:",
        "Wrong.take cannot be described to a model: NameError: name 'Nothing' is not defined",
        "Wrong.turn cannot be described to a model: DocstringParsingException: Cannot generate JSON schema for turn "
        "because the docstring has no description for the argument 'angle'",
    ]


class Uncallable:
    """Methods that a model could not call, or would be told nothing of."""

    @classmethod
    def reset(cls, **row: Any) -> None:
        """Begin."""

    def bare() -> str:  # type: ignore[misc]
        """Do."""
        return ""

    def each(self) -> Any:
        """Give each."""
        yield 1

    async def each_later(self) -> Any:
        """Give each."""
        yield 1

    def placed(self, number: int, /) -> None:
        """Take it.

        Args:
            number: The number.
        """

    def sound(this, number: int) -> None:
        """Take it.

        Args:
            number: The number.
        """

    @staticmethod
    def static(cls: int) -> None:
        """Take it.

        Args:
            cls: The number.
        """


def test_a_method_that_no_call_would_reach_or_tell_of_is_a_problem_beforehand() -> None:
    generator = (
        "is a generator, of which a model would be told neither what it yields nor what it returns; return a value"
    )
    assert check_environment(Uncallable) == [
        "Uncallable.reset is a class method; write def reset(self, **row)",
        "Uncallable.bare takes no self, with which it is called; write def bare(self, ...), or make it a staticmethod",
        f"Uncallable.each {generator}",
        f"Uncallable.each_later {generator}",
        "Uncallable.placed takes number by place alone, but a model gives each by name; drop the /",
    ]


def test_an_environment_needs_reset_and_something_to_do() -> None:
    class Empty:
        pass

    class Still:
        def reset(self, prompt: str) -> None:
            """Begins."""

        def get_reward(self, scale: float) -> float:
            return scale

    empty, still = Empty.__qualname__, Still.__qualname__
    nothing = "has no public method besides reset and get_reward, so the model can do nothing in it"
    assert check_environment(Empty) == [
        f"{empty} has no method reset; it begins an episode: def reset(self, **row)",
        f"{empty} {nothing}",
    ]
    assert check_environment(Still) == [
        f"{still}.reset takes no **row, but it is given every column of a row by name; add **row",
        f"{still}.get_reward needs scale, but it is called without arguments",
        f"{still} {nothing}",
    ]


def test_inherited_methods_are_tools_too_and_an_abstract_class_is_none() -> None:
    class Board(abc.ABC):
        def reset(self, **row: Any) -> str:
            return "A board."

        @abc.abstractmethod
        def move(self, place: int) -> str: ...

        def helper(self, what):
            return what

    class Chess(Board):
        def move(self, place: int) -> str:
            """Move.

            Args:
                place: Where to.
            """
            return str(place)

    assert (
        check_environment(Board)[0] == f"{Board.__qualname__} is abstract, it lacks move; name a class that can be made"
    )
    assert check_environment(Chess) == [
        f"{Chess.__qualname__}.helper has no type hint for what; the model is told the types",
        f"{Chess.__qualname__}.helper has no docstring; the model is told what it does, and each argument under Args:",
    ]


def test_a_function_is_looked_at_as_a_tool() -> None:
    def add(a: int, b: int = 2) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    assert tool_problems(add, "mine:add") == []
    assert tool_problems(lambda a: a, "mine:it")[0] == "mine:it has no type hint for a; the model is told the types"


def test_an_environment_is_found_by_its_name(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_tmp / "somegames.py").write_text(GAME)
    monkeypatch.delitem(sys.modules, "somegames", raising=False)
    found = resolve_environment("somegames: Guessing")
    assert found.__name__ == "Guessing" and found.__module__ == "somegames"
    monkeypatch.delitem(sys.modules, "somegames")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("Guessing", "environment 'Guessing' is not a 'module:Class' path. Example: myproject.games:Guessing"),
        ("somegames:", "environment 'somegames:' is not a 'module:Class' path"),
        ("somegames:LEVELS", "environment 'somegames:LEVELS' is a int, not a class. Classes in 'somegames': Guessing"),
        (
            "somegames:Gesing",
            "environment 'somegames:Gesing' is not there (did you mean 'Guessing'?). Classes in 'somegames': Guessing",
        ),
        ("nogames:Guessing", "cannot import 'nogames' for environment 'nogames:Guessing': ModuleNotFoundError"),
        ("badgames:Guessing", "cannot import 'badgames' for environment 'badgames:Guessing': SystemExit: 3"),
    ],
)
def test_what_is_no_environment_is_told(in_tmp: Path, monkeypatch: pytest.MonkeyPatch, spec: str, said: str) -> None:
    (in_tmp / "somegames.py").write_text(GAME)
    (in_tmp / "badgames.py").write_text("raise SystemExit(3)")
    for name in ("somegames", "badgames"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError) as caught:
        resolve_environment(spec)
    assert str(caught.value).startswith(said)
    sys.modules.pop("somegames", None)


# --- episodes that do not begin, or that nothing sound is said of -----------------------------------------------------


def raises() -> Any:
    raise ValueError("boom")


def leaves() -> Any:
    sys.exit(3)


def hangs() -> Any:
    time.sleep(600)


def is_cancelled() -> Any:
    raise asyncio.CancelledError


async def raises_later() -> Any:
    raises()


HOW = {
    "raises": (raises, "raised ValueError: boom"),
    "hangs": (hangs, "did not end within 0.3 s"),
    "leaves": (leaves, "ended the program (SystemExit: 3)"),
    "is cancelled": (is_cancelled, "raised CancelledError"),
}
WANTED = "; wanted: a text that is put behind the prompt, or None"
NOT_BEGUN = {
    **HOW,
    "gives a number": (lambda: 5, f"returned a int, 5{WANTED}"),
    "gives a list": (lambda: [1, 2], f"returned a list, [1, 2]{WANTED}"),
    "gives no parts": (list, f"returned a list, []{WANTED}"),
    "gives a picture": (lambda: [{"type": "image"}], f"returned a list, [{{'type': 'image'}}]{WANTED}"),
    "gives half an emoji": (lambda: "\ud83d", "returned a text that no tokenizer takes, '\\ud83d': 'utf-8' codec"),
}
NO_SCORE = {
    **HOW,
    "raises later": (raises_later, "raised ValueError: boom"),
    "text": (lambda: "7", "returned '7' as a score"),
    "nan": (lambda: float("nan"), "returned NaN as a score"),
    "infinite": (lambda: float("-inf"), "returned -inf as a score"),
    "list": (lambda: [1.0], "returned [1.0] as a score"),
}


class Playing:
    """A place where the row says what goes wrong."""

    asked = 0

    def reset(self, **row: Any) -> Any:
        self.row = row
        return row.get("begin", lambda: " Go.")()

    def step(self) -> str:
        """Step."""
        return "done"

    def get_reward(self) -> Any:
        self.asked += 1
        return self.row.get("score", lambda: 2)()


def playing(**row: Any) -> Any:
    acting = acting_in_time(Playing, 0.3 if hangs in row.values() else 60)()
    acting.observation = acting.reset(**row)
    return acting


@pytest.mark.parametrize("how", NOT_BEGUN)
def test_an_episode_that_does_not_begin_is_told_by_the_method_and_the_cause_and_the_next_one_begins(how: str) -> None:
    begin, said = NOT_BEGUN[how]
    acting = playing(begin=begin)
    fault = fault_of(acting)
    assert fault is not None and fault.text.startswith(f"Playing.reset {said}") and acting.observation is None
    assert score_of_episode(acting) is None and acting.asked == 0
    assert acting.reset(score=lambda: 1.5) == " Go." and fault_of(acting) is None and score_of_episode(acting) == 1.5


def test_an_episode_that_changes_its_row_changes_no_other() -> None:
    row = {"prompt": [{"role": "user", "content": "Go"}], "board": [0, 0]}
    for _ in range(2):
        acting = playing(**row)
        assert acting.row == {"prompt": [{"role": "user", "content": "Go"}], "board": [0, 0]}
        acting.row["board"][0] = 1
        acting.row["prompt"].append("mine")
    assert row == {"prompt": [{"role": "user", "content": "Go"}], "board": [0, 0]}


def test_what_an_environment_adds_may_be_parts_of_text() -> None:
    acting = playing(begin=lambda: [{"type": "text", "text": " Go"}, {"type": "text", "text": "."}])
    assert acting.observation == " Go." and fault_of(acting) is None


def test_an_environment_that_cannot_be_made_at_first_is_made_for_the_next_episode() -> None:
    class Late(Playing):
        tries: ClassVar[list[int]] = []

        def __init__(self) -> None:
            self.tries.append(1)
            if len(self.tries) < 3:
                raise OSError("no room")

    acting = acting_in_time(Late, 60)()
    assert acting.reset() is None
    fault = fault_of(acting)
    assert fault is not None and fault.text == f"{Late.__qualname__}.__init__ raised OSError: no room"
    assert acting.reset() == " Go." and fault_of(acting) is None and len(Late.tries) == 3


@pytest.mark.parametrize("how", NO_SCORE)
def test_a_score_that_is_none_costs_its_own_episode_and_names_the_method_in_training_and_comparison(how: str) -> None:
    score, said = NO_SCORE[how]
    acted = [playing(), playing(score=score), playing(score=lambda: True), playing(score=lambda: None)]
    scores = [score_of_episode(one) for one in acted]
    runs = [noted(score, Run(id=str(place), time=0.0)) for place, score in enumerate(scores)]
    for told in (episode_reward([""] * 4, runs[:0], acted), episode_reward([""] * 4, runs)):
        assert list(told) == [2.0, None, 1.0, None]
        assert told.failed == {1: f"Playing.get_reward {said}"}  # type: ignore[attr-defined]
    assert [one.asked for one in acted] == [1] * 4


def test_a_score_that_fails_is_counted_as_a_reward_that_fails_and_said_once() -> None:
    warned: list[str] = []
    caller = Caller([Reward(episode_reward, "episode")], CallRules(pause=0.001), warn=warned.append)
    for _ in range(2):
        acted = [playing(score=raises), playing(), playing(score=leaves)]
        found = caller.score(["p"] * 3, ["c"] * 3, {"environments": acted}, runs=None)
        assert found == {"episode": [None, 2.0, None]} and [one.asked for one in acted] == [1] * 3
    caller.close()
    (said,) = warned
    assert "gave no score: Playing.get_reward raised ValueError: boom" in said
    assert (caller.counts["episode"].failed, caller.counts["episode"].samples) == (4, 6)
    assert "Playing.get_reward raised ValueError: boom" in str(caller.too_many_failed())


def test_an_episode_that_is_scored_is_never_taken_for_another_that_looks_the_same() -> None:
    from praison_agent_rl.scoring.keys import why_not_kept

    assert why_not_kept(Reward(episode_reward, "episode")) == "it says so (cacheable)"


def test_the_first_fault_of_each_kind_is_said() -> None:
    said: list[str] = []
    telling = Telling(said.append)
    for text in ("one", "other"):
        telling.hear([None, EpisodeFault("A.reset raised", text), EpisodeFault("A.reset did not end", f"late {text}")])
    assert [text.partition(".")[0] for text in said] == ["one", "late one"]


# --- names ------------------------------------------------------------------------------------------------------------


def guess(number: int) -> str:
    """Guess.

    Args:
        number: Any.
    """
    return str(number)


async def hint() -> str:
    """Ask."""
    return "none"


def other() -> str:
    """Do something else."""
    return ""


def test_tools_and_methods_of_one_name_are_refused_with_both_of_each_at_once() -> None:
    pytest.importorskip("transformers", reason="TRL's form of a tool is transformers' own: needs the extra train")
    names = [f"{__name__}:{name}" for name in ("guess", "hint", "other")]
    with pytest.raises(ConfigError) as told:
        environment_of(TrainConfig(tools=names, environment=f"{__name__}:Guessing"))
    said = "tools name 'guess', 'hint', and the environment Guessing has Guessing.guess, Guessing.hint; "
    assert str(told.value).startswith(said)
    found = environment_of(TrainConfig(tools=names[2:], environment=f"{__name__}:Guessing"))
    assert found is not None and list(methods_that_act(found)) == ["guess", "hint"]
    gone = TrainConfig(tools=[*names[:1], "nowhere:gone"], environment=f"{__name__}:Guessing")
    with pytest.raises(ConfigError, match="tools name 'guess', and"):
        environment_of(gone)
