"""Environments are found by name, and all that is wrong with one is said before anything loads."""

import abc
import sys
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.environments import check_environment, resolve_environment, tool_problems
from praison_agent_rl.errors import ConfigError

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
