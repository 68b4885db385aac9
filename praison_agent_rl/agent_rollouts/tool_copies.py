"""Tools of a rollout's copies: each is timed, or a stand-in runs in its place; the model sees no difference.

The framework describes a tool by its name, docstring, signature and, of tool objects, their schema; all of these stay
those of the original.
"""

import concurrent.futures.thread
import contextlib
import copy
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from praison_agent_rl.capture.recordings import describe

TOOL_LOG = "_rl_tools"
"""Attribute of a copy: the `ToolLog` of its rollout."""


class ToolLog:
    """How long the tools of one rollout took, and which of them raised."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0.0
        self._running: dict[object, float] = {}
        self._errors: list[str] = []

    @property
    def seconds(self) -> float:
        """Time in tools, with those that are still running."""
        now = time.monotonic()
        with self._lock:
            return self._done + sum(now - began for began in self._running.values())

    @property
    def errors(self) -> list[str]:
        """Tools that raised, each with its name, in the order in which they did."""
        with self._lock:
            return list(self._errors)

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """A block in which the tool ``name`` runs."""
        run = object()
        _let_the_process_end()
        with self._lock:
            self._running[run] = time.monotonic()
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._errors.append(f"{name}: {describe(error)}")
            raise
        finally:
            with self._lock:
                self._done += time.monotonic() - self._running.pop(run)


def _let_the_process_end() -> None:
    """Have the interpreter not wait for this thread at its end: a tool that hangs in a worker would keep it forever."""
    thread = threading.current_thread()
    if thread.daemon:  # as all that a rollout starts; the framework runs tools in workers of asyncio
        vars(concurrent.futures.thread).get("_threads_queues", {}).pop(thread, None)


def names_of(tool: Any) -> set[str]:
    """The names by which the framework finds a tool."""
    names = (getattr(tool, "__name__", None), getattr(tool, "name", None))
    return {name for name in names if isinstance(name, str) and name}


def replaceable(tool: Any) -> bool:
    """Whether another callable can run in the place of ``tool``."""
    if hasattr(tool, "to_openai_tool") or not names_of(tool):
        return False  # a client of an MCP server
    if inspect.isclass(tool):
        return _method_of(tool) is not None
    return inspect.isroutine(tool) or (callable(getattr(tool, "run", None)) and hasattr(tool, "__dict__"))


def watched(tool: Any, log: ToolLog, stand_ins: Mapping[str, Callable[..., Any]]) -> Any:
    """``tool`` as ``log`` sees it run, or the stand-in of its name in its place; itself if it cannot be replaced."""
    if _describes_itself(tool):
        return _object_like(tool, log)
    if not replaceable(tool):
        return tool
    name = min(names_of(tool), key=lambda known: (known not in stand_ins, known))
    stand_in = stand_ins.get(name)
    if _describes_itself(stand_in):
        return _object_like(stand_in, log)
    if inspect.isclass(tool):
        return _class_like(tool, stand_in, log)
    if inspect.isroutine(tool):
        return _like(tool, stand_in or tool, name, log)
    twin = copy.copy(tool)
    vars(twin)["run"] = _like(tool.run, stand_in or tool.run, name, log)
    if stand_in is not None and "_func" in vars(twin):
        vars(twin)["_func"] = _like(vars(tool)["_func"], stand_in, name, log)
    return twin


def _like(original: Any, call: Callable[..., Any], name: str, log: ToolLog) -> Any:
    """``call`` with the name, docstring and signature of ``original``, and what else is kept of a function."""
    if inspect.iscoroutinefunction(call):

        @functools.wraps(original)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with log.running(name):
                return await call(*args, **kwargs)

        return awaited

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        with log.running(name):
            return call(*args, **kwargs)

    return called


def _describes_itself(tool: Any) -> bool:
    """Whether it is a callable object that was made to stand in a list of tools, with the schema that it shows."""
    return callable(tool) and not inspect.isclass(tool) and "get_schema" in getattr(tool, "__dict__", {})


def _object_like(tool: Any, log: ToolLog) -> Any:
    """A copy of a callable object, as ``log`` sees it run."""
    twin = copy.copy(tool)
    known: Any = type(tool)

    @functools.wraps(known.__call__)
    def called(_: Any, *args: Any, **kwargs: Any) -> Any:
        with log.running(str(tool.name)):
            return tool(*args, **kwargs)

    twin.__class__ = type(known)(known.__name__, (known,), {"__call__": called, **_said(known)})
    return twin


def _class_like(tool: Any, stand_in: Callable[..., Any] | None, log: ToolLog) -> Any:
    """A class that the framework makes an object of for each call, with another method in the place of its own."""
    method = str(_method_of(tool))
    original = getattr(tool, method)
    if stand_in is None:
        return type(tool)(
            tool.__name__, (tool,), {method: _like(original, original, tool.__name__, log), **_said(tool)}
        )
    chosen = stand_in

    def without_object(_: Any, *args: Any, **kwargs: Any) -> Any:
        return chosen(*args, **kwargs)

    body = {method: _like(original, without_object, tool.__name__, log), "__init__": lambda self: None}
    return type(tool)(tool.__name__, (tool,), {**body, **_said(tool)})


def _said(tool: Any) -> dict[str, Any]:
    return {"__doc__": tool.__doc__, "__module__": tool.__module__, "__qualname__": tool.__qualname__}


def _method_of(tool: Any) -> str | None:
    """The method that the framework calls of an object of a tool class."""
    return next((name for name in ("_run", "run") if callable(getattr(tool, name, None))), None)
