"""What a model is told of its calls in ``rollout: tools``: what the framework would tell it, and in time."""

import asyncio
import difflib
import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

from praison_agent_rl.agent_rollouts.replays import text_told
from praison_agent_rl.deadlines import TimedOut, within
from praison_agent_rl.environments import methods_that_act

Tool = Callable[..., Any]


def told_result(name: str, result: Any) -> str:
    """The text of what the tool ``name`` returned, as the framework's OpenAI client gives it to a model."""
    from praisonaiagents.tools.trust import wrap_if_external

    return text_told(wrap_if_external(name, result))


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
    """The tools of a rollout that TRL asks by name, where a name of none is answered as the framework answers it.

    ``others`` are names that TRL looks for elsewhere: of tools that it awaits.
    """

    def __init__(self, tools: Mapping[str, Tool], others: Collection[str] = ()) -> None:
        super().__init__(tools)
        self._others = others
        self.absent = 0
        """Calls of tools that are not there."""

    def __contains__(self, name: object) -> bool:
        return name not in self._others

    def __missing__(self, name: str) -> Tool:
        found = meant(name, self.keys())
        if found is not None:
            return self[found]
        self.absent += 1
        return lambda **_: told_absent(name, [*self, *self._others])


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
    """The class of an environment whose methods that act fail where they take longer than ``seconds``."""
    methods = {name: in_time(method, seconds) for name, method in methods_that_act(environment).items()}
    said = {name: getattr(environment, name) for name in ("__doc__", "__module__", "__qualname__")}
    return types.new_class(environment.__name__, (environment,), exec_body=lambda body: body.update(said | methods))
