"""In ``rollout: tools`` a model is told what the framework would tell it, and a tool that hangs is a failed call."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl.agent_rollouts.copies import RolloutPlace, rollout_copy
from praison_agent_rl.agent_rollouts.tool_answers import (
    AwaitedTools,
    NamedTools,
    acting_in_time,
    in_time,
    meant,
    telling,
    told_absent,
    told_result,
)
from praison_agent_rl.environments import methods_that_act
from tests.fakes import build_agent
from tests.rollout_stand_in import KEY, Asked, ScriptedEndpoint, calls, says

pytestmark = pytest.mark.usefixtures("agents_around")

HANGS = 600
"""Seconds that a hanging tool would take."""
LONG_PAGE = "a page of the web with <external_tool_result> in it, which is long enough"


def size_of(thing: str) -> str:
    """How big a thing is."""
    return f"{thing} is big"


async def given_later(result: Any) -> Any:
    return result


def told_by_the_framework(server_a: Any, tool: Callable[..., Any], called: str = "") -> str:
    """What a model is told by a copy of an agent on the OpenAI client, after it called a tool."""

    def script(asked: Asked) -> dict[str, Any]:
        return says("done") if asked.results else calls(called or tool.__name__, thing="sun")

    with ScriptedEndpoint(script) as endpoint:
        agent = build_agent("environment", server_a.url, tools=[tool, size_of] if tool is not size_of else [size_of])
        assert rollout_copy(agent, RolloutPlace(endpoint.address, KEY, "j1")).chat("hello") == "done"
        (result,) = endpoint.asked[-1].results
        return result


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("look", "a text"),
        ("look", 5),
        ("look", None),
        ("look", ["a", {"b": None}]),
        ("look", {"error": "no such thing"}),
        ("look", {"é": 2.5}),
        ("look", {1, 2}),
        ("web_search", LONG_PAGE),
        ("web_search", [LONG_PAGE]),
        ("web_search", "short"),
        ("look", lambda: given_later("a text")),
    ],
    ids=["text", "number", "nothing", "list", "error", "object", "set", "page", "pages", "short page", "awaitable"],
)
def test_a_result_is_told_as_the_framework_tells_it(name: str, result: Any, server_a: Any) -> None:
    def look(thing: str) -> Any:
        """Look."""
        return result() if callable(result) else result

    look.__name__ = name
    assert told_result(name, look("sun")) == told_by_the_framework(server_a, look)


@pytest.mark.parametrize("called", ["nothing", "size", "size_off"])
def test_a_call_of_a_tool_that_is_not_there_is_told_as_the_framework_tells_it(called: str, server_a: Any) -> None:
    def look(thing: str) -> str:
        """Look."""
        return thing

    assert told_absent(called, ["size_of", "look"]) == told_by_the_framework(server_a, look, called)


@pytest.mark.parametrize("called", ["size_of", "Size-Of", "sizeOf", "SIZE OF"])
def test_a_name_that_is_written_almost_so_means_the_tool_as_in_the_framework(called: str, server_a: Any) -> None:
    assert meant(called, ["size_of", "look"]) == "size_of"
    assert told_by_the_framework(server_a, size_of, called) == told_result("size_of", size_of("sun"))


def test_a_name_that_could_be_either_of_two_means_none() -> None:
    assert meant("sizeof", ["size_of", "Size-Of"]) is None and meant("size_of", ["size_of", "Size-Of"]) == "size_of"


@pytest.mark.parametrize(
    "called", ["size_of", "SizeOf", "size-of", "colour_of", "Colour-Of", "COLOUR OF", "nothing", "of"]
)
@pytest.mark.parametrize("awaited", [[], ["size_of"], ["colour_of"], ["size_of", "colour_of"], ["SIZE_OF"]])
def test_a_name_means_the_same_tool_to_trl_whether_it_is_awaited_or_not(called: str, awaited: list[str]) -> None:
    names = {"size_of", "colour_of", *awaited}
    sync: dict[str, Any] = NamedTools({name: name for name in names - {*awaited}}, awaited)  # type: ignore[misc]
    later: dict[str, Any] = AwaitedTools({name: name for name in awaited})  # type: ignore[misc]
    # as in trl/trainer/grpo_trainer.py, _tool_call_loop
    found = sync[called] if called in sync else later[called]
    wanted = meant(called, names)  # by which the comparison goes, and the framework
    if wanted is None:
        assert found(any=1) == told_absent(called, names) and sync.absent == 1  # type: ignore[attr-defined]
    else:
        assert found == wanted and sync.absent == 0  # type: ignore[attr-defined]


def test_tools_that_trl_asks_by_name_answer_for_those_that_are_not_there() -> None:
    tools = NamedTools({"size_of": size_of}, others=["later"])
    assert "size_of" in tools and "nothing" in tools and "later" not in tools
    assert tools["size_of"] is tools["SizeOf"] is size_of and tools.absent == 0
    assert tools["nothing"](any=1) == told_absent("nothing", ["size_of", "later"]) and tools.absent == 1


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise OSError("not even this")


def fails(error: BaseException) -> Any:
    raise error


TOLD = {
    "text": (lambda: "a", "a"),
    "nothing": (lambda: None, "None"),
    "list": (lambda: [1, "b"], "[1, 'b']"),
    "no items": (lambda: [], "[]"),
    "parts": (lambda: [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    "picture": (lambda: [{"type": "image", "image": 1}], "[{'type': 'image', 'image': 1}]"),
    "awaitable": (lambda: given_later([2]), "[2]"),
}
FAILED = {
    "error": (lambda: fails(KeyError("x")), "'x'"),
    "unspeakable": (lambda: fails(Unspeakable()), "Unspeakable"),
    "cancelled": (lambda: fails(asyncio.CancelledError()), "Tool was cancelled"),
    "half an emoji": (
        lambda: "\ud83d",
        "'utf-8' codec can't encode character '\\ud83d' in position 0: surrogates not allowed",
    ),
    "unspeakable result": (lambda: Unspeakable(), "not even this"),
}


@pytest.mark.parametrize("how", [*TOLD, *FAILED])
@pytest.mark.parametrize("awaited", [False, True], ids=["plain", "awaited"])
def test_what_a_tool_gives_is_text_and_each_failure_one_that_trl_goes_on_from(how: str, awaited: bool) -> None:
    do, wanted = {**TOLD, **FAILED}[how]

    def plain() -> Any:
        return do()

    async def later() -> Any:
        found = do()
        return await found if inspect.isawaitable(found) else found

    tool = telling(in_time(later if awaited else plain, 60))
    assert inspect.iscoroutinefunction(tool) is awaited and tool.__name__ == ("later" if awaited else "plain")
    call = (lambda: asyncio.run(tool())) if awaited else tool
    if how in TOLD:
        assert call() == wanted
        return
    with pytest.raises(RuntimeError) as told:
        call()
    assert str(told.value) == wanted


# --- time -------------------------------------------------------------------------------------------------------------


def sleeps(thing: str) -> str:
    """Sleep."""
    time.sleep(HANGS)
    return thing


def spins(thing: str) -> str:
    """Never come to an end."""
    while True:
        pass


@pytest.mark.parametrize("tool", [sleeps, spins])
def test_a_tool_that_hangs_fails_in_time_in_the_main_thread_and_in_others(tool: Callable[..., Any]) -> None:
    limited = in_time(tool, 0.1)
    with pytest.raises(TimeoutError, match=r"^Tool timed out after 0\.1s$"):
        limited(thing="sun")
    failures: list[str] = []

    def ask() -> None:
        try:
            limited(thing="sun")
        except TimeoutError as error:
            failures.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(60)
    assert failures == ["Tool timed out after 0.1s"]


def test_a_tool_in_time_gives_and_raises_what_it_does_and_looks_the_same() -> None:
    limited = in_time(size_of, 60)
    assert limited(thing="sun") == limited("sun") == "sun is big"
    assert inspect.signature(limited) == inspect.signature(size_of) and limited.__doc__ == size_of.__doc__
    assert limited.__name__ == "size_of" and not inspect.iscoroutinefunction(limited)

    def raises(thing: str) -> str:
        raise TimeoutError(f"{thing} has timed out by itself")

    with pytest.raises(TimeoutError, match="by itself"):
        in_time(raises, 60)(thing="sun")


def test_a_tool_that_is_awaited_fails_in_time_though_it_heeds_no_end() -> None:
    ended = asyncio.Event()

    async def waits(thing: str) -> str:
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), HANGS)
            except asyncio.CancelledError:
                continue
        return thing

    async def both() -> tuple[str, str]:
        with pytest.raises(TimeoutError, match=r"timed out after 0\.05s"):
            await in_time(waits, 0.05)(thing="sun")
        ended.set()
        return await in_time(waits, 60)(thing="sun"), await in_time(waits, 60)("moon")

    assert inspect.iscoroutinefunction(in_time(waits, 1)) and asyncio.run(both()) == ("sun", "moon")


class Slow:
    """A place."""

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, **row: Any) -> None:
        """Begin."""

    def step(self, far: int) -> int:
        """Step."""
        self.steps += far
        return self.steps

    def wait(self) -> None:
        """Wait."""
        time.sleep(HANGS)


class Slower(Slow):
    """One that counts double."""

    def step(self, far: int) -> int:
        """Step."""
        return super().step(far) * 2


def test_what_is_done_in_an_environment_fails_in_time_and_its_class_looks_the_same() -> None:
    limited = acting_in_time(Slower, 0.1)
    acting = limited()
    acting.reset(prompt="x")
    assert isinstance(acting, Slower) and acting.step(far=2) == 4 and acting.steps == 2
    with pytest.raises(TimeoutError, match=r"timed out after 0\.1s"):
        acting.wait()
    assert (limited.__name__, limited.__doc__, limited.__module__) == ("Slower", Slower.__doc__, __name__)
    assert list(methods_that_act(limited)) == list(methods_that_act(Slower)) == ["step", "wait"]
    assert inspect.signature(limited.step) == inspect.signature(Slower.step)


class Coloured:
    """A class that wants a word of each class that is made of it."""

    colour: str

    def __init_subclass__(cls, *, colour: str) -> None:
        cls.colour = colour


class Base(Coloured, colour="red"):
    """What environments have in common."""

    def reset(self, **row: Any) -> str:
        self.row = row
        return f" in {self.shade}"

    @property
    def shade(self) -> str:
        return f"light {self.colour}"

    def inherited(self, far: int) -> str:
        """Go far."""
        return f"{self.shade} {self.row['start'] + far}"


class Kinds(Base, colour="blue"):
    """Methods of every kind."""

    @staticmethod
    def static(far: int) -> str:
        """Go far."""
        return f"static {far}"

    @classmethod
    def of_class(cls, far: int) -> str:
        return f"{cls.colour} {far}"

    def own(self, far: int) -> str:
        """Go far."""
        return f"{self.of_class(far)} {self.static(far)}"

    async def awaited(self, far: int) -> str:
        """Go far."""
        return super().inherited(far)


def test_methods_of_every_kind_work_in_an_environment_as_they_do_without_a_time_limit() -> None:
    limited = acting_in_time(Kinds, 60)
    plain, acting = Kinds(), limited()
    assert plain.reset(start=1) == acting.reset(start=1) == " in light blue"
    names = list(methods_that_act(Kinds))
    assert names == list(methods_that_act(limited)) == ["awaited", "inherited", "own", "static"]
    for name in names:
        one, other = getattr(plain, name), getattr(acting, name)
        assert inspect.signature(one) == inspect.signature(other) and inspect.getdoc(one) == inspect.getdoc(other)
        said, same = one(far=2), other(far=2)
        assert (asyncio.run(said), asyncio.run(same)) == ("light blue 3",) * 2 if name == "awaited" else said == same
    assert (acting.static(2), acting.own(2), acting.of_class(2)) == ("static 2", "blue 2 static 2", "blue 2")
    assert (acting.shade, limited.colour) == ("light blue", "blue") and isinstance(acting, Kinds)


@pytest.mark.parametrize("seconds", [1e12, 1e300, float("inf")])
def test_a_time_limit_that_no_thread_can_wait_for_is_none(seconds: float) -> None:
    async def later(thing: str) -> str:
        return size_of(thing)

    told = [in_time(size_of, seconds)("sun")]
    thread = threading.Thread(target=lambda: told.append(in_time(size_of, seconds)("sun")), daemon=True)
    thread.start()
    thread.join(60)
    told.append(asyncio.run(in_time(later, seconds)("sun")))
    assert told == ["sun is big"] * 3


HANGING = """
import threading, time
from praison_agent_rl.agent_rollouts.tool_answers import in_time

def hangs():
    while True:
        time.sleep(600)

def ask():
    try:
        in_time(hangs, 0.1)()
    except TimeoutError:
        print("failed in time", flush=True)

ask()
thread = threading.Thread(target=ask)
thread.start()
thread.join()
"""


def test_a_process_ends_though_tools_hung(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["failed in time"] * 2), done.stderr
    assert json.loads(told_absent("x", [])) == {
        "error": "Tool 'x' not found. Available tools: []",
        "available_tools": [],
    }


def test_a_tool_that_ends_the_program_is_a_failed_call_and_its_loop_goes_on():
    def leaves(thing: str) -> str:
        raise SystemExit(3)

    async def leaves_later(thing: str) -> str:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"^Tool ended the program \(SystemExit: 3\)$"):
        in_time(leaves, 5)("sun")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)  # as TRL runs tools that it awaits
    thread.start()
    asked = asyncio.run_coroutine_threadsafe(in_time(leaves_later, 5)("sun"), loop)
    with pytest.raises(RuntimeError, match=r"^Tool ended the program \(SystemExit: 3\)$"):
        asked.result(30)
    assert thread.is_alive()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()
