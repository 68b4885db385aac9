"""Finds the function that a ``module:function`` text names, and learns what a function calls itself and takes."""

import difflib
import functools
import importlib
import inspect
import itertools
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any

from praison_agent_rl.errors import RewardError

Function = Callable[..., Any]

logger = logging.getLogger(__name__)

RUNTIME = ("trainer_state", "log_extra", "log_metric", "environments")
"""Live objects that TRL passes; they are never copied."""
OWN = ("prompts", "completions", "completion_ids", *RUNTIME)
"""What TRL itself passes, trl/trainer/grpo_trainer.py."""
RUN_VIEWS = ("run", "final_answer", "tool_calls")
"""What whoever scores brings of the whole run, for a parameter of that name; see `run_views`."""
_EXAMPLE = "Example: myproject.rewards:length_penalty"


@contextmanager
def importing_from(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Let modules in ``folder`` (the current one by default) be found during the block."""
    # A script finds the modules beside it; an installed command has its own bin folder first on the path instead, so
    # the same config would work one way and not the other. Taken off again: nothing else may start to find them.
    here = os.path.abspath(folder or os.getcwd())
    absent = here not in [os.path.abspath(entry) for entry in sys.path]
    if absent:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may be younger than the folder listing that Python remembers
    try:
        yield
    finally:
        if absent and here in sys.path:  # the imported module may have cleaned the path itself
            sys.path.remove(here)


def short(value: object) -> str:
    """``value`` as an error line shows it, at most 80 letters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a user's own class may fail even here
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The known names that are nearly ``name``, to stand behind it in an error; empty if none is."""
    near = difflib.get_close_matches(name, known, n=2)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def cause_of(error: BaseException) -> str:
    """The error's type and what it says."""
    with suppress(Exception):  # a user's own exception may fail even here
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return type(error).__name__


def plain_value(value: Any) -> Any:
    """A numpy or torch value as Python's own, without importing either."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def collect(do: Callable[[Any], Any], given: object) -> tuple[list[Any], list[str]]:
    """What ``do`` makes of each item (or the only one), and the errors of those it refuses, to report at once."""
    made, failures = [], []
    for item in given if isinstance(given, list | tuple) else [] if given is None else [given]:
        try:
            made.append(do(item))
        except RewardError as error:
            failures.append(str(error))
    return made, failures


def _split(spec: object) -> tuple[str, str]:
    """The module and the attribute path of ``spec``; blanks around either are forgiven."""
    text = spec if isinstance(spec, str) else ""
    module, _, path = (part.strip() for part in text.rpartition(":"))
    several = [part.strip() for part in text.split(",") if part.strip()]
    hint = ""
    if len(several) > 1:
        hint = f". It names {len(several)}; write them as a list: {several}"
    elif file := re.fullmatch(r"(?:\.[/\\])?(.*)\.py", module or path):
        parts = re.split(r"[/\\]+", file[1])
        dotted = ".".join(parts) if all(part.isidentifier() for part in parts) else parts[-1]
        hint = f". It names a file; write the module instead: {dotted}:{path if module else 'function'}"
    # import_module takes more than identifiers ("my-rewards"), an attribute path does not
    elif re.fullmatch(r"[\w-]+(\.[\w-]+)*", module) and all(part.isidentifier() for part in path.split(".")):
        return module, path
    raise RewardError(f"reward function {short(spec)} is not a 'module:function' path. {_EXAMPLE}{hint}")


def _import(module: str, spec: str) -> object:
    failed = f"{module!r} for reward function {spec!r} could not be imported:"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            text = f"cannot import {module!r} for reward function {spec!r}: {error}. Is it on PYTHONPATH?"
            raise RewardError(text) from error
        why = f"it needs {error.name!r}, which is not installed ({error})" if error.name else cause_of(error)
        raise RewardError(f"{failed} {why}") from error
    except SyntaxError as error:
        raise RewardError(f"{failed} SyntaxError: {error.msg} ({error.filename}, line {error.lineno})") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and its sys.exit may not end us
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(f"{failed} {cause_of(error)} ({where.filename}, line {where.lineno})") from error


def _attribute(owner: object, name: str, at: str) -> object:
    try:
        target = getattr(owner, name)
    except AttributeError:
        names = [key for key in (vars(owner) if isinstance(owner, ModuleType) else dir(owner)) if key[0] != "_"]
        kinds = {key: inspect.getattr_static(owner, key, None) for key in names}  # static: runs no property
        there = sorted(key for key, kind in kinds.items() if callable(kind) or isinstance(kind, classmethod))
        listed = f"Callables there: {', '.join(there[:8]) or 'none'}"
        raise RewardError(f"{at!r} has no {name!r}{did_you_mean(name, there)}. {listed}") from None
    except Exception as error:  # a property or a lazy module may raise anything
        raise RewardError(f"{name!r} of {at!r} cannot be read: {cause_of(error)}") from error
    plain = inspect.isclass(owner) and isinstance(inspect.getattr_static(owner, name), FunctionType)
    if plain and [p.name for p in parameters_of(target) or []][:1] == ["self"]:
        what = f"{name!r} of the class {at!r} is a method that needs an instance ('self')"
        raise RewardError(f"{what}. Point at the method of an instance, or make it a @staticmethod")
    return target


def _usable(fn: object, label: str) -> Function:
    if inspect.isclass(fn):
        raise RewardError(f"{label} is a class, not a function. Point at an instance of it or at one of its methods")
    if not callable(fn):
        raise RewardError(f"{label} is a {type(fn).__name__}, not a function")
    return fn


def find(spec: object, *, base: str | os.PathLike[str] | None = None, made: bool = False) -> Function:
    """The callable that ``'module:function'`` names, sought in folder ``base`` too, or ``spec`` itself if it is one.

    A class is refused unless it is to be ``made`` into an instance.
    """
    if callable(spec):
        return spec if made and inspect.isclass(spec) else _usable(spec, short(spec))
    module, path = _split(spec)
    spec = f"{module}:{path}"
    with importing_from(base):
        target, at = _import(module, spec), module
        for name in path.split("."):
            target, at = _attribute(target, name, at), f"{at}{'.' if ':' in at else ':'}{name}"
    return target if made and inspect.isclass(target) else _usable(target, repr(spec))


def parameters_of(fn: Any) -> list[inspect.Parameter] | None:
    """None where the signature cannot be read (builtins, C callables): such a function is not guessed at."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def takes(fn: Function, name: str) -> bool:
    """Whether ``fn`` can be called with an argument of this name."""
    taken = parameters_of(fn)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return taken is None or any(p.kind is p.VAR_KEYWORD or (p.name == name and p.kind in named) for p in taken)


def unlike_trl(fn: Function, spec: str = "") -> str | None:
    """What is odd about ``fn`` if it does not take ``completions``; refusing could block code that works."""
    if takes(fn, "completions"):
        return None
    name = getattr(fn, "__name__", "") or spec or name_of(fn)
    return f"{name} does not take 'completions'; TRL calls reward functions as (prompts, completions, **kwargs)"


def check_signature(fn: Function, spec: str = "") -> str | None:
    """Log, and return, a warning if ``fn`` does not take ``completions``."""
    text = unlike_trl(fn, spec)
    if text is None:
        return None
    logger.warning(text)
    return f"WARNING: {text}"


def needed_columns(fn: Function) -> list[str]:
    """The parameters of ``fn`` that only columns of the dataset can fill."""
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = (p.name for p in parameters_of(fn) or [] if p.default is p.empty and p.kind not in starred)
    return [name for name in needed if name not in OWN and name not in RUN_VIEWS]


def takes_column(fn: Function, name: str) -> bool:
    """Whether a column of the dataset called ``name`` is handed to ``fn``.

    Not if its spec gave that parameter a value, nor if ``fn.takes`` says which columns it wants and this is none.
    """
    wanted = declared(fn, "takes")
    if wanted is not None:
        return name in wanted or (name in OWN and name in [p.name for p in parameters_of(fn) or []])
    return takes(fn, name) and not (isinstance(fn, functools.partial) and name in fn.keywords)


def asked_views(fn: Function) -> list[str]:
    """Those of `RUN_VIEWS` that ``fn`` asks for by name; what takes any column asks for none."""
    wanted = declared(fn, "takes")
    if wanted is None:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        fixed = fn.keywords if isinstance(fn, functools.partial) else {}
        wanted = [p.name for p in parameters_of(fn) or [] if p.kind in named and p.name not in fixed]
    return [name for name in RUN_VIEWS if name in wanted]


def taken_view(fn: Function, renamed: Mapping[str, str], columns: Collection[str]) -> str | None:
    """What is wrong where ``fn`` asks for a view of the run and the data has a column of that name; None if nothing.

    In a dataset that was built of recorded runs, ``run`` beside ``agent`` is the id of the recorded one: the run
    of the answer that is scored counts there.
    """
    told = {*renamed, *renamed.values(), *(["run"] if "agent" in columns else [])}
    taken = next((name for name in asked_views(fn) if name in columns and name not in told), None)
    if taken is None:
        return None
    return (
        f"takes {taken!r}, which is given to it of each run, but the data has a column of that name too. Rename the "
        f"column, or feed it to a parameter of another name (columns: {{recorded_{taken}: {taken}}})"
    )


def declared(fn: Function, name: str) -> Any:
    """What ``fn``, or the function inside a partial, says of itself by the attribute ``name``; None if nothing."""
    found = getattr(fn, name, None)
    return declared(fn.func, name) if found is None and isinstance(fn, functools.partial) else found


def name_of(fn: Function) -> str:
    """The name to log ``fn`` under: its own, that of the function inside a partial, or its class's."""
    own = getattr(fn, "__name__", None)
    if isinstance(own, str):
        return own
    return name_of(fn.func) if isinstance(fn, functools.partial) else type(fn).__name__


def unique_names(fns: Sequence[Function], given: Sequence[str | None] = ()) -> list[str]:
    """One name per function, its ``given`` one if it has any: TRL would log two of one name under one metric."""
    names: list[str] = []
    for fn, own in itertools.zip_longest(fns, given):
        stem, count = own or name_of(fn).replace("<lambda>", "lambda"), 1
        name = "lambda_1" if stem == "lambda" else stem
        while name in names:
            count += 1
            name = f"{stem}_{count}"
        names.append(name)
    return names


def spec_of(fn: Function) -> str | None:
    """The ``module:name`` under which another process finds this very object again, or None."""
    module, name = getattr(fn, "__module__", None) or "__main__", getattr(fn, "__qualname__", "<instance>")
    with importing_from(None):
        # a module made or loaded by hand sits in sys.modules, where only this process finds it
        finders = [getattr(finder, "find_spec", lambda *_: None) for finder in sys.meta_path]
        importable = any(find(module.partition(".")[0], None) for find in finders)
    if module == "__main__" or not importable:
        return None
    found, _ = collect(find, f"{module}:{name}")
    return f"{module}:{name}" if any(f is fn or (inspect.ismethod(f) and f == fn) for f in found) else None
