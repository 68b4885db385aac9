"""What a model is told of its calls in ``rollout: tools``: what the framework would tell it, and in time."""

import asyncio
import contextlib
import difflib
import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

from praison_agent_rl.agent_rollouts.replays import text_told
from praison_agent_rl.deadlines import TimedOut, within
from praison_agent_rl.environments import methods_that_act
from praison_agent_rl.episodes import Acting, as_told, settled

Tool = Callable[..., Any]


def told_result(name: str, result: Any) -> str:
    """The text of what the tool ``name`` returned, as the framework's OpenAI client gives it to a model.

    A function that is none of asyncio's may return an awaitable all the same (a lambda, a decorated one).
    """
    from praisonaiagents.tools.trust import wrap_if_external

    return text_told(wrap_if_external(name, settled(result)))


def told_absent(name: str, known: Iterable[str]) -> str:
    """The text for a call of a tool that is not there (praisonaiagents/agent/tool_execution.py)."""
    there = sorted(set(known))
    near = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    error = f"Tool '{name}' not found.{hint} Available tools: {there}"
    return text_told({"error": error, "available_tools": there})


def meant(name: str, known: Collection[str]) -> str | None:
    """The tool that the framework runs for a call of ``name``: that one, or the only one written almost so.

    >>> meant("Size-Of", ["size_of", "colour_of"])
    'size_of'
    """
    if name in known:
        return name
    alike = [one for one in known if _letters(one) == _letters(name)]
    return alike[0] if len(alike) == 1 else None


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


class NamedTools(dict[str, Tool]):
    """The tools of a rollout that TRL asks by name, found as `meant` finds them; a name of none is answered here.

    ``others`` are names that TRL looks for elsewhere: of tools that it awaits.
    """

    def __init__(self, tools: Mapping[str, Tool], others: Collection[str] = ()) -> None:
        super().__init__(tools)
        self._others = others
        self.absent = 0
        """Calls of tools that are not there."""

    def __contains__(self, name: object) -> bool:
        return meant(str(name), [*self, *self._others]) not in self._others

    def __missing__(self, name: str) -> Tool:
        found = meant(name, [*self, *self._others])
        if found in self.keys():  # `in self` is for TRL
            return self[str(found)]
        self.absent += 1
        return lambda **_: told_absent(name, [*self, *self._others])


class AwaitedTools(dict[str, Tool]):
    """The tools of a rollout that TRL awaits, found by its name as `meant` finds them."""

    def __contains__(self, name: object) -> bool:
        return meant(str(name), self.keys()) is not None

    def __missing__(self, name: str) -> Tool:
        found = meant(name, self.keys())
        if found is None:
            raise KeyError(name)
        return self[found]


_CANCELLED = "Tool was cancelled"


def telling(tool: Tool) -> Tool:
    """``tool``, which returns the text that a model is told, and of which each failure is one that TRL goes on from.

    TRL takes a list for parts of a message, makes text of other results where nothing is caught, and would end the
    run with what is no ``Exception`` or cannot say what it is.
    """
    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def told_later(*given: Any, **named: Any) -> str:
            try:
                return as_told(await tool(*given, **named))
            except Exception as error:
                raise RuntimeError(_said_by(error)) from error

        return told_later

    @functools.wraps(tool)
    def told(*given: Any, **named: Any) -> str:
        try:
            return as_told(settled(tool(*given, **named)))
        except asyncio.CancelledError as error:
            raise RuntimeError(_CANCELLED) from error
        except Exception as error:
            raise RuntimeError(_said_by(error)) from error

    return told


def _said_by(error: Exception) -> str:
    with contextlib.suppress(Exception):  # a user's own exception may fail even here
        return str(error)
    return type(error).__name__


def in_time(tool: Tool, seconds: float) -> Tool:
    """``tool``, whose calls fail where they take longer than ``seconds``, or end the program (``sys.exit``).

    A coroutine that keeps its event loop to itself is not ended, nor is code that does not let go of the interpreter.
    """
    late = f"Tool timed out after {seconds:g}s"
    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def awaited(*given: Any, **named: Any) -> Any:
            task = asyncio.ensure_future(_not_ending(tool(*given, **named)))
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if not done:
                task.cancel()  # and not waited for: it may not heed it
                raise TimeoutError(late)
            if task.cancelled():
                raise RuntimeError(_CANCELLED)
            return task.result()

        return awaited

    @functools.wraps(tool)
    def called(*given: Any, **named: Any) -> Any:
        try:
            return within(seconds, functools.partial(tool, *given, **named))
        except TimedOut:
            raise TimeoutError(late) from None
        except SystemExit as end:
            raise _ended_by(end) from end

    return called


async def _not_ending(call: Awaitable[Any]) -> Any:
    """What a call comes to; asyncio lets SystemExit end the thread of its loop, for which others wait."""
    try:
        return await call
    except SystemExit as end:
        raise _ended_by(end) from end


def _ended_by(end: SystemExit) -> RuntimeError:
    return RuntimeError(f"Tool ended the program (SystemExit: {end.code})")


def acting_in_time(environment: type, seconds: float) -> type:
    """The class of an environment in which nothing takes longer than ``seconds``.

    A method that acts fails then; what becomes of an episode that does not begin is said by `Acting`.
    """
    methods = {name: _limited(environment, name, tool, seconds) for name, tool in methods_that_act(environment).items()}
    said = {name: getattr(environment, name) for name in ("__doc__", "__module__", "__qualname__")}
    own = {"_rl_limit": seconds, "_rl_name": environment.__qualname__}
    body = {**said, **own, **methods}
    return types.new_class(environment.__name__, (Acting, environment), exec_body=lambda space: space.update(body))


def _limited(environment: type, name: str, method: Tool, seconds: float) -> Any:
    static = isinstance(inspect.getattr_static(environment, name), staticmethod)
    return staticmethod(in_time(method, seconds)) if static else in_time(method, seconds)
